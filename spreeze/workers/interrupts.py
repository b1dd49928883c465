"""Ctrl-C once, twice; SIGTERM; a closed terminal."""

from __future__ import annotations

import signal
import types
from pathlib import Path
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts requests to stop while the context lasts; never raises from a handler."""

    def __init__(self) -> None:
        self.count = 0
        self.stop_file: Path | None = None
        """A file that asks to stop while it exists: the run's ``control/stop``."""
        self.cause: str | None = None
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._old[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        self.count += 1
        if self.cause is None:
            self.cause = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}.get(signal.Signals(number), "hang-up")

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
        return self.count >= 2
