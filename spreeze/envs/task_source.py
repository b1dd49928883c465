"""Makes a sampler's environments, with the constructor arguments that a callback has changed meanwhile."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from spreeze.envs.task import Task, open_task
from spreeze.types import EnvSpec

CHANGED = "env_args.json"
"""File of a run directory: the ``key=value`` texts that have changed, all together."""


class TaskSource:
    """Opens environments of one description; a new ``version`` says that those made before have older arguments."""

    def __init__(self, spec: EnvSpec, run_dir: Path, version: Callable[[], int]) -> None:
        self._spec, self._file, self._version = spec, run_dir / CHANGED, version

    @property
    def version(self) -> int:
        """Number of changes so far; 0: the run's own arguments."""
        return self._version()

    def __call__(self) -> Task:
        """One more environment; errors as ``open_task``, or an OSError where the changes cannot be read."""
        if not self.version:
            return open_task(self._spec)
        changed = json.loads(self._file.read_text(encoding="utf-8"))
        return open_task(dataclasses.replace(self._spec, args=merged(self._spec.args, changed)))


def merged(args: tuple[str, ...], changed: list[str]) -> tuple[str, ...]:
    """``key=value`` texts, of which later ones replace earlier ones of the same key."""
    return tuple({text.partition("=")[0].strip(): text for text in (*args, *changed)}.values())
