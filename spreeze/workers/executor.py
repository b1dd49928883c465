"""The executor process: steps its environments with the actions that actors answer, or that it infers itself."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from spreeze.envs.task import open_task
from spreeze.jsonable import Jsonable
from spreeze.metrics import Phase
from spreeze.transport.exchange import Exchange
from spreeze.transport.parameters import Parameters
from spreeze.transport.rollouts import Rollouts, RolloutSpec
from spreeze.types import EnvSpec
from spreeze.workers.inference import WAIT_S, Inference, bells_of
from spreeze.workers.link import Link
from spreeze.workers.rollout import RolloutEnvs


@dataclass(frozen=True, kw_only=True)
class ExecutorJob(Jsonable):
    """All that an executor process has to know."""

    spec: EnvSpec
    index: int
    seed: int
    num_envs: int
    """M: environments of this executor."""
    step_synchronous: bool
    num_actors: int
    """A: 0 means that the executor infers for itself."""
    rollouts: RolloutSpec
    rollouts_fd: int
    exchange_fd: int
    policy_fds: tuple[int, ...]
    executor_bell_fds: tuple[int, ...]
    """Of all executors, its own among them; two each."""
    actor_bell_fds: tuple[int, ...]
    learner_bell_fds: tuple[int, ...]


def run_executor(link: Link, job: ExecutorJob) -> None:
    """Steps until told to stop; a dead one's successor begins where that one was."""
    rollouts = Rollouts.attach(job.rollouts_fd, job.rollouts)
    exchange = Exchange.attach(job.exchange_fd, job.rollouts)
    try:
        envs = RolloutEnvs(
            lambda: open_task(job.spec), job.spec, rollouts, exchange, first=job.index * job.num_envs,
            num_envs=job.num_envs, seed=job.seed, step_synchronous=job.step_synchronous,
            on_progress=lambda: link.beat(Phase.RESET),
        )
        try:
            loop = _Executor(link, job, rollouts, exchange, envs)
            while not link.stopping:
                loop.turn()
        finally:
            envs.close()
    finally:
        rollouts.close()
        exchange.close()


class _Executor:
    def __init__(self, link: Link, job: ExecutorJob, rollouts: Rollouts, exchange: Exchange, envs: RolloutEnvs) -> None:
        self._link, self._job, self._envs = link, job, envs
        executors = bells_of(job.executor_bell_fds)
        self._bell = executors[job.index]
        # In step synchrony the last one to take a step is what the others wait for.
        self._others = [bell for bell in executors if bell is not self._bell] if job.step_synchronous else []
        self._actors, (self._learner,) = bells_of(job.actor_bell_fds), bells_of(job.learner_bell_fds)
        first_fd, second_fd = job.policy_fds
        self._inference = None
        if not job.num_actors:
            policies = Parameters((first_fd, second_fd))
            self._inference = Inference(rollouts, exchange, policies, envs.mine)
        self._wait_s = 0.0
        # Slots outlive a restart of this process, so counters go on from where they were.
        self._base = link.slots.copy()

    def turn(self) -> None:
        """One round over the environments, or one sleep."""
        start = perf_counter()
        self._link.beat(Phase.STEP)
        asked = self._envs.ask()
        if self._inference is not None:
            self._inference.answer()
        inferred = perf_counter()
        self._envs.counts.policy_s += inferred - start
        if self._inference is None and asked.size:
            # Whoever is woken may take this core at once: that is waiting, too.
            for actor in np.unique(asked % self._job.num_actors).tolist():
                self._actors[actor].ring()
            self._wait_s += perf_counter() - inferred
        if self._envs.step().size:
            self._tell()
        else:
            self._sleep()
        self._envs.counts.post(self._link.slots, self._base, self._wait_s)

    def _tell(self) -> None:
        """Wakes those who may have waited for the steps that were just taken."""
        if self._others and self._envs.last_of_step:
            for bell in self._others:
                bell.ring()
        if self._envs.filled:
            self._learner.ring()

    def _sleep(self) -> None:
        start = perf_counter()
        self._link.beat(Phase.WAIT)
        self._bell.wait(WAIT_S)
        self._wait_s += perf_counter() - start
