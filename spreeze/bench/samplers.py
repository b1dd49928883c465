"""Real sampler processes alone: memory of one, env steps a second of one and of two, bytes of a row.

Two samplers are started once; for the rate of one the other is stopped by SIGSTOP, in turns, so that
drift of the machine meets both alike.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from spreeze.bench.sampling import publish_policy
from spreeze.errors import WorkerError
from spreeze.modes.spreeze import open_memory, worker_specs
from spreeze.rundir import SUBDIRECTORIES
from spreeze.transport import board as words
from spreeze.transport.board import Board
from spreeze.workers.crew import Crew
from spreeze.workers.plan import RunPlan
from spreeze.workers.spawn import Nest

Row = dict[str, Any]
_SETTLE_S = 0.3
_START_S = 60.0
_STEPS = 2000
"""Env steps of each sampler before anything is measured."""


def samplers_rows(plan: RunPlan, repeats: int, seconds: float) -> list[Row]:
    """Figures of two samplers with the environments and the policy of ``plan``.

    Raises:
        WorkerError: a sampler died, or none stepped within a minute.
    """
    plan = dataclasses.replace(plan, samplers=2)
    more = {"env": plan.spec.env_id, "envs_per_sampler": plan.config.sampling.envs_per_sampler}
    with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as folder:
        for sub in SUBDIRECTORIES:
            (Path(folder) / sub).mkdir()
        publish_policy(plan, Path(folder))
        with open_memory(plan, Path(folder), 2) as (board, ring):
            board.header[words.WEIGHTS_HINT] = 1
            ring.begin_learning()
            ring.sampled = 2**60  # the limiter is asked each time and always says yes
            nest = Nest(run_dir=Path(folder), board_fd=board.block.fd, board_rows=2, nonce=secrets.token_hex(8))
            crew = Crew(nest, board, on_event=lambda level, text: None)
            try:
                for spec in worker_specs(plan, Path(folder), ring, time.monotonic()).values():
                    if spec.role == "sampler":
                        crew.add(spec)
                _start(crew, board)
                memory = _memory(crew)
                pairs = [_pair(crew, board, seconds) for _ in range(repeats)]
            finally:
                _signal(crew, signal.SIGCONT)
                crew.stop(hurry=lambda: True, on_messages=lambda messages: None)
    layout = plan.layout
    scaling = [both / one for one, both in pairs]
    return [
        {"metric": "sampler_memory_bytes", "unit": "bytes", "value": memory, "target": "<= 350e6", **more},
        {"metric": "row_bytes", "unit": "bytes", "value": layout.row_bytes, **more},
        _row("one_sampler_env_steps_per_s", "1/s", [one for one, _ in pairs], **more),
        _row("two_samplers_env_steps_per_s", "1/s", [both for _, both in pairs], **more),
        _row("two_samplers_over_one", "ratio", scaling, target=">= 1.9 on two free cores", **more),
    ]


def _row(metric: str, unit: str, repeats: list[float], **more: Any) -> Row:
    return {"metric": metric, "unit": unit, "value": statistics.median(repeats), "repeats": repeats, **more}


def _env_steps(board: Board) -> float:
    return sum(float(board.named_slots(row, "sampler")["env_steps"]) for row in range(2))


def _watch(crew: Crew, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        crew.wait(0.02)
        crew.watch()
        if crew.restarts:
            raise WorkerError(f"a sampler died during the measurement: {crew.first_error}")


def _start(crew: Crew, board: Board) -> None:
    end = time.monotonic() + _START_S
    while min(float(board.named_slots(row, "sampler")["env_steps"]) for row in range(2)) < _STEPS:
        if time.monotonic() > end:
            raise WorkerError(f"the samplers did not take {_STEPS} env steps each within {_START_S:g} s")
        _watch(crew, 0.05)


def _memory(crew: Crew) -> int:
    """Proportional resident memory of a sampler (its share of pages that processes have in common)."""
    found = []
    for post in crew.posts.values():
        if post.child is not None:
            info = psutil.Process(post.child.pid).memory_full_info()
            found.append(int(getattr(info, "pss", info.rss)))
    return max(found)


def _signal(crew: Crew, number: signal.Signals, only: int | None = None) -> None:
    for post in crew.posts.values():
        if post.child is not None and only in (None, post.spec.index):
            os.kill(post.child.pid, number)


def _pair(crew: Crew, board: Board, seconds: float) -> tuple[float, float]:
    """Env steps a second of the first sampler alone, and of both."""
    found = []
    for number in (signal.SIGSTOP, signal.SIGCONT):
        _signal(crew, number, only=1)
        _watch(crew, _SETTLE_S)
        before, start = _env_steps(board), time.monotonic()
        _watch(crew, seconds)
        found.append((_env_steps(board) - before) / (time.monotonic() - start))
    return found[0], found[1]
