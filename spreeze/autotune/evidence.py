"""What the model expected and what was measured, weighed by how far each can be trusted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from spreeze.autotune.pick import Scored, worth
from spreeze.autotune.records import JointRate, JointSetting, Knobs

_MODEL_ERROR = 0.06
"""Relative error of a ratio of two expected scores, at least; twice the measurements' error where that is more."""
_LEAST_ERROR = 0.01
_MEDIAN_OVER_MEAN = 1.25
"""Standard error of a median over that of a mean, of normal values."""


def log_gains(
    knobs: Knobs, rates: Sequence[JointRate], here: JointRate, expected: Mapping[JointSetting, Scored], error: float
) -> dict[JointSetting, float]:
    """Log of each setting's score over that of ``here``, as it is to be believed.

    All were measured in turns, so what slowed one turn slowed all: the ratio of two scores is taken turn by
    turn, and scatters less than either. Prior and measurement are weighed by the inverse squares of their errors.

    Args:
        knobs: the objective and its bounds.
        rates: measured in the same turns as ``here``, without failures.
        here: what they are compared with.
        expected: scores of the model.
        error: relative standard error of a median that the model was fitted to.
    """
    logs = {rate.setting: _log_ratios(knobs, rate, here) for rate in rates if rate.setting != here.setting}
    scatter = [statistics.pstdev(values) for values in logs.values() if len(values) > 1]
    sigma = statistics.median(scatter) if scatter else error
    model_error = max(_MODEL_ERROR, 2.0 * error)
    found: dict[JointSetting, float] = {}
    for setting, values in logs.items():
        if not values:
            continue
        own = max(_LEAST_ERROR, _MEDIAN_OVER_MEAN * sigma / math.sqrt(len(values)))
        trust = model_error**2 / (model_error**2 + own**2)
        prior = _log(expected[setting].score, expected[here.setting].score)
        found[setting] = trust * statistics.median(values) + (1.0 - trust) * prior
    return found


def _log_ratios(knobs: Knobs, rate: JointRate, here: JointRate) -> list[float]:
    """Of the turns in which both made updates and env steps."""
    own, other = _turn_scores(knobs, rate), _turn_scores(knobs, here)
    return [_log(a, b) for a, b in zip(own, other, strict=False) if a > 0.0 and b > 0.0]


def _turn_scores(knobs: Knobs, rate: JointRate) -> list[float]:
    shares = rate.cpu_share or (None,) * len(rate.updates_per_s)
    return [worth(knobs, rate.setting, updates, steps, share).score
            for updates, steps, share in zip(rate.updates_per_s, rate.env_steps_per_s, shares, strict=False)]


def _log(score: float, other: float) -> float:
    return math.log(score / other) if score > 0.0 and other > 0.0 else 0.0


