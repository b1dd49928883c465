"""Actors: processes that infer actions in batches for whatever environments have asked (HTS-RL, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from spreeze.jsonable import Jsonable
from spreeze.metrics import SLOTS, Phase
from spreeze.policies import Policy
from spreeze.transport.exchange import Answers, Exchange
from spreeze.transport.parameters import Parameters
from spreeze.transport.rollouts import Rollouts, RolloutSpec
from spreeze.transport.wake import Bell
from spreeze.workers.link import Link

WAIT_S = 0.1
"""Sleep without being rung: only a lost ring, the heartbeat and a stop need an end to it."""


class IntervalPolicy:
    """The policy of the interval at hand, taken over when a new one has begun."""

    def __init__(self, rollouts: Rollouts, policies: Parameters) -> None:
        self._rollouts, self._policies = rollouts, policies
        self._policy: Policy | None = None
        self.interval = -1
        """Interval of the policy that was given last."""

    def current(self) -> Policy | None:
        """The policy, None while it is not there yet; an interval lasts until nobody needs its policy any more."""
        interval = self._rollouts.interval
        if interval != self.interval:
            weights = self._policies.read(interval)
            if weights is None:
                return None
            self._policy, self.interval = Policy.from_weights(weights.arrays, weights.meta), interval
        return self._policy


class Inference:
    """Answers the questions of some environments with the interval's policy."""

    def __init__(self, policies: IntervalPolicy, exchange: Exchange, envs: slice) -> None:
        self._policies, self._exchange, self._envs = policies, exchange, envs

    def answer(self) -> np.ndarray:
        """Answers what is asked now; returns the environments answered, none while the policy is not there yet."""
        envs = self._exchange.pending(self._envs)
        policy = self._policies.current() if envs.size else None
        if policy is None:
            return envs[:0]
        action, log_prob = policy.draw(self._exchange.obs[envs], self._exchange.noise[envs])
        self._exchange.answer(envs, Answers(action, log_prob, self._policies.interval))
        return envs


@dataclass(frozen=True, kw_only=True)
class ActorJob(Jsonable):
    """All that an actor process has to know."""

    index: int
    num_actors: int
    envs_per_executor: int
    rollouts: RolloutSpec
    rollouts_fd: int
    exchange_fd: int
    policy_fds: tuple[int, ...]
    bell_fds: tuple[int, ...]
    """Its own."""
    executor_bell_fds: tuple[int, ...]
    """Of all executors, two each."""


def bells_of(fds: tuple[int, ...]) -> list[Bell]:
    """Bells of inherited descriptors, two each."""
    return [Bell(fds[at], fds[at + 1]) for at in range(0, len(fds), 2)]


def run_actor(link: Link, job: ActorJob) -> None:
    """Answers until told to stop; sleeps while nobody asks."""
    rollouts = Rollouts.attach(job.rollouts_fd, job.rollouts)
    exchange = Exchange.attach(job.exchange_fd, job.rollouts)
    first_fd, second_fd = job.policy_fds
    mine = slice(job.index, None, job.num_actors)
    policies = IntervalPolicy(rollouts, Parameters((first_fd, second_fd)))
    inference = Inference(policies, exchange, mine)
    (bell,) = bells_of(job.bell_fds)
    executors = bells_of(job.executor_bell_fds)
    numbers: dict[str, Any] = link.named(link.slots)
    assert set(numbers) == set(SLOTS["actor"])
    while not link.stopping:
        start = perf_counter()
        link.beat(Phase.STEP)
        envs = inference.answer()
        if envs.size:
            for executor in np.unique(envs // job.envs_per_executor).tolist():
                executors[executor].ring()
            numbers["rows"] += len(envs)
            numbers["batches"] += 1
            numbers["policy_s"] += perf_counter() - start
        else:
            link.beat(Phase.WAIT)
            bell.wait(WAIT_S)
            numbers["wait_s"] += perf_counter() - start
        numbers["policy_version"] = max(policies.interval, 0)
        link.post(**numbers)
    rollouts.close()
    exchange.close()
