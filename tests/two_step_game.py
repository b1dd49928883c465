"""The two-step game of Rashid et al. 2018 (table 2) as a parallel environment in PettingZoo's form."""

import gymnasium
import numpy as np

PAYOFF = {1: [[7.0, 7.0], [7.0, 7.0]], 2: [[0.0, 1.0], [1.0, 8.0]]}
"""Of the team, by state (2A, 2B) and both actions; in state 0 the first agent alone chooses the next one."""


class TwoStepGame:
    metadata = {"name": "two_step_game", "render_modes": []}  # noqa: RUF012
    possible_agents = ("first", "second")
    state_space = gymnasium.spaces.Box(0.0, 1.0, (3,), np.float32)

    def observation_space(self, agent):
        return gymnasium.spaces.Box(0.0, 2.0, (1,), np.float32)

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.now = list(self.possible_agents), 0
        return self._observations(), {agent: {} for agent in self.agents}

    def state(self):
        return np.eye(3, dtype=np.float32)[self.now]

    def _observations(self):
        return {agent: np.array([self.now], np.float32) for agent in self.possible_agents}

    def step(self, actions):
        over, reward = self.now > 0, 0.0
        if over:
            reward = PAYOFF[self.now][actions["first"]][actions["second"]]
        else:
            self.now = 1 + actions["first"]
        given = self.agents
        self.agents = [] if over else self.agents
        return (self._observations(), dict.fromkeys(given, reward / 2), dict.fromkeys(given, over),
                dict.fromkeys(given, False), {agent: {} for agent in given})

    def close(self):
        pass


def parallel_env():
    return TwoStepGame()
