"""Worker processes that run only to be measured: paused while others are, watched, and ended without a trace."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from spreeze.errors import WorkerError
from spreeze.rundir import SUBDIRECTORIES
from spreeze.strays import StrayWatch
from spreeze.transport.board import Board
from spreeze.workers.crew import Crew, private_memory_bytes
from spreeze.workers.interrupts import Interrupts
from spreeze.workers.spawn import Nest, WorkerSpec

_MOST_FAILURES = 1
_LOOK_S = 0.05
_MEMORY_EVERY_S = 0.25
_PREFIX = "spreeze-tune-"


class Window(NamedTuple):
    """What was counted in one window."""

    env_steps_per_s: float
    updates_per_s: float
    cpu_share: float
    """Processor time of all workers over that of the usable cores."""


class Unfit(Exception):
    """These settings cannot run here; the text says why. Data for the tuner, not an error."""


class Troupe:
    """Some workers on a board; nothing of them is left after the stack that they were started on has closed."""

    def __init__(
        self, stack: contextlib.ExitStack, run_dir: Path, board: Board, rows: int, *, shared_bytes: int,
        memory_cap_bytes: int, interrupts: Interrupts,
    ) -> None:
        """Starts nobody yet.

        Args:
            stack: ends the workers when it closes, before what was put on it earlier.
            run_dir: where their logs go.
            board: their slots and heartbeats.
            rows: of the board.
            shared_bytes: shared memory that counts as theirs.
            memory_cap_bytes: what all of it may take.
            interrupts: the user's wish to stop.
        """
        nonce = secrets.token_hex(8)
        watch = StrayWatch(nonce)
        stack.callback(watch.end)
        watch.start()
        nest = Nest(run_dir=run_dir, board_fd=board.block.fd, board_rows=rows, nonce=nonce)
        self._crew = Crew(nest, board, on_event=lambda level, text: None)
        stack.callback(self._crew.stop, hurry=lambda: True, on_messages=lambda messages: None)
        self._shared_bytes, self._cap_bytes, self._interrupts = shared_bytes, memory_cap_bytes, interrupts
        self.memory_bytes: int | None = None
        """Most that all of it took: private memory of the processes, and what they share."""
        self._looked_s = 0.0

    def add(self, spec: WorkerSpec) -> None:
        """Starts a worker and returns at once.

        Raises:
            OSError: it cannot be started.
        """
        self._crew.add(spec)

    def why(self) -> str:
        """The first error that a worker reported."""
        return ": ".join(self._crew.first_error) if self._crew.first_error else "no worker reported an error"

    def pause(self) -> None:
        """Stops all processes where they are."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for post in self._crew.posts.values():
            if post.child is not None:
                post.child.signal_group(number)

    def cpu_s(self) -> float:
        """Processor time of all so far."""
        total = 0.0
        for pid in self._crew.pids().values():
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
        return total

    def pass_time(self, seconds: float) -> None:
        """Lets time pass, with an eye on the workers; raises as ``look`` does."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.look(min(left, _LOOK_S))

    def look(self, seconds: float = _LOOK_S) -> None:
        """Waits, then sees to workers, memory and the user's wish to stop.

        Raises:
            Unfit: a worker keeps failing, or too much memory is taken.
            KeyboardInterrupt: the user asked to stop.
        """
        self._crew.wait(seconds)
        if self._interrupts.asked:
            raise KeyboardInterrupt
        try:
            self._crew.watch()
        except WorkerError as error:
            raise Unfit(str(error)) from None
        failures = [len(post.failures) for post in self._crew.posts.values() if post.spec.role != "learner"]
        if self._crew.posts["learner"].failures or sum(failures) > _MOST_FAILURES:
            raise Unfit(self.why())
        now = time.monotonic()
        if now - self._looked_s >= _MEMORY_EVERY_S:
            self._looked_s = now
            taken = self._taken_bytes()
            self.memory_bytes = max(taken, self.memory_bytes or 0)
            if taken > self._cap_bytes:
                raise Unfit(f"out of memory: more than the {self._cap_bytes / 1e9:.1f} GB that a candidate may take")

    def _taken_bytes(self) -> int:
        total = self._shared_bytes
        for pid in self._crew.pids().values():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                total += sum(private_memory_bytes(one.pid) or 0 for one in (process, *process.children(recursive=True)))
        return total


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A run directory that is removed afterwards; also removes those that a killed tuner left."""
    remove_leftovers()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as path:
        for sub in SUBDIRECTORIES:
            (Path(path) / sub).mkdir()
        yield Path(path)


def remove_leftovers() -> None:
    """Removes what tuners left behind that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and not psutil.pid_exists(int(pid)) and path.stat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)
