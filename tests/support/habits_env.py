"""Environments with the habits that real ones have, one constructor argument each. ``--import habits_env``."""

import math
from typing import ClassVar

import gymnasium
import numpy as np

S = gymnasium.spaces
EYE = S.Box(0, 255, (40, 52, 3), np.uint8)


class Habits(gymnasium.Env):
    """Observes a random digit in two ways; reward 1 for the action that names it.

    ``sees`` is what it observes, ``drawn`` asks for a render_mode at ``init`` or in ``reset``, ``mask`` says where it
    gives one, ``spike`` is the reward of each tenth step.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, render_mode=None, sees="vector", drawn="", mask="", spike=0.0, paints="uint8"):
        if drawn == "init" and render_mode != "rgb_array":
            raise AssertionError
        self.render_mode, self.sees, self.drawn, self.mask, self.spike = render_mode, sees, drawn, mask, spike
        self.paints, self.steps, self.digit = paints, 0, 0
        self.action_space = S.Discrete(3)
        self.observation_space = {
            "vector": S.Box(-1, 1, (3,), np.float32), "eye": S.Dict({"eye": EYE}), "plain": EYE,
            "first": S.Box(0, 255, (3, 40, 52), np.uint8), "floats": S.Box(0.0, 1.0, (40, 52, 3), np.float64),
            "tuple": S.Tuple((S.Dict({"eye": EYE}),)), "both": S.Dict({"eye": EYE, "state": S.Box(-1, 1, (2,))}),
            "clock": S.Box(-np.inf, np.inf, (3,), np.float64),
        }[sees]  # fmt: skip
        if mask == "observation":
            self.observation_space = S.Dict({"obs": self.observation_space, "action_mask": S.MultiBinary(3)})

    def _picture(self):
        picture = np.full((40, 52, 3), 40 * self.steps % 256, np.uint8)
        picture[:, :, 1] = 200
        return picture

    def _obs(self):
        picture = self.render() if self.drawn else self._picture()
        obs = np.eye(3, dtype=np.float32)[self.digit]
        seen = {"eye": {"eye": picture}, "plain": picture, "tuple": ({"eye": picture},), "clock": 1.7e9 * obs,
                "both": {"eye": picture, "state": obs[:2]}}.get(self.sees, obs)  # fmt: skip
        if self.sees == "first":
            seen = picture.transpose(2, 0, 1)
        if self.sees == "floats":
            seen = picture / 255.0
        return {"obs": seen, "action_mask": self.action_masks()} if self.mask == "observation" else seen

    def action_masks(self):
        if self.mask not in ("method", "observation"):
            raise NotImplementedError
        return np.arange(3) != (self.digit + 1) % 3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.digit = 0, int(self.np_random.integers(3))
        return self._obs(), {}

    def step(self, action):
        if self.mask:
            assert self.action_masks()[action], "a forbidden action"
        self.steps += 1
        reward = self.spike if self.spike and self.steps % 10 == 0 else float(action == self.digit)
        self.digit = int(self.np_random.integers(3))
        return self._obs(), reward, False, False, {}

    def render(self):
        if self.render_mode is None:
            return None
        picture = self._picture()
        return picture / 255.0 if self.paints == "floats" else picture


class Fails(Habits):
    """Raises in the first reset of a process."""

    resets = 0

    def reset(self, *, seed=None, options=None):
        Fails.resets += 1
        if Fails.resets == 1:
            raise OSError("no simulator")
        return super().reset(seed=seed)


class Board(gymnasium.Env):
    """A 3 x 3 board of 0, 1, 2 in numbers of a kind."""

    def __init__(self, kind="uint8", render_mode=None):
        self.observation_space, self.action_space = S.Box(0, 2, (3, 3), np.dtype(kind)), S.Discrete(9)

    def _board(self):
        return self.np_random.integers(0, 3, (3, 3)).astype(self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._board(), {}

    def step(self, action):
        return self._board(), math.inf if action > 8 else 0.0, False, False, {}


gymnasium.register("habits/Habits-v0", Habits, max_episode_steps=30)
gymnasium.register("habits/First-v0", Habits, max_episode_steps=30, kwargs={"sees": "first"})
gymnasium.register("habits/Nested-v0", Habits, max_episode_steps=30, kwargs={"sees": "eye"})
gymnasium.register("habits/Method-v0", Habits, max_episode_steps=30, kwargs={"mask": "method"})
gymnasium.register("habits/Observed-v0", Habits, max_episode_steps=30, kwargs={"mask": "observation"})
gymnasium.register("habits/Fails-v0", Fails, max_episode_steps=30)
gymnasium.register("habits/Board-v0", Board, max_episode_steps=30)
