"""The workers that fill rollouts: samplers step environments, and inference workers compute their actions in batches.

Actions belong to whichever environments have requested one (HTS-RL, section 3). Without inference workers a sampler
draws its own.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from spreeze.envs.task import open_task
from spreeze.metrics.table import SLOTS, Phase
from spreeze.transport.protocols import ParameterSource
from spreeze.transport.rollouts import Answers, InferenceMailbox, Rollouts, RolloutSpec
from spreeze.transport.shared_memory import WAIT_S, Wakeup, wakeups_of
from spreeze.transport.weights import VersionedParameters
from spreeze.types import EnvSpec, Jsonable
from spreeze.workers.collectors import NewestPolicy, RolloutCollector, RolloutPolicy
from spreeze.workers.context import WorkerContext
from spreeze.workers.evaluator import EvaluatorJob, turn_evaluation

POLL_S = 0.0005
"""Sleep of a sampler that waits for uses of its oldest rollout."""
_POLICY_VERSION = SLOTS["sampler"].index("policy_version")


@dataclass(frozen=True, kw_only=True)
class RolloutWorkerJob(Jsonable):
    index: int
    num_envs: int
    """M: environments of each sampler."""
    num_inference_workers: int
    """0: the samplers compute their own actions."""
    rollouts: RolloutSpec
    rollouts_fd: int
    mailbox_fd: int
    policy_fds: tuple[int, ...]
    sampler_wakeup_fds: tuple[int, ...]
    """Descriptors of all samplers' wakeups, two each; those of the inference workers and the learner likewise."""
    inference_wakeup_fds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RolloutSamplerJob(RolloutWorkerJob):
    spec: EnvSpec
    seed: int
    step_synchronous: bool
    nan_policy: str
    learner_wakeup_fds: tuple[int, ...]
    evaluation: EvaluatorJob | None = None
    """Evaluations in the sampler's own environment; None: an evaluator has its own."""


@dataclass(frozen=True, kw_only=True)
class BufferSamplerJob(Jsonable):
    spec: EnvSpec
    index: int
    num_envs: int
    seed: int
    nan_policy: str
    rollouts: RolloutSpec
    rollouts_fd: int
    policy_fds: tuple[int, ...]
    learner_wakeup_fds: tuple[int, ...]
    evaluation: EvaluatorJob | None = None
    """As of ``RolloutSamplerJob``."""


def run_rollout_sampler(context: WorkerContext, job: RolloutSamplerJob) -> None:
    """Steps until asked to stop; the successor of a dead sampler continues at the same step."""
    with contextlib.ExitStack() as stack:
        rollouts = stack.enter_context(contextlib.closing(Rollouts.attach(job.rollouts_fd, job.rollouts)))
        mailbox = stack.enter_context(contextlib.closing(InferenceMailbox.attach(job.mailbox_fd, job.rollouts)))
        envs = stack.enter_context(contextlib.closing(RolloutCollector(
            lambda: open_task(job.spec), job.spec, rollouts, first=job.index * job.num_envs, num_envs=job.num_envs,
            seed=job.seed, step_synchronous=job.step_synchronous, on_progress=context.beat,
            nan_policy=job.nan_policy, on_error=context.env_error,
        )))
        envs.interlude = stack.enter_context(turn_evaluation(context, job.evaluation))
        loop = _RolloutSampler(context, job, rollouts, mailbox, envs)
        while not context.stopping:
            loop.turn()
        context.beat(Phase.DONE)  # closing is no work


def run_buffer_sampler(context: WorkerContext, job: BufferSamplerJob) -> None:
    """Fills the circular buffer, with the newest policy from rollout to rollout, until asked to stop.

    The successor of a dead sampler begins new episodes, in the rollout that was begun.
    """
    with contextlib.ExitStack() as stack:
        rollouts = stack.enter_context(contextlib.closing(Rollouts.attach(job.rollouts_fd, job.rollouts)))
        envs = stack.enter_context(contextlib.closing(RolloutCollector(
            lambda: open_task(job.spec), job.spec, rollouts, first=job.index * job.num_envs, num_envs=job.num_envs,
            seed=job.seed, replays=False, on_progress=context.beat, nan_policy=job.nan_policy,
            on_error=context.env_error,
        )))
        envs.interlude = stack.enter_context(turn_evaluation(context, job.evaluation))
        (learner,) = wakeups_of(job.learner_wakeup_fds)
        loop = _BufferSampler(context, envs, VersionedParameters(job.policy_fds), learner)
        while not context.stopping:
            loop.turn()
        context.beat(Phase.DONE)  # closing is no work


class _BufferSampler:
    def __init__(
        self, context: WorkerContext, envs: RolloutCollector, weights: ParameterSource, learner: Wakeup
    ) -> None:
        self._context, self._envs, self._policy, self._learner = context, envs, NewestPolicy(weights), learner
        self._asks = True
        """True if the next step is by the newest policy: in a new rollout, and after a rest."""
        self._begins = True
        self._base = context.slots.tolist()  # counters continue after a restart

    def turn(self) -> None:
        """One step of all environments, or one short sleep."""
        start, context, counts = perf_counter(), self._context, self._envs.counts
        if context.rests(start):
            self._asks = True
        elif self._step():
            context.worked(start)
        else:
            context.beat(Phase.WAIT)
            time.sleep(POLL_S)
            counts.wait_s += perf_counter() - start
        counts.post(context.slots, self._base)
        context.slots[_POLICY_VERSION] = self._policy.version

    def _step(self) -> bool:
        """False without a policy, or while the oldest rollout has to be used first."""
        start = perf_counter()
        if self._begins and not self._envs.open():
            return False
        if self._asks or self._policy.current() is None:
            self._policy.refresh()
        self._envs.counts.policy_s += perf_counter() - start
        self._context.beat(Phase.STEP)
        stepped = self._envs.advance(self._policy)
        self._asks = self._begins = self._envs.columns.filled
        if self._begins:
            self._learner.notify()
        return stepped


class MailboxClient:
    """A sampler's requests to inference workers."""

    def __init__(self, envs: RolloutCollector, mailbox: InferenceMailbox, first: int, num_envs: int) -> None:
        self._envs, self._mailbox, self._first = envs, mailbox, first
        self._mine = slice(first, first + num_envs)

    def ask(self) -> np.ndarray:
        """Requests the actions that are due; returns the environments asked about."""
        number, asked = self._envs.columns.question, self._mailbox.asked[self._mine].tolist()
        indices = [index for index in self._envs.open() if asked[index] != number(index)]
        envs = np.array(indices, np.int64) + self._first
        if indices:
            self._mailbox.ask(envs, *self._envs.questions(indices), np.array([number(index) for index in indices]))
        return envs

    def step(self) -> bool:
        """Steps the environments whose request is answered; False if there are none."""
        number, answered = self._envs.columns.question, self._mailbox.answered[self._mine].tolist()
        indices = [index for index in self._envs.open() if answered[index] == number(index)]
        if indices:
            self._envs.step(indices, self._mailbox.answers(np.array(indices) + self._first))
        return bool(indices)


class _RolloutSampler:
    def __init__(
        self, context: WorkerContext, job: RolloutSamplerJob, rollouts: Rollouts, mailbox: InferenceMailbox,
        envs: RolloutCollector,
    ) -> None:
        self._context, self._envs = context, envs
        samplers = wakeups_of(job.sampler_wakeup_fds)
        self._wakeup = samplers[job.index]
        # In step synchrony the others wait for the last sampler to take the step.
        self._others = [wakeup for wakeup in samplers if wakeup is not self._wakeup] if job.step_synchronous else []
        self._inference_workers = wakeups_of(job.inference_wakeup_fds)
        (self._learner,) = wakeups_of(job.learner_wakeup_fds)
        self._policies = RolloutPolicy(rollouts, VersionedParameters(job.policy_fds))
        self._client = MailboxClient(envs, mailbox, job.index * job.num_envs, job.num_envs)
        # Slots outlive this process, so counters continue after a restart.
        self._base = context.slots.tolist()

    def turn(self) -> None:
        """One round over the environments, or one sleep."""
        self._context.beat(Phase.STEP)
        if self._inference_workers:
            self._ask()
            stepped = self._client.step()
        else:
            stepped = self._envs.advance(self._policies)
        if stepped:
            columns = self._envs.columns
            if self._others and columns.last_of_step:
                for wakeup in self._others:
                    wakeup.notify()
            if columns.filled:
                self._learner.notify()
        else:
            start = perf_counter()
            self._context.beat(Phase.WAIT)
            self._wakeup.wait(WAIT_S)
            self._envs.counts.wait_s += perf_counter() - start
        self._envs.counts.post(self._context.slots, self._base)

    def _ask(self) -> None:
        start = perf_counter()
        asked = self._client.ask()
        asked_s = perf_counter()
        for worker in np.unique(asked % len(self._inference_workers)).tolist():
            self._inference_workers[worker].notify()
        # The woken worker may take this core at once, which counts as waiting.
        self._envs.counts.wait_s += perf_counter() - asked_s
        self._envs.counts.policy_s += asked_s - start


class Inference:
    def __init__(self, policies: RolloutPolicy, mailbox: InferenceMailbox, envs: slice) -> None:
        self._policies, self._mailbox, self._envs = policies, mailbox, envs

    def answer(self) -> np.ndarray:
        """Answers pending requests; returns the environments answered, none while there is no policy."""
        envs = self._mailbox.pending(self._envs)
        policy = self._policies.current() if envs.size else None
        if policy is None:
            return envs[:0]
        action, log_prob = policy.draw(self._mailbox.obs[envs], self._mailbox.noise[envs])
        self._mailbox.answer(envs, Answers(action, log_prob, self._policies.version))
        return envs


def run_inference_worker(context: WorkerContext, job: RolloutWorkerJob) -> None:
    """Answers until asked to stop; sleeps while there are no requests."""
    with (
        contextlib.closing(Rollouts.attach(job.rollouts_fd, job.rollouts)) as rollouts,
        contextlib.closing(InferenceMailbox.attach(job.mailbox_fd, job.rollouts)) as mailbox,
    ):
        policies = RolloutPolicy(rollouts, VersionedParameters(job.policy_fds))
        inference = Inference(policies, mailbox, slice(job.index, None, job.num_inference_workers))
        wakeup = wakeups_of(job.inference_wakeup_fds)[job.index]
        samplers = wakeups_of(job.sampler_wakeup_fds)
        numbers = context.named(context.slots)
        while not context.stopping:
            start = perf_counter()
            context.beat(Phase.STEP)
            envs = inference.answer()
            if envs.size:
                for sampler in np.unique(envs // job.num_envs).tolist():
                    samplers[sampler].notify()
                numbers["rows"] += len(envs)
                numbers["batches"] += 1
                numbers["policy_s"] += perf_counter() - start
            else:
                context.beat(Phase.WAIT)
                wakeup.wait(WAIT_S)
                numbers["wait_s"] += perf_counter() - start
            numbers["policy_version"] = max(policies.version, 0)
            context.post(**numbers)
