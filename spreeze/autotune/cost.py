"""The cost of an update, ``t(B) = a + b B``, and how much of a measurement is noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spreeze.autotune.records import LearnerRate, LearnerSetting

_LEAST_NOISE, _MOST_NOISE = 0.01, 0.15
_RANGE_TO_SIGMA = {2: 1.13, 3: 1.69, 4: 2.06, 5: 2.33}
"""Expected range of n normal values in standard deviations."""
BELIEF = 2.0
"""A deviation from the model below this many standard errors is taken for noise."""

Kind = tuple[str, str, int]
"""(device, precision, threads) of a learner."""


def kind_of(setting: LearnerSetting) -> Kind:
    """What the settings of one curve share."""
    return setting.device, setting.precision, setting.threads


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Time of an update over the batch size, for one kind of learner."""

    kind: Kind
    a: float
    """Seconds of an update whatever its batch."""
    b: float
    """Seconds that each row adds."""
    excess: Mapping[int, float]
    """Batch size -> log of measured over fitted time, as far as it is beyond noise."""
    fitted: bool
    """False with only one batch size: ``a`` then is its time and ``b`` zero."""

    def update_s(self, batch_size: int) -> float:
        """Smoothed time of an update."""
        return (self.a + self.b * batch_size) * math.exp(self.excess.get(batch_size, 0.0))

    def updates_per_s(self, batch_size: int) -> float:
        """Smoothed updates a second."""
        return 1.0 / self.update_s(batch_size)

    def setting(self, batch_size: int) -> LearnerSetting:
        """The learner setting at a batch size."""
        device, precision, threads = self.kind
        return LearnerSetting(batch_size=batch_size, threads=threads, device=device, precision=precision)


def noise(repeats: Iterable[Sequence[float]]) -> float:
    """Relative standard error of a median of repeats, pooled over candidates."""
    sigmas = []
    count = 3
    for values in repeats:
        if len(values) > 1 and min(values) > 0:
            factor = _RANGE_TO_SIGMA.get(len(values), math.sqrt(2.0 * math.log(len(values))) + 0.5)
            sigmas.append(math.log(max(values) / min(values)) / factor)
            count = len(values)
    sigma = statistics.fmean(sorted(sigmas)[: max(1, math.ceil(0.8 * len(sigmas)))]) if sigmas else 0.03
    return min(max(sigma, _LEAST_NOISE), _MOST_NOISE) * 1.25 / math.sqrt(count)


def beyond_noise(log_ratio: float, error: float) -> float:
    """What is left of a deviation when the part that noise explains is taken off (soft threshold)."""
    return math.copysign(max(0.0, abs(log_ratio) - BELIEF * error), log_ratio)


def fit_cost(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Least squares of ``t(B) = a + b B`` with weights 1/t^2 (relative errors), a and b not negative.

    Args:
        points: (batch size, seconds of an update).

    Returns:
        (a, b) in seconds, or None with fewer than two batch sizes.
    """
    if len({batch for batch, _ in points}) < 2:
        return None
    s_w = sum(1 / t**2 for _, t in points)
    s_x = sum(batch / t**2 for batch, t in points)
    s_xx = sum(batch**2 / t**2 for batch, t in points)
    s_y = sum(1 / t for _, t in points)
    s_xy = sum(batch / t for batch, t in points)
    b = (s_w * s_xy - s_x * s_y) / (s_w * s_xx - s_x**2)
    a = (s_y - b * s_x) / s_w
    if a <= 0.0:
        a, b = 0.0, s_xy / s_xx
    if b <= 0.0:
        a, b = s_y / s_w, 0.0
    return a, max(b, 1e-12)


def fit_curve(rates: Sequence[LearnerRate], error: float) -> Curve | None:
    """Curve of one kind of learner; None if not one of its candidates ran."""
    points = [(rate.setting.batch_size, 1.0 / rate.median) for rate in rates if rate.median > 0]
    if not points:
        return None
    kind = kind_of(rates[0].setting)
    found = fit_cost(points)
    if found is None:
        return Curve(kind=kind, a=points[0][1], b=0.0, excess={}, fitted=False)
    a, b = found
    # Two points lie on any line: only a third can tell a deviation.
    over = {batch: math.log(t / (a + b * batch)) for batch, t in points} if len(points) > 2 else {}
    excess = {batch: beyond_noise(log_ratio, error) for batch, log_ratio in over.items()}
    return Curve(kind=kind, a=a, b=b, excess=excess, fitted=True)
