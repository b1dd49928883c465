"""Jobs of the processes with heavy imports, kept apart so that starting one does not need those imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spreeze.config.schema import LearnerConfig, StopConfig, VisualizerConfig, algorithm_part
from spreeze.transport.gossip import GlooPlace
from spreeze.transport.mixing import MixSpec
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_ring import RingSpec
from spreeze.transport.rollouts import RolloutSpec
from spreeze.types import EnvSpec, Jsonable


@dataclass(frozen=True, kw_only=True)
class AnyLearnerJob(Jsonable):
    run_dir: str
    spec: EnvSpec
    algo: str
    algorithm: dict[str, Any]
    """Fields of the algorithm's settings."""
    learner: LearnerConfig
    seed: int
    normalize_obs: bool
    stop: StopConfig
    """When the run ends; env steps are those of the whole run."""
    run_started_s: float
    """Monotonic time at which this session began; ``wall_base_s`` is the wall time of earlier sessions."""
    wall_base_s: float
    wakeup_fds: tuple[int, ...] = ()
    """Of the wakeup by which samplers tell it of rows or complete rollouts; empty: it polls."""

    @property
    def settings(self) -> Any:
        """The algorithm's settings, of its own class."""
        return algorithm_part(self.algo, self.spec.import_module)(**self.algorithm)


@dataclass(frozen=True, kw_only=True)
class LearnerJob(AnyLearnerJob):
    limiter: RateLimiter
    save_replay: bool
    ring_fd: int
    ring: RingSpec
    num_samplers: int
    env_steps_base: int
    """Env steps of earlier sessions of this run."""
    shared_fds: tuple[int, ...] = ()
    """Of the ``VersionedParameters`` of each group in turn, two files each; empty: this learner averages with none, or
    by gloo."""
    gloo: GlooPlace | None = None
    """Where it meets the others, to average with them; None: they share memory, or there are none."""
    sampler_wakeup_fds: tuple[int, ...] = ()
    """Of the wakeups of its samplers, two descriptors each."""
    loaded_rows: tuple[int, ...] = ()
    """Rows of each shard that came from an earlier session; empty: none."""


@dataclass(frozen=True, kw_only=True)
class OnPolicyLearnerJob(AnyLearnerJob):
    batch_size: int
    """Rows of one update, for the metrics."""
    correction: str
    lag: int
    """Rollouts between the policy that collects and the one that is learned from its data."""
    fingerprint: bool
    rollouts: RolloutSpec
    rollouts_fd: int
    policy_fds: tuple[int, ...]
    state_fds: tuple[int, ...]
    sampler_wakeup_fds: tuple[int, ...]
    mix: MixSpec | None = None
    """How it shares what it learns with other learners; None: it is alone."""


@dataclass(frozen=True, kw_only=True)
class BufferLearnerJob(AnyLearnerJob):
    batch_size: int
    """Rows of one update."""
    env_steps_base: int
    """Env steps of earlier sessions."""
    envs_per_sampler: int
    rollouts: RolloutSpec
    rollouts_fd: int
    policy_fds: tuple[int, ...]
    """By which samplers get new weights."""


@dataclass(frozen=True, kw_only=True)
class UpdateProbeJob(Jsonable):
    spec: EnvSpec
    algo: str
    algorithm: dict[str, Any]
    normalize_obs: bool
    rows: int
    """Number of synthetic rows to draw from."""
    memory_cap_bytes: int
    """A measurement that takes more private memory than this is ended."""


@dataclass(frozen=True, kw_only=True)
class UpdateTurn(Jsonable):
    learner: LearnerConfig
    algorithm: dict[str, Any]
    repeats: int
    repeat_s: float
    deadline_s: float
    kept: bool
    """Whether the device's process is kept for the next measurement, instead of a fresh one each time."""


@dataclass(frozen=True, kw_only=True)
class VisualizerJob(Jsonable):
    run_dir: str
    spec: EnvSpec
    config: VisualizerConfig
    has_free_core: bool
    seed: int
