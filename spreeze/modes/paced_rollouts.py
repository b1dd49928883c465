"""Paced rollouts: samplers and inference workers fill one storage while the learner learns from the other (HTS-RL).

With a lag of 0 rollout and learning take turns: the synchronous baseline.

*Several learners* (GALA, arXiv 1906.04585; TianJi), each with samplers of its own: the seed of its environments is
``run.seed`` + its number. All start with the same parameters. After an update each sends its parameters to its
out-neighbours, takes the mean with what has arrived from its in-neighbours, and continues; it waits only for one of
which nothing came for ``gala.max_staleness`` rollouts (``transport.mixing``). The mean of all policies is published
and evaluated; each learner writes checkpoints of its own. In mode tianji each takes the mean of all parameters every
``learner.average_interval`` updates; each policy is published and evaluated. Learners of other hosts may be in the
ring (``--cluster``): a run on each host, which starts with a neighbour's parameters.

*Learning rate.* Each of n learners has 1/n of the rows, so its gradient has sqrt(n) times the noise, and Adam makes
steps of one size of either. The mean of n such steps goes 1/sqrt(n) as far as one step from all rows would. So the
learning rate is multiplied by sqrt(n) (``gala.scale_lr``), but not to above 4e-3, where learners fall back
(``assets/figures.md``). Learners keep samplers of their own, also on small tasks: that costs no env steps, and a crash
of an environment ends no learner.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from spreeze.errors import CheckpointError, ConfigError
from spreeze.runtime.assembly import Assembly, Data
from spreeze.runtime.learner_spread import LearnerSpread, in_lockstep
from spreeze.runtime.recorder import GroupSample
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.mixing import MixMemory, MixSpec
from spreeze.transport.rollouts import InferenceMailbox, LearnerMemory, Rollouts, restore_rollouts
from spreeze.transport.weights import VersionedParameters
from spreeze.workers.jobs import OnPolicyLearnerJob, RolloutSamplerJob, RolloutWorkerJob
from spreeze.workers.roles import RestartLimit

_LIMIT = RestartLimit(failures=20, window_s=60.0, quarantine_s=None, backoff_s=0.05, max_delay_s=1.0)
"""The others learn on without a learner that fails, so it may fail more often than a learner that is alone."""
_MOST_LR = 4e-3  # Learning rate to which the number of learners may raise one.


class RolloutData(Data):
    """A learner's storages, mailbox, policies and states, restored from its last checkpoint if there is one."""

    def __init__(self, run: Assembly, group: int) -> None:
        """A ResourceError if there is no room, a ConfigError if the checkpoint does not fit the settings."""
        plan, spec = run.plan, run.plan.rollout_spec()
        self.rollouts, self.batch_size = run.open(lambda: Rollouts.create(spec)), plan.batch_size
        self.mailbox = run.open(lambda: InferenceMailbox.create(spec))
        self.memory = LearnerMemory(run.open(VersionedParameters.create), run.open(VersionedParameters.create))
        self.size_bytes = spec.size_bytes
        if plan.earlier.sessions:
            self._restore(run.folder(group))
        self.first_rollout, state = self.rollouts.current, self.memory.states.read(self.rollouts.current)
        self.first_updates = 0 if state is None else int(state.meta["updates"])

    def _restore(self, folder: Path) -> None:
        checkpoint = CheckpointStore(folder / "checkpoints").load_latest()
        if checkpoint is None:
            return
        try:
            restore_rollouts(checkpoint.tensors, checkpoint.state, self.rollouts, self.memory)
        except (CheckpointError, KeyError) as error:
            raise ConfigError(f"{folder.name} cannot be continued with these settings: {error}") from None

    @property
    def env_steps(self) -> int:
        """Env steps of whole rollouts since the run started."""
        return self.rollouts.current * self.rollouts.spec.rows

    @property
    def swaps(self) -> int | None:
        return self.rollouts.current

    def read(self, posted: GroupSample, *, ending: bool) -> GroupSample:
        """Counts whole rollouts only, since a resume collects the rest again."""
        collected = (self.rollouts.current - self.first_rollout) * self.rollouts.spec.rows
        updates = int(max(0.0, posted.learner["updates"] - self.first_updates))
        for sampler in posted.samplers if ending else ():
            sampler["env_steps"] = collected / len(posted.samplers)
        return dataclasses.replace(posted, inserted=collected, sampled=updates * self.batch_size)


def assemble(run: Assembly) -> None:
    """Learners, samplers and inference workers of all groups; several learners mix or average their parameters."""
    plan, config, hosts = run.plan, run.plan.config, run.hosts_messages()
    groups = range(plan.learners)
    data = [RolloutData(run, group) for group in groups]
    run.data += data
    run.whole_env_steps = sum(one.env_steps for one in data)
    samplers = [run.wakeups(plan.samplers_of(group)) for group in groups]
    inference_workers, learners = run.wakeups(plan.inference_workers), run.wakeups(plan.learners)
    memory = None
    if plan.learners > 1 or hosts is not None:
        mixed = memory = run.open(lambda: MixMemory.create(plan.learners, lockstep=in_lockstep(plan)))
        for group in groups:
            mixed.board["env_steps"][group] = data[group].env_steps
        if plan.learners > 1 and hosts is None:  # parameters of other hosts are not here
            run.spread = LearnerSpread(plan, mixed)
    for group in groups:
        job = learner_job(run, group, data[group])
        job = dataclasses.replace(job, wakeup=learners[group], sampler_wakeups=samplers[group])
        if memory is None:
            run.learner(group, job)
        else:
            run.learner(group, _mixing(run, job, group, memory, data), _LIMIT)
    for group in groups:
        shared: dict[str, Any] = {
            "num_envs": config.rollout.envs_per_sampler,
            "num_inference_workers": plan.inference_workers,
            "rollouts": data[group].rollouts.handle,
            "mailbox": data[group].mailbox.handle,
            "policies": data[group].memory.policies.handle,
            "sampler_wakeups": samplers[group],
            "inference_wakeups": inference_workers,
        }
        for index in range(plan.samplers_of(group)):
            run.sampler(
                group,
                index,
                RolloutSamplerJob(
                    **shared,
                    index=index,
                    spec=plan.spec,
                    seed=config.run.seed + run.seed_offset(group),
                    step_synchronous=plan.lag == 0 and config.rollout.synchrony == "step",
                    nan_policy=config.sampling.nan_policy,
                    learner_wakeup=learners[group],
                    evaluation=run.turn_evaluation,
                ),
                role="rollout-sampler",
            )
        for index in range(plan.inference_workers):
            run.inference_worker(group, index, RolloutWorkerJob(**shared, index=index))


def learner_job(run: Assembly, group: int, data: RolloutData) -> OnPolicyLearnerJob:
    """The job of a learner that nobody wakes, and that is alone."""
    plan, lag = run.plan, run.plan.lag or 0
    return OnPolicyLearnerJob(
        **run.learner_fields(group),
        correction=plan.config.rollout.correction if lag else "on-policy",
        lag=lag,
        batch_size=plan.batch_size,
        rollouts=data.rollouts.handle,
        policies=data.memory.policies.handle,
        states=data.memory.states.handle,
    )


def _mixing(
    run: Assembly, job: OnPolicyLearnerJob, own: int, memory: MixMemory, data: list[RolloutData]
) -> OnPolicyLearnerJob:
    """A learner's job with its part in the mixing; all start with the same parameters."""
    plan, hosts, gala = run.plan, run.messages, run.plan.config.gala
    averages, algorithm = plan.config.data_flow.averages_parameters, dict(job.algorithm)
    means = own == 0 and plan.policies == 1
    mix = MixSpec(
        learner=own,
        learners=plan.learners,
        mixing="average" if averages else gala.mixing,
        topology=gala.topology,
        max_staleness=None if averages else gala.max_staleness,
        interval=-(-plan.config.learner.average_interval // plan.updates_in_rollout),
        rows=tuple(range(plan.learners)),
        memory=memory.handle,
        policies=tuple(one.memory.policies.handle for one in data) if means else (),
        hosts=hosts,
    )
    if gala.scale_lr and mix.mixing == "gossip":
        learners, lr = plan.learners if hosts is None else hosts.learners, float(algorithm["lr"])
        algorithm["lr"] = min(lr * math.sqrt(learners), max(lr, _MOST_LR))
    if mix.mixing == "all_reduce" and "target_kl" in algorithm:
        algorithm["target_kl"] = None  # else each would take steps of its own size
    return dataclasses.replace(job, mix=mix, algorithm=algorithm)
