"""The plan of a run: every value that the modes need, with the reason of each automatic choice.

Settings, task and mode that do not fit together are refused when it is made, before anything is started.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from spreeze.config.algorithm_bases import AsyncOnPolicyConfig
from spreeze.config.algorithms import OFF_POLICY
from spreeze.config.layers import DEFAULT, Settings, toml_value
from spreeze.config.profiles import NO_PROFILE
from spreeze.config.schema import Config
from spreeze.envs.families import engine_of, refusal_on_device
from spreeze.errors import ConfigError, first_true
from spreeze.machine.hardware import is_split
from spreeze.metrics.stop_conditions import Ending, ending_of
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


_LOCAL_SECTIONS = ("run", "cluster", "stop", "logging", "visualizer", "tuning")
_LOCAL_SETTINGS = ("learner.device", "learner.threads", "learner.precision", "sampling.samplers", "rollout.samplers",
                    "rollout.inference_workers")  # fmt: skip
_FORWARDED_AS_FLAGS = ("env.id", "env.import_module", "env.plain", "env.args", "replay.demonstrations")
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
    joined_run: GossipHandle | None = None  # memory by which this host's learner takes part in a run elsewhere
    to_tune: bool = False  # the tuner has still to choose, so what it may change is not rejected
    host_tune: tuple[str, ...] = ()  # arguments of each host's own tuner; empty: it measures nothing
    single_env: bool = False  # there can be one environment only: the sampler plays the evaluations in it
    max_envs: int | None = None  # environments of the evaluator at a time; None: as many as suit the task
    sampler_bytes: int = 0  # memory that the environments of one sampler take; 0: not known, or little
    start_s: float = 0.0  # time that an environment takes to start
    requested_settings: Settings | None = None  # before mode or hosts changed any for this session; None: equal

    def __post_init__(self) -> None:
        _check(self)

    @property
    def working_samplers(self) -> int:
        """Samplers that are at work when the run begins."""
        return 0 if self.config.replay.offline else self.first_samplers or self.samplers

    @property
    def ending(self) -> Ending | None:
        """The end of a run without a stop condition; None where there is one, or another host decides."""
        if self.joined_run is not None:
            return None
        return ending_of(self.config, self.spec.env_id, self.earlier.best_return)

    @property
    def takes_turns(self) -> bool:
        """True if all workers take turns in this process."""
        return self.config.data_flow.takes_turns(self.samplers)

    @property
    def rollback_enabled(self) -> bool:
        """True if the learner rolls back to its best checkpoint once the return has fallen."""
        flow = self.config.data_flow
        single_learner = self.learners == 1 and self.joined_run is None and not self.spans_hosts
        from_replay = self.config.on_policy is None and not (flow.serial or flow.averages_parameters)
        return from_replay and single_learner and self.config.evaluation.enabled and self.config.replay.roll_back

    @property
    def target_return(self) -> float | None:
        """The return that ends the run, or that it reports: the user's, else a published one."""
        ending, requested = self.ending, self.config.stop.target_return
        return requested if ending is None or ending.target is None else ending.target.value

    @property
    def spans_hosts(self) -> bool:
        """True if learners of other hosts may take part."""
        return self.joined_run is not None or self.all_learners > 0

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
            left = part in _LOCAL_SECTIONS or key in _LOCAL_SETTINGS or key in _FORWARDED_AS_FLAGS
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
        return self.config.algorithm.row_layout(self.spec)

    def ring_spec(self, group: int = 0) -> RingSpec:
        """A group's replay: a shard for each sampler, then those of other hosts, at least ``replay.capacity`` rows."""
        shards = self.samplers_of(group) + self.host_shards
        return RingSpec(
            self.layout, shards, -(-self.config.replay.capacity // (shards * self.layout.env_steps_per_row))
        )

    def algorithm_fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self.config.on_policy or self.config.algorithm)


def _check(plan: RunPlan) -> None:
    """Raises a ConfigError for the first setting that the run cannot have."""
    if plan.config.env.normalize_obs and not plan.spec.vector_dim - plan.spec.mask_dim:
        raise ConfigError("env.normalize_obs = true: images are scaled by 1/255 already; remove it")
    if plan.config.stop.at_return and not plan.config.evaluation.enabled:
        raise ConfigError(
            f"stop.target_return = {plan.config.stop.target_return:g}: it needs evaluations, but "
            "evaluation.enabled = false (--no-evaluator); remove one of them"
        )
    if plan.config.data_flow.on_device:
        _check_device(plan)
    _check_learners(plan)
    if plan.config.cluster.address is not None:
        _check_cluster(plan)
    interval = plan.config.evaluation.interval_updates
    if interval is not None and not plan.takes_turns:
        raise ConfigError(
            f"evaluation.interval_updates = {interval}: in mode {plan.config.run.mode} the evaluator runs in "
            "parallel with the learner; use --mode serial with one sampler, or remove it"
        )
    if plan.config.on_policy is not None:
        _check_rollout(plan)
    else:
        _check_replay(plan)


def _check_replay(plan: RunPlan) -> None:
    config = plan.config
    if plan.spec.frames is not None and config.replay.save:
        frames_gib = config.replay.capacity * plan.layout.row_bytes / 2**30
        raise ConfigError(
            f"replay.save = true: frames in replay take {frames_gib:.1f} GiB and cannot be saved; remove it"
        )
    if config.learner.overlap and plan.spec.choices is not None:
        raise ConfigError(
            "learner.overlap = true: it needs an actor with continuous actions, unlike "
            f"{config.run.algo} with discrete ones; remove it"
        )
    _check_sequences(plan)
    _check_goals(plan)
    _check_demonstrations(plan)
    samplers = plan.samplers_of(0)
    shards = samplers + plan.host_shards
    rows = config.replay.rows_per_step
    smallest = shards * max(config.sampling.envs_per_sampler, 1) * 2 * (1 + plan.layout.depth) * rows
    smallest *= plan.layout.env_steps_per_row
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
            "or raise the capacity"
        )


def _check_sequences(plan: RunPlan) -> None:
    config, algo, device = plan.config, plan.config.run.algo, plan.config.learner.device
    if plan.layout.sequence is None:
        return
    conflicts = {
        f"--env {plan.spec.env_id}": engine_of(plan.spec.env_id) is not None,
        f"replay.her = {config.replay.her}": config.replay.her != "off",
        "--demonstrations": bool(config.replay.demonstrations),
        "--cluster": config.cluster.address is not None,
        "learner.compile = true": config.learner.compile,
        "learner.overlap = true": config.learner.overlap,
        f"learner.device = {device}": is_split(device),
    }
    if (name := first_true(conflicts)) is not None:
        recurrent = getattr(config.algorithm, "recurrent", "none")
        raise ConfigError(
            f"{name} cannot be combined with {algo}.recurrent = {recurrent}, whose replay stores sequences; remove "
            "one of them"
        )


def _check_device(plan: RunPlan) -> None:
    config, spec, replay = plan.config, plan.spec, plan.config.replay
    algorithm, device = config.algo_settings, config.learner.device
    unfit, recurrent = refusal_on_device(spec.env_id, spec), getattr(algorithm, "recurrent", "none")
    conflicts = {
        f"--env {spec.env_id}: {unfit}": unfit is not None,
        f"{config.run.algo}.recurrent: it is not supported there": recurrent != "none",
        "priority_exponent: priorities of rows are on the host": getattr(algorithm, "priority_exponent", 0.0) > 0.0,
        "explore_average: the newest weights explore there": getattr(algorithm, "explore_average", False)
        and getattr(algorithm, "policy_average", 0.0) > 0.0,
        f"replay.her = {replay.her}: goals are added on the host": replay.her != "off",
        "--demonstrations: they are read on the host": bool(replay.demonstrations) or replay.offline,
        "--save-replay: replay is on the device": replay.save,
        f"learner.device = {device}: it is one device": is_split(device),
    }
    if (why := first_true(conflicts)) is not None:
        raise ConfigError(f"--mode {config.run.mode}: {why}; change it, or use another mode")


def _check_goals(plan: RunPlan) -> None:
    her, goals, env_id = plan.config.replay.her, plan.spec.goals, plan.spec.env_id
    if her != "off" and goals is None:
        raise ConfigError(
            f"replay.her = {her}: {env_id} has no goals; its observation has to be a Dict of observation, "
            "achieved_goal and desired_goal, both goals a Box or MultiBinary of one shape; remove it"
        )
    if her != "off" and goals is not None and not goals.computes_reward:
        raise ConfigError(
            f"replay.her = {her}: {env_id} has no compute_reward(achieved_goal, desired_goal, info), which gives "
            "the rewards under other goals; add it to the environment, or remove replay.her"
        )


def _check_demonstrations(plan: RunPlan) -> None:
    config, replay = plan.config, plan.config.replay
    reasons = {
        "there is nothing else to learn from; add --demonstrations FILE": not replay.demonstrations,
        "no env steps are taken; use --updates or --seconds": config.stop.env_steps is not None,
        "other hosts would only have samplers; remove --cluster": config.cluster.address is not None,
        "there are no samplers to tune; remove --auto": plan.to_tune,
        "there is one learner; remove --learners": plan.learners > 1,
    }
    if replay.offline and (why := first_true(reasons)):
        raise ConfigError(f"--offline: {why}")
    if replay.demonstrations:
        find_demonstrations(replay.demonstrations)


def _check_cluster(plan: RunPlan) -> None:
    config = plan.config
    if config.data_flow.supports_remote_learners:
        return
    if not config.data_flow.supports_remote_samplers:
        raise ConfigError(
            f"--cluster: in mode {config.run.mode} other hosts cannot be used; use --mode spreeze "
            "with an off-policy algorithm, --mode gala or tianji, or remove --cluster"
        )
    if plan.learners > 1:
        raise ConfigError(
            f"run.learners = {plan.learners}: samplers on other hosts need a single learner; remove it, or --cluster"
        )
    if plan.spec.frames is not None:
        raise ConfigError(
            f"--cluster: {plan.spec.env_id} observes images, which are not supported on other hosts; remove --cluster"
        )


def _check_learners(plan: RunPlan) -> None:
    learners, run = plan.learners, plan.config.run
    if learners > 1 and not plan.config.data_flow.supports_learner_groups:
        raise ConfigError(
            f"run.learners = {learners}: {run.algo} in mode {run.mode} has one learner; remove it, or use "
            "--mode spreeze for off-policy algorithms, --mode gala for ppo and a2c"
        )
    if learners > plan.samplers:
        raise ConfigError(
            f"run.learners = {learners}: each needs its own sampler, but there are {plan.samplers}; use "
            f"--samplers {learners} or more"
        )
    flow, gala, on_policy = plan.config.data_flow, plan.config.gala, plan.config.on_policy is not None
    if plan.spans_hosts and flow.mixes_parameters and (gala.mixing != "gossip" or gala.max_staleness == 0):
        raise ConfigError(
            f"gala.mixing = {gala.mixing}, gala.max_staleness = {gala.max_staleness}: learners of "
            "several hosts can only gossip, and not in lockstep; remove both settings"
        )
    if 0 < plan.all_learners <= learners:
        raise ConfigError(
            f"cluster.learners = {plan.all_learners}: this host already has run.learners = {learners}; raise it"
        )
    if not (flow.mixes_parameters or (flow.averages_parameters and on_policy)):
        return
    if plan.samplers % learners:
        raise ConfigError(
            f"--samplers {plan.samplers}: {learners} learners need the same number of samplers each; use "
            f"--samplers {plan.samplers // learners * learners}"
        )
    is_set = "user" in (plan.settings.sources.get(key) for key in ("gala.topology", "gala.mixing"))
    single_learner = learners == 1 and not plan.spans_hosts
    if single_learner and flow.mixes_parameters and is_set and not plan.to_tune:
        raise ConfigError(
            f"gala.topology = {gala.topology}, gala.mixing = {gala.mixing}: "
            "a single learner has no neighbours; add --learners 2, or remove them"
        )


def _check_rollout(plan: RunPlan) -> None:
    part, replay = plan.config.rollout, plan.config.replay
    conflicts = {"her": replay.her != "off", "demonstrations": replay.demonstrations, "offline": replay.offline}
    if (name := first_true(conflicts)) is not None:
        raise ConfigError(
            f"replay.{name} = {getattr(replay, name)}: {plan.config.run.algo} learns without replay; use "
            f"{', '.join(OFF_POLICY)}, or remove it"
        )
    if part.inference_workers and plan.config.data_flow.asynchronous:
        raise ConfigError(
            f"rollout.inference_workers = {part.inference_workers}: in mode {plan.config.run.mode} "
            "samplers run the policy themselves; remove it"
        )
    if plan.inference_workers and (plan.learners > 1 or plan.spans_hosts):
        raise ConfigError(
            f"rollout.inference_workers = {plan.inference_workers}: with several learners, samplers run the "
            "policy themselves; remove it"
        )
    if plan.inference_workers > plan.samplers:
        raise ConfigError(
            f"rollout.inference_workers = {plan.inference_workers}: more than the {plan.samplers} "
            "samplers; use at most as many"
        )
    if plan.spec.frames is not None and plan.spec.frames.options.get("episodic_life"):
        raise ConfigError(
            f"image.episodic_life = true: {plan.config.run.algo} seeds each episode and would start a new "
            "game after each lost life; remove it, or use dqn"
        )
    length = 1 if plan.config.on_policy is None else plan.config.on_policy.sequence_of(plan.sync_interval)
    rows, minibatches = plan.sync_interval // length * part.envs_per_sampler, plan.minibatches  # of one sampler
    if plan.config.data_flow.asynchronous and rows % minibatches:
        what = "rows" if length == 1 else f"sequences of {length}"
        raise ConfigError(
            f"a rollout has {rows} {what} (sync_interval {plan.sync_interval} x {part.envs_per_sampler} "
            f"environments), which {plan.config.run.algo}.minibatches = {minibatches} does not divide; change one "
            "of them"
        )
    learner = plan.config.learner
    if learner.overlap or is_split(learner.device):
        wrong = "learner.overlap = true" if learner.overlap else f"learner.device = {learner.device}"
        raise ConfigError(f"{wrong}: {plan.config.run.algo} trains one network on one device; remove it")
    if learner.precision != "float32" and not plan.config.data_flow.asynchronous:
        raise ConfigError(
            f"learner.precision = {learner.precision}: mode {plan.config.run.mode} learns in float32, so that "
            "results are reproducible; remove it"
        )
