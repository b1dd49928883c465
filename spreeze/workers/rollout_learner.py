"""Learns from one rollout after another, in step with the samplers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

from spreeze.algorithms import create_on_policy
from spreeze.algorithms.on_policy import OnPolicyAlgorithm
from spreeze.transport import status_table
from spreeze.transport.checkpoint import Checkpoint
from spreeze.transport.mixing import Mixer, MixSpec
from spreeze.transport.rollouts import LearnerMemory, Rollouts
from spreeze.workers.context import WorkerContext
from spreeze.workers.jobs import BaseLearnerJob, OnPolicyLearnerJob
from spreeze.workers.learner import Learner, UpdateLoop, run_progress
from spreeze.workers.on_policy_trainer import FINGERPRINTS, OnPolicyTrainer, Progress
from spreeze.workers.roles import Phase
from spreeze.workers.torch_devices import open_device, resolve_device

_POLL_S = 0.0005
_BEAT_S = 1.0


def learn_from_rollouts(context: WorkerContext, job: OnPolicyLearnerJob) -> Iterator[None]:
    """Learns until asked to stop; writes the checkpoint and weights of the current rollout."""
    with (
        contextlib.closing(job.rollouts.attach()) as rollouts,
        open_device(job.learner, job.spec, job.settings.hidden_sizes, job.batch_size),
    ):
        yield from Learner(context, job, RolloutUpdateLoop(context, job, rollouts)).turns()


class RolloutUpdateLoop(UpdateLoop):
    """One rollout after another; with a lag of 1, each is learned from while the next one is collected."""

    _job: OnPolicyLearnerJob
    trainer: OnPolicyTrainer

    def __init__(self, context: WorkerContext, job: OnPolicyLearnerJob, rollouts: Rollouts) -> None:
        super().__init__(context, job)
        self._mixer = None if job.mix is None else Mixer(job.mix, _living_peers(context, job.mix), self._wait_for_peers)
        self.publishes = self._mixer is None or self._mixer.publishes  # where learners mix, one publishes their mean
        self.trainer = OnPolicyTrainer(
            on_policy_algorithm(job, job.correction),
            rollouts,
            LearnerMemory(policies=job.weights_channel.attach(), states=job.states.attach()),
            lag=job.lag,
            batch_size=job.batch_size,
            progress=progress_of(job, self.session_s),
            meta={"algo": job.algo, "env": dataclasses.asdict(job.spec)},
            mixer=self._mixer,
            fingerprints=Path(job.run_dir) / FINGERPRINTS if "SPREEZE_TEST_FINGERPRINT" in os.environ else None,
        )
        self.trainer.algorithm.on_gradient, self._beat_s = self._on_gradient, perf_counter()
        self._rollouts = rollouts

    def restore(self, checkpoint: Checkpoint | None, epoch: int) -> None:
        """Only reports: the trainer has read the state from the shared memory that outlives a learner."""
        if self.trainer.continued:
            self._report(f"learner continues from update {self.trainer.updates}, rollout {self._rollouts.current}")
        self._notify()

    def _on_gradient(self) -> None:
        """The heartbeat while a large rollout is learned from; once a second, or a timeline would be full of it."""
        if perf_counter() - self._beat_s >= _BEAT_S:
            self._beat_s = perf_counter()
            self._context.heartbeat(Phase.UPDATE)

    def _wait_for_peers(self) -> bool:
        self._context.heartbeat(Phase.WAIT)
        time.sleep(_POLL_S)
        return not self._context.stopping

    def leave(self) -> None:
        if self._mixer is not None:
            self._mixer.leave()

    def train(self) -> bool:
        """Learns from the rollout that is due; True if the next rollout started."""
        self._context.heartbeat(Phase.UPDATE)
        self.trainer.learn()
        if not self.trainer.swap():
            return False
        self._notify()
        return True

    def env_steps(self) -> int:
        """Env steps of finished rollouts, of all learners."""
        return self.trainer.env_steps if self._mixer is None else int(self._mixer.board["env_steps"].sum())


def _living_peers(context: WorkerContext, spec: MixSpec) -> Callable[[], tuple[int, ...]]:
    """A function for the learners of a run that are alive: their process runs its loop."""
    controls = [context.status.control(row) for row in spec.rows]
    left = spec.memory.attach_board()["left"]

    def is_alive(peer: int) -> bool:
        phase = Phase(int(controls[peer][status_table.PHASE]))
        if left[peer] or phase in (Phase.START, Phase.INIT, Phase.DONE):
            return False
        try:
            os.kill(int(controls[peer][status_table.PID]), 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    return lambda: tuple(peer for peer in range(len(controls)) if peer == spec.learner or is_alive(peer))


def on_policy_algorithm(job: BaseLearnerJob, correction: str) -> OnPolicyAlgorithm:
    return create_on_policy(
        job.algo,
        job.spec,
        job.settings,
        job.seed,
        resolve_device(job.learner.device),
        correction=correction,
        normalize_obs=job.normalize_obs,
    )


def progress_of(job: BaseLearnerJob, session_s: Callable[[], float]) -> Progress:
    """Completed fraction of the run, for the learning rate of an on-policy learner.

    It follows env steps if the run ends by them, so that learning does not depend on the clock; several learners take a
    part each. It follows the clock if nothing else ends the run. With a target return, a number of updates, or learners
    that have other clocks, the time is only a limit, and the fraction stays 0.
    """
    stop, mix = job.stop, getattr(job, "mix", None)
    if stop.env_steps is not None:
        end = -(-stop.env_steps // (1 if mix is None else mix.learners))
        return lambda env_steps: min(1.0, env_steps / end)
    other_clocks = mix is not None and (mix.mixing == "all_reduce" or mix.hosts is not None)
    if other_clocks or stop.limit_s is None or stop.updates is not None or stop.at_return:
        return lambda env_steps: 0.0
    return lambda env_steps: min(1.0, run_progress(stop, job.previous_wall_s, session_s(), 0, 0))
