"""Observations in units of their running deviation, as networks read them where there is a normaliser."""

from __future__ import annotations

import numpy as np

from spreeze.errors import WeightsError

OBS_CLIP = 10.0
"""Bound of a normalized observation."""
# As float32 arrays, since a ufunc takes a microsecond to find the type of a Python number.
_LOW, _HIGH = np.array(-OBS_CLIP, np.float32), np.array(OBS_CLIP, np.float32)


def obs_scale(arrays: dict[str, np.ndarray], obs_dim: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and deviation [O] among a policy's arrays; None without a normaliser."""
    if "obs_mean" not in arrays:
        return None
    mean, std = (np.ascontiguousarray(arrays[name], np.float32) for name in ("obs_mean", "obs_std"))
    if mean.shape != (obs_dim,) or std.shape != (obs_dim,):
        raise WeightsError(f"normalizer has shapes {mean.shape} and {std.shape}; ({obs_dim},) is needed")
    return mean, std


def scaled(x: np.ndarray, scale: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray:
    """Observations [N, O], normalized and clipped if there is a normalizer."""
    if scale is None:
        return x
    mean, std = scale
    x = np.subtract(x, mean)
    x /= std
    np.maximum(x, _LOW, out=x)
    np.minimum(x, _HIGH, out=x)
    return x
