"""A long run watched from outside: what grows, and what slows down."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from spreeze.bench.live_run import LiveRun
from spreeze.errors import SpreezeError

Row = dict[str, Any]
_LOOK_S = 10.0
SETTLE_SHARE = 0.2
"""Share of the time that is left out: caches fill, replay fills."""
_TARGETS = {
    "memory_bytes": "< 0.5 %/h", "descriptors": "flat", "threads": "flat", "env_steps_per_s": "drift < 2 %",
    "updates_per_s": "drift < 2 %",
}


class Look(NamedTuple):
    """One look at all processes of the run."""

    t_s: float
    memory_bytes: float
    """Private memory of all processes; shared replay is allocated at the start."""
    descriptors: float
    threads: float
    disk_bytes: float
    env_steps: float
    updates: float


def soak_rows(hours: float, env_id: str, runs_dir: str, extra: list[str], look_s: float = _LOOK_S) -> list[Row]:
    """Slopes over the last four fifths of a run.

    Args:
        hours: length of the run.
        env_id: its task.
        runs_dir: where it goes.
        extra: further arguments of ``train``.
        look_s: time between two looks.

    Raises:
        SpreezeError: the run ended by itself, or it was too short for a slope.
    """
    looks: list[Look] = []
    with LiveRun(["--env", env_id, *extra], runs_dir, f"soak-{os.getpid()}-{int(time.time())}", {}) as run:
        run.attach()
        run.wait(lambda: run.ring is not None and run.ring.sampled > 0, 120.0, "the first update")
        end = time.monotonic() + 3600.0 * hours
        while time.monotonic() < end:
            looks.append(_look(run))
            run.wait(lambda: time.monotonic() >= looks[-1].t_s + look_s, look_s + 60.0, "the next look")
        code = run.stop()
        orphans = run.orphans()
    kept = looks[int(SETTLE_SHARE * len(looks)) :]
    if len(kept) < 4:
        raise SpreezeError(f"{len(kept)} looks give no slope: take at least {10 * look_s / 3600:.3f} hours")
    times = [look.t_s for look in kept]
    return [
        *(slope_row(name, times, [getattr(look, name) for look in kept], _TARGETS.get(name))
          for name in ("memory_bytes", "descriptors", "threads", "disk_bytes")),
        *(_drift_row(f"{name}_per_s", [getattr(look, name) for look in kept], times)
          for name in ("env_steps", "updates")),
        {"metric": "exit_code", "value": code, "unit": "code", "target": "0"},
        {"metric": "orphans_after_5_s", "value": orphans, "unit": "processes", "target": "0"},
    ]


def _look(run: LiveRun) -> Look:
    assert run.board is not None
    memory = descriptors = threads = 0.0
    workers = run.workers()
    samplers = [spec["row"] for name, (_, spec) in workers.items() if name.startswith("sampler")]
    for pid in [run.process.pid, *(pid for pid, _ in workers.values())]:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            held = process.memory_info()
            memory += held.rss - getattr(held, "shared", 0)
            descriptors += process.num_fds()
            threads += process.num_threads()
    updates = run.board.named_slots(workers["learner"][1]["row"], "learner")["updates"] if "learner" in workers else 0.0
    return Look(
        t_s=time.monotonic(), memory_bytes=memory, descriptors=descriptors, threads=threads,
        disk_bytes=_disk_bytes(run.path), env_steps=sum(float(run.board.slots(row)[0]) for row in samplers),
        updates=updates,
    )


def _disk_bytes(folder: Path) -> float:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return float(total)


def slope_row(name: str, times: list[float], values: list[float], target: str | None) -> Row:
    """Least-squares slope in per cent of the mean an hour; ``times`` in seconds."""
    hours, seen = np.array(times) / 3600.0, np.array(values)
    slope = float(np.polyfit(hours - hours[0], seen, 1)[0])
    return {
        "metric": f"{name}_slope", "value": 100.0 * slope / float(seen.mean()), "unit": "%/h",
        "target": target, "first": values[0], "last": values[-1],
    }


def _drift_row(name: str, counts: list[float], times: list[float]) -> Row:
    """Rate of the last third over that of the first, less one, in per cent."""
    third = max(1, len(counts) // 3)
    first = (counts[third] - counts[0]) / (times[third] - times[0])
    last = (counts[-1] - counts[-1 - third]) / (times[-1] - times[-1 - third])
    return {
        "metric": f"{name}_drift", "value": 100.0 * (last / first - 1.0) if first > 0 else None, "unit": "%",
        "target": _TARGETS.get(name), "first": first, "last": last,
    }
