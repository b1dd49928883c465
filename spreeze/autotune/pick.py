"""Choosing among settings: the best score, ties to what is configured, then to the smaller and plainer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spreeze.autotune.capacity import Room
from spreeze.autotune.cost import Kind
from spreeze.autotune.options import ratio_bound, ratio_options, sampler_grid
from spreeze.autotune.records import JointRate, JointSetting, Knobs
from spreeze.autotune.scores import joint_score
from spreeze.autotune.sharing import Sharing

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
    knobs: Knobs, setting: JointSetting, updates_per_s: float, env_steps_per_s: float, cpu_share: float | None
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


def measured_worth(knobs: Knobs, rate: JointRate) -> Scored:
    """Score of what was measured; 0 for a failed candidate."""
    return worth(knobs, rate.setting, rate.update_median, rate.env_median, rate.cpu_median)


def expected_worth(knobs: Knobs, sharing: Sharing, setting: JointSetting) -> Scored:
    """Score that the model expects of a setting."""
    found = sharing.forecast(setting)
    return worth(knobs, setting, found.updates_per_s, found.env_steps_per_s, found.cpu_share)


def all_settings(
    knobs: Knobs, room: Room, sharing: Sharing, sizes: Mapping[Kind, Sequence[int]]
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


def pick(knobs: Knobs, scored: Iterable[Scored], tie: float = TIE) -> Scored:
    """The best setting; among those within ``tie`` of it the one nearest to what is configured."""
    found = list(scored)
    best = max(one.score for one in found)
    return min((one for one in found if one.score >= best * (1.0 - tie)), key=lambda one: _preference(knobs, one))


def _preference(knobs: Knobs, one: Scored) -> tuple[float, ...]:
    setting, configured = one.setting, knobs.configured
    learner = setting.learner
    device = next((i for i, entry in enumerate(knobs.devices) if entry.name == learner.device), 0)
    precisions = knobs.devices[device].precisions
    precision = precisions.index(learner.precision) if learner.precision in precisions else 0
    low, start = setting.samples_per_insert_min, configured.samples_per_insert_min
    moved = abs(math.log(low / start)) if low > 0 and start > 0 else 0.0
    return (precision, learner.batch_size != configured.batch_size, learner.batch_size, learner.threads,
            round(moved, 6), setting.samplers, device, -one.score)
