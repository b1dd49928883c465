"""Converts Gymnasium action spaces to ``ActionSpec``."""

from __future__ import annotations

from typing import Any

import numpy as np

from spreeze.errors import EnvironmentError_
from spreeze.types import ActionSpec, Box, Choices

_MAX_OPTIONS = 4096
"""Options of all choices at most: a policy has one output for each."""


def action_of(env_id: str, space: Any) -> ActionSpec:
    """The description of an action of this space.

    Raises:
        EnvironmentError_: no algorithm can handle it; the message names the space and what would fit.
    """
    from gymnasium import spaces

    what = f"{env_id}: action space {space_text(space)}"
    choice = choices_of(space)
    if choice is not None:
        most = max(choice.nvec, default=0)
        if most < 2 or choice.options > _MAX_OPTIONS:
            count = most if most < 2 else choice.options
            raise EnvironmentError_(f"{what} has {count} actions; supported are 2 to {_MAX_OPTIONS}")
        return choice
    if not isinstance(space, spaces.Box):
        raise EnvironmentError_(f"{what} is not supported; wrap it as a Box, Discrete or MultiDiscrete")
    if not np.issubdtype(space.dtype, np.floating):
        raise EnvironmentError_(
            f"{what} has an integer dtype, which is not supported; wrap it as Discrete or MultiDiscrete"
        )
    low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (space.low, space.high))
    if not low.size:
        raise EnvironmentError_(f"{what} is empty")
    if not (high - low < np.finfo(np.float32).max).all():  # also where a bound is infinite or not a number
        raise EnvironmentError_(f"{what} is unbounded; wrap it in TransformAction with a bounded Box")
    return Box(tuple(low.tolist()), tuple(high.tolist()), tuple(space.shape))


def choices_of(space: Any) -> Choices | None:
    """The choices of a Discrete, MultiDiscrete or MultiBinary space; None of any other."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Choices((int(space.n),), (int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = (tuple(np.ravel(values).astype(int).tolist()) for values in (space.nvec, space.start))
        return Choices(nvec, start, tuple(space.shape))
    if isinstance(space, spaces.MultiBinary):
        return Choices((2,) * int(np.prod(space.shape)), shape=tuple(space.shape))
    return None


def space_text(space: Any) -> str:
    return " ".join(str(space).split())[:120]
