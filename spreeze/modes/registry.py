"""From a mode's declaration (``spreeze.config.modes``) to the module that runs it. Wiring only, one file a mode."""

from __future__ import annotations

import importlib
from typing import Protocol

from spreeze.config.modes import Mode
from spreeze.run_directory import RunDir
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import Outcome, View


class ModeModule(Protocol):
    """What a mode's module offers."""

    def run_mode(
        self, plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH
    ) -> Outcome:
        """Runs to the end, leaves nothing behind; ``launcher`` starts its workers, where it has any."""


def load_mode(mode: Mode) -> ModeModule:
    """The module of a mode; imported only now, so that torch loads only where it is needed."""
    module: ModeModule = importlib.import_module(mode.module)
    return module
