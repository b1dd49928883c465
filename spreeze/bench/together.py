"""Sampler and learner alone, together, and with evaluator and visualizer beside, in one run.

All processes are started once; for each measurement those that must not work are stopped by SIGSTOP
and go on afterwards. The measurements take turns, so that drift of the machine meets all alike.
"""

from __future__ import annotations

import os
import secrets
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from spreeze.errors import WorkerError
from spreeze.modes.ensemble import counters
from spreeze.modes.spreeze import open_memory, worker_specs
from spreeze.rundir import SUBDIRECTORIES
from spreeze.transport.board import Board
from spreeze.workers.crew import Crew
from spreeze.workers.plan import RunPlan
from spreeze.workers.spawn import Nest

STATES: dict[str, tuple[str, ...]] = {
    "learner alone": ("learner",),
    "samplers alone": ("sampler",),
    "together": ("learner", "sampler"),
    "with evaluator and visualizer": ("learner", "sampler", "evaluator", "visualizer"),
}
_SETTLE_S = 0.5


def together_rows(plan: RunPlan, repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Rates in each state, and what each side keeps of its rate alone.

    Raises:
        WorkerError: a worker died.
    """
    with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as folder:
        for sub in SUBDIRECTORIES:
            (Path(folder) / sub).mkdir()
        rows = plan.samplers + 3
        with open_memory(plan, Path(folder), rows) as (board, ring):
            nest = Nest(run_dir=Path(folder), board_fd=board.block.fd, board_rows=rows, nonce=secrets.token_hex(8))
            crew = Crew(nest, board, on_event=lambda level, text: None)
            try:
                for spec in worker_specs(plan, Path(folder), ring, time.monotonic()).values():
                    crew.add(spec)
                _run_for(crew, 60.0, until=lambda: ring.sampled > 0)
                _run_for(crew, 8.0)
                found = _turns(crew, board, plan, repeats, seconds)
            finally:
                _signal(crew, tuple(STATES["with evaluator and visualizer"]))
                crew.stop(hurry=lambda: True, on_messages=lambda messages: None)
    return _rows(found)


def _run_for(crew: Crew, seconds: float, until: Any = lambda: False) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not until():
        crew.wait(0.02)
        crew.watch()
        if crew.restarts:
            raise WorkerError(f"a worker died during the measurement: {crew.first_error}")


def _signal(crew: Crew, working: tuple[str, ...]) -> None:
    for post in crew.posts.values():
        if post.child is not None:
            os.kill(post.child.pid, signal.SIGCONT if post.spec.role in working else signal.SIGSTOP)


def _turns(
    crew: Crew, board: Board, plan: RunPlan, repeats: int, seconds: float
) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {state: [] for state in STATES}
    for _ in range(repeats):
        for state, working in STATES.items():
            _signal(crew, working)
            _run_for(crew, _SETTLE_S)
            before, start = counters(board, plan.samplers), time.monotonic()
            _run_for(crew, seconds)
            after, took = counters(board, plan.samplers), time.monotonic() - start
            found[state].append(((after[0] - before[0]) / took, (after[1] - before[1]) / took))
    return found


def _rows(found: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for state, pairs in found.items():
        for index, (metric, role) in enumerate((("env_steps_per_s", "sampler"), ("updates_per_s", "learner"))):
            if role in STATES[state]:
                values = [pair[index] for pair in pairs]
                rows.append({"metric": metric, "unit": "1/s", "value": statistics.median(values), "repeats": values,
                             "state": state})
    comparisons = (
        ("sampler_kept_together", 0, "together", "samplers alone", ">= 0.9"),
        ("learner_kept_together", 1, "together", "learner alone", ">= 0.9"),
        ("learner_kept_beside_evaluator_and_visualizer", 1, "with evaluator and visualizer", "together",
         ">= 0.95 on three free cores"),
    )
    for name, index, state, reference, target in comparisons:
        pairs_of = zip(found[state], found[reference], strict=True)
        ratios = [new[index] / old[index] for new, old in pairs_of if old[index]]
        rows.append({"metric": name, "unit": "ratio", "value": statistics.median(ratios) if ratios else None,
                     "repeats": ratios, "target": target})
    return rows
