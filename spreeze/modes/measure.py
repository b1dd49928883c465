"""Measurements for the tuner: real updates in a child process, real samplers beside a real learner."""

from __future__ import annotations

import dataclasses
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from spreeze.autotune.sweep import JointRate, UpdateRate
from spreeze.errors import WorkerError
from spreeze.modes.spreeze import open_memory, worker_specs
from spreeze.rundir import SUBDIRECTORIES
from spreeze.settings import Layer
from spreeze.transport import board as words
from spreeze.transport.board import Board
from spreeze.transport.ring import Ring
from spreeze.workers.crew import Crew
from spreeze.workers.interrupts import Interrupts
from spreeze.workers.jobs import UpdateProbeJob
from spreeze.workers.plan import RunPlan
from spreeze.workers.spawn import Nest, child_environment

_REPEATS = 3
_UPDATE_REPEAT_S = 0.3
_JOINT_SETTLE_S, _JOINT_S = 0.4, 1.0
_SWEEP_S = 20.0
"""All of the joint measurement, however many candidates there are."""
_START_S = 60.0


def measure_updates(
    plan: RunPlan, batch_sizes: Sequence[int], threads: int, interrupts: Interrupts, deadline_s: float = 40.0
) -> list[UpdateRate]:
    """Times updates at each batch size in a fresh process with a deadline; failures are results.

    Raises:
        KeyboardInterrupt: the user asked to stop.
    """
    config = plan.config
    job = UpdateProbeJob(
        spec=plan.spec, algo=config.run.algo, algorithm=plan.algorithm_fields(), batch_sizes=tuple(batch_sizes),
        threads=threads, device=config.learner.device, repeats=_REPEATS, repeat_s=_UPDATE_REPEAT_S,
        slowest_update_s=0.1,
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "spreeze.workers.update_probe", json.dumps(job.to_json())],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=child_environment(threads, "probe"),
    )
    output, failure = _outcome(process, interrupts, deadline_s)
    found = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]
    rates = [
        UpdateRate(batch_size=entry["batch_size"], threads=threads, updates_per_s=tuple(entry["updates_per_s"]))
        for entry in found
    ]
    if failure is not None:
        done = {rate.batch_size for rate in rates}
        failed = next((size for size in batch_sizes if size not in done), batch_sizes[-1])
        rates.append(UpdateRate(batch_size=failed, threads=threads, updates_per_s=(), failure=failure))
    return rates


def _outcome(
    process: subprocess.Popen[bytes], interrupts: Interrupts, deadline_s: float
) -> tuple[bytes, str | None]:
    """What the child wrote, and why it failed if it did; it has ended when this returns or raises."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            output, errors = process.communicate(timeout=0.1)
            if interrupts.asked:  # Ctrl-C reaches the whole group: that is no failure of the candidate
                raise KeyboardInterrupt
            break
        except subprocess.TimeoutExpired:
            if interrupts.asked or time.monotonic() > end:
                process.kill()
                output, errors = process.communicate()
                if interrupts.asked:
                    raise KeyboardInterrupt from None
                return output, f"not done within {deadline_s:.0f} s"
    return output, None if process.returncode == 0 else _last_line(errors) or f"exit code {process.returncode}"


def _last_line(text: bytes) -> str:
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def measure_samplers(
    plan: RunPlan, counts: Sequence[int], envs_per_sampler: int, batch_size: int, threads: int, interrupts: Interrupts
) -> list[JointRate]:
    """Runs the real learner and up to ``max(counts)`` samplers; sets how many are active and counts.

    Raises:
        WorkerError: learning did not begin, or a worker keeps failing.
    """
    probe_plan = _probe_plan(plan, max(counts), envs_per_sampler, batch_size, threads)
    with tempfile.TemporaryDirectory(prefix="spreeze-tune-") as folder:
        run_dir = Path(folder)
        for sub in SUBDIRECTORIES:
            (run_dir / sub).mkdir()
        rows = probe_plan.samplers + 3
        with open_memory(probe_plan, run_dir, rows) as (board, ring):
            nest = Nest(run_dir=run_dir, board_fd=board.block.fd, board_rows=rows, nonce=secrets.token_hex(8))
            crew = Crew(nest, board, on_event=lambda level, text: None)
            try:
                specs = worker_specs(probe_plan, run_dir, ring, time.monotonic())
                for spec in specs.values():
                    if spec.role in ("learner", "sampler"):
                        crew.add(spec)
                _await_learning(crew, ring, interrupts)
                return _sweep(crew, board, probe_plan.samplers, counts, interrupts)
            finally:
                crew.stop(hurry=lambda: True, on_messages=lambda messages: None)


def _probe_plan(plan: RunPlan, samplers: int, envs_per_sampler: int, batch_size: int, threads: int) -> RunPlan:
    """The same task with nobody throttled and a replay that is filled at once."""
    settings = plan.settings.with_layer(Layer("tuner", {
        "replay": {
            "capacity": max(4 * batch_size, 100_000), "samples_per_insert_min": 0.0, "samples_per_insert_max": 1e9,
            "learning_starts": min(max(batch_size, 500), plan.config.replay.learning_starts or 500), "save": False,
        },
        "learner": {"batch_size": batch_size, "threads": threads},
        "sampling": {"envs_per_sampler": envs_per_sampler, "samplers": samplers},
        "visualizer": {"enabled": False},
    }))
    return dataclasses.replace(plan, settings=settings, samplers=samplers)


def _await_learning(crew: Crew, ring: Ring, interrupts: Interrupts) -> None:
    deadline = time.monotonic() + _START_S
    while ring.sampled <= 0:
        crew.wait(0.05)
        crew.watch()
        _check(crew, interrupts)
        if time.monotonic() > deadline:
            raise WorkerError(f"learning did not begin within {_START_S:.0f} s while tuning; {_why(crew)}")


def _why(crew: Crew) -> str:
    return ": ".join(crew.first_error) if crew.first_error else "no worker reported an error"


def _check(crew: Crew, interrupts: Interrupts) -> None:
    if interrupts.asked:
        raise KeyboardInterrupt
    if len(crew.posts) and crew.restarts > 3:
        raise WorkerError(f"workers keep failing while tuning; {_why(crew)}")


def _sweep(
    crew: Crew, board: Board, samplers: int, counts: Sequence[int], interrupts: Interrupts
) -> list[JointRate]:
    """Each number of samplers in turn, the whole round repeated, so that drift meets all alike."""
    found: dict[int, tuple[list[float], list[float]]] = {count: ([], []) for count in counts}
    settle_s = min(_JOINT_SETTLE_S, _SWEEP_S / _REPEATS / len(counts) * 0.3)
    window_s = min(_JOINT_S, _SWEEP_S / _REPEATS / len(counts) * 0.7)
    for _ in range(_REPEATS):
        for count in counts:
            board.header[words.ACTIVE_SAMPLERS] = count
            _pass(crew, settle_s, interrupts)
            before, start = counters(board, samplers), time.monotonic()
            _pass(crew, window_s, interrupts)
            after, seconds = counters(board, samplers), time.monotonic() - start
            found[count][0].append((after[0] - before[0]) / seconds)
            found[count][1].append((after[1] - before[1]) / seconds)
    return [
        JointRate(samplers=count, env_steps_per_s=tuple(steps), updates_per_s=tuple(updates))
        for count, (steps, updates) in found.items()
    ]


def _pass(crew: Crew, seconds: float, interrupts: Interrupts) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        crew.wait(min(left, 0.05))
        crew.watch()
        _check(crew, interrupts)


def counters(board: Board, samplers: int) -> tuple[float, float]:
    """Env steps of the first ``samplers`` rows together, and the learner's updates."""
    steps = sum(board.named_slots(row, "sampler")["env_steps"] for row in range(samplers))
    return steps, board.named_slots(samplers, "learner")["updates"]
