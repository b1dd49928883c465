"""An environment in which every policy of a process is poor at first, good for a while, and poor forever after."""

import gymnasium
import numpy as np

GOOD = range(20, 70)
"""Numbers of the good episodes."""


class Falling(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    begun = 0
    """Episodes of all environments of this process."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps, self._reward = 0, 10.0 if Falling.begun in GOOD else 0.0
        Falling.begun += 1
        return self.observation_space.sample(), {}

    def step(self, action):
        self._steps += 1
        return self.observation_space.sample(), self._reward, False, self._steps >= 5, {}
