"""Every error that Spreeze raises on purpose. The message is one line: what is wrong, the value, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpreezeError(Exception):
    """Base class of all errors raised on purpose."""

    exit_code = 1


class UsageError(SpreezeError):
    """The request cannot work; rejected before anything was started."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting with an unknown key, a wrong type or a value out of range."""


class EnvironmentError_(UsageError):
    """An environment that cannot be made, or whose spaces no algorithm supports."""


class ResourceError(UsageError):
    """Too little memory, shared memory or disk; the message gives needed and available bytes."""


class RunError(UsageError):
    """A run directory that is missing, damaged, locked by a live run, or already taken."""


class WorkerError(SpreezeError):
    """A worker process failed more often than its restart limit allows."""


class TransportError(SpreezeError):
    """Shared memory whose header does not match what this process expects."""


class WeightsError(SpreezeError):
    """Weights that are damaged, out of order, or made for another network."""


class CheckpointError(SpreezeError):
    """A checkpoint directory has no valid checkpoint, or the state does not fit."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest known word, or an empty string."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean '{names[close[0]]}'?" if close else ""


class BadTransition(SpreezeError):
    """An environment returned a value that cannot be stored."""

    def __init__(self, field: str, value: str, env_id: str = "environment") -> None:
        super().__init__(f"{env_id} returned {field} = {value}")
        self.field, self.value = field, value
