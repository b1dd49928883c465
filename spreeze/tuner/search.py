"""The whole choice: facts, learners alone, samplers beside the learner, neighbours, answer."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spreeze.errors import ConfigError, WorkerError
from spreeze.tuner.candidates import (
    LEAST_BATCH,
    UPDATES_PER_STEP_BOUND,
    Room,
    check_pins,
    find_room,
    ratio_bound,
    sampler_ladder,
)
from spreeze.tuner.choice import Scored, all_settings, bayes_update, expected_worth, measured_worth, pick
from spreeze.tuner.learner_search import Learners, measure_learners
from spreeze.tuner.model import CostCurve, Kind, Sharing, fit_sharing, kind_of, noise
from spreeze.tuner.objective import FORMULAS, learner_score, paper_batch
from spreeze.tuner.problem import Choice, JointRate, JointSetting, LearnerRate, Measure, Row, Tuning, TuningProblem

LEARNER_SHARE, SWEEP_SHARE = 0.45, 0.5
"""Share of the budget for learners alone, and share of what is left then for the number of samplers."""
_RUNNERS = 3

Say = Callable[[Row], None]


def tune(knobs: TuningProblem, measure: Measure, say: Say) -> Tuning:
    """Measures and chooses within the budget; ``say`` is told each row as it is measured.

    Raises:
        ConfigError: a pinned value cannot work, or memory has no room; the message names the limit.
        WorkerError: nothing could be measured.
    """
    check_pins(knobs)
    room = find_room(knobs)
    keep_s = measure.seconds_left() * (1.0 - LEARNER_SHARE)
    learners = measure_learners(knobs, room, measure, lambda rate: say(_learner_row(knobs, rate)), keep_s)
    joint = measure_joint(knobs, room, learners, measure, lambda rate: say(_joint_row(knobs, rate)),
                          measure.seconds_left() * SWEEP_SHARE)
    return _answer(knobs, room, learners, joint)


def _learner_row(knobs: TuningProblem, rate: LearnerRate) -> Row:
    score = learner_score(knobs.targets.objective, rate.setting.batch_size, rate.median)
    return Row(setting=rate.setting, updates_per_s=rate.median or None, spread=rate.spread,
               score=None if rate.failure else score, failure=rate.failure)


def _joint_row(knobs: TuningProblem, rate: JointRate) -> Row:
    return Row(
        setting=rate.setting, updates_per_s=rate.update_median or None, env_steps_per_s=rate.env_median or None,
        spread=rate.spread, cpu_share=rate.cpu_median, failure=rate.failure,
        score=None if rate.failure else measured_worth(knobs, rate).score,
    )  # fmt: skip


def _answer(knobs: TuningProblem, room: Room, learners: Learners, joint: JointMeasurement) -> Tuning:
    setting = joint.chosen.setting
    curve = learners.curves[kind_of(setting.learner)]
    limits = [*learners.limits, *joint.limits]
    low = lower_band(knobs, joint)
    low = dataclasses.replace(low, runners_up=_runners_up(knobs, joint, "samples_per_insert_min"))
    high = upper_band(knobs, joint, low.value, limits)
    learner = setting.learner
    choices = {
        "learner.device": _plain(learner.device, f"learner on {learner.device}", knobs.pins.device,
                                 _learner_runners(knobs, joint, "device"), len(knobs.devices) == 1),
        "learner.precision": _plain(learner.precision, f"learner in {learner.precision}", knobs.pins.precision,
                                    _learner_runners(knobs, joint, "precision"),
                                    all(len(device.precisions) == 1 for device in knobs.devices)),
        "learner.batch_size": _batch(knobs, joint),
        "learner.threads": _plain(learner.threads, f"{learner.threads} learner thread{_s(learner.threads)}",
                                  knobs.pins.threads, _learner_runners(knobs, joint, "threads"), knobs.cores < 2),
        "sampling.samplers": _samplers(knobs, joint),
        "sampling.envs_per_sampler": room.envs_per_sampler,
        "replay.capacity": room.capacity,
        "replay.samples_per_insert_min": low,
        "replay.samples_per_insert_max": high,
    }
    notes = [*band_notes(knobs, low, high, joint), *(f"checked with its neighbours: {one}" for one in joint.moved)]
    if not joint.measured:
        notes.append("the chosen setting itself was not measured: its rates are the model's")
    return Tuning(
        choices=choices, objective=knobs.targets.objective, formula=FORMULAS[knobs.targets.objective],
        learner_rates=learners.rates, joint_rates=joint.rates, cost=(curve.a, curve.b) if curve.fitted else None,
        paper_batch=_paper_batch(curve, learners, knobs.targets.gpu_target),
        limits=tuple(dict.fromkeys(limits)), notes=tuple(notes),
    )


def _paper_batch(curve: CostCurve, learners: Learners, gpu_target: float) -> int | None:
    """The paper's rule, or None where the cost of a row is lost in the noise: the rule divides by it."""
    largest = max((one.setting.batch_size for one in learners.rates if kind_of(one.setting) == curve.kind), default=0)
    if not curve.fitted or curve.b * largest < learners.error * curve.a:
        return None
    return paper_batch(curve.a, curve.b, gpu_target)


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _plain(
    value: str | int, what: str, pin: str | int | None, runners: tuple[tuple[str | int, float], ...], only: bool
) -> Choice:
    """Choice of a knob whose reason is its score against the others."""
    if pin is not None:
        return Choice(value, f"{what}: set by you", pinned=True, runners_up=runners)
    if not runners:
        return Choice(value, f"{what}: {'no other is offered' if only else 'no other was better alone'}")
    return Choice(value, f"{what}: {_against(runners)}", runners_up=runners)


def _against(runners: tuple[tuple[str | int, float], ...]) -> str:
    if not runners:
        return "nothing else was possible"
    others = ", ".join(f"{value}: {100 * share:.0f} %" for value, share in runners)
    return f"best score, ties to what is configured and plainer ({others})"


def _learner_runners(knobs: TuningProblem, joint: JointMeasurement, name: str) -> tuple[tuple[str | int, float], ...]:
    """Other values of one field of the learner, each with its best expected score."""
    here = getattr(joint.chosen.setting.learner, name)
    return _ranked(knobs, joint, [(getattr(one.learner, name), one) for one in joint.expected
                                  if getattr(one.learner, name) != here])


def _runners_up(knobs: TuningProblem, joint: JointMeasurement, name: str) -> tuple[tuple[str | int, float], ...]:
    """Other values of one knob with all others as chosen."""
    chosen = joint.chosen.setting
    return _ranked(knobs, joint, [
        (getattr(one, name), one) for one in joint.expected
        if one != chosen and one.learner == chosen.learner
        and dataclasses.replace(one, **{name: getattr(chosen, name)}) == chosen
    ])


def _ranked(
    knobs: TuningProblem, joint: JointMeasurement, others: list[tuple[str | int, JointSetting]]
) -> tuple[tuple[str | int, float], ...]:
    """(value, expected score over that of the choice), best first."""
    own = expected_worth(knobs, joint.sharing, joint.chosen.setting).score
    best: dict[str | int, float] = {}
    for value, setting in others:
        share = joint.expected[setting].score / own if own > 0 else 0.0
        best[value] = max(best.get(value, 0.0), share)
    return tuple(sorted(best.items(), key=lambda one: -one[1])[:_RUNNERS])


def _batch(knobs: TuningProblem, joint: JointMeasurement) -> Choice:
    """Reason of the batch size."""
    batch, updates = joint.chosen.setting.learner.batch_size, joint.chosen.updates_per_s
    runners = tuple(one for one in _learner_runners(knobs, joint, "batch_size"))
    what = f"batch {batch}: {updates:.0f} updates/s beside the samplers"
    if knobs.pins.batch_size is not None:
        return Choice(batch, f"{what}, set by you", pinned=True)
    if knobs.targets.objective == "paper":
        return Choice(batch, f"{what}; smallest power of two with {100 * knobs.targets.gpu_target:.0f} % of the "
                             "highest frame rate", runners_up=runners)
    if knobs.targets.objective in ("sampling", "updates"):
        return Choice(batch, f"{what}; the configured batch, which this objective keeps")
    why = "the configured batch, and none is clearly better" if batch == knobs.configured.batch_size else "best score"
    others = ", ".join(f"{value}: {100 * share:.0f} %" for value, share in runners)
    why += f" ({others})" if others else ""
    if batch == LEAST_BATCH:
        why += f"; below {LEAST_BATCH} it takes none unless you set one: smaller batches learned less in the same time"
    return Choice(batch, f"{what}; {why}", runners_up=runners)


def _samplers(knobs: TuningProblem, joint: JointMeasurement) -> Choice:
    """Reason of the number of samplers."""
    count = joint.chosen.setting.samplers
    runners = _runners_up(knobs, joint, "samplers")
    what = (f"{count} sampler{_s(count)}: {joint.chosen.env_steps_per_s:.0f} env steps/s beside "
            f"{joint.chosen.updates_per_s:.0f} updates/s")
    if knobs.pins.samplers is not None:
        return Choice(count, f"{what}, set by you", pinned=True)
    others = ", ".join(f"{value}: {100 * share:.0f} %" for value, share in runners)
    why = f"; scores of others: {others}" if others else f"; {knobs.cores:g} usable cores and memory allow no more"
    return Choice(count, what + why, runners_up=runners)


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
class JointMeasurement:
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
    knobs: TuningProblem, room: Room, learners: Learners, measure: Measure, on_rate: OnRate, sweep_s: float
) -> JointMeasurement:
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


def _nothing_ran(knobs: TuningProblem, rates: Sequence[JointRate]) -> Exception:
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

    knobs: TuningProblem
    sharing: Sharing
    expected: dict[JointSetting, Scored]
    rates: list[JointRate]
    limits: list[str]
    error: float
    """Relative standard error of a median."""


def _check(search: _Search, measure: Measure, on_rate: OnRate) -> JointMeasurement:
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
    return JointMeasurement(rates=tuple(search.rates), sharing=search.sharing, expected=search.expected,
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
    gains = bayes_update(search.knobs, good, here, search.expected, search.error)
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


_ROOM = 2.0
"""The upper bound is this many times what was measured, so that the learner is not held back by chance."""


def lower_band(knobs: TuningProblem, joint: JointMeasurement) -> Choice:
    """Samples per insert below which the samplers wait."""
    low = joint.chosen.setting.samples_per_insert_min
    if knobs.pins.samples_per_insert_min is not None:
        return Choice(low, f"samplers wait below {low:g} samples per insert: set by you", pinned=True)
    if low == knobs.configured.samples_per_insert_min:
        return Choice(low, f"samplers wait below {low:g} samples per insert: as configured")
    return Choice(low, f"samplers wait below {low:g} samples per insert: {_gain(knobs, joint)}")


def _gain(knobs: TuningProblem, joint: JointMeasurement) -> str:
    setting = joint.chosen.setting
    before = expected_worth(knobs, joint.sharing, _with_ratio(setting, knobs.configured.samples_per_insert_min))
    after = expected_worth(knobs, joint.sharing, setting)
    return (f"updates {_percent(after.updates_per_s, before.updates_per_s)}, env steps "
            f"{_percent(after.env_steps_per_s, before.env_steps_per_s)} against "
            f"{knobs.configured.samples_per_insert_min:g}")


def _with_ratio(setting: JointSetting, ratio: float) -> JointSetting:
    return JointSetting(learner=setting.learner, samplers=setting.samplers,
                        envs_per_sampler=setting.envs_per_sampler, samples_per_insert_min=ratio)


def _percent(after: float, before: float) -> str:
    return f"{100.0 * (after / before - 1.0):+.0f} %" if before > 0 else "new"


def upper_band(knobs: TuningProblem, joint: JointMeasurement, low: float, limits: list[str]) -> Choice:
    """Samples per insert above which the learner waits; raised where it would wait at the measured rates."""
    batch = joint.chosen.setting.learner.batch_size
    configured = max(knobs.configured.samples_per_insert_max, low)
    if knobs.pins.samples_per_insert_max is not None:
        high = knobs.pins.samples_per_insert_max
        return Choice(high, f"the learner waits above {high:g} samples per insert: set by you", pinned=True)
    rates = expected_worth(knobs, joint.sharing, joint.chosen.setting) if not joint.measured else joint.chosen
    ratio = rates.updates_per_s * batch / rates.env_steps_per_s if rates.env_steps_per_s > 0 else 0.0
    if _ROOM * ratio <= configured:
        return Choice(configured, f"the learner waits above {configured:g} samples per insert: as configured, "
                                  f"{ratio:.3g} were measured")
    bound = ratio_bound(knobs, batch)
    high = max(configured, min(_ROOM * ratio, bound))
    if high >= bound > configured:
        limits.append(f"the learner may draw {bound:g} samples per insert, {UPDATES_PER_STEP_BOUND:g} updates per env "
                      "step, and waits above")
    return Choice(float(round(high)), f"the learner waits above {high:.0f} samples per insert: {ratio:.3g} were "
                                      f"measured, {configured:g} would hold it back")


def band_notes(knobs: TuningProblem, low: Choice, high: Choice, joint: JointMeasurement) -> list[str]:
    """What changes in the algorithm."""
    found = []
    if not low.pinned and low.value != knobs.configured.samples_per_insert_min:
        found.append(
            f"samples per insert at least {low.value:g} instead of {knobs.configured.samples_per_insert_min:g} "
            f"({_gain(knobs, joint)}): each transition is drawn at least {low.value:g} times on average"
        )
    if not high.pinned and high.value > knobs.configured.samples_per_insert_max:
        found.append(
            f"samples per insert up to {high.value:g} instead of {knobs.configured.samples_per_insert_max:g}: "
            f"up to {high.value / joint.chosen.setting.learner.batch_size:.1f} updates per env step"
        )
    return found
