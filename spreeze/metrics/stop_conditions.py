"""Conditions that end a run, in their order, and the reasons: their names in files, and a sentence for each.

A run without a stop condition ends at a published return, once returns have stopped rising, or at its budget. They
have stopped if in the last third of its time their slope is not above 0 by its 95 % interval, and the mean of ten
evaluations is not above the best one before. A run that has never risen, or has fallen, goes on to its budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from spreeze.config.schema import Config, StopConfig
from spreeze.metrics.published_returns import ZOO, Published, published
from spreeze.metrics.return_curve import FALLEN_SHARE, FINAL_EVALUATIONS, FIRST, level_of, robust_slope, running_mean
from spreeze.metrics.store import EvaluationRow

RUN_ENDS = "the run ends"  # Beginning of the event that tells the reason.


class StopReason(StrEnum):
    """Reason for the end of a run; its value is ``exit_reason`` in ``run.json``, ``stopped_by`` in ``summary.json``."""

    sentence: str

    TARGET_RETURN = "target_return", "the target return was reached"
    SECONDS = "seconds", "its time limit was reached"
    ENV_STEPS = "env_steps", "its limit of env steps was reached"
    UPDATES = "updates", "its limit of updates was reached"
    PLATEAU = "plateau", "returns no longer rose"
    BUDGET = "budget", "its time budget was used up"
    REQUEST = "stop request", "it was stopped"
    INTERRUPT = "interrupt", "it was interrupted"  # In files the signal follows in brackets.
    FAILURE = "failure", "it failed"

    def __new__(cls, value: str, sentence: str) -> StopReason:
        reason = str.__new__(cls, value)
        reason._value_, reason.sentence = value, sentence
        return reason


def stop_reason(text: object) -> StopReason | None:
    """The reason that a file names; None for one that is unknown."""
    name = str(text).partition(" (")[0]
    return next((reason for reason in StopReason if reason == name), None)


_MIN_S = 600.0  # Training time below which no plateau counts.
_MIN = 30  # Evaluations in the last third of the time below which no plateau counts.
_GAIN = 0.02  # Share of the gain so far by which the best mean has to rise in the last third.


def has_stopped_rising(curve: Sequence[EvaluationRow]) -> bool:
    """True if the returns of a run have risen, and have not risen further in the last third of its time."""
    if not curve or curve[-1].t - curve[0].t < _MIN_S:
        return False
    since = curve[-1].t - (curve[-1].t - curve[0].t) / 3.0
    begin = next(index for index, record in enumerate(curve) if record.t >= since)
    latest = curve[begin:]
    if len(latest) < _MIN or begin < max(FIRST, FINAL_EVALUATIONS):
        return False
    first, last = level_of(curve[:FIRST]), level_of(latest)
    if last.mean - first.mean <= 2.0 * math.hypot(first.error, last.error):
        return False
    times, returns = (np.array([getattr(record, name) for record in latest]) for name in ("t", "return_mean"))
    if robust_slope(times, returns)[1] > 0.0:
        return False
    means = running_mean(curve, FINAL_EVALUATIONS)
    before, now = max(means[FINAL_EVALUATIONS - 1 : begin], default=-math.inf), max(means[begin:])
    gained = max(before, now) - first.mean
    return now - before <= _GAIN * gained and last.mean - first.mean >= FALLEN_SHARE * gained


@dataclass
class Ending:
    """End of a run without a stop condition."""

    target: Published | None
    budget_s: float
    _judged: int = field(default=0, init=False)  # number of evaluations judged so far

    @property
    def sentence(self) -> str:
        """A sentence on when it ends."""
        target = (
            "" if self.target is None else f"a return of {self.target.value:g} on fresh starts (the best of {ZOO}); "
        )
        plateau = f"returns that have stopped rising (not before {_MIN_S / 60.0:g} min)"
        return f"ends by itself at the first of: {target}{plateau}; {self.budget_s / 60.0:g} min"

    def reason(self, curve: Sequence[EvaluationRow], session_s: float) -> StopReason | None:
        """Budget or plateau, or None; ``curve`` holds the evaluations of this session."""
        if session_s >= self.budget_s:
            return StopReason.BUDGET
        if len(curve) == self._judged:
            return None
        self._judged = len(curve)
        return StopReason.PLATEAU if has_stopped_rising(curve) else None


def ending_of(config: Config, env_id: str, best_before: float | None = None) -> Ending | None:
    """How a run with these settings ends by itself; None if it has a stop condition.

    A run that is resumed after it had the published return (``best_before``: its best one) is to go beyond it.
    """
    if not config.stop.by_itself:
        return None
    target = published(env_id) if config.evaluation.enabled else None
    if target is not None and best_before is not None and best_before >= target.value:
        target = None
    return Ending(target, config.stop.budget_s)


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Counts and times of a run that its stop conditions need; None: not counted here."""

    stop_requested: bool
    target_reached: bool
    trained_s: float
    curve: Sequence[EvaluationRow]  # evaluations of this session
    updates: float | None  # of the learner with the fewest
    env_steps: float | None


def stop_reason_of(stop: StopConfig, ending: Ending | None, reached: Reached) -> StopReason | None:
    """The first stop condition that is met, or None."""
    if reached.stop_requested:
        return StopReason.REQUEST
    if reached.target_reached:
        return StopReason.TARGET_RETURN
    if stop.seconds and reached.trained_s >= stop.seconds:
        return StopReason.SECONDS
    if ending is not None:
        return ending.reason(reached.curve, reached.trained_s)
    if stop.updates is not None and reached.updates is not None and reached.updates >= stop.updates:
        return StopReason.UPDATES
    if stop.env_steps is not None and reached.env_steps is not None and reached.env_steps >= stop.env_steps:
        return StopReason.ENV_STEPS
    return None
