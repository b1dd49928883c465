"""The last evaluation, in a process of its own so that the supervisor never loads an environment."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from spreeze.processes import DEATH_S, held_back, kill_and_wait, left_behind
from spreeze.rundir import RunDir
from spreeze.strays import end_strays
from spreeze.workers.evaluator import EvaluatorJob
from spreeze.workers.interrupts import Interrupts
from spreeze.workers.plan import RunPlan
from spreeze.workers.spawn import child_environment, log_file


def final_evaluation(
    run_dir: RunDir, plan: RunPlan, budget_s: float, interrupts: Interrupts, on_event: Callable[[str, str], None]
) -> dict[str, Any] | None:
    """Greedy episodes of the newest weights within ``budget_s``; None if none finished in time."""
    part = plan.config.evaluation
    job = EvaluatorJob(run_dir=str(run_dir.path), spec=plan.spec, episodes=part.episodes, first_seed=part.seed,
                       cpu_share=1.0, has_free_core=True)
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
    end_strays(run_dir.nonce)  # what its environment started may hold the pipe open
    return _record(process)


def _record(process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """What the process wrote before it ended."""
    assert process.stdout is not None
    with process.stdout, contextlib.suppress(ValueError, subprocess.TimeoutExpired):
        output, _ = process.communicate(timeout=0.0 if process.returncode is None else DEATH_S)
        record = json.loads(output)
        if isinstance(record, dict):
            return record
    return None
