"""The workers that step environments, and those that infer for them.

Replay samplers append to their own shard of the ring, rollout samplers to their own environment columns. In paced
modes, inference workers answer whichever environments have a pending request (HTS-RL, section 3); without them each
sampler runs the policy itself. ``assets/docs/architecture.md`` follows one transition from here to the weights' file.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

from spreeze.config.section import NO_LIMIT
from spreeze.envs.action_spaces import RandomActions
from spreeze.envs.task import TaskSource, vector_maker
from spreeze.inference.policy import Policy, exploring_arrays
from spreeze.metrics.table import SLOTS
from spreeze.transport import status_table
from spreeze.transport.replay_ring import ShardWriter
from spreeze.transport.rollouts import InferenceMailbox, Responses, Rollouts
from spreeze.transport.shared_memory import WAIT_S, Wakeup
from spreeze.transport.weights import ParameterSource
from spreeze.workers.collectors.rollout_collector import RolloutCollector, RolloutPolicy
from spreeze.workers.collectors.transition_collector import GoalCollector, TransitionCollector, VectorCollector
from spreeze.workers.context import WorkerContext, open_weights
from spreeze.workers.evaluator import turn_evaluation
from spreeze.workers.jobs import BaseSamplerJob, BufferSamplerJob, ReplaySamplerJob, RolloutSamplerJob, RolloutWorkerJob
from spreeze.workers.roles import Phase

_POLL_S = 0.0005
"""Sleep of a sampler blocked by the limiter or by an unused rollout: shorter than an update, longer than a wakeup."""
_POLICY_VERSION = SLOTS["sampler"].index("policy_version")


def run_sampler(context: WorkerContext, job: ReplaySamplerJob) -> Iterator[None]:
    """Samples until asked to stop, then closes its environments."""
    writer = ShardWriter(job.replay.attach(), job.index)
    # The row count of the writer changes the stream after a restart, so no episode is repeated.
    stream = job.index if job.stream is None else job.stream
    rng = np.random.default_rng([job.seed, stream, writer.next_logical - job.loaded_rows])
    collector_class: Callable[..., TransitionCollector] = TransitionCollector
    if (make_vector := vector_maker(job.spec)) is not None:
        collector_class = partial(VectorCollector, make_vector=make_vector)
    elif job.rows_per_step > 1:
        collector_class = partial(GoalCollector, her=job.her, goals=job.rows_per_step - 1)
    collector = collector_class(
        _task_source(context, job),
        job.num_envs,
        job.spec,
        writer,
        n_step=job.n_step,
        gamma=job.gamma,
        seeds=[int(s) for s in rng.integers(2**31, size=job.num_envs)],
        nan_policy=job.nan_policy,
        heartbeat=context.heartbeat,
        on_error=context.env_error,
    )
    collector.on_episode = context.episode
    try:
        with turn_evaluation(context, job.evaluation) as collector.inline_evaluation:
            loop = SamplerLoop(context, job, writer, collector, rng)
            yield from _turns(context, loop.step_or_wait)
    finally:
        collector.close()
        writer.close()


def _task_source(context: WorkerContext, job: BaseSamplerJob) -> TaskSource:
    return TaskSource(job.spec, context.run_dir, lambda: context.header_word(status_table.ENV_ARGS))


class NewestPolicy:
    """The newest published policy, for samplers that never wait."""

    def __init__(self, weights: ParameterSource) -> None:
        self._weights = weights
        self._order: tuple[int, int] | None = None
        self._policy: Policy | None = None
        self.version = 0  # updates of the learner when it published this policy

    def refresh(self) -> None:
        newest = self._weights.read_latest(self._order)
        if newest is not None:
            self._policy = Policy.from_weights(exploring_arrays(newest.arrays), newest.meta)
            self._order, self.version = newest.order, newest.version

    def current(self) -> Policy | None:
        return self._policy


class SamplerLoop:
    """One turn: ask the limiter, refresh the policy, step the environments, store rows, post metrics."""

    def __init__(
        self,
        context: WorkerContext,
        job: ReplaySamplerJob,
        writer: ShardWriter,
        collector: TransitionCollector,
        rng: np.random.Generator,
    ) -> None:
        self._context, self._writer, self._collector, self._rng = context, writer, collector, rng
        self._limiter, self._retuned = job.limiter, 0
        self._keep_limiter = job.limiter.within(0.0, job.limiter.maximum)
        self._random = RandomActions(job.spec, rng)
        self._reads_files = job.weights_channel is None
        """True if weights come as files, announced by a counter; else the policy is read at each turn."""
        self._policy = NewestPolicy(
            open_weights(Path(job.group_dir)) if job.weights_channel is None else job.weights_channel.attach()
        )
        self._weights_counter = -1
        self._ring_counts = writer.counts()
        self._wakeup, self._learner = (
            None if handle is None else handle.attach() for handle in (job.wakeup, job.learner_wakeup)
        )

    def step_or_wait(self) -> np.ndarray | None:
        """One step of all environments, or one short wait; returns the actions taken [N, A], if any."""
        start = perf_counter()
        actions = None
        if self._context.pause_if_requested(start):
            pass
        elif self._may_insert():
            self._context.heartbeat(Phase.STEP)
            self._refresh_policy()
            actions = self._actions()
            self._collector.counts.policy_s += perf_counter() - start
            self._collector.step(actions, self._policy.version)
            if self._learner is not None:
                self._learner.notify()
            self._context.account_work(start)
        else:
            self._context.heartbeat(Phase.WAIT)
            if self._wakeup is None:
                time.sleep(_POLL_S)
            else:
                self._wakeup.wait(WAIT_S)
            self._collector.counts.wait_s += perf_counter() - start
        self._collector.counts.post(self._context.slots, self._context.earlier_counters)
        self._context.slots[_POLICY_VERSION] = self._policy.version
        self._context.report_info(self._collector.info, start)
        return actions

    def _may_insert(self) -> bool:
        if (retuned := self._context.header_word(status_table.RETUNED)) != self._retuned:
            self._retuned = retuned
            tuned = self._context.status.retuned_settings()
            self._limiter = self._limiter.within(tuned.samples_per_insert_min, tuned.samples_per_insert_max)
            self._keep_limiter = self._limiter.within(tuned.kept_per_insert, NO_LIMIT)
        self._ring_counts = counts = self._writer.counts()
        rows = self._collector.num_envs * self._collector.rows_per_step
        self._collector.keeps_rows = self._keep_limiter.may_insert(*counts, rows)
        return self._limiter.may_insert(*counts, rows)

    def _refresh_policy(self) -> None:
        counter = self._context.weights_counter
        if counter != self._weights_counter or not self._reads_files:
            self._policy.refresh()
            if self._policy.current() is not None:
                self._weights_counter = counter

    def _actions(self) -> np.ndarray:
        """Uniform actions until learning has started or trained weights are there, then the policy's."""
        policy = self._policy.current()
        if policy is None or (self._policy.version == 0 and self._ring_counts.inserted_at_learning_start < 0):
            if policy is not None and policy.state_dim:  # its state also follows random actions
                _, self._collector.state = policy.act(self._collector.obs, self._collector.state)
            return self._random.draw(self._collector.num_envs, self._collector.obs)
        actions, self._collector.state = policy.act(self._collector.obs, self._collector.state, self._rng)
        return actions


def _turns(context: WorkerContext, turn: Callable[[], object]) -> Iterator[None]:
    yield
    while not context.stopping:
        turn()
        yield
    context.heartbeat(Phase.DONE)  # closing environments is not part of a step


def _collector(
    context: WorkerContext,
    job: RolloutSamplerJob | BufferSamplerJob,
    rollouts: Rollouts,
    stack: contextlib.ExitStack,
    **options: bool,
) -> RolloutCollector:
    """The environments of a sampler that fills ``rollouts``, closed by ``stack``; ``options`` are keyword arguments."""
    collector = RolloutCollector(
        _task_source(context, job),
        job.spec,
        rollouts,
        first=job.index * job.num_envs,
        num_envs=job.num_envs,
        seed=job.seed,
        heartbeat=context.heartbeat,
        nan_policy=job.nan_policy,
        on_error=context.env_error,
        **options,
    )
    stack.enter_context(contextlib.closing(collector))
    collector.on_episode = context.episode
    collector.inline_evaluation = stack.enter_context(turn_evaluation(context, job.evaluation))
    return collector


def run_rollout_sampler(context: WorkerContext, job: RolloutSamplerJob) -> Iterator[None]:
    """Steps until asked to stop; the successor of a dead sampler continues at the same step."""
    with contextlib.ExitStack() as stack:
        rollouts = stack.enter_context(contextlib.closing(job.rollouts.attach()))
        mailbox = stack.enter_context(contextlib.closing(job.mailbox.attach()))
        envs = _collector(context, job, rollouts, stack, step_synchronous=job.step_synchronous)
        loop = _RolloutSampler(context, job, rollouts, mailbox, envs)
        yield from _turns(context, loop.turn)


def run_buffer_sampler(context: WorkerContext, job: BufferSamplerJob) -> Iterator[None]:
    """Fills the circular buffer, with the newest policy from rollout to rollout, until asked to stop.

    The successor of a dead sampler starts new episodes, in the unfinished rollout.
    """
    with contextlib.ExitStack() as stack:
        rollouts = stack.enter_context(contextlib.closing(job.rollouts.attach()))
        envs = _collector(context, job, rollouts, stack, replays=False)
        loop = _BufferSampler(context, envs, job.weights_channel.attach(), job.learner_wakeup.attach())
        yield from _turns(context, loop.turn)


class _BufferSampler:
    """Steps all environments into its own rollouts, with the newest policy at the start of each."""

    def __init__(
        self, context: WorkerContext, envs: RolloutCollector, weights: ParameterSource, learner: Wakeup
    ) -> None:
        self._context, self._envs, self._policy, self._learner = context, envs, NewestPolicy(weights), learner
        self._needs_policy = True
        """True if the next step is by the newest policy: in a new rollout, and after a pause."""
        self._at_rollout_start = True

    def turn(self) -> None:
        """One step of all environments, or one short sleep."""
        start, context, counts = perf_counter(), self._context, self._envs.counts
        if context.pause_if_requested(start):
            self._needs_policy = True
        elif self._step():
            context.account_work(start)
        else:
            context.heartbeat(Phase.WAIT)
            time.sleep(_POLL_S)
            counts.wait_s += perf_counter() - start
        counts.post(context.slots, context.earlier_counters)
        context.slots[_POLICY_VERSION] = self._policy.version
        context.report_info(self._envs.info, start)

    def _step(self) -> bool:
        """False without a policy, or while the oldest rollout has to be used first."""
        start = perf_counter()
        if self._at_rollout_start and not self._envs.may_step():
            return False
        if self._needs_policy or self._policy.current() is None:
            self._policy.refresh()
        self._envs.counts.policy_s += perf_counter() - start
        self._context.heartbeat(Phase.STEP)
        stepped = self._envs.advance(self._policy)
        self._needs_policy = self._at_rollout_start = self._envs.columns.filled
        if self._at_rollout_start:
            self._learner.notify()
        return stepped


class MailboxClient:
    """A sampler's requests to inference workers."""

    def __init__(self, envs: RolloutCollector, mailbox: InferenceMailbox, first: int, num_envs: int) -> None:
        self._envs, self._mailbox, self._first = envs, mailbox, first
        self._mine = slice(first, first + num_envs)

    def request(self) -> np.ndarray:
        """Requests the actions that are due; returns the environments that wait for one."""
        request_id, requested = self._envs.columns.request_id, self._mailbox.requested[self._mine].tolist()
        indices = [index for index in self._envs.may_step() if requested[index] != request_id(index)]
        envs = np.array(indices, np.int64) + self._first
        if indices:
            self._mailbox.request(
                envs, *self._envs.requests(indices), np.array([request_id(index) for index in indices])
            )
        return envs

    def step(self) -> bool:
        """Steps the environments whose request is answered; False if there are none."""
        request_id, answered = self._envs.columns.request_id, self._mailbox.answered[self._mine].tolist()
        indices = [index for index in self._envs.may_step() if answered[index] == request_id(index)]
        if indices:
            self._envs.step(indices, self._mailbox.responses(np.array(indices) + self._first))
        return bool(indices)


class _RolloutSampler:
    """Steps those environments whose action has arrived, into rollouts that all samplers share."""

    def __init__(
        self,
        context: WorkerContext,
        job: RolloutSamplerJob,
        rollouts: Rollouts,
        mailbox: InferenceMailbox,
        envs: RolloutCollector,
    ) -> None:
        self._context, self._envs = context, envs
        wakeups = [handle.attach() for handle in job.sampler_wakeups]
        self._wakeup = wakeups.pop(job.index)
        # In step synchrony the others wait for the last sampler to take the step.
        self._other_wakeups = wakeups if job.step_synchronous else []
        self._inference_workers = [handle.attach() for handle in job.inference_wakeups]
        self._learner = job.learner_wakeup.attach()
        self._policies = RolloutPolicy(rollouts, job.weights_channel.attach())
        self._client = MailboxClient(envs, mailbox, job.index * job.num_envs, job.num_envs)

    def turn(self) -> None:
        """One round over the environments, or one sleep."""
        self._context.heartbeat(Phase.STEP)
        if self._inference_workers:
            self._request_actions()
            stepped = self._client.step()
        else:
            stepped = self._envs.advance(self._policies)
        if stepped:
            columns = self._envs.columns
            if self._other_wakeups and columns.last_of_step:
                for wakeup in self._other_wakeups:
                    wakeup.notify()
            if columns.filled:
                self._learner.notify()
        else:
            start = perf_counter()
            self._context.heartbeat(Phase.WAIT)
            self._wakeup.wait(WAIT_S)
            self._envs.counts.wait_s += perf_counter() - start
        self._envs.counts.post(self._context.slots, self._context.earlier_counters)
        self._context.report_info(self._envs.info, perf_counter())

    def _request_actions(self) -> None:
        start = perf_counter()
        envs = self._client.request()
        requested_s = perf_counter()
        for worker in np.unique(envs % len(self._inference_workers)).tolist():
            self._inference_workers[worker].notify()
        # The woken worker may take this core at once, which counts as waiting.
        self._envs.counts.wait_s += perf_counter() - requested_s
        self._envs.counts.policy_s += requested_s - start


class Inference:
    def __init__(self, policies: RolloutPolicy, mailbox: InferenceMailbox, envs: slice) -> None:
        self._policies, self._mailbox, self._envs = policies, mailbox, envs

    def respond(self) -> np.ndarray:
        """Answers pending requests; returns the environments answered, none while there is no policy."""
        envs = self._mailbox.pending(self._envs)
        policy = self._policies.current() if envs.size else None
        if policy is None:
            return envs[:0]
        mailbox = self._mailbox
        action, log_prob, state = policy.sample(mailbox.obs[envs], mailbox.noise[envs], mailbox.state_of(envs))
        mailbox.respond(envs, Responses(action, log_prob, self._policies.version, state))
        return envs


def run_inference_worker(context: WorkerContext, job: RolloutWorkerJob) -> None:
    """Answers requests until the run stops; sleeps while there are none."""
    with contextlib.closing(job.rollouts.attach()) as rollouts, contextlib.closing(job.mailbox.attach()) as mailbox:
        policies = RolloutPolicy(rollouts, job.weights_channel.attach())
        inference = Inference(policies, mailbox, slice(job.index, None, job.num_inference_workers))
        wakeup = job.inference_wakeups[job.index].attach()
        samplers = [handle.attach() for handle in job.sampler_wakeups]
        counts = context.slot_values()
        while not context.stopping:
            start = perf_counter()
            context.heartbeat(Phase.STEP)
            envs = inference.respond()
            if envs.size:
                for sampler in np.unique(envs // job.num_envs).tolist():
                    samplers[sampler].notify()
                counts["rows"] += len(envs)
                counts["batches"] += 1
                counts["policy_s"] += perf_counter() - start
            else:
                context.heartbeat(Phase.WAIT)
                wakeup.wait(WAIT_S)
                counts["wait_s"] += perf_counter() - start
            counts["policy_version"] = max(policies.version, 0)
            context.post(**counts)
