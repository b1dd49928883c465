"""Converts Gymnasium action spaces to ``ActionSpec`` and ``ActionPart``; random actions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from spreeze.errors import EnvError
from spreeze.types import ActionPart, ActionSpec, Box, Choices, EnvSpec, Mixed

_MAX_OPTIONS = 4096  # maximum number of options of all choices: a policy has one output per option
_LONGEST_HOLD, _HOLD_EXPONENT, _MAX_HELD = 64, 1.5, 2
"""Longest hold of a random action [env steps], exponent of the distribution of lengths, and the largest number of
action components for which actions are held."""
KeyPath = tuple[str | int, ...]  # the keys and indices that lead to a part of a nested space
_KINDS = "Box, Discrete, MultiDiscrete or MultiBinary"


def action_of(env_id: str, space: Any) -> tuple[ActionSpec, tuple[ActionPart, ...]]:
    """A space's actions as one row and, for a Dict or Tuple, their parts; an EnvError if no algorithm supports it."""
    what = f"{env_id}: action space {space_text(space)}"
    leaves = list(_leaves(space))
    for path, leaf in leaves:
        if not getattr(leaf, "spaces", True):
            raise EnvError(f"{what}: {_name(path)} is an empty {type(leaf).__name__}")
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
        raise EnvError(f"{what} has {choice.options} actions in all; supported are 2 to {_MAX_OPTIONS}")
    return Mixed(box, choice) if box and choice else box or choice, tuple(parts)  # type: ignore[return-value]


def _flat(what: str, space: Any) -> Box | Choices:
    """The specification of the actions of a space without parts."""
    from gymnasium import spaces

    choice = _choices(space)
    if choice is not None:
        largest = max(choice.nvec, default=0)
        count = largest if largest < 2 else choice.options
        if not 2 <= count <= _MAX_OPTIONS:
            raise EnvError(f"{what} has {count} actions; supported are 2 to {_MAX_OPTIONS}")
        return choice
    if not isinstance(space, spaces.Box):
        raise EnvError(f"{what} is not supported; wrap it as a {_KINDS}, or a Dict or Tuple of these")
    if not np.issubdtype(space.dtype, np.floating):
        raise EnvError(f"{what} has an integer dtype, not supported; wrap it as Discrete or MultiDiscrete")
    low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (space.low, space.high))
    if not low.size:
        raise EnvError(f"{what} is empty")
    if not (high - low < np.finfo(np.float32).max).all():  # also if a bound is infinite or NaN
        raise EnvError(
            f"{what} is unbounded; give it bounds: gymnasium.wrappers.TransformAction(env, lambda action: action, "
            "gymnasium.spaces.Box(-1.0, 1.0, env.action_space.shape))"
        )
    return Box(tuple(low.tolist()), tuple(high.tolist()), tuple(space.shape))


def _leaves(space: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the path and space of each leaf, those of a Dict sorted by key; an empty Dict or Tuple is a leaf."""
    from gymnasium import spaces

    nested: Any = space.spaces if isinstance(space, spaces.Dict | spaces.Tuple) else ()
    keys = sorted(nested, key=str) if isinstance(nested, Mapping) else range(len(nested))
    for key in keys:
        if isinstance(nested, Mapping) and not isinstance(key, str):
            raise EnvError(f"action space {space_text(space)} has the key {key!r}; keys have to be texts")
        yield from _leaves(nested[key], (*path, key))
    if not keys:
        yield path, space


def _name(path: KeyPath) -> str:
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


class RandomActions:
    """Random actions, each held for a random number of env steps: independent ones cancel out, held ones explore.

    The lengths follow Zipf's law, as in FlashSAC (arXiv 2604.04539): most are short, few are long. With action masks,
    for teams, and for more than two numbers, where holds make robots fall over, an action lasts one step.
    """

    def __init__(self, spec: EnvSpec, rng: np.random.Generator) -> None:
        self._spec, self._rng = spec, rng
        continuous = 0 if spec.box is None else spec.box.dim
        self._holds = not spec.action_mask and spec.team is None and continuous <= _MAX_HELD
        chances = np.arange(1.0, _LONGEST_HOLD + 1.0) ** -_HOLD_EXPONENT
        self._chances = chances / chances.sum()
        self._left = np.zeros(0, np.int64)
        self._held = np.zeros((0, spec.action_dim), np.float32)

    def draw(self, rows: int, obs: np.ndarray | None = None) -> np.ndarray:
        """The next actions float32 [rows, A] of ``rows`` environments; ``obs`` as for ``uniform_actions``."""
        actions = uniform_actions(self._spec, rows, self._rng, obs)
        if not self._holds:
            return actions
        if len(self._left) != rows:
            self._left, self._held = np.zeros(rows, np.int64), actions.copy()
        expired = self._left == 0
        self._held[expired] = actions[expired]
        self._left[expired] = self._rng.choice(_LONGEST_HOLD, expired.sum(), p=self._chances) + 1
        self._left -= 1
        return self._held.copy()


def uniform_actions(spec: EnvSpec, rows: int, rng: np.random.Generator, obs: np.ndarray | None = None) -> np.ndarray:
    """Uniformly random actions float32 [rows, A], in the form of a policy's.

    With action masks, only those that the masks at the end of ``obs`` [rows, O] allow; all of them if it is None.
    """
    if spec.box is not None and spec.choices is not None:
        choices_only = dataclasses.replace(spec, action=spec.choices, action_parts=())
        continuous = rng.uniform(-1.0, 1.0, (rows, spec.box.dim)).astype(np.float32)
        return np.concatenate((continuous, uniform_actions(choices_only, rows, rng, obs)), 1)
    if spec.action_mask and spec.choices is not None and obs is not None:
        draws = rng.random((rows, spec.mask_dim)) + spec.masks(obs)
        allowed: np.ndarray = np.stack([np.argmax(draws[:, part], 1) for part in spec.choices.slices], 1)
        return allowed.astype(np.float32)
    if spec.choices is not None:
        counts = spec.choices.nvec if spec.choices.dim > 1 else spec.choices.options  # one number draws faster
        return rng.integers(counts, size=(rows, spec.action_dim)).astype(np.float32)
    return rng.uniform(-1.0, 1.0, (rows, spec.action_dim)).astype(np.float32)
