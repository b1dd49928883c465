"""The n-step window of one environment, step by step: what the writers of rows are compared with."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

_MAX = float(np.finfo(np.float32).max)


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
