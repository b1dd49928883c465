"""Judgements on the health of a run's learning, and possible reasons why a return differs from an earlier one.

A judgement on the newest metrics is *good*, *amber* or *unknown*, with one sentence on the reason and, if it is amber,
the remedy. A rule is amber only where its sentence is true for every task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spreeze.formatting import DASH, duration, number, percent, signed, whole
from spreeze.metrics.recorded_episodes import Recording, can_fall
from spreeze.metrics.stop_conditions import RUN_ENDS
from spreeze.metrics.store import EvaluationRow, Event, MetricsReader, Series
from spreeze.metrics.table import TABLE

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
            ", where little gradient passes; if the return stagnates, lower the actor's learning rate or explore more",
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
            "only hidden units with ReLU can be dead, and some networks do not report it",
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
    fact = f"The value at the start is {number(value)}, the actual discounted return {number(actual)}"
    # A return near 0 has no scale of its own: the scale of the rewards replaces it.
    size = max(abs(actual), values.get("return_scale", 0.0))
    if abs(bias) <= MAX_BIAS * size:
        near = f"little apart beside the scale of the rewards, {number(size)}"
        if abs(bias) <= MAX_BIAS * abs(actual):
            share = abs(bias / actual) if actual else 0.0
            near = f"apart by {percent(share)}, of which {percent(MAX_BIAS)} and less count as good"
        return text, Health.GOOD, f"{fact}: {near}."
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


# --- a return that differs ---

_LATEST = 6  # Evaluations before one in which a fall in several steps may have begun.
_UNUSUAL_STD = 4.0  # A standard deviation this many times that of the evaluation before is due to single episodes.
_EARLIER = 12  # Number of earlier evaluations that show how much a metric usually changes from one to the next.
_MIN_EARLIER = 5
_UNUSUAL = 4.0  # A metric is mentioned if its change is at least this multiple of its usual change.
_MIN_CHANGE = 0.1  # Least share of its value by which such a metric changes.
_MAX_METRICS, _MAX_EVENTS = 3, 4
_NEWEST_EVENTS = 2000
_GROUPS = ("Learning", "Balance", "Speed")  # Groups of charts whose metrics are examined.


class ReturnChange(NamedTuple):
    title: str
    sentences: tuple[str, ...]


def return_change(run_dir: Path, recording: Recording) -> ReturnChange | None:
    """Compares a recorded evaluation with an earlier one, None without one; a RunError if metrics cannot be read.

    The earlier one is the evaluation before; after a fall in several steps, each of which chance may explain, it is the
    highest of the latest ones. Nothing here proves a cause: the sentences say whether chance is a sufficient
    explanation, whether episodes became shorter or earned less a step, how many of them are affected, and what else
    changed between the two.
    """
    with MetricsReader(run_dir / "metrics.db").connected() as reader:
        rows = reader.evaluations()
        t, *counts = recording.key[:3]
        is_recorded = [[row.env_steps, row.updates] == counts and abs(row.t - t) < 2e-3 for row in rows]
        index = is_recorded.index(True) if any(is_recorded) else 0
        if index == 0:
            return None
        first, now = _fall_begins(rows, index), rows[index]
        before = rows[first]
        between = (event for event in reader.events(_NEWEST_EVENTS) if before.t < event.t <= now.t)
        events = [event for event in between if not event.text.startswith(RUN_ENDS)]  # an end changes no policy
        times = [row.t for row in (*rows[max(0, first - _EARLIER) : first + 1], now)]
        metric_changes = _metric_changes(reader, times)
    other_changes = [*_event_sentences(events), *metric_changes]
    if not other_changes:
        few = "; there are too few evaluations before to tell which metrics changed unusually."
        nothing = ", and no metric of learning changed unusually." if len(times) > _MIN_EARLIER + 2 else few
        other_changes = [f"Between the two no event was recorded{nothing}"]
    time = duration(before.t)
    time += f", after {whole(before.updates)} updates" if time == duration(now.t) else ""
    where = f"at the evaluation before, at {time}"
    if (steps := index - first) > 1:
        where = f"at {time}, {steps} evaluations before: it fell in steps that each may be chance"
    return ReturnChange(
        f"Return {number(now.return_mean)}, and {number(before.return_mean)} {where}",
        (*_chance(before, now, recording), *_length_or_reward(before, now), *other_changes),
    )


def _fall_begins(rows: Sequence[EvaluationRow], index: int) -> int:
    """Index of the evaluation to compare with: the one before, or the highest before a fall in several steps."""
    before, now = index - 1, rows[index]
    highest = max(range(max(0, index - _LATEST), index), key=lambda at: rows[at].return_mean)
    in_steps = _may_be_chance(rows[before], now) and not _may_be_chance(rows[highest], now)
    return highest if in_steps and now.return_mean < rows[highest].return_mean else before


def _may_be_chance(before: EvaluationRow, now: EvaluationRow) -> bool:
    """True unless the 95 % intervals rule it out."""
    if before.half_width is None or now.half_width is None:
        return True
    return abs(now.return_mean - before.return_mean) <= math.hypot(before.half_width, now.half_width)


def _chance(before: EvaluationRow, now: EvaluationRow, recording: Recording) -> list[str]:
    """A sentence if the 95 % intervals explain the difference; else, after a fall, how many episodes show it."""
    if before.return_mean == now.return_mean:
        return ["The return did not change."]
    if before.half_width is None or now.half_width is None:
        return []
    if not _may_be_chance(before, now):
        return _which_episodes(before, now, recording)
    margin = math.hypot(before.half_width, now.half_width)
    if now.return_mean < before.return_mean and now.return_std > _UNUSUAL_STD * before.return_std > 0.0:
        return [
            f"Single episodes differ far more than before (standard deviation {number(now.return_std)}, before "
            f"{number(before.return_std)}): a few of them failed, which the worst one shows."
        ]
    return [
        f"Chance is enough: returns of single episodes differ so much that the means of {now.episodes} may be "
        f"{number(margin)} apart without any change of the policy."
    ]


def _length_or_reward(before: EvaluationRow, now: EvaluationRow) -> list[str]:
    """Parts of the difference: its length at the mean reward a step, and the reward a step at the mean length."""
    if min(before.length_mean, now.length_mean) <= 0.0:
        return []
    rewards = [row.return_mean / row.length_mean for row in (before, now)]
    steady = _reads_equal(*rewards)
    if _reads_equal(before.length_mean, now.length_mean):
        return [] if steady else [f"Episodes are as long as before; the reward a step went from {_pair(*rewards)}."]
    if steady:
        lengths = _pair(before.length_mean, now.length_mean)
        return [f"Episodes went from {lengths} env steps; the reward a step stayed {_short(rewards[1])}."]
    by_length = (now.length_mean - before.length_mean) * sum(rewards) / 2.0
    by_reward = (rewards[1] - rewards[0]) * (now.length_mean + before.length_mean) / 2.0
    return [
        f"Episodes went from {_pair(before.length_mean, now.length_mean)} env steps, the reward a step from "
        f"{_pair(*rewards)}: {signed(by_length)} by length, {signed(by_reward)} by reward."
    ]


def _which_episodes(before: EvaluationRow, now: EvaluationRow, recording: Recording) -> list[str]:
    """After a fall of the return: a sentence on whether most episodes are worse, or only a few."""
    returns = {kind: episode.episode_return for episode in recording.episodes for kind in episode.kinds}
    if now.return_mean >= before.return_mean or not {"median", "worst"} <= returns.keys() or now.episodes < 3:
        return []
    median, worst = returns["median"], returns["worst"]
    few = median >= (before.return_mean + now.return_mean) / 2.0
    return [
        f"{'Few' if few else 'Most'} episodes are worse: of {now.episodes} the median has {number(median)} and the "
        f"worst {number(worst)}."
    ]


def _event_sentences(events: Sequence[Event]) -> list[str]:
    chosen = sorted(events, key=lambda event: event.level == "info")[:_MAX_EVENTS]
    chosen.sort(key=lambda event: event.t)
    sentences = [f"{duration(event.t)}, {event.source}: {event.text}" for event in chosen]
    more = len(events) - len(chosen)
    return sentences + [f"and {more} more events in that time"] * (more > 0)


def _metric_changes(reader: MetricsReader, times: Sequence[float]) -> list[str]:
    """Sentences on the metrics whose last change is far above their usual one, the largest first."""
    changes = []
    for metric in TABLE.metrics:
        if metric.chart is None or metric.chart.group not in _GROUPS or metric.parts or metric.is_evaluated:
            continue
        means = _means(reader.series(metric.name, times[0]), times)
        if (score := _score(means)) >= _UNUSUAL:
            scale = metric.chart.scale
            unit = "" if metric.unit in ("ratio", "share", "norm", "loss", "return") else f" {metric.unit}"
            unit = " %" if metric.chart.unit == "%" else unit
            text = f"{metric.chart.title} went from {_pair(scale * means[-2], scale * means[-1])}{unit}"
            stood = "hardly changed" if np.nanmin(means[:-1]) < np.nanmax(means[:-1]) else "had not changed"
            usual = f"which {stood} before" if math.isinf(score) else f"{score:.0f} times its usual change"
            changes.append((score, f"{text}, {usual}."))
    return [text for _, text in sorted(changes, reverse=True)[:_MAX_METRICS]]


def _means(series: Series, times: Sequence[float]) -> np.ndarray:
    """The mean of a series between consecutive times, NaN without a value, float64 [len(times) - 1]."""
    edges = np.searchsorted(series.t, times, side="right")
    sums = np.concatenate([[0.0], np.cumsum(series.mean)])
    with np.errstate(invalid="ignore"):
        return np.asarray(np.diff(sums[edges]) / np.diff(edges))


def _score(means: np.ndarray) -> float:
    """The last change over the usual one, by their median absolute deviation; 0 with too little data."""
    changes = np.diff(means)
    earlier = changes[:-1][np.isfinite(changes[:-1])]
    if len(changes) == 0 or not math.isfinite(changes[-1]) or len(earlier) < _MIN_EARLIER:
        return 0.0
    last = abs(changes[-1] - float(np.median(earlier)))
    if last < _MIN_CHANGE * float(np.max(np.abs(means[-2:]))):
        return 0.0
    usual = 1.4826 * float(np.median(np.abs(earlier - np.median(earlier))))  # the deviation, if they are normal
    if usual == 0.0:
        return math.inf if last > 0.0 else 0.0
    return float(last / usual)


def _pair(before: float, now: float) -> str:
    return f"{_short(before)} to {_short(now)}"


def _reads_equal(before: float, now: float) -> bool:
    return _short(before) == _short(now)


def _short(value: float) -> str:
    return f"{value:.2g}" if 0.0 < abs(value) < 0.01 else number(value)
