"""Standard output that stays usable: for a person who may be gone, and beside libraries that print from C."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import IO, Any


def silence(stream: IO[Any]) -> None:
    """Sends a stream to nowhere; what is still in its buffer would fail again at the end."""
    with contextlib.suppress(OSError, ValueError):
        send_nowhere(stream.fileno())


def send_nowhere(*fds: int) -> None:
    """Points descriptors at /dev/null: what is written is lost, what is read is at its end.

    Raises:
        OSError: no descriptor is free.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for fd in fds:
            os.dup2(null, fd)
    finally:
        os.close(null)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Points descriptor 1 at descriptor 2 inside the block, so that one JSON document stays one."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # the terminal is gone
            silence(sys.stdout)
        _flush_c_streams()
        os.dup2(saved, 1)
        os.close(saved)


def _flush_c_streams() -> None:
    """Empties libc's buffers: text that Bullet printed would else appear after the block."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
