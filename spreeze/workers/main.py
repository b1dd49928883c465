"""The entry point of every worker process: ``python -m spreeze.workers.main JOB``, with the job as JSON.

Thread counts come with the environment, before any import; standard output and error already go to the worker's own
log (Bullet prints from C). ``--wait FD`` starts a learner before its job is known: the process imports what every
learner needs and waits at a socket for its job and descriptors.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from spreeze.machine.processes import (
    PREWARM,
    end_with_parent,
    exit_process,
    ignore_ending_signals,
    lower_priority,
    take_name,
)
from spreeze.transport.status_table import StatusHandle
from spreeze.workers.context import WorkerContext, write_error
from spreeze.workers.jobs import Job, ReplayLearnerJob
from spreeze.workers.roles import ROLES, Address, Phase

MAX_FDS = 250  # descriptors that one message can carry (Linux: 253)


def main(argv: list[str]) -> int:
    """Runs one worker body; returns its exit code."""
    if argv[0] == "--wait":
        argument = _wait_for_job(int(argv[1]))
        if argument is None:
            return 0
        argv = [argument]
    spec: dict[str, Any] = json.loads(argv[0])
    _die_with_supervisor(spec["lifeline_fd"], spec["supervisor_pid"])
    ignore_ending_signals()
    address = Address(spec["role"], spec["group"], spec["index"])
    take_name(address.name)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    role = ROLES[address.role]
    lower_priority(role.niceness(gives_way=spec["gives_way"]))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(role.oom_score), encoding="ascii")
    status = StatusHandle.from_json(spec["status"]).attach()
    errors_dir = Path(spec["errors_dir"])
    context = WorkerContext(address, status, spec["row"], spec["message_fd"], errors_dir)
    context.heartbeat(Phase.INIT)
    try:
        job: Job = load_named(spec["job_class"]).from_json(spec["job"])
        for _ in load_named(job.entry_point)(context, job) or ():
            pass
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk must not hide the reason
            traceback.print_exception(error)
        report_failure(context, errors_dir, error)
        return 1
    context.heartbeat(Phase.DONE)
    context.close()
    return 0


def load_named(name: str) -> Any:
    """The class or function ``module:name``; its module is imported."""
    module, _, attribute = name.partition(":")
    return getattr(_load(module), attribute)


def _load(module: str) -> ModuleType:
    """Imports a module without garbage collection, which would take a sixth of torch's import time and find nothing."""
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def _wait_for_job(fd: int) -> str | None:
    """Imports what learners need, then waits for a job; None if no run needs this process."""
    end_with_parent()
    take_name(PREWARM)
    ignore_ending_signals()
    with socket.socket(fileno=fd) as line:
        _load(ReplayLearnerJob.entry_point.partition(":")[0])
        data, fds = receive(line)
    if not data:
        return None
    message = json.loads(data)
    install_fds(fds, message["places"])
    return str(message["argument"])


def receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """One line and the descriptors sent with it; the line is empty if the other end was closed before its end."""
    data, fds, _, _ = socket.recv_fds(line, 65536, MAX_FDS)
    while data and not data.endswith(b"\n"):
        more = line.recv(65536)
        if not more:
            return b"", fds
        data += more
    return data, list(fds)


def install_fds(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Moves each descriptor to the number that the job knows it by, output and error first; an OSError if in use."""
    above = max(*numbers, *fds) + 1
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(aside, numbers, strict=True):
        if number > 2 and os.path.exists(f"/dev/fd/{number}"):
            raise OSError(f"descriptor {number} is in use")
        os.dup2(fd, number, inheritable=number <= 2)
        os.close(fd)


def report_failure(context: WorkerContext, errors_dir: Path, error: BaseException) -> None:
    """Reports to the supervisor why a worker ends, by a file (authoritative) and a message."""
    record = write_error(errors_dir, context.name, error)
    context.send("error", error=record["error"])


def _die_with_supervisor(lifeline_fd: int, supervisor_pid: int) -> None:
    """Ends this process when the supervisor has died in any way, by two means, each of which has a gap.

    The kernel's death signal (Linux only) follows the thread that started this process, and a waiting thread cannot run
    while C code holds the interpreter lock: elsewhere the process then ends as soon as that code returns.
    """
    end_with_parent()
    if os.getppid() != supervisor_pid:
        os._exit(3)

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(lifeline_fd, 1):
                pass
        os._exit(3)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
