"""A chain with its reward at the far end, which random actions seldom reach."""

import gymnasium
import numpy as np


class Chain(gymnasium.Env):
    """``length`` cells in a row, of which the last ends the episode with a reward of 1 (after Osband et al. 2016).

    Two actions go one cell left or right; which is which differs from cell to cell, so that nothing can be generalized.
    Episodes begin in the first cell, where each step that stays there gives 0.001, and are truncated after
    three steps a cell. An observation is the cell as a one-hot. Of 20 cells random actions reach the end in one episode
    of forty.
    """

    def __init__(self, length=20):
        self._length = length
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._right = np.random.default_rng(0).integers(0, 2, length)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._cell, self._steps = 0, 0
        return self._observation(), {}

    def step(self, action):
        before, self._steps = self._cell, self._steps + 1
        self._cell = max(0, before + (1 if action == self._right[before] else -1))
        over = self._cell == self._length - 1
        reward = 1.0 if over else 0.001 if self._cell == before else 0.0
        return self._observation(), reward, over, not over and self._steps >= 3 * self._length, {}

    def _observation(self):
        return (np.arange(self._length) == self._cell).astype(np.float32)


gymnasium.register("Chain-v0", Chain, reward_threshold=0.99)
