"""Reads the description of an environment from a file of a run or a policy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spreeze.errors import first_true
from spreeze.types import Choices, EnvSpec, Mixed, rebuild

_MAX_VALUES = 100_000_000
"""Numbers in one observation or action that a description may have."""


def spec_from(data: Any) -> EnvSpec:
    """The description of an environment from a file's data; a ValueError for wrong or contradictory values."""
    if not isinstance(data, dict):
        raise ValueError("it names no environment")
    try:
        spec = rebuild(EnvSpec, data)
    except TypeError as error:
        raise ValueError(str(error)) from None
    sizes = {"obs_dim": spec.obs_dim, "action_dim": spec.action_dim}
    if spec.choices is not None:
        sizes |= {"action.nvec": min(spec.choices.nvec, default=0), "sum of action.nvec": spec.choices.options}
    if spec.max_episode_steps is not None:
        sizes["max_episode_steps"] = spec.max_episode_steps
    if spec.frames is not None:
        sizes |= {name: getattr(spec.frames, name) for name in ("channels", "height", "width", "stack")}
        sizes |= {"frames.vector_dim": spec.frames.vector_dim + 1}
    if spec.team is not None:
        sizes |= {"team.obs_dim": spec.team.obs_dim, "team.actions": min(spec.team.actions, default=0)}
    for name, size in sizes.items():
        if not 1 <= size <= (_MAX_VALUES if name != "max_episode_steps" else 2**63):
            raise ValueError(f"{name} = {size}: expected 1 to {_MAX_VALUES}")
    if (wrong := first_true(_contradictions(spec))) is not None:
        raise ValueError(f"{wrong} does not fit the other values of the environment")
    return spec


def _contradictions(spec: EnvSpec) -> dict[str, bool]:
    action, team, unfit = spec.action, spec.team, dict[str, bool]()
    if spec.choices is not None:
        unfit["action.start"] = len(spec.choices.start) != spec.choices.dim
    if (box := spec.box) is not None:
        pairs = list(zip(box.low, box.high, strict=False))
        unfit["action.low"] = not all(map(math.isfinite, (*box.low, *box.high))) or any(a > b for a, b in pairs)
        unfit["action.high"] = len(box.high) != box.dim
    return unfit | {
        "action_parts": not _parts_fit(spec),
        "env_id": not spec.env_id.strip(),
        "action.shape": action.shape is not None and math.prod(action.shape) != action.dim,
        "team": team is not None and (not isinstance(action, Choices) or action.nvec != team.actions),
        "action_mask": spec.action_mask and not 0 < spec.mask_dim < spec.obs_dim,
        "obs_shape": spec.obs_shape is not None and math.prod(spec.obs_shape) != spec.obs_dim - spec.mask_dim,
        "frames": spec.frames is not None and spec.frames.stack * spec.frames.frame_bytes > _MAX_VALUES,
    }


def _parts_fit(spec: EnvSpec) -> bool:
    """True if the parts of a nested action cover all of its columns, boxes before choices."""
    parts, continuous = spec.action_parts, 0 if spec.box is None else len(spec.box.low)
    if not parts:
        return not isinstance(spec.action, Mixed)
    stops = [0, *(part.columns.stop for part in parts)]
    kinds_fit = all(
        (part.start is None) == (part.columns.stop <= continuous)
        and len(part.start or ()) in (0, math.prod(part.shape))
        for part in parts
    )
    if not kinds_fit or sorted(stops) != sorted([*(part.begin for part in parts), spec.action_dim]):
        return False
    try:
        spec.form()(np.zeros(spec.action_dim, np.float32))
    except (ValueError, TypeError, IndexError, KeyError):
        return False
    return True
