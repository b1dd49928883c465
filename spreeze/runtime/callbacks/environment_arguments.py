"""Arguments of the samplers' environments that a callback changes while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable

from spreeze.envs.families import engine_of
from spreeze.envs.make import parse_args
from spreeze.envs.task_source import CHANGED, merged
from spreeze.errors import SpreezeError
from spreeze.formatting import clean
from spreeze.run_directory import RunDir
from spreeze.runtime.plan import RunPlan
from spreeze.transport.files import replace_bytes

REQUEST = "env-args"


class EnvironmentArguments:
    """Takes requests for other arguments; they last over a resume."""

    def __init__(self, plan: RunPlan, run_dir: RunDir, on_event: Callable[[str, str], None]) -> None:
        self._plan, self._run_dir, self._on_event = plan, run_dir, on_event
        self.version = int((run_dir.path / CHANGED).is_file())
        """Number of changes; samplers make their environments anew when it rises."""

    def look(self) -> None:
        """Takes a request, if there is one; a wrong one becomes an event."""
        text = self._run_dir.take_request(REQUEST)
        if text is None:
            return
        try:
            changed = [str(entry) for entry in json.loads(text)]
            self._check(changed)
            path = self._run_dir.path / CHANGED
            known = json.loads(path.read_text(encoding="utf-8")) if self.version else []
            replace_bytes(path, json.dumps(merged(tuple(known), changed)).encode())
        except (OSError, ValueError, TypeError, SpreezeError) as error:
            self._on_event("warning", f"env.args = {clean(text, 80)} was ignored: {error}")
            return
        self.version += 1
        self._on_event("info", f"environments are made anew with {clean(', '.join(changed), 200)}")

    def _check(self, changed: list[str]) -> None:
        if engine_of(self._plan.spec.env_id) is not None:
            raise ValueError("an engine steps several environments at once, whose arguments stay")
        if self._plan.alone:
            raise ValueError("this environment can exist only once, so its arguments stay")
        parse_args(tuple(changed))
