"""The watch over environments in this process: one that hangs is abandoned, or ends the run."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Callable
from pathlib import Path

from spreeze.errors import WorkerError
from spreeze.machine.awake import AWAKE
from spreeze.metrics.table import DEADLINE_S, Phase, deadline_text
from spreeze.runtime.interrupts import Interrupts

_STOP_S = 6.0  # Time for an environment to return after a request to stop [s], equal to that of workers.
_GRACE_S = 2.0  # Time for its code to end after an error was raised in it [s].
RUN = "run"
"""Name of the one process, in metrics and of its log."""


class EnvironmentHung(WorkerError):
    """Raised in an environment's code that did not return in time; costs the episode."""


class HangWatch:
    """Knows since when this process is in an environment's code.

    An ``EnvironmentHung`` is raised in code that does not return in time. Where it is not reached or catches that, the
    process ends with the reason. The stack of such code is in ``logs/run.log``.
    """

    def __init__(
        self,
        interrupts: Interrupts,
        run_dir: Path,
        step_deadline_s: float,
        stopping: Callable[[], bool],
        start_deadline_s: float = DEADLINE_S[Phase.INIT],
    ) -> None:
        """``stopping``: whether the run was asked to stop in another way than by a signal."""
        self._interrupts, self._log, self._stopping = interrupts, run_dir / "logs" / f"{RUN}.log", stopping
        self._deadline_s = DEADLINE_S | {
            Phase.STEP: step_deadline_s,
            Phase.INIT: start_deadline_s,
            Phase.RESET: max(start_deadline_s, DEADLINE_S[Phase.RESET]),
            Phase.EVALUATE: max(start_deadline_s, DEADLINE_S[Phase.EVALUATE]),
        }
        self._phase: Phase | None = None
        self._calls = 0
        self._seen, self._seen_s = -1, AWAKE()
        self._asked_s: float | None = None
        self._poked_s: float | None = None
        self._reason: tuple[int, str] | None = None
        interrupts.on_tick.append(self.check)
        interrupts.on_signal = self.on_signal

    def note(self, phase: Phase) -> None:
        """The next call is into an environment."""
        self._phase = phase
        self._calls += 1

    def done(self) -> None:
        """Marks the end of the environment's code: code of this package follows."""
        self._phase = None

    def close(self) -> None:
        self._interrupts.on_tick.remove(self.check)
        self._interrupts.on_signal = lambda: None

    def check(self) -> None:
        """Looks how long the latest call has lasted; called by another thread a few times a second."""
        now_s, calls, phase = AWAKE(), self._calls, self._phase
        if self._asked_s is None and (self._interrupts.stop_requested or self._stopping()):
            self._asked_s = now_s
        if phase is None or calls != self._seen:
            self._seen, self._seen_s, self._poked_s = calls, now_s, None
            return
        silent_s = now_s - self._seen_s
        most_s = self._deadline_s[phase]
        if silent_s > most_s:
            reason = f"it has not returned within {most_s:g} s in phase {phase.name}{deadline_text(phase, most_s)}"
        elif self._asked_s is not None and now_s - max(self._asked_s, self._seen_s) > _STOP_S:
            reason = f"it has not returned in phase {phase.name} within {_STOP_S:g} s after the request to stop"
        else:
            return
        if self._poked_s is None:
            self._poked_s = now_s
            self._write_stack()
            self._reason = calls, f"{reason}; its stack is in logs/{RUN}.log"
            self._interrupts.poke()
        elif now_s - self._poked_s > _GRACE_S:
            self._interrupts.end_by_force(f"the environment hangs: {reason}; its stack is in {self._log}", 1)

    def _write_stack(self) -> None:
        with contextlib.suppress(OSError), open(self._log, "a") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    def on_signal(self) -> None:
        """Raises in the main thread what ends a hanging call, or what a second Ctrl-C asks for."""
        if self._phase is None:
            return
        if self._interrupts.urgent:
            raise KeyboardInterrupt
        if self._reason is not None and self._reason[0] == self._calls:
            reason, self._reason = self._reason[1], None
            raise EnvironmentHung(reason)
