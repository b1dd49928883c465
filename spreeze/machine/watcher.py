"""The watcher: a small process that ends a run's processes once their supervisor has ended or no longer responds."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from spreeze.config import python_path
from spreeze.machine.processes import (
    DEATH_S,
    ENDING,
    MARK,
    WATCHER,
    end_orphans,
    is_stopped,
    signals_blocked,
    take_name,
)

NOTICED, _TICK = 0, 255
"""Bytes that the watcher reads besides signal numbers: a second Ctrl-C was handled; the process made progress."""
_INTERRUPT_S = 1.5  # Time for Python code to handle a second Ctrl-C, before the watcher ends the process.
_CHECK_S = 0.5  # Interval at which the watcher checks a process that ticks or was interrupted.
_SWEEP_S = 0.1
_SWEEPS = 50
_EMPTY_SWEEPS = 3  # Sweeps in a row that must find nothing: a process that was just being forked may appear late.


class OrphanWatch:
    """The watcher, which acts if this process ends within the ``with`` block."""

    def __init__(self, nonce: str, folder: Path | None = None, *, silent_s: float | None = None) -> None:
        """The watcher also removes a ``folder`` that the process would have removed itself.

        Without a ``tick`` for ``silent_s`` it kills this process, after SIGUSR1, so that it may write its stack.
        """
        self._nonce, self._folder, self._silent_s = nonce, folder, silent_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Starts the watcher; if no process can be started, the run continues without it."""
        code, folder = f"from {__name__} import watch; watch()", [] if self._folder is None else [str(self._folder)]
        with contextlib.suppress(OSError), signals_blocked():
            command = [sys.executable, "-c", code, self._nonce, str(self._silent_s or 0.0), *folder]
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
            streams["stderr"] = subprocess.DEVNULL
            env = {**os.environ, "PYTHONPATH": python_path(), MARK: ""}
            self._process = subprocess.Popen(command, start_new_session=True, env=env, **streams)
        return self

    def receive_signals(self) -> None:
        """Passes each signal that this process handles to the watcher, even while this process is busy."""
        if self._process is not None and self._process.stdin is not None:
            fd = self._process.stdin.fileno()
            os.set_blocking(fd, False)
            signal.set_wakeup_fd(fd, warn_on_full_buffer=False)

    def notify(self, byte: int) -> None:
        """Writes a byte to the watcher; never blocks."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._process.stdin.fileno(), bytes([byte]))

    def tick(self) -> None:
        """Notifies the watcher of progress, if it monitors this process (``silent_s``)."""
        if self._silent_s is not None:
            self.notify(_TICK)

    def __exit__(self, *exc: object) -> None:
        """Kills the remaining processes of the run, and the watcher."""
        end_orphans(self._nonce)
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(DEATH_S)
            if self._process.stdin is not None:
                self._process.stdin.close()


def watch() -> None:
    """The watcher: waits until the end of the supervisor closes standard input, then sweeps."""
    take_name(WATCHER)
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    guard = _Guard(os.getppid(), float(sys.argv[2]))
    while not select.select([0], [], [], guard.wait_s())[0] or guard.receive(os.read(0, 4096)):
        guard.check()
    empty_sweeps = 0
    for _ in range(_SWEEPS):
        empty_sweeps = 0 if end_orphans(sys.argv[1]) else empty_sweeps + 1
        if empty_sweeps == _EMPTY_SWEEPS:
            break
        time.sleep(_SWEEP_S)
    for folder in sys.argv[3:]:
        import shutil  # a worker imports this module before it takes its name

        shutil.rmtree(folder, ignore_errors=True)


class _Guard:
    """Ends the supervisor where it cannot end itself, because some code blocks it and lets no other code run."""

    def __init__(self, supervisor: int, silent_s: float) -> None:
        self._supervisor, self._silent_s = supervisor, silent_s
        self._interrupts = 0
        self._interrupted_s: float | None = None
        self._checked_s = time.monotonic()
        self._ticked_s = self._checked_s if silent_s else None

    def wait_s(self) -> float | None:
        """The longest time until the next check; None: until data arrives."""
        return None if self._interrupted_s is None and self._ticked_s is None else _CHECK_S

    def receive(self, data: bytes) -> bytes:
        now_s = time.monotonic()
        for byte in data:
            self._interrupts += byte == signal.SIGINT
            if byte == NOTICED:
                self._interrupted_s = None
            elif byte == _TICK:
                self._ticked_s = now_s
            elif byte == signal.SIGINT and self._interrupts >= 2:
                self._interrupted_s = self._interrupted_s or now_s
        return data

    def check(self) -> None:
        """Ends the supervisor if it ignored a second Ctrl-C, or if it has not ticked for too long."""
        now_s = time.monotonic()
        # This process or the supervisor did not run in the meantime.
        if now_s - self._checked_s > 4 * _CHECK_S or is_stopped(self._supervisor):
            self._ticked_s = self._ticked_s and now_s
            self._interrupted_s = self._interrupted_s and now_s
        self._checked_s = now_s
        if self._interrupted_s is not None and now_s - self._interrupted_s > _INTERRUPT_S:
            self._kill()
        elif self._silent_s and self._ticked_s is not None and now_s - self._ticked_s > self._silent_s:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._supervisor, signal.SIGUSR1)
            time.sleep(_CHECK_S)
            self._kill()

    def _kill(self) -> None:
        if os.getppid() == self._supervisor:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._supervisor, signal.SIGKILL)
        self._interrupted_s = self._ticked_s = None
