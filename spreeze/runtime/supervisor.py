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
from typing import Any

from spreeze.config.schema import TuningConfig
from spreeze.errors import ConfigError, ResourceError, WorkerError
from spreeze.formatting import clean, percent
from spreeze.machine.awake import AWAKE
from spreeze.machine.logs import LogKeeper, ending, oom_kills
from spreeze.machine.processes import (
    CLOSING_S,
    LOW_PRIORITY,
    OrphanWatch,
    end_orphans,
    kill_and_wait,
    left_behind,
    mark,
    signals_blocked,
)
from spreeze.metrics.progress import MOST_RETURNS, FallWatch
from spreeze.metrics.stop_reasons import StopReason
from spreeze.run_directory import RunDir, group_folder
from spreeze.runtime.assembly import Assemble, Assembly, assembled, evaluator_job
from spreeze.runtime.callback_links import EnvironmentArguments
from spreeze.runtime.cpu_governor import GovernorLoop, LoadWatch
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import (
    FRESH,
    Launcher,
    RunContext,
    WorkerSpec,
    begin_log,
    child_environment,
    group_arguments,
    open_log,
)
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.process_supervisor import ProcessSupervisor
from spreeze.runtime.rates import CounterSample
from spreeze.runtime.recorder import SAMPLE_S, Outcome, Recorder, View
from spreeze.runtime.timeline import FIRST_S, Timeline
from spreeze.transport import status_table as status_words
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.shared_memory import readable
from spreeze.workers.roles import ROLES, Address

_LOOK_S = 0.05
_FINAL_EVALUATION_S = 6.0
_EXIT_S = 12.0  # longest time from the stop request to the end of the final evaluation; 3 s remain for closing files
_TUNER_AFTER_S = 5.0  # from the first update to the tuner, so that a short run is over before it begins
_VISUALIZER_AFTER_S = 4.0  # from the first update to the visualizer's start, whose imports would delay the first ones


def run_workers(
    assemble: Assemble, plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH
) -> Outcome:
    """Trains with the workers that a mode puts together, then evaluates. All have ended when this returns.

    Raises:
        ResourceError: there is no room for shared memory, or a worker could not be started.
        ConfigError: a checkpoint does not fit the settings.
    """
    recorder = Recorder(plan, run_dir, view)
    watch, logs = OrphanWatch(run_dir.nonce, silent_s=launcher.silent_s), LogKeeper()
    try:
        watch.start()
        logs.start()
        with interrupts.guarded_by(watch), contextlib.ExitStack() as stack:
            with interrupts.abandonable():  # a saved replay may have gigabytes
                run = stack.enter_context(assembled(assemble, plan, run_dir.path, recorder.started_s))
            if run.whole_env_steps is not None:
                recorder.continue_from(run.whole_env_steps)
            stack.enter_context(launcher.supervised(run_dir.path, run_dir.nonce))
            loop = _RunLoop(run_dir, recorder, interrupts, launcher, run, logs)
            try:
                loop.start()
                loop.run()
            finally:
                loop.stop()
        budget_s = min(_FINAL_EVALUATION_S, _EXIT_S - loop.stopping_s)
        wanted = plan.config.evaluation.enabled and recorder.outcome.updates > 0
        if plan.start_s > 0.5 * _FINAL_EVALUATION_S:  # worth the wait where there is no score at all
            wanted = wanted and recorder.outcome.eval_return is None and not interrupts.count
            budget_s += 2.0 * plan.start_s
        if wanted and not interrupts.urgent and budget_s >= 1.0:
            record = _final_evaluation(run_dir, plan, budget_s, interrupts, recorder, logs)
            if record is not None:
                recorder.evaluation(record, final=True)
            elif not interrupts.urgent:
                recorder.no_final_evaluation(budget_s)
    finally:
        watch.end()
        logs.close()
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
        self._run_dir, self._recorder, self._interrupts, self._run = run_dir, recorder, interrupts, run
        self._governing: GovernorLoop | None = None
        if plan.config.tuning.govern and any(spec.role.pausable for spec in run.specs.values()):
            self._governing = GovernorLoop(plan, run.status, recorder.event)
        self._watching = self._governing or LoadWatch()
        gives_way = plan.config.tuning.give_way
        self._workers = ProcessSupervisor(
            RunContext(run_dir=run_dir.path, status=run.status, nonce=run_dir.nonce, gives_way=gives_way, logs=logs),
            on_event=recorder.event,
            launcher=launcher,
        )
        self._finished: dict[Address, str] = {}
        self._leave_free = plan.config.tuning.leave_free
        self._env_args = EnvironmentArguments(plan, run_dir, recorder.event)
        run.status.header[status_words.ENV_ARGS] = self._env_args.version
        self._timeline = Timeline(
            run.status, {name: spec.row for name, spec in run.specs.items()}, run_dir.path, lambda: recorder.wall_s
        )
        self._tunes = False
        self._falls = FallWatch(plan.config.learner.checkpoint_interval_s)
        self._next_sample_s = 0.0
        self.stopping_s = 0.0  # how long stopping the workers took

    def start(self) -> None:
        """Starts all workers but the visualizer and the samplers that only the tuner may want."""
        self._run_dir.write_state(leave_free=None if self._governing is None else self._leave_free)
        for name, spec in self._run.specs.items():
            try:
                if name != "visualizer" and not self._waits_for_tuner(spec):
                    self._workers.add(spec)
            except OSError as error:
                raise ResourceError(
                    f"{name} could not be started: {error}; use fewer {spec.role.name}s, or raise the limit of "
                    "processes and open files (ulimit -u, ulimit -n)"
                ) from None

    def _waits_for_tuner(self, spec: WorkerSpec) -> bool:
        first = self._run.plan.first_samplers
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
                self._run.status.header[status_words.PAUSED_MS] = round(1000 * self._recorder.paused_s)
                if self._timeline.is_due:
                    self._write_timeline()
                if time.monotonic() >= self._next_sample_s:
                    self._next_sample_s = time.monotonic() + SAMPLE_S
                    self._sample()
                    self._start_visualizer()
                    self._tune()
                reason = self._stop_reason()
                if reason is not None:
                    outcome.stopped_by = reason
                    return
        except WorkerError as error:
            outcome.stopped_by, outcome.error = StopReason.FAILURE, str(error)
            self._recorder.event("error", str(error))

    def _pause(self) -> None:
        """Stops all processes of the workers where they are, and continues them when the pause is over."""
        self._workers.signal_all(signal.SIGSTOP)
        try:
            self._recorder.wait_while_paused(lambda: self._stop_reason() is None)
        finally:
            self._run.status.header[status_words.PAUSED_MS] = round(1000 * self._recorder.paused_s)
            self._workers.signal_all(signal.SIGCONT)

    def _handle_requests(self) -> None:
        header, governing = self._run.status.header, self._governing
        for name, word in (
            ("evaluate", status_words.EVALUATIONS_ASKED),
            ("checkpoint", status_words.CHECKPOINTS_ASKED),
        ):
            if self._run_dir.take_request(name) is not None:
                header[word] += 1
        began_s = self._recorder.rates.learning_began_s
        first = not self._timeline.recorded and began_s is not None and time.monotonic() - began_s >= FIRST_S
        if self._run_dir.take_request("timeline") is not None or first:
            self._timeline.begin()
        self._env_args.look()
        if header[status_words.ENV_ARGS] != self._env_args.version:
            self._falls.begin_again(self._recorder.curve)
        header[status_words.ENV_ARGS] = self._env_args.version
        header[status_words.EPISODES_TOLD] = int(self._recorder.callbacks.wants_episodes)
        text = self._run_dir.take_request("leave-free")
        if text is not None and governing is None:
            self._recorder.event("warning", "leave-free: this run has no CPU governor, so nothing changes")
        elif text is not None and governing is not None:
            try:
                share = TuningConfig(leave_free=float(text)).leave_free
            except (ValueError, ConfigError) as error:
                self._recorder.event("warning", f"leave-free = {clean(text, 40)!r} was ignored: {error}")
                return
            governing.leave_free(share)
            self._run_dir.write_state(leave_free=share)
            self._recorder.event("info", f"{percent(share)} of the usable cores are left free for other programs")

    def _read(self) -> CounterSample:
        found = self._run.read()
        if self._run.measured is None:
            return found
        return dataclasses.replace(found, groups=self._run.measured(found.groups, found.t_s, self._recorder))

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
                self._recorder.event("warning", f"the visualizer could not be started: {error}")

    def _tune(self) -> None:
        """Lets the tuner begin once learning has, and shows what it says; then governs the samplers of its choice."""
        tuner, began_s = self._run.plan.tuner, self._recorder.rates.learning_began_s
        if tuner is None:
            return
        if not self._tunes and began_s is not None and time.monotonic() - began_s > _TUNER_AFTER_S:
            self._tunes = True
            try:
                for spec in self._run.specs.values():
                    if self._waits_for_tuner(spec):
                        self._workers.add(spec)
            except OSError as error:  # never a reason to end the run
                self._recorder.event("warning", f"not tuned: a sampler could not be started: {error}")
                return
            if self._governing is not None:
                self._governing.hold()
            self._run_dir.write_state(tuning_began=time.time())
            tuner.begin(self._run, self._workers.pids)
        for text in tuner.notes() if self._tunes else ():
            self._recorder.event("info", text)
        if self._tunes and (samplers := tuner.chosen_samplers()) is not None:
            self._recorder.samplers_wanted = samplers
            if self._governing is not None:
                self._governing.allow(samplers)

    def stop(self) -> None:
        """Ends the workers and takes the last sample. All workers have ended when this returns."""
        if self._run.plan.tuner is not None:
            self._run.plan.tuner.end()
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
            self._recorder.first_error, restarts = self._workers.first_error, self._workers.restarts
            self._recorder.sample(self._read(), pids=None, restarts=restarts, samplers_alive=0, state="stopping")
            self._recorder.finish(restarts)

    def _waited(self, specs: list[WorkerSpec]) -> None:
        """Called while these workers end: shows how much of their checkpoints learners have yet to write."""
        self._report_hang_up()
        if any(spec.role.learns for spec in specs):
            groups = self._read().groups
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
        """Says that the return has fallen, and has the learner go back to its best checkpoint where it can."""
        curve, header = self._recorder.curve, self._run.status.header
        if (text := self._falls.fallen(curve)) is None:
            return
        self._recorder.event("warning", text)
        if self._run.plan.goes_back and header[status_words.FALLS] < MOST_RETURNS:
            header[status_words.FALLS] += 1
            self._falls.went_back(curve)

    def _sample(self) -> None:
        self._recorder.first_error = self._workers.first_error
        reading, pids = self._read(), self._workers.pids()
        governed = self._watching.update(reading, {**pids, "supervisor": os.getpid()})
        self._recorder.note_evaluator(not self._workers.keeps_failing("evaluator"))
        on_device = self._run.plan.config.data_flow.on_device  # there the learner steps environments, too
        stepping = [role for role in ROLES.values() if role.steps or (role.learns and on_device)]
        alive = sum(self._workers.alive(role) for role in stepping)
        restarts = self._workers.restarts
        self._recorder.sample(reading, pids=pids, restarts=restarts, samplers_alive=alive, governed=governed)
        self._run.status.header[status_words.VISUALIZER_PAUSED] = int(self._run_dir.requested("pause-visualizer"))
        self._handle_requests()


def _final_evaluation(
    run_dir: RunDir, plan: RunPlan, budget_s: float, interrupts: Interrupts, recorder: Recorder, logs: LogKeeper
) -> dict[str, Any] | None:
    """Evaluates the newest weights within ``budget_s``; None if no round finished in time."""
    slept_s = AWAKE.slept_s
    job = dataclasses.replace(evaluator_job(plan, run_dir.path, has_free_core=True), target_return=None)
    gives_way = plan.config.tuning.give_way
    nice = str(LOW_PRIORITY if gives_way else 0)
    command = [sys.executable, "-m", "spreeze.workers.evaluator", json.dumps(job.to_json()), str(budget_s), nice]
    log, kills = begin_log(run_dir.path, "evaluator", logs), oom_kills()
    try:
        with open_log(log) as output, signals_blocked():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                env=child_environment(1, run_dir.nonce, "evaluator"),
                **group_arguments(gives_way),
            )
        mark(process.pid, run_dir.nonce)
    except OSError as error:  # no reason to fail a run that has ended well
        recorder.event("warning", f"the final evaluation could not be started: {error}")
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
            recorder.event("error", left_behind("the final evaluation", process.pid))
        end_orphans(run_dir.nonce)
        if readable([pipe.fileno()], 0.0):
            answer += os.read(pipe.fileno(), 65536)
    with contextlib.suppress(ValueError):
        record = json.loads(answer.partition(b"\n")[0])
        if isinstance(record, dict):
            return record
    if AWAKE.slept_s > slept_s and interrupts.count == asked:  # its time was over when it went on
        return _final_evaluation(run_dir, plan, budget_s, interrupts, recorder, logs)
    if not killed and process.returncode:
        why = ": ".join(filter(None, (ending(process.returncode, kills), log.last_words)))
        recorder.event("warning", f"the final evaluation failed: {why}")
    return None
