"""Learns from one rollout after another, in step with the samplers.

With a lag of 1 (HTS-RL): while rollout j is collected with theta(j), theta(j+1) is learned from D(j-1), which
theta(j-1) collected; in rollout 0 there is nothing to learn, so theta(1) = theta(0). With a lag of 0 (the synchronous
baseline): D(j) is collected with theta(j), and then theta(j+1) is learned from it. All that a later rollout depends on
is stored before the swap in memory that outlives this process. The successor of a killed learner reads the state of the
rollout and learns the same again, unless the next state is stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np

from spreeze.algorithms import create_on_policy
from spreeze.algorithms.algorithm import LazySnapshot
from spreeze.algorithms.averages import RolloutAverage
from spreeze.algorithms.on_policy import OnPolicyAlgorithm
from spreeze.errors import WorkerError
from spreeze.process_identity import pid_exists
from spreeze.transport import status_table
from spreeze.transport.checkpoint import Checkpoint
from spreeze.transport.mixing import Mixer, MixSpec
from spreeze.transport.rollouts import LEARNER, ROLLOUTS, LearnerMemory, Rollouts
from spreeze.transport.weights import VersionedParameters, Weights, sha256_of
from spreeze.types import Arrays, RolloutBatch
from spreeze.workers.context import WorkerContext
from spreeze.workers.jobs import BaseLearnerJob, OnPolicyLearnerJob
from spreeze.workers.learner import Learner, UpdateLoop, run_progress
from spreeze.workers.roles import Phase
from spreeze.workers.torch_devices import open_device, resolve_device

_POLL_S = 0.0005
_BEAT_S = 1.0
Progress = Callable[[int], float]  # env steps of a learner -> share of the run that is over
_MAX_SKIPPED_ROLLOUTS = 5
OnPolicy = TypeVar("OnPolicy", bound=OnPolicyAlgorithm)


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
            progress=progress_of(job, self.training_s),
            meta={"algo": job.algo, "env": dataclasses.asdict(job.spec)},
            mixer=self._mixer,
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
        return pid_exists(int(controls[peer][status_table.PID]))

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


def progress_of(job: BaseLearnerJob, training_s: Callable[[], float]) -> Progress:
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
    return lambda env_steps: min(1.0, run_progress(stop, job.previous_wall_s, training_s(), 0, 0))


class RolloutTrainer(Generic[OnPolicy]):
    """Base of the trainers that learn from rollouts; independent of processes."""

    algorithm: OnPolicy
    batch_size: int
    learn_s: float
    _lag: int = 0  # rollouts between the policy that collected and the one that learns

    def health(self) -> dict[str, float]:
        return self.algorithm.health()

    def value_snapshot(self) -> LazySnapshot | None:
        return self.algorithm.value_snapshot(self.algorithm.return_scale)

    def metrics(self, *, wait_s: float, publish_s: float) -> dict[str, float]:
        return {
            "updates": self.algorithm.updates,
            "wait_s": wait_s,
            "learn_s": self.learn_s,
            "publish_s": publish_s,
            "policy_lag": self._lag,
            "batch_size": self.batch_size,
            "updates_skipped": self.algorithm.updates_skipped(),
            "rollout_uses": math.nan,
            "rollouts_dropped": math.nan,  # there is no circular buffer
            **self.algorithm.metrics(),
        }


class OnPolicyTrainer(RolloutTrainer[OnPolicyAlgorithm]):
    def __init__(
        self,
        algorithm: OnPolicyAlgorithm,
        rollouts: Rollouts,
        memory: LearnerMemory,
        *,
        lag: int,
        meta: dict[str, Any],
        batch_size: int,
        progress: Progress,
        mixer: Mixer | None = None,
    ) -> None:
        """Continues from the state of the current rollout, if there is one.

        ``lag``: 1 or 0 rollouts between the policy that collects and the one that learns; ``meta`` is published with
        every policy. A ``mixer`` shares what is learned with others. A WorkerError if the state is missing, a
        CheckpointError if it is of another network.
        """
        self.algorithm, self._rollouts, self._memory = algorithm, rollouts, memory
        self.batch_size, self._lag, self._meta = batch_size, lag, meta
        self._progress, self.mixer = progress, mixer
        self.learn_s = self.publish_s = 0.0
        self._learned = -1
        self._average = RolloutAverage(algorithm)
        state = memory.states.read(rollouts.current)
        if state is None and rollouts.current > 0:
            raise WorkerError(f"the learner's state of rollout {rollouts.current} is gone")
        # Samplers may have the policy that a predecessor published before it died. It is not learned again: mixed
        # with the others' present weights, it would be another policy with the same number.
        following = None if state is None else memory.states.read(rollouts.current + 1)
        latest = state if following is None else following
        if latest is not None:
            algorithm.load_state_arrays(latest.arrays)
            algorithm.load_state_json(latest.meta["algorithm"])
            self._average.restore(latest.arrays)
        if following is not None:
            self._learned = rollouts.current
        self._publish(rollouts.current + (following is not None))
        self.continued = state is not None
        self.updates = algorithm.updates if state is None else int(state.meta["updates"])
        """Updates at the start of this rollout."""
        self._skipped_rollouts, self._skipped = 0, algorithm.updates_skipped()
        if mixer is not None:
            if mixer.spec.mixing == "all_reduce":
                algorithm.share_gradients(mixer.reduce)
            mixer.statistics = algorithm.statistics_to_average()
            mixer.begin(algorithm.parameters(), rollouts.current)

    def _publish(self, current: int) -> None:
        """Stores state and policy of a rollout, for inference workers and a successor."""
        start = perf_counter()
        algorithm = self.algorithm
        state = {"algorithm": algorithm.state_json(), "updates": algorithm.updates}
        self._memory.states.publish(algorithm.state_arrays() | self._average.state_arrays(), state, 0, current)
        meta = {**algorithm.policy_meta(), **self._meta, "updates": algorithm.updates}
        self._memory.policies.publish(self._average.policy_arrays(), meta, 0, current)
        self.publish_s += perf_counter() - start

    def learn(self) -> bool:
        """Learns what is due in this rollout, once; False if that is done, or the rollout is not full yet (lag 0)."""
        current = self._rollouts.current
        if self._learned == current or (self._lag == 0 and not self._rollouts.full):
            return False
        source = current - self._lag
        if source >= self._rollouts.first:
            start = perf_counter()
            versions = self._rollouts.versions(source)
            if (versions != source).any():
                policies = np.unique(versions).tolist()
                raise WorkerError(f"rows of rollout {source} were collected by the policies of {policies[:5]}")
            progress = self._progress(self._rollouts.env_steps_before(source))
            waited_s = self.waited_s
            if self.mixer is None:
                self.algorithm.learn(self._rollouts.batch(source), progress)
            else:
                self._learn_and_mix(self.mixer, self._rollouts.batch(source), progress)
            self._average.advance()
            self.learn_s += perf_counter() - start - (self.waited_s - waited_s)
            self._check_skipped()
        self._publish(current + 1)
        self._learned = current
        return True

    def _learn_and_mix(self, mixer: Mixer, batch: RolloutBatch, progress: float | None) -> None:
        algorithm, before = self.algorithm, self.algorithm.parameters()
        mixer.statistics = start = algorithm.statistics_to_average()
        algorithm.learn(batch, progress)
        learned = algorithm.statistics_to_average()
        mixer.statistics = learned + (mixer.statistics - start)  # shared gradients' ones are from before this rollout
        algorithm.set_parameters(mixer.mix(before, algorithm.parameters(), self._rollouts.current + 1))
        if not np.array_equal(mixer.statistics, learned):
            algorithm.set_average_statistics(mixer.statistics)

    @property
    def waited_s(self) -> float:
        """Time spent waiting for other learners."""
        return 0.0 if self.mixer is None else self.mixer.waited_s

    def _check_skipped(self) -> None:
        algorithm = self.algorithm
        skipped, self._skipped = algorithm.updates_skipped() - self._skipped, algorithm.updates_skipped()
        self._skipped_rollouts = self._skipped_rollouts + 1 if 0 < skipped == algorithm.updates - self.updates else 0
        if self._skipped_rollouts > _MAX_SKIPPED_ROLLOUTS:
            raise WorkerError(
                f"in {self._skipped_rollouts} rollouts in a row every update had a non-finite loss or gradient; "
                "lower the learning rate, or check the scale of rewards"
            )

    def swap(self) -> bool:
        """Starts the next rollout if this one is full and learning is done; returns whether it did."""
        current = self._rollouts.current
        if self._learned != current or not self._rollouts.full:
            return False
        self._rollouts.mark()
        self.updates = self.algorithm.updates
        self._rollouts.swap()
        if self.mixer is not None:
            self.mixer.board["env_steps"][self.mixer.spec.learner] = self.env_steps
        return True

    @property
    def env_steps(self) -> int:
        """Env steps of all finished rollouts since the run started."""
        return self._rollouts.env_steps_before(self._rollouts.current)

    def policy_snapshot(self) -> tuple[Callable[[], Arrays], dict[str, Any]]:
        """Policy of this rollout, theta(j), as it was published; of several learners that mix, the mean of theirs."""
        weights, mixer = _read(self._memory.policies, self._rollouts.current), self.mixer
        return lambda: weights.arrays if mixer is None else mixer.mean_policy(weights.arrays), weights.meta

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """Returns tensors and JSON from which a resume restarts this rollout."""
        rollouts = self._rollouts
        state, kept = _read(self._memory.states, rollouts.current), rollouts.state_arrays(with_batch=self._lag == 1)
        tensors = {LEARNER + name: array for name, array in state.arrays.items()}
        tensors |= {ROLLOUTS + name: array for name, array in kept.items()}
        return tensors, {
            "interval": rollouts.current,
            "collected_env_steps": self.env_steps,
            "lag": self._lag,
            "learner": state.meta,
            "updates": state.meta["updates"],
        }

    def parameters_sha256(self) -> str:
        """Hash of the learner's arrays at the start of this rollout; equal runs have equal hashes."""
        return sha256_of(_read(self._memory.states, self._rollouts.current).arrays)

    def metrics(self, *, wait_s: float, publish_s: float) -> dict[str, float]:
        metrics = super().metrics(wait_s=wait_s + self.waited_s, publish_s=publish_s + self.publish_s)
        return metrics | ({} if self.mixer is None else self.mixer.metrics())


def _read(channel: VersionedParameters, current: int) -> Weights:
    weights = channel.read(current)
    if weights is None:
        raise WorkerError(f"the stored policy or learner state of rollout {current} is missing")
    return weights
