"""``python -m spreeze.train``: examines the machine, resolves the settings, trains, reports.

python -m spreeze.train --auto                                # a walking robot; ends by itself
python -m spreeze.train --env Pendulum-v1 --target-return -200
python -m spreeze.train --resume latest
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spreeze.cli.algorithm_choice import AlgorithmChoice, candidates_for, continued, step_us_of, too_slow
from spreeze.cli.arguments import as_argument, build_parser, guarded
from spreeze.cli.planning import check_machine, cluster_note, layers_of, plan_of, untunable_env
from spreeze.cli.resume import check_environment, earlier_sessions, write_settings
from spreeze.cli.terminal import open_view, show_tuning
from spreeze.config.layers import SLOW_ENV, Layer, Settings, default_of, effect_notes, resolve, with_algorithm
from spreeze.envs.make import bullet_engine, foreign_module
from spreeze.envs.pictures import observation_note
from spreeze.envs.probe import TIMED_STEPS, Probe, probe_of
from spreeze.errors import ConfigError, ResourceError, RunError
from spreeze.files import read_json, replace_bytes, write_json
from spreeze.formatting import percent, size
from spreeze.machine.awake import AWAKE
from spreeze.machine.hardware import Machine, read_machine
from spreeze.machine.output import background_output, emit, print_error, say
from spreeze.machine.processes import ENDS_WITH, is_stopped
from spreeze.metrics.published_returns import published
from spreeze.metrics.return_curve import HELD
from spreeze.metrics.stop_conditions import StopReason, stop_reason
from spreeze.metrics.tuning_record import ALGORITHMS, PROGRESS
from spreeze.modes import run_mode
from spreeze.process_identity import process_age_s, process_identity
from spreeze.run_directory import (
    RunDir,
    find_run,
    kept_policy,
    new_name,
    read_config,
    read_run,
    refuse_links,
    send_request,
    session_starts,
    started_s,
    versions,
)
from spreeze.runtime.callback_process import check_callbacks
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import Launcher, Prewarm
from spreeze.runtime.loggers import check_sinks
from spreeze.runtime.outcome import Outcome, summary
from spreeze.runtime.plan import EarlierSessions, RunPlan
from spreeze.tuner.in_run import BesideRunTuner, InRunTuner, can_tune_in_run, first_setting, rollouts_at_first
from spreeze.tuner.knobs import knobs_of
from spreeze.tuner.problem import CAPACITY, ENVS, SAMPLERS, Setting, TrialResult
from spreeze.tuner.run import TunerCallbacks, Tuning, check_tunable, layer_of
from spreeze.types import RowLayout


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 trained, 1 failed, 2 rejected."""
    command = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(command)

    def train() -> int:
        result = _train(args, command)
        return result if isinstance(result, int) else int(_train(result, command))

    with background_output():
        return guarded(train, as_json=args.json)


def _train(args: argparse.Namespace, command: Sequence[str]) -> int | argparse.Namespace:
    """Returns the exit code, or a command line to run in place of this one."""
    with Interrupts() as interrupts, contextlib.ExitStack() as stack:
        resumed = find_run(args.resume, Path(getattr(args, "--runs-dir") or "runs")) if args.resume else None
        if resumed is not None:
            refuse_links(resumed)  # before anything in it is read
        machine = read_machine()
        base, notes = layers_of(args, resumed, machine)
        settings = resolve(base)  # before any output: a rejection is a single line
        check_sinks(settings.config.logging.sinks)
        check_callbacks(settings.config.callback.classes)
        for note in notes:
            say(note, as_json=args.json)
        config = settings.config
        # A learner process will be needed; with two cores, it can load in the meantime.
        wanted = config.mode.starts_processes and machine.cores.usable >= 2 and not args.fresh
        prewarm = stack.enter_context(Prewarm(config.learner.threads, wanted=wanted, gives_way=config.tuning.give_way))
        probe = probe_of(
            settings.config,
            steps=TIMED_STEPS if args.auto else 0,
            second=True,
            interrupted=lambda: interrupts.stop_requested,
            on_wait=lambda text: say(text, as_json=args.json),
        )
        if resumed is not None:
            check_environment(resumed, probe.spec)
        compared = _compare(args, command, base, settings, probe, machine, interrupts, prewarm)
        if not isinstance(compared, list):
            return compared
        base, settings, why = with_algorithm(compared, probe.spec, probe.step_us_median)
        auto = args.auto
        if auto and (untunable := untunable_env(probe)) is not None:
            auto = False
            say(f"not tuned: {untunable}; using profile and defaults", as_json=args.json)
        earlier, missing_note = earlier_sessions(resumed, settings.config) if resumed else (EarlierSessions(), None)
        for line in filter(None, (why, *_task_notes(args, settings, probe), machine.one_line(), missing_note)):
            say(line, as_json=args.json)
        if settings.config.cluster.address is not None:
            say(cluster_note(settings.config.cluster.address), as_json=args.json)
        plan = plan_of(settings, probe, machine, earlier, to_tune=auto)
        check_machine(plan, machine)
        if auto:
            check_tunable(plan.config)
        run_dir = _open_run_dir(args, plan, resumed, prewarm)
        interrupts.on_exit = lambda reason: run_dir.write_state(
            state="stopped" if interrupts.urgent else "failed", exit_reason=interrupts.cause or reason
        )
        try:
            _write_start(plan, run_dir, machine)
            result = _TuningResult()
            if auto:
                interrupts.stop_file = run_dir.path / "control" / "stop"
                listener = _tuner_callbacks(args, settings, run_dir, prewarm.close)
                tuning = Tuning(settings, probe, machine, interrupts, listener)
                plan = result.tuned_plan(
                    args, tuning, run_dir, functools.partial(_tuned_plan, base, probe, machine, earlier)
                )
            return _run(args, plan, run_dir, machine, result, interrupts, prewarm)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)  # during tuning
            run_dir.write_state(
                state="stopped" if stopped else "failed",
                exit_reason=(interrupts.cause or StopReason.REQUEST) if stopped else None,
            )
            raise
        finally:
            run_dir.close()


def _open_run_dir(args: argparse.Namespace, plan: RunPlan, resumed: Path | None, launcher: Prewarm) -> RunDir:
    run = plan.config.run
    if resumed is not None:
        run_dir = RunDir.open(resumed, launcher.nonce)
    else:
        name = run.name or new_name(plan.spec.env_id, run.algo, run.seed)
        run_dir = RunDir.create(Path(run.runs_dir), name, launcher.nonce, numbered=run.name is None)
    if not run_dir.guarded:
        say(
            f"{run.runs_dir}: this file system has no locks, so two processes could resume "
            f"{run_dir.path.name} at the same time; make sure only one does",
            as_json=args.json,
        )
    return run_dir


def _compare(
    args: argparse.Namespace,
    command: Sequence[str],
    base: list[Layer],
    settings: Settings,
    probe: Probe,
    machine: Machine,
    interrupts: Interrupts,
    prewarm: Prewarm,
) -> int | argparse.Namespace | list[Layer]:
    """Compares algorithms if there is a choice; returns the command line of the best one.

    Returns the exit code if that has reached its target; the settings layers of this run if there is no choice or the
    best is known.
    """
    names = candidates_for(args, settings, probe.spec)
    if not names:
        return base
    note = functools.partial(say, as_json=args.json)
    if (reason := too_slow(settings, names, step_us_of(settings, probe), machine.cores.usable)) is not None:
        note(f"{probe.spec.env_id}: {reason}")
        return base
    choice = AlgorithmChoice(command, args, settings, probe, machine, note)
    if (known := choice.known(names)) is not None:
        return [Layer("comparison of algorithms", {"run": {"algo": known}}), *base]
    prewarm.close()
    began_s = AWAKE()
    chosen = choice.best(names, interrupts)
    if read_run(chosen.run).get("exit_reason") != StopReason.TARGET_RETURN:
        return continued(args, chosen, AWAKE() - began_s)
    if args.json:
        emit(read_json(chosen.run / "summary.json"))
    return 0


def _task_notes(args: argparse.Namespace, settings: Settings, probe: Probe) -> list[str]:
    """Flags without effect, and how the environment is made and observed."""
    notes = effect_notes(settings, tuned=args.auto or args.compared)
    notes += ["no effect without --auto: --fresh"] if args.fresh and not args.auto else []
    env = settings.config.env
    engine = bullet_engine(env.id, plain=env.plain, args=env.args)
    env_notes = [observation_note(probe.spec), *probe.notes, None if engine is None else engine.reason]
    replay, rollout = settings.config.replay, settings.config.rollout
    replays, goals = settings.config.on_policy is None, probe.spec.goals
    if replays and goals is not None and goals.computes_reward and replay.her == "off":
        env_notes.append("it has goals; --set replay.her=future also learns from those that were achieved")
    if replay.her != "off" and settings.sources.get("replay.her") == default_of(settings):
        env_notes.append(
            "rewards depend only on goals, so hindsight replay (HER) is on; turn it off with --set replay.her=off"
        )
    for name, count in (("replay.learning_starts", replay.learning_starts), ("rollout.size", rollout.size)):
        if settings.source_of(name) == SLOW_ENV:
            env_notes.append(f"its steps are slow, so the first update comes after {count} of them (--set {name}=N)")
    if replays and probe.spec.frames is not None:
        rows, row_bytes = replay.capacity, RowLayout.of(probe.spec).row_bytes
        total = size(rows * row_bytes)
        env_notes.append(f"replay may grow to {rows:,} frames of {size(row_bytes)}, {total} (--replay-capacity)")
    return [*notes, *(f"{env.id}: {line}" for line in env_notes if line)]


def _tuned_plan(
    base: list[Layer],
    probe: Probe,
    machine: Machine,
    earlier: EarlierSessions,
    tuned: Layer,
    reasons: dict[str, str] | None,
) -> RunPlan:
    """The plan with the tuner's choice, which the user's settings override."""
    plan = plan_of(resolve([*base[:-1], tuned, base[-1]]), probe, machine, earlier, reasons, tune_hosts=True)
    check_machine(plan, machine)
    return plan


_Planned = Callable[[Layer, dict[str, str] | None], RunPlan]  # makes the plan from the tuner's choice and its reasons


class _TuningResult:
    """The tuner's record and the resulting plan: known at the start, or set during the run."""

    record: dict[str, Any] | None = None
    plan: RunPlan | None = None  # the plan with the settings that were chosen during the run
    on_plan: Callable[[RunPlan, dict[str, Any]], None]  # called with the plan and the record once the tuner has chosen

    def tuned_plan(self, args: argparse.Namespace, tuning: Tuning, run_dir: RunDir, planned: _Planned) -> RunPlan:
        """The plan with the tuner's choice, or a plan for a run in which it will choose."""
        self.record = None if args.fresh else tuning.known()
        if self.record is None and (plan := self._tuned_in_run(tuning, planned)) is not None:
            return plan
        if self.record is None:
            run_dir.write_state(state="tuning", tuning_began=time.time())
            spent_s = 0.0 if args.resume else process_age_s()  # which may include a comparison of algorithms
            self.record = tuning.measured(spent_s=spent_s, fresh=args.fresh)
            show_tuning(self.record, sys.stderr if args.json else sys.stdout, reasons=False)
        return planned(layer_of(self.record), self.record["reasons"])

    def _tuned_in_run(self, tuning: Tuning, planned: _Planned) -> RunPlan | None:
        """The plan of a run that trains while it is tuned; None if it has to be tuned first."""
        problem = tuning.problem()
        if can_tune_in_run(problem, tuning.settings.config):
            first, max_samplers = first_setting(problem)
            known = Setting({name: first[name] for name in (CAPACITY, ENVS) if first[name] != problem.configured[name]})
            plan = planned(known.layer(), None)
            if not plan.single_env:
                tuner = InRunTuner(tuning, first.replace(SAMPLERS, plan.samplers), self._chosen_by(planned))
                with contextlib.suppress(ConfigError):  # replay is too small for more samplers
                    started = max(max_samplers, plan.samplers)
                    return dataclasses.replace(plan, samplers=started, first_samplers=plan.samplers, tuner=tuner)
                return dataclasses.replace(plan, tuner=tuner)
        if (first_rollout := rollouts_at_first(problem, tuning.settings.config)) is not None:
            plan = planned(Setting({}).layer(), None)
            if not plan.single_env:
                return dataclasses.replace(plan, tuner=BesideRunTuner(tuning, first_rollout, self._chosen_by(planned)))
        return None

    def _chosen_by(self, planned: _Planned) -> Callable[[dict[str, Any]], RunPlan]:
        """A function from the record of a tuner that chose during the run to the resulting plan."""

        def chosen(record: dict[str, Any]) -> RunPlan:
            self.record, self.plan = record, planned(layer_of(record), record["reasons"])
            self.on_plan(self.plan, record)
            return self.plan

        return chosen


def _tuner_callbacks(
    args: argparse.Namespace, settings: Settings, run_dir: RunDir, before: Callable[[], None]
) -> TunerCallbacks:
    """Rows go to ``tune-progress.jsonl`` as they are measured. ``before`` is called before the first trial."""

    def note(result: TrialResult) -> None:
        with contextlib.suppress(OSError), open(run_dir.path / PROGRESS, "a", encoding="utf-8") as file:
            file.write(json.dumps(result.as_json()) + "\n")

    labels = {"labels": {knob.name: knob.column for knob in knobs_of(settings.config)}}
    with contextlib.suppress(OSError):
        (run_dir.path / PROGRESS).write_text(json.dumps(labels) + "\n", encoding="utf-8")
    return TunerCallbacks(say=lambda text: say(text, as_json=args.json), on_result=note, before=before)


def _failed_checkpoints(run_dir: RunDir, error: OSError) -> ResourceError:
    return ResourceError(f"{run_dir.path} cannot be written: {error}; free some disk space or choose --runs-dir")


def _write_start(plan: RunPlan, run_dir: RunDir, machine: Machine) -> None:
    """Writes ``env.json`` and the first state to ``run.json``; a ResourceError if there is no room."""
    try:
        write_json(run_dir.path / "env.json", dataclasses.asdict(plan.spec), durable=True)
    except OSError as error:
        raise _failed_checkpoints(run_dir, error) from None
    sessions, before, now_s = plan.earlier.sessions + 1, read_run(run_dir.path), time.time()
    counters = {name: getattr(plan.earlier, name) for name in ("env_steps", "updates", "episodes", "wall_s")}
    started: dict[str, Any] = {}
    if sessions == 1 or started_s(before) is None:
        started = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now_s)), "started_s": now_s}
    run_dir.write_state(
        durable=True,
        state="starting",
        sessions=sessions,
        session_starts=[*session_starts(before), plan.earlier.wall_s],
        **(counters if sessions > 1 else {}),
        # Mode of the previous session: a resume checks it if this one dies before it has written config.toml.
        mode_before=read_config(run_dir.path).get("run", {}).get("mode"),
        env_id=plan.spec.env_id,
        algo=plan.config.run.algo,
        mode=plan.config.run.mode,
        data_flow=dataclasses.asdict(plan.config.data_flow),
        seed=plan.config.run.seed,
        nonce=run_dir.nonce,
        command=sys.argv,
        exit_reason=None,
        versions=versions(),
        machine=machine.one_line(),
        **process_identity(os.getpid()),
        host=socket.gethostname(),
        **started,
    )


def _run(
    args: argparse.Namespace,
    plan: RunPlan,
    run_dir: RunDir,
    machine: Machine,
    tuning: _TuningResult,
    interrupts: Interrupts,
    launcher: Launcher,
) -> int:
    _check_disk(plan, run_dir)
    settings_before = None
    with contextlib.suppress(OSError):
        settings_before = (run_dir.path / "config.toml").read_bytes() if plan.earlier.sessions else None
    checkpoints_before = _checkpoint_times(run_dir.path)
    try:
        # A resumed run may have another batch, other hosts.
        _write_plan(plan, run_dir, tuning.record)
    except OSError as error:
        raise _failed_checkpoints(run_dir, error) from None
    with contextlib.suppress(OSError):  # of an earlier session: the page would show it until there is a new one
        (run_dir.path / "live.jpg").unlink(missing_ok=True)
    view = open_view(json_mode=args.json)

    def tuned(plan: RunPlan, record: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the run goes on; a resume measures again
            _write_plan(plan, run_dir, record)
        table = io.StringIO()
        show_tuning(record, table, reasons=True)
        for line in table.getvalue().splitlines():
            view.note(line)

    tuning.on_plan = tuned
    interrupts.on_stop = view.leave
    if (caller := os.environ.get(ENDS_WITH)) == str(os.getppid()):
        interrupts.on_tick.append(_pause_with(int(caller), run_dir))
    state = "failed"
    try:
        with contextlib.closing(view):
            view.note(f"run directory {run_dir.path}")
            if (ending := plan.ending) is not None:
                view.note(f"{ending.sentence} (--seconds 0: trains until Ctrl-C)")
            for key, reason in plan.reasons.items():
                view.note(f"{key}: {reason}")
            outcome = run_mode(plan, run_dir, view, interrupts, launcher)
        document = _document(tuning, plan, outcome, run_dir, machine)
        try:
            write_json(run_dir.path / "summary.json", document)
        except OSError as error:
            say(f"summary.json could not be written: {error}", as_json=args.json)
        state = "failed" if outcome.error else "finished"
        run_dir.write_state(exit_reason=outcome.stopped_by, wall_s=outcome.wall_s, **outcome.totals)
    finally:
        if state == "failed" and settings_before is not None and _checkpoint_times(run_dir.path) == checkpoints_before:
            # The settings may be the cause; with those of the earlier session the run can continue.
            with contextlib.suppress(OSError):
                replace_bytes(run_dir.path / "config.toml", settings_before, durable=True)
        run_dir.write_state(durable=True, state=state)
    if args.json:
        emit(document)
    else:
        say(_final_report(document, foreign_module(plan.spec.env_id, plan.config.env.import_module)), keep=True)
    if outcome.error:
        print_error(outcome.error)
    return 1 if outcome.error else 0


def _document(
    tuning: _TuningResult, plan: RunPlan, outcome: Outcome, run_dir: RunDir, machine: Machine
) -> dict[str, Any]:
    """The summary of a run, with the records of tuning and of the comparison of algorithms."""
    document = summary(tuning.plan or plan, outcome, run_dir.path, machine)
    if (record := tuning.record) is not None:
        document["tuning"] = {name: record.get(name) for name in ("measured_at", "reused", "provisional", "notes")}
    if compared := read_json(run_dir.path / ALGORITHMS):
        document["algorithms"] = compared.get("candidates")
    return document


def _write_plan(plan: RunPlan, run_dir: RunDir, record: dict[str, Any] | None) -> None:
    write_settings(run_dir.path, plan.requested_settings or plan.settings)
    if record is not None:
        write_json(run_dir.path / "tune.json", record)
    run_dir.write_state(samples_per_insert_band=plan.config.replay.samples_per_insert_band)


def _pause_with(caller: int, run_dir: RunDir) -> Callable[[], None]:
    """A function that pauses the run while the process that called ``spreeze.train`` is stopped (Ctrl-Z)."""
    paused = False

    def update() -> None:
        nonlocal paused
        stopped = is_stopped(caller)
        with contextlib.suppress(RunError):
            if stopped and not paused and not run_dir.requested("pause"):
                send_request(run_dir.path, "pause")
                paused = True
            elif paused and not stopped:
                run_dir.withdraw("pause")
                paused = False

    return update


def _checkpoint_times(run: Path) -> dict[str, int]:
    with contextlib.suppress(OSError):
        return {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(run / "checkpoints")}
    return {}


def _check_disk(plan: RunPlan, run_dir: RunDir) -> None:
    """Rejects ``--save-replay`` if the disk cannot hold two copies, the old and the new one."""
    if not plan.config.replay.save or plan.config.on_policy is not None:
        return
    needed, free = 2 * plan.shared_bytes()[1], shutil.disk_usage(run_dir.path).free
    if needed > free:
        raise ResourceError(
            f"--save-replay needs {needed / 1e6:.0f} MB of disk, {free / 1e6:.0f} MB are free; "
            "free some disk space, or lower --replay-capacity"
        )


def _final_report(document: dict[str, Any], import_module: str | None) -> str:
    def text(name: str, form: str = ".1f") -> str:
        value = document.get(name)
        return "-" if value is None else format(value, form)

    kinds = (("cut", "cut short"), ("lost", "lost to environment errors"))
    lost = [f", {count} {label}" for kind, label in kinds if (count := document.get(f"eval_episodes_{kind}"))]
    episodes = f"; of {document['eval_episodes']} episodes{''.join(lost)}" if lost else ""
    more = [f", success rate {percent(rate)}"] if (rate := document.get("eval_success_rate")) is not None else []
    if (count := document.get("eval_return_final_evaluations") or 0) > 1:  # else it is the last evaluation
        more += [f", {document['eval_return_final']:.1f} over the last {count} evaluations"]
    if (reached := document.get("time_to_target_s")) is not None:
        held = document.get("time_to_target_held_s")
        more.append(f", target confirmed {reached:.1f} s after the command began")
        more += [] if held is None else [f", reached by the mean of {HELD} evaluations after {held:.1f} s"]
    if (known := published(document["env"])) is not None:
        more.append(f"; {known.label}")
    kept = kept_policy(Path(document["run_dir"]))
    best = f"these commands use the best policy: of {kept}\n" if kept else ""
    run = f"{as_argument(document['run_dir'])}{f' --import {import_module}' if import_module else ''}"
    hint = "it ended before its first update: give it more time, or lower replay.learning_starts or rollout.size\n"
    unlearned = "" if document["updates"] else hint
    reason = stop_reason(document["stopped_by"])
    why = f", because {reason.sentence}" if reason else ""
    return (
        f"ended after {text('wall_s')} s{why}: {document['env_steps']} env steps, {document['updates']} updates, "
        f"greedy return {text('eval_return_mean')} (best evaluation {text('eval_return_best')}{episodes})"
        f"{''.join(more)}\n"
        f"from this session's first update on: {text('env_steps_per_s', '.0f')} env steps/s, "
        f"{text('updates_per_s')} updates/s; {text('samples_per_insert')} samples per insert since the learner "
        f"last started\n{unlearned}"
        f"{best}watch it: python -m spreeze play {run}\n"
        f"evaluate it: python -m spreeze evaluate {run}\n"
        f"continue: python -m spreeze.train --resume {run}"
    )
