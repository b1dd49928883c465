"""ShardWriter and ReplayReader: rows arrive whole, in order and once, in this process and from others."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from harness import REPO, poll
from rings import count_torn
from row_sinks import put

from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingSpec, ShardWriter
from spreeze.types import RowLayout

LAYOUT = RowLayout(obs_dim=3, action_dim=2, n_step=3, checksum=True)
IMAGES = RowLayout(obs_dim=0, action_dim=1, checksum=True, frame_bytes=6, stack=2)
SHARDS, ROWS = 2, 256

WRITER = """
import json, os, sys
sys.path.insert(0, os.path.join(os.environ["PYTHONPATH"], "tests", "support"))
from row_sinks import put
from spreeze.transport.replay_ring import RingHandle, RingSpec, ShardWriter
handle = RingHandle(fds=(int(sys.argv[1]),), spec=RingSpec.from_json(json.loads(sys.argv[2])))
sink = ShardWriter(handle.attach(), 0)
while True:
    put(sink, 8)
"""


class Memory:
    """A ring in this process."""

    def __init__(self, layout, fenced):
        self.ring = ReplayRing.create(RingSpec(layout, SHARDS, ROWS), fenced=fenced)

    def sink(self, shard=0):
        return ShardWriter(self.ring, shard)

    def close(self):
        self.ring.close()


IMPLEMENTATIONS = {
    "ring": lambda layout: Memory(layout, False),
    "ring with fences": lambda layout: Memory(layout, True),
}


@contextlib.contextmanager
def opened(name, layout=LAYOUT):
    made = IMPLEMENTATIONS[name](layout)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(params=IMPLEMENTATIONS)
def place(request):
    with opened(request.param) as made:
        yield made


def arrived(place, shard, count):
    """The rows [n, W] of a shard, which has had that many, oldest first."""
    assert int(place.ring.committed[shard]) == count
    spec = place.ring.spec
    last = int(place.ring.committed[shard])
    # What a writer announced before it was killed may be half overwritten.
    logical = np.arange(max(0, int(place.ring.reserved[shard]) - spec.rows_per_shard), last)
    return place.ring.rows[shard * spec.stride_rows + logical % spec.rows_per_shard].copy()


def batch(reader, draws=512, seed=0):
    layout = reader.ring.spec.layout
    rows = np.empty((draws, layout.width), np.float32)
    reader.sample(np.random.default_rng(seed), rows)
    assert count_torn(reader, rows) == 0
    return rows


def test_rows_of_each_writer_arrive_whole_in_order_and_once(place):
    sinks = [place.sink(shard) for shard in range(SHARDS)]
    for count in (1, 3, 7, 40, 1, 2):
        for sink in sinks:
            put(sink, count)
    for shard, sink in enumerate(sinks):
        rows = arrived(place, shard, 54)
        assert rows[:, LAYOUT.reward].tolist() == list(range(54))
        assert (rows[:, LAYOUT.next_obs] == rows[:, LAYOUT.obs] + 1).all()
        assert (rows[:, LAYOUT.action] == 0.5).all()
        assert sink.next_logical == 54
    reader = ReplayReader(place.ring)
    assert (reader.inserted, reader.available) == (108, 108)
    assert set(batch(reader)[:, 0]) <= set(range(54))


def test_a_full_ring_forgets_its_oldest_rows_and_a_reader_that_comes_late_sees_the_newest(place):
    sink = place.sink()
    for _ in range(10):
        put(sink, 100)
    rows = arrived(place, 0, 1000)
    assert rows[:, 0].tolist() == list(range(1000 - ROWS, 1000))
    assert batch(ReplayReader(place.ring))[:, 0].min() >= 1000 - ROWS


def test_a_successor_goes_on_behind_the_last_row_that_counts(place):
    put(place.sink(), 5)
    arrived(place, 0, 5)
    later = place.sink()
    assert later.next_logical == 5
    put(later, 3)
    assert arrived(place, 0, 8)[:, 0].tolist() == list(range(8))


def test_the_counts_that_a_rate_limiter_needs_come_back(place):
    sink, other = place.sink(0), place.sink(1)
    assert sink.counts() == (0, -1, 0)
    put(sink, 4)
    put(other, 2)
    assert sink.counts() == (6, -1, 0)
    place.ring.begin_learning()
    place.ring.rows_drawn += 256
    assert sink.counts() == (6, 6, 256)


def test_the_policy_s_version_comes_along(place):
    sink = place.sink()
    put(sink, 32, version=7)
    arrived(place, 0, 32)
    assert place.ring.stamps[0, :2, 1].tolist() == [7, 7]


def test_a_write_that_does_not_fit_is_an_error_and_nothing_arrives(place):
    sink, one = place.sink(), np.zeros(1)
    with pytest.raises(ValueError, match="num_steps is missing"):
        sink.write(np.zeros((1, 3)), np.zeros((1, 2)), one, one, np.zeros((1, 3)))
    with pytest.raises(ValueError, match="broadcast"):
        sink.write(np.zeros((1, 4)), np.zeros((1, 2)), one, one, np.zeros((1, 3)), one)
    put(sink, 2)
    assert arrived(place, 0, 2)[:, 0].tolist() == [0, 1]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_frames_arrive_with_their_rows(name):
    with opened(name, IMAGES) as place:
        sink = place.sink()
        for count in (1, 30, 9):
            put(sink, count)
        arrived(place, 0, 40)
        reader = ReplayReader(place.ring)
        rows = np.empty((200, IMAGES.width), np.float32)
        frames = np.empty((200, IMAGES.window, IMAGES.frame_bytes), np.uint8)
        reader.sample(np.random.default_rng(0), rows, frames)
        newest = rows[:, IMAGES.reward].astype(int)
        assert (frames[:, -1] == newest[:, None]).all()
        assert (frames[:, 0] == np.maximum(newest - 2, 0)[:, None]).all()


@pytest.mark.warm
def test_writers_that_are_killed_leave_no_torn_row_and_invent_none(place):
    reader, done = ReplayReader(place.ring), 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(place.ring.fd), json.dumps(place.ring.spec.to_json())],
            pass_fds=(place.ring.fd,),
            env={**os.environ, "PYTHONPATH": str(REPO)},
        )
        try:
            poll(lambda before=done: place.ring.total_committed() > before + 3 * ROWS)
            for seed in range(20):
                batch(reader, seed=seed)
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        done = int(place.ring.committed[0])
        rows = arrived(place, 0, done)
        assert (np.diff(rows[:, 0]) == 1).all(), "in order, nothing twice, nothing left out"
        assert rows[-1, 0] == done - 1
        batch(reader)
