"""Runs the workers of a mode: starts and watches them, reads their messages, decides when the run is over."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spreeze.config.schema import TuningConfig
from spreeze.errors import ConfigError, ResourceError, WorkerError
from spreeze.formatting import clean, percent, size
from spreeze.machine.awake import AWAKE
from spreeze.machine.last_words import ending, oom_kills
from spreeze.machine.logs import LogKeeper
from spreeze.machine.processes import (
    CLOSING_S,
    DEATH_S,
    LOW_PRIORITY,
    OrphanWatch,
    end_orphans,
    kill_and_wait,
    left_behind,
    mark,
    signals_blocked,
)
from spreeze.machine.utilisation import tree_memory_bytes
from spreeze.metrics.table import DEADLINE_S, Phase, deadline_text
from spreeze.run_directory import RunDir, group_folder
from spreeze.runtime.assembly import Assembly, assembled, evaluator_job
from spreeze.runtime.cpu_governor import GovernorLoop
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import (
    FRESH,
    Launcher,
    RunContext,
    WorkerProcess,
    WorkerSpec,
    begin_log,
    child_environment,
    leads,
    open_log,
)
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import SAMPLE_S, CounterSample, Outcome, Recorder, View
from spreeze.runtime.timeline import FIRST_S, Timeline
from spreeze.transport import status_table as words
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.shared_memory import readable
from spreeze.transport.status_table import StatusTable
from spreeze.workers.roles import ROLES, Address, Loss, RestartLimit, Role

_LOOK_S = 0.05
_FINAL_EVALUATION_S = 6.0
_EXIT_S = 12.0  # longest time from the stop request to the end of the final evaluation; 3 more are for closing
_VISUALIZER_AFTER_S = 4.0  # from the first update to the visualizer's start, whose imports would delay the first ones


def run_workers(
    assemble: Callable[[Assembly], None],
    plan: RunPlan,
    run_dir: RunDir,
    view: View,
    interrupts: Interrupts,
    launcher: Launcher = FRESH,
) -> Outcome:
    """Trains with the workers that a mode puts together, then evaluates. All have ended when this returns.

    Raises:
        ResourceError: there is no room for shared memory, or a worker could not be started.
        ConfigError: a checkpoint does not fit the settings.
    """
    recorder = Recorder(plan, run_dir, view)
    watch, logs = OrphanWatch(run_dir.nonce), LogKeeper()
    try:
        watch.start()
        logs.start()
        with interrupts.guarded_by(watch), contextlib.ExitStack() as stack:
            with interrupts.abandonable():  # a saved replay may have gigabytes
                run = stack.enter_context(assembled(assemble, plan, run_dir.path, recorder.started_s))
            if run.whole_env_steps is not None:
                recorder.goes_on_from(run.whole_env_steps)
            supervisor = _Supervisor(plan, run_dir, recorder, interrupts, launcher, run, logs)
            try:
                supervisor.start()
                supervisor.run()
            finally:
                supervisor.stop()
        budget_s = min(_FINAL_EVALUATION_S, _EXIT_S - supervisor.stopping_s)
        wanted = plan.config.evaluation.enabled and recorder.outcome.updates > 0
        if plan.start_s > 0.5 * _FINAL_EVALUATION_S:  # worth the wait where there is no score at all
            wanted = wanted and recorder.outcome.eval_return is None and not interrupts.count
            budget_s += 2.0 * plan.start_s
        if wanted and not interrupts.urgent and budget_s >= 1.0:
            record = _final_evaluation(run_dir, plan, budget_s, interrupts, recorder.event, logs)
            if record is not None:
                recorder.evaluation(record, final=True)
            elif not interrupts.urgent:
                recorder.no_final_evaluation(budget_s)
    finally:
        watch.end()
        logs.close()
        recorder.close(interrupts.again())
    return recorder.outcome


class _Supervisor:
    """Watches the workers of one run until all have ended."""

    def __init__(
        self,
        plan: RunPlan,
        run_dir: RunDir,
        recorder: Recorder,
        interrupts: Interrupts,
        launcher: Launcher,
        run: Assembly,
        logs: LogKeeper,
    ) -> None:
        self._run_dir, self._recorder, self._interrupts, self._run = run_dir, recorder, interrupts, run
        self._governing: GovernorLoop | None = None
        if plan.config.tuning.govern and any(spec.role.rests for spec in run.specs.values()):
            self._governing = GovernorLoop(plan, run.status, recorder.event)
        self._spread = None if run.spread is None else run.spread(recorder)
        run_context = RunContext(
            run_dir=run_dir.path,
            status_fd=run.status.block.fd,
            status_rows=run.status.num_rows,
            nonce=run_dir.nonce,
            gives_way=plan.config.tuning.give_way,
            logs=logs,
        )
        self._workers = ProcessSupervisor(
            run_context,
            run.status,
            on_event=recorder.event,
            launcher=launcher,
            uncounted_crashes=int(os.environ.get("SPREEZE_TEST_UNCOUNTED_CRASHES", "0")),
        )
        self._finished: dict[Address, str] = {}
        self._leave_free = plan.config.tuning.leave_free
        self._timeline = Timeline(
            run.status, {name: spec.row for name, spec in run.specs.items()}, run_dir.path, lambda: recorder.wall_s
        )
        self._next_sample_s = 0.0
        self.stopping_s = 0.0  # how long stopping the workers took

    def start(self) -> None:
        """Starts all workers but the visualizer."""
        self._run_dir.write_state(leave_free=None if self._governing is None else self._leave_free)
        for name, spec in self._run.specs.items():
            try:
                if name != "visualizer":
                    self._workers.add(spec)
            except OSError as error:
                raise ResourceError(
                    f"{name} could not be started: {error}; use fewer {spec.role.name}s, or raise the limit of "
                    "processes and open files (ulimit -u, ulimit -n)"
                ) from None

    def run(self) -> None:
        """Watches until a stop condition, an interrupt, or a failure that no restart can repair."""
        outcome = self._recorder.outcome
        try:
            while True:
                if self._run_dir.asked("pause"):
                    self._pause()
                self._handle(self._workers.wait(_LOOK_S))
                self._handle(self._workers.watch())
                self._report_hang_up()
                self._run.status.header[words.PAUSED_MS] = round(1000 * self._recorder.paused_s)
                if self._timeline.is_due:
                    self._write_timeline()
                if time.monotonic() >= self._next_sample_s:
                    self._next_sample_s = time.monotonic() + SAMPLE_S
                    self._sample()
                    self._start_visualizer()
                reason = self._stop_reason()
                if reason is not None:
                    outcome.stopped_by = reason
                    return
        except WorkerError as error:
            outcome.stopped_by, outcome.error = "failure", str(error)
            self._recorder.event("error", str(error))

    def _pause(self) -> None:
        """Stops all processes of the workers where they are, and continues them when the pause is over."""
        self._workers.signal_all(signal.SIGSTOP)
        try:
            self._recorder.hold(lambda: self._stop_reason() is None)
        finally:
            self._run.status.header[words.PAUSED_MS] = round(1000 * self._recorder.paused_s)
            self._workers.signal_all(signal.SIGCONT)

    def _obey(self) -> None:
        """Passes on what the user asks of a live run."""
        header, governing = self._run.status.header, self._governing
        for name, word in (("evaluate", words.EVALUATIONS_ASKED), ("checkpoint", words.CHECKPOINTS_ASKED)):
            if self._run_dir.take(name) is not None:
                header[word] += 1
        began_s = self._recorder.rates.learning_began_s
        first = not self._timeline.recorded and began_s is not None and time.monotonic() - began_s >= FIRST_S
        if self._run_dir.take("timeline") is not None or first:
            self._timeline.begin()
        text = self._run_dir.take("leave-free")
        if text is not None and governing is None:
            self._recorder.event("warning", "leave-free: no governor watches this run, so nothing changes")
        elif text is not None and governing is not None:
            try:
                share = TuningConfig(leave_free=float(text)).leave_free
            except (ValueError, ConfigError) as error:
                self._recorder.event("warning", f"leave-free = {clean(text, 40)!r} was ignored: {error}")
                return
            governing.leave_free(share)
            self._run_dir.write_state(leave_free=share)
            self._recorder.event("info", f"{percent(share)} of the usable cores stay with your other programs")

    def _read(self) -> CounterSample:
        """All counters of the run."""
        found = self._run.read()
        if self._spread is None:
            return found
        return dataclasses.replace(found, groups=self._spread(found.groups, found.t_s))

    def _write_timeline(self) -> None:
        try:
            self._timeline.finish()
        except OSError as error:
            self._recorder.event("warning", f"timeline not written: {error}")

    def _start_visualizer(self) -> None:
        began_s = self._recorder.rates.learning_began_s
        due = began_s is not None and time.monotonic() - began_s > _VISUALIZER_AFTER_S
        if due and "visualizer" in self._run.specs and "visualizer" not in self._workers.handles:
            try:
                self._workers.add(self._run.specs["visualizer"])
            except OSError as error:  # never a reason to end the run
                self._recorder.event("warning", f"no pictures: the visualizer could not be started: {error}")

    def stop(self) -> None:
        """Ends the workers and takes the last sample. All workers have ended when this returns."""
        self._recorder.rates.end()
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
            self._recorder.sample(
                self._read(), pids=None, restarts=self._workers.restarts, samplers_alive=0, state="stopping"
            )
            self._recorder.finish(self._workers.restarts)

    def _waited(self, specs: list[WorkerSpec]) -> None:
        """Called while waiting for ``specs``; shows what learners still have to write."""
        self._report_hang_up()
        if any(spec.role.learns for spec in specs):
            groups = self._read().groups
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
            elif kind == "metrics" and (handle := self._workers.handles.get(source)) is not None:
                self._recorder.report(handle.spec.address.group, message.get("values"))
            elif kind == "started":
                outcome.device = message.get("device")
            elif kind == "finished" and (handle := self._workers.handles.get(source)) is not None:
                self._finished[handle.spec.address] = str(message.get("reason") or "updates")
                outcome.learned(handle.spec.address.group, message)

    def _sample(self) -> None:
        self._recorder.first_error = self._workers.first_error
        reading, pids = self._read(), self._workers.pids()
        governing = self._governing
        governed = governing.look(reading, {**pids, "supervisor": os.getpid()}) if governing else {}
        self._recorder.evaluates(not self._workers.keeps_failing("evaluator"))
        self._recorder.sample(
            reading,
            pids=pids,
            restarts=self._workers.restarts,
            samplers_alive=sum(self._workers.alive(role) for role in ROLES.values() if role.steps),
            governed=governed,
        )
        self._run.status.header[words.VISUALIZER_PAUSED] = int(self._run_dir.asked("pause-visualizer"))
        self._obey()


_STOP_S = 6.0  # for a worker to end after it was asked to stop
_LAST_WORK = (Phase.UPDATE, Phase.PUBLISH, Phase.CHECKPOINT)
"""Phases before the learner's last checkpoint: no time limit while its heartbeat is in time."""
_MEMORY_S = 1.0  # between two checks of the workers' memory
_STARTING = (Phase.INIT, Phase.RESET)
_FIRST_WORD_S = 10.0  # of silence while an environment starts, after which it is said
_STACK_S = 0.2  # for a hung worker to write its stack into its log before it is killed


@dataclass
class WorkerHandle:
    """A supervised worker: its current process and its failures."""

    spec: WorkerSpec
    restarts: Restarts
    process: WorkerProcess | None = None
    last_heartbeat: int = -1
    heartbeat_seen_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    reported: str | None = None  # the error that it reported before its end was noticed
    ended_s: float | None = None  # when its last process ended, until the next one works
    waited_for: bool = False  # whether it was said that its environments take long to start
    oom_kills: int | None = None  # of the machine when its process began


def _read(handle: WorkerHandle) -> list[dict[str, Any]]:
    """The messages of a worker that have arrived; notes the error that it reports."""
    messages = handle.process.read_messages() if handle.process else []
    for message in messages:
        if message.get("kind") == "error":
            handle.reported = str(message.get("error"))
    return messages


class ProcessSupervisor:
    """Starts, watches, restarts and stops workers.

    ``uncounted_crashes`` of each worker are restarted at once and do not count toward its limit.
    """

    def __init__(
        self,
        run_context: RunContext,
        status: StatusTable,
        *,
        on_event: Callable[[str, str], None],
        launcher: Launcher = FRESH,
        clock: Callable[[], float] = AWAKE,
        uncounted_crashes: int = 0,
    ) -> None:
        self._run_context, self._status = run_context, status
        self.on_event, self._launcher, self._clock = on_event, launcher, clock
        self._uncounted = uncounted_crashes
        self.handles: dict[str, WorkerHandle] = {}
        self.first_error: tuple[str, str] | None = None
        self._next_memory_s = 0.0

    def add(self, spec: WorkerSpec) -> None:
        """Starts a worker and keeps it running from now on; an OSError if it could not be started."""
        restarts = Restarts(spec.limit or spec.role.limit, self._uncounted)
        self.handles[spec.name] = handle = WorkerHandle(spec=spec, restarts=restarts)
        self._launch(handle)

    def _launch(self, handle: WorkerHandle) -> None:
        self._status.control(handle.spec.row)[words.PHASE] = int(Phase.START)
        handle.process = self._launcher.start(handle.spec, self._run_context)
        handle.last_heartbeat, handle.heartbeat_seen_s, handle.reported = -1, self._clock(), None
        handle.waited_for, handle.oom_kills = False, oom_kills()

    @property
    def restarts(self) -> int:
        """Workers started again so far."""
        return sum(handle.restarts.total for handle in self.handles.values())

    def alive(self, role: Role) -> int:
        return sum(handle.process is not None for handle in self.handles.values() if handle.spec.role is role)

    def keeps_failing(self, name: str) -> bool:
        """True while a worker does not run, for it has failed so often that its next start has to wait long."""
        handle = self.handles.get(name)
        return handle is not None and handle.process is None and handle.restarts.quarantined

    def learners(self) -> list[Address]:
        """Addresses of the learners, one in each group."""
        return [handle.spec.address for handle in self.handles.values() if handle.spec.role.learns]

    def pids(self) -> dict[str, int]:
        """Name -> process id of the running workers."""
        return {name: handle.process.pid for name, handle in self.handles.items() if handle.process is not None}

    def wait(self, seconds: float) -> list[dict[str, Any]]:
        """Waits for messages for at most ``seconds``; returns them."""
        by_fd = {handle.process.message_fd: handle for handle in self.handles.values() if handle.process}
        ready = readable(by_fd, seconds)
        messages = [message for fd in ready for message in _read(by_fd[fd])]
        if ready and not messages:
            # Only closed pipes of ending workers: do not spin until they are reaped.
            time.sleep(min(seconds, 0.01))
        return messages

    def signal_all(self, number: signal.Signals) -> None:
        """Signals all workers and what they started; deadlines begin again."""
        now = self._clock()
        for handle in self.handles.values():
            if handle.process is not None:
                handle.heartbeat_seen_s = now
                handle.process.signal_group(number)

    def note_error(self, name: str, text: str) -> None:
        """Keeps the first error of any worker, which usually explains the others."""
        if self.first_error is None:
            self.first_error = (name, text)

    def watch(self) -> list[dict[str, Any]]:
        """Reaps, checks deadlines, restarts; returns the last messages of ended workers.

        Raises a WorkerError if a worker that the run needs was given up (see ``Role.lost``).
        """
        now = self._clock()
        messages: list[dict[str, Any]] = []
        look_at_memory = now >= self._next_memory_s
        if look_at_memory:
            self._next_memory_s = now + _MEMORY_S
        for handle in self.handles.values():
            if handle.process is not None:
                messages += self._check(handle, handle.process, now, look_at_memory)
            elif handle.restarts.due(now):
                self._restart(handle)
        self._check_lost()
        return messages

    def _check(
        self, handle: WorkerHandle, process: WorkerProcess, now: float, look_at_memory: bool
    ) -> list[dict[str, Any]]:
        """Reaps a worker, or ends one that is hung or too large; returns its last messages."""
        code = process.poll()
        if code is not None:
            return self._ended(handle, code, now)
        spec, phase = handle.spec, self._note_heartbeat(handle, now)
        silent_s, limit = now - handle.heartbeat_seen_s, spec.memory_limit_bytes
        starts, deadline_s = phase in _STARTING and _has_envs(spec), _deadline_s(spec, phase)
        if starts and spec.role.steps and silent_s > _FIRST_WORD_S and not handle.waited_for:
            handle.waited_for = True
            self.on_event(
                "info",
                f"waiting for an environment of {spec.name} to start: {silent_s:.0f} s so far, at "
                f"most {deadline_s:g} s (--start-deadline-s)",
            )
        if silent_s > deadline_s:
            why = f"silent for {silent_s:.0f} s in phase {phase.name}; its stack is in logs/{spec.name}.log" + (
                f"; for an environment that takes longer to start: --start-deadline-s {2 * deadline_s:g}"
                if starts
                else ""
                if phase in _STARTING
                else deadline_text(phase, deadline_s)
            )
            process.signal_group(signal.SIGUSR1)
            time.sleep(_STACK_S)
        elif look_at_memory and limit is not None and (used := tree_memory_bytes(process.pid)) > limit:
            # Before the system kills a process of its choice.
            why = f"ended: it used {size(used)} of memory, its limit is {size(limit)} (does the environment leak?)"
        else:
            return []
        self._kill([handle])
        return self._ended(handle, -int(signal.SIGKILL), now, why)

    def _note_heartbeat(self, handle: WorkerHandle, now: float) -> Phase:
        """Notes when the heartbeat last changed; returns the phase."""
        control = self._status.control(handle.spec.row)
        heartbeat, phase = int(control[words.HEARTBEAT]), Phase(int(control[words.PHASE]))
        if handle.ended_s is not None and phase not in (Phase.START, Phase.INIT):
            self.on_event("info", f"{handle.spec.name} is back after {now - handle.ended_s:.1f} s")
            handle.ended_s = None
        if heartbeat != handle.last_heartbeat:
            handle.last_heartbeat, handle.heartbeat_seen_s = heartbeat, now
        return phase

    def _close(self, handle: WorkerHandle) -> tuple[list[dict[str, Any]], Phase]:
        """Releases the process of a worker that has ended; returns its last messages and its last phase."""
        process = handle.process
        assert process is not None
        process.signal_group(signal.SIGKILL)
        messages = _read(handle)
        process.close()
        handle.process = None
        return messages, Phase(int(self._status.control(handle.spec.row)[words.PHASE]))

    def _ended(self, handle: WorkerHandle, code: int, now: float, why: str | None = None) -> list[dict[str, Any]]:
        log = handle.process.log if handle.process is not None else None
        messages, phase = self._close(handle)
        if code == 0 and phase is Phase.DONE and handle.spec.role.may_end:
            return messages
        words = "" if why or handle.reported or log is None else log.last_words
        reason = why or _exit_text(code, phase, handle.oom_kills) + (f": {words}" if words else "")
        handle.failures.append(f"{reason}: {handle.reported}" if handle.reported else reason)
        self.note_error(handle.spec.name, handle.failures[-1])
        handle.restarts.failed(now)
        handle.ended_s = now
        given_up, wait_s = handle.restarts.given_up, (handle.restarts.due_s or now) - now
        outlook = "given up" if given_up else "restarting now" if wait_s <= 0 else f"restarting in {wait_s:.1f} s"
        self.on_event("error" if given_up else "warning", f"{handle.spec.name} {handle.failures[-1]}; {outlook}")
        return messages

    def _restart(self, handle: WorkerHandle) -> None:
        try:
            self._launch(handle)
        except OSError as error:
            handle.restarts.failed(self._clock())
            self.on_event("error", f"{handle.spec.name} could not be started: {error}")
            return
        handle.restarts.restarted()

    def _check_lost(self) -> None:
        """Raises a WorkerError if the run cannot go on without the workers that are lost."""
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
                    raise WorkerError(
                        f"{len(lost)} of {len(own)} {role.name}s keep failing; {lost[0].spec.name}: "
                        f"{lost[0].failures[-1]}"
                    )

    def stop(
        self,
        hurry: Callable[[], bool],
        on_messages: Callable[[list[dict[str, Any]]], None],
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
        """True if a worker has used up its time to end since ``start``."""
        now = self._clock()
        phase = self._note_heartbeat(handle, now)
        if not handle.spec.role.learns:
            done = phase is Phase.DONE and now - max(start, handle.heartbeat_seen_s) > CLOSING_S
            return done or now - start > _STOP_S
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

    def _reap(self, handle: WorkerHandle) -> list[dict[str, Any]]:
        """Releases a worker that was asked to stop, or that was killed because it did not."""
        assert handle.process is not None
        code = handle.process.poll()
        messages, phase = self._close(handle)
        if code != 0 and handle.spec.role.learns and phase is not Phase.DONE:
            how = "was left behind" if code is None else _exit_text(code, phase)
            self.on_event("warning", f"{handle.spec.name} {how} while stopping; its last checkpoint counts")
        return messages


def _deadline_s(spec: WorkerSpec, phase: Phase) -> float:
    """Silence after which a worker in that phase counts as hung."""
    if phase is Phase.STEP:
        return spec.step_deadline_s
    if phase is Phase.INIT and _has_envs(spec):
        return spec.start_deadline_s
    again = _has_envs(spec) and phase in (Phase.RESET, Phase.EVALUATE, Phase.RENDER)  # one may have to be made there
    return max(DEADLINE_S[phase], spec.start_deadline_s if again else 0.0)


def _has_envs(spec: WorkerSpec) -> bool:
    """True for workers that make environments: samplers, evaluator, visualizer."""
    return spec.role.steps or spec.role.may_end


def _exit_text(code: int, phase: Phase, oom_kills_before: int | None = None) -> str:
    if code < 0:
        text = ending(code, oom_kills_before)
        return f"ended by {text.removeprefix('signal ') if 'SIG' in text else text} in phase {phase.name}"
    if code == 0:
        return f"ended by itself (exit code 0) in phase {phase.name} without being asked to"
    return f"ended with exit code {code} in phase {phase.name}"


@dataclass
class Restarts:
    """The failures of one worker."""

    limit: RestartLimit
    forgiven: int = 0  # failures that are restarted at once and do not count toward the limit
    total: int = 0
    due_s: float | None = None  # monotonic time of the next start; None while it runs or after it was given up
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
        self.total, self.due_s, self.quarantined = self.total + 1, None, False


def _final_evaluation(
    run_dir: RunDir,
    plan: RunPlan,
    budget_s: float,
    interrupts: Interrupts,
    on_event: Callable[[str, str], None],
    logs: LogKeeper,
) -> dict[str, Any] | None:
    """Evaluates the newest weights within ``budget_s``; None if no round finished in time."""
    slept_s = AWAKE.slept_s
    job = dataclasses.replace(evaluator_job(plan, run_dir.path, has_free_core=True), target_return=None)
    gives_way = plan.config.tuning.give_way
    command = [
        sys.executable,
        "-m",
        "spreeze.workers.evaluator",
        json.dumps(job.to_json()),
        str(budget_s),
        str(LOW_PRIORITY if gives_way else 0),
    ]
    words, kills = begin_log(run_dir.path, "evaluator", logs), oom_kills()
    try:
        with open_log(words) as output, signals_blocked():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                env=child_environment(1, run_dir.nonce, "evaluator"),
                **leads(gives_way),
            )
        mark(process.pid, run_dir.nonce)
    except OSError as error:  # no reason to fail a run that has ended well
        on_event("warning", f"the last evaluation could not be started: {error}")
        return None
    assert process.stdout is not None
    asked, deadline, answer = interrupts.count, AWAKE() + budget_s + 2.0, b""
    with process.stdout as pipe:
        while process.poll() is None and interrupts.count == asked and AWAKE() < deadline:
            known = b"\n" in answer
            said = os.read(pipe.fileno(), 65536) if readable([pipe.fileno()], 0.02) else b""
            if not said:  # also where it has closed the pipe
                time.sleep(0.01)
            answer += said
            if not known and b"\n" in answer:  # it closes its environments
                deadline = min(deadline, AWAKE() + CLOSING_S)
        killed = process.poll() is None
        if killed and kill_and_wait(process) is None:
            on_event("error", left_behind("the last evaluation", process.pid))
        end_orphans(run_dir.nonce)
        if readable([pipe.fileno()], 0.0):
            answer += os.read(pipe.fileno(), 65536)
    with contextlib.suppress(ValueError):
        record = json.loads(answer.partition(b"\n")[0])
        if isinstance(record, dict):
            return record
    if AWAKE.slept_s > slept_s and interrupts.count == asked:  # its time was over when it went on
        return _final_evaluation(run_dir, plan, budget_s, interrupts, on_event, logs)
    if not killed and process.returncode:
        why = ": ".join(filter(None, (ending(process.returncode, kills), words.last_words)))
        on_event("warning", f"the last evaluation failed: {why}")
    return None
