"""Runs worker processes from start to end, for every mode that has workers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spreeze.errors import ResourceError
from spreeze.machine.orphan_cleanup import OrphanWatch, end_orphans
from spreeze.machine.processes import DEATH_S, held_back, kill_and_wait, left_behind
from spreeze.run_directory import RunDir
from spreeze.runtime.cpu_governor import GovernorLoop
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import Launcher, RunContext, WorkerSpec, child_environment, log_file
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import CounterSample, GroupSample
from spreeze.runtime.recorder import Outcome, Recorder
from spreeze.runtime.supervisor import ProcessSupervisor, Supervisor
from spreeze.transport.shared_memory import available_bytes
from spreeze.transport.status_table import StatusTable
from spreeze.workers.evaluator import EvaluatorJob
from spreeze.workers.jobs import VisualizerJob
from spreeze.workers.roles import Address

_FINAL_EVALUATION_S = 6.0
_EXIT_S = 12.0
"""Longest time from the stop request to the end of the final evaluation; 3 more seconds are for closing."""
_VISUALIZER_AFTER_S = 4.0
_LEAST_LIMIT_BYTES = 2**30
"""Least memory limit of a worker that steps environments; else its share of half of the free memory."""


@dataclass(frozen=True, kw_only=True)
class Wired:
    """A mode's workers and the shared memory between them, ready to start."""

    status: StatusTable
    specs: dict[str, WorkerSpec]
    """By name, in starting order: slowest imports first."""
    read: Callable[[], CounterSample]
    """Reads all counters; after the stop flag is set, the final ones."""
    learning_began: Callable[[], bool]
    takeover: Callable[[WorkerSpec], None] = lambda spec: None
    """See ``ProcessSupervisor``."""
    governing: GovernorLoop | None = None


def run_workers(
    plan: RunPlan, run_dir: RunDir, recorder: Recorder, interrupts: Interrupts, launcher: Launcher,
    wired: AbstractContextManager[Wired],
) -> Outcome:
    """Starts and watches the workers of a mode, then evaluates. All workers have ended when this returns.

    Raises:
        ResourceError: no room for shared memory, or a worker could not be started.
    """
    watch = OrphanWatch(run_dir.nonce)
    try:
        watch.start()
        with wired as mode:
            run_context = RunContext(run_dir=run_dir.path, status_fd=mode.status.block.fd,
                                     status_rows=mode.status.num_rows, nonce=run_dir.nonce)
            workers = ProcessSupervisor(
                run_context, mode.status, on_event=recorder.event, takeover=mode.takeover, launcher=launcher,
                forgiven_failures=plan.config.run.forgiven_failures,
            )
            supervisor = Supervisor(run_dir, mode.status, workers, mode.read, recorder, interrupts, mode.governing)
            _supervise(supervisor, workers, mode)
        _last_evaluation(plan, run_dir, recorder, supervisor, interrupts)
    finally:
        watch.end()
        recorder.close()
    return recorder.outcome


def read_group(status: StatusTable, specs: dict[str, WorkerSpec], group: int) -> GroupSample:
    """The posted slots of a group's workers; the mode adds the counters of the group's buffer."""
    own = [spec for spec in specs.values() if spec.address.group == group]

    def posted(workers: Iterable[WorkerSpec]) -> tuple[dict[str, float], ...]:
        return tuple(status.named_slots(spec.row, spec.role.name) for spec in workers)

    (learner,) = posted(spec for spec in own if spec.role.learns)
    return GroupSample(
        samplers=posted(spec for spec in own if spec.role.steps), learner=learner,
        inference_workers=posted(spec for spec in own if spec.role.infers), inserted=0, baseline_inserted=-1, sampled=0,
    )


def _supervise(supervisor: Supervisor, workers: ProcessSupervisor, mode: Wired) -> None:
    specs = dict(mode.specs)
    visualizer = specs.pop("visualizer", None)
    began_s: float | None = None

    def start_visualizer() -> None:
        # Only when learning is under way, since its imports would delay the first updates.
        nonlocal visualizer, began_s
        if began_s is None and mode.learning_began():
            began_s = time.monotonic()
        if visualizer is not None and began_s is not None and time.monotonic() - began_s > _VISUALIZER_AFTER_S:
            chosen = visualizer
            visualizer = None
            try:
                workers.add(chosen)
            except OSError as error:  # never a reason to end the run
                workers.on_event("warning", f"no pictures: the visualizer could not be started: {error}")

    try:
        for spec in specs.values():
            try:
                workers.add(spec)
            except OSError as error:
                raise ResourceError(
                    f"{spec.name} could not be started: {error}; use fewer {spec.role.name}s, or raise the limit of "
                    "processes and open files (ulimit -u, ulimit -n)"
                ) from None
        supervisor.run(on_sample=start_visualizer)
    finally:
        supervisor.stop()


def memory_limit_bytes(plan: RunPlan) -> int:
    """Memory above which a sampler is restarted."""
    asked = plan.config.sampling.memory_limit_bytes
    return asked or max(_LEAST_LIMIT_BYTES, available_bytes() // (2 * plan.samplers))


def watcher_specs(plan: RunPlan, run_dir: Path, first_row: int) -> dict[str, WorkerSpec]:
    """Evaluator and visualizer, in rows ``first_row`` and the next of the status table."""
    config = plan.config
    evaluator = EvaluatorJob(
        run_dir=str(run_dir), spec=plan.spec, config=config.evaluation, has_free_core=plan.free_core,
        groups=plan.learners,
    )
    specs = {"evaluator": WorkerSpec(address=Address("evaluator"), row=first_row, job=evaluator.to_json())}
    if config.visualizer.enabled:
        visualizer = VisualizerJob(run_dir=str(run_dir), spec=plan.spec, config=config.visualizer,
                                   has_free_core=plan.free_core, seed=config.run.seed)
        specs["visualizer"] = WorkerSpec(address=Address("visualizer"), row=first_row + 1,
                                         job=visualizer.to_json())
    return specs


def _last_evaluation(
    plan: RunPlan, run_dir: RunDir, recorder: Recorder, supervisor: Supervisor, interrupts: Interrupts
) -> None:
    """Evaluates the last policy, if time allows."""
    budget_s = min(_FINAL_EVALUATION_S, _EXIT_S - supervisor.stopping_s)
    if not interrupts.urgent and recorder.outcome.updates > 0 and budget_s >= 1.0:
        record = _final_evaluation(run_dir, plan, budget_s, interrupts, recorder.event)
        if record is not None:
            recorder.evaluation(record, final=True)
        elif not interrupts.urgent:
            recorder.no_final_evaluation(budget_s)


def _final_evaluation(
    run_dir: RunDir, plan: RunPlan, budget_s: float, interrupts: Interrupts, on_event: Callable[[str, str], None]
) -> dict[str, Any] | None:
    """Evaluates the newest weights within ``budget_s``; None if no round finished in time."""
    job = EvaluatorJob(run_dir=str(run_dir.path), spec=plan.spec, config=plan.config.evaluation, has_free_core=True,
                       groups=plan.learners)
    command = [sys.executable, "-m", "spreeze.workers.evaluator", json.dumps(job.to_json()), str(budget_s)]
    with log_file(run_dir.path, "evaluator") as log, held_back():
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                                   process_group=0, env=child_environment(1, run_dir.nonce, "evaluator"))
    asked, deadline = interrupts.count, time.monotonic() + budget_s + 2.0
    while process.poll() is None:
        if interrupts.count > asked or time.monotonic() > deadline:
            if kill_and_wait(process) is None:
                on_event("error", left_behind("the last evaluation", process.pid))
            break
        time.sleep(0.02)
    end_orphans(run_dir.nonce)  # what its environment started may hold the pipe open
    return _record(process)


def _record(process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """The record that the process wrote."""
    assert process.stdout is not None
    with process.stdout, contextlib.suppress(ValueError, subprocess.TimeoutExpired):
        output, _ = process.communicate(timeout=0.0 if process.returncode is None else DEATH_S)
        record = json.loads(output)
        if isinstance(record, dict):
            return record
    return None
