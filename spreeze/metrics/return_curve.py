"""Levels, falls and trends of a run's return.

A level is a mean of ten evaluations. The gain of a run is its highest level minus that of its first evaluations, so
negative returns are judged like others. It has fallen once ten levels in a row are below half of its gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spreeze.formatting import duration, number
from spreeze.metrics.store import EvaluationRow

FINAL_EVALUATIONS = 10
HELD = 5
"""A return counts as held if the mean of this many consecutive evaluations reaches it, not one lucky evaluation."""
WORST_OF = 20  # number of latest evaluations, whose worst one shows how far a policy falls back
FIRST = 5  # number of first evaluations, whose mean is the level at which a run starts
_LOW_LEVELS = 10  # Consecutive low levels that count as a fall.
FALLEN_SHARE = 0.5  # Share of the gain below which the return has fallen; the latest returns are then no plateau.
_CLEARLY = 3.0  # Standard errors that a gain has to exceed.
MAX_ROLLBACKS = 5
"""Times that a session may roll back to its best checkpoint: learning rates are then a 32nd of the settings."""


def _mean_return(records: Sequence[EvaluationRow]) -> float:
    """Mean over episodes; an evaluation cut short by time counts with the episodes that it has."""
    weights = [record.episodes for record in records]
    if not any(weights):
        weights = [1] * len(records)
    return sum(record.return_mean * weight for record, weight in zip(records, weights, strict=True)) / sum(weights)


def running_mean(curve: Sequence[EvaluationRow], policies: int) -> list[float]:
    """Mean return over the episodes of the latest ``policies`` evaluations, at each evaluation; fewer at first."""
    return [_mean_return(curve[max(0, i + 1 - policies) : i + 1]) for i in range(len(curve))]


def final_metric(
    curve: Sequence[EvaluationRow], policies: int = FINAL_EVALUATIONS, limit_s: float = math.inf
) -> float | None:
    """Mean return over all episodes of the last policies published up to ``limit_s``; None if there are none."""
    known = [record for record in curve if record.t <= limit_s][-policies:]
    return _mean_return(known) if known else None


def required_time(curve: Sequence[EvaluationRow], target: float, policies: int = FINAL_EVALUATIONS) -> float | None:
    """Wall time [s] at which the running mean over the latest ``policies``, not fewer, first reaches ``target``."""
    row = reached(curve, target, policies)
    return None if row is None else row.t


def reached(curve: Sequence[EvaluationRow], target: float, policies: int = FINAL_EVALUATIONS) -> EvaluationRow | None:
    """The evaluation at which the running mean over the latest ``policies`` first reaches ``target``."""
    means = running_mean(curve, policies)[policies - 1 :]
    return next((row for row, mean in zip(curve[policies - 1 :], means, strict=True) if mean >= target), None)


def whole(curve: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """Returns evaluations with at least half of the usual episodes: shorter ones may be luck."""
    usual = max((record.episodes for record in curve), default=0)
    return [record for record in curve if 2 * record.episodes >= usual]


def worst_of_last(curve: Sequence[EvaluationRow]) -> float | None:
    """The lowest of the latest ``WORST_OF`` whole evaluations; None if there are none."""
    return min((record.return_mean for record in whole(curve)[-WORST_OF:]), default=None)


class Level(NamedTuple):
    """Mean return of some evaluations."""

    mean: float
    error: float  # standard error of the mean
    t: float


class FallWatch:
    """Detects falls in a growing curve, each once: again after a recovery, or after the learner was rolled back."""

    def __init__(self, least_s: float) -> None:
        """``least_s``: time that a fall lasts at least [s]."""
        self._least_s = least_s
        self._start(0)

    def _start(self, first: int) -> None:
        self._first = self._seen = self._judged = first
        self._top: Level | None = None
        self._low_since: int | None = None
        self._reported = False

    def reset(self, curve: Sequence[EvaluationRow]) -> None:
        """Forgets the curve so far: the task has changed."""
        self._start(len(curve))

    def judge_from(self, curve: Sequence[EvaluationRow]) -> None:
        """Judges only evaluations after these: the learner rolls back to its best checkpoint, or the run resumes."""
        self._judged, self._reported = len(curve), False

    def fallen(self, curve: Sequence[EvaluationRow]) -> str | None:
        """A sentence on a fall that is not yet reported, or None; ``curve`` only grows from call to call."""
        if len(curve) - self._first < FIRST + FINAL_EVALUATIONS:
            return None
        first = level_of(curve[self._first : self._first + FIRST])
        self._seen = max(self._seen, self._first + FIRST + FINAL_EVALUATIONS - 1)
        while self._seen < len(curve):
            self._seen += 1
            level = level_of(curve[self._seen - FINAL_EVALUATIONS : self._seen])
            if self._top is None or level.mean > self._top.mean:
                self._top = level
            if level.mean >= first.mean + FALLEN_SHARE * (self._top.mean - first.mean):
                self._low_since, self._reported = None, False
            elif self._low_since is None:
                self._low_since = self._seen - 1
        top = self._top
        if top is None or self._low_since is None or self._reported:
            return None
        low = max(self._low_since, self._judged + FINAL_EVALUATIONS - 1)  # a level averages only evaluations since then
        if len(curve) - low < _LOW_LEVELS or curve[-1].t - curve[low].t < self._least_s:
            return None
        if top.mean - first.mean <= _CLEARLY * math.hypot(top.error, first.error):
            return None
        self._reported = True
        return (
            f"the return has fallen: {level_of(curve[-FINAL_EVALUATIONS:]).mean:.1f} is its mean over "
            f"{FINAL_EVALUATIONS} evaluations, below half of what was gained from {first.mean:.1f} "
            f"to {top.mean:.1f} at {top.t:.0f} s"
        )


def level_of(rows: Sequence[EvaluationRow]) -> Level:
    """The level of at least two evaluations; its time is that of the last."""
    returns = np.array([row.return_mean for row in rows])
    return Level(float(returns.mean()), float(returns.std(ddof=1)) / math.sqrt(len(rows)), rows[-1].t)


_Z_95 = 1.96
_MIN_TREND_POINTS = 6
_MAX_TREND_POINTS = 200  # Points through which a trend is drawn; more of them are averaged in turn.
_MIN_STUCK_S = 120.0  # training time and evaluations without a rise before a run is called stuck
_MIN_STUCK = 10
_MIN_TREND_S = 30.0  # Training time that a trend covers at least: a slope over seconds says little about a minute.


def has_risen(curve: Sequence[EvaluationRow]) -> bool:
    """True if the best mean of a few evaluations in a row is clearly above the first one, by their intervals."""
    if not curve:
        return False
    size, first = min(FIRST, len(curve)), curve[0]
    best, end = max((mean, end) for end, mean in enumerate(running_mean(curve, size)) if end >= size - 1)
    widths = [row.half_width or 0.0 for row in curve[end - size + 1 : end + 1]]
    return best - first.return_mean > math.hypot(first.half_width or 0.0, math.hypot(*widths) / size)


def is_stuck(curve: Sequence[EvaluationRow], trend: Trend | None) -> bool:
    """True if the returns have not risen for minutes, and do not rise now."""
    if trend is None or curve[-1].t - curve[0].t < _MIN_STUCK_S or len(curve) < _MIN_STUCK:
        return False
    return trend.low <= 0.0 and not has_risen(curve)


def robust_slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Theil-Sen slope and its 95 % interval (Sen 1968), which a few odd values hardly move; ``x`` ascends."""
    if len(x) > _MAX_TREND_POINTS:  # there are as many slopes as pairs
        blocks = np.linspace(0, len(x), _MAX_TREND_POINTS, endpoint=False).astype(int)
        counts = np.diff(np.append(blocks, len(x)))
        x, y = (np.add.reduceat(values, blocks) / counts for values in (x, y))
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] > x[first]
    slopes = np.sort((y[second] - y[first])[apart] / (x[second] - x[first])[apart])
    count = len(x)
    margin = _Z_95 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18.0)
    low, high = round((len(slopes) - margin) / 2.0) - 1, round((len(slopes) + margin) / 2.0)
    return float(np.median(slopes)), float(slopes[max(low, 0)]), float(slopes[min(high, len(slopes) - 1)])


class Trend(NamedTuple):
    """A line through the latest returns."""

    per_s: float  # its slope [return/s]
    low: float
    high: float  # the slope's 95 % interval [return/s]
    span_s: float
    level: float  # the return at which the line ends

    def sentence(self, target: float | None = None, best: float = -math.inf) -> str:
        """The slope in words, and when the line reaches ``target`` if the ``best`` return so far has not."""
        low, high = self.low, self.high
        now, *ends = (f"{'+' * (value > 0.0)}{number(60.0 * value)}" for value in (self.per_s, low, high))
        text = f"Over the last {duration(self.span_s)}: {now} a minute [{' .. '.join(ends)}]"
        if low == high == 0.0:
            text = f"Over the last {duration(self.span_s)}: no change"
        elif low <= 0.0 <= high:
            text += ", which may be no change"
        if target is None or max(self.level, best) >= target:
            return text
        if self.per_s <= 0.0:
            return f"{text}; {number(target)} is not reached at this slope"
        soonest, likely = (duration((target - self.level) / slope) for slope in (high, self.per_s))
        when = f"in {likely} at this slope, in {soonest} at the earliest" if low <= 0.0 else (
            f"in {soonest} to {duration((target - self.level) / low)} at this slope"
        )  # fmt: skip
        return f"{text}; {number(target)} {when}"


def trend_of(curve: Sequence[EvaluationRow]) -> Trend | None:
    """The trend in the last third of the time, or the last 30 s; None where that has fewer than six evaluations."""
    if not curve or curve[-1].t - curve[0].t < _MIN_TREND_S:
        return None
    since = curve[-1].t - max((curve[-1].t - curve[0].t) / 3.0, _MIN_TREND_S)
    latest = [record for record in curve if record.t >= since]
    times, returns = (np.array([getattr(record, name) for record in latest]) for name in ("t", "return_mean"))
    if len(latest) < _MIN_TREND_POINTS or times[0] == times[-1]:
        return None
    slope, low, high = (round(value, 12) + 0.0 for value in robust_slope(times, returns))  # equal returns: not 1e-17
    level = float(np.median(returns - slope * (times - times[-1])))
    return Trend(slope, low, high, float(times[-1] - times[0]), level)
