"""A learner's published weights and checkpoints, which evaluation, play and resume read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from spreeze.errors import WeightsError
from spreeze.transport.checkpoint import Checkpoint, CheckpointStore
from spreeze.transport.replay_ring import ReplayRing
from spreeze.transport.weights import Weights, WeightsStore
from spreeze.workers.context import open_weights

_POLL_S = 0.1
Arrays = dict[str, np.ndarray]


class Trainer(Protocol):
    """Common interface of the replay and on-policy trainers."""

    updates: int

    def policy_snapshot(self) -> tuple[Callable[[], Arrays], dict[str, Any]]:
        """The policy: a function that returns copies of its arrays (in any thread), and JSON metadata."""
        ...

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """All that a resume needs: tensors and JSON."""
        ...

    def numbers(self, *, wait_s: float, publish_s: float) -> dict[str, float]:
        """The learner's slots by name (see ``metrics.table``)."""
        ...

    def parameters_sha256(self) -> str:
        """Hash of networks, targets, optimisers and random state; equal runs have equal hashes."""
        ...


class Offer(NamedTuple):
    arrays: Callable[[], Arrays]
    meta: dict[str, Any]
    epoch: int
    version: int


class RunFiles:
    """Weights and checkpoints of one trainer."""

    def __init__(
        self, run_dir: Path, algo: str, env_id: str, trainer: Trainer, *, env_steps: Callable[[], int],
        wall_s: Callable[[], float], on_progress: Callable[[int], None],
    ) -> None:
        """``on_progress`` gets the bytes of a checkpoint that are still to be written and checked."""
        self._trainer, self._names = trainer, {"algo": algo, "env_id": env_id}
        self._env_steps, self._wall_s = env_steps, wall_s
        self.weights = open_weights(run_dir)
        self._checkpoints = CheckpointStore(run_dir / "checkpoints", on_progress)
        self._epoch = 0
        self.offered_updates = -1
        """Updates of the last offered policy."""
        self.saved_updates = 0
        """Updates in the newest checkpoint of this process."""

    def begin(self) -> Checkpoint | None:
        """Begins an epoch after all existing ones; returns the newest checkpoint, if any."""
        latest, checkpoint = self.weights.read_latest(None), self._checkpoints.load_latest()
        self._epoch = 1 + max(latest.epoch if latest else 0, checkpoint.epoch if checkpoint else 0)
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
        return Offer(arrays, meta | self._now(), self._epoch, self.offered_updates)

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
        self._checkpoints.save(tensors, state, epoch=self._epoch, updates=updates, ring=ring)
        self.saved_updates = updates


class Publisher:
    """Publishes in a helper thread, so that encoding, hashing and writing do not delay updates.

    At most one offer waits; a newer one replaces it.
    """

    def __init__(self, store: WeightsStore, on_published: Callable[[], None] = lambda: None) -> None:
        """``on_published`` is called in the helper thread when a new version is visible to readers."""
        self.version = -1
        """The newest version visible to readers; -1 before the first."""
        self._store, self._on_published = store, on_published
        self._change = threading.Condition()
        self._waiting: Offer | None = None
        self._busy = self._closing = False
        self._failures: list[str] = []
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def offer(self, arrays: Callable[[], Arrays], meta: dict[str, Any], epoch: int, version: int) -> None:
        """Hands over a version and returns at once; ``arrays`` is called in the helper thread."""
        with self._change:
            self._waiting = Offer(arrays, meta, epoch, version)
            self._change.notify_all()

    def failures(self) -> list[str]:
        """Failures to publish since the last call."""
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
        self._thread.join(max(deadline_s - time.monotonic(), _POLL_S))

    def _run(self) -> None:
        while (offer := self._next()) is not None:
            failure: str | None = None
            try:
                self._store.publish(offer.arrays(), offer.meta, offer.epoch, offer.version)
                self.version = offer.version
                self._on_published()
            except (WeightsError, OSError) as error:
                failure = str(error)
            except Exception as error:  # reported by the learner, which goes on with the last good weights
                failure = f"{type(error).__name__}: {error}"
            with self._change:
                self._busy = False
                self._failures += [] if failure is None else [failure]
                self._change.notify_all()

    def _next(self) -> Offer | None:
        with self._change:
            while self._waiting is None:
                if self._closing:
                    return None
                self._change.wait(_POLL_S)
            offer, self._waiting, self._busy = self._waiting, None, True
            return offer
