"""The paper's ablation: writer and reader joined by the replay ring, or by a queue.

A program, so that what multiprocessing leaves running ends with it: takes the arguments of ``against_queue_rows`` as
JSON, prints the rows as JSON.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import queue
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from figures import Row, row
from replay_rates import CHILD_LIMIT_S, LAYOUT, WRITE_ROWS, open_ring, paced, ring_writer, transitions, wait_for_rows

from spreeze.transport.replay_ring import ReplayReader

QUEUE_SIZES_ROWS = (5_000, 20_000, 50_000)
"""Queue sizes of the Spreeze paper's ablation (section 4.3, Fig. 3a)."""


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
            row("transfer_cycle_hz", "Hz", cycle, transport=transport),
            row("learner_receive_share", "share", share, transport=transport),
            row("rows_lost_share", "share", lost, transport=transport),
            row("rows_received_per_s", "1/s", received, transport=transport),
            row("updates_per_s", "1/s", updates, transport=transport),
        ]
    return rows


def _update(update_s: float, left: np.ndarray, right: np.ndarray) -> None:
    """Stands for an update: matmuls for a fixed time."""
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
    with open_ring(LAYOUT, 100_000) as ring, ring_writer(ring, rows_per_s) as child:
        wait_for_rows(ring, child)
        reader = ReplayReader(ring)

        def receive() -> int:
            before = reader.inserted
            reader.refresh()
            return reader.inserted - before

        rows, receptions, receiving_s, updates, wall_s = _drive(seconds, update_s, receive)
    return _Transfer(receptions / wall_s, receiving_s / wall_s, 0.0, rows / wall_s, updates / wall_s)


def _write_into_queue(channel: Any, offered: Any, rows_per_s: float) -> None:
    """Body of the writing process: one message a transition, dropped when the queue is full."""
    channel.cancel_join_thread()
    rows = np.concatenate([transitions(WRITE_ROWS)[0]] * 3, axis=1)[:, : LAYOUT.width].copy()
    for _ in paced(rows_per_s):
        for one in rows:
            with contextlib.suppress(queue.Full):
                channel.put_nowait(one)
        offered.value += WRITE_ROWS


def _over_queue(size: int, seconds: float, rows_per_s: float, update_s: float) -> _Transfer:
    """A queue of multiprocessing, which Spreeze itself does not use."""
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
            replay[end] = channel.get(timeout=CHILD_LIMIT_S)
            end = (end + 1) % len(replay)
        return size

    try:
        first = channel.get(timeout=CHILD_LIMIT_S)
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


if __name__ == "__main__":
    print(json.dumps(against_queue_rows(**json.loads(sys.argv[1]))))
