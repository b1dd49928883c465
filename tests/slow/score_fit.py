"""The tuner's score: updates that a return takes at each batch size and number of updates per env step, and the fit.

Training runs with the ratio held exactly, in one process: so the count of updates does not depend on how busy the
machine is. Each run is one JSON line; runs already in the file are not repeated.

Model: ``updates = N0(task) (1 + B0 / B) (1 + u / R)``, B the batch size, u the updates per env step. A run that was
given up counts as "at least that many": it only errs if the model says fewer.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from figures import Row

from spreeze.config.schema import LearnerConfig
from spreeze.envs.action_spaces import uniform_actions
from spreeze.envs.task import Task, open_task
from spreeze.inference.policy import Policy
from spreeze.runtime.plan import RunPlan
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, ShardWriter
from spreeze.workers.collectors.transition_collector import TransitionCollector
from spreeze.workers.episodes.lockstep import run_episodes, score
from spreeze.workers.replay_trainer import ReplayTrainer

Record = dict[str, Any]
COUNTED: tuple[tuple[int, float], ...] = (
    (32, 0.25), (64, 0.25), (128, 0.25), (256, 0.25), (1024, 0.25), (128, 0.03), (128, 1.0), (128, 4.0),
)  # fmt: skip
"""(batch size, updates per env step): a row over the batch and a column over the ratio."""
_EPISODES = 10
_FIRST_EVALUATION, _EVALUATION_GROWTH = 100, 1.08
_FIRST_SEED = 10_000
_BATCHES = [2.0 ** (k / 4) for k in range(0, 41)]
_RATIOS = [2.0 ** (k / 4) for k in range(-16, 25)]


# --- counted runs ---


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The return that ends a run, and the updates after which it is given up."""

    target_return: float
    max_updates: int


def run_all(
    plan: RunPlan, goal: Goal, settings: Iterable[tuple[int, float]], seeds: int, out: Path, say: Callable[[str], None]
) -> list[Record]:
    """All settings, seed by seed, so that a stopped bench has each setting equally often."""
    done = read_records(out)
    known = {(r["env_id"], r["batch_size"], r["updates_per_env_step"], r["seed"]) for r in done}
    for seed in range(1, seeds + 1):
        for batch_size, ratio in settings:
            if (plan.spec.env_id, batch_size, ratio, seed) in known:
                continue
            record = train_until(plan, goal, batch_size, ratio, seed)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            done.append(record)
            reached = f"{record['updates']} updates" if record["reached"] else f"not in {record['updates']} updates"
            say(
                f"  {plan.spec.env_id} batch {batch_size}, {ratio:g} updates per env step, seed {seed}: {reached}, "
                f"{record['env_steps']} env steps, {record['learner_s']:.1f} s of updates"
            )
    return [record for record in done if record["env_id"] == plan.spec.env_id]


def read_records(path: Path) -> list[Record]:
    """The runs in a file, oldest first; empty where there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def train_until(plan: RunPlan, goal: Goal, batch_size: int, updates_per_env_step: float, seed: int) -> Record:
    """One training run to the goal; counts of what it took."""
    torch.set_num_threads(1)
    config, spec = plan.config, plan.spec
    ring = ReplayRing.create(plan.ring_spec())
    rng = np.random.default_rng([seed, batch_size])
    num_envs = config.sampling.envs_per_sampler
    sampling = TransitionCollector(
        lambda: open_task(spec),
        num_envs,
        spec,
        ShardWriter(ring, 0),
        n_step=config.algorithm.n_step,
        gamma=config.algorithm.gamma,
        seeds=[int(s) for s in rng.integers(2**31, size=num_envs)],
    )
    learning = ReplayTrainer(
        spec,
        config.run.algo,
        config.algorithm,
        plan.layout,
        ReplayReader(ring),
        LearnerConfig(batch_size=batch_size, device="cpu"),
        seed=seed,
        normalize_obs=config.env.normalize_obs,
    )
    judges: list[Task] = []
    try:
        return _loop(plan, goal, sampling, learning, judges, updates_per_env_step, rng) | {
            "env_id": spec.env_id,
            "algo": config.run.algo,
            "batch_size": batch_size,
            "seed": seed,
            "updates_per_env_step": updates_per_env_step,
            "target_return": goal.target_return,
        }
    finally:
        for task in judges:
            task.close()
        sampling.close()
        ring.close()


def _loop(
    plan: RunPlan,
    goal: Goal,
    sampling: TransitionCollector,
    learning: ReplayTrainer,
    judges: list[Task],
    ratio: float,
    rng: np.random.Generator,
) -> Record:
    spec, starts = plan.spec, max(plan.config.replay.learning_starts, 1)
    policy: Policy | None = None
    credit, next_evaluation, learner_s, best = 0.0, _FIRST_EVALUATION, 0.0, -np.inf
    reached = False
    while learning.updates < goal.max_updates and not reached:
        actions = (
            uniform_actions(spec, sampling.num_envs, rng) if policy is None else policy.act(sampling.obs, (), rng)[0]
        )
        sampling.step(actions, learning.updates)
        if sampling.counts.env_steps < starts:
            continue
        credit += ratio * sampling.num_envs
        start = perf_counter()
        while credit >= 1.0:
            learning.refresh()
            learning.update()
            credit -= 1.0
            policy = None
        learner_s += perf_counter() - start
        if policy is None:
            policy = Policy.from_weights(*learning.policy())
        if learning.updates >= next_evaluation:
            next_evaluation = max(learning.updates + 1, int(learning.updates * _EVALUATION_GROWTH))
            episodes = run_episodes(
                lambda: open_task(spec), policy.act, range(_FIRST_SEED, _FIRST_SEED + _EPISODES), tasks=judges
            )
            found = score(episodes)["return_mean"]
            best, reached = max(best, found), found >= goal.target_return
    return {
        "reached": reached,
        "updates": learning.updates,
        "env_steps": sampling.counts.env_steps,
        "learner_s": round(learner_s, 3),
        "best_return": round(float(best), 2),
    }


# --- the fit ---


class Point(NamedTuple):
    """Median over the seeds of one setting on one task."""

    task: str
    batch_size: int
    ratio: float
    updates: float
    reached: bool


class Fit(NamedTuple):
    """Constants, and the typical factor between prediction and count."""

    batch_constant: float
    ratio_constant: float
    typical_factor: float


def points(records: Sequence[Record]) -> list[Point]:
    """One point a task and setting: the median count; not reached if half of the seeds were not."""
    groups: dict[tuple[str, int, float], list[Record]] = {}
    for record in records:
        key = (record["env_id"], record["batch_size"], record["updates_per_env_step"])
        groups.setdefault(key, []).append(record)
    return [
        Point(
            *key,
            statistics.median(float(r["updates"]) for r in group),
            2 * sum(bool(r["reached"]) for r in group) > len(group),
        )
        for key, group in sorted(groups.items())
    ]


def shape(batch_size: float, ratio: float, b0: float, r0: float) -> float:
    """Updates needed over those of a very large batch on plenty of data."""
    return (1.0 + b0 / batch_size) * (1.0 + ratio / r0)


def residuals(found: Sequence[Point], b0: float, r0: float) -> list[float]:
    """Natural logarithm of count over prediction, each task's N0 free; 0 where a given-up run agrees."""
    result = []
    for task in sorted({p.task for p in found}):
        own = [p for p in found if p.task == task]
        raw = [math.log(p.updates / shape(p.batch_size, p.ratio, b0, r0)) for p in own]
        base = statistics.mean([value for value, p in zip(raw, own, strict=True) if p.reached] or raw)
        result += [0.0 if not p.reached and value < base else value - base for value, p in zip(raw, own, strict=True)]
    return result


def fit(found: Sequence[Point], ratio_constant: float | None = None) -> Fit:
    """Least squares of the logarithms over a grid of a quarter of an octave; R may be given, where u hardly varies."""

    def error(b0: float, r0: float) -> float:
        return sum(value * value for value in residuals(found, b0, r0))

    ratios = _RATIOS if ratio_constant is None else [ratio_constant]
    b0, r0 = min(((b, r) for b in _BATCHES for r in ratios), key=lambda pair: error(*pair))
    return Fit(b0, r0, math.exp(math.sqrt(error(b0, r0) / len(found))))


BATCHES = tuple(2**power for power in range(7, 15))
"""Batch sizes to pick from: from the tuner's least one on."""


def worst_loss(b0: float, truths: Iterable[float], fixed_rows: Iterable[float]) -> float:
    """Time that the batch picked with ``b0`` needs over that of the best one, at worst.

    ``truths`` are the batch constants that may be true; ``fixed_rows`` those of learners, a / b of an update that takes
    ``a + b B``. A score within 3 % of the best is picked where its batch is smaller, as the tuner does.
    """

    def worth(batch: int, constant: float, fixed: float) -> float:
        return batch / (batch + constant) / (fixed + batch)

    worst = 1.0
    for fixed in fixed_rows:
        best = max(worth(batch, b0, fixed) for batch in BATCHES)
        picked = min(batch for batch in BATCHES if worth(batch, b0, fixed) >= 0.97 * best)
        worst = max(
            [
                worst,
                *(
                    max(worth(batch, truth, fixed) for batch in BATCHES) / worth(picked, truth, fixed)
                    for truth in truths
                ),
            ]
        )
    return worst


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's coefficient; ties share their mean rank."""
    a, b = _ranks(first), _ranks(second)
    return statistics.correlation(a, b)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def left_out(found: Sequence[Point]) -> dict[str, tuple[Fit, float, float]]:
    """For each task: the fit to all others, its typical factor there, and the rank correlation with it."""
    result = {}
    for task in sorted({p.task for p in found}):
        others, own = [p for p in found if p.task != task], [p for p in found if p.task == task]
        if not others:
            continue
        constants = fit(others)
        errors = residuals(own, constants.batch_constant, constants.ratio_constant)
        predicted = [shape(p.batch_size, p.ratio, constants.batch_constant, constants.ratio_constant) for p in own]
        result[task] = (
            constants,
            math.exp(math.sqrt(statistics.mean(e * e for e in errors))),
            rank_correlation(predicted, [p.updates for p in own]),
        )
    return result


def fit_rows(records: Sequence[Record]) -> list[Row]:
    """The fit as rows of a bench."""
    found = points(records)
    whole = fit(found)
    rows: list[Row] = [
        {
            "metric": "batch_constant",
            "value": whole.batch_constant,
            "unit": "rows",
            "settings": len(found),
            "runs": len(records),
        },
        {"metric": "ratio_constant", "value": whole.ratio_constant, "unit": "updates/env step"},
        {"metric": "typical_factor", "value": whole.typical_factor, "unit": "ratio"},
    ]
    for task, (constants, factor, correlation) in left_out(found).items():
        rows += [
            {
                "metric": "left_out_factor",
                "value": factor,
                "unit": "ratio",
                "env": task,
                "batch_constant": constants.batch_constant,
                "ratio_constant": constants.ratio_constant,
            },
            {"metric": "left_out_rank_correlation", "value": correlation, "unit": "Spearman", "env": task},
        ]
    return rows
