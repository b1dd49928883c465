"""Weights leave the learner through a helper thread: encoding, hashing and writing take no time from updates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from spreeze.errors import WeightsError
from spreeze.transport.weights import WeightsStore

_POLL_S = 0.1


Arrays = Callable[[], dict[str, np.ndarray]]


class _Offer(NamedTuple):
    arrays: Arrays
    meta: dict[str, Any]
    epoch: int
    version: int


class Publisher:
    """Writes what it is offered; at most one offer waits, and a newer one takes its place."""

    def __init__(self, store: WeightsStore, on_published: Callable[[], None] = lambda: None) -> None:
        """Args: ``on_published`` is called in the helper thread when readers can see a new version."""
        self.version = -1
        """The newest version that readers can see; -1 before the first."""
        self._store, self._on_published = store, on_published
        self._change = threading.Condition()
        self._waiting: _Offer | None = None
        self._busy = self._closing = False
        self._failures: list[str] = []
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def offer(self, arrays: Arrays, meta: dict[str, Any], epoch: int, version: int) -> None:
        """Hands over a version and returns at once.

        Args:
            arrays: gives copies that nobody changes any more; called in the helper thread.
            meta: JSON values.
            epoch: of the learner.
            version: updates taken.
        """
        with self._change:
            self._waiting = _Offer(arrays, meta, epoch, version)
            self._change.notify_all()

    def failures(self) -> list[str]:
        """Why versions were not published, since the last call."""
        with self._change:
            found, self._failures = self._failures, []
        return found

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is waiting or being written; False where that took longer."""
        with self._change:
            return self._change.wait_for(lambda: self._waiting is None and not self._busy, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what waits, then ends the thread; a disk that hangs is left to it."""
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
            except Exception as error:  # told by the learner, which goes on with the last good weights
                failure = f"{type(error).__name__}: {error}"
            with self._change:
                self._busy = False
                self._failures += [] if failure is None else [failure]
                self._change.notify_all()

    def _next(self) -> _Offer | None:
        with self._change:
            while self._waiting is None:
                if self._closing:
                    return None
                self._change.wait(_POLL_S)
            offer, self._waiting, self._busy = self._waiting, None, True
            return offer
