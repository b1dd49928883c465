"""A run as its writer would have left it after a day, made in seconds; and one that is alive, without training."""

import contextlib
import fcntl
import io
import json
import math
import os
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
from PIL import Image

from spreeze.metrics.store import RAW_S, TIERS, EvaluationRow
from spreeze.metrics.table import METRICS
from spreeze.metrics.writer import _SCHEMA, MetricsWriter

PARTED = (
    "sampler_env_steps_per_s",
    "cpu_core_use",
    "process_cpu_use",
    "process_memory_bytes",
    "gpu_use",
    "gpu_memory_used_bytes",
    "gpu_power_w",
    "gpu_clock_hz",
    "gpu_memory_bytes",
    "gpu_power_limit_w",
    "gpu_clock_max_hz",
)
PERIOD_S = 0.5


def make(path: Path, hours: float = 24.0) -> int:
    """Fills ``metrics.db`` as two writes a second would, old ones rolled up; returns how many points were written."""
    folders(path, state="finished", wall_s=hours * 3600)
    end_s = hours * 3600.0
    names = [m.name for m in METRICS if m.name not in PARTED] + [f"{name}/{i}" for name in PARTED for i in range(3)]
    connection = sqlite3.connect(path / "metrics.db", isolation_level=None)
    for pragma in ("page_size = 1024", "journal_mode = WAL", "synchronous = OFF"):
        connection.execute(f"PRAGMA {pragma}")
    for statement in _SCHEMA:
        connection.execute(statement)
    count = "WITH RECURSIVE k(i) AS (SELECT {0} UNION ALL SELECT i + 1 FROM k WHERE i < {1} - 1) "
    connection.execute("BEGIN")
    samples = range(int(max(0.0, end_s - RAW_S) / PERIOD_S), int(end_s / PERIOD_S))
    connection.executemany(
        "INSERT INTO samples VALUES (?, ?, ?)",
        ((int(i * PERIOD_S * 1e6), i, np.full(len(names), 0.5 + 0.4 * math.sin(i * 0.01)).tobytes()) for i in samples),
    )
    for number, name in enumerate(names, 1):
        connection.execute("INSERT INTO series VALUES (?, ?, '1', 'x')", (number, name))
        for table, width_s, keep_s in TIERS:
            first, last = int(max(0.0, end_s - keep_s) / width_s), int(end_s / width_s)
            t = f"(i + 1) * {width_s} - {PERIOD_S}"
            connection.execute(
                f"{count.format(first, last)} INSERT INTO {table} SELECT {number}, i, {t}, i, 0.1, "
                f"CASE i WHEN {last // 3} THEN 0.99 ELSE 0.9 END, 0.5, 0.5, {width_s / PERIOD_S} FROM k"
            )
    connection.execute(
        f"{count.format(0, int(hours * 360))} INSERT INTO evaluations "
        "SELECT i * 10.0, i * 1000, i * 100, 1, i * 100, 10, 2000.0 * i / (i + 500), 20.0, 1000 FROM k"
    )
    connection.execute("COMMIT")
    connection.close()
    return int(len(names) * end_s / PERIOD_S)


def folders(path: Path, **state) -> None:
    """A run directory with what its supervisor would tell."""
    for sub in ("logs", "videos", "errors", "control"):
        (path / sub).mkdir(parents=True)
    tell(path, **state)


def tell(path: Path, **state) -> None:
    """Writes ``run.json``."""
    facts = {
        "env_id": "Walker2DBulletEnv-v0",
        "algo": "sac",
        "seed": 1,
        "nonce": path.name,
        "sessions": 1,
        "started": "2026-11-21T00:00:00",
        "heartbeat": time.time(),
        "env_steps": 10**8,
        "updates": 10**6,
        "eval_best": 1995.0,
        **state,
    }
    (path / "run.tmp").write_text(json.dumps(facts))
    os.replace(path / "run.tmp", path / "run.json")


@contextlib.contextmanager
def alive(path: Path):
    """A run that goes on: numbers twice a second, pictures eight times a second, its lock held."""
    folders(path, state="running", wall_s=0.0)
    fd = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    over = threading.Event()
    thread = threading.Thread(target=_live, args=(path, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.close(fd)


def _live(path: Path, over: threading.Event) -> None:
    writer, begun_s, tick = MetricsWriter(path / "metrics.db"), time.monotonic() - 300.0, 0
    names = [m.name for m in METRICS if m.name not in PARTED] + [f"{name}/{i}" for name in PARTED for i in range(2)]

    def write(t: float) -> None:
        writer.write(
            t,
            int(100 * t),
            {**{name: 0.5 + 0.3 * math.sin(t / 10) for name in names}, "env_steps": 100.0 * t, "updates": 10.0 * t},
        )

    for i in range(600):
        write(0.5 * i)
    while not over.wait(0.125):
        tick += 1
        t = time.monotonic() - begun_s
        picture = io.BytesIO()
        Image.new("RGB", (320, 240), (tick % 256, 90, 160)).save(picture, format="JPEG")
        (path / "live.tmp").write_bytes(picture.getvalue())
        os.replace(path / "live.tmp", path / "live.jpg")
        if tick % 4 == 0:
            write(t)
            tell(path, state="running", wall_s=t)
        if tick % 40 == 0:
            writer.evaluation(EvaluationRow(t, int(100 * t), int(10 * t), 1, int(10 * t), 10, t, 5.0, 200.0))
    writer.close()
