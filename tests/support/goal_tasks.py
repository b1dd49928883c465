"""A goal task that is hardly ever solved by chance: flipping bits (Andrychowicz et al. 2017, section 3.1)."""

import gymnasium
import numpy as np


class BitFlip(gymnasium.Env):
    """``bits`` bits of which each action flips one; the reward is -1 until they are the goal's.

    An episode ends there, or after ``bits`` steps. About half of the bits differ at its start, so the best mean return
    is 1 - bits / 2; random actions find the goal among 2^bits hardly ever.
    """

    def __init__(self, bits=20):
        self.bits, self.metadata = bits, {"render_modes": []}
        part = gymnasium.spaces.MultiBinary(bits)
        parts = {"observation": part, "achieved_goal": part, "desired_goal": part}
        self.observation_space = gymnasium.spaces.Dict(parts)
        self.action_space = gymnasium.spaces.Discrete(bits)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._state, self._goal = self.np_random.integers(2, size=(2, self.bits)).astype(np.int8)
        self._steps = 0
        return self._observation(), {}

    def step(self, action):
        self._state[action] ^= 1
        self._steps += 1
        reward = float(self.compute_reward(self._state, self._goal, {}))
        solved, over = reward == 0.0, self._steps == self.bits
        return self._observation(), reward, solved, over and not solved, {"is_success": solved}

    def compute_reward(self, achieved_goal, desired_goal, info):
        """-1, or 0 where all bits of achieved and desired goals [..., bits] agree; [...]."""
        return -np.any(achieved_goal != desired_goal, axis=-1).astype(np.float32)

    def compute_terminated(self, achieved_goal, desired_goal, info):
        """True where all bits agree; bool [...]."""
        return np.all(achieved_goal == desired_goal, axis=-1)

    def _observation(self):
        return {
            "observation": self._state.copy(),
            "achieved_goal": self._state.copy(),
            "desired_goal": self._goal.copy(),
        }


gymnasium.register("BitFlip-v0", BitFlip)
