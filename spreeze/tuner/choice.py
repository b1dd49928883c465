"""Choosing among settings: the best score, ties to what is configured, then to the smaller and plainer."""
from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spreeze.tuner.candidates import Room, ratio_bound, ratio_options, sampler_grid
from spreeze.tuner.model import Kind, Sharing
from spreeze.tuner.objective import joint_score
from spreeze.tuner.problem import JointRate, JointSetting, TuningProblem

TIE = 0.03
"""Scores this near to the best one count as equal to it."""
_CPU_ERROR = 1e-6
_OVER_TARGET = 1e-3
"""What a setting over the processor target keeps of its score: it is taken only where nothing else is."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A setting with its score; higher is better."""

    setting: JointSetting
    score: float
    updates_per_s: float
    env_steps_per_s: float


def worth(
    knobs: TuningProblem, setting: JointSetting, updates_per_s: float, env_steps_per_s: float, cpu_share: float | None
) -> Scored:
    """Score of a setting from its rates, the learner held to the upper bound of samples per insert."""
    batch = setting.learner.batch_size
    updates = min(updates_per_s, ratio_bound(knobs, batch) * env_steps_per_s / batch)
    score = joint_score(knobs.targets.objective, batch, updates, env_steps_per_s)
    if knobs.targets.objective == "paper" and setting.samplers > 1:
        share = cpu_share
        if share is None:
            share = (setting.samplers + setting.learner.threads) / knobs.cores
        if share > knobs.targets.cpu_target + _CPU_ERROR:
            score *= _OVER_TARGET
    return Scored(setting=setting, score=score, updates_per_s=updates, env_steps_per_s=env_steps_per_s)


def measured_worth(knobs: TuningProblem, rate: JointRate) -> Scored:
    """Score of what was measured; 0 for a failed candidate."""
    return worth(knobs, rate.setting, rate.update_median, rate.env_median, rate.cpu_median)


def expected_worth(knobs: TuningProblem, sharing: Sharing, setting: JointSetting) -> Scored:
    """Score that the model expects of a setting."""
    found = sharing.forecast(setting)
    return worth(knobs, setting, found.updates_per_s, found.env_steps_per_s, found.cpu_share)


def all_settings(
    knobs: TuningProblem, room: Room, sharing: Sharing, sizes: Mapping[Kind, Sequence[int]]
) -> list[JointSetting]:
    """Every setting that may be chosen: each kind of learner with its batch sizes, samplers and ratios."""
    return [
        JointSetting(
            learner=curve.setting(batch), samplers=samplers, envs_per_sampler=room.envs_per_sampler.value,
            samples_per_insert_min=ratio,
        )
        for kind, curve in sharing.curves.items()
        for batch in sizes.get(kind, ())
        for samplers in sampler_grid(knobs, room, kind[2])
        for ratio in ratio_options(knobs, batch)
    ]


def pick(knobs: TuningProblem, scored: Iterable[Scored], tie: float = TIE) -> Scored:
    """The best setting; among those within ``tie`` of it the one nearest to what is configured."""
    found = list(scored)
    best = max(one.score for one in found)
    return min((one for one in found if one.score >= best * (1.0 - tie)), key=lambda one: _preference(knobs, one))


def _preference(knobs: TuningProblem, one: Scored) -> tuple[float, ...]:
    setting, configured = one.setting, knobs.configured
    learner = setting.learner
    device = next((i for i, entry in enumerate(knobs.devices) if entry.name == learner.device), 0)
    precisions = knobs.devices[device].precisions
    precision = precisions.index(learner.precision) if learner.precision in precisions else 0
    low, start = setting.samples_per_insert_min, configured.samples_per_insert_min
    moved = abs(math.log(low / start)) if low > 0 and start > 0 else 0.0
    return (precision, learner.batch_size != configured.batch_size, learner.batch_size, learner.threads,
            round(moved, 6), setting.samplers, device, -one.score)


_MODEL_ERROR = 0.06
"""Relative error of a ratio of two expected scores, at least; twice the measurements' error where that is more."""
_LEAST_ERROR = 0.01
_MEDIAN_OVER_MEAN = 1.25
"""Standard error of a median over that of a mean, of normal values."""


def bayes_update(
    knobs: TuningProblem,
    rates: Sequence[JointRate],
    here: JointRate,
    expected: Mapping[JointSetting, Scored],
    error: float,
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


def _log_ratios(knobs: TuningProblem, rate: JointRate, here: JointRate) -> list[float]:
    """Of the turns in which both made updates and env steps."""
    own, other = _turn_scores(knobs, rate), _turn_scores(knobs, here)
    return [_log(a, b) for a, b in zip(own, other, strict=False) if a > 0.0 and b > 0.0]


def _turn_scores(knobs: TuningProblem, rate: JointRate) -> list[float]:
    shares = rate.cpu_share or (None,) * len(rate.updates_per_s)
    return [worth(knobs, rate.setting, updates, steps, share).score
            for updates, steps, share in zip(rate.updates_per_s, rate.env_steps_per_s, shares, strict=False)]


def _log(score: float, other: float) -> float:
    return math.log(score / other) if score > 0.0 and other > 0.0 else 0.0
