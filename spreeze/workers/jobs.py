"""The jobs of all workers: the settings that each process starts with, and the handles of its channels.

A job names the function that does it, which is imported only in the worker's own process. A mode of another module may
have jobs of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from spreeze.config.schema import (
    EvaluationConfig,
    LearnerConfig,
    SamplingConfig,
    StopConfig,
    VisualizerConfig,
    algorithm_section,
)
from spreeze.transport.gossip import GossipHandle
from spreeze.transport.mixing import MixSpec
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_ring import RingHandle
from spreeze.transport.rollouts import MailboxHandle, RolloutsHandle
from spreeze.transport.shared_memory import WakeupHandle
from spreeze.transport.weights import ParametersHandle
from spreeze.types import EnvSpec, Jsonable, RowLayout


class Job(Jsonable):
    entry_point: ClassVar[str]
    """``module:function`` that does it, called with the worker's context and the job.

    A function that yields when it is ready and after each of its turns can share a process with others.
    """


@dataclass(frozen=True, kw_only=True)
class BaseLearnerJob(Job):
    group_dir: str  # the run directory, or its group-N of a run with several learners
    spec: EnvSpec
    algo: str
    algorithm: dict[str, Any]
    learner: LearnerConfig
    seed: int
    normalize_obs: bool
    stop: StopConfig  # when the run ends; env steps are those of the whole run
    session_started_s: float
    """Monotonic time at which this session started; ``previous_...`` are totals of earlier sessions."""
    previous_wall_s: float
    previous_env_steps: int = 0
    session: float  # number by which checkpoints recognize this session
    publishes_values: bool = False
    """True if the values of its networks are published beside its policy, for recorded episodes."""
    publish_updates: int | None = None  # updates between two publications; None: by the clock
    wakeup: WakeupHandle | None = None  # wakeup by which samplers signal new rows or rollouts; None: it polls
    sampler_wakeups: tuple[WakeupHandle, ...] = ()
    """Wakeups by which it signals drawn batches or a swap to its samplers; empty: they poll."""

    @property
    def settings(self) -> Any:
        """The algorithm's settings, of its own class."""
        return algorithm_section(self.algo, self.spec.import_module)(**self.algorithm)


@dataclass(frozen=True, kw_only=True)
class BaseReplayJob(BaseLearnerJob):
    limiter: RateLimiter
    save_replay: bool = False
    rollback_enabled: bool = False
    sampler_status_rows: tuple[int, ...]
    """Rows of the status table of all samplers of the run, other hosts' too: their env steps go into checkpoints."""
    weights_channel: ParametersHandle | None = None
    """The memory by which its samplers get the weights of every update; None: files."""
    averages: tuple[ParametersHandle, ...] = ()
    """One for each group's learner; empty: this learner averages with none, or also with those of ``hosts``."""
    hosts: GossipHandle | None = None
    """Messages of the learners of all hosts, to average with them; None: only this host has learners."""
    loaded_rows: tuple[int, ...] = ()  # rows of each shard that came from an earlier session; empty: none
    returns: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Count, sum and sum of squares of the demonstrations' returns, which are new to the learner."""
    offline: bool = False  # True if there are no samplers


@dataclass(frozen=True, kw_only=True)
class ReplayLearnerJob(BaseReplayJob):
    entry_point = "spreeze.workers.replay_learner:learn_from_replay"

    replay: RingHandle


@dataclass(frozen=True, kw_only=True)
class DeviceEnvs(Jsonable):
    """Environments of a learner that steps them itself, on its device."""

    num_envs: int
    seed: int
    nan_policy: str
    row: int
    steps: int = 0  # T: env steps of each environment in a rollout; 0 with replay
    capacity: int = 0  # rows of replay; 0 with rollouts


@dataclass(frozen=True, kw_only=True)
class DeviceReplayJob(BaseReplayJob):
    entry_point = "spreeze.workers.device_learner:learn_from_device_replay"

    layout: RowLayout
    envs: DeviceEnvs


@dataclass(frozen=True, kw_only=True)
class BaseRolloutJob(BaseLearnerJob):
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class DeviceRolloutJob(BaseRolloutJob):
    entry_point = "spreeze.workers.device_learner:learn_from_device_rollouts"

    envs: DeviceEnvs


@dataclass(frozen=True, kw_only=True)
class OnPolicyLearnerJob(BaseRolloutJob):
    entry_point = "spreeze.workers.rollout_learner:learn_from_rollouts"

    correction: str
    lag: int  # rollouts between the policy that collects and the one that is learned from its data
    rollouts: RolloutsHandle
    weights_channel: ParametersHandle
    states: ParametersHandle
    mix: MixSpec | None = None


@dataclass(frozen=True, kw_only=True)
class BufferLearnerJob(BaseRolloutJob):
    entry_point = "spreeze.workers.buffer_learner:learn_from_buffer"

    envs_per_sampler: int
    rollouts: RolloutsHandle
    weights_channel: ParametersHandle


@dataclass(frozen=True, kw_only=True)
class EvaluatorJob(Job):
    entry_point = "spreeze.workers.evaluator:run_evaluator"

    run_dir: str
    spec: EnvSpec
    config: EvaluationConfig
    has_free_core: bool
    groups: int = 1  # number of learners; their weights are evaluated in turn
    target_return: float | None = None
    max_envs: int | None = None  # maximum number of environments at a time; None: as many as suit the task


@dataclass(frozen=True, kw_only=True)
class BaseSamplerJob(Job):
    spec: EnvSpec
    index: int
    num_envs: int
    seed: int
    nan_policy: str
    evaluation: EvaluatorJob | None = None
    """Evaluations in the sampler's own environment; None: an evaluator has its own."""


@dataclass(frozen=True, kw_only=True)
class RowFacts(Jsonable):
    """Facts of the run that decide what rows its samplers write, on any host."""

    spec: EnvSpec
    nan_policy: str
    n_step: int
    gamma: float
    her: str = "off"  # goals that are added, as ``ReplayConfig.her``
    rows_per_step: int = 1  # rows of one env step, at most: its transition, and those with other goals

    @property
    def row_facts(self) -> dict[str, Any]:
        """These fields, for another object that has them."""
        return {part.name: getattr(self, part.name) for part in fields(RowFacts)}


@dataclass(frozen=True, kw_only=True)
class ReplaySamplerJob(RowFacts, BaseSamplerJob):
    entry_point = "spreeze.workers.samplers:run_sampler"

    group_dir: str
    limiter: RateLimiter
    replay: RingHandle
    loaded_rows: int = 0
    stream: int | None = None  # number that, with the seed, determines its random numbers; None: its index
    weights_channel: ParametersHandle | None = None
    wakeup: WakeupHandle | None = None
    learner_wakeup: WakeupHandle | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutWorkerJob(Job):
    entry_point = "spreeze.workers.samplers:run_inference_worker"

    index: int
    num_envs: int  # M: environments of each sampler
    num_inference_workers: int  # 0: the samplers compute their own actions
    rollouts: RolloutsHandle
    mailbox: MailboxHandle
    weights_channel: ParametersHandle
    sampler_wakeups: tuple[WakeupHandle, ...]
    inference_wakeups: tuple[WakeupHandle, ...]


@dataclass(frozen=True, kw_only=True)
class RolloutSamplerJob(RolloutWorkerJob, BaseSamplerJob):
    entry_point = "spreeze.workers.samplers:run_rollout_sampler"

    step_synchronous: bool
    learner_wakeup: WakeupHandle


@dataclass(frozen=True, kw_only=True)
class BufferSamplerJob(BaseSamplerJob):
    entry_point = "spreeze.workers.samplers:run_buffer_sampler"

    rollouts: RolloutsHandle
    weights_channel: ParametersHandle
    learner_wakeup: WakeupHandle


@dataclass(frozen=True, kw_only=True)
class VisualizerJob(Job):
    entry_point = "spreeze.workers.visualizer:run_visualizer"

    run_dir: str
    spec: EnvSpec
    config: VisualizerConfig
    has_free_core: bool
    seed: int


@dataclass(frozen=True, kw_only=True)
class HostJob(RowFacts):
    """Facts of the run that a host needs."""

    layout: RowLayout  # layout of a row; the host derives it as well, and they have to be equal
    seed: int
    sampling: SamplingConfig
    samplers: int | None = None  # None: the choice of the host's tuner, or one per usable core
    gives_way: bool = False
    tune: tuple[str, ...] = ()
    """Arguments of ``spreeze tune`` that measure samplers and environments there; empty: nothing is measured."""


@dataclass(frozen=True, kw_only=True)
class RowBridgeJob(Job):
    entry_point = "spreeze.runtime.cluster.row_bridge:run_row_bridge"

    address: str
    run_dir: str
    replay: RingHandle
    first_shard: int  # first of the shards that are this process's own; the last one of the ring is its last
    limiter: RateLimiter
    host: HostJob
    host_rows: tuple[int, ...]  # rows of the status table, one for each host that there may be
    learner_wakeup: WakeupHandle | None = None


@dataclass(frozen=True, kw_only=True)
class LearnerBridgeJob(Job):
    entry_point = "spreeze.runtime.cluster.learner_bridge:run_learner_bridge"

    address: str
    messages: GossipHandle
    topology: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class UpdateProbeJob(Jsonable):
    spec: EnvSpec
    algo: str
    algorithm: dict[str, Any]
    normalize_obs: bool
    rows: int
    memory_cap_bytes: int  # a measurement that takes more private memory than this is ended


@dataclass(frozen=True, kw_only=True)
class UpdateTurn(Jsonable):
    learner: LearnerConfig
    algorithm: dict[str, Any]
    repeats: int
    repeat_s: float
    deadline_s: float
    kept: bool  # True if the device's process is kept for the next measurement, instead of a fresh one each time
