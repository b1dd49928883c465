"""The process of one callback: calls its methods on the supervisor's request, and sends back logged values."""

from __future__ import annotations

import ast
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from spreeze.errors import ConfigError, described
from spreeze.inference.user_modules import import_named
from spreeze.runtime import socket_process
from spreeze.runtime.callback import DECLARED, BaseCallback, Logger
from spreeze.runtime.socket_process import Send, TakeRow
from spreeze.workers.context import is_power_of_ten

_NICE = 5
_MAX_TEXT = 500


def open_callbacks(text: str) -> list[BaseCallback]:
    """The callback of ``MODULE:CLASS`` or ``MODULE:CLASS(name=value, ...)``; those of ``MODULE:CALLBACKS``.

    A ConfigError if there is no such class, it is no callback, or an argument is no plain value.
    """
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
    callbacks = [_Hooked(callback, opening, send) for callback in open_callbacks(opening["callback"])]
    send(episodes=any(callback.wants_episodes for callback in callbacks))

    def take(row: dict[str, Any]) -> None:
        for callback in callbacks if "hook" in row else ():
            callback.call(row["hook"], row["arguments"], row["step"])

    return take


class _Hooked:
    def __init__(self, callback: BaseCallback, opening: dict[str, Any], send: Send) -> None:
        self._callback, self._send, self._failures = callback, send, Counter[str]()
        callback.run_dir, callback.settings = Path(opening["run_dir"]), opening["settings"]
        callback.env_id, callback.algo = opening["env_id"], opening["algo"]
        callback.logger = Logger(lambda name, value: send(value=(name, value)))
        self.wants_episodes = type(callback).on_episode_end is not BaseCallback.on_episode_end

    def call(self, hook: str, arguments: list[Any], step: int) -> None:
        """Calls a method; an exception becomes an event."""
        name = f"{type(self._callback).__name__}.{hook}"
        self._callback.num_timesteps = step
        self._send(calls=name)
        try:
            if getattr(self._callback, hook)(*arguments) is False:
                self._send(event=("info", f"{name} stops the run"))
                self._callback.stop()
        except Exception as error:
            self._failures[name] += 1
            if is_power_of_ten(self._failures[name]):
                traceback.print_exc()
                times = "" if self._failures[name] == 1 else f" ({self._failures[name]} times so far)"
                self._send(event=("warning", f"{name} raised {described(error, _MAX_TEXT)}{times}"))


def main(argv: list[str]) -> None:
    """The process of one callback; ``argv`` has the descriptor of its socket."""
    socket_process.run(argv, opened, nice=_NICE, describe=lambda error: described(error, _MAX_TEXT))


if __name__ == "__main__":
    main(sys.argv[1:])
