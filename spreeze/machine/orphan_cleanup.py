"""Ends processes that an environment has started and left behind.

A signal to a worker's group misses a process that began its own session, and a killed supervisor sends no signals at
all. So every process of a run carries the run's nonce in its environment, and a small watcher, which briefly outlives
the supervisor, kills every process that still carries it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from spreeze.machine.processes import DEATH_S, ENDING, held_back

MARK = "SPREEZE_RUN"
"""Environment variable with the run's nonce."""
_SWEEP_S = 0.1
_SWEEPS = 50
_CALM = 3
"""Sweeps in a row that must find nothing: a process that was just being forked may appear late."""


def end_orphans(nonce: str) -> int:
    """Kills every other process that carries the run's mark; returns their number."""
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == nonce:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                process.kill()
                count += 1
    return count


class OrphanWatch:
    """The watcher, which acts if this process ends between ``start`` and ``end``."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the watcher; if no process can be started, the run goes on without it."""
        root = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        with contextlib.suppress(OSError), held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spreeze.machine.orphan_cleanup", self._nonce], stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "PYTHONPATH": paths, MARK: ""},
            )

    def end(self) -> None:
        """Kills what is left of the run, and the watcher."""
        end_orphans(self._nonce)
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(DEATH_S)
            if self._process.stdin is not None:
                self._process.stdin.close()


def main(argv: list[str]) -> int:
    """``NONCE``: waits until the end of the supervisor closes standard input, then sweeps."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    calm = 0
    for _ in range(_SWEEPS):
        calm = 0 if end_orphans(argv[0]) else calm + 1
        if calm == _CALM:
            break
        time.sleep(_SWEEP_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
