"""Transitions of images: each frame is stored once, and a draw follows its environment's rows back.

The row of an env step owns the newest frame of its ``next_obs`` (see ``RowLayout``). All that a
transition needs lies in rows that the same writer committed before it, so the ring's own rule holds
for the whole of it: a draw is good if, after the copy, its oldest row was not about to be overwritten.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spreeze.errors import TransportError
from spreeze.transport.n_step import NStep, NStepTransition
from spreeze.transport.replay_reader import Drawn, ReplayReader
from spreeze.transport.replay_ring import FrameColumns, ReplayRing, ShardWriter

_MAX_TRIES = 10_000


class _Entry(NamedTuple):
    """One row to write."""

    frame: np.ndarray  # [F]
    back: int
    age: int
    transition: NStepTransition | None  # None: a frame that later rows need, nothing to draw


class FrameLog:
    """Turns the steps of N environments into rows of one shard.

    The frame of a reset waits for the first step, so that the two are published together. With n-step
    returns a row holds the transition that ends with its frame; the shorter ones at the end of an
    episode follow in rows of their own with the same frame.
    """

    def __init__(self, writer: ShardWriter, num_envs: int, n_step: int, gamma: float) -> None:
        self._writer = writer
        self._layout = writer.ring.spec.layout
        self._n_steps = [NStep(n_step, gamma) for _ in range(num_envs)]
        self._first: list[np.ndarray | None] = [None] * num_envs
        self._last = [0] * num_envs
        self._age = [0] * num_envs
        self._entries: list[_Entry] = []
        self._nothing = np.zeros((4 * num_envs, 0), np.float32)

    def start(self, index: int, frame: np.ndarray) -> None:
        """An episode of environment ``index`` begins with ``frame`` [F] uint8 (copied)."""
        self._n_steps[index].clear()
        self._first[index] = np.array(frame)
        self._age[index] = 0

    def add(
        self, index: int, action: np.ndarray, reward: float, terminated: bool, truncated: bool, frame: np.ndarray
    ) -> None:
        """One step of environment ``index``: ``action`` [A], and the ``frame`` [F] that it led to.

        The frame must stay as it is until ``flush``.
        """
        entries = self._entries
        first = self._first[index]
        if first is not None:
            self._last[index] = self._writer.next_logical + len(entries)
            entries.append(_Entry(first, 0, 0, None))
            self._first[index] = None
        nothing = self._nothing[0]
        finished = self._n_steps[index].push(nothing, action, reward, terminated, truncated, nothing)
        self._age[index] = age = min(self._age[index] + 1, self._layout.depth)
        previous = self._last[index]
        self._last[index] = self._writer.next_logical + len(entries)
        for place in range(max(1, len(finished))):
            back = self._writer.next_logical + len(entries) - previous
            entries.append(_Entry(frame, back, age, finished[place] if finished else None))

    def flush(self, version: int) -> None:
        """Writes all that was added, collected by policy ``version``."""
        entries, layout = self._entries, self._layout
        if not entries:
            return
        count = len(entries)
        values = np.zeros((4, count), np.float32)  # reward, terminated, num_steps, age
        action = np.zeros((count, layout.action_dim), np.float32)
        frames, backs = np.empty((count, layout.frame_bytes), np.uint8), np.empty(count, np.int64)
        for row, (frame, back, age, transition) in enumerate(entries):
            frames[row], backs[row], values[3, row] = frame, back, age
            if transition is not None:
                action[row] = transition.action
                values[:3, row] = transition.reward, transition.terminated, transition.num_steps
        if count > len(self._nothing):
            self._nothing = np.zeros((2 * count, 0), np.float32)
        empty = self._nothing[:count]
        self._writer.write(empty, action, values[0], values[1], empty, values[2], version,
                           FrameColumns(frames, backs, values[3]))
        entries.clear()


def open_reader(ring: ReplayRing) -> ReplayReader:
    """The reader that a ring's rows need."""
    return FrameReader(ring) if ring.spec.layout.frame_bytes else ReplayReader(ring)


class _Found(NamedTuple):
    """What one pass of draws gave."""

    bad: np.ndarray  # positions of the draws that must be repeated
    overwritten: int  # how many of them because a writer may have been in their rows


class FrameReader(ReplayReader):
    """Draws whole image transitions."""

    def sample_frames(self, rng: np.random.Generator, rows: np.ndarray, frames: np.ndarray) -> int:
        """Fills ``rows`` [B, W] float32 and ``frames`` [B, T, F] uint8 (see ``RowLayout.split_frames``).

        Uniform over the transitions whose frames are all still there, with replacement.

        Returns:
            How many transitions were drawn again because a writer may have been in their rows.

        Raises:
            TransportError: nothing can be drawn.
        """
        self.refresh()
        drawn = self._draw(rng, len(rows))
        bad, redrawn = self._gather(drawn, rows, frames)
        for _ in range(_MAX_TRIES):
            if not bad.size:
                self._drawn = drawn
                self.redrawn += redrawn
                return redrawn
            self.refresh()
            again = self._draw(rng, bad.size)
            some_rows, some_frames = np.empty_like(rows[: bad.size]), np.empty_like(frames[: bad.size])
            found = self._gather(again, some_rows, some_frames)
            rows[bad], frames[bad] = some_rows, some_frames
            drawn.logical[bad], drawn.row[bad] = again.logical, again.row
            if drawn.shard is not None:
                drawn.shard[bad] = again.shard
            bad, redrawn = bad[found.bad], redrawn + found.overwritten
        raise TransportError("no whole image transition can be drawn: raise the replay capacity")

    def _gather(self, drawn: Drawn, rows: np.ndarray, frames: np.ndarray) -> _Found:
        """Copies the transitions at ``drawn``, then finds those that are none or may have been overwritten."""
        ring, layout = self.ring, self.ring.spec.layout
        assert layout.num_steps is not None
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
        return _Found(bad, int(np.count_nonzero(overwritten)))

    def _chain(self, drawn: Drawn, age: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows [n, depth + 1] in ``ring.rows``, newest first, and the lowest logical index of each draw.

        The first frame of an episode is repeated for what would lie before it. A link that is overwritten
        while it is read may hold anything; its row is then below the floor, and so is the draw.
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
        """Which of a chain's rows give the T frames [n, T]: obs, then next_obs, each oldest first."""
        layout = self.ring.spec.layout
        stack = layout.stack
        if layout.n_step == 1:
            return np.broadcast_to(np.arange(stack, -1, -1), (len(steps), stack + 1))
        ages = np.arange(stack - 1, -1, -1)
        return np.concatenate([steps[:, None] + ages, np.broadcast_to(ages, (len(steps), stack))], axis=1)
