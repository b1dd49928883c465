"""Starts workers, watches them, restarts them after failures, and stops them."""

from __future__ import annotations

import functools
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spreeze.errors import WorkerError
from spreeze.formatting import size
from spreeze.machine.awake import AWAKE
from spreeze.machine.logs import ending, oom_kills
from spreeze.machine.processes import CLOSING_S, DEATH_S, end_orphans, unkillable_message, waited_for_core_s
from spreeze.machine.utilisation import tree_memory_bytes
from spreeze.runtime.launcher import FRESH, Launcher, RunContext, Worker, WorkerSpec
from spreeze.transport import status_table
from spreeze.workers.roles import DEADLINE_S, ROLES, Address, FailurePolicy, Phase, RestartLimit, Role, deadline_text

_STOP_S = 6.0  # for a worker to end after it was asked to stop
_LAST_WORK = (Phase.UPDATE, Phase.PUBLISH, Phase.CHECKPOINT)
"""Phases before the learner's last checkpoint: no time limit while its heartbeat is in time."""
_MEMORY_S = 1.0  # between two checks of the workers' memory
_STARTING = (Phase.INIT, Phase.RESET)
_SLOW_START_S = 10.0  # silence while an environment starts, after which a slow start is reported
_STACK_S = 0.2  # for a hung worker to write its stack into its log before it is killed


@dataclass
class WorkerHandle:
    """A supervised worker: its current process and its failures."""

    spec: WorkerSpec
    restarts: RestartState
    process: Worker | None = None
    last_heartbeat: int = -1
    heartbeat_seen_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    reported: str | None = None  # the error that it reported before its end was noticed
    ended_s: float | None = None  # when its last process ended, until the next one works
    slow_start_reported: bool = False  # whether the slow start of its environments was reported
    oom_kills: int | None = None  # of the machine when its process began
    waited_s: float | None = None  # core-waiting time so far, noted when the current silence reached half its deadline


class WorkerPool:
    """Starts, watches, restarts and stops workers."""

    def __init__(
        self,
        run_context: RunContext,
        *,
        on_event: Callable[[str, str], None],
        launcher: Launcher = FRESH,
        clock: Callable[[], float] = AWAKE,
    ) -> None:
        self._run_context, self._status = run_context, run_context.status
        self.on_event, self._launcher, self._clock = on_event, launcher, clock
        self.handles: dict[str, WorkerHandle] = {}
        self.first_error: tuple[str, str] | None = None
        self._next_memory_s = 0.0

    def add(self, spec: WorkerSpec) -> None:
        """Starts a worker and keeps it running from now on; an OSError if it could not be started."""
        restarts = RestartState(spec.limit or spec.role.limit)
        self.handles[spec.name] = handle = WorkerHandle(spec=spec, restarts=restarts)
        self._launch(handle)

    def _launch(self, handle: WorkerHandle) -> None:
        self._status.control(handle.spec.row)[status_table.PHASE] = int(Phase.START)
        handle.process = self._launcher.start(handle.spec, self._run_context)
        handle.last_heartbeat, handle.heartbeat_seen_s, handle.reported = -1, self._clock(), None
        handle.slow_start_reported, handle.oom_kills = False, oom_kills()

    @property
    def restart_count(self) -> int:
        return sum(handle.restarts.total for handle in self.handles.values())

    def alive(self, role: Role) -> int:
        return sum(handle.process is not None for handle in self.handles.values() if handle.spec.role is role)

    def keeps_failing(self, name: str) -> bool:
        """True while a worker is down and has failed so often that its next start is delayed for long."""
        handle = self.handles.get(name)
        return handle is not None and handle.process is None and handle.restarts.quarantined

    def learners(self) -> list[Address]:
        """Addresses of the learners, one in each group."""
        return [handle.spec.address for handle in self.handles.values() if handle.spec.role.learns]

    def pids(self) -> dict[str, int]:
        """Name -> process id of the running workers."""
        running = [handle.process for handle in self.handles.values() if handle.process is not None]
        return {process.process_name: process.pid for process in running}

    def wait(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
        """Waits for messages for at most ``seconds``; returns them. ``meanwhile``: see ``Launcher.wait``."""
        by_fd = {handle.process.message_fd: handle for handle in self.handles.values() if handle.process}
        ready = self._launcher.wait(by_fd, seconds, meanwhile)
        messages = [message for fd in ready for message in self._read(by_fd[fd])]
        if ready and not messages:
            # Only closed pipes of ending workers: do not spin until they are reaped.
            time.sleep(min(seconds, 0.01))
        return messages

    def _read(self, handle: WorkerHandle) -> list[dict[str, Any]]:
        """The messages of a worker that have arrived; notes the error that it reports."""
        messages = handle.process.read_messages() if handle.process else []
        for message in messages:
            if message.get("kind") == "error":
                handle.reported = str(message.get("error"))
                self.note_error(handle.spec.name, handle.reported[:1000])
        return messages

    def signal_all(self, number: signal.Signals) -> None:
        """Signals all workers and what they started, in any thread; deadlines begin again."""
        now = self._clock()
        for handle in list(self.handles.values()):
            if handle.process is not None:
                handle.heartbeat_seen_s = now
                handle.process.signal_group(number)

    def note_error(self, name: str, text: str) -> None:
        """Keeps the first error of any worker, which usually explains the others."""
        if self.first_error is None:
            self.first_error = (name, text)

    def watch(self) -> list[dict[str, Any]]:
        """Reaps, checks deadlines, restarts; returns last messages. A WorkerError if a needed worker is given up."""
        now = self._clock()
        messages: list[dict[str, Any]] = []
        look_at_memory = now >= self._next_memory_s
        if look_at_memory:
            self._next_memory_s = now + _MEMORY_S
        for handle in self.handles.values():
            if handle.process is not None:
                messages += self._check(handle, handle.process, now, look_at_memory)
            elif handle.restarts.due(now):
                self._restart(handle, now)
        self._raise_if_lost()
        return messages

    def _check(self, handle: WorkerHandle, process: Worker, now: float, look_at_memory: bool) -> list[dict[str, Any]]:
        """Reaps a worker, or ends one that is hung or too large; returns its last messages."""
        code = process.poll()
        if code is not None:
            return self._on_exit(handle, process, code, now)
        phase = self._note_heartbeat(handle, now)
        silent_s, deadline_s = now - handle.heartbeat_seen_s, handle.spec.deadline_s(phase)
        if silent_s - self._starved_s(handle, process, silent_s, deadline_s) > deadline_s:
            reason = _hung_text(handle.spec, phase, silent_s, deadline_s)
            process.signal_group(signal.SIGUSR1)
            time.sleep(_STACK_S)
        else:
            self._report_slow_start(handle, phase, silent_s, deadline_s)
            too_large = _too_large_text(handle.spec, process) if look_at_memory else None
            if too_large is None:
                return []
            reason = too_large
        self._kill([process])
        messages, _ = self._kill_and_release(handle, process)
        self._failed(handle, reason, now)
        handle.ended_s = now
        return messages

    def _starved_s(self, handle: WorkerHandle, process: Worker, silent_s: float, deadline_s: float) -> float:
        """Time, from half of a deadline on, in which a silent worker waited for a core: that is no hang."""
        if silent_s < deadline_s / 2.0:
            handle.waited_s = None
            return 0.0
        waited_s = waited_for_core_s(process.pid)
        handle.waited_s = waited_s if handle.waited_s is None else handle.waited_s
        return waited_s - handle.waited_s

    def _report_slow_start(self, handle: WorkerHandle, phase: Phase, silent_s: float, deadline_s: float) -> None:
        spec = handle.spec
        if phase in _STARTING and spec.role.steps and silent_s > _SLOW_START_S and not handle.slow_start_reported:
            handle.slow_start_reported = True
            self.on_event(
                "info",
                f"waiting for an environment of {spec.name} to start: {silent_s:.0f} s so far, at most "
                f"{deadline_s:g} s (--start-deadline-s)",
            )

    def _note_heartbeat(self, handle: WorkerHandle, now: float) -> Phase:
        """Notes when the heartbeat last changed; returns the phase."""
        control = self._status.control(handle.spec.row)
        heartbeat, phase = int(control[status_table.HEARTBEAT]), Phase(int(control[status_table.PHASE]))
        if handle.ended_s is not None and phase not in (Phase.START, Phase.INIT):
            self.on_event("info", f"{handle.spec.name} is back after {now - handle.ended_s:.1f} s")
            handle.ended_s = None
        if heartbeat != handle.last_heartbeat:
            handle.last_heartbeat, handle.heartbeat_seen_s = heartbeat, now
        return phase

    def _kill_and_release(self, handle: WorkerHandle, process: Worker) -> tuple[list[dict[str, Any]], Phase]:
        """Kills what is left of an ended worker and releases it; returns its last messages and its last phase."""
        process.signal_group(signal.SIGKILL)
        messages = self._read(handle)
        process.close()
        handle.process = None
        return messages, Phase(int(self._status.control(handle.spec.row)[status_table.PHASE]))

    def _on_exit(self, handle: WorkerHandle, process: Worker, code: int, now: float) -> list[dict[str, Any]]:
        messages, phase = self._kill_and_release(handle, process)
        if code == 0 and phase is Phase.DONE and handle.spec.role.may_end:
            return messages
        last_words = "" if handle.reported or process.log is None else process.log.last_words
        self._failed(handle, _exit_text(code, phase, handle.oom_kills) + (f": {last_words}" if last_words else ""), now)
        handle.ended_s = now
        return messages

    def _restart(self, handle: WorkerHandle, now: float) -> None:
        try:
            self._launch(handle)
        except OSError as error:
            handle.reported = None
            self._failed(handle, f"could not be started: {error}", now)
            return
        handle.restarts.restarted()

    def _failed(self, handle: WorkerHandle, reason: str, now: float) -> None:
        handle.failures.append(f"{reason}: {handle.reported}" if handle.reported else reason)
        self.note_error(handle.spec.name, handle.failures[-1])
        handle.restarts.failed(now)
        given_up, wait_s = handle.restarts.given_up, (handle.restarts.due_s or now) - now
        outlook = "given up" if given_up else "restarting now" if wait_s <= 0 else f"restarting in {wait_s:.1f} s"
        self.on_event("error" if given_up else "warning", f"{handle.spec.name} {handle.failures[-1]}; {outlook}")

    def _raise_if_lost(self) -> None:
        """Raises a WorkerError if the run cannot continue without the lost workers."""
        for role in ROLES.values():
            handles = [handle for handle in self.handles.values() if handle.spec.role is role]
            if role.on_loss is FailurePolicy.ANY:
                _raise_if_any_given_up(handles)
            elif role.on_loss is FailurePolicy.MAJORITY:
                for group in {handle.spec.address.group for handle in handles}:
                    _raise_if_majority_down([handle for handle in handles if handle.spec.address.group == group])

    def stop(
        self,
        hurry: Callable[[], bool],
        on_messages: Callable[[list[dict[str, Any]]], None],
        on_wait: Callable[[list[WorkerSpec]], None] = lambda specs: None,
    ) -> None:
        """Ends all workers: stop flag, then SIGKILL for late ones.

        When it returns, every worker has ended or was reported as left behind. ``hurry()`` kills all at once;
        ``on_wait`` gets the workers still alive.
        """
        self._status.header[status_table.STOP] = 1
        start = self._clock()
        while living := [(handle, handle.process) for handle in self.handles.values() if handle.process is not None]:
            specs = [handle.spec for handle, _ in living]
            on_messages(self.wait(0.02, functools.partial(on_wait, specs)))
            on_wait(specs)
            in_hurry, late = hurry(), []
            for handle, process in living:
                if process.poll() is not None:
                    on_messages(self._on_stop_exit(handle, process))
                elif in_hurry or self._is_late(handle, start):
                    late.append((handle, process))
            self._kill([process for _, process in late])
            for handle, process in late:
                on_messages(self._on_stop_exit(handle, process))
        end_orphans(self._run_context.nonce)

    def _is_late(self, handle: WorkerHandle, start: float) -> bool:
        now = self._clock()
        phase = self._note_heartbeat(handle, now)
        if not handle.spec.role.learns:
            done = phase is Phase.DONE and now - max(start, handle.heartbeat_seen_s) > CLOSING_S
            return done or now - start > _STOP_S
        silent_s = now - max(start, handle.heartbeat_seen_s)
        return silent_s > (DEADLINE_S[phase] if phase in _LAST_WORK else _STOP_S)

    def _kill(self, processes: list[Worker]) -> None:
        """Kills workers; those that do not die in time are reported and left behind."""
        for process in processes:
            process.signal_group(signal.SIGKILL)
        end = self._clock() + DEATH_S
        for process in processes:
            if process.kill_and_wait(max(0.0, end - self._clock())) is None:
                self.on_event("error", unkillable_message(process.spec.name, process.pid))

    def _on_stop_exit(self, handle: WorkerHandle, process: Worker) -> list[dict[str, Any]]:
        """Releases a worker that was asked to stop, or that was killed because it did not."""
        code = process.poll()
        messages, phase = self._kill_and_release(handle, process)
        if code != 0 and handle.spec.role.learns and phase is not Phase.DONE:
            how = "was left behind" if code is None else _exit_text(code, phase)
            self.on_event("warning", f"{handle.spec.name} {how} while stopping; its last checkpoint is used")
        return messages


def _raise_if_any_given_up(handles: list[WorkerHandle]) -> None:
    for handle in handles:
        if handle.restarts.given_up:
            name, role, failures = handle.spec.name, handle.spec.role, len(handle.failures)
            times = "once" if failures == 1 else f"{failures} times"
            raise WorkerError(
                f"{f'the {name}' if name == role.name else name} failed {times} and is not started again; the last "
                f"failure: {handle.failures[-1]}; see logs/{name}.log of the run"
            )


def _raise_if_majority_down(handles: list[WorkerHandle]) -> None:
    """Raises a WorkerError if more than half of these workers, of one role and group, are down: they keep failing."""
    lost = [handle for handle in handles if handle.restarts.quarantined and handle.process is None]
    if 2 * len(lost) > len(handles):
        name, role = lost[0].spec.name, lost[0].spec.role
        raise WorkerError(
            f"{len(lost)} of {len(handles)} {role.name}s keep failing; {name}: {lost[0].failures[-1]}; see "
            f"logs/{name}.log of the run"
        )


def _hung_text(spec: WorkerSpec, phase: Phase, silent_s: float, deadline_s: float) -> str:
    text = f"silent for {silent_s:.0f} s in phase {phase.name}; its stack is in logs/{spec.name}.log"
    if phase not in _STARTING:
        return text + deadline_text(phase, deadline_s)
    return f"{text}; for slow environments set --start-deadline-s {2 * deadline_s:g}" if spec.role.has_envs else text


def _too_large_text(spec: WorkerSpec, process: Worker) -> str | None:
    """Message if a worker exceeds its memory limit, before the system kills a process of its choice; else None."""
    limit = spec.memory_limit_bytes
    if limit is None or (used := tree_memory_bytes(process.pid)) <= limit:
        return None
    return (
        f"terminated: it used {size(used)} of memory, above its limit of {size(limit)} (does the environment leak "
        "memory?)"
    )


def _exit_text(code: int, phase: Phase, oom_kills_before: int | None = None) -> str:
    if code < 0:
        text = ending(code, oom_kills_before)
        return f"ended by {text.removeprefix('signal ') if 'SIG' in text else text} in phase {phase.name}"
    if code == 0:
        return f"exited unexpectedly (exit code 0) in phase {phase.name}"
    return f"ended with exit code {code} in phase {phase.name}"


@dataclass
class RestartState:
    """When and whether one worker starts again."""

    limit: RestartLimit
    total: int = 0
    due_s: float | None = None  # monotonic time of the next start; None while it runs or after it was given up
    quarantined: bool = False
    given_up: bool = False
    _times: deque[float] = field(default_factory=deque)

    def failed(self, now_s: float) -> None:
        """Notes a failure and decides when to start again: ``first_delay_s``, then ``backoff_s``, doubled each time."""
        self._times.append(now_s)
        while self._times and self._times[0] < now_s - self.limit.window_s:
            self._times.popleft()
        recent = len(self._times)
        self.quarantined = recent >= self.limit.failures
        if self.quarantined:
            rest_s = self.limit.quarantine_s
            self.given_up, self.due_s = rest_s is None, None if rest_s is None else now_s + rest_s
        elif recent == 1:
            self.due_s = now_s + self.limit.first_delay_s
        else:
            self.due_s = now_s + min(self.limit.backoff_s * 2.0 ** (recent - 2), self.limit.max_delay_s)

    def due(self, now_s: float) -> bool:
        return self.due_s is not None and now_s >= self.due_s

    def restarted(self) -> None:
        self.total, self.due_s, self.quarantined = self.total + 1, None, False
