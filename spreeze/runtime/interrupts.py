"""Ctrl-C once, twice; SIGTERM; Ctrl-Z; a closed terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Self

from spreeze.machine.awake import AWAKE
from spreeze.machine.output import BackgroundWriter, print_error, send_nowhere
from spreeze.machine.processes import ENDING, family, resume_family, stop_family
from spreeze.machine.watcher import NOTICED, OrphanWatch

_STUCK_S, _LONGEST_S = 1.5, 5.0
"""Time from the second Ctrl-C until this process ends by force: if it is stuck, and in any case."""
_SAME_POSITION_S = 1.0  # The main thread is stuck if its position has not changed for this long.
_LAST_WORDS_S = 0.5
AT_ONCE = 130  # exit code after a second Ctrl-C


class Interrupts:
    """Counts requests to stop while the context lasts.

    SIGHUP does not count: the run continues when its terminal is closed. Logouts and batch systems repeat SIGTERM, so
    only a second Ctrl-C means hurry. It ends this process whatever it does: in order within seconds, else by force.
    Ctrl-Z stops this process and all that it has started; the time until SIGCONT does not count for the run
    (``machine.awake``). Writing to the terminal from the background stops nothing. No handler raises, except within
    ``abandonable`` and where ``on_signal`` does.
    """

    def __init__(self) -> None:
        self.count = 0  # requests to stop: each Ctrl-C, and SIGTERM once
        self.stop_file: Path | None = None  # asks to stop while it exists (the run's control/stop)
        self.cause: str | None = None
        self.hung_up = False  # the terminal was closed
        self.on_stop: Callable[[], None] = lambda: None
        """Called before Ctrl-Z stops this process, and after it continues."""
        self.on_tick: list[Callable[[], None]] = []
        """Called a few times a second by another thread than the main one."""
        self.on_signal: Callable[[], None] = lambda: None
        """Called in the main thread after a second Ctrl-C and after ``poke``; may raise."""
        self.on_exit: Callable[[str], None] = lambda reason: None
        """Called with the reason before this process ends by force."""
        self._ctrl_c, self._terminated = 0, False
        self._abandonable = 0
        self._urgent_s: float | None = None
        self._position: object = None
        self._position_s = 0.0
        self._guard: OrphanWatch | None = None
        self._terminals: list[int] = []
        self._old: dict[signal.Signals, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        # Determined now: the descriptor of a closed terminal is no longer recognized as one.
        self._terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]
        self._main = threading.get_ident()
        handlers: dict[signal.Signals, Any] = dict.fromkeys(ENDING, self._handle)
        handlers |= {signal.SIGCONT: self._continued, signal.SIGTTOU: signal.SIG_IGN}
        handlers[signal.SIGUSR2] = lambda number, frame: self.on_signal()
        if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
            handlers[signal.SIGTSTP] = self._stop
        for number, handler in handlers.items():
            self._old[number] = signal.signal(number, handler)
        self._stack.enter_context(AWAKE.watched(self._tick))
        return self

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.hung_up = True
            with contextlib.suppress(OSError):
                send_nowhere(*self._terminals)  # printing to a closed terminal would fail
            return
        if number == signal.SIGTERM:
            if self._terminated:
                return
            self._terminated = True
        else:
            self._ctrl_c += 1
        self.count += 1
        self.cause = self.cause or ("SIGTERM" if number == signal.SIGTERM else "Ctrl-C")
        if self.urgent:
            self._urgent_s = self._urgent_s or time.monotonic()
            if self._guard is not None:
                self._guard.notify(NOTICED)
            if self._abandonable:
                raise KeyboardInterrupt
            self.on_signal()

    def _stop(self, number: int, frame: types.FrameType | None) -> None:
        """Ctrl-Z: all that this process started stops, then itself, until SIGCONT."""
        self.on_stop()
        stopped = stop_family()
        AWAKE()
        os.kill(os.getpid(), signal.SIGSTOP)  # SIGTSTP would not stop a process without a shell that can continue it
        AWAKE.continued(0.0)
        resume_family(stopped)

    def _continued(self, number: int, frame: types.FrameType | None) -> None:
        AWAKE.continued()
        self.on_stop()

    def poke(self) -> None:
        """Makes the main thread call ``on_signal``; a blocking system call is interrupted."""
        signal.pthread_kill(self._main, signal.SIGUSR2)

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @property
    def stop_requested(self) -> bool:
        """True if the run has to stop in order."""
        return self.count >= 1 or (self.stop_file is not None and self.stop_file.exists())

    def again(self) -> Callable[[], bool]:
        """Returns a function that is true after another request to stop, or one to stop at once."""
        before = self.count
        return lambda: self.urgent or self.count > before

    @property
    def urgent(self) -> bool:
        """True if the run has to stop at once."""
        return self._ctrl_c >= 2

    @contextlib.contextmanager
    def abandonable(self) -> Iterator[None]:
        """Within the block a second Ctrl-C raises KeyboardInterrupt; for long work that leaves nothing behind."""
        self._abandonable += 1
        try:
            if self.urgent:
                raise KeyboardInterrupt
            yield
        finally:
            self._abandonable -= 1

    @contextlib.contextmanager
    def guarded_by(self, guard: OrphanWatch) -> Iterator[None]:
        """Within the block the watcher kills this process if a second Ctrl-C does not even reach Python's code."""
        self._guard = guard
        guard.receive_signals()
        try:
            yield
        finally:
            self._guard = None
            signal.set_wakeup_fd(-1)

    # --- in the thread that watches ---

    def _tick(self) -> None:
        if self._guard is not None:
            self._guard.tick()
        for callback in self.on_tick:
            callback()
        if self._urgent_s is None:
            return
        now_s, position = time.monotonic(), _position_of(self._main)
        if position != self._position:
            self._position, self._position_s = position, now_s
        waited_s = now_s - self._urgent_s
        if waited_s > _LONGEST_S or (waited_s > _STUCK_S and now_s - self._position_s > _SAME_POSITION_S):
            self.end_by_force("interrupted and killed", AT_ONCE)

    def end_by_force(self, reason: str, code: int) -> NoReturn:
        """Ends this process and all that it has started, whatever the main thread does."""
        for process in family():
            with contextlib.suppress(Exception):
                process.kill()
        thread = threading.Thread(target=self.on_exit, args=(reason,), daemon=True)  # the disk may not answer
        thread.start()
        thread.join(_LAST_WORDS_S)
        if isinstance(sys.stderr, BackgroundWriter):  # no other stream is sure not to wait
            print_error(reason)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, BackgroundWriter):
                stream.drain(within_s=_LAST_WORDS_S)
        os._exit(code)


def _position_of(thread: int) -> object:
    """Position of a thread in the code; unchanged while it waits, or computes outside of Python."""
    innermost = sys._current_frames().get(thread)
    return innermost and [(id(frame.f_code), frame.f_lasti) for frame, _ in traceback.walk_stack(innermost)]
