"""The process at the other end of a supervisor's socket: of a metric sink or of a callback."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import traceback
from collections.abc import Callable
from typing import NoReturn

from spreeze.machine.processes import end_with_parent, leave_to_supervisor


def run(
    argv: list[str], serve: Callable[[socket.socket], None], *, nice: int, describe: Callable[[BaseException], str]
) -> NoReturn:
    """Serves the socket until that ends, then ends the process.

    Args:
        argv: the descriptor of the socket.
        serve: reads rows from the socket and answers them; what it raises is sent as ``failed`` and logged.
        nice: niceness of the process.
        describe: the text of ``failed`` for an exception.
    """
    end_with_parent()
    leave_to_supervisor()
    with contextlib.suppress(OSError):
        os.nice(nice)
    line, code = socket.socket(fileno=int(argv[0])), 1
    try:
        serve(line)
        code = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            line.sendall(json.dumps({"failed": describe(error)}).encode() + b"\n")
        with contextlib.suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()
    finally:
        os._exit(code)  # threads and exit handlers of a user's library may hang
