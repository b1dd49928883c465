"""The metrics of a run: their meaning, their storage, and conclusions from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    """Median; 0 without any values."""
    return statistics.median(values) if values else 0.0


def spread(values: Sequence[float]) -> float | None:
    """(largest - smallest) / median; None with fewer than two values."""
    middle = median(values)
    return (max(values) - min(values)) / middle if len(values) > 1 and middle > 0 else None
