"""Output of the commands, which survives a closed terminal, a full disk, and libraries that print from C.

All that a command prints goes through here (tables through ``terminal.Screen``): names, states and errors may belong to
a run from another machine, and a terminal would obey escape sequences in them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, TextIO

from spreeze.formatting import printable


def silence(stream: IO[Any]) -> None:
    """Redirects a stream to /dev/null; the rest of its buffer would fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        send_nowhere(stream.fileno())


def send_nowhere(*fds: int) -> None:
    """Redirects descriptors to /dev/null; an OSError if no descriptor is free."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for fd in fds:
            os.dup2(null, fd)
    finally:
        os.close(null)


def emit(document: dict[str, Any]) -> None:
    """Writes the one JSON document; non-finite numbers become null."""
    _write(sys.stdout, json.dumps(_plain(document), indent=1, allow_nan=False) + "\n")


def say(text: str, *, as_json: bool = False) -> None:
    """Prints one line to stdout, or to stderr if stdout belongs to the JSON document."""
    _write(sys.stderr if as_json else sys.stdout, text + "\n")


def complain(text: str) -> None:
    """Prints ``error: ...`` as one line to stderr."""
    _write(sys.stderr, f"error: {' '.join(text.split())}\n")


def _write(stream: TextIO, text: str) -> None:
    """Writes text; a closed pipe or a full disk only silences the stream."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(printable(text).encode(encoding, errors="replace").decode(encoding))
        stream.flush()
    except OSError:
        silence(stream)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirects descriptor 1 to descriptor 2 inside the block, so that stdout holds the JSON document alone."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # the terminal is gone
            silence(sys.stdout)
        ctypes.CDLL(None).fflush(None)  # text that Bullet printed from C would otherwise appear after the block
        os.dup2(saved, 1)
        os.close(saved)
