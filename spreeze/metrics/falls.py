"""Falls of a run's return: a policy that was good is lost, and does not come back by itself.

A level is a mean of ten evaluations. What a run has gained is its highest level over that of its first evaluations, so
negative returns are judged like others. It has fallen once ten levels in a row are below half of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spreeze.metrics.comparison import POLICIES
from spreeze.metrics.store import EvaluationRow

FIRST = 5
"""Evaluations that tell where a run began."""
_STAYS = 10
"""Levels in a row that are a fall."""
_KEPT = 0.5
"""Share of what was gained below which the return has fallen."""
_CLEARLY = 3.0
"""Standard errors that a gain exceeds."""
MOST_RETURNS = 5
"""Times that a session goes back to its best checkpoint: learning rates are then a 32nd of the settings."""


class Level(NamedTuple):
    """Mean return of some evaluations."""

    mean: float
    error: float
    """Standard error of the mean."""
    t: float


class FallWatch:
    """Notices falls in a growing curve, each once: again after a recovery, or after the learner has gone back."""

    def __init__(self, stays_s: float) -> None:
        """``stays_s``: time that a fall lasts at least [s]."""
        self._stays_s = stays_s
        self._begin(0)

    def _begin(self, first: int) -> None:
        self._begun = self._seen = self._judged = first
        self._top: Level | None = None
        self._low_since: int | None = None
        self._said = False

    def begin_again(self, curve: Sequence[EvaluationRow]) -> None:
        """Forgets the curve so far: the task has changed."""
        self._begin(len(curve))

    def went_back(self, curve: Sequence[EvaluationRow]) -> None:
        """The learner goes back: the evaluations from here on tell whether that was enough."""
        self._judged, self._said = len(curve), False

    def fallen(self, curve: Sequence[EvaluationRow]) -> str | None:
        """Says that the return has fallen, from which level to which; None if it has not, or that was said before.

        ``curve`` is that of the last call and what came since.
        """
        if len(curve) - self._begun < FIRST + POLICIES:
            return None
        first = level_of(curve[self._begun : self._begun + FIRST])
        self._seen = max(self._seen, self._begun + FIRST + POLICIES - 1)
        while self._seen < len(curve):
            self._seen += 1
            level = level_of(curve[self._seen - POLICIES : self._seen])
            if self._top is None or level.mean > self._top.mean:
                self._top = level
            if level.mean >= first.mean + _KEPT * (self._top.mean - first.mean):
                self._low_since, self._said = None, False
            elif self._low_since is None:
                self._low_since = self._seen - 1
        top = self._top
        if top is None or self._low_since is None or self._said:
            return None
        low = max(self._low_since, self._judged + POLICIES - 1)  # a level is of evaluations since then alone
        if len(curve) - low < _STAYS or curve[-1].t - curve[low].t < self._stays_s:
            return None
        if top.mean - first.mean <= _CLEARLY * math.hypot(top.error, first.error):
            return None
        self._said = True
        return (
            f"the return has fallen: {level_of(curve[-POLICIES:]).mean:.1f} is its mean over {POLICIES} evaluations, "
            f"below half of what was gained from {first.mean:.1f} to {top.mean:.1f} at {top.t:.0f} s"
        )


def level_of(rows: Sequence[EvaluationRow]) -> Level:
    """The level of at least two evaluations; its time is that of the last."""
    returns = np.array([row.return_mean for row in rows])
    return Level(float(returns.mean()), float(returns.std(ddof=1)) / math.sqrt(len(rows)), rows[-1].t)
