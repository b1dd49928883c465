"""Output of the commands, which survives a closed terminal, a full disk, and libraries that print from C.

All output of a command goes through here (tables through ``terminal.Screen``): names, states and errors may come from a
run of another machine, and a terminal would obey escape sequences in them.

A command that supervises others prints within ``background_output``: a terminal without a reader (Ctrl-S, a dropped
connection, a stopped pager) then blocks only a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import math
import os
import signal
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import IO, Any, TextIO, cast

from spreeze.formatting import printable

_STANDARD_FDS = (0, 1, 2)
_MAX_WAITING_BYTES = 2**18
_CHUNK_BYTES = 4096
_TERMINAL_S, _PIPE_S = 2.0, 60.0
"""Longest time without progress for writing the last lines: a terminal is read at once or not at all, while a pipe's
reader may be busy."""
_RETRY_S = 0.2


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Opens the standard streams that the caller has closed on the null device, and flushes them at the end.

    Without it, the next file opened would take a closed stream's number and get its output. A reader may have ended.
    """
    for fd in _STANDARD_FDS:
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(null, True)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if fd else "r"
            setattr(sys, name, open(fd, mode, encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)


def silence(stream: IO[Any]) -> None:
    """Redirects a stream to /dev/null; otherwise flushing its buffer would fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        send_nowhere(stream.fileno())


def send_nowhere(*fds: int) -> None:
    """Redirects descriptors to /dev/null; an OSError if no descriptor is free."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        for fd in fds:
            os.dup2(null, fd)
    finally:
        os.close(null)


class BackgroundWriter:
    """A text stream whose ``write`` never waits for a reader: a thread writes to the descriptor.

    Up to 256 kB are queued while nobody reads; further lines are dropped, and their number is written afterwards.
    """

    def __init__(self, stream: TextIO, *fds: int) -> None:
        """``fds``: all descriptors with the same target as ``stream``; they are silenced together."""
        self._stream, self._fds = stream, fds
        self.encoding = stream.encoding or "utf-8"
        self._is_terminal = stream.isatty()
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = self._dropped = 0
        self._silenced = self._ended = False
        self._progress_s = time.monotonic()
        self._changed = threading.Condition()  # of a reentrant lock: a signal handler may write, too
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def behind(self) -> bool:
        """True while earlier text waits for a reader."""
        return self._waiting_bytes > 0

    def write(self, text: str, *, keep: bool = False) -> int:
        """Queues text, or drops it if too much is queued already; with ``keep`` it is never dropped."""
        data = text.encode(self.encoding, errors="replace")
        with self._changed:
            if self._silenced or self._ended:
                return len(text)
            if self._waiting_bytes > _MAX_WAITING_BYTES and not keep:
                self._dropped += text.count("\n")
                return len(text)
            self._report_dropped()
            self._put(data)
        return len(text)

    def flush(self) -> None:
        """Does nothing: the thread writes as soon as it can."""

    def drain(self, since_s: float | None = None, *, within_s: float | None = None) -> bool:
        """Waits until all text is written, as long as there is progress; returns True if it is.

        ``since_s``: monotonic time before which no progress was due; ``within_s``: longest wait in any case.
        """
        since_s = time.monotonic() if since_s is None else since_s
        patience_s = _TERMINAL_S if self._is_terminal else _PIPE_S
        with self._changed:
            while (self._waiting or self._dropped) and not self._silenced:
                now_s = time.monotonic()
                if now_s - max(since_s, self._progress_s) > patience_s or (
                    within_s is not None and now_s - since_s > within_s
                ):
                    return False
                self._changed.wait(0.05)
        return True

    def forget(self) -> None:
        """Drops the queued text."""
        with self._changed:
            self._waiting.clear()
            self._waiting_bytes = self._dropped = 0

    def end(self) -> bool:
        """Ends the thread and drops the queued text; returns True if there was none."""
        with self._changed:
            self._ended, done = True, not self._waiting
            self.forget()
            self._changed.notify_all()
        self._thread.join(_RETRY_S)
        return done

    def _put(self, data: bytes) -> None:
        if data:
            self._waiting.append(memoryview(data))
            self._waiting_bytes += len(data)
            self._changed.notify_all()

    def _report_dropped(self) -> None:
        if self._dropped and self._waiting_bytes <= _MAX_WAITING_BYTES:
            lines = "1 line was" if self._dropped == 1 else f"{self._dropped} lines were"
            self._dropped = 0
            self._put(f"[{lines} dropped: nobody read the output]\n".encode())

    def silence(self) -> None:
        """Redirects the descriptors to /dev/null."""
        with self._changed:
            self._silenced = True
            self.forget()
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            send_nowhere(*self._fds)

    def _run(self) -> None:
        # The main thread handles signals. With SIGTTOU blocked, no write stops the process either.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with self._changed:
                while not self._waiting and not self._dropped and not self._ended:
                    self._changed.wait()
                if not self._waiting:
                    self._report_dropped()
                if not self._waiting:
                    return
                data = self._waiting[0]
            try:
                written = os.write(self._fds[0], data[:_CHUNK_BYTES]) if self._may_write() else 0
            except BlockingIOError:  # another program made the terminal non-blocking
                written = 0
            except OSError:  # closed pipe or terminal, full disk
                self.silence()
                return
            with self._changed:
                if self._silenced:
                    return
                if written:
                    self._progress_s = time.monotonic()
                if written and self._waiting and self._waiting[0] is data:
                    self._waiting_bytes -= written
                    self._waiting[0] = data[written:]
                    if not self._waiting[0]:
                        self._waiting.popleft()
                    self._changed.notify_all()
            if not written:
                time.sleep(_RETRY_S)

    def _may_write(self) -> bool:
        """False for a background process of a terminal that forbids its output (``stty tostop``)."""
        if not self._is_terminal:
            return True
        try:
            return os.tcgetpgrp(self._fds[0]) == os.getpgrp() or not termios.tcgetattr(self._fds[0])[3] & termios.TOSTOP
        except (OSError, termios.error):  # not the terminal of this session
            return True


@contextlib.contextmanager
def followed(stream: TextIO) -> Iterator[TextIO | BackgroundWriter]:
    """Yields a stream for lines that must not wait for a reader; for a caller's own standard output."""
    writer = in_background(stream)
    try:
        yield stream if writer is None else writer
    finally:
        if writer is not None:
            with contextlib.suppress(KeyboardInterrupt):
                writer.drain()
            writer.end()


def in_background(stream: TextIO, *more_fds: int) -> BackgroundWriter | None:
    """A writer to the descriptor of a stream; None if it is no plain file (captured, or a notebook's)."""
    if not isinstance(stream, io.TextIOWrapper):
        return None
    try:
        fd = stream.fileno()
        stream.flush()
    except (OSError, ValueError):
        return None
    return BackgroundWriter(stream, fd, *more_fds)


@contextlib.contextmanager
def background_output() -> Iterator[None]:
    """Within the block, printing never waits for a reader.

    At the end the rest is written: until Ctrl-C, or while some is read, every 2 s by a terminal, every 60 s by a pipe.
    """
    before = sys.stdout, sys.stderr
    same_file = _same_file(*before)
    out = in_background(sys.stdout, *([sys.stderr.fileno()] if same_file else []))
    error = out if same_file else in_background(sys.stderr)
    if out is not None:
        sys.stdout = cast(TextIO, out)
    if error is not None:
        sys.stderr = cast(TextIO, error)
    try:
        yield
    finally:
        writers = dict.fromkeys(writer for writer in (out, error) if writer is not None)
        since_s = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt):
            for writer in writers:
                writer.drain(since_s)
        for writer in writers:
            if not writer.end():
                writer.silence()  # later output would wait
        sys.stdout, sys.stderr = before


def _same_file(*streams: TextIO) -> bool:
    """True if both streams write to one file or terminal, where the order of their lines matters."""
    try:
        return os.path.sameopenfile(*(stream.fileno() for stream in streams))
    except (OSError, ValueError, AttributeError):
        return False


def emit(document: dict[str, Any]) -> None:
    """Writes the one JSON document; non-finite numbers become null."""
    write(sys.stdout, json.dumps(_plain(document), indent=1, allow_nan=False) + "\n", keep=True)


def say(text: str, *, as_json: bool = False, keep: bool = False) -> None:
    """Prints one line to stdout, or to stderr if stdout belongs to the JSON document; with ``keep`` never dropped."""
    write(sys.stderr if as_json else sys.stdout, text + "\n", keep=keep)


def print_error(text: str) -> None:
    """Prints ``error: ...`` as one line to stderr."""
    write(sys.stderr, f"error: {' '.join(text.split())}\n", keep=True)


def write(stream: TextIO | BackgroundWriter | None, text: str, *, keep: bool = False) -> None:
    """Writes text without control characters; a closed pipe or a full disk only silences the stream."""
    if stream is None:  # closed before the process started
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = printable(text).encode(encoding, errors="replace").decode(encoding)
    if isinstance(stream, BackgroundWriter):
        stream.write(shown, keep=keep)
        return
    try:
        stream.write(shown)
        stream.flush()
    except (OSError, ValueError):
        silence(stream)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirects descriptor 1 to descriptor 2 inside the block, so that stdout holds the JSON document alone."""
    _flush_stdout()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        _flush_stdout()
        ctypes.CDLL(None).fflush(None)  # text that Bullet printed from C would otherwise appear after the block
        os.dup2(saved, 1)
        os.close(saved)


def _flush_stdout() -> None:
    """Writes the text buffered for descriptor 1 before that is redirected."""
    stream: object = sys.stdout
    if not isinstance(stream, BackgroundWriter):
        _flush(sys.stdout)
    elif not stream.drain(within_s=_TERMINAL_S):
        stream.forget()


def _flush(stream: TextIO) -> None:
    try:
        stream.flush()
    except (OSError, ValueError):  # the reader has ended
        silence(stream)
