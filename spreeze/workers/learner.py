"""The learner process: one loop, with data from replay or from rollouts."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import sys
import time
from pathlib import Path
from time import perf_counter

from spreeze.algorithms.create import create_on_policy
from spreeze.algorithms.fused_mlp import ThreadPair
from spreeze.config.schema import AlgorithmConfig, algorithm_part
from spreeze.errors import ResourceError, WorkerError
from spreeze.metrics.table import SLOTS, TABLE, Phase
from spreeze.transport.checkpoint import Checkpoint
from spreeze.transport.replay_reader import open_reader
from spreeze.transport.replay_ring import ReplayRing
from spreeze.transport.rollouts import Handover, Rollouts
from spreeze.transport.weights import VersionedParameters
from spreeze.workers.context import WorkerContext
from spreeze.workers.inference_worker import WAIT_S, wakeups_of
from spreeze.workers.jobs import AnyLearnerJob, LearnerJob, OnPolicyLearnerJob
from spreeze.workers.learner_outputs import Publisher, RunFiles, Trainer
from spreeze.workers.on_policy_trainer import FINGERPRINTS, OnPolicyTrainer
from spreeze.workers.replay_trainer import ReplayTrainer
from spreeze.workers.torch_devices import (
    learner_threads,
    out_of_memory,
    products_in,
    resolve_device,
    staged_copies,
)

_POLL_S = 0.0005
_POST_S = 0.25
_FIRST_CHECKPOINT_S = 5.0
_LAST_PUBLICATION_S = 5.0
"""Longest wait for the disk to take the last weights of a run."""
_MAX_SKIPPED_IN_A_ROW = 20
_LEAST_BATCH = 32
_UPDATES, _ENV_STEPS = SLOTS["learner"].index("updates"), SLOTS["sampler"].index("env_steps")


def run_learner(context: WorkerContext, job: LearnerJob) -> None:
    """Learns from replay until asked to stop; writes a final checkpoint and final weights."""
    ring = ReplayRing.attach(job.ring_fd, job.ring)
    try:
        device = resolve_device(job.learner.device)
        with products_in(job.learner.precision, device), learner_threads(job.spec, job.learner.threads, device) as pair:
            source = _FromReplay(context, job, ring, pair, device)
            _Learner(context, job, source.trainer, source).run(ring if job.save_replay else None)
    finally:
        ring.close()


def run_on_policy_learner(context: WorkerContext, job: OnPolicyLearnerJob) -> None:
    """Learns until asked to stop; writes the checkpoint and weights of the current rollout."""
    rollouts = Rollouts.attach(job.rollouts_fd, job.rollouts)
    try:
        with learner_threads(job.spec, job.learner.threads, resolve_device(job.learner.device)):
            trainer = open_on_policy_trainer(job, rollouts)
            _Learner(context, job, trainer, _FromRollouts(context, job, trainer, rollouts)).run()
    finally:
        rollouts.close()


class _Learner:
    """The loop of a learner: restore, then learn, and regularly post, publish and save."""

    def __init__(
        self, context: WorkerContext, job: AnyLearnerJob, trainer: Trainer, source: _FromReplay | _FromRollouts
    ) -> None:
        self._context, self._job, self._trainer, self._source = context, job, trainer, source
        self._files = RunFiles(
            Path(job.run_dir), job.algo, job.spec.env_id, trainer, env_steps=source.env_steps,
            wall_s=lambda: job.wall_base_s + time.monotonic() - job.run_started_s, on_progress=context.saving,
        )
        self._publisher = Publisher(self._files.weights, context.weights_published)
        found = context.named(context.slots)
        self._base = {name: found[name] for name in TABLE.cumulative("learner")}
        self._wait_s = self._publish_s = 0.0
        self._published_s = self._saved_s = self._posted_s = 0.0
        self._ring: ReplayRing | None = None

    def run(self, saved_ring: ReplayRing | None = None) -> None:
        """Learns to the end; checkpoints include the rows of ``saved_ring``, if given."""
        self._ring = saved_ring
        try:
            self._learn()
        finally:
            self._publisher.close(_LAST_PUBLICATION_S)

    def _learn(self) -> None:
        context, source = self._context, self._source
        context.send("started", device=resolve_device(self._job.learner.device))
        checkpoint = self._files.begin()
        for damage in checkpoint.skipped if checkpoint else ():
            _tell(context, f"checkpoint left out: {damage}"[:500], "warning")
        source.restore(checkpoint)
        del checkpoint
        self._publish()
        self._saved_s = perf_counter()
        reason, began = source.stop_reason(), False
        while not context.stopping and reason is None:
            if not source.advance():
                self._wait()
            if source.began and not began:
                began = True
                # The first checkpoint comes early: without one, the death of this process loses everything.
                self._saved_s = perf_counter() - max(0.0, self._job.learner.checkpoint_interval_s - _FIRST_CHECKPOINT_S)
            self._chores()
            reason = source.stop_reason()
        self._finish(reason)

    def _wait(self) -> None:
        start = perf_counter()
        self._context.beat(Phase.WAIT)
        self._source.wait()
        self._wait_s += perf_counter() - start

    def _chores(self) -> None:
        now = perf_counter()
        if now - self._posted_s >= _POST_S:
            self._post()
            self._posted_s = now
        if now - self._published_s >= self._job.learner.publish_interval_s:
            if self._files.is_new:
                self._publish()
            self._published_s = now
        if now - self._saved_s >= self._job.learner.checkpoint_interval_s:
            self._checkpoint()

    def _publish(self) -> None:
        start = perf_counter()
        self._context.beat(Phase.PUBLISH)
        self._publisher.offer(*self._files.offer())
        self._published_s = perf_counter()
        self._publish_s += self._published_s - start

    def _tell_unpublished(self) -> None:
        for text in self._publisher.failures():
            _tell(self._context, f"weights not published, the last good ones stay: {text}", "warning")

    def _checkpoint(self) -> None:
        start = perf_counter()
        self._context.beat(Phase.CHECKPOINT)
        try:
            self._files.save(self._ring)
        except (OSError, ResourceError) as error:
            _tell(self._context, f"checkpoint not written, the last one stays: {error}", "warning")
        self._context.saving(0)
        malloc_trim()
        self._saved_s = perf_counter()
        self._publish_s += self._saved_s - start

    def _post(self) -> None:
        self._source.check()
        numbers = self._trainer.numbers(wait_s=self._wait_s, publish_s=self._publish_s)
        for name, before in self._base.items():
            numbers[name] += before
        numbers["policy_version"] = max(self._publisher.version, 0)
        numbers["checkpoint_updates"] = self._files.saved_updates
        self._context.post(**numbers)
        self._tell_unpublished()

    def _finish(self, reason: str | None) -> None:
        """Writes the final state. An unfinished rollout does not count: a resume learns it again."""
        context, trainer = self._context, self._trainer
        self._post()
        if self._files.is_new:
            self._publish()
        self._checkpoint()
        self._publisher.flush(_LAST_PUBLICATION_S)
        self._tell_unpublished()
        context.post(updates=trainer.updates)
        context.send("finished", updates=trainer.updates, reason=reason, parameters_sha256=trainer.parameters_sha256())
        while not context.stopping:
            context.beat(Phase.WAIT)
            time.sleep(0.02)


def _tell(context: WorkerContext, text: str, level: str = "info") -> None:
    context.send("event", level=level, text=text)


class _FromReplay:
    """Batches drawn from replay, within the band of samples per insert."""

    def __init__(
        self, context: WorkerContext, job: LearnerJob, ring: ReplayRing, pair: ThreadPair | None, device: str
    ) -> None:
        self._context, self._job, self._ring, self._device = context, job, ring, device
        config: AlgorithmConfig = algorithm_part(job.algo, job.spec.import_module)(**job.algorithm)
        self.trainer = ReplayTrainer(
            job.spec, job.algo, config, ring.spec.layout, open_reader(ring), batch_size=job.learner.batch_size,
            device=device, seed=job.seed, normalize_obs=job.normalize_obs, pair=pair, overlap=job.learner.overlap,
            mirror=job.learner.mirror, updates_per_launch=job.learner.updates_per_launch,
        )
        self._limiter = job.limiter
        self.began = False
        self._skipped_before = self._updates_before = self._skipped_in_a_row = 0

    def restore(self, checkpoint: Checkpoint | None) -> None:
        staged = staged_copies(self._device)
        if staged is not None:
            _tell(self._context, staged)
        if checkpoint is None:
            return
        self.trainer.load_state(checkpoint.tensors, checkpoint.state)
        self._updates_before = self.trainer.updates
        self._skipped_before = self.trainer.algorithm.updates_skipped()
        _tell(self._context, f"learner continues from update {self.trainer.updates}")

    def stop_reason(self) -> str | None:
        most = self._job.max_updates
        return "updates" if most is not None and self.trainer.updates >= most else None

    def advance(self) -> bool:
        ring = self._ring
        inserted = ring.total_committed()
        if not self.began and inserted >= max(self._job.limiter.learning_starts, 1):
            # A new baseline at every start, so that rows collected before never cause a burst of updates.
            ring.begin_learning()
            self.trainer.refresh()
            self.began = True
            _tell(self._context, f"learning began after {inserted} transitions in replay")
        if not self.began or not self._limiter.may_sample(inserted, ring.baseline_inserted, ring.sampled):
            return False
        self._context.beat(Phase.UPDATE)
        self._update()
        self._context.slots[_UPDATES] = self.trainer.updates
        return True

    def _update(self) -> None:
        """Runs one update; shrinks memory use and tries again when the device runs out of memory.

        Only this error leaves the device usable: any other CUDA error ends the process, and a fresh one goes on.
        """
        trainer = self.trainer
        most = None if self._job.max_updates is None else self._job.max_updates - trainer.updates
        while True:
            try:
                self._ring.sampled += trainer.update(most) * trainer.batch_size
                return
            except (RuntimeError, MemoryError) as error:
                can_shrink = trainer.has_mirror or trainer.batch_size // 2 >= _LEAST_BATCH
                if not out_of_memory(error) or not can_shrink:
                    raise
            # Outside the handler, so that the traceback no longer holds what the update allocated.
            self._shrink()

    def _shrink(self) -> None:
        """Goes on with less memory: without GPU replay, or else with half of the batch."""
        trainer = self.trainer
        if trainer.drop_mirror():
            _tell(self._context, f"the mirror of replay gives back the memory that updates need on {self._device}: "
                  "batches come from the host", "warning")
        else:
            smaller = trainer.batch_size // 2
            _tell(self._context, f"batch {trainer.batch_size} does not fit into the memory of {self._device}: goes on "
                  f"with {smaller}; set --batch-size {smaller}", "warning")
            trainer.set_batch_size(smaller)
            self._limiter = dataclasses.replace(self._limiter, batch_size=smaller)
        trainer.release_cached()
        malloc_trim()
        self._context.beat(Phase.UPDATE)

    def wait(self) -> None:
        time.sleep(_POLL_S)

    def env_steps(self) -> int:
        rows = range(self._job.num_samplers)
        return self._job.env_steps_base + int(sum(float(self._context.status.slots(row)[_ENV_STEPS]) for row in rows))

    def check(self) -> None:
        """Reports the trainer's notes.

        Raises:
            WorkerError: too many updates in a row were skipped.
        """
        trainer = self.trainer
        skipped = trainer.algorithm.updates_skipped()
        done = trainer.updates - self._updates_before
        self._skipped_in_a_row = self._skipped_in_a_row + done if skipped - self._skipped_before == done else 0
        if self._skipped_in_a_row > _MAX_SKIPPED_IN_A_ROW:
            raise WorkerError(
                f"{self._skipped_in_a_row} updates in a row had a non-finite loss or gradient; "
                "going back to the last checkpoint (lower the step size, or look at the rewards' size)"
            )
        self._skipped_before, self._updates_before = skipped, trainer.updates
        while trainer.notes:
            _tell(self._context, trainer.notes.pop(0))


class _FromRollouts:
    """One rollout after another; with a lag of 1, each is learned from while the next one is collected."""

    began = True

    def __init__(
        self, context: WorkerContext, job: OnPolicyLearnerJob, trainer: OnPolicyTrainer, rollouts: Rollouts
    ) -> None:
        self._context, self._job, self._trainer, self._rollouts = context, job, trainer, rollouts
        self._samplers, (self._wakeup,) = wakeups_of(job.sampler_wakeup_fds), wakeups_of(job.wakeup_fds)

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Only reports: the trainer has read the state from the shared memory that outlives a learner."""
        if self._trainer.continued:
            text = f"learner continues from update {self._trainer.updates}, interval {self._rollouts.interval}"
            _tell(self._context, text)
        self._notify()

    def _notify(self) -> None:
        """Wakes the rollout samplers, which wait for a swap, or at the start for the first policy."""
        for wakeup in self._samplers:
            wakeup.notify()

    def stop_reason(self) -> str | None:
        job = self._job
        if job.max_env_steps is not None and self.env_steps() >= job.max_env_steps:
            return "env_steps"
        return "updates" if job.max_updates is not None and self._trainer.updates >= job.max_updates else None

    def advance(self) -> bool:
        """Learns from the rollout that is due; True if the next rollout began."""
        self._context.beat(Phase.UPDATE)
        self._trainer.learn()
        if not self._trainer.swap():
            return False
        self._notify()
        return True

    def wait(self) -> None:
        self._wakeup.wait(WAIT_S)

    def env_steps(self) -> int:
        return self._trainer.env_steps

    def check(self) -> None:
        """Does nothing: the trainer checks its own progress."""


def open_on_policy_trainer(job: OnPolicyLearnerJob, rollouts: Rollouts) -> OnPolicyTrainer:
    algorithm = create_on_policy(
        job.algo, job.spec, algorithm_part(job.algo, job.spec.import_module)(**job.algorithm), job.seed,
        resolve_device(job.learner.device), correction=job.correction, normalize_obs=job.normalize_obs,
    )
    handover = Handover(policies=VersionedParameters((job.policy_fds[0], job.policy_fds[1])),
                        states=VersionedParameters((job.state_fds[0], job.state_fds[1])))
    return OnPolicyTrainer(
        algorithm, rollouts, handover, lag=job.lag, batch_size=job.batch_size, progress_env_steps=job.max_env_steps,
        meta={"algo": job.algo, "env": dataclasses.asdict(job.spec)},
        fingerprints=Path(job.run_dir) / FINGERPRINTS if job.fingerprint else None,
    )


def malloc_trim() -> None:
    """Asks the allocator to return freed memory to the system (glibc only).

    A checkpoint and a publication written at the same time need some megabytes in different heaps, which would stay
    that large; over a week such coincidences add up.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
