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
