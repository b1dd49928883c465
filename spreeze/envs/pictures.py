"""Pictures: which observations are some, and what environments draw, as bytes.

An observation is a picture where its space is one Box of bytes up to 255 with at least 36 pixels a side, channels first
or last. With ``env.image = true`` any bounded array of two dimensions or more is one, scaled from its bounds to bytes;
with ``env.image = false`` none is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spreeze.envs.obs_flattening import Path, leaves_of
from spreeze.envs.scalars import array_like
from spreeze.errors import EnvironmentError_
from spreeze.types import EnvSpec, PictureSpec

MIN_SIDE = 36
"""Pixels of height and width from which bytes are taken for a picture: a board or a map of cells is smaller."""
_MOST_OF_UNIT = 1.5
"""Up to here floats are 0 .. 1, a little more by interpolation; as 0 .. 255 they would be black."""


def picture_in(space: Any, wanted: bool | None = None) -> PictureSpec | None:
    """The picture that an observation space is, or the only part of; None where it is numbers.

    ``wanted`` is the setting ``env.image``.

    Raises:
        EnvironmentError_: a picture is wanted, and the space can be none.
    """
    from gymnasium import spaces

    path: Path = ()
    while isinstance(space, spaces.Dict | spaces.Tuple) and len(space.spaces) == 1:
        key: str | int = 0 if isinstance(space, spaces.Tuple) else next(iter(space.spaces))
        path, space = (*path, key), space.spaces[key]  # type: ignore[index]
    if wanted is False:
        return None
    if not wanted:
        return PictureSpec(path=path, shape=space.shape, order=_order(space.shape)) if is_picture(space) else None
    text = " ".join(str(space).split())[:120]
    if not isinstance(space, spaces.Box) or not 2 <= len(space.shape) <= 4:
        raise EnvironmentError_(
            f"env.image = true: observation space {text} is not an image: expected one Box [H, W], "
            "[H, W, C] or [C, H, W], optionally in a Dict"
        )
    bounds = (0.0, 255.0) if space.dtype == np.uint8 else (float(np.min(space.low)), float(np.max(space.high)))
    if not 0.0 < bounds[1] - bounds[0] < float("inf"):
        raise EnvironmentError_(
            f"env.image = true: observation space {text} is unbounded: an image needs bounds, such as 0 and 1"
        )
    return PictureSpec(path=path, shape=space.shape, order=_order(space.shape), bounds=bounds)


def is_picture(space: Any) -> bool:
    """True if a space without parts is one of pictures, as far as its author says."""
    from gymnasium import spaces

    shape = tuple(getattr(space, "shape", None) or ())
    large = [axis for axis, length in enumerate(shape) if length >= MIN_SIDE]
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and len(shape) <= 4
        and len(large) == 2
        and large[1] == large[0] + 1
        and bool(np.max(space.high) == 255)
    )


def _order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a picture with channels first, height and width last."""
    large = [axis for axis, length in enumerate(shape) if length >= MIN_SIDE]
    if len(large) == 2 and large[1] == large[0] + 1:
        height = large[0]
    elif len(shape) == 2:
        height = 0
    else:  # of the last three, two sides of the same length; else the fewest are the channels
        first, middle, last = shape[-3:]
        channels_last = last <= first if (first == middle) == (middle == last) else first == middle
        height = len(shape) - 2 - channels_last
    return (*(axis for axis in range(len(shape)) if axis not in (height, height + 1)), height, height + 1)


def refuse_pictures(space: Any, what: str) -> None:
    """Refuses a space of an observation, called ``what``, with pictures that no network here takes.

    Raises:
        EnvironmentError_: a picture beside other values; the message names it and what can be done.
    """
    for leaf in leaves_of(space, what):
        if not is_picture(leaf.space):
            continue
        size = leaf.stop - leaf.start
        if not leaf.path:
            raise EnvironmentError_(
                f"{what} is an image of a vector engine or team, which is not supported; use --set "
                f"env.image=false to treat it as {size} values"
            )
        raise EnvironmentError_(
            f"{what}: '{leaf.name}' is an image among other values, which a CNN does not support: register the "
            f"environment in gymnasium.wrappers.FilterObservation(env, [{leaf.path[0]!r}]), or use --set "
            f"env.image=false to treat it as {size} values"
        )


class DrawnPictures:
    """Turns what an environment draws, one picture after the other, into uint8 [H, W, 3].

    Floats are taken as 0 .. 1 until one is larger, integers of two bytes as 0 .. 255 likewise.
    """

    def __init__(self) -> None:
        self._most = 0.0
        """The largest value so far."""

    def __call__(self, drawn: Any) -> np.ndarray:
        """A picture [H, W], [H, W, C] or [C, H, W] with C = 1, 3 or 4; of a list of pictures the newest.

        Raises:
            ValueError: no picture.
        """
        newest = drawn[-1] if isinstance(drawn, list) and drawn and isinstance(drawn[-1], np.ndarray) else drawn
        try:
            array = np.asarray(array_like(newest))
        except (TypeError, ValueError, RuntimeError):
            array = np.empty(0)
        array = array[0] if array.ndim == 4 and len(array) == 1 else array
        if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
            array = array.transpose(1, 2, 0)
        array = array[:, :, None] if array.ndim == 2 else array
        if array.ndim != 3 or array.shape[2] == 2 or not array.size or array.dtype.kind not in "buif":
            shape = getattr(drawn, "shape", None)
            raise ValueError(
                f"{type(drawn).__name__}{'' if shape is None else f' of shape {tuple(shape)}'}; expected "
                "uint8 [H, W, 3]"
            )
        array = array[:, :, :3] if array.shape[2] >= 3 else np.repeat(array[:, :, :1], 3, axis=2)
        return np.ascontiguousarray(self._bytes(array))

    def _bytes(self, array: np.ndarray) -> np.ndarray:
        if array.dtype == np.uint8:
            return array
        kind = array.dtype.kind
        values = np.nan_to_num(array.astype(np.float32), posinf=255.0, neginf=0.0)
        self._most = max(self._most, float(values.max()))
        if kind == "b" or (kind == "f" and self._most <= _MOST_OF_UNIT):
            values *= 255.0
        elif array.dtype == np.uint16 and self._most > 255.0:
            values /= 257.0
        found: np.ndarray = np.clip(values + 0.5, 0.0, 255.0).astype(np.uint8)
        return found


def seen_as(spec: EnvSpec) -> str | None:
    """Line on how an observation of several dimensions is understood; None for a vector."""
    frames = spec.frames
    if frames is None:
        if len(spec.obs_shape or ()) < 2:
            return None
        return (
            f"observation {spec.obs_shape}: taken as {spec.obs_dim - spec.mask_dim} numbers; for an image use "
            f"--set env.image=true"
        )
    colours = {1: "grey", 3: "in colour"}.get(frames.channels, f"of {frames.channels} planes")
    text = f"frames of {frames.height} x {frames.width} pixels, {colours}, the last {frames.stack} at a time"
    source = frames.source
    if source is None:
        return f"observation: treated as images: {text}"
    first = "" if len(source.order) == 2 else f", channels {'first' if source.order[0] == 0 else 'last'}"
    own = (
        ""
        if source.rgb or source.channels == 1
        else (f"; if its {source.channels} channels are stacked frames: --set image.stack=1")
    )
    return f"observation {source.shape}: treated as an image{first}: {text}{own}; otherwise use --set env.image=false"
