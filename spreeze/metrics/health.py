"""Judgements on the health of a run's learning, as pure functions of its newest metrics.

Each is *good*, *amber* or *unknown*, with one sentence on the reason and, if it is amber, the remedy. A rule is amber
only where its sentence is true for every task.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from spreeze.formatting import DASH, number, percent, signed
from spreeze.metrics.recorded_episodes import can_fall

SETTLED_UPDATES = 20_000
"""Updates after which values are judged: 1 / (tau (1 - gamma)) with tau = 0.005 and gamma = 0.99, in which an error of
a value falls to about a third. Values start at 0."""
MAX_BIAS = 0.5  # bias of a value as a share of the return's size
MAX_AT_BOUND = 0.8
LARGEST_UPDATE, MIN_UPDATE = 5e-2, 1e-7
MAX_DEAD = 0.9
MAX_FALLS = 0.5


class Health(StrEnum):
    GOOD = "good"
    AMBER = "amber"
    UNKNOWN = "unknown"


class Judgement(NamedTuple):
    label: str
    value: str  # the number with its unit; a dash if it is unknown
    level: Health
    sentence: str
    metric: str  # the metric whose chart shows more


def judgements(values: Mapping[str, float], env_id: object = None, gamma: float | None = None) -> list[Judgement]:
    """Judgements on the newest ``values`` of a run, metric by metric, of task ``env_id``, with discount ``gamma``.

    One without a value is left out after the first evaluation: it does not apply to the run's task or networks.
    """
    found = [
        Judgement("Value bias", *_bias(values, gamma), "eval_start_value"),
        _fraction(
            values,
            "Actions at bound",
            "eval_actions_at_bound",
            MAX_AT_BOUND,
            "of the action's numbers are at a bound",
            ", where little gradient passes; if the return stands still, lower the actor's learning rate or explore "
            "more",
            "it comes with an evaluation whose episodes are kept, where actions are numbers",
        ),
        Judgement("Update size", *_update(values.get("update_size")), "update_size"),
        _fraction(
            values,
            "Dead units",
            "dead_units",
            MAX_DEAD,
            "of the hidden units are 0 on the whole batch",
            ", and no gradient revives them; start again with a lower learning rate, layer normalization or another "
            "activation",
            "only hidden units with ReLU can be dead, and some networks do not tell",
        ),
        _terminated(values, falls=can_fall(env_id)),
    ]
    evaluated = "eval_terminated" in values
    return [judgement for judgement in found if judgement.value != DASH or not evaluated]


def _terminated(values: Mapping[str, float], *, falls: bool) -> Judgement:
    """Termination may be a fall, a success or neither: its meaning is known only for robots that can fall."""
    judgement = _fraction(
        values,
        "Terminated",
        "eval_terminated",
        MAX_FALLS,
        "of the evaluation's episodes terminated before their time limit"
        + ("" if falls else "; whether that is good depends on the task"),
        ": the robot falls; a click on the return shows how the worst one fell; train on" if falls else "",
        "it comes with an evaluation",
    )
    return judgement if falls else judgement._replace(level=Health.UNKNOWN)


_Verdict = tuple[str, Health, str]


def _unknown(sentence: str) -> _Verdict:
    return DASH, Health.UNKNOWN, sentence


def _fraction(
    values: Mapping[str, float], label: str, metric: str, limit: float, fact: str, amber: str, unknown: str
) -> Judgement:
    """A fraction that is amber above ``limit``: its sentence continues with ``fact``, then with ``amber``."""
    value = values.get(metric)
    if value is None:
        return Judgement(label, *_unknown(f"Unknown: {unknown}."), metric)
    good = value <= limit
    sentence = f"{percent(value)} {fact}{'' if good else amber}."
    return Judgement(label, percent(value), Health.GOOD if good else Health.AMBER, sentence, metric)


def _entropy_bonus(values: Mapping[str, float], gamma: float | None) -> float:
    """Discounted rewards of entropy that the value of SAC includes beside the return; 0 for other algorithms."""
    names = ("alpha", "entropy", "eval_length")
    alpha, entropy, length = (values.get(name) for name in names)
    if alpha is None or entropy is None or length is None or gamma is None:
        return 0.0
    steps = length if gamma == 1.0 else (1.0 - gamma**length) / (1.0 - gamma)
    return alpha * entropy * steps * values.get("return_scale", 1.0)


def _bias(values: Mapping[str, float], gamma: float | None) -> _Verdict:
    value, actual = values.get("eval_start_value"), values.get("eval_discounted_return")
    if value is None or actual is None:
        return _unknown(
            "Unknown: it comes with an evaluation. Not for policies on images or with memory, whose inputs kept "
            "episodes do not hold, nor for custom networks."
        )
    bias = value - actual
    text = signed(bias)
    fact = f"The value at the start is {number(value)}, the discounted return that came {number(actual)}"
    # A return near 0 has no scale of its own: the scale of the rewards replaces it.
    size = max(abs(actual), values.get("return_scale", 0.0))
    if abs(bias) <= MAX_BIAS * size:
        near = "less than half of it apart" if abs(bias) <= MAX_BIAS * abs(actual) else (
            f"little apart beside the scale of the rewards, {number(size)}"
        )  # fmt: skip
        return text, Health.GOOD, f"{fact}: {near}, as is usual."
    if values.get("updates", 0.0) < SETTLED_UPDATES:
        return text, Health.UNKNOWN, f"{fact}: far apart, as is usual before update {SETTLED_UPDATES:,}."
    bonus = _entropy_bonus(values, gamma)
    if abs(bias - bonus) <= MAX_BIAS * size:
        sentence = f"{fact}: it includes rewards of entropy, worth {number(bonus)}, which explain the difference."
        return text, Health.GOOD, sentence
    if bias > 0.0:
        remedy = "lower the learning rate or the samples per insert, or use layer normalization in the critics"
        return text, Health.AMBER, f"{fact}: it is overestimated; {remedy}."
    remedy = "train on, and if it stays, check whether rewards are rare or far larger than the reward scale"
    return text, Health.AMBER, f"{fact}: it is underestimated; {remedy}."


def _update(size: float | None) -> _Verdict:
    if size is None:
        return _unknown("Unknown: it comes seconds after the first update.")
    text = f"{size:.1e}"
    fact = f"An update changes the parameters by {text} of their norm"
    if size > LARGEST_UPDATE:
        return text, Health.AMBER, f"{fact}: too much to be stable; lower the learning rate."
    if size < MIN_UPDATE:
        return text, Health.AMBER, f"{fact}: next to nothing is learned; raise the learning rate, or end the run."
    return text, Health.GOOD, f"{fact}."
