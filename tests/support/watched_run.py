"""A whole run that a test watches while it goes on, and its newest counters."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from spreeze.errors import RunError, SpreezeError
from spreeze.metrics.store import MetricsReader
from spreeze.workers.roles import role_of


class Counters(NamedTuple):
    """What a run had done at one moment of its own clock."""

    t_s: float
    updates: float
    env_steps: float


def counters(path: Path) -> Counters | None:
    """The newest counters that a run wrote; None before the first."""
    try:
        points = MetricsReader(path / "metrics.db").latest()
    except RunError:
        return None
    if not {"updates", "env_steps"} <= set(points):
        return None
    return Counters(points["updates"].t, points["updates"].value, points["env_steps"].value)


def rates(first: Counters, last: Counters) -> tuple[float, float]:
    """(updates, env steps) a second between two moments."""
    seconds = max(last.t_s - first.t_s, 1e-9)
    return (last.updates - first.updates) / seconds, (last.env_steps - first.env_steps) / seconds


FORGIVING = (str(Path(__file__).with_name("forgiving_train.py")),)


class LiveRun:
    """One ``python -m spreeze.train`` in a session of its own; a context manager that ends it."""

    end_s = 60.0
    """A run that was asked to end has so long."""

    def __init__(
        self,
        arguments: list[str],
        runs_dir: str,
        name: str,
        environment: Mapping[str, str],
        before: Sequence[str] = (),
        program: Sequence[str] = ("-m", "spreeze.train"),
    ) -> None:
        """``name`` is that of a new run, or, with ``--resume NAME`` among the arguments, of an earlier one.

        ``before`` begins the command, as ``ip netns exec SPACE`` does. ``program``: ``FORGIVING`` for a run whose
        workers are killed all the time.
        """
        self.path = Path(runs_dir) / name
        named = [] if "--resume" in arguments else ["--name", name]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self.process = subprocess.Popen(
            [*before, sys.executable, *program, *arguments, "--runs-dir", runs_dir, *named, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._output,
            start_new_session=True,
            env={**os.environ, **environment},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()

    def children(self) -> dict[str, psutil.Process]:
        """Name -> process of the living workers."""
        found: dict[str, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if role_of(child.name()) and child.status() != psutil.STATUS_ZOMBIE:
                        found[child.name()] = child
        return found

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

    def await_learning(self, seconds: float) -> None:
        """Waits for the first update.

        Raises:
            SpreezeError: the run ended, or the time is over.
        """
        self.wait(lambda: (now := counters(self.path)) is not None and now.updates > 0, seconds, "the first update")

    def output(self) -> str:
        size_bytes = os.fstat(self._output.fileno()).st_size
        start = max(0, size_bytes - 1_000_000)
        return os.pread(self._output.fileno(), size_bytes - start, start).decode(errors="replace")

    def last_output(self) -> str:
        lines = self.output().strip().splitlines()
        return lines[-1] if lines else "no output"

    def stop(self) -> int:
        """Asks for the end as Ctrl-C does; returns the exit code.

        Raises:
            SpreezeError: it did not end.
        """
        self.process.send_signal(2)
        try:
            return self.process.wait(self.end_s)
        except subprocess.TimeoutExpired:
            raise SpreezeError(f"the run did not end within {self.end_s:.0f} s") from None
