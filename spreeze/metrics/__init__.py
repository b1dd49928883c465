"""Metrics of a run: table, storage, and analysis."""

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


def student_quantile(normal: float, degrees: int) -> float:
    """Quantile of Student's distribution with ``degrees`` of freedom, from that of the normal distribution.

    Expansion in 1 / degrees (Abramowitz and Stegun 26.7.5), four terms: the 97.5 % quantile is 11 % too small with one
    degree of freedom, 1 % with two, right to four digits from nine on.
    """
    z = normal
    terms = (
        (z**3 + z) / 4.0,
        (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0,
        (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0,
        (79.0 * z**9 + 776.0 * z**7 + 1482.0 * z**5 - 1920.0 * z**3 - 945.0 * z) / 92160.0,
    )
    return float(z + sum(term / degrees**power for power, term in enumerate(terms, 1)))
