"""Heads of action-value networks: dueling streams, distributions of the return, and noisy weights.

A distributional head has Z outputs per action. *Quantile* (QR-DQN; Dabney et al. 2018, arXiv 1710.10044): quantiles of
the return. *Categorical* (C51; Bellemare et al. 2017, arXiv 1707.06887): logits of returns on a grid. Actions are
chosen by the mean. Rewards are in the unit of ``inference.normalizer``, so one grid and one threshold of Huber's loss
fit tasks of any reward scale; a mean far from 0 needs a wider grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Generic, TypeVar

from spreeze.algorithms import losses
from spreeze.algorithms.networks.conv_networks import ConvParameters
from spreeze.algorithms.networks.fused_mlp import Parameters, aligned
from spreeze.inference.lazy_torch import Tensor, torch

N = TypeVar("N", bound=Parameters | ConvParameters)


class QuantileReturns:
    """Z quantiles at the middle levels ``(2 k + 1) / (2 Z)``; the loss is eq. 10 of arXiv 1710.10044 over Z."""

    def __init__(self, quantiles: int, device: torch.device) -> None:
        self.outputs = quantiles
        """Z: outputs for each action."""
        self._levels = torch.arange(quantiles, device=device).add(0.5).div_(quantiles)
        self._latest: tuple[Tensor, Tensor] | None = None

    def means(self, out: Tensor) -> Tensor:
        """Mean returns [..., K, B] of outputs [..., K, Z, B]."""
        return out.mean(-2)

    def next_returns(self, out: Tensor) -> Tensor:
        """M returns [M, B] from the outputs [Z, B] of the next actions, in new memory; for ``loss_gradient``."""
        return out.clone()

    def loss_gradient(self, out: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Derivative [Z, B] of the loss to outputs [Z, B], mean errors [B] and mean targets [B]; target [M, B]."""
        self._latest, mean = (out, target), target.mean(0)
        gradient = losses.quantile_huber_gradient(out, target, self._levels).div_(self.outputs)
        return gradient.add_(_unless_finite(target)), out.mean(0) - mean, mean

    def row_losses(self) -> Tensor:
        """The loss [B] of the latest ``loss_gradient``."""
        assert self._latest is not None
        out, target = self._latest
        error = target - out.unsqueeze(1)  # [Z, M, B]
        weight = (self._levels.view(-1, 1, 1) - (error < 0.0).to(error.dtype)).abs_()
        size = error.abs_()
        huber = torch.where(size < 1.0, size.square().mul(0.5), size - 0.5)
        return huber.mul_(weight).mean((0, 1))

    def folded(self, outputs: Tensor) -> Tensor:
        """Head rows [k, Z, C] for samplers: rows of the mean [k, 1, C] if it is linear in the outputs."""
        return outputs.mean(1, keepdim=True)


class CategoricalReturns:
    """Logits of Z returns from ``low`` to ``high``, methods as in ``QuantileReturns``.

    The loss is the cross-entropy with the projected target.
    """

    def __init__(self, atoms: int, low: float, high: float, device: torch.device) -> None:
        self.outputs, self._range = atoms, (low, high)
        self.grid = torch.linspace(low, high, atoms, device=device)
        """[Z]"""
        self._next_prob: Tensor | None = None
        self._latest: tuple[Tensor, Tensor] | None = None

    def means(self, out: Tensor) -> Tensor:
        return (out.softmax(-2) * self.grid.unsqueeze(1)).sum(-2)

    def next_returns(self, out: Tensor) -> Tensor:
        self._next_prob = out.softmax(0)
        return self.grid.unsqueeze(1).repeat(1, out.shape[1])

    def loss_gradient(self, out: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self._next_prob is not None
        target_prob, grid = losses.projected(self._next_prob, target, *self._range), self.grid.unsqueeze(1)
        self._latest, gradient, mean = (out, target_prob), out.softmax(0).sub_(target_prob), (target_prob * grid).sum(0)
        return gradient.add(_unless_finite(target)), (gradient * grid).sum(0), mean

    def row_losses(self) -> Tensor:
        """KL divergence from the target, which unlike the cross-entropy is 0 at the optimum."""
        assert self._latest is not None
        out, target_prob = self._latest
        return (torch.xlogy(target_prob, target_prob) - target_prob * out.log_softmax(0)).sum(0).clamp_(min=0.0)

    def folded(self, outputs: Tensor) -> Tensor:
        return outputs


ReturnHead = QuantileReturns | CategoricalReturns


def _unless_finite(target: Tensor) -> Tensor:
    """0 per row [B], NaN if a target [M, B] is not finite, which clamps would hide from the optimizer."""
    total = target.sum(0)
    return total - total


class DuelingHead:
    """A dueling head ``Q = V + A - mean A`` as the linear map ``joint`` [K, 1 + K] from its outputs V, A_1 .. A_K.

    With Z outputs per action, V and each A have Z, each under the same map (Hessel et al. 2018, arXiv 1710.02298).
    """

    def __init__(self, parameters: Parameters, num_actions: int, outputs: int = 1) -> None:
        like, half, self._outputs = parameters.flat, parameters.sizes[-2] // 2, outputs
        self.joint = like.new_full((num_actions, 1 + num_actions), -1.0 / num_actions)
        self.joint[:, 0] = 1.0
        self.joint[:, 1:].diagonal().add_(1.0)
        self.mask = torch.zeros_like(parameters.head_weight)
        self.mask[:, :outputs, :half] = 1.0
        self.mask[:, outputs:, half:] = 1.0

    def initialize(self, parameters: Parameters) -> None:
        """Removes the connections between the streams, and scales weights: each stream reads half of the layer."""
        parameters.head_weight.mul_(self.mask).mul_(math.sqrt(2.0))
        parameters.head_bias.mul_(math.sqrt(2.0))

    def join(self, out: Tensor) -> Tensor:
        """Outputs [S, K Z, B] of all actions from those of the streams [S, (1 + K) Z, B]."""
        rows = out.shape[2]
        return torch.matmul(self.joint, out.view(len(out), self.joint.shape[1], -1)).view(len(out), -1, rows)

    def join_rows(self, out: Tensor) -> Tensor:
        """``join`` of outputs row by row: [B, K Z] from [B, (1 + K) Z]."""
        return self._by_rows(self.joint, out)

    def part_rows(self, grad: Tensor) -> Tensor:
        """The streams' gradient [B, (1 + K) Z] from that of all actions [B, K Z]."""
        return self._by_rows(self.joint.t(), grad)

    def _by_rows(self, matrix: Tensor, rows: Tensor) -> Tensor:
        if self._outputs == 1:
            return rows @ matrix.t()
        return torch.matmul(matrix, rows.view(len(rows), -1, self._outputs)).flatten(1)

    def part(self, grad: Tensor, out: Tensor) -> None:
        """The streams' gradient ``out`` [S, (1 + K) Z, B] from that of all actions [S, K Z, B]."""
        stack, (actions, streams) = len(grad), self.joint.shape
        torch.matmul(self.joint.t(), grad.view(stack, actions, -1), out=out.view(stack, streams, -1))


def perceptron_of(networks: Parameters | ConvParameters) -> Parameters:
    """The perceptron alone, without convolutions."""
    return networks if isinstance(networks, Parameters) else networks.mlp


class NoisyNetworks(Generic[N]):
    """Learned means and deviations of a perceptron's weights, and the latest sample of these weights.

    The noise replaces random actions as exploration (Fortunato et al. 2018, arXiv 1706.10295, factorised by eq. 10 and
    11): ``f(e_in) f(e_out)`` for a weight, ``f(e_out)`` for a bias, with ``f(x) = sign(x) sqrt|x|`` and a standard
    normal number for each input and output of a layer. Convolutions have no noise.
    """

    def __init__(self, make: Callable[[], N], scale: float) -> None:
        """``scale`` is sigma_0: the initial value of a deviation is ``scale / sqrt(inputs)``."""
        self.drawn: N = make()
        count, self._scale = len(self.drawn.flat), scale
        start = aligned(count)
        self.flat = self.drawn.flat.new_zeros(2 * start)
        """The means, then the deviations."""
        self.means, self.deviations = self.drawn.over(self.flat[:count]), self.drawn.over(self.flat[start:][:count])
        self._noise = self.drawn.over(torch.zeros_like(self.drawn.flat))
        sizes = perceptron_of(self.drawn).sizes
        self._sides = [size for pair in pairwise(sizes) for size in pair]
        self._normal = self.flat.new_zeros(sum(self._sides))

    def initialize(self, generator: torch.Generator) -> None:
        self.means.initialize(generator)
        for tensor, inputs in perceptron_of(self.deviations).blocks():
            tensor.fill_(self._scale / math.sqrt(inputs))

    def draw(self, fill: Callable[[Tensor], None]) -> None:
        """Samples all weights anew; ``fill`` fills a tensor with standard normal numbers."""
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
        """Adds the deviations' gradient to that of the sampled weights, which equals that of the means."""
        torch.mul(gradient.means.flat, self._noise.flat, out=gradient.deviations.flat)
