"""Policies in NumPy, for samplers, evaluator and visualizer: torch is never loaded there.

Below some sixteen observations a NumPy pass costs a third of torch's: 12 against 37 us at 2x256.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spreeze.convolution import Trunk
from spreeze.errors import WeightsError
from spreeze.heads import Head, head_of

OBS_CLIP = 10.0
"""Bound of a normalised observation."""

# As float32 arrays: a ufunc spends a microsecond on finding the type of a Python number.
_ZERO = np.array(0.0, np.float32)
_OBS_LOW, _OBS_HIGH = np.array(-OBS_CLIP, np.float32), np.array(OBS_CLIP, np.float32)

Arrays = dict[str, np.ndarray]


class Policy:
    """An actor's weights and what to do with them; one instance serves one caller at a time."""

    def __init__(
        self,
        layers: list[tuple[np.ndarray, np.ndarray]],
        head: Head,
        obs_scale: tuple[np.ndarray, np.ndarray] | None,
        trunk: Trunk | None = None,
    ) -> None:
        self._layers, self._head, self._obs_scale, self._trunk = layers, head, obs_scale, trunk
        self.obs_dim = layers[0][0].shape[0]
        self._rows = -1
        self._buffers: list[np.ndarray] = []

    @classmethod
    def from_weights(cls, arrays: Arrays, meta: dict[str, Any]) -> Policy:
        """Builds the policy that ``policy_arrays`` and ``policy_meta`` of an algorithm describe.

        ``obs_mean`` and ``obs_std`` [O] among the arrays switch the observation normaliser on.

        Raises:
            WeightsError: a layer is missing or shapes do not fit each other.
        """
        head = head_of(meta)
        names = [(f"w{index}", f"b{index}") for index in range(len(meta.get("hidden_sizes", ())))]
        layers = [_layer(arrays, *pair) for pair in [*names, ("head_w", "head_b")]]
        trunk = Trunk(arrays, meta) if "cnn" in meta else None
        fan_ins = [trunk.features if trunk else int(meta["obs_dim"]), *(weight.shape[1] for weight, _ in layers)]
        for (weight, _), fan_in in zip(layers, fan_ins, strict=False):
            if weight.shape[0] != fan_in:
                raise WeightsError(f"weights do not fit each other: a layer takes {weight.shape[0]}, gets {fan_in}")
        if layers[-1][0].shape[1] != head.outputs:
            raise WeightsError(f"weights give {layers[-1][0].shape[1]} outputs; {head.outputs} are needed")
        return cls(layers, head, _obs_scale(arrays, fan_ins[0]), trunk)

    def act(self, obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Exploring actions: sampled, with noise, or sometimes random, by the kind of policy.

        Args:
            obs: [N, O] float32, or images uint8 [N, k, C, H, W].
            rng: source of the noise.

        Returns:
            [N, A] float32, a new array.
        """
        return self._head.explore(self._forward(obs), rng)

    def act_greedy(self, obs: np.ndarray) -> np.ndarray:
        """Actions without noise; [N, O] to [N, A], a new array."""
        return self._head.greedy(self._forward(obs))

    def _forward(self, obs: np.ndarray) -> np.ndarray:
        """Raw output [N, K] of the network, in a buffer that the next call overwrites."""
        if len(obs) != self._rows:
            self._rows = len(obs)
            self._buffers = [np.empty((self._rows, weight.shape[1]), np.float32) for weight, _ in self._layers]
        x = obs if self._trunk is None else self._trunk(obs)
        if self._obs_scale is not None:
            mean, std = self._obs_scale
            x = np.subtract(obs, mean)
            x /= std
            np.maximum(x, _OBS_LOW, out=x)
            np.minimum(x, _OBS_HIGH, out=x)
        last = len(self._layers) - 1
        for index, ((weight, bias), buffer) in enumerate(zip(self._layers, self._buffers, strict=True)):
            np.dot(x, weight, out=buffer)
            buffer += bias
            if index < last:
                np.maximum(buffer, _ZERO, out=buffer)
            x = buffer
        return x


def _layer(arrays: Arrays, weight_name: str, bias_name: str) -> tuple[np.ndarray, np.ndarray]:
    for name in (weight_name, bias_name):
        if name not in arrays:
            raise WeightsError(f"weights have no '{name}'; publish them again with this version")
    weight = np.ascontiguousarray(arrays[weight_name], np.float32)
    bias = np.ascontiguousarray(arrays[bias_name], np.float32)
    if weight.ndim != 2 or bias.shape != weight.shape[1:]:
        raise WeightsError(f"weights '{weight_name}' {weight.shape} and '{bias_name}' {bias.shape} do not fit")
    return weight, bias


def _obs_scale(arrays: Arrays, obs_dim: int) -> tuple[np.ndarray, np.ndarray] | None:
    if "obs_mean" not in arrays:
        return None
    mean, std = (np.ascontiguousarray(arrays[name], np.float32) for name in ("obs_mean", "obs_std"))
    if mean.shape != (obs_dim,) or std.shape != (obs_dim,):
        raise WeightsError(f"normaliser has shapes {mean.shape} and {std.shape}; ({obs_dim},) is needed")
    return mean, std
