"""The plan of a run: every value that the modes need, with the reason of each automatic choice."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from spreeze.config.algorithm_bases import AsyncOnPolicyConfig
from spreeze.config.layers import DEFAULT, Settings, toml_value
from spreeze.config.profiles import NO_PROFILE
from spreeze.config.schema import Config
from spreeze.metrics.progress import Ending, ending_of
from spreeze.runtime.plan_checks import check
from spreeze.transport.gossip import GossipHandle
from spreeze.transport.replay_ring import RingSpec
from spreeze.transport.rollouts import RolloutSpec
from spreeze.types import EnvSpec, RowLayout


@dataclass(frozen=True, kw_only=True)
class EarlierSessions:
    """Totals of the earlier sessions of a resumed run."""

    env_steps: int = 0
    updates: int = 0
    wall_s: float = 0.0
    episodes: int = 0
    sessions: int = 0
    best_return: float | None = None


_OF_THIS_HOST = ("run", "cluster", "stop", "logging", "visualizer", "tuning")
_OF_THIS_MACHINE = ("learner.device", "learner.threads", "learner.precision", "sampling.samplers", "rollout.samplers",
                    "rollout.inference_workers")  # fmt: skip
_WITH_FLAGS = ("env.id", "env.import_module", "env.plain", "env.args", "replay.demonstrations")
"""Settings that another host's run does not take over, or gets by flags of their own."""


class TunerChoice(NamedTuple):
    samplers: int
    plan: RunPlan | None = None  # the plan for which all workers have to start again; None: the choice is in force


class RunTuner(Protocol):
    """A tuner that measures while a run trains."""

    def begin(self, run: Any, workers: Any) -> None:
        """Starts measuring for an ``Assembly`` with its workers, a ``WorkerPool``."""

    def notes(self) -> list[str]:
        """Lines since the last call, for the user."""

    def choice(self) -> TunerChoice | None:
        """The choice, once, as soon as the measurements are over; None before and after."""

    def end(self) -> None:
        """Ends the measurements; the settings in force stay."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The input of a mode."""

    settings: Settings
    spec: EnvSpec
    samplers: int  # sampler processes of all learners together
    first_samplers: int | None = None  # of these, at work until the tuner has chosen; None: all
    tuner: RunTuner | None = None  # chooses settings while the run trains; None: all are chosen
    free_core: bool  # whether evaluator and visualizer have a core besides those of samplers and learner
    reasons: dict[str, str] = field(default_factory=dict)  # setting -> why it was chosen automatically
    earlier: EarlierSessions = EarlierSessions()
    process_age_s: float = 0.0  # age of this process when the mode started, with imports and tuning
    inference_workers: int = 0  # processes that compute actions for samplers
    hosts: int = 0  # maximum number of other hosts at once; 0: the run has this machine alone
    host_shards: int = 0  # of replay, for the rows of all other hosts
    all_learners: int = 0  # of all hosts together, if each has its own; 0: only this host has learners
    joins: GossipHandle | None = None  # memory by which this host's learner takes part in a run elsewhere
    to_tune: bool = False  # the tuner has still to choose, so what it may change is not rejected
    host_tune: tuple[str, ...] = ()  # arguments of each host's own tuner; empty: it measures nothing
    single_env: bool = False  # there can be one environment only: the sampler plays the evaluations in it
    max_envs: int | None = None  # environments of the evaluator at a time; None: as many as suit the task
    sampler_bytes: int = 0  # memory that the environments of one sampler take; 0: not known, or little
    start_s: float = 0.0  # time that an environment takes to start
    requested_settings: Settings | None = None  # before mode or hosts changed any for this session; None: equal

    def __post_init__(self) -> None:
        check(self)

    @property
    def working_samplers(self) -> int:
        """Samplers that are at work when the run begins."""
        return 0 if self.config.replay.offline else self.first_samplers or self.samplers

    @property
    def ending(self) -> Ending | None:
        """The end of a run without a stop condition; None where there is one, or another host decides."""
        return ending_of(self.config, self.spec.env_id) if self.joins is None else None

    @property
    def rollback_enabled(self) -> bool:
        """True if the learner goes back to its best checkpoint once the return has fallen."""
        flow = self.config.data_flow
        single_learner = self.learners == 1 and self.joins is None and not self.spans_hosts
        from_replay = self.config.on_policy is None and not (flow.serial or flow.averages_parameters)
        return from_replay and single_learner and self.config.evaluation.enabled and self.config.replay.go_back

    @property
    def target_return(self) -> float | None:
        """The return that ends the run, or that it reports: the user's, else a published one."""
        ending, requested = self.ending, self.config.stop.target_return
        return requested if ending is None or ending.target is None else ending.target.value

    @property
    def spans_hosts(self) -> bool:
        """True if learners of other hosts may take part."""
        return self.joins is not None or self.all_learners > 0

    @property
    def host_arguments(self) -> tuple[str, ...]:
        """Flags of ``spreeze.train`` for a run on another host, whose learner is to join this run's.

        All settings of this run, except those of this machine, of files and of the end.
        """
        config, env = self.config, self.config.env
        run, samplers = config.run, config.cluster.samplers
        values = {"--env": env.id, "--import": env.import_module, "--algo": run.algo, "--mode": run.mode}
        values |= {"--seed": str(run.seed), "--learners": "1", "--profile": NO_PROFILE}
        values |= {"--samplers": None if samplers is None else str(samplers)}
        flags = [word for flag, value in values.items() if value for word in (flag, value)]
        flags += ["--no-visualizer", *(f"--env-arg={text}" for text in env.args)]
        flags += ["--plain-env"] if env.plain else []
        for key, source in sorted(self.settings.sources.items()):
            part, name = key.split(".")
            left = part in _OF_THIS_HOST or key in _OF_THIS_MACHINE or key in _WITH_FLAGS
            value = getattr(config.sections().get(part), name, None)
            if source != DEFAULT and not left and value is not None:
                flags += ["--set", f"{key}={toml_value(value)}"]
        return tuple(flags)

    @property
    def session_seed(self) -> int:
        """Seed of the samplers: a resumed run sees other episodes."""
        return self.config.run.seed + 1000 * self.earlier.sessions

    @property
    def learners(self) -> int:
        return self.config.run.learners

    def samplers_of(self, group: int) -> int:
        """Samplers of a learner; the first ones have one more if the division leaves a remainder."""
        return self.samplers // self.learners + (group < self.samplers % self.learners)

    @property
    def policies(self) -> int:
        """Policies that are published and evaluated; learners that mix have one, the mean of theirs."""
        return 1 if self.config.data_flow.mixes_parameters and self.config.gala.mixing != "none" else self.learners

    @property
    def lag(self) -> int | None:
        """Rollouts between the policy that collects and the one that learns from its data; None: off-policy."""
        return self.config.data_flow.lag

    @property
    def rollout_envs(self) -> int:
        """Environments of one learner (on-policy)."""
        return self.samplers // self.learners * self.config.rollout.envs_per_sampler

    @property
    def sync_interval(self) -> int:
        """Env steps of each environment in one rollout (on-policy)."""
        return self.config.rollout_interval(self.rollout_envs)

    @property
    def minibatches(self) -> int:
        """Minibatches of a rollout (on-policy)."""
        algorithm, steps = self.config.on_policy, self.sync_interval
        return 1 if algorithm is None else algorithm.minibatches_of(steps * self.rollout_envs, steps)

    @property
    def batch_size(self) -> int:
        """Rows of one update."""
        if self.config.on_policy is None:
            return self.config.learner.batch_size
        writers = self.samplers if self.config.data_flow.asynchronous else 1
        return self.rollout_spec().rows // (self.minibatches * writers)

    def rollout_spec(self) -> RolloutSpec:
        """The rollouts of an on-policy learner in shared memory; an asynchronous sampler has a slot more, to fill."""
        algorithm, samplers = self.config.on_policy, self.samplers // self.learners
        state_dim = 0 if algorithm is None else algorithm.state_dim
        spec = RolloutSpec.of(self.spec, self.sync_interval, self.rollout_envs, state_dim)
        if not isinstance(algorithm, AsyncOnPolicyConfig):
            return spec
        return dataclasses.replace(
            spec,
            num_slots=-(-algorithm.slots // samplers) + 1,
            max_uses=algorithm.uses,
            least_uses=algorithm.uses_before_overwrite,
            asynchronous=True,
            log_steps=1,
        )

    @property
    def buffer_slots(self) -> int:
        """Rollouts that the circular buffer holds: ``slots``, rounded up to equally many of each sampler."""
        return self.samplers * (self.rollout_spec().num_slots - 1)

    def shared_bytes(self) -> tuple[str, int, str]:
        """Name and size of the run's shared memory, and how to reduce it; a circular buffer with its learner's copy."""
        on_device = self.config.data_flow.on_device
        if on_device or self.config.on_policy is None:
            rings = [] if on_device else [self.ring_spec(group) for group in range(self.learners)]
            return "replay", sum(ring.size_bytes for ring in rings), "the replay capacity"
        if self.config.data_flow.asynchronous:
            spec = self.rollout_spec()
            rows = spec.num_slots * spec.sync_interval * spec.num_envs
            # Logits, or means and standard deviations.
            box, choices = self.spec.box, self.spec.choices
            out = (2 * box.dim if box else 0) + (choices.options if choices else 0)
            # Action, log-probability, advantage, target and value, float32.
            row_bytes = math.prod(spec.obs_shape) * np.dtype(spec.obs_dtype).itemsize + 4 * (spec.action_dim + 4 + out)
            kept_bytes = rows * row_bytes
            less = f"{self.config.run.algo}.slots or --sync-interval"
            return "circular buffer", spec.size_bytes + kept_bytes, less
        size_bytes = self.learners * self.rollout_spec().size_bytes
        return "rollout slots", size_bytes, "--sync-interval or --envs-per-sampler"

    @property
    def config(self) -> Config:
        return self.settings.config

    @property
    def layout(self) -> RowLayout:
        """Layout of a replay row."""
        return self.config.algorithm.row_layout(self.spec, checksum="SPREEZE_TEST_CHECKSUM" in os.environ)

    def ring_spec(self, group: int = 0) -> RingSpec:
        """A group's replay: a shard for each sampler, then those of other hosts, at least ``replay.capacity`` rows."""
        shards = self.samplers_of(group) + self.host_shards
        return RingSpec(
            self.layout, shards, -(-self.config.replay.capacity // (shards * self.layout.env_steps_per_row))
        )

    def algorithm_fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self.config.on_policy or self.config.algorithm)
