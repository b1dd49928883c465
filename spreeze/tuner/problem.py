"""What the tuner is told, what it asks to be measured, and what it answers; plain values only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from spreeze.metrics.repeats import median, spread

SCHEMA = 4
"""Version of what ``TuningView.as_json`` gives."""


@dataclass(frozen=True, kw_only=True, order=True)
class LearnerSetting:
    """One way to run the learner."""

    batch_size: int
    threads: int = 1
    device: str = "cpu"
    """A name from ``TuningProblem.devices``: ``cpu``, ``cuda:0``, ``cuda:0+cuda:1`` (actor, critics) ..."""
    precision: str = "float32"


@dataclass(frozen=True, kw_only=True)
class LearnerRate:
    """Updates of one setting, measured with nothing else running."""

    setting: LearnerSetting
    updates_per_s: tuple[float, ...]
    """Every repeat after the warm-up; empty when the candidate failed."""
    failure: str | None = None
    memory_bytes: int | None = None
    """What the device needs for it."""

    @property
    def median(self) -> float:
        """Median updates a second; 0 for a failed candidate."""
        return median(self.updates_per_s)

    @property
    def spread(self) -> float | None:
        """(greatest - least) / median of the repeats."""
        return spread(self.updates_per_s)

    def as_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**dataclasses.asdict(self.setting), "updates_per_s": list(self.updates_per_s),
                "failure": self.failure, "memory_bytes": self.memory_bytes}


@dataclass(frozen=True, kw_only=True, order=True)
class JointSetting:
    """Learner and samplers at the same time."""

    learner: LearnerSetting
    samplers: int
    envs_per_sampler: int
    samples_per_insert_min: float
    """Below this ratio the samplers wait; the learner is never throttled while measuring."""


@dataclass(frozen=True, kw_only=True)
class JointRate:
    """Sampling and learning measured at the same time."""

    setting: JointSetting
    env_steps_per_s: tuple[float, ...]
    updates_per_s: tuple[float, ...]
    cpu_share: tuple[float, ...] = ()
    """Share of the usable cores that the whole run kept busy, each repeat; empty if not known."""
    memory_bytes: int | None = None
    failure: str | None = None

    @property
    def env_median(self) -> float:
        """Median env steps a second; 0 for a failed candidate."""
        return median(self.env_steps_per_s)

    @property
    def update_median(self) -> float:
        """Median updates a second; 0 for a failed candidate."""
        return median(self.updates_per_s)

    @property
    def cpu_median(self) -> float | None:
        """Median share of the usable cores; None if not known."""
        return median(self.cpu_share) if self.cpu_share else None

    @property
    def spread(self) -> float | None:
        """The larger spread of the two rates."""
        found = [one for one in (spread(self.env_steps_per_s), spread(self.updates_per_s)) if one is not None]
        return max(found, default=None)

    def as_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**dataclasses.asdict(self.setting), "env_steps_per_s": list(self.env_steps_per_s),
                "updates_per_s": list(self.updates_per_s), "cpu_share": list(self.cpu_share),
                "failure": self.failure, "memory_bytes": self.memory_bytes}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured candidate, told as soon as it is known."""

    setting: LearnerSetting | JointSetting
    updates_per_s: float | None
    env_steps_per_s: float | None = None
    spread: float | None = None
    cpu_share: float | None = None
    score: float | None = None
    failure: str | None = None

    @property
    def stage(self) -> str:
        """``learner`` for updates alone, ``joint`` with samplers running."""
        return "learner" if isinstance(self.setting, LearnerSetting) else "joint"

    def as_json(self) -> dict[str, Any]:
        """One line of ``tune-progress.jsonl``: the setting's fields beside the medians."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "setting"}
        return {"stage": self.stage, **dataclasses.asdict(self.setting), **fields}

    def line(self) -> str:
        """One line for a terminal."""
        learner = self.setting if isinstance(self.setting, LearnerSetting) else self.setting.learner
        where = f"batch {learner.batch_size:6d}, {learner.threads} threads"
        if learner.device != "cpu" or learner.precision != "float32":
            where += f", {learner.device} {learner.precision}"
        if isinstance(self.setting, JointSetting):
            joint = self.setting
            where = (f"{joint.samplers} samplers x {joint.envs_per_sampler} at >= {joint.samples_per_insert_min:g} "
                     f"samples/insert, {where}")
        if self.failure:
            return f"  {where}: {self.failure}"
        rates = f"{self.updates_per_s or 0.0:8.1f} updates/s"
        if self.env_steps_per_s is None:
            rates += f", {(self.updates_per_s or 0.0) * learner.batch_size:10.0f} update frames/s"
        else:
            rates = f"{self.env_steps_per_s:8.0f} env steps/s, {rates}"
        return f"  {where}: {rates}" + (f" (+-{50 * self.spread:.0f} %)" if self.spread is not None else "")


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where the learner may run."""

    name: str
    """``cpu``, ``cuda:0`` or both devices of a split, ``cuda:0,cuda:1``."""
    memory_bytes: int | None = None
    """Free memory of the device; None for the processor, which has ``TuningProblem.memory_bytes``."""
    precisions: tuple[str, ...] = ("float32",)
    """What may be tried on it, the safest first."""


@dataclass(frozen=True, kw_only=True)
class Configured:
    """What defaults and profile say; the tuner falls back on it and ties go to it."""

    batch_size: int
    capacity: int
    learning_starts: int
    samples_per_insert_min: float
    samples_per_insert_max: float


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What the user has set; None where the tuner chooses."""

    device: str | None = None
    precision: str | None = None
    batch_size: int | None = None
    threads: int | None = None
    samplers: int | None = None
    envs_per_sampler: int | None = None
    capacity: int | None = None
    samples_per_insert_min: float | None = None
    samples_per_insert_max: float | None = None


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What the user wants of the machine."""

    objective: str = "return"
    """A name from ``scores.FORMULAS``."""
    cpu_target: float = 0.75
    gpu_target: float = 0.85
    leave_free: float = 0.0
    """Share of the usable cores that is left to the user."""


@dataclass(frozen=True, kw_only=True)
class TuningProblem:
    """Facts of the machine and the task, what is configured, what is pinned, what is wanted."""

    usable_cores: float
    physical_cores: int | None
    memory_bytes: int
    """Main memory that may still be taken."""
    shared_memory_bytes: int | None
    """Room for replay's memory where that is bounded separately; None if only main memory bounds it."""
    step_us: float | None
    """Mean or median time of one env step; None if not known."""
    step_cv: float | None
    """Its standard deviation over its mean."""
    row_bytes: int
    """One transition in replay."""
    sampler_bytes: int
    """A sampler process with its first environment."""
    env_bytes: int
    """Each further environment."""
    learner_bytes: int = 500_000_000
    """The learner process."""
    devices: tuple[Device, ...] = (Device(name="cpu"),)
    paired: bool = True
    """Whether two threads on the processor share an update as a pair; if not, each product."""
    configured: Configured
    pins: Pins = Pins()
    targets: Targets = Targets()
    budget_s: float = 60.0
    """All of the tuning."""

    @property
    def cores(self) -> float:
        """Cores that may be used: the usable ones without the share that is left free."""
        return self.usable_cores * (1.0 - self.targets.leave_free)


class TrialResult(Protocol):
    """One measured candidate of any search, told as soon as it is known."""

    def as_json(self) -> dict[str, Any]:
        """One line of ``tune-progress.jsonl``."""

    def line(self) -> str:
        """One line for a terminal."""


class Measure(Protocol):
    """The measuring side. Candidates come in the order of their importance.

    Each method measures every setting (at least three repeats, warm-up dropped, repeats interleaved) in
    fresh child processes with a deadline and a memory cap; settings that can share a process do. It tells
    ``on_rate`` each result once, as soon as it is known, and returns all of them. It aims to be done
    within ``within_s`` seconds: it shortens its windows, then leaves out the last settings. A crash, a
    hang or missing memory is a result with ``failure``. What is not returned was not measured.
    """

    def learner(
        self, settings: Sequence[LearnerSetting], *, within_s: float, on_rate: Callable[[LearnerRate], None]
    ) -> list[LearnerRate]:
        """Updates alone, on synthetic rows; may leave out larger batches once an update takes over 0.25 s."""

    def joint(
        self, settings: Sequence[JointSetting], *, within_s: float, on_rate: Callable[[JointRate], None]
    ) -> list[JointRate]:
        """Real samplers beside the real learner."""

    def device_start_s(self, device: str) -> float:
        """What the first measurement on a device takes besides the updates, about; 0 once it has been started."""

    def seconds_left(self) -> float:
        """Seconds of the budget that are left; negative when it is overdrawn."""


@dataclass(frozen=True)
class Choice:
    """One knob: its value, the reason in one sentence, and what came next."""

    value: Any
    reason: str
    pinned: bool = False
    runners_up: tuple[tuple[Any, float], ...] = ()
    """(value, score as a share of the chosen one's), best first."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The choice, its reasons, and everything that was measured."""

    choices: Mapping[str, Choice]
    """By the setting's name: learner.device, learner.precision, learner.batch_size, learner.threads,
    sampling.samplers, sampling.envs_per_sampler, replay.capacity, replay.samples_per_insert_min and _max."""
    objective: str
    formula: str
    learner_rates: tuple[LearnerRate, ...]
    joint_rates: tuple[JointRate, ...]
    cost: tuple[float, float] | None
    """a (s) and b (s per row) of ``t(B) = a + b B`` for the chosen learner; None if fewer than two batches ran."""
    paper_batch: int | None
    """What the Spreeze paper's rule would take."""
    limits: tuple[str, ...] = ()
    """Bounds that cut the choice short, each in a sentence."""
    notes: tuple[str, ...] = field(default=())
    """What changes in the algorithm, what was gained, what could not be measured."""

    def as_json(self) -> dict[str, Any]:
        """Everything measured and chosen, for ``tune.json``."""
        a, b = self.cost or (None, None)
        return {
            "schema": SCHEMA, "objective": self.objective, "formula": self.formula,
            "choice": {name: choice.value for name, choice in self.choices.items()},
            "reasons": {name: choice.reason for name, choice in self.choices.items()},
            "pinned": sorted(name for name, choice in self.choices.items() if choice.pinned),
            "runners_up": {name: [list(one) for one in choice.runners_up] for name, choice in self.choices.items()},
            "cost_a_s": a, "cost_b_s_per_row": b, "paper_batch_size": self.paper_batch,
            "limits": list(self.limits), "notes": list(self.notes),
            "update_rates": [rate.as_json() for rate in self.learner_rates],
            "joint_rates": [rate.as_json() for rate in self.joint_rates],
        }
