"""A run, decided: every value that the modes need, with the reason of each automatic choice."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from spreeze.config.layers import Settings
from spreeze.config.schema import Config
from spreeze.errors import ConfigError
from spreeze.transport.replay_ring import RingSpec
from spreeze.transport.rollouts import RolloutSpec
from spreeze.types import EnvSpec, RowLayout


@dataclass(frozen=True, kw_only=True)
class EarlierSessions:
    """What a resumed run has behind it."""

    env_steps: int = 0
    wall_s: float = 0.0
    episodes: int = 0
    sessions: int = 0
    best_return: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a mode is given."""

    settings: Settings
    spec: EnvSpec
    samplers: int
    """Sampler processes; of the on-policy algorithms: executors."""
    free_core: bool
    """True when a core is left for evaluator and visualizer besides samplers and learner."""
    reasons: dict[str, str] = field(default_factory=dict)
    """setting -> why it was chosen automatically."""
    earlier: EarlierSessions = EarlierSessions()
    process_age_s: float = 0.0
    """Age of this process, imports and tuning included, when the mode began."""
    actors: int = 0
    """Processes that infer for executors."""

    def __post_init__(self) -> None:
        config = self.config
        if config.on_policy is not None:
            self._check_rollout()
            return
        if self.spec.frames is not None:
            self._check_images()
        smallest = self.samplers * max(config.sampling.envs_per_sampler, 1) * 2 * (1 + self.layout.depth)
        if config.replay.capacity < smallest:
            raise ConfigError(
                f"replay.capacity = {config.replay.capacity}: {self.samplers} samplers with "
                f"{config.sampling.envs_per_sampler} environments each need at least {smallest}"
            )
        if config.replay.learning_starts > config.replay.capacity:
            raise ConfigError(
                f"replay.learning_starts = {config.replay.learning_starts} is above replay.capacity = "
                f"{config.replay.capacity}: learning would never begin"
            )

    def _check_images(self) -> None:
        """Refuses what does not go with images.

        Raises:
            ConfigError: a normaliser, or replay in checkpoints.
        """
        config, size = self.config, self.config.replay.capacity * self.layout.row_bytes
        if config.env.normalize_obs:
            raise ConfigError("env.normalize_obs = true: images are scaled by 1/255 already; leave it out")
        if config.replay.save:
            raise ConfigError(
                f"replay.save = true: frames in replay take {size / 2**30:.1f} GiB and are not stored; leave it out"
            )

    def _check_rollout(self) -> None:
        """Refuses sizes of an on-policy run that do not go together.

        Raises:
            ConfigError: says which.
        """
        part, minibatches = self.config.rollout, self.minibatches
        if self.actors > self.samplers:
            raise ConfigError(
                f"rollout.actors = {self.actors}: more than the {self.samplers} executors that they infer for; "
                "use at most as many"
            )
        rows = self.rollout_spec().rows
        if rows % minibatches:
            raise ConfigError(
                f"an interval has {rows} rows (sync_interval {part.sync_interval} x {self.samplers} executors x "
                f"{part.envs_per_executor} environments), which {self.config.run.algo}.minibatches = {minibatches} "
                "does not divide; change one of them"
            )
        if self.config.env.normalize_obs and self.spec.frames is not None:
            raise ConfigError("env.normalize_obs = true: images are scaled by 1/255 already; leave it out")
        learner = self.config.learner
        if learner.overlap or "+" in learner.device or learner.device == "split":
            raise ConfigError(
                f"learner.device = {learner.device}, learner.overlap = {str(learner.overlap).lower()}: "
                f"{self.config.run.algo} has one network on one device"
            )
        if self.config.learner.precision != "float32":
            raise ConfigError(
                f"learner.precision = {self.config.learner.precision}: {self.config.run.algo} learns in float32, which "
                "its equal results rest on; leave it out"
            )

    @property
    def lag(self) -> int | None:
        """Intervals between the policy that collects and the one that is learned from its data; None: off-policy."""
        return self.config.wiring.lag

    @property
    def minibatches(self) -> int:
        """Parts that an interval's rows are learned in (on-policy)."""
        return int(getattr(self.config.on_policy, "minibatches", 1))

    @property
    def batch_size(self) -> int:
        """Rows of one update."""
        if self.config.on_policy is None:
            return self.config.learner.batch_size
        return self.rollout_spec().rows // self.minibatches

    def rollout_spec(self) -> RolloutSpec:
        """The storages of an on-policy run."""
        part = self.config.rollout
        return RolloutSpec.of(self.spec, part.sync_interval, self.samplers * part.envs_per_executor)

    def shared_bytes(self) -> tuple[str, int]:
        """The largest block of shared memory that the run needs: its name and size."""
        if self.config.on_policy is None:
            return "replay", self.ring_spec().size_bytes
        return "rollout storages", self.rollout_spec().size_bytes

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.settings.config

    @property
    def layout(self) -> RowLayout:
        """Layout of a replay row."""
        return RowLayout.of(self.spec, self.config.algorithm.n_step, checksum=self.config.replay.checksum)

    def ring_spec(self) -> RingSpec:
        """One shard a sampler, together the asked capacity."""
        return RingSpec(self.layout, self.samplers, -(-self.config.replay.capacity // self.samplers))

    def algorithm_fields(self) -> dict[str, Any]:
        """The algorithm's part as a dictionary."""
        return dataclasses.asdict(self.config.on_policy or self.config.algorithm)
