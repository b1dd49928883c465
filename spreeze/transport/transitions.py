"""From env steps to replay rows, in the sampler: n-step returns, and images whose frames are stored once.

Rewards are summed before a transition is stored. With images, the row of an env step owns the newest frame of its
``next_obs`` (see ``RowLayout``); the reader follows the rows back for the older ones.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from spreeze.transport.protocols import FrameColumns, TransitionSink


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

    Within an episode each step finishes the transition that began ``n`` steps ago. When the episode terminates or is
    truncated, the remaining ones are finished early with the steps that they have: none reaches past the end.
    """

    def __init__(self, n: int, gamma: float) -> None:
        self.n = n
        self.gamma = gamma
        self._window: deque[tuple[np.ndarray, np.ndarray, float]] = deque(maxlen=n)

    def push(
        self, obs: np.ndarray, action: np.ndarray, reward: float, terminated: bool, truncated: bool,
        next_obs: np.ndarray,
    ) -> list[NStepTransition]:
        """Adds one env step (arrays are copied); returns the transitions that it finished, oldest first."""
        self._window.append((np.array(obs), np.array(action), reward))
        ended = terminated or truncated
        finished = len(self._window) if ended else int(len(self._window) == self.n)
        if not finished:
            return []
        rows = self._finish(finished, terminated, np.array(next_obs))
        for _ in range(finished):
            self._window.popleft()
        return rows

    def clear(self) -> None:
        """Drops the unfinished transitions, when their environment was replaced."""
        self._window.clear()

    def _finish(self, count: int, terminated: bool, next_obs: np.ndarray) -> list[NStepTransition]:
        """The oldest ``count`` transitions, each with all rewards up to now."""
        returns: list[float] = []
        total = 0.0
        for _, _, reward in reversed(self._window):
            total = reward + self.gamma * total
            returns.append(total)
        returns.reverse()
        length = len(self._window)
        return [
            NStepTransition(obs, action, returns[index], terminated, next_obs, length - index)
            for index, (obs, action, _) in zip(range(count), self._window, strict=False)
        ]


class _Entry(NamedTuple):
    frame: np.ndarray  # [F]
    back: int
    age: int
    transition: NStepTransition | None  # None: only a frame that later rows need


class FrameLog:
    """Turns the steps of N environments into rows of one sink.

    The frame of a reset waits for the first step, so that both are published together. With n-step returns a row holds
    the transition that ends with its frame; the shorter ones at the end of an episode follow in rows of their own with
    the same frame.
    """

    def __init__(self, sink: TransitionSink, num_envs: int, n_step: int, gamma: float) -> None:
        self._sink = sink
        self._layout = sink.layout
        self._n_steps = [NStep(n_step, gamma) for _ in range(num_envs)]
        self._first: list[np.ndarray | None] = [None] * num_envs
        self._last = [0] * num_envs
        self._age = [0] * num_envs
        self._entries: list[_Entry] = []
        self._nothing = np.zeros((4 * num_envs, 0), np.float32)

    def start(self, index: int, frame: np.ndarray) -> None:
        """Begins an episode of environment ``index`` with ``frame`` [F] uint8 (copied)."""
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
            self._last[index] = self._sink.next_logical + len(entries)
            entries.append(_Entry(first, 0, 0, None))
            self._first[index] = None
        nothing = self._nothing[0]
        finished = self._n_steps[index].push(nothing, action, reward, terminated, truncated, nothing)
        self._age[index] = age = min(self._age[index] + 1, self._layout.depth)
        previous = self._last[index]
        self._last[index] = self._sink.next_logical + len(entries)
        for place in range(max(1, len(finished))):
            back = self._sink.next_logical + len(entries) - previous
            entries.append(_Entry(frame, back, age, finished[place] if finished else None))

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
        if count > len(self._nothing):
            self._nothing = np.zeros((2 * count, 0), np.float32)
        empty = self._nothing[:count]
        self._sink.write(empty, action, values[0], values[1], empty, values[2], version,
                           FrameColumns(frames, backs, values[3]))
        entries.clear()
