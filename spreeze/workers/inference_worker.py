"""Inference workers compute actions in batches, for whichever environments have asked (HTS-RL, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from spreeze.inference.policy import Policy
from spreeze.metrics.table import SLOTS, Phase
from spreeze.transport.rollouts import Answers, InferenceMailbox, Rollouts, RolloutSpec
from spreeze.transport.shared_memory import Wakeup
from spreeze.transport.weights import VersionedParameters
from spreeze.types import Jsonable
from spreeze.workers.context import WorkerContext

WAIT_S = 0.1
"""Longest sleep without a wakeup; it ends for the heartbeat, a stop, or a lost wakeup."""


class RolloutPolicy:
    """The policy of the current rollout, read again when a new rollout begins."""

    def __init__(self, rollouts: Rollouts, policies: VersionedParameters) -> None:
        self._rollouts, self._policies = rollouts, policies
        self._policy: Policy | None = None
        self.interval = -1
        """Rollout of the policy that was returned last."""

    def current(self) -> Policy | None:
        """The policy, or None while it is not published. A rollout lasts until no worker needs its policy any more."""
        interval = self._rollouts.interval
        if interval != self.interval:
            weights = self._policies.read(interval)
            if weights is None:
                return None
            self._policy, self.interval = Policy.from_weights(weights.arrays, weights.meta), interval
        return self._policy


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
        self._mailbox.answer(envs, Answers(action, log_prob, self._policies.interval))
        return envs


@dataclass(frozen=True, kw_only=True)
class InferenceWorkerJob(Jsonable):
    index: int
    num_inference_workers: int
    envs_per_sampler: int
    rollouts: RolloutSpec
    rollouts_fd: int
    mailbox_fd: int
    policy_fds: tuple[int, ...]
    wakeup_fds: tuple[int, ...]
    """Of this worker."""
    sampler_wakeup_fds: tuple[int, ...]
    """Of all samplers, two each."""


def wakeups_of(fds: tuple[int, ...]) -> list[Wakeup]:
    return [Wakeup(fds[at], fds[at + 1]) for at in range(0, len(fds), 2)]


def run_inference_worker(context: WorkerContext, job: InferenceWorkerJob) -> None:
    """Answers until asked to stop; sleeps while there are no requests."""
    rollouts = Rollouts.attach(job.rollouts_fd, job.rollouts)
    mailbox = InferenceMailbox.attach(job.mailbox_fd, job.rollouts)
    first_fd, second_fd = job.policy_fds
    mine = slice(job.index, None, job.num_inference_workers)
    policies = RolloutPolicy(rollouts, VersionedParameters((first_fd, second_fd)))
    inference = Inference(policies, mailbox, mine)
    (wakeup,) = wakeups_of(job.wakeup_fds)
    samplers = wakeups_of(job.sampler_wakeup_fds)
    numbers: dict[str, Any] = context.named(context.slots)
    assert set(numbers) == set(SLOTS["inference"])
    while not context.stopping:
        start = perf_counter()
        context.beat(Phase.STEP)
        envs = inference.answer()
        if envs.size:
            for sampler in np.unique(envs // job.envs_per_sampler).tolist():
                samplers[sampler].notify()
            numbers["rows"] += len(envs)
            numbers["batches"] += 1
            numbers["policy_s"] += perf_counter() - start
        else:
            context.beat(Phase.WAIT)
            wakeup.wait(WAIT_S)
            numbers["wait_s"] += perf_counter() - start
        numbers["policy_version"] = max(policies.interval, 0)
        context.post(**numbers)
    rollouts.close()
    mailbox.close()
