"""The last evaluation, in a process of its own so that the supervisor never loads an environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from spreeze.workers.interrupts import Interrupts
from spreeze.workers.plan import RunPlan


def final_evaluation(run_dir: Path, plan: RunPlan, budget_s: float, interrupts: Interrupts) -> dict[str, Any] | None:
    """Greedy episodes of the newest weights within ``budget_s``; None if none finished in time."""
    evaluation = plan.config.evaluation
    command = [
        sys.executable, "-m", "spreeze.workers.evaluator", str(run_dir), str(evaluation.episodes), str(evaluation.seed),
        str(budget_s), plan.spec.env_id, plan.spec.import_module or "",
        *(["plain"] if plan.spec.plain else []),
    ]
    with open(run_dir / "logs" / "evaluator.log", "ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                                   process_group=0)
    asked, deadline = interrupts.count, time.monotonic() + budget_s + 2.0
    output = b""
    while process.poll() is None:
        if interrupts.count > asked or time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.02)
    output, _ = process.communicate()
    try:
        record = json.loads(output)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
