"""A clock that leaves out time in which this process did not run: stopped (Ctrl-Z, SIGSTOP), frozen, or asleep."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

_TICK_S = 0.25
_ASLEEP_S = 5.0  # A gap this long between two readings counts as sleep; after SIGCONT, a gap of two ticks does.
_IDLE_SHARE = 0.2  # CPU time as a share of a gap; above it the process was busy, in code that lets no other thread run.


class AwakeClock:
    """A monotonic clock [s] that stands still while this process does not run.

    Only gaps within ``watched`` count, where a thread reads the clock regularly: a busy or blocked main thread is no
    sleep. Linux's monotonic clock itself leaves out the time in which the machine is suspended.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, processor_s: Callable[[], float] = time.process_time
    ) -> None:
        self._clock, self._processor_s = clock, processor_s
        self._lock = threading.RLock()  # a signal handler may read it, too
        self._watchers = 0
        self._threshold_s = _ASLEEP_S
        self._read_s, self._used_s = clock(), processor_s()
        self.slept_s = 0.0  # Time that was left out so far.

    def __call__(self) -> float:
        with self._lock:
            now_s, used_s = self._clock(), self._processor_s()
            gap_s = now_s - self._read_s
            if self._watchers and gap_s > self._threshold_s and used_s - self._used_s < _IDLE_SHARE * gap_s:
                self.slept_s += gap_s
            self._read_s, self._used_s, self._threshold_s = now_s, used_s, _ASLEEP_S
            return now_s - self.slept_s

    def continued(self, threshold_s: float = 2 * _TICK_S) -> None:
        """Called after SIGCONT: the time since the last reading was sleep if it is longer than ``threshold_s``."""
        with self._lock:
            self._threshold_s = threshold_s
            self()

    @contextlib.contextmanager
    def watched(self, on_tick: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Detects sleep within the block; a thread calls ``on_tick`` several times a second."""
        ending = threading.Event()

        def watch() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles them
            while not ending.wait(_TICK_S):
                self()
                on_tick()

        thread = threading.Thread(target=watch, name="awake", daemon=True)
        self()
        self._watchers += 1
        thread.start()
        try:
            yield
        finally:
            ending.set()
            self._watchers -= 1
            thread.join()


AWAKE = AwakeClock()  # the clock of this process
