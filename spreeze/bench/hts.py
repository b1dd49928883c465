"""HTS-RL against its synchronous baselines: where step times are as given, and on tasks that are learned.

Every figure is a whole ``python -m spreeze.train`` in processes of its own, modes in turn, seed by seed. Environments
of given step times are ``spreeze/Synthetic-v0``; runs on tasks are scored by the protocol of the paper.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spreeze.bench import Row, ratios, row
from spreeze.bench.runs import OUTSIDE_S, Document, RunsBench, Say, measured, sleeping, target_rows, train
from spreeze.errors import ConfigError, SpreezeError
from spreeze.metrics.comparison import Rules, Spread, report_of

PARTS = ("steps", "target", "paired", "correction")
LAWS = ("constant", "exponential", "gamma 0.5", "gamma 1", "gamma 3")
CORRECTIONS = ("delayed", "none", "truncated-is")
MEAN_S = 0.002
ROLLOUT_SAMPLERS = 8
INTERVAL = 64
MODES: dict[str, list[str]] = {
    "hts": ["--mode", "hts"], "step": ["--mode", "serial", "--synchrony", "step"],
    "batch": ["--mode", "serial", "--synchrony", "batch"],
}
"""HTS-RL, and the baselines that wait for each other at every step, and once an interval."""
_START_S = 6.0
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class HtsBench:
    """How the runs of this bench are started and told of."""

    runs_dir: str
    seconds: float
    """What a rate is measured over [s], about: from the end of a run's warm-up to its end."""
    repeats: int
    say: Say
    laws: tuple[str, ...] = LAWS
    inference_workers: int = 0
    """Inference workers of HTS-RL; the baselines have none."""
    run: Callable[[list[str], float], Document] = train

    def synthetic(self, mode: str, law: str, seed: int, *more: str, samplers: int = ROLLOUT_SAMPLERS,
                  interval: int = INTERVAL) -> Document:
        """The document of a run with one sleeping environment in each sampler.

        Raises:
            SpreezeError: it failed, or was too short for a rate.
        """
        name, cv = _law(law)
        algo = [] if "--algo" in more else ["--algo", "a2c"]
        inference_workers = ["--inference-workers", str(self.inference_workers)] if mode == "hts" else []
        arguments = [
            *sleeping(MEAN_S, name, cv), *algo, *MODES[mode], *inference_workers, "--samplers", str(samplers),
            "--envs-per-sampler", "1", "--sync-interval", str(interval), "--seed", str(seed), "--runs-dir",
            self.runs_dir, "--no-visualizer", "--set", "evaluation.episodes=1", "--set",
            "learner.publish_interval_s=60", *more,
        ]  # fmt: skip
        length_s = self.seconds + _START_S
        for _ in range(_TRIES):
            document = self.run([*arguments, "--seconds", str(length_s)], length_s + OUTSIDE_S)
            if document["env_steps_per_s"] and document["rates_measured_s"] >= self.seconds / 2:
                return document
            length_s *= 2.0  # the start of so many processes took most of it
        raise SpreezeError(f"{document['run_dir']}: {length_s / 2:g} s were too short for a rate; take more --seconds")


def steps_rows(bench: HtsBench) -> list[Row]:
    """Env steps a second of HTS-RL over both baselines, with a learner that takes next to no time."""
    rows = []
    for law in bench.laws:
        rates: dict[str, list[float]] = {mode: [] for mode in MODES}
        lags: list[float] = []
        for seed in range(1, bench.repeats + 1):
            for mode, found in rates.items():
                document = bench.synthetic(mode, law, seed)
                found.append(float(document["env_steps_per_s"]))
                if mode == "hts":
                    lags.append(document["policy_lag_mean"])
            told = ", ".join(f"{mode} {found[-1]:.0f}/s" for mode, found in rates.items())
            bench.say(f"  {law}, seed {seed}: {told}")
        over = {mode: ratios(rates["hts"], rates[mode]) for mode in ("step", "batch")}
        rows += [row("env_steps_per_s", "1/s", found, law=law, mode=mode) for mode, found in rates.items()]
        rows += [row(f"hts_over_{mode}", "ratio", found, law=law) for mode, found in over.items()]
        rows.append(row("policy_lag", "intervals", lags, law=law, target="exactly 1"))
    return rows


def _law(text: str) -> tuple[str, float]:
    """Law and coefficient of variation of "gamma 0.5"."""
    name, _, cv = text.partition(" ")
    return name, float(cv or 1.0)


# --- tasks that are learned ---


@dataclass(frozen=True, kw_only=True)
class TasksBench(RunsBench):
    """Tasks that are learned."""

    env_ids: tuple[str, ...]
    algo: str
    samplers: int = 2
    envs: int = 16
    """Environments in all, the same for every mode."""
    extra: tuple[str, ...] = ()

    def modes(self) -> dict[str, list[str]]:
        """HTS-RL with its samplers, and the synchronous mode with as many environments in one process."""
        return {
            "hts": ["--mode", "hts", "--samplers", str(self.samplers),
                    "--envs-per-sampler", str(self.envs // self.samplers)],
            "serial": ["--mode", "serial", "--samplers", "1", "--envs-per-sampler", str(self.envs)],
        }

    def on_task(self, env_id: str, cases: dict[str, list[str]]) -> dict[str, list[Document]]:
        """The documents of each case, seed by seed."""
        self.say(f"  {env_id}:")
        return self.in_turn(cases, ["--env", env_id, "--algo", self.algo, *self.extra], self.seconds)


def task_target_rows(bench: TasksBench) -> list[Row]:
    """Wall time from process start to the target return, HTS-RL and serial in turn."""
    rows = []
    for env_id in bench.env_ids:
        target = ["--target-return", str(bench.target_return)]
        found = bench.on_task(env_id, {name: [*flags, *target] for name, flags in bench.modes().items()})
        rows += target_rows(found, env_id, {"hts": "<= 60 s, all seeds"} if env_id == "CartPole-v1" else {}, "<= 0.7")
    return rows


def paired_rows(bench: TasksBench) -> list[Row]:
    """HTS-RL and serial in the same time: the paper's metrics seed by seed, and env steps a second."""
    rows = []
    for env_id in bench.env_ids:
        found = bench.on_task(env_id, bench.modes())
        rates = {mode: [d["env_steps_per_s"] for d in documents] for mode, documents in found.items()}
        rows += [row("env_steps_per_s", "1/s", values, env=env_id, mode=mode) for mode, values in rates.items()]
        rows.append(row("rate_over_serial", "ratio", ratios(rates["hts"], rates["serial"]), env=env_id))
        rows += scores(found, env_id)
    return rows


def correction_rows(bench: TasksBench) -> list[Row]:
    """What is done about data one interval old: the final metric of each correction."""
    rows = []
    for env_id in bench.env_ids:
        flags = bench.modes()["hts"]
        found = bench.on_task(env_id, {name: [*flags, "--correction", name] for name in CORRECTIONS})
        rows += scores(found, env_id)
    return rows


def scores(found: dict[str, list[Document]], env_id: str) -> list[Row]:
    """Metrics of each group, and of each two groups seed by seed; means and intervals as the protocol has them."""
    paths = [Path(document["run_dir"]) for documents in found.values() for document in documents]
    report = report_of(paths, None, Rules())
    rows = []
    for group in report.groups:
        runs = [run for run in report.runs if run.group == group.group]
        more = {"env": env_id, "group": group.group.label}
        rows.append(_spread_row("final_metric", group.final, [run.final for run in runs], **more))
        rows.append(_spread_row("final_time_metric", group.final_time, [run.final_time for run in runs], **more))
    return rows + [_spread_row("final_metric_difference", pair.final, [], env=env_id,
                               group=f"{pair.group.label} less {pair.against.label}") for pair in report.pairs]


def _spread_row(metric: str, spread: Spread | None, repeats: list[float | None], **more: Any) -> Row:
    mean, low, high = (None, None, None) if spread is None else (spread.centre, spread.low, spread.high)
    return {"metric": metric, "unit": "return", "value": mean, "low": low, "high": high, "repeats": repeats, **more}


# --- the command ---


def add_hts_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS[:1]),
        help="steps: step times as given; target, paired, correction: tasks (default: steps)")
    add("--seconds", type=float, default=10.0,
        help="what a rate is measured over where step times are given [s] (default: 10)")
    add("--laws", nargs="+", choices=LAWS, default=list(LAWS), help="step times of part steps (default: all)")
    add("--inference-workers", type=int, default=0,
        help="inference workers of HTS-RL where step times are given; 0: samplers infer for themselves (default: 0)")
    add("--env", nargs="+", default=["CartPole-v1"], help="tasks (default: CartPole-v1)")
    add("--algo", choices=("ppo", "a2c"), default="ppo", help="algorithm on tasks (default: ppo)")
    add("--task-seconds", type=float, default=120.0, help="training of one run on a task [s] (default: 120)")
    add("--target-return", type=float, default=475.0, help="mean of 10 greedy episodes of part target (default: 475)")
    add("--samplers", type=int, default=2, help="samplers of HTS-RL on tasks (default: 2)")
    add("--envs", type=int, default=16, help="environments in all on tasks, in either mode (default: 16)")
    add("--set", action="append", default=[], metavar="PART.FIELD=VALUE",
        help="setting of the runs on tasks, as often as needed (default: none)")
    add("--runs-dir", default="runs", help="where runs go (default: runs)")


def hts_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    """Measures the parts that were asked for.

    Raises:
        ConfigError: environments that do not divide among the samplers.
        SpreezeError: a run failed.
    """
    if args.envs % args.samplers:
        raise ConfigError(f"--envs {args.envs}: not divisible by --samplers {args.samplers}")
    given = HtsBench(runs_dir=args.runs_dir, seconds=args.seconds, repeats=args.repeats, say=say,
                     laws=tuple(args.laws), inference_workers=args.inference_workers)
    tasks = TasksBench(
        env_ids=tuple(args.env), algo=args.algo, seeds=args.repeats, seconds=args.task_seconds,
        target_return=args.target_return, runs_dir=args.runs_dir, say=say, samplers=args.samplers, envs=args.envs,
        extra=tuple(text for setting in args.set for text in ("--set", setting)),
    )
    parts: dict[str, Callable[[], list[Row]]] = {
        "steps": lambda: steps_rows(given), "target": lambda: task_target_rows(tasks),
        "paired": lambda: paired_rows(tasks), "correction": lambda: correction_rows(tasks),
    }
    return measured(args.parts, lambda part: parts[part](), say)
