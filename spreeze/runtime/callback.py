"""Callbacks: a user's own code that follows a run and steers it, in a process of its own.

    from spreeze import BaseCallback

    class Curriculum(BaseCallback):
        length = 10

        def on_metrics(self, metrics):
            if metrics.get("episode_return", 0.0) > 0.9 * self.length:
                self.length += 10
                self.set("env.args", {"length": self.length})
            self.logger.record("length", self.length)

``--callback my_module:Curriculum`` or ``train(..., callbacks=[Curriculum])`` adds it to a run; so does a module of
``--import`` that names it in ``CALLBACKS``. An exception in a method becomes an event. A method that does not
return in time disables only that callback; the run continues.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spreeze.config.section import value_text
from spreeze.errors import UsageError
from spreeze.run_directory import send_request

CHANGEABLE = ("env.args", "tuning.leave_free")
MAX_TEXT = 900
DECLARED = "CALLBACKS"  # name by which a module of ``--import`` lists its callbacks


class Logger:
    """Takes a callback's own numbers, which become metrics ``callback/NAME``."""

    def __init__(self, send: Callable[[str, float], None]) -> None:
        self._send = send

    def record(self, name: str, value: float) -> None:
        """Logs a number under a name of at most 60 characters.

        Raises:
            UsageError: it is not finite.
        """
        if not math.isfinite(value):
            raise UsageError(f"{name} = {value}: only finite numbers are logged")
        self._send(str(name)[:60], float(value))


class BaseCallback:
    """Base class of callbacks; any of its methods may be overridden.

    A method named ``on_...`` that returns False stops the run.
    """

    run_dir: Path
    env_id: str
    algo: str
    settings: dict[str, Any]  # ``section.field`` -> value
    logger: Logger
    num_timesteps: int = 0  # env steps of the run so far

    def on_training_start(self) -> bool | None:
        """Called first; all attributes are set."""

    def on_metrics(self, metrics: dict[str, float]) -> bool | None:
        """Called once a second with the newest value of each metric (see the table of metrics)."""

    def on_evaluation(self, evaluation: dict[str, Any]) -> bool | None:
        """Called with the fields of ``eval.csv`` and ``success_rate`` after each evaluation.

        Of several learners only evaluations of the best one count, by the newest return of each.
        """

    def on_checkpoint(self, updates: int) -> bool | None:
        """Called when a checkpoint was written after that many updates."""

    def on_episode_end(self, episode: dict[str, Any]) -> bool | None:
        """Called for the episodes that samplers end: ``return``, ``length``, ``success`` (None: unknown), ``sampler``.

        Where episodes end faster than messages are read, some are left out.
        """

    def on_training_end(self, reason: str) -> None:
        """Called last; the run waits ten seconds for it."""

    def save_checkpoint(self) -> None:
        """Requests a checkpoint now."""
        send_request(self.run_dir, "checkpoint")

    def evaluate(self) -> None:
        """Requests an evaluation now."""
        send_request(self.run_dir, "evaluate")

    def stop(self) -> None:
        """Ends the run, as Ctrl-C would."""
        send_request(self.run_dir, "stop")

    def set(self, key: str, value: Any) -> None:
        """Changes a setting while the run goes on.

        Args:
            key: ``env.args`` or ``tuning.leave_free``.
            value: of ``env.args`` a mapping of arguments to the values that change; each environment is made anew with
                them when its episode has ended. Evaluations, and samplers on other hosts, keep the arguments that the
                run was started with.

        Raises:
            UsageError: this setting cannot change, or the value does not fit it.
        """
        if key not in CHANGEABLE:
            raise UsageError(f"{key} cannot change while a run goes on; {' and '.join(CHANGEABLE)} can")
        if key == "tuning.leave_free":
            send_request(self.run_dir, "leave-free", repr(float(value)))
            return
        if not isinstance(value, Mapping) or not all(str(name).isidentifier() for name in value):
            raise UsageError(f"env.args = {value!r}: expected a mapping such as {{'length': 20}}")
        text = json.dumps([f"{name}={value_text(entry)}" for name, entry in value.items()])
        if len(text) > MAX_TEXT:
            raise UsageError(f"env.args of {len(text)} characters: at most {MAX_TEXT} fit")
        send_request(self.run_dir, "env-args", text)
