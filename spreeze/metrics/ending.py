"""The end of a run that has no stop condition: a published return, returns that have stopped rising, or a budget.

A run counts as risen once its latest evaluations are clearly above its first ones. It has stopped rising if in the
last third of its time the slope of the returns is not above 0 by its 95 % interval, and the mean of ten evaluations
is not above the best one before. A run that has fallen far below its best, or has never risen, goes on to its budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spreeze.config.schema import Config
from spreeze.metrics.comparison import POLICIES, running_mean
from spreeze.metrics.falls import FIRST, level_of
from spreeze.metrics.published import ZOO, Published, published
from spreeze.metrics.store import EvaluationRow

_LEAST_S = 600.0
"""Training time below which no plateau counts."""
_FEWEST = 30
"""Evaluations in the last third of the time below which no plateau counts."""
_GAIN = 0.02
"""Share of what was gained so far by which the best mean has to rise in the last third."""
_FALLEN = 0.5
"""Share of what was gained below which the latest returns are no plateau."""
_Z_95 = 1.96


def has_stopped_rising(curve: Sequence[EvaluationRow]) -> bool:
    """True if the returns of a run have risen, and have not risen further in the last third of its time."""
    if not curve or curve[-1].t - curve[0].t < _LEAST_S:
        return False
    since = curve[-1].t - (curve[-1].t - curve[0].t) / 3.0
    begun = next(place for place, record in enumerate(curve) if record.t >= since)
    latest = curve[begun:]
    if len(latest) < _FEWEST or begun < max(FIRST, POLICIES):
        return False
    first, last = level_of(curve[:FIRST]), level_of(latest)
    if last.mean - first.mean <= 2.0 * math.hypot(first.error, last.error):
        return False
    times, returns = (np.array([getattr(record, name) for record in latest]) for name in ("t", "return_mean"))
    if lowest_slope(times, returns) > 0.0:
        return False
    means = running_mean(curve, POLICIES)
    before, now = max(means[POLICIES - 1 : begun], default=-math.inf), max(means[begun:])
    gained = max(before, now) - first.mean
    return now - before <= _GAIN * gained and last.mean - first.mean >= _FALLEN * gained


def lowest_slope(x: np.ndarray, y: np.ndarray) -> float:
    """Lower end of the 95 % interval of the slope of a least-squares line through at least three points."""
    centred = x - x.mean()
    square = float((centred**2).sum())
    slope = float((centred * y).sum()) / square
    residual = y - y.mean() - slope * centred
    error = math.sqrt(float((residual**2).sum()) / (len(x) - 2) / square)
    return slope - _Z_95 * error


@dataclass
class Ending:
    """Decides whether a run ends by itself."""

    target: Published | None
    budget_s: float
    _judged: int = field(default=0, init=False)
    """Evaluations that were looked at."""

    @property
    def sentence(self) -> str:
        """When it ends, and how to change that."""
        target = "" if self.target is None else f"at a return of {self.target.value:g} ({ZOO}), "
        return (
            f"ends by itself: {target}once returns no longer rise, or after {self.budget_s / 60.0:g} min "
            f"(--seconds 0: trains until Ctrl-C)"
        )

    def reason(self, curve: Sequence[EvaluationRow], session_s: float, *, first: int = 0) -> str | None:
        """``budget`` or ``plateau``, or None; ``curve`` holds the evaluations, those of this session from ``first``."""
        if session_s >= self.budget_s:
            return "budget"
        if len(curve) == self._judged:
            return None
        self._judged = len(curve)
        return "plateau" if has_stopped_rising(curve[first:]) else None


def ending_of(config: Config, env_id: str) -> Ending | None:
    """The end of a run of these settings; None where it has a stop condition of its own."""
    if not config.stop.by_itself:
        return None
    target = published(config.run.algo, env_id) if config.evaluation.enabled else None
    return Ending(target, config.stop.budget_s)
