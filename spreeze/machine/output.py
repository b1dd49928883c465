"""Output for a person who may be gone: a closed terminal, a reader that ended, a full disk."""

from __future__ import annotations

import contextlib
import os
from typing import IO, Any


def silence(stream: IO[Any]) -> None:
    """Lets all that goes to a stream go nowhere; what is still in its buffer would fail again at the end."""
    with contextlib.suppress(OSError, ValueError):
        send_nowhere(stream.fileno())


def send_nowhere(*fds: int) -> None:
    """Lets all that goes to these descriptors go nowhere; what is read from them is at its end.

    Raises:
        OSError: no descriptor was to be had.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for fd in fds:
            os.dup2(null, fd)
    finally:
        os.close(null)
