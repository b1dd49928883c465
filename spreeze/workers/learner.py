"""The learner process: waits for rows, takes gradient steps, publishes weights, writes checkpoints."""
from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import sys
import time
from pathlib import Path
from time import perf_counter

from spreeze.algorithms.nn.two_thread_update import ThreadPair
from spreeze.config.schema import PARTS, AlgorithmConfig
from spreeze.errors import ResourceError, WorkerError
from spreeze.metrics.table import SLOTS, Phase
from spreeze.transport.checkpoint import Checkpoint, CheckpointStore
from spreeze.transport.frames import open_reader
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_reader import ReplayReader
from spreeze.transport.replay_ring import ReplayRing, RingSpec
from spreeze.transport.weights import WeightsStore
from spreeze.workers.context import WorkerContext
from spreeze.workers.jobs import LearnerJob
from spreeze.workers.learn.publisher import Publisher
from spreeze.workers.learn.replay_trainer import ReplayTrainer
from spreeze.workers.learn.torch_devices import (
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
"""Patience with the disk for the last weights of a run."""
_MAX_SKIPPED_IN_A_ROW = 20
_LEAST_BATCH = 32
_UPDATES, _ENV_STEPS = SLOTS["learner"].index("updates"), SLOTS["sampler"].index("env_steps")
_CUMULATIVE = ("wait_s", "gather_s", "critic_s", "actor_s", "publish_s", "rows_redrawn")
"""Slots that go on from where they were when this process is started again."""


def run_learner(context: WorkerContext, job: LearnerJob) -> None:
    """Learns until told to stop; leaves a final checkpoint and final weights."""
    ring = ReplayRing.attach(job.ring_fd, RingSpec.from_json(job.ring))
    try:
        device = resolve_device(job.device)
        with products_in(job.precision, device), learner_threads(job.spec, job.threads, device) as pair:
            learner = _Learner(context, job, ring, open_reader(ring), pair)
            try:
                learner.run()
            finally:
                learner.close()
    finally:
        ring.close()


class _Learner:
    def __init__(
        self, context: WorkerContext, job: LearnerJob, ring: ReplayRing, reader: ReplayReader, pair: ThreadPair | None
    ) -> None:
        self._context, self._job, self._ring, self._reader = context, job, ring, reader
        config: AlgorithmConfig = PARTS[job.algo](**job.algorithm)  # type: ignore[assignment]
        self._device = resolve_device(job.device)
        self._learning = ReplayTrainer(
            job.spec, job.algo, config, ring.spec.layout, reader, batch_size=job.batch_size, device=self._device,
            seed=job.seed, normalize_obs=job.normalize_obs, pair=pair, overlap=job.overlap,
            copy_interval=job.copy_interval, mirror=job.mirror, updates_per_launch=job.updates_per_launch,
        )
        self._weights = WeightsStore(Path(job.run_dir) / "weights")
        self._publisher = Publisher(self._weights, context.weights_published)
        self._checkpoints = CheckpointStore(Path(job.run_dir) / "checkpoints", on_progress=context.saving)
        self._epoch = 0
        self._limiter = RateLimiter(
            minimum=job.samples_per_insert_min, maximum=job.samples_per_insert_max,
            learning_starts=job.learning_starts, batch_size=job.batch_size, rows_per_write=job.rows_per_write,
        )
        self._base = context.slots.copy()
        self._wait_s = self._publish_s = 0.0
        self._published_s = self._checkpoint_s = self._posted_s = 0.0
        self._offered_updates = -1
        self._checkpoint_updates = 0
        self._skipped_before = self._updates_before = self._skipped_in_a_row = 0

    def run(self) -> None:
        self._context.send("started", device=self._device)
        staged = staged_copies(self._device)
        self._tell([staged] if staged else [])
        self._restore()
        self._publish()
        self._checkpoint_s = perf_counter()
        started = False
        while not self._context.stopping and not self._finished():
            inserted = self._ring.total_committed()
            if not started and inserted >= max(self._job.learning_starts, 1):
                # A new baseline at every start: what was collected before never causes a burst of updates.
                self._ring.begin_learning()
                self._learning.refresh()
                started = True
                # The first checkpoint comes soon: without one a death of this process loses everything.
                interval_s = self._job.checkpoint_interval_s
                self._checkpoint_s = perf_counter() - interval_s + min(interval_s, _FIRST_CHECKPOINT_S)
                self._context.send("event", level="info", text=f"learning began after {inserted} transitions in replay")
            if started and self._limiter.may_sample(inserted, self._ring.baseline_inserted, self._ring.sampled):
                self._context.beat(Phase.UPDATE)
                self._update()
                self._context.slots[_UPDATES] = self._learning.updates
            else:
                self._wait()
            self._chores()
        self._finish()

    def _finished(self) -> bool:
        return self._job.max_updates is not None and self._learning.updates >= self._job.max_updates

    def _update(self) -> None:
        """One update; where the device's memory does not suffice, with half of the batch from now on.

        Only this error leaves the device usable: any other CUDA error ends the process, and a fresh one goes on.
        """
        learning = self._learning
        most = None if self._job.max_updates is None else self._job.max_updates - learning.updates
        while True:
            try:
                self._ring.sampled += learning.update(most) * learning.batch_size
                return
            except (RuntimeError, MemoryError) as error:
                can_shrink = learning.has_mirror or learning.batch_size // 2 >= _LEAST_BATCH
                if not out_of_memory(error) or not can_shrink:
                    raise
            # Here nothing holds the error any more, nor, by its traceback, what the update had allocated.
            self._shrink()

    def _shrink(self) -> None:
        """Goes on with less memory: without the mirror of replay, and if there is none with half of the batch."""
        learning = self._learning
        if learning.drop_mirror():
            self._tell([f"the mirror of replay gives back the memory that updates need on {self._device}: "
                        "batches come from the host"], level="warning")
        else:
            smaller = learning.batch_size // 2
            self._tell([f"batch {learning.batch_size} does not fit into the memory of {self._device}: goes on with "
                        f"{smaller}; set --batch-size {smaller}"], level="warning")
            learning.set_batch_size(smaller)
            self._limiter = dataclasses.replace(self._limiter, batch_size=smaller)
        learning.release_cached()
        malloc_trim()
        self._context.beat(Phase.UPDATE)

    def _tell(self, notes: list[str], level: str = "info") -> None:
        """Sends notes as events, once."""
        while notes:
            self._context.send("event", level=level, text=notes.pop(0))

    def _wait(self) -> None:
        start = perf_counter()
        self._context.beat(Phase.WAIT)
        time.sleep(_POLL_S)
        self._wait_s += perf_counter() - start

    def _chores(self) -> None:
        now = perf_counter()
        if now - self._posted_s >= _POST_S:
            self._post()
            self._report_unpublished()
            self._posted_s = now
        if now - self._published_s >= self._job.publish_interval_s:
            if self._learning.updates != self._offered_updates:
                self._publish()
            self._published_s = now
        if now - self._checkpoint_s >= self._job.checkpoint_interval_s:
            self._checkpoint(with_replay=self._job.save_replay)

    def _restore(self) -> None:
        """Continues from the newest checkpoint, if the run has one."""
        latest = self._weights.read_latest(None)
        checkpoint: Checkpoint | None = self._checkpoints.load_latest()
        self._epoch = 1 + max(latest.epoch if latest else 0, checkpoint.epoch if checkpoint else 0)
        if checkpoint is None:
            return
        self._learning.load_state(checkpoint.tensors, checkpoint.state)
        self._updates_before = self._learning.updates
        self._skipped_before = self._learning.algorithm.updates_skipped()
        for reason in checkpoint.skipped:
            self._context.send("event", level="warning", text=f"checkpoint left out: {reason}"[:500])
        self._context.send("event", level="info", text=f"learner continues from update {self._learning.updates}")

    def _wall_s(self) -> float:
        return self._job.wall_base_s + time.monotonic() - self._job.run_started_s

    def _env_steps(self) -> int:
        steps = sum(float(self._context.status.slots(row)[_ENV_STEPS]) for row in range(self._job.num_samplers))
        return self._job.env_steps_base + int(steps)

    def _publish(self) -> None:
        """Hands a copy of the policy to the publisher's thread."""
        start = perf_counter()
        self._context.beat(Phase.PUBLISH)
        arrays, meta = self._learning.policy_snapshot(self._job.spec, self._job.algo)
        meta |= {"env_steps": self._env_steps(), "wall_s": self._wall_s()}
        self._offered_updates = self._learning.updates
        self._publisher.offer(arrays, meta, self._epoch, self._offered_updates)
        self._published_s = perf_counter()
        self._publish_s += self._published_s - start

    def _report_unpublished(self) -> None:
        for text in self._publisher.failures():
            self._context.send("event", level="warning", text=f"weights not published, the last good ones stay: {text}")

    def close(self) -> None:
        """Ends the publisher's thread."""
        self._publisher.close(_LAST_PUBLICATION_S)

    def _checkpoint(self, *, with_replay: bool) -> None:
        start = perf_counter()
        self._context.beat(Phase.CHECKPOINT)
        tensors, state = self._learning.state()
        state |= {
            "algo": self._job.algo, "env_id": self._job.spec.env_id, "env_steps": self._env_steps(),
            "wall_s": self._wall_s(), "replay_saved": with_replay,
        }
        try:
            self._checkpoints.save(tensors, state, epoch=self._epoch, updates=self._learning.updates,
                                   ring=self._ring if with_replay else None)
            self._checkpoint_updates = self._learning.updates
        except (OSError, ResourceError) as error:
            self._context.send("event", level="warning", text=f"checkpoint not written, the last one stays: {error}")
        self._context.saving(0)
        malloc_trim()
        self._checkpoint_s = perf_counter()
        self._publish_s += self._checkpoint_s - start

    def _post(self) -> None:
        learning, base = self._learning, self._context.named(self._base)
        skipped = self._learning.algorithm.updates_skipped()
        done = learning.updates - self._updates_before
        self._skipped_in_a_row = self._skipped_in_a_row + done if skipped - self._skipped_before == done else 0
        if self._skipped_in_a_row > _MAX_SKIPPED_IN_A_ROW:
            raise WorkerError(
                f"{self._skipped_in_a_row} updates in a row had a non-finite loss or gradient; "
                "going back to the last checkpoint (lower the step size, or look at the rewards' size)"
            )
        self._skipped_before, self._updates_before = skipped, learning.updates
        self._tell(learning.notes)
        numbers = learning.numbers(wait_s=self._wait_s, publish_s=self._publish_s)
        for name in _CUMULATIVE:
            numbers[name] += base[name]
        numbers["policy_version"] = max(self._publisher.version, 0)
        numbers["checkpoint_updates"] = self._checkpoint_updates
        numbers["batch_size"] = learning.batch_size
        self._context.post(**numbers)

    def _finish(self) -> None:
        self._post()
        if self._learning.updates != self._offered_updates:
            self._publish()
        self._checkpoint(with_replay=self._job.save_replay)
        self._publisher.flush(_LAST_PUBLICATION_S)
        self._report_unpublished()
        self._context.send("finished", updates=self._learning.updates,
                        parameters_sha256=self._learning.parameters_sha256())
        while not self._context.stopping:
            self._context.beat(Phase.WAIT)
            time.sleep(0.02)


def malloc_trim() -> None:
    """Asks the allocator to return freed memory to the system (glibc; elsewhere nothing happens).

    A checkpoint and a publication that happen to be written at the same moment need some megabytes at once, in
    different heaps, which stay that large for good otherwise: a run of a week would collect all such coincidences.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
