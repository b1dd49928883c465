"""Rows of figures: metric, unit, value, repeats and labels, and how they are printed."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np

Row = dict[str, Any]


def row(metric: str, unit: str, repeats: list[Any], **more: Any) -> Row:
    """A figure: the median of its known repeats, and what else is known of it."""
    known = [value for value in repeats if value is not None]
    return {
        "metric": metric,
        "unit": unit,
        "value": statistics.median(known) if known else None,
        "repeats": repeats,
        **{key: value for key, value in more.items() if value is not None},
    }


def row_of_reached(metric: str, unit: str, repeats: list[Any], **more: Any) -> Row:
    """A figure of runs that may not get there, which are None: they count as above all others in the median.

    So the median is None where it is theirs. ``reached`` says how many got there.
    """
    middle = statistics.median([math.inf if value is None else value for value in repeats]) if repeats else math.inf
    return {
        **row(metric, unit, repeats, reached=sum(value is not None for value in repeats), **more),
        "value": middle if math.isfinite(middle) else None,
    }


def slope_row(name: str, times: list[float], values: list[float], target: str | None) -> Row:
    """Least-squares slope in per cent of the mean an hour, with its standard error; ``times`` in seconds."""
    hours, seen = np.array(times) / 3600.0, np.array(values)
    (slope, _), covariance = np.polyfit(hours - hours[0], seen, 1, cov=True)
    percent = 100.0 / float(seen.mean())
    return {
        "metric": f"{name}_slope",
        "value": percent * float(slope),
        "unit": "%/h",
        "target": target,
        "standard_error": percent * float(np.sqrt(covariance[0, 0])),
        "first": values[0],
        "last": values[-1],
    }


def line(row: Row) -> str:
    """A row as one line for a person."""
    known = ("metric", "value", "unit", "repeats", "target")
    labels = [f"{key} {_short(value)}" for key, value in row.items() if key not in known and value != []]
    repeats = [value for value in row["repeats"] if isinstance(value, int | float)]
    count = f"n={len(repeats)}" + (f" of {len(row['repeats'])}" if len(repeats) < len(row["repeats"]) else "")
    several = repeats and len(row["repeats"]) > 1
    spread = f"  [{_short(min(repeats))} .. {_short(max(repeats))}, {count}]" if several else ""
    target = f"  target {row['target']}" if row.get("target") else ""
    text = f"  {row['metric']:44s} {_short(row['value']):>10s} {row['unit']:10s}{spread}{target}"
    return text + (f"  ({', '.join(labels)})" if labels else "")


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
