"""Image replay: frames stored once, stacks rebuilt. The reference is a list of whole stacks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from n_step import NStep
from rings import AgelessReader

from spreeze.errors import TransportError
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingSpec, ShardWriter
from spreeze.transport.transitions import FrameLog
from spreeze.types import RowLayout

FRAME = 8


class Reference:
    """One environment: whole observations by plain lists, each frame filled with its serial number."""

    def __init__(self, log, index, stack, n_step, gamma, serials):
        self.log, self.index, self.stack, self.serials = log, index, stack, serials
        self.window = NStep(n_step, gamma)
        self.kept = []
        self.reset()

    def frame(self):
        serial = next(self.serials)
        return np.array([serial % 251, serial // 251 % 251, *[self.index] * (FRAME - 2)], np.uint8)

    def reset(self):
        first = self.frame()
        self.history = [first] * self.stack
        self.window.clear()
        self.log.start(self.index, first)

    def step(self, reward, terminated, truncated):
        frame, action = self.frame(), np.array([reward + self.index], np.float32)
        before = np.stack(self.history[-self.stack :])
        self.history.append(frame)
        after = np.stack(self.history[-self.stack :])
        self.kept += [
            (*item, self.index) for item in self.window.push(before, action, reward, terminated, truncated, after)
        ]
        self.log.add(self.index, action, reward, terminated, truncated, frame)
        return terminated or truncated


def collect(ring, shard, *, stack, n_step, envs, ends, steps, rng, serials):
    log = FrameLog(ShardWriter(ring, shard), envs, n_step, 0.9)
    references = [Reference(log, index, stack, n_step, 0.9, serials) for index in range(envs)]
    for _ in range(steps):
        over = []
        for reference in references:
            chance = rng.random()
            over.append(reference.step(float(rng.integers(1, 9)), chance < ends, ends <= chance < 2 * ends))
        log.flush(version=3)
        for reference, ended in zip(references, over, strict=True):
            if ended:
                reference.reset()
    return [item for reference in references for item in reference.kept]


def key(obs, action, reward, terminated, next_obs, num_steps):
    return obs.tobytes(), float(action), float(np.float32(reward)), bool(terminated), next_obs.tobytes(), int(num_steps)


def drawn(reader, layout, rng, count):
    rows = np.empty((count, layout.width), np.float32)
    frames = np.empty((count, layout.window, layout.frame_bytes), np.uint8)
    reader.sample(rng, rows, frames)
    batch = layout.split_frames(rows, frames, 0.9)
    return [
        key(
            batch.obs[i],
            batch.action[i, 0],
            batch.reward[i],
            batch.terminated[i],
            batch.next_obs[i],
            rows[i, layout.num_steps],
        )
        for i in range(count)
    ]


@settings(max_examples=25, deadline=None)
@given(
    stack=st.integers(1, 5), n_step=st.integers(1, 6), envs=st.integers(1, 4), shards=st.integers(1, 2),
    capacity=st.integers(60, 400), ends=st.sampled_from([0.0, 0.02, 0.2, 0.5]), steps=st.integers(12, 150),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_every_drawn_transition_is_one_of_the_reference_and_the_newest_are_all_there(
    stack, n_step, envs, shards, capacity, ends, steps, seed
):
    layout = RowLayout(0, 1, n_step=n_step, frame_bytes=FRAME, stack=stack)
    ring = ReplayRing.create(RingSpec(layout, shards, capacity))
    try:
        rng, serials = np.random.default_rng(seed), iter(range(10**9))
        kept = [collect(ring, shard, stack=stack, n_step=n_step, envs=envs, ends=ends, steps=steps, rng=rng,
                        serials=serials) for shard in range(shards)]  # fmt: skip
        expected = {key(o, a[0], r, t, n, m) for items in kept for o, a, r, t, n, m, _ in items}
        found = set(drawn(AgelessReader(ring), layout, rng, 3000))
        assert found <= expected
        if ring.total_committed() <= min(200, shards * capacity // 2):
            assert found == expected  # 3,000 draws leave none of at most 200 out
    finally:
        ring.close()


def test_a_row_holds_its_fields_and_nothing_else():
    layout = RowLayout(0, 1, frame_bytes=84 * 84, stack=4)
    assert layout.width == 6  # action, reward, terminated, num_steps, back, age
    assert layout.row_bytes == 84 * 84 + 24
    spec = RingSpec(layout, 2, 1000)
    assert spec.size_bytes < 1.05 * spec.capacity * layout.row_bytes


def test_the_first_frame_is_repeated_and_the_last_one_is_the_true_one():
    layout = RowLayout(0, 1, frame_bytes=FRAME, stack=3)
    ring = ReplayRing.create(RingSpec(layout, 1, 64))
    try:
        log = FrameLog(ShardWriter(ring, 0), 1, 1, 0.99)
        log.start(0, np.full(FRAME, 10, np.uint8))
        for value, truncated in ((11, False), (12, True)):
            log.add(0, np.array([1.0], np.float32), 0.5, False, truncated, np.full(FRAME, value, np.uint8))
            log.flush(0)
        log.start(0, np.full(FRAME, 20, np.uint8))
        log.add(0, np.array([0.0], np.float32), 0.5, True, False, np.full(FRAME, 21, np.uint8))
        log.flush(0)
        rows, frames = np.empty((200, layout.width), np.float32), np.empty((200, 4, FRAME), np.uint8)
        ReplayReader(ring).sample(np.random.default_rng(0), rows, frames)
        found = {(*frames[i, :, 0].tolist(), rows[i, layout.terminated]) for i in range(200)}
        assert found == {(10, 10, 10, 11, 0.0), (10, 10, 11, 12, 0.0), (20, 20, 20, 21, 1.0)}
    finally:
        ring.close()


def test_a_transition_whose_oldest_frame_is_overwritten_during_the_copy_is_drawn_again():
    layout = RowLayout(0, 1, frame_bytes=FRAME, stack=4)
    ring = ReplayRing.create(RingSpec(layout, 1, 64))
    try:
        rng = np.random.default_rng(0)
        collect(ring, 0, stack=4, n_step=1, envs=1, ends=0.0, steps=63, rng=rng, serials=iter(range(10**6)))
        reader = ReplayReader(ring)
        real = ring.counters
        calls = []

        def counters():  # the writer announces 20 more rows after the first copy
            calls.append(None)
            return [(reserved + 20 * (len(calls) > 1), committed) for reserved, committed in real()]

        ring.counters = counters
        rows, frames = np.empty((400, layout.width), np.float32), np.empty((400, 5, FRAME), np.uint8)
        redrawn = reader.sample(rng, rows, frames)
        # Rows 0..19 are announced; 20..23 are whole but lean on them.
        oldest = frames[:, 0, 0].astype(int)
        assert redrawn > 0
        assert oldest.min() >= 20
    finally:
        ring.close()


def test_nothing_to_draw_is_an_error_and_not_an_endless_search():
    layout = RowLayout(0, 1, frame_bytes=FRAME, stack=4)
    ring = ReplayRing.create(RingSpec(layout, 1, 64))
    try:
        rows, frames = np.empty((4, layout.width), np.float32), np.empty((4, 5, FRAME), np.uint8)
        with pytest.raises(TransportError):
            ReplayReader(ring).sample(np.random.default_rng(0), rows, frames)
    finally:
        ring.close()
