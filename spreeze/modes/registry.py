"""Modes: which workers, which buffers, which synchronisation. Wiring only, one file a mode."""

from __future__ import annotations

import importlib
from typing import Protocol

from spreeze.run_directory import RunDir
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import Start, spawn
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import Outcome, View

MODES: dict[str, str] = {
    "spreeze": "spreeze.modes.spreeze",
    "serial": "spreeze.modes.serial",
    "hts": "spreeze.modes.hts",
}
"""mode -> module with ``run_mode``; imported when used, so that torch loads only where it is needed."""


class Mode(Protocol):
    """What a mode's module offers."""

    def run_mode(
        self, plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, start: Start = spawn
    ) -> Outcome:
        """Runs to the end, leaves nothing behind; ``start`` begins its workers, where it has any."""


def load_mode(name: str) -> Mode:
    """The module of a mode.

    Raises:
        KeyError: no such mode (the configuration has checked the name before).
    """
    module: Mode = importlib.import_module(MODES[name])
    return module
