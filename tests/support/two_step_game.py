"""The two-step game of Rashid et al. 2018 (arXiv 1803.11485, table 2) as a parallel environment in PettingZoo's form.

::

    python -m spreeze.train --env parallel:two_step_game --import two_step_game
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np

PAYOFF = {1: [[7.0, 7.0], [7.0, 7.0]], 2: [[0.0, 1.0], [1.0, 8.0]]}
"""Reward of the team, by state (2A, 2B) and both actions; in state 0 the first agent alone chooses the next one."""


class TwoStepGame:
    """An agent observes the state's number [1]; the team's state is its one-hot [3]."""

    metadata: ClassVar[dict[str, Any]] = {"name": "two_step_game", "render_modes": []}
    possible_agents: tuple[str, ...] = ("first", "second")
    state_space = gymnasium.spaces.Box(0.0, 1.0, (3,), np.float32)
    agents: list[str]
    _now: int

    def observation_space(self, agent: str) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(0.0, 2.0, (1,), np.float32)

    def action_space(self, agent: str) -> gymnasium.spaces.Discrete:
        return gymnasium.spaces.Discrete(2)

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self.agents, self._now = list(self.possible_agents), 0
        return self._observations(), {agent: {} for agent in self.agents}

    def state(self) -> np.ndarray:
        return np.asarray(np.eye(3)[self._now], np.float32)

    def _observations(self) -> dict[str, np.ndarray]:
        return {agent: np.array([self._now], np.float32) for agent in self.possible_agents}

    def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:
        over, reward = self._now > 0, 0.0
        if over:
            reward = PAYOFF[self._now][actions["first"]][actions["second"]]
        else:
            self._now = 1 + int(actions["first"])
        given = self.agents
        self.agents = [] if over else self.agents
        return (
            self._observations(),
            dict.fromkeys(given, reward / 2),
            dict.fromkeys(given, over),
            dict.fromkeys(given, False),
            {agent: {} for agent in given},
        )

    def close(self) -> None:
        pass


def parallel_env() -> TwoStepGame:
    return TwoStepGame()
