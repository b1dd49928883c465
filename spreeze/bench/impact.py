"""IMPACT against PPO, APPO and IMPALA: samplers that sleep, time to a return, equal time, and the paper's ablations.

Every figure is a whole ``python -m spreeze.train`` in processes of its own, cases in turn, seed by seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from spreeze.bench import Row, row
from spreeze.bench.hts import scores
from spreeze.bench.runs import Document, Say, in_turn, times_to_target, train
from spreeze.testing import SYNTHETIC_ID

PARTS = ("steps", "target", "paired", "ablation")
SAMPLERS = (1, 2, 4, 8)
MEAN_S = 0.002
CASES: dict[str, list[str]] = {
    "impact": ["--algo", "impact"], "hts ppo": ["--algo", "ppo", "--mode", "hts"],
    "serial ppo": ["--algo", "ppo", "--mode", "serial"], "appo": ["--algo", "appo"], "impala": ["--algo", "impala"],
}
SLOW_WEIGHTS = ["--set", "impact.broadcast_updates=1000000000", "--set", "learner.publish_interval_s=1"]
"""New weights once a second: the lag that the ablations are about."""
ABLATIONS: dict[str, list[str]] = {
    **{f"ratio {name}": ["--set", f"impact.ratio={name}"] for name in ("R3", "R1", "R2")},
    **{f"K {uses}": ["--set", f"impact.uses={uses}"] for uses in (1, 2, 4, 16, 32)},
    **{f"t_target {updates}": ["--set", f"impact.target_interval={updates}"] for updates in (1, 4, 32, 128, 512)},
}
_START_S, _OUTSIDE_S = 6.0, 120.0


@dataclass(frozen=True, kw_only=True)
class ImpactBench:
    """What is trained, for how long, and how it is told."""

    env_ids: tuple[str, ...]
    seeds: int
    seconds: float
    """Training of one run [s]; of part target the most."""
    step_seconds: float
    """What a rate of sleeping samplers is measured over [s]."""
    target_return: float
    runs_dir: str
    say: Say
    samplers: tuple[int, ...] = SAMPLERS
    ablations: tuple[str, ...] = tuple(ABLATIONS)
    run: Callable[[list[str], float], Document] = train

    def in_turn(self, cases: dict[str, list[str]], common: list[str], seconds: float) -> dict[str, list[Document]]:
        """The documents of each case, seed by seed."""
        flags = [*common, "--seconds", str(seconds), "--runs-dir", self.runs_dir, "--no-visualizer"]
        return in_turn(cases, self.seeds, lambda own: self.run([*flags, *own], seconds + _OUTSIDE_S), self.say)


def steps_rows(bench: ImpactBench) -> list[Row]:
    """Env steps a second by the number of samplers that sleep (gamma, coefficient of variation 1)."""
    common = ["--env", SYNTHETIC_ID, "--env-arg=law=gamma", f"--env-arg=mean_s={MEAN_S}", "--env-arg=cv=1", "--algo",
              "impact", "--envs-per-sampler", "1", "--sync-interval", "64", "--set", "impact.least_uses=0", "--set",
              "evaluation.episodes=1"]
    found = bench.in_turn({str(count): ["--samplers", str(count)] for count in bench.samplers}, common,
                          bench.step_seconds + _START_S)
    rates = {count: [document["env_steps_per_s"] for document in documents] for count, documents in found.items()}
    waits = {count: [document["time_split"].get("learner_wait_share") for document in documents]
             for count, documents in found.items()}
    alone = rates[str(bench.samplers[0])]
    rows = []
    for count, values in rates.items():
        linear = [None if not one or not many else many / one * bench.samplers[0] / int(count)
                  for one, many in zip(alone, values, strict=True)]
        rows += [row("env_steps_per_s", "1/s", values, samplers=int(count)),
                 row("share_of_linear", "share", linear, samplers=int(count), target=">= 0.9"),
                 row("learner_wait_share", "share", waits[count], samplers=int(count), target="> 0")]
    return rows


def target_rows(bench: ImpactBench) -> list[Row]:
    """Wall time from process start to the target return, and what it took."""
    rows = []
    for env_id in bench.env_ids:
        found = bench.in_turn(CASES, ["--env", env_id, "--target-return", str(bench.target_return)], bench.seconds)
        times = {case: times_to_target(documents) for case, documents in found.items()}
        for case, (of_case, reached) in times.items():
            rows.append(row("time_to_target_s", "s", of_case, case=case, env=env_id, reached=reached))
            rows.append(row("env_steps", "env steps", [one["env_steps"] for one in found[case]], case=case, env=env_id))
        goals = {"hts ppo": "<= 1", "impala": "<= 0.7"}
        rows += [row("time_over", "ratio", [a / b for a, b in zip(times["impact"][0], others, strict=True)],
                     case=case, env=env_id, target=goals.get(case))
                 for case, (others, _) in times.items() if case != "impact"]
    return rows


def paired_rows(bench: ImpactBench) -> list[Row]:
    """All of them in the same time: the metrics of the protocol, seed by seed, and env steps a second."""
    rows = []
    for env_id in bench.env_ids:
        found = bench.in_turn(CASES, ["--env", env_id], bench.seconds)
        rows += [row("env_steps_per_s", "1/s", [one["env_steps_per_s"] for one in documents], case=case, env=env_id)
                 for case, documents in found.items()]
        rows += scores(found, env_id)
    return rows


def ablation_rows(bench: ImpactBench) -> list[Row]:
    """R1, R2 and R3, numbers of uses, and target intervals, with lag that slow weights force."""
    rows = []
    for env_id in bench.env_ids:
        cases = {name: ABLATIONS[name] for name in bench.ablations}
        found = bench.in_turn(cases, ["--env", env_id, "--algo", "impact", *SLOW_WEIGHTS], bench.seconds)
        for case, documents in found.items():
            for name, unit in (("eval_return_best", "return"), ("eval_return_mean", "return"),
                               ("policy_lag_mean", "updates"), ("env_steps", "env steps")):
                rows.append(row(name, unit, [one[name] for one in documents], case=case, env=env_id))
    return rows


def add_impact_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS[:2]),
        help="steps: samplers that sleep; target: time to a return; paired: equal time; ablation: ratios, uses and "
        "target intervals (default: steps target)")
    add("--long", action="store_true", help="runs of 900 s, rates over 60 s (default: off)")
    add("--env", nargs="+", default=["CartPole-v1"], help="tasks (default: CartPole-v1)")
    add("--seconds", type=float, default=None, help="training of one run [s] (default: 60, with --long 900)")
    add("--target-return", type=float, default=475.0, help="mean of 10 greedy episodes of part target (default: 475)")
    add("--samplers", type=int, nargs="+", default=list(SAMPLERS), help="samplers of part steps (default: 1 2 4 8)")
    add("--ablations", nargs="+", choices=tuple(ABLATIONS), default=list(ABLATIONS),
        help="cases of part ablation (default: all)")
    add("--runs-dir", default="runs", help="where runs go (default: runs)")


def impact_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    """Measures the parts that were asked for; a SpreezeError if a run failed."""
    bench = ImpactBench(
        env_ids=tuple(args.env), seeds=args.repeats, seconds=args.seconds or (900.0 if args.long else 60.0),
        step_seconds=60.0 if args.long else 10.0, target_return=args.target_return, runs_dir=args.runs_dir, say=say,
        samplers=tuple(args.samplers), ablations=tuple(args.ablations),
    )
    parts = {"steps": steps_rows, "target": target_rows, "paired": paired_rows, "ablation": ablation_rows}
    rows = []
    for part in args.parts:
        say(f"{part}:")
        rows += [{**one, "part": part} for one in parts[part](bench)]
    return rows
