"""The last evaluation, in a process of its own so that the supervisor never loads an environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from spreeze.rundir import RunDir
from spreeze.strays import end_strays
from spreeze.workers.evaluator import EvaluatorJob
from spreeze.workers.interrupts import Interrupts
from spreeze.workers.plan import RunPlan
from spreeze.workers.spawn import child_environment, log_file


def final_evaluation(run_dir: RunDir, plan: RunPlan, budget_s: float, interrupts: Interrupts) -> dict[str, Any] | None:
    """Greedy episodes of the newest weights within ``budget_s``; None if none finished in time."""
    part = plan.config.evaluation
    job = EvaluatorJob(run_dir=str(run_dir.path), spec=plan.spec, episodes=part.episodes, first_seed=part.seed,
                       cpu_share=1.0, has_free_core=True)
    command = [sys.executable, "-m", "spreeze.workers.evaluator", json.dumps(job.to_json()), str(budget_s)]
    with log_file(run_dir.path, "evaluator") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                                   process_group=0, env=child_environment(1, run_dir.nonce, "evaluator"))
    asked, deadline = interrupts.count, time.monotonic() + budget_s + 2.0
    output = b""
    while process.poll() is None:
        if interrupts.count > asked or time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.02)
    end_strays(run_dir.nonce)  # what its environment started may hold the pipe open
    output, _ = process.communicate()
    try:
        record = json.loads(output)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
