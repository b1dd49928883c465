"""Ctrl-C once, twice; SIGTERM; a closed terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import types
from pathlib import Path
from typing import Any, Self

from spreeze.machine.output import send_nowhere
from spreeze.machine.processes import ENDING

_STANDARD_FDS = (0, 1, 2)


class Interrupts:
    """Counts requests to stop while the context lasts; never raises from a handler.

    SIGHUP is none: a closed terminal lets the run go on. It comes twice, from the shell and from the kernel, and
    logouts and batch systems repeat SIGTERM: only Ctrl-C is pressed a second time because somebody is in a hurry.
    """

    def __init__(self) -> None:
        self.count = 0
        """Requests to stop: each Ctrl-C, and SIGTERM once."""
        self.stop_file: Path | None = None
        """A file that asks to stop while it exists: the run's ``control/stop``."""
        self.cause: str | None = None
        self.hung_up = False
        """The terminal was closed."""
        self._ctrl_c, self._terminated = 0, False
        self._terminals: list[int] = []
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Determined now: a descriptor of a terminal that has gone is no longer recognised as one.
        self._terminals = [fd for fd in _STANDARD_FDS if os.isatty(fd)]
        for number in ENDING:
            self._old[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._hang_up()
            return
        if number == signal.SIGTERM:
            if self._terminated:
                return
            self._terminated = True
        else:
            self._ctrl_c += 1
        self.count += 1
        self.cause = self.cause or ("SIGTERM" if number == signal.SIGTERM else "Ctrl-C")

    def _hang_up(self) -> None:
        """Discards further output: printing to a terminal that is gone would fail."""
        self.hung_up = True
        with contextlib.suppress(OSError):
            send_nowhere(*self._terminals)

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        """Stop, and leave everything in order."""
        return self.count >= 1 or (self.stop_file is not None and self.stop_file.exists())

    @property
    def urgent(self) -> bool:
        """Stop now."""
        return self._ctrl_c >= 2
