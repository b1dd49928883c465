"""The replay ring: its layout in shared memory, ``ShardWriter`` (one for each shard) and ``ReplayReader``.

The memory has int64 words (rows_drawn | inserted_at_learning_start | one line per shard), stamps ``[S, blocks, 2]``,
float32 rows ``[S, stride, W]`` and, for images, uint8 frames ``[S, stride, F]``. assets/docs/architecture.md tells the
protocol. A draw of an image transition follows its environment's rows back (``RowLayout``), all committed earlier by
the same writer. So it is valid if, after the copy, its oldest row was not about to be overwritten.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from spreeze.errors import ConfigError, TransportError
from spreeze.transport.shared_memory import STRONGLY_ORDERED, ArraySpec, Handle, SharedArrays, memory_fence
from spreeze.types import Jsonable, RowLayout

_LINE_WORDS = 16  # 128 bytes: two cache lines, because processors fetch them in pairs
_FIRST_SHARD = 2  # line of shard 0
_STAMP_ROWS = 256
_ROW_ALIGNMENT = 16  # rows: as float32 a multiple of 64 bytes whatever the width, so every shard starts on a line
_DRAWN, _AT_START = 0, _LINE_WORDS
_RESERVED, _COMMITTED = 0, 1
_MAX_TRIES = 10_000
_LAG_SAMPLE_ROWS = 2048
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class RingSpec(Jsonable):
    """Shape of a ring."""

    layout: RowLayout
    num_shards: int
    rows_per_shard: int

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.rows_per_shard < 1:
            raise ConfigError(f"replay of {self.num_shards} shards of {self.rows_per_shard} rows: at least 1 of each")

    @property
    def capacity(self) -> int:
        return self.num_shards * self.rows_per_shard

    @property
    def block_rows(self) -> int:
        """Rows that share one stamp: 256, fewer in small rings."""
        return min(_STAMP_ROWS, max(1, self.rows_per_shard // 16))

    @property
    def blocks_per_shard(self) -> int:
        return -(-self.rows_per_shard // self.block_rows)

    @property
    def stride_rows(self) -> int:
        """Rows from the start of one shard to the start of the next."""
        return -(-self.rows_per_shard // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    @property
    def size_bytes(self) -> int:
        return SharedArrays.size_bytes(self.fields())

    def fields(self) -> tuple[ArraySpec, ...]:
        count = self.num_shards * self.stride_rows
        return (
            ArraySpec("words", ((_FIRST_SHARD + self.num_shards) * _LINE_WORDS,), "int64"),
            ArraySpec("stamps", (self.num_shards, self.blocks_per_shard, 2), "int64"),
            ArraySpec("rows", (count, self.layout.width), "float32"),
            ArraySpec("frames", (count, self.layout.frame_bytes), "uint8"),
        )

    @property
    def meaning(self) -> str:
        """A text that differs when the meaning of a row differs."""
        return f"{self.layout!r} {self.layout.sequence!r}, blocks of {self.block_rows}"


@dataclass(frozen=True, kw_only=True)
class RingHandle(Handle):
    """Carries a ``ReplayRing``."""

    spec: RingSpec

    def attach(self) -> ReplayRing:
        return ReplayRing(self.spec, SharedArrays.attach(self.fds[0], self.spec.fields(), self.spec.meaning))


class ReplayRing:
    """Typed view of the memory, created by the supervisor and attached by descriptor in the workers."""

    def __init__(self, spec: RingSpec, arrays: SharedArrays, fenced: bool | None = None) -> None:
        self.spec, self._arrays = spec, arrays
        self.fenced = not STRONGLY_ORDERED if fenced is None else fenced
        # A memoryview stores and loads one aligned int64 in a single instruction, and faster than NumPy.
        self.words = arrays["words"].data
        lines = arrays["words"].reshape(-1, _LINE_WORDS)[_FIRST_SHARD:]
        self.reserved, self.committed = lines[:, _RESERVED], lines[:, _COMMITTED]  # [S] each
        self.stamps, self.rows, self.frames = arrays["stamps"], arrays["rows"], arrays["frames"]
        self._committed_words = [self.word(shard, _COMMITTED) for shard in range(spec.num_shards)]

    @classmethod
    def create(cls, spec: RingSpec, *, fenced: bool | None = None) -> ReplayRing:
        """Allocates an empty ring; ``fenced`` forces the fences on or off (None: on if the processor needs them)."""
        ring = cls(spec, SharedArrays.create("spreeze-replay", spec.fields(), spec.meaning, "replay.capacity"), fenced)
        ring.words[_AT_START] = -1
        return ring

    @property
    def fd(self) -> int:
        return self._arrays.fd

    @property
    def handle(self) -> RingHandle:
        return RingHandle(fds=(self.fd,), spec=self.spec)

    def word(self, shard: int, field: int) -> int:
        """Index in ``words`` of a field of a shard's line."""
        return (_FIRST_SHARD + shard) * _LINE_WORDS + field

    def total_committed(self) -> int:
        """Rows inserted so far into all shards; also the clock of transition age."""
        words = self.words
        return sum([words[index] for index in self._committed_words])

    def counters(self) -> list[tuple[int, int]]:
        """(reserved, committed) of every shard.

        Reserved is read first and bounds committed, else a reader held up between the reads would see more rows than
        fit.
        """
        words = self.words
        return [
            (reserved := words[index - _COMMITTED + _RESERVED], min(words[index], reserved))
            for index in self._committed_words
        ]

    @property
    def rows_drawn(self) -> int:
        """Rows drawn since learning started; this and the next are written by the learner only."""
        return self.words[_DRAWN]

    @rows_drawn.setter
    def rows_drawn(self, value: int) -> None:
        self.words[_DRAWN] = value

    @property
    def inserted_at_learning_start(self) -> int:
        """Rows inserted when learning started, -1 before."""
        return self.words[_AT_START]

    def begin_learning(self) -> None:
        """Starts the rate limiter's count; called at the first update and after every restart."""
        self.words[_DRAWN] = 0
        self.words[_AT_START] = self.total_committed()

    def in_order(self) -> None:
        """A memory fence, in a ring that needs fences; a reader has one between counters and rows, both ways."""
        if self.fenced:
            memory_fence()

    def close(self) -> None:
        """Drops the views and closes the descriptor; its writers and readers must not be used any more."""
        if self.fd >= 0:
            del self.words, self.rows, self.frames, self.stamps, self.reserved, self.committed
            self._arrays.close()


def row_checksum(row: np.ndarray, frame: np.ndarray, logical: int) -> int:
    """CRC-32 of a row [W] float32 without its last column, its frame [F] uint8 (F may be 0) and its logical index."""
    return zlib.crc32(row[:-1].data, zlib.crc32(frame.data, logical & 0xFFFFFFFF))


class FrameColumns(NamedTuple):
    """The additional columns of N rows of images (see ``RowLayout``)."""

    frame: np.ndarray  # [N, F] uint8
    back: np.ndarray  # [N]
    age: np.ndarray  # [N]


class ReplayCounts(NamedTuple):
    """Inputs of a sampler's rate limiter."""

    inserted: int  # rows inserted into replay so far
    inserted_at_learning_start: int  # ``inserted`` when learning started, -1 before
    sampled: int  # rows drawn since learning started


class ShardWriter:
    """Writes rows into one shard, over its oldest ones; a shard has one writer at any time.

    Rows arrive complete, in order, each at most once. After a kill, every completed write is readable; of the
    interrupted one, none, some or all rows. A successor continues after the last committed row and keeps ``reserved``:
    announced rows may be half overwritten.
    """

    def __init__(self, ring: ReplayRing, shard: int) -> None:
        spec, layout = ring.spec, ring.spec.layout
        if not 0 <= shard < spec.num_shards:
            raise TransportError(f"shard {shard} of a ring of {spec.num_shards} shards")
        self.ring, self.shard, self.layout = ring, shard, layout
        self._words = ring.words
        self._reserved_word, self._committed_word = ring.word(shard, _RESERVED), ring.word(shard, _COMMITTED)
        first = shard * spec.stride_rows
        rows = ring.rows[first : first + spec.rows_per_shard]
        self._rows = rows
        self._obs, self._action = rows[:, layout.obs], rows[:, layout.action]
        self._reward, self._terminated = rows[:, layout.reward], rows[:, layout.terminated]
        self._next_obs = rows[:, layout.next_obs]
        # Storing single floats is faster through a memoryview, which needs a flat, contiguous piece of the memory.
        self._values = rows.reshape(-1).data
        self._first_reward, self._width = layout.reward, layout.width
        self._num_steps = None if layout.num_steps is None else rows[:, layout.num_steps]
        self._has_frames, self._packed = layout.frame_bytes > 0, rows[:, : layout.width - layout.checksum]
        self._frames = ring.frames[first : first + spec.rows_per_shard]
        self._links = rows[:, layout.back : layout.episode_step + 1] if self._has_frames else rows[:, :0]
        self._checksum = rows.view(np.uint32)[:, -1] if layout.checksum else None
        self._capacity = spec.rows_per_shard
        self._max_rows = max(1, spec.rows_per_shard // 2)  # so that a write never empties the reader's window
        self._block_rows = spec.block_rows
        self._stamps = ring.stamps[shard]
        self._reserved, self._committed = self._words[self._reserved_word], self._words[self._committed_word]
        self._position = self._committed % self._capacity
        self._stamp_position = -(-self._position // self._block_rows) * self._block_rows
        self._fenced = ring.fenced

    @property
    def next_logical(self) -> int:
        return self._committed

    def counts(self) -> ReplayCounts:
        return ReplayCounts(self.ring.total_committed(), self._words[_AT_START], self._words[_DRAWN])

    def close(self) -> None:
        """Closes the ring, which its process opened for this writer alone."""
        self.ring.close()

    def write(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        next_obs: Any,
        num_steps: Any = None,
        version: int = 0,
        frames: FrameColumns | None = None,
    ) -> None:
        """Appends N transitions that policy ``version`` collected; arrays as in ``RowLayout``, ``reward`` [N].

        ``num_steps`` [N] is for rings with n-step returns or images. A ValueError if a shape does not fit.
        """
        count = len(reward)
        position = self._position
        stop = position + count
        if stop > self._capacity or count > self._max_rows:
            self._write_parts((obs, action, reward, terminated, next_obs), num_steps, version, frames)
            return
        self._announce(count)
        if count == 1:  # as below, with fewer and cheaper NumPy calls
            self._obs[position], self._action[position] = obs, action
            self._next_obs[position] = next_obs
            reward_at = self._first_reward + position * self._width
            self._values[reward_at], self._values[reward_at + 1] = reward[0], terminated[0]
        else:
            at = slice(position, stop)
            self._obs[at], self._action[at], self._next_obs[at] = obs, action, next_obs
            self._reward[at], self._terminated[at] = reward, terminated
        if self._num_steps is not None:
            if num_steps is None:
                raise ValueError("this ring holds n-step transitions: num_steps is missing")
            self._num_steps[position:stop] = num_steps
        if self._has_frames:
            if frames is None:
                raise ValueError("this ring holds images: frames are missing")
            self._frames[position:stop], self._links[position:stop, 0], self._links[position:stop, 1] = frames
        self._publish(stop, version)

    def write_packed(self, rows: np.ndarray, version: int = 0) -> None:
        """Appends N rows [N, W] float32 as ``RowLayout`` has them, not of images: transitions, or sequences."""
        rows = rows[:, : self._packed.shape[1]]
        while count := min(len(rows), self._max_rows, self._capacity - self._position):
            self._announce(count)
            stop = self._position + count
            self._packed[self._position : stop] = rows[:count]
            self._publish(stop, version)
            rows = rows[count:]

    def _announce(self, count: int) -> None:
        """Announces the rows that are about to be overwritten."""
        end = self._committed + count
        if end > self._reserved:  # never lowered, as a dead predecessor may have announced more
            self._words[self._reserved_word] = self._reserved = end
        if self._fenced:
            memory_fence()

    def _publish(self, stop: int, version: int) -> None:
        """Publishes the rows that were written up to position ``stop``."""
        position = self._position
        if stop > self._stamp_position:
            self._stamp(position, stop, version)
        if self._checksum is not None:
            self._write_checksums(position, stop)
        if self._fenced:
            memory_fence()
        self._words[self._committed_word] = self._committed = self._committed + stop - position  # published last
        if stop == self._capacity:
            stop = self._stamp_position = 0
        self._position = stop

    def _write_checksums(self, position: int, stop: int) -> None:
        """Writes the checksums of the rows in [position, stop)."""
        assert self._checksum is not None
        shift = self._committed - position
        for row in range(position, stop):
            self._checksum[row] = row_checksum(self._rows[row], self._frames[row], row + shift)

    def _stamp(self, position: int, stop: int, version: int) -> None:
        """Stamps the blocks that start in [position, stop) with clock and policy version."""
        clock = self.ring.total_committed()
        while self._stamp_position < stop:
            stamp = self._stamps[self._stamp_position // self._block_rows]
            stamp[0] = clock + self._stamp_position - position
            stamp[1] = version
            self._stamp_position += self._block_rows

    def _write_parts(self, columns: tuple[Any, ...], num_steps: Any, version: int, frames: FrameColumns | None) -> None:
        """Splits a write at the end of the shard and into parts of at most half a shard."""
        start, count = 0, len(columns[2])
        while start < count:
            stop = min(count, start + self._max_rows, start + self._capacity - self._position)
            part = slice(start, stop)
            steps = None if num_steps is None else num_steps[part]
            images = None if frames is None else FrameColumns(*(column[part] for column in frames))
            obs, action, reward, terminated, next_obs = (column[part] for column in columns)
            self.write(obs, action, reward, terminated, next_obs, steps, version, images)
            start = stop


def fill(ring: ReplayRing, rows: Any, versions: np.ndarray) -> int:
    """Writes rows [N, W] with policy versions [N] into an empty ring, block by block to its shards in turn.

    Returns how many were kept: a smaller ring keeps the newest.
    """
    kept, size = min(len(versions), ring.spec.capacity), ring.spec.block_rows
    writers = [ShardWriter(ring, shard) for shard in range(ring.spec.num_shards)]
    for index, start in enumerate(range(len(versions) - kept, len(versions), size)):
        part = np.asarray(rows[start : min(start + size, len(versions))], dtype=np.float32)
        writers[index % len(writers)].write_packed(part, int(versions[start]))
    return kept


class SampledIndices(NamedTuple):
    """Positions of n drawn rows."""

    shard: np.ndarray | None  # [n]; None where there is one shard
    logical: np.ndarray  # [n]: number of the row since the shard's first one; it never wraps
    row: np.ndarray  # [n]: row in ``ring.rows``


class ReplayReader:
    """Draws uniformly over all rows that are published, not about to be overwritten and not too old.

    Rows older than the capacity of the whole ring are left out, as in one common ring: those of a stopped sampler are
    no longer drawn once ``capacity`` newer rows exist. The newest C rows can be drawn if samplers write at equal rates;
    one that writes alone keeps only its own shard, of C / S rows. Therefore samplers rest in turn
    (``runtime.cpu_governor``), and at most the rows of one turn are missing.
    """

    def __init__(self, ring: ReplayRing) -> None:
        spec = ring.spec
        self.ring, self.capacity = ring, spec.capacity
        self._shard_rows = spec.rows_per_shard
        # Leaves out the rows next to the writer, which would be overwritten during the copy: fewer redraws.
        self._guard = min(1024, spec.rows_per_shard // 64)
        self._shard_start = np.arange(spec.num_shards) * spec.stride_rows
        self.windows: list[tuple[int, int]] = []
        """Logical rows [low, end) of each shard that could be drawn at the last refresh; end is ``committed``."""
        self._age_low = [0] * spec.num_shards
        self._age_block = [0] * spec.num_shards
        self._age_clock = 0
        self._drawn: SampledIndices | None = None
        self.inserted, self.available = 0, 0
        self.refresh()

    def refresh(self) -> None:
        """Reads the counters; takes microseconds, however much was written."""
        counters = self.ring.counters()
        self.ring.in_order()
        self.inserted = sum([committed for _, committed in counters])
        if self.inserted > self.capacity and self.inserted - self._age_clock >= self.ring.spec.block_rows:
            self._advance_age_bound(counters)
        margin = self._shard_rows - self._guard
        both = zip(counters, self._age_low, strict=True)
        self.windows = [(max(0, reserved - margin, oldest), committed) for (reserved, committed), oldest in both]
        self.available = sum([max(0, end - low) for low, end in self.windows])

    @property
    def ends(self) -> list[int]:
        """Rows that were committed to each shard so far, at the last refresh."""
        return [end for _, end in self.windows]

    def newer(self, shard: int, begin: int, columns: slice) -> tuple[np.ndarray, int]:
        """Copies of columns of a shard's rows from logical row ``begin`` to the last refresh, and where they end.

        Rows overwritten by now are left out. With images they are bytes of each frame, read as float32.
        """
        ring, capacity = self.ring, self._shard_rows
        low, end = self.windows[shard]
        begin = min(max(begin, low), end)
        row = self._shard_start[shard] + np.arange(begin, end) % capacity
        rows = (ring.frames if ring.spec.layout.frame_bytes else ring.rows)[row, columns]
        ring.in_order()
        overwritten = max(0, ring.counters()[shard][0] - capacity - begin)  # read after the copy is complete
        return np.ascontiguousarray(rows[overwritten:]).view(np.float32), end

    def _advance_age_bound(self, counters: list[tuple[int, int]]) -> None:
        """Moves each shard's first young enough block forward; costs one step per block written."""
        self._age_clock = self.inserted
        threshold = self.inserted - self.capacity
        for shard, (reserved, end) in enumerate(counters):
            if end == 0:
                continue
            last = self._block_of(end - 1)
            oldest = self._block_of(max(0, reserved - self._shard_rows))
            block = min(max(self._age_block[shard], oldest), last)
            while block <= last and self._end_clock(shard, block, last, end) <= threshold:
                block += 1
            self._age_block[shard] = min(block, last)
            self._age_low[shard] = self._first_row(block) if block <= last else end

    def _block_of(self, logical: int) -> int:
        """Number of a row's block, counted since the shard exists."""
        spec = self.ring.spec
        lap, position = divmod(logical, self._shard_rows)
        return lap * spec.blocks_per_shard + position // spec.block_rows

    def _first_row(self, block: int) -> int:
        """Logical index of a block's first row."""
        spec = self.ring.spec
        lap, index = divmod(block, spec.blocks_per_shard)
        return lap * self._shard_rows + index * spec.block_rows

    def _end_clock(self, shard: int, block: int, last: int, committed: int) -> int:
        """Clock at which a block was full: the next one's stamp, or for the last block a lower bound by its rows."""
        stamps = self.ring.stamps[shard]
        if block < last:
            return int(stamps[(block + 1) % len(stamps), 0])
        return int(stamps[block % len(stamps), 0]) + committed - self._first_row(block)

    def sample(self, rng: np.random.Generator, rows: np.ndarray, frames: np.ndarray | None = None) -> int:
        """Fills ``rows`` [B, W] float32, and for images ``frames`` [B, T, F] uint8, uniformly with replacement.

        Images: uniform over transitions with complete frames. Returns how many draws were repeated because a writer may
        have been changing their rows. Raises a TransportError if there is nothing to draw.
        """
        self.refresh()
        self._drawn = drawn = self._draw(rng, len(rows))
        bad, redrawn = self._copy(drawn, rows, frames)
        for _ in range(_MAX_TRIES):
            if not bad.size:
                return redrawn
            self.refresh()
            repeated = self._draw(rng, bad.size)
            some_rows = np.empty_like(rows[: bad.size])
            some_frames = None if frames is None else np.empty_like(frames[: bad.size])
            still, overwritten = self._copy(repeated, some_rows, some_frames)
            rows[bad] = some_rows
            if frames is not None:
                frames[bad] = some_frames
            drawn.logical[bad], drawn.row[bad] = repeated.logical, repeated.row
            if drawn.shard is not None:
                drawn.shard[bad] = repeated.shard
            bad, redrawn = bad[still], redrawn + overwritten
        raise TransportError("rows are overwritten faster than they can be read; raise the replay capacity")

    def _draw(self, rng: np.random.Generator, count: int) -> SampledIndices:
        """Chooses rows uniformly over the windows of all shards."""
        if self.available < 1:
            raise TransportError(f"no replay row can be drawn: {self.inserted} were inserted")
        capacity = self._shard_rows
        logical = rng.integers(0, self.available, size=count)
        if len(self.windows) == 1:
            low = self.windows[0][0]
            logical += low
            row = logical - (low - low % capacity)
            row -= capacity * (row >= capacity)
            return SampledIndices(None, logical, row)
        lows = np.array([low for low, _ in self.windows])
        sizes = np.array([max(0, end - low) for low, end in self.windows])
        ends = sizes.cumsum()
        shard = np.searchsorted(ends, logical, side="right")
        logical += (lows - ends + sizes)[shard]
        row = logical - (lows - lows % capacity)[shard]
        row -= capacity * (row >= capacity)
        row += self._shard_start[shard]
        return SampledIndices(shard, logical, row)

    def _copy(self, drawn: SampledIndices, rows: np.ndarray, frames: np.ndarray | None) -> tuple[np.ndarray, int]:
        """Copies rows; returns the positions of the draws to repeat, and how many of them may be overwritten rows."""
        ring, lowest, incomplete = self.ring, drawn.logical, None
        # mode="clip" lets NumPy copy straight into ``rows``; "raise" would copy through a buffer.
        ring.rows.take(drawn.row, axis=0, out=rows, mode="clip")
        if frames is not None:
            lowest, incomplete = self._copy_frames(drawn, rows, frames)
        ring.in_order()
        counters = ring.counters()  # read after the copy is complete
        capacity = self._shard_rows
        if incomplete is None and all(
            now[0] - capacity <= low for now, (low, _) in zip(counters, self.windows, strict=True)
        ):
            return _NONE, 0
        floor = np.maximum(0, np.array([reserved for reserved, _ in counters]) - capacity)
        overwritten = lowest < (floor[0] if drawn.shard is None else floor[drawn.shard])
        bad = overwritten if incomplete is None else overwritten | incomplete
        return np.flatnonzero(bad), int(np.count_nonzero(overwritten))

    def _copy_frames(
        self, drawn: SampledIndices, rows: np.ndarray, frames: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Copies frames; returns each draw's lowest logical index, and which draws are no transition."""
        ring, layout = self.ring, self.ring.spec.layout
        assert layout.num_steps is not None
        steps = np.clip(np.nan_to_num(rows[:, layout.num_steps]), 0, layout.n_step).astype(np.int64)
        chain, lowest = self._chain(drawn, rows[:, layout.episode_step])
        picked = np.take_along_axis(chain, self._chain_indices(steps), axis=1)
        ring.frames.take(picked.reshape(-1), axis=0, out=frames.reshape(-1, layout.frame_bytes), mode="clip")
        return lowest, steps == 0

    def _chain(self, drawn: SampledIndices, age: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows [n, depth + 1] in ``ring.rows``, newest first, and the lowest logical index of each draw.

        The first frame of an episode stands in for those before it. A link overwritten while it is read may hold
        anything; its row is then older than the oldest safe one, and the batch draws another.
        """
        layout, capacity = self.ring.spec.layout, self._shard_rows
        chain = np.empty((len(drawn.row), layout.depth + 1), np.int64)
        chain[:, 0] = drawn.row
        logical = drawn.logical.copy()
        start = 0 if drawn.shard is None else self._shard_start[drawn.shard]
        with np.errstate(invalid="ignore"):
            for link in range(1, layout.depth + 1):
                back = self.ring.rows[chain[:, link - 1], layout.back]
                logical -= np.where(age >= link, np.clip(np.nan_to_num(back), 0, capacity), 0).astype(np.int64)
                chain[:, link] = start + logical % capacity
        return chain, logical

    def _chain_indices(self, steps: np.ndarray) -> np.ndarray:
        """Indices [n, T] of the T frames in a chain: obs, then next_obs, each oldest first."""
        layout = self.ring.spec.layout
        stack = layout.stack
        if layout.n_step == 1:
            return np.broadcast_to(np.arange(stack, -1, -1), (len(steps), stack + 1))
        ages = np.arange(stack - 1, -1, -1)
        return np.concatenate([steps[:, None] + ages, np.broadcast_to(ages, (len(steps), stack))], axis=1)

    def last_lag_age(self, version_now: int) -> tuple[float, float]:
        """``lag_and_age`` of the last drawn batch."""
        return (0.0, 0.0) if self._drawn is None else self.lag_and_age(self._drawn.row, version_now)

    def lag_and_age(self, row: np.ndarray, version_now: int) -> tuple[float, float]:
        """Mean policy lag (updates) and mean age (env steps of all samplers) of rows [n] of ``ring.rows``.

        From the stamps of at most 2,048 of them; the age is at most 256 x (shards - 1) too high.
        """
        spec = self.ring.spec
        row = row[:_LAG_SAMPLE_ROWS]
        shard, position = np.divmod(row, spec.stride_rows)
        block, offset = np.divmod(position, spec.block_rows)
        stamps = self.ring.stamps[shard, block]  # [n, 2]
        age = np.maximum(self.inserted - stamps[:, 0] - offset, 0)
        lag = np.maximum(version_now - stamps[:, 1], 0)  # after a learner that lost its latest updates: not negative
        return float(lag.mean()), float(age.mean())
