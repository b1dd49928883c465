"""Names, signals and the end of a run's processes.

A closed window, a logout, ``systemctl stop`` and batch systems signal many or all processes of a run. Only the
supervisor acts on it; every other process ends by its order, or has ended itself. A signal to a worker's group misses a
process with its own session, and a killed supervisor sends none. So every process carries a mark, and a small watcher
(``watcher``), which briefly outlives the supervisor, kills every process that still has it. The mark is a resource
limit (on file locks, without other effect since Linux 2.4.25): descendants inherit it, and reading it never waits for a
hung process. Where that limit is already set, or unknown (macOS), the mark is an environment variable.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that request the end of a process
DEATH_S = 10.0  # time for a process to die after SIGKILL; freeing much memory takes a while
OWN_PREFIX = "spreeze-"
PAGE, PREWARM, PROBE, WATCHER = (OWN_PREFIX + name for name in ("page", "early", "probe", "watcher"))
"""Names of processes that are not workers: the page's server, a learner without a job yet, a single measurement, the
watcher."""
_LONGEST_NAME_BYTES = 15
LOW_PRIORITY = 10  # nice value at and above which a program counts as a batch job, which leaves the cores to all others
_AUTOGROUP, _COMM = Path("/proc/self/autogroup"), Path("/proc/self/comm")
_AUTOGROUP_TRIES, _AUTOGROUP_PAUSE_S = 50, 0.05
"""Linux accepts ten such changes a second from all unprivileged processes together."""
_PR_SET_PDEATHSIG = 1
_PARENT_S = 0.5  # Interval at which a process looks for its parent where the kernel sends no signal at its death.
MARK = "SPREEZE_RUN"  # environment variable with the run's nonce
_RLIMIT_LOCKS = 10
ENDS_WITH = "SPREEZE_ENDS_WITH"
"""Environment variable with the pid of the caller, whose end acts on a training like Ctrl-C (``spreeze.api``)."""
_STOP_ROUNDS = 5


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Has a signal sent to this process when its parent ends: by Linux, elsewhere by a thread that looks regularly.

    On Linux it follows the thread that started this process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, number)
        return
    parent = os.getppid()

    def watch() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles them
        while os.getppid() == parent:
            time.sleep(_PARENT_S)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def take_name(name: str) -> None:
    """Sets the process name that ``top`` shows and that siblings recognize (Linux; at most 15 letters)."""
    with contextlib.suppress(OSError):
        _COMM.write_bytes(name.encode("ascii")[:_LONGEST_NAME_BYTES])


def lower_priority(nice: int) -> None:
    """Raises this process's nice value by ``nice``, to 19 at most; does nothing where that is not allowed.

    Where Linux divides cores among sessions first (autogroup), the leader of a session also lowers its session's.
    """
    with contextlib.suppress(OSError):
        os.nice(nice)
    if nice == 0 or os.getsid(0) != os.getpid():
        return
    with contextlib.suppress(OSError):
        for _ in range(_AUTOGROUP_TRIES):
            try:
                _AUTOGROUP.write_text(str(min(nice, 19)), encoding="ascii")
                return
            except BlockingIOError:
                time.sleep(_AUTOGROUP_PAUSE_S)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Blocks the signals of ``ENDING`` while starting processes, so that each lives until ``ignore_ending_signals``.

    The processes inherit the mask and receive the signals once they unblock them; so does this process after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_ending_signals() -> None:
    """Makes this process, but not its children, ignore the signals of ``ENDING``.

    By a handler, not SIG_IGN, which an environment's own programs would inherit: ``terminate()`` would hang on them.
    """
    for number in ENDING:
        signal.signal(number, _ignore)
        signal.siginterrupt(number, False)
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)  # a supervisor ignores it
    # Blocked during a fork: a signal to a child that still has the handler would be lost.
    os.register_at_fork(
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, ENDING),
        after_in_parent=_unblock,
        after_in_child=_restore_default,
    )
    _unblock()


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """Does nothing."""


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _restore_default() -> None:
    for number in ENDING:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.SIG_DFL)
    _unblock()


def waited_for_core_s(task: int | str = "thread-self") -> float:
    """Time that this thread, or a process's main thread, has waited for a core; 0 if the system does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{task}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0


def kill_and_wait(process: subprocess.Popen[bytes], within_s: float = DEATH_S) -> int | None:
    """Kills a process group by its leader and waits for the leader; returns its exit code.

    None if a hung driver or a dead disk holds it in the kernel; it runs no more of its program: the caller can go on.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        return None


def unkillable_message(name: str, pid: int) -> str:
    """The message about a process for which ``kill_and_wait`` returned None."""
    return f"{name} (process {pid}) does not end on SIGKILL, perhaps because of a hung driver or disk: left behind"


def mark(pid: int, nonce: str) -> None:
    """Marks a process that was just started; its future descendants inherit the mark."""
    if not hasattr(resource, "prlimit"):
        return  # its environment has the mark
    with contextlib.suppress(OSError, ValueError):  # it may have ended
        resource.prlimit(pid, _RLIMIT_LOCKS, (_limit_of(nonce), resource.prlimit(pid, _RLIMIT_LOCKS)[1]))


@contextlib.contextmanager
def own_mark(nonce: str) -> Iterator[None]:
    """Marks the processes that this one starts within the block."""
    before, variable = resource.getrlimit(_RLIMIT_LOCKS) if _marks_by_limit() else None, os.environ.get(MARK)
    mark(os.getpid(), nonce)
    if before is None:
        os.environ[MARK] = nonce
    try:
        yield
    finally:
        if before is not None:
            resource.setrlimit(_RLIMIT_LOCKS, before)
        elif variable is None:
            os.environ.pop(MARK, None)
        else:
            os.environ[MARK] = variable


def _limit_of(nonce: str) -> int:
    """A 62-bit hash of the nonce, which no other run has."""
    value = 1
    for byte in nonce.encode():
        value = (value * 1_099_511_628_211 ^ byte) % 2**62
    return value


def _marks_by_limit() -> bool:
    return hasattr(resource, "prlimit") and resource.getrlimit(_RLIMIT_LOCKS)[1] == resource.RLIM_INFINITY


def marked_processes(nonce: str) -> Iterator[Any]:
    """Yields every other living process that carries the run's mark, as a ``psutil.Process``."""
    import psutil  # not at the top: a worker takes its name before it loads anything else

    limit = _limit_of(nonce) if _marks_by_limit() else None
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            if limit is not None:
                carries = resource.prlimit(pid, _RLIMIT_LOCKS)[0] == limit
            else:
                carries = psutil.Process(pid).environ().get(MARK) == nonce
            if pid != os.getpid() and carries:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def end_orphans(nonce: str) -> int:
    """Kills every other process that carries the run's mark; returns their number."""
    import psutil

    count = 0
    for process in marked_processes(nonce):
        with contextlib.suppress(psutil.Error):
            process.kill()
            count += 1
    return count


def family() -> list[Any]:
    """All descendants of this process (``psutil.Process``), except watchers."""
    import psutil

    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if not _is_watcher(process) and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def _is_watcher(process: Any) -> bool:
    """True for a watcher: by its name, or its command where ``take_name`` has no effect."""
    named = process.name() == WATCHER
    return named or (not _COMM.exists() and any("spreeze.machine.watcher" in word for word in process.cmdline()))


def stop_family() -> list[Any]:
    """Stops (SIGSTOP) all descendants; returns those that were not stopped before, for ``resume_family``."""
    import psutil

    stopped: list[Any] = []
    for _ in range(_STOP_ROUNDS):  # a process that was just being started appears late
        before = len(stopped)
        for process in family():
            with contextlib.suppress(psutil.Error, OSError):
                if process not in stopped and process.status() != psutil.STATUS_STOPPED:
                    process.suspend()
                    stopped.append(process)
        if len(stopped) == before:
            break
    return stopped


def is_stopped(pid: int) -> bool:
    """True if a process is stopped, as by Ctrl-Z."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def resume_family(stopped: list[Any]) -> None:
    """Continues processes that ``stop_family`` stopped."""
    import psutil

    for process in stopped:
        with contextlib.suppress(psutil.Error, OSError):
            process.resume()


CLOSING_S = 2.0
"""Time for ``close()``, threads and processes of an environment to end by themselves once its result is there."""


def exit_process(code: int) -> NoReturn:
    """Ends this process with an exit code, whatever threads and exit handlers an environment left in it."""

    def exit_after_delay() -> None:
        time.sleep(CLOSING_S)
        os._exit(code)

    _flush()
    # Not threading.Thread: its start() waits forever for a thread that has died for want of memory.
    with contextlib.suppress(RuntimeError):  # no thread can be started
        _thread.start_new_thread(exit_after_delay, ())
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closed, or None
            stream.flush()


class OutOfTime(BaseException):
    """The block of a ``time_limit`` took too long."""


@contextlib.contextmanager
def time_limit(
    limit_s: float, *, every_s: float | None = None, on_wait: Callable[[float], object] = lambda waited_s: None
) -> Iterator[None]:
    """Raises OutOfTime in the main thread's block after ``limit_s``; code in C is interrupted when it returns.

    ``on_wait`` is called every ``every_s`` with the seconds so far. Other threads have no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    started_s = time.monotonic()

    def on_alarm(number: int, frame: types.FrameType | None) -> None:
        waited_s = time.monotonic() - started_s
        if waited_s >= limit_s:
            raise OutOfTime
        on_wait(waited_s)
        signal.setitimer(signal.ITIMER_REAL, min(every_s or limit_s, max(limit_s - waited_s, 0.001)), 0.5)

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, min(every_s or limit_s, limit_s), 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


def close_in_time(*closes: Callable[[], object]) -> None:
    """Calls each function, for at most ``CLOSING_S`` seconds in total; errors are ignored."""
    with contextlib.suppress(OutOfTime), time_limit(CLOSING_S):
        for close in closes:
            with contextlib.suppress(Exception):
                close()


@contextlib.contextmanager
def no_child_left() -> Iterator[None]:
    """At the end of the block, kills the processes that this one, or its children, have started within it."""
    import psutil

    process = psutil.Process()
    before = {child.pid for child in process.children(recursive=True)}
    try:
        yield
    finally:
        with contextlib.suppress(psutil.Error):
            for child in process.children(recursive=True):
                if child.pid not in before:
                    with contextlib.suppress(psutil.Error):
                        child.kill()


def main(argv: list[str]) -> None:
    """``NAME MODULE ARGUMENT...``: runs ``python -m MODULE ARGUMENT...`` under a name taken before any import."""
    take_name(argv[0])
    sys.argv[1:] = argv[2:]
    runpy.run_module(argv[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
