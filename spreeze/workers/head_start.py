"""A learner's process that loads its libraries while the run is still being decided.

They are most of what a short run waits for. The process waits with them until there is a run; then the job and
the descriptors of shared memory reach it over a socket, and all else is as with ``spawn``. It serves the first
learner only: one that is started again is a fresh process.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from typing import Self

from spreeze.processes import held_back, kill_and_wait
from spreeze.rundir import new_nonce
from spreeze.workers.early import MOST_FDS
from spreeze.workers.spawn import Child, Nest, WorkerSpec, child_environment, fresh_process, log_file, spawn

_ROLE = "learner"


class HeadStart:
    """One waiting process, which ends with the ``with`` block unless a worker has taken it."""

    def __init__(self, threads: int, *, wanted: bool = True) -> None:
        """Begins it.

        Args:
            threads: of its libraries.
            wanted: whether there is a process at all; without, every worker is a fresh one.
        """
        self.nonce = new_nonce()
        """Of the run that can use it."""
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        if wanted:
            with contextlib.suppress(OSError):  # a run can do without
                self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the process, while it waits."""
        return self._process.pid if self._process else None

    def close(self) -> None:
        """Ends the process if it still waits; workers are fresh processes from now on."""
        if self._line is not None:
            self._line.close()
        process, self._process = self._process, None
        if process is not None:
            kill_and_wait(process)

    def start(self, spec: WorkerSpec, nest: Nest) -> Child:
        """``spawn``, in the waiting process if there is one for this worker.

        Raises:
            OSError: the worker could not be started.
        """
        return spawn(spec, nest, self._taken if spec.role == _ROLE else fresh_process)

    def _begin(self) -> None:
        self._line, theirs = socket.socketpair()
        with theirs, held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spreeze.workers.early", str(theirs.fileno())], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=True, process_group=0,
                pass_fds=(theirs.fileno(),), env=child_environment(self._threads, self.nonce, _ROLE),
            )

    def _taken(self, argument: str, spec: WorkerSpec, nest: Nest, fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
        """The waiting process with its job, if it fits and lives; else a fresh one. It waits no longer."""
        taken = None
        fits = (spec.threads, nest.nonce) == (self._threads, self.nonce) and len(set(fds)) + 2 <= MOST_FDS
        if fits and self._process is not None and self._line is not None:
            with contextlib.suppress(OSError):  # it has ended
                _hand_over(self._line, argument, spec, nest, fds)
                taken, self._process = self._process, None
        self.close()
        return taken or fresh_process(argument, spec, nest, fds)


def _hand_over(line: socket.socket, argument: str, spec: WorkerSpec, nest: Nest, fds: tuple[int, ...]) -> None:
    with log_file(nest.run_dir, spec.name) as log:
        places = {1: log.fileno(), 2: log.fileno(), **{fd: fd for fd in fds}}
        message = json.dumps({"argument": argument, "places": list(places)}).encode() + b"\n"
        sent = socket.send_fds(line, [message], list(places.values()))
        line.sendall(message[sent:])
