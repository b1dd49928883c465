"""The two constants of the tuner's score, fitted to counted training runs, and how well they predict others.

Model: ``updates = N0(task) (1 + B0 / B) (1 + u / R)``, B the batch size, u the updates per env step. A run
that was given up counts as "at least that many": it only errs if the model says fewer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

Record = dict[str, Any]
_BATCHES = [2.0 ** (k / 4) for k in range(0, 41)]
_RATIOS = [2.0 ** (k / 4) for k in range(-16, 25)]


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
        Point(*key, statistics.median(float(r["updates"]) for r in group),
              2 * sum(bool(r["reached"]) for r in group) > len(group))
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


def fit(found: Sequence[Point]) -> Fit:
    """Least squares of the logarithms over a grid of a quarter of an octave."""
    def error(b0: float, r0: float) -> float:
        return sum(value * value for value in residuals(found, b0, r0))

    b0, r0 = min(((b, r) for b in _BATCHES for r in _RATIOS), key=lambda pair: error(*pair))
    return Fit(b0, r0, math.exp(math.sqrt(error(b0, r0) / len(found))))


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
        result[task] = (constants, math.exp(math.sqrt(statistics.mean(e * e for e in errors))),
                        rank_correlation(predicted, [p.updates for p in own]))
    return result


def fit_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The fit as rows of a bench."""
    found = points(records)
    whole = fit(found)
    rows: list[dict[str, Any]] = [
        {"metric": "batch_constant", "value": whole.batch_constant, "unit": "rows", "settings": len(found),
         "runs": len(records)},
        {"metric": "ratio_constant", "value": whole.ratio_constant, "unit": "updates/env step"},
        {"metric": "typical_factor", "value": whole.typical_factor, "unit": "ratio"},
    ]
    for task, (constants, factor, correlation) in left_out(found).items():
        rows += [
            {"metric": "left_out_factor", "value": factor, "unit": "ratio", "env": task,
             "batch_constant": constants.batch_constant, "ratio_constant": constants.ratio_constant},
            {"metric": "left_out_rank_correlation", "value": correlation, "unit": "Spearman", "env": task},
        ]
    return rows
