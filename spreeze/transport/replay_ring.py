"""The replay ring: its shape, its memory, and the one writer of each shard.

The memory begins with int64 words: header | sampled | baseline_inserted | (free) | one line per shard | stamps
``[S, blocks, 2]``. Then come, each aligned to a page, float32 rows ``[S, stride, W]`` and, for images, uint8 frames
``[S, stride, F]``. The package ``transport`` describes the protocol.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from spreeze.errors import ConfigError, TransportError
from spreeze.transport.protocols import FrameColumns, ReplayCounts, TransitionSink
from spreeze.transport.shared_memory import PAGE_BYTES, STRONGLY_ORDERED, Block, allocate, attach
from spreeze.types import Jsonable, RowLayout

LINE_WORDS = 16
"""128 bytes: two cache lines, because processors fetch them in pairs."""
FIRST_SHARD_WORD = 4 * LINE_WORDS
"""Where the line of shard 0 starts."""
_MAGIC = 0x535052494E470A01
_VERSION = 1
_STAMP_ROWS = 256
_ROW_ALIGNMENT = 16
"""16 rows of float32 are a multiple of 64 bytes whatever the width, so every shard starts on a line."""
_SAMPLED, _BASELINE = LINE_WORDS, 2 * LINE_WORDS
_RESERVED, _COMMITTED, _EPOCH, _OWNER_PID = 0, 1, 2, 3
__all__ = ["FrameColumns", "ReplayRing", "RingSpec", "ShardWriter", "pack_rows", "row_checksum", "write_rows"]


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
        """Rows that all shards hold together."""
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
    def stamps_word(self) -> int:
        return FIRST_SHARD_WORD + self.num_shards * LINE_WORDS

    @property
    def rows_offset_bytes(self) -> int:
        words = self.stamps_word + 2 * self.num_shards * self.blocks_per_shard
        return -(-8 * words // PAGE_BYTES) * PAGE_BYTES

    @property
    def size_bytes(self) -> int:
        return self.frames_offset_bytes + self.num_shards * self.stride_rows * self.layout.frame_bytes

    @property
    def frames_offset_bytes(self) -> int:
        """Where the frames start, if there are any."""
        end = self.rows_offset_bytes + 4 * self.num_shards * self.stride_rows * self.layout.width
        return -(-end // PAGE_BYTES) * PAGE_BYTES if self.layout.frame_bytes else end

    @property
    def schema_hash(self) -> int:
        """63 bits that differ when the meaning of a row differs."""
        text = f"{self.layout!r} float32 blocks of {self.block_rows}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def header(self) -> list[int]:
        return [_MAGIC, _VERSION, self.schema_hash, self.rows_per_shard, self.num_shards, self.layout.width]


class ReplayRing:
    """Typed view of the memory, created by the supervisor and attached by descriptor in the workers."""

    def __init__(self, spec: RingSpec, block: Block, locked: bool | None) -> None:
        self.spec = spec
        self.block = block
        self.locked = not STRONGLY_ORDERED if locked is None else locked
        shards, blocks = spec.num_shards, spec.blocks_per_shard
        used = block.view[: spec.size_bytes]
        # A memoryview of 'q' stores and loads one aligned int64 in a single instruction, and faster than NumPy.
        self.words = used[: spec.rows_offset_bytes].cast("q")
        table = np.frombuffer(self.words, dtype=np.int64)
        lines = table[FIRST_SHARD_WORD : spec.stamps_word].reshape(shards, LINE_WORDS)
        self.reserved = lines[:, _RESERVED]  # [S]
        self.committed = lines[:, _COMMITTED]  # [S]
        self.stamps = table[spec.stamps_word : spec.stamps_word + 2 * shards * blocks].reshape(shards, blocks, 2)
        count = shards * spec.stride_rows
        rows_end = spec.rows_offset_bytes + 4 * count * spec.layout.width
        flat = np.frombuffer(used[spec.rows_offset_bytes : rows_end], dtype=np.float32)
        self.rows = flat.reshape(count, spec.layout.width)
        self.frames = np.frombuffer(used[spec.frames_offset_bytes :], np.uint8).reshape(count, spec.layout.frame_bytes)
        self._committed_words = [self.word(shard, _COMMITTED) for shard in range(shards)]
        if table.ctypes.data % 8 or flat.ctypes.data % 64:
            raise TransportError(f"replay memory at {table.ctypes.data:#x} is not aligned")

    @classmethod
    def create(cls, spec: RingSpec, *, locked: bool | None = None) -> ReplayRing:
        """Allocates an empty ring; ``locked`` forces the locks on or off (None: on if the processor needs them).

        Raises:
            ResourceError: not enough memory.
        """
        ring = cls(spec, allocate("spreeze-replay", spec.size_bytes), locked)
        ring.words[_BASELINE] = -1
        for index, word in reversed(list(enumerate(spec.header()))):
            ring.words[index] = word
        return ring

    @classmethod
    def attach(cls, fd: int, spec: RingSpec, *, locked: bool | None = None) -> ReplayRing:
        """Attaches to an inherited descriptor; a TransportError if it belongs to another ring."""
        ring = cls(spec, attach(fd, spec.size_bytes), locked)
        found, expected = ring.words[:6].tolist(), spec.header()
        if found != expected:
            ring.close()
            raise TransportError(f"descriptor {fd} holds another ring: header {found}, expected {expected}")
        return ring

    @property
    def fd(self) -> int:
        return self.block.fd

    def word(self, shard: int, field: int) -> int:
        """Index in ``words`` of a field of a shard's line."""
        return FIRST_SHARD_WORD + shard * LINE_WORDS + field

    def total_committed(self) -> int:
        """Rows inserted so far into all shards; also the clock of transition age."""
        words = self.words
        return sum([words[index] for index in self._committed_words])

    def counters(self) -> list[tuple[int, int]]:
        """(reserved, committed) of every shard; reserved is read first."""
        words = self.words
        return [(words[index - _COMMITTED + _RESERVED], words[index]) for index in self._committed_words]

    @property
    def sampled(self) -> int:
        """Rows drawn since learning began; written by the learner only."""
        return self.words[_SAMPLED]

    @sampled.setter
    def sampled(self, value: int) -> None:
        self.words[_SAMPLED] = value

    @property
    def baseline_inserted(self) -> int:
        """Rows inserted when learning began, -1 before; written by the learner only."""
        return self.words[_BASELINE]

    def begin_learning(self) -> None:
        """Starts the rate limiter's count; called at the first update and after every restart."""
        self.words[_SAMPLED] = 0
        self.words[_BASELINE] = self.total_committed()

    def takeover(self, shard: int, pid: int) -> int:
        """Gives a shard to a new owner and returns its new epoch; the old owner must be dead and reaped.

        ``reserved`` stays as the dead writer left it: the rows that it announced may be half overwritten.
        """
        epoch = self.words[self.word(shard, _EPOCH)] + 1
        self.words[self.word(shard, _OWNER_PID)] = pid
        self.words[self.word(shard, _EPOCH)] = epoch
        return epoch

    def owner_pid(self, shard: int) -> int:
        """Process that writes a shard; 0 if none has yet."""
        return self.words[self.word(shard, _OWNER_PID)]

    def lock(self, first: int, last: int) -> None:
        """Waits for the locks of shards ``first..last``; the kernel frees them when this process dies."""
        if sys.platform == "win32":
            raise TransportError(f"processor {platform.machine()} needs file locks, which Windows lacks: use x86-64")
        import fcntl

        fcntl.lockf(self.fd, fcntl.LOCK_EX, last - first + 1, first)

    def unlock(self, first: int, last: int) -> None:
        import fcntl

        fcntl.lockf(self.fd, fcntl.LOCK_UN, last - first + 1, first)

    @contextlib.contextmanager
    def shard_locks(self, first: int, last: int) -> Iterator[None]:
        """Holds the locks of shards ``first..last`` in a ring that needs locks; does nothing in others."""
        if not self.locked:
            yield
            return
        self.lock(first, last)
        try:
            yield
        finally:
            self.unlock(first, last)

    def close(self) -> None:
        """Drops the views and closes the descriptor; its writers and readers must not be used any more."""
        if self.block.fd < 0:
            return
        del self.rows, self.frames, self.stamps, self.reserved, self.committed
        with contextlib.suppress(BufferError):
            self.words.release()
        self.block.close()


def row_checksum(row: np.ndarray, frame: np.ndarray, logical: int) -> int:
    """CRC-32 of a row [W] float32 without its last column, its frame [F] uint8 (F may be 0) and its logical index."""
    return zlib.crc32(row[:-1].data, zlib.crc32(frame.data, logical & 0xFFFFFFFF))


class ShardWriter:
    """Writes rows into one shard, over its oldest ones; a shard has one writer at any time."""

    has_room = True

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
        self._has_frames = layout.frame_bytes > 0
        self._frames = ring.frames[first : first + spec.rows_per_shard]
        self._links = rows[:, layout.back : layout.age + 1] if self._has_frames else rows[:, :0]
        self._checksum = rows.view(np.uint32)[:, -1] if layout.checksum else None
        self._capacity = spec.rows_per_shard
        self._max_rows = max(1, spec.rows_per_shard // 2)  # so that a write never empties the reader's window
        self._block_rows = spec.block_rows
        self._stamps = ring.stamps[shard]
        self._reserved, self._committed = self._words[self._reserved_word], self._words[self._committed_word]
        self._position = self._committed % self._capacity
        self._stamp_position = -(-self._position // self._block_rows) * self._block_rows
        self._locked = ring.locked

    @property
    def next_logical(self) -> int:
        return self._committed

    def counts(self) -> ReplayCounts:
        return ReplayCounts(self.ring.total_committed(), self._words[_BASELINE], self._words[_SAMPLED])

    def close(self) -> None:
        """Closes the ring, which its process opened for this writer alone."""
        self.ring.close()

    def write(
        self, obs: Any, action: Any, reward: Any, terminated: Any, next_obs: Any, num_steps: Any = None,
        version: int = 0, frames: FrameColumns | None = None,
    ) -> None:
        """Appends N transitions; the arguments are cast to float32.

        ``obs`` and ``next_obs`` are [N, O], ``action`` [N, A] in [-1, 1], ``reward`` [N], ``terminated`` [N] with 1
        where the MDP ended. ``num_steps`` [N] is only for rings with n-step returns or images, ``frames`` for images.

        Raises:
            ValueError: a shape does not fit; nothing was published.
        """
        count = len(reward)
        position = self._position
        stop = position + count
        if stop > self._capacity or count > self._max_rows:
            self._write_parts(obs, action, reward, terminated, next_obs, num_steps, version, frames)
            return
        if self._locked:
            self.ring.lock(self.shard, self.shard)
        try:
            end = self._committed + count
            if end > self._reserved:  # announced first; never lowered, as a dead predecessor may have announced more
                self._words[self._reserved_word] = self._reserved = end
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
                    raise ValueError(_NO_STEPS)
                self._num_steps[position:stop] = num_steps
            if self._has_frames:
                self._write_frames(slice(position, stop), frames)
            if stop > self._stamp_position:
                self._stamp(position, stop, version)
            if self._checksum is not None:
                self._seal(position, stop)
            self._words[self._committed_word] = self._committed = end  # published last
        finally:
            if self._locked:
                self.ring.unlock(self.shard, self.shard)
        if stop == self._capacity:
            stop = self._stamp_position = 0
        self._position = stop

    def _write_frames(self, at: slice, frames: FrameColumns | None) -> None:
        if frames is None:
            raise ValueError(_NO_FRAMES)
        self._frames[at], self._links[at, 0], self._links[at, 1] = frames

    def _seal(self, position: int, stop: int) -> None:
        """Writes the checksums of the rows in [position, stop)."""
        assert self._checksum is not None
        shift = self._committed - position
        for row in range(position, stop):
            self._checksum[row] = row_checksum(self._rows[row], self._frames[row], row + shift)

    def _stamp(self, position: int, stop: int, version: int) -> None:
        """Stamps the blocks that begin in [position, stop) with clock and policy version."""
        clock = self.ring.total_committed()
        while self._stamp_position < stop:
            stamp = self._stamps[self._stamp_position // self._block_rows]
            stamp[0] = clock + self._stamp_position - position
            stamp[1] = version
            self._stamp_position += self._block_rows

    def _write_parts(
        self, obs: Any, action: Any, reward: Any, terminated: Any, next_obs: Any, num_steps: Any, version: int,
        frames: FrameColumns | None,
    ) -> None:
        """Splits a write at the end of the shard and into parts of at most half a shard."""
        start, count = 0, len(reward)
        while start < count:
            stop = min(count, start + self._max_rows, start + self._capacity - self._position)
            part = slice(start, stop)
            steps = None if num_steps is None else num_steps[part]
            images = None if frames is None else FrameColumns(*(column[part] for column in frames))
            self.write(obs[part], action[part], reward[part], terminated[part], next_obs[part], steps, version, images)
            start = stop


_NO_STEPS = "this ring holds n-step transitions: num_steps is missing"
_NO_FRAMES = "this ring holds images: frames are missing"


def pack_rows(
    layout: RowLayout, obs: Any, action: Any, reward: Any, terminated: Any, next_obs: Any, num_steps: Any,
    frames: FrameColumns | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Packs the arguments of ``ShardWriter.write`` into rows [N, W] float32 and their frames [N, F] uint8.

    Raises:
        ValueError: a shape does not fit.
    """
    rows = np.zeros((len(reward), layout.width), np.float32)
    images = np.zeros((len(reward), layout.frame_bytes), np.uint8)
    rows[:, layout.obs], rows[:, layout.action], rows[:, layout.next_obs] = obs, action, next_obs
    rows[:, layout.reward], rows[:, layout.terminated] = reward, terminated
    if layout.num_steps is not None:
        if num_steps is None:
            raise ValueError(_NO_STEPS)
        rows[:, layout.num_steps] = num_steps
    if layout.frame_bytes:
        if frames is None:
            raise ValueError(_NO_FRAMES)
        images[:], rows[:, layout.back], rows[:, layout.age] = frames
    return rows, images


def write_rows(sink: TransitionSink, rows: np.ndarray, version: int, frames: np.ndarray | None = None) -> None:
    """Writes packed rows [N, W] float32 and, for images, their ``frames`` [N, F] uint8."""
    layout = sink.layout
    batch = layout.split(rows, 1.0)
    steps = None if layout.num_steps is None else rows[:, layout.num_steps]
    columns = None if frames is None else FrameColumns(frames, rows[:, layout.back], rows[:, layout.age])
    sink.write(batch.obs, batch.action, batch.reward, batch.terminated, batch.next_obs, steps, version, columns)
