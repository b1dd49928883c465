"""Converts Gymnasium action spaces to ``ActionSpec`` and ``ActionPart``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from spreeze.errors import EnvironmentError_
from spreeze.types import ActionPart, ActionSpec, Box, Choices, Mixed

_MAX_OPTIONS = 4096
"""Maximum number of options of all choices: a policy has one output per option."""
_KINDS = "Box, Discrete, MultiDiscrete or MultiBinary"

Path = tuple[str | int, ...]


def action_of(env_id: str, space: Any) -> tuple[ActionSpec, tuple[ActionPart, ...]]:
    """A space's actions as one row and, for a Dict or Tuple, their parts; an EnvironmentError_ if none can learn it."""
    what = f"{env_id}: action space {space_text(space)}"
    leaves = list(_leaves(space))
    for path, leaf in leaves:
        if not getattr(leaf, "spaces", True):
            raise EnvironmentError_(f"{what}: {_name(path)} is an empty {type(leaf).__name__}")
    if leaves == [((), space)]:
        return _flat(what, space), ()
    specs = [(path, leaf, _flat(f"{what}: {_name(path)} {space_text(leaf)}", leaf)) for path, leaf in leaves]
    specs.sort(key=lambda part: isinstance(part[2], Choices))  # boxes first; the sort is stable
    parts, begin = [], 0
    for path, leaf, flat in specs:
        start = flat.start if isinstance(flat, Choices) else None
        parts.append(ActionPart(path=path, begin=begin, shape=tuple(leaf.shape), dtype=str(leaf.dtype), start=start))
        begin += flat.dim
    box, choice = _joined([flat for _, _, flat in specs])
    if choice is not None and choice.options > _MAX_OPTIONS:
        raise EnvironmentError_(f"{what} has {choice.options} actions in all; supported are 2 to {_MAX_OPTIONS}")
    return Mixed(box, choice) if box and choice else box or choice, tuple(parts)  # type: ignore[return-value]


def _flat(what: str, space: Any) -> Box | Choices:
    """The specification of the actions of a space without parts."""
    from gymnasium import spaces

    choice = _choices(space)
    if choice is not None:
        largest = max(choice.nvec, default=0)
        count = largest if largest < 2 else choice.options
        if not 2 <= count <= _MAX_OPTIONS:
            raise EnvironmentError_(f"{what} has {count} actions; supported are 2 to {_MAX_OPTIONS}")
        return choice
    if not isinstance(space, spaces.Box):
        raise EnvironmentError_(f"{what} is not supported; wrap it as a {_KINDS}, or a Dict or Tuple of these")
    if not np.issubdtype(space.dtype, np.floating):
        raise EnvironmentError_(f"{what} has an integer dtype, not supported; wrap it as Discrete or MultiDiscrete")
    low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (space.low, space.high))
    if not low.size:
        raise EnvironmentError_(f"{what} is empty")
    if not (high - low < np.finfo(np.float32).max).all():  # also if a bound is infinite or NaN
        raise EnvironmentError_(f"{what} is unbounded; wrap it in TransformAction with a bounded Box")
    return Box(tuple(low.tolist()), tuple(high.tolist()), tuple(space.shape))


def _leaves(space: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the path and space of each leaf, those of a Dict sorted by key; an empty Dict or Tuple is a leaf."""
    from gymnasium import spaces

    nested: Any = space.spaces if isinstance(space, spaces.Dict | spaces.Tuple) else ()
    keys = sorted(nested, key=str) if isinstance(nested, Mapping) else range(len(nested))
    for key in keys:
        if isinstance(nested, Mapping) and not isinstance(key, str):
            raise EnvironmentError_(f"action space {space_text(space)} has the key {key!r}; keys have to be texts")
        yield from _leaves(nested[key], (*path, key))
    if not keys:
        yield path, space


def _name(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path) or "it"


def choices_of(space: Any) -> Choices | None:
    """All choices of an action space, with those of its parts concatenated; None if it has none."""
    return _joined([choice for _, leaf in _leaves(space) if (choice := _choices(leaf)) is not None])[1]


def _joined(parts: list[Any]) -> tuple[Box | None, Choices | None]:
    """All boxes as one, and all choices as one; None if there are none."""
    low, high, nvec, start = (
        sum((getattr(part, name) for part in parts if isinstance(part, kind)), ())
        for kind, name in ((Box, "low"), (Box, "high"), (Choices, "nvec"), (Choices, "start"))
    )
    return Box(low, high, (len(low),)) if low else None, Choices(nvec, start, (len(nvec),)) if nvec else None


def _choices(space: Any) -> Choices | None:
    """The choices of a Discrete, MultiDiscrete or MultiBinary space; None for any other."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Choices((int(space.n),), (int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = (tuple(np.ravel(values).astype(int).tolist()) for values in (space.nvec, space.start))
        return Choices(nvec, start, tuple(space.shape))
    if isinstance(space, spaces.MultiBinary):
        return Choices((2,) * math.prod(space.shape), shape=tuple(space.shape))
    return None


def row_of(parts: tuple[ActionPart, ...], action: Any) -> np.ndarray:
    """The flat action, float32 [A], of an environment's action: inverts ``EnvSpec.form``."""
    row = np.zeros(max(part.columns.stop for part in parts), np.float32)
    for part in parts:
        value = action
        for key in part.path:
            value = value[key]
        row[part.columns] = np.ravel(value) - (0 if part.start is None else part.start)
    return row


def space_text(space: Any) -> str:
    return " ".join(str(space).split())[:120]
