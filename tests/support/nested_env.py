"""A task with a nested observation, as a user's package would register it."""

import gymnasium
import numpy as np

S = gymnasium.spaces


class NestedGoal(gymnasium.Env):
    """Move to the origin; the observation has a phase and a state of two parts."""

    def __init__(self):
        state = S.Dict({name: S.Box(-9.0, 9.0, (1,), np.float32) for name in ("speed", "distance")})
        self.observation_space = S.Dict({"state": state, "phase": S.Discrete(3)})
        self.action_space = S.Box(-1.0, 1.0, (1,), np.float32)
        self.place = self.speed = 0.0
        self.steps = 0

    def _observe(self):
        state = {"speed": np.array([self.speed], np.float32), "distance": np.array([self.place], np.float32)}
        return {"state": state, "phase": self.steps % 3}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.speed, self.steps = float(self.np_random.uniform(-1, 1)), 0.0, 0
        return self._observe(), {}

    def step(self, action):
        self.speed = 0.1 * float(action[0])
        self.place = float(np.clip(self.place + self.speed, -9, 9))
        self.steps += 1
        return self._observe(), -abs(self.place), False, False, {}


gymnasium.register("NestedGoal-v0", NestedGoal, max_episode_steps=30)


def made(*, wide=False):
    """The task by a function, with another limit of time."""
    env = NestedGoal()
    return gymnasium.wrappers.TimeLimit(env, 60) if wide else env
