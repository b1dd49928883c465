"""From the workers' raw slots to metrics: rates, shares, ratios. Pure arithmetic over snapshots."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from spreeze.metrics.table import TABLE, Kind, Metric, MetricTable, Needs

_RATE_WINDOW_S = 3.0


@dataclass(frozen=True)
class CounterSample:
    """All counters at one moment."""

    t_s: float
    samplers: tuple[dict[str, float], ...]
    """Of on-policy modes: the executors."""
    learner: dict[str, float]
    inserted: int
    """Transitions in replay since the ring was made."""
    baseline_inserted: int
    """Transitions at the moment learning began; -1 before."""
    sampled: int
    """Transitions drawn since learning began."""
    actors: tuple[dict[str, float], ...] = ()
    """Processes that infer for executors (hts)."""

    @property
    def env_steps(self) -> float:
        """Env steps of this session, all samplers."""
        return sum(sampler["env_steps"] for sampler in self.samplers)


@dataclass
class Rates:
    """Keeps a short window of readings for live rates and two marks for steady-state rates."""

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
        """Readings from now on do not count for steady-state rates: the run is being stopped."""
        self._ended = True

    def read(self, reading: CounterSample) -> dict[str, float | None]:
        """Metrics at this reading; a rate is None until there are two readings."""
        self._note(reading)
        first = self._window[0]
        metrics = {**_counts(reading, self.table), **self._changes(first, reading)}
        metrics["samples_per_insert"] = samples_per_insert(reading)
        return metrics

    def _changes(self, old: CounterSample, new: CounterSample) -> dict[str, float | None]:
        return {**_rates(old, new, self.batch_size, self.table), **_shares(old, new, self.table)}

    def _note(self, reading: CounterSample) -> None:
        self._window.append(reading)
        while len(self._window) > 2 and reading.t_s - self._window[0].t_s > _RATE_WINDOW_S:
            self._window.popleft()
        if self._learning_began_s is None and reading.learner["updates"] > 0 and reading.sampled > 0:
            self._learning_began_s = reading.t_s
        if self._steady is None and self._learning_began_s is not None and (
            reading.t_s - self._learning_began_s >= self.warmup_s
        ):
            self._steady = reading
        if not self._ended:
            self._last = reading

    def steady(self) -> dict[str, float | None]:
        """Rates from the end of the warm-up to the last reading; None when the run was too short."""
        if self._steady is None or self._last is None or self._last.t_s <= self._steady.t_s:
            return dict.fromkeys(("env_steps_per_s", "updates_per_s", "update_frames_per_s", "measured_s"))
        changes = self._changes(self._steady, self._last)
        whole = {name: value for name, value in changes.items() if not self.table.by_name(name).parts}
        return {**whole, "measured_s": self._last.t_s - self._steady.t_s}


def split_names(*, on_policy: bool, actors: bool) -> tuple[str, ...]:
    """Names of the shares of time that a run has, known or not.

    Args:
        on_policy: its learner takes one step an interval instead of critic and actor steps.
        actors: processes of their own infer for its executors.
    """
    roles = ("sampler", "learner", "actor") if actors else ("sampler", "learner")
    return tuple(metric.name for role in roles for metric, _ in TABLE.splits(role, on_policy=on_policy))


def samples_per_insert(reading: CounterSample) -> float | None:
    """Transitions drawn over transitions inserted since learning began; None before."""
    inserts = reading.inserted - reading.baseline_inserted
    return reading.sampled / inserts if reading.baseline_inserted >= 0 and inserts > 0 else None


def _counts(reading: CounterSample, table: MetricTable) -> dict[str, float | None]:
    learned = reading.learner["updates"] > 0 and reading.sampled > 0
    other = Needs.REPLAY if _on_policy(reading) else Needs.ROLLOUTS
    counts: dict[str, float | None] = {}
    for metric, slot in table.of("learner", Kind.COUNTER, Kind.GAUGE):
        due = metric.known_from is Needs.NOTHING or (learned and metric.known_from is not other)
        counts[metric.name] = _known(reading.learner.get(slot, math.nan)) if due else None
    for metric, slot in table.of("sampler", Kind.COUNTER):
        counts[metric.name] = sum(sampler[slot] for sampler in reading.samplers)
    for metric, slot in table.of("sampler", Kind.GAUGE):
        values = [sampler[slot] for sampler in reading.samplers if sampler["episodes"] > 0]
        counts[metric.name] = sum(values) / len(values) if values else None
    return counts


def _on_policy(reading: CounterSample) -> bool:
    """Whether the learner takes whole intervals, one step each, instead of batches from replay."""
    return reading.learner.get("learn_s", 0.0) > 0.0


def _known(value: float) -> float | None:
    """A learner's number; None where its algorithm has none, or had none that is finite."""
    return value if math.isfinite(value) else None


def _total(reading: CounterSample, role: str, slot: str) -> float:
    """A slot's value, summed over all workers of the role."""
    if role == "learner":
        return reading.learner.get(slot, 0.0)
    return sum(worker[slot] for worker in (reading.samplers if role == "sampler" else reading.actors))


def _rates(old: CounterSample, new: CounterSample, batch_size: int, table: MetricTable) -> dict[str, float | None]:
    counters = {metric.name: table.by_name(metric.per_s_of) for metric in table.metrics if metric.per_s_of}
    seconds = new.t_s - old.t_s
    if seconds <= 0:
        return dict.fromkeys((*counters, "update_frames_per_s"))
    rates: dict[str, float | None] = {}
    for name, counter in counters.items():
        role, slot = _source(counter)
        rates[name] = max(_total(new, role, slot) - _total(old, role, slot), 0.0) / seconds
    # The learner halves its batch where the device has too little memory.
    rates["update_frames_per_s"] = (rates["updates_per_s"] or 0.0) * (new.learner.get("batch_size") or batch_size)
    for index, (before, after) in enumerate(zip(old.samplers, new.samplers, strict=True)):
        rates[f"sampler_env_steps_per_s/{index}"] = max(after["env_steps"] - before["env_steps"], 0.0) / seconds
    return rates


def _source(counter: Metric) -> tuple[str, str]:
    if counter.source is None:
        raise ValueError(f"metric {counter.name} comes from no slot, so it has no rate; take per_s_of out of its rate")
    return counter.source


def _shares(old: CounterSample, new: CounterSample, table: MetricTable) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for role in ("sampler", "learner", "actor") if new.actors else ("sampler", "learner"):
        splits = table.splits(role, on_policy=_on_policy(new))
        found |= _normalised({m.name: _total(new, role, slot) - _total(old, role, slot) for m, slot in splits})
    if new.actors:
        batches = _total(new, "actor", "batches") - _total(old, "actor", "batches")
        rows = _total(new, "actor", "rows") - _total(old, "actor", "rows")
        found["actor_rows_per_batch"] = rows / batches if batches > 0 else None
    return found


def _normalised(times: dict[str, float]) -> dict[str, Any]:
    total = sum(times.values())
    return {name: value / total if total > 0 else None for name, value in times.items()}
