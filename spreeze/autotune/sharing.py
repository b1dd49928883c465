"""Learner and samplers on the same cores: a model, corrected by what was measured together.

With n samplers of duty d and a learner of L threads, k = n d + L threads are busy. Up to the physical
cores all run at full speed; SMT siblings add ``_SMT`` of a core each; beyond the usable cores all get
their share. Where samples per insert keep the samplers waiting, d = u B / (s n e), with u updates/s
and e env steps/s of one sampler at full speed: the share of the cores cancels out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spreeze.autotune.cost import Curve, Kind, beyond_noise, kind_of
from spreeze.autotune.records import JointRate, JointSetting, Knobs, median

_SMT = 0.3
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
class Sharing:
    """The model with its measured constants."""

    cores: float
    physical: float
    curves: Mapping[Kind, Curve]
    env_rate: float
    """Env steps/s of one sampler that has a core."""
    together: float
    """Updates/s beside samplers that have cores of their own, over updates/s alone."""
    excess: tuple[tuple[float, float, float, float], ...]
    """(busy threads, log excess of updates/s, of env steps/s, excess share of the cores), by busy threads."""

    def forecast(self, setting: JointSetting) -> Forecast:
        """Rates of a setting whose learner was measured alone."""
        learner = setting.learner
        alone = self.together * self.curves[kind_of(learner)].updates_per_s(learner.batch_size)
        full = setting.samplers * self.env_rate
        duty = 1.0
        if setting.samples_per_insert_min > 0.0 and full > 0.0:
            duty = min(1.0, alone * learner.batch_size / (setting.samples_per_insert_min * full))
        busy = setting.samplers * duty + learner.threads
        share = speed(busy, self.cores, self.physical)
        updates, steps, cpu = self._excess_at(busy)
        found = duty * full * share * math.exp(steps)
        rate = alone * share * math.exp(updates)
        if setting.samples_per_insert_min > 0.0:
            found = min(found, rate * learner.batch_size / setting.samples_per_insert_min)
        return Forecast(updates_per_s=rate, env_steps_per_s=found,
                        cpu_share=min(1.0, max(0.0, busy / self.cores + cpu)))

    def _excess_at(self, busy: float) -> tuple[float, float, float]:
        """Interpolated between the measured numbers of busy threads, held outside of them."""
        if not self.excess:
            return 0.0, 0.0, 0.0
        if busy <= self.excess[0][0]:
            # Fewer busy threads than ever measured: whatever they do to each other fades with them.
            return self.excess[0][1], self.excess[0][2], self.excess[0][3]
        for low, high in zip(self.excess, self.excess[1:], strict=False):
            if busy <= high[0]:
                part = (busy - low[0]) / (high[0] - low[0])
                first, second, third = (low[i] + part * (high[i] - low[i]) for i in (1, 2, 3))
                return first, second, third
        return self.excess[-1][1], self.excess[-1][2], self.excess[-1][3]


def physical_cores(knobs: Knobs) -> float:
    """Cores of their own behind the usable ones, the user's share taken off."""
    return min(knobs.cores, knobs.physical_cores or knobs.cores)


def fit_sharing(knobs: Knobs, curves: Mapping[Kind, Curve], rates: Sequence[JointRate], error: float) -> Sharing:
    """Constants of the model from samplers that ran unthrottled beside one learner.

    Args:
        knobs: for the cores.
        curves: the learners measured alone.
        rates: joint rates, failures among them or not; at least one good.
        error: relative standard error of a median.
    """
    cores, physical = knobs.cores, physical_cores(knobs)
    good = sorted((rate for rate in rates if not rate.failure and rate.update_median > 0),
                  key=lambda rate: rate.setting.samplers)
    roomy = [rate for rate in good if _busy(rate) <= physical] or good[:1]
    env_rate = median([rate.env_median / rate.setting.samplers / speed(_busy(rate), cores, physical)
                       for rate in roomy])
    together = median([rate.update_median / _alone(rate, curves) / speed(_busy(rate), cores, physical)
                       for rate in roomy])
    excess = []
    for rate in good:
        share = speed(_busy(rate), cores, physical)
        updates = _log(rate.update_median, together * _alone(rate, curves) * share)
        steps = _log(rate.env_median, rate.setting.samplers * env_rate * share)
        cpu = 0.0
        if rate.cpu_median is not None:
            off = rate.cpu_median - min(1.0, _busy(rate) / cores)
            cpu = math.copysign(max(0.0, abs(off) - _SHARE_ERROR), off)
        excess.append((_busy(rate), beyond_noise(updates, error), beyond_noise(steps, error), cpu))
    return Sharing(cores=cores, physical=physical, curves=curves, env_rate=env_rate, together=together,
                   excess=tuple(excess))


def _busy(rate: JointRate) -> float:
    return float(rate.setting.samplers + rate.setting.learner.threads)


def _alone(rate: JointRate, curves: Mapping[Kind, Curve]) -> float:
    learner = rate.setting.learner
    return curves[kind_of(learner)].updates_per_s(learner.batch_size)


def _log(measured: float, expected: float) -> float:
    return math.log(measured / expected) if measured > 0.0 and expected > 0.0 else 0.0
