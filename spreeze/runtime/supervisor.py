"""The supervisor: reads the workers' messages, samples their counters, decides when the run is over."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from spreeze.errors import WorkerError
from spreeze.formatting import size
from spreeze.machine.orphan_cleanup import end_orphans
from spreeze.machine.processes import DEATH_S, left_behind
from spreeze.metrics.table import DEADLINE_S, Phase
from spreeze.run_directory import RunDir, group_folder
from spreeze.runtime.cpu_governor import GovernorLoop
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher, RunContext, WorkerProcess, WorkerSpec
from spreeze.runtime.rates import CounterSample
from spreeze.runtime.recorder import SAMPLE_S, Recorder
from spreeze.transport import status_table as words
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.shared_memory import readable
from spreeze.transport.status_table import StatusTable
from spreeze.workers.roles import ROLES, Address, Loss, RestartLimit, Role

_LOOK_S = 0.05


class Supervisor:
    """Watches the workers of one run until all have ended."""

    def __init__(
        self,
        run_dir: RunDir,
        status: StatusTable,
        workers: ProcessSupervisor,
        read: Callable[[], CounterSample],
        recorder: Recorder,
        interrupts: Interrupts,
        governing: GovernorLoop | None = None,
    ) -> None:
        """``read`` gives all counters; after the stop flag is set, the final ones."""
        self._run_dir, self._status, self._workers = run_dir, status, workers
        self._reading, self._recorder, self._interrupts = read, recorder, interrupts
        self._governing = governing
        self._finished: dict[Address, str] = {}
        self._next_sample_s = 0.0
        self.stopping_s = 0.0
        """How long stopping the workers took."""

    def run(self, on_sample: Callable[[], None]) -> None:
        """Watches until a stop condition, an interrupt, or a failure that no restart can repair.

        ``on_sample`` is called after each sample of the metrics, twice a second.
        """
        recorder = self._recorder
        try:
            while True:
                self._handle(self._workers.wait(_LOOK_S))
                self._handle(self._workers.watch())
                self._report_hang_up()
                if time.monotonic() >= self._next_sample_s:
                    self._next_sample_s = time.monotonic() + SAMPLE_S
                    self._sample()
                    on_sample()
                reason = self._stop_reason()
                if reason is not None:
                    recorder.outcome.stopped_by = reason
                    return
        except WorkerError as error:
            recorder.outcome.stopped_by = "failure"
            recorder.outcome.error = str(error)
            recorder.event("error", str(error))

    def stop(self) -> None:
        """Ends the workers and takes the last sample. All workers have ended when this returns."""
        self._recorder.ending()
        start_s = time.monotonic()
        self._run_dir.write_state(state="stopping")
        try:
            self._workers.stop(hurry=lambda: self._interrupts.urgent, on_messages=self._handle, on_wait=self._waited)
        finally:
            self.stopping_s = time.monotonic() - start_s
            with contextlib.suppress(OSError):  # an abandoned checkpoint may take gigabytes
                for address in self._workers.learners():
                    folder = group_folder(self._run_dir.path, address.group) / "checkpoints"
                    CheckpointStore(folder).remove_unfinished()
            self._recorder.first_error = self._workers.first_error
            self._recorder.sample(self._reading(), pids=None, restarts=self._workers.restarts,
                                  samplers_alive=0, state="stopping")
            self._recorder.finish(self._workers.restarts)

    def _waited(self, specs: list[WorkerSpec]) -> None:
        """Called while waiting for ``specs``; shows what learners still have to write."""
        self._report_hang_up()
        if any(spec.role.saves for spec in specs):
            groups = self._reading().groups
            self._recorder.saving(int(sum(group.learner["checkpoint_left_bytes"] for group in groups)))

    def _report_hang_up(self) -> None:
        if self._interrupts.hung_up:
            self._recorder.hung_up()

    def _stop_reason(self) -> str | None:
        if self._interrupts.count:
            return f"interrupt ({self._interrupts.cause})"
        if self._finished and len(self._finished) == len(self._workers.learners()):
            return next(iter(self._finished.values()))
        return self._recorder.stop_reason()

    def _handle(self, messages: list[dict[str, Any]]) -> None:
        outcome = self._recorder.outcome
        for message in messages:
            kind, source = message.get("kind"), str(message.get("from", "?"))
            if kind == "event":
                self._recorder.event(str(message.get("level", "info")), str(message.get("text", ""))[:2000], source)
            elif kind == "error":
                self._workers.note_error(source, str(message.get("error", ""))[:1000])
            elif kind == "evaluation":
                self._recorder.evaluation(message)
            elif kind == "started":
                outcome.device = message.get("device")
            elif kind == "finished" and (handle := self._workers.handles.get(source)) is not None:
                self._finished[handle.spec.address] = str(message.get("reason") or "updates")
                outcome.learned(handle.spec.address.group, message)

    def _sample(self) -> None:
        self._recorder.first_error = self._workers.first_error
        reading, pids = self._reading(), self._workers.pids()
        governed = self._governing.look(reading, {**pids, "supervisor": os.getpid()}) if self._governing else {}
        self._recorder.sample(reading, pids=pids, restarts=self._workers.restarts,
                              samplers_alive=sum(self._workers.alive(role) for role in ROLES.values() if role.steps),
                              governed=governed)
        paused = (self._run_dir.path / "control" / "pause-visualizer").exists()
        self._status.header[words.VISUALIZER_PAUSED] = int(paused)


_ASLEEP_S = 5.0
"""After a gap this long between two checks this process has slept, and the workers may have been silent for that."""
_STOP_S = 6.0
"""Time for a worker to end after it was asked to stop."""
_LAST_WORK = (Phase.UPDATE, Phase.PUBLISH, Phase.CHECKPOINT)
"""Phases before the learner's last checkpoint: no time limit while its heartbeat is in time."""
_MEMORY_S = 1.0
"""Time between two checks of the workers' memory."""
_STACK_S = 0.2
"""Time for a hung worker to write its stack into its log before it is killed."""


@dataclass
class WorkerHandle:
    """A supervised worker: its current process and its failures."""

    spec: WorkerSpec
    restarts: Restarts
    process: WorkerProcess | None = None
    finished: bool = False
    last_heartbeat: int = -1
    heartbeat_seen_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    reported: str | None = None
    """The error that the worker reported before its end was noticed."""


class ProcessSupervisor:
    """Starts, watches, restarts and stops workers.

    ``forgiven_failures`` crashes of each worker are restarted at once and do not count toward its limit.
    """

    def __init__(
        self, run_context: RunContext, status: StatusTable, *, on_event: Callable[[str, str], None],
        launcher: Launcher = FRESH, clock: Callable[[], float] = time.monotonic,
        forgiven_failures: int = 0,
    ) -> None:
        self._run_context, self._status = run_context, status
        self.on_event, self._launcher, self._clock = on_event, launcher, clock
        self._forgiven = forgiven_failures
        self.handles: dict[str, WorkerHandle] = {}
        self.first_error: tuple[str, str] | None = None
        self._last_watch_s: float | None = None
        self._next_memory_s = 0.0

    def add(self, spec: WorkerSpec) -> None:
        """Starts a worker and keeps it running from now on.

        Raises:
            OSError: it could not be started (descriptor, process or memory limit).
        """
        handle = WorkerHandle(spec=spec, restarts=Restarts(spec.role.limit, self._forgiven))
        self.handles[spec.name] = handle
        self._launch(handle)

    def _launch(self, handle: WorkerHandle) -> None:
        self._status.control(handle.spec.row)[words.PHASE] = int(Phase.START)
        handle.process = self._launcher.start(handle.spec, self._run_context)
        handle.last_heartbeat, handle.heartbeat_seen_s, handle.reported = -1, self._clock(), None

    @property
    def restarts(self) -> int:
        """Workers started again so far."""
        return sum(handle.restarts.total for handle in self.handles.values())

    def alive(self, role: Role) -> int:
        return sum(handle.process is not None for handle in self.handles.values() if handle.spec.role is role)

    def learners(self) -> list[Address]:
        """Addresses of the learners, one in each group."""
        return [handle.spec.address for handle in self.handles.values() if handle.spec.role.learns]

    def pids(self) -> dict[str, int]:
        """Name -> process id of the running workers."""
        return {name: handle.process.pid for name, handle in self.handles.items() if handle.process is not None}

    def wait(self, seconds: float) -> list[dict[str, Any]]:
        """Waits for messages for at most ``seconds``; returns them."""
        processes = [handle.process for handle in self.handles.values() if handle.process is not None]
        by_fd = {process.message_fd: process for process in processes}
        try:
            ready = readable(by_fd, seconds) if by_fd else []
        except InterruptedError:
            return []
        if len(ready) == len(by_fd) == 0:
            time.sleep(seconds)
        messages: list[dict[str, Any]] = []
        for fd in ready:
            messages += by_fd[fd].read_messages()
        for message in messages:
            handle = self.handles.get(str(message.get("from"))) if message.get("kind") == "error" else None
            if handle is not None:
                handle.reported = str(message.get("error"))
        if ready and not messages:
            # Only closed pipes of ending workers: do not spin until they are reaped.
            time.sleep(min(seconds, 0.01))
        return messages

    def note_error(self, name: str, text: str) -> None:
        """Keeps the first error of any worker, which usually explains the others."""
        if self.first_error is None:
            self.first_error = (name, text)

    def watch(self) -> list[dict[str, Any]]:
        """Reaps, checks deadlines, restarts; returns the last messages of ended workers.

        Raises:
            WorkerError: a worker that the run needs was given up (see ``Role.lost``).
        """
        now = self._clock()
        if self._last_watch_s is not None and now - self._last_watch_s > _ASLEEP_S:
            self.on_event("warning", f"the machine slept for {now - self._last_watch_s:.0f} s; deadlines extended")
            for handle in self.handles.values():
                handle.heartbeat_seen_s = now
        self._last_watch_s = now
        messages: list[dict[str, Any]] = []
        look_at_memory = now >= self._next_memory_s
        if look_at_memory:
            self._next_memory_s = now + _MEMORY_S
        for handle in self.handles.values():
            if handle.process is not None:
                messages += self._check(handle, now) or (self._check_memory(handle, now) if look_at_memory else [])
            elif handle.restarts.due(now):
                self._restart(handle)
        self._judge()
        return messages

    def _check(self, handle: WorkerHandle, now: float) -> list[dict[str, Any]]:
        process = handle.process
        assert process is not None
        code = process.poll()
        if code is not None:
            return self._ended(handle, code, now)
        phase = self._note_heartbeat(handle, now)
        silent_s = now - handle.heartbeat_seen_s
        if silent_s <= (handle.spec.step_deadline_s if phase is Phase.STEP else DEADLINE_S[phase]):
            return []
        process.signal_group(signal.SIGUSR1)
        time.sleep(_STACK_S)
        self._kill([handle])
        why = f"silent for {silent_s:.0f} s in phase {phase.name}; its stack is in logs/{handle.spec.name}.log"
        return self._ended(handle, -int(signal.SIGKILL), now, why)

    def _note_heartbeat(self, handle: WorkerHandle, now: float) -> Phase:
        """Notes when the heartbeat last changed; returns the phase."""
        control = self._status.control(handle.spec.row)
        heartbeat, phase = int(control[words.HEARTBEAT]), Phase(int(control[words.PHASE]))
        if heartbeat != handle.last_heartbeat:
            handle.last_heartbeat, handle.heartbeat_seen_s = heartbeat, now
        return phase

    def _check_memory(self, handle: WorkerHandle, now: float) -> list[dict[str, Any]]:
        """Ends a worker above its memory limit, before the system kills one of its choice."""
        process, limit = handle.process, handle.spec.memory_limit_bytes
        if process is None or limit is None:
            return []
        used = private_memory_bytes(process.pid)
        if used is None or used <= limit:
            return []
        self._kill([handle])
        why = f"ended: it used {size(used)} of memory, its limit is {size(limit)} (does the environment leak?)"
        return self._ended(handle, -int(signal.SIGKILL), now, why)

    def _ended(self, handle: WorkerHandle, code: int, now: float, why: str | None = None) -> list[dict[str, Any]]:
        process = handle.process
        assert process is not None
        process.signal_group(signal.SIGKILL)
        messages = process.read_messages()
        process.close()
        handle.process = None
        phase = Phase(int(self._status.control(handle.spec.row)[words.PHASE]))
        if code == 0 and phase is Phase.DONE and handle.spec.role.may_end:
            handle.finished = True
            return messages
        reason = why or _exit_text(code, phase)
        reported = next((str(m.get("error")) for m in reversed(messages) if m.get("kind") == "error"), handle.reported)
        handle.failures.append(f"{reason}: {reported}" if reported else reason)
        self.note_error(handle.spec.name, handle.failures[-1])
        handle.restarts.failed(now)
        level = "error" if handle.restarts.given_up else "warning"
        self.on_event(level, f"{handle.spec.name} {handle.failures[-1]}{self._outlook(handle, now)}")
        return messages

    def _outlook(self, handle: WorkerHandle, now: float) -> str:
        if handle.restarts.given_up:
            return "; given up"
        wait_s = (handle.restarts.due_s or now) - now
        return "; restarting now" if wait_s <= 0 else f"; restarting in {wait_s:.1f} s"

    def _restart(self, handle: WorkerHandle) -> None:
        try:
            self._launch(handle)
        except OSError as error:
            handle.restarts.failed(self._clock())
            self.on_event("error", f"{handle.spec.name} could not be started: {error}")
            return
        handle.restarts.restarted()

    def _judge(self) -> None:
        for role in ROLES.values():
            handles = [handle for handle in self.handles.values() if handle.spec.role is role]
            for handle in handles if role.lost is Loss.ANY else ():
                if handle.restarts.given_up:
                    who = f"the {handle.spec.name}" if handle.spec.name == role.name else handle.spec.name
                    raise WorkerError(f"{who} failed {len(handle.failures)} times; the last: {handle.failures[-1]}")
            for group in {handle.spec.address.group for handle in handles} if role.lost is Loss.MOST else ():
                own = [handle for handle in handles if handle.spec.address.group == group]
                lost = [handle for handle in own if handle.restarts.quarantined and handle.process is None]
                if 2 * len(lost) > len(own):
                    raise WorkerError(f"{len(lost)} of {len(own)} {role.name}s keep failing; {lost[0].spec.name}: "
                                      f"{lost[0].failures[-1]}")

    def stop(
        self, hurry: Callable[[], bool], on_messages: Callable[[list[dict[str, Any]]], None],
        on_wait: Callable[[list[WorkerSpec]], None] = lambda specs: None,
    ) -> None:
        """Ends all workers: stop flag, then SIGKILL for late ones. All have ended when this returns.

        Meanwhile all are killed at once if ``hurry()``, and ``on_wait`` gets the workers still alive.
        """
        self._status.header[words.STOP] = 1
        start = self._clock()
        while living := [handle for handle in self.handles.values() if handle.process is not None]:
            on_messages(self.wait(0.02))
            on_wait([handle.spec for handle in living])
            in_hurry, late = hurry(), []
            for handle in living:
                if handle.process is not None and handle.process.poll() is not None:
                    on_messages(self._reap(handle))
                elif in_hurry or self._is_late(handle, start):
                    late.append(handle)
            self._kill(late)
            for handle in late:
                on_messages(self._reap(handle))
        end_orphans(self._run_context.nonce)

    def _is_late(self, handle: WorkerHandle, start: float) -> bool:
        """Whether a worker has used up its time to end since ``start``."""
        now = self._clock()
        if not handle.spec.role.saves:
            return now - start > _STOP_S
        phase = self._note_heartbeat(handle, now)
        silent_s = now - max(start, handle.heartbeat_seen_s)
        return silent_s > (DEADLINE_S[phase] if phase in _LAST_WORK else _STOP_S)

    def _kill(self, handles: list[WorkerHandle]) -> None:
        """Kills workers; those that do not die in time are reported and left behind."""
        processes = [handle.process for handle in handles if handle.process is not None]
        for process in processes:
            process.signal_group(signal.SIGKILL)
        end = self._clock() + DEATH_S
        for process in processes:
            if process.kill_and_wait(max(0.0, end - self._clock())) is None:
                self.on_event("error", left_behind(process.spec.name, process.pid))
        if self._last_watch_s is not None:
            self._last_watch_s = self._clock()  # this wait was no sleep

    def _reap(self, handle: WorkerHandle) -> list[dict[str, Any]]:
        process = handle.process
        assert process is not None
        process.signal_group(signal.SIGKILL)
        messages = process.read_messages()
        phase = Phase(int(self._status.control(handle.spec.row)[words.PHASE]))
        code = process.poll()
        if code != 0 and handle.spec.role.saves and phase is not Phase.DONE:
            how = "was left behind" if code is None else _exit_text(code, phase)
            self.on_event("warning", f"{handle.spec.name} {how} while stopping; its last checkpoint counts")
        process.close()
        handle.process = None
        return messages


def private_memory_bytes(pid: int) -> int | None:
    """Unshared resident memory of a process; None if it has ended."""
    with contextlib.suppress(psutil.Error, OSError):
        memory = psutil.Process(pid).memory_info()
        return int(memory.rss - getattr(memory, "shared", 0))
    return None


def _exit_text(code: int, phase: Phase) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"ended by {name} in phase {phase.name}"
    if code == 0:
        return f"ended by itself (exit code 0) in phase {phase.name} without being asked to"
    return f"ended with exit code {code} in phase {phase.name}"


@dataclass
class Restarts:
    """The failures of one worker."""

    limit: RestartLimit
    forgiven: int = 0
    """Failures that are restarted at once and do not count toward the limit."""
    total: int = 0
    due_s: float | None = None
    """Monotonic time of the next start; None while the worker runs or after it was given up."""
    quarantined: bool = False
    given_up: bool = False
    _times: deque[float] = field(default_factory=deque)

    def failed(self, now_s: float) -> None:
        """Notes a failure and decides when to start again.

        The first in a window waits ``first_delay_s``; the next ones wait ``backoff_s``, doubled up to ``max_delay_s``.
        """
        if self.forgiven > 0:
            self.forgiven -= 1
            self.due_s = now_s
            return
        self._times.append(now_s)
        while self._times and self._times[0] < now_s - self.limit.window_s:
            self._times.popleft()
        recent = len(self._times)
        self.quarantined = recent >= self.limit.failures
        if self.quarantined and self.limit.quarantine_s is None:
            self.given_up, self.due_s = True, None
            return
        if self.quarantined:
            self.due_s = now_s + (self.limit.quarantine_s or 0.0)
        elif recent == 1:
            self.due_s = now_s + self.limit.first_delay_s
        else:
            self.due_s = now_s + min(self.limit.backoff_s * 2.0 ** (recent - 2), self.limit.max_delay_s)

    def due(self, now_s: float) -> bool:
        return self.due_s is not None and now_s >= self.due_s

    def restarted(self) -> None:
        self.total += 1
        self.due_s = None
        self.quarantined = False
