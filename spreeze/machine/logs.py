"""Logs of processes: bounded files, written to without an error and without waiting, whatever the disk does.

A worker's standard output and error go to an anonymous file in memory, to which Python, C and children of an
environment can always append. A few times a second a thread of the supervisor moves new output to the log, which keeps
its newest part; output that the disk refuses is lost. While the supervisor is stopped, the file in memory grows; a
stack that a dying worker writes is moved after its end. The reason why a child ended is its exit code or signal, and
the last lines of its standard error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import threading
from pathlib import Path
from typing import IO, Self

from spreeze.errors import importable_path, is_users
from spreeze.files import anonymous_file
from spreeze.formatting import clean, size
from spreeze.machine.hardware import memory_limits

_LINES, _LONGEST_LINE = 3, 160
_BY_SIGNAL = re.compile(
    r"Fatal Python error: (Aborted|Segmentation fault|Bus error|Illegal instruction|Floating)|"
    r"Timeout \(|(Current thread|Thread) 0x"
)
"""Line that Python writes about a fatal signal, which the exit code gives, too; a stack of each thread follows."""
_CURRENT, _OTHER = "Current thread 0x", "Thread 0x"
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in ')
_OF_PYTHON = ("Extension modules: ", "  ...", "Stack (", "  <")


def ending(code: int, oom_kills_before: int | None = None) -> str:
    """Text for the end of a process: ``exit code 3``, ``signal SIGSEGV``; real-time signals have no name.

    If ``oom_kills`` has risen above ``oom_kills_before``, a SIGKILL is attributed to the kernel.
    """
    if code >= 0:
        return f"exit code {code}"
    known = -code in set(signal.Signals)
    text = f"signal {signal.Signals(-code).name if known else -code}"
    if -code != signal.SIGKILL or oom_kills_before is None or (oom_kills() or 0) <= oom_kills_before:
        return text
    memory = memory_limits()
    return f"{text} by the system, out of memory ({size(memory.cgroup_limit_bytes or memory.total_bytes)})"


def oom_kills(root: str | Path = "/") -> int | None:
    """Number of processes that the kernel has killed because memory ran out; None if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in (Path(root) / "proc/vmstat").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def last_words_of(text: str) -> str:
    """The last lines of standard error in one line, `` | `` between them; empty if there are none.

    Of a fatal signal's Python stack, all but the environment's line is left out.
    """
    lines: list[str] = []
    stack: list[tuple[str, str]] = []
    in_stack = in_other = False
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if _BY_SIGNAL.match(line):
            in_stack, in_other = True, line.startswith(_OTHER)
            if line.startswith(_CURRENT):
                stack.clear()
        elif in_stack and frame is not None:
            stack += [] if in_other else [(frame["file"], f":{frame['line']}")]
        elif line.strip() and not (in_stack and line.startswith(_OF_PYTHON)):
            lines.append(clean(line, _LONGEST_LINE))
    location = next((importable_path(name) + line for name, line in stack if is_users(name)), None)
    return " | ".join([*lines[-_LINES:], *([f"at {location}"] if location else [])])


MAX_BYTES = 8 * 2**20  # size of a log at most; then its older half is dropped
_IN_MEMORY_BYTES = 2**20  # Size up to which moved output stays in memory.
_PIECE_BYTES, _TAIL_BYTES = 2**20, 2**14
_PAUSE_S, _BUSY_PAUSE_S, _JOIN_S = 0.2, 0.01, 2.0


class KeptLog:
    """One log and the file in memory whose content goes there."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd, self._read = fd, 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._lost_bytes = 0
        self._tail = b""
        self._lock = threading.Lock()  # never held while the disk is used

    def open(self) -> IO[bytes]:
        """A new file object to write to; an OSError if no descriptor is left."""
        return open(os.dup(self._fd), "ab", buffering=0)

    def begin(self) -> None:
        """A new process writes from now on."""
        self.read()
        with self._lock:
            self._tail = b""

    @property
    def last_words(self) -> str:
        """``last_words_of`` the latest process."""
        self.read()
        with self._lock:
            return last_words_of(self._tail.decode("utf-8", "replace"))

    def read(self) -> int:
        """Reads the output since the last call from the file in memory; returns the number of bytes."""
        with self._lock, contextlib.suppress(OSError):
            size = os.fstat(self._fd).st_size
            if size < self._read:  # another process has truncated it
                self._read = 0
            skipped = max(0, size - self._read - MAX_BYTES)
            self._lost_bytes += skipped
            self._read += skipped
            count = skipped
            while self._read < size and (data := os.pread(self._fd, min(_PIECE_BYTES, size - self._read), self._read)):
                self._read, count = self._read + len(data), count + len(data)
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
                self._put(data)
            if self._read >= _IN_MEMORY_BYTES:
                os.ftruncate(self._fd, 0)  # output written at this very moment is lost
                self._read = 0
            return count
        return 0

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        while self._waiting_bytes > MAX_BYTES:
            dropped = len(self._waiting.pop(0))
            self._waiting_bytes, self._lost_bytes = self._waiting_bytes - dropped, self._lost_bytes + dropped

    def write(self) -> None:
        """Appends the output read so far to the log, and shortens the log; output that the disk refuses is lost."""
        with self._lock:
            if not self._waiting:
                return
            output, lost = b"".join(self._waiting), self._lost_bytes
            self._waiting, self._waiting_bytes, self._lost_bytes = [], 0, 0
        gap = f"[{lost} bytes of output are missing here]\n".encode() if lost else b""
        data, written = gap + output, 0
        try:
            with open(_opened(self.path), "ab", buffering=0) as file:
                while written < len(data):
                    written += file.write(data[written:])
                size = os.fstat(file.fileno()).st_size
            if size > MAX_BYTES:
                _shorten(self.path)
        except OSError:
            with self._lock:
                self._lost_bytes += (lost if written < len(gap) else 0) + min(len(output), len(data) - written)

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            os.close(self._fd)
            self._fd = -1


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o666)


def _shorten(path: Path) -> None:
    """Keeps the newer half of a log; rewrites the file in place, since the disk may be full."""
    with open(path, "r+b") as file:
        file.seek(-MAX_BYTES // 2, os.SEEK_END)
        file.readline()
        kept = b"[older output was dropped: a log keeps only the newest]\n" + file.read()
        file.seek(0)
        file.write(kept)
        file.truncate()


class LogKeeper:
    """The logs of the processes that this one starts."""

    def __init__(self) -> None:
        self._logs: dict[Path, KeptLog] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def __enter__(self) -> Self:
        with contextlib.suppress(RuntimeError):  # no thread can be started: all output is written at the end
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def log(self, path: Path) -> KeptLog:
        """The log at a path; an OSError if no descriptor is left. A restarted process continues with it."""
        if path not in self._logs:
            fd = anonymous_file("spreeze-log")
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND | os.O_RDWR)
            self._logs[path] = KeptLog(path, fd)
            with contextlib.suppress(OSError):  # an empty file at first, so that it can be followed from the start
                os.close(_opened(path))
        return self._logs[path]

    def close(self) -> None:
        """Writes the remaining output, without waiting for a hung disk, and closes all logs; writers have ended."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._move()
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def _move(self) -> int:
        count = 0
        for log in list(self._logs.values()):
            count += log.read()
            log.write()
        return count

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles them
        while not self._ending.wait(_BUSY_PAUSE_S if self._move() > _PIECE_BYTES // 4 else _PAUSE_S):
            pass
