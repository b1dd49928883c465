"""The mirror of replay on the learner's device against the ring: same rows, none torn, whatever the order of work."""

import numpy as np
import pytest
import torch
from harness import PATIENCE_S
from rings import put, ring_of, wait_for, writer_process

from spreeze.errors import TransportError
from spreeze.transport.replay_ring import ReplayReader, ShardWriter, row_checksum
from spreeze.types import RowLayout
from spreeze.workers import gpu_replay as mirror_module
from spreeze.workers.gpu_replay import DeviceStream, GpuReplay, StreamEvent, gpu_replay_bytes

CPU = torch.device("cpu")
NO_FRAME = np.empty(0, np.uint8)
DRAWS = 4000


def mirror_of(ring, draws=DRAWS, **options):
    return GpuReplay(ReplayReader(ring), draws, CPU, 5, **options)


class Counting(DeviceStream):
    """The stream of the copies, which counts the rows that travel."""

    def __init__(self):
        super().__init__(CPU, side=True)
        self.rows = 0

    def copy(self, to, source):
        super().copy(to, source)
        self.rows += len(to)


def numbers(mirror):
    return set(mirror.draw()[:, 0].int().tolist())


def reader_numbers(ring):
    return {n for low, end in ReplayReader(ring).windows for n in range(low, end)}


def test_every_row_that_the_ring_gives_is_drawn_bit_for_bit_and_about_equally_often():
    with ring_of(RowLayout(3, 2, n_step=3), shards=2, rows=64) as ring:
        put(ShardWriter(ring, 0), 0, 30)
        put(ShardWriter(ring, 1), 100, 10)
        mirror = mirror_of(ring)
        mirror.pull()
        assert mirror.available == 40
        drawn = mirror.draw().numpy()
        stored = {row.tobytes() for shard in range(2) for row in ring.rows[64 * shard : 64 * shard + (30, 10)[shard]]}
        found = [row.tobytes() for row in drawn]
        assert set(found) == stored
        counts = np.unique(np.array(found), return_counts=True)[1]
        assert DRAWS / 40 * 0.5 < counts.min() <= counts.max() < DRAWS / 40 * 1.5


def test_only_new_rows_travel_and_the_newest_are_there_after_each_pull():
    with ring_of(rows=64) as ring:
        copies = Counting()
        writer, mirror = ShardWriter(ring, 0), mirror_of(ring, side_stream=copies)
        for start in range(0, 40, 8):
            put(writer, start, 8)
            mirror.pull()
            assert copies.rows == start + 8
            assert start + 7 in numbers(mirror)
        mirror.pull()
        assert copies.rows == 40


def test_wrapping_round_many_times_leaves_the_newest_rows_of_the_ring():
    with ring_of(rows=64) as ring:
        writer, mirror, rng = ShardWriter(ring, 0), mirror_of(ring), np.random.default_rng(0)
        total = 0
        for count in rng.integers(1, 30, size=60).tolist():
            put(writer, total, count)
            total += count
            mirror.pull()
            drawn = numbers(mirror)
            assert drawn <= reader_numbers(ring)
            # At most a chunk (a sixteenth) of the ring's oldest rows is left out.
            assert len(reader_numbers(ring)) - 4 <= mirror.available <= len(reader_numbers(ring))
        assert total > 10 * 64


def test_a_pull_after_a_long_pause_skips_what_would_be_overwritten_at_once():
    with ring_of(rows=64) as ring:
        copies = Counting()
        writer, mirror = ShardWriter(ring, 0), mirror_of(ring, side_stream=copies)
        put(writer, 0, 20)
        mirror.pull()
        for start in range(20, 500, 16):
            put(writer, start, 16)
        mirror.pull()
        assert copies.rows == 20 + 60  # the ring's 64 without the chunk of 4
        assert numbers(mirror) <= set(range(500 - 60, 500))


def test_a_smaller_mirror_holds_the_newest_rows_of_each_shard():
    with ring_of(shards=2, rows=256) as ring:
        for shard in range(2):
            put(ShardWriter(ring, shard), 1000 * shard, 200)
        mirror = mirror_of(ring, rows_per_shard=64)
        mirror.pull()
        assert mirror.size_bytes == gpu_replay_bytes(ring.spec.layout, 2, 64) == 2 * 64 * 4 * ring.spec.layout.width
        assert numbers(mirror) == {*range(140, 200), *range(1140, 1200)}


def test_a_million_walker_rows_take_what_the_rows_take():
    layout = RowLayout(22, 6)
    assert gpu_replay_bytes(layout, 3, 333_334) <= 1.1 * 1_000_000 * layout.row_bytes


def test_rows_too_old_for_the_ring_are_not_drawn_from_the_mirror():
    with ring_of(shards=2, rows=64) as ring:
        put(ShardWriter(ring, 0), 0, 40)
        mirror = mirror_of(ring)
        mirror.pull()
        busy = ShardWriter(ring, 1)
        for start in range(1000, 1400, 20):
            put(busy, start, 20)
            mirror.pull()
        assert min(numbers(mirror)) > 1000, "the retired shard has faded away"


def test_a_shard_taken_over_from_a_dead_writer_gives_only_whole_rows():
    with ring_of(rows=64) as ring:
        put(ShardWriter(ring, 0), 0, 64)
        mirror = mirror_of(ring)
        mirror.pull()
        # The writer died after it had announced 20 more rows and half written the first of them.
        ring.words[ring.word(0, 0)] = 84
        ring.rows[0] = -1.0
        mirror.pull()
        assert numbers(mirror) <= set(range(20, 64))
        put(ShardWriter(ring, 0), 64, 4)
        mirror.pull()
        assert numbers(mirror) <= set(range(20, 68))
        assert {64, 67} <= numbers(mirror)


class Overwritten(ReplayReader):
    """A reader whose ring gets a writer in the middle of a copy."""

    def refresh(self):
        super().refresh()
        if getattr(self, "during", None):
            self.during.pop()()


def test_rows_announced_as_overwritten_during_the_copy_are_not_taken():
    with ring_of(rows=64) as ring:
        writer = ShardWriter(ring, 0)
        put(writer, 0, 64)
        reader = Overwritten(ring)
        copies = Counting()
        mirror = GpuReplay(reader, DRAWS, CPU, 5, side_stream=copies)
        # After the mirror noted what is committed, the writer goes on by half of the ring.
        reader.during = [lambda: put(writer, 64, 32)]
        mirror.pull()
        assert copies.rows == 60 - 28  # of 60 rows from 4 on, without those below 96 - 64
        assert numbers(mirror) == set(range(32, 64))
        mirror.pull()
        assert numbers(mirror) == set(range(36, 96))


@pytest.mark.warm
@pytest.mark.parametrize("fenced", [False, True])
def test_no_torn_row_beside_a_writer_that_never_pauses(fenced):
    rows = 10_000
    with ring_of(rows=256, fenced=fenced) as ring, writer_process(ring, 0, rows) as child:
        wait_for(lambda: ring.total_committed() > 0)
        mirror = mirror_of(ring, draws=512)
        checked = 0
        while child.poll() is None or checked < 5000:
            mirror.pull()
            if mirror.available:
                batch = mirror.draw().numpy()
                expected, logical = batch[:, -1].copy().view(np.uint32).tolist(), mirror.logical.tolist()
                assert [row_checksum(row, NO_FRAME, n) for row, n in zip(batch, logical, strict=True)] == expected
                checked += len(batch)
        assert child.wait(timeout=PATIENCE_S) == 0


def test_lag_and_age_are_those_of_the_ring():
    with ring_of(rows=4096) as ring:
        writer = ShardWriter(ring, 0)
        for version in range(8):
            put(writer, 256 * version, 256, version=version)
        mirror = mirror_of(ring)
        mirror.pull()
        mirror.draw()
        lag, age = mirror.last_lag_age(10)
        assert lag == pytest.approx(10 - 3.5, abs=0.2)
        assert age == pytest.approx(1024, rel=0.1)


def test_an_empty_ring_gives_an_error_and_not_a_row():
    with ring_of() as ring:
        mirror = mirror_of(ring)
        mirror.pull()
        with pytest.raises(TransportError, match="replay is empty"):
            mirror.draw()


class LateMoment(StreamEvent):
    """Over once its lane has been driven that far."""

    def __init__(self, lane, position):
        super().__init__()
        self.lane, self.position = lane, position

    def wait(self):
        self.lane.drive(self.position)


class LateLane:
    """Work that is done as late as its order allows: only when somebody waits for it."""

    def __init__(self):
        self.work, self.done = [], 0

    def copy(self, to, source):
        self.work.append(lambda: to.copy_(source))

    def record_use(self, tensor):
        self.held = tensor

    def mark(self):
        return LateMoment(self, len(self.work))

    def follow(self, moment):
        self.work.append(moment.wait)

    def drive(self, position=None):
        while self.done < (len(self.work) if position is None else position):
            self.done += 1
            self.work[self.done - 1]()


class PromptLane(LateLane):
    """Work that is done as early as its order allows: at once, but for what another lane has to do before."""

    def copy(self, to, source):
        super().copy(to, source)
        self.drive()

    def follow(self, moment):
        super().follow(moment)
        self.drive()


def late_zeros(lane):
    """``torch.zeros`` as a stream of a GPU does it: the memory is there at once, the zeros come in their turn."""

    def zeros(shape, **options):
        made = torch.full(shape if isinstance(shape, tuple) else (shape,), -7, **options)
        lane.work.append(made.zero_)
        return made

    return zeros


def test_the_first_copies_come_after_the_zeros_that_fill_the_memory(monkeypatch):
    main, beside = LateLane(), PromptLane()
    with ring_of(rows=64) as ring:
        put(ShardWriter(ring, 0), 1, 40)
        with monkeypatch.context() as patch:
            patch.setattr(mirror_module.torch, "zeros", late_zeros(main))
            mirror = mirror_of(ring, main=main, side_stream=beside)
        assert main.done == 0, "nothing waits for the zeros until the first copy"
        mirror.pull()
        main.drive()
        assert numbers(mirror) == set(range(1, 41))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_the_first_copies_come_after_the_zeros_that_fill_the_memory():
    device = torch.device("cuda:0")
    with ring_of(rows=64) as ring:
        put(ShardWriter(ring, 0), 1, 40)
        GpuReplay(ReplayReader(ring), DRAWS, device, 5).pull()  # what is made once, made before
        torch.cuda.synchronize(device)
        torch.cuda._sleep(200_000_000)  # cycles in which the zeros have to wait
        mirror = GpuReplay(ReplayReader(ring), DRAWS, device, 5)
        mirror.pull()
        assert numbers(mirror) == set(range(1, 41))


@pytest.mark.parametrize("most", [4, 20])  # rows before each pull: at most one chunk, or several
def test_a_draw_begins_after_the_copies_of_its_windows_however_late_these_are(most):
    main, beside, total = LateLane(), LateLane(), 40
    with ring_of(rows=64) as ring:
        writer, mirror, rng = (
            ShardWriter(ring, 0),
            mirror_of(ring, main=main, side_stream=beside),
            np.random.default_rng(1),
        )
        put(writer, 0, total)
        for count in rng.integers(1, most + 1, size=100).tolist():
            put(writer, total, count)
            total += count
            mirror.pull()
            main.drive()
            drawn = mirror.draw()[:, 0].int().tolist()
            assert drawn == mirror.logical.tolist()
            assert total - 1 in drawn


def test_copies_that_run_ahead_overwrite_nothing_that_a_late_draw_may_touch():
    main, total = LateLane(), 40
    with ring_of(rows=64) as ring:
        writer, mirror, rng = ShardWriter(ring, 0), mirror_of(ring, main=main), np.random.default_rng(2)
        put(writer, 0, total)
        mirror.pull()
        main.drive()
        for count in rng.integers(1, 5, size=100).tolist():  # at most a chunk
            put(writer, total, count)
            total += count
            mirror.pull()  # its copies are made at once, its windows are not in force yet
            assert mirror.draw()[:, 0].int().tolist() == mirror.logical.tolist()
            main.drive()
