"""A run's callbacks: one process each, which gets events from the supervisor and is never waited for.

``CallbackLinks`` is the supervisor's side. The process calls methods on its request, and sends back logged values.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spreeze.envs.families import engine_of
from spreeze.envs.make import parse_args
from spreeze.envs.task import CHANGED_ARGS, merged_args
from spreeze.errors import ConfigError, SpreezeError, described
from spreeze.files import replace_bytes
from spreeze.formatting import clean, is_power_of_ten
from spreeze.inference.user_modules import import_named, is_script
from spreeze.metrics.info_means import MAX_NUMBERS
from spreeze.run_directory import RunDir
from spreeze.runtime import socket_process
from spreeze.runtime.callback import DECLARED, BaseCallback, Logger
from spreeze.runtime.loggers import OPEN_S, Sink, end_all, setting_values
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.socket_process import Send, TakeRow

_METRICS_S = 1.0


class _Link(Sink):
    module = "spreeze.runtime.callback_process"

    def __init__(
        self,
        opening: Mapping[str, Any],
        run_dir: RunDir,
        on_event: Callable[[str, str], None],
        log: str,
        deadline_s: float,
        on_value: Callable[[str, float], None],
    ) -> None:
        self._on_value, self._calls, self.needs_episodes = on_value, "", False  # first: opening reads messages
        super().__init__(opening, run_dir, on_event, log)
        self._limits_s = OPEN_S, deadline_s

    def _take(self, message: dict[str, Any]) -> None:
        super()._take(message)
        self._calls = str(message.get("calls", self._calls))
        self.needs_episodes = bool(message.get("episodes", self.needs_episodes))
        if "value" in message:
            self._on_value(*message["value"])

    def _switch_off(self, why: str) -> None:
        self.needs_episodes = False
        where = f" to {self._calls}" if self._calls and why.startswith("no answer") else ""
        hint = "; callback.deadline_s allows more" if where and not self._calls.endswith("on_training_end") else ""
        super()._switch_off(f"{why}{where}{hint}")


class CallbackLinks:
    """All callbacks of a run."""

    def __init__(self, on_event: Callable[[str, str], None], on_value: Callable[[str, float], None]) -> None:
        self._on_event, self._on_value = on_event, on_value
        self._links: list[_Link] = []
        self._names: set[str] = set()
        self._step, self._next_s, self._updates = 0, 0.0, 0.0

    def start(self, plan: RunPlan, run_dir: RunDir) -> None:
        """Starts the processes of the callbacks that the run was given."""
        for index, text in enumerate(callbacks_of(plan)):
            name, log, deadline_s = f"callback {clean(text, 80)}", f"callback-{index}", plan.config.callback.deadline_s
            opening = {
                "sink": name,
                "callback": text,
                "run_dir": os.path.abspath(run_dir.path),
                "env_id": plan.spec.env_id,
                "algo": plan.config.run.algo,
                "settings": setting_values(plan),
            }
            try:
                self._links.append(_Link(opening, run_dir, self._on_event, log, deadline_s, self._value))
            except OSError as error:
                self._on_event("warning", f"{name} is disabled; the run continues: it was not started: {error}")
        self.call("on_training_start")

    @property
    def needs_episodes(self) -> bool:
        """True if a callback needs each episode."""
        return any(link.needs_episodes for link in self._links)

    def call(self, hook: str, *arguments: Any) -> None:
        """Requests that every callback call a method; does not wait."""
        for link in self._links:
            link.put({"hook": hook, "arguments": arguments, "step": self._step})

    def sample(self, wall_s: float, step: int, values: Mapping[str, float], updates: float) -> None:
        """Takes one sample of all metrics, and the updates in the newest checkpoint."""
        self._step = step
        if not self._links:
            return
        if updates > self._updates:
            self._updates = updates
            self.call("on_checkpoint", int(updates))
        if wall_s >= self._next_s:
            self._next_s = wall_s + _METRICS_S
            self.call("on_metrics", dict(values))
        for link in self._links:
            link.poll()

    def close(self, reason: str, hurry: Callable[[], bool]) -> None:
        """Tells all callbacks that the run ends, and waits for them, for ten seconds each without an answer."""
        self.call("on_training_end", reason)
        end_all(self._links, self._on_event, failed=False, hurry=hurry)

    def _value(self, name: str, value: float) -> None:
        if name in self._names or len(self._names) < MAX_NUMBERS:
            self._names.add(name)
            self._on_value(name, float(value))


def callbacks_of(plan: RunPlan) -> tuple[str, ...]:
    """``MODULE:CLASS`` of each callback that the command line names, or the module of ``--import`` declares."""
    module = plan.config.env.import_module
    declared = () if module is None or not _declares(module) else (f"{module}:{DECLARED}",)
    return (*plan.config.callback.classes, *declared)


def _declares(module: str) -> bool:
    """True if the source of a module contains the word ``CALLBACKS``; it is not imported."""
    try:
        spec = None if is_script(module) else importlib.util.find_spec(module)
        path = Path(module) if is_script(module) else Path((spec and spec.origin) or "")
        return DECLARED in path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ImportError, ValueError):
        return False


def check_callbacks(texts: tuple[str, ...]) -> None:
    """Raises a ConfigError for the first text that is not ``MODULE:CLASS`` or a call of it, or names a missing script.

    It imports nothing.
    """
    for text in texts:
        module, colon, name = text.partition("(")[0].partition(":")
        if not (colon and module and all(part.isidentifier() for part in name.split("."))):
            raise ConfigError(f"--callback {text[:80]!r}: expected MODULE:CLASS, such as my_callbacks:Curriculum")
        if is_script(module) and not Path(module).is_file():
            raise ConfigError(f"--callback {text[:80]!r}: there is no file {module}")


class EnvironmentArguments:
    """Takes a callback's requests for other arguments of the samplers' environments; a resume keeps them."""

    def __init__(self, plan: RunPlan, run_dir: RunDir, on_event: Callable[[str, str], None]) -> None:
        self._plan, self._run_dir, self._on_event = plan, run_dir, on_event
        self.version = int((run_dir.path / CHANGED_ARGS).is_file())
        """Number of changes; samplers make their environments anew when it rises."""

    def poll(self) -> None:
        """Takes a request, if there is one; an invalid one becomes an event."""
        text = self._run_dir.take_request("env-args")
        if text is None:
            return
        try:
            changed = [str(entry) for entry in json.loads(text)]
            if engine_of(self._plan.spec.env_id) is not None:
                raise ValueError("an engine steps several environments at once, whose arguments stay")
            if self._plan.single_env:
                raise ValueError("this environment can exist only once, so its arguments stay")
            parse_args(tuple(changed))
            path = self._run_dir.path / CHANGED_ARGS
            known = json.loads(path.read_text(encoding="utf-8")) if self.version else []
            replace_bytes(path, json.dumps(merged_args(tuple(known), changed)).encode())
        except (OSError, ValueError, TypeError, SpreezeError) as error:
            self._on_event("warning", f"env.args = {clean(text, 80)} was ignored: {error}")
            return
        self.version += 1
        self._on_event("info", f"environments will be recreated with {clean(', '.join(changed), 200)}")


_NICE = 5
_MAX_TEXT = 500


def open_callbacks(text: str) -> list[BaseCallback]:
    """The callbacks of ``MODULE:CLASS``, ``MODULE:CLASS(name=value)`` or ``MODULE:CALLBACKS``, or a ConfigError."""
    module, _, rest = text.partition(":")
    if rest == DECLARED:
        rows = getattr(import_named(module), DECLARED, ())
        callbacks = [row() if isinstance(row, type) else row for row in rows]
        if not all(isinstance(row, BaseCallback) for row in callbacks):
            raise ConfigError(f"{module}: {DECLARED} may only hold subclasses or instances of spreeze.BaseCallback")
        return callbacks
    name, bracket, arguments = rest.partition("(")
    try:
        call: Any = ast.parse(f"f({arguments}" if bracket else "f()", mode="eval").body
        if call.args:
            raise ValueError("an argument without a name")
        keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AttributeError) as error:
        raise ConfigError(f"expected MODULE:CLASS(name=value, ...): {error}") from None
    target: Any = import_named(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    if not (isinstance(target, type) and issubclass(target, BaseCallback)):
        raise ConfigError(f"{module} has no class {name} that is a spreeze.BaseCallback")
    return [target(**keywords)]


def opened(opening: dict[str, Any], send: Send) -> TakeRow:
    """Opens the callbacks that the first row names; each other row calls a method of theirs."""
    callbacks, failures = open_callbacks(opening["callback"]), Counter[tuple[int, str]]()
    for callback in callbacks:
        callback.run_dir, callback.settings = Path(opening["run_dir"]), opening["settings"]
        callback.env_id, callback.algo = opening["env_id"], opening["algo"]
        callback.logger = Logger(lambda name, value: send(value=(name, value)))
    send(episodes=any(type(row).on_episode_end is not BaseCallback.on_episode_end for row in callbacks))

    def call(index: int, hook: str, arguments: list[Any]) -> None:
        """Calls a method; an exception becomes an event."""
        name = f"{type(callbacks[index]).__name__}.{hook}"
        send(calls=name)
        try:
            if getattr(callbacks[index], hook)(*arguments) is False:
                send(event=("info", f"{name} stops the run"))
                callbacks[index].stop()
        except Exception as error:
            failures[index, name] += 1
            if is_power_of_ten(count := failures[index, name]):
                traceback.print_exc()
                times = "" if count == 1 else f" ({count} times so far)"
                send(event=("warning", f"{name} raised {described(error, _MAX_TEXT)}{times}"))

    def take(row: dict[str, Any]) -> None:
        for index, callback in enumerate(callbacks) if "hook" in row else ():
            callback.num_timesteps = row["step"]
            call(index, row["hook"], row["arguments"])

    return take


def main(argv: list[str]) -> None:
    """The process of one callback; ``argv`` has the descriptor of its socket."""
    socket_process.run(argv, opened, nice=_NICE, describe=lambda error: described(error, _MAX_TEXT))


if __name__ == "__main__":
    main(sys.argv[1:])
