"""Converts env steps to replay rows in the sampler: n-step returns, and images with frames stored once.

With images, the row of an env step owns the newest frame of its ``next_obs`` (see ``RowLayout``); the reader follows
the rows back for the older ones. ``fill_with_synthetic_rows`` makes rows for measurements.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from spreeze.envs.action_spaces import uniform_actions
from spreeze.envs.scalars import FLOAT32_MAX
from spreeze.transport.replay_ring import FrameColumns, ReplayRing, ShardWriter
from spreeze.types import EnvSpec

_DRAWN_ROWS, _DRAWN_IMAGES = 4096, 2000  # of synthetic rows


class NStepBatch:
    """The n-step windows of N environments stepped together (Sutton and Barto 2018, section 7.1).

    Within an episode each step finishes the transition that started ``n`` steps ago. At the episode's end the remaining
    ones are finished early, with the steps that they have: none reaches past it. The last n steps lie in slots written
    in turn; rows come by environment, then oldest first.
    """

    def __init__(self, n: int, gamma: float, num_envs: int, obs_dim: int, action_dim: int) -> None:
        self._n, self._gamma, self._slot = n, gamma, 0
        self._obs = np.zeros((n, num_envs, obs_dim), np.float32)
        self._action = np.zeros((n, num_envs, action_dim), np.float32)
        self._reward = np.zeros((n, num_envs))
        self._returns = np.zeros((n, num_envs))  # Discounted reward sums by age in steps.
        self._length = np.zeros(num_envs, np.int64)  # Steps of an environment whose transitions are not finished.
        self._envs = np.arange(num_envs)

    def push(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        next_obs: np.ndarray,
        *,
        ended: np.ndarray,
        lost: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        """Adds one env step of each [N, ...]; returns the transitions that it finished, R of them.

        They are the columns obs [R, O], action [R, A], reward, terminated, next_obs and num_steps of
        ``ShardWriter.write``. Where ``lost`` [N], there was no step, and unfinished transitions are dropped. ``ended``
        [N]: terminated or truncated.
        """
        slot, returns = self._slot, self._returns
        self._obs[slot], self._action[slot], self._reward[slot] = obs, action, reward
        returns[0] = reward
        for age in range(1, self._n):
            np.multiply(returns[age - 1], self._gamma, out=returns[age])
            returns[age] += self._reward[slot - age]
        self._length += 1
        self._length[lost] = 0
        finished = np.where(ended, self._length, self._length == self._n)
        envs = np.repeat(self._envs, finished)
        first = np.cumsum(finished) - finished
        ages = self._length[envs] - 1 - (np.arange(len(envs)) - first[envs])
        slots = slot - ages
        sums = np.minimum(np.maximum(returns[ages, envs], -FLOAT32_MAX), FLOAT32_MAX).astype(np.float32)
        obs, action, steps = self._obs[slots, envs], self._action[slots, envs], (ages + 1).astype(np.float32)
        rows = obs, action, sums, terminated[envs], next_obs[envs], steps
        self._length[ended] = 0
        np.minimum(self._length, self._n - 1, out=self._length)
        self._slot = (slot + 1) % self._n
        return rows


class _Entry(NamedTuple):
    frame: np.ndarray  # [F]
    back: int
    age: int
    action: np.ndarray | None = None  # [A] with which the transition began; None: only a frame that later rows need
    reward: float = 0.0  # sum of gamma^i r_i, i = 0 .. num_steps - 1
    terminated: bool = False  # the MDP ended at its last step
    num_steps: int = 0


class FrameLog:
    """Turns the steps of N environments into rows of one writer.

    The frame of a reset waits for the first step, to be published with it. With n-step returns, as of ``NStepBatch``, a
    row holds the transition that ends with its frame; shorter ones at an episode's end follow in rows with the same
    frame.
    """

    def __init__(self, writer: ShardWriter, num_envs: int, n_step: int, gamma: float) -> None:
        self._writer, self._layout, self._n_step, self._gamma = writer, writer.layout, n_step, gamma
        self._windows = [deque[tuple[np.ndarray, float]]() for _ in range(num_envs)]
        """Action and reward of the steps whose transitions are not finished."""
        self._first: list[np.ndarray | None] = [None] * num_envs
        self._last = [0] * num_envs
        self._age = [0] * num_envs
        self._entries: list[_Entry] = []

    def start(self, index: int, frame: np.ndarray) -> None:
        """Starts an episode of environment ``index`` with ``frame`` [F] uint8 (copied)."""
        self._windows[index].clear()
        self._first[index] = np.array(frame)
        self._age[index] = 0

    def add(
        self, index: int, action: np.ndarray, reward: float, terminated: bool, truncated: bool, frame: np.ndarray
    ) -> None:
        """Adds a step of environment ``index`` that led to ``frame`` [F], which must not change until ``flush``."""
        entries = self._entries
        first = self._first[index]
        if first is not None:
            self._last[index] = self._writer.next_logical + len(entries)
            entries.append(_Entry(first, 0, 0))
            self._first[index] = None
        self._windows[index].append((np.array(action), reward))
        finished = self._finished(self._windows[index], ended=terminated or truncated)
        self._age[index] = age = min(self._age[index] + 1, self._layout.depth)
        previous = self._last[index]
        self._last[index] = self._writer.next_logical + len(entries)
        for first_action, total, num_steps in finished or [(None, 0.0, 0)]:
            back = self._writer.next_logical + len(entries) - previous
            entries.append(_Entry(frame, back, age, first_action, total, terminated, num_steps))

    def _finished(
        self, window: deque[tuple[np.ndarray, float]], *, ended: bool
    ) -> list[tuple[np.ndarray | None, float, int]]:
        """First action, reward and steps of the transitions that the latest step finished, oldest first."""
        count = len(window) if ended else int(len(window) == self._n_step)
        if not count:
            return []
        returns, total = [], 0.0  # of the latest step, the latest two and so on
        for _, reward in reversed(window):
            total = reward + self._gamma * total
            returns.append(min(max(total, -FLOAT32_MAX), FLOAT32_MAX))
        left = range(len(window) - 1, len(window) - 1 - count, -1)
        return [(window.popleft()[0], returns[after], after + 1) for after in left]

    def flush(self, version: int) -> None:
        """Writes all steps added, which policy ``version`` collected."""
        entries, layout = self._entries, self._layout
        if not entries:
            return
        count = len(entries)
        values = np.zeros((4, count), np.float32)  # reward, terminated, num_steps, age
        action = np.zeros((count, layout.action_dim), np.float32)
        frames, backs = np.empty((count, layout.frame_bytes), np.uint8), np.empty(count, np.int64)
        for row, entry in enumerate(entries):
            frames[row], backs[row] = entry.frame, entry.back
            values[:, row] = entry.reward, entry.terminated, entry.num_steps, entry.age
            if entry.action is not None:
                action[row] = entry.action
        no_obs, columns = np.empty((count, 0), np.float32), FrameColumns(frames, backs, values[3])
        self._writer.write(no_obs, action, values[0], values[1], no_obs, values[2], version, columns)
        entries.clear()


def fill_with_synthetic_rows(ring: ReplayRing, spec: EnvSpec) -> None:
    """Fills every shard with normal observations and uniform actions for measurements; call before any other write."""
    layout, rng, capacity = ring.spec.layout, np.random.default_rng(0), ring.spec.rows_per_shard
    writers = [ShardWriter(ring, shard) for shard in range(ring.spec.num_shards)]
    if spec.frames is not None:
        for writer in writers:
            _write_synthetic_frames(writer, min(_DRAWN_IMAGES, capacity), spec, rng)
        return
    count = min(capacity, -(-_DRAWN_ROWS // layout.env_steps_per_row))
    rows = rng.standard_normal((count, layout.width), np.float32)
    if layout.sequence is not None:
        batch = layout.split_sequences(rows, 1.0)
        batch.action[...] = uniform_actions(spec, batch.action[..., 0].size, rng).reshape(batch.action.shape)
        batch.terminated[...], batch.valid[...], batch.begins[...] = 0.0, 1.0, 0.0
    else:
        rows[:, layout.action], rows[:, layout.terminated] = uniform_actions(spec, count, rng), 0.0
        if layout.num_steps is not None:
            rows[:, layout.num_steps] = 1.0
        for part in (layout.obs, layout.next_obs):
            rows[:, part][:, layout.obs_dim - spec.mask_dim :] = 1.0  # all actions are allowed
    for writer in writers:
        for begin in range(0, capacity, count):
            writer.write_packed(rows[: capacity - begin])


def _write_synthetic_frames(writer: ShardWriter, count: int, spec: EnvSpec, rng: np.random.Generator) -> None:
    layout = writer.layout
    log = FrameLog(writer, 1, layout.n_step, 0.99)
    frames = rng.integers(256, size=(16, layout.frame_bytes), dtype=np.uint8)
    frames[:, layout.normalized_columns] = np.ones((16, spec.vector_dim), np.float32).view(np.uint8)
    log.start(0, frames[0])
    for step, action in enumerate(uniform_actions(spec, count - 1, rng)):
        log.add(0, action, 0.0, False, False, frames[step % len(frames)])
        log.flush(0)
