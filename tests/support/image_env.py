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


class Parts(Counter):
    """Two images, nested, beside the number of the step; with ``masked`` only one action at a time is allowed."""

    def __init__(self, render_mode=None, masked=False, **given):
        super().__init__(render_mode, **given)
        self._masked = masked
        front = gymnasium.spaces.Box(0, 255, (3, 50, 37), np.uint8)
        self._eye = self.observation_space
        self.observation_space = gymnasium.spaces.Dict(
            {
                "place": gymnasium.spaces.Box(-100.0, 100.0, (2,), np.float32),
                "eyes": gymnasium.spaces.Tuple([self._eye, front]),
                "turn": gymnasium.spaces.Discrete(2),
            }
        )

    def _obs(self):
        eye, front = np.full(self._eye.shape, 10 * self._steps, np.uint8), np.full((3, 50, 37), self._steps, np.uint8)
        place = np.array([self._steps, -0.5 * self._steps], np.float32)
        return {"place": place, "eyes": (eye, front), "turn": self._steps % 2}

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], self._info()

    def step(self, action):
        assert not self._masked or self._info()["action_mask"][action]
        return *super().step(action)[:4], self._info()

    def _info(self):
        return {"action_mask": np.arange(3) == self._steps % 3} if self._masked else {}


gymnasium.register("test/Counter-v0", Counter)
gymnasium.register("test/Parts-v0", Parts)
gymnasium.register("test/Truncated-v0", Counter, kwargs={"truncates": True})
gymnasium.register("test/Steering-v0", Counter, kwargs={"continuous": True})
gymnasium.register("test/FourChannels-v0", Counter, kwargs={"channels": 4})
gymnasium.register("test/Flat-v0", Counter, kwargs={"channels": 0})
