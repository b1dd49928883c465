"""Logs of processes: bounded files, written to without an error and without waiting, whatever the disk does.

A worker's standard output and error are a nameless file in memory, to which Python, C and whatever an environment
starts can always append: no disk is full there, and no reader is waited for, as with a pipe. A thread of the supervisor
moves what was written to the log, of which the newest part stays, a few times a second. Where the disk refuses it, it
is lost. While the supervisor is stopped the file in memory grows; a stack that a dying worker writes is moved after its
end. Only on Linux are there such files; elsewhere output goes to the log itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import threading
from pathlib import Path
from typing import IO

from spreeze.machine.last_words import words_of

MOST_BYTES = 8 * 2**20
"""Size of a log at most; then its older half is dropped."""
_IN_MEMORY_BYTES = 2**20  # Size up to which moved output stays in memory.
_PIECE_BYTES, _TAIL_BYTES = 2**20, 2**14
_PAUSE_S, _HURRY_S, _END_S = 0.2, 0.01, 2.0


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
        """A file to write to, of one's own; an OSError if no descriptor is left."""
        return open(os.dup(self._fd), "ab", buffering=0)

    def begin(self) -> None:
        """A new process writes from now on."""
        self.read()
        with self._lock:
            self._tail = b""

    @property
    def last_words(self) -> str:
        """Like the function of that name, for the latest process."""
        self.read()
        with self._lock:
            return words_of(self._tail.decode("utf-8", "replace"))

    def read(self) -> int:
        """Takes what was written since the last call out of the file in memory; returns the number of bytes."""
        with self._lock, contextlib.suppress(OSError):
            size = os.fstat(self._fd).st_size
            if size < self._read:  # somebody has emptied it
                self._read = 0
            skipped = max(0, size - self._read - MOST_BYTES)
            self._lost_bytes += skipped
            self._read += skipped
            found = skipped
            while self._read < size and (data := os.pread(self._fd, min(_PIECE_BYTES, size - self._read), self._read)):
                self._read, found = self._read + len(data), found + len(data)
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
                self._put(data)
            if self._read >= _IN_MEMORY_BYTES:
                os.ftruncate(self._fd, 0)  # what is written in this very moment is lost
                self._read = 0
            return found
        return 0

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        while self._waiting_bytes > MOST_BYTES:
            dropped = len(self._waiting.pop(0))
            self._waiting_bytes, self._lost_bytes = self._waiting_bytes - dropped, self._lost_bytes + dropped

    def write(self) -> None:
        """Appends what was read to the log, and shortens that; what the disk refuses is lost."""
        with self._lock:
            data, lost = b"".join(self._waiting), self._lost_bytes
            self._waiting, self._waiting_bytes, self._lost_bytes = [], 0, 0
        if not data:
            return
        if lost:
            data = f"[{lost} bytes of output are missing here]\n".encode() + data
        written = 0
        try:
            with open(_opened(self.path), "ab", buffering=0) as file:
                while written < len(data):
                    written += file.write(data[written:])
                size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                _shorten(self.path)
        except OSError:
            with self._lock:
                self._lost_bytes += len(data) - written

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            os.close(self._fd)
            self._fd = -1


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def _shorten(path: Path) -> None:
    """Keeps the newer half of a log, in its own place on the disk, which may be full."""
    with open(path, "r+b") as file:
        file.seek(-MOST_BYTES // 2, os.SEEK_END)
        file.readline()
        kept = b"[what stood here was dropped: a log keeps the newest output]\n" + file.read()
        file.seek(0)
        file.write(kept)
        file.truncate()


class LogKeeper:
    """The logs of the processes that this one starts."""

    def __init__(self) -> None:
        self._logs: dict[Path, KeptLog] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def start(self) -> None:
        with contextlib.suppress(RuntimeError):  # no thread can be started: all is written at the end
            self._thread.start()

    def log(self, path: Path) -> KeptLog | None:
        """The log at a path, or None where there can be none. A restarted process continues with it."""
        if path not in self._logs:
            if sys.platform != "linux":
                return None
            try:
                fd = os.memfd_create("spreeze-log", os.MFD_CLOEXEC)
                fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND | os.O_RDWR)
            except OSError:
                return None
            self._logs[path] = KeptLog(path, fd)
            with contextlib.suppress(OSError):  # empty at first, for who follows it from the start
                os.close(_opened(path))
        return self._logs[path]

    def close(self) -> None:
        """Writes what is left and closes all; a disk that hangs is not waited for. All writers should have ended."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._move()
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def _move(self) -> int:
        found = 0
        for log in list(self._logs.values()):
            found += log.read()
            log.write()
        return found

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
        while not self._ending.wait(_HURRY_S if self._move() > _PIECE_BYTES // 4 else _PAUSE_S):
            pass
