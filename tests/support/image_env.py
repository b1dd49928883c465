"""Environments that observe images: what a test needs to know is in the pixels. ``--import image_env``."""

from typing import ClassVar

import gymnasium
import numpy as np


class Counter(gymnasium.Env):
    """Shows the number of the step as brightness; ends after 5 steps, truncated if asked."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode=None, height=40, width=48, channels=3, continuous=False, truncates=False):
        self.render_mode, self._truncates = render_mode, truncates
        shape = (height, width, channels) if channels else (height, width)
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gymnasium.spaces.Box(-1, 1, (1,)) if continuous else gymnasium.spaces.Discrete(3)
        self._steps = 0

    def _obs(self):
        return np.full(self.observation_space.shape, 10 * self._steps, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._obs(), {}

    def step(self, action):
        self._steps += 1
        over = self._steps == 5
        return self._obs(), float(action), over and not self._truncates, over and self._truncates, {}

    def render(self):
        return np.zeros((32, 32, 3), np.uint8)


gymnasium.register("test/Counter-v0", Counter)
gymnasium.register("test/Truncated-v0", Counter, kwargs={"truncates": True})
gymnasium.register("test/Steering-v0", Counter, kwargs={"continuous": True})
gymnasium.register("test/FourChannels-v0", Counter, kwargs={"channels": 4})
gymnasium.register("test/Flat-v0", Counter, kwargs={"channels": 0})
