"""n-step returns at the sampler: rewards are summed before a transition is stored. No torch here."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np


class NStepTransition(NamedTuple):
    """A transition that spans ``num_steps`` env steps."""

    obs: np.ndarray  # [O]
    action: np.ndarray  # [A]
    reward: float  # sum of gamma^i r_i, i = 0 .. num_steps - 1
    terminated: bool  # the MDP ended at its last step
    next_obs: np.ndarray  # [O]: after its last step
    num_steps: int


class NStep:
    """The window of one environment (Sutton and Barto 2018, section 7.1).

    In mid-episode each step finishes the transition that began ``n`` steps ago. At the end of an
    episode, by either cause, the remaining ones are finished early, with the steps they have;
    nothing ever reaches over the end.
    """

    def __init__(self, n: int, gamma: float) -> None:
        self.n = n
        self.gamma = gamma
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
        """Takes in one env step (arrays are copied); returns the transitions that it finished, oldest first."""
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
        """Forgets the unfinished transitions (their environment was replaced)."""
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
