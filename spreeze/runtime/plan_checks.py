"""Checks of a plan before anything is started, for settings, task and mode that do not fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spreeze.config.algorithms import OFF_POLICY
from spreeze.envs.families import engine_of, refusal_on_device
from spreeze.errors import ConfigError, first_true
from spreeze.transport.demonstrations import find_demonstrations

if TYPE_CHECKING:
    from spreeze.runtime.plan import RunPlan


def check(plan: RunPlan) -> None:
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
    interval, serial = plan.config.evaluation.interval_updates, plan.config.data_flow.serial
    if interval is not None and not (serial and (plan.config.on_policy is None or plan.samplers == 1)):
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
        f"learner.device = {device}": "+" in device or device == "split",
    }
    if (name := first_true(conflicts)) is not None:
        recurrent = getattr(config.algorithm, "recurrent", "none")
        raise ConfigError(
            f"{name} cannot be combined with {algo}.recurrent = {recurrent}, whose replay stores sequences; remove "
            "one of them"
        )


def _check_device(plan: RunPlan) -> None:
    config, spec, replay = plan.config, plan.spec, plan.config.replay
    algorithm, device = config.own, config.learner.device
    unfit = refusal_on_device(spec.env_id, spec)
    conflicts = {
        f"--env {spec.env_id}: {unfit}": unfit is not None,
        f"{config.run.algo}.recurrent: policies with a memory are not": getattr(algorithm, "recurrent", "none")
        != "none",
        "priority_exponent: priorities of rows are on the host": getattr(algorithm, "priority_exponent", 0.0) > 0.0,
        "explore_average: the newest weights explore there": getattr(algorithm, "explore_average", False)
        and getattr(algorithm, "policy_average", 0.0) > 0.0,
        f"replay.her = {replay.her}: goals are added on the host": replay.her != "off",
        "--demonstrations: they are read on the host": bool(replay.demonstrations) or replay.offline,
        "--save-replay: replay is on the device": replay.save,
        f"learner.device = {device}: it is one device": "+" in device or device == "split",
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
            "several hosts gossip, but not in lockstep; remove them"
        )
    if 0 < plan.all_learners <= learners:
        raise ConfigError(
            f"cluster.learners = {plan.all_learners}: this host already has run.learners = {learners}; raise it"
        )
    if not (flow.mixes_parameters or (flow.averages_parameters and on_policy)):
        return
    if plan.samplers % learners:
        raise ConfigError(
            f"--samplers {plan.samplers}: {learners} learners need equally many each; use "
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
    if learner.overlap or "+" in learner.device or learner.device == "split":
        wrong = "learner.overlap = true" if learner.overlap else f"learner.device = {learner.device}"
        raise ConfigError(f"{wrong}: {plan.config.run.algo} trains one network on one device; remove it")
    if learner.precision != "float32" and not plan.config.data_flow.asynchronous:
        raise ConfigError(
            f"learner.precision = {learner.precision}: mode {plan.config.run.mode} learns in float32, so that "
            "results are reproducible; remove it"
        )
