"""What the learner hands on at each swap, in files that exist in memory only: two versions, by parity.

One such pair holds the policies of two intervals for actors and executors, another one the learner's whole
state, from which a learner that was killed goes on with the same bits. The sizes are the learner's own
affair; the files belong to the supervisor, so they outlive every worker.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.errors import WeightsError
from spreeze.transport.memory import nameless_file
from spreeze.transport.rollouts import Rollouts
from spreeze.transport.weights import DAMAGE, Weights, decode, encode

ROLLOUTS, LEARNER = "rollouts/", "learner/"
"""Whose a checkpoint's tensors are."""
_HEADER_BYTES = 16


class Parameters:
    """Arrays and facts of intervals j and j + 1; one writer, any number of readers, nobody waits."""

    def __init__(self, fds: tuple[int, int]) -> None:
        self.fds = fds

    @classmethod
    def create(cls) -> Parameters:
        """An empty pair.

        Raises:
            OSError: no descriptor left.
        """
        first = nameless_file("spreeze-parameters")
        try:
            return cls((first, nameless_file("spreeze-parameters")))
        except OSError:
            os.close(first)
            raise

    def write(self, interval: int, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        """Stores what holds for an interval; nothing if that is there already, for somebody may be reading it.

        Raises:
            OSError: no memory left.
        """
        if self._size_bytes(interval) is not None:
            return
        fd = self.fds[interval % 2]
        data = encode(arrays, meta, 0, interval)
        _pwrite(fd, (-1).to_bytes(8, "little", signed=True), 0)
        _pwrite(fd, data, _HEADER_BYTES)
        _pwrite(fd, interval.to_bytes(8, "little") + len(data).to_bytes(8, "little"), 0)

    def read(self, interval: int) -> Weights | None:
        """What holds for an interval, or None: it is not there (yet), or being written."""
        size_bytes = self._size_bytes(interval)
        if size_bytes is None:
            return None
        with contextlib.suppress(*DAMAGE, WeightsError):  # torn: the writer has gone on meanwhile
            found = decode(_pread(self.fds[interval % 2], size_bytes, _HEADER_BYTES), Path("parameters"))
            return found if found.version == interval else None
        return None

    def _size_bytes(self, interval: int) -> int | None:
        """Bytes of what is there for an interval, None if there is nothing."""
        header = os.pread(self.fds[interval % 2], _HEADER_BYTES, 0)
        if len(header) < _HEADER_BYTES or int.from_bytes(header[:8], "little", signed=True) != interval:
            return None
        return int.from_bytes(header[8:], "little")

    def close(self) -> None:
        """Closes the files; the last one to do so frees them."""
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)


@dataclass(frozen=True, kw_only=True)
class Handover:
    """Memory of an on-policy run that outlives its learner."""

    policies: Parameters
    """theta(j) and theta(j+1) as actors read them."""
    states: Parameters
    """Everything the learner begins interval j with, and j + 1."""


def put_back(tensors: dict[str, np.ndarray], state: dict[str, Any], rollouts: Rollouts, handover: Handover) -> None:
    """Puts a checkpoint where executors and learner go on from, before any of them is there.

    Raises:
        CheckpointError: it was saved with other sizes.
        KeyError: it is no checkpoint of an on-policy run.
    """
    def part(name: str) -> dict[str, np.ndarray]:
        return {key.removeprefix(name): array for key, array in tensors.items() if key.startswith(name)}

    interval = int(state["interval"])
    rollouts.restore(part(ROLLOUTS), interval)
    handover.states.write(interval, part(LEARNER), state["learner"])


def _pwrite(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _pread(fd: int, size_bytes: int, offset: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes and (part := os.pread(fd, size_bytes - len(data), offset + len(data))):
        data += part
    return bytes(data)
