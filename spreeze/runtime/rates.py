"""Computes metrics from the workers' slots: rates, shares, ratios. Pure arithmetic over samples."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from spreeze.metrics.table import TABLE, Kind, Metric, MetricTable, Needs

_RATE_WINDOW_S = 3.0


@dataclass(frozen=True)
class GroupSample:
    """All counters of one group at one time."""

    samplers: tuple[dict[str, float], ...]
    learner: dict[str, float]
    inserted: int
    """Transitions written since the ring was made."""
    baseline_inserted: int
    """Value of ``inserted`` when learning began; -1 before."""
    sampled: int
    """Transitions drawn since learning began."""
    inference_workers: tuple[dict[str, float], ...] = ()
    """Those of an hts run."""

    @property
    def learned(self) -> bool:
        """Whether there has been an update in this session."""
        return self.learner["updates"] > 0 and self.sampled > 0

    @property
    def on_policy(self) -> bool:
        """Whether the learner takes whole rollouts instead of batches from replay."""
        return self.learner.get("learn_s", 0.0) > 0.0

    def of(self, role: str) -> tuple[dict[str, float], ...]:
        """The slots of all workers of a role of the metric table."""
        return (self.learner,) if role == "learner" else self.samplers if role == "sampler" else self.inference_workers


@dataclass(frozen=True)
class CounterSample:
    """All counters at one time, group by group."""

    t_s: float
    groups: tuple[GroupSample, ...]

    @classmethod
    def of_one(
        cls, t_s: float, samplers: tuple[dict[str, float], ...], learner: dict[str, float], inserted: int,
        baseline_inserted: int, sampled: int, inference_workers: tuple[dict[str, float], ...] = (),
    ) -> CounterSample:
        """The counters of a run with one group."""
        return cls(t_s, (GroupSample(samplers, learner, inserted, baseline_inserted, sampled, inference_workers),))

    @property
    def env_steps(self) -> float:
        """Env steps of this session, over all samplers."""
        return sum(sampler["env_steps"] for group in self.groups for sampler in group.samplers)

    @property
    def inserted(self) -> int:
        """Transitions written, over all groups."""
        return sum(group.inserted for group in self.groups)


_Groups = tuple[GroupSample, ...]


@dataclass
class Rates:
    """Keeps a short window of readings for live rates, and two readings for steady-state rates."""

    batch_size: int
    warmup_s: float = 1.0
    """Time after the first update that steady-state rates leave out."""
    table: MetricTable = TABLE
    _window: deque[CounterSample] = field(default_factory=deque)
    _learning_began_s: float | None = None
    _steady: CounterSample | None = None
    _last: CounterSample | None = None
    _ended: bool = False

    def end(self) -> None:
        """Excludes later readings from steady-state rates, since the run is being stopped."""
        self._ended = True

    def read(self, reading: CounterSample) -> dict[str, float | None]:
        """Metrics at this reading; a rate is None until there are two readings.

        With several groups, each metric is that of the whole run, and ``name/1`` that of group 1. Counters, rates and
        times are summed over the groups; other numbers are means over the groups that have them.
        """
        self._note(reading)
        first = self._window[0]
        metrics = self._metrics(first, reading, slice(None))
        for index, sampler_rate in enumerate(_sampler_rates(first, reading)):
            metrics[f"sampler_env_steps_per_s/{index}"] = sampler_rate
        for number in range(len(reading.groups)) if len(reading.groups) > 1 else ():
            own = self._metrics(first, reading, slice(number, number + 1))
            metrics |= {f"{name}/{number}": value for name, value in own.items()}
        return metrics

    def _metrics(self, old: CounterSample, new: CounterSample, part: slice) -> dict[str, float | None]:
        groups = new.groups[part]
        changes = self._changes(old.groups[part], groups, new.t_s - old.t_s)
        return {**_counts(groups, self.table), **changes, "samples_per_insert": samples_per_insert(groups)}

    def _changes(self, old: _Groups, new: _Groups, seconds: float) -> dict[str, float | None]:
        return {**_rates(old, new, seconds, self.batch_size, self.table), **_shares(old, new, self.table)}

    def _note(self, reading: CounterSample) -> None:
        self._window.append(reading)
        while len(self._window) > 2 and reading.t_s - self._window[0].t_s > _RATE_WINDOW_S:
            self._window.popleft()
        if self._learning_began_s is None and all(group.learned for group in reading.groups):
            self._learning_began_s = reading.t_s
        if self._steady is None and self._learning_began_s is not None and (
            reading.t_s - self._learning_began_s >= self.warmup_s
        ):
            self._steady = reading
        if not self._ended:
            self._last = reading

    def steady(self) -> dict[str, float | None]:
        """Rates from the end of the warmup to the last reading; None if the run was too short."""
        if self._steady is None or self._last is None or self._last.t_s <= self._steady.t_s:
            return dict.fromkeys(("env_steps_per_s", "updates_per_s", "update_frames_per_s", "measured_s"))
        seconds = self._last.t_s - self._steady.t_s
        return {**self._changes(self._steady.groups, self._last.groups, seconds), "measured_s": seconds}


def split_names(*, on_policy: bool, inference_workers: bool) -> tuple[str, ...]:
    """Names of the shares of time in a run, known or not."""
    roles = ("sampler", "learner", "inference") if inference_workers else ("sampler", "learner")
    return tuple(metric.name for role in roles for metric, _ in TABLE.splits(role, on_policy=on_policy))


def samples_per_insert(groups: _Groups) -> float | None:
    """Transitions drawn / transitions inserted, since learning began; None before."""
    begun = [group for group in groups if group.baseline_inserted >= 0]
    inserts = sum(group.inserted - group.baseline_inserted for group in begun)
    return sum(group.sampled for group in begun) / inserts if inserts > 0 else None


def _counts(groups: _Groups, table: MetricTable) -> dict[str, float | None]:
    counts: dict[str, float | None] = {}
    for metric, slot in table.of("learner", Kind.COUNTER, Kind.GAUGE):
        posted = [group.learner.get(slot, math.nan) for group in groups if _is_due(metric, group)]
        known = [value for value in posted if math.isfinite(value)]  # some are missing or not finite
        parts = 1 if metric.kind is Kind.COUNTER else len(known)
        counts[metric.name] = sum(known) / parts if known else None
    for metric, slot in table.of("sampler", Kind.COUNTER):
        counts[metric.name] = _total(groups, "sampler", slot)
    for metric, slot in table.of("sampler", Kind.GAUGE):
        values = [sampler[slot] for group in groups for sampler in group.samplers if sampler["episodes"] > 0]
        counts[metric.name] = sum(values) / len(values) if values else None
    return counts


def _is_due(metric: Metric, group: GroupSample) -> bool:
    """Whether a learner of this kind has this number by now."""
    other = Needs.REPLAY if group.on_policy else Needs.ROLLOUTS
    return metric.known_from is Needs.NOTHING or (group.learned and metric.known_from is not other)


def _total(groups: _Groups, role: str, slot: str) -> float:
    """Sum of a slot over all workers of the role."""
    return sum(worker.get(slot, 0.0) for group in groups for worker in group.of(role))


def _rates(
    old: _Groups, new: _Groups, seconds: float, batch_size: int, table: MetricTable
) -> dict[str, float | None]:
    counters = {metric.name: table.by_name(metric.per_s_of) for metric in table.metrics if metric.per_s_of}
    if seconds <= 0:
        return dict.fromkeys((*counters, "update_frames_per_s"))
    rates: dict[str, float | None] = {}
    for name, counter in counters.items():
        role, slot = _source(counter)
        rates[name] = max(_total(new, role, slot) - _total(old, role, slot), 0.0) / seconds
    # A learner halves its batch if the device has too little memory.
    rates["update_frames_per_s"] = sum(
        max(after.learner["updates"] - before.learner["updates"], 0.0) / seconds
        * (after.learner.get("batch_size") or batch_size)
        for before, after in zip(old, new, strict=True)
    )
    return rates


def _sampler_rates(old: CounterSample, new: CounterSample) -> list[float]:
    """Env steps a second of each sampler, group after group; empty if no time has passed."""
    seconds = new.t_s - old.t_s
    before = [sampler["env_steps"] for group in old.groups for sampler in group.samplers]
    after = [sampler["env_steps"] for group in new.groups for sampler in group.samplers]
    return [max(b - a, 0.0) / seconds for a, b in zip(before, after, strict=True)] if seconds > 0 else []


def _source(counter: Metric) -> tuple[str, str]:
    if counter.source is None:
        raise ValueError(f"metric {counter.name} comes from no slot, so it has no rate; take per_s_of out of its rate")
    return counter.source


def _shares(old: _Groups, new: _Groups, table: MetricTable) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    has_inference = any(group.inference_workers for group in new)
    for role in ("sampler", "learner", "inference") if has_inference else ("sampler", "learner"):
        splits = table.splits(role, on_policy=new[0].on_policy)
        found |= _normalised({m.name: _total(new, role, slot) - _total(old, role, slot) for m, slot in splits})
    if has_inference:
        batches = _total(new, "inference", "batches") - _total(old, "inference", "batches")
        rows = _total(new, "inference", "rows") - _total(old, "inference", "rows")
        found["inference_rows_per_batch"] = rows / batches if batches > 0 else None
    return found


def _normalised(times: dict[str, float]) -> dict[str, Any]:
    total = sum(times.values())
    return {name: value / total if total > 0 else None for name, value in times.items()}
