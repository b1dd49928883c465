"""The replay ring in figures: writing, gathering, and torn rows while another process writes.

``python tests/slow/replay_rates.py`` prints them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from figures import Row, line, row
from rings import count_torn

from spreeze.errors import WorkerError
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingHandle, RingSpec, ShardWriter
from spreeze.types import RowLayout

LAYOUT = RowLayout(obs_dim=22, action_dim=6)
"""52 floats a row, as Walker2DBulletEnv-v0 has."""
WRITE_ROWS = 8
CHILD_LIMIT_S = 60.0


def open_ring(layout: RowLayout, rows: int) -> contextlib.closing[ReplayRing]:
    """A ring of one shard, for as long as it is wanted."""
    return contextlib.closing(ReplayRing.create(RingSpec(layout, 1, rows)))


def transitions(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Some observations [N, O], actions [N, A] and rewards [N]."""
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((count, LAYOUT.obs_dim), dtype=np.float32)
    action = rng.standard_normal((count, LAYOUT.action_dim), dtype=np.float32)
    return obs, action, np.zeros(count, dtype=np.float32)


def _mean_us(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count * 1e6


def replay_rows(repeats: int = 5, *, capacity: int = 500_000, checked_rows: int = 10_000_000) -> list[Row]:
    """In-place writes, gathers against plain NumPy indexing, and torn rows from a second process.

    ``capacity`` rows are gathered from; ``checked_rows`` are written, and as many drawn, in the search for torn ones.
    """
    rows: list[Row] = []
    with open_ring(LAYOUT, capacity) as ring:
        rows += _write_figures(ring, repeats)
        rows += _gather_figures(ring, repeats)
    return rows + torn_rows(checked_rows)


def _write_figures(ring: ReplayRing, repeats: int) -> list[Row]:
    """Fills the ring once, so that no page is touched for the first time, then times writes of 1 and 8 rows."""
    writer = ShardWriter(ring, 0)
    obs, action, reward = transitions(1000)
    while ring.total_committed() < ring.spec.capacity:
        writer.write(obs, action, reward, reward, obs)
    rows = []
    for count in (1, WRITE_ROWS):
        obs, action, reward = transitions(count)
        figures = [
            _mean_us(lambda o=obs, a=action, r=reward: writer.write(o, a, r, r, o), 20_000) / count  # type: ignore[misc]
            for _ in range(repeats)
        ]
        rows.append(row(f"write_us_per_row_of_{count}", "us", figures, floats_per_row=ring.spec.layout.width))
    return rows


def _gather_figures(ring: ReplayRing, repeats: int) -> list[Row]:
    """Draws of 8,192 and 256 rows in turns with plain fancy indexing of as many bytes."""
    reader, rng = ReplayReader(ring), np.random.default_rng(0)
    rows = [row("refresh_us", "us", [_mean_us(reader.refresh, 2000) for _ in range(repeats)])]
    for batch, calls in ((8192, 20), (256, 500)):
        out = np.empty((batch, ring.spec.layout.width), dtype=np.float32)
        found: dict[str, list[float]] = {name: [] for name in ("sample", "plain_index", "bare_take")}
        for _ in range(repeats):
            times = [_gather_times(ring, reader, rng, out) for _ in range(calls)]
            for figures, column in zip(found.values(), zip(*times, strict=True), strict=True):
                figures.append(statistics.median(column))
        rows += [row(f"{name}_{batch}_us", "us", figures) for name, figures in found.items()]
        for name in ("plain_index", "bare_take"):
            ratios = [a / b for a, b in zip(found["sample"], found[name], strict=True)]
            rows.append(row(f"sample_{batch}_over_{name}", "ratio", ratios))
    # Rows arrive in place: what a learner does to receive them is to look at the counters.
    rows.append(row("ring_receive_copies", "rows", [0.0]))
    return rows


def _gather_times(ring: ReplayRing, reader: ReplayReader, rng: np.random.Generator, out: np.ndarray) -> list[float]:
    """Times in microseconds, each with other random rows.

    A draw of ours, indices and validation included; ``rows[index]``, which allocates its result; and
    ``take`` into memory that is there already, the least that any gather costs.
    """
    first, second = (rng.integers(0, ring.spec.capacity, size=len(out)) for _ in range(2))
    times = [time.perf_counter()]
    reader.sample(rng, out)
    times.append(time.perf_counter())
    ring.rows[first]
    times.append(time.perf_counter())
    ring.rows.take(second, axis=0, out=out, mode="clip")
    times.append(time.perf_counter())
    return [(end - start) * 1e6 for start, end in itertools.pairwise(times)]


def torn_rows(checked_rows: int, *, capacity: int = 16_384, batch: int = 1024) -> list[Row]:
    """A second process writes rows with checksums as fast as it can while this one draws and checks them.

    The ring is small, so that the writer laps the reader all the time.
    """
    layout = RowLayout(LAYOUT.obs_dim, LAYOUT.action_dim, checksum=True)
    torn = checked = redrawn = 0
    with open_ring(layout, capacity) as ring, ring_writer(ring, rows_per_s=0) as child:
        wait_for_rows(ring, child)
        reader, rng = ReplayReader(ring), np.random.default_rng(0)
        out = np.empty((batch, layout.width), dtype=np.float32)
        while checked < checked_rows or reader.inserted < checked_rows:
            redrawn += reader.sample(rng, out)
            torn += count_torn(reader, out)
            checked += batch
            if child.poll() is not None:
                raise WorkerError(f"the writing process ended with {child.returncode}")
        more = {"rows_written": reader.inserted, "rows_checked": checked, "rows_redrawn": redrawn}
    return [row("torn_rows", "rows", [float(torn)], **more)]


@contextlib.contextmanager
def ring_writer(ring: ReplayRing, rows_per_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes into shard 0 until it is killed."""
    code = "import sys; from replay_rates import write_into_ring; write_into_ring(*sys.argv[1:])"
    here = Path(__file__).resolve()
    path = os.pathsep.join(filter(None, (str(here.parent), str(here.parents[2]), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", code, str(ring.fd), json.dumps(ring.spec.to_json()), str(rows_per_s)]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, pass_fds=[ring.fd], env=environment)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def write_into_ring(fd: str, spec: str, rows_per_s: str) -> None:
    """Body of the writing process: runs until it is killed or its parent is gone."""
    ring = RingHandle(fds=(int(fd),), spec=RingSpec.from_json(json.loads(spec))).attach()
    writer = ShardWriter(ring, 0)
    obs, action, reward = transitions(WRITE_ROWS)
    for _ in paced(float(rows_per_s)):
        writer.write(obs, action, reward, reward, obs)


def paced(rows_per_s: float) -> Iterator[None]:
    """Yields once for every ``WRITE_ROWS`` rows that are due; 0 means always."""
    parent, due = os.getppid(), time.perf_counter()
    while os.getppid() == parent:
        if rows_per_s > 0:
            due += WRITE_ROWS / rows_per_s
            time.sleep(max(0.0, due - time.perf_counter()))
        yield


def wait_for_rows(ring: ReplayRing, child: subprocess.Popen[bytes]) -> None:
    """Until the writing process is at work.

    Raises:
        WorkerError: it is not within a minute, or ended.
    """
    deadline = time.monotonic() + CHILD_LIMIT_S
    while ring.total_committed() < min(ring.spec.capacity, 1000):
        if child.poll() is not None or time.monotonic() > deadline:
            raise WorkerError(f"the writing process wrote nothing within {CHILD_LIMIT_S:g} s (exit {child.poll()})")
        time.sleep(0.01)


if __name__ == "__main__":
    print(*map(line, replay_rows()), sep="\n")
