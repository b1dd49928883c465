"""What repeated measurements of one rate say: their middle, and how far they lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    """Median of the repeats; 0 without any."""
    return statistics.median(values) if values else 0.0


def spread(values: Sequence[float]) -> float | None:
    """(greatest - least) / median of the repeats; None with fewer than two."""
    middle = median(values)
    return (max(values) - min(values)) / middle if len(values) > 1 and middle > 0 else None
