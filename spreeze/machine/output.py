"""Output for a person who may be gone: a closed terminal, a reader that ended, a full disk.

All that a verb prints goes through here (tables through ``terminal.Screen``): names, states and errors may be those of
a run that came from elsewhere, and a terminal obeys the escapes in them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import IO, Any, TextIO

from spreeze.formatting import printable


def silence(stream: IO[Any]) -> None:
    """Lets all that goes to a stream go nowhere; what is still in its buffer would fail again at the end."""
    with contextlib.suppress(OSError, ValueError):
        send_nowhere(stream.fileno())


def send_nowhere(*fds: int) -> None:
    """Lets all that goes to these descriptors go nowhere; what is read from them is at its end.

    Raises:
        OSError: no descriptor was to be had.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for fd in fds:
            os.dup2(null, fd)
    finally:
        os.close(null)


def emit(document: dict[str, Any]) -> None:
    """Writes the one JSON document; numbers that JSON does not know become null."""
    _write(sys.stdout, json.dumps(_plain(document), indent=1, allow_nan=False) + "\n")


def say(text: str, *, as_json: bool = False) -> None:
    """One line for a person: stdout, or stderr when stdout belongs to the JSON document."""
    _write(sys.stderr if as_json else sys.stdout, text + "\n")


def complain(text: str) -> None:
    """``error: ...``, as one line on stderr."""
    _write(sys.stderr, f"error: {' '.join(text.split())}\n")


def _write(stream: TextIO, text: str) -> None:
    """Writes to a person who may be gone: a closed pipe or a full disk is no reason to stop."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(printable(text).encode(encoding, errors="replace").decode(encoding))
        stream.flush()
    except OSError:
        silence(stream)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
