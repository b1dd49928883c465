"""Falls and plateaus of a run's return, returns that others have published, and the end of a run without a condition.

A level is a mean of ten evaluations. The gain of a run is its highest level minus that of its first evaluations, so
negative returns are judged like others. It has fallen once ten levels in a row are below half of its gain.

A run without a stop condition ends at a published return, once returns have stopped rising, or at its budget. They
have stopped if in the last third of its time their slope is not above 0 by its 95 % interval, and the mean of ten
evaluations is not above the best one before. A run that has never risen, or has fallen, goes on to its budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from spreeze.config.schema import Config
from spreeze.formatting import duration, number
from spreeze.metrics import student_quantile
from spreeze.metrics.comparison import FINAL_EVALUATIONS, running_mean
from spreeze.metrics.stop_reasons import StopReason
from spreeze.metrics.store import EvaluationRow

ZOO = "RL Baselines3 Zoo"
SOURCE = (
    f"{ZOO}, benchmark.md (github.com/DLR-RM/rl-baselines3-zoo): mean return of its trained agent over "
    "150,000 env steps; one training run each, tuned settings"
)


class Published(NamedTuple):
    """The best return of a task in ``SOURCE``, over all of its algorithms."""

    value: float
    algo: str
    env_steps: int
    env_id: str

    @property
    def label(self) -> str:
        """Legend of its line."""
        steps = f"{self.env_steps // 1_000_000} M" if self.env_steps >= 1_000_000 else f"{self.env_steps // 1000}k"
        return f"{ZOO}, {self.algo.upper()} on {self.env_id} after {steps} env steps: {self.value:g}"


PUBLISHED = {
    found.env_id: found
    for found in (
        Published(-69.1, "qrdqn", 100_000, "Acrobot-v1"),
        Published(5813.3, "td3", 1_000_000, "Ant-v3"),
        Published(3456.7, "tqc", 1_000_000, "AntBulletEnv-v0"),
        Published(329.8, "tqc", 500_000, "BipedalWalker-v3"),
        Published(235.2, "tqc", 2_000_000, "BipedalWalkerHardcore-v3"),
        Published(500.0, "dqn", 50_000, "CartPole-v1"),
        Published(-9.3, "tqc", 1_000_000, "FetchPickAndPlace-v1"),
        Published(-8.8, "tqc", 1_000_000, "FetchPush-v1"),
        Published(-1.66, "tqc", 20_000, "FetchReach-v1"),
        Published(-29.2, "tqc", 3_000_000, "FetchSlide-v1"),
        Published(12089.9, "tqc", 1_000_000, "HalfCheetah-v3"),
        Published(3675.3, "tqc", 1_000_000, "HalfCheetahBulletEnv-v0"),
        Published(3754.2, "tqc", 1_000_000, "Hopper-v3"),
        Published(2681.6, "td3", 1_000_000, "HopperBulletEnv-v0"),
        Published(7239.3, "tqc", 2_000_000, "Humanoid-v3"),
        Published(242.1, "ppo", 1_000_000, "LunarLander-v2"),
        Published(278.0, "tqc", 500_000, "LunarLanderContinuous-v2"),
        Published(-100.8, "dqn", 120_000, "MountainCar-v0"),
        Published(96.7, "ars", 500_000, "MountainCarContinuous-v0"),
        Published(-36.6, "tqc", 1_000_000, "PandaPickAndPlace-v2"),
        Published(-8.7, "tqc", 1_000_000, "PandaPush-v2"),
        Published(-1.73, "tqc", 20_000, "PandaReach-v2"),
        Published(-36.8, "tqc", 3_000_000, "PandaSlide-v2"),
        Published(-151.9, "td3", 20_000, "Pendulum-v1"),
        Published(18.3, "tqc", 300_000, "ReacherBulletEnv-v0"),
        Published(365.7, "trpo", 1_000_000, "Swimmer-v3"),
        Published(2508.9, "tqc", 1_000_000, "Walker2DBulletEnv-v0"),
        Published(4933.1, "trpo", 1_000_000, "Walker2d-v3"),
        Published(-6.8, "tqc", 100_000, "parking-v0"),
    )
}
"""Task -> its best return in ``SOURCE``, less games of Atari, whose rules here are others (sticky actions)."""


def published(env_id: str | None) -> Published | None:
    """The best return of a task in ``SOURCE``, where an older version of the task stands for a newer one."""
    name, _, version = (env_id or "").rpartition("-v")
    older = range(int(version), -1, -1) if version.isascii() and version.isdigit() and len(version) < 3 else ()
    return next((PUBLISHED[key] for number in older if (key := f"{name}-v{number}") in PUBLISHED), None)


FIRST = 5  # number of first evaluations, whose mean is the level at which a run starts
_LOW_LEVELS = 10  # Consecutive low levels that count as a fall.
_FALLEN_SHARE = 0.5  # Share of the gain below which the return has fallen; the latest returns are then no plateau.
_CLEARLY = 3.0  # Standard errors that a gain has to exceed.
MAX_ROLLBACKS = 5
"""Times that a session may go back to its best checkpoint: learning rates are then a 32nd of the settings."""


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

    def rolled_back(self, curve: Sequence[EvaluationRow]) -> None:
        """The learner goes back to its best checkpoint: only evaluations after this show whether that helped."""
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
            if level.mean >= first.mean + _FALLEN_SHARE * (self._top.mean - first.mean):
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


_MIN_S = 600.0  # Training time below which no plateau counts.
_MIN = 30  # Evaluations in the last third of the time below which no plateau counts.
_GAIN = 0.02  # Share of the gain so far by which the best mean has to rise in the last third.
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
    slope, half = slope_of(times, returns)
    if slope > half:
        return False
    means = running_mean(curve, FINAL_EVALUATIONS)
    before, now = max(means[FINAL_EVALUATIONS - 1 : begin], default=-math.inf), max(means[begin:])
    gained = max(before, now) - first.mean
    return now - before <= _GAIN * gained and last.mean - first.mean >= _FALLEN_SHARE * gained


def slope_of(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope of a least-squares line through at least three points, and half of its 95 % interval."""
    centred = x - x.mean()
    square = float((centred**2).sum())
    slope = float((centred * y).sum()) / square
    residual = y - y.mean() - slope * centred
    degrees = len(x) - 2
    return slope, student_quantile(_Z_95, degrees) * math.sqrt(float((residual**2).sum()) / degrees / square)


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


@dataclass
class Ending:
    """Decides whether a run ends by itself."""

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

    def reason(self, curve: Sequence[EvaluationRow], session_s: float, *, first: int = 0) -> StopReason | None:
        """Budget or plateau, or None; ``curve`` holds the evaluations, those of this session from ``first``."""
        if session_s >= self.budget_s:
            return StopReason.BUDGET
        if len(curve) == self._judged:
            return None
        self._judged = len(curve)
        return StopReason.PLATEAU if has_stopped_rising(curve[first:]) else None


def ending_of(config: Config, env_id: str) -> Ending | None:
    """How a run with these settings ends by itself; None if it has a stop condition."""
    if not config.stop.by_itself:
        return None
    target = published(env_id) if config.evaluation.enabled else None
    return Ending(target, config.stop.budget_s)
