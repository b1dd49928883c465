"""Nested observations as one float32 vector, in an order that depends only on names.

Dict entries are laid out by sorted key, Tuple entries by index, both depth first. A Box is flattened in C order, a
Discrete(n) is a one-hot of n values, a MultiDiscrete the concatenated one-hots of its components, a MultiBinary its
bits. ``gymnasium.spaces.flatten`` has the same order, except that it keeps the order of insertion for a Dict built from
an OrderedDict or keywords. Texts, such as MiniGrid's mission, are left out. An action mask, ``info["action_mask"]``,
follows the observation as K values of 0 and 1, so that it is stored, sent and replayed with it, and seen by the
networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from spreeze.envs.action_spaces import KeyPath
from spreeze.envs.scalars import array_like
from spreeze.errors import EnvError
from spreeze.types import ActionPart, Choices

MASK = "action_mask"  # key of the mask in the info, as in Gymnasium's Taxi-v3
MAX_ONE_HOT = 65_536  # maximum number of values of a one-hot leaf: each is a column of every replay row

Writer = Callable[[Any, np.ndarray], None]  # writes one leaf of an observation into its part of the vector


class LeafError(Exception):
    """A leaf that does not fit its space: its name, and a text for its value."""

    def __init__(self, name: str, value: str) -> None:
        super().__init__(f"{name} = {value}")
        self.name, self.value = name, value


def path_text(path: KeyPath) -> str:
    """Name of the leaf at a path."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".") or "observation"


@dataclass(frozen=True)
class Leaf:
    path: KeyPath
    start: int
    stop: int
    space: Any

    @property
    def name(self) -> str:
        """``goal``, ``arm.camera[0]`` and so on; ``observation`` for a space without parts."""
        return path_text(self.path)

    def text(self) -> str:
        """Readable description: ``0:3 goal (Box, (3,))``."""
        kind = type(self.space).__name__
        size = f"{kind}, {tuple(self.space.shape)}"
        if kind == "Discrete":
            size = f"one-hot of {int(self.space.n)}"
        elif kind == "MultiDiscrete":
            size = f"one-hots of {', '.join(str(int(n)) for n in np.ravel(self.space.nvec))}"
        return f"{self.start}:{self.stop} {self.name} ({size})"


def leaves_of(space: Any, what: str) -> tuple[Leaf, ...]:
    """The leaves of a Gymnasium space with their columns, in the order of the vector; errors call the space ``what``.

    An EnvError names a leaf that cannot be part of a vector, and the reason.
    """
    from gymnasium import spaces

    leaves: list[Leaf] = []
    for path, part in _parts(space):
        if path and _is_text(part):
            continue
        start, name = leaves[-1].stop if leaves else 0, path_text(path)
        if not isinstance(part, spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete):
            raise EnvError(
                f"{what}: '{name}' is a {type(part).__name__}, which has no fixed length; wrap the environment so "
                "that it is a Box, Discrete, MultiBinary or MultiDiscrete"
            )
        size = spaces.flatdim(part)
        if size > MAX_ONE_HOT and not isinstance(part, spaces.Box | spaces.MultiBinary):
            raise EnvError(f"{what}: '{name}' would be a one-hot of {size} values; at most {MAX_ONE_HOT}")
        leaves.append(Leaf(path, start, start + size, part))
    return tuple(leaves)


def text_left_out(space: Any) -> str | None:
    """A line about the parts of an observation space that are text; None if it has none."""
    names = sorted(path_text(path) for path, part in _parts(space) if path and _is_text(part))
    return f"left out of the observation, because networks read no text: {', '.join(names)}" if names else None


def _parts(space: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the path and space of each leaf, those of a Dict sorted by key."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for key in sorted(space.spaces, key=str):
            yield from _parts(space.spaces[key], (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _parts(part, (*path, index))
    else:
        yield path, space


def _is_text(space: Any) -> bool:
    return getattr(getattr(space, "dtype", None), "kind", "") == "U"


def without(leaves: tuple[Leaf, ...], paths: Collection[KeyPath]) -> tuple[Leaf, ...]:
    """The leaves not at these paths, laid out as a new vector."""
    kept, stop = list[Leaf](), 0
    for leaf in leaves:
        if leaf.path not in paths:
            start, stop = stop, stop + leaf.stop - leaf.start
            kept.append(Leaf(leaf.path, start, stop, leaf.space))
    return tuple(kept)


def mask_of(info: Any, choice: Choices, *, terminated: bool, parts: tuple[ActionPart, ...] = ()) -> np.ndarray:
    """The action mask of an observation, float32 [K]: 1 where an option is allowed, else 0.

    After termination the info is not read, and all options are allowed. With the ``parts`` of a Dict or Tuple action,
    the mask may be such a structure. A LeafError if there is none, it is not a row of K flags, or it allows no option
    of a choice.
    """
    if terminated:
        return np.ones(choice.options, np.float32)
    name, given = f"info['{MASK}']", info.get(MASK) if isinstance(info, dict) else None
    if given is None:
        raise LeafError(name, "none, though the first reset had one; return it from every reset and step")
    try:
        mask = np.array(joined_mask(given, choice, parts), np.float32)
    except (TypeError, ValueError):
        raise LeafError(name, f"{str(given)[:60]} ({type(given).__name__})") from None
    if mask.shape != (choice.options,):
        raise LeafError(name, f"shape {mask.shape}; expected one flag for each of {choice.options} actions")
    if not ((mask == 0.0) | (mask == 1.0)).all():
        raise LeafError(name, f"{str(given)[:60]}; expected True or 1 for an allowed action, else False or 0")
    for index, part in enumerate(choice.slices):
        if not mask[part].any():
            where = "" if choice.dim == 1 else f" for choice {index}"
            raise LeafError(name, f"all False{where}, but the episode continues: allow an action, or terminate")
    return mask


def joined_mask(mask: Any, choice: Choices | None, parts: tuple[ActionPart, ...]) -> Any:
    """Flags [K] of a mask with the structure of the action, as for Gymnasium's ``sample``; other masks are unchanged.

    A part without a mask, or with None, allows all options. A MultiBinary has two flags per bit, or its bits (2: any).
    """
    if choice is None or not parts or not isinstance(mask, dict | tuple):
        return mask
    return np.concatenate([flags_of(mask, part.path, options) for part, options in options_of(choice, parts)])


def options_of(choice: Choices, parts: tuple[ActionPart, ...]) -> list[tuple[ActionPart, tuple[int, ...]]]:
    """The parts with choices, and their numbers of options."""
    choosing = [part for part in parts if part.start is not None]
    return [(part, choice.nvec[part.begin - choosing[0].begin :][: math.prod(part.shape)]) for part in choosing]


def flags_of(mask: Any, path: Any, options: Any) -> Any:
    """Flags, one per option, of the part at ``path`` in a structure of masks."""
    for key in path:
        mask = None if mask is None or (isinstance(mask, dict) and key not in mask) else mask[key]
    if mask is None:
        return np.ones(sum(options))
    while isinstance(mask, tuple) and isinstance(mask[0], tuple):
        mask = sum(mask, ())
    flat = np.concatenate([np.ravel(part) for part in (mask if isinstance(mask, tuple) else [mask])])
    # Gymnasium's mask of bits: 0 and 1 are the only values allowed, 2 is any.
    return np.stack((flat != 1, flat != 0), 1).ravel() if len(flat) == len(options) != sum(options) else flat


class Flattener:
    """Writes nested observations into vectors, with one path and one writer per leaf, made once."""

    def __init__(self, leaves: tuple[Leaf, ...]) -> None:
        self.obs_dim = leaves[-1].stop if leaves else 0
        self._steps = [(leaf.name, leaf.path, _writer(leaf)) for leaf in leaves]

    def __call__(self, obs: Any) -> np.ndarray:
        """A new float32 [O] vector; a LeafError if a leaf is missing or does not fit its space."""
        out = np.zeros(self.obs_dim, np.float32)
        for name, path, write in self._steps:
            value = obs
            try:
                for key in path:
                    value = value[key]
            except (KeyError, IndexError, TypeError):
                raise LeafError(name, "missing") from None
            try:
                write(value, out)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                raise LeafError(name, f"{str(value)[:60]} ({type(value).__name__})") from None
        return out


def _writer(leaf: Leaf) -> Writer:
    from gymnasium import spaces

    if isinstance(leaf.space, spaces.Discrete):
        return _one_hot(leaf)
    if isinstance(leaf.space, spaces.MultiDiscrete):
        return _one_hots(leaf)
    shape, name, columns = tuple(leaf.space.shape), leaf.name, slice(leaf.start, leaf.stop)

    def write(value: Any, out: np.ndarray) -> None:
        if type(value) is not np.ndarray or value.dtype == np.float64:
            with np.errstate(over="ignore", invalid="ignore"):  # overflows become infinite and are detected later
                value = np.asarray(array_like(value), np.float32)
        if value.shape != shape:
            raise LeafError(name, f"shape {value.shape}; expected {shape}")
        out[columns] = value.reshape(-1)

    return write


def _one_hot(leaf: Leaf) -> Writer:
    name, begin = leaf.name, leaf.start
    first, last = int(leaf.space.start), int(leaf.space.start) + int(leaf.space.n) - 1

    def write(value: Any, out: np.ndarray) -> None:
        index = int(value)
        if not first <= index <= last:
            raise LeafError(name, f"{value}; expected {first} to {last}")
        out[begin + index - first] = 1.0

    return write


def _one_hots(leaf: Leaf) -> Writer:
    name, nvec = leaf.name, np.ravel(leaf.space.nvec).astype(np.int64)
    start = getattr(leaf.space, "start", None)
    firsts = np.zeros(len(nvec), np.int64) if start is None else np.ravel(start).astype(np.int64)
    begins = leaf.start + np.concatenate([[0], np.cumsum(nvec)[:-1]]) - firsts
    parts = [tuple(part) for part in np.stack([firsts, firsts + nvec - 1, begins], axis=1).tolist()]

    def write(value: Any, out: np.ndarray) -> None:
        indices = np.ravel(value).tolist()
        if len(indices) != len(parts):
            raise LeafError(name, f"{str(value)[:60]}; the space has {len(parts)} components")
        for item, (first, last, begin) in zip(indices, parts, strict=True):
            if not first <= item <= last:
                raise LeafError(name, f"{str(value)[:60]}; expected {first} to {last} for a component")
            out[begin + int(item)] = 1.0

    return write
