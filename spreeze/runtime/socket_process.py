"""The process at the other end of a supervisor's socket: of a metric sink or of a callback."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from spreeze.machine.processes import end_with_parent, ignore_ending_signals

Send = Callable[..., None]
"""Sends fields to the supervisor: ``event`` = (level, text); of a sink ``known`` = names and ids that it gets back when
the run is resumed."""
TakeRow = Callable[[dict[str, Any]], None]  # takes a row; the last one has ``end``


def run(
    argv: list[str],
    opened: Callable[[dict[str, Any], Send], TakeRow],
    *,
    nice: int,
    describe: Callable[[BaseException], str],
) -> NoReturn:
    """Serves the socket until the row that ends it, or a closed end, then ends the process.

    ``argv`` has the descriptor of the socket. ``opened`` takes the first row and returns a function for the others; the
    number done is sent after each. An exception in either is sent as ``failed``, as ``describe`` gives it, and logged.
    """
    end_with_parent()
    ignore_ending_signals()
    with contextlib.suppress(OSError):
        os.nice(nice)
    line, code = socket.socket(fileno=int(argv[0])), 1

    def send(**fields: Any) -> None:
        line.sendall(json.dumps(fields).encode() + b"\n")

    try:
        rows = map(json.loads, line.makefile("rb"))
        take, done, row = opened(next(rows), send), 1, dict[str, Any]()
        while "end" not in row:
            send(done=done)
            row = next(rows, {"end": False})
            take(row)
            done += 1
        send(closed=True)
        code = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            send(failed=describe(error))
        with contextlib.suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()
    finally:
        os._exit(code)  # threads and exit handlers of a user's library may hang
