"""Networks that explore by noise in their weights, in place of random actions (Fortunato et al. 2018, 1706.10295)."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Generic, TypeVar

from spreeze.algorithms.conv_networks import ConvParameters
from spreeze.algorithms.fused_mlp import Parameters
from spreeze.inference.lazy_torch import Tensor, torch

N = TypeVar("N", bound=Parameters | ConvParameters)
_ALIGN = 16
"""Float32 values in a cache line."""


def perceptron_of(networks: Parameters | ConvParameters) -> Parameters:
    """The perceptron alone, without convolutions."""
    return networks if isinstance(networks, Parameters) else networks.mlp


class NoisyNetworks(Generic[N]):
    """Means and deviations of a perceptron's weights, both learned, and the latest draw of these weights.

    The noise is factorised (eq. 10 and 11 of the paper): that of a weight is ``f(e_in) f(e_out)``, of a bias
    ``f(e_out)``, with ``f(x) = sign(x) sqrt|x|`` and a standard normal number for each input and output of a layer.
    Convolutions have none.
    """

    def __init__(self, make: Callable[[], N], scale: float) -> None:
        """``scale`` is sigma_0: a deviation begins at ``scale / sqrt(inputs)``."""
        self.drawn: N = make()
        count, self._scale = len(self.drawn.flat), scale
        start = -(-count // _ALIGN) * _ALIGN
        self.flat = self.drawn.flat.new_zeros(2 * start)
        """The means, then the deviations."""
        self.means, self.deviations = self.drawn.over(self.flat[:count]), self.drawn.over(self.flat[start:][:count])
        self._noise = self.drawn.over(torch.zeros_like(self.drawn.flat))
        sizes = perceptron_of(self.drawn).sizes
        self._sides = [size for pair in pairwise(sizes) for size in pair]
        self._normal = self.flat.new_zeros(sum(self._sides))

    def initialise(self, generator: torch.Generator) -> None:
        self.means.initialise(generator)
        for tensor, inputs in perceptron_of(self.deviations).blocks():
            tensor.fill_(self._scale / math.sqrt(inputs))

    def draw(self, fill: Callable[[Tensor], None]) -> None:
        """Draws all weights anew; ``fill`` fills a tensor with standard normal numbers."""
        fill(self._normal)
        sides = torch.split(self._normal.sign() * self._normal.abs().sqrt_(), self._sides)
        noise = perceptron_of(self._noise)
        for weight, bias, ins, outs in zip(noise.weights, noise.biases, sides[:-2:2], sides[1:-2:2], strict=True):
            torch.mul(ins.unsqueeze(1), outs, out=weight[0])
            bias[0, 0] = outs
        torch.mul(sides[-1].unsqueeze(1), sides[-2], out=noise.head_weight[0])
        noise.head_bias[0, :, 0] = sides[-1]
        torch.addcmul(self.means.flat, self.deviations.flat, self._noise.flat, out=self.drawn.flat)

    def set_gradient(self, gradient: NoisyNetworks[N]) -> None:
        """Completes a gradient by the drawn weights, which is also that by the means, with that by the deviations."""
        torch.mul(gradient.means.flat, self._noise.flat, out=gradient.deviations.flat)
