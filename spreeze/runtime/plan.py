"""The plan of a run: every value that the modes need, with the reason of each automatic choice."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from spreeze.config.algorithm_settings import AsyncOnPolicyConfig
from spreeze.config.algorithms import OFF_POLICY
from spreeze.config.layers import DEFAULT, Settings, toml_value
from spreeze.config.profiles import NO_PROFILE
from spreeze.config.schema import Config
from spreeze.envs.families import engine_of
from spreeze.errors import ConfigError
from spreeze.metrics.progress import Ending, ending_of
from spreeze.transport.demonstrations import find_demonstrations
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
"""Settings that another host's run does not take over, or by flags of its own."""


def split_evenly(samplers: int, learners: int) -> list[int]:
    """Samplers of each learner; the first ones get one more if the division leaves a remainder."""
    return [samplers // learners + (group < samplers % learners) for group in range(learners)]


class RunTuner(Protocol):
    """A tuner that measures on the workers of a run while they train."""

    def begin(self, run: Any, pids: Callable[[], Mapping[str, int]]) -> None:
        """Begins to measure, on an ``Assembly`` whose workers have these process ids."""

    def notes(self) -> list[str]:
        """Lines since the last call, for the user."""

    def chosen_samplers(self) -> int | None:
        """Samplers that the choice has, once, as soon as it is in force; None before and after."""

    def end(self) -> None:
        """Ends the measurements; what is in force stays."""


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
    hosts: int = 0  # other hosts that there may be at a time; 0: the run has this machine alone
    host_shards: int = 0  # of replay, for the rows of all other hosts
    all_learners: int = 0  # of all hosts together, where each has learners of its own; 0: there is this host alone
    joins: GossipHandle | None = None  # memory by which this host's learner takes part in a run elsewhere
    to_tune: bool = False  # the tuner has still to choose, so what it may change is not rejected
    host_tune: tuple[str, ...] = ()  # arguments of each host's own tuner; empty: it measures nothing
    alone: bool = False  # there can be one environment only: the sampler plays the evaluations in it
    room: int | None = None  # environments of the evaluator at a time; None: as many as suit the task
    sampler_bytes: int = 0  # memory that the environments of one sampler take; 0: not known, or little
    start_s: float = 0.0  # time that an environment takes to start
    requested_settings: Settings | None = None  # before mode or hosts changed any for this session; None: equal

    def __post_init__(self) -> None:
        if self.config.env.normalize_obs and not self.spec.vector_dim - self.spec.mask_dim:
            raise ConfigError("env.normalize_obs = true: images are scaled by 1/255 already; remove it")
        if self.config.stop.at_return and not self.config.evaluation.enabled:
            raise ConfigError(
                f"stop.target_return = {self.config.stop.target_return:g}: it needs evaluations, but "
                f"evaluation.enabled = false (--no-evaluator); remove one of them"
            )
        if self.config.data_flow.on_device:
            self._check_device()
        self._check_learners()
        if self.config.cluster.address is not None:
            self._check_cluster()
        interval, serial = self.config.evaluation.interval_updates, self.config.data_flow.serial
        if interval is not None and not (serial and (self.config.on_policy is None or self.samplers == 1)):
            raise ConfigError(
                f"evaluation.interval_updates = {interval}: in mode {self.config.run.mode} the evaluator runs in "
                f"parallel with the learner; use --mode serial with one sampler, or remove it"
            )
        if self.config.on_policy is not None:
            self._check_rollout()
        else:
            self._check_replay()

    @property
    def working_samplers(self) -> int:
        """Samplers that are at work when the run begins."""
        return 0 if self.config.replay.offline else self.first_samplers or self.samplers

    @property
    def ending(self) -> Ending | None:
        """The end of a run without a stop condition; None where there is one, or another host decides."""
        return ending_of(self.config, self.spec.env_id) if self.joins is None else None

    @property
    def goes_back(self) -> bool:
        """True if the learner goes back to its best checkpoint once the return has fallen."""
        flow, alone = self.config.data_flow, self.learners == 1 and self.joins is None and not self.spans_hosts
        from_replay = self.config.on_policy is None and not (flow.serial or flow.averages_parameters)
        return from_replay and alone and self.config.evaluation.enabled and self.config.replay.go_back

    @property
    def target_return(self) -> float | None:
        """The return that ends the run, or that it reports: the user's, else a published one."""
        ending, asked = self.ending, self.config.stop.target_return
        return asked if ending is None or ending.target is None else ending.target.value

    def _check_replay(self) -> None:
        """Rejects a replay that is too small, or whose frames would be stored."""
        config = self.config
        if self.spec.frames is not None and config.replay.save:
            frames_gib = config.replay.capacity * self.layout.row_bytes / 2**30
            raise ConfigError(
                f"replay.save = true: frames in replay take {frames_gib:.1f} GiB and cannot be saved; remove it"
            )
        if config.learner.overlap and self.spec.choices is not None:
            raise ConfigError(
                f"learner.overlap = true: it needs an actor with continuous actions, unlike "
                f"{config.run.algo} with discrete ones; remove it"
            )
        self._check_memory()
        self._check_goals()
        self._check_demonstrations()
        samplers = self.samplers_of(0)
        shards = samplers + self.host_shards
        rows = config.replay.rows_per_step
        smallest = shards * max(config.sampling.envs_per_sampler, 1) * 2 * (1 + self.layout.depth) * rows
        smallest *= self.layout.steps
        if config.replay.capacity < smallest:
            raise ConfigError(
                f"replay.capacity = {config.replay.capacity}: {samplers} samplers with "
                f"{config.sampling.envs_per_sampler} environments each need at least {smallest}; use "
                f"--replay-capacity {smallest}, or fewer samplers"
            )
        if config.replay.learning_starts * rows > config.replay.capacity:
            of_each = "" if rows == 1 else f", {rows} rows each,"
            raise ConfigError(
                f"replay.learning_starts = {config.replay.learning_starts}{of_each} is above replay.capacity = "
                f"{config.replay.capacity}: the first rows would be overwritten before learning starts; lower it, "
                f"or raise the capacity"
            )

    def _check_memory(self) -> None:
        """Rejects sequences in replay beside what needs transitions."""
        config, algo, device = self.config, self.config.run.algo, self.config.learner.device
        if self.layout.sequence is None:
            return
        asked = {
            f"--env {self.spec.env_id}": engine_of(self.spec.env_id) is not None,
            f"replay.her = {config.replay.her}": config.replay.her != "off",
            "--demonstrations": bool(config.replay.demonstrations),
            "--cluster": config.cluster.address is not None,
            "learner.compile = true": config.learner.compile,
            "learner.overlap = true": config.learner.overlap,
            f"learner.device = {device}": "+" in device or device == "split",
        }
        if (name := next((name for name, wrong in asked.items() if wrong), None)) is not None:
            recurrent = getattr(config.algorithm, "recurrent", "none")
            raise ConfigError(
                f"{name} cannot be combined with {algo}.recurrent = {recurrent}, whose replay stores sequences; remove "
                "one of them"
            )

    def _check_device(self) -> None:
        """Rejects what cannot be stepped and learned from on one device."""
        config, spec, replay = self.config, self.spec, self.config.replay
        own, device = config.own, config.learner.device
        asked = {
            f"--env {spec.env_id}: environments on a device come from an engine (vector:ID or warp:ID)": (
                engine_of(spec.env_id) is None
            ),
            f"--env {spec.env_id}: actions must be a Box": spec.box is None or spec.choices is not None,
            f"--env {spec.env_id}: images and masks are not supported there": bool(spec.frames) or spec.action_mask,
            f"{config.run.algo}.recurrent: policies with a memory are not": getattr(own, "recurrent", "none") != "none",
            "priority_exponent: priorities of rows are on the host": getattr(own, "priority_exponent", 0.0) > 0.0,
            "explore_average: the newest weights explore there": getattr(own, "explore_average", False)
            and getattr(own, "policy_average", 0.0) > 0.0,
            f"replay.her = {replay.her}: goals are added on the host": replay.her != "off",
            "--demonstrations: they are read on the host": bool(replay.demonstrations) or replay.offline,
            "--save-replay: replay is on the device": replay.save,
            f"learner.device = {device}: it is one device": "+" in device or device == "split",
        }
        if (why := next((text for text, wrong in asked.items() if wrong), None)) is not None:
            raise ConfigError(f"--mode {config.run.mode}: {why}; change it, or use another mode")

    def _check_goals(self) -> None:
        """Rejects hindsight where transitions cannot have other goals."""
        her, goals, env_id = self.config.replay.her, self.spec.goals, self.spec.env_id
        if her != "off" and goals is None:
            raise ConfigError(
                f"replay.her = {her}: {env_id} has no goals; its observation has to be a Dict of observation, "
                f"achieved_goal and desired_goal, both goals a Box or MultiBinary of one shape; remove it"
            )
        if her != "off" and goals is not None and not goals.computes_reward:
            raise ConfigError(
                f"replay.her = {her}: {env_id} has no compute_reward(achieved_goal, desired_goal, info), which gives "
                f"the rewards under other goals; add it to the environment, or remove replay.her"
            )

    def _check_demonstrations(self) -> None:
        """Rejects learning from demonstrations alone where that has no data, or no end."""
        config, replay = self.config, self.config.replay
        reasons = {
            "there is nothing else to learn from; add --demonstrations FILE": not replay.demonstrations,
            "no env steps are taken; use --updates or --seconds": config.stop.env_steps is not None,
            "other hosts would only have samplers; remove --cluster": config.cluster.address is not None,
            "there are no samplers to tune; remove --auto": self.to_tune,
            "there is one learner; remove --learners": self.learners > 1,
        }
        if replay.offline and (why := next((text for text, wrong in reasons.items() if wrong), None)):
            raise ConfigError(f"--offline: {why}")
        if replay.demonstrations:
            find_demonstrations(replay.demonstrations)

    def _check_cluster(self) -> None:
        """Rejects other hosts where their rows cannot be used."""
        config = self.config
        if config.data_flow.supports_remote_learners:
            return
        if not config.data_flow.supports_remote_samplers:
            raise ConfigError(
                f"--cluster: in mode {config.run.mode} other hosts cannot be used; use --mode spreeze "
                "with an off-policy algorithm, --mode gala or tianji, or remove --cluster"
            )
        if self.learners > 1:
            raise ConfigError(
                f"run.learners = {self.learners}: samplers on other hosts need a single learner; remove it, or "
                f"--cluster"
            )
        if self.spec.frames is not None:
            raise ConfigError(
                f"--cluster: {self.spec.env_id} observes images, which are not supported on other hosts; remove "
                f"--cluster"
            )

    def _check_learners(self) -> None:
        """Rejects several learners if the mode has one, or if their samplers are too few or not shared out evenly."""
        learners, run = self.learners, self.config.run
        if learners > 1 and not self.config.data_flow.supports_learner_groups:
            raise ConfigError(
                f"run.learners = {learners}: {run.algo} in mode {run.mode} has one learner; remove it, or use "
                f"--mode spreeze for off-policy algorithms, --mode gala for ppo and a2c"
            )
        if learners > self.samplers:
            raise ConfigError(
                f"run.learners = {learners}: each needs its own sampler, but there are {self.samplers}; use "
                f"--samplers {learners} or more"
            )
        self._check_hosts()
        flow, on_policy = self.config.data_flow, self.config.on_policy is not None
        if not (flow.mixes_parameters or (flow.averages_parameters and on_policy)):
            return
        if self.samplers % learners:
            raise ConfigError(
                f"--samplers {self.samplers}: {learners} learners need equally many each; use "
                f"--samplers {self.samplers // learners * learners}"
            )
        asked = "user" in (self.settings.sources.get(key) for key in ("gala.topology", "gala.mixing"))
        alone = learners == 1 and not self.spans_hosts
        if alone and flow.mixes_parameters and asked and not self.to_tune:
            raise ConfigError(
                f"gala.topology = {self.config.gala.topology}, gala.mixing = {self.config.gala.mixing}: "
                "a single learner has no neighbours; add --learners 2, or remove them"
            )

    def _check_rollout(self) -> None:
        """Rejects inconsistent settings of an on-policy run."""
        part, replay = self.config.rollout, self.config.replay
        given = {"her": replay.her != "off", "demonstrations": replay.demonstrations, "offline": replay.offline}
        if (name := next((name for name, wrong in given.items() if wrong), None)) is not None:
            raise ConfigError(
                f"replay.{name} = {getattr(replay, name)}: {self.config.run.algo} learns without replay; use "
                f"{', '.join(OFF_POLICY)}, or remove it"
            )
        if part.inference_workers and self.config.data_flow.asynchronous:
            raise ConfigError(
                f"rollout.inference_workers = {part.inference_workers}: in mode {self.config.run.mode} "
                "samplers run the policy themselves; remove it"
            )
        if self.inference_workers and (self.learners > 1 or self.spans_hosts):
            raise ConfigError(
                f"rollout.inference_workers = {self.inference_workers}: with several learners, samplers run the "
                f"policy themselves; remove it"
            )
        if self.inference_workers > self.samplers:
            raise ConfigError(
                f"rollout.inference_workers = {self.inference_workers}: more than the {self.samplers} "
                "samplers; use at most as many"
            )
        if self.spec.frames is not None and self.spec.frames.options.get("episodic_life"):
            raise ConfigError(
                f"image.episodic_life = true: {self.config.run.algo} seeds each episode and would start a new "
                f"game after each lost life; remove it, or use dqn"
            )
        length = 1 if self.config.on_policy is None else self.config.on_policy.sequence_of(self.sync_interval)
        rows, minibatches = self.sync_interval // length * part.envs_per_sampler, self.minibatches  # of one sampler
        if self.config.data_flow.asynchronous and rows % minibatches:
            what = "rows" if length == 1 else f"sequences of {length}"
            raise ConfigError(
                f"a rollout has {rows} {what} (sync_interval {self.sync_interval} x {part.envs_per_sampler} "
                f"environments), which {self.config.run.algo}.minibatches = {minibatches} does not divide; change one "
                "of them"
            )
        learner = self.config.learner
        if learner.overlap or "+" in learner.device or learner.device == "split":
            wrong = "learner.overlap = true" if learner.overlap else f"learner.device = {learner.device}"
            raise ConfigError(f"{wrong}: {self.config.run.algo} trains one network on one device; remove it")
        if learner.precision != "float32" and not self.config.data_flow.asynchronous:
            raise ConfigError(
                f"learner.precision = {learner.precision}: mode {self.config.run.mode} learns in float32, so that "
                f"results are reproducible; remove it"
            )

    @property
    def spans_hosts(self) -> bool:
        """True if learners of other hosts may take part."""
        return self.joins is not None or self.all_learners > 0

    def _check_hosts(self) -> None:
        """Rejects learners of other hosts where they cannot take part."""
        data_flow, gala = self.config.data_flow, self.config.gala
        if self.spans_hosts and data_flow.mixes_parameters and (gala.mixing != "gossip" or gala.max_staleness == 0):
            raise ConfigError(
                f"gala.mixing = {gala.mixing}, gala.max_staleness = {gala.max_staleness}: learners of "
                "several hosts gossip, but not in lockstep; remove them"
            )
        if 0 < self.all_learners <= self.learners:
            raise ConfigError(
                f"cluster.learners = {self.all_learners}: this host already has run.learners = {self.learners}; "
                f"raise it"
            )

    @property
    def host_arguments(self) -> tuple[str, ...]:
        """Flags of ``spreeze.train`` for a run on another host, whose learner is to join this run's.

        It has the settings of this run, but for those of this machine, of files and of the end.
        """
        config, env = self.config, self.config.env
        run, samplers = config.run, config.cluster.samplers
        asked = {"--env": env.id, "--import": env.import_module, "--algo": run.algo, "--mode": run.mode}
        asked |= {"--seed": str(run.seed), "--learners": "1", "--profile": NO_PROFILE}
        asked |= {"--samplers": None if samplers is None else str(samplers)}
        flags = [word for flag, value in asked.items() if value for word in (flag, value)]
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
        return split_evenly(self.samplers, self.learners)[group]

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
    def device_envs(self) -> int:
        """Environments of a learner that steps them itself."""
        config = self.config
        return self.rollout_envs if config.on_policy is not None else config.sampling.envs_per_sampler

    @property
    def minibatches(self) -> int:
        """Minibatches of a rollout (on-policy)."""
        algorithm, steps = self.config.on_policy, self.sync_interval
        return 1 if algorithm is None else algorithm.minibatches_of(steps * self.rollout_envs, steps)

    @property
    def updates_in_rollout(self) -> int:
        """Updates that a learner takes from a rollout (on-policy)."""
        return self.minibatches * int(getattr(self.config.on_policy, "epochs", 1))

    @property
    def batch_size(self) -> int:
        """Rows of one update."""
        if self.config.on_policy is None:
            return self.config.learner.batch_size
        writers = self.samplers if self.config.data_flow.asynchronous else 1
        return self.rollout_spec().rows // (self.minibatches * writers)

    def rollout_spec(self) -> RolloutSpec:
        """The storages of an on-policy learner; each sampler of a free-running one has a slot more, to fill."""
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
        """Name and size of the shared memory that the run needs, except for some kilobytes, and what makes it less.

        With the circular buffer's counts what its learner keeps of it: observations and some columns of every rollout.
        """
        if self.config.data_flow.on_device:
            return "replay", 0, "the replay capacity"
        if self.config.on_policy is None:
            size_bytes = sum(self.ring_spec(group).size_bytes for group in range(self.learners))
            return "replay", size_bytes, "the replay capacity"
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
        return "rollout storages", size_bytes, "--sync-interval or --envs-per-sampler"

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
        return RingSpec(self.layout, shards, -(-self.config.replay.capacity // (shards * self.layout.steps)))

    def algorithm_fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self.config.on_policy or self.config.algorithm)
