"""A task whose action is several choices at once; only all of them together are rewarded.

It is registered as ``tests/Choices-v0`` for runs with ``--import choices_env``.
"""

import gymnasium
import numpy as np

SPACES = {"discrete": gymnasium.spaces.MultiDiscrete([3, 4], start=[1, 5]), "binary": gymnasium.spaces.MultiBinary(3)}
STEPS = 10


def counts_of(space):
    """Number of options of each choice, and the first one's number."""
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return np.full(space.n, 2), np.zeros(space.n, int)
    return space.nvec, space.start


class Choices(gymnasium.Env):
    """Observes the wanted option of each choice as one-hots; reward 1 for all of them, nothing for less.

    ``masked`` allows the wanted option and about half of the others; a forbidden one raises.
    """

    def __init__(self, kind="discrete", masked=False):
        self.action_space, self.masked = SPACES[kind], masked
        self.nvec, self.start = counts_of(self.action_space)
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (int(sum(self.nvec)),), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._next()

    def step(self, action):
        assert self.action_space.contains(action), repr(action)
        index = action - self.start
        flags = np.split(self.mask, np.cumsum(self.nvec)[:-1])
        assert all(part[chosen] for part, chosen in zip(flags, index, strict=True)), f"{action} is forbidden"
        reward = float(np.array_equal(index, self.wanted))
        self.steps += 1
        obs, info = self._next()
        return obs, reward, False, self.steps == STEPS, info

    def _next(self):
        self.wanted = self.np_random.integers(self.nvec)
        obs = np.concatenate([np.eye(count, dtype=np.float32)[one] for count, one in
                              zip(self.nvec, self.wanted, strict=True)])  # fmt: skip
        self.mask = (obs > 0.0) | (self.np_random.random(len(obs)) < (0.5 if self.masked else 1.0))
        return obs, {"action_mask": self.mask} if self.masked else {}


gymnasium.register("tests/Choices-v0", Choices)
