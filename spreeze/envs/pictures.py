"""Pictures: finds them in observations, and converts rendered ones to bytes.

A part of an observation is a picture if its space is a Box of bytes up to 255 with at least 36 pixels a side, channels
first or last. With ``env.image = true`` any bounded array of that size is one (of any size, if it is the only part),
scaled from its bounds to bytes; with ``env.image = false`` none is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spreeze.envs.obs_flattening import Leaf, leaves_of, path_text
from spreeze.envs.scalars import array_like
from spreeze.errors import EnvError
from spreeze.types import EnvSpec, PictureSpec

MIN_SIDE = 36  # minimum height and width of bytes that count as a picture: a board or a map of cells is smaller
_MAX_OF_UNIT = 1.5
"""Largest value of floats in 0 .. 1, with some overshoot by interpolation; in 0 .. 255 such pictures would be black."""


def pictures_in(space: Any, wanted: bool | None = None, what: str = "observation space") -> tuple[PictureSpec, ...]:
    """The pictures of an observation space, which errors call ``what``; empty if it has only numbers.

    ``wanted`` is the setting ``env.image``. An EnvError if a picture is wanted and no part can be one, or as
    ``leaves_of``.
    """
    if wanted is False:
        return ()
    leaves = leaves_of(space, what)
    if not wanted:
        return tuple(_picture(leaf) for leaf in leaves if is_picture(leaf.space))
    if len(leaves) == 1:
        return (_picture(leaves[0], wanted=True),)
    if large := [leaf for leaf in leaves if _is_large(leaf.space) and _bounds(leaf.space)]:
        return tuple(_picture(leaf, wanted=True) for leaf in large)
    raise EnvError(
        f"env.image = true: {what} has no image (a bounded Box of at least {MIN_SIDE} x {MIN_SIDE} pixels), but "
        f"{', '.join(leaf.text() for leaf in leaves)[:200] or 'no part'}; remove it"
    )


def _picture(leaf: Leaf, *, wanted: bool = False) -> PictureSpec:
    space, bounds = leaf.space, (0.0, 255.0)
    shape = tuple(space.shape or ())
    if wanted:
        text = " ".join(str(space).split())[:120]
        if not _is_box(space) or not 2 <= len(shape) <= 4:
            raise EnvError(
                f"env.image = true: observation space {text} is not an image: expected one Box [H, W], "
                "[H, W, C] or [C, H, W], optionally in a Dict"
            )
        if (known := _bounds(space)) is None:
            raise EnvError(
                f"env.image = true: observation space {text} is unbounded: an image needs bounds, such as 0 and 1"
            )
        bounds = known
    return PictureSpec(path=leaf.path, shape=shape, order=_order(shape), bounds=bounds)


def _is_box(space: Any) -> bool:
    from gymnasium import spaces

    return isinstance(space, spaces.Box)


def _bounds(space: Any) -> tuple[float, float] | None:
    """The values that become bytes 0 and 255; None if a Box has no bounds."""
    if space.dtype == np.uint8:
        return 0.0, 255.0
    low, high = float(np.min(space.low)), float(np.max(space.high))
    return (low, high) if 0.0 < high - low < float("inf") else None


def _height_axis(shape: tuple[int, ...]) -> int | None:
    """The first of the only two axes that are large enough for a picture, if they follow each other; else None."""
    large = [axis for axis, length in enumerate(shape) if length >= MIN_SIDE]
    return large[0] if len(large) == 2 and large[1] == large[0] + 1 else None


def _is_large(space: Any) -> bool:
    return _is_box(space) and len(space.shape) <= 4 and _height_axis(space.shape) is not None


def is_picture(space: Any) -> bool:
    """True if a leaf space is declared like a picture: bytes up to 255, of sufficient size."""
    return _is_large(space) and space.dtype == np.uint8 and bool(np.max(space.high) == 255)


def _order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a picture with channels first, height and width last."""
    height = _height_axis(shape) if len(shape) > 2 else 0
    if height is None:  # of the last three, two sides of the same length; else the fewest are the channels
        first, middle, last = shape[-3:]
        channels_last = last <= first if (first == middle) == (middle == last) else first == middle
        height = len(shape) - 2 - channels_last
    return (*(axis for axis in range(len(shape)) if axis not in (height, height + 1)), height, height + 1)


def refuse_pictures(space: Any, what: str) -> None:
    """Raises an EnvError if the observation space ``what`` of a vector engine or team has a picture."""
    for leaf in leaves_of(space, what):
        if is_picture(leaf.space):
            raise EnvError(
                f"{what}: '{leaf.name}' is an image of a vector engine or team, which is not supported; use --set "
                f"env.image=false to treat it as {leaf.stop - leaf.start} values"
            )


class DrawnPictures:
    """Converts rendered pictures of one environment, one after the other, to uint8 [H, W, 3].

    Floats count as 0 .. 1 until a larger value appears, two-byte integers likewise as 0 .. 255.
    """

    def __init__(self) -> None:
        self._max = 0.0
        """The largest value so far."""

    def __call__(self, drawn: Any) -> np.ndarray:
        """Converts a picture [H, W], [H, W, C] or [C, H, W], C = 1, 3 or 4, or a list's last; else a ValueError."""
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
        self._max = max(self._max, float(values.max()))
        if kind == "b" or (kind == "f" and self._max <= _MAX_OF_UNIT):
            values *= 255.0
        elif array.dtype == np.uint16 and self._max > 255.0:
            values /= 257.0
        picture: np.ndarray = np.clip(values + 0.5, 0.0, 255.0).astype(np.uint8)
        return picture


def images_as_numbers(space: Any) -> str | None:
    """A line about parts of a nested observation that are taken as numbers, but could be images; None without any."""
    leaves = leaves_of(space, "observation space")
    large = [leaf for leaf in leaves if len(leaves) > 1 and _is_large(leaf.space) and _bounds(leaf.space)]
    if not large:
        return None
    parts = ", ".join(f"{leaf.name} {leaf.space.shape}" for leaf in large)
    return f"observation: {parts} taken as numbers; for an image use --set env.image=true"


def observation_note(spec: EnvSpec) -> str | None:
    """A line about the interpretation of an observation with several dimensions; None for a vector."""
    frames = spec.frames
    if frames is None:
        if len(spec.obs_shape or ()) < 2:
            return None
        return (
            f"observation {spec.obs_shape}: taken as {spec.obs_dim - spec.mask_dim} numbers; for an image use "
            "--set env.image=true"
        )
    colours = {1: "grey", 3: "in colour"}.get(frames.channels, f"of {frames.channels} planes")
    text = f"frames of {frames.height} x {frames.width} pixels, {colours}, the last {frames.stack} at a time"
    source = frames.source
    if source is None:
        return f"observation: treated as images: {text}"
    if spec.obs_layout:
        pairs = zip((source, *frames.more), frames.images, strict=True)
        images = [f"{path_text(part.path)} {part.shape} as {' x '.join(map(str, image))}" for part, image in pairs]
        numbers = f" and {count} number{'s' * (count > 1)}" if (count := frames.vector_dim - spec.mask_dim) else ""
        return (
            f"observation: treated as {len(images)} image{'s' * (len(images) > 1)} ({', '.join(images)}; the last "
            f"{frames.stack} frames){numbers}; otherwise use --set env.image=false"
        )
    first = "" if len(source.order) == 2 else f", channels {'first' if source.order[0] == 0 else 'last'}"
    if not source.rgb and source.channels > 1:
        text += f"; if its {source.channels} channels are stacked frames: --set image.stack=1"
    return f"observation {source.shape}: treated as an image{first}: {text}; otherwise use --set env.image=false"
