"""Keeps a verb's standard output clean of what environments print from C."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

from spreeze.machine.output import silence


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
