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


class InfoMask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Puts a mask into the info: an entry of the observation, which loses it, or the result of ``action_masks()``.

    The method is not used if its first mask does not have one flag per option.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], choice: Choices, mask_source: str) -> None:
        super().__init__(env)
        self.mask_source, self._count = mask_source, choice.options
        self._masks: Callable[[], Any] | None = None
        self._fits: bool | None = None
        if mask_source == BY_METHOD:
            self._masks = env.get_wrapper_attr(_METHOD)
        else:
            parts = dict(env.observation_space.spaces)  # type: ignore[attr-defined]
            del parts[MASK]
            self.observation_space = gymnasium.spaces.Dict(parts)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._with_mask(*self.env.reset(seed=seed, options=options))

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if self._masks is None or not terminated:  # else no action follows
            obs, info = self._with_mask(obs, info)
        return obs, reward, terminated, truncated, info

    def _with_mask(self, obs: Any, info: Any) -> tuple[Any, dict[str, Any]]:
        info = info if isinstance(info, dict) else {}
        if self._masks is not None:
            return obs, {MASK: self._masks(), **info} if self._method_fits(self._masks) else info
        if not isinstance(obs, dict) or MASK not in obs:
            return obs, info
        return {key: part for key, part in obs.items() if key != MASK}, {MASK: obs[MASK], **info}

    def _method_fits(self, masks: Callable[[], Any]) -> bool:
        if self._fits is None:
            try:
                self._fits = np.shape(masks()) == (self._count,)
            except Exception:
                self._fits = False
        return self._fits


def with_info_mask(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """The environment, with its mask in the info: one beside other entries of the observation, else by its method."""
    parts, choice = getattr(env.observation_space, "spaces", None), choices_of(env.action_space)
    if choice is None:
        return env
    observed = parts.get(MASK) if isinstance(parts, dict) and len(parts) > 1 else None
    if np.prod(getattr(observed, "shape", None) or (0,)) == choice.options:
        return InfoMask(env, choice, IN_OBSERVATION)
    return InfoMask(env, choice, BY_METHOD) if env.has_wrapper_attr(_METHOD) else env


def source_of(env: gymnasium.Env[Any, Any]) -> str:
    """Text for the source of an environment's masks."""
    return str(getattr(env, "mask_source", IN_INFO))


def mask_note(env: gymnasium.Env[Any, Any], spec: EnvSpec) -> str | None:
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
