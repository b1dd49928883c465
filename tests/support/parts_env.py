"""Tasks whose actions have parts that must agree: a tool, two dials and a push that the observation asks for.

``tests/Parts-v0`` takes them as a nested ``Dict``; with ``kind=flat`` one ``Discrete`` numbers all combinations, where
the push has ``LEVELS`` values an axis. ``tests/Hybrid-v0`` has one tool and one push. For runs with
``--import tests/support/parts_env.py``.
"""

import gymnasium
import numpy as np
from gymnasium import spaces

TOOLS, DIALS, AXES, LEVELS, STEPS = 4, (3, 4), 2, 5, 10


class Parts(gymnasium.Env):
    """Observes the wanted tool, dials and push; reward ``1 - distance of the push`` where all choices
    are right, else 0.

    ``masked`` allows the wanted options and about half of the others; a forbidden one raises.
    """

    def __init__(self, kind="nested", masked=False):
        self.flat, self.masked = kind == "flat", masked
        self.action_space = (
            spaces.Discrete(TOOLS * int(np.prod(DIALS)) * LEVELS**AXES)
            if self.flat
            else spaces.Dict(
                {
                    "tool": spaces.Discrete(TOOLS, start=1),
                    "hand": spaces.Tuple((spaces.Box(-2.0, 2.0, (AXES,), np.float64), spaces.MultiDiscrete(DIALS))),
                }
            )
        )
        self.counts = np.array([TOOLS, *DIALS])
        self.observation_space = spaces.Box(-1.0, 1.0, (int(self.counts.sum()) + AXES,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._next()

    def step(self, action):
        assert self.action_space.contains(action), repr(action)
        if self.flat:
            *chosen, row, column = np.unravel_index(action, (TOOLS, *DIALS, *(LEVELS,) * AXES))
            push = np.array([row, column]) * 2.0 / (LEVELS - 1) - 1.0
        else:
            push, dials = action["hand"]
            chosen, push = [action["tool"] - 1, *dials], push / 2.0
        flags = np.split(self.mask, np.cumsum(self.counts)[:-1])
        assert all(own[index] for own, index in zip(flags, chosen, strict=True)), f"{action} is forbidden"
        near = max(0.0, 1.0 - float(np.abs(push - self.push).max()))
        reward = near * np.array_equal(chosen, self.wanted)
        self.steps += 1
        obs, info = self._next()
        return obs, reward, False, self.steps == STEPS, info

    def _next(self):
        self.wanted, self.push = self.np_random.integers(self.counts), self.np_random.uniform(-0.9, 0.9, AXES)
        ones = np.concatenate([np.eye(count)[one] for count, one in zip(self.counts, self.wanted, strict=True)])
        self.mask = (ones > 0.0) | (self.np_random.random(len(ones)) < (0.5 if self.masked else 1.0))
        return np.concatenate((ones, self.push)).astype(np.float32), self._info()

    def _info(self):
        if not self.masked:
            return {}
        tool, *dials = np.split(self.mask.astype(np.int8), np.cumsum(self.counts)[:-1])
        return {"action_mask": {"tool": tool, "hand": (None, tuple(dials))}}


class Hybrid(gymnasium.Env):
    """A ball on a line, pushed by one of two tools: one only moves it right, the other only left, as far as it is told.

    The reward is minus the distance to a goal, less where the push is gentle; an episode is 20 steps.
    """

    action_space = spaces.Tuple((spaces.Discrete(3), spaces.Box(0.0, 1.0, (1,), np.float32)))
    observation_space = spaces.Box(-4.0, 4.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.goal = self.np_random.uniform(-2.0, 2.0, 2)
        self.steps = 0
        return self._obs(), {}

    def step(self, action):
        assert self.action_space.contains(action), repr(action)
        tool, (push,) = action
        self.place = float(np.clip(self.place + (0.0, 1.0, -1.0)[tool] * push, -4.0, 4.0))
        self.steps += 1
        reward = -abs(self.place - self.goal) - 0.1 * (tool != 0)
        return self._obs(), reward, False, self.steps == 20, {}

    def _obs(self):
        return np.array([self.place, self.goal], np.float32)


gymnasium.register("tests/Parts-v0", Parts)
gymnasium.register("tests/Hybrid-v0", Hybrid)
