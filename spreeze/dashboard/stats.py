"""Curves of several runs together: mean or interquartile mean over runs, with bootstrap bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spreeze.protocol import bootstrap_interval, running_mean
from spreeze.store import Evaluation

RESAMPLES = 1000
SMOOTHING = 3
"""Evaluations of one run that are averaged (a median would hide a collapse, one alone is noisy)."""


class Band(NamedTuple):
    """A curve and its 95 % interval over K common points; arrays are float64 [K], nan where unknown."""

    x: np.ndarray
    centre: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: np.ndarray
    """How many runs reach that point."""


def on_grid(curves: Sequence[Sequence[Evaluation]], axis: str, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Curves as steps on one grid: x [K], values [runs, K]; nan before a run's first and after its last point.

    Args:
        curves: the evaluations of each run, oldest first.
        axis: field of ``Evaluation`` that is the horizontal axis: t, env_steps or updates.
        points: K.
    """
    columns = [[(float(getattr(e, axis)), e.return_mean) for e in curve] for curve in curves]
    end = max((column[-1][0] for column in columns if column), default=0.0)
    x = np.linspace(0.0, end, points)
    values = np.full((len(curves), points), np.nan)
    for row, column in zip(values, columns, strict=True):
        if column:
            at, returns = (np.array(part, dtype=np.float64) for part in zip(*column, strict=True))
            index = np.searchsorted(at, x, side="right") - 1
            row[:] = np.where(index >= 0, returns[np.maximum(index, 0)], np.nan)
            row[x > at[-1]] = np.nan
    return x, values


def iqm(values: np.ndarray) -> np.ndarray:
    """Interquartile mean over the first axis, [R, ...] -> [...]: the mean of the middle half.

    Agarwal et al. 2021 (arXiv 2108.13264): steadier than the mean, less wasteful than the median.
    """
    ordered = np.sort(values, axis=0)
    count = len(ordered)
    cut = count // 4
    return np.asarray(ordered[cut : count - cut].mean(axis=0))


def band(x: np.ndarray, values: np.ndarray, robust: bool, seed: int = 0) -> Band:
    """Mean or interquartile mean over runs with a percentile bootstrap over runs; values [runs, K]."""
    centre = np.full(len(x), np.nan)
    low, high = centre.copy(), centre.copy()
    counts = np.isfinite(values).sum(axis=0)
    for k in np.flatnonzero(counts):
        column = values[np.isfinite(values[:, k]), k]
        centre[k] = iqm(column) if robust else column.mean()
        if len(column) > 1:
            drawn = (lambda rows: iqm(rows.T)) if robust else None
            low[k], high[k] = bootstrap_interval(column, resamples=RESAMPLES, seed=seed, centre=drawn)
    return Band(x, centre, low, high, counts)


def smoothed(curve: Sequence[Evaluation]) -> list[Evaluation]:
    """Each return replaced by the mean of it and the evaluations just before (``SMOOTHING`` in all)."""
    means = running_mean(curve, SMOOTHING)
    return [record._replace(return_mean=mean) for record, mean in zip(curve, means, strict=True)]
