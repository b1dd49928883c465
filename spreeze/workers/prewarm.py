"""Where a learner starts that loads before its job is known: ``python -m spreeze.workers.prewarm <descriptor>``.

It loads what every learner needs, waits for its job and the descriptors that belong to it, and is a
``spreeze.workers.main`` from then on. The environment, threads included, is a learner's from the beginning.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from collections.abc import Sequence

from spreeze.machine.processes import EARLY, leave_to_supervisor, take_name
from spreeze.workers import main as worker_main
from spreeze.workers.roles import ROLES

MOST_FDS = 250
"""Descriptors that one message can carry, about (Linux: 253)."""


def main(argv: list[str]) -> int:
    """Loads, waits, then runs the worker body; returns its exit code."""
    worker_main.end_with_parent()
    take_name(EARLY)
    leave_to_supervisor()
    with socket.socket(fileno=int(argv[0])) as line:
        for role in ROLES.values():
            for body in role.bodies.values() if role.prewarmed else ():
                worker_main.load(body.module)
        data, fds = receive(line)
    if not data:
        return 0  # there is no run, or none for this process
    message = json.loads(data)
    place(fds, message["places"])
    return worker_main.main([message["argument"]])


def receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """One line and the descriptors that came with it; no line where the other end was closed before its end."""
    data, fds, _, _ = socket.recv_fds(line, 65536, MOST_FDS)
    while data and not data.endswith(b"\n"):
        more = line.recv(65536)
        if not more:
            return b"", fds
        data += more
    return data, list(fds)


def place(fds: Sequence[int], places: Sequence[int]) -> None:
    """Gives each descriptor the number that the job knows it by; those of standard output and error go first.

    Raises:
        OSError: a number is in use by something else.
    """
    above = max(*places, *fds) + 1
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(aside, places, strict=True):
        if number > 2 and _is_open(number):
            raise OSError(f"descriptor {number} is in use")
        os.dup2(fd, number, inheritable=number <= 2)
        os.close(fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
