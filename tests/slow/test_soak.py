"""A long run watched from outside: what grows, and what slows down.

By hand: ``SPREEZE_LONG_TESTS=1 SPREEZE_STRESS_HOURS=1 pytest tests/slow/test_soak.py``; ``SPREEZE_STRESS_ENV``
(Walker2DBulletEnv-v0) is its task, ``SPREEZE_STRESS_SAMPLERS`` (as train chooses) its sampler processes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
from figures import Row, slope_row
from live_run import AttachedRun
from long_form import LIMIT_S, asked, by_hand

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into the run's memory through /proc"),
]
_LOOK_S = 10.0
_SETTLE_S = 1800.0
"""Left out, but at most half of the time: caches and replay fill."""
_MIN_LOOKS = 4
"""For a slope; where looks take long, so does the soak."""
_SAY_S = 600.0
_WORK_VALUES, _WORK_PASSES = 32_768, 200
_ROLES = ("supervisor", "learner", "sampler", "evaluator", "visualizer")
_TARGETS = {
    "memory_bytes": "< 0.5 %/h",
    "descriptors": "flat",
    "threads": "flat",
    "env_steps_per_s": "drift < 2 %",
    "updates_per_s": "drift < 2 %",
}


class Look(NamedTuple):
    """One look at all processes of the run."""

    t_s: float
    memory_of: dict[str, float]
    """Private memory [bytes] of all processes of a role; shared replay is allocated at the start."""
    descriptors: float
    threads: float
    disk_bytes: float
    env_steps: float
    updates: float
    rows_drawn: float
    rows_redrawn: float
    core_speed: float
    """Passes over a fixed piece of work a second of processor time: what this core can do at the moment."""

    @property
    def memory_bytes(self) -> float:
        """Private memory of all processes."""
        return sum(self.memory_of.values())


def soak_rows(
    hours: float,
    env_id: str,
    runs_dir: str,
    extra: list[str],
    look_s: float = _LOOK_S,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Slopes over a run, its first 30 minutes (at most half of it) left out.

    Args:
        hours: length of the run.
        env_id: its task.
        runs_dir: where it goes.
        extra: further arguments of ``train``.
        look_s: time between two looks.
        say: told every ten minutes how it stands.

    Raises:
        SpreezeError: the run ended by itself.
    """
    looks: list[Look] = []
    with AttachedRun(["--env", env_id, *extra], runs_dir, f"soak-{os.getpid()}-{int(time.time())}", {}) as run:
        run.attach()
        run.wait(lambda: run.ring is not None and run.ring.rows_drawn > 0, 2 * LIMIT_S, "the first update")
        begin_s = next_word_s = time.monotonic()
        settled_s = begin_s + min(_SETTLE_S, 1800.0 * hours)
        while time.monotonic() < begin_s + 3600.0 * hours or len(_kept(looks, settled_s)) < _MIN_LOOKS:
            looks.append(_look(run))
            if looks[-1].t_s >= next_word_s + _SAY_S:
                next_word_s += _SAY_S
                say(
                    f"  {(looks[-1].t_s - begin_s) / 60.0:.0f} min: {looks[-1].memory_bytes / 1e6:.0f} MB, "
                    f"{looks[-1].env_steps:.0f} env steps, {looks[-1].updates:.0f} updates"
                )
            run.wait(lambda: time.monotonic() >= looks[-1].t_s + look_s, look_s + LIMIT_S, "the next look")
        code = run.stop()
        orphans = run.orphans()
    return [
        *_kept_rows(_kept(looks, settled_s)),
        {"metric": "exit_code", "value": code, "unit": "code", "target": "0"},
        {"metric": "orphans_after_5_s", "value": orphans, "unit": "processes", "target": "0"},
    ]


def _kept(looks: list[Look], settled_s: float) -> list[Look]:
    return [look for look in looks if look.t_s >= settled_s]


def _kept_rows(kept: list[Look]) -> list[Row]:
    times = [look.t_s for look in kept]
    roles = [role for role in _ROLES if all(role in look.memory_of for look in kept)]
    redrawn = [
        1e6 * (b.rows_redrawn - a.rows_redrawn) / max(1.0, b.rows_drawn - a.rows_drawn)
        for a, b in ((kept[0], kept[len(kept) // 2]), (kept[len(kept) // 2], kept[-1]))
    ]
    return [
        {"metric": "measured_minutes", "value": (times[-1] - times[0]) / 60.0, "unit": "min"},
        *(
            slope_row(name, times, [getattr(look, name) for look in kept], _TARGETS.get(name))
            for name in ("memory_bytes", "descriptors", "threads", "disk_bytes")
        ),
        *(slope_row(f"memory_bytes_of_{role}", times, [look.memory_of[role] for look in kept], None) for role in roles),
        {
            "metric": "redrawn_per_million",
            "value": redrawn[1],
            "unit": "rows",
            "target": "no rise",
            "first": redrawn[0],
            "last": redrawn[1],
        },
        *(
            _drift_row(f"{name}_per_s", [getattr(look, name) for look in kept], times)
            for name in ("env_steps", "updates")
        ),
        _core_row([look.core_speed for look in kept]),
    ]


def _look(run: AttachedRun) -> Look:
    assert run.status is not None
    assert run.ring is not None
    memory: dict[str, float] = {}
    descriptors = threads = 0.0
    workers = run.workers()
    samplers = [run.rows[name] for name in workers if name.startswith("sampler")]
    pids = {"supervisor": run.process.pid, **workers}
    for name, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            held, role = process.memory_info(), name.partition("-")[0]
            memory[role] = memory.get(role, 0.0) + held.rss - getattr(held, "shared", 0)
            descriptors += process.num_fds()
            threads += process.num_threads()
    learner = run.status.named_slots(run.rows["learner"], "learner") if "learner" in workers else {}
    return Look(
        t_s=time.monotonic(),
        memory_of=memory,
        descriptors=descriptors,
        threads=threads,
        disk_bytes=_disk_bytes(run.path),
        env_steps=sum(float(run.status.slots(row)[0]) for row in samplers),
        updates=learner.get("updates", 0.0),
        rows_drawn=float(run.ring.rows_drawn),
        rows_redrawn=learner.get("rows_redrawn", 0.0),
        core_speed=_core_speed(),
    )


def _core_speed() -> float:
    """Counted in processor time, so that who else wants the core does not matter, only how fast it is."""
    values = np.linspace(0.0, 1.0, _WORK_VALUES)
    start_s = time.thread_time()
    for _ in range(_WORK_PASSES):
        values = np.sqrt(values * 0.5 + 0.25)
    return _WORK_PASSES / max(time.thread_time() - start_s, 1e-9)


def _disk_bytes(folder: Path) -> float:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return float(total)


def _core_row(speeds: list[float]) -> Row:
    """How much faster the core itself was in the last third: no part of the run's own drift."""
    third = max(1, len(speeds) // 3)
    first, last = (float(np.median(part)) for part in (speeds[:third], speeds[-third:]))
    return {
        "metric": "core_speed_drift",
        "value": 100.0 * (last / first - 1.0),
        "unit": "%",
        "first": first,
        "last": last,
    }


def _drift_row(name: str, counts: list[float], times: list[float]) -> Row:
    """Rate of the last third over that of the first, less one, in per cent."""
    third = max(1, len(counts) // 3)
    first = (counts[third] - counts[0]) / (times[third] - times[0])
    last = (counts[-1] - counts[-1 - third]) / (times[-1] - times[-1 - third])
    return {
        "metric": f"{name}_drift",
        "value": 100.0 * (last / first - 1.0) if first > 0 else None,
        "unit": "%",
        "target": _TARGETS.get(name),
        "first": first,
        "last": last,
    }


HOURS, ENV, SAMPLERS = asked("HOURS", 1.0), asked("ENV", "Walker2DBulletEnv-v0"), asked("SAMPLERS", 0)


def ends_in_order(rows):
    assert (rows["exit_code"]["value"], rows["orphans_after_5_s"]["value"]) == (0, 0)


def test_a_short_soak_gives_slopes_and_drifts(tmp_path):
    extra = ["--samplers", "1", "--batch-size", "32", "--replay-capacity", "20000", "--no-visualizer", "--set",
             "sac.hidden_sizes=[32,32]"]  # fmt: skip
    rows = {row["metric"]: row for row in soak_rows(5 / 3600, "Pendulum-v1", str(tmp_path / "runs"), extra, 0.5)}
    assert rows["memory_bytes_slope"]["first"] > 20e6
    roles = ("supervisor", "learner", "sampler", "evaluator")
    assert sum(rows[f"memory_bytes_of_{role}_slope"]["first"] for role in roles) == rows["memory_bytes_slope"]["first"]
    assert 60.0 * rows["measured_minutes"]["value"] >= 1.5, "four looks, two a second"
    assert rows["redrawn_per_million"]["value"] >= 0
    assert rows["descriptors_slope"]["first"] > 10
    assert rows["updates_per_s_drift"]["first"] >= 0
    assert rows["core_speed_drift"]["first"] > 0
    ends_in_order(rows)


@by_hand
@pytest.mark.timeout(3600.0 * HOURS + 900.0)
def test_a_long_soak_ends_in_order(tmp_path, report, say):
    extra = [f"--samplers={SAMPLERS}"] if SAMPLERS else []
    ends_in_order(report(soak_rows(HOURS, ENV, str(tmp_path / "runs"), extra, say=say)))
