"""Stages 2 and 3: samplers raised beside the learner, then the neighbours of the choice measured with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spreeze.autotune.batch import Learners
from spreeze.autotune.capacity import Room
from spreeze.autotune.cost import Kind, kind_of, noise
from spreeze.autotune.evidence import log_gains
from spreeze.autotune.options import sampler_ladder
from spreeze.autotune.pick import Scored, all_settings, expected_worth, measured_worth, pick
from spreeze.autotune.records import JointRate, JointSetting, Knobs, Measure
from spreeze.autotune.sharing import Sharing, fit_sharing
from spreeze.errors import ConfigError, WorkerError

_MOST_NEIGHBOURS = 4
_LEAST_GAIN = 0.05
_PROMISING, _PROMISING_RIVAL = 0.85, 0.6
"""Neighbours expected below this share of the choice are not measured; other kinds of learner, below the second."""
_SAME = 0.002
"""Settings whose expected rates differ by less are one and the same: a bound that does not bind."""
_ROUNDS = 3
_LEAST_S = 4.0
"""A round of joint measurements is not begun with less time than this."""

OnRate = Callable[[JointRate], None]
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Joint:
    """What is known after stages 2 and 3."""

    rates: tuple[JointRate, ...]
    sharing: Sharing
    expected: Mapping[JointSetting, Scored]
    """The model's forecast of everything that could be chosen."""
    chosen: Scored
    measured: bool
    """False if the chosen setting itself was not measured."""
    moved: tuple[str, ...]
    """How the check of the neighbours changed the choice."""
    limits: tuple[str, ...]


def measure_joint(
    knobs: Knobs, room: Room, learners: Learners, measure: Measure, on_rate: OnRate, sweep_s: float
) -> Joint:
    """Measures samplers beside the best learner, forecasts every setting, and checks the best one's neighbours.

    Raises:
        ConfigError: what the user pinned cannot run.
        WorkerError: nothing could.
    """
    ladder = [
        JointSetting(learner=learners.first, samplers=count, envs_per_sampler=room.envs_per_sampler.value,
                     samples_per_insert_min=0.0)
        for count in sampler_ladder(knobs, room, learners.first.threads)
    ]
    sweep = measure.joint(ladder, within_s=max(sweep_s, 1.0), on_rate=on_rate)
    good = [rate for rate in sweep if not rate.failure and rate.update_median > 0 and rate.env_median > 0]
    if sweep and not good:
        raise _nothing_ran(knobs, sweep)
    error = max(learners.error, noise(values for rate in good for values in (rate.updates_per_s, rate.env_steps_per_s)))
    sharing = fit_sharing(knobs, learners.curves, good, error)
    # Never more busy threads than ran together.
    busy = max((rate.setting.samplers for rate in good), default=1) + learners.first.threads
    settings = [one for one in all_settings(knobs, room, sharing, learners.sizes)
                if one.samplers + one.learner.threads <= busy or one.samplers in (1, knobs.pins.samplers)]
    settings = _without_failed(settings, sweep)
    limits = [f"{rate.setting.samplers} samplers: {rate.failure}" for rate in sweep if rate.failure]
    if not sweep:
        limits.append("time was up before samplers could be measured: chosen from the facts")
    expected = {one: expected_worth(knobs, sharing, one) for one in settings}
    return _check(_Search(knobs, sharing, expected, list(sweep), limits, error), measure, on_rate)


def _nothing_ran(knobs: Knobs, rates: Sequence[JointRate]) -> Exception:
    reasons = "; ".join(sorted({rate.failure or "no env step or no update" for rate in rates}))
    if knobs.pins.samplers is not None:
        return ConfigError(f"sampling.samplers = {knobs.pins.samplers} cannot work here: {reasons}; set another")
    return WorkerError(f"tuning failed: samplers could not be measured beside the learner: {reasons}")


def _without_failed(settings: Sequence[JointSetting], sweep: Sequence[JointRate]) -> list[JointSetting]:
    """Without the numbers of samplers from the first that failed on, as long as any is left."""
    failed = min((rate.setting.samplers for rate in sweep if rate.failure), default=None)
    left = [one for one in settings if failed is None or one.samplers < failed]
    return left or list(settings)


@dataclass
class _Search:
    """The state of stage 3."""

    knobs: Knobs
    sharing: Sharing
    expected: dict[JointSetting, Scored]
    rates: list[JointRate]
    limits: list[str]
    error: float
    """Relative standard error of a median."""


def _check(search: _Search, measure: Measure, on_rate: OnRate) -> Joint:
    """Hill-climbing from the expected best, by gains as model and measurement together tell them."""
    known: dict[JointSetting, Scored] = {}
    chosen = pick(search.knobs, search.expected.values())
    moved: list[str] = []
    cost_s = _LEAST_S
    for _ in range(_ROUNDS):
        left = measure.seconds_left()
        if left < cost_s:
            if not known:
                search.limits.append("time was up before the neighbours of the choice were measured")
            break
        wanted = [chosen.setting, *_neighbours(search, chosen.setting, known)]
        if len(wanted) == 1 and chosen.setting in known:
            break
        found = measure.joint(wanted, within_s=left - 1.0, on_rate=on_rate)
        cost_s = max(_LEAST_S, left - measure.seconds_left())
        search.rates += found
        failed = {rate.setting for rate in found if rate.failure or rate.update_median <= 0}
        search.expected = {one: score for one, score in search.expected.items() if one not in failed} or search.expected
        now = {rate.setting: measured_worth(search.knobs, rate) for rate in found if rate.setting not in failed}
        known.update(now)
        before, chosen = chosen, _next(search, chosen, found, now, failed)
        if chosen.setting == before.setting:
            break
        moved.append(_move_text(before, chosen))
    return Joint(rates=tuple(search.rates), sharing=search.sharing, expected=search.expected,
                 chosen=known.get(chosen.setting, chosen), measured=chosen.setting in known, moved=tuple(moved),
                 limits=tuple(dict.fromkeys(search.limits)))


def _next(
    search: _Search, chosen: Scored, found: Sequence[JointRate], now: Mapping[JointSetting, Scored],
    failed: set[JointSetting],
) -> Scored:
    """The setting to go on with after a round."""
    search.limits += [f"{_text(rate.setting)}: {rate.failure or 'no updates'}"
                      for rate in found if rate.setting in failed]
    if chosen.setting in failed:
        ran = max((rate.setting.samplers for rate in search.rates if not rate.failure), default=1)
        left = [score for one, score in search.expected.items()
                if _no_larger(one, chosen.setting) and one.samplers <= ran] or list(search.expected.values())
        return max(now.values(), key=lambda one: one.score, default=None) or pick(search.knobs, left)
    if chosen.setting not in now:
        return chosen
    good = [rate for rate in found if rate.setting in now]
    here = next(rate for rate in good if rate.setting == chosen.setting)
    gains = log_gains(search.knobs, good, here, search.expected, search.error)
    best = max(gains, key=lambda one: gains[one], default=chosen.setting)
    return now[best] if gains.get(best, 0.0) > math.log1p(_LEAST_GAIN) else now[chosen.setting]


def _no_larger(one: JointSetting, other: JointSetting) -> bool:
    return one != other and one.learner.batch_size <= other.learner.batch_size and one.samplers <= other.samplers


def _neighbours(search: _Search, centre: JointSetting, known: Mapping[JointSetting, Scored]) -> list[JointSetting]:
    """The most promising settings that differ in one knob by one step and were not measured yet.

    Of each other kind of learner it is the one expected to be the best: the model knows kinds apart least well.
    """
    here = search.expected.get(centre)
    around = {dataclasses.replace(centre, **change): _PROMISING for change in _changes(list(search.expected), centre)}
    around |= dict.fromkeys(_rivals(search, centre), _PROMISING_RIVAL)
    promising = [search.expected[one] for one, share in around.items() if one in search.expected and one not in known
                 and (here is None or _differs(search.expected[one], here, share))]
    promising.sort(key=lambda one: (-one.score, one.setting))
    return [one.setting for one in promising[:_MOST_NEIGHBOURS]]


def _differs(one: Scored, here: Scored, share: float) -> bool:
    """Whether a setting is promising and not the same as the choice in all but name."""
    rates = (one.updates_per_s, here.updates_per_s), (one.env_steps_per_s, here.env_steps_per_s)
    same = all(abs(a - b) <= _SAME * b for a, b in rates) and one.setting.learner == here.setting.learner
    return one.score >= share * here.score and not same


def _rivals(search: _Search, centre: JointSetting) -> set[JointSetting]:
    """The best expected setting of each other kind of learner."""
    best: dict[Kind, Scored] = {}
    for score in search.expected.values():
        kind = kind_of(score.setting.learner)
        if kind != kind_of(centre.learner) and (kind not in best or score.score > best[kind].score):
            best[kind] = score
    return {score.setting for score in best.values()}


def _changes(settings: Sequence[JointSetting], centre: JointSetting) -> list[dict[str, Any]]:
    """The next smaller and the next larger value of each knob."""
    learner = centre.learner
    same = [one.learner for one in settings
            if dataclasses.replace(one.learner, batch_size=learner.batch_size) == learner]
    steps: list[dict[str, Any]] = [
        {"learner": dataclasses.replace(learner, batch_size=batch)}
        for batch in _beside(learner.batch_size, [one.batch_size for one in same])
    ]
    steps += [{"samplers": count} for count in _beside(centre.samplers, [one.samplers for one in settings])]
    ratios = [one.samples_per_insert_min for one in settings if one.learner == learner]
    steps += [{"samples_per_insert_min": ratio} for ratio in _beside(centre.samples_per_insert_min, ratios)]
    return steps


def _beside(value: _Number, values: Sequence[_Number]) -> list[_Number]:
    below = [one for one in values if one < value]
    above = [one for one in values if one > value]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def _text(setting: JointSetting) -> str:
    return (f"batch {setting.learner.batch_size} with {setting.samplers} samplers at "
            f">= {setting.samples_per_insert_min:g} samples per insert")


def _move_text(before: Scored, after: Scored) -> str:
    if before.score <= 0:
        return f"{_text(after.setting)} in place of {_text(before.setting)}"
    return f"{_text(after.setting)} measured better than {_text(before.setting)}"
