"""Output for a person who may be gone (a closed terminal, a full disk), and beside libraries that print from C.

All that a verb prints goes through here (tables through ``terminal.Screen``): names, states and errors may be those of
a run that came from elsewhere, and a terminal obeys the escapes in them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, TextIO

from spreeze.formatting import printable


def silence(stream: IO[Any]) -> None:
    """Sends a stream to nowhere; what is still in its buffer would fail again at the end."""
    with contextlib.suppress(OSError, ValueError):
        send_nowhere(stream.fileno())


def send_nowhere(*fds: int) -> None:
    """Points descriptors at /dev/null: what is written is lost, what is read is at its end.

    Raises:
        OSError: no descriptor is free.
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


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Points descriptor 1 at descriptor 2 inside the block, so that one JSON document stays one."""
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
        _flush_c_streams()
        os.dup2(saved, 1)
        os.close(saved)


def _flush_c_streams() -> None:
    """Empties libc's buffers: text that Bullet printed would else appear after the block."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
