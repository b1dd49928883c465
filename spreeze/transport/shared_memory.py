"""What processes share: memory without a name, and wakeups for who sleeps.

Nothing has to be unlinked, so nothing can leak, whoever is killed: memory is a sealed memfd on Linux, elsewhere a
temporary file that is unlinked at once. A child gets the descriptor by inheritance.
"""
from __future__ import annotations

import contextlib
import math
import mmap
import os
import platform
import select
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from spreeze.errors import ResourceError, TransportError

PAGE_BYTES = mmap.PAGESIZE
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


class Block:
    """A mapped piece of shared memory and the descriptor behind it."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Closes mapping and descriptor; arrays that still look into the block keep the mapping alive."""
        if self.fd < 0:
            return
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()
        os.close(self.fd)
        self.fd = -1


def allocate(name: str, size_bytes: int) -> Block:
    """Allocates zeroed shared memory in whole pages, all of it now, so that no later write can fail.

    Raises:
        ResourceError: less memory is available.
    """
    size_bytes = -(-max(size_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
    available = check_room(name, size_bytes)
    fd = nameless_file(name)
    try:
        _reserve(fd, size_bytes)
        return Block(fd, size_bytes)
    except OSError as error:
        os.close(fd)
        raise ResourceError(f"{_no_room(name, size_bytes, available)} ({error.strerror})") from None


def check_room(name: str, size_bytes: int) -> int:
    """Returns the available bytes.

    Raises:
        ResourceError: a block of that size could not be had.
    """
    available = available_bytes()
    if size_bytes > available:
        raise ResourceError(_no_room(name, size_bytes, available))
    return available


def _no_room(name: str, size_bytes: int, available: int) -> str:
    return (
        f"{name} needs {size_bytes} bytes of memory ({size_bytes / 2**30:.2f} GiB), {available} are available "
        f"({available / 2**30:.2f} GiB); lower the replay capacity or close other programs"
    )


def nameless_file(name: str) -> int:
    """The descriptor of an empty file in memory that no other process can find; an OSError if none is left."""
    if sys.platform == "linux":
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        fd, path = tempfile.mkstemp(prefix=f"{name}-")
        with contextlib.suppress(OSError):  # an open file cannot be unlinked on Windows
            os.unlink(path)
        return fd


def _reserve(fd: int, size_bytes: int) -> None:
    """Takes the pages now: ``ftruncate`` alone succeeds on a full tmpfs and the first touch is a SIGBUS."""
    if sys.platform == "linux":
        import fcntl

        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    else:
        os.ftruncate(fd, size_bytes)


def attach(fd: int, size_bytes: int) -> Block:
    """Maps an inherited descriptor; the block owns the descriptor from now on.

    Raises:
        TransportError: no such descriptor, or it is smaller than asked.
    """
    try:
        real = os.fstat(fd).st_size
    except OSError as error:
        raise TransportError(f"descriptor {fd} cannot be attached: {error.strerror}") from None
    if real < size_bytes:
        raise TransportError(f"descriptor {fd} has {real} bytes of shared memory, {size_bytes} are needed")
    return Block(fd, real)


def available_bytes() -> int:
    """Memory that can be had without swapping: of the machine, and of the control group if it is tighter."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file, stat_file in _CGROUP_FILES:
        limit, used = _number(limit_file), _number(used_file)
        if limit is not None and used is not None:
            available = min(available, limit - used + _reclaimable_bytes(stat_file))
    return max(available, 0)


def _number(path: str) -> int | None:
    """The number in a file, or None (no such file, or the word ``max``: no limit)."""
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _reclaimable_bytes(stat_file: str) -> int:
    """File cache that the control group gives back when asked."""
    try:
        for line in Path(stat_file).read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key == "inactive_file":
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


_LINE_BYTES = 64
STRONGLY_ORDERED = platform.machine().lower() in ("x86_64", "amd64")
"""True where stores and loads of one process are seen in program order by the others."""


class ArraySpec(NamedTuple):
    """One array of a block."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Whole cache lines."""
        raw = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return -(-raw // _LINE_BYTES) * _LINE_BYTES


class SharedArrays:
    """A block as named arrays, zero at first; every process that attaches sees the same."""

    def __init__(self, block: Block, fields: tuple[ArraySpec, ...]) -> None:
        self.block = block
        self._arrays: dict[str, np.ndarray] = {}
        offset = _LINE_BYTES
        for field in fields:
            raw = np.frombuffer(block.view, np.uint8, math.prod(field.shape) * np.dtype(field.dtype).itemsize, offset)
            self._arrays[field.name] = raw.view(field.dtype).reshape(field.shape)
            offset += field.size_bytes

    @staticmethod
    def size_bytes(fields: tuple[ArraySpec, ...]) -> int:
        return _LINE_BYTES + sum(field.size_bytes for field in fields)

    @classmethod
    def create(cls, name: str, fields: tuple[ArraySpec, ...]) -> SharedArrays:
        made = cls(allocate(name, cls.size_bytes(fields)), fields)
        np.frombuffer(made.block.view, np.int64, 1)[0] = cls.size_bytes(fields)
        return made

    @classmethod
    def attach(cls, fd: int, fields: tuple[ArraySpec, ...]) -> SharedArrays:
        """Attaches to an inherited descriptor; a TransportError if it is no block of these fields."""
        block = attach(fd, cls.size_bytes(fields))
        found, wanted = int(np.frombuffer(block.view, np.int64, 1)[0]), cls.size_bytes(fields)
        if found != wanted:
            block.close()
            raise TransportError(f"descriptor {fd} holds {found} bytes of arrays, {wanted} are expected")
        return cls(block, fields)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def in_order(self) -> None:
        """What was stored or loaded before is so for everybody who sees what comes after.

        Free on x86-64. Elsewhere writer and reader pass through one lock of the operating system, which the
        kernel releases when its holder dies: who has seen the counter takes it after the writer gave it back.
        """
        if STRONGLY_ORDERED:
            return
        if sys.platform != "win32":
            import fcntl

            fcntl.lockf(self.block.fd, fcntl.LOCK_EX, 1, 0, os.SEEK_SET)
            fcntl.lockf(self.block.fd, fcntl.LOCK_UN, 1, 0, os.SEEK_SET)

    def close(self) -> None:
        self._arrays = {}
        self.block.close()


_ONE = (1).to_bytes(8, sys.byteorder)
"""What an eventfd is told; a pipe takes any bytes."""


class Wakeup:
    """How others wake one sleeper: an eventfd on Linux, a pipe elsewhere. Notifying never waits.

    Counters in shared memory are the truth, a wakeup only a hint. The waker stores first and notifies then; the sleeper
    looks at the counters after it has cleared its wakeup, so none is lost. A waker that is killed between the two costs
    its sleeper one timeout.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.fds = (read_fd, write_fd)
        self._poll = select.poll()
        self._poll.register(read_fd, select.POLLIN)

    @classmethod
    def create(cls) -> Wakeup:
        """A new one; an OSError if no descriptor is left."""
        if sys.platform == "linux":
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return cls(fd, fd)
        else:
            read_fd, write_fd = os.pipe()
            os.set_blocking(read_fd, False)
            os.set_blocking(write_fd, False)
            return cls(read_fd, write_fd)

    def notify(self) -> None:
        """Wakes the sleeper, now or at its next wait."""
        with contextlib.suppress(OSError):  # a full pipe has woken it already
            os.write(self.fds[1], _ONE)

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until somebody notifies, at most ``timeout_s``; True if somebody did. Clears the wakeup."""
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
    """Those of some descriptors that can be read or are closed at the other end; waits for one at most ``timeout_s``.

    Not ``select.select``, which rejects descriptors above 1,023 however many a process may have.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, 1000.0 * timeout_s))]
