"""Exceptions of Spreeze. Messages are one line: what is wrong, the value, the remedy."""

from __future__ import annotations

import difflib
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path


class SpreezeError(Exception):
    """Base class of all exceptions of Spreeze."""

    exit_code = 1


class UsageError(SpreezeError):
    """An invalid request, rejected before anything was started."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting with an unknown key, a wrong type or a value out of range."""


class EnvError(UsageError):
    """An environment that cannot be constructed, or with unsupported spaces."""


class ResourceError(UsageError):
    """Not enough memory, shared memory or disk; the message has needed and available bytes."""


class RunError(UsageError):
    """A run directory that is missing, damaged, locked by a live run, or already taken."""


class WorkerError(SpreezeError):
    """A worker process failed more often than its restart limit allows."""


class TransportError(SpreezeError):
    """Shared memory whose header does not match what this process expects."""


class WeightsError(SpreezeError):
    """Weights that are damaged, out of order, or made for another network."""


class HubError(SpreezeError):
    """A model hub could not be reached, or refused the request."""


class CheckpointError(SpreezeError):
    """A checkpoint directory has no valid checkpoint, or the state does not fit."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest known word, or an empty string."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean '{names[close[0]]}'?" if close else ""


def first_true(reasons: Mapping[str, object]) -> str | None:
    """The first text whose value is true; None if there is none."""
    return next((text for text, value in reasons.items() if value), None)


def refuse_newer(version: object, newest: int, file: object, error: type[SpreezeError]) -> None:
    """Raises ``error`` for a file whose format number is above ``newest``; a file without one has format 1."""
    if version is not None and (not isinstance(version, int) or version > newest):
        number = version if isinstance(version, int) else f"of type {type(version).__name__}"
        raise error(f"{file} has format {number}; this version of Spreeze reads {newest} at most: update Spreeze")


class BadTransition(SpreezeError):
    """An invalid value returned by an environment."""

    def __init__(self, field: str, value: str, env_id: str = "environment") -> None:
        super().__init__(f"{env_id} returned {field} = {value}")
        self.field, self.value = field, value


_LONGEST_LINE = 100
_OWN_FOLDER = f"{Path(__file__).parent}/"
_LIBRARIES = tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))
_PACKAGES = tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def described(error: BaseException, limit: int = 300) -> str:
    """An exception in one line: its class, its message, and the line of user code that raised it.

    The location is ``file:line``, relative to the import folder. The source line follows if the message has less than
    two words: ``AssertionError (my_env.py:9: assert speed < 5)``. Errors of this package have none.
    """
    try:
        text = " ".join(str(error).split())
    except Exception as failure:
        text = f"its message cannot be formatted: {type(failure).__name__}"
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    location = error_place(error, with_line=len(text.split()) < 2)
    return line[:limit] + (f" ({location})" if location else "")


def error_place(error: BaseException, *, with_line: bool = False) -> str | None:
    """Returns the ``file:line`` in user code that raised an exception; None without user code.

    That is the innermost frame outside this package, Python's own library and installed packages; without such a frame,
    the innermost frame of an installed package other than Gymnasium.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    users = [frame for frame in frames if is_users(frame.filename)]
    gymnasium = tuple(f"{folder}/gymnasium/" for folder in _PACKAGES)
    others = [frame for frame in frames if not frame.filename.startswith(_OWN_FOLDER)]
    installed = [frame for frame in others if frame.filename.startswith(_PACKAGES)]
    candidates = [*(frame for frame in installed if not frame.filename.startswith(gymnasium)), *users]
    if not candidates:
        return None
    frame = candidates[-1]
    location = f"{importable_path(frame.filename)}:{frame.lineno}"
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{location}: {line[:_LONGEST_LINE]}" if with_line and line else location


def is_users(filename: str) -> bool:
    """True if a source file belongs to neither this package, Python's own library, nor an installed package."""
    return not filename.startswith((_OWN_FOLDER, *_LIBRARIES, *_PACKAGES))


def importable_path(filename: str) -> str:
    """A source file's path from the folder in which Python found it: ``my_package/my_env.py``."""
    folders = (f"{folder.rstrip('/')}/" for folder in sys.path if folder)
    return filename[max((len(folder) for folder in folders if filename.startswith(folder)), default=0) :]
