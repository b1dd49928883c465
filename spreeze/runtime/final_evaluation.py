"""The evaluation at the end of a run, by a process of its own: ``python -m spreeze.workers.evaluator``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

from spreeze.machine.awake import AWAKE
from spreeze.machine.logs import LogKeeper, ending, oom_kills
from spreeze.machine.processes import CLOSING_S, LOW_PRIORITY, end_orphans, kill_and_wait, unkillable_message
from spreeze.metrics.stop_reasons import StopReason
from spreeze.run_directory import RunDir, group_folder
from spreeze.runtime.assembly import evaluator_job
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import group_arguments, log_path, start_process
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import Recorder
from spreeze.transport.shared_memory import readable
from spreeze.workers.evaluator import read_rows, record_of

_LIMIT_S = 6.0
_FIRST_S = 45.0  # the same where a run that ends by itself has no return yet
_EXIT_S = 12.0  # longest time from any other end of the run to the end of this evaluation


def evaluate_at_the_end(
    plan: RunPlan, run_dir: RunDir, recorder: Recorder, interrupts: Interrupts, logs: LogKeeper, *, stopping_s: float
) -> None:
    """Evaluates the last weights, unless the user is in a hurry; ``stopping_s``: time taken to stop the workers."""
    outcome = recorder.outcome
    wanted = plan.config.evaluation.enabled and outcome.updates > 0
    in_a_hurry = interrupts.count or outcome.stopped_by in (StopReason.REQUEST, StopReason.FAILURE)
    is_first = outcome.eval_return is None and not in_a_hurry  # worth the wait
    budget_s = _FIRST_S if is_first else min(_LIMIT_S, _EXIT_S - stopping_s)
    if plan.start_s > 0.5 * _LIMIT_S:
        wanted = wanted and is_first
        budget_s += 2.0 * plan.start_s
    if not wanted or interrupts.urgent or budget_s < 1.0:
        return
    if is_first:
        recorder.event(
            "info", f"a first evaluation takes at most {budget_s:.0f} s; stop the run again to go without it"
        )
    record = _played(plan, run_dir, recorder, interrupts, logs, budget_s)
    if record is not None:
        recorder.evaluation(record, final=True)
    elif not interrupts.urgent:
        recorder.no_final_evaluation(budget_s)


def _played(
    plan: RunPlan, run_dir: RunDir, recorder: Recorder, interrupts: Interrupts, logs: LogKeeper, budget_s: float
) -> dict[str, Any] | None:
    """Evaluates the newest weights within ``budget_s``; None if no round finished in time."""
    slept_s, before = AWAKE.slept_s, [len(rows) for rows in _rows(plan, run_dir)]
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
    for group, rows in enumerate(_rows(plan, run_dir)):  # its time may be over between the row and the answer
        if len(rows) > before[group]:
            return record_of(rows[-1], group, plan.config.evaluation.episodes)
    if AWAKE.slept_s > slept_s and is_wanted():  # its time was over when the machine woke
        return _played(plan, run_dir, recorder, interrupts, logs, budget_s)
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


def _rows(plan: RunPlan, run_dir: RunDir) -> list[list[dict[str, Any]]]:
    return [read_rows(group_folder(run_dir.path, group) / "eval.csv") for group in range(plan.policies)]
