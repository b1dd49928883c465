"""The sampler process: steps its environments with its own copy of the policy and writes into its shard."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from spreeze.envs.task import HeldActions, open_task, vector_maker
from spreeze.metrics.table import SLOTS, Phase
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_ring import ReplayRing, RingSpec, ShardWriter
from spreeze.transport.shared_memory import WAIT_S, wakeups_of
from spreeze.types import EnvSpec, Jsonable
from spreeze.workers.collectors import NewestPolicy, TransitionCollector
from spreeze.workers.context import WorkerContext, open_weights
from spreeze.workers.evaluator import EvaluatorJob, turn_evaluation

_POLL_S = 0.0005
"""Sleep while the limiter holds the sampler: shorter than a learner update, longer than a wakeup."""
_POLICY_VERSION = SLOTS["sampler"].index("policy_version")


@dataclass(frozen=True, kw_only=True)
class SamplerJob(Jsonable):
    run_dir: str
    spec: EnvSpec
    index: int
    seed: int
    num_envs: int
    n_step: int
    gamma: float
    nan_policy: str
    limiter: RateLimiter
    ring: RingSpec
    ring_fd: int
    wakeup_fds: tuple[int, ...] = ()
    """Of the wakeup by which the learner tells it of batches drawn; empty: it polls."""
    learner_wakeup_fds: tuple[int, ...] = ()
    """Of the learner's wakeup, to be told of rows."""
    evaluation: EvaluatorJob | None = None
    """Evaluations in the sampler's own environment; None: an evaluator has its own."""


def run_sampler(context: WorkerContext, job: SamplerJob) -> None:
    """Samples until asked to stop, then closes its environments."""
    sink = ShardWriter(ReplayRing.attach(job.ring_fd, job.ring), job.index)
    # The row count of the sink changes the stream after a restart, so no episode is repeated.
    stream = np.random.SeedSequence([job.seed, job.index, sink.next_logical])
    rng = np.random.default_rng(stream)
    sampling = TransitionCollector(
        lambda: open_task(job.spec),
        job.num_envs, job.spec, sink,
        n_step=job.n_step, gamma=job.gamma, seeds=[int(s) for s in rng.integers(2**31, size=job.num_envs)],
        nan_policy=job.nan_policy, make_vector=vector_maker(job.spec), on_progress=context.beat,
        on_error=context.env_error,
    )
    try:
        with turn_evaluation(context, job.evaluation) as sampling.interlude:
            loop = SamplerLoop(context, job, sink, sampling, rng)
            while not context.stopping:
                loop.turn()
            context.beat(Phase.DONE)  # closing is no work
    finally:
        sampling.close()
        sink.close()


class SamplerLoop:
    """The steady state: limiter, weights, actions, environments, rows, metrics."""

    def __init__(
        self, context: WorkerContext, job: SamplerJob, sink: ShardWriter, sampling: TransitionCollector,
        rng: np.random.Generator,
    ) -> None:
        self._context, self._job, self._sink, self._sampling, self._rng = context, job, sink, sampling, rng
        self._random = HeldActions(job.spec, rng)
        self._policy = NewestPolicy(open_weights(Path(job.run_dir)))
        self._hint = -1
        self._counts = sink.counts()
        self._wakeup, self._learner = (next(iter(wakeups_of(fds)), None)
                                       for fds in (job.wakeup_fds, job.learner_wakeup_fds))
        # Slots outlive this process, so counters continue after a restart.
        self._base = context.slots.tolist()

    def turn(self) -> np.ndarray | None:
        """One step of all environments, or one short wait; returns the actions taken [N, A], if any."""
        start = perf_counter()
        actions = None
        if self._context.rests(start):
            pass
        elif self._may_insert():
            self._context.beat(Phase.STEP)
            self._refresh_policy()
            actions = self._actions()
            self._sampling.counts.policy_s += perf_counter() - start
            self._sampling.step(actions, self._policy.version)
            if self._learner is not None:
                self._learner.notify()
            self._context.worked(start)
        else:
            self._context.beat(Phase.WAIT)
            if self._wakeup is None:
                time.sleep(_POLL_S)
            else:
                self._wakeup.wait(WAIT_S)
            self._sampling.counts.wait_s += perf_counter() - start
        self._sampling.counts.post(self._context.slots, self._base)
        self._context.slots[_POLICY_VERSION] = self._policy.version
        return actions

    def _may_insert(self) -> bool:
        self._counts = counts = self._sink.counts()
        return self._job.limiter.may_insert(*counts, self._sampling.num_envs)

    def _refresh_policy(self) -> None:
        hint = self._context.weights_hint
        if hint != self._hint:
            self._policy.refresh()
            if self._policy.current() is not None:
                self._hint = hint

    def _actions(self) -> np.ndarray:
        """Uniform actions until learning has started or trained weights are there, then the policy's."""
        policy = self._policy.current()
        if policy is None or (self._policy.version == 0 and self._counts.baseline < 0):
            return self._random.draw(self._sampling.num_envs, self._sampling.obs)
        return policy.act(self._sampling.obs, self._rng)
