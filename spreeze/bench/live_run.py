"""A real run, watched from outside through its own shared memory (Linux): for the storm and the soak."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import psutil

from spreeze.errors import SpreezeError
from spreeze.modes.spreeze import board_rows
from spreeze.rundir import read_run
from spreeze.siblings import is_worker
from spreeze.strays import MARK
from spreeze.transport.board import Board
from spreeze.transport.ring import Ring, RingSpec

_START_S = 60.0
_END_S = 60.0
_ORPHAN_S = 5.0


class LiveRun:
    """One ``python -m spreeze.train`` in a session of its own; a context manager that ends it."""

    def __init__(self, arguments: list[str], runs_dir: str, name: str, environment: Mapping[str, str]) -> None:
        self.path = Path(runs_dir) / name
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spreeze.train", *arguments, "--runs-dir", runs_dir, "--name", name, "--json"],
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **environment},
        )
        self.board: Board | None = None
        self.ring: Ring | None = None
        self.rows: dict[str, int] = {}
        """Name of a worker -> its row of the board, once that is mapped."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for memory in (self.board, self.ring):
            if memory is not None:
                memory.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()

    def workers(self) -> dict[str, int]:
        """Name -> process id of the living workers."""
        return {name: child.pid for name, child in self._children().items()}

    def _children(self) -> dict[str, psutil.Process]:
        found: dict[str, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if is_worker(child.name()) and child.status() != psutil.STATUS_ZOMBIE:
                        found[child.name()] = child
        return found

    def attach(self) -> None:
        """Maps the run's board and ring, as a sampler's argument has them.

        Raises:
            SpreezeError: the run ended or did not start in time.
        """
        self.wait(lambda: "sampler-0" in self.workers(), _START_S, "the first sampler's start")
        spec = json.loads(self._children()["sampler-0"].cmdline()[3])
        self.board = Board.attach(self._descriptor(spec["board_fd"]), spec["board_rows"])
        self.ring = Ring.attach(self._descriptor(spec["job"]["ring_fd"]), RingSpec.from_json(spec["job"]["ring"]))
        self.rows = board_rows(self.ring.spec.num_shards)

    def _descriptor(self, number: int) -> int:
        """A descriptor of our own for what the supervisor has open."""
        return os.open(f"/proc/{self.process.pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Polls until the condition is true.

        Raises:
            SpreezeError: the run ended, or the time is over.
        """
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise SpreezeError(f"the run ended while waiting for {what}: {self.last_output()}")
            if time.monotonic() > end:
                raise SpreezeError(f"waited {seconds:.0f} s in vain for {what}")
            time.sleep(0.02)

    def output(self) -> str:
        """What the run wrote so far, at most the last megabyte."""
        size_bytes = os.fstat(self._output.fileno()).st_size
        start = max(0, size_bytes - 1_000_000)
        return os.pread(self._output.fileno(), size_bytes - start, start).decode(errors="replace")

    def last_output(self) -> str:
        """The last line that the run wrote."""
        lines = self.output().strip().splitlines()
        return lines[-1] if lines else "no output"

    def version(self) -> tuple[int, int]:
        """(epoch, version) that the pointer names; (0, 0) while there is none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            pointer = json.loads((self.path / "weights" / "LATEST.json").read_bytes())
            return int(pointer["epoch"]), int(pointer["version"])
        return 0, 0

    def stop(self) -> int:
        """Asks for the end as Ctrl-C does; returns the exit code.

        Raises:
            SpreezeError: it did not end.
        """
        self.process.send_signal(2)
        try:
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            raise SpreezeError(f"the run did not end within {_END_S:.0f} s") from None

    def orphans(self) -> int:
        """Processes that still carry the run's mark 5 s after its end."""
        nonce, end = read_run(self.path).get("nonce"), time.monotonic() + _ORPHAN_S
        while (left := len(marked(MARK, str(nonce)))) and time.monotonic() < end:
            time.sleep(0.1)
        return left


def marked(variable: str, value: str) -> list[int]:
    """Ids of the living processes with this in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
