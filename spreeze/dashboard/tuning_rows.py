"""What the tuner has measured so far: from ``tune.json``, or from its progress file while it is at work."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spreeze.dashboard.run_data import read_json, tail_text
from spreeze.metrics.repeats import spread

PROGRESS = "tune-progress.jsonl"


@dataclass(frozen=True)
class UpdateRow:
    """One batch size, measured."""

    batch_size: int
    threads: int
    updates_per_s: float | None
    spread: float | None
    """Fastest less slowest repeat, as a share of the median."""
    failure: str | None
    score: float | None = None

    @property
    def frames_per_s(self) -> float | None:
        """Update frames a second."""
        return None if self.updates_per_s is None else self.updates_per_s * self.batch_size


@dataclass(frozen=True)
class JointRow:
    """One number of samplers, measured beside the learner."""

    samplers: int
    env_steps_per_s: float | None
    updates_per_s: float | None
    batch_size: int | None = None
    envs_per_sampler: int | None = None
    score: float | None = None
    failure: str | None = None
    samples_per_insert_min: float | None = None
    threads: int | None = None
    cpu_share: float | None = None
    """Share of the usable cores that the run kept busy."""

    @property
    def kind(self) -> tuple[float, int, int, int]:
        """What but the number of samplers tells it from others; they are one curve."""
        return (self.samples_per_insert_min or 0.0, self.batch_size or 0, self.threads or 0, self.envs_per_sampler or 0)

    def is_choice(self, choice: dict[str, Any]) -> bool:
        """True where it has all that was chosen."""
        own = {
            "sampling.samplers": self.samplers, "sampling.envs_per_sampler": self.envs_per_sampler,
            "learner.batch_size": self.batch_size, "learner.threads": self.threads,
            "replay.samples_per_insert_min": self.samples_per_insert_min,
        }
        known = {key: value for key, value in own.items() if value is not None and key in choice}
        return bool(known) and all(choice[key] == value for key, value in known.items())


@dataclass(frozen=True)
class RolloutRow:
    """One way to collect for an on-policy algorithm, measured beside the learner."""

    executors: int
    envs_per_executor: int | None
    actors: int | None
    sync_interval: int | None
    minibatches: int | None
    env_steps_per_s: float | None
    cpu_share: float | None
    failure: str | None

    def is_choice(self, choice: dict[str, Any]) -> bool:
        """True where it has all that was chosen."""
        return bool(choice) and all(getattr(self, name) == choice.get(f"rollout.{name}") for name in (
            "executors", "envs_per_executor", "actors", "sync_interval"))


@dataclass(frozen=True)
class TuningView:
    """All that is known; ``choice`` is empty while the tuner is still at work."""

    updates: list[UpdateRow] = field(default_factory=list)
    joint: list[JointRow] = field(default_factory=list)
    choice: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    rollouts: list[RolloutRow] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        """Whether there is any row."""
        return bool(self.updates or self.joint or self.rollouts)


def read(path: Path) -> TuningView:
    """The tuner's result of a run, or what it has measured so far."""
    record = read_json(path / "tune.json")
    if record:
        entries = [*record.get("update_rates", []), *record.get("joint_rates", [])]
        return TuningView(*_rows(entries), _dict(record.get("choice")), _dict(record.get("reasons")), record,
                      _rollouts(record.get("rollout_rates")))
    entries = []
    for line in tail_text(path / PROGRESS).splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return TuningView(*_rows(entries), rollouts=_rollouts(entries))


def _rows(entries: list[Any]) -> tuple[list[UpdateRow], list[JointRow]]:
    updates, joint = [], []
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        rates = _rates(entry.get("updates_per_s"))
        middle = statistics.median(rates) if rates else None
        failure = entry["failure"] if isinstance(entry.get("failure"), str) else None
        if isinstance(entry.get("samplers"), int):
            steps, learner = _rates(entry.get("env_steps_per_s")), _dict(entry.get("learner"))
            joint.append(JointRow(
                entry["samplers"], statistics.median(steps) if steps else None, middle,
                _integer(learner.get("batch_size")), _integer(entry.get("envs_per_sampler")),
                _number(entry.get("score")), failure, _number(entry.get("samples_per_insert_min")),
                _integer(learner.get("threads")), _middle(entry.get("cpu_share")),
            ))
        elif isinstance(entry.get("batch_size"), int) and isinstance(entry.get("threads"), int):
            told = spread(rates) if len(rates) > 1 else _number(entry.get("spread"))
            score = _number(entry.get("score"))
            updates.append(UpdateRow(entry["batch_size"], entry["threads"], middle, told, failure, score))
    return updates, joint


def _rollouts(entries: Any) -> list[RolloutRow]:
    rows = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return [
        RolloutRow(
            executors=entry["executors"], envs_per_executor=_integer(entry.get("envs_per_executor")),
            actors=_integer(entry.get("actors")), sync_interval=_integer(entry.get("sync_interval")),
            minibatches=_integer(entry.get("minibatches")), env_steps_per_s=_middle(entry.get("env_steps_per_s")),
            cpu_share=_middle(entry.get("cpu_share")),
            failure=entry["failure"] if isinstance(entry.get("failure"), str) else None,
        )
        for entry in rows if _integer(entry.get("executors")) is not None
    ]


def _rates(value: Any) -> list[float]:
    """Repeats of a rate; a row of a tuner at work has their median alone."""
    values = value if isinstance(value, list) else [value]
    return [float(x) for x in values if _number(x) is not None]


def _middle(value: Any) -> float | None:
    rates = _rates(value)
    return statistics.median(rates) if rates else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
