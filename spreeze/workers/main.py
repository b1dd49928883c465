"""The entry point of every worker process: ``python -m spreeze.workers.main <job>``.

The job is one JSON argument. Thread counts come with the environment, before any import; standard
output and error already go to the worker's own log (Bullet prints from C).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from spreeze.machine.processes import leave_to_supervisor, take_name
from spreeze.metrics.table import Phase
from spreeze.transport.status_table import StatusTable
from spreeze.workers.context import WorkerContext
from spreeze.workers.roles import BODIES, ROLES, Address, Role
from spreeze.workers.sampler_stats import write_error

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Runs one worker body; returns its exit code."""
    spec: dict[str, Any] = json.loads(argv[0])
    _die_with_supervisor(spec["lifeline_fd"], spec["supervisor_pid"])
    leave_to_supervisor()
    address = Address(spec["role"], spec["group"], spec["index"])
    take_name(address.name)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _lower_priority(ROLES[address.role])
    _offer_to_oom_killer(ROLES[address.role])
    status = StatusTable.attach(spec["status_fd"], spec["status_rows"])
    errors_dir = Path(spec["errors_dir"])
    context = WorkerContext(address, status, spec["row"], spec["message_fd"], errors_dir)
    context.beat(Phase.INIT)
    try:
        body = BODIES[spec["body"]]
        loaded = load(body.module)
        getattr(loaded, body.function)(context, getattr(loaded, body.job).from_json(spec["job"]))
    except BaseException as error:
        _report(context, errors_dir, error)
        return 1
    context.beat(Phase.DONE)
    context.close()
    return 0


def load(module: str) -> ModuleType:
    """Imports a module with garbage collection off, which would take a sixth of torch's import time and find nothing.

    Later collections skip what was imported.
    """
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def _lower_priority(role: Role) -> None:
    """Sets the process priority before the imports, lowest first: pictures, samplers, evaluation, learner.

    A run waits for its learner. When another program takes a core, the samplers lose it at once, long before the
    governor notices.
    """
    if role.nice and hasattr(os, "nice"):
        with contextlib.suppress(OSError):
            os.nice(role.nice)


def _offer_to_oom_killer(role: Role) -> None:
    """When memory runs out, Linux should kill a sampler first, which is cheap to replace, and the learner last."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(role.oom_score), encoding="ascii")


def _report(context: WorkerContext, errors_dir: Path, error: BaseException) -> None:
    """Reports to the supervisor why this process ends, by a file (authoritative) and a message."""
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):  # a full disk must not hide the reason
        sys.stderr.write(text)
    record = write_error(errors_dir, context.name, error)
    context.send("error", error=record["error"], traceback=text[-2500:])


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_with_supervisor(lifeline_fd: int, supervisor_pid: int) -> None:
    """Ends this process when the supervisor has died in any way.

    Each of the two means has a gap: the kernel's death signal (Linux only) follows the thread that started this
    process, and a waiting thread cannot run while C code holds the interpreter lock.
    """
    end_with_parent()
    if os.getppid() != supervisor_pid:
        os._exit(3)

    def watch() -> None:
        while True:
            try:
                if os.read(lifeline_fd, 1) == b"":
                    os._exit(3)
            except InterruptedError:
                continue
            except OSError:
                os._exit(3)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
