"""A Q network over images: a convolutional trunk and a perceptron on it, its target and its optimiser.

The same interface as ``DiscreteCritics`` with one network. Gradients come from autograd; parameters still lie
in one flat vector, so that optimiser, target and checkpoint are those of every other network. Channels-last
memory was tried: no faster on a CPU, where a layer is bound by its matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from spreeze.algorithms import losses
from spreeze.algorithms.nn.fused_mlp import Parameters, parameter_count
from spreeze.algorithms.nn.optimizers import FlatAdam
from spreeze.algorithms.nn.q_networks import Streams
from spreeze.inference.convolution import Placed, features, place
from spreeze.types import FrameSpec

_PIXEL = 1.0 / 255.0


class ConvParameters:
    """Views of a flat vector: ``convolutions`` [(weight [C', C, k, k], bias [C'])] and the perceptron ``mlp``."""

    def __init__(self, flat: Tensor, placed: list[Placed], sizes: tuple[int, ...]) -> None:
        self.flat, self._strides = flat, [part.layer.stride for part in placed]
        self.convolutions: list[tuple[Tensor, Tensor]] = []
        offset = 0
        for part in placed:
            shape = (part.layer.channels, part.inputs, part.layer.kernel, part.layer.kernel)
            weight = flat[offset : offset + math.prod(shape)].view(shape)
            offset += weight.numel()
            self.convolutions.append((weight, flat[offset : offset + shape[0]]))
            offset += shape[0]
        self.mlp = Parameters(flat[offset:], sizes, 1)

    @staticmethod
    def count(placed: list[Placed], sizes: tuple[int, ...]) -> int:
        """Length of the flat vector."""
        own = sum(part.layer.channels * (part.inputs * part.layer.kernel**2 + 1) for part in placed)
        return own + parameter_count(sizes, 1)

    def initialise(self, generator: torch.Generator) -> None:
        """Uniform in +-1/sqrt(fan_in), weights and biases, as torch.nn does by default."""
        for weight, bias in self.convolutions:
            bound = 1.0 / math.sqrt(weight[0].numel())
            for tensor in (weight, bias):
                tensor.copy_(torch.empty(tensor.shape, dtype=tensor.dtype).uniform_(-bound, bound, generator=generator))
        self.mlp.initialise(generator)

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        """(weight, bias) of all layers, the head last."""
        hidden = [(weight[0], bias[0, 0]) for weight, bias in zip(self.mlp.weights, self.mlp.biases, strict=True)]
        return [*self.convolutions, *hidden, (self.mlp.head_weight[0], self.mlp.head_bias[0, :, 0])]

    def forward(self, obs: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Outputs [B, K] at images uint8 [B, k, C, H, W], by ``layers`` as ``tensors`` gives them."""
        convolutions = len(self.convolutions)
        # Pixel by pixel, all channels of each: on a CPU a pass there and back takes two thirds of the time.
        x = obs.flatten(1, 2).to(self.flat.dtype, memory_format=torch.channels_last).mul_(_PIXEL)
        for stride, (weight, bias) in zip(self._strides, layers[:convolutions], strict=True):
            x = torch.relu(functional.conv2d(x, weight, bias, stride))
        x = x.permute(0, 2, 3, 1).flatten(1)  # by row, column, channel, as in the sampler
        for weight, bias in layers[convolutions:-1]:
            x = torch.relu(torch.addmm(bias, x, weight))
        weight, bias = layers[-1]
        return functional.linear(x, weight, bias)


class ImageCritics:
    """Q(s, .) [K] of images; members as in ``DiscreteCritics``, S = 1."""

    def __init__(
        self, frames: FrameSpec, num_actions: int, cnn: str, hidden_sizes: tuple[int, ...], lr: float,
        generator: torch.Generator, device: torch.device, dtype: torch.dtype = torch.float32, *, duelling: bool = False,
    ) -> None:
        self.image = [frames.stack * frames.channels, frames.height, frames.width]
        placed = place(cnn, *self.image)
        sizes = (features(placed), *hidden_sizes, num_actions)
        if duelling:
            sizes = (features(placed), *hidden_sizes[:-1], 2 * hidden_sizes[-1], 1 + num_actions)
        self.hidden_sizes = sizes[1:-1]

        def parameters() -> ConvParameters:
            flat = torch.zeros(ConvParameters.count(placed, sizes), device=device, dtype=dtype)
            return ConvParameters(flat, placed, sizes)

        self.online, self.target, self.gradient = parameters(), parameters(), parameters()
        self.online.initialise(generator)
        self._streams = Streams(self.online.mlp, num_actions) if duelling else None
        self.target.flat.copy_(self.online.flat)
        self.adam = FlatAdam(self.online.flat, self.gradient.flat, lr)
        # Leaves that share the memory of ``online``: what autograd differentiates by.
        self._leaves = [
            (weight.detach().requires_grad_(), bias.detach().requires_grad_()) for weight, bias in self.online.tensors()
        ]
        self._td_error: Tensor | None = None
        self._chosen: Tensor | None = None

    def values(self, obs: Tensor, *, target: bool = False) -> Tensor:
        """All actions' values [1, K, B] at images [B, k, C, H, W]."""
        parameters = self.target if target else self.online
        with torch.no_grad():
            return self._joined(parameters.forward(obs, parameters.tensors())).t().unsqueeze(0)

    def _joined(self, out: Tensor) -> Tensor:
        """Action values [B, K] of the network's outputs."""
        return out if self._streams is None else out @ self._streams.joint.t()

    def step(
        self, obs: Tensor, action: Tensor, target: Tensor, loss_gradient: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """One gradient step on ``mean loss(Q(s, a) - target)``; arguments as in ``DiscreteCritics``, obs images."""
        with torch.inference_mode(False), torch.enable_grad():
            out = self.online.forward(obs, self._leaves)
            q, index = self._joined(out.detach()), action.unsqueeze(1)
            chosen = q.gather(1, index)[:, 0]
            error = chosen - target
            slope = error if loss_gradient is None else loss_gradient(error)
            grad = torch.zeros_like(q).scatter_(1, index, (slope / len(obs)).unsqueeze(1))
            if self._streams is not None:
                grad = grad @ self._streams.joint
            leaves = [tensor for pair in self._leaves for tensor in pair]
            found = torch.autograd.grad(out, leaves, grad)
        with torch.no_grad():
            own = [tensor for pair in self.gradient.tensors() for tensor in pair]
            for tensor, value in zip(own, found, strict=True):
                tensor.copy_(value)
            if self._streams is not None:
                self.gradient.mlp.head_weight.mul_(self._streams.mask)
        self._chosen, self._td_error = chosen, error
        self.adam.step()

    def update_target(self, tau: float) -> None:
        """Moves the target network toward the online one."""
        losses.polyak_(self.target.flat, self.online.flat, tau)

    def policy_head(self) -> tuple[Tensor, Tensor]:
        """Weight [K, H] and bias [K] that give the action values."""
        weight, bias = self.online.tensors()[-1]
        return (weight, bias) if self._streams is None else (self._streams.joint @ weight, self._streams.joint @ bias)

    def trunk_arrays(self) -> dict[str, Tensor]:
        """The trunk's weights as ``spreeze.inference.convolution`` reads them."""
        named: dict[str, Tensor] = {}
        for index, (weight, bias) in enumerate(self.online.convolutions):
            named |= {f"conv{index}_w": weight, f"conv{index}_b": bias}
        return named

    def metrics(self) -> dict[str, float]:
        """critic_loss, q_mean and critic_grad_norm of the latest step (reads the device)."""
        if self._td_error is None or self._chosen is None:
            return {}
        return {
            "critic_loss": self._td_error.square().mean().item(),
            "q_mean": self._chosen.mean().item(),
            "critic_grad_norm": self.adam.gradient_norm,
        }

    def mean_action_value(self) -> float:
        """No actor, no fresh actions."""
        return math.nan

    def drop_buffers(self) -> None:
        """Frees what depends on the size of the batch; the next update makes it anew."""
        self._td_error = self._chosen = None

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        own = {"online": self.online.flat, "target": self.target.flat}
        return own | {f"adam.{name}": tensor for name, tensor in self.adam.tensors().items()}
