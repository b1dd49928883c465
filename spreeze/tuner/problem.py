"""The tuner's input and measurements as plain values, and the definition of a knob."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spreeze.config.layers import Layer, Values
from spreeze.config.modes import DataFlow
from spreeze.config.schema import TuningConfig
from spreeze.metrics import median, spread

SCHEMA = 6  # version of the format of ``Search.as_json``

DEVICE, PRECISION = "learner.device", "learner.precision"
BATCH, THREADS = "learner.batch_size", "learner.threads"
SAMPLERS, ENVS = "sampling.samplers", "sampling.envs_per_sampler"
CAPACITY, RATIO, RATIO_MAX = "replay.capacity", "replay.samples_per_insert_min", "replay.samples_per_insert_max"
ROLLOUT_SAMPLERS, ROLLOUT_ENVS = "rollout.samplers", "rollout.envs_per_sampler"
INFERENCE_WORKERS, LEARNERS = "rollout.inference_workers", "run.learners"
SYNC_INTERVAL, MINIBATCHES = "rollout.sync_interval", "algorithm.minibatches"
SLOTS, USES = "algorithm.slots", "algorithm.uses"
"""Knobs by their names; ``algorithm.FIELD`` stands for a field of the chosen algorithm."""

LEARNER, JOINT, ROLLOUT, FACTS = "learner", "joint", "rollout", "facts"
"""Trials: updates alone; everything of a mode with replay; everything of one with rollouts; none, facts decide."""


class Setting(dict[str, Any]):
    """Values by the dotted names of their settings; a key of other dictionaries, so it is never changed."""

    __slots__ = ("_hash",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
        self._hash = hash(frozenset(self.items()))

    def __hash__(self) -> int:  # type: ignore[override]
        return self._hash

    def replace(self, name: str, value: Any) -> Setting:
        return Setting({**self, name: value})

    def without(self, *names: str) -> Setting:
        return Setting({name: value for name, value in self.items() if name not in names})

    def layer(self) -> Layer:
        """Returns these values as a layer of settings."""
        values: Values = {}
        for name, value in self.items():
            part, item = name.split(".")
            values.setdefault(part, {})[item] = value
        return Layer("tuner", values)


@dataclass(kw_only=True)
class TrialResult:
    """Result of one setting in one kind of trial so far; reported as soon as it is complete."""

    trial: str  # ``LEARNER``, ``JOINT`` or ``ROLLOUT``
    setting: Setting
    updates_per_s: tuple[float, ...] = ()  # every repeat after the warm-up; empty when the candidate failed
    env_steps_per_s: tuple[float, ...] = ()
    cpu_share: tuple[float, ...] = ()
    """Share of the usable cores that the whole trial kept busy, each repeat; empty if not known."""
    memory_bytes: int | None = None
    failure: str | None = None
    starved: bool = False
    """True if it failed for lack of time or memory without a worker error: other programs may be the cause."""
    score: float | None = None

    @property
    def updates(self) -> float:
        """Median updates a second; 0 for a failed candidate."""
        return median(self.updates_per_s)

    @property
    def env_steps(self) -> float:
        """Median env steps a second; 0 for a failed candidate."""
        return median(self.env_steps_per_s)

    @property
    def cpu(self) -> float | None:
        return median(self.cpu_share) if self.cpu_share else None

    @property
    def spread(self) -> float | None:
        """(greatest - least) / median of the repeats, the larger one of the two rates."""
        spreads = (spread(self.env_steps_per_s), spread(self.updates_per_s))
        return max((value for value in spreads if value is not None), default=None)

    @property
    def ran(self) -> bool:
        learned = self.updates > 0 or self.trial == ROLLOUT
        return self.failure is None and learned and (self.env_steps > 0 or self.trial == LEARNER)

    def fail(self, why: str, *, starved: bool = False) -> None:
        self.failure, self.starved = why, starved
        self.updates_per_s, self.env_steps_per_s, self.cpu_share = (), (), ()

    def as_json(self) -> dict[str, Any]:
        """A line of ``tune-progress.jsonl`` and an entry of ``tune.json``."""
        values = {**vars(self), "setting": dict(self.setting)}
        return {"stage": values.pop("trial"), **values}


OnResult = Callable[[TrialResult], None]


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str  # ``cpu``, ``cuda:0`` or both devices of a split (actor, critics), ``cuda:0+cuda:1``
    memory_bytes: int | None = None
    """Free memory of the device; None for the processor, which has ``TuningProblem.memory_bytes``."""
    precision: str = "float32"


@dataclass(frozen=True)
class Choice:
    """The choice of one knob: its value, the reason in one sentence, and the runners-up."""

    value: Any
    reason: str
    pinned: bool = False
    runners_up: tuple[tuple[Any, float], ...] = ()  # (value, score as a share of the chosen one's), best first


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory that settings have to fit into."""

    capacity: Choice
    envs_per_sampler: Choice
    samplers: int  # sampler processes that memory allows, at least 1
    batch_size: int  # largest batch that replay allows
    limits: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TuningProblem:
    """Facts of the machine and the task; configured values, pins and the objective."""

    knobs: tuple[Knob, ...]  # knobs to choose; they decide ties and are varied in this order
    configured: Setting  # value of each knob in defaults, profile and the user's settings; None if not known yet
    pins: frozenset[str] = frozenset()  # knobs that stay as configured: set by the user, or ``kept``
    kept: frozenset[str] = frozenset()  # the ``pins`` that the profile protects (``about.keep``)
    resumed: frozenset[str] = frozenset()  # the ``pins`` on which the stored data of a resumed run depend
    targets: TuningConfig = field(default_factory=TuningConfig)
    trial: str = JOINT  # the trial in which everything runs, ``JOINT`` or ``ROLLOUT``
    usable_cores: float
    memory_bytes: int  # main memory that may still be taken
    sampler_bytes: int  # memory of a process that steps environments, with its first one
    env_bytes: int  # memory of each further environment
    learner_bytes: int = 500_000_000
    physical_cores: int | None = None
    step_us: float | None = None  # mean or median time of one env step; None if not known
    one_call: bool = False
    """An engine steps all environments of a sampler in one call, whose own cost many of them share."""
    step_cpu_share: float = 1.0
    """Share of a core that stepping an environment takes; less where it waits, for hardware or a server."""
    row_bytes: int = 1  # size of a transition in replay
    learning_starts: int = 0
    samplers: int = 1
    """Sampler processes beside the learner that a run without the tuner has, where none are configured."""
    devices: tuple[Device, ...] = (Device(name="cpu"),)
    paired: bool = True  # True if two threads on the CPU share an update as a pair; if not, each matmul
    balanced: bool = False
    """The mode takes as few env steps as the learner can use, so more environments per sampler would only be slower."""
    observer_cores: float = 0.0
    """Cores that evaluator, visualizer and supervisor take in a run where none is free; they are not measured."""
    memory_plan: MemoryPlan | None = None  # filled in by ``search.tune``, for modes with replay

    @property
    def known_memory_plan(self) -> MemoryPlan:
        """The memory plan of a mode with replay, after ``knobs.find_memory_plan`` has found it."""
        assert self.memory_plan is not None
        return self.memory_plan

    def full_name(self, name: str) -> str | None:
        """The setting that ``algorithm.FIELD`` stands for; None if the algorithm has no such field."""
        return next((one for one in self.configured if one.endswith(name.removeprefix("algorithm"))), None)

    @property
    def cores(self) -> float:
        """Cores that may be used: the usable ones without the share that is left free."""
        return self.usable_cores * (1.0 - self.targets.leave_free)

    @property
    def objective(self) -> str:
        """A name from ``model.FORMULAS``, or ``rollout``."""
        return ROLLOUT if self.trial == ROLLOUT else self.targets.objective

    def pin(self, name: str) -> Any:
        """Configured value of a pinned knob; None if the tuner chooses."""
        return self.configured[name] if name in self.pins else None

    def pinned_by(self, name: str) -> str:
        """Reason why it is pinned, in words."""
        if name in self.resumed:
            return "kept by the run that goes on"
        return "kept by the profile" if name in self.kept else "set by you"


def _nearest(problem: TuningProblem, name: str, value: Any) -> Any:
    configured = problem.configured[name]
    return value != configured, abs(value) if isinstance(value, int | float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A setting that the tuner chooses, with all that the tuner needs to know about it.

    ``KNOBS`` of an ``--import`` module declares more: a row each, with a name and candidates at least. Such a knob is
    varied after all others, around the choice, and takes another value only for a gain of 5 %.
    """

    name: str  # the setting, ``section.field``; ``algorithm.FIELD`` is read as a field of the chosen algorithm
    candidates: Callable[[TuningProblem, Setting], Iterable[Any]] = lambda problem, current: ()
    """Values worth trying, the most promising first, from the facts and the values of the other knobs."""
    trial: str = JOINT  # ``LEARNER``: measured on the learner alone; ``JOINT``: on all workers; ``FACTS``: not measured
    fit: Callable[[TuningProblem, Setting], Setting | None] = lambda problem, setting: setting
    """The setting with all values that follow from this knob; None if memory, cores or other knobs forbid it."""
    text_format: str = ""  # text of a value in a sentence, such as ``{} sampler{s}``; by default name and value
    label: str = ""  # ``column``, if not the last word of the name
    usual: Any = None  # a line of results omits this value
    where: Callable[[DataFlow], bool] | None = None
    """The data flows in which it is tuned, if a mode names no knobs.

    None: those that read the setting, or the asynchronous ones for a setting of the algorithm.
    """
    precedence: int = 0
    """Knobs with the lowest value decide ties and are varied first (``knobs.ordered``); equal ones in display order."""
    tie: Callable[[TuningProblem, str, Any], Any] = _nearest
    """Among equal scores the value that minimizes this is taken: by default the configured one, then the least."""
    remark: Callable[[TuningProblem, Setting], str] = lambda problem, setting: ""  # remark on the chosen value
    figures: str = ""  # rates of the choice, in its reason: a format of ``updates_per_s`` and ``env_steps_per_s``
    fixed: bool = False  # a resumed run keeps its value, since its stored data depend on it
    varied_last: bool = False
    """Varied by its candidates around the choice of the other knobs. Set by ``knobs_of``, not by a row of the table."""

    @property
    def column(self) -> str:
        """Head of its column in a table."""
        return self.label or self.name.split(".")[1]

    def text(self, value: Any) -> str:
        if not self.text_format:
            return f"{self.name} {value}"
        return self.text_format.format(value, s="" if value == 1 else "s")

    def neighbours(self, problem: TuningProblem, current: Setting) -> list[Setting]:
        """Settings that differ from ``current`` in this knob and in values that follow from it."""
        if self.name in problem.pins:
            return []
        fitted = [self.fit(problem, current.replace(self.name, value)) for value in self.candidates(problem, current)]
        return list(dict.fromkeys(setting for setting in fitted if setting is not None and setting != current))


def spread_of(results: Iterable[TrialResult]) -> float:
    """The greatest spread of some results; infinite if a result has no spread, or there are none."""
    return max((math.inf if result.spread is None else result.spread for result in results), default=math.inf)


def setting_text(problem: TuningProblem, setting: Setting) -> str:
    """A setting in one line; values that are ``usual`` are left out."""
    knobs = {knob.name: knob for knob in problem.knobs}
    names = [name for name in problem.configured if name in setting]
    return ", ".join(knobs[name].text(setting[name]) for name in names if setting[name] != knobs[name].usual)


def too_much_memory(cap_bytes: int) -> str:
    return f"out of memory: more than the {cap_bytes / 1e9:.1f} GB limit of a candidate"


def result_line(problem: TuningProblem, result: TrialResult) -> str:
    """A measured candidate in one line, for a terminal."""
    where = setting_text(problem, result.setting)
    if result.failure:
        return f"  {where}: {result.failure}"
    rates = f"{result.env_steps:.0f} env steps/s"
    if result.trial == LEARNER:
        rates = f"{result.updates:.1f} updates/s, {result.updates * result.setting[BATCH]:.0f} update frames/s"
    elif result.trial == JOINT or problem.full_name(USES) is not None:
        rates += f", {result.updates:.1f} updates/s"
    return f"  {where}: {rates}" + (f" (+-{50 * result.spread:.0f} %)" if result.spread is not None else "")
