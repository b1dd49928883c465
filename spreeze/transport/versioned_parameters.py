"""What the learner hands on at each swap, in files that exist in memory only: two versions, by parity.

One such pair holds the policies of two intervals for actors and executors, another one the learner's whole
state, from which a learner that was killed goes on with the same bits. The sizes are the learner's own
affair; the files belong to the supervisor, so they outlive every worker.

A file begins with its interval, stored last by the writer and looked at again by the reader; what a writer that was
killed has left unfinished counts as nothing. There are no checksums: nobody else has these files.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from spreeze.transport.rollouts import Rollouts
from spreeze.transport.shared_memory import nameless_file

ROLLOUTS, LEARNER = "rollouts/", "learner/"
"""Whose a checkpoint's tensors are."""
_HEADER_BYTES = 16
_NOTHING = -1
"""In place of an interval while something is being written."""


class StoredParameters(NamedTuple):
    """What holds for an interval."""

    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]


class VersionedParameters:
    """Arrays and facts of intervals j and j + 1; one writer, any number of readers, nobody waits."""

    def __init__(self, fds: tuple[int, int]) -> None:
        self.fds = fds

    @classmethod
    def create(cls) -> VersionedParameters:
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
        if self._facts_bytes(interval) is not None:
            return
        fd = self.fds[interval % 2]
        own = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        facts = json.dumps({"meta": meta, "arrays": [[name, array.dtype.str, array.shape]
                                                     for name, array in own.items()]}).encode()
        parts: list[bytes | memoryview] = [facts, *(array.reshape(-1).view(np.uint8).data for array in own.values())]
        _pwrite(fd, _header(_NOTHING, 0), 0)
        offset = _HEADER_BYTES
        for data in parts:
            _pwrite(fd, data, offset)
            offset += len(data)
        _pwrite(fd, _header(interval, len(facts)), 0)

    def read(self, interval: int) -> StoredParameters | None:
        """What holds for an interval, in arrays of its own, or None: it is not there (yet), or being written."""
        facts_bytes = self._facts_bytes(interval)
        if facts_bytes is None:
            return None
        fd = self.fds[interval % 2]
        facts = _pread(fd, facts_bytes, _HEADER_BYTES)
        if self._facts_bytes(interval) is None:  # the writer has gone on meanwhile
            return None
        described = json.loads(facts)
        arrays, offset = {}, _HEADER_BYTES + facts_bytes
        for name, dtype, shape in described["arrays"]:
            data = _pread(fd, math.prod(shape) * np.dtype(dtype).itemsize, offset)
            arrays[name] = np.frombuffer(data, dtype).reshape(shape)
            offset += len(data)
        return None if self._facts_bytes(interval) is None else StoredParameters(arrays, described["meta"])

    def _facts_bytes(self, interval: int) -> int | None:
        """Length of the description of what is there for an interval, None if there is nothing."""
        header = os.pread(self.fds[interval % 2], _HEADER_BYTES, 0)
        return None if header[:8] != _header(interval, 0)[:8] else int.from_bytes(header[8:], "little")

    def close(self) -> None:
        """Closes the files; the last one to do so frees them."""
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)


@dataclass(frozen=True, kw_only=True)
class Handover:
    """Memory of an on-policy run that outlives its learner."""

    policies: VersionedParameters
    """theta(j) and theta(j+1) as actors read them."""
    states: VersionedParameters
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


def _header(interval: int, facts_bytes: int) -> bytes:
    return interval.to_bytes(8, "little", signed=True) + facts_bytes.to_bytes(8, "little")


def _pwrite(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _pread(fd: int, size_bytes: int, offset: int) -> bytearray:
    """That many bytes, or zeros where the file ends."""
    data = bytearray(size_bytes)
    view = memoryview(data)
    while view and (count := os.preadv(fd, [view], offset)):
        view, offset = view[count:], offset + count
    return data
