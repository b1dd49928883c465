"""Tasks that a policy without memory cannot solve: a T-maze, and CartPole and Pendulum without velocities.

::

    python -m spreeze.train --import spreeze.envs.memory_tasks --env TMaze-v0 --algo ppo --set ppo.recurrent=lstm
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv


class TMaze(gymnasium.Env[np.ndarray, np.int64]):
    """A corridor of ``length`` cells and a junction (Bakker 2001): the goal's side is shown at the start alone.

    An observation is the side (-1 left, 1 right; 0 but at the first step) and whether this is the junction. Actions
    are forward, left and right. A turn at the junction ends the episode, with a reward of 1 on the goal's side and -1
    on the other; any step against a wall costs 0.1. Without memory the best mean return is 0.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._side, self._place = 1 - 2 * int(self.np_random.integers(2)), 0
        return np.array([self._side, 0.0], np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        turns, at_junction = action > 0, self._place == self.length
        over, reward = False, 0.0
        if turns != at_junction:
            reward = -0.1
        elif at_junction:
            over, reward = True, 1.0 if (action == 2) == (self._side == 1) else -1.0
        else:
            self._place += 1
        return np.array([0.0, self._place == self.length], np.float32), reward, over, False, {}


class WithoutVelocities(gymnasium.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Leaves some entries of a vector: those that tell places and angles."""

    def __init__(self, env: gymnasium.Env[np.ndarray, Any], kept: tuple[int, ...]) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, gymnasium.spaces.Box)
        self._kept = list(kept)
        self.observation_space = gymnasium.spaces.Box(space.low[self._kept], space.high[self._kept], dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return np.asarray(observation[self._kept], np.float32)


def cart_pole(render_mode: str | None = None) -> gymnasium.Env[np.ndarray, Any]:
    """CartPole by the cart's place and the pole's angle."""
    return WithoutVelocities(CartPoleEnv(render_mode=render_mode), (0, 2))


def pendulum(render_mode: str | None = None) -> gymnasium.Env[np.ndarray, Any]:
    """Pendulum by cosine and sine of its angle."""
    return WithoutVelocities(PendulumEnv(render_mode=render_mode), (0, 1))


gymnasium.register("TMaze-v0", f"{__name__}:TMaze", max_episode_steps=100, reward_threshold=0.95)
gymnasium.register("CartPoleNoVel-v1", f"{__name__}:cart_pole", max_episode_steps=500, reward_threshold=475.0)
gymnasium.register("PendulumNoVel-v1", f"{__name__}:pendulum", max_episode_steps=200)
