"""Wakeups: how one process wakes another that sleeps. A counter in shared memory is the truth, a wakeup only a hint.

The waker stores first and rings then; the sleeper looks at the counters after it has cleared its wakeup,
so no ring is lost. A waker that is killed between the two costs its sleeper one timeout.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterable


class Wakeup:
    """One sleeper's wakeup: an eventfd on Linux, a pipe elsewhere. Ringing never waits."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.fds = (read_fd, write_fd)
        self._poll = select.poll()
        self._poll.register(read_fd, select.POLLIN)

    @classmethod
    def create(cls) -> Wakeup:
        """A new one.

        Raises:
            OSError: no descriptor left.
        """
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
        with contextlib.suppress(OSError):  # a full pipe has rung already
            os.write(self.fds[1], _ONE)

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until somebody rings, at most ``timeout_s``; True if somebody did. Clears the wakeup."""
        if not self._poll.poll(max(0.0, 1000.0 * timeout_s)):
            return False
        with contextlib.suppress(OSError):
            os.read(self.fds[0], 4096)
        return True

    def close(self) -> None:
        """Closes the descriptors."""
        for fd in set(self.fds):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = (-1, -1)


def readable(fds: Iterable[int], timeout_s: float) -> list[int]:
    """Those of some descriptors that can be read or are closed at the other end; waits for one at most ``timeout_s``.

    Not ``select.select``, which refuses descriptors above 1,023 however many a process may have.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, 1000.0 * timeout_s))]


_ONE = (1).to_bytes(8, sys.byteorder)
"""What an eventfd is told; a pipe takes any bytes."""
