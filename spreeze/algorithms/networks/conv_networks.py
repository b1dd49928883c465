"""Networks for images: one convolutional trunk per image; a perceptron takes their features and further numbers.

Gradients are by autograd; parameters lie in one flat vector, so that optimizer, target and checkpoint are the same as
for other networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from spreeze.algorithms.networks.fused_mlp import (
    HIDDEN_GAIN,
    POLICY_GAIN,
    VALUE_GAIN,
    ActorCriticSpec,
    Parameters,
    host_copies,
    orthogonal_,
    parameter_count,
    uniform_,
)
from spreeze.algorithms.optimizers import Encoder
from spreeze.config.algorithm_bases import ActorCriticConfig
from spreeze.inference.convolution import TrunkInputs
from spreeze.inference.lazy_torch import Tensor, functional, torch
from spreeze.types import FrameSpec, TransitionBatch

Shift = Callable[[Tensor], Tensor]
_PIXEL = 1.0 / 255.0
_CHUNK_ROWS = 128
"""Images per pass through a trunk on a CPU, so that a layer's output is still in the cache for the next layer."""


def _chunks(rows: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, _CHUNK_ROWS if rows.device.type == "cpu" else len(rows))


class Trunks:
    """Views of a flat vector: ``convolutions`` [(weight [C', C, k, k], bias [C'])] of the trunks, image by image."""

    def __init__(self, flat: Tensor, inputs: TrunkInputs, cnn: str) -> None:
        self.flat, self.inputs, self._cnn = flat, inputs, cnn
        conv = inputs.layers(cnn)
        self._strides = [[part.layer.stride for part in trunk] for trunk in conv]
        self.convolutions: list[tuple[Tensor, Tensor]] = []
        self._end = 0
        for part in chain(*conv):
            shape = (part.layer.channels, part.inputs, part.layer.kernel, part.layer.kernel)
            weight = flat[self._end : self._end + math.prod(shape)].view(shape)
            self._end += weight.numel()
            self.convolutions.append((weight, flat[self._end : self._end + shape[0]]))
            self._end += shape[0]

    @staticmethod
    def count(inputs: TrunkInputs, cnn: str) -> int:
        """Parameters of all trunks."""
        conv = chain(*inputs.layers(cnn))
        return sum(part.layer.channels * (part.inputs * part.layer.kernel**2 + 1) for part in conv)

    def initialize(self, generator: torch.Generator) -> None:
        for pair in self.convolutions:
            for tensor in pair:
                uniform_(tensor, pair[0][0].numel(), generator)

    def leaves(self) -> list[tuple[Tensor, Tensor]]:
        """``tensors`` as leaves of autograd that share this memory."""
        return [(weight.detach().requires_grad_(), bias.detach().requires_grad_()) for weight, bias in self.tensors()]

    def set_gradient(
        self, outputs: Iterable[Tensor], leaves: list[tuple[Tensor, Tensor]], grads: Iterable[Tensor]
    ) -> None:
        """Fills these parameters with the gradient of ``leaves``, summed over outputs with the gradients ``grads``."""
        tensors = list(chain(*self.tensors()))
        self.flat.zero_()
        for output, grad in zip(outputs, grads, strict=True):
            for tensor, gradient in zip(tensors, torch.autograd.grad(output, list(chain(*leaves)), grad), strict=True):
                tensor.add_(gradient)

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        """(weight, bias) of all layers."""
        return list(self.convolutions)

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the convolutions, as ``spreeze.inference.convolution`` reads them."""
        pairs = enumerate(self.convolutions)
        return host_copies(
            {f"conv{i}_{kind}": tensor for i, pair in pairs for kind, tensor in zip("wb", pair, strict=True)}
        )

    def numbers(self, obs: Tensor) -> Tensor:
        """The newest numbers [B, V] of observations uint8 [B, k, F]."""
        return self._floats(self.inputs.split(obs)[1])

    def _floats(self, numbers: Tensor) -> Tensor:
        # A copy, because bytes that are viewed as floats must be aligned to four.
        return numbers.clone(memory_format=torch.contiguous_format).view(torch.float32).to(self.flat.dtype)

    def features(self, obs: Tensor, layers: list[tuple[Tensor, Tensor]], shift: Shift | None = None) -> Tensor:
        """Features and numbers [B, F + V] of observations uint8 [B, k, *frame]; ``layers`` in the form of ``tensors``.

        ``shift``, if any, maps the images [B, C, H, W] to those that the trunks see.
        """
        images, numbers = self.inputs.split(obs)
        features, left = [], iter(layers)
        for image, strides in zip(images, self._strides, strict=True):
            pixels = image if shift is None else shift(image)
            # Channels last: on a CPU a forward and backward pass takes two thirds of the time.
            x = pixels.to(self.flat.dtype, memory_format=torch.channels_last).mul_(_PIXEL)
            for stride, (weight, bias) in zip(strides, left, strict=False):
                x = torch.relu(functional.conv2d(x, weight, bias, stride))
            features.append(x.permute(0, 2, 3, 1).flatten(1))  # by row, column, channel, as in the sampler
        if self.inputs.vector_dim:
            features.append(self._floats(numbers))
        return features[0] if len(features) == 1 else torch.cat(features, 1)


class ConvParameters(Trunks):
    """Trunks and the perceptron ``mlp`` that follows."""

    def __init__(self, flat: Tensor, inputs: TrunkInputs, cnn: str, sizes: tuple[int, ...]) -> None:
        super().__init__(flat, inputs, cnn)
        self.mlp = Parameters(flat[self._end :], sizes, 1)

    def over(self, flat: Tensor) -> ConvParameters:
        """Views of another vector with the same layout."""
        return ConvParameters(flat, self.inputs, self._cnn, self.mlp.sizes)

    @classmethod
    def zeros(cls, inputs: TrunkInputs, cnn: str, sizes: tuple[int, ...], device: torch.device) -> ConvParameters:
        return cls(torch.zeros(cls.count(inputs, cnn) + parameter_count(sizes, 1), device=device), inputs, cnn, sizes)

    def initialize(self, generator: torch.Generator) -> None:
        super().initialize(generator)
        self.mlp.initialize(generator)

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        """(weight, bias) of all layers, the head last."""
        hidden = [(weight[0], bias[0, 0]) for weight, bias in zip(self.mlp.weights, self.mlp.biases, strict=True)]
        return [*self.convolutions, *hidden, (self.mlp.head_weight[0], self.mlp.head_bias[0, :, 0])]

    def forward(self, obs: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Outputs [B, K] at observations uint8 [B, k, *frame]; ``layers`` in the form of ``tensors``."""
        convolutions = len(self.convolutions)
        x = self.features(obs, layers[:convolutions])
        for weight, bias in layers[convolutions:-1]:
            x = torch.relu(torch.addmm(bias, x, weight))
        weight, bias = layers[-1]
        return functional.linear(x, weight, bias)


class ConvActorCritic:
    """Policy and value of one trunk and perceptron; the head's last output is the value; see ``MlpActorCritic``."""

    of_value: Tensor | None = None  # None: policy and value share the trunk, so their gradient is clipped as a whole

    def __init__(self, frames: FrameSpec, cnn: str, spec: ActorCriticSpec) -> None:
        self.inputs = TrunkInputs.of(frames)
        sizes = (self.inputs.features(cnn), *spec.hidden_sizes, spec.outputs + 1)
        count = ConvParameters.count(self.inputs, cnn) + parameter_count(sizes, 1)
        self._outputs = spec.outputs
        self.meta = {"hidden_sizes": list(spec.hidden_sizes), "activation": "relu", **self.inputs.meta(cnn)}
        self.flat = torch.zeros(count + spec.num_log_std, device=spec.device)
        self.gradient = torch.zeros_like(self.flat)
        self.log_std, self.grad_log_std = self.flat[count:], self.gradient[count:]
        self._parameters = ConvParameters(self.flat[:count], self.inputs, cnn, sizes)
        self._gradients = ConvParameters(self.gradient[:count], self.inputs, cnn, sizes)
        self._leaves = self._parameters.leaves()
        self._outs: tuple[Tensor, ...] = ()
        for weight, _ in self._parameters.convolutions:
            orthogonal_(weight.flatten(1), HIDDEN_GAIN, spec.generator)
        for weight in self._parameters.mlp.weights:
            orthogonal_(weight[0].t(), HIDDEN_GAIN, spec.generator)
        head = self._parameters.mlp.head_weight[0]
        orthogonal_(head[: spec.outputs], POLICY_GAIN, spec.generator)
        orthogonal_(head[spec.outputs :], VALUE_GAIN, spec.generator)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """One pass at observations uint8 [M, k, *frame]; keeps the graphs."""
        with torch.enable_grad():
            self._outs = tuple(self._parameters.forward(part, self._leaves) for part in _chunks(obs))
        out = torch.cat([part.detach() for part in self._outs]).t()
        return out[: self._outputs], out[self._outputs]

    def backward(self, grad_out: Tensor, grad_value: Tensor) -> None:
        outs, self._outs = self._outs, ()
        grad = torch.cat((grad_out, grad_value.unsqueeze(0))).t()
        self._gradients.set_gradient(outs, self._leaves, _chunks(grad))

    def numbers(self, obs: Tensor) -> Tensor:
        return self._parameters.numbers(obs)

    def values(self, obs: Tensor) -> Tensor:
        layers = self._parameters.tensors()
        return torch.cat([self._parameters.forward(part, layers)[:, self._outputs] for part in _chunks(obs)])

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Trunk and perceptron, with only the policy's part of the head."""
        arrays = self._parameters.mlp.arrays()
        arrays["head_w"] = np.ascontiguousarray(arrays["head_w"][:, : self._outputs])
        arrays["head_b"] = arrays["head_b"][: self._outputs].copy()
        return arrays | self._parameters.arrays()


def over_images(name: str) -> dict[str, Any]:
    """Defaults of algorithm ``name`` for images."""
    return {f"{name}.actor_layer_norm": True, f"{name}.critic_layer_norm": True}


def shifted(images: Tensor, max_shift: int, generator: torch.Generator) -> Tensor:
    """Images [B, C, H, W], each shifted by up to ``max_shift`` pixels vertically and horizontally, in new memory.

    New rows and columns replicate the edge (replicate padding, arXiv 2004.13649).
    """
    moves = torch.randint(-max_shift, max_shift + 1, (2, len(images), 1), generator=generator, device=generator.device)
    rows, columns = (
        (torch.arange(size, device=images.device) + move).clamp_(0, size - 1)
        for size, move in zip(images.shape[2:], moves.to(images.device), strict=True)
    )
    index = (rows[:, :, None] * images.shape[3] + columns[:, None]).flatten(1)
    return images.flatten(2).gather(2, index[:, None].expand(-1, images.shape[1], -1)).view(images.shape)


class ImageEncoder(Encoder):
    """Trunks for actor-critic algorithms; converts batches of images to batches of features.

    DrQ-v2 (Yarats et al. 2022, arXiv 2107.09645): one encoder, trained only by the critics' loss, and random shifts. No
    gradient of the actor flows back; there is no target encoder. Departures from the authors' code: trunks as in the
    other algorithms; first layers of actor and critics with layer normalization instead of a projection to 50 features;
    losses and exploration of the algorithm that uses this.
    """

    def __init__(self, frames: FrameSpec, config: ActorCriticConfig, seed: int, device: torch.device) -> None:
        inputs, cnn = TrunkInputs.of(frames), config.cnn
        self.size, self.meta = inputs.features(cnn), inputs.meta(cnn)
        super().__init__(
            lambda: Trunks(torch.zeros(Trunks.count(inputs, cnn), device=device), inputs, cnn),
            config.critic_lr,
            torch.Generator().manual_seed(seed + 2),
            target=False,
        )
        self._leaves = self.online.leaves()
        self._max_shift = config.random_shift
        self._recorded: list[Tensor] = []

    def encode(self, batch: TransitionBatch, noise: torch.Generator) -> TransitionBatch:
        """The batch with features of shifted images; stores the graph of those of ``obs`` for ``step``."""
        shift = partial(shifted, max_shift=self._max_shift, generator=noise) if self._max_shift else None
        with torch.enable_grad():
            self._recorded = [self.online.features(part, self._leaves, shift) for part in _chunks(batch.obs)]
        obs = torch.cat([part.detach() for part in self._recorded])
        with torch.no_grad():
            layers = self.online.tensors()
            next_obs = torch.cat([self.online.features(part, layers, shift) for part in _chunks(batch.next_obs)])
        return batch._replace(obs=obs, next_obs=next_obs, obs_action=torch.cat((obs, batch.action), 1))

    def step(self, grad_obs: Tensor) -> None:
        recorded, self._recorded = self._recorded, []
        self.gradient.set_gradient(recorded, self._leaves, _chunks(grad_obs))
        self.adam.step()

    def update_target(self, tau: float) -> None:
        """Does nothing: there is no target."""
