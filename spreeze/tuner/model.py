"""The cost of an update, ``t(B) = a + b B``, and how much of a measurement is noise."""
from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spreeze.tuner.problem import JointRate, JointSetting, LearnerRate, LearnerSetting, TuningProblem

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
class CostCurve:
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


def fit_curve(rates: Sequence[LearnerRate], error: float) -> CostCurve | None:
    """Curve of one kind of learner; None if not one of its candidates ran."""
    points = [(rate.setting.batch_size, 1.0 / rate.median) for rate in rates if rate.median > 0]
    if not points:
        return None
    kind = kind_of(rates[0].setting)
    found = fit_cost(points)
    if found is None:
        return CostCurve(kind=kind, a=points[0][1], b=0.0, excess={}, fitted=False)
    a, b = found
    # Two points lie on any line: only a third can tell a deviation.
    over = {batch: math.log(t / (a + b * batch)) for batch, t in points} if len(points) > 2 else {}
    excess = {batch: beyond_noise(log_ratio, error) for batch, log_ratio in over.items()}
    return CostCurve(kind=kind, a=a, b=b, excess=excess, fitted=True)


_SMT = 0.3
_PER_THREAD, _CROWDED = 0.01, 0.2
"""Sizes of the trends that are expected: log rate lost to each busy thread, and where threads outnumber cores."""
_SHARE_ERROR = 0.05
"""A measured share of the cores this near to the model's is not told from it."""


def speed(busy: float, cores: float, physical: float) -> float:
    """Speed of each of ``busy`` threads, 1 for a thread alone on a core."""
    if busy <= 0.0:
        return 1.0
    fast = min(busy, physical, cores)
    return min(1.0, (fast + _SMT * max(0.0, min(busy, cores) - fast)) / busy)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a setting is expected to do."""

    updates_per_s: float
    env_steps_per_s: float
    cpu_share: float


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Log of a measured rate over the model's: ``level + per_thread k + crowded max(0, k / physical - 1)``.

    ``rest`` is what single measurements leave beyond noise, (k, log) by k.
    """

    level: float = 0.0
    per_thread: float = 0.0
    crowded: float = 0.0
    rest: tuple[tuple[float, float], ...] = ()

    def factor(self, busy: float, physical: float) -> float:
        """What to multiply the model's rate with."""
        crowd = max(0.0, busy / physical - 1.0)
        return math.exp(self.level + self.per_thread * busy + self.crowded * crowd + _between(self.rest, busy))


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The model with its measured constants."""

    cores: float
    physical: float
    curves: Mapping[Kind, CostCurve]
    learner: Trend
    """Updates/s against those of the learner alone."""
    sampler: Trend
    """Env steps/s of one sampler."""
    cpu_excess: tuple[tuple[float, float], ...] = ()
    """(busy threads, measured share of the cores less the model's), by busy threads."""

    def forecast(self, setting: JointSetting) -> Forecast:
        """Rates of a setting whose learner was measured alone."""
        learner, ratio = setting.learner, setting.samples_per_insert_min
        alone = self.curves[kind_of(learner)].updates_per_s(learner.batch_size)
        quiet = float(learner.threads)
        full = setting.samplers * self.sampler.factor(quiet + 1.0, self.physical)
        duty = 1.0
        if ratio > 0.0 and full > 0.0:
            duty = min(1.0, alone * self.learner.factor(quiet, self.physical) * learner.batch_size / (ratio * full))
        busy = setting.samplers * duty + quiet
        share = speed(busy, self.cores, self.physical)
        updates = alone * share * self.learner.factor(busy, self.physical)
        steps = setting.samplers * duty * share * self.sampler.factor(busy, self.physical)
        if ratio > 0.0:
            steps = min(steps, updates * learner.batch_size / ratio)
        cpu = busy / self.cores + _between(self.cpu_excess, busy)
        return Forecast(updates_per_s=updates, env_steps_per_s=steps, cpu_share=min(1.0, max(0.0, cpu)))


def _between(table: Sequence[tuple[float, float]], at: float) -> float:
    """Linear interpolation, held outside of the table; 0 for an empty one."""
    if not table:
        return 0.0
    if at <= table[0][0]:
        return table[0][1]
    for (low, first), (high, second) in pairwise(table):
        if at <= high:
            return first + (second - first) * (at - low) / (high - low)
    return table[-1][1]


def physical_cores(knobs: TuningProblem) -> float:
    """Cores of their own behind the usable ones, the user's share taken off."""
    return min(knobs.cores, knobs.physical_cores or knobs.cores)


def fit_sharing(
    knobs: TuningProblem, curves: Mapping[Kind, CostCurve], rates: Sequence[JointRate], error: float
) -> Sharing:
    """Constants of the model from samplers that ran unthrottled beside one learner.

    Args:
        knobs: for the cores, and for the step time where nothing was measured.
        curves: the learners measured alone.
        rates: good joint rates; none if there was no time.
        error: relative standard error of a median.
    """
    cores, physical = knobs.cores, physical_cores(knobs)
    good = sorted(rates, key=lambda rate: rate.setting.samplers)
    if not good:
        guess = Trend(level=math.log(1e6 / knobs.step_us if knobs.step_us else 1000.0))
        return Sharing(cores=cores, physical=physical, curves=curves, learner=Trend(), sampler=guess)
    learner, sampler, cpu = [], [], []
    for rate in good:
        busy = float(rate.setting.samplers + rate.setting.learner.threads)
        share = speed(busy, cores, physical)
        setting = rate.setting.learner
        alone = curves[kind_of(setting)].updates_per_s(setting.batch_size)
        learner.append((busy, math.log(rate.update_median / (alone * share))))
        sampler.append((busy, math.log(rate.env_median / (rate.setting.samplers * share))))
        if rate.cpu_median is not None:
            off = rate.cpu_median - min(1.0, busy / cores)
            cpu.append((busy, math.copysign(max(0.0, abs(off) - _SHARE_ERROR), off)))
    return Sharing(cores=cores, physical=physical, curves=curves, learner=fit_trend(learner, physical, error),
                   sampler=fit_trend(sampler, physical, error), cpu_excess=tuple(cpu))


def fit_trend(points: Sequence[tuple[float, float]], physical: float, error: float) -> Trend:
    """Ridge regression: the trend stays zero where few or noisy points do not ask for one.

    Args:
        points: (busy threads, log of measured over modelled rate), by busy threads, at least one.
        physical: cores of their own.
        error: standard error of each.
    """
    level = math.fsum(value for _, value in points) / len(points)
    rows = [((1.0, busy, max(0.0, busy / physical - 1.0)), value - level) for busy, value in points]
    ridge = [0.0, *((error / scale) ** 2 for scale in (_PER_THREAD, _CROWDED))]
    matrix = [[math.fsum(x[i] * x[j] for x, _ in rows) + (ridge[i] if i == j else 0.0) for j in range(3)]
              + [math.fsum(x[i] * y for x, y in rows)] for i in range(3)]
    shift, per_thread, crowded = _solved(matrix)
    found = Trend(level=level + shift, per_thread=per_thread, crowded=crowded)
    rest = [(busy, beyond_noise(value - math.log(found.factor(busy, physical)), error)) for busy, value in points]
    return dataclasses.replace(found, rest=tuple(rest) if any(value for _, value in rest) else ())


def _solved(matrix: list[list[float]]) -> list[float]:
    """Solution of three linear equations, positive definite, the right side as last column (Gauss)."""
    for i in range(3):
        matrix[i] = [value / matrix[i][i] for value in matrix[i]]
        for j in range(3):
            if j != i:
                matrix[j] = [x - matrix[j][i] * y for x, y in zip(matrix[j], matrix[i], strict=True)]
    return [row[3] for row in matrix]
