"""Entry point of a learner that starts before its job is known: ``python -m spreeze.workers.prewarm <descriptor>``.

It imports what every learner needs, waits for its job and descriptors, and then runs ``spreeze.workers.main``. Its
environment variables, threads included, are a learner's from the beginning.
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
"""Descriptors that one message can carry (Linux: 253)."""


def main(argv: list[str]) -> int:
    worker_main.end_with_parent()
    take_name(EARLY)
    leave_to_supervisor()
    with socket.socket(fileno=int(argv[0])) as line:
        for role in ROLES.values():
            for body in role.bodies.values() if role.prewarmed else ():
                worker_main.load(body.module)
        data, fds = receive(line)
    if not data:
        return 0  # no run needs this process
    message = json.loads(data)
    place(fds, message["places"])
    return worker_main.main([message["argument"]])


def receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """One line and the descriptors sent with it; the line is empty if the other end was closed before its end."""
    data, fds, _, _ = socket.recv_fds(line, 65536, MOST_FDS)
    while data and not data.endswith(b"\n"):
        more = line.recv(65536)
        if not more:
            return b"", fds
        data += more
    return data, list(fds)


def place(fds: Sequence[int], places: Sequence[int]) -> None:
    """Moves each descriptor to the number that the job knows it by; standard output and error come first.

    Raises:
        OSError: a number is already in use.
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
