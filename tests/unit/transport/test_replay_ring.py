"""The replay ring against plain lists, across processes, and with writers that die."""

import json
import os
import signal
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import LAYOUT, AgelessReader, count_torn, put, ring_of, wait_for, writer_process
from safetensors import safe_open

from spreeze.errors import CheckpointError, ConfigError, TransportError
from spreeze.transport import checkpoint
from spreeze.transport.replay_ring import _RESERVED as RESERVED
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingHandle, RingSpec, ShardWriter
from spreeze.types import RowLayout


def drawn_numbers(reader, draws=3000, seed=0):
    out = np.empty((draws, reader.ring.spec.layout.width), dtype=np.float32)
    reader.sample(np.random.default_rng(seed), out)
    assert count_torn(reader, out) == 0
    return out[:, 0].astype(int)


def test_fields_come_back_where_the_layout_says():
    layout = RowLayout(obs_dim=3, action_dim=2, n_step=3)
    with ring_of(layout) as ring:
        ShardWriter(ring, 0).write(
            np.array([[1.0, 2.0, 3.0]]), np.array([[0.25, -0.5]]), np.array([7.0]), np.array([True]),
            np.array([[4.0, 5.0, 6.0]]), np.array([2]),
        )  # fmt: skip
        out = np.empty((1, layout.width), dtype=np.float32)
        ReplayReader(ring).sample(np.random.default_rng(0), out)
    assert out.tolist() == [[1.0, 2.0, 3.0, 0.25, -0.5, 7.0, 1.0, 4.0, 5.0, 6.0, 2.0]]


def test_every_shard_starts_on_a_cache_line_and_rows_are_not_padded():
    with ring_of(RowLayout(22, 6), shards=3, rows=100) as ring:
        assert ring.rows.strides == (52 * 4, 4)
        starts = [ring.rows[shard * ring.spec.stride_rows :].ctypes.data for shard in range(3)]
        assert all(start % 64 == 0 for start in starts)


def test_attach_refuses_another_layout():
    with ring_of() as ring:
        other = RingSpec(RowLayout(2, 3, checksum=True), 1, 64)
        with pytest.raises(TransportError, match="other arrays"):
            RingHandle(fds=(os.dup(ring.fd),), spec=other).attach()
        spec = RingSpec.from_json(json.loads(json.dumps(ring.spec.to_json())))
        attached = RingHandle(fds=(os.dup(ring.fd),), spec=spec).attach()
        attached.rows_drawn = 5
        assert ring.rows_drawn == 5
        attached.close()


def test_impossible_shapes_are_refused():
    with pytest.raises(ConfigError, match="0 shards"):
        RingSpec(LAYOUT, 0, 64)
    with ring_of() as ring, pytest.raises(TransportError, match="shard 1 of a ring of 1"):
        ShardWriter(ring, 1)


def test_empty_ring_cannot_be_drawn_from():
    with ring_of() as ring, pytest.raises(TransportError, match="no replay row"):
        drawn_numbers(ReplayReader(ring))


def test_n_step_ring_insists_on_the_number_of_steps():
    with ring_of(RowLayout(1, 1, n_step=2)) as ring:
        one = np.zeros(1)
        with pytest.raises(ValueError, match="num_steps is missing"):
            ShardWriter(ring, 0).write(one[:, None], one[:, None], one, one, one[:, None])
        assert ring.total_committed() == 0


class Recorder:
    """Stands in for the ring's words; notes each store and what the first two rows held at that moment."""

    def __init__(self, ring):
        self.ring, self.seen = ring, []

    def __setitem__(self, index, value):
        self.seen.append((index, value, self.ring.rows[:2, 0].tolist()))
        self.ring.words[index] = value


def test_intent_is_stored_before_any_row_and_publication_after_the_last():
    with ring_of() as ring:
        writer = ShardWriter(ring, 0)
        recorder = writer._words = Recorder(ring)
        put(writer, 5, 2)
        assert recorder.seen == [(writer._reserved_word, 2, [0.0, 0.0]), (writer._committed_word, 2, [5.0, 6.0])]
        writer._words = recorder.ring = None


@settings(max_examples=60, deadline=None)
@given(
    shards=st.integers(1, 3),
    rows=st.integers(1, 40),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.booleans()), min_size=1, max_size=30),
    fenced=st.booleans(),
)
def test_window_is_the_newest_rows_of_every_shard(shards, rows, steps, fenced):
    with ring_of(shards=shards, rows=rows, fenced=fenced) as ring:
        writers = [ShardWriter(ring, shard) for shard in range(shards)]
        model = [[] for _ in range(shards)]
        reader = AgelessReader(ring)
        number = 0
        for shard, count, dies in steps:
            shard %= shards
            put(writers[shard], number, count)
            model[shard] += range(number, number + count)
            number += count
            if dies:
                writers[shard] = ShardWriter(ring, shard)
        expected = {value for values in model for value in values[-rows:]}
        reader.refresh()
        assert reader.inserted == number == ring.total_committed()
        assert reader.available == len(expected)
        assert set(drawn_numbers(reader)) <= expected


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=8), n_step=st.integers(1, 2), checked=st.booleans())
def test_packed_rows_are_written_like_their_columns(counts, n_step, checked):
    layout = RowLayout(obs_dim=3, action_dim=2, n_step=n_step, checksum=checked)
    rows = np.random.default_rng(1).standard_normal((sum(counts), layout.width), np.float32)
    with ring_of(layout, rows=20) as whole, ring_of(layout, rows=20) as apart:
        packed, writer, begin = ShardWriter(whole, 0), ShardWriter(apart, 0), 0
        for count in counts:
            part = rows[begin : begin + count]
            batch, begin = layout.split(part, 1.0), begin + count
            steps = part[:, layout.num_steps] if layout.num_steps else None
            packed.write_packed(part, 7)
            writer.write(batch.obs, batch.action, batch.reward, batch.terminated, batch.next_obs, steps, 7)
        np.testing.assert_array_equal(whole.rows, apart.rows)
        np.testing.assert_array_equal(whole.stamps, apart.stamps)
        assert whole.counters() == apart.counters()


def test_draws_are_uniform_over_shards_of_unequal_fill():
    with ring_of(shards=3, rows=50) as ring:
        for shard, (start, count) in enumerate([(0, 10), (100, 50), (200, 30)]):
            put(ShardWriter(ring, shard), start, count)
        numbers = drawn_numbers(ReplayReader(ring), draws=90_000)
        values, counts = np.unique(numbers, return_counts=True)
        assert len(values) == 90
        # chi-square with 89 degrees of freedom: mean 89, deviation sqrt(178) = 13.3; 5 deviations
        assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 89 + 5 * 13.4


def test_rows_that_a_writer_announced_are_not_drawn():
    with ring_of(rows=40) as ring:
        put(ShardWriter(ring, 0), 0, 40)
        ring.words[ring.word(0, 0)] = 45  # a writer died after announcing five rows
        assert drawn_numbers(ReplayReader(ring)).min() == 5
        put(ShardWriter(ring, 0), 40, 1)
        assert ring.words[ring.word(0, 0)] == 45
        numbers = drawn_numbers(ReplayReader(ring))
        assert (numbers.min(), numbers.max()) == (5, 40)


def test_rows_overwritten_during_the_copy_are_drawn_again(monkeypatch):
    with ring_of(rows=40) as ring:
        writer = ShardWriter(ring, 0)
        put(writer, 0, 40)
        reader = ReplayReader(ring)
        original, written = ring.counters, []

        def counters_after_a_late_write():
            # called by refresh, then after the copy: the write falls between copy and check
            if len(written) == 1:
                put(writer, 40, 20)
            written.append(1)
            return original()

        monkeypatch.setattr(ring, "counters", counters_after_a_late_write)
        out = np.empty((400, LAYOUT.width), dtype=np.float32)
        redrawn = reader.sample(np.random.default_rng(0), out)
        assert 150 < redrawn < 250
        assert out[:, 0].min() >= 20
        assert count_torn(reader, out) == 0


def test_lag_and_age_of_a_batch_come_from_the_stamps():
    with ring_of(RowLayout(1, 1), rows=4096) as ring:
        writer = ShardWriter(ring, 0)
        put(writer, 0, 256, version=10)
        put(writer, 256, 256, version=30)
        reader = ReplayReader(ring)
        assert reader.last_lag_age(30) == (0.0, 0.0)
        out = np.empty((2048, 5), dtype=np.float32)[:, : ring.spec.layout.width].copy()
        reader.sample(np.random.default_rng(0), out)
        lag, age = reader.last_lag_age(50)
        assert lag == pytest.approx(50 - np.where(out[:, 0] < 256, 10, 30).mean())
        assert age == pytest.approx((512 - out[:, 0]).mean())
        lag, _ = reader.last_lag_age(20)
        assert lag == pytest.approx(np.where(out[:, 0] < 256, 10, 0).mean()), "after a learner lost updates 20 to 30"


def test_a_retired_shard_fades_away():
    with ring_of(RowLayout(1, 1), shards=2, rows=512) as ring:
        retired, active = ShardWriter(ring, 0), ShardWriter(ring, 1)
        put(retired, 0, 512)
        reader = ReplayReader(ring)
        shares = []
        for start in range(1000, 3000, 100):
            put(active, start, 100)
            shares.append(float((drawn_numbers(reader) < 1000).mean()))
        assert shares[4] > 0.4
        # capacity 1,024: the retired rows 0..511 are older than that once 1,536 rows were inserted
        assert shares[10] == 0.0
        assert drawn_numbers(reader).min() >= 1000


def test_age_distribution_is_that_of_one_common_ring():
    """Four shards at rates 6:3:1:0, after a long time, against one ring of the same capacity."""
    rows, shards = 1024, 4
    with ring_of(RowLayout(1, 1), shards=shards, rows=rows) as ring:
        writers = [ShardWriter(ring, shard) for shard in range(shards)]
        number = 0
        for shard in [3] * 64 + [0, 0, 1, 0, 1, 0, 2, 0, 1, 0] * 80:
            put(writers[shard], number, 16)
            number += 16
        numbers = drawn_numbers(ReplayReader(ring), draws=20_000)
    age = number - numbers
    assert age.max() <= rows * shards + 640  # to within one block: 64 rows of the shard with every tenth row
    assert (numbers >= 1024).all()  # nothing of the shard that stopped long ago
    # The fast shards hold less than their share of the past, so rows are younger than in a common ring, never older.
    common = np.random.default_rng(1).integers(1, rows * shards, 20_000)
    for quantile in (0.25, 0.5, 0.75, 0.95):
        assert np.quantile(age, quantile) <= np.quantile(common, quantile) * 1.03


def test_equal_rates_give_exactly_the_ages_of_one_common_ring():
    rows, shards = 1024, 4
    with ring_of(RowLayout(1, 1), shards=shards, rows=rows) as ring:
        writers = [ShardWriter(ring, shard) for shard in range(shards)]
        for number in range(0, 12_288, 8):
            put(writers[(number // 8) % shards], number, 8)
        age = 12_288 - drawn_numbers(ReplayReader(ring), draws=40_000)
    expected = np.random.default_rng(1).integers(1, rows * shards, 40_000)
    for quantile in (0.1, 0.5, 0.9):
        assert np.quantile(age, quantile) == pytest.approx(np.quantile(expected, quantile), rel=0.05)


def serial(ring, rows_per_turn, rows):
    """Four samplers write so many rows in all, one after the other; a row's number is its place in the order."""
    writers = [ShardWriter(ring, shard) for shard in range(4)]
    for turn, number in enumerate(range(0, rows, rows_per_turn)):
        put(writers[turn % 4], number, min(rows_per_turn, rows - number))
    return writers


def test_samplers_that_rest_in_turn_leave_what_one_common_ring_would():
    """Four shards of 1,024 rows, of which 1,024 // 64 = 16 next to each writer are left out."""
    with ring_of(RowLayout(1, 1), shards=4, rows=1024) as ring:
        serial(ring, rows_per_turn=32, rows=12_288)  # 32 turns fit into a shard
        reader = ReplayReader(ring)
        assert reader.available == 4 * (1024 - 16)
        assert drawn_numbers(reader, draws=20_000).min() >= 12_288 - 4096
    with ring_of(RowLayout(1, 1), shards=4, rows=1024) as ring:
        serial(ring, rows_per_turn=96, rows=12_320)  # 10 turns and 64 rows fit: up to 96 rows of each are missing
        assert 4 * (1024 - 16 - 96) <= ReplayReader(ring).available <= 4 * (1024 - 16)


def test_a_sampler_that_writes_alone_leaves_less_than_one_common_ring_would():
    """As reckoned in the reader's docstring; ages are known to a block of 64 rows of each resting shard."""
    with ring_of(RowLayout(1, 1), shards=4, rows=1024) as ring:
        alone = serial(ring, rows_per_turn=32, rows=4096)[0]
        put(alone, 4096, 2048)
        assert 0 <= ReplayReader(ring).available - (3 * 512 + 1024 - 16) <= 3 * 64
        put(alone, 6144, 2048)
        assert 0 <= ReplayReader(ring).available - (1024 - 16) <= 3 * 64
        put(alone, 8192, 128)
        assert ReplayReader(ring).available == 1024 - 16


def test_learning_begins_anew_with_a_new_baseline():
    with ring_of() as ring:
        assert ring.inserted_at_learning_start == -1
        put(ShardWriter(ring, 0), 0, 20)
        ring.begin_learning()
        ring.rows_drawn += 256
        assert (ring.inserted_at_learning_start, ring.rows_drawn) == (20, 256)
        put(ShardWriter(ring, 0), 20, 5)
        ring.begin_learning()
        assert (ring.inserted_at_learning_start, ring.rows_drawn) == (25, 0)


@pytest.mark.warm
@pytest.mark.parametrize("fenced", [False, True])
def test_two_processes_and_no_torn_row(fenced):
    """A small ring, so that the writers lap the reader all the time; every row carries a checksum."""
    with ring_of(RowLayout(22, 6, checksum=True), shards=2, rows=2048, fenced=fenced) as ring:
        with writer_process(ring, 0, 10**9), writer_process(ring, 1, 10**9):
            wait_for(lambda: ring.committed.min() > 4000)
            reader, rng = ReplayReader(ring), np.random.default_rng(0)
            out = np.empty((1024, ring.spec.layout.width), dtype=np.float32)
            torn, start = 0, ring.total_committed()
            while ring.total_committed() < start + 30 * ring.spec.capacity:
                reader.sample(rng, out)
                torn += count_torn(reader, out)
        assert torn == 0


class HeldUp:
    """Words of a ring; whoever reads ``index`` loses the core, and meanwhile ``act`` happens, once."""

    def __init__(self, words, index, act):
        self.words, self.index, self.act = words, index, act

    def __getitem__(self, index):
        value = self.words[index]
        if index == self.index and self.act is not None:
            act, self.act = self.act, None
            act()
        return value


def test_a_reader_held_up_between_two_counters_draws_no_row_of_another_place():
    with ring_of(RowLayout(3, 2, checksum=True), rows=64) as ring:
        writer, words = ShardWriter(ring, 0), ring.words
        put(writer, 0, 64)
        reader = ReplayReader(ring)
        ring.words = HeldUp(words, ring.word(0, RESERVED), lambda: put(writer, 64, 200))  # three times round
        out = np.empty((256, ring.spec.layout.width), np.float32)
        reader.sample(np.random.default_rng(0), out)
        went_round, ring.words = ring.words.act is None, words
        assert went_round
        assert count_torn(reader, out) == 0


def test_checksums_do_find_torn_rows():
    with ring_of() as ring:
        put(ShardWriter(ring, 0), 0, 10)
        ring.rows[3, 1] += 1.0
        reader = ReplayReader(ring)
        out = np.empty((500, LAYOUT.width), dtype=np.float32)
        reader.sample(np.random.default_rng(0), out)
        assert count_torn(reader, out) == (out[:, 0] == 3).sum() > 0


@pytest.mark.warm
def test_killed_writers_are_taken_over_and_nothing_is_torn():
    with ring_of(RowLayout(22, 6, checksum=True), rows=512) as ring:
        reader, rng = ReplayReader(ring), np.random.default_rng(0)
        out = np.empty((512, ring.spec.layout.width), dtype=np.float32)
        for _ in range(3):
            before = ring.total_committed()
            with writer_process(ring, 0, 10**9) as child:
                wait_for(lambda before=before: ring.total_committed() > before + 2000)
                reader.sample(rng, out)
                assert count_torn(reader, out) == 0
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
            for _ in range(20):
                reader.sample(rng, out)
                assert count_torn(reader, out) == 0


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_dumped_rows_load_into_any_number_of_shards(tmp_path, shards):
    path = tmp_path / "replay.safetensors"
    with ring_of(shards=3, rows=400) as ring:
        writers = [ShardWriter(ring, shard) for shard in range(3)]
        for number in range(0, 1800, 10):
            put(writers[number // 10 % 3], number, 10, version=number)
        assert checkpoint.dump_replay(ring, path) == 1200
    with ring_of(shards=shards, rows=1200 // shards) as ring:
        assert checkpoint.load_replay(path, ring) == 1200
        numbers = drawn_numbers(ReplayReader(ring), draws=20_000)
        assert numbers.min() >= 600
        assert len(set(numbers)) > 1000
        put(ShardWriter(ring, 0), 5000, 10)
        assert 5000 in drawn_numbers(ReplayReader(ring), draws=20_000)


def test_replay_of_another_task_or_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "replay.safetensors"
    with ring_of() as ring:
        put(ShardWriter(ring, 0), 0, 10)
        checkpoint.dump_replay(ring, path)
    with ring_of(RowLayout(4, 2)) as ring, pytest.raises(CheckpointError, match="obs 3, action 2"):
        checkpoint.load_replay(path, ring)
    path.write_bytes(path.read_bytes()[:100])
    with ring_of() as ring, pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load_replay(path, ring)


@pytest.mark.parametrize("checksum", [False, True])
def test_a_dump_takes_little_memory_and_its_rows_come_back_oldest_first(tmp_path, checksum):
    layout = RowLayout(40, 2, checksum=checksum)
    spec = RingSpec(layout, 2, 20_000)
    ring = ReplayRing.create(spec)
    writers = [ShardWriter(ring, shard) for shard in range(2)]
    for number in range(0, 60_000, 250):
        value = np.arange(number, number + 250, dtype=np.float32)
        obs = np.repeat(value[:, None], 40, axis=1)
        writers[number // 250 % 2].write(obs, obs[:, :2] * 0, value, value * 0, obs, version=number)
    path, calls = tmp_path / "replay.safetensors", []
    tracemalloc.start()
    expected = checkpoint.dump_bytes(ring)
    saved = checkpoint.dump_replay(ring, path, calls.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    ring.close()
    assert saved == 40_000
    assert sum(calls) == expected, "every byte is told once"
    assert max(calls) < 2**21
    assert peak < 0.2 * spec.size_bytes
    with safe_open(path, framework="np") as file:
        rows, versions = file.get_tensor("rows"), file.get_tensor("policy_version")
    assert set(rows[:, layout.reward]) == set(range(20_000, 60_000))
    assert np.abs(rows[:, layout.reward] - np.arange(20_000, 60_000)).max() <= 3 * 256
    assert (versions <= rows[:, layout.reward]).mean() > 0.95  # blocks that a newer lap began know its version only


def test_rows_overwritten_during_the_dump_are_left_out(tmp_path, monkeypatch):
    with ring_of(shards=1, rows=512) as ring:
        writer = ShardWriter(ring, 0)
        put(writer, 0, 512)
        original, late = checkpoint._copy, [True]

        def copy_late(ring, block):
            if late:
                late.clear()
                put(writer, 512, 100)  # after the blocks were listed, before the first was copied
            return original(ring, block)

        monkeypatch.setattr(checkpoint, "_copy", copy_late)
        path = tmp_path / "replay.safetensors"
        assert checkpoint.dump_replay(ring, path) == 412
    with ring_of(shards=1, rows=512) as ring:
        assert checkpoint.load_replay(path, ring) == 412
        assert drawn_numbers(ReplayReader(ring), draws=5_000).min() >= 100
