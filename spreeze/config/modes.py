"""The modes, one declaration each. Config, tuner and page read this table without importing the code of a mode.

A module that ``--import`` names may declare more of them, as its own ``MODES``. To add a mode, write its declaration.
A mode with its own data path also names a module, which has ``assemble`` (see ``spreeze.modes``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spreeze.inference.user_modules import extended, find
from spreeze.types import rebuild


@dataclass(frozen=True, kw_only=True)
class PipelineBox:
    """One box of the page's pipeline: data passes through the stages from left to right."""

    title: str
    items: tuple[str, ...]
    """Names of the metrics in the box (``metrics.table``)."""
    split: str = ""
    """Role whose time split the box shows."""


@dataclass(frozen=True, kw_only=True)
class DataFlow:
    """Data flow of a mode for one kind of algorithm."""

    stages: tuple[PipelineBox, ...]
    serial: bool = False
    """Sampling and learning alternate; otherwise they run in parallel."""
    on_device: bool = False
    """The learner steps the environments on its own device; evaluator and visualizer run in other processes."""
    lag: int | None = None
    """Lag of the collecting policy behind the learner in rollouts; None where the learner draws from replay."""
    asynchronous: bool = False
    """Samplers run at their own pace; they block only before overwriting a rollout that has not had its minimum uses.
    For algorithms that take rollouts of any age, whose lag is then at least ``lag``."""
    inference_workers: bool = False
    """``rollout.inference_workers`` processes may run the policy for the samplers of one learner."""
    mixes_parameters: bool = False
    """Learners mix their parameters (``gala.mixing``) and start with equal ones."""
    averages_parameters: bool = False
    """Learners average their parameters every ``learner.average_interval`` updates and start with equal ones."""

    @property
    def from_replay(self) -> bool:
        """True if learners draw from replay, False if they take rollouts."""
        return self.lag is None

    def takes_turns(self, samplers: int) -> bool:
        """True if sampler, learner and evaluator take turns in the process of the command; nothing is rendered."""
        return self.serial and not self.on_device and samplers == 1

    @property
    def supports_learner_groups(self) -> bool:
        """True if ``run.learners`` groups may run in parallel, each with its own learner, samplers and buffer."""
        return self.supports_remote_learners or self.supports_remote_samplers

    @property
    def supports_remote_samplers(self) -> bool:
        """True if samplers of other hosts may take part (``--cluster``)."""
        return self.from_replay and not self.serial and not self.supports_remote_learners

    @property
    def supports_remote_learners(self) -> bool:
        """True if other hosts have learners, which join those of this host (``--cluster``)."""
        return self.mixes_parameters or self.averages_parameters

    @property
    def tunable(self) -> bool:
        """True if the tuner has settings to choose: those of processes that run in parallel."""
        return not self.serial

    @property
    def balanced(self) -> bool:
        """True if limiter and governor keep the samples per insert of mode serial."""
        return self.averages_parameters and self.from_replay


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Declaration of a mode."""

    name: str
    doc: str
    """Description in one line."""
    module: str = ""
    """Module with ``assemble(run)``, which connects workers and channels, or ``run_mode``, which runs the whole mode;
    imported when the run starts. Empty: its data flows describe it completely."""
    replay: DataFlow | None = None
    """Data flow for off-policy algorithms; None: not supported."""
    on_policy: DataFlow | None = None
    """Data flow for on-policy algorithms; None: not supported."""

    def data_flow(self, *, on_policy: bool) -> DataFlow | None:
        """The data flow for that kind of algorithm; None: not supported."""
        return self.on_policy if on_policy else self.replay

    @property
    def on_device(self) -> bool:
        """True if a learner steps the environments on its own device."""
        return any(data_flow.on_device for data_flow in (self.replay, self.on_policy) if data_flow is not None)

    @property
    def starts_processes(self) -> bool:
        """True if a worker process will be needed, whatever the algorithm."""
        return any(not data_flow.serial for data_flow in (self.replay, self.on_policy) if data_flow is not None)


_SAMPLERS = PipelineBox(title="Samplers", split="sampler", items=("samplers_active", "env_steps_per_s"))


def _stages(title: str, *items: str, also: tuple[str, ...]) -> tuple[PipelineBox, ...]:
    """Samplers, a buffer of that title, and a learner that shows ``also`` beside its updates/s."""
    learner_box = PipelineBox(title="Learner", split="learner", items=("updates_per_s", *also))
    return (_SAMPLERS, PipelineBox(title=title, items=items), learner_box)


REPLAY_STAGES = _stages("Replay", "replay_fill", "samples_per_insert", "transition_age", also=("policy_lag",))
BALANCED_STAGES = _stages("Replay", "replay_fill", "samples_per_insert_now", "staleness", also=("policy_lag",))
ROLLOUT_STAGES = _stages("Storages", "samples_per_insert", "policy_lag", also=("update_frames_per_s",))
BUFFER_STAGES = _stages(
    "Circular buffer", "samples_per_insert", "rollout_uses", "rollouts_dropped", also=("policy_lag", "target_updates")
)
GOSSIP_STAGES = (
    _SAMPLERS,
    PipelineBox(title="Learners", split="learner", items=("updates_per_s", "learners_spread")),
    PipelineBox(title="Gossip", items=("gossip_radius", "gossip_staleness")),
)
DECLARED = (
    Mode(
        name="spreeze",
        doc="samplers fill the replay buffer while the learner trains on large batches",
        replay=DataFlow(stages=REPLAY_STAGES),
    ),
    Mode(
        name="serial",
        module="spreeze.modes.serial",
        doc="the same workers take turns in one process: a run of a seed repeats bit by bit where counts end it",
        replay=DataFlow(stages=REPLAY_STAGES, serial=True),
        on_policy=DataFlow(stages=ROLLOUT_STAGES, serial=True, lag=0),
    ),
    Mode(
        name="hts",
        doc="samplers collect the next rollout while the learner trains on the last one (HTS-RL)",
        on_policy=DataFlow(stages=ROLLOUT_STAGES, lag=1, inference_workers=True),
    ),
    Mode(
        name="impact",
        doc="the learner reuses rollouts from a circular buffer while samplers keep collecting (IMPACT)",
        on_policy=DataFlow(stages=BUFFER_STAGES, lag=1, asynchronous=True),
    ),
    Mode(
        name="gala",
        doc="learners with their own samplers gossip their parameters around a ring, asynchronously (GALA)",
        on_policy=DataFlow(stages=GOSSIP_STAGES, lag=0, mixes_parameters=True),
    ),
    Mode(
        name="tianji",
        doc="groups of samplers, buffer and learner at a fixed ratio of samples per insert; learners average "
        "their parameters (TianJi)",
        replay=DataFlow(stages=BALANCED_STAGES, averages_parameters=True),
        on_policy=DataFlow(stages=ROLLOUT_STAGES, lag=1, averages_parameters=True, inference_workers=True),
    ),
    Mode(
        name="device",
        module="spreeze.modes.device",
        doc="the learner's device also steps the environments and keeps replay, without a copy to the host",
        replay=DataFlow(stages=REPLAY_STAGES, serial=True, on_device=True),
        on_policy=DataFlow(stages=ROLLOUT_STAGES, serial=True, on_device=True, lag=0),
    ),
)
"""The modes that come with Spreeze, the default first."""


def modes(import_module: str | None = None) -> dict[str, Mode]:
    """Name -> mode: the declared ones, then those of a module (see ``extended``)."""
    return extended({mode.name: mode for mode in DECLARED}, import_module, "MODES", Mode)


def find_mode(name: str, import_module: str | None = None) -> Mode:
    """The mode of that name (see ``find``)."""
    return find(name, import_module, modes, "run.mode")


def data_flow_of(run: Mapping[str, Any], *, on_policy: bool) -> DataFlow | None:
    """The data flow of a run, from its ``run.json``; None if neither the table nor the file has it."""
    mode = modes().get(str(run.get("mode", DECLARED[0].name)))
    if mode is not None:
        return mode.data_flow(on_policy=on_policy)
    try:
        known = {name: value for name, value in run["data_flow"].items() if name != "knobs"}  # of an earlier version
        return rebuild(DataFlow, known)
    except (KeyError, TypeError, AttributeError):
        return None  # a file may hold anything
