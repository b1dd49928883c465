"""Who heeds which signal, and how a process is ended: what a supervisor and its processes share.

A closed window, a logout, ``systemctl stop`` and batch systems signal many processes of a run, or all. Only the
supervisor decides what becomes of it; every other process ends when the supervisor says so, or is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import types
from collections.abc import Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""
DEATH_S = 10.0
"""What a process gets to die after SIGKILL; freeing much memory takes a while."""


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
