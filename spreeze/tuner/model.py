"""Scores, the cost of an update ``t(B) = a + b B``, and rates of learner and samplers that share cores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spreeze.config.algorithm_bases import serial_ratio
from spreeze.config.schema import Config
from spreeze.metrics import median
from spreeze.tuner.problem import (
    BATCH,
    DEVICE,
    LEARNER,
    MINIBATCHES,
    PRECISION,
    RATIO,
    RATIO_MAX,
    ROLLOUT,
    ROLLOUT_ENVS,
    SAMPLERS,
    SYNC_INTERVAL,
    THREADS,
    USES,
    Setting,
    TrialResult,
    TuningProblem,
)

BATCH_HALF_WORTH = 96.0
"""B0 (transitions): the batch at which an update has half of its greatest worth.

Fits give 7 for early returns of easy tasks, some hundred for late ones of Walker2D (``tests/slow``): unknown before a
run. With ``knobs.MIN_BATCH``, whatever the truth between 7 and 250, it loses nothing on a processor (a < 100 b), and at
most a factor of 1.2 on a GPU; a B0 of 16 loses up to 1.9 there, one of 250 up to 1.4.
"""
UPDATES_PER_STEP = 2.0
"""R (updates per env step): the ratio at which an update has half of its worth on fresh data; also fitted."""

FORMULAS = {
    "return": f"U * B / (B + {BATCH_HALF_WORTH:g}) * E / (E + U / {UPDATES_PER_STEP:g})",
    "paper": "the smallest power of two B with b B / (a + b B) >= gpu_target, where an update takes a + b B; "
             "then E while the run keeps at most cpu_target of the cores busy",
    "sampling": "E, with the configured batch",
    "updates": "U, with the configured batch",
}  # fmt: skip
"""Objective -> its formula in one line; U updates/s, E env steps/s, B batch size, learner and samplers together."""
ROLLOUT_FORMULA = "env steps/s of the whole run; rollout and minibatch size as configured"
HOST_FORMULA = "env steps/s of a host without a learner"
MAX_USES = 20
"""Uses of a rollout of any age up to which an update is worth the same (``assets/figures.md``). The paper's K is 20."""
BUFFER_FORMULA = f"updates/s of the whole run, with rollouts used up to {MAX_USES} times, at the configured rows"
UPDATES_PER_STEP_BOUND = 8.0
"""Samples per insert are never allowed above this many updates per env step (times the batch)."""


def formula(problem: TuningProblem) -> str:
    """The objective in one line."""
    if problem.objective in FORMULAS:
        return FORMULAS[problem.objective]
    if SAMPLERS in problem.configured:
        return HOST_FORMULA
    return ROLLOUT_FORMULA if problem.full_name(USES) is None else BUFFER_FORMULA


def learner_score(objective: str, batch_size: int, updates_per_s: float) -> float:
    """Worth of a learner before the samplers are known; all that run are equal if only env steps count."""
    if objective == "sampling":
        return float(updates_per_s > 0.0)
    return updates_per_s * (batch_size / (batch_size + BATCH_HALF_WORTH) if objective == "return" else 1.0)


def joint_score(objective: str, batch_size: int, updates_per_s: float, env_steps_per_s: float) -> float:
    """Worth of learner and samplers together; ``paper`` takes the batch by its rule and scores E."""
    if objective == "return":
        needed = updates_per_s / UPDATES_PER_STEP
        fresh = env_steps_per_s / (env_steps_per_s + needed) if env_steps_per_s > 0.0 else 0.0
        return learner_score(objective, batch_size, updates_per_s) * fresh
    return updates_per_s if objective == "updates" else env_steps_per_s


def paper_batch(a_s: float, b_s: float, gpu_target: float) -> int:
    """Smallest power of two whose frame rate reaches ``gpu_target`` of the asymptotic one, 1/b (paper, 3.3)."""
    needed = gpu_target / (1.0 - gpu_target) * a_s / b_s
    return 1 << max(0, math.ceil(math.log2(max(needed, 1.0)) - 1e-9))


SUPERVISOR_CORES = 0.03  # cores that the supervisor takes, for two samples of all metrics a second


def observer_cores(config: Config) -> float:
    """Cores that the observers (evaluator, visualizer and supervisor) take in a run where none is free for them."""
    visualizer = config.visualizer.cpu_share if config.visualizer.enabled else 0.0
    return config.evaluation.cpu_share + visualizer + SUPERVISOR_CORES


def share_in_a_run(problem: TuningProblem, cpu_share: float | None) -> float:
    """Fraction of measured rates that a run keeps: its observers take idle cores first, then a part of all others.

    ``cpu_share``: fraction of the cores that learner and samplers keep busy; None counts as all.
    """
    busy = min(1.0, 1.0 if cpu_share is None else cpu_share)
    lacking = max(0.0, problem.observer_cores - (1.0 - busy) * problem.cores)
    return max(0.0, 1.0 - lacking / (busy * problem.cores)) if lacking > 0.0 else 1.0


class Scored(NamedTuple):
    """A setting with its score; higher is better."""

    setting: Setting
    score: float
    updates_per_s: float = 0.0
    env_steps_per_s: float = 0.0
    in_a_run: float = 1.0  # share of these rates that a run keeps beside its observers


TIE = 0.03  # scores this near to the best one count as equal to it
_CPU_ERROR = 1e-6
_OVER_TARGET = 1e-3
"""Share of its score that a setting over the processor target keeps: it is chosen only if nothing else is left."""


def ratio_bound(problem: TuningProblem, batch_size: int) -> float:
    """Samples per insert above which the learner has to wait, at most."""
    if problem.balanced:
        return serial_ratio(batch_size, problem.configured[RATIO], problem.configured[RATIO_MAX])
    if problem.pin(RATIO_MAX) is not None:
        return float(problem.pin(RATIO_MAX))
    return float(max(problem.configured[RATIO_MAX], UPDATES_PER_STEP_BOUND * batch_size, problem.pin(RATIO) or 0.0))


def worth(
    problem: TuningProblem, setting: Setting, updates_per_s: float, env_steps_per_s: float, cpu_share: float | None
) -> Scored:
    """Score of a setting from its rates, with the learner limited to the upper bound of samples per insert."""
    objective, in_a_run = problem.objective, share_in_a_run(problem, cpu_share)
    if objective == ROLLOUT:
        score = env_steps_per_s
        if problem.full_name(USES) is not None:
            minibatches = problem.full_name(MINIBATCHES)
            rows = setting[ROLLOUT_ENVS] * setting[SYNC_INTERVAL] / (setting[minibatches] if minibatches else 1)
            score = min(updates_per_s * rows, MAX_USES * env_steps_per_s)
        return Scored(setting, score, updates_per_s, env_steps_per_s, in_a_run)
    batch = setting[BATCH]
    updates = min(updates_per_s, ratio_bound(problem, batch) * env_steps_per_s / batch)
    score = joint_score(objective, batch, updates, env_steps_per_s)
    if objective == "paper" and setting[SAMPLERS] > 1:
        share = (setting[SAMPLERS] + setting[THREADS]) / problem.cores if cpu_share is None else cpu_share
        if share > problem.targets.cpu_target + _CPU_ERROR:
            score *= _OVER_TARGET
    return Scored(setting, score, updates, env_steps_per_s, in_a_run)


def measured_worth(problem: TuningProblem, result: TrialResult) -> Scored:
    """Score of a measured setting; 0 for a failed candidate."""
    return worth(problem, result.setting, result.updates, result.env_steps, result.cpu)


def pick(problem: TuningProblem, scored: Iterable[Scored]) -> Scored:
    """The best setting; among those within ``TIE`` of it the one that the knobs prefer, in their order."""
    candidates = list(scored)
    best = max(one.score for one in candidates)
    knobs = [knob for knob in problem.knobs if knob.name in candidates[0].setting]
    return min(
        (one for one in candidates if one.score >= best * (1.0 - TIE)),
        key=lambda one: tuple(knob.tie(problem, knob.name, one.setting[knob.name]) for knob in knobs),
    )


def kind_of(setting: Setting) -> Setting:
    """The part of a setting on which a learner's time of an update depends, beside the batch."""
    return Setting({name: setting[name] for name in (DEVICE, PRECISION, THREADS)})


class Cost(NamedTuple):
    """Time of an update of one kind of learner: ``a`` seconds, and ``b`` more for each row of the batch."""

    a: float
    b: float  # 0 if only one batch size was measured

    def update_s(self, batch_size: int) -> float:
        return self.a + self.b * batch_size


def fit_cost(points: Sequence[tuple[int, float]]) -> Cost:
    """Fits (batch size, seconds of an update) by least squares of relative errors; neither a nor b is negative."""
    batch, seconds = np.array(points).T
    if np.ptp(batch) == 0.0:
        return Cost(points[0][1], 0.0)
    b, a = np.polyfit(batch, seconds, 1, w=1.0 / seconds)
    if a <= 0.0:
        a, b = 0.0, np.sum(batch / seconds) / np.sum((batch / seconds) ** 2)
    if b <= 0.0:
        a, b = np.sum(1.0 / seconds) / np.sum(seconds**-2.0), 0.0
    return Cost(float(a), max(float(b), 1e-12))


_SMT = 0.3  # Speed that a busy second thread adds to that of a physical core.


@dataclass(frozen=True)
class Sharing:
    """Rates of learner and samplers that share cores, each relative to an even share of the processor."""

    cores: float
    physical: float
    costs: Mapping[Setting, Cost]
    busy: Sequence[float]  # busy threads in each measurement, ascending
    learner: Sequence[float]
    """Log of measured updates/s over those of the learner alone at an even share; interpolated between."""
    sampler: Sequence[float]  # log of one sampler's env steps/s at an even share

    def speed(self, busy: float) -> float:
        """Speed of each of ``busy`` threads, 1 for a thread alone on a core."""
        fast = min(busy, self.physical, self.cores)
        return min(1.0, (fast + _SMT * max(0.0, min(busy, self.cores) - fast)) / busy)

    def forecast(self, setting: Setting) -> tuple[float, float, float]:
        """(updates/s, env steps/s, share of the cores) of a setting whose learner was measured alone."""
        batch, samplers, ratio = setting[BATCH], setting[SAMPLERS], setting[RATIO]
        updates_alone = 1.0 / self.costs[kind_of(setting)].update_s(batch)
        quiet, duty = float(setting[THREADS]), 1.0
        full = samplers * self._factor(self.sampler, quiet + 1.0)
        if ratio > 0.0:
            duty = min(1.0, updates_alone * self._factor(self.learner, quiet) * batch / (ratio * full))
        busy = samplers * duty + quiet
        updates = updates_alone * self.speed(busy) * self._factor(self.learner, busy)
        steps = samplers * duty * self.speed(busy) * self._factor(self.sampler, busy)
        if ratio > 0.0:
            steps = min(steps, updates * batch / ratio)
        return updates, steps, min(1.0, busy / self.cores)

    def _factor(self, logs: Sequence[float], busy: float) -> float:
        return math.exp(np.interp(busy, self.busy, logs))


def fit_sharing(problem: TuningProblem, costs: Mapping[Setting, Cost], results: Sequence[TrialResult]) -> Sharing:
    """The model, from samplers that ran unthrottled beside one learner; guessed if none did."""
    physical = min(problem.cores, problem.physical_cores or problem.cores)
    guess = math.log(1e6 / problem.step_us if problem.step_us else 1000.0)
    even = Sharing(problem.cores, physical, costs, (0.0,), (0.0,), (guess,))
    points = []
    for result in results:
        setting = result.setting
        busy, cost = setting[SAMPLERS] + setting[THREADS], costs[kind_of(setting)]
        updates_alone, speed = 1.0 / cost.update_s(setting[BATCH]), even.speed(busy)
        learner, sampler = result.updates / (updates_alone * speed), result.env_steps / (setting[SAMPLERS] * speed)
        points.append((float(busy), math.log(learner), math.log(sampler)))
    return Sharing(problem.cores, physical, costs, *zip(*sorted(points), strict=True)) if points else even


def gain(problem: TuningProblem, other: TrialResult, current: TrialResult) -> float:
    """The other's score over the current one's: median over their turns, which cancels load; 0 if no turn counts."""
    turns = zip(_turn_scores(problem, other), _turn_scores(problem, current), strict=False)
    return median([score / base for score, base in turns if score > 0.0 and base > 0.0])


def _turn_scores(problem: TuningProblem, result: TrialResult) -> list[float]:
    if result.trial == LEARNER:
        objective, batch = problem.objective, result.setting[BATCH]
        return [learner_score(objective, batch, updates) for updates in result.updates_per_s]
    shares = result.cpu_share or (None,) * len(result.updates_per_s)
    turns = zip(result.updates_per_s, result.env_steps_per_s, shares, strict=False)
    return [worth(problem, result.setting, *turn).score for turn in turns]
