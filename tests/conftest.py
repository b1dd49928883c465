"""Every test is followed by a leak check: shared memory, processes, file descriptors."""

import os
import time

import psutil
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
_HAS_SHM = os.path.isdir("/dev/shm")


def _shared_memory() -> set[str]:
    """Names in shared memory, but for multiprocessing's semaphores: a neighbour's, Spreeze makes none."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")} if _HAS_SHM else set()


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _descriptors() -> set[str]:
    """Open descriptors that could leak: memory files, pipes and files of a run."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(("/memfd:spreeze", "pipe:", "anon_inode:[pidfd]")) or "/runs/" in target:
            found.add(f"{fd} -> {target}")
    return found


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fails a test that leaves shared memory, processes or descriptors behind."""
    before = _shared_memory(), _children(), _descriptors()
    yield
    deadline = time.monotonic() + 5.0
    while True:
        left = (_shared_memory() - before[0], _children() - before[1], _descriptors() - before[2])
        if not any(left):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: shared memory {left[0]}, processes {left[1]}, descriptors {left[2]}")
        os.sched_yield()
