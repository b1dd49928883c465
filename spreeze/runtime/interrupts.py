"""Ctrl-C once, twice; SIGTERM; a closed terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from spreeze.machine.output import send_nowhere
from spreeze.machine.processes import ENDING

_STANDARD_FDS = (0, 1, 2)


class Interrupts:
    """Counts requests to stop while the context lasts; never raises from a handler.

    SIGHUP does not count: the run goes on when its terminal is closed. Shell and kernel both send it, and logouts and
    batch systems repeat SIGTERM, so only a second Ctrl-C means hurry.
    """

    def __init__(self) -> None:
        self.count = 0  # requests to stop: each Ctrl-C, and SIGTERM once
        self.stop_file: Path | None = None  # asks to stop while it exists (the run's control/stop)
        self.cause: str | None = None
        self.hung_up = False  # the terminal was closed
        self._ctrl_c, self._terminated = 0, False
        self._terminals: list[int] = []
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Determined now: the descriptor of a closed terminal is no longer recognised as one.
        self._terminals = [fd for fd in _STANDARD_FDS if os.isatty(fd)]
        for number in ENDING:
            self._old[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.hung_up = True
            with contextlib.suppress(OSError):
                send_nowhere(*self._terminals)  # printing to a closed terminal would fail
            return
        if number == signal.SIGTERM:
            if self._terminated:
                return
            self._terminated = True
        else:
            self._ctrl_c += 1
        self.count += 1
        self.cause = self.cause or ("SIGTERM" if number == signal.SIGTERM else "Ctrl-C")

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        """Whether to stop in order."""
        return self.count >= 1 or (self.stop_file is not None and self.stop_file.exists())

    def again(self) -> Callable[[], bool]:
        """Tells from now on whether there was another request to stop since, or one to stop at once."""
        before = self.count
        return lambda: self.urgent or self.count > before

    @property
    def urgent(self) -> bool:
        """Whether to stop at once."""
        return self._ctrl_c >= 2
