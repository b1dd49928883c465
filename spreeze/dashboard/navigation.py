"""The pages, in the order of the navigation; each is a function ``page`` in a file of its own in ``pages/``."""

from __future__ import annotations

import importlib
from types import ModuleType

TITLES = {
    "live": "Live",
    "autotune": "Autotune",
    "runs": "Runs",
    "compare": "Compare",
    "watch": "Watch",
    "logs": "Logs",
    "about": "About this machine",
}
"""By name, which is also the last part of the page's address; the first page is the one shown unasked."""


def load(name: str) -> ModuleType:
    """The module of one of ``TITLES``."""
    return importlib.import_module(f"spreeze.dashboard.pages.{name}")
