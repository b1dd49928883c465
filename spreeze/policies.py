"""Policies in NumPy, for samplers, evaluator and visualizer: torch is never loaded there.

Below some sixteen observations a NumPy pass costs a third of torch's: 12 against 37 us at 2x256.

The last bits of a row of a matrix product depend on how many rows there are: OpenBLAS 0.3.31 gave up to 3
results for one row over 1 to 64 rows, but one and the same at every place of a product of 4, 8, 16 or 32 (15
shapes, 3 x 64 to 3136 x 512). So ``draw`` works in tiles of a fixed number of rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from spreeze.convolution import Trunk
from spreeze.errors import WeightsError
from spreeze.heads import Arrays, DrawingHead, Head, head_of

OBS_CLIP = 10.0
"""Bound of a normalised observation."""
TILE = 8
"""Rows of one product in ``draw``: at 2x256 a product of 16 takes 2.6 times as long, of 4 three quarters."""

# As float32 arrays: a ufunc spends a microsecond on finding the type of a Python number.
_ZERO = np.array(0.0, np.float32)
_OBS_LOW, _OBS_HIGH = np.array(-OBS_CLIP, np.float32), np.array(OBS_CLIP, np.float32)

ACTIVATIONS = ("relu", "tanh")
"""What may follow a hidden layer."""


class Policy:
    """An actor's weights and what to do with them; one instance serves one caller at a time."""

    def __init__(
        self,
        layers: list[tuple[np.ndarray, np.ndarray]],
        head: Head,
        obs_scale: tuple[np.ndarray, np.ndarray] | None,
        trunk: Trunk | None = None,
        activation: str = "relu",
    ) -> None:
        self._layers, self._head, self._obs_scale, self._trunk = layers, head, obs_scale, trunk
        self._tanh = activation == "tanh"
        self.obs_dim = layers[0][0].shape[0]
        self._rows = -1
        self._buffers: list[np.ndarray] = []
        self._drawing = head if isinstance(head, DrawingHead) else None
        if self._drawing is not None:
            self._tile = _Tile(layers, self._drawing.noise_dim)

    @classmethod
    def from_weights(cls, arrays: Arrays, meta: dict[str, Any]) -> Policy:
        """Builds the policy that ``policy_arrays`` and ``policy_meta`` of an algorithm describe.

        ``obs_mean`` and ``obs_std`` [O] among the arrays switch the observation normaliser on; ``activation``
        in the metadata is one of ``ACTIVATIONS``, ReLU if it is not there.

        Raises:
            WeightsError: a layer is missing or shapes do not fit each other.
        """
        head, activation = head_of(meta, arrays), meta.get("activation", ACTIVATIONS[0])
        if activation not in ACTIVATIONS:
            raise WeightsError(f"weights need the activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
        names = [(f"w{index}", f"b{index}") for index in range(len(meta.get("hidden_sizes", ())))]
        layers = [_layer(arrays, *pair) for pair in [*names, ("head_w", "head_b")]]
        trunk = Trunk(arrays, meta) if "cnn" in meta else None
        fan_ins = [trunk.features if trunk else int(meta["obs_dim"]), *(weight.shape[1] for weight, _ in layers)]
        for (weight, _), fan_in in zip(layers, fan_ins, strict=False):
            if weight.shape[0] != fan_in:
                raise WeightsError(f"weights do not fit each other: a layer takes {weight.shape[0]}, gets {fan_in}")
        if layers[-1][0].shape[1] != head.outputs:
            raise WeightsError(f"weights give {layers[-1][0].shape[1]} outputs; {head.outputs} are needed")
        return cls(layers, head, _obs_scale(arrays, fan_ins[0]), trunk, activation)

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

    @property
    def noise_dim(self) -> int:
        """Z: values of noise that ``draw`` takes for one action; standard normal, or uniform in [0, 1) for discrete."""
        return self._drawing_head().noise_dim

    def draw(self, obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Exploring actions by given noise; each row's result is a function of that row alone, bit by bit.

        Args:
            obs: [N, O] float32, or images uint8 [N, k, C, H, W].
            noise: [N, Z] float32.

        Returns:
            Actions [N, A] float32, continuous ones not clipped to [-1, 1], and their log-probabilities [N]
            float32 in nat; new arrays.

        Raises:
            WeightsError: a policy of a kind that draws its own noise.
        """
        rows = len(obs)
        if rows <= TILE:
            return self._draw_tile(obs, noise)
        tiles = [self._draw_tile(obs[begin : begin + TILE], noise[begin : begin + TILE])
                 for begin in range(0, rows, TILE)]
        return np.concatenate([tile[0] for tile in tiles]), np.concatenate([tile[1] for tile in tiles])

    def _draw_tile(self, obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``draw`` of at most ``TILE`` rows."""
        head, tile, rows = self._drawing_head(), self._tile, len(obs)
        tile.fill(obs if self._trunk is None else self._trunk(obs), noise)
        action, log_prob = head.draw(self._run(self._scaled(tile.features), tile.buffers, tile.row_by_row), tile.noise)
        return action[:rows], log_prob[:rows]

    def _drawing_head(self) -> DrawingHead:
        if self._drawing is None:
            raise WeightsError(f"a policy of kind {type(self._head).__name__} draws its own noise; only on-policy "
                               "algorithms collect with noise from outside")
        return self._drawing

    def _forward(self, obs: np.ndarray) -> np.ndarray:
        """Raw output [N, K] of the network, in a buffer that the next call overwrites."""
        if len(obs) != self._rows:
            self._rows = len(obs)
            self._buffers = [np.empty((self._rows, weight.shape[1]), np.float32) for weight, _ in self._layers]
        x = obs if self._trunk is None else self._trunk(obs)
        return self._run(self._scaled(x), self._buffers)

    def _scaled(self, x: np.ndarray) -> np.ndarray:
        """Observations as the network takes them: normalised and clipped where there is a normaliser."""
        if self._obs_scale is None:
            return x
        mean, std = self._obs_scale
        x = np.subtract(x, mean)
        x /= std
        np.maximum(x, _OBS_LOW, out=x)
        np.minimum(x, _OBS_HIGH, out=x)
        return x

    def _run(self, x: np.ndarray, buffers: list[np.ndarray], row_by_row: bool = False) -> np.ndarray:
        """All layers over x [N, I], in ``buffers``; returns the last one."""
        last = len(self._layers) - 1
        for index, ((weight, bias), buffer) in enumerate(zip(self._layers, buffers, strict=True)):
            if row_by_row:
                np.matmul(x[:, None], weight, out=buffer[:, None])
            else:
                np.dot(x, weight, out=buffer)
            buffer += bias
            if index < last:
                if self._tanh:
                    np.tanh(buffer, out=buffer)
                else:
                    np.maximum(buffer, _ZERO, out=buffer)
            x = buffer
        return x


class _Tile:
    """Buffers of ``TILE`` rows for one pass; rows that are not in use are zero."""

    def __init__(self, layers: list[tuple[np.ndarray, np.ndarray]], noise_dim: int) -> None:
        self.features = np.zeros((TILE, layers[0][0].shape[0]), np.float32)
        self.noise = np.zeros((TILE, noise_dim), np.float32)
        self.buffers = [np.zeros((TILE, weight.shape[1]), np.float32) for weight, _ in layers]
        self.row_by_row = not all(places_agree(*weight.shape) for weight, _ in layers)
        self._used = 0

    def fill(self, features: np.ndarray, noise: np.ndarray) -> None:
        """Takes in the first ``len(features)`` rows."""
        rows = len(features)
        self.features[:rows], self.noise[:rows] = features, noise
        if rows < self._used:
            self.features[rows : self._used], self.noise[rows : self._used] = 0.0, 0.0
        self._used = rows


@cache
def places_agree(inputs: int, outputs: int) -> bool:
    """Whether this machine's product of ``TILE`` rows gives a row the same bits at every place and in any company.

    The order in which a kernel sums depends on place and shape, not on values: a trial with full mantissas tells.
    Where it fails, ``draw`` multiplies row by row, at two to four times the cost.
    """
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((inputs, outputs)).astype(np.float32)
    row = rng.standard_normal(inputs).astype(np.float32)
    found = set()
    for place in range(TILE):
        x = rng.standard_normal((TILE, inputs)).astype(np.float32)
        x[place] = row
        found.add(np.dot(x, weight)[place].tobytes())
    return len(found) == 1



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
