"""What a supervisor and its processes share: names, who heeds which signal, how a process is ended.

A closed window, a logout, ``systemctl stop`` and batch systems signal many processes of a run, or all. Only the
supervisor decides what becomes of it; every other process ends when the supervisor says so, or is gone.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

from spreeze.metrics.table import SLOTS

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""
DEATH_S = 10.0
"""What a process gets to die after SIGKILL; freeing much memory takes a while."""
OWN_PREFIX = "spreeze-"
PAGE, EARLY, PROBE = OWN_PREFIX + "page", OWN_PREFIX + "early", OWN_PREFIX + "probe"
"""Names of processes that are no workers: the page's server, a learner that waits for its job, what measures once."""
_LONGEST_NAME_BYTES = 15


def take_name(name: str) -> None:
    """What ``top`` shows instead of python, and what siblings know this process by (Linux; at most 15 letters)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(name.encode("ascii")[:_LONGEST_NAME_BYTES])


def is_worker(process_name: str, role: str | None = None) -> bool:
    """Whether a process of this name (Linux: as ``top`` shows it) is a worker with its job, of this role if any."""
    return process_name.partition("-")[0] in (SLOTS if role is None else (role,))


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Begin processes in this block that call ``leave_to_supervisor``: no signal of ``ENDING`` ends them before.

    They inherit that these are blocked, and are signalled once they listen; so is this process after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_supervisor() -> None:
    """From now on no signal of ``ENDING`` ends this process; those that it starts are as if nothing had been said.

    A handler that does nothing instead of SIG_IGN: ignored signals stay ignored in a program that an environment
    starts, and its ``terminate()`` would then wait for ever.
    """
    for number in ENDING:
        signal.signal(number, _unheard)
        signal.siginterrupt(number, False)
    # Blocked meanwhile: a signal to a fork that has the handler still would be lost.
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_hear_again)
    _unblock()


def _unheard(number: int, frame: types.FrameType | None) -> None:
    """Does nothing."""


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _hear_again() -> None:
    for number in ENDING:
        if signal.getsignal(number) is _unheard:
            signal.signal(number, signal.SIG_DFL)
    _unblock()


def kill_and_wait(process: subprocess.Popen[bytes], within_s: float = DEATH_S) -> int | None:
    """SIGKILL to a process that leads a group and to all of this group, then waits for it.

    Returns:
        Its exit code; None if it does not die in that time: a hung driver or a dead disk holds it in the kernel. No
        instruction of its program is run any more, so whoever asked can go on without it.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        return None


def left_behind(name: str, pid: int) -> str:
    """What to tell of a process for which ``kill_and_wait`` gave None."""
    return f"{name} (process {pid}) does not end on SIGKILL, a hung driver or a dead disk may hold it: left behind"


def main(argv: list[str]) -> None:
    """``NAME MODULE ARGUMENT...``: as ``python -m MODULE ARGUMENT...``, with its name before its first import."""
    take_name(argv[0])
    sys.argv[1:] = argv[2:]
    runpy.run_module(argv[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
