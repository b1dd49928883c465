"""Frames of environments that observe images: one uint8 array [C, H, W] a step, grey and small as asked."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import gymnasium
import numpy as np

from spreeze.config.schema import ImageConfig
from spreeze.errors import EnvironmentError_
from spreeze.types import FrameSpec

_GREY = np.array([0.299, 0.587, 0.114], np.float32)
"""Luma of red, green and blue (ITU-R BT.601)."""


class AreaResize:
    """Shrinks or stretches a picture; each output pixel is the mean of the area that it covers.

    The weights repeat after ``gcd`` of the two sizes, so each axis is a matmul with one small block.
    """

    def __init__(self, height: int, width: int, size: int) -> None:
        self._shape, self._size = (height, width), size
        rows, columns = math.gcd(height, size), math.gcd(width, size)
        self._row_block = np.ascontiguousarray(_area_weights(height // rows, size // rows).T)
        self._column_block = _area_weights(width // columns, size // columns)
        self._input = np.empty((height * columns, width // columns), np.float32)
        self._narrow = np.empty((height * columns, size // columns), np.float32)
        self._tall = self._narrow.reshape(rows, height // rows, size)
        self._output = np.empty((rows, size // rows, size), np.float32)

    def __call__(self, picture: np.ndarray, out: np.ndarray) -> None:
        """Writes ``picture`` [H, W], of any number type, to ``out`` [size, size] uint8."""
        np.copyto(self._input, picture.reshape(self._input.shape), casting="unsafe")
        np.dot(self._input, self._column_block, out=self._narrow)
        np.matmul(self._row_block, self._tall, out=self._output)
        self._output += 0.5  # uint8 cuts off
        np.copyto(out, self._output.reshape(self._size, self._size), casting="unsafe")


def _area_weights(old: int, new: int) -> np.ndarray:
    """[old, new]: share of each old pixel in the mean of each new one."""
    scale = old / new
    edge = np.arange(new) * scale
    pixel = np.arange(old)[:, None]
    overlap = np.minimum(edge + scale, pixel + 1) - np.maximum(edge, pixel)
    weights: np.ndarray = np.maximum(overlap, 0.0) / scale
    return weights.astype(np.float32)


class ImageFrames(gymnasium.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Frames of any environment whose observation is a uint8 image [H, W] or [H, W, C]."""

    def __init__(self, env: gymnasium.Env[Any, Any], options: ImageConfig) -> None:
        """Takes the sizes from the observation space.

        Raises:
            EnvironmentError_: an image that is neither grey nor red, green and blue.
        """
        super().__init__(env)
        shape = env.observation_space.shape or ()
        if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3)):
            name = env.spec.id if env.spec else str(env)
            raise EnvironmentError_(f"{name}: an image of shape {shape}; expected [H, W], [H, W, 1] or [H, W, 3]")
        height, width = shape[:2]
        self._to_grey = options.grey and len(shape) == 3 and shape[2] == 3
        channels = 3 if len(shape) == 3 and shape[2] == 3 and not options.grey else 1
        size = options.size
        self._resize = AreaResize(height, width, size)
        self.frame_spec = FrameSpec(
            channels=channels, height=size, width=size, stack=options.stack, sign_rewards=False,
            options=asdict(options),
        )
        self.observation_space = gymnasium.spaces.Box(0, 255, self.frame_spec.shape, np.uint8)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """The frame [C, H, W] of an image, a new array."""
        planes: Any = observation @ _GREY if self._to_grey else observation
        planes = planes[None] if planes.ndim == 2 else np.moveaxis(planes, 2, 0)
        out = np.empty(self.frame_spec.shape, np.uint8)
        for plane, target in zip(planes, out, strict=True):
            self._resize(plane, target)
        return out
