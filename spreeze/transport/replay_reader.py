"""Drawing from the replay ring.

A draw of an image transition follows its environment's rows back (see ``RowLayout``). All that it needs lies in rows
that the same writer committed before it, so the ring's rule covers all of them: a draw is valid if, after the copy, its
oldest row was not about to be overwritten.
"""

from __future__ import annotations

import functools
import zlib
from typing import NamedTuple

import numpy as np

from spreeze.errors import TransportError
from spreeze.transport.replay_ring import ReplayRing

_MAX_TRIES = 10_000
_LAG_SAMPLE_ROWS = 2048


class Drawn(NamedTuple):
    """Where n drawn rows lie."""

    shard: np.ndarray | None  # [n]; None where there is one shard
    logical: np.ndarray  # [n]: index since the shard exists
    row: np.ndarray  # [n]: row in ``ring.rows``


class _Repeat(NamedTuple):
    """Draws of a copy that must be repeated."""

    bad: np.ndarray  # their positions
    overwritten: int  # how many of them because a writer may have been changing their rows


class ReplayReader:
    """Draws uniformly over all rows that are published, not about to be overwritten and not too old.

    Rows older than the capacity of the whole ring are left out, as in one common ring: the shard of a retired sampler
    fades away instead of being drawn forever.

    So the newest C rows of all can be drawn, as far as the S shards, of c = C / S rows each, still hold them. Where
    samplers write at the same rate, that is all C. Where one writes alone it is less, since its rows have the room of
    one shard. Example: S = 4, c = 1,024, all full. After 2,048 rows of one sampler alone, the newest 4,096 rows are
    these and the 2,048 before, 512 of each shard. The other shards hold their 512 each, its own only 1,024 rows:
    3 x 512 + 1,024 = 2,560 of 4,096. After 4,096 rows 1,024 are left.

    So samplers rest in turn, not always the same (``runtime.cpu_governor``). Where they write r rows a turn, a shard
    holds its last c / r turns, and S shards the last S x c / r = C / r of all: C rows. Where r does not divide c, up to
    c + r of the C newest rows belong to one shard: up to r are missing.
    """

    def __init__(self, ring: ReplayRing, max_age_rows: int | None = None) -> None:
        """Rows older than ``max_age_rows``, in env steps of all samplers, are left out (None: the ring's capacity)."""
        spec = ring.spec
        self.ring = ring
        self.max_age_rows = spec.capacity if max_age_rows is None else max_age_rows
        self._capacity = spec.rows_per_shard
        # Leaves out the rows next to the writer, which would be overwritten during the copy. This only saves time.
        self._guard = min(1024, spec.rows_per_shard // 64)
        self._shard_start = np.arange(spec.num_shards) * spec.stride_rows
        self._windows: list[tuple[int, int]] = []  # of logical indices, end excluded
        self._age_low = [0] * spec.num_shards
        self._age_block = [0] * spec.num_shards
        self._age_clock = 0
        self._drawn: Drawn | None = None
        self.inserted = 0
        """Rows committed in all shards at the last refresh."""
        self.available = 0
        """Rows that could be drawn at the last refresh."""
        self.redrawn = 0
        """Rows that this reader has drawn again because they may have been overwritten during the copy."""
        self.refresh()

    @property
    def capacity(self) -> int:
        return self.ring.spec.capacity

    def refresh(self) -> None:
        """Reads the counters; takes microseconds, however much was written."""
        counters = self.ring.counters()
        self.inserted = sum([committed for _, committed in counters])
        if self.inserted > self.max_age_rows and self.inserted - self._age_clock >= self.ring.spec.block_rows:
            self._advance_age_bound(counters)
        margin = self._capacity - self._guard
        self._windows = [
            (max(0, reserved - margin, oldest), committed)
            for (reserved, committed), oldest in zip(counters, self._age_low, strict=True)
        ]
        self.available = sum([max(0, end - low) for low, end in self._windows])

    @property
    def windows(self) -> list[tuple[int, int]]:
        """Logical rows [low, end) of each shard that could be drawn at the last refresh; end is ``committed``."""
        return list(self._windows)

    def _advance_age_bound(self, counters: list[tuple[int, int]]) -> None:
        """Moves each shard's first young enough block forward; costs one step per block written."""
        self._age_clock = self.inserted
        threshold = self.inserted - self.max_age_rows
        for shard, (reserved, end) in enumerate(counters):
            if end == 0:
                continue
            last = self._block_of(end - 1)
            oldest = self._block_of(max(0, reserved - self._capacity))
            block = min(max(self._age_block[shard], oldest), last)
            while block <= last and self._end_clock(shard, block, last, end) <= threshold:
                block += 1
            self._age_block[shard] = min(block, last)
            self._age_low[shard] = self._first_row(block) if block <= last else end

    def _block_of(self, logical: int) -> int:
        """Number of a row's block, counted since the shard exists."""
        spec = self.ring.spec
        lap, position = divmod(logical, self._capacity)
        return lap * spec.blocks_per_shard + position // spec.block_rows

    def _first_row(self, block: int) -> int:
        """Logical index of a block's first row."""
        spec = self.ring.spec
        lap, index = divmod(block, spec.blocks_per_shard)
        return lap * self._capacity + index * spec.block_rows

    def _end_clock(self, shard: int, block: int, last: int, committed: int) -> int:
        """Clock at which a block was full: the next one's stamp, or for the last block a lower bound by its rows."""
        stamps = self.ring.stamps[shard]
        if block < last:
            return int(stamps[(block + 1) % len(stamps), 0])
        return int(stamps[block % len(stamps), 0]) + committed - self._first_row(block)

    def sample(self, rng: np.random.Generator, rows: np.ndarray, frames: np.ndarray | None = None) -> int:
        """Fills ``rows`` [B, W] float32 with rows drawn uniformly, with replacement.

        For images it also fills ``frames`` [B, T, F] uint8 (see ``RowLayout.split_frames``) and draws uniformly over
        the transitions whose frames are all still there.

        Returns:
            How many rows were drawn again because a writer may have been changing them.

        Raises:
            TransportError: nothing can be drawn.
        """
        self.refresh()
        drawn = self._draw(rng, len(rows))
        repeat = self._copy(drawn, rows, frames)
        self._drawn = drawn
        return 0 if repeat is None else self._redraw(rng, drawn, rows, frames, repeat)

    def _redraw(
        self, rng: np.random.Generator, drawn: Drawn, rows: np.ndarray, frames: np.ndarray | None, repeat: _Repeat
    ) -> int:
        """Draws again until no row can have been overwritten during its copy."""
        redrawn, bad = repeat.overwritten, repeat.bad
        for _ in range(_MAX_TRIES):
            self.refresh()
            again = self._draw(rng, bad.size)
            some_rows = np.empty_like(rows[: bad.size])
            some_frames = None if frames is None else np.empty_like(frames[: bad.size])
            still = self._copy(again, some_rows, some_frames)
            rows[bad] = some_rows
            if frames is not None:
                frames[bad] = some_frames
            drawn.logical[bad], drawn.row[bad] = again.logical, again.row
            if drawn.shard is not None:
                drawn.shard[bad] = again.shard
            if still is None:
                self.redrawn += redrawn
                return redrawn
            bad, redrawn = bad[still.bad], redrawn + still.overwritten
        raise TransportError("rows are overwritten faster than whole ones are drawn: raise the replay capacity")

    def _draw(self, rng: np.random.Generator, count: int) -> Drawn:
        """Chooses rows uniformly over the windows of all shards."""
        if self.available < 1:
            raise TransportError(f"no replay row can be drawn: {self.inserted} were inserted")
        capacity = self._capacity
        logical = rng.integers(0, self.available, size=count)
        if len(self._windows) == 1:
            low = self._windows[0][0]
            logical += low
            row = logical - (low - low % capacity)
            row -= capacity * (row >= capacity)
            return Drawn(None, logical, row)
        lows = np.array([low for low, _ in self._windows])
        sizes = np.array([max(0, end - low) for low, end in self._windows])
        ends = sizes.cumsum()
        shard = np.searchsorted(ends, logical, side="right")
        logical += (lows - ends + sizes)[shard]
        row = logical - (lows - lows % capacity)[shard]
        row -= capacity * (row >= capacity)
        row += self._shard_start[shard]
        return Drawn(shard, logical, row)

    def _copy(self, drawn: Drawn, rows: np.ndarray, frames: np.ndarray | None) -> _Repeat | None:
        """Copies rows; returns those that may have been overwritten meanwhile, if any."""
        ring = self.ring
        with ring.shard_locks(0, ring.spec.num_shards - 1):
            # mode="clip" lets NumPy copy straight into ``rows``; "raise" would copy through a buffer.
            ring.rows.take(drawn.row, axis=0, out=rows, mode="clip")
        counters = ring.counters()  # read after the copy is complete
        capacity = self._capacity
        if all(now[0] - capacity <= low for now, (low, _) in zip(counters, self._windows, strict=True)):
            return None
        floor = np.array([reserved for reserved, _ in counters]) - capacity
        bad = np.flatnonzero(drawn.logical < (floor[0] if drawn.shard is None else floor[drawn.shard]))
        return _Repeat(bad, bad.size) if bad.size else None

    def last_lag_age(self, version_now: int) -> tuple[float, float]:
        """``lag_age`` of the last drawn batch."""
        return (0.0, 0.0) if self._drawn is None else self.lag_age(self._drawn.row, version_now)

    def lag_age(self, row: np.ndarray, version_now: int) -> tuple[float, float]:
        """Mean policy lag (updates) and mean age (env steps of all samplers) of rows [n] of ``ring.rows``.

        Taken from the stamps of at most 2,048 of them. A stamp covers 256 rows of a shard, so the age is at most
        256 x (shards - 1) too high.
        """
        spec = self.ring.spec
        row = row[:_LAG_SAMPLE_ROWS]
        shard, position = np.divmod(row, spec.stride_rows)
        block, offset = np.divmod(position, spec.block_rows)
        stamps = self.ring.stamps[shard, block]  # [n, 2]
        age = np.maximum(self.inserted - stamps[:, 0] - offset, 0)
        return float(version_now - stamps[:, 1].mean()), float(age.mean())

    def count_torn(self, out: np.ndarray) -> int:
        """Number of rows of the last batch whose checksum does not match; 0 in a ring without checksums."""
        if self._drawn is None or not self.ring.spec.layout.checksum:
            return 0
        expected = out[:, -1].copy().view(np.uint32)
        return int(np.count_nonzero(row_checksums(out, self._drawn.logical) != expected))


class FrameReader(ReplayReader):
    """Draws whole image transitions; ``sample`` needs frames."""

    def _copy(self, drawn: Drawn, rows: np.ndarray, frames: np.ndarray | None) -> _Repeat | None:
        """Copies transitions; returns draws that are no transition or may have been overwritten meanwhile, if any."""
        ring, layout = self.ring, self.ring.spec.layout
        assert layout.num_steps is not None
        assert frames is not None
        with ring.shard_locks(0, ring.spec.num_shards - 1):
            ring.rows.take(drawn.row, axis=0, out=rows, mode="clip")
            steps = np.clip(np.nan_to_num(rows[:, layout.num_steps]), 0, layout.n_step).astype(np.int64)
            chain, lowest = self._chain(drawn, rows[:, layout.age])
            picked = np.take_along_axis(chain, self._places(steps), axis=1)
            ring.frames.take(picked.reshape(-1), axis=0, out=frames.reshape(-1, layout.frame_bytes), mode="clip")
        counters = ring.counters()  # read after the copy is complete
        floor = np.array([reserved for reserved, _ in counters]) - self._capacity
        overwritten = lowest < (floor[0] if drawn.shard is None else floor[drawn.shard])
        overwritten |= lowest < 0
        bad = np.flatnonzero(overwritten | (steps == 0))
        return _Repeat(bad, int(np.count_nonzero(overwritten))) if bad.size else None

    def _chain(self, drawn: Drawn, age: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows [n, depth + 1] in ``ring.rows``, newest first, and the lowest logical index of each draw.

        The first frame of an episode stands in for the frames before it. A link that is overwritten while it is read
        may hold anything; but then its row, and so the draw, is below the floor.
        """
        layout, capacity = self.ring.spec.layout, self._capacity
        chain = np.empty((len(drawn.row), layout.depth + 1), np.int64)
        chain[:, 0] = drawn.row
        logical = drawn.logical.copy()
        start = 0 if drawn.shard is None else self._shard_start[drawn.shard]
        with np.errstate(invalid="ignore"):
            for place in range(1, layout.depth + 1):
                back = self.ring.rows[chain[:, place - 1], layout.back]
                logical -= np.where(age >= place, np.clip(np.nan_to_num(back), 0, capacity), 0).astype(np.int64)
                chain[:, place] = start + logical % capacity
        return chain, logical

    def _places(self, steps: np.ndarray) -> np.ndarray:
        """Places [n, T] in a chain of the T frames: obs, then next_obs, each oldest first."""
        layout = self.ring.spec.layout
        stack = layout.stack
        if layout.n_step == 1:
            return np.broadcast_to(np.arange(stack, -1, -1), (len(steps), stack + 1))
        ages = np.arange(stack - 1, -1, -1)
        return np.concatenate([steps[:, None] + ages, np.broadcast_to(ages, (len(steps), stack))], axis=1)


def open_reader(ring: ReplayRing) -> ReplayReader:
    """The reader for a ring's kind of rows."""
    return FrameReader(ring) if ring.spec.layout.frame_bytes else ReplayReader(ring)


@functools.cache
def _crc_table() -> np.ndarray:
    """[256] uint32: the CRC-32 of each byte without the inversions at both ends."""
    return np.array([zlib.crc32(bytes([byte]), 0xFFFFFFFF) ^ 0xFFFFFFFF for byte in range(256)], np.uint32)


def row_checksums(rows: np.ndarray, logical: np.ndarray) -> np.ndarray:
    """``row_checksum`` of rows [N, W] float32 without frames: [N] uint32, byte by byte over all rows at once."""
    table, crc = _crc_table(), ~logical.astype(np.uint32)
    for column in np.ascontiguousarray(rows[:, :-1]).view(np.uint8).T.copy():
        crc = table[(crc ^ column) & 0xFF] ^ (crc >> 8)
    return ~crc
