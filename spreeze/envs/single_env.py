"""A vector environment with one element, with the interface of a plain environment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from spreeze.envs.action_spaces import action_of, row_of
from spreeze.envs.make import closed_on_error
from spreeze.envs.obs_flattening import MASK, leaves_of
from spreeze.envs.vector_task import VectorTask
from spreeze.errors import EnvError
from spreeze.types import Box, Choices, EnvSpec


class SingleEnv(gymnasium.Env[np.ndarray, Any]):
    """The only environment of a vector environment; a seed makes it anew, since some engines seed only then."""

    def __init__(self, env_id: str, make: Callable[[int], Any]) -> None:
        self._env_id, self._make = env_id, make
        env = make(0)
        with closed_on_error(env):
            space = getattr(env, "single_observation_space", env.observation_space)
            self.observation_space = _as_vector(space) if isinstance(space, gymnasium.spaces.Dict) else space
            if not isinstance(self.observation_space, gymnasium.spaces.Box):
                raise EnvError(
                    f"{env_id}: its observation space is a {type(space).__name__}; vector engines need a Box, or a "
                    "Dict of Box"
                )
            self.action_space = getattr(env, "single_action_space", env.action_space)
            self._action, self._parts = action_of(env_id, self.action_space)
        limit, threshold = _limits(env)
        self.spec = gymnasium.envs.registration.EnvSpec(
            id=env_id, entry_point=f"{__name__}:SingleEnv", max_episode_steps=limit, reward_threshold=threshold
        )
        # The info of a reset shows whether it gives masks.
        self._obs_dim = math.prod(self.observation_space.shape or (0,))
        self._masked = not isinstance(self._action, Box) and env.reset()[1].get(MASK) is not None
        self._task = self._task_of(env)

    def _task_of(self, env: Any) -> VectorTask:
        spec = EnvSpec(
            env_id=self._env_id,
            import_module=None,
            obs_dim=self._obs_dim,
            action=self._action,
            action_parts=self._parts,
            max_episode_steps=None,
            reward_threshold=None,
            action_mask=self._masked,
        )
        return VectorTask(env, dataclasses.replace(spec, obs_dim=self._obs_dim + spec.mask_dim))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode, unless the engine has just started one."""
        if seed is None:
            return self._shaped(self._task.restart())
        self._task.close()
        self._task = self._task_of(self._make(seed))
        return self._shaped(self._task.reset(seed))

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        values = row_of(self._parts, action) if self._parts else np.asarray(action, np.float32)
        values = values.reshape(1, -1)
        is_number = isinstance(self._action, Choices) and not self._parts
        result = self._task.step(values - self._action.low if is_number else values)
        obs, info = self._shaped(result.next_obs)
        return obs, float(result.reward[0]), bool(result.terminated[0]), bool(result.truncated[0]), info

    def _shaped(self, obs: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
        shaped: np.ndarray = obs[0, : self._obs_dim].reshape(self.observation_space.shape or ())
        info = {MASK: obs[0, self._obs_dim :]} if self._masked else {}
        return shaped.astype(self.observation_space.dtype, copy=False), info

    def close(self) -> None:
        self._task.close()


def _as_vector(space: gymnasium.spaces.Dict) -> gymnasium.Space[Any]:
    """The space of a nested observation's parts, concatenated by key as in ``VectorTask``."""
    leaves = leaves_of(space, "observation space")
    for leaf in leaves:
        if not isinstance(leaf.space, gymnasium.spaces.Box):
            raise EnvError(
                f"observation space: {leaf.name} is a {type(leaf.space).__name__}; nested observations of vector "
                "engines must be Box"
            )
    return gymnasium.spaces.Box(-np.inf, np.inf, (leaves[-1].stop,), np.float32)


def _limits(env: Any) -> tuple[int | None, float | None]:
    """Time limit [env steps] and reward threshold, as far as the engine specifies them."""
    spec = getattr(env, "spec", None)
    config = getattr(spec, "config", spec)
    limit, threshold = getattr(config, "max_episode_steps", None), getattr(spec, "reward_threshold", None)
    return (int(limit) if limit else None), (None if threshold is None else float(threshold))
