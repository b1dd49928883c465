"""Networks with a policy and a value, for on-policy algorithms; all parameters in one flat vector.

``out`` [K, M] are a policy's raw outputs (logits, or means), ``value`` [M] the values of M rows. A
continuous policy's log deviations [A] stand at the end of the vector. Both networks start orthogonal (Saxe et al. 2014,
arXiv 1312.6120) with a gain of sqrt 2, the policy's last layer with 0.01, the value's with 1: Andrychowicz
et al. 2021 (arXiv 2006.05990) found the small policy head to matter most of such choices.
"""
from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from spreeze.algorithms import losses
from spreeze.algorithms.nn.conv_q_networks import ConvParameters
from spreeze.algorithms.nn.fused_mlp import Parameters, Tape, mlp_backward, mlp_forward, parameter_count, policy_arrays
from spreeze.inference.convolution import features, place
from spreeze.types import FrameSpec

_HIDDEN_GAIN, _POLICY_GAIN, _VALUE_GAIN = math.sqrt(2.0), 0.01, 1.0
_CHUNK_ROWS = 128
"""Images that go through a trunk at once on a CPU: what a layer gives is still in the cache for the next."""


class ActorCriticNetwork(Protocol):
    """A policy and a value network, their gradient, and what of them is published."""

    flat: Tensor
    """All parameters."""
    gradient: Tensor
    """As ``flat``; filled by ``backward``, but for ``grad_log_std``."""
    log_std: Tensor
    """View [A] of ``flat``; empty where actions are discrete."""
    grad_log_std: Tensor
    """View [A] of ``gradient``, which the caller fills."""
    hidden_sizes: tuple[int, ...]
    activation: str

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [K, M] and values [M] at M rows, in buffers that the next call overwrites."""
        ...

    def backward(self, grad_out: Tensor, grad_value: Tensor) -> None:
        """Fills ``gradient`` from those to outputs [K, M] and values [M] of the latest ``forward``."""
        ...

    def values(self, obs: Tensor) -> Tensor:
        """Values [M] alone."""
        ...

    def policy_arrays(self) -> dict[str, Tensor]:
        """Copies of the policy by layer, as ``Policy.from_weights`` reads them, without the log deviations."""
        ...


class MlpActorCritic:
    """Two perceptrons with tanh, stacked into one batched product; the value is the second one's first output."""

    activation = "tanh"

    def __init__(
        self, obs_dim: int, outputs: int, num_log_std: int, hidden_sizes: tuple[int, ...], generator: torch.Generator,
        device: torch.device, dtype: torch.dtype = torch.float32,
    ) -> None:
        sizes = (obs_dim, *hidden_sizes, outputs)
        count = parameter_count(sizes, 2)
        self.hidden_sizes = hidden_sizes
        self.flat = torch.zeros(count + num_log_std, device=device, dtype=dtype)
        self.gradient = torch.zeros_like(self.flat)
        self.log_std, self.grad_log_std = self.flat[count:], self.gradient[count:]
        self._parameters = Parameters(self.flat[:count], sizes, 2)
        self._policy, self._value = self._parameters.one(0), self._parameters.one(1)
        self._gradients = Parameters(self.gradient[:count], sizes, 2)
        self._tape = Tape.allocate(self._parameters, 1, tanh=True)
        self._x_t = self.flat[:0]
        for weight in self._parameters.weights:
            for network in weight:
                _orthogonal_(network.t(), _HIDDEN_GAIN, generator)
        _orthogonal_(self._parameters.head_weight[0], _POLICY_GAIN, generator)
        _orthogonal_(self._parameters.head_weight[1, :1], _VALUE_GAIN, generator)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """One pass of both networks."""
        rows = obs.shape[0]
        if self._tape.out.shape[2] != rows:
            self._tape = Tape.allocate(self._parameters, rows, tanh=True)
        self._x_t = obs.t().expand(2, -1, -1)
        out = mlp_forward(self._parameters, obs.expand(2, -1, -1), self._tape)
        return out[0], out[1, 0]

    def backward(self, grad_out: Tensor, grad_value: Tensor) -> None:
        """One pass back; the value network's other outputs have no gradient and stay as they began."""
        self._tape.grad_out[0].copy_(grad_out)
        self._tape.grad_out[1, 0].copy_(grad_value)
        mlp_backward(self._parameters, self._tape, self._x_t, self._gradients)

    def values(self, obs: Tensor) -> Tensor:
        """One pass of the value network."""
        tape = Tape.allocate(self._value, obs.shape[0], tanh=True)
        return mlp_forward(self._value, obs.unsqueeze(0), tape)[0, 0]

    def policy_arrays(self) -> dict[str, Tensor]:
        """The first network's layers."""
        return policy_arrays(self._policy)


class ConvActorCritic:
    """A convolutional trunk and a perceptron with ReLU, shared; the head's last output is the value. By autograd."""

    activation = "relu"

    def __init__(
        self, frames: FrameSpec, outputs: int, num_log_std: int, cnn: str, hidden_sizes: tuple[int, ...],
        generator: torch.Generator, device: torch.device, dtype: torch.dtype = torch.float32,
    ) -> None:
        self.image = [frames.stack * frames.channels, frames.height, frames.width]
        placed = place(cnn, *self.image)
        sizes = (features(placed), *hidden_sizes, outputs + 1)
        count = ConvParameters.count(placed, sizes)
        self.hidden_sizes, self._outputs = hidden_sizes, outputs
        self.flat = torch.zeros(count + num_log_std, device=device, dtype=dtype)
        self.gradient = torch.zeros_like(self.flat)
        self.log_std, self.grad_log_std = self.flat[count:], self.gradient[count:]
        self._parameters = ConvParameters(self.flat[:count], placed, sizes)
        self._net_gradient = self.gradient[:count]
        self._gradients = ConvParameters(self._net_gradient, placed, sizes)
        # Leaves that share the parameters' memory: what autograd differentiates by.
        self._leaves = [
            (weight.detach().requires_grad_(), bias.detach().requires_grad_())
            for weight, bias in self._parameters.tensors()
        ]
        self._outs: tuple[Tensor, ...] = ()
        self._chunk_rows = _CHUNK_ROWS if device.type == "cpu" else None
        for weight, _ in self._parameters.convolutions:
            _orthogonal_(weight.flatten(1), _HIDDEN_GAIN, generator)
        for weight in self._parameters.mlp.weights:
            _orthogonal_(weight[0].t(), _HIDDEN_GAIN, generator)
        _orthogonal_(self._parameters.mlp.head_weight[0, :outputs], _POLICY_GAIN, generator)
        _orthogonal_(self._parameters.mlp.head_weight[0, outputs:], _VALUE_GAIN, generator)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """One pass at images uint8 [M, k, C, H, W]; keeps the graphs."""
        with torch.enable_grad():
            self._outs = tuple(self._parameters.forward(part, self._leaves) for part in self._chunks(obs))
        out = torch.cat([part.detach() for part in self._outs]).t()
        return out[: self._outputs], out[self._outputs]

    def backward(self, grad_out: Tensor, grad_value: Tensor) -> None:
        """One pass back."""
        leaves = [tensor for pair in self._leaves for tensor in pair]
        own = [tensor for pair in self._gradients.tensors() for tensor in pair]
        grad = torch.cat((grad_out, grad_value.unsqueeze(0))).t()
        outs, self._outs = self._outs, ()
        self._net_gradient.zero_()
        for out, part in zip(outs, self._chunks(grad), strict=True):
            for tensor, found in zip(own, torch.autograd.grad(out, leaves, part), strict=True):
                tensor.add_(found)

    def values(self, obs: Tensor) -> Tensor:
        """One pass without a graph."""
        layers = self._parameters.tensors()
        return torch.cat([self._parameters.forward(part, layers)[:, self._outputs] for part in self._chunks(obs)])

    def _chunks(self, rows: Tensor) -> tuple[Tensor, ...]:
        return torch.split(rows, self._chunk_rows or len(rows))

    def policy_arrays(self) -> dict[str, Tensor]:
        """Trunk and perceptron, of the head only the policy's part."""
        arrays = policy_arrays(self._parameters.mlp)
        arrays["head_w"] = arrays["head_w"][:, : self._outputs].contiguous()
        arrays["head_b"] = arrays["head_b"][: self._outputs].contiguous()
        for index, (weight, bias) in enumerate(self._parameters.convolutions):
            arrays |= {f"conv{index}_w": weight.to("cpu", copy=True), f"conv{index}_b": bias.to("cpu", copy=True)}
        return arrays


def _orthogonal_(matrix: Tensor, gain: float, generator: torch.Generator) -> None:
    """Fills a matrix [out, in], which may be a view, with orthonormal rows or columns times ``gain``."""
    values = torch.empty(matrix.shape, dtype=matrix.dtype)
    matrix.copy_(torch.nn.init.orthogonal_(values, gain, generator=generator))


class Distribution(Protocol):
    """Actions given a policy's outputs; ``backward`` and ``entropy`` are of the latest ``log_prob``."""

    def log_prob(self, out: Tensor, action: Tensor) -> Tensor:
        """Log-probabilities [M] in nat of actions [M, A] under outputs [K, M]."""
        ...

    def backward(self, grad_log_prob: Tensor, entropy_weight: float) -> Tensor:
        """Gradient of ``sum(grad_log_prob log pi) - entropy_weight sum H`` to the outputs [K, M]."""
        ...

    def entropy(self) -> float:
        """Mean entropy in nat (reads the device)."""
        ...

    def meta(self) -> dict[str, Any]:
        """What a published policy says of it."""
        ...


class CategoricalDistribution:
    """One of K actions; outputs are logits, an action its index."""

    def __init__(self, num_actions: int) -> None:
        self._num_actions = num_actions
        self._log_pi: Tensor | None = None
        self._index: Tensor | None = None

    def log_prob(self, out: Tensor, action: Tensor) -> Tensor:
        """Of the actions taken."""
        self._index = action.t().long()
        self._log_pi, chosen = losses.categorical(out, self._index)
        return chosen

    def backward(self, grad_log_prob: Tensor, entropy_weight: float) -> Tensor:
        """To the logits."""
        assert self._log_pi is not None
        assert self._index is not None
        return losses.categorical_backward(self._log_pi, self._index, grad_log_prob, entropy_weight)

    def entropy(self) -> float:
        """Mean over the rows."""
        assert self._log_pi is not None
        return -(self._log_pi.exp() * self._log_pi).sum(0).mean().item()

    def meta(self) -> dict[str, Any]:
        """Kind and number of actions."""
        return {"policy": "categorical", "num_actions": self._num_actions}


class GaussianDistribution:
    """Independent Gaussians, not squashed; outputs are means, the log deviations the same everywhere."""

    def __init__(self, log_std: Tensor, grad_log_std: Tensor) -> None:
        self._log_std, self._grad_log_std = log_std, grad_log_std
        self._z: Tensor | None = None

    def log_prob(self, out: Tensor, action: Tensor) -> Tensor:
        """Of the actions taken."""
        self._z, log_prob = losses.gaussian(out, self._log_std, action.t())
        return log_prob

    def backward(self, grad_log_prob: Tensor, entropy_weight: float) -> Tensor:
        """To the means; that to the log deviations goes to where it belongs."""
        assert self._z is not None
        grad_mean, grad_log_std = losses.gaussian_backward(self._z, self._log_std, grad_log_prob, entropy_weight)
        self._grad_log_std.copy_(grad_log_std)
        return grad_mean

    def entropy(self) -> float:
        """The same for every row."""
        return losses.gaussian_entropy(self._log_std).item()

    def meta(self) -> dict[str, Any]:
        """Kind and number of action components."""
        return {"policy": "gaussian", "action_dim": len(self._log_std)}
