"""Noise of a noisy network (Fortunato et al. 2018, 1706.10295) in NumPy, for samplers."""

from __future__ import annotations

from typing import Any

import numpy as np

from spreeze.errors import WeightsError

Layers = list[tuple[np.ndarray, np.ndarray]]


class NoisyLayers:
    """The noise of a perceptron's layers; each row of each step has its own.

    With the factorised noise of ``algorithms.value_heads`` that of a row's products is
    ``((x f(e_in)) deviations) f(e_out)``: one more matmul a layer, and no weights are drawn.
    """

    def __init__(self, arrays: dict[str, np.ndarray], meta: dict[str, Any], layers: Layers) -> None:
        """Reads ``noise_w0`` to ``noise_head_b``; the head's are those of the streams and outputs that it was made of.

        Raises:
            WeightsError: shapes do not fit those of ``layers``.
        """
        names = [str(index) for index in range(len(layers) - 1)]
        pairs = [*((f"noise_w{name}", f"noise_b{name}") for name in names), ("noise_head_w", "noise_head_b")]
        self._layers = [tuple(np.ascontiguousarray(arrays[name], np.float32) for name in pair) for pair in pairs]
        about = meta["noisy"]
        self._duelling, self._outputs, self._mean = bool(about["duelling"]), int(about["outputs"]), bool(about["mean"])
        for index, (weight, bias) in enumerate(layers):
            found, x = self._layers[index], np.zeros((1, len(weight)), np.float32)
            fits = found[0].shape == (len(weight), len(found[1]))
            if not fits or self.draw(index, x, np.random.default_rng(0))[0].shape[1:] != bias.shape:
                raise WeightsError(f"noise of shape {found[0].shape} does not fit a layer of shape {weight.shape}")

    def draw(self, index: int, x: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Noise of the products of inputs ``x`` [N, I] with a layer's weights, and of its bias, both [N, H]."""
        weight, bias = self._layers[index]
        product = np.dot(x * _factors(rng, x.shape), weight)
        outs = _factors(rng, product.shape)
        product *= outs
        outs *= bias
        if index < len(self._layers) - 1:
            return product, outs
        return self._folded(product), self._folded(outs)

    def _folded(self, values: np.ndarray) -> np.ndarray:
        """Noise of the head's outputs from that of its streams, or of the mean from that of its quantiles."""
        parts = values.reshape(len(values), -1, self._outputs)
        if self._mean:
            parts = parts.mean(2, keepdims=True)
        if self._duelling:
            own = parts[:, 1:]
            parts = own - own.mean(1, keepdims=True) + parts[:, :1]
        return parts.reshape(len(values), -1)


def _factors(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """``sign(e) sqrt|e|`` of standard normal e."""
    normal = rng.standard_normal(shape, np.float32)
    return np.copysign(np.sqrt(np.abs(normal)), normal)
