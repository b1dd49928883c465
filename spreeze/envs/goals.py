"""Goals of goal tasks: their position in the observation, and the rewards and ends of steps under other goals.

A goal task observes a Dict of ``observation``, ``achieved_goal`` and ``desired_goal``, and has
``compute_reward(achieved_goal, desired_goal, info)``, as ``gymnasium_robotics.GoalEnv`` defines it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spreeze.envs.obs_flattening import leaves_of
from spreeze.envs.scalars import FLOAT32_MAX
from spreeze.errors import BadTransition
from spreeze.types import GoalSpec

if TYPE_CHECKING:
    import gymnasium

    from spreeze.envs.task import Task

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
_GOALS = 6  # number of drawn goals whose pairs show whether rewards are sparse
_PROVED_ROWS = 4  # rows of the first batch whose results must equal those of single calls


def goals_of(env: gymnasium.Env[Any, Any]) -> GoalSpec | None:
    """The goals of an environment's observations; None if it has none that are vectors of one size."""
    from gymnasium import spaces

    space = env.observation_space
    if not isinstance(space, spaces.Dict) or not {"observation", ACHIEVED, DESIRED} <= space.spaces.keys():
        return None
    ranges = {
        leaf.path[0]: (leaf.start, leaf.stop)
        for leaf in leaves_of(space, "observation space")
        if len(leaf.path) == 1 and isinstance(leaf.space, spaces.Box | spaces.MultiBinary)
    }
    if not {ACHIEVED, DESIRED} <= ranges.keys() or space[ACHIEVED].shape != space[DESIRED].shape:
        return None
    computes = env.has_wrapper_attr("compute_reward")
    return GoalSpec(
        achieved=ranges[ACHIEVED],
        desired=ranges[DESIRED],
        computes_reward=computes,
        sparse=computes and _is_sparse(env.get_wrapper_attr("compute_reward"), space[ACHIEVED]),
    )


def _is_sparse(compute_reward: Callable[[Any, Any, Any], Any], space: Any) -> bool:
    """True if pairs of goals give at most two different rewards; False if a reward needs the info of a step."""
    drawn = copy.deepcopy(space)
    drawn.seed(0)
    goals = [drawn.sample() for _ in range(_GOALS)]
    try:
        rewards = {float(compute_reward(achieved, desired, {})) for achieved in goals for desired in goals}
    except Exception:  # a function that reads more than it was given may raise any error
        return False
    return len(rewards) <= 2


class GoalRewards:
    """Rewards and ends of many steps of one environment, each under its own goal."""

    def __init__(self, task: Task) -> None:
        env = task.env
        self._space, self._env_id = env.observation_space[ACHIEVED], task.spec.env_id  # type: ignore[index]
        self._reward = _Batched(env.get_wrapper_attr("compute_reward"))
        ends = "compute_terminated"
        self._terminated = _Batched(env.get_wrapper_attr(ends)) if env.has_wrapper_attr(ends) else None

    def rewards(self, achieved: np.ndarray, desired: np.ndarray, infos: Sequence[Any]) -> np.ndarray:
        """``compute_reward`` of n pairs of flat goals [n, G], float64 [n]; a BadTransition if one is not finite."""
        results = self._reward(self._native(achieved), self._native(desired), infos)
        try:
            rewards = results.astype(np.float64)
        except (TypeError, ValueError):
            raise BadTransition("compute_reward", str(results.reshape(-1)[:1])[:60], self._env_id) from None
        bad = ~(np.abs(rewards) <= FLOAT32_MAX)  # NaN, too
        if bad.any():
            raise BadTransition("compute_reward", str(rewards[bad][0]), self._env_id)
        return rewards

    def terminated(self, achieved: np.ndarray, desired: np.ndarray, infos: Sequence[Any]) -> np.ndarray | None:
        """``compute_terminated`` of the same pairs, bool [n]; None if the environment's ends do not depend on goals."""
        if self._terminated is None:
            return None
        return self._terminated(self._native(achieved), self._native(desired), infos).astype(bool)

    def _native(self, goals: np.ndarray) -> np.ndarray:
        """Flat goals in the environment's own form, [n, *shape]."""
        return goals.reshape(len(goals), *(self._space.shape or ())).astype(self._space.dtype)


class _Batched:
    """A function of goals, called for a whole batch if it supports that, else goal by goal."""

    def __init__(self, function: Callable[[Any, Any, Any], Any]) -> None:
        self._function = function
        self._takes_batches: bool | None = None

    def __call__(self, achieved: np.ndarray, desired: np.ndarray, infos: Sequence[Any]) -> np.ndarray:
        """Results [n] of goals [n, ...]."""
        if self._takes_batches is None and len(achieved) > 1:
            self._takes_batches = self._proven(achieved, desired, infos)
        if not self._takes_batches:
            return self._one_by_one(achieved, desired, infos)
        dicts = np.empty(len(infos), object)
        dicts[:] = infos
        return np.asarray(self._function(achieved, desired, dicts))

    def _proven(self, *batch: Any) -> bool:
        """True if a batch gives one result per row, and the first results equal those of single calls."""
        try:
            self._takes_batches = True
            results = self(*batch)
        except Exception:  # a function of single goals may raise any error
            return False
        if results.shape != (len(batch[0]),):
            return False
        try:
            single = self._one_by_one(*(part[:_PROVED_ROWS] for part in batch))
        except Exception:  # it takes nothing but batches
            return True
        return np.array_equal(results[:_PROVED_ROWS], single)

    def _one_by_one(self, *batch: Any) -> np.ndarray:
        return np.array([self._function(*row) for row in zip(*batch, strict=True)])
