"""The learner of the circular buffer: its update loop, and its trainer, which learns from rollouts of any age.

The buffer (``transport.rollouts``) gives new rollouts first, the oldest of them first, then cycles through the stored
ones: between two uses of a rollout all others are used. So K uses of N rollouts are like K epochs of N minibatches of
PPO (arXiv 1912.00167, section 3.2). A use is one update from that rollout or, with ``minibatches`` above 1, that many
updates from rows of all rollouts in use. Values computed at a rollout's first use are kept here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterator
from time import perf_counter
from typing import Any

from spreeze.algorithms.averages import RolloutAverage
from spreeze.algorithms.impact import AsyncOnPolicy, Evaluated
from spreeze.errors import WeightsError
from spreeze.metrics.table import SLOTS
from spreeze.transport.checkpoint import Checkpoint
from spreeze.transport.rollouts import RolloutReader, Rollouts
from spreeze.transport.weights import VersionedParameters, check_finite, sha256_of
from spreeze.types import Arrays
from spreeze.workers.context import WorkerContext
from spreeze.workers.jobs import BufferLearnerJob
from spreeze.workers.learner import CheckpointedUpdateLoop, Learner
from spreeze.workers.roles import Phase
from spreeze.workers.rollout_learner import OnPolicy, Progress, RolloutTrainer, on_policy_algorithm, progress_of
from spreeze.workers.torch_devices import open_device

_UPDATES = SLOTS["learner"].index("updates")
_BROADCAST_S = 0.002  # least time between two policies for the samplers while there is something to learn from
_RECENT = 64


def learn_from_buffer(context: WorkerContext, job: BufferLearnerJob) -> Iterator[None]:
    """Learns from the circular buffer until asked to stop; writes a final checkpoint and final weights."""
    with (
        contextlib.closing(job.rollouts.attach()) as rollouts,
        open_device(job.learner, job.spec, job.settings.hidden_sizes, job.batch_size),
    ):
        yield from Learner(context, job, BufferUpdateLoop(context, job, rollouts)).turns()


class BufferUpdateLoop(CheckpointedUpdateLoop):
    """Rollouts of any age, from a buffer that samplers write without waiting."""

    _job: BufferLearnerJob
    trainer: BufferTrainer

    def __init__(self, context: WorkerContext, job: BufferLearnerJob, rollouts: Rollouts) -> None:
        algorithm = on_policy_algorithm(job, "none")
        assert isinstance(algorithm, AsyncOnPolicy)
        super().__init__(context, job)
        self.trainer = BufferTrainer(
            algorithm,
            rollouts,
            job.envs_per_sampler,
            previous_env_steps=job.previous_env_steps,
            session=job.session,
            progress=progress_of(job, self.training_s),
            meta={"algo": job.algo, "env": dataclasses.asdict(job.spec)},
        )
        self._epoch = 0
        self._broadcast = PolicyBroadcast(self.trainer, job.weights_channel.attach(), job.settings.broadcast_updates)

    def restore(self, checkpoint: Checkpoint | None, epoch: int) -> None:
        self._epoch = epoch
        super().restore(checkpoint, epoch)

    def train(self) -> bool:
        """One update; all samplers get new weights after every few updates, and before the learner waits."""
        self._context.heartbeat(Phase.UPDATE)
        learned = self.trainer.learn()
        if learned:
            self._context.slots[_UPDATES] = self.trainer.updates
        self.broadcast_s += self._broadcast.after(learned, self._epoch)
        return learned

    def env_steps(self) -> int:
        return self.trainer.env_steps


class CheckpointedRolloutTrainer(RolloutTrainer[OnPolicy]):
    """Base of trainers whose state is in their checkpoint: after a restart, rollouts are collected again."""

    def __init__(self, algorithm: OnPolicy, meta: dict[str, Any]) -> None:
        """``meta`` is published with every policy."""
        self.batch_size = 0
        self.algorithm, self._meta, self._average = algorithm, meta, RolloutAverage(algorithm)
        self.learn_s = 0.0

    @property
    def updates(self) -> int:
        return self.algorithm.updates

    def policy_snapshot(self) -> tuple[Callable[[], Arrays], dict[str, Any]]:
        arrays = self._average.policy_arrays()
        return lambda: arrays, {**self.algorithm.policy_meta(), **self._meta, "updates": self.updates}

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """Tensors and JSON of a checkpoint."""
        arrays = self.algorithm.state_arrays() | self._average.state_arrays()
        return arrays, {"algorithm": self.algorithm.state_json(), "updates": self.updates}

    def load_state(self, tensors: Arrays, state: dict[str, Any]) -> None:
        """Raises a CheckpointError if the state belongs to another network or algorithm."""
        self.algorithm.load_state_arrays(tensors)
        self.algorithm.load_state_json(state["algorithm"])
        self._average.restore(tensors)

    def parameters_sha256(self) -> str:
        return sha256_of(self.algorithm.state_arrays())


class BufferTrainer(CheckpointedRolloutTrainer[AsyncOnPolicy]):
    """One update after another, while the buffer has rollouts with uses left."""

    def __init__(
        self,
        algorithm: AsyncOnPolicy,
        rollouts: Rollouts,
        envs_per_sampler: int,
        *,
        meta: dict[str, Any],
        progress: Progress,
        previous_env_steps: int,
        session: float,
    ) -> None:
        """The learning rate follows ``progress``. A checkpoint of the same ``session`` refers to the same rollouts."""
        super().__init__(algorithm, meta)
        self._rollouts = rollouts
        self._reader = RolloutReader(rollouts, envs_per_sampler, cycles=True)
        self._progress, self._env_steps_base, self._session = progress, previous_env_steps, session
        spec = rollouts.spec
        self.batch_size = spec.sync_interval * envs_per_sampler // algorithm.minibatches
        self._kept = algorithm.new_rollout_cache(spec.num_slots * (spec.num_envs // envs_per_sampler))
        self._counted: set[tuple[int, int]] = set()
        """Readable rollouts that the running statistics of observations and rewards include."""
        self._parts: list[Evaluated] = []
        """Data for the remaining updates of the current use."""
        self._version = 0.0
        """Mean version of the policy that collected the rollout in use."""
        self._lags: deque[float] = deque(maxlen=_RECENT)
        self._uses: deque[int] = deque(maxlen=_RECENT)
        self._dropped = 0

    @property
    def env_steps(self) -> int:
        """Env steps that samplers have stored since the run started; each counts where it was collected, once."""
        return self._env_steps_base + int(self._rollouts.steps.sum())

    def learn(self) -> bool:
        """One update; False if there is no data for it."""
        start = perf_counter()
        if not self._parts and not self._use():
            return False
        # Not negative either after a learner that lost its latest updates.
        self._lags.append(max(0.0, self.updates - self._version))
        self.algorithm.update_minibatch(self._parts.pop(0), self._progress(self.env_steps))
        self._average.advance()
        self.learn_s += perf_counter() - start
        return True

    def _use(self) -> bool:
        """Starts a use of the rollout whose turn it is; False if there is none."""
        taken = self._reader.take(self._kept)
        if taken is None:
            return False
        spec, key = self._rollouts.spec, (taken.writer, taken.rollout)
        if taken.batch is not None:  # also after a restart, in the middle of its uses
            readable = self._reader.readable
            for other in [other for other in self._kept if other not in readable]:  # written over, with uses left
                del self._kept[other]
            self._kept[key] = self.algorithm.evaluate(taken.batch, taken.writer, key not in self._counted)
            self._counted = self._counted & readable | {key}
        self._version = float(taken.versions.mean())
        self._uses.append(taken.use)
        self._parts = self.algorithm.parts(self._kept, key)
        if taken.use == spec.max_uses:
            del self._kept[key]
        return True

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        arrays, state = super().state()
        return arrays, state | {"counted": sorted(self._counted), "session": self._session}

    def load_state(self, tensors: Arrays, state: dict[str, Any]) -> None:
        super().load_state(tensors, state)
        if state.get("session") == self._session:
            self._counted = {(writer, rollout) for writer, rollout in state["counted"]}

    def metrics(self, *, wait_s: float, publish_s: float) -> dict[str, float]:
        self._dropped = max(self._dropped, self._reader.dropped)
        return super().metrics(wait_s=wait_s, publish_s=publish_s) | {
            "policy_lag": _mean(self._lags),
            "rollouts_dropped": self._dropped,
            "rollout_uses": _mean(self._uses),
        }


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0


class PolicyBroadcast:
    """Broadcasts the newest policy to samplers: after every few updates, and whenever the learner starts to wait."""

    def __init__(
        self, trainer: BufferTrainer, weights: VersionedParameters, every_updates: int, min_s: float = _BROADCAST_S
    ) -> None:
        self._trainer, self._weights = trainer, weights
        self._every_updates, self._min_s = every_updates, min_s
        # A learner that was killed may have broadcast policies of an epoch that no file records.
        self._min_epoch = 0 if (newest := weights.newest) is None else newest[0] + 1
        self._updates, self._at_s = -1, 0.0

    def after(self, learned: bool, epoch: int) -> float:
        """Call after each attempt at an update; returns the time taken [s]. A non-finite policy is kept back."""
        new, start = self._trainer.updates - self._updates, perf_counter()
        if new == 0 or (learned and (new < self._every_updates or start - self._at_s < self._min_s)):
            return 0.0
        read, meta = self._trainer.policy_snapshot()
        arrays = read()
        try:
            check_finite(arrays, "policy")
        except WeightsError:
            pass
        else:
            self._weights.publish_over_oldest(arrays, meta, max(epoch, self._min_epoch), self._trainer.updates)
        self._updates, self._at_s = self._trainer.updates, perf_counter()
        return self._at_s - start
