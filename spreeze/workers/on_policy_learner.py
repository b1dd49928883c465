"""The learner process of the on-policy modes: learns, waits for the executors, swaps, publishes, writes checkpoints."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from time import perf_counter

from spreeze.algorithms.registry import create_on_policy
from spreeze.config.schema import PARTS
from spreeze.errors import ResourceError, WeightsError
from spreeze.metrics.table import Phase
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.rollouts import Rollouts
from spreeze.transport.versioned_parameters import Handover, VersionedParameters
from spreeze.transport.weights import Weights, WeightsStore
from spreeze.workers.context import WorkerContext
from spreeze.workers.inference_worker import WAIT_S, wakeups_of
from spreeze.workers.jobs import OnPolicyLearnerJob
from spreeze.workers.learn.on_policy_trainer import FINGERPRINTS, OnPolicyTrainer
from spreeze.workers.learn.torch_devices import learner_threads, resolve_device

_POST_S = 0.25
_FIRST_CHECKPOINT_S = 5.0
_CUMULATIVE = ("wait_s", "learn_s", "publish_s")
"""Slots that go on from where they were when this process is started again."""


def run_on_policy_learner(context: WorkerContext, job: OnPolicyLearnerJob) -> None:
    """Learns until told to stop; leaves checkpoint and weights of the interval that was being collected."""
    rollouts = Rollouts.attach(job.rollouts_fd, job.rollouts)
    try:
        with learner_threads(job.spec, job.threads, resolve_device(job.device)):
            _RolloutLearner(context, job, open_learning(job, rollouts)).run(rollouts)
    finally:
        rollouts.close()


def open_learning(job: OnPolicyLearnerJob, rollouts: Rollouts) -> OnPolicyTrainer:
    """The algorithm of a job, with the state that the storages' interval begins with."""
    algorithm = create_on_policy(
        job.algo, job.spec, PARTS[job.algo](**job.algorithm), job.seed,  # type: ignore[arg-type]
        resolve_device(job.device), correction=job.correction, normalize_obs=job.normalize_obs,
    )
    handover = Handover(policies=VersionedParameters((job.policy_fds[0], job.policy_fds[1])),
                        states=VersionedParameters((job.state_fds[0], job.state_fds[1])))
    return OnPolicyTrainer(
        algorithm, rollouts, handover, lag=job.lag, batch_size=job.batch_size, progress_env_steps=job.max_env_steps,
        meta={"algo": job.algo, "env": dataclasses.asdict(job.spec)},
        fingerprints=Path(job.run_dir) / FINGERPRINTS if job.fingerprint else None,
    )


class RunFiles:
    """Where policies and checkpoints of an on-policy run go: the files that evaluation, play and resume read."""

    def __init__(self, job: OnPolicyLearnerJob, learning: OnPolicyTrainer, store: CheckpointStore) -> None:
        self._job, self._learning, self._store = job, learning, store
        self._weights = WeightsStore(Path(job.run_dir) / "weights")
        latest, checkpoint = self._weights.read_latest(None), store.load_latest()
        self.epoch = 1 + max(latest.epoch if latest else 0, checkpoint.epoch if checkpoint else 0)
        self.version = -1
        """Updates of the newest published policy."""

    @property
    def wall_s(self) -> float:
        """Wall time of the run."""
        return self._job.wall_base_s + time.monotonic() - self._job.run_started_s

    def publish(self) -> Weights | None:
        """Publishes the policy of this interval and returns it; None if that has been done.

        Raises:
            WeightsError: a value is not finite; nothing was published.
            OSError: no room.
        """
        updates = self._learning.updates
        if updates == self.version:
            return None
        self.version = updates
        policy = self._learning.policy()
        meta = policy.meta | {"env_steps": self._learning.env_steps, "wall_s": self.wall_s}
        path = self._weights.publish(policy.arrays, meta, self.epoch, updates)
        return Weights(policy.arrays, meta, self.epoch, updates, Path(path))

    def checkpoint(self) -> int:
        """Writes a checkpoint of this interval's beginning; returns its updates.

        Raises:
            ResourceError: no room on the disk.
            OSError: writing failed; older ones are untouched.
        """
        tensors, state = self._learning.checkpoint()
        updates = int(state["learner"]["updates"])
        state |= {"algo": self._job.algo, "env_id": self._job.spec.env_id, "env_steps": self._learning.env_steps,
                  "wall_s": self.wall_s, "updates": updates}
        self._store.save(tensors, state, epoch=self.epoch, updates=updates)
        return updates


class _RolloutLearner:
    def __init__(self, context: WorkerContext, job: OnPolicyLearnerJob, learning: OnPolicyTrainer) -> None:
        self._context, self._job, self._learning = context, job, learning
        store = CheckpointStore(Path(job.run_dir) / "checkpoints", on_progress=context.saving)
        self._files = RunFiles(job, learning, store)
        self._executors, (self._wakeup,) = wakeups_of(job.executor_wakeup_fds), wakeups_of(job.wakeup_fds)
        self._base = context.named(context.slots)
        self._wait_s = self._publish_s = self._posted_s = self._published_s = 0.0
        self._checkpoint_s = perf_counter() - max(0.0, job.checkpoint_interval_s - _FIRST_CHECKPOINT_S)
        self._checkpoint_updates = 0

    def run(self, rollouts: Rollouts) -> None:
        self._context.send("started", device=resolve_device(self._job.device))
        if self._learning.continued:
            text = f"learner continues from update {self._learning.algorithm.updates}, interval {rollouts.interval}"
            self._context.send("event", level="info", text=text)
        self._publish()
        self._ring()
        reason = None
        while not self._context.stopping and (reason := self._finished()) is None:
            self._context.beat(Phase.UPDATE)
            self._learning.learn()
            if self._learning.swap():
                self._ring()
                self._chores()
            else:
                self._wait()
            self._post()
        self._finish(reason)

    def _ring(self) -> None:
        """Executors wait for a swap, and at the start for the first policy."""
        for wakeup in self._executors:
            wakeup.notify()

    def _finished(self) -> str | None:
        """The stop condition that is met at the beginning of this interval."""
        job = self._job
        if job.max_env_steps is not None and self._learning.env_steps >= job.max_env_steps:
            return "env_steps"
        return "updates" if job.max_updates is not None and self._learning.updates >= job.max_updates else None

    def _wait(self) -> None:
        start = perf_counter()
        self._context.beat(Phase.WAIT)
        self._wakeup.wait(WAIT_S)
        self._wait_s += perf_counter() - start

    def _chores(self) -> None:
        now = perf_counter()
        if now - self._published_s >= self._job.publish_interval_s:
            self._publish()
        if now - self._checkpoint_s >= self._job.checkpoint_interval_s:
            self._checkpoint()

    def _publish(self) -> None:
        start = perf_counter()
        self._context.beat(Phase.PUBLISH)
        try:
            if self._files.publish() is not None:
                self._context.weights_published()
        except (WeightsError, OSError) as error:
            self._context.send("event", level="warning",
                               text=f"weights not published, the last good ones stay: {error}")
        self._published_s = perf_counter()
        self._publish_s += self._published_s - start

    def _checkpoint(self) -> None:
        start = perf_counter()
        self._context.beat(Phase.CHECKPOINT)
        try:
            self._checkpoint_updates = self._files.checkpoint()
        except (OSError, ResourceError) as error:
            self._context.send("event", level="warning", text=f"checkpoint not written, the last one stays: {error}")
        self._context.saving(0)
        self._checkpoint_s = perf_counter()
        self._publish_s += self._checkpoint_s - start

    def _post(self) -> None:
        now = perf_counter()
        if now - self._posted_s < _POST_S:
            return
        self._posted_s = now
        numbers = self._learning.numbers(wait_s=self._wait_s, publish_s=self._publish_s)
        for name in _CUMULATIVE:
            numbers[name] += self._base[name]
        numbers["policy_version"] = max(self._files.version, 0)
        numbers["checkpoint_updates"] = self._checkpoint_updates
        self._context.post(**numbers)

    def _finish(self, reason: str | None) -> None:
        """What was learned of an interval that is not over counts for nothing: a resume learns it again."""
        self._posted_s = 0.0
        self._post()
        self._publish()
        self._checkpoint()
        self._context.post(updates=self._learning.updates)
        self._context.send("finished", updates=self._learning.updates, reason=reason,
                        parameters_sha256=self._learning.parameters_sha256())
        while not self._context.stopping:
            self._context.beat(Phase.WAIT)
            self._wakeup.wait(WAIT_S)
