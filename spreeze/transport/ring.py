"""Replay in shared memory: one shard per sampler, rows written in place, no queue, no lock.

A writer announces what it is about to overwrite (``reserved``) before it touches a row and publishes
(``committed``) after the last one. A reader copies first and looks at ``reserved`` afterwards, so it
knows which of its rows may have been overwritten meanwhile. Nobody ever waits for anybody, and a
process that dies at any point leaves at worst a few rows that nobody draws. The order of the steps is
checked over all interleavings in ``tests/test_ring_model.py``.

It relies on stores and loads that stay in program order, as on x86-64; on other processors each shard
has a lock of the operating system's around the copy, which the kernel releases when its holder dies.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from spreeze.errors import TransportError
from spreeze.transport.memory import Block, allocate, attach
from spreeze.transport.ring_spec import FIRST_SHARD_WORD, LINE_WORDS, RingSpec

__all__ = ["STRONGLY_ORDERED", "FrameColumns", "Ring", "RingSpec", "ShardWriter", "row_checksum"]

_SAMPLED, _BASELINE = LINE_WORDS, 2 * LINE_WORDS
_RESERVED, _COMMITTED, _EPOCH, _OWNER_PID = 0, 1, 2, 3
STRONGLY_ORDERED = platform.machine().lower() in ("x86_64", "amd64")
"""True where plain stores and loads suffice."""


class FrameColumns(NamedTuple):
    """What N rows of images hold besides the fields of every row (see ``RowLayout``)."""

    frame: np.ndarray  # [N, F] uint8
    back: np.ndarray  # [N]
    age: np.ndarray  # [N]


class Ring:
    """Typed view of the memory; made by the supervisor, attached by descriptor in the children."""

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
    def create(cls, spec: RingSpec, *, locked: bool | None = None) -> Ring:
        """Allocates an empty ring; ``locked`` forces the locks on or off (None: as the processor needs).

        Raises:
            ResourceError: not enough memory.
        """
        ring = cls(spec, allocate("spreeze-replay", spec.size_bytes), locked)
        ring.words[_BASELINE] = -1
        for index, word in reversed(list(enumerate(spec.header()))):
            ring.words[index] = word
        return ring

    @classmethod
    def attach(cls, fd: int, spec: RingSpec, *, locked: bool | None = None) -> Ring:
        """Attaches to an inherited descriptor.

        Raises:
            TransportError: too small, or its header is that of another ring.
        """
        ring = cls(spec, attach(fd, spec.size_bytes), locked)
        found, expected = ring.words[:6].tolist(), spec.header()
        if found != expected:
            ring.close()
            raise TransportError(f"descriptor {fd} holds another ring: header {found}, expected {expected}")
        return ring

    @property
    def fd(self) -> int:
        """Descriptor to hand to a child."""
        return self.block.fd

    def word(self, shard: int, field: int) -> int:
        """Index in ``words`` of a field of a shard's line."""
        return FIRST_SHARD_WORD + shard * LINE_WORDS + field

    def total_committed(self) -> int:
        """Rows inserted since the ring exists, all shards; also the clock of transition age."""
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
        """Starts the count of the limiter here and now, at the first update and after every restart."""
        self.words[_SAMPLED] = 0
        self.words[_BASELINE] = self.total_committed()

    def takeover(self, shard: int, pid: int) -> int:
        """Gives a shard to a new owner; call it only when the old one is dead and waited for.

        ``reserved`` stays as the dead writer left it: what it announced may be half overwritten.

        Returns:
            The shard's new epoch.
        """
        epoch = self.words[self.word(shard, _EPOCH)] + 1
        self.words[self.word(shard, _OWNER_PID)] = pid
        self.words[self.word(shard, _EPOCH)] = epoch
        return epoch

    def owner_pid(self, shard: int) -> int:
        """Process that writes a shard; 0 if nobody did yet."""
        return self.words[self.word(shard, _OWNER_PID)]

    def lock(self, first: int, last: int) -> None:
        """Waits for the locks of shards ``first..last`` against other processes; the kernel frees them on death."""
        if sys.platform == "win32":
            raise TransportError(f"processor {platform.machine()} needs file locks, which Windows lacks: use x86-64")
        import fcntl

        fcntl.lockf(self.fd, fcntl.LOCK_EX, last - first + 1, first)

    def unlock(self, first: int, last: int) -> None:
        """Gives back what ``lock`` took."""
        import fcntl

        fcntl.lockf(self.fd, fcntl.LOCK_UN, last - first + 1, first)

    @contextlib.contextmanager
    def shard_locks(self, first: int, last: int) -> Iterator[None]:
        """Holds the locks of shards ``first..last`` in a ring that needs them; nothing in others."""
        if not self.locked:
            yield
            return
        self.lock(first, last)
        try:
            yield
        finally:
            self.unlock(first, last)

    def close(self) -> None:
        """Drops the views and closes the descriptor; writers and readers of it must not be used any more."""
        if self.block.fd < 0:
            return
        del self.rows, self.frames, self.stamps, self.reserved, self.committed
        with contextlib.suppress(BufferError):
            self.words.release()
        self.block.close()


def row_checksum(row: np.ndarray, frame: np.ndarray, logical: int) -> int:
    """CRC-32 of a checked row ([W] float32) without its last column and of its frame ([F] uint8, F may be 0).

    The logical index is mixed in.
    """
    return zlib.crc32(row[:-1].data, zlib.crc32(frame.data, logical & 0xFFFFFFFF))


class ShardWriter:
    """Writes rows into one shard; there is one writer per shard at any time."""

    def __init__(self, ring: Ring, shard: int) -> None:
        spec, layout = ring.spec, ring.spec.layout
        if not 0 <= shard < spec.num_shards:
            raise TransportError(f"shard {shard} of a ring of {spec.num_shards} shards")
        self.ring, self.shard = ring, shard
        self._words = ring.words
        self._reserved_word, self._committed_word = ring.word(shard, _RESERVED), ring.word(shard, _COMMITTED)
        first = shard * spec.stride_rows
        rows = ring.rows[first : first + spec.rows_per_shard]
        self._rows = rows
        self._obs, self._action = rows[:, layout.obs], rows[:, layout.action]
        self._reward, self._terminated = rows[:, layout.reward], rows[:, layout.terminated]
        self._next_obs = rows[:, layout.next_obs]
        # One float at a time is faster through a memoryview; it takes a flat, contiguous piece of the memory.
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
        """Logical index of the row that is written next."""
        return self._committed

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
        """Appends N transitions; the arguments are cast to float32.

        Args:
            obs: [N, O].
            action: [N, A], in [-1, 1].
            reward: [N].
            terminated: [N], 1 where the MDP ended.
            next_obs: [N, O].
            num_steps: [N], only in rings with n-step returns or images.
            version: policy version that collected them.
            frames: the rest of the row, only in rings of images.

        Raises:
            ValueError: a shape that does not fit; nothing was published.
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
            if end > self._reserved:  # intent first; never lowered: a dead predecessor may have announced more
                self._words[self._reserved_word] = self._reserved = end
            if count == 1:  # the same as below, in fewer and cheaper NumPy calls
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
                self._write_frames(slice(position, stop), frames)
            if stop > self._stamp_position:
                self._stamp(position, stop, version)
            if self._checksum is not None:
                self._seal(position, stop)
            self._words[self._committed_word] = self._committed = end  # publication last
        finally:
            if self._locked:
                self.ring.unlock(self.shard, self.shard)
        if stop == self._capacity:
            stop = self._stamp_position = 0
        self._position = stop

    def _write_frames(self, at: slice, frames: FrameColumns | None) -> None:
        if frames is None:
            raise ValueError("this ring holds images: frames are missing")
        self._frames[at], self._links[at, 0], self._links[at, 1] = frames

    def _seal(self, position: int, stop: int) -> None:
        """Writes the checksums of the rows in [position, stop)."""
        assert self._checksum is not None
        shift = self._committed - position
        for row in range(position, stop):
            self._checksum[row] = row_checksum(self._rows[row], self._frames[row], row + shift)

    def _stamp(self, position: int, stop: int, version: int) -> None:
        """Stamps the blocks that begin in [position, stop): clock, policy version."""
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
        """Splits a write at the end of the shard and where it is longer than half a shard."""
        start, count = 0, len(reward)
        while start < count:
            stop = min(count, start + self._max_rows, start + self._capacity - self._position)
            part = slice(start, stop)
            steps = None if num_steps is None else num_steps[part]
            images = None if frames is None else FrameColumns(*(column[part] for column in frames))
            self.write(obs[part], action[part], reward[part], terminated[part], next_obs[part], steps, version, images)
            start = stop
