"""Networks for images: a convolutional trunk followed by a perceptron, by autograd.

Parameters lie in one flat vector, so that optimizer, target and checkpoint are the same as for other networks.
"""

from __future__ import annotations

import math

import numpy as np

from spreeze.algorithms.fused_mlp import (
    RELU,
    HiddenLayers,
    Parameters,
    host_copies,
    orthogonal_,
    parameter_count,
    policy_arrays,
    uniform_,
)
from spreeze.errors import ConfigError
from spreeze.inference.convolution import ConvLayer, conv_layers, features
from spreeze.inference.lazy_torch import Tensor, functional, torch
from spreeze.types import FrameSpec

_PIXEL = 1.0 / 255.0
HIDDEN_GAIN, POLICY_GAIN, VALUE_GAIN = math.sqrt(2.0), 0.01, 1.0
"""Gains of orthogonal initialisation (Saxe et al. 2014, arXiv 1312.6120). Andrychowicz et al. 2021 (arXiv 2006.05990)
found that the small policy head matters most of such choices."""
_CHUNK_ROWS = 128
"""Images that go through a trunk at once on a CPU: a layer's output is still in the cache for the next one."""


def refuse_layers(layers: HiddenLayers, name: str, default: HiddenLayers = RELU) -> None:
    """Raises a ConfigError if settings of algorithm ``name`` ask for other hidden layers than images have."""
    if layers != default:
        if layers.own is not None:
            raise ConfigError(f"{name}.network = {layers.own.name!r}: for images set {name}.cnn; remove it")
        raise ConfigError(
            f"{name}.activation = {layers.activation!r} and {name}.layer_norm = {layers.layer_norm}: "
            "networks for images use relu without layer norm; remove both"
        )


class ConvParameters:
    """Views of a flat vector: ``convolutions`` [(weight [C', C, k, k], bias [C'])] and the perceptron ``mlp``."""

    def __init__(self, flat: Tensor, conv: list[ConvLayer], sizes: tuple[int, ...]) -> None:
        self.flat, self._conv, self._strides = flat, conv, [part.layer.stride for part in conv]
        self.convolutions: list[tuple[Tensor, Tensor]] = []
        offset = 0
        for part in conv:
            shape = (part.layer.channels, part.inputs, part.layer.kernel, part.layer.kernel)
            weight = flat[offset : offset + math.prod(shape)].view(shape)
            offset += weight.numel()
            self.convolutions.append((weight, flat[offset : offset + shape[0]]))
            offset += shape[0]
        self.mlp = Parameters(flat[offset:], sizes, 1)

    def over(self, flat: Tensor) -> ConvParameters:
        """Views of another vector in this form."""
        return ConvParameters(flat, self._conv, self.mlp.sizes)

    @staticmethod
    def count(conv: list[ConvLayer], sizes: tuple[int, ...]) -> int:
        own = sum(part.layer.channels * (part.inputs * part.layer.kernel**2 + 1) for part in conv)
        return own + parameter_count(sizes, 1)

    def initialise(self, generator: torch.Generator) -> None:
        for pair in self.convolutions:
            for tensor in pair:
                uniform_(tensor, pair[0][0].numel(), generator)
        self.mlp.initialise(generator)

    def leaves(self) -> list[tuple[Tensor, Tensor]]:
        """``tensors`` as leaves of autograd that share this memory."""
        return [(weight.detach().requires_grad_(), bias.detach().requires_grad_()) for weight, bias in self.tensors()]

    def trunk(self) -> dict[str, Tensor]:
        """The convolutions, named as ``spreeze.inference.convolution`` reads them."""
        return {
            f"conv{index}_{kind}": tensor
            for index, pair in enumerate(self.convolutions)
            for kind, tensor in zip("wb", pair, strict=True)
        }

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        """(weight, bias) of all layers, the head last."""
        hidden = [(weight[0], bias[0, 0]) for weight, bias in zip(self.mlp.weights, self.mlp.biases, strict=True)]
        return [*self.convolutions, *hidden, (self.mlp.head_weight[0], self.mlp.head_bias[0, :, 0])]

    def forward(self, obs: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Outputs [B, K] at images uint8 [B, k, C, H, W], by ``layers`` as ``tensors`` gives them."""
        convolutions = len(self.convolutions)
        # Channels last: on a CPU a forward and backward pass takes two thirds of the time.
        x = obs.flatten(1, 2).to(self.flat.dtype, memory_format=torch.channels_last).mul_(_PIXEL)
        for stride, (weight, bias) in zip(self._strides, layers[:convolutions], strict=True):
            x = torch.relu(functional.conv2d(x, weight, bias, stride))
        x = x.permute(0, 2, 3, 1).flatten(1)  # by row, column, channel, as in the sampler
        for weight, bias in layers[convolutions:-1]:
            x = torch.relu(torch.addmm(bias, x, weight))
        weight, bias = layers[-1]
        return functional.linear(x, weight, bias)


class ConvActorCritic:
    """Policy and value that share trunk and perceptron; the head's last output is the value.

    Members are as in ``on_policy.MlpActorCritic``.
    """

    layers = RELU
    of_value: Tensor | None = None
    """Policy and value share the trunk, so one norm bounds the gradient of both."""

    def __init__(
        self,
        frames: FrameSpec,
        cnn: str,
        outputs: int,
        num_log_std: int,
        hidden_sizes: tuple[int, ...],
        generator: torch.Generator,
        device: torch.device,
    ) -> None:
        self.image = [frames.stack * frames.channels, frames.height, frames.width]
        conv = conv_layers(cnn, *self.image)
        sizes = (features(conv), *hidden_sizes, outputs + 1)
        count = ConvParameters.count(conv, sizes)
        self.hidden_sizes, self._outputs = hidden_sizes, outputs
        self.flat = torch.zeros(count + num_log_std, device=device)
        self.gradient = torch.zeros_like(self.flat)
        self.log_std, self.grad_log_std = self.flat[count:], self.gradient[count:]
        self._parameters = ConvParameters(self.flat[:count], conv, sizes)
        self._gradients = ConvParameters(self.gradient[:count], conv, sizes)
        self._leaves = self._parameters.leaves()
        self._outs: tuple[Tensor, ...] = ()
        self._chunk_rows = _CHUNK_ROWS if device.type == "cpu" else None
        for weight, _ in self._parameters.convolutions:
            orthogonal_(weight.flatten(1), HIDDEN_GAIN, generator)
        for weight in self._parameters.mlp.weights:
            orthogonal_(weight[0].t(), HIDDEN_GAIN, generator)
        orthogonal_(self._parameters.mlp.head_weight[0, :outputs], POLICY_GAIN, generator)
        orthogonal_(self._parameters.mlp.head_weight[0, outputs:], VALUE_GAIN, generator)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """One pass at images uint8 [M, k, C, H, W]; keeps the graphs."""
        with torch.enable_grad():
            self._outs = tuple(self._parameters.forward(part, self._leaves) for part in self._chunks(obs))
        out = torch.cat([part.detach() for part in self._outs]).t()
        return out[: self._outputs], out[self._outputs]

    def backward(self, grad_out: Tensor, grad_value: Tensor) -> None:
        leaves = [tensor for pair in self._leaves for tensor in pair]
        own = [tensor for pair in self._gradients.tensors() for tensor in pair]
        grad = torch.cat((grad_out, grad_value.unsqueeze(0))).t()
        outs, self._outs = self._outs, ()
        self._gradients.flat.zero_()
        for out, part in zip(outs, self._chunks(grad), strict=True):
            for tensor, found in zip(own, torch.autograd.grad(out, leaves, part), strict=True):
                tensor.add_(found)

    def values(self, obs: Tensor) -> Tensor:
        layers = self._parameters.tensors()
        return torch.cat([self._parameters.forward(part, layers)[:, self._outputs] for part in self._chunks(obs)])

    def _chunks(self, rows: Tensor) -> tuple[Tensor, ...]:
        return torch.split(rows, self._chunk_rows or len(rows))

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Trunk and perceptron, with only the policy's part of the head."""
        arrays = policy_arrays(self._parameters.mlp)
        arrays["head_w"] = np.ascontiguousarray(arrays["head_w"][:, : self._outputs])
        arrays["head_b"] = arrays["head_b"][: self._outputs].copy()
        return arrays | host_copies(self._parameters.trunk())
