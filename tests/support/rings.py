"""Rings of replay: made for a test, filled with rows that tell their number, written to by another process."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from unittest import mock

import numpy as np
from harness import REPO, poll

from spreeze.runtime.plan import RunPlan
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingSpec, row_checksum
from spreeze.types import RowLayout

LAYOUT = RowLayout(obs_dim=3, action_dim=2, checksum=True)

WRITER = """
import json, os, sys
import numpy as np
from spreeze.transport.replay_ring import RingHandle, RingSpec, ShardWriter
fd, shard, rows, spec = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
ring = RingHandle(fds=(fd,), spec=RingSpec.from_json(spec)).attach()
writer = ShardWriter(ring, shard)
rng = np.random.default_rng(os.getpid())
layout = ring.spec.layout
obs = rng.standard_normal((4, layout.obs_dim)).astype("f4")
action, reward = np.ones((4, layout.action_dim), "f4"), np.zeros(4, "f4")
count = 0
while count < rows:
    obs[:] = count
    writer.write(obs, action, reward, reward, obs)
    count += 4
"""


class AgelessReader(ReplayReader):
    """A reader for which no row is too old."""

    capacity = property(lambda self: 10**9, lambda self, value: None)


@contextlib.contextmanager
def ring_of(layout=LAYOUT, shards=1, rows=64, **options):
    ring = ReplayRing.create(RingSpec(layout, shards, rows), **options)
    try:
        yield ring
    finally:
        ring.close()


def checked_rows():
    """A patch by which each row of a run's replay has a checksum."""
    layout = RunPlan.layout.fget
    return mock.patch.object(RunPlan, "layout", property(lambda plan: dataclasses.replace(layout(plan), checksum=True)))


def put(writer, start, count, version=0):
    """Rows whose every value tells their number."""
    layout = writer.ring.spec.layout
    number = np.arange(start, start + count, dtype=np.float32)
    obs = np.repeat(number[:, None], layout.obs_dim, axis=1)
    action = np.full((count, layout.action_dim), 0.5, dtype=np.float32)
    steps = np.full(count, 2.0) if layout.num_steps is not None else None
    writer.write(obs, action, number, number % 2, obs + 1, steps, version)


def torn_rows(rows, logical):
    """Number of rows [n, W] without frames, at logical indices [n], with a wrong checksum."""
    nothing, checksums = np.empty(0, np.uint8), rows[:, -1].copy().view(np.uint32).tolist()
    return sum(
        row_checksum(row, nothing, number) != checksum
        for row, number, checksum in zip(rows, logical.tolist(), checksums, strict=True)
    )


def count_torn(reader, rows):
    """Number of rows [n, W] of the reader's last batch with a wrong checksum; 0 in a ring without checksums."""
    return torn_rows(rows, reader._drawn.logical) if reader.ring.spec.layout.checksum else 0


@contextlib.contextmanager
def writer_process(ring, shard, rows):
    command = [sys.executable, "-c", WRITER, str(ring.fd), str(shard), str(rows), json.dumps(ring.spec.to_json())]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, pass_fds=[ring.fd], env=environment)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def wait_for(condition):
    poll(condition, what="what the test waits for")
