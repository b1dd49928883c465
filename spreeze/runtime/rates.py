"""From the workers' raw slots to metrics: rates, shares, ratios. Pure arithmetic over snapshots."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

_RATE_WINDOW_S = 3.0
_STEPPING = ("policy", "env", "write", "wait")
_LEARNING, _LEARNING_ON_POLICY = ("wait", "gather", "critic", "actor", "publish"), ("wait", "learn", "publish")
_INFERRING = ("policy", "wait")


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
        metrics = {**_counts(reading), **_rates(first, reading, self.batch_size), **_shares(first, reading)}
        metrics["samples_per_insert"] = samples_per_insert(reading)
        return metrics

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
        rates = _rates(self._steady, self._last, self.batch_size)
        return {
            **{name: rates[name] for name in ("env_steps_per_s", "updates_per_s", "update_frames_per_s")},
            "measured_s": self._last.t_s - self._steady.t_s,
            **_shares(self._steady, self._last),
        }


def split_names(*, on_policy: bool, actors: bool) -> tuple[str, ...]:
    """Names of the shares of time that a run has, known or not.

    Args:
        on_policy: its learner takes one step an interval instead of critic and actor steps.
        actors: processes of their own infer for its executors.
    """
    learner = _names("learner", _LEARNING_ON_POLICY if on_policy else _LEARNING)
    return (*_names("sampler", _STEPPING), *learner, *(_names("actor", _INFERRING) if actors else ()))


def _names(role: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{role}_{part}_share" for part in parts)


def samples_per_insert(reading: CounterSample) -> float | None:
    """Transitions drawn over transitions inserted since learning began; None before."""
    inserts = reading.inserted - reading.baseline_inserted
    return reading.sampled / inserts if reading.baseline_inserted >= 0 and inserts > 0 else None


def _counts(reading: CounterSample) -> dict[str, float | None]:
    learner = reading.learner
    learned = learner["updates"] > 0 and reading.sampled > 0
    on_policy = learner.get("learn_s", 0.0) > 0.0
    counts: dict[str, float | None] = {
        "updates": learner["updates"],
        "policy_version": learner["policy_version"],
        **{name: learner[name] if learned else None for name in (
            "policy_lag", "updates_skipped",
        )},
        **{name: _known(learner[name]) if learned and not on_policy else None for name in (
            "transition_age", "replay_fill", "critic_loss", "actor_loss", "q_mean",
            "critic_grad_norm", "actor_grad_norm", "rows_redrawn",
        )},
        **{name: _known(learner[name]) if learned and on_policy else None for name in (
            "policy_loss", "value_loss", "approx_kl", "clip_share", "explained_variance", "learning_rate", "grad_norm",
        )},
        **{name: _known(learner[name]) if learned else None for name in ("alpha", "entropy")},
    }
    for name in ("episodes", "rows_refused", "env_errors"):
        counts[name] = sum(sampler[name] for sampler in reading.samplers)
    for name in ("episode_return", "episode_length"):
        values = [sampler[name] for sampler in reading.samplers if sampler["episodes"] > 0]
        counts[name] = sum(values) / len(values) if values else None
    return counts


def _known(value: float) -> float | None:
    """A learner's number; None where its algorithm has none, or had none that is finite."""
    return value if math.isfinite(value) else None


def _rates(old: CounterSample, new: CounterSample, batch_size: int) -> dict[str, float | None]:
    seconds = new.t_s - old.t_s
    if seconds <= 0:
        return dict.fromkeys(("env_steps_per_s", "updates_per_s", "update_frames_per_s"))
    updates_per_s = max(new.learner["updates"] - old.learner["updates"], 0.0) / seconds
    rates: dict[str, float | None] = {
        "env_steps_per_s": max(new.env_steps - old.env_steps, 0.0) / seconds,
        "updates_per_s": updates_per_s,
        # The learner halves its batch where the device has too little memory.
        "update_frames_per_s": updates_per_s * (new.learner.get("batch_size") or batch_size),
    }
    for index, (before, after) in enumerate(zip(old.samplers, new.samplers, strict=True)):
        rates[f"sampler_env_steps_per_s/{index}"] = max(after["env_steps"] - before["env_steps"], 0.0) / seconds
    return rates


def _shares(old: CounterSample, new: CounterSample) -> dict[str, float | None]:
    sampler_times = {
        f"sampler_{name}_share": sum(s[f"{name}_s"] for s in new.samplers) - sum(s[f"{name}_s"] for s in old.samplers)
        for name in _STEPPING
    }
    # An on-policy learner has one step instead of three.
    parts = _LEARNING_ON_POLICY if new.learner.get("learn_s") else _LEARNING
    learner_times = {
        f"learner_{name}_share": new.learner[f"{name}_s"] - old.learner[f"{name}_s"] for name in parts
    }
    return {**_normalised(sampler_times), **_normalised(learner_times), **_actors(old, new)}


def _actors(old: CounterSample, new: CounterSample) -> dict[str, float | None]:
    """What the actor processes did; nothing where there are none."""
    if not new.actors:
        return {}
    done = {name: sum(a[name] for a in new.actors) - sum(a[name] for a in old.actors) for name in new.actors[0]}
    times = {f"actor_{name}_share": done[f"{name}_s"] for name in _INFERRING}
    return {"actor_rows_per_batch": done["rows"] / done["batches"] if done["batches"] > 0 else None,
            **_normalised(times)}


def _normalised(times: dict[str, float]) -> dict[str, Any]:
    total = sum(times.values())
    return {name: value / total if total > 0 else None for name, value in times.items()}
