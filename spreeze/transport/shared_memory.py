"""Channels between workers: memory without a name, wakeups for sleeping processes, and handles that jobs carry.

Nothing has to be unlinked, so nothing can leak, whichever process is killed: memory is a sealed memfd on Linux,
elsewhere POSIX shared memory that is unlinked at once. A child inherits the descriptor.

The supervisor creates such a channel and puts its ``handle`` into the job of each worker that takes part, and the
worker attaches to it. What a process inherits follows from its job (``inherited_fds``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib
import math
import mmap
import os
import platform
import secrets
import select
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from spreeze.errors import ResourceError, TransportError
from spreeze.files import anonymous_file
from spreeze.machine.hardware import memory_limits
from spreeze.types import Jsonable


@dataclass(frozen=True, kw_only=True)
class Handle(Jsonable):
    """A channel in a job. Subclasses add further fields that ``attach`` needs."""

    attached_owns: ClassVar[bool] = True  # True if what ``attach`` returns closes these descriptors

    fds: tuple[int, ...]  # descriptors, which have the same numbers in the process that inherits them


def handles(job: Any) -> Iterator[Handle]:
    """Returns all handles in a job, also in nested dataclasses and tuples."""
    if isinstance(job, Handle):
        yield job
    elif isinstance(job, tuple):
        for entry in job:
            yield from handles(entry)
    elif dataclasses.is_dataclass(job):
        for field in dataclasses.fields(job):
            yield from handles(getattr(job, field.name))


def with_own_descriptors(job: Any) -> Any:
    """The job for a worker in the process that created its channels, which closes what it attaches to."""
    if isinstance(job, Handle):
        return dataclasses.replace(job, fds=tuple(map(os.dup, job.fds))) if job.attached_owns else job
    if not any(True for _ in handles(job)):
        return job
    if isinstance(job, tuple):
        return tuple(map(with_own_descriptors, job))
    fields = {field.name: with_own_descriptors(getattr(job, field.name)) for field in dataclasses.fields(job)}
    return dataclasses.replace(job, **fields)


def inherited_fds(job: Jsonable) -> tuple[int, ...]:
    return tuple(sorted({fd for handle in handles(job) for fd in handle.fds}))


def check_room(name: str, size_bytes: int, smaller: str = "the settings that size it") -> None:
    """Raises a ResourceError if less memory is available, by the machine and by its control groups.

    ``smaller`` names the settings that make it smaller.
    """
    if size_bytes > available_bytes():
        raise ResourceError(_no_room(name, size_bytes, smaller))


def _no_room(name: str, size_bytes: int, smaller: str) -> str:
    available = available_bytes()
    return (
        f"{name} needs {size_bytes} bytes of memory ({size_bytes / 2**30:.2f} GiB), {available} are available "
        f"({available / 2**30:.2f} GiB); lower {smaller} or close other programs"
    )


def available_bytes() -> int:
    """Memory available without swapping."""
    return memory_limits().usable_bytes


def _anonymous_memory(name: str) -> int:
    """The descriptor of memory without a name. On macOS such a descriptor can be mapped, but not read or written."""
    if hasattr(os, "memfd_create"):
        return anonymous_file(name)
    posix_memory = importlib.import_module("_posixshmem")  # of multiprocessing
    path = f"/spreeze-{secrets.token_hex(8)}"  # macOS allows 31 letters
    fd = int(posix_memory.shm_open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600))
    posix_memory.shm_unlink(path)
    return fd


def _reserve(fd: int, size_bytes: int) -> None:
    """Allocates the pages now: ``ftruncate`` alone succeeds on a full tmpfs, and the first access is a SIGBUS."""
    if hasattr(os, "memfd_create"):
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    else:
        os.ftruncate(fd, size_bytes)


_LINE_BYTES = 128  # two cache lines, because processors fetch them in pairs
STRONGLY_ORDERED = platform.machine().lower() in ("x86_64", "amd64")
"""True if other processes see the stores of a process in program order, and loads are done in it."""


def memory_fence() -> None:
    """Keeps all loads and stores before it before those after it, on any processor.

    Unlocking stores with C11's release order, locking loads with acquire order. ARMv8 keeps the second behind the first
    (STLR, LDAR), so nothing passes the pair. A new lock each time: nobody else can hold it.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def in_order() -> None:
    """A memory fence for writer and reader: who sees a later store also sees all earlier ones. Free on x86-64."""
    if not STRONGLY_ORDERED:
        memory_fence()


class ArraySpec(NamedTuple):
    """One array of a block."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def size_bytes(self) -> int:
        """Whole pairs of cache lines."""
        return -(-self.data_bytes // _LINE_BYTES) * _LINE_BYTES


class SharedArrays:
    """Mapped shared memory as named arrays, and its descriptor, which this object owns."""

    def __init__(self, fd: int, fields: tuple[ArraySpec, ...]) -> None:
        self.fd, self._map = fd, mmap.mmap(fd, self.size_bytes(fields))
        self._arrays: dict[str, np.ndarray] = {}
        offset = _LINE_BYTES
        for field in fields:
            raw = np.frombuffer(self._map, np.uint8, field.data_bytes, offset)
            self._arrays[field.name] = raw.view(field.dtype).reshape(field.shape)
            offset += field.size_bytes

    @staticmethod
    def size_bytes(fields: tuple[ArraySpec, ...]) -> int:
        """Whole pages, of which the first line holds a fingerprint."""
        return -(-(_LINE_BYTES + sum(field.size_bytes for field in fields)) // mmap.PAGESIZE) * mmap.PAGESIZE

    @classmethod
    def create(
        cls, name: str, fields: tuple[ArraySpec, ...], meaning: str = "", smaller: str = "the settings that size it"
    ) -> SharedArrays:
        """Allocates arrays of zeros, all pages at once, so that no later write fails; ResourceError if too little.

        ``meaning`` is a text that also has to be equal where they are attached; ``smaller`` as for ``check_room``.
        """
        size_bytes = cls.size_bytes(fields)
        check_room(name, size_bytes, smaller)
        fd = _anonymous_memory(name)
        try:
            _reserve(fd, size_bytes)
            arrays, text = cls(fd, fields), _fingerprint(fields, meaning)
            arrays._map[: len(text)] = text
            return arrays
        except OSError as error:
            os.close(fd)
            raise ResourceError(f"{_no_room(name, size_bytes, smaller)} ({error.strerror})") from None

    @classmethod
    def attach(cls, fd: int, fields: tuple[ArraySpec, ...], meaning: str = "") -> SharedArrays:
        """Maps an inherited descriptor, which is owned from now on; a TransportError if it does not hold these."""
        expected = _fingerprint(fields, meaning)
        try:
            with mmap.mmap(fd, len(expected), access=mmap.ACCESS_READ) as head:
                stored = head[:]
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise TransportError(f"descriptor {fd} cannot be attached: {why}") from None
        if stored != expected:
            os.close(fd)
            raise TransportError(f"descriptor {fd} holds other arrays than {', '.join(field.name for field in fields)}")
        return cls(fd, fields)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def in_order(self) -> None:
        """A memory fence (``in_order``), which protocols have between data and counters."""
        in_order()

    def close(self) -> None:
        """Closes mapping and descriptor; arrays that others still hold keep the mapping alive."""
        if self.fd >= 0:
            self._arrays = {}
            with contextlib.suppress(BufferError):
                self._map.close()
            os.close(self.fd)
            self.fd = -1


def _fingerprint(fields: tuple[ArraySpec, ...], meaning: str) -> bytes:
    """Differs between different arrays, and arrays of another meaning."""
    text = "".join(f"{name} {dtype} {list(map(int, shape))}\n" for name, shape, dtype in fields) + meaning
    return hashlib.sha256(text.encode()).digest()


WAIT_S = 0.1  # longest sleep of a worker without a wakeup; it ends for the heartbeat, a stop, or a lost wakeup
_ONE = (1).to_bytes(8, sys.byteorder)  # The increment of an eventfd; a pipe takes any bytes.


@dataclass(frozen=True, kw_only=True)
class WakeupHandle(Handle):
    """Carries a ``Wakeup``: the descriptor to read, then the one to write."""

    attached_owns = False

    def attach(self) -> Wakeup:
        return Wakeup(*self.fds)


class Wakeup:
    """Lets other processes wake one sleeper: an eventfd on Linux, a pipe elsewhere. Notifying never waits.

    A wakeup is only a hint, the counters in shared memory are the truth. The waker stores first, then notifies; the
    sleeper clears its wakeup, then reads the counters. If the waker is killed between the two, the sleeper loses one
    timeout.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.fds = (read_fd, write_fd)
        self._poll = select.poll()
        self._poll.register(read_fd, select.POLLIN)

    @classmethod
    def create(cls) -> Wakeup:
        if hasattr(os, "eventfd"):
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return cls(fd, fd)
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        return cls(read_fd, write_fd)

    @property
    def handle(self) -> WakeupHandle:
        return WakeupHandle(fds=self.fds)

    def notify(self) -> None:
        """Wakes the sleeper, now or at its next wait."""
        with contextlib.suppress(OSError):  # a full pipe has already woken it
            os.write(self.fds[1], _ONE)

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until notified, for at most ``timeout_s``, and clears the wakeup; True if it was notified."""
        if not self._poll.poll(max(0.0, 1000.0 * timeout_s)):
            return False
        with contextlib.suppress(OSError):
            os.read(self.fds[0], 4096)
        return True

    def close(self) -> None:
        for fd in set(self.fds):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = (-1, -1)


def readable(fds: Iterable[int], timeout_s: float) -> list[int]:
    """Descriptors that are readable or closed at the other end; waits at most ``timeout_s`` for the first.

    Not by ``select.select``, which rejects descriptors above 1,023.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, 1000.0 * timeout_s))]
