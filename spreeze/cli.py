"""What all verbs share: errors as one line, one JSON document on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from spreeze.errors import SpreezeError


def guarded(body: Callable[[], int], *, as_json: bool = False) -> int:
    """Runs a verb; an error raised on purpose becomes one line on stderr and its exit code."""
    try:
        return body()
    except SpreezeError as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"error: {line}\n")
        if as_json:
            emit({"error": line})
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        return 0


def emit(document: dict[str, Any]) -> None:
    """Writes the one JSON document; numbers that JSON does not know become null."""
    sys.stdout.write(json.dumps(_plain(document), indent=1, allow_nan=False) + "\n")
    sys.stdout.flush()


def say(text: str, *, as_json: bool = False) -> None:
    """One line for a person: stdout, or stderr when stdout belongs to the JSON document."""
    stream = sys.stderr if as_json else sys.stdout
    stream.write(text + "\n")
    stream.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
