"""The learner: calls its update loop, publishes weights and writes checkpoints."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from spreeze.algorithms.algorithm import LazySnapshot
from spreeze.config.schema import StopConfig
from spreeze.errors import CheckpointError, ResourceError, WeightsError, WorkerError
from spreeze.formatting import in_a_row, is_power_of_ten
from spreeze.metrics.stop_conditions import StopReason
from spreeze.metrics.table import TABLE
from spreeze.transport import status_table
from spreeze.transport.checkpoint import Checkpoint, CheckpointStore, load
from spreeze.transport.replay_ring import ReplayRing
from spreeze.transport.shared_memory import WAIT_S
from spreeze.transport.weights import ParameterPublisher
from spreeze.types import Arrays
from spreeze.workers.best_policy import best_updates
from spreeze.workers.context import WorkerContext, open_values, open_weights
from spreeze.workers.jobs import BaseLearnerJob
from spreeze.workers.roles import Phase
from spreeze.workers.torch_devices import malloc_trim, resolve_device

if TYPE_CHECKING:
    from spreeze.workers.buffer_learner import CheckpointedRolloutTrainer
    from spreeze.workers.replay_trainer import ReplayTrainer
    from spreeze.workers.rollout_learner import OnPolicyTrainer

_POLL_S = 0.0005
_POST_S = 0.25
_VALUES_S = 5.0  # least time between two publications of values
_HEALTH_S = 5.0  # least time between two computations of ``health``
FIRST_CHECKPOINT_S = 5.0  # time from the first update to the first checkpoint, unless the interval is shorter [s]
_MAX_SKIPPED_IN_A_ROW = 20
_LAST_WEIGHTS_S = 5.0  # longest wait for the disk to take the last weights of a run


class UpdateLoop(ABC):
    """Base of the update loops: a source of data, and the trainer that learns from it."""

    trainer: ReplayTrainer | OnPolicyTrainer | CheckpointedRolloutTrainer[Any]
    saved_ring: ReplayRing | None = None
    has_begun = True  # False until its first update is due
    ends_by_env_steps = True
    """True if it ends the run at the number of env steps requested; if not, the supervisor does."""
    publishes = True  # False if another learner publishes the weights that are evaluated
    roll_back: Callable[[Checkpoint], str] | None = None
    """Continues from a checkpoint of this run at half the learning rates; returns a text with the new ones."""
    stepping_s = 0.0
    """Time [s] in which it stepped environments itself instead of learning: it counts as waiting for data."""
    broadcast_s = 0.0
    """Time [s] spent broadcasting weights to samplers that do not read the published ones (mode serial)."""

    def __init__(self, context: WorkerContext, job: BaseLearnerJob) -> None:
        self._context, self._job = context, job
        self._wakeup = None if job.wakeup is None else job.wakeup.attach()
        self._samplers = [handle.attach() for handle in job.sampler_wakeups]

    def session_s(self) -> float:
        """Wall time of this session, without pauses."""
        return time.monotonic() - self._job.session_started_s - self._context.paused_s

    def training_s(self) -> float:
        """``session_s`` without the start of slow environments, as the stop condition counts it."""
        return self.session_s() - self._context.header_word(status_table.STARTING_MS) / 1000

    @abstractmethod
    def restore(self, checkpoint: Checkpoint | None, epoch: int) -> None:
        """Continues from the newest checkpoint; ``epoch`` rises with each start of the learner."""

    @abstractmethod
    def train(self) -> bool:
        """Learns what is due; False if the learner has to wait for data."""

    def wait(self) -> None:
        """Waits until samplers signal new data, or briefly if they do not signal."""
        if self._wakeup is None:
            time.sleep(_POLL_S)
        else:
            self._wakeup.wait(WAIT_S)

    @abstractmethod
    def env_steps(self) -> int:
        """Env steps of the run."""

    def check(self) -> None:  # noqa: B027
        """Reports, or raises, problems since the last call."""

    def leave(self) -> None:  # noqa: B027
        """Tells other learners that this one has finished."""

    def _notify(self) -> None:
        for sampler in self._samplers:
            sampler.notify()

    def _report(self, text: str, level: str = "info") -> None:
        self._context.event(level, text)


class CheckpointedUpdateLoop(UpdateLoop):
    """A loop whose trainer has its state in the checkpoint."""

    trainer: ReplayTrainer | CheckpointedRolloutTrainer[Any]

    def restore(self, checkpoint: Checkpoint | None, epoch: int) -> None:
        if checkpoint is not None:
            self.trainer.load_state(checkpoint.tensors, checkpoint.state)
            lost = int(self._context.slot_values()["updates"]) - self.trainer.updates
            since = f", its last checkpoint; {lost} updates after that are lost" if lost > 0 else ""
            self._report(f"learner continues from update {self.trainer.updates}{since}")
        self._begin_checks()

    def _begin_checks(self) -> None:
        self._skipped_in_a_row = 0
        self._checked_updates, self._skipped = self.trainer.updates, self.trainer.algorithm.updates_skipped()

    def check(self) -> None:
        """Raises a WorkerError if too many updates in a row were skipped, for a loss or gradient that is not finite."""
        skipped, updates = self.trainer.algorithm.updates_skipped(), self.trainer.updates
        done = updates - self._checked_updates
        self._skipped_in_a_row = self._skipped_in_a_row + done if skipped - self._skipped == done else 0
        if self._skipped_in_a_row > _MAX_SKIPPED_IN_A_ROW:
            raise WorkerError(
                f"{self._skipped_in_a_row} consecutive updates had a non-finite loss or gradient; lower the learning "
                "rate, or check the scale of rewards (the learner restarts from its last checkpoint)"
            )
        self._skipped, self._checked_updates = skipped, updates


class Learner:
    """The loop of a learner: restore, then call the update loop, and regularly post, publish and save."""

    def __init__(self, context: WorkerContext, job: BaseLearnerJob, loop: UpdateLoop) -> None:
        self._context, self._job, self._loop, self._trainer = context, job, loop, loop.trainer
        self._weights = open_weights(Path(job.group_dir))
        self._checkpoints = CheckpointStore(Path(job.group_dir) / "checkpoints", context.saving)
        values = open_values(Path(job.group_dir)) if job.publishes_values else None
        report = functools.partial(context.event, "warning")
        self._publisher = PublishingThread(self._weights, context.weights_published, values, report)
        self._epoch = 0  # rises with each start of the learner
        # Where workers take turns, all others would wait for the evaluation of a policy that has learned nothing.
        self._last_published_updates = 0 if context.takes_turns else -1  # updates of the policy published last
        self._saved_updates = 0  # updates in the newest checkpoint of this process
        slots = context.slot_values()
        self._base = {name: slots[name] for name in TABLE.cumulative("learner")}
        self._wait_s = self._publish_s = 0.0
        self._published_s = self._saved_s = self._posted_s = 0.0
        self._valued_s, self._health_s = -_VALUES_S, -_HEALTH_S
        self._failed_checkpoints = 0  # checkpoints in a row
        self._checkpoint_requests = context.header_word(status_table.CHECKPOINT_REQUESTS)
        self._rollbacks = context.header_word(status_table.ROLLBACKS)

    def _counters(self) -> dict[str, Any]:
        return {"env_steps": self._loop.env_steps(), "wall_s": self._job.previous_wall_s + self._loop.session_s()}

    @property
    def _policy_changed(self) -> bool:
        """True if the policy has changed since it was last published."""
        return self._trainer.updates != self._last_published_updates

    def _stop_reason(self) -> StopReason | None:
        stop, loop = self._job.stop, self._loop
        if loop.ends_by_env_steps and stop.env_steps is not None and loop.env_steps() >= stop.env_steps:
            return StopReason.ENV_STEPS
        return StopReason.UPDATES if stop.updates is not None and self._trainer.updates >= stop.updates else None

    def turns(self) -> Iterator[None]:
        """Learns until asked to stop, or to the end of the run; yields when it is ready and after each turn."""
        with contextlib.closing(self._publisher):
            yield from self._turns()

    def _turns(self) -> Iterator[None]:
        context, loop = self._context, self._loop
        context.send("started", device=resolve_device(self._job.learner.device))
        latest, checkpoint = self._weights.read_latest(None), self._checkpoints.load_latest()
        self._epoch = self._checkpoints.new_epoch(latest.epoch if latest else 0)
        for damage in checkpoint.skipped if checkpoint else ():
            context.event("warning", f"checkpoint ignored: {damage}")
        loop.restore(checkpoint, self._epoch)
        del latest, checkpoint
        if self._policy_changed:
            self._publish()
        self._saved_s = perf_counter()
        reason, began = self._stop_reason(), False
        while reason is None:
            yield
            if context.stopping:
                break
            if not loop.train():
                start = perf_counter()
                context.heartbeat(Phase.WAIT)
                if not context.takes_turns:
                    loop.wait()
                self._wait_s += perf_counter() - start
            if loop.has_begun and not began:
                began = True
                # The first checkpoint comes early: without one, the death of this process loses everything.
                self._saved_s = perf_counter() - max(0.0, self._job.learner.checkpoint_interval_s - FIRST_CHECKPOINT_S)
            self._housekeeping()
            reason = self._stop_reason()
        self._finish(reason)
        while not context.stopping:
            yield from context.pauses(0.02)

    def _housekeeping(self) -> None:
        now = perf_counter()
        if now - self._posted_s >= _POST_S:
            self._post()
            self._posted_s = now
        # First, since a version is published once: it would otherwise be that of the policy that fell.
        if (rollbacks := self._context.header_word(status_table.ROLLBACKS)) > self._rollbacks:
            self._rollbacks = rollbacks
            self._roll_back()
        if self._are_weights_due(now):
            if self._policy_changed:
                self._publish()
            self._published_s = now
        requests = self._context.header_word(status_table.CHECKPOINT_REQUESTS)
        requested = requests > self._checkpoint_requests
        if requested or now - self._saved_s >= self._job.learner.checkpoint_interval_s:
            self._checkpoint_requests = requests
            if self._checkpoint() and requested:
                self._context.event("info", f"checkpoint written on request at update {self._trainer.updates}")

    def _roll_back(self) -> None:
        context, best, roll_back = self._context, best_updates(Path(self._job.group_dir)), self._loop.roll_back
        path = None if best is None else self._checkpoints.nearest(best)
        if roll_back is None or path is None:
            context.event(
                "warning", "there is no checkpoint of the best policy, so training continues without a rollback"
            )
            return
        context.heartbeat(Phase.CHECKPOINT)
        try:
            checkpoint = load(path)
        except CheckpointError as error:
            context.event("warning", f"training continues without a rollback: {error}")
            return
        rates = roll_back(checkpoint)
        context.event(
            "warning",
            f"rolled back at update {self._trainer.updates} to the checkpoint of update {checkpoint.updates}, nearest "
            f"to the best policy ({best}); {rates}; replay is kept (replay.roll_back=false: never)",
        )
        if self._policy_changed:  # else it is published with the next update
            self._publish()
        self._checkpoint()  # a learner that dies now starts from here

    def _are_weights_due(self, now: float) -> bool:
        every, before = self._job.publish_updates, self._last_published_updates
        if every is None:
            return now - self._published_s >= self._job.learner.publish_interval_s
        return before <= 0 or self._trainer.updates // every > before // every

    def _publish(self) -> None:
        if not self._loop.publishes:
            return
        start = perf_counter()
        self._context.heartbeat(Phase.PUBLISH)
        self._checkpoints.note_epoch()
        arrays, meta = self._trainer.policy_snapshot()
        self._last_published_updates = self._trainer.updates
        values = None
        publishes_values = self._job.publishes_values and self._trainer.updates > 0  # else nothing was learned
        if publishes_values and perf_counter() - self._valued_s >= _VALUES_S:
            values, self._valued_s = self._trainer.value_snapshot(), perf_counter()
        self._publisher.submit(arrays, meta | self._counters(), self._epoch, self._last_published_updates, values)
        if self._job.publish_updates is not None:  # each is to be evaluated
            self._publisher.flush(_LAST_WEIGHTS_S)
        self._published_s = perf_counter()
        self._publish_s += self._published_s - start

    def _checkpoint(self) -> bool:
        start = perf_counter()
        self._context.heartbeat(Phase.CHECKPOINT)
        try:
            self._save()
            self._failed_checkpoints = 0
        except (OSError, ResourceError) as error:
            self._failed_checkpoints += 1
            if is_power_of_ten(self._failed_checkpoints):
                failed = f"writing the checkpoint failed{in_a_row(self._failed_checkpoints)}"
                text = f"{failed}; the previous one is kept: {error}"
                self._context.event("warning", text)
        self._context.saving(0)
        malloc_trim()
        self._saved_s = perf_counter()
        self._publish_s += self._saved_s - start
        return not self._failed_checkpoints

    def _save(self) -> None:
        tensors, state = self._trainer.state()
        state |= {"algo": self._job.algo, "env_id": self._job.spec.env_id} | self._counters()
        updates = int(state["updates"])
        ring = self._loop.saved_ring  # a further copy of replay would take gigabytes
        best = best_updates(Path(self._job.group_dir)) if self._loop.roll_back is not None and ring is None else None
        self._checkpoints.save(tensors, state, epoch=self._epoch, updates=updates, ring=ring, best=best)
        self._saved_updates = updates

    def _post(self) -> None:
        self._loop.check()
        publish_s = self._publish_s + self._loop.broadcast_s
        metrics = self._trainer.metrics(wait_s=self._wait_s + self._loop.stepping_s, publish_s=publish_s)
        for name, before in self._base.items():
            metrics[name] = metrics.get(name, 0.0) + before
        if (now := perf_counter()) - self._health_s >= _HEALTH_S and (health := self._trainer.health()):
            metrics |= health
            self._health_s = now
        metrics["policy_version"] = max(self._publisher.version, 0)
        metrics["checkpoint_updates"] = self._saved_updates
        self._context.report(metrics)

    def _finish(self, reason: str | None) -> None:
        """Writes the final state. An unfinished rollout does not count: a resumed run collects it again."""
        context, trainer = self._context, self._trainer
        self._loop.leave()
        self._post()
        if self._policy_changed:
            self._publish()
        self._checkpoint()
        self._publisher.flush(_LAST_WEIGHTS_S)
        context.post(updates=trainer.updates)
        context.send("finished", updates=trainer.updates, reason=reason, parameters_sha256=trainer.parameters_sha256())


class PublishingThread:
    """Publishes in a helper thread, so that writing delays no update; if several versions wait, only the newest."""

    def __init__(
        self,
        store: ParameterPublisher,
        on_published: Callable[[], None] = lambda: None,
        values: ParameterPublisher | None = None,
        on_failure: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``values`` takes the values published with a version.

        The helper thread calls ``on_published`` after each version, and ``on_failure`` with the text of a failure; of
        those in a row the first, the tenth, ...
        """
        self.version = -1
        """The newest version visible to readers; -1 before the first."""
        self._store, self._on_published, self._values, self._on_failure = store, on_published, values, on_failure
        self._change = threading.Condition()
        self._waiting: tuple[Callable[[], Arrays], dict[str, Any], int, int, LazySnapshot | None] | None = None
        self._busy = self._closing = False
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def submit(
        self,
        arrays: Callable[[], Arrays],
        meta: dict[str, Any],
        epoch: int,
        version: int,
        values: LazySnapshot | None = None,
    ) -> None:
        """Publishes a version and returns at once; ``arrays`` is called in the helper thread."""
        with self._change:
            self._waiting = arrays, meta, epoch, version, values
            self._change.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all versions are written; False if that took longer."""
        with self._change:
            return self._change.wait_for(lambda: self._waiting is None and not self._busy, timeout_s)

    def close(self, timeout_s: float = _LAST_WEIGHTS_S) -> None:
        """Writes the waiting version and ends the thread; gives up on a disk that hangs."""
        deadline_s = time.monotonic() + timeout_s
        self.flush(timeout_s)
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._thread.join(max(deadline_s - time.monotonic(), 0.1))

    def _run(self) -> None:
        failures = 0  # in a row
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting is not None or self._closing)
                if self._waiting is None:
                    return
                arrays, meta, epoch, version, values = self._waiting
                self._waiting, self._busy = None, True
            if self._values is not None and values is not None:
                with contextlib.suppress(Exception):  # first, so that a reader of the weights finds them
                    self._values.publish(values[0](), values[1], epoch, version)
            try:
                self._store.publish(arrays(), meta, epoch, version)
                self.version = version
                self._on_published()
                failures = 0
            except Exception as error:  # the learner continues with the last good weights
                failures += 1
                kind = "" if isinstance(error, WeightsError | OSError) else f"{type(error).__name__}: "
                if is_power_of_ten(failures):
                    text = f"publishing weights failed{in_a_row(failures)}; the previous weights remain in use"
                    self._on_failure(f"{text}: {kind}{error}")
            with self._change:
                self._busy = False
                self._change.notify_all()


def run_progress(stop: StopConfig, earlier_s: float, training_s: float, env_steps: float, updates: int) -> float:
    """Completed fraction of a run, by the stop condition that comes first; 0 if none can be predicted.

    ``earlier_s``: time of earlier sessions [s], so that a resumed run does not start over.
    """
    total_s = stop.limit_s and earlier_s + stop.limit_s
    pairs = ((earlier_s + training_s, total_s), (env_steps, stop.env_steps), (updates, stop.updates))
    return max((done / limit for done, limit in pairs if limit), default=0.0)
