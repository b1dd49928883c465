"""Runs the workers of a mode: starts and watches them, reads their messages, decides when the run ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from spreeze.config.schema import TuningConfig
from spreeze.errors import ConfigError, ResourceError, WorkerError
from spreeze.files import remove_unfinished, write_json
from spreeze.formatting import clean, percent
from spreeze.machine.awake import AWAKE
from spreeze.machine.logs import LogKeeper, ending, oom_kills
from spreeze.machine.processes import CLOSING_S, LOW_PRIORITY, end_orphans, kill_and_wait, unkillable_message
from spreeze.machine.watcher import OrphanWatch
from spreeze.metrics.return_curve import MAX_ROLLBACKS, FallWatch
from spreeze.metrics.stop_conditions import RUN_ENDS, StopReason, stop_reason
from spreeze.run_directory import TIMELINE, RunDir, group_folder
from spreeze.runtime.assembly import Assemble, Assembly, assembled, evaluator_job
from spreeze.runtime.callback_process import EnvironmentArguments
from spreeze.runtime.cpu_governor import GovernorLoop, LoadWatch
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher, RunContext, WorkerSpec, group_arguments, log_path, start_process
from spreeze.runtime.outcome import Outcome
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import SAMPLE_S, Recorder, View
from spreeze.runtime.worker_pool import WorkerPool
from spreeze.transport import status_table
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.shared_memory import readable
from spreeze.transport.status_table import StatusTable
from spreeze.workers.evaluator import read_rows, record_of
from spreeze.workers.roles import ROLES, Address, Phase

_LOOK_S = 0.05
_TUNER_AFTER_S = 5.0  # from the first update to the tuner, so that a short run is over before it begins
_VISUALIZER_AFTER_S = 4.0  # from the first update to the visualizer's start, whose imports would delay the first ones
_TIMELINE_S = 0.25
_FIRST_TIMELINE_S = 10.0  # learning time [s] after which the first timeline is recorded without a request
_MAX_PARTS = 400  # Parts of one worker that a timeline keeps: the latest.
_EVALUATION_S = 6.0  # longest evaluation at the end
_FIRST_EVALUATION_S = 45.0  # the same where a run that ends by itself has no return yet
_EXIT_S = 12.0  # longest time from any other end of the run to the end of this evaluation


def run_workers(
    assemble: Assemble, plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH
) -> Outcome:
    """Trains with the workers that a mode puts together, then evaluates.

    When it returns, every worker has ended or was reported as left behind. Raises as ``assembled``; a ResourceError if
    a worker could not be started.
    """
    recorder = Recorder(plan, run_dir, view)

    def supervise(plan: RunPlan, leave_free: float | None = None) -> _RunLoop:
        """Trains with one set of workers; returns once all have ended. ``leave_free``: the user's latest request."""
        with contextlib.ExitStack() as stack:
            with interrupts.abandonable():  # a saved replay may have gigabytes
                run = stack.enter_context(assembled(assemble, plan, run_dir.path, recorder.started_s))
            if run.resumed_env_steps is not None:
                recorder.continue_from(run.resumed_env_steps)
            for text in run.notes:
                recorder.event("info", text)
            stack.enter_context(launcher.supervised(run_dir.path, run_dir.nonce))
            loop = _RunLoop(run_dir, recorder, interrupts, launcher, run, logs)
            if leave_free is not None:
                loop.keep_free(leave_free)
            try:
                loop.start()
                loop.run()
            finally:
                loop.stop()
        return loop

    try:
        with LogKeeper() as logs, OrphanWatch(run_dir.nonce, silent_s=launcher.silent_s) as watch:
            with interrupts.guarded_by(watch):
                loop = supervise(plan)
                while loop.next_plan is not None:
                    plan = recorder.continue_with(loop.next_plan)
                    loop = supervise(plan, loop.leave_free)
            _evaluate_at_the_end(plan, run_dir, recorder, interrupts, logs, stopping_s=loop.stopping_s)
    finally:
        recorder.close(interrupts.again())
    return recorder.outcome


class _RunLoop:
    """Watches the workers of one run until all have ended."""

    def __init__(
        self,
        run_dir: RunDir,
        recorder: Recorder,
        interrupts: Interrupts,
        launcher: Launcher,
        run: Assembly,
        logs: LogKeeper,
    ) -> None:
        plan = run.plan
        self._run_dir, self._recorder, self._interrupts, self._assembly = run_dir, recorder, interrupts, run
        self._governor: GovernorLoop | None = None
        if plan.config.tuning.govern and any(spec.role.pausable for spec in run.specs.values()):
            self._governor = GovernorLoop(plan, run.status, recorder.event)
        self._load = self._governor or LoadWatch()
        gives_way = plan.config.tuning.give_way
        context = RunContext(
            run_dir=run_dir.path, status=run.status, nonce=run_dir.nonce, gives_way=gives_way, logs=logs
        )
        self._workers = WorkerPool(context, on_event=recorder.event, launcher=launcher)
        self._finished: dict[Address, str] = {}
        self.leave_free = plan.config.tuning.leave_free
        self._env_args = EnvironmentArguments(plan, run_dir, recorder.event)
        self._post_header()
        self._timeline = Timeline(
            run.status, {name: spec.row for name, spec in run.specs.items()}, run_dir.path, lambda: recorder.wall_s
        )
        self._tunes = False
        self._falls = FallWatch(plan.config.learner.checkpoint_interval_s)
        self._falls.judge_from(recorder.curve)
        self._next_sample_s = 0.0
        self.stopping_s = 0.0  # how long stopping the workers took
        self.next_plan: RunPlan | None = None  # with which the run continues; None: it is over

    def start(self) -> None:
        """Starts all workers except the visualizer and the samplers that only the tuner may need."""
        self._run_dir.write_state(leave_free=None if self._governor is None else self.leave_free)
        for name, spec in self._assembly.specs.items():
            try:
                if name != "visualizer" and not self._waits_for_tuner(spec):
                    self._workers.add(spec)
            except OSError as error:
                raise ResourceError(
                    f"{name} could not be started: {error}; use fewer {spec.role.name}s, or raise the limit of "
                    "processes and open files (ulimit -u, ulimit -n)"
                ) from None

    def _waits_for_tuner(self, spec: WorkerSpec) -> bool:
        first = self._assembly.plan.first_samplers
        return first is not None and spec.role.steps and spec.address.index >= first

    def run(self) -> None:
        """Watches until a stop condition, an interrupt, or a failure that no restart can repair."""
        outcome = self._recorder.outcome
        try:
            while True:
                if self._run_dir.requested("pause"):
                    self._pause()
                self._handle(self._workers.wait(_LOOK_S))
                self._handle(self._workers.watch())
                self._report_hang_up()
                self._post_header()
                if self._timeline.is_due:
                    try:
                        self._timeline.finish()
                    except OSError as error:
                        self._recorder.event("warning", f"timeline not written: {error}")
                if time.monotonic() >= self._next_sample_s:
                    self._next_sample_s = time.monotonic() + SAMPLE_S
                    self._sample()
                    self._take_requests()
                    self._check_arguments()
                    self._start_visualizer()
                    self._tune()
                reason = self._stop_reason()
                if reason is not None:
                    outcome.stopped_by, self.next_plan = reason, None
                    known = stop_reason(reason)
                    self._recorder.event("info", f"{RUN_ENDS}: {known.sentence if known else reason}")
                if reason is not None or self.next_plan is not None:
                    return
        except WorkerError as error:
            outcome.stopped_by, outcome.error = StopReason.FAILURE, str(error)
            self._recorder.event("error", str(error))

    def _pause(self) -> None:
        self._workers.signal_all(signal.SIGSTOP)
        try:
            self._recorder.wait_while_paused(lambda: self._stop_reason() is None)
        finally:
            self._post_header()
            self._workers.signal_all(signal.SIGCONT)

    def _post_header(self) -> None:
        header = self._assembly.status.header
        header[status_table.PAUSED_MS] = round(1000 * self._recorder.paused_s)
        header[status_table.STARTING_MS] = round(1000 * self._recorder.starting_s)
        header[status_table.ENV_ARGS] = self._env_args.version
        header[status_table.EPISODE_REPORTS] = int(self._recorder.callbacks.needs_episodes)

    def _take_requests(self) -> None:
        header = self._assembly.status.header
        header[status_table.VISUALIZER_PAUSED] = int(self._run_dir.requested("pause-visualizer"))
        words = {"evaluate": status_table.EVALUATION_REQUESTS, "checkpoint": status_table.CHECKPOINT_REQUESTS}
        for name, word in words.items():
            if self._run_dir.take_request(name) is not None:
                header[word] += 1
        began_s = self._recorder.rates.learning_began_s
        first = not self._timeline.recorded and began_s is not None and time.monotonic() - began_s >= _FIRST_TIMELINE_S
        if self._run_dir.take_request("timeline") is not None or first:
            self._timeline.begin()
        if (text := self._run_dir.take_request("leave-free")) is not None:
            self._leave_free_now(text)

    def _leave_free_now(self, text: str) -> None:
        if self._governor is None:
            self._recorder.event("warning", "leave-free: this run has no CPU governor, so nothing changes")
            return
        try:
            fraction = TuningConfig(leave_free=float(text)).leave_free
        except (ValueError, ConfigError) as error:
            self._recorder.event("warning", f"leave-free = {clean(text, 40)!r} was ignored: {error}")
            return
        self.keep_free(fraction)
        self._run_dir.write_state(leave_free=fraction)
        self._recorder.event(
            "info",
            f"samplers are paused as needed to leave {percent(fraction)} of the usable cores free for other programs",
        )

    def keep_free(self, fraction: float) -> None:
        """Leaves that fraction of the usable cores to other programs from now on."""
        self.leave_free = self._recorder.leave_free = fraction
        if self._governor is not None:
            self._governor.leave_free(fraction)

    def _check_arguments(self) -> None:
        """Passes on new arguments of environments; returns before and after are not compared."""
        before = self._env_args.version
        self._env_args.poll()
        if self._env_args.version != before:
            self._falls.reset(self._recorder.curve)
            self._post_header()

    def _start_visualizer(self) -> None:
        began_s = self._recorder.rates.learning_began_s
        due = began_s is not None and time.monotonic() - began_s > _VISUALIZER_AFTER_S
        if due and "visualizer" in self._assembly.specs and "visualizer" not in self._workers.handles:
            try:
                self._workers.add(self._assembly.specs["visualizer"])
            except OSError as error:  # never a reason to end the run
                self._recorder.event("warning", f"the visualizer could not be started: {error}")

    def _tune(self) -> None:
        tuner, began_s = self._assembly.plan.tuner, self._recorder.rates.learning_began_s
        if tuner is None:
            return
        if not self._tunes and began_s is not None and time.monotonic() - began_s > _TUNER_AFTER_S:
            self._tunes = True
            try:
                for spec in self._assembly.specs.values():
                    if self._waits_for_tuner(spec):
                        self._workers.add(spec)
            except OSError as error:  # never a reason to end the run
                self._recorder.event("warning", f"not tuned: a sampler could not be started: {error}")
                return
            if self._governor is not None:
                self._governor.suspend()
            self._run_dir.write_state(tuning_began=time.time())
            self._recorder.tuner_measures = True
            tuner.begin(self._assembly, self._workers)
        for text in tuner.notes() if self._tunes else ():
            self._recorder.event("info", text)
        if self._tunes and (choice := tuner.choice()) is not None:
            self._recorder.tuner_measures = False
            self._recorder.samplers_wanted, self.next_plan = choice.samplers, choice.plan
            if self._governor is not None:
                self._governor.resume(choice.samplers)

    def stop(self) -> None:
        """Ends the workers and takes the last sample. All workers have ended when this returns."""
        if (tuner := self._assembly.plan.tuner) is not None:
            tuner.end()
            for text in tuner.notes() if self._tunes else ():
                self._recorder.event("info", text)
        self._recorder.rates.end()
        start_s, goes_on = time.monotonic(), self.next_plan is not None
        # If the tuner had not chosen, the last record is of its trial settings.
        self._recorder.tuner_measures &= not goes_on
        state = "running" if goes_on else "stopping"
        self._run_dir.write_state(state=state, tuner_measures=self._recorder.tuner_measures)
        try:
            self._workers.stop(hurry=lambda: self._interrupts.urgent, on_messages=self._handle, on_wait=self._waited)
        finally:
            self.stopping_s = time.monotonic() - start_s
            with contextlib.suppress(OSError):  # an abandoned checkpoint may take gigabytes
                for address in self._workers.learners():
                    folder = group_folder(self._run_dir.path, address.group) / "checkpoints"
                    CheckpointStore(folder).remove_unfinished()
                for folder in self._run_dir.path.glob("**/"):
                    remove_unfinished(folder)
            self._recorder.first_error, restarts = self._workers.first_error, self._workers.restart_count
            state = "training" if goes_on else "stopping"
            self._recorder.sample(self._assembly.read(), pids=None, restarts=restarts, samplers_alive=0, state=state)
            self._recorder.finish(restarts)

    def _waited(self, specs: list[WorkerSpec]) -> None:
        """Called while these workers end: shows how much of their checkpoints learners have yet to write."""
        self._report_hang_up()
        if any(spec.role.learns for spec in specs):
            groups = self._assembly.read().groups
            self._recorder.saving(int(sum(group.learner["checkpoint_left_bytes"] for group in groups)))

    def _report_hang_up(self) -> None:
        if self._interrupts.hung_up:
            self._recorder.report_sighup()

    def _stop_reason(self) -> str | None:
        if self._interrupts.count:
            return f"{StopReason.INTERRUPT} ({self._interrupts.cause})"
        if self._finished and len(self._finished) == len(self._workers.learners()):
            return next(iter(self._finished.values()))
        return self._recorder.stop_reason()

    def _handle(self, messages: list[dict[str, Any]]) -> None:
        outcome = self._recorder.outcome
        for message in messages:
            kind, source = message.get("kind"), str(message.get("from", "?"))
            if kind == "event":
                self._recorder.event(str(message.get("level", "info")), str(message.get("text", ""))[:2000], source)
            elif kind == "evaluation":
                self._recorder.evaluation(message)
                self._watch_falls()
            elif kind == "metrics" and (handle := self._workers.handles.get(source)) is not None:
                self._recorder.reported[handle.spec.address.group] |= message["values"]
            elif kind == "episode":
                self._recorder.episode(source, *message["numbers"])
            elif kind == "info":
                self._recorder.info(message)
            elif kind == "started":
                outcome.device = message.get("device")
            elif kind == "finished" and (handle := self._workers.handles.get(source)) is not None:
                self._finished[handle.spec.address] = str(message.get("reason") or StopReason.UPDATES)
                outcome.take_learner_result(handle.spec.address.group, message)

    def _watch_falls(self) -> None:
        curve, header = self._recorder.curve, self._assembly.status.header
        if (text := self._falls.fallen(curve)) is None:
            return
        self._recorder.event("warning", text)
        if self._assembly.plan.rollback_enabled and header[status_table.ROLLBACKS] < MAX_ROLLBACKS:
            header[status_table.ROLLBACKS] += 1
            self._falls.judge_from(curve)

    def _sample(self) -> None:
        self._recorder.first_error = self._workers.first_error
        reading, pids = self._assembly.read(), self._workers.pids()
        more = self._load.update(reading, {**pids, "supervisor": os.getpid()})
        more |= self._assembly.shared_metrics(reading.groups, reading.t_s, self._recorder)
        self._recorder.note_evaluator(not self._workers.keeps_failing("evaluator"))
        on_device = self._assembly.plan.config.data_flow.on_device  # there the learner steps environments, too
        stepping = [role for role in ROLES.values() if role.steps or (role.learns and on_device)]
        alive = sum(self._workers.alive(role) for role in stepping)
        restarts = self._workers.restart_count
        self._recorder.sample(reading, pids=pids, restarts=restarts, samplers_alive=alive, more=more)


class Timeline:
    """Trace of worker phases: which of them work at the same time, and which wait for which.

    It switches the workers' recording on and off (``StatusTable.events``) and writes what they noted to a file.
    """

    def __init__(self, status: StatusTable, rows: dict[str, int], run_dir: Path, wall_s: Callable[[], float]) -> None:
        """``rows`` has each worker's row of the status table by its name."""
        self._status, self._rows, self._file, self._wall_s = status, rows, run_dir / TIMELINE, wall_s
        self._began_ns = 0
        self._before: dict[str, int] = {}
        self.recorded = False

    def begin(self) -> None:
        self.recorded = True
        self._before = {name: int(self._status.control(row)[status_table.PHASE]) for name, row in self._rows.items()}
        self._began_ns = time.monotonic_ns()
        self._status.header[status_table.RECORDING] = 1

    @property
    def is_due(self) -> bool:
        """True if a trace is being recorded and is long enough."""
        return self._began_ns > 0 and time.monotonic_ns() - self._began_ns >= _TIMELINE_S * 1e9

    def finish(self) -> None:
        """Writes the file; an OSError if that fails."""
        self._status.header[status_table.RECORDING] = 0
        began_ns, self._began_ns = self._began_ns, 0
        end_ns = time.monotonic_ns()
        workers = {
            name: phase_parts(self._status.events(row), began_ns, end_ns, Phase(self._before[name]))
            for name, row in self._rows.items()
            if int(self._status.control(row)[status_table.PID])  # it has been started
        }
        write_json(
            self._file,
            {
                "wall_s": round(self._wall_s(), 3),
                "length_ms": round((end_ns - began_ns) / 1e6, 3),
                "workers": [{"name": name, "parts": rows} for name, rows in workers.items() if rows],
            },
        )


def phase_parts(events: Any, began_ns: int, end_ns: int, before: Phase) -> list[list[Any]]:
    """[start, end, phase] in ms since ``began_ns`` from a worker's events; a phase lasts until the next event.

    Phases that follow themselves are one part. ``before`` lasts until the first event: a long update may have none.
    """
    noted = sorted(
        (value >> status_table.PHASE_BITS, value & (2**status_table.PHASE_BITS - 1)) for value in events[1:].tolist()
    )
    known = [(t_ns, Phase(phase).name.lower()) for t_ns, phase in noted if began_ns <= t_ns < end_ns]
    if noted[0][0] < began_ns:  # else the ring has lost the first ones
        known.insert(0, (began_ns, before.name.lower()))
    rows: list[list[Any]] = []
    for (t_ns, phase), (next_ns, _) in pairwise([*known, (end_ns, "")]):
        start, end = round((t_ns - began_ns) / 1e6, 3), round((next_ns - began_ns) / 1e6, 3)
        if rows and rows[-1][2] == phase:
            rows[-1][1] = end
        else:
            rows.append([start, end, phase])
    return rows[-_MAX_PARTS:]


# --- the evaluation at the end of a run, by a process of its own ---


def _evaluate_at_the_end(
    plan: RunPlan, run_dir: RunDir, recorder: Recorder, interrupts: Interrupts, logs: LogKeeper, *, stopping_s: float
) -> None:
    """Evaluates the last weights, unless the user is in a hurry; ``stopping_s``: time taken to stop the workers."""
    outcome = recorder.outcome
    wanted = plan.config.evaluation.enabled and outcome.updates > 0
    in_a_hurry = interrupts.count or outcome.stopped_by in (StopReason.REQUEST, StopReason.FAILURE)
    is_first = outcome.eval_return_mean is None and not in_a_hurry  # worth the wait
    budget_s = _FIRST_EVALUATION_S if is_first else min(_EVALUATION_S, _EXIT_S - stopping_s)
    if plan.start_s > 0.5 * _EVALUATION_S:
        wanted = wanted and is_first
        budget_s += 2.0 * plan.start_s
    if not wanted or interrupts.urgent or budget_s < 1.0:
        return
    if is_first:
        recorder.event("info", f"a first evaluation takes at most {budget_s:.0f} s; stop the run again to skip it")
    record = _last_evaluation(plan, run_dir, recorder, interrupts, logs, budget_s)
    if record is not None:
        recorder.evaluation(record, final=True)
    elif not interrupts.urgent:
        recorder.no_final_evaluation(budget_s)


def _last_evaluation(
    plan: RunPlan, run_dir: RunDir, recorder: Recorder, interrupts: Interrupts, logs: LogKeeper, budget_s: float
) -> dict[str, Any] | None:
    """Evaluates the newest weights within ``budget_s``; None if no round finished in time."""
    slept_s, before = AWAKE.slept_s, [len(rows) for rows in _evaluations(plan, run_dir)]
    job = dataclasses.replace(evaluator_job(plan, run_dir.path, has_free_core=True), target_return=None)
    gives_way = plan.config.tuning.give_way
    nice = str(LOW_PRIORITY if gives_way else 0)
    arguments = ("-m", "spreeze.workers.evaluator", json.dumps(job.to_json()), str(budget_s), nice)
    kills = oom_kills()
    try:
        log = logs.log(log_path(run_dir.path, "evaluator"))
        log.begin()
        with log.open() as output:
            process = start_process(
                arguments,
                run_dir.nonce,
                name="evaluator",
                stdout=subprocess.PIPE,
                stderr=output,
                **group_arguments(gives_way),
            )
    except OSError as error:  # no reason to fail a run that has ended well
        recorder.event("warning", f"the final evaluation could not be started: {error}")
        return None
    assert process.stdout is not None
    interrupt_count, stop_requested = interrupts.count, run_dir.requested("stop")

    def is_wanted() -> bool:
        return interrupts.count == interrupt_count and run_dir.requested("stop") == stop_requested

    with process.stdout as pipe:
        received = _answer(process, pipe.fileno(), AWAKE() + budget_s + 2.0, is_wanted)
        killed = process.poll() is None
        if killed and kill_and_wait(process) is None:
            recorder.event("error", unkillable_message("the final evaluation", process.pid))
        end_orphans(run_dir.nonce)
        if readable([pipe.fileno()], 0.0):
            received += os.read(pipe.fileno(), 65536)
    with contextlib.suppress(ValueError):
        record = json.loads(received.partition(b"\n")[0])
        if isinstance(record, dict):
            return record
    for group, rows in enumerate(_evaluations(plan, run_dir)):  # its time may be over between the row and the answer
        if len(rows) > before[group]:
            return record_of(rows[-1], group, plan.config.evaluation.episodes)
    if AWAKE.slept_s > slept_s and is_wanted():  # its time was over when the machine woke
        return _last_evaluation(plan, run_dir, recorder, interrupts, logs, budget_s)
    if not killed and process.returncode:
        why = ": ".join(filter(None, (ending(process.returncode, kills), log.last_words)))
        recorder.event("warning", f"the final evaluation failed: {why}")
    return None


def _answer(process: subprocess.Popen[bytes], fd: int, deadline: float, is_wanted: Callable[[], bool]) -> bytes:
    """Bytes that the process writes until it ends, is not wanted any more, or has no time left."""
    received = b""
    while process.poll() is None and is_wanted() and AWAKE() < deadline:
        known = b"\n" in received
        data = os.read(fd, 65536) if readable([fd], 0.02) else b""
        if not data:  # also where it has closed the pipe
            time.sleep(0.01)
        received += data
        if not known and b"\n" in received:  # it closes its environments
            deadline = min(deadline, AWAKE() + CLOSING_S)
    return received


def _evaluations(plan: RunPlan, run_dir: RunDir) -> list[list[dict[str, Any]]]:
    return [read_rows(group_folder(run_dir.path, group) / "eval.csv") for group in range(plan.policies)]
