"""HTS-RL against its synchronous baselines: where step times are as given, and on tasks that are learned.

Every figure is a whole ``python -m spreeze.train`` in processes of its own, modes in turn, seed by seed. Given step
times (``spreeze/Synthetic-v0``) stand beside what ``spreeze.metrics.hts_theory`` simulates for the same distribution,
environments and interval; runs on tasks are scored by the protocol of the paper.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.bench import Row, row
from spreeze.bench.runs import Document, Say, in_turn, target_rows, train
from spreeze.envs.synthetic import ENV_ID
from spreeze.errors import ConfigError, SpreezeError
from spreeze.metrics.hts_metrics import Rules, Spread, report_of
from spreeze.metrics.hts_theory import (
    Draw,
    expected_run_time,
    gamma_shape_rate,
    simulated_run_time,
    simulated_speedup,
    step_times,
)

PARTS = ("steps", "learner", "sweep", "target", "paired", "correction")
LAWS = ("constant", "exponential", "gamma 0.5", "gamma 1", "gamma 3")
CORRECTIONS = ("delayed", "none", "truncated-is")
MEAN_S = 0.002
EXECUTORS = 8
INTERVAL = 64
SWEEP_INTERVALS = (4, 16, 64, 256, 512)
SWEEP_EXECUTORS = (1, 2, 4, 8, 16)
MODES: dict[str, list[str]] = {
    "hts": ["--mode", "hts"], "step": ["--mode", "serial", "--synchrony", "step"],
    "batch": ["--mode", "serial", "--synchrony", "batch"],
}
"""HTS-RL, and the baselines that wait for each other at every step, and once an interval."""
_CALIBRATIONS = 2
_FIRST_EPOCHS = 10
_STATES = 400_000
_START_S, _OUTSIDE_S = 6.0, 120.0
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
    actors: int = 0
    """Actor processes of HTS-RL; the baselines have none."""
    run: Callable[[list[str], float], Document] = train

    def synthetic(self, mode: str, law: str, seed: int, *more: str, executors: int = EXECUTORS,
                  interval: int = INTERVAL) -> Document:
        """The document of a run with one sleeping environment in each executor.

        Raises:
            SpreezeError: it failed, or was too short for a rate.
        """
        name, cv = _law(law)
        algo = [] if "--algo" in more else ["--algo", "a2c"]
        actors = ["--actors", str(self.actors)] if mode == "hts" else []
        arguments = [
            "--env", ENV_ID, f"--env-arg=law={name}", f"--env-arg=mean_s={MEAN_S}", f"--env-arg=cv={cv}", *algo,
            *MODES[mode], *actors, "--executors", str(executors), "--envs-per-executor", "1",
            "--sync-interval", str(interval), "--seed", str(seed), "--runs-dir", self.runs_dir, "--no-visualizer",
            "--set", "evaluation.episodes=1", "--set", "learner.publish_interval_s=60", *more,
        ]  # fmt: skip
        length_s = self.seconds + _START_S
        for _ in range(_TRIES):
            document = self.run([*arguments, "--seconds", str(length_s)], length_s + _OUTSIDE_S)
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
            bench.say(f"  {law}, seed {seed}: {_last(rates)}")
        simulated = simulated_speedup(np.random.default_rng(1), _draw(law), EXECUTORS, INTERVAL,
                                      states=_states(EXECUTORS, INTERVAL))
        over = {mode: _ratios(rates["hts"], rates[mode]) for mode in ("step", "batch")}
        rows += [row("env_steps_per_s", "1/s", found, law=law, mode=mode) for mode, found in rates.items()]
        rows.append(row("hts_over_step", "ratio", over["step"], law=law, simulated=simulated))
        rows.append(row("hts_over_batch", "ratio", over["batch"], law=law))
        rows.append(row("policy_lag", "intervals", lags, law=law, target="exactly 1"))
        shares = [ratio / simulated for ratio in over["step"]]
        rows.append(row("share_of_simulated_speedup", "share", shares, law=law,
                        target=">= 0.9" if law.startswith("gamma") else None))
    return rows


def learner_rows(bench: HtsBench) -> list[Row]:
    """HTS-RL over the alternating baseline where learning takes as long as rollout."""
    rows = []
    for law in (law for law in bench.laws if law.startswith("gamma")):
        epochs = _balanced_epochs(bench, law)
        rates: dict[str, list[float]] = {"hts": [], "batch": []}
        balance: list[float] = []
        rollout: list[float] = []
        for seed in range(1, bench.repeats + 1):
            for mode, found in rates.items():
                document = bench.synthetic(mode, law, seed, *_ppo(epochs))
                found.append(float(document["env_steps_per_s"]))
                if mode == "batch":
                    learn_s, rollout_s = _phases(document)
                    balance.append(learn_s / rollout_s)
                    rollout.append(rollout_s)
            bench.say(f"  {law}, {epochs} epochs, seed {seed}: learning / rollout {balance[-1]:.2f}, "
                      f"{_last(rates)}")
        rows += [row("env_steps_per_s", "1/s", found, law=law, mode=mode, learner="as long as rollout")
                 for mode, found in rates.items()]
        rows.append(row("learning_over_rollout", "ratio", balance, law=law, epochs=epochs))
        simulated = _overlap(law, statistics.median(balance), statistics.median(rollout))
        rows.append(row("hts_over_alternating", "ratio", _ratios(rates["hts"], rates["batch"]), law=law,
                        simulated=simulated, target=">= 1.8"))
    return rows


def _ppo(epochs: int) -> list[str]:
    return ["--algo", "ppo", "--set", f"ppo.epochs={epochs}"]


def _balanced_epochs(bench: HtsBench, law: str) -> int:
    """Epochs of PPO at which learning an interval takes about as long as collecting it, in the alternating mode."""
    epochs = _FIRST_EPOCHS
    for _ in range(_CALIBRATIONS):
        learn_s, rollout_s = _phases(bench.synthetic("batch", law, 1, *_ppo(epochs)))
        epochs = max(1, round(epochs * rollout_s / learn_s))
    return epochs


def _phases(document: Document) -> tuple[float, float]:
    """Seconds of learning and of rollout in one interval of an alternating run.

    Raises:
        SpreezeError: the run knows no share of learning.
    """
    share = document["time_split"].get("learner_learn_share")
    if not share or share >= 1.0:
        raise SpreezeError(f"{document['run_dir']}: share of time spent learning is {share}; take more --seconds")
    round_s = EXECUTORS * INTERVAL / float(document["env_steps_per_s"])
    return share * round_s, (1.0 - share) * round_s


def _overlap(law: str, balance: float, rollout_s: float) -> float:
    """Simulated gain of learning during rollout; what a step costs beyond the law is spread over its steps."""
    draw, rng, states = _draw(law), np.random.default_rng(1), _states(EXECUTORS, INTERVAL)
    bare_s = simulated_run_time(rng, draw, states, EXECUTORS, INTERVAL) * EXECUTORS * INTERVAL / states
    actor_s = max(0.0, rollout_s - bare_s) / INTERVAL
    alternating, at_once = (
        simulated_run_time(rng, draw, states, EXECUTORS, INTERVAL, actor_s, balance * rollout_s, concurrent=concurrent)
        for concurrent in (False, True)
    )
    return alternating / at_once


def sweep_rows(bench: HtsBench, intervals: Sequence[int] = SWEEP_INTERVALS,
               executors: Sequence[int] = SWEEP_EXECUTORS) -> list[Row]:
    """Run time of HTS-RL over intervals and executors, exponential step times, against Claim 1 as simulated.

    The overhead is measured apart, with constant step times: c of a step and s of a swap from the shortest and
    the longest interval. Claim 1 is then simulated with that c and s.
    """
    rows: list[Row] = []
    deviations: list[float] = []
    for n in executors:
        step_s, swap_s = _overhead(bench, n, min(intervals), max(intervals))
        rows.append({"metric": "overhead_of_a_step", "unit": "s", "value": step_s, "executors": n})
        rows.append({"metric": "overhead_of_a_swap", "unit": "s", "value": swap_s, "executors": n})
        for interval in intervals:
            found = [1.0 / float(bench.synthetic("hts", "exponential", seed, executors=n, interval=interval)
                                 ["env_steps_per_s"]) for seed in range(1, bench.repeats + 1)]
            one = _sweep_row(found, n, interval, step_s, swap_s)
            rows.append(one)
            deviations.append(one["deviation"])
            bench.say(f"  {n} executors, alpha {interval}: {1e6 * one['value']:.0f} us a state, simulated "
                      f"{1e6 * one['simulated_s']:.0f} ({100 * one['deviation']:+.1f} %)")
    rows.append({"metric": "largest_deviation_from_claim_1", "unit": "share", "value": max(map(abs, deviations)),
                 "repeats": deviations, "target": "<= 0.10"})
    return rows


def _sweep_row(found: list[float], n: int, interval: int, step_s: float, swap_s: float) -> Row:
    """Seconds for one state, beside simulation with and without the overhead, and the formula."""
    shape, rate = gamma_shape_rate(MEAN_S, 1.0)
    draw = _draw("exponential")
    states = _states(n, interval)
    bare = simulated_run_time(np.random.default_rng(1), draw, states, n, interval) / states
    simulated = bare + step_s / n + swap_s / (n * interval)
    value = statistics.median(found)
    return row("time_for_a_state", "s", found, law="exponential", executors=n, interval=interval,
               simulated_s=simulated, simulated_without_overhead_s=bare, deviation=value / simulated - 1.0,
               formula_s=expected_run_time(states, n, interval, shape, rate, step_s) / states)


def _overhead(bench: HtsBench, n: int, short: int, long: int) -> tuple[float, float]:
    """Seconds of a step and of a swap beyond the environment's own time, from constant step times."""
    beyond = {}
    for interval in (short, long):
        rates = [float(bench.synthetic("hts", "constant", seed, executors=n, interval=interval)["env_steps_per_s"])
                 for seed in range(1, bench.repeats + 1)]
        beyond[interval] = interval * (n / statistics.median(rates) - MEAN_S)
    step_s = max(0.0, (beyond[long] - beyond[short]) / (long - short)) if long > short else beyond[long] / long
    return step_s, max(0.0, beyond[short] - short * step_s)


def _states(n: int, interval: int) -> int:
    """Whole rounds of about ``_STATES`` states."""
    return -(-_STATES // (n * interval)) * n * interval


def _draw(law: str) -> Draw:
    name, cv = _law(law)
    return step_times(name, MEAN_S, cv)


def _law(text: str) -> tuple[str, float]:
    """Law and coefficient of variation of "gamma 0.5"."""
    name, _, cv = text.partition(" ")
    return name, float(cv or 1.0)


def _last(rates: dict[str, list[float]]) -> str:
    return ", ".join(f"{mode} {found[-1]:.0f}/s" for mode, found in rates.items())


def _ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(one, other, strict=True)]


# --- tasks that are learned ---


@dataclass(frozen=True, kw_only=True)
class TasksBench:
    """What is trained, for how long, and how it is told."""

    env_ids: tuple[str, ...]
    algo: str
    seeds: int
    seconds: float
    """Training of one run [s]; of ``task_target_rows`` the most."""
    target_return: float
    runs_dir: str
    say: Say
    executors: int = 2
    envs: int = 16
    """Environments in all, the same for every mode."""
    extra: tuple[str, ...] = ()
    run: Callable[[list[str], float], Document] = train

    def modes(self) -> dict[str, list[str]]:
        """HTS-RL with its executors, and the synchronous mode with as many environments in one process."""
        return {
            "hts": ["--mode", "hts", "--executors", str(self.executors),
                    "--envs-per-executor", str(self.envs // self.executors)],
            "serial": ["--mode", "serial", "--executors", "1", "--envs-per-executor", str(self.envs)],
        }

    def in_turn(self, env_id: str, cases: dict[str, list[str]]) -> dict[str, list[Document]]:
        """The documents of each case, seed by seed."""
        common = ["--env", env_id, "--algo", self.algo, "--seconds", str(self.seconds), "--runs-dir", self.runs_dir,
                  "--no-visualizer", *self.extra]
        self.say(f"  {env_id}:")
        limit_s = self.seconds + _OUTSIDE_S
        return in_turn(cases, self.seeds, lambda flags: self.run([*common, *flags], limit_s), self.say)


def task_target_rows(bench: TasksBench) -> list[Row]:
    """Wall time from process start to the target return, HTS-RL and serial in turn."""
    rows = []
    for env_id in bench.env_ids:
        target = ["--target-return", str(bench.target_return)]
        found = bench.in_turn(env_id, {name: [*flags, *target] for name, flags in bench.modes().items()})
        rows += target_rows(found, env_id, {"hts": "<= 60 s, all seeds"} if env_id == "CartPole-v1" else {}, "<= 0.7")
    return rows


def paired_rows(bench: TasksBench) -> list[Row]:
    """HTS-RL and serial in the same time: the paper's metrics seed by seed, and env steps a second."""
    rows = []
    for env_id in bench.env_ids:
        found = bench.in_turn(env_id, bench.modes())
        rates = {mode: [d["env_steps_per_s"] for d in documents] for mode, documents in found.items()}
        rows += [row("env_steps_per_s", "1/s", values, env=env_id, mode=mode) for mode, values in rates.items()]
        ratios = [a / b if a and b else None for a, b in zip(rates["hts"], rates["serial"], strict=True)]
        rows.append(row("rate_over_serial", "ratio", ratios, env=env_id))
        rows += _scores(found, env_id)
    return rows


def correction_rows(bench: TasksBench) -> list[Row]:
    """What is done about data one interval old: the final metric of each correction."""
    rows = []
    for env_id in bench.env_ids:
        flags = bench.modes()["hts"]
        found = bench.in_turn(env_id, {name: [*flags, "--correction", name] for name in CORRECTIONS})
        rows += _scores(found, env_id)
    return rows


def _scores(found: dict[str, list[Document]], env_id: str) -> list[Row]:
    """Metrics of each group, and of each two groups seed by seed; means and intervals as the protocol has them."""
    paths = [Path(document["run_dir"]) for documents in found.values() for document in documents]
    report = report_of(paths, (), Rules())
    rows = []
    for group in report.groups:
        runs = [run for run in report.runs if run.group == group.group]
        more = {"env": env_id, "group": group.group.label}
        rows.append(_spread_row("final_metric", group.final, [run.final for run in runs], **more))
        rows.append(_spread_row("final_time_metric", group.final_time, [run.final_time for run in runs], **more))
    return rows + [_spread_row("final_metric_difference", pair.final, [], env=env_id,
                               group=f"{pair.group.label} less {pair.against.label}") for pair in report.pairs]


def _spread_row(metric: str, spread: Spread | None, repeats: list[float | None], **more: Any) -> Row:
    mean, low, high = (None, None, None) if spread is None else (spread.mean, spread.low, spread.high)
    return {"metric": metric, "unit": "return", "value": mean, "low": low, "high": high, "repeats": repeats, **more}


# --- the command ---


def hts_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    """Measures the parts that were asked for.

    Raises:
        ConfigError: environments that do not divide among the executors.
        SpreezeError: a run failed.
    """
    if args.envs % args.executors:
        raise ConfigError(f"--envs {args.envs}: not divisible by --executors {args.executors}")
    given = HtsBench(runs_dir=args.runs_dir, seconds=args.seconds, repeats=args.repeats, say=say,
                     laws=tuple(args.laws), actors=args.actors)
    tasks = TasksBench(
        env_ids=tuple(args.env), algo=args.algo, seeds=args.repeats, seconds=args.task_seconds,
        target_return=args.target_return, runs_dir=args.runs_dir, say=say, executors=args.executors, envs=args.envs,
        extra=tuple(text for setting in args.set for text in ("--set", setting)),
    )
    parts: dict[str, Callable[[], list[Row]]] = {
        "steps": lambda: steps_rows(given), "learner": lambda: learner_rows(given), "sweep": lambda: sweep_rows(given),
        "target": lambda: task_target_rows(tasks), "paired": lambda: paired_rows(tasks),
        "correction": lambda: correction_rows(tasks),
    }
    rows = []
    for part in args.parts:
        say(f"{part}:")
        rows += [{**one, "part": part} for one in parts[part]()]
    return rows
