"""Rates, shares of time and ratios: pure arithmetic on the counters that the workers post.

Metrics are for the whole run: counters and rates are sums over groups, other numbers are means. With several groups,
``updates_per_s/1`` is that of group 1. Another host counts as one sampler of group 0.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field, replace

from spreeze.metrics.table import TABLE, Kind, Metric, Needs

_RATE_WINDOW_S = 3.0


@dataclass(frozen=True)
class GroupSample:
    """Counters of one group at one time."""

    samplers: tuple[dict[str, float], ...]
    learner: dict[str, float]
    inserted: int  # transitions written since the ring was made
    inserted_at_learning_start: int  # value of inserted when learning started; -1 before
    sampled: int  # transitions drawn since learning started
    inference_workers: tuple[dict[str, float], ...] = ()
    hosts: tuple[dict[str, float], ...] = ()  # other hosts, each with the slots of its samplers together and its own

    @property
    def learned(self) -> bool:
        """True after the first update of this session."""
        return self.learner["updates"] > 0 and self.sampled > 0

    @property
    def on_policy(self) -> bool:
        """True if the learner takes whole rollouts instead of batches from replay."""
        return self.learner.get("learn_s", 0.0) > 0.0

    def rows_drawn(self, batch_size: int, first_updates: int) -> int:
        """Rows of all updates after the first ones, those of earlier sessions."""
        return int(max(0.0, self.learner["updates"] - first_updates)) * batch_size

    def knows(self, metric: Metric) -> bool:
        """True if a learner of this kind has this number now."""
        other = Needs.REPLAY if self.on_policy else Needs.ROLLOUTS
        return metric.known_from is Needs.NOTHING or (self.learned and metric.known_from is not other)

    def of(self, role: str) -> tuple[dict[str, float], ...]:
        """The slots of all workers of a role of the metric table."""
        collecting = (*self.samplers, *self.hosts)
        return (self.learner,) if role == "learner" else collecting if role == "sampler" else self.inference_workers


@dataclass(frozen=True)
class CounterSample:
    """Counters of all groups at one time."""

    t_s: float
    groups: tuple[GroupSample, ...]

    @property
    def sampler_steps(self) -> list[float]:
        """Env steps of each sampler in this session, group after group."""
        return [sampler["env_steps"] for group in self.groups for sampler in group.samplers]

    @property
    def env_steps(self) -> float:
        """Env steps of this session, over all samplers, those of other hosts included."""
        return sum(self.sampler_steps) + sum(self.host_steps)

    @property
    def host_steps(self) -> list[float]:
        """Env steps of each other host in this session."""
        return [host["env_steps"] for group in self.groups for host in group.hosts]

    @property
    def inserted(self) -> int:
        """Transitions written, over all groups."""
        return sum(group.inserted for group in self.groups)


_Groups = tuple[GroupSample, ...]
_Worker = tuple[int, str, int]  # group, role, number

_LATE_S = 2.0  # a worker may post so much later than it measured


class _MeasuredTimes:
    """Seconds that workers measure of their own work, less those in which they were suspended.

    A suspended worker (pause, Ctrl-Z, sleep) counts the suspension to whatever it was doing, while readings do not: it
    has then measured more time than has passed.
    """

    def __init__(self) -> None:
        self._slots = {role: self._names(role) for role in ("sampler", "learner", "inference")}
        self._latest: dict[_Worker, tuple[float, dict[str, float]]] = {}  # its last change: when, slots
        self._excluded: dict[_Worker, dict[str, float]] = {}

    @staticmethod
    def _names(role: str) -> tuple[str, ...]:
        return tuple({slot: None for on_policy in (False, True) for _, slot in TABLE.splits(role, on_policy=on_policy)})

    def corrected(self, reading: CounterSample) -> CounterSample:
        """The reading without suspensions."""
        groups = tuple(self._group(reading.t_s, *numbered) for numbered in enumerate(reading.groups))
        return replace(reading, groups=groups)

    def _group(self, t_s: float, number: int, group: GroupSample) -> GroupSample:
        def several(role: str, workers: tuple[dict[str, float], ...]) -> tuple[dict[str, float], ...]:
            return tuple(self._slots_of(t_s, (number, role, index), slots) for index, slots in enumerate(workers))

        return replace(
            group,
            samplers=several("sampler", group.samplers),
            learner=self._slots_of(t_s, (number, "learner", 0), group.learner),
            inference_workers=several("inference", group.inference_workers),
        )

    def _slots_of(self, t_s: float, worker: _Worker, slots: dict[str, float]) -> dict[str, float]:
        times = {name: slots[name] for name in self._slots[worker[1]] if name in slots}
        changed_s, before = self._latest.setdefault(worker, (t_s, times))
        if times != before:
            self._latest[worker] = t_s, times
            change = {name: value - before.get(name, 0.0) for name, value in times.items()}
            if sum(change.values()) > t_s - changed_s + _LATE_S:
                excluded = self._excluded.setdefault(worker, {})
                excluded.update({name: excluded.get(name, 0.0) + value for name, value in change.items()})
        suspended = self._excluded.get(worker, {})
        return slots | {name: times[name] - seconds for name, seconds in suspended.items()}


@dataclass
class Rates:
    """Keeps a short window of readings for live rates, and two readings for steady-state rates."""

    batch_size: int
    warmup_s: float = 1.0  # after the first update, left out of steady-state rates
    restores: bool = False  # a learner's counters may start at those of a checkpoint: after a resume or a restart
    balanced_rows: int | None = None  # that replay can hold, where consumption and production are balanced
    _window: deque[CounterSample] = field(default_factory=deque)
    learning_began_s: float | None = None
    _steady: CounterSample | None = None
    _last: CounterSample | None = None
    _steady_frames: float = 0.0  # update frames since the end of the warmup, each update with the batch size in force
    _ended: bool = False
    _times: _MeasuredTimes = field(default_factory=_MeasuredTimes, init=False)

    def end(self) -> None:
        """Excludes later readings from steady-state rates, since the run is being stopped."""
        self._ended = True

    def read(self, reading: CounterSample) -> dict[str, float | None]:
        """Metrics at this reading; a rate is None until there are two readings.

        With several groups, ``name`` is that of the run and ``name/1`` that of group 1. Counters, rates and times are
        summed over groups; other numbers are means over the groups that have them.
        """
        reading = self._times.corrected(reading)
        self._note(reading)
        first, seconds = self._window[0], reading.t_s - self._window[0].t_s
        metrics = self._metrics(first, reading, slice(None))
        steps = zip(first.sampler_steps, reading.sampler_steps, strict=True)
        for index, (before, after) in enumerate(steps if seconds > 0 else ()):
            metrics[f"sampler_env_steps_per_s/{index}"] = max(after - before, 0.0) / seconds
        metrics |= self._host_metrics(first, reading, seconds)
        for number in range(len(reading.groups)) if len(reading.groups) > 1 else ():
            part = self._metrics(first, reading, slice(number, number + 1))
            metrics |= {f"{name}/{number}": value for name, value in part.items()}
        return metrics

    def _host_metrics(self, old: CounterSample, new: CounterSample, seconds: float) -> dict[str, float | None]:
        metrics: dict[str, float | None] = {}
        hosts = [host for group in new.groups for host in group.hosts]
        posted = TABLE.of("host", Kind.COUNTER, Kind.GAUGE)
        for index, host in enumerate(hosts):
            if host["seen"]:
                metrics |= {f"{metric.name}/{index}": host[slot] for metric, slot in posted}
                if seconds > 0:
                    change = new.host_steps[index] - old.host_steps[index]
                    metrics[f"host_env_steps_per_s/{index}"] = max(change, 0.0) / seconds
        if hosts:
            metrics["hosts_alive"] = sum(host["alive"] for host in hosts)
        return metrics

    def _metrics(self, old: CounterSample, new: CounterSample, part: slice) -> dict[str, float | None]:
        groups = new.groups[part]
        seconds = new.t_s - old.t_s
        changes = self._changes(old.groups[part], groups, seconds)
        # Each reading with its own batch size, which the tuner changes.
        pairs = itertools.pairwise(self._window)
        frames = sum(_frames(a.groups[part], b.groups[part], self.batch_size) for a, b in pairs)
        changes["update_frames_per_s"] = max(frames, 0.0) / seconds if seconds > 0 else None
        counts = _counts(groups)
        if changes.get("env_steps_per_s") == 0.0:  # what samplers last measured holds no longer
            counts |= {metric.name: None for metric, _ in TABLE.of("sampler", Kind.GAUGE)}
        return counts | changes | {"samples_per_insert": samples_per_insert(groups)}

    def _changes(self, old: _Groups, new: _Groups, seconds: float) -> dict[str, float | None]:
        changes = _rates(old, new, seconds) | _shares(old, new)
        return changes if self.balanced_rows is None else changes | _balance(old, new, self.balanced_rows)

    def _note(self, reading: CounterSample) -> None:
        before = self._window[-1].groups if self._window else reading.groups
        updates = [(a.learner["updates"], b.learner["updates"]) for a, b in zip(before, reading.groups, strict=True)]
        if self.restores and any(old == 0 < new for old, new in updates):
            self._window.clear()  # updates of a checkpoint took no time just now
        starts = zip(before, reading.groups, strict=True)
        if any(a.inserted_at_learning_start < 0 <= b.inserted_at_learning_start for a, b in starts):
            self._window.clear()  # until now the learner could only wait
        self.restores = self.restores or any(new < old for old, new in updates)
        self._window.append(reading)
        while len(self._window) > 2 and reading.t_s - self._window[0].t_s > _RATE_WINDOW_S:
            self._window.popleft()
        if self.learning_began_s is None and all(group.learned for group in reading.groups):
            self.learning_began_s = reading.t_s
        began_s = self.learning_began_s
        if self._last is not None and self._steady is not None and not self._ended:
            self._steady_frames += _frames(self._last.groups, reading.groups, self.batch_size)
        if self._steady is None and began_s is not None and reading.t_s - began_s >= self.warmup_s:
            self._steady = reading
        if not self._ended:
            self._last = reading

    def steady(self) -> dict[str, float | None]:
        """Rates from the end of the warmup to the last reading; None if the run was too short."""
        if self._steady is None or self._last is None or self._last.t_s <= self._steady.t_s:
            return dict.fromkeys(("env_steps_per_s", "updates_per_s", "update_frames_per_s", "measured_s"))
        seconds = self._last.t_s - self._steady.t_s
        changes = self._changes(self._steady.groups, self._last.groups, seconds)
        return changes | {"update_frames_per_s": max(self._steady_frames, 0.0) / seconds, "measured_s": seconds}


def split_names(*, on_policy: bool, inference_workers: bool) -> tuple[str, ...]:
    """Names of the shares of time in a run, known or not."""
    roles = ("sampler", "learner", "inference") if inference_workers else ("sampler", "learner")
    return tuple(metric.name for role in roles for metric, _ in TABLE.splits(role, on_policy=on_policy))


def samples_per_insert(groups: _Groups) -> float | None:
    """Transitions drawn / transitions inserted, since learning started; None before."""
    learning = [group for group in groups if group.inserted_at_learning_start >= 0]
    inserts = sum(group.inserted - group.inserted_at_learning_start for group in learning)
    return sum(group.sampled for group in learning) / inserts if inserts > 0 else None


def _balance(old: _Groups, new: _Groups, capacity: int) -> dict[str, float | None]:
    """Consumption over production between two readings of learners from replay, and staleness now; None if unknown."""
    both = zip(old, new, strict=True)
    pairs = [(a, b) for a, b in both if 0 <= a.inserted_at_learning_start == b.inserted_at_learning_start and a.learned]
    inserts = sum(after.inserted - before.inserted for before, after in pairs)
    drawn = sum(after.sampled - before.sampled for before, after in pairs)
    stale = [after.learner["batch_size"] / max(after.learner["replay_fill"] * capacity, 1.0) for _, after in pairs]
    ratio = drawn / inserts if inserts > 0 else None
    return {"samples_per_insert_now": ratio, "staleness": sum(stale) / len(stale) if stale else None}


def _counts(groups: _Groups) -> dict[str, float | None]:
    counts: dict[str, float | None] = {}
    for metric, slot in TABLE.of("learner", Kind.COUNTER, Kind.GAUGE):
        posted = [group.learner[slot] for group in groups if group.knows(metric)]
        known = [value for value in posted if math.isfinite(value)]
        parts = 1 if metric.kind is Kind.COUNTER else len(known)
        counts[metric.name] = sum(known) / parts if known else None
    for metric, slot in TABLE.of("sampler", Kind.COUNTER):
        counts[metric.name] = _total(groups, "sampler", slot)
    for metric, slot in TABLE.of("sampler", Kind.GAUGE):
        values = [sampler[slot] for group in groups for sampler in group.of("sampler") if sampler["episodes"] > 0]
        counts[metric.name] = sum(values) / len(values) if values else None
    return counts


def _total(groups: _Groups, role: str, slot: str) -> float:
    return sum(worker.get(slot, 0.0) for group in groups for worker in group.of(role))


def _change(old: _Groups, new: _Groups, role: str, slot: str) -> float:
    return _total(new, role, slot) - _total(old, role, slot)


def _rates(old: _Groups, new: _Groups, seconds: float) -> dict[str, float | None]:
    counters = {metric.name: TABLE.by_name(metric.per_s_of) for metric in TABLE.metrics if metric.per_s_of}
    if seconds <= 0:
        return dict.fromkeys(counters)
    rates: dict[str, float | None] = {}
    for name, counter in counters.items():
        if counter.source is None:
            raise ValueError(f"metric {counter.name} comes from no slot, so it has no rate: take out per_s_of")
        rates[name] = max(_change(old, new, *counter.source), 0.0) / seconds
    return rates


def _frames(old: _Groups, new: _Groups, batch_size: int) -> float:
    """Updates between two readings times their batch size; the smaller one where tuner or learner changed it.

    Negative where a learner was restarted: like updates, their sum is without those that it lost.
    """
    frames = 0.0
    for before, after in zip(old, new, strict=True):
        sizes = [size for size in (before.learner.get("batch_size"), after.learner.get("batch_size")) if size]
        frames += (after.learner["updates"] - before.learner["updates"]) * min(sizes, default=batch_size)
    return frames


def _shares(old: _Groups, new: _Groups) -> dict[str, float | None]:
    shares: dict[str, float | None] = {}
    has_inference = any(group.inference_workers for group in new)
    for role in ("sampler", "learner", "inference") if has_inference else ("sampler", "learner"):
        splits = TABLE.splits(role, on_policy=new[0].on_policy)
        times = {metric.name: _change(old, new, role, slot) for metric, slot in splits}
        total = sum(times.values())
        shares |= {name: value / total if total > 0 else None for name, value in times.items()}
    if has_inference:
        batches = _change(old, new, "inference", "batches")
        rows = _change(old, new, "inference", "rows")
        shares["inference_rows_per_batch"] = rows / batches if batches > 0 else None
    return shares
