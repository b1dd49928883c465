"""The learner process: one loop over data from replay or rollouts, and its files, which serial mode writes too."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from spreeze.algorithms import create_on_policy
from spreeze.algorithms.fused_mlp import ThreadPair
from spreeze.algorithms.impact import AnyAge
from spreeze.algorithms.on_policy import OnPolicyAlgorithm
from spreeze.config.algorithm_settings import AlgorithmConfig
from spreeze.config.schema import StopConfig
from spreeze.errors import ResourceError, WeightsError, WorkerError
from spreeze.metrics.table import SLOTS, TABLE, Phase
from spreeze.metrics.target_pace import TargetPace
from spreeze.transport import status_table as words
from spreeze.transport.checkpoint import Checkpoint, CheckpointStore
from spreeze.transport.gossip import SharedGossip
from spreeze.transport.mixing import Mixer, MixSpec, board_fields
from spreeze.transport.protocols import Arrays, Gossip, ParameterPublisher
from spreeze.transport.replay_ring import ReplayReader, ReplayRing
from spreeze.transport.rollouts import Handover, Rollouts
from spreeze.transport.shared_memory import WAIT_S, SharedArrays, wakeups_of
from spreeze.transport.weights import VersionedParameters, Weights
from spreeze.workers.buffer_trainer import BufferTrainer, PolicyBroadcast
from spreeze.workers.context import WorkerContext, in_a_row, is_power_of_ten, open_weights
from spreeze.workers.jobs import AnyLearnerJob, BufferLearnerJob, LearnerJob, OnPolicyLearnerJob
from spreeze.workers.on_policy_trainer import FINGERPRINTS, OnPolicyTrainer, Progress
from spreeze.workers.replay_trainer import PeerAverage, ReplayTrainer
from spreeze.workers.torch_devices import open_device, resolve_device

_POLL_S = 0.0005
_BEAT_S = 1.0
_POST_S = 0.25
FIRST_CHECKPOINT_S = 5.0
"""From the first update to the first checkpoint, if the interval between two is not shorter."""
_LAST_PUBLICATION_S = 5.0
"""Longest wait for the disk to take the last weights of a run."""
_MAX_SKIPPED_IN_A_ROW = 20
_UPDATES, _ENV_STEPS = SLOTS["learner"].index("updates"), SLOTS["sampler"].index("env_steps")
_RETURNS = [SLOTS["sampler"].index(name) for name in ("returns", "returns_sum", "returns_square_sum")]


def run_learner(context: WorkerContext, job: LearnerJob) -> None:
    """Learns from replay until asked to stop; writes a final checkpoint and final weights."""
    with contextlib.closing(ReplayRing.attach(job.ring_fd, job.ring)) as ring, open_device(
            job.learner, job.spec, job.settings.hidden_sizes, job.learner.batch_size) as (_, pair):
        _ReplayLearner(context, job, ring, pair).run()


def run_on_policy_learner(context: WorkerContext, job: OnPolicyLearnerJob) -> None:
    """Learns until asked to stop; writes the checkpoint and weights of the current rollout."""
    with contextlib.closing(Rollouts.attach(job.rollouts_fd, job.rollouts)) as rollouts, open_device(
            job.learner, job.spec, job.settings.hidden_sizes, job.batch_size):
        _RolloutLearner(context, job, rollouts).run()


def run_buffer_learner(context: WorkerContext, job: BufferLearnerJob) -> None:
    """Learns from the circular buffer until asked to stop; writes a final checkpoint and final weights."""
    with contextlib.closing(Rollouts.attach(job.rollouts_fd, job.rollouts)) as rollouts, open_device(
            job.learner, job.spec, job.settings.hidden_sizes, job.batch_size):
        _BufferLearner(context, job, rollouts).run()


class SkippedUpdates:
    """Notices that no update is applied any more, because loss or gradient is not finite."""

    def __init__(self, trainer: ReplayTrainer | BufferTrainer) -> None:
        self._trainer, self._in_a_row = trainer, 0
        self._updates, self._skipped = trainer.updates, trainer.algorithm.updates_skipped()

    def check(self) -> None:
        """Raises a WorkerError if too many updates in a row were skipped."""
        skipped, updates = self._trainer.algorithm.updates_skipped(), self._trainer.updates
        done = updates - self._updates
        self._in_a_row = self._in_a_row + done if skipped - self._skipped == done else 0
        if self._in_a_row > _MAX_SKIPPED_IN_A_ROW:
            raise WorkerError(f"{self._in_a_row} updates in a row had a non-finite loss or gradient; lower the "
                              "learning rate, or look at the rewards' size (a learner process goes back to its last "
                              "checkpoint)")
        self._skipped, self._updates = skipped, updates


class _Learner:
    """The loop of a learner: restore, then learn, and regularly post, publish and save."""

    began = True
    """Whether there was enough data to begin."""
    ends_by_env_steps = True
    """Whether it ends the run at the number of env steps that was asked for; if not, the supervisor does."""

    def __init__(
        self, context: WorkerContext, job: AnyLearnerJob, trainer: ReplayTrainer | OnPolicyTrainer | BufferTrainer,
        saved_ring: ReplayRing | None = None,
    ) -> None:
        """Checkpoints include the rows of ``saved_ring``, if given."""
        self._context, self._job, self._trainer, self._ring = context, job, trainer, saved_ring
        self._files = LearnerFiles(
            Path(job.run_dir), job.algo, job.spec.env_id, trainer, env_steps=self.env_steps, wall_s=self._wall_s,
            on_progress=context.saving,
        )
        self._publisher = Publisher(self._files.weights, context.weights_published)
        self._wakeup = next(iter(wakeups_of(job.wakeup_fds)), None)
        found = context.named(context.slots)
        self._base = {name: found[name] for name in TABLE.cumulative("learner")}
        self._wait_s = self._publish_s = 0.0
        self._published_s = self._saved_s = self._posted_s = 0.0
        self._unwritten = 0  # checkpoints in a row
        self._checkpoints_asked = context.checkpoints_asked

    def _wall_s(self) -> float:
        """Wall time of the run, without pauses."""
        return self._job.wall_base_s + self._session_s()

    def _session_s(self) -> float:
        """The same of this session."""
        return time.monotonic() - self._job.run_started_s - self._context.paused_s

    def restore(self, checkpoint: Checkpoint | None) -> None:
        raise NotImplementedError

    def stop_reason(self) -> str | None:
        stop = self._job.stop
        if self.ends_by_env_steps and stop.env_steps is not None and self.env_steps() >= stop.env_steps:
            return "env_steps"
        return "updates" if stop.updates is not None and self._trainer.updates >= stop.updates else None

    def advance(self) -> bool:
        """Learns what is due; False if the learner has to wait for data."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until samplers have written, or a little while where they tell nobody."""
        if self._wakeup is None:
            time.sleep(_POLL_S)
        else:
            self._wakeup.wait(WAIT_S)

    def env_steps(self) -> int:
        raise NotImplementedError

    def check(self) -> None:
        """Reports, or raises, what was found since the last call."""

    def run(self) -> None:
        try:
            self._learn()
        finally:
            self._publisher.close(_LAST_PUBLICATION_S)

    def _learn(self) -> None:
        context = self._context
        context.send("started", device=resolve_device(self._job.learner.device))
        checkpoint = self._files.begin()
        for damage in checkpoint.skipped if checkpoint else ():
            self._report(f"checkpoint left out: {damage}", "warning")
        self.restore(checkpoint)
        del checkpoint
        self._publish()
        self._saved_s = perf_counter()
        reason, began = self.stop_reason(), False
        while not context.stopping and reason is None:
            if not self.advance():
                start = perf_counter()
                context.beat(Phase.WAIT)
                self.wait()
                self._wait_s += perf_counter() - start
            if self.began and not began:
                began = True
                # The first checkpoint comes early: without one, the death of this process loses everything.
                self._saved_s = perf_counter() - max(0.0, self._job.learner.checkpoint_interval_s - FIRST_CHECKPOINT_S)
            self._chores()
            reason = self.stop_reason()
        self._finish(reason)

    def _chores(self) -> None:
        now = perf_counter()
        if now - self._posted_s >= _POST_S:
            self._post()
            self._posted_s = now
        if now - self._published_s >= self._job.learner.publish_interval_s:
            if self._files.is_new:
                self._publish()
            self._published_s = now
        asked = self._context.checkpoints_asked > self._checkpoints_asked
        if asked or now - self._saved_s >= self._job.learner.checkpoint_interval_s:
            self._checkpoints_asked = self._context.checkpoints_asked
            if self._checkpoint() and asked:
                self._report(f"checkpoint on request, at update {self._trainer.updates}")

    def _publish(self) -> None:
        start = perf_counter()
        self._context.beat(Phase.PUBLISH)
        self._publisher.offer(*self._files.offer())
        self._published_s = perf_counter()
        self._publish_s += self._published_s - start

    def _report_unpublished(self) -> None:
        for text in self._publisher.failures():
            self._report(text, "warning")

    def _checkpoint(self) -> bool:
        """Whether it was written."""
        start, written = perf_counter(), False
        self._context.beat(Phase.CHECKPOINT)
        try:
            self._files.save(self._ring)
            written, self._unwritten = True, 0
        except (OSError, ResourceError) as error:
            self._unwritten += 1
            if is_power_of_ten(self._unwritten):
                text = f"checkpoint not written{in_a_row(self._unwritten)}, the last one stays: {error}"
                self._report(text, "warning")
        self._context.saving(0)
        malloc_trim()
        self._saved_s = perf_counter()
        self._publish_s += self._saved_s - start
        return written

    def _post(self) -> None:
        self.check()
        metrics = self._trainer.metrics(wait_s=self._wait_s, publish_s=self._publish_s)
        for name, before in self._base.items():
            metrics[name] = metrics.get(name, 0.0) + before
        metrics["policy_version"] = max(self._publisher.version, 0)
        metrics["checkpoint_updates"] = self._files.saved_updates
        self._context.report(metrics)
        self._report_unpublished()

    def _finish(self, reason: str | None) -> None:
        """Writes the final state. An unfinished rollout does not count: a resume learns it again."""
        context, trainer = self._context, self._trainer
        self._post()
        if self._files.is_new:
            self._publish()
        self._checkpoint()
        self._publisher.flush(_LAST_PUBLICATION_S)
        self._report_unpublished()
        context.post(updates=trainer.updates)
        context.send("finished", updates=trainer.updates, reason=reason, parameters_sha256=trainer.parameters_sha256())
        while not context.stopping:
            context.beat(Phase.WAIT)
            time.sleep(0.02)

    def _report(self, text: str, level: str = "info") -> None:
        self._context.event(level, text)


class _RestoredLearner(_Learner):
    """One whose state is in its checkpoint."""

    _trainer: ReplayTrainer | BufferTrainer
    _skipped: SkippedUpdates

    def restore(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            self._trainer.load_state(checkpoint.tensors, checkpoint.state)
            self._report(f"learner continues from update {self._trainer.updates}")
        self._skipped = SkippedUpdates(self._trainer)

    def check(self) -> None:
        """Raises a WorkerError if too many updates in a row were skipped."""
        self._skipped.check()


class _ReplayLearner(_RestoredLearner):
    """Batches drawn from replay, within the band of samples per insert."""

    ends_by_env_steps = False
    _job: LearnerJob
    _trainer: ReplayTrainer

    def __init__(
        self, context: WorkerContext, job: LearnerJob, ring: ReplayRing, pair: ThreadPair | None
    ) -> None:
        config: AlgorithmConfig = job.settings
        trainer = ReplayTrainer(
            job.spec, job.algo, config, ring.spec.layout, ReplayReader(ring), job.learner, seed=job.seed,
            normalize_obs=job.normalize_obs, pair=pair, session=job.run_started_s, loaded_rows=job.loaded_rows,
        )
        self._limiter, self._anneals = job.limiter, config.lr_schedule != "constant"
        self._samplers = wakeups_of(job.sampler_wakeup_fds)
        super().__init__(context, job, trainer, ring if job.save_replay else None)
        self._replay = ring
        self._pace = TargetPace(trainer.algorithm.target_share, config.gamma, config.n_step)
        self._peers: PeerAverage | None = None
        self.began = False

    def restore(self, checkpoint: Checkpoint | None) -> None:
        if (gossip := self._open_gossip()) is not None:
            returned = self._context.named(self._context.slots)["updates"] > 0.0  # its parameters are old
            joins = returned or (self._job.gloo is not None and self._job.gloo.joined)
            self._peers = PeerAverage(self._trainer.algorithm, gossip, self._job.learner.average_interval,
                                      joins=joins, statistics=self._trainer)
        super().restore(checkpoint)

    def _open_gossip(self) -> Gossip | None:
        """The exchange with the learners to average with; None where there are none."""
        fds, own = self._job.shared_fds, self._context.address.group
        if self._job.gloo is not None:
            from spreeze.transport.gloo_gossip import GlooGossip  # loads torch.distributed

            return GlooGossip(own, self._job.gloo, topology="full", max_staleness=None)
        shared = [VersionedParameters(fds[index : index + 2]) for index in range(0, len(fds), 2)]
        return SharedGossip(own, shared, topology="full", max_staleness=None, epoch=self._files.epoch) if fds else None

    def _finish(self, reason: str | None) -> None:
        if self._peers is not None:
            self._peers.close()
        super()._finish(reason)

    def advance(self) -> bool:
        ring = self._replay
        inserted = ring.total_committed()
        if not self.began and inserted >= max(self._job.limiter.learning_starts, 1):
            # A new baseline at every start, so that rows collected before never cause a burst of updates.
            ring.begin_learning()
            self._count_returns()
            self._trainer.refresh()
            self.began = True
            self._report(f"learning began after {inserted} transitions in replay")
        if not self.began or not self._limiter.may_sample(inserted, ring.baseline_inserted, ring.sampled):
            return False
        self._context.beat(Phase.UPDATE)
        if self._anneals:
            done = run_progress(self._job.stop, self._job.wall_base_s, self._session_s(), self.env_steps(),
                                self._trainer.updates)
            self._trainer.anneal(done)
        self._update()
        self._context.slots[_UPDATES] = self._trainer.updates
        for sampler in self._samplers:
            sampler.notify()
        if self._peers is not None and (note := self._peers.advance(self._trainer.updates)):
            self._report(note)
        return True

    def _update(self) -> None:
        trainer = self._trainer
        most = None if self._job.stop.updates is None else self._job.stop.updates - trainer.updates
        rows = trainer.update_within_memory(most, self._shrunk) * trainer.batch_size
        self._replay.sampled += rows  # in one go: the tuner sets it to 0 at any moment

    def _shrunk(self, text: str) -> None:
        """Reports what the trainer did when the device ran out of memory."""
        self._report(text, "warning")
        self._limiter = dataclasses.replace(self._limiter, batch_size=self._trainer.batch_size)
        malloc_trim()
        self._context.beat(Phase.UPDATE)

    def env_steps(self) -> int:
        rows = range(self._job.num_samplers)
        return self._job.env_steps_base + int(sum(float(self._context.status.slots(row)[_ENV_STEPS]) for row in rows))

    def _count_returns(self) -> None:
        """Tells the trainer of the returns of all samplers of this session, those of other hosts included."""
        rows = range(self._job.num_samplers)
        self._trainer.count_returns(np.sum([self._context.status.slots(row)[_RETURNS] for row in rows], 0))

    def check(self) -> None:
        """Also takes in the samplers' returns, and reports the trainer's notes and targets that are too slow."""
        super().check()
        self._count_returns()
        if self.began and (note := self._pace.note(self._session_s(), self._trainer.updates)):
            self._report(note, "warning")
        while self._trainer.notes:
            self._report(self._trainer.notes.pop(0))


class _RolloutLearner(_Learner):
    """One rollout after another; with a lag of 1, each is learned from while the next one is collected."""

    _job: OnPolicyLearnerJob
    _trainer: OnPolicyTrainer

    def __init__(self, context: WorkerContext, job: OnPolicyLearnerJob, rollouts: Rollouts) -> None:
        self._mixer = None if job.mix is None else Mixer(job.mix, _Peers(context, job.mix), self._wait_for_peers)
        self._context = context
        super().__init__(context, job, open_on_policy_trainer(job, rollouts, self._session_s, self._mixer))
        self._trainer.algorithm.on_gradient, self._beat_s = self._on_gradient, perf_counter()
        self._rollouts = rollouts
        self._samplers = wakeups_of(job.sampler_wakeup_fds)

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Only reports: the trainer has read the state from the shared memory that outlives a learner."""
        if self._trainer.continued:
            self._report(
                f"learner continues from update {self._trainer.updates}, rollout {self._rollouts.current}"
            )
        self._notify()

    def _notify(self) -> None:
        """Wakes the rollout samplers, which wait for a swap, or at the start for the first policy."""
        for wakeup in self._samplers:
            wakeup.notify()

    def _on_gradient(self) -> None:
        """The heartbeat while a large rollout is learned from; once a second, or a timeline would be full of it."""
        if perf_counter() - self._beat_s >= _BEAT_S:
            self._beat_s = perf_counter()
            self._context.beat(Phase.UPDATE)

    def _wait_for_peers(self) -> bool:
        self._context.beat(Phase.WAIT)
        time.sleep(_POLL_S)
        return not self._context.stopping

    def _publish(self) -> None:
        """Where learners mix, one of them publishes their mean."""
        if self._mixer is None or self._mixer.publishes:
            super()._publish()

    def _finish(self, reason: str | None) -> None:
        if self._mixer is not None:
            self._mixer.leave()
        super()._finish(reason)

    def advance(self) -> bool:
        """Learns from the rollout that is due; True if the next rollout began."""
        self._context.beat(Phase.UPDATE)
        self._trainer.learn()
        if not self._trainer.swap():
            return False
        self._notify()
        return True

    def env_steps(self) -> int:
        """Env steps of finished rollouts, of all learners."""
        return self._trainer.env_steps if self._mixer is None else int(self._mixer.board["env_steps"].sum())


class _Peers:
    """Which learners of a run are alive: their process is there, has begun its loop, and has not finished."""

    def __init__(self, context: WorkerContext, spec: MixSpec) -> None:
        self._controls = [context.status.control(row) for row in spec.rows]
        self._own = spec.learner
        self._left = SharedArrays.attach(spec.board_fd, board_fields(spec.learners))["left"]

    def __call__(self) -> tuple[int, ...]:
        return tuple(peer for peer, control in enumerate(self._controls)
                     if peer == self._own or self._is_alive(peer, control))

    def _is_alive(self, peer: int, control: np.ndarray) -> bool:
        if self._left[peer] or Phase(int(control[words.PHASE])) in (Phase.START, Phase.INIT, Phase.DONE):
            return False
        try:
            os.kill(int(control[words.PID]), 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True


class _BufferLearner(_RestoredLearner):
    """Rollouts of any age, from a buffer that samplers write without waiting."""

    _job: BufferLearnerJob
    _trainer: BufferTrainer

    def __init__(self, context: WorkerContext, job: BufferLearnerJob, rollouts: Rollouts) -> None:
        algorithm = _on_policy_algorithm(job, "none")
        assert isinstance(algorithm, AnyAge)
        super().__init__(context, job, BufferTrainer(
            algorithm, rollouts, job.envs_per_sampler, env_steps_base=job.env_steps_base, session=job.run_started_s,
            progress=scheduled(job.stop, job.wall_base_s, self._session_s),
            meta={"algo": job.algo, "env": dataclasses.asdict(job.spec)},
        ))
        self._broadcast = PolicyBroadcast(
            self._trainer, VersionedParameters(job.policy_fds), job.settings.broadcast_updates)

    def advance(self) -> bool:
        """One update; the samplers, all of them, find new weights after every few, and before the learner waits."""
        self._context.beat(Phase.UPDATE)
        learned = self._trainer.learn()
        if learned:
            self._context.slots[_UPDATES] = self._trainer.updates
        self._publish_s += self._broadcast.after(learned, self._files.epoch)
        return learned

    def env_steps(self) -> int:
        return self._trainer.env_steps


def run_progress(stop: StopConfig, earlier_s: float, session_s: float, env_steps: float, updates: int) -> float:
    """Share of a run that is over, by the stop condition that comes first; 0 where it has none that can be foreseen.

    ``earlier_s`` [s] of earlier sessions are over, so that a resumed run does not begin anew.
    """
    pairs = ((earlier_s + session_s, stop.seconds and earlier_s + stop.seconds), (env_steps, stop.env_steps),
             (updates, stop.updates))
    return max((done / most for done, most in pairs if most), default=0.0)


def scheduled(
    stop: StopConfig, earlier_s: float, session_s: Callable[[], float], learners: int = 1, *, by_clock: bool = True
) -> Progress:
    """The share of a run that is over, as an on-policy learner's learning rate follows it.

    It goes by env steps where the run ends by them, so that what is learned does not depend on the clock; each of
    ``learners`` takes its part of them. It goes by the clock where nothing else ends the run: beside a return or a
    number of updates the time is a limit, and the share stays 0, as without ``by_clock``.
    """
    if stop.env_steps is not None:
        end = -(-stop.env_steps // learners)
        return lambda env_steps: min(1.0, env_steps / end)
    if not by_clock or stop.seconds is None or stop.updates is not None or stop.at_return:
        return lambda env_steps: 0.0
    return lambda env_steps: min(1.0, run_progress(stop, earlier_s, session_s(), 0, 0))


def _on_policy_algorithm(job: OnPolicyLearnerJob | BufferLearnerJob, correction: str) -> OnPolicyAlgorithm:
    return create_on_policy(
        job.algo, job.spec, job.settings, job.seed,
        resolve_device(job.learner.device), correction=correction, normalize_obs=job.normalize_obs,
    )


def progress_of(job: OnPolicyLearnerJob, session_s: Callable[[], float]) -> Progress:
    """The share that this learner's learning rate follows; not by the clock where others have one of their own."""
    mix = job.mix
    if mix is None:
        return scheduled(job.stop, job.wall_base_s, session_s)
    by_clock = mix.mixing != "all_reduce" and mix.gloo is None
    return scheduled(job.stop, job.wall_base_s, session_s, mix.learners, by_clock=by_clock)


def open_on_policy_trainer(
    job: OnPolicyLearnerJob, rollouts: Rollouts, session_s: Callable[[], float], mixer: Mixer | None = None
) -> OnPolicyTrainer:
    """``session_s``: wall time of this session without pauses [s]."""
    algorithm = _on_policy_algorithm(job, job.correction)
    handover = Handover(policies=VersionedParameters(job.policy_fds), states=VersionedParameters(job.state_fds))
    return OnPolicyTrainer(
        algorithm, rollouts, handover, lag=job.lag, batch_size=job.batch_size,
        progress=progress_of(job, session_s),
        meta={"algo": job.algo, "env": dataclasses.asdict(job.spec)}, mixer=mixer,
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


class Offer(NamedTuple):
    arrays: Callable[[], Arrays]
    meta: dict[str, Any]
    epoch: int
    version: int


class LearnerFiles:
    """Published weights and checkpoints of one trainer, which evaluation, play and resume read."""

    def __init__(
        self, run_dir: Path, algo: str, env_id: str, trainer: ReplayTrainer | OnPolicyTrainer | BufferTrainer, *,
        env_steps: Callable[[], int], wall_s: Callable[[], float], on_progress: Callable[[int], None],
    ) -> None:
        """``on_progress`` gets the bytes of a checkpoint that are still to be written and checked."""
        self._trainer, self._names = trainer, {"algo": algo, "env_id": env_id}
        self._env_steps, self._wall_s = env_steps, wall_s
        self.weights = open_weights(run_dir)
        self._checkpoints = CheckpointStore(run_dir / "checkpoints", on_progress)
        self.epoch = 0
        """Rises with each start of the learner."""
        self.offered_updates = -1
        """Updates of the last offered policy."""
        self.saved_updates = 0
        """Updates in the newest checkpoint of this process."""

    def begin(self) -> Checkpoint | None:
        """Begins an epoch after all existing ones; returns the newest checkpoint, if any."""
        latest, checkpoint = self.weights.read_latest(None), self._checkpoints.load_latest()
        self.epoch = 1 + max(latest.epoch if latest else 0, checkpoint.epoch if checkpoint else 0)
        return checkpoint

    def _now(self) -> dict[str, Any]:
        return {"env_steps": self._env_steps(), "wall_s": self._wall_s()}

    @property
    def is_new(self) -> bool:
        """Whether the policy has changed since it was offered."""
        return self._trainer.updates != self.offered_updates

    def offer(self) -> Offer:
        arrays, meta = self._trainer.policy_snapshot()
        self.offered_updates = self._trainer.updates
        return Offer(arrays, meta | self._now(), self.epoch, self.offered_updates)

    def publish(self) -> Weights:
        """Publishes in this thread.

        Raises:
            WeightsError: a value is not finite; nothing was published.
            OSError: no room.
        """
        made, meta, epoch, version = self.offer()
        arrays = made()
        return Weights(arrays, meta, epoch, version, Path(self.weights.publish(arrays, meta, epoch, version)))

    def save(self, ring: ReplayRing | None = None) -> None:
        """Writes a checkpoint, with replay where a ring is given.

        Raises:
            ResourceError: no room on the disk.
            OSError: writing failed; older checkpoints are untouched.
        """
        tensors, state = self._trainer.state()
        state, updates = state | self._names | self._now(), int(state["updates"])
        self._checkpoints.save(tensors, state, epoch=self.epoch, updates=updates, ring=ring)
        self.saved_updates = updates


class Publisher:
    """Publishes in a helper thread, so that encoding, hashing and writing do not delay updates.

    At most one offer waits; a newer one replaces it.
    """

    def __init__(self, store: ParameterPublisher, on_published: Callable[[], None] = lambda: None) -> None:
        """``on_published`` is called in the helper thread when a new version is visible to readers."""
        self.version = -1
        """The newest version visible to readers; -1 before the first."""
        self._store, self._on_published = store, on_published
        self._change = threading.Condition()
        self._waiting: Offer | None = None
        self._busy = self._closing = False
        self._failures: list[str] = []
        self._in_a_row = 0
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def offer(self, arrays: Callable[[], Arrays], meta: dict[str, Any], epoch: int, version: int) -> None:
        """Hands over a version and returns at once; ``arrays`` is called in the helper thread."""
        with self._change:
            self._waiting = Offer(arrays, meta, epoch, version)
            self._change.notify_all()

    def failures(self) -> list[str]:
        """Reports on failures to publish since the last call; of those in a row the first, the tenth, ..."""
        with self._change:
            found, self._failures = self._failures, []
        return found

    def flush(self, timeout_s: float) -> bool:
        """Waits until all offers are written; False if that took longer."""
        with self._change:
            return self._change.wait_for(lambda: self._waiting is None and not self._busy, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes the waiting offer and ends the thread; gives up on a disk that hangs."""
        deadline_s = time.monotonic() + timeout_s
        self.flush(timeout_s)
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._thread.join(max(deadline_s - time.monotonic(), 0.1))

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting is not None or self._closing)
                if self._waiting is None:
                    return
                offer, self._waiting, self._busy = self._waiting, None, True
            failure: str | None = None
            try:
                self._store.publish(offer.arrays(), offer.meta, offer.epoch, offer.version)
                self.version = offer.version
                self._on_published()
            except (WeightsError, OSError) as error:
                failure = str(error)
            except Exception as error:  # reported by the learner, which goes on with the last good weights
                failure = f"{type(error).__name__}: {error}"
            self._in_a_row = 0 if failure is None else self._in_a_row + 1
            with self._change:
                self._busy = False
                if failure is not None and is_power_of_ten(self._in_a_row):
                    self._failures.append(f"weights not published{in_a_row(self._in_a_row)}, the last good ones stay: "
                                          f"{failure}")
                self._change.notify_all()
