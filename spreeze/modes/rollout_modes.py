"""Groups of rollouts: paced, or through a circular buffer where the data flow is asynchronous.

*Paced* (HTS-RL): samplers and inference workers fill one slot while the learner learns from the other. With a lag of
0 rollout and learning take turns: the synchronous baseline.

*Several learners* (GALA, arXiv 1906.04585; TianJi) have samplers of their own, with seeds ``run.seed`` + their number,
and start with the same parameters. After an update each sends its parameters to its out-neighbours, takes the mean with
the messages of its in-neighbours, and continues; it waits only for one that has sent nothing for
``gala.max_staleness`` rollouts (``transport.mixing``). The mean of all policies is published and evaluated. In mode
tianji each takes the mean of all parameters every ``learner.average_interval`` updates; each policy is published and
evaluated. Learners of other hosts may be in the ring (``--cluster``), each of a run on its host.

*Learning rate.* Each of n learners has 1/n of the rows. The mean of their n Adam steps is 1/sqrt(n) as long as one step
from all rows would be, so the learning rate is multiplied by sqrt(n) (``gala.scale_lr``), to at most 4e-3
(``assets/figures.md``).

*Circular buffer* (IMPACT): samplers -> rollouts in shared memory -> learner, each at its own pace. The algorithm sets
the number of slots of the buffer, the uses of a rollout (``slots``, ``uses``), and whether a sampler waits before it
overwrites one with too few uses (``least_uses``, by default half of ``uses``, rounded down). The learner waits when all
stored rollouts are used up. Each step has the policy's version and its log-probability, so the algorithm can correct
for any lag.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.errors import CheckpointError, ConfigError
from spreeze.metrics import median
from spreeze.runtime.assembly import Assembly, GroupData
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import GroupSample
from spreeze.runtime.recorder import Recorder
from spreeze.transport.checkpoint import Checkpoint
from spreeze.transport.gossip import asynchronous_bound, contraction, mixing_matrix, radius, synchronous_bound
from spreeze.transport.mixing import NORMS, MixMemory, MixSpec
from spreeze.transport.rollouts import InferenceMailbox, LearnerMemory, Rollouts, restore_rollouts
from spreeze.transport.weights import VersionedParameters
from spreeze.workers.jobs import (
    BufferLearnerJob,
    BufferSamplerJob,
    OnPolicyLearnerJob,
    RolloutSamplerJob,
    RolloutWorkerJob,
)
from spreeze.workers.roles import Address, RestartLimit

_LIMIT = RestartLimit(failures=20, window_s=60.0, quarantine_s=None, backoff_s=0.05, max_delay_s=1.0)
"""The others continue without a learner that fails, so it may fail more often than a single learner."""
_MAX_LR = 4e-3  # Learning rate up to which the number of learners may raise it.
_POLICIES = 3  # versions of the policy in shared memory: while one is written or read, a newer one may be written


def assemble(run: Assembly) -> None:
    """Learners and samplers of the data flow that the mode declares."""
    (_assemble_buffer if run.plan.config.data_flow.asynchronous else _assemble_paced)(run)


class RolloutData(GroupData):
    """A learner's rollout slots, mailbox, policies and states, restored from its last checkpoint if there is one."""

    def __init__(self, run: Assembly, group: int) -> None:
        """A ResourceError if there is no room, a ConfigError if the checkpoint does not fit the settings."""
        plan, spec = run.plan, run.plan.rollout_spec()
        self.rollouts, self._batch_size = run.open(lambda: Rollouts.create(spec)), plan.batch_size
        self.mailbox = run.open(lambda: InferenceMailbox.create(spec))
        self.memory = LearnerMemory(run.open(VersionedParameters.create), run.open(VersionedParameters.create))
        self.size_bytes = spec.size_bytes
        if (checkpoint := run.checkpoint(group)) is not None and not self._restore(checkpoint, run.folder(group)):
            learner = Address("learner", group).name
            run.notes.append(
                f"{learner} now has {spec.num_envs} environments and rollouts of {spec.rows} rows, other than before: "
                "all begin new episodes, and the rollout that was collected last is lost"
            )
        self._first_rollout, state = self.rollouts.current, self.memory.states.read(self.rollouts.current)
        self._first_updates = 0 if state is None else int(state.meta["updates"])

    def _restore(self, checkpoint: Checkpoint, folder: Path) -> bool:
        """False if rollouts have other sizes now."""
        try:
            return restore_rollouts(checkpoint.tensors, checkpoint.state, self.rollouts, self.memory)
        except (CheckpointError, KeyError) as error:
            raise ConfigError(f"{folder.name} cannot be continued with these settings: {error}") from None

    @property
    def env_steps(self) -> int:
        """Env steps of whole rollouts since the run started."""
        return self.rollouts.env_steps_before(self.rollouts.current)

    @property
    def swaps(self) -> int | None:
        return self.rollouts.current

    def read(self, posted: GroupSample, *, ending: bool) -> GroupSample:
        """Counts whole rollouts only, since a resume collects the rest again."""
        collected = (self.rollouts.current - self._first_rollout) * self.rollouts.spec.rows
        samplers = posted.samplers
        if ending:
            samplers = tuple({**sampler, "env_steps": collected / len(samplers)} for sampler in samplers)
        sampled = posted.rows_drawn(self._batch_size, self._first_updates)
        return dataclasses.replace(posted, samplers=samplers, inserted=collected, sampled=sampled)


def _assemble_paced(run: Assembly) -> None:
    """Learners, samplers and inference workers of all groups; several learners mix or average their parameters."""
    plan, config, hosts = run.plan, run.plan.config, run.hosts_messages()
    groups = range(plan.learners)
    data = [RolloutData(run, group) for group in groups]
    run.data += data
    run.resumed_env_steps = sum(part.env_steps for part in data)
    samplers = [run.wakeups(plan.samplers_of(group)) for group in groups]
    inference_workers, learners = run.wakeups(plan.inference_workers), run.wakeups(plan.learners)
    memory = None
    if plan.learners > 1 or hosts is not None:
        mixed = memory = run.open(lambda: MixMemory.create(plan.learners, lockstep=in_lockstep(plan)))
        for group in groups:
            mixed.board["env_steps"][group] = data[group].env_steps
        if plan.learners > 1 and hosts is None:  # parameters of other hosts are not here
            run.shared_metrics = LearnerSpread(plan, mixed).metrics
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
            "weights_channel": data[group].memory.policies.handle,
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
            run.add(Address("inference", group, index), RolloutWorkerJob(**shared, index=index))


def learner_job(run: Assembly, group: int, data: RolloutData) -> OnPolicyLearnerJob:
    """The job of a learner without wakeups and without other learners."""
    plan, lag = run.plan, run.plan.lag or 0
    return OnPolicyLearnerJob(
        **run.learner_fields(group),
        correction=plan.config.rollout.correction if lag else "on-policy",
        lag=lag,
        batch_size=plan.batch_size,
        rollouts=data.rollouts.handle,
        weights_channel=data.memory.policies.handle,
        states=data.memory.states.handle,
    )


def _mixing(
    run: Assembly, job: OnPolicyLearnerJob, learner: int, memory: MixMemory, data: list[RolloutData]
) -> OnPolicyLearnerJob:
    """A learner's job with its part in the mixing; all start with the same parameters."""
    plan, hosts, gala = run.plan, run.messages, run.plan.config.gala
    averages, algorithm = plan.config.data_flow.averages_parameters, dict(job.algorithm)
    means = learner == 0 and plan.policies == 1
    updates_in_rollout = plan.minibatches * int(algorithm.get("epochs", 1))
    mix = MixSpec(
        learner=learner,
        learners=plan.learners,
        mixing="average" if averages else gala.mixing,
        topology=gala.topology,
        max_staleness=None if averages else gala.max_staleness,
        average_interval=-(-plan.config.learner.average_interval // updates_in_rollout),
        rows=tuple(range(plan.learners)),
        memory=memory.handle,
        policies=tuple(part.memory.policies.handle for part in data) if means else (),
        hosts=hosts,
    )
    if gala.scale_lr and mix.mixing == "gossip":
        learners, lr = plan.learners if hosts is None else hosts.learners, float(algorithm["lr"])
        algorithm["lr"] = min(lr * math.sqrt(learners), max(lr, _MAX_LR))
    if mix.mixing == "all_reduce" and "target_kl" in algorithm:
        algorithm["target_kl"] = None  # else each would take steps of its own size
    return dataclasses.replace(job, mix=mix, algorithm=algorithm)


_SLOW_FRACTION = 0.5
_WINDOW_S = 5.0
_REPORT_AGAIN_S = 60.0


def in_lockstep(plan: RunPlan) -> bool:
    """True if all learners mix at every update, as in Proposition 1."""
    return plan.config.data_flow.mixes_parameters and plan.config.gala.max_staleness == 0


class LearnerSpread:
    """Measures how far apart the learners are, and names the slow ones."""

    def __init__(self, plan: RunPlan, memory: MixMemory) -> None:
        self._memory = memory
        self._gala, self._learners = plan.config.gala, plan.learners
        self._beta = contraction(mixing_matrix(self._gala.topology, plan.learners))
        self._gossips = plan.config.data_flow.mixes_parameters and self._gala.mixing == "gossip"
        self._lockstep = in_lockstep(plan)
        self._start = None if plan.earlier.sessions else 0.0
        self._past: deque[tuple[float, list[float]]] = deque()
        self._reported_s = [-math.inf] * plan.learners

    def metrics(self, groups: tuple[GroupSample, ...], now_s: float, recorder: Recorder) -> dict[str, float]:
        """The metrics of all learners together; ``recorder`` gets a warning of a slow one."""
        metrics = self._sizes()
        returns = [[row["episode_return"] for row in group.samplers if row["episodes"]] for group in groups]
        if all(returns):
            means = [float(np.mean(group)) for group in returns]
            metrics |= {"learners_best": max(means), "learners_spread": max(means) - min(means)}
        self._report_slow([group.learner["updates"] for group in groups], now_s, recorder)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _sizes(self) -> dict[str, float]:
        """The radius and its bounds; a bound is unknown if the learners do not gossip.

        Both propositions start with equal parameters. After a resume the radius measured first is added:
        mixing never makes it larger.
        """
        memory, board = self._memory, self._memory.board
        parameters = memory.aligned() if self._lockstep else memory.newest()
        if parameters is None:
            return {}
        sizes = {"gossip_radius": radius(np.stack(parameters))}
        self._start = sizes["gossip_radius"] if self._start is None else self._start
        if not self._gossips:
            return sizes
        counts = np.full(self._learners, board["number"].min()) if self._lockstep else board["number"]
        both = zip(board["norms"], counts, strict=True)
        latest = [norms[np.arange(number - NORMS + 1, number + 1) % NORMS] for norms, number in both]
        if self._lockstep:  # slots after that number hold other updates
            latest = [norms[NORMS // 2 :] for norms in latest]
        largest, staleness = float(board["largest"].max()), float(board["staleness"].max())
        bound = asynchronous_bound(largest, self._gala.topology, self._learners, staleness)
        return sizes | {
            "gossip_bound_1": self._start + synchronous_bound(np.stack(latest), self._beta),
            "gossip_bound_2": self._start + bound,
        }

    def _report_slow(self, updates: list[float], now_s: float, recorder: Recorder) -> None:
        self._past.append((now_s, updates))
        while len(self._past) > 2 and now_s - self._past[1][0] >= _WINDOW_S:
            self._past.popleft()
        then_s, before = self._past[0]
        if now_s - then_s < _WINDOW_S or not all(before):  # one that still loads is not slow
            return
        rates = [max(new - old, 0.0) / (now_s - then_s) for old, new in zip(before, updates, strict=True)]
        for learner, rate in enumerate(rates):
            others = median([*rates[:learner], *rates[learner + 1 :]])
            if others > 0.0 and rate < _SLOW_FRACTION * others and now_s - self._reported_s[learner] >= _REPORT_AGAIN_S:
                self._reported_s[learner] = now_s
                limit = f" before the staleness limit of {self._gala.max_staleness} rollouts" if self._gossips else ""
                recorder.event(
                    "warning",
                    f"{Address('learner', learner).name} is slow: {rate:.3g} updates/s, "
                    f"the others {others:.3g}; the others do not wait for it{limit}",
                )


class BufferData(GroupData):
    """The circular buffer of a learner."""

    def __init__(self, rollouts: Rollouts, batch_size: int, first_updates: int) -> None:
        self._rollouts, self._batch_size, self._first_updates = rollouts, batch_size, first_updates
        self.size_bytes = rollouts.spec.size_bytes

    def read(self, posted: GroupSample, *, ending: bool) -> GroupSample:
        sampled = posted.rows_drawn(self._batch_size, self._first_updates)
        return dataclasses.replace(posted, inserted=int(self._rollouts.steps.sum()), sampled=sampled)


def _assemble_buffer(run: Assembly) -> None:
    """One learner and its samplers."""
    plan, config, num_envs = run.plan, run.plan.config, run.plan.config.rollout.envs_per_sampler
    rollouts = run.open(lambda: Rollouts.create(plan.rollout_spec()))
    weights_channel = run.open(lambda: VersionedParameters.create(_POLICIES)).handle
    (wakeup,) = run.wakeups(1)
    run.data.append(BufferData(rollouts, plan.batch_size, run.first_updates()))
    run.learner(
        0,
        BufferLearnerJob(
            **run.learner_fields(0) | {"algorithm": plan.algorithm_fields() | {"slots": plan.buffer_slots}},
            batch_size=plan.batch_size,
            envs_per_sampler=num_envs,
            rollouts=rollouts.handle,
            weights_channel=weights_channel,
            wakeup=wakeup,
        ),
    )
    for index in range(plan.samplers):
        run.sampler(
            0,
            index,
            BufferSamplerJob(
                spec=plan.spec,
                index=index,
                num_envs=num_envs,
                nan_policy=config.sampling.nan_policy,
                seed=plan.session_seed,
                rollouts=rollouts.handle,
                weights_channel=weights_channel,
                learner_wakeup=wakeup,
                evaluation=run.turn_evaluation,
            ),
        )
