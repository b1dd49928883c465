"""Workers that take turns in this process, in place of a process for each, and the watch over their environments."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from time import monotonic

from spreeze.config.schema import SamplingConfig
from spreeze.errors import ResourceError, WorkerError
from spreeze.machine.awake import AWAKE
from spreeze.machine.output import stdout_to_stderr
from spreeze.machine.processes import DEATH_S, own_mark
from spreeze.run_directory import RunDir
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import Launcher, RunContext, Worker, WorkerSpec, open_log
from spreeze.transport.shared_memory import readable, with_own_descriptors
from spreeze.workers.context import WorkerContext
from spreeze.workers.main import load_named, report_failure
from spreeze.workers.roles import DEADLINE_S, Phase, deadline_text, deadlines

_STOP_S = 6.0  # Time for an environment to return after a request to stop [s], equal to that of workers.
_GRACE_S = 2.0  # Time for its code to end after an error was raised in it [s].
RUN = "run"  # name of the one process, in metrics and of its log
_MIN_SILENT_S = 30.0
"""Shortest time after which a process counts as hung in code that lets no other thread run: imports take seconds."""
_MARGIN_S = 5.0  # For the deadline to be met in the usual way before.
_IN_ENVIRONMENT = (Phase.INIT, Phase.RESET, Phase.STEP, Phase.EVALUATE, Phase.DONE)


class EnvironmentHung(WorkerError):
    """Raised in an environment's code that did not return in time; costs the episode."""


class HangWatch:
    """Raises ``EnvironmentHung`` in environment code that is late, logs its stack; if in vain, ends the process."""

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
        self._deadline_s = deadlines(step_deadline_s, start_deadline_s)
        self._phase: Phase | None = None
        self._calls = 0
        self._seen, self._seen_s = -1, AWAKE()
        self._requested_s: float | None = None
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
        """Checks how long the latest call has lasted; called by another thread a few times a second."""
        now_s, calls, phase = AWAKE(), self._calls, self._phase
        if self._requested_s is None and (self._interrupts.stop_requested or self._stopping()):
            self._requested_s = now_s
        if phase is None or calls != self._seen:
            self._seen, self._seen_s, self._poked_s = calls, now_s, None
            return
        limit_s = self._deadline_s[phase]
        if now_s - self._seen_s > limit_s:
            reason = f"it has not returned within {limit_s:g} s in phase {phase.name}{deadline_text(phase, limit_s)}"
        elif self._requested_s is not None and now_s - max(self._requested_s, self._seen_s) > _STOP_S:
            reason = f"it has not returned in phase {phase.name} within {_STOP_S:g} s after the request to stop"
        else:
            return
        if self._poked_s is None:
            self._poked_s = now_s
            with contextlib.suppress(OSError), open(self._log, "a") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            self._reason = calls, f"{reason}; its stack is in logs/{RUN}.log"
            self._interrupts.poke()
        elif now_s - self._poked_s > _GRACE_S:
            self._interrupts.end_by_force(f"the environment hangs: {reason}; its stack is in {self._log}", 1)

    def on_signal(self) -> None:
        """Raises the exception that ends a hanging call, or that of a second Ctrl-C, in the main thread."""
        if self._phase is None:
            return
        if self._interrupts.urgent:
            raise KeyboardInterrupt
        if self._reason is not None and self._reason[0] == self._calls:
            reason, self._reason = self._reason[1], None
            raise EnvironmentHung(reason)


class TurnLauncher(Launcher):
    """Runs all workers in turns, each as far as it gets without waiting for another one."""

    def __init__(self, run_dir: RunDir, interrupts: Interrupts, part: SamplingConfig) -> None:
        self.interrupts = interrupts
        self.silent_s = max(_MIN_SILENT_S, part.step_deadline_s) + _MARGIN_S
        self.watch = HangWatch(
            interrupts, run_dir.path, part.step_deadline_s, lambda: run_dir.requested("stop"), part.start_deadline_s
        )
        self.has_changed = False
        """True since a worker has sent a message or ended."""
        self.meanwhile: Callable[[], None] = lambda: None
        self._workers: list[TurnWorker] = []

    @contextlib.contextmanager
    def supervised(self, run_dir: Path, nonce: str) -> Iterator[None]:
        """Also marks what the environments of this process start, and keeps their output from standard output."""
        with open_log(run_dir, RUN) as log, own_mark(nonce), stdout_to_stderr():
            faulthandler.register(signal.SIGUSR1, log, all_threads=True)
            try:
                yield
            finally:
                faulthandler.unregister(signal.SIGUSR1)
                self.watch.close()

    def start(self, spec: WorkerSpec, run_context: RunContext) -> TurnWorker:
        """Starts a worker, up to its first turn."""
        worker = TurnWorker(spec, run_context, self)
        self._workers = [other for other in self._workers if other.poll() is None]
        self._workers.append(worker)
        # The learner comes last: its reason for the end holds for all.
        self._workers.sort(key=lambda worker: worker.spec.role.learns)
        worker.turn()
        return worker

    def wait(self, fds: Collection[int], seconds: float, meanwhile: Callable[[], None]) -> list[int]:
        """Gives each worker its turns for ``seconds``, or until one has sent a message or ended."""
        end, self.meanwhile = monotonic() + seconds, meanwhile
        while True:
            for worker in self._workers:
                worker.turn()
            if self.has_changed or self.interrupts.count or monotonic() >= end:
                break
        self.has_changed = False
        return readable(fds, 0.0)


class TurnWorker(Worker):
    """A worker that works in this process whenever it has its turn."""

    def __init__(self, spec: WorkerSpec, run_context: RunContext, launcher: TurnLauncher) -> None:
        read_fd, self._write_fd = os.pipe()
        super().__init__(spec=spec, message_fd=read_fd)
        os.set_blocking(read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._launcher, self._errors_dir = launcher, run_context.run_dir / "errors"
        self._context = TurnContext(self, run_context, launcher, self._write_fd)
        self._code: int | None = None
        job = with_own_descriptors(spec.job)
        self._turns: Iterator[None] = load_named(job.entry_point)(self._context, job)
        self._context.heartbeat(Phase.INIT)

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def process_name(self) -> str:
        return RUN

    def turn(self) -> None:
        """Works until it yields; not between an interrupt and the supervisor's stop request."""
        if self._code is not None or self._context.is_ahead:
            return
        try:
            next(self._turns)
        except StopIteration:
            self._context.heartbeat(Phase.DONE)
            self._end(0)
        except KeyboardInterrupt:  # a second Ctrl-C, in an environment's code
            self._end(-signal.SIGINT)
        except BaseException as error:
            report_failure(self._context, self._errors_dir, error)
            self._end(1)
        finally:
            self._launcher.watch.done()

    def _end(self, code: int) -> None:
        self._code, self._launcher.has_changed = code, True

    def poll(self) -> int | None:
        return self._code

    def signal_group(self, number: signal.Signals) -> None:
        """Ends it on SIGKILL; pausing this process pauses all its workers."""
        if number == signal.SIGKILL and self._code is None:
            with contextlib.suppress(BaseException):
                self._turns.close()  # type: ignore[attr-defined]
            self._end(-signal.SIGKILL)

    def kill_and_wait(self, within_s: float = DEATH_S) -> int | None:
        self.signal_group(signal.SIGKILL)
        return self._code

    def close(self) -> None:
        self._context.close()
        os.close(self.message_fd)


class TurnContext(WorkerContext):
    """A worker's view of its run when it takes turns."""

    takes_turns = True

    def __init__(self, worker: TurnWorker, run_context: RunContext, launcher: TurnLauncher, message_fd: int) -> None:
        spec, self._launcher = worker.spec, launcher
        status = with_own_descriptors(run_context.status.handle).attach()
        super().__init__(spec.address, status, spec.row, message_fd, run_context.run_dir / "errors")
        self._has_envs = spec.role.has_envs

    def heartbeat(self, phase: Phase) -> None:
        super().heartbeat(phase)
        if self._has_envs and phase in _IN_ENVIRONMENT:
            self._launcher.watch.note(phase)
        else:
            self._launcher.watch.done()

    @property
    def stopping(self) -> bool:
        return self._launcher.interrupts.count > 0 or super().stopping

    @property
    def is_ahead(self) -> bool:
        """True if it is to stop before its supervisor knows."""
        return self.stopping and not super().stopping

    def send(self, kind: str, **fields: object) -> None:
        super().send(kind, **fields)
        self._launcher.has_changed = True

    def saving(self, left_bytes: int) -> None:
        """Also lets the supervisor report it; a ResourceError gives up the checkpoint on a second Ctrl-C."""
        if left_bytes and self._launcher.interrupts.urgent:
            raise ResourceError("skipped by a second Ctrl-C")
        super().saving(left_bytes)
        self._launcher.meanwhile()
