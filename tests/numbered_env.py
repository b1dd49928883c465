"""An environment whose every transition tells which instance and which step it is of: ``tests/Numbered-v0``.

For runs with ``--import numbered_env``. Rows that were torn, repeated or made up can be told from such rows.
"""

import secrets
import time

import gymnasium
import numpy as np

UNIT = 2.0**-20
"""Of numbers and steps, which makes them small; sums and differences of its multiples are exact in float32."""


class Numbered(gymnasium.Env):
    """Observes (a random number of this instance, its steps so far, their difference); an episode has 50 steps."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, render_mode=None, sleep_s=0.0):
        self.render_mode, self.sleep_s = render_mode, sleep_s
        self.number, self.steps = secrets.randbits(20), 0

    def _obs(self):
        return np.array([self.number, self.steps, self.number - self.steps], np.float32) * np.float32(UNIT)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps += 1  # so that no two transitions of an instance are equal
        return self._obs(), {}

    def step(self, action):
        if self.sleep_s:
            time.sleep(self.sleep_s)
        self.steps += 1
        return self._obs(), 1.0, False, self.steps % 50 == 0, {}


def check(rows, layout):
    """How many different transitions there are; an AssertionError if one is torn, made up or there twice."""
    obs, next_obs = rows[:, layout.obs], rows[:, layout.next_obs]
    for each in (obs, next_obs):
        assert (each[:, 0] - each[:, 1] == each[:, 2]).all(), "a torn row"
    assert (obs[:, 0] == next_obs[:, 0]).all(), "a torn row"
    assert (obs[:, 1] + UNIT == next_obs[:, 1]).all(), "a row that no environment gave"
    assert (rows[:, layout.reward] == 1.0).all()
    seen = {(float(number), float(step)) for number, step in obs[:, :2]}
    assert len(seen) == len(rows), f"{len(rows) - len(seen)} rows are there twice"
    return len(seen)


gymnasium.register("tests/Numbered-v0", entry_point=Numbered)
