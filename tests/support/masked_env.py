"""A tiny task whose actions are restricted by ``info["action_mask"]``, and that notes each forbidden one.

It is registered as ``tests/Masked-v0`` for runs with ``--import masked_env``.
"""

import os

import gymnasium
import numpy as np

NUM_ACTIONS = 5


class Masked(gymnasium.Env):
    """Observes a random number 0 to 9 as one-hot and allows one to three actions; reward 1 for the least allowed one.

    ``fault`` spoils the mask from step ``at`` on. A forbidden action raises, and adds a line to the file that
    FORBIDDEN_ACTIONS names.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (10,), np.float32)
    action_space = gymnasium.spaces.Discrete(NUM_ACTIONS, start=2)

    def __init__(self, render_mode=None, fault="", at=3):
        self.render_mode, self.fault, self.at = render_mode, fault, at

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.cut = 0, bool(self.np_random.integers(2))
        return self._next()

    def step(self, action):
        assert type(action) is np.int64
        if not self.mask[action - 2]:
            if "FORBIDDEN_ACTIONS" in os.environ:
                with open(os.environ["FORBIDDEN_ACTIONS"], "a", encoding="utf-8") as file:
                    file.write(f"{action}\n")
            raise ValueError(f"action {action} is forbidden by {self.mask}")
        self.steps += 1
        reward = float(action - 2 == np.argmax(self.mask))
        obs, info = self._next()
        return obs, reward, self.steps == 12, self.cut and self.steps == 7, info

    def _next(self):
        self.state = int(self.np_random.integers(10))
        self.mask = np.zeros(NUM_ACTIONS, np.int8)
        self.mask[self.np_random.choice(NUM_ACTIONS, 1 + self.state % 3, replace=False)] = 1
        obs = np.eye(10, dtype=np.float32)[self.state]
        if self.steps == 12:
            return obs, {"action_mask": 0 * self.mask}
        if self.steps < self.at:
            return obs, {"action_mask": self.mask.astype(bool)}
        given = {"missing": {}, "long": {"action_mask": np.ones(NUM_ACTIONS + 1, np.int8)},
                 "empty": {"action_mask": np.zeros(NUM_ACTIONS, bool)}, "number": {"action_mask": self.mask * np.nan},
                 "text": {"action_mask": "no"}}  # fmt: skip
        return obs, given.get(self.fault, {"action_mask": self.mask.copy()})

    def render(self):
        return np.zeros((32, 32, 3), np.uint8)


def vector(num_envs, render_mode=None, mode="NextStep", max_episode_steps=None, **arguments):
    """Environments of this kind in one, as ``vector:tests/Masked-v0`` makes them."""
    return gymnasium.vector.SyncVectorEnv([lambda: Masked(**arguments)] * num_envs,
                                          autoreset_mode=gymnasium.vector.AutoresetMode(mode))  # fmt: skip


gymnasium.register("tests/Masked-v0", Masked, vector_entry_point=vector, max_episode_steps=30)
