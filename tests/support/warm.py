"""Warm starts: processes of Spreeze fork from one that has imported its libraries, in place of fresh interpreters.

Importing torch, NumPy and Gymnasium is most of the cost of a short run. ``install`` replaces what ``subprocess.Popen``
does with ``python -m spreeze...``: a *nursery*, a child with one thread, forks the process, which then takes the
command, descriptors, variables, folder, limits, priority and signals that a fresh one would have, and becomes a child
of the caller. A program that is started so has a nursery of its own for the processes that it starts.

Not the same as in a fresh process: ``/proc/PID/cmdline`` and ``/proc/PID/environ`` are those of the nursery, modules
are loaded that a sampler does not load, and so its memory is larger; what is done now and then, or after a while, comes
sooner (``SHORTENED``). Whatever depends on that is marked ``cold``.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import linecache
import os
import random
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

REPO, SUPPORT = Path(__file__).resolve().parents[2], Path(__file__).resolve().parent
WATCHER = "from spreeze.machine.watcher import watch; watch()"
STARTS_NOTHING = (
    "spreeze.workers.main",
    "spreeze.workers.evaluator",
    "spreeze.envs.probe",
    "spreeze.tuner.update_probe",
)
"""Programs that start no process of Spreeze: they have no nursery."""
PRELOADED = (
    "torch", "numpy", "gymnasium", "gymnasium.envs.classic_control.pendulum", "gymnasium.envs.classic_control.cartpole",
    "gymnasium.wrappers", "psutil", "safetensors.numpy", "PIL.Image", "rich.console", "rich.live", "rich.table",
    "sqlite3",
)  # fmt: skip
NOT_PRELOADED = (
    "spreeze.__main__",
    "spreeze.train",
    "spreeze.envs.small_tasks",
    "spreeze.dashboard",
    "spreeze.cli.bench",
    "spreeze.envs.bullet",
)
"""What is run as a program, reads variables when it is imported, or is dear and rarely needed."""
_AS_THEY_ARE = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")
"""Variables of Python that are obeyed; a process for which another one differs is a fresh one."""
_FIXED = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "TZ")
_PROGRAMS = ("spreeze", "process_facts")
_COLD = ("spreeze.dashboard",)
"""Programs that load packages of their own and are asked about their command line."""
SHORTENED = {
    "spreeze.runtime.supervisor": {"SAMPLE_S": 0.1, "_TUNER_AFTER_S": 0.5, "_VISUALIZER_AFTER_S": 0.5},
    "spreeze.runtime.callback_process": {"_METRICS_S": 0.2},
    "spreeze.tuner.measure": {"_GROUP_START_S": 1.5, "_SHORTEST_START_S": 2.0},  # processes start sooner, too
    "spreeze.tuner.search": {"_MIN_S": 1.5, "_AGAIN_S": 3.0},
}
"""Module -> its seconds that differ: until they are over, what a test waits for goes on at full speed."""
_VARIABLES = dict(os.environ)
_SUBREAPER = 36
_MAX_FDS = 250
_FAR = 400
"""The descriptor of the line to a nursery has such a number: those of a run are what they would be without it."""
_ANSWER_S = 240.0


def main(fd: int) -> None:
    """The first nursery: imports everything, then starts what is asked for. Returns in no process that it starts."""
    _preload()
    gc.collect()
    gc.freeze()
    line = socket.socket(fileno=fd)
    line.sendall(b"ready\n")
    _run(_serve(line))


def _preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    for path in sorted((REPO / "spreeze").rglob("*.py")):
        name = ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith(NOT_PRELOADED):
            with contextlib.suppress(ImportError):  # of an optional package
                importlib.import_module(name)
    for name, seconds in SHORTENED.items():
        for constant, value in seconds.items():
            assert getattr(sys.modules[name], constant) > value
            setattr(sys.modules[name], constant, value)


def _serve(line: socket.socket) -> Request:
    """Starts a process for each request; returns in it, and never in the nursery itself."""
    os.setpgid(0, 0)  # no signal to the caller's group is for it
    _close_all(line.fileno())
    for _ in range(3):
        os.open(os.devnull, os.O_RDWR)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    while True:
        data, fds = _received(line)
        if not data:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            first_parent = os.getpid()
            if os.fork() == 0:
                line.detach()  # its number is that of another descriptor soon
                request = Request(json.loads(data), fds, writer)
                request.await_parent(first_parent)
                return request
            os._exit(0)
        for fd in (writer, *fds):
            os.close(fd)
        os.waitpid(between, 0)  # from here on the process is a child of the caller, which is the next reaper above
        line.sendall((os.read(reader, 32) or b"0") + b"\n")
        os.close(reader)


def _received(line: socket.socket) -> tuple[bytes, list[int]]:
    data, fds, _, _ = socket.recv_fds(line, 65536, _MAX_FDS)
    while data and not data.endswith(b"\n"):
        data += line.recv(65536)
    return data, list(fds)


class Request:
    """A process that somebody asked for."""

    def __init__(self, told: dict, fds: list[int], ready: int) -> None:
        self._told, self._fds, self._ready = told, fds, ready
        self.argv: list[str] = told["argv"]

    @property
    def module(self) -> str | None:
        """What ``python -m`` runs; None for ``python -c`` and for a script."""
        return self.argv[2] if self.argv[1] == "-m" else None

    @property
    def script(self) -> str | None:
        """The file that ``python FILE`` runs; None for ``python -m`` and ``python -c``."""
        return None if self.argv[1].startswith("-") else self.argv[1]

    def await_parent(self, first: int) -> None:
        """Waits until this process is the caller's child."""
        while (parent := os.getppid()) == first:
            time.sleep(0.0002)
        if parent != self._told["parent"]:
            os._exit(3)

    def become(self) -> None:
        """Makes of this process what a fresh interpreter would be."""
        told = self._told
        if told["session"]:
            os.setsid()
        else:
            os.setpgid(0, 0 if told["group"] == 0 else told["group"] if told["group"] > 0 else told["own_group"])
        self._take_descriptors()
        os.chdir(told["folder"])
        os.umask(told["umask"])
        for number, limits in told["limits"]:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(number, limits)
        os.setpriority(os.PRIO_PROCESS, 0, told["nice"])
        os.sched_setaffinity(0, told["cores"])
        Path("/proc/self/oom_score_adj").write_text(told["oom"])
        Path("/proc/self/comm").write_bytes(os.path.basename(sys.executable).encode()[:15])
        before = _paths(os.environ)
        os.environ.clear()
        os.environ.update(told["variables"])
        _set_streams()
        sys.orig_argv[:] = self.argv
        sys.argv[:] = self.argv[1:] if self.script else [self.argv[1], *self.argv[3:]]
        sys.path[:] = [
            os.path.dirname(os.path.abspath(self.script)) if self.script else os.getcwd() if self.module else "",
            *_paths(os.environ),
            *(path for path in sys.path[1:] if path not in before),
        ]
        importlib.invalidate_caches()
        if "PYTHONFAULTHANDLER" in os.environ:
            faulthandler.enable()
        random.seed()
        sys.modules["numpy"].random.seed()
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(told["cores"])))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in told["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, told["blocked"])
        os.write(self._ready, str(os.getpid()).encode())  # only now: the caller may change limits, or send signals
        os.close(self._ready)

    def _take_descriptors(self) -> None:
        places = self._told["places"]
        above = max(*places, *self._fds, _FAR) + 1
        *aside, self._ready = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in (*self._fds, self._ready)]
        _close_all(*aside, self._ready)
        for fd, number in zip(aside, places, strict=True):
            os.dup2(fd, number)
            os.close(fd)


def _close_all(*kept: int) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(fd)


def _paths(variables) -> list[str]:
    return list(filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)))


def _set_streams() -> None:
    """Streams over the descriptors of this process, as an interpreter makes them at its start."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        old, stream = getattr(sys, name), None
        with contextlib.suppress(OSError):
            raw = io.FileIO(fd, "w" if fd else "r", closefd=False)
            buffer = io.BufferedReader(raw) if fd == 0 else raw if unbuffered else io.BufferedWriter(raw)
            lines = not unbuffered and (fd == 2 or raw.isatty())
            stream = io.TextIOWrapper(buffer, old.encoding, old.errors, line_buffering=lines, write_through=unbuffered)
            stream.mode = "w" if fd else "r"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(request: Request) -> None:
    """Becomes the process that was asked for, with a nursery of its own where it may start others."""
    while True:
        request.become()
        if request.module in STARTS_NOTHING or request.argv[2:3] == [WATCHER]:
            break
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            request = _serve(theirs)
            continue
        theirs.close()
        install(Nursery(ours))
        break
    program = types.ModuleType("__main__")
    program.__builtins__ = builtins
    sys.modules["__main__"] = program
    if request.module is None:
        program.__file__ = request.script
        text = Path(request.script).read_bytes() if request.script else request.argv[2]
        linecache.clearcache()
        exec(compile(text, request.script or "<string>", "exec"), vars(program))
        threading._shutdown()
        sys.modules["spreeze.machine.processes"].exit_process(0)  # modules of a warm process take long to take down
    sys.modules.pop(request.module, None)
    runpy._run_module_as_main(request.module)


class Nursery:
    """The caller's end of the line to a nursery."""

    def __init__(self, line: socket.socket) -> None:
        far = min(_FAR, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1)
        fd = fcntl.fcntl(line.fileno(), fcntl.F_DUPFD_CLOEXEC, far)
        line.close()
        self._line, self._owner = socket.socket(fileno=fd), os.getpid()
        self._line.settimeout(_ANSWER_S)
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None).prctl

    def close(self) -> None:
        """Ends the nursery; what it has started goes on."""
        self._line.close()

    def start(self, told: dict, fds: list[int]) -> int | None:
        """Id of the process that was started; None where the nursery is gone, or is that of another process."""
        if os.getpid() != self._owner:
            return None
        message = json.dumps(told).encode() + b"\n"
        with self._lock:
            self._prctl(_SUBREAPER, 1, 0, 0, 0)  # only meanwhile: orphans of a run become no children of it
            try:
                sent = socket.send_fds(self._line, [message], fds)
                self._line.sendall(message[sent:])
                return int(self._line.recv(32)) or None
            except (
                OSError,
                ValueError,
            ):  # it has ended, or hangs: an answer that comes late is that of no other request
                self._line.close()
                return None
            finally:
                self._prctl(_SUBREAPER, 0, 0, 0, 0)


class FirstNursery:
    """The nursery of a session of tests, begun when it is first needed, and again where it was killed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.wanted = True
        self.latest: int | None = None  # id of the latest process that was started warm
        self._nursery: Nursery | None = None
        self._beginning = threading.Lock()  # threads start processes, too

    def start(self, told: dict, fds: list[int]) -> int | None:
        if not self.wanted:
            return None
        with self._beginning:
            if self.process is None or self.process.poll() is not None:
                self._begin()
        started = self._nursery.start(told, fds)
        self.latest = started or self.latest
        return started

    def close(self) -> None:
        """Ends the nursery; what it has started goes on."""
        if self._nursery is not None:
            self._nursery.close()
            self.process.wait()
            self._nursery = self.process = None

    def _begin(self) -> None:
        self.close()
        ours, theirs = socket.socketpair()
        code = (
            "import sys; sys.path.insert(1, sys.argv.pop()); import warm; del sys.path[1]; warm.main(int(sys.argv[1]))"
        )
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("SPREEZE_", "PYTEST_"))}
        variables |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), str(SUPPORT)], stdin=subprocess.DEVNULL, cwd=REPO,
                pass_fds=(theirs.fileno(),), env={**variables, "OMP_WAIT_POLICY": "PASSIVE"},
            )  # fmt: skip
        assert ours.recv(6) == b"ready\n", "the nursery did not begin"
        self._nursery = Nursery(ours)


FIRST = FirstNursery()
"""The nursery of this session of tests."""


def install(nursery: Nursery | FirstNursery) -> None:
    """From now on ``subprocess`` starts warm what can be started so, and all else as before."""
    fresh = subprocess._fork_exec

    def fork_exec(*arguments):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            asked = _asked(*arguments, blocked=blocked)
            started = None if asked is None else nursery.start(*asked)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return fresh(*arguments) if started is None else started

    subprocess._fork_exec = fork_exec


def _asked(
    argv, executables, close_fds, pass_fds, folder, variables, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
    errpipe_read, errpipe_write, restore_signals, session, group, gid, gids, uid, umask, preexec, *rest, blocked,
):  # fmt: skip
    """What the nursery is told, and descriptors; None for what takes a fresh process."""
    argv = list(map(os.fsdecode, argv))
    ours = argv[:2] == [sys.executable, "-m"] and argv[2].partition(".")[0] in _PROGRAMS
    ours |= argv[:2] == [sys.executable, "-c"] and "spreeze" in argv[2]
    ours |= argv[0] == sys.executable and argv[1].endswith(".py")
    plain = close_fds and restore_signals and preexec is None and (gid, gids, uid) == (None, None, None)
    if not (ours and plain) or (argv[2:] and argv[2].startswith(_COLD)):
        return None
    told = os.environ if variables is None else dict(map(os.fsdecode, pair.split(b"=", 1)) for pair in variables)
    told = dict(told)
    if _fixed(told) != _fixed(_VARIABLES) or any(Path(path, "sitecustomize.py").exists() for path in _paths(told)):
        return None
    places = {0: max(p2cread, 0), 1: c2pwrite if c2pwrite >= 0 else 1, 2: errwrite if errwrite >= 0 else 2}
    places |= {int(fd): int(fd) for fd in pass_fds if fd != errpipe_write}
    if len(places) > _MAX_FDS:
        return None
    numbers = (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGTTOU,
        signal.SIGTTIN,
        signal.SIGCHLD,
    )
    return {
        "argv": argv,
        "folder": os.fsdecode(folder or os.getcwd()),
        "variables": told,
        "places": list(places),
        "parent": os.getpid(),
        "session": bool(session),
        "group": -1 if group is None else group,
        "own_group": os.getpgid(0),
        "umask": _umask() if umask < 0 else umask,
        "limits": [(number, resource.getrlimit(number)) for number in range(resource.RLIMIT_RTPRIO + 1)],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "ignored": [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN],
        "blocked": sorted(blocked),
    }, list(places.values())


def _fixed(variables) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(_FIXED) and name not in _AS_THEY_ARE}


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
