"""Steps environments into rollouts, with actions of inference workers or of its own policy."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from spreeze.envs.task import open_task
from spreeze.metrics.table import Phase
from spreeze.transport.rollouts import InferenceMailbox, Rollouts, RolloutSpec
from spreeze.transport.weights import VersionedParameters
from spreeze.types import EnvSpec, Jsonable
from spreeze.workers.context import WorkerContext
from spreeze.workers.inference_worker import WAIT_S, RolloutPolicy, wakeups_of
from spreeze.workers.rollout_collector import RolloutCollector


@dataclass(frozen=True, kw_only=True)
class RolloutSamplerJob(Jsonable):
    spec: EnvSpec
    index: int
    seed: int
    num_envs: int
    """M: environments of this sampler."""
    step_synchronous: bool
    nan_policy: str
    num_inference_workers: int
    """0: the sampler computes its own actions."""
    rollouts: RolloutSpec
    rollouts_fd: int
    mailbox_fd: int
    policy_fds: tuple[int, ...]
    sampler_wakeup_fds: tuple[int, ...]
    """Of all samplers, including this one; two each."""
    inference_wakeup_fds: tuple[int, ...]
    learner_wakeup_fds: tuple[int, ...]


def run_rollout_sampler(context: WorkerContext, job: RolloutSamplerJob) -> None:
    """Steps until asked to stop; the successor of a dead sampler continues at the same step."""
    rollouts = Rollouts.attach(job.rollouts_fd, job.rollouts)
    mailbox = InferenceMailbox.attach(job.mailbox_fd, job.rollouts)
    try:
        envs = RolloutCollector(
            lambda: open_task(job.spec), job.spec, rollouts, first=job.index * job.num_envs, num_envs=job.num_envs,
            seed=job.seed, step_synchronous=job.step_synchronous, on_progress=lambda: context.beat(Phase.RESET),
            nan_policy=job.nan_policy, tell=context.env_error,
        )
        try:
            loop = _Sampler(context, job, rollouts, mailbox, envs)
            while not context.stopping:
                loop.turn()
        finally:
            envs.close()
    finally:
        rollouts.close()
        mailbox.close()


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


class _Sampler:
    def __init__(
        self, context: WorkerContext, job: RolloutSamplerJob, rollouts: Rollouts, mailbox: InferenceMailbox,
        envs: RolloutCollector,
    ) -> None:
        self._context, self._job, self._envs = context, job, envs
        samplers = wakeups_of(job.sampler_wakeup_fds)
        self._wakeup = samplers[job.index]
        # In step synchrony the others wait for the last sampler to take the step.
        self._others = [wakeup for wakeup in samplers if wakeup is not self._wakeup] if job.step_synchronous else []
        self._inference_workers = wakeups_of(job.inference_wakeup_fds)
        (self._learner,) = wakeups_of(job.learner_wakeup_fds)
        first_fd, second_fd = job.policy_fds
        self._policies = RolloutPolicy(rollouts, VersionedParameters((first_fd, second_fd)))
        self._asking = (MailboxClient(envs, mailbox, job.index * job.num_envs, job.num_envs)
                        if job.num_inference_workers else None)
        self._wait_s = 0.0
        # Slots outlive this process, so counters continue after a restart.
        self._base = context.slots.copy()

    def turn(self) -> None:
        """One round over the environments, or one sleep."""
        self._context.beat(Phase.STEP)
        if self._asking is None:
            stepped = self._envs.advance(self._policies)
        else:
            self._ask(self._asking)
            stepped = self._asking.step()
        if stepped:
            self._notify()
        else:
            self._sleep()
        self._envs.counts.post(self._context.slots, self._base, self._wait_s)

    def _ask(self, asking: MailboxClient) -> None:
        start = perf_counter()
        asked = asking.ask()
        asked_s = perf_counter()
        for worker in np.unique(asked % self._job.num_inference_workers).tolist():
            self._inference_workers[worker].notify()
        # The woken worker may take this core at once, which counts as waiting.
        self._wait_s += perf_counter() - asked_s
        self._envs.counts.policy_s += asked_s - start

    def _notify(self) -> None:
        """Wakes the workers that may wait for the steps just taken."""
        columns = self._envs.columns
        if self._others and columns.last_of_step:
            for wakeup in self._others:
                wakeup.notify()
        if columns.filled:
            self._learner.notify()

    def _sleep(self) -> None:
        start = perf_counter()
        self._context.beat(Phase.WAIT)
        self._wakeup.wait(WAIT_S)
        self._wait_s += perf_counter() - start
