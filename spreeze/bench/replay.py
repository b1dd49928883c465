"""The replay ring in figures: writing, gathering, torn rows, and the paper's comparison with a queue.

Everything that is compared is measured in turns within one run. Every repeat is kept.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spreeze.errors import WorkerError
from spreeze.transport.ring import Ring, RingSpec, ShardWriter
from spreeze.transport.ring_reader import RingReader
from spreeze.types import RowLayout

Row = dict[str, Any]
LAYOUT = RowLayout(obs_dim=22, action_dim=6)
"""52 floats a row, as Walker2DBulletEnv-v0 has."""
QUEUE_SIZES_ROWS = (5_000, 20_000, 50_000)
"""Queue sizes of the Spreeze paper's ablation (section 4.3, Fig. 3a)."""
_WRITE_ROWS = 8
_CHILD_LIMIT_S = 60.0


def _row(metric: str, unit: str, repeats: list[float], **more: Any) -> Row:
    return {"metric": metric, "value": statistics.median(repeats), "unit": unit, "repeats": repeats, **more}


@contextlib.contextmanager
def _ring(layout: RowLayout, rows: int) -> Iterator[Ring]:
    ring = Ring.create(RingSpec(layout, 1, rows))
    try:
        yield ring
    finally:
        ring.close()


def _transitions(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Some observations [N, O], actions [N, A] and rewards [N]."""
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((count, LAYOUT.obs_dim), dtype=np.float32)
    action = rng.standard_normal((count, LAYOUT.action_dim), dtype=np.float32)
    return obs, action, np.zeros(count, dtype=np.float32)


def _mean_us(call: Callable[[], object], count: int) -> float:
    """Mean time of a call in microseconds."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count * 1e6


def replay_rows(repeats: int = 5, *, capacity: int = 500_000, checked_rows: int = 10_000_000) -> list[Row]:
    """In-place writes, gathers against plain NumPy indexing, and torn rows from a second process.

    Args:
        repeats: times that each figure is taken.
        capacity: rows of the ring that is gathered from.
        checked_rows: rows that are written, and rows that are drawn and checked, in the search for torn ones.
    """
    rows: list[Row] = []
    with _ring(LAYOUT, capacity) as ring:
        rows += _write_figures(ring, repeats)
        rows += _gather_figures(ring, repeats)
    return rows + torn_rows(checked_rows)


def _write_figures(ring: Ring, repeats: int) -> list[Row]:
    """Fills the ring once, so that no page is touched for the first time, then times writes of 1 and 8 rows."""
    writer = ShardWriter(ring, 0)
    obs, action, reward = _transitions(1000)
    while ring.total_committed() < ring.spec.capacity:
        writer.write(obs, action, reward, reward, obs)
    rows = []
    for count in (1, _WRITE_ROWS):
        obs, action, reward = _transitions(count)
        figures = [
            _mean_us(lambda o=obs, a=action, r=reward: writer.write(o, a, r, r, o), 20_000) / count  # type: ignore[misc]
            for _ in range(repeats)
        ]
        rows.append(_row(f"write_us_per_row_of_{count}", "us", figures, floats_per_row=ring.spec.layout.width))
    return rows


def _gather_figures(ring: Ring, repeats: int) -> list[Row]:
    """Draws of 8,192 and 256 rows in turns with plain fancy indexing of as many bytes."""
    reader, rng = RingReader(ring), np.random.default_rng(0)
    rows = [_row("refresh_us", "us", [_mean_us(reader.refresh, 2000) for _ in range(repeats)])]
    for batch, calls in ((8192, 20), (256, 500)):
        out = np.empty((batch, ring.spec.layout.width), dtype=np.float32)
        ours: list[float] = []
        plain: list[float] = []
        bare: list[float] = []
        for _ in range(repeats):
            times = [_gather_times(ring, reader, rng, out) for _ in range(calls)]
            medians = [statistics.median(column) for column in zip(*times, strict=True)]
            for figures, median in zip((ours, plain, bare), medians, strict=True):
                figures.append(median)
        rows.append(_row(f"sample_{batch}_us", "us", ours))
        rows.append(_row(f"plain_index_{batch}_us", "us", plain))
        rows.append(_row(f"bare_take_{batch}_us", "us", bare))
        for name, others in (("plain_index", plain), ("bare_take", bare)):
            ratios = [a / b for a, b in zip(ours, others, strict=True)]
            rows.append(_row(f"sample_{batch}_over_{name}", "ratio", ratios))
    # Rows arrive in place: what a learner does to receive them is to look at the counters.
    rows.append(_row("ring_receive_copies", "rows", [0.0]))
    return rows


def _gather_times(ring: Ring, reader: RingReader, rng: np.random.Generator, out: np.ndarray) -> list[float]:
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
    torn = checked = 0
    with _ring(layout, capacity) as ring, _ring_writer(ring, rows_per_s=0) as child:
        _wait_for_rows(ring, child)
        reader, rng = RingReader(ring), np.random.default_rng(0)
        out = np.empty((batch, layout.width), dtype=np.float32)
        while checked < checked_rows or reader.inserted < checked_rows:
            reader.sample(rng, out)
            torn += reader.count_torn(out)
            checked += batch
            if child.poll() is not None:
                raise WorkerError(f"the writing process ended with {child.returncode}")
        more = {"rows_written": reader.inserted, "rows_checked": checked, "rows_redrawn": reader.redrawn}
    return [_row("torn_rows", "rows", [float(torn)], **more)]


@contextlib.contextmanager
def _ring_writer(ring: Ring, rows_per_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes into shard 0 until it is killed."""
    code = "import sys; from spreeze.bench.replay import write_into_ring; write_into_ring(*sys.argv[1:])"
    path = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))))
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
    ring = Ring.attach(int(fd), RingSpec.from_json(json.loads(spec)))
    writer = ShardWriter(ring, 0)
    obs, action, reward = _transitions(_WRITE_ROWS)
    for _ in _paced(float(rows_per_s)):
        writer.write(obs, action, reward, reward, obs)


def _paced(rows_per_s: float) -> Iterator[None]:
    """Yields once for every ``_WRITE_ROWS`` rows that are due; 0 means always."""
    parent, due = os.getppid(), time.perf_counter()
    while os.getppid() == parent:
        if rows_per_s > 0:
            due += _WRITE_ROWS / rows_per_s
            time.sleep(max(0.0, due - time.perf_counter()))
        yield


def _wait_for_rows(ring: Ring, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _CHILD_LIMIT_S
    while ring.total_committed() < min(ring.spec.capacity, 1000):
        if child.poll() is not None or time.monotonic() > deadline:
            raise WorkerError(f"the writing process wrote nothing within {_CHILD_LIMIT_S:g} s (exit {child.poll()})")
        time.sleep(0.01)


class _Transfer(NamedTuple):
    """What one run of writer and reader gave."""

    cycle_hz: float
    receive_share: float
    rows_lost: float
    rows_received_per_s: float
    updates_per_s: float


def against_queue_rows(
    repeats: int = 3,
    *,
    seconds: float = 6.0,
    rows_per_s: float = 15_000.0,
    update_s: float = 0.01,
    queue_sizes: tuple[int, ...] = QUEUE_SIZES_ROWS,
) -> list[Row]:
    """The paper's ablation: the same writer and reader joined by the ring, or by a queue of some size.

    The writer offers rows at a fixed rate and drops what finds the queue full. The reader alternates
    updates of fixed length with receiving: a queue is emptied into the reader's own replay when it is
    full, as in the paper; with the ring the reader looks at the counters.

    Args:
        repeats: times that each transport is measured, in turns.
        seconds: length of one measurement; long enough for a few fillings of the largest queue.
        rows_per_s: rate of the writer; 15,000 is the paper's sampling rate.
        update_s: length of one update.
        queue_sizes: rows that the queues hold.
    """
    found: dict[str, list[_Transfer]] = {}
    for _ in range(repeats):
        found.setdefault("ring", []).append(_over_ring(seconds, rows_per_s, update_s))
        for size in queue_sizes:
            lasting_s = max(seconds, 3.0 * size / rows_per_s)
            found.setdefault(f"queue of {size} rows", []).append(_over_queue(size, lasting_s, rows_per_s, update_s))
    rows = []
    for transport, transfers in found.items():
        cycle, share, lost, received, updates = (list(column) for column in zip(*transfers, strict=True))
        rows += [
            _row("transfer_cycle_hz", "Hz", cycle, transport=transport),
            _row("learner_receive_share", "share", share, transport=transport),
            _row("rows_lost_share", "share", lost, transport=transport),
            _row("rows_received_per_s", "1/s", received, transport=transport),
            _row("updates_per_s", "1/s", updates, transport=transport),
        ]
    return rows


def _update(update_s: float, left: np.ndarray, right: np.ndarray) -> None:
    """Stands for an update: matrix products for a fixed time."""
    end = time.perf_counter() + update_s
    while time.perf_counter() < end:
        left @ right


def _drive(seconds: float, update_s: float, receive: Callable[[], int]) -> tuple[int, int, float, int, float]:
    """Alternates receiving and updating; returns (rows, receptions with rows, receiving s, updates, wall s)."""
    left, right = np.ones((64, 256), dtype=np.float32), np.ones((256, 256), dtype=np.float32)
    rows, receptions, receiving_s, updates = 0, 0, 0.0, 0
    start = now = time.perf_counter()
    while now - start < seconds:
        received = receive()
        receiving_s += time.perf_counter() - now
        rows += received
        receptions += received > 0
        _update(update_s, left, right)
        updates += 1
        now = time.perf_counter()
    return rows, receptions, receiving_s, updates, now - start


def _over_ring(seconds: float, rows_per_s: float, update_s: float) -> _Transfer:
    with _ring(LAYOUT, 100_000) as ring, _ring_writer(ring, rows_per_s) as child:
        _wait_for_rows(ring, child)
        reader = RingReader(ring)

        def receive() -> int:
            before = reader.inserted
            reader.refresh()
            return reader.inserted - before

        rows, receptions, receiving_s, updates, wall_s = _drive(seconds, update_s, receive)
    return _Transfer(receptions / wall_s, receiving_s / wall_s, 0.0, rows / wall_s, updates / wall_s)


def _write_into_queue(channel: Any, offered: Any, rows_per_s: float) -> None:
    """Body of the writing process: one message a transition, dropped when the queue is full."""
    channel.cancel_join_thread()
    rows = np.concatenate([_transitions(_WRITE_ROWS)[0]] * 3, axis=1)[:, : LAYOUT.width].copy()
    for _ in _paced(rows_per_s):
        for row in rows:
            with contextlib.suppress(queue.Full):
                channel.put_nowait(row)
        offered.value += _WRITE_ROWS


def _over_queue(size: int, seconds: float, rows_per_s: float, update_s: float) -> _Transfer:
    """The only place in Spreeze that uses multiprocessing, for the comparison."""
    context = multiprocessing.get_context("spawn")
    channel = context.Queue(maxsize=size)
    offered = context.Value("q", 0, lock=False)
    child = context.Process(target=_write_into_queue, args=(channel, offered, rows_per_s), daemon=True)
    child.start()
    replay, end = np.empty((100_000, LAYOUT.width), dtype=np.float32), 0

    def receive() -> int:
        nonlocal end
        if not channel.full():
            return 0
        for _ in range(size):
            replay[end] = channel.get(timeout=_CHILD_LIMIT_S)
            end = (end + 1) % len(replay)
        return size

    try:
        first = channel.get(timeout=_CHILD_LIMIT_S)
        replay[end] = first
        before = offered.value
        rows, receptions, receiving_s, updates, wall_s = _drive(seconds, update_s, receive)
        waiting = channel.qsize() if sys.platform != "darwin" else 0
        written = offered.value - before
    finally:
        child.kill()
        child.join()
        channel.close()
    lost = max(0.0, 1.0 - (rows + waiting) / written) if written else 0.0
    return _Transfer(receptions / wall_s, receiving_s / wall_s, lost, rows / wall_s, updates / wall_s)
