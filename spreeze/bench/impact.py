"""IMPACT against PPO, APPO and IMPALA: samplers that sleep, time to a return, equal time, and the paper's ablations.

Every figure but those of part ablation is a whole ``python -m spreeze.train`` in processes of its own, cases in turn,
seed by seed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spreeze.algorithms import create_on_policy
from spreeze.algorithms.impact import AnyAge
from spreeze.bench import Row, ratios, row, row_of_reached
from spreeze.bench.hts import scores
from spreeze.bench.runs import (
    Document,
    RunsBench,
    Say,
    linear_rows,
    picture,
    ratio_row,
    rows_of_parts,
    sleeping,
    task_settings,
    time_row,
)
from spreeze.cli.arguments import build_parser, user_values
from spreeze.config.algorithm_settings import AnyAgeConfig
from spreeze.config.layers import Layer, Settings
from spreeze.envs.task import Task, open_task
from spreeze.errors import ConfigError, UsageError
from spreeze.inference.policy import Policy
from spreeze.machine.output import stdout_to_stderr
from spreeze.metrics.comparison import POLICIES, reached, running_mean
from spreeze.metrics.store import EvaluationRow, MetricsReader
from spreeze.runtime.plan import RunPlan
from spreeze.transport.rollouts import Rollouts
from spreeze.transport.weights import VersionedParameters
from spreeze.types import EnvSpec
from spreeze.workers.buffer_trainer import BufferTrainer
from spreeze.workers.collectors import NewestPolicy, RolloutCollector
from spreeze.workers.evaluator import envs_at_once, run_episodes, score, seed_list
from spreeze.workers.torch_devices import learner_threads

PARTS = ("steps", "target", "paired", "ablation")
SAMPLERS = (1, 2, 4, 8)
MEAN_S = 0.002
CASES: dict[str, list[str]] = {
    "impact": ["--algo", "impact"], "hts ppo": ["--algo", "ppo", "--mode", "hts"],
    "serial ppo": ["--algo", "ppo", "--mode", "serial"], "appo": ["--algo", "appo"], "impala": ["--algo", "impala"],
}
BROADCAST = 256
SLOW_WEIGHTS = [
    "--set", f"impact.broadcast_updates={BROADCAST}", "--set", "impact.slots=4", "--set", "impact.uses=20",
    "--set", "impact.minibatches=1", "--set", "impact.target_interval=0", "--set", "impact.vtrace=true",
    "--set", "impact.rho=2.0", "--set", "impact.lr=1e-3", "--sync-interval", "16",
]
"""New weights for the samplers after so many updates: the lag that the ablations are about, whatever the profile."""
ABLATIONS: dict[str, dict[str, list[str]]] = {
    "ratio": {"R1": ["--set", "impact.ratio=R1"], "R2": ["--set", "impact.ratio=R2"], "R3": []},
    "K": {str(uses): [] if uses == 20 else ["--set", f"impact.uses={uses}"] for uses in (1, 2, 5, 10, 20, 40)},
    "N": {str(slots): [] if slots == 4 else ["--set", f"impact.slots={slots}"] for slots in (2, 4, 8, 16)},
    "t_target": {str(updates): ["--set", f"impact.target_interval={updates}"]
                 for updates in (2, 5, 20, 80, 320, 1280)},
}
"""One thing at a time is changed: without a flag it is R3, K = 20, N = 4, with rollouts of 16.

t_target is N K there, and so follows both, as by default.
"""
ABLATION_STEPS = 30_000
_EVALUATIONS = 30
"""Of a counted run."""
_START_S = 6.0


@dataclass(frozen=True, kw_only=True)
class ImpactBench(RunsBench):
    """Learners from rollouts of any age, and those beside them."""

    env_ids: tuple[str, ...]
    step_seconds: float
    """What a rate of sleeping samplers is measured over [s]."""
    samplers: tuple[int, ...] = SAMPLERS
    ablations: tuple[str, ...] = tuple(ABLATIONS)
    cases: tuple[str, ...] = tuple(CASES)
    """Those of parts target and paired."""
    env_steps: int | None = None
    """End of one run; of part ablation ``ABLATION_STEPS`` where it is None."""
    curves: Path | None = None
    """File of the curves of part ablation that are known already."""

    def on_task(self, env_id: str, *common: str) -> dict[str, list[Document]]:
        """The documents of each case, seed by seed."""
        end = [] if self.env_steps is None else ["--env-steps", str(self.env_steps)]
        return self.in_turn({case: CASES[case] for case in self.cases}, ["--env", env_id, *end, *common], self.seconds)

    def curve(self, flags: list[str]) -> CountedCurve:
        """A counted run with these flags; one that is in the file of curves is not run again."""
        env_steps = self.env_steps or ABLATION_STEPS
        key = {"flags": flags, "env_steps": env_steps}
        for line in self.curves.read_text().splitlines() if self.curves and self.curves.exists() else ():
            if (known := json.loads(line))["key"] == key:
                return CountedCurve(**known["curve"])
        curve = counted_curve(flags, env_steps, env_steps // _EVALUATIONS)
        if self.curves is not None:
            with self.curves.open("a") as file:
                file.write(json.dumps({"key": key, "curve": curve._asdict()}) + "\n")
        return curve


def steps_rows(bench: ImpactBench) -> list[Row]:
    """Env steps a second by the number of samplers that sleep (gamma, coefficient of variation 1)."""
    common = [*sleeping(MEAN_S), "--algo", "impact", "--envs-per-sampler", "1", "--sync-interval", "64", "--set",
              "impact.least_uses=0", "--set", "impact.uses=2", "--set", "evaluation.episodes=1"]
    found = bench.in_turn({str(count): ["--samplers", str(count)] for count in bench.samplers}, common,
                          bench.step_seconds + _START_S)
    waits = {count: [document["time_split"].get("learner_wait_share") for document in documents]
             for count, documents in found.items()}
    return linear_rows(found, "samplers") + [
        row("learner_wait_share", "share", values, samplers=int(count), target="> 0")
        for count, values in waits.items()]


def target_rows(bench: ImpactBench) -> list[Row]:
    """Wall time from process start to the target return, and what it took."""
    rows = []
    for env_id in bench.env_ids:
        found = bench.on_task(env_id, "--target-return", str(bench.target_return))
        for case, documents in found.items():
            rows.append(time_row(documents, case=case, env=env_id))
            rows.append(row("env_steps", "env steps", [one["env_steps"] for one in documents], case=case, env=env_id))
        goals = {"hts ppo": "<= 1", "impala": "<= 0.7"}
        rows += [ratio_row("time_over", found["impact"], others, case=case, env=env_id, target=goals.get(case))
                 for case, others in found.items() if case != "impact" and "impact" in found]
    return rows


def paired_rows(bench: ImpactBench) -> list[Row]:
    """All of them for the same time or env steps: metrics of the protocol, rates, and IMPALA's score.

    IMPACT is compared with each of the others seed by seed.
    """
    rows = []
    for env_id in bench.env_ids:
        found = bench.on_task(env_id)
        for name in ("env_steps_per_s", "updates_per_s"):
            rows += [row(name, "1/s", [one[name] for one in documents], case=case, env=env_id)
                     for case, documents in found.items()]
        rows += scores(found, env_id)
        if {"impact", "impala"} <= found.keys():
            rows += _impala_rows(found["impact"], found["impala"], env_id)
    return rows


def _impala_rows(impact: list[Document], impala: list[Document], env_id: str) -> list[Row]:
    """What IMPACT takes until it holds IMPALA's best score, over what IMPALA took: wall time, env steps."""
    held: list[list[EvaluationRow | None]] = [[], []]
    for documents in zip(impact, impala, strict=True):
        curves = [MetricsReader(Path(one["run_dir"]) / "metrics.db").evaluations() for one in documents]
        if len(curves[1]) >= POLICIES:  # else IMPALA has no score
            best = max(running_mean(curves[1], POLICIES)[POLICIES - 1 :])
            for found, curve in zip(held, curves, strict=True):
                found.append(reached(curve, best))
    return [row_of_reached(name, "ratio", ratios(*([one and getattr(one, axis) for one in found] for found in held)),
                           env=env_id, target=target)
            for name, axis, target in (("wall_s_to_impala_score", "t", "<= 0.7"),
                                       ("env_steps_to_impala_score", "env_steps", None))]


def ablation_rows(bench: ImpactBench) -> list[Row]:
    """R1, R2 and R3, numbers of uses and slots, and target intervals, by counts, with lag that slow weights force."""
    rows = []
    for env_id in bench.env_ids:
        for name in bench.ablations:
            for case, own in ABLATIONS[name].items():
                flags = ["--env", env_id, "--algo", "impact", *SLOW_WEIGHTS, *own]
                curves = [bench.curve([*flags, "--seed", str(seed)]) for seed in range(1, bench.seeds + 1)]
                more = {"ablation": name, "case": case, "env": env_id}
                final = [sum(curve.returns[-POLICIES:]) / POLICIES for curve in curves]
                rows += [
                    {**row("final_metric", "return", final, **more), "curves": [curve._asdict() for curve in curves]},
                    row("eval_return_best", "return", [max(curve.returns) for curve in curves], **more),
                    row_of_reached("env_steps_to_target", "env steps",
                                   [_first(curve, bench.target_return) for curve in curves], **more),
                    row("policy_lag", "updates", [curve.lag for curve in curves], **more)]
                bench.say(f"  {env_id}, {name} {case}: last ten {', '.join(f'{value:.1f}' for value in final)}")
    return rows


def _first(curve: CountedCurve, target: float) -> int | None:
    """Env steps after which the return was first reached."""
    return next((steps for steps, value in zip(curve.env_steps, curve.returns, strict=True) if value >= target), None)


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    panels: dict[str, list[Row]] = {}
    for one in rows:
        if "curves" in one:
            panels.setdefault(f"{one['env']}: {one['ablation']}", []).append(one)
    if not panels:
        raise UsageError("--out: the picture is of part ablation; add it to --parts, or its document to --rows")
    return panels


def draw_ablations(rows: list[Row], out: Path) -> None:
    """Median greedy return over env steps, with least and greatest of the seeds: a panel for each ablation of a task.

    Raises:
        UsageError: there are none, or matplotlib is not installed.
    """
    panels = _panels(rows)
    title = f"IMPACT by counts, weights every {BROADCAST} updates: median, least and greatest of the seeds"
    width = min(3, len(panels))
    with picture(out, title, -(-len(panels) // width), width) as grid:
        for axis in grid.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, (name, cases) in zip(grid.flat, panels.items(), strict=False):
            axis.set(title=name, xlabel="env steps [1000]", ylabel="greedy return")
            for one in cases:
                x = [steps / 1e3 for steps in one["curves"][0]["env_steps"]]
                seeds = list(zip(*(curve["returns"] for curve in one["curves"]), strict=True))
                line = axis.plot(x, [statistics.median(each) for each in seeds], linewidth=1.6, label=one["case"])
                axis.fill_between(x, [min(each) for each in seeds], [max(each) for each in seeds], alpha=0.1,
                                  linewidth=0, color=line[0].get_color())
            axis.legend(fontsize=7)


# --- mode impact by counts ---
#
# Its samplers, buffer and learner take turns in one process. Who is fast or slow does not matter then: a seed gives the
# same curve on every machine of one kind, and lag is a setting (``broadcast_updates``). The learner goes on while there
# is a rollout whose turn it is; else the next sampler fills one. So the samplers are what everybody waits for, and each
# rollout is used K times.

COUNTED_SAMPLERS = 2
"""The same on every machine."""


class CountedCurve(NamedTuple):
    """Greedy returns of one seed, and the mean lag of its updates."""

    env_steps: list[int]
    updates: list[int]
    returns: list[float]
    lag: float


def counted_curve(flags: list[str], env_steps: int, every: int) -> CountedCurve:
    """Learns with the flags of ``spreeze.train`` and evaluates greedy episodes each ``every`` env steps."""
    with stdout_to_stderr(), contextlib.ExitStack() as stack:
        settings, spec = _settings(flags)
        plan = RunPlan(settings=settings, spec=spec, samplers=COUNTED_SAMPLERS, free_core=True)
        config, each = settings.config, settings.config.rollout.envs_per_sampler
        if not isinstance(config.on_policy, AnyAgeConfig):
            raise ConfigError(f"--algo {config.run.algo}: it does not learn from rollouts of any age")
        stack.enter_context(learner_threads(spec, 1, "cpu"))
        rollouts = stack.enter_context(contextlib.closing(Rollouts.create(plan.rollout_spec())))
        algorithm = create_on_policy(config.run.algo, spec, config.on_policy, config.run.seed, "cpu",
                                     correction="none", normalize_obs=config.env.normalize_obs)
        assert isinstance(algorithm, AnyAge)
        trainer = BufferTrainer(algorithm, rollouts, each, meta={}, env_steps_base=0, session=0.0,
                                progress=lambda done: min(1.0, done / env_steps))
        samplers = [stack.enter_context(contextlib.closing(RolloutCollector(
            lambda: open_task(spec), spec, rollouts, first=index * each, num_envs=each, seed=config.run.seed,
            replays=False,
        ))) for index in range(COUNTED_SAMPLERS)]
        return _turns(trainer, samplers, _Greedy(settings, spec, stack), config.on_policy.broadcast_updates,
                      range(every, env_steps + 1, every))


def _turns(
    trainer: BufferTrainer, samplers: list[RolloutCollector], greedy: _Greedy, broadcast_updates: int, due: range
) -> CountedCurve:
    curve, lags, turn, version = CountedCurve([], [], [], 0.0), list[float](), 0, 0
    with contextlib.closing(VersionedParameters.create()) as weights:
        policies = [NewestPolicy(weights) for _ in samplers]
        _publish(trainer.algorithm, weights)
        while len(curve.returns) < len(due):
            if trainer.learn():
                if trainer.updates - version >= broadcast_updates:
                    version = trainer.updates
                    _publish(trainer.algorithm, weights)
                continue
            # The next sampler; one that waits for uses of its oldest rollout is left out.
            turn = next(number % len(samplers) for number in range(turn + 1, turn + 1 + len(samplers))
                        if samplers[number % len(samplers)].open())
            policies[turn].refresh()
            while samplers[turn].advance(policies[turn]) and not samplers[turn].columns.filled:
                pass
            if trainer.env_steps >= due[len(curve.returns)]:
                curve.env_steps.append(trainer.env_steps)
                curve.updates.append(trainer.updates)
                curve.returns.append(greedy.mean(trainer.algorithm))
                lags.append(trainer.metrics(wait_s=0.0, publish_s=0.0)["policy_lag"])
    return curve._replace(lag=sum(lags) / max(1, len(lags)))


def _publish(algorithm: AnyAge, weights: VersionedParameters) -> None:
    weights.publish(algorithm.policy_arrays(), algorithm.policy_meta(), 1, algorithm.updates)


class _Greedy:
    """The evaluator's episodes."""

    def __init__(self, settings: Settings, spec: EnvSpec, stack: contextlib.ExitStack) -> None:
        evaluation = settings.config.evaluation
        self._spec, self._seeds = spec, seed_list(evaluation.seed, evaluation.episodes)
        self._tasks: list[Task] = []
        stack.callback(self._close)

    def _close(self) -> None:
        for task in self._tasks:
            task.close()

    def mean(self, algorithm: AnyAge) -> float:
        policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
        return score(run_episodes(lambda: open_task(self._spec, whole_games=True), policy.act_greedy, self._seeds,
                                  max_envs=envs_at_once(self._spec), tasks=self._tasks)).return_mean


def _settings(flags: list[str]) -> tuple[Settings, EnvSpec]:
    """The settings that ``spreeze.train`` would have with these flags, and the task."""
    return task_settings([Layer("user", user_values(build_parser().parse_args(flags)))])


# --- the command ---


def add_impact_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parts", nargs="*", choices=PARTS, default=list(PARTS[:2]),
        help="steps: samplers that sleep; target: time to a return; paired: equal time or env steps; ablation: ratios, "
        "uses, slots and target intervals by counts (default: steps target)")
    add("--long", action="store_true", help="runs of 900 s, rates over 60 s (default: off)")
    add("--env", nargs="+", default=["CartPole-v1"], help="tasks (default: CartPole-v1)")
    add("--seconds", type=float, default=None, help="training of one run [s] (default: 60, with --long 900)")
    add("--env-steps", type=int, default=None,
        help=f"a run of part target or paired ends there, too (default: never); of part ablation (default: "
        f"{ABLATION_STEPS})")
    add("--target-return", type=float, default=475.0, help="mean of 10 greedy episodes of part target (default: 475)")
    add("--samplers", type=int, nargs="+", default=list(SAMPLERS), help="samplers of part steps (default: 1 2 4 8)")
    add("--cases", nargs="+", choices=tuple(CASES), default=list(CASES),
        help="cases of parts target and paired (default: all)")
    add("--ablations", nargs="+", choices=tuple(ABLATIONS), default=list(ABLATIONS),
        help="what part ablation varies (default: all)")
    add("--curves", type=Path, default=None,
        help="file of part ablation's curves: those in it are not run again, new ones are added (default: none)")
    add("--out", type=Path, default=None, help="picture of part ablation to write (default: none)")
    add("--rows", nargs="+", default=[], metavar="FILE",
        help="earlier documents of this bench with --json to draw as well (default: none)")
    add("--runs-dir", default="runs", help="where runs go (default: runs)")


def impact_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    """Measures the parts that were asked for; a SpreezeError if a run failed."""
    bench = ImpactBench(
        env_ids=tuple(args.env), seeds=args.repeats, seconds=args.seconds or (900.0 if args.long else 60.0),
        step_seconds=60.0 if args.long else 10.0, target_return=args.target_return, runs_dir=args.runs_dir, say=say,
        samplers=tuple(args.samplers), cases=tuple(args.cases), ablations=tuple(args.ablations),
        env_steps=args.env_steps, curves=args.curves,
    )
    parts = {"steps": steps_rows, "target": target_rows, "paired": paired_rows, "ablation": ablation_rows}
    return rows_of_parts(args, bench, parts, draw_ablations, say, check=None if "ablation" in args.parts else _panels)
