"""The band of samples per insert: never moved in silence."""

from __future__ import annotations

from spreeze.autotune.joint import Joint
from spreeze.autotune.options import UPDATES_PER_STEP_BOUND, ratio_bound
from spreeze.autotune.pick import expected_worth
from spreeze.autotune.records import Choice, JointSetting, Knobs

_ROOM = 2.0
"""The upper bound is this many times what was measured, so that the learner is not held back by chance."""


def lower(knobs: Knobs, joint: Joint) -> Choice:
    """Samples per insert below which the samplers wait."""
    low = joint.chosen.setting.samples_per_insert_min
    if knobs.pins.samples_per_insert_min is not None:
        return Choice(low, f"samplers wait below {low:g} samples per insert: set by you", pinned=True)
    if low == knobs.configured.samples_per_insert_min:
        return Choice(low, f"samplers wait below {low:g} samples per insert: as configured")
    return Choice(low, f"samplers wait below {low:g} samples per insert: {_gain(knobs, joint)}")


def _gain(knobs: Knobs, joint: Joint) -> str:
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


def upper(knobs: Knobs, joint: Joint, low: float, limits: list[str]) -> Choice:
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


def notes(knobs: Knobs, low: Choice, high: Choice, joint: Joint) -> list[str]:
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
