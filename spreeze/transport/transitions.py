"""Converts env steps to replay rows in the sampler: n-step returns, and images with frames stored once.

With images, the row of an env step owns the newest frame of its ``next_obs`` (see ``RowLayout``); the reader follows
the rows back for the older ones. ``fill_with_synthetic_rows`` makes rows for measurements.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from spreeze.envs.action_spaces import uniform_actions
from spreeze.transport.replay_ring import FrameColumns, ReplayRing, ShardWriter
from spreeze.types import EnvSpec

_DRAWN_ROWS, _DRAWN_IMAGES = 4096, 2000  # of synthetic rows
_MAX = float(np.finfo(np.float32).max)
"""Largest sum of rewards that can be stored; rewards are no larger, but several of them may be."""


_NO_OBS = np.empty(0, np.float32)


class NStepTransition(NamedTuple):
    """A transition that spans ``num_steps`` env steps."""

    obs: np.ndarray  # [O]
    action: np.ndarray  # [A]
    reward: float  # sum of gamma^i r_i, i = 0 .. num_steps - 1
    terminated: bool  # the MDP ended at its last step
    next_obs: np.ndarray  # [O]: after its last step
    num_steps: int


class NStep:
    """The n-step window of one environment (Sutton and Barto 2018, section 7.1).

    Within an episode each step finishes the transition that started ``n`` steps ago. At the episode's end the remaining
    ones are finished early, with the steps that they have: none reaches past it.
    """

    def __init__(self, n: int, gamma: float) -> None:
        self.n, self.gamma = n, gamma
        self._window: deque[tuple[np.ndarray, np.ndarray, float]] = deque(maxlen=n)

    def push(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: float,
        terminated: bool,
        truncated: bool,
        next_obs: np.ndarray,
    ) -> list[NStepTransition]:
        """Adds one env step (arrays are copied); returns the transitions that it finished, oldest first."""
        self._window.append((np.array(obs), np.array(action), reward))
        length = len(self._window)
        finished = length if terminated or truncated else int(length == self.n)
        if not finished:
            return []
        returns, total = [0.0] * length, 0.0
        for index in range(length - 1, -1, -1):
            total = self._window[index][2] + self.gamma * total
            returns[index] = min(max(total, -_MAX), _MAX)
        after, rows = np.array(next_obs), []
        for index in range(finished):
            start, first_action, _ = self._window.popleft()
            rows.append(NStepTransition(start, first_action, returns[index], terminated, after, length - index))
        return rows

    def clear(self) -> None:
        """Drops the unfinished transitions, when their environment was replaced."""
        self._window.clear()


class NStepBatch:
    """The windows of N environments stepped together: the transitions of N ``NStep``, in a few NumPy calls.

    The last n steps lie in slots written in turn; rows come by environment, then oldest first.
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
        sums = np.minimum(np.maximum(returns[ages, envs], -_MAX), _MAX).astype(np.float32)
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
    transition: NStepTransition | None  # None: only a frame that later rows need


class FrameLog:
    """Turns the steps of N environments into rows of one writer.

    The frame of a reset waits for the first step, to be published with it. With n-step returns a row holds the
    transition that ends with its frame; shorter ones at an episode's end follow in rows with the same frame.
    """

    def __init__(self, writer: ShardWriter, num_envs: int, n_step: int, gamma: float) -> None:
        self._writer, self._layout = writer, writer.layout
        self._n_steps = [NStep(n_step, gamma) for _ in range(num_envs)]
        self._first: list[np.ndarray | None] = [None] * num_envs
        self._last = [0] * num_envs
        self._age = [0] * num_envs
        self._entries: list[_Entry] = []

    def start(self, index: int, frame: np.ndarray) -> None:
        """Starts an episode of environment ``index`` with ``frame`` [F] uint8 (copied)."""
        self._n_steps[index].clear()
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
            entries.append(_Entry(first, 0, 0, None))
            self._first[index] = None
        finished = self._n_steps[index].push(_NO_OBS, action, reward, terminated, truncated, _NO_OBS)
        self._age[index] = age = min(self._age[index] + 1, self._layout.depth)
        previous = self._last[index]
        self._last[index] = self._writer.next_logical + len(entries)
        for number in range(max(1, len(finished))):
            back = self._writer.next_logical + len(entries) - previous
            entries.append(_Entry(frame, back, age, finished[number] if finished else None))

    def flush(self, version: int) -> None:
        """Writes all steps added, which policy ``version`` collected."""
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
