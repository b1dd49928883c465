"""From a mode's declaration (``spreeze.config.modes``) to the module that runs it."""

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
    """Interface of a mode's module."""

    def run_mode(
        self, plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH
    ) -> Outcome:
        """Runs to the end and releases everything; ``launcher`` starts the workers, if there are any."""


def load_mode(mode: Mode) -> ModeModule:
    """Imports the module of a mode, only when needed, since it may load torch."""
    module: ModeModule = importlib.import_module(mode.module)
    return module
