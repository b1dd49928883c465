"""The whole choice: facts, learners alone, samplers beside the learner, neighbours, answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from spreeze.autotune import band
from spreeze.autotune.batch import Learners, measure_learners
from spreeze.autotune.capacity import Room, find_room
from spreeze.autotune.cost import Curve, kind_of
from spreeze.autotune.joint import Joint, measure_joint
from spreeze.autotune.options import LEAST_BATCH, check_pins
from spreeze.autotune.pick import expected_worth, measured_worth
from spreeze.autotune.records import Choice, JointRate, JointSetting, Knobs, LearnerRate, Measure, Row, Tuning
from spreeze.autotune.scores import FORMULAS, learner_score, paper_batch

LEARNER_SHARE, SWEEP_SHARE = 0.45, 0.5
"""Share of the budget for learners alone, and share of what is left then for the number of samplers."""
_RUNNERS = 3

Say = Callable[[Row], None]


def tune(knobs: Knobs, measure: Measure, say: Say) -> Tuning:
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


def _learner_row(knobs: Knobs, rate: LearnerRate) -> Row:
    score = learner_score(knobs.targets.objective, rate.setting.batch_size, rate.median)
    return Row(setting=rate.setting, updates_per_s=rate.median or None, spread=rate.spread,
               score=None if rate.failure else score, failure=rate.failure)


def _joint_row(knobs: Knobs, rate: JointRate) -> Row:
    return Row(
        setting=rate.setting, updates_per_s=rate.update_median or None, env_steps_per_s=rate.env_median or None,
        spread=rate.spread, cpu_share=rate.cpu_median, failure=rate.failure,
        score=None if rate.failure else measured_worth(knobs, rate).score,
    )  # fmt: skip


def _answer(knobs: Knobs, room: Room, learners: Learners, joint: Joint) -> Tuning:
    setting = joint.chosen.setting
    curve = learners.curves[kind_of(setting.learner)]
    limits = [*learners.limits, *joint.limits]
    low = band.lower(knobs, joint)
    low = dataclasses.replace(low, runners_up=_runners_up(knobs, joint, "samples_per_insert_min"))
    high = band.upper(knobs, joint, low.value, limits)
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
    notes = [*band.notes(knobs, low, high, joint), *(f"checked with its neighbours: {one}" for one in joint.moved)]
    if not joint.measured:
        notes.append("the chosen setting itself was not measured: its rates are the model's")
    return Tuning(
        choices=choices, objective=knobs.targets.objective, formula=FORMULAS[knobs.targets.objective],
        learner_rates=learners.rates, joint_rates=joint.rates, cost=(curve.a, curve.b) if curve.fitted else None,
        paper_batch=_paper_batch(curve, learners, knobs.targets.gpu_target),
        limits=tuple(dict.fromkeys(limits)), notes=tuple(notes),
    )


def _paper_batch(curve: Curve, learners: Learners, gpu_target: float) -> int | None:
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


def _learner_runners(knobs: Knobs, joint: Joint, name: str) -> tuple[tuple[str | int, float], ...]:
    """Other values of one field of the learner, each with its best expected score."""
    here = getattr(joint.chosen.setting.learner, name)
    return _ranked(knobs, joint, [(getattr(one.learner, name), one) for one in joint.expected
                                  if getattr(one.learner, name) != here])


def _runners_up(knobs: Knobs, joint: Joint, name: str) -> tuple[tuple[str | int, float], ...]:
    """Other values of one knob with all others as chosen."""
    chosen = joint.chosen.setting
    return _ranked(knobs, joint, [
        (getattr(one, name), one) for one in joint.expected
        if one != chosen and one.learner == chosen.learner
        and dataclasses.replace(one, **{name: getattr(chosen, name)}) == chosen
    ])


def _ranked(
    knobs: Knobs, joint: Joint, others: list[tuple[str | int, JointSetting]]
) -> tuple[tuple[str | int, float], ...]:
    """(value, expected score over that of the choice), best first."""
    own = expected_worth(knobs, joint.sharing, joint.chosen.setting).score
    best: dict[str | int, float] = {}
    for value, setting in others:
        share = joint.expected[setting].score / own if own > 0 else 0.0
        best[value] = max(best.get(value, 0.0), share)
    return tuple(sorted(best.items(), key=lambda one: -one[1])[:_RUNNERS])


def _batch(knobs: Knobs, joint: Joint) -> Choice:
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


def _samplers(knobs: Knobs, joint: Joint) -> Choice:
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
