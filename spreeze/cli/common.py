"""What all verbs share: errors as one line, one JSON document on standard output, and nothing but plain text.

All that a verb prints goes through here (tables through ``terminal.Screen``): names, states and errors may be those of
a run that came from elsewhere, and a terminal obeys the escapes in them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from spreeze.errors import SpreezeError
from spreeze.formatting import printable
from spreeze.machine.output import silence


class Parser(argparse.ArgumentParser):
    """Refuses what it cannot read as everything is refused: one line, code 2, a document for ``--json``."""

    _as_json = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As its base; remembers whether ``--json`` was among the arguments."""
        self._as_json = "--json" in (sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """One line; ends with code 2."""
        line = " ".join(f"{message} ({self.prog} --help lists all flags)".split())
        complain(line)
        if self._as_json:
            emit({"error": line})
        sys.exit(2)


def guarded(body: Callable[[], int], *, as_json: bool = False) -> int:
    """Runs a verb; an error raised on purpose becomes one line on stderr and its exit code."""
    try:
        return body()
    except SpreezeError as error:
        line = " ".join(str(error).split())
        complain(line)
        if as_json:
            emit({"error": line})
        return error.exit_code
    except KeyboardInterrupt:
        _write(sys.stderr, "interrupted\n")
        return 130
    except BrokenPipeError:
        return 0


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
