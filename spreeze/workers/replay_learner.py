"""Learns from replay, within the band of samples per insert."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from time import perf_counter

import numpy as np

from spreeze.algorithms.off_policy import OffPolicyAlgorithm
from spreeze.algorithms.parallel_work import TwoThreads
from spreeze.config.algorithm_bases import AlgorithmConfig
from spreeze.config.schema import LearnerConfig
from spreeze.metrics.table import SLOTS
from spreeze.transport import status_table
from spreeze.transport.checkpoint import Checkpoint
from spreeze.transport.gossip import Gossip, GossipMemory
from spreeze.transport.mixing import as_float32, as_float64
from spreeze.transport.prioritised_replay import open_reader
from spreeze.transport.replay_ring import ReplayReader, ReplayRing
from spreeze.workers.context import WorkerContext
from spreeze.workers.gpu_replay import DeviceReplay
from spreeze.workers.jobs import BaseReplayJob, ReplayLearnerJob
from spreeze.workers.learner import CheckpointedUpdateLoop, Learner, run_progress
from spreeze.workers.replay_batches import ReplayStatistics
from spreeze.workers.replay_trainer import ReplayTrainer
from spreeze.workers.roles import Phase
from spreeze.workers.torch_devices import malloc_trim, open_device

_UPDATES, _ENV_STEPS = SLOTS["learner"].index("updates"), SLOTS["sampler"].index("env_steps")
_RETURNS = [SLOTS["sampler"].index(name) for name in ("returns", "returns_sum", "returns_square_sum")]
_PACE_S = 20.0
_SILENT_STEPS = 4
"""Averaging steps without a message from another learner after which it is left out; speeds differ by less."""
_MIN_BACKUPS_PER_S = 2.0  # target backups a second, below which values may need minutes to be of the right size


def learn_from_replay(context: WorkerContext, job: ReplayLearnerJob) -> Iterator[None]:
    """Learns from replay until asked to stop; writes a final checkpoint and final weights."""
    with contextlib.closing(job.replay.attach()) as ring, contextlib.ExitStack() as device:
        reader = open_reader(ring, job.settings.priority_exponent)
        yield from Learner(context, job, ReplayUpdateLoop(context, job, ring, device, reader)).turns()


class ReplayUpdateLoop(CheckpointedUpdateLoop):
    """Batches drawn from replay, within the band of samples per insert."""

    _job: BaseReplayJob
    trainer: ReplayTrainer

    def __init__(
        self,
        context: WorkerContext,
        job: BaseReplayJob,
        ring: ReplayRing | DeviceReplay,
        device: contextlib.ExitStack,
        reader: ReplayReader | DeviceReplay,
    ) -> None:
        """``device`` keeps the learner's device open; ``reader`` draws from ``ring``."""
        config: AlgorithmConfig = job.settings
        super().__init__(context, job)
        self._device, self._learner, self._retuned = device, job.learner, 0
        parallel = self._open_device(job.learner)
        self.trainer = ReplayTrainer(
            job.spec,
            job.algo,
            config,
            ring.spec.layout,
            reader,
            job.learner,
            seed=job.seed,
            normalize_obs=job.normalize_obs,
            parallel=parallel,
            session=job.session,
            loaded_rows=job.loaded_rows,
        )
        self.ends_by_env_steps = self._is_serial = context.takes_turns
        self._weights_channel = None if job.weights_channel is None else job.weights_channel.attach()
        self._epoch = 0
        self._limiter = job.limiter
        self._anneals = config.lr_schedule != "constant" or config.priority_exponent > 0.0
        self.saved_ring = ring if job.save_replay and isinstance(ring, ReplayRing) else None
        self.roll_back = self._roll_back if job.rollback_enabled else None
        self._replay = ring
        self._updates_before_sampling: float = math.inf if job.offline else getattr(config, "bc_updates", 0)
        """Updates from demonstrations alone, before samplers begin; infinite if they never do."""
        self._pace = TargetPace(self.trainer.algorithm.effective_tau, config.gamma, config.n_step)
        self._peers: PeerAverage | None = None
        self._hosts: GossipMemory | None = None
        self.learning_started = self.has_begun = self._resumed = False

    def restore(self, checkpoint: Checkpoint | None, epoch: int) -> None:
        if (gossip := self._open_gossip(epoch)) is not None:
            returned = self._context.slot_values()["updates"] > 0.0  # its parameters are old
            joins = returned or (self._job.hosts is not None and self._job.hosts.joined)
            interval, statistics = self._job.learner.average_interval, self.trainer.statistics
            self._peers = PeerAverage(self.trainer.algorithm, gossip, interval, joins=joins, statistics=statistics)
        super().restore(checkpoint, epoch)
        self._epoch = epoch
        self._resumed = self.trainer.updates > 0
        if self._resumed:
            self._broadcast()

    def _roll_back(self, checkpoint: Checkpoint) -> str:
        self.trainer.roll_back(checkpoint.tensors, checkpoint.state)
        self._begin_checks()
        self._broadcast()
        return f"learning rates are {self.trainer.algorithm.lr_multiplier:g} of the settings"

    def _broadcast(self) -> None:
        """Sends its samplers the newest weights, where they do not read the published ones."""
        if self._weights_channel is not None:
            start = perf_counter()
            arrays, meta = self.trainer.exploring_policy()
            self._weights_channel.publish(
                arrays, meta | {"env_steps": self.env_steps()}, self._epoch, self.trainer.updates
            )
            self.broadcast_s += perf_counter() - start

    def _open_gossip(self, epoch: int) -> Gossip | None:
        group, hosts = self._context.address.group, self._job.hosts
        if hosts is not None:
            self._hosts = hosts.attach()
            return self._hosts.enter(hosts.own[group], topology="full", max_staleness=None)
        shared = [handle.attach() for handle in self._job.averages]
        return Gossip(group, shared, topology="full", max_staleness=None, epoch=epoch) if shared else None

    def leave(self) -> None:
        if self._hosts is not None:
            self._hosts.leave()

    def train(self) -> bool:
        ring = self._replay
        if self._context.header_word(status_table.RETUNED) != self._retuned:
            self._retune()
        inserted = ring.total_committed()
        if self.trainer.updates < self._updates_before_sampling:  # there are only demonstrations to learn from
            self.has_begun = True
            return self._update_before_sampling(inserted)
        if not self.learning_started and inserted >= max(self._job.limiter.learning_starts, 1):
            # Counted anew at every start, so that rows collected before never cause a burst of updates.
            ring.begin_learning()
            if not self._is_serial:
                self._update_statistics()
            self.learning_started = self.has_begun = True
            done = f"{inserted * ring.spec.layout.env_steps_per_row} transitions"
            if self._job.spec.frames is not None:  # rows are frames, and a reset's frame belongs to no env step
                done = f"{self.env_steps()} env steps, with {inserted} frames in replay"
            self._report(f"learning {'resumed' if self._resumed else 'started'} after {done}")
        if not self._may_update(inserted):
            return False
        self._context.heartbeat(Phase.UPDATE)
        self._update()
        while self._is_serial and self._may_update(inserted):
            self._update()
        self._post_update()
        if self._peers is not None and (note := self._peers.advance(self.trainer.updates)):
            self._report(note)
        return True

    def _open_device(self, learner: LearnerConfig) -> TwoThreads | None:
        self._device.close()
        opened = open_device(learner, self._job.spec, self._job.settings.hidden_sizes, learner.batch_size)
        return self._device.enter_context(opened)[1]

    def _retune(self) -> None:
        self._retuned = self._context.header_word(status_table.RETUNED)
        tuned = self._context.status.retuned_settings()
        learner = dataclasses.replace(self._learner, batch_size=tuned.batch_size, threads=tuned.learner_threads)
        if learner != self._learner:
            self._learner = learner
            self.trainer.set_parallel(None)
            self.trainer.set_parallel(self._open_device(learner))
            self.trainer.set_batch_size(learner.batch_size)
        self._pace.begin_again()
        limiter = self._limiter.within(tuned.samples_per_insert_min, tuned.samples_per_insert_max)
        self._limiter = dataclasses.replace(limiter, batch_size=self.trainer.batches.num_rows)

    def _update_before_sampling(self, inserted: int) -> bool:
        """One update, without the count of samples per insert, which begins when samplers do."""
        if inserted < max(self._job.limiter.learning_starts, 1) or self._is_done:
            return False
        if not self.trainer.updates:
            self._update_statistics()
            waits = "; samplers wait" if math.isfinite(self._updates_before_sampling) else ""
            self._report(f"learning from {inserted} transitions in replay{waits}")
        self._context.heartbeat(Phase.UPDATE)
        self._update()
        self._post_update()
        return True

    def _post_update(self) -> None:
        self._context.slots[_UPDATES] = self.trainer.updates
        self._broadcast()
        self._notify()

    @property
    def _is_done(self) -> bool:
        return self._job.stop.updates is not None and self.trainer.updates >= self._job.stop.updates

    def _may_update(self, inserted: int) -> bool:
        if not self.learning_started or self._is_done:
            return False
        return self._limiter.may_sample(inserted, self._replay.inserted_at_learning_start, self._replay.rows_drawn)

    def _update_statistics(self) -> None:
        self._count_returns()
        self.trainer.refresh()

    def _update(self) -> None:
        trainer = self.trainer
        if self._is_serial:  # else by the clock
            self._update_statistics()
        job = self._job
        if self._anneals:
            trainer.update_learning_rates(
                run_progress(job.stop, job.previous_wall_s, self.training_s(), self.env_steps(), trainer.updates)
            )
        if trainer.algorithm.imitation is not None:
            trainer.algorithm.imitation.begin(trainer.updates)
        max_updates = None if job.stop.updates is None else job.stop.updates - trainer.updates
        rows = trainer.update_within_memory(max_updates, self._shrunk) * trainer.batches.num_rows
        self._replay.rows_drawn += rows  # in one go: the tuner sets it to 0 at any moment

    def _shrunk(self, text: str) -> None:
        self._report(text, "warning")
        self._limiter = dataclasses.replace(self._limiter, batch_size=self.trainer.batches.num_rows)
        malloc_trim()
        self._context.heartbeat(Phase.UPDATE)

    def env_steps(self) -> int:
        slots = self._context.status.slots
        return self._job.previous_env_steps + int(
            sum(float(slots(row)[_ENV_STEPS]) for row in self._job.sampler_status_rows)
        )

    def _count_returns(self) -> None:
        slots = self._context.status.slots
        sampled = [np.asarray(slots(row)[_RETURNS]) for row in self._job.sampler_status_rows]
        self.trainer.statistics.update_returns(sum(sampled, start=np.asarray(self._job.returns)))

    def check(self) -> None:
        """Also takes in the samplers' returns, and reports the trainer's notes and targets that are too slow."""
        super().check()
        if not self._is_serial:
            self._count_returns()
        if self.has_begun and (note := self._pace.note(self.session_s(), self.trainer.updates)):
            self._report(note, "warning")
        while self.trainer.notes:
            self._report(self.trainer.notes.pop(0))


class PeerAverage:
    """The mean of the parameters of learners side by side, as in federated averaging (McMahan et al. 2017).

    Every ``interval`` updates a learner sends its networks, targets and entropy coefficient, and the statistics that
    scale inputs and outputs, then takes the mean of these and the newest of each other learner. Moments of the
    optimizer stay its own. No learner waits: one silent for ``_SILENT_STEPS`` of these steps is left out until it sends
    again.
    """

    def __init__(
        self,
        algorithm: OffPolicyAlgorithm,
        gossip: Gossip,
        interval: int,
        *,
        joins: bool = False,
        statistics: ReplayStatistics | None = None,
    ) -> None:
        """A learner that ``joins`` a running group first takes the mean of the others alone."""
        self._algorithm, self._gossip, self._joins = algorithm, gossip, joins
        self._statistics = statistics
        self._interval, self._due, self._version = interval, -1, 0
        self._newest: dict[int, tuple[np.ndarray, int]] = {}
        """Number of another learner -> its last message, and the own version at which that arrived."""
        self._num_others = -1

    def advance(self, updates: int) -> str | None:
        """Averages if that is due; returns a sentence if the number of other learners in the mean has changed."""
        if self._due < 0:
            self._due = updates + self._interval
        if updates < self._due:
            return None
        self._due = updates + self._interval
        arrays = self._algorithm.state_arrays()
        names = [name for name, array in arrays.items() if array.dtype == np.float32 and "adam" not in name]
        units = np.zeros(0) if self._statistics is None else self._statistics.statistics_to_average()
        message = np.concatenate([*(arrays[name].reshape(-1) for name in names), as_float32(units)])
        self._version += 1
        others = self._living()
        messages = others if self._joins and others else [message, *others]
        if messages is not others:
            self._gossip.send(message, self._version)
        if others:
            self._joins, size = False, len(message) - 2 * len(units)
            mean = np.mean([message[:size] for message in messages], 0)
            parts = np.split(mean, np.cumsum([arrays[name].size for name in names])[:-1])
            means = {name: part.reshape(arrays[name].shape) for name, part in zip(names, parts, strict=True)}
            self._algorithm.load_state_arrays(arrays | means)
            if self._statistics is not None and len(units):
                means_of = np.mean([as_float64(message[size:]) for message in messages], 0)
                self._statistics.set_average_statistics(means_of)
        if len(others) == self._num_others:
            return None
        self._num_others = len(others)
        plural = "" if self._num_others == 1 else "s"
        return f"update {updates}: averages parameters with {self._num_others} other learner{plural}"

    def _living(self) -> list[np.ndarray]:
        for message in self._gossip.receive():
            self._newest[message.sender] = message.parameters, self._version
        return [parameters for parameters, since in self._newest.values() if self._version - since < _SILENT_STEPS]


class TargetPace:
    """The fraction of the online weights mixed into the targets per second, which limits how fast values can follow."""

    def __init__(self, tau: float, gamma: float, n_step: int) -> None:
        """An update mixes the fraction ``tau`` of the online weights into the targets, on average."""
        self._tau, self._one_minus_discount = tau, 1.0 - gamma**n_step
        self._start: tuple[float, int] | None = None
        self._done = False

    def begin_again(self) -> None:
        """Restarts the measurement, since updates now take another time."""
        self._start = None

    def note(self, now_s: float, updates: int) -> str | None:
        """Advice if the targets are too slow, given once; ``now_s`` is the run's time without pauses [s]."""
        if self._start is None:
            self._start = now_s, updates
        elapsed_s = now_s - self._start[0]
        if self._done or elapsed_s < _PACE_S:
            return None
        self._done = True
        return slow_target_advice(self._tau, (updates - self._start[1]) / elapsed_s, self._one_minus_discount)


def slow_target_advice(tau: float, updates_per_s: float, one_minus_discount: float) -> str | None:
    """Advice if target networks follow too slowly, else None.

    Q-values have the time constant ``1 / (tau one_minus_discount)`` updates; the discount is gamma^n.
    """
    backups_per_s = tau * updates_per_s
    if updates_per_s <= 0.0 or one_minus_discount <= 0.0 or backups_per_s >= _MIN_BACKUPS_PER_S:
        return None
    return (
        "target networks change slowly: choose smaller networks or a smaller --batch-size, else raise tau or n_step; "
        f"Q-values need about {1.0 / (backups_per_s * one_minus_discount):,.0f} s to adapt ({backups_per_s:.2g} "
        f"backups/s: tau {tau:g} an update, {updates_per_s:.3g} updates/s over {_PACE_S:.0f} s)"
    )
