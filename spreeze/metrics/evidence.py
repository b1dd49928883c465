"""Statistics over runs: centres with bootstrap intervals, the probability of improvement, seeds needed, main effects.

Agarwal et al. 2021 (arXiv 2108.13264) recommend the interquartile mean, and the probability of improvement where two
algorithms are compared over few seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
_Z = 1.96 + 0.84
"""Standard errors by which a difference must exceed 0 to be found at a level of 5 % with a power of 80 %."""
_CHUNK_VALUES = 1_000_000


def iqm(values: np.ndarray) -> np.ndarray:
    """Interquartile mean over the first axis, [R, ...] -> [...]: the mean of the middle half (arXiv 2108.13264)."""
    ordered = np.sort(values, axis=0)
    count = len(ordered)
    cut = count // 4
    return np.asarray(ordered[cut : count - cut].mean(axis=0))


def bootstrap_interval(
    values: Sequence[float] | np.ndarray, level: float = LEVEL, resamples: int = RESAMPLES, *, robust: bool = False
) -> tuple[float, float]:
    """Percentile bootstrap interval of a centre (Efron 1979): quantiles of the centres of resamples.

    ``values`` needs at least one number; ``level`` is the share of resampled centres inside. ``robust``: the centre is
    the interquartile mean, else the mean.
    """
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(0)

    def centres(count: int) -> np.ndarray:
        drawn = data[rng.integers(0, data.size, (count, data.size))]
        return iqm(drawn.T) if robust else np.asarray(drawn.mean(axis=1))

    return _interval(centres, data.size, level, resamples)


def improvement(
    mine: Sequence[float],
    others: Sequence[float],
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    *,
    paired: bool = False,
) -> tuple[float, float, float]:
    """Probability that a run of one group exceeds one of the other, ties counting half, and ends of its interval.

    The share of all pairs of runs (Mann-Whitney's statistic, arXiv 2108.13264, section 4). Both need at least one
    number. ``paired``: the n-th of both have the same seed, so they are resampled together.
    """
    a, b = np.asarray(mine, np.float64), np.asarray(others, np.float64)
    wins = (a[:, None] > b) + 0.5 * (a[:, None] == b)
    rng = np.random.default_rng(0)

    def shares(count: int) -> np.ndarray:
        rows = rng.integers(0, a.size, (count, a.size))
        columns = rows if paired else rng.integers(0, b.size, (count, b.size))
        return np.asarray(wins[rows[:, :, None], columns[:, None, :]].mean(axis=(1, 2)))

    return float(wins.mean()), *_interval(shares, wins.size, level, resamples)


def seeds_needed(mine: Sequence[float], others: Sequence[float], *, paired: bool = False) -> int | None:
    """Runs of each group needed to tell them apart, if difference and spread are as observed.

    Two-sided at 5 %, power 80 %, normal approximation. None if a group has fewer than two runs, or both have the same
    mean. ``paired``: the n-th of both have the same seed.
    """
    a, b = np.asarray(mine, np.float64), np.asarray(others, np.float64)
    if min(a.size, b.size) < 2 or a.mean() == b.mean():
        return None
    variance = (a - b).var(ddof=1) if paired else a.var(ddof=1) + b.var(ddof=1)
    return max(2, math.ceil(_Z**2 * float(variance) / float(a.mean() - b.mean()) ** 2))


class Effect(NamedTuple):
    """The main effect of one setting on the results of runs."""

    settings: tuple[str, ...]
    """Its name; several names if these settings always changed together, so that their effects cannot be separated."""
    share: float  # share of the variance between runs that its values explain (eta squared), 0 to 1
    values: dict[str, list[float]]
    """Value -> the results of the runs that have it; values of several settings are joined by a comma."""


def main_effects(runs: Sequence[tuple[dict[str, str], float]]) -> list[Effect]:
    """The effect of each setting, averaged over the others, the largest first.

    ``runs``: settings and result of each. Left out are settings with one value in all runs, those that a run lacks, and
    those with a different value in each run, which would explain all of the variance.
    """
    results = np.array([result for _, result in runs], np.float64)
    total = float(((results - results.mean()) ** 2).sum()) if len(runs) else 0.0
    alike: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(set().union(*(settings for settings, _ in runs))):
        column = [settings.get(name) for settings, _ in runs]
        if None not in column and 1 < len(set(column)) < len(runs):
            alike.setdefault(tuple(map(column.index, column)), []).append(name)
    effects = []
    for names in alike.values():
        values: dict[str, list[float]] = {}
        for settings, result in runs:
            values.setdefault(", ".join(settings[name] for name in names), []).append(result)
        between = sum(len(part) * (float(np.mean(part)) - float(results.mean())) ** 2 for part in values.values())
        effects.append(Effect(tuple(names), between / total if total > 0.0 else 0.0, values))
    return sorted(effects, key=lambda effect: -effect.share)


def _interval(resampled: Callable[[int], np.ndarray], values: int, level: float, resamples: int) -> tuple[float, float]:
    """Quantiles of a statistic of resamples; ``resampled(n)`` returns n of these, each of ``values`` numbers."""
    chunk = max(1, _CHUNK_VALUES // values)
    parts = [resampled(min(chunk, resamples - start)) for start in range(0, resamples, chunk)]
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(np.concatenate(parts), [tail, 1.0 - tail])
    return float(low), float(high)
