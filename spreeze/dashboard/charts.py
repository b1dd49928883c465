"""The charts of the Live page as the table of metrics has them, published scores, and curves over several runs."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from spreeze.metrics.hts_metrics import bootstrap_interval, running_mean
from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.table import GROUPS, RETURN, TABLE, Metric, MetricTable

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
"""Okabe and Ito (2008): told apart with any colour vision."""


_MOST_PARTS = 8


def drawn(table: MetricTable = TABLE) -> list[Metric]:
    """The metrics that the Live page draws, by groups of charts."""
    order = {group: rank for rank, group in enumerate((RETURN, *GROUPS))}
    found = [(order[metric.chart.group], metric) for metric in table.metrics if metric.chart]
    return [metric for _, metric in sorted(found, key=lambda entry: entry[0])]


def as_json(lag_unit: str, table: MetricTable = TABLE) -> list[dict[str, Any]]:
    """The charts with a sentence for each, for the page's script; that of the returns is its own.

    Args:
        lag_unit: depends on the algorithm: updates, or intervals of those without replay.
        table: each row says where it is drawn.
    """
    charts: dict[str, dict[str, Any]] = {}
    for metric in drawn(table):
        chart = metric.chart
        if chart is None or chart.group == RETURN:
            continue
        unit = lag_unit if metric.name == "policy_lag" else chart.unit or metric.unit
        card = charts.setdefault(chart.key, {
            "key": chart.key, "title": chart.title, "unit": unit, "series": (), "group": chart.group,
            "scale": chart.scale, "part": metric.parts or "group", "help": "",
        })
        card["series"] += metric.series
        card["help"] = f"{card['help']} {metric.sentence}".strip()
    return list(charts.values())


def wanted(names: list[str], table: MetricTable = TABLE) -> list[str]:
    """Those of ``names`` that some chart shows, of each metric at most eight parts or groups."""
    found: list[str] = []
    for metric in drawn(table):
        found += [name for name in names if name == metric.name and not metric.parts]
        found += [name for name in names if name.startswith(f"{metric.name}/")][:_MOST_PARTS]
    return found


SOURCE = (
    "RL Baselines3 Zoo, benchmark.md (github.com/DLR-RM/rl-baselines3-zoo): mean return of its trained agent over "
    "150,000 env steps; one training run each, tuned settings"
)


class Published(NamedTuple):
    """A published mean return and the env steps it took to train."""

    value: float
    env_steps: int

    @property
    def label(self) -> str:
        """Legend of its line."""
        steps = f"{self.env_steps // 1_000_000} M" if self.env_steps >= 1_000_000 else f"{self.env_steps // 1000}k"
        return f"RL Baselines3 Zoo after {steps} env steps: {self.value:g}"


PUBLISHED: dict[tuple[str, str], Published] = {
    ("sac", "AntBulletEnv-v0"): Published(3073.1, 1_000_000),
    ("sac", "BipedalWalker-v3"): Published(297.7, 500_000),
    ("sac", "HalfCheetahBulletEnv-v0"): Published(2792.2, 1_000_000),
    ("sac", "HopperBulletEnv-v0"): Published(2603.5, 1_000_000),
    ("sac", "LunarLanderContinuous-v2"): Published(260.4, 500_000),
    ("sac", "MountainCarContinuous-v0"): Published(94.7, 50_000),
    ("sac", "Pendulum-v1"): Published(-157.0, 20_000),
    ("sac", "ReacherBulletEnv-v0"): Published(18.1, 300_000),
    ("sac", "Walker2DBulletEnv-v0"): Published(2292.3, 1_000_000),
    ("td3", "AntBulletEnv-v0"): Published(3300.0, 1_000_000),
    ("td3", "BipedalWalker-v3"): Published(306.0, 1_000_000),
    ("td3", "HalfCheetahBulletEnv-v0"): Published(2821.6, 1_000_000),
    ("td3", "HopperBulletEnv-v0"): Published(2681.6, 1_000_000),
    ("td3", "MountainCarContinuous-v0"): Published(93.5, 300_000),
    ("td3", "Pendulum-v1"): Published(-151.9, 20_000),
    ("td3", "ReacherBulletEnv-v0"): Published(17.1, 300_000),
    ("td3", "Walker2DBulletEnv-v0"): Published(2213.7, 1_000_000),
    ("ddpg", "AntBulletEnv-v0"): Published(2399.1, 1_000_000),
    ("ddpg", "BipedalWalker-v3"): Published(197.5, 1_000_000),
    ("ddpg", "HalfCheetahBulletEnv-v0"): Published(2078.3, 1_000_000),
    ("ddpg", "HopperBulletEnv-v0"): Published(1157.1, 1_000_000),
    ("ddpg", "MountainCarContinuous-v0"): Published(93.5, 300_000),
    ("ddpg", "Pendulum-v1"): Published(-152.1, 20_000),
    ("ddpg", "ReacherBulletEnv-v0"): Published(15.6, 300_000),
    ("ddpg", "Walker2DBulletEnv-v0"): Published(1387.6, 1_000_000),
}
"""(algorithm, task) -> what the source lists."""


def published(algo: str | None, env_id: str | None) -> Published | None:
    """What is published for a task and an algorithm, or None."""
    return PUBLISHED.get((algo or "", env_id or ""))


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


def on_grid(curves: Sequence[Sequence[EvaluationRow]], axis: str, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Curves as steps on one grid: x [K], values [runs, K]; nan before a run's first and after its last point.

    Args:
        curves: the evaluations of each run, oldest first.
        axis: field of ``EvaluationRow`` that is the horizontal axis: t, env_steps or updates.
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


def smoothed(curve: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """Each return replaced by the mean of it and the evaluations just before (``SMOOTHING`` in all)."""
    means = running_mean(curve, SMOOTHING)
    return [record._replace(return_mean=mean) for record, mean in zip(curve, means, strict=True)]
