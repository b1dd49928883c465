"""Memory that this process has freed but still holds."""

from __future__ import annotations

import contextlib
import ctypes
import sys


def give_back() -> None:
    """Asks the allocator to return freed memory to the system (glibc; elsewhere nothing happens).

    A checkpoint and a publication that happen to be written at the same moment need some megabytes at once, in
    different heaps, which stay that large for good otherwise: a run of a week would collect all such coincidences.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
