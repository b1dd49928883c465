"""The supervisor's side of a worker process: starting it, reading its messages, ending it."""

from __future__ import annotations

import abc
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from spreeze.config import python_path
from spreeze.machine.hardware import CoreFacts, core_facts
from spreeze.machine.logs import KeptLog, LogKeeper
from spreeze.machine.processes import DEATH_S, MARK, kill_and_wait, mark, signals_blocked
from spreeze.run_directory import new_nonce
from spreeze.transport.shared_memory import inherited_fds, readable
from spreeze.transport.status_table import StatusTable
from spreeze.workers.jobs import Job
from spreeze.workers.main import MAX_FDS
from spreeze.workers.roles import DEADLINE_S, ROLES, Address, Phase, RestartLimit, Role, deadlines

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_NAME = "SPREEZE_WORKER"
"""Environment variable with the worker's name, with which test environments fail in one worker alone."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Specification to start or restart a worker."""

    address: Address
    row: int  # of the status table
    job: Job  # names the code to run; the process inherits its handles
    threads: int = 1  # of numerical libraries, set before any import
    step_deadline_s: float = DEADLINE_S[Phase.STEP]  # silence within an env step after which the worker counts as hung
    start_deadline_s: float = DEADLINE_S[Phase.INIT]  # longest start of one of its environments
    memory_limit_bytes: int | None = None  # above it the worker, with what it started, is restarted; None: no limit
    limit: RestartLimit | None = None  # how often it may fail; None: as its role

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def role(self) -> Role:
        return ROLES[self.address.role]

    def deadline_s(self, phase: Phase) -> float:
        """Silence after which the worker counts as hung in that phase."""
        with_envs = self.role.has_envs or phase is Phase.STEP  # in which an inference worker is, too
        return (deadlines(self.step_deadline_s, self.start_deadline_s) if with_envs else DEADLINE_S)[phase]


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Context of all workers of one run."""

    run_dir: Path
    status: StatusTable
    nonce: str  # marks every process of the run, so that all can be found
    logs: LogKeeper
    gives_way: bool = False  # whether all workers run at low priority


@dataclass(kw_only=True)
class Worker(abc.ABC):
    """A started worker, and the pipe of its messages."""

    spec: WorkerSpec
    message_fd: int  # readable when there are messages, or when the worker has ended
    log: KeptLog | None = None  # what it writes to standard error
    _pending: bytes = b""

    @property
    @abc.abstractmethod
    def pid(self) -> int: ...

    @property
    def process_name(self) -> str:
        return self.spec.name

    @abc.abstractmethod
    def poll(self) -> int | None:
        """Exit code, negative signal number, or None while it runs."""

    def read_messages(self) -> list[dict[str, Any]]:
        """Whole messages that have arrived; damaged lines are skipped. Never waits."""
        with contextlib.suppress(OSError):  # nothing more has arrived
            while data := os.read(self.message_fd, 65536):
                self._pending += data
        *lines, self._pending = self._pending.split(b"\n")
        return messages_in(lines)

    @abc.abstractmethod
    def signal_group(self, number: signal.Signals) -> None:
        """Signals the worker and its child processes."""

    @abc.abstractmethod
    def kill_and_wait(self, within_s: float = DEATH_S) -> int | None:
        """Kills the whole group and waits, so that the worker never writes again; as ``processes.kill_and_wait``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes this side's descriptors; the worker must have ended."""


@dataclass(kw_only=True)
class WorkerProcess(Worker):
    """A child process that leads a process group; its end of the lifeline closes when this process ends."""

    process: subprocess.Popen[bytes]
    lifeline: int

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    def signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill_and_wait(self, within_s: float = DEATH_S) -> int | None:
        return kill_and_wait(self.process, within_s)

    def close(self) -> None:
        for fd in (self.message_fd, self.lifeline):
            with contextlib.suppress(OSError):
                os.close(fd)


def messages_in(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON object of each line; damaged lines are skipped."""
    messages: list[Any] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            messages.append(json.loads(line))
    return [message for message in messages if isinstance(message, dict)]


class Launcher:
    """Starts each worker in a fresh interpreter."""

    silent_s: float | None = None  # time after which this process counts as hung; None: never

    def supervised(self, run_dir: Path, nonce: str) -> contextlib.AbstractContextManager[None]:
        """A context for as long as workers run; ``nonce`` is the run's."""
        return contextlib.nullcontext()

    def wait(self, fds: Collection[int], seconds: float, meanwhile: Callable[[], None]) -> list[int]:
        """Waits at most ``seconds`` for readable descriptors; ``meanwhile`` is called in turns of this process."""
        return readable(fds, seconds)

    def start(self, spec: WorkerSpec, run_context: RunContext) -> Worker:
        """Starts a worker process that ends whenever this one ends; an OSError if that fails."""
        with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:
            message_read, message_write = os.pipe()
            kept.callback(os.close, message_read)
            given.callback(os.close, message_write)
            lifeline_read, lifeline_write = os.pipe()
            kept.callback(os.close, lifeline_write)
            given.callback(os.close, lifeline_read)
            os.set_blocking(message_read, False)
            os.set_blocking(message_write, False)
            argument = json.dumps(
                {
                    **vars(spec.address),
                    "job_class": f"{type(spec.job).__module__}:{type(spec.job).__name__}",
                    "job": spec.job.to_json(),
                    "row": spec.row,
                    "gives_way": run_context.gives_way,
                    "status": run_context.status.handle.to_json(),
                    "message_fd": message_write,
                    "lifeline_fd": lifeline_read,
                    "supervisor_pid": os.getpid(),
                    "errors_dir": str(run_context.run_dir / "errors"),
                }
            )
            fds = (*run_context.status.handle.fds, message_write, lifeline_read, *inherited_fds(spec.job))
            log = run_context.logs.log(log_path(run_context.run_dir, spec.name))
            log.begin()
            with log.open() as output:
                process = self._begin(argument, spec, run_context, fds, output)
            kept.pop_all()
        return WorkerProcess(spec=spec, process=process, message_fd=message_read, lifeline=lifeline_write, log=log)

    def _begin(
        self, argument: str, spec: WorkerSpec, run_context: RunContext, fds: tuple[int, ...], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Starts the process; the descriptors keep their numbers."""
        return start_process(
            ("-m", "spreeze.workers.main", argument),
            run_context.nonce,
            threads=spec.threads,
            name=spec.name,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=fds,
            **group_arguments(run_context.gives_way),
        )


FRESH = Launcher()
_AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")


_FEW_CORES = 2.0


def group_arguments(gives_way: bool, cores: CoreFacts | None = None, autogroups: Path = _AUTOGROUPS) -> dict[str, Any]:
    """Arguments of ``Popen`` with which a worker leads its process group; in two cases it leads a session, too.

    Where Linux first shares each core between sessions (autogroup), a run in one session counts as one program. On n
    cores it keeps (n - 1) / n beside a program of one thread, where its fair share is n / (n + 1). So on two cores or
    fewer each worker has its own session; on more, that would leave programs of several threads far less than their
    share. A run that ``gives_way`` needs sessions, too: nice counts only in one.
    """
    try:
        by_session = autogroups.read_text(encoding="ascii").strip() == "1"
    except OSError:
        by_session = False
    new_session = by_session and (gives_way or (core_facts() if cores is None else cores).usable <= _FEW_CORES)
    return {"process_group": None if new_session else 0, "start_new_session": new_session}


def log_path(run_dir: Path, name: str) -> Path:
    """The log of a process of a run."""
    return run_dir / "logs" / f"{name}.log"


def open_log(run_dir: Path, name: str) -> IO[bytes]:
    """Opens a log to append to; the null device if it cannot be opened."""
    try:
        return open(log_path(run_dir, name), "ab")
    except OSError:
        return open(os.devnull, "ab")


def start_process(
    arguments: Sequence[str], nonce: str, *, threads: int = 1, name: str = "", **options: Any
) -> subprocess.Popen[bytes]:
    """Starts Python as a marked process of the run ``nonce``, which has to call ``ignore_ending_signals``.

    An OSError if that fails. ``options`` are those of ``subprocess.Popen``.
    """
    env = child_environment(threads, nonce, name)
    with signals_blocked():
        process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, env=env, **options
        )
    mark(process.pid, nonce)
    return process


def child_environment(threads: int, nonce: str, name: str = "") -> dict[str, str]:
    """Environment of a child: thread counts for its libraries, no window, no banner."""
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # cuda:1 is then the GPU that NVML and nvidia-smi call 1
        **os.environ,
        **dict.fromkeys(_THREAD_VARIABLES, str(threads)),
        # Waiting threads must not burn the core that a sampler needs.
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYGAME_HIDE_SUPPORT_PROMPT": "1",
        "SDL_VIDEODRIVER": "dummy",
        "SDL_AUDIODRIVER": "dummy",
        MARK: nonce,
        _NAME: name,
    }


_JOB_BYTES = 1 << 17
_PREWARMED = next(role.name for role in ROLES.values() if role.learns)


class Prewarm(Launcher, contextlib.AbstractContextManager["Prewarm"]):
    """Starts the first learner in a process that waits with its libraries loaded until the ``with`` block ends."""

    def __init__(self, threads: int, *, wanted: bool = True, gives_way: bool = False) -> None:
        """Starts the process with ``threads`` for its libraries; if not ``wanted``, every worker is a fresh one."""
        self.nonce = new_nonce()  # of the run that can use the process
        self._threads, self._gives_way = threads, gives_way
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        if wanted:
            with contextlib.suppress(OSError):  # it only saves time
                self._start_waiting()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process if it still waits; workers are fresh processes from now on."""
        if self._line is not None:
            self._line.close()
        process, self._process = self._process, None
        if process is not None:
            kill_and_wait(process)

    def _start_waiting(self) -> None:
        self._line, theirs = socket.socketpair()
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _JOB_BYTES)  # else macOS takes a quarter of a job
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _JOB_BYTES)
        with theirs, signals_blocked():  # no Ctrl-C before it can be closed
            self._process = start_process(
                ("-m", "spreeze.workers.main", "--wait", str(theirs.fileno())),
                self.nonce,
                threads=self._threads,
                name=_PREWARMED,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                **group_arguments(self._gives_way),
            )

    def _begin(
        self, argument: str, spec: WorkerSpec, run_context: RunContext, fds: tuple[int, ...], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Hands the job to the waiting process if it fits and lives, else starts a fresh one; for one learner only."""
        if not spec.role.learns:
            return super()._begin(argument, spec, run_context, fds, output)
        taken = None
        wanted = spec.threads, run_context.nonce, run_context.gives_way
        fits = wanted == (self._threads, self.nonce, self._gives_way) and len(set(fds)) + 2 <= MAX_FDS
        if fits and self._process is not None and self._line is not None:
            with contextlib.suppress(OSError):  # it may have ended
                places = {1: output.fileno(), 2: output.fileno(), **{fd: fd for fd in fds}}
                message = json.dumps({"argument": argument, "places": list(places)}).encode() + b"\n"
                sent = socket.send_fds(self._line, [message], list(places.values()))
                if rest := message[sent:]:  # it closes its end once it has all: then even sending nothing fails
                    self._line.sendall(rest)
                taken, self._process = self._process, None
        self.close()
        return taken or super()._begin(argument, spec, run_context, fds, output)
