"""Chunks of other hosts: rows arrive whole, in order and once, however chunks are lost, repeated, late or forged."""

import contextlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_sinks import put

from spreeze.errors import TransportError
from spreeze.transport.chunks import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    RowReader,
    SequenceTracker,
    Taken,
    outlet_limiter,
    outlet_spec,
    quotas,
    sign,
    sign_chunk,
    sign_json,
    verify,
    verify_chunk,
    verify_json,
)
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_ring import ReplayRing, ShardWriter
from spreeze.types import RowLayout

SECRET = bytes(range(32))
LAYOUT = RowLayout(obs_dim=3, action_dim=2, n_step=3, checksum=True)
WIDE = RowLayout(obs_dim=4000, action_dim=1)  # rows of 32 kB, so that a chunk is full after some
SAMPLERS, ENVS = 3, 4


class HostDouble:
    """A host's ring, its samplers and its outlet, in this process."""

    def __init__(self, layout=LAYOUT):
        self.ring = ReplayRing.create(outlet_spec(layout, SAMPLERS, ENVS))
        self.outlet = RowReader(self.ring)
        self.sinks = [ShardWriter(self.ring, shard) for shard in range(SAMPLERS)]
        self.limiter = outlet_limiter(SAMPLERS, ENVS)

    def sample(self, shard, version=0):
        """One turn of a sampler, if its limiter lets it; every value tells shard and row."""
        sink = self.sinks[shard]
        if not self.limiter.may_insert(*sink.counts(), ENVS):
            return False
        put(sink, ENVS, version)
        return True

    def pull(self, allowed=None):
        if allowed is not None:
            self.outlet.allow(allowed)
        first = self.outlet.taken
        return sign_chunk(SECRET, self.outlet.ring_id, first, self.outlet.take(), {"told": first})

    def close(self):
        self.ring.close()


@contextlib.contextmanager
def host(layout=LAYOUT):
    made = HostDouble(layout)
    try:
        yield made
    finally:
        made.close()


def test_rows_of_all_samplers_arrive_whole_in_order_and_once_with_their_policy_s_version():
    with host() as there, contextlib.closing(ReplayRing.create(outlet_spec(LAYOUT, 1, 1000))) as ring:
        sink, ledger, written = ShardWriter(ring, 0), SequenceTracker(), 0
        for turn in range(40):
            for shard in range(SAMPLERS):
                written += ENVS * there.sample(shard, version=turn)
            chunk = verify_chunk(SECRET, LAYOUT, there.pull(allowed=10_000))
            assert ledger.admit(chunk) == 0
            assert chunk.facts == {"told": ledger.next_row - len(chunk.rows)}
            for part, (count, version) in zip(np.split(chunk.rows, SAMPLERS), chunk.segments, strict=True):
                assert (count, version <= turn) == (len(part), True)
                sink.write_packed(part, version)
        assert (ledger.rows, ledger.chunks, ledger.lost_rows) == (written, 40, 0)
        rows = ring.rows[:written]
        assert (rows[:, LAYOUT.next_obs] == rows[:, LAYOUT.obs] + 1).all()
        counted = np.bincount(rows[:, LAYOUT.reward].astype(int))
        assert counted.tolist() == [SAMPLERS] * (written // SAMPLERS)


def test_samplers_stop_where_the_driver_says_and_before_a_row_would_be_overwritten_that_was_not_taken():
    with host(WIDE) as there:
        slack = SAMPLERS * ENVS
        for allowed in (0, 10, 20):
            there.outlet.allow(allowed)
            while sum(there.sample(shard) for shard in range(SAMPLERS)):
                pass
            assert allowed <= there.outlet.waiting + ENVS
            assert there.outlet.waiting <= allowed + slack
            assert there.outlet.quota_used or allowed == 0
        there.outlet.allow(10**9)
        while there.sample(0):  # one sampler alone, the others stand still
            pass
        assert there.outlet.waiting <= there.ring.spec.rows_per_shard
        seen = 0
        while there.outlet.waiting:
            data = there.pull(allowed=0)
            assert len(data) <= MAX_CHUNK_BYTES + 2000
            chunk = verify_chunk(SECRET, WIDE, data)
            seen += len(chunk.rows)
        assert seen == there.outlet.taken > MAX_CHUNK_BYTES // WIDE.row_bytes


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["sample", "arrive", "lose", "twice", "late", "restart"]), max_size=60))
def test_no_row_counts_twice_none_is_invented_and_what_a_gap_shows_is_counted(events):
    ledger, stored, sent, on_the_way, ring, lost = SequenceTracker(), [], {}, [], 0, 0
    next_row, late = 0, []

    def deliver(message):
        chunk = verify_chunk(SECRET, LAYOUT, message)
        known = ledger.admit(chunk)
        stored.extend((chunk.ring_id, row) for row in chunk.rows[known:, LAYOUT.reward].astype(int).tolist())

    for event in events:
        if event == "sample" or ring == 0:
            ring = ring or 1
            rows = np.zeros((2, LAYOUT.width), np.float32)
            rows[:, LAYOUT.reward] = next_row, next_row + 1
            sent.update({(ring, next_row): 1, (ring, next_row + 1): 1})
            taken = Taken([rows.reshape(-1).view(np.uint8).data], [(2, 0)])
            on_the_way.append(sign_chunk(SECRET, ring, next_row, taken, {}))
            next_row += 2
        elif event == "restart":
            late += on_the_way[:1]
            ring, next_row, on_the_way = ring + 1, 0, []
        elif event == "late" and late:
            deliver(late.pop())
        elif on_the_way:
            message = on_the_way.pop(0)
            if event == "lose":
                ledger.lost_chunks += 1
                lost += 1
            else:
                deliver(message)
                if event == "twice":
                    deliver(message)
    assert len(stored) == len(set(stored)), "a row was stored twice"
    assert set(stored) <= set(sent), "a row was invented"
    assert ledger.rows == len(stored)
    assert ledger.lost_chunks == lost


def test_a_chunk_that_is_lost_leaves_a_gap_and_one_of_a_closed_ring_is_refused():
    with host() as there, host() as again:
        ledger, chunks = SequenceTracker(), []
        for _ in range(3):
            there.sample(0)
            chunks.append(verify_chunk(SECRET, LAYOUT, there.pull(allowed=1000)))
        assert [ledger.admit(chunk) for chunk in (chunks[0], chunks[2], chunks[1])] == [0, 0, ENVS]
        assert (ledger.lost_rows, ledger.refused_rows, ledger.rows) == (ENVS, ENVS, 2 * ENVS)
        again.sample(0)
        assert ledger.admit(verify_chunk(SECRET, LAYOUT, again.pull())) == 0
        there.sample(1)
        assert ledger.admit(verify_chunk(SECRET, LAYOUT, there.pull())) == ENVS
        assert (ledger.ring_id, ledger.rows) == (again.outlet.ring_id, 3 * ENVS)


def test_what_is_not_signed_with_the_run_s_secret_is_not_read():
    with host() as there:
        there.sample(0)
        message = there.pull()
    verify_chunk(SECRET, LAYOUT, message)
    for place in (0, 31, 32, 40, 100, len(message) - 1):
        forged = bytearray(message)
        forged[place] ^= 1
        with pytest.raises(TransportError, match="is not signed with"):
            verify_chunk(SECRET, LAYOUT, bytes(forged))
    for wrong in (message[:-1], message + b"\0", b"", b"short", message[32:]):
        with pytest.raises(TransportError, match="is not signed with"):
            verify_chunk(SECRET, LAYOUT, wrong)
    with pytest.raises(TransportError, match="is not signed with"):
        verify_chunk(bytes(32), LAYOUT, message)
    with pytest.raises(TransportError, match="is not signed with"):
        verify(SECRET, b"weights", message)  # of another kind


@given(st.binary(max_size=200))
def test_noise_under_the_secret_is_an_error_and_nothing_else(noise):
    with contextlib.suppress(TransportError):
        verify_chunk(SECRET, LAYOUT, sign(SECRET, b"chunk", noise))
    head = struct.pack("<8sqqII", b"SPCHUNK\x01", 1, 0, 0, len(noise))
    with contextlib.suppress(TransportError):
        verify_chunk(SECRET, LAYOUT, sign(SECRET, b"chunk", head, noise))
    with contextlib.suppress(TransportError):
        assert isinstance(verify_json(SECRET, b"pull", sign(SECRET, b"pull", noise)), dict)


@pytest.mark.parametrize("segments", [[[1, 0]], [[-1, 0], [5, 0]], [[4]], "ab", None, [[4, "x"]]])
def test_segments_that_do_not_fit_the_rows_are_refused(segments):
    told = json.dumps({"segments": segments}).encode()
    rows = bytes(4 * LAYOUT.row_bytes)
    head = struct.pack("<8sqqII", b"SPCHUNK\x01", 1, 0, 4, len(told))
    with pytest.raises(TransportError, match="segments"):
        verify_chunk(SECRET, LAYOUT, sign(SECRET, b"chunk", head, told, rows))


def test_rows_of_another_layout_are_refused():
    with host() as there:
        there.sample(0)
        message = there.pull()
    with pytest.raises(TransportError, match="same version of Spreeze"):
        verify_chunk(SECRET, RowLayout(obs_dim=3, action_dim=2), message)


def test_json_goes_there_and_back():
    assert verify_json(SECRET, b"job", sign_json(SECRET, b"job", {"a": [1, None, "b"]})) == {"a": [1, None, "b"]}
    assert MIN_CHUNK_BYTES < MAX_CHUNK_BYTES


@given(
    minimum=st.sampled_from([0.0, 0.5, 1.0, 8.0]),
    starts=st.integers(0, 50),
    inserted=st.integers(0, 500),
    baseline=st.integers(-1, 100),
    sampled=st.integers(0, 2000),
    width=st.integers(1, 20),
)
def test_the_room_of_a_limiter_is_what_it_would_let_in_row_by_row(minimum, starts, inserted, baseline, sampled, width):
    limiter = RateLimiter(minimum, 512.0, starts, 4, width)
    room = limiter.rows_allowed(inserted, baseline, sampled)
    if room is None:
        assert minimum == 0.0
        return
    for rows in range(1, width + 1):
        assert limiter.may_insert(inserted, baseline, sampled, rows) == (rows <= room)


@given(
    room=st.none() | st.integers(0, 10_000),
    outstanding=st.lists(st.integers(0, 3000), max_size=8),
    most=st.integers(0, 3000),
)
def test_hosts_are_never_allowed_more_than_the_limiter_has_room_for(room, outstanding, most):
    found = quotas(room, outstanding, most)
    assert len(found) == len(outstanding)
    assert min(found, default=0) >= 0
    assert all(own + more <= max(own, most) for own, more in zip(outstanding, found, strict=True))
    if room is not None:
        assert sum(found) <= max(0, room - sum(outstanding))
