"""The supervisor's side of a worker process: start it, hear it, end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from spreeze.metrics import DEADLINE_S, Phase
from spreeze.processes import DEATH_S, held_back, kill_and_wait
from spreeze.strays import MARK
from spreeze.workers.link import worker_name

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_NAME = "SPREEZE_WORKER"
"""Environment variable with the worker's name, for environments that want to know where they run."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """All that is needed to start a worker, and to start it again."""

    role: str
    index: int
    row: int
    """Row of the board."""
    job: dict[str, Any]
    """JSON form of the body's job."""
    body: str = ""
    """Key of ``child.BODIES``; the role if empty."""
    threads: int = 1
    """Threads of numerical libraries, set before any import."""
    step_deadline_s: float = DEADLINE_S[Phase.STEP]
    """Silence in the middle of an env step after which the worker counts as hung."""
    memory_limit_bytes: int | None = None
    """Private memory above which the worker is started anew; None: no limit."""
    inherited_fds: tuple[int, ...] = ()
    """Descriptors of shared memory that the body attaches to."""

    @property
    def name(self) -> str:
        """``sampler-3``, ``learner``, ..."""
        return worker_name(self.role, self.index)


@dataclass(frozen=True, kw_only=True)
class Nest:
    """What all workers of one run share."""

    run_dir: Path
    board_fd: int
    board_rows: int
    nonce: str
    """Marks every process of the run in its environment, so that none can be overlooked."""


@dataclass
class Child:
    """A running (or ended) worker process."""

    spec: WorkerSpec
    process: subprocess.Popen[bytes]
    message_fd: int
    lifeline: int
    _pending: bytes = b""

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def poll(self) -> int | None:
        """Exit code, negative signal number, or None while it runs."""
        return self.process.poll()

    def read_messages(self) -> list[dict[str, Any]]:
        """Whole messages that have arrived; damaged lines are skipped. Never waits."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                data = os.read(self.message_fd, 65536)
            except (BlockingIOError, OSError):
                break
            if not data:
                break
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                    if isinstance(record, dict):
                        found.append(record)
        return found

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the worker and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill_and_wait(self, within_s: float = DEATH_S) -> int | None:
        """SIGKILL to the whole group, then waits: after this the worker never writes again.

        Returns:
            The exit code; None where the kernel does not let it go (see ``processes.kill_and_wait``).
        """
        return kill_and_wait(self.process, within_s)

    def close(self) -> None:
        """Closes this side's descriptors; the worker must have been killed or have ended."""
        for fd in (self.message_fd, self.lifeline):
            with contextlib.suppress(OSError):
                os.close(fd)


Start = Callable[[WorkerSpec, Nest], Child]
"""Starts a worker: ``spawn``, or what has something ready for it."""
Begin = Callable[[str, WorkerSpec, Nest, tuple[int, ...]], "subprocess.Popen[bytes]"]
"""Begins a worker's process: its argument, what and where it is, and the descriptors that it gets."""


def spawn(spec: WorkerSpec, nest: Nest, begin: Begin | None = None) -> Child:
    """Starts a worker in a fresh interpreter, or in what ``begin`` has, and in a process group of its own.

    Raises:
        OSError: no process, descriptor or log file could be made.
    """
    message_read, message_write = os.pipe()
    lifeline_read, lifeline_write = os.pipe()
    try:
        os.set_blocking(message_read, False)
        os.set_blocking(message_write, False)
        argument = json.dumps({
            "role": spec.role, "body": spec.body or spec.role, "index": spec.index, "row": spec.row, "job": spec.job,
            "board_fd": nest.board_fd, "board_rows": nest.board_rows, "message_fd": message_write,
            "lifeline_fd": lifeline_read, "supervisor_pid": os.getpid(),
            "errors_dir": str(nest.run_dir / "errors"),
        })
        fds = (nest.board_fd, message_write, lifeline_read, *spec.inherited_fds)
        process = (begin or fresh_process)(argument, spec, nest, fds)
    except BaseException:
        os.close(message_read)
        os.close(lifeline_write)
        raise
    finally:
        os.close(message_write)
        os.close(lifeline_read)
    return Child(spec=spec, process=process, message_fd=message_read, lifeline=lifeline_write)


def fresh_process(
    argument: str, spec: WorkerSpec, nest: Nest, fds: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    """A fresh interpreter for a worker; the descriptors keep their numbers.

    Raises:
        OSError: it could not be started.
    """
    with log_file(nest.run_dir, spec.name) as log, held_back():
        return subprocess.Popen(
            [sys.executable, "-m", "spreeze.workers.child", argument],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, close_fds=True, process_group=0,
            pass_fds=fds, env=child_environment(spec.threads, nest.nonce, spec.name),
        )


def log_file(run_dir: Path, name: str) -> IO[bytes]:
    """The worker's log, or nothing at all when the disk refuses: a log is no reason to stop."""
    try:
        return open(run_dir / "logs" / f"{name}.log", "ab")
    except OSError:
        return open(os.devnull, "ab")


def child_environment(threads: int, nonce: str, name: str = "") -> dict[str, str]:
    """Environment of a child: its threads pinned before any import, no window, no banner."""
    package_root = str(Path(__file__).resolve().parents[2])
    paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # cuda:1 is then the GPU that NVML and nvidia-smi call 1
        **os.environ,
        **dict.fromkeys(_THREAD_VARIABLES, str(threads)),
        # Waiting threads must not burn the core that a sampler needs.
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYGAME_HIDE_SUPPORT_PROMPT": "1",
        "SDL_VIDEODRIVER": "dummy",
        "SDL_AUDIODRIVER": "dummy",
        MARK: nonce,
        _NAME: name,
    }
