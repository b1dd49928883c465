"""Wrappers that move action masks to ``info["action_mask"]``, where Gymnasium has them.

A mask may be an entry of the observation, as in RLlib and PettingZoo, or the result of a method ``action_masks()``, as
in SB3-contrib. Only choices have masks: one flag per option, with several choices concatenated. In the info, the mask
of a Dict or Tuple action may also be such a structure.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from spreeze.envs.action_spaces import choices_of, uniform_actions
from spreeze.envs.obs_flattening import MASK, joined_mask
from spreeze.envs.task import ActionScaling
from spreeze.types import Choices, EnvSpec

IN_INFO, IN_OBSERVATION, BY_METHOD = f"info['{MASK}']", f"observation['{MASK}']", "action_masks()"
_METHOD = "action_masks"
_DRAWN = "drawn"


class ObservedMask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Moves the mask from the observation to the info; the other entries are the new observation."""

    mask_source = IN_OBSERVATION

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        parts = dict(env.observation_space.spaces)  # type: ignore[attr-defined]
        del parts[MASK]
        self.observation_space = gymnasium.spaces.Dict(parts)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._split(*self.env.reset(seed=seed, options=options))

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        obs, info = self._split(obs, info)
        return obs, reward, terminated, truncated, info

    def _split(self, obs: Any, info: Any) -> tuple[Any, dict[str, Any]]:
        info = info if isinstance(info, dict) else {}
        if not isinstance(obs, dict) or MASK not in obs:
            return obs, info
        return {key: part for key, part in obs.items() if key != MASK}, {MASK: obs[MASK], **info}


class MethodMask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds the mask of ``action_masks()`` to the info, unless the first one does not have one flag per option."""

    mask_source = BY_METHOD

    def __init__(self, env: gymnasium.Env[Any, Any], choice: Choices) -> None:
        super().__init__(env)
        self._masks = env.get_wrapper_attr(_METHOD)
        self._count = choice.options
        self._fits: bool | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, self._with_mask(info)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if not terminated:  # else no action follows
            info = self._with_mask(info)
        return obs, reward, terminated, truncated, info

    def _with_mask(self, info: Any) -> dict[str, Any]:
        info = info if isinstance(info, dict) else {}
        if self._fits is None:
            try:
                self._fits = np.shape(self._masks()) == (self._count,)
            except Exception:
                self._fits = False
        return {MASK: self._masks(), **info} if self._fits else info


def without_observed_mask(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """The environment, with its mask moved to the info if the observation has one beside other entries."""
    parts, choice = getattr(env.observation_space, "spaces", None), choices_of(env.action_space)
    if not isinstance(parts, dict) or len(parts) < 2 or MASK not in parts or choice is None:
        return env
    return ObservedMask(env) if np.prod(getattr(parts[MASK], "shape", None) or (0,)) == choice.options else env


def with_method_mask(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """The environment, with the masks of ``action_masks()`` in the info if it has only that method."""
    choice = None if isinstance(env, ObservedMask) else choices_of(env.action_space)
    return MethodMask(env, choice) if choice is not None and env.has_wrapper_attr(_METHOD) else env


def source_of(env: gymnasium.Env[Any, Any]) -> str:
    """Text for the source of an environment's masks."""
    return str(getattr(env, "mask_source", IN_INFO))


def used_or_not(env: gymnasium.Env[Any, Any], spec: EnvSpec) -> str | None:
    """A line about the masks of an environment; None if it has none."""
    if spec.action_mask:
        return f"{source_of(env)}: invalid actions are masked"
    why = "because actions are not discrete"
    if spec.choices is not None:
        why = f"because it does not have one flag for each of {spec.choices.options} actions"
    if MASK in (getattr(env.observation_space, "spaces", None) or ()):
        return f"{IN_OBSERVATION} is not used as a mask but as part of the observation, {why}"
    return f"{BY_METHOD} is not used {why}" if env.has_wrapper_attr(_METHOD) else None


def sample_allowed(env: Any, spec: EnvSpec) -> None:
    """Makes an environment's action space sample only actions that its latest mask allows, for Gymnasium's checker."""
    latest, scaled, form = dict[str, Any](), ActionScaling(spec), spec.form()

    def recording(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)  # the checker inspects the parameters
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and latest.get(MASK) is not latest.get(_DRAWN):  # drawn before a reset, under another mask
                args = (env.action_space.sample(),)
            result = method(*args, **kwargs)
            latest[MASK] = joined_mask(_mask_of(env, result), spec.choices, spec.action_parts)
            return result

        return call

    env.reset, env.step, env.action_space = recording(env.reset), recording(env.step), copy.deepcopy(env.action_space)
    space, plain_sample = env.action_space, env.action_space.sample

    def sample() -> Any:
        mask = latest[_DRAWN] = latest.get(MASK)
        if mask is None or isinstance(space, gymnasium.spaces.Discrete):
            return plain_sample(None if mask is None else np.asarray(mask, np.int8))
        action = form(scaled(uniform_actions(spec, 1, space.np_random, np.asarray(mask, np.float32)[None]))[0])
        return action if spec.action_parts else action.astype(space.dtype)

    space.sample = sample


def _mask_of(env: Any, result: tuple[Any, ...]) -> Any:
    """The mask in the result of the environment's own reset or step, or from its method."""
    for given in (result[-1], result[0]):
        if isinstance(given, dict) and MASK in given:
            return given[MASK]
    return env.action_masks() if hasattr(env, "action_masks") else None
