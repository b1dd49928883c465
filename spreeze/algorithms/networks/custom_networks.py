"""Custom networks by autograd, with the interface of perceptrons.

The ``--import`` module declares ``NETWORKS = (NetworkRow(name=..., make=...),)``; ``make(inputs, outputs)`` returns a
``torch.nn.Module`` from [M, I] to [M, K], without buffers. It replaces every perceptron of an algorithm: actor and
critics, or policy and value. For callers it is a perceptron whose first layer is the identity. A backward pass
recomputes the outputs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spreeze.algorithms.networks.fused_mlp import HiddenLayers, MlpBuffers, Parameters, host_copies
from spreeze.algorithms.parallel_work import TwoStreams
from spreeze.errors import ConfigError
from spreeze.inference.lazy_torch import Tensor, torch


class ModuleParameters(Parameters):
    """Views of a flat vector as the parameters of S modules; ``sizes`` = (I, I, K)."""

    def __init__(
        self, flat: Tensor, sizes: tuple[int, ...], layers: HiddenLayers, modules: list[Any], first: int = 0
    ) -> None:
        """``modules`` are those of the vector from index ``first`` on."""
        self.flat, self.layers, self.stack = flat, layers, len(modules)
        self.sizes = (sizes[0], sizes[0], sizes[-1])
        self._modules, self._first = modules, first
        self._named: list[dict[str, Tensor]] = []
        count = count_of(modules[0])
        for index in range(len(modules)):
            offset, views = (first + index) * count, {}
            for name, tensor in modules[index].named_parameters():
                views[name] = flat[offset : offset + tensor.numel()].view(tensor.shape)
                offset += tensor.numel()
            self._named.append(views)
        identity = torch.eye(sizes[0], device=flat.device, dtype=flat.dtype).expand(self.stack, -1, -1)
        self.weights, self.weights_t, self.biases = [identity], [identity], []

    def one(self, index: int) -> Parameters:
        return ModuleParameters(
            self.flat, self.sizes, self.layers, self._modules[index : index + 1], self._first + index
        )

    def over(self, flat: Tensor) -> Parameters:
        return ModuleParameters(flat, self.sizes, self.layers, self._modules, self._first)

    def views(self) -> list[Tensor]:
        return [tensor for views in self._named for tensor in views.values()]

    def initialize(self, generator: torch.Generator) -> None:
        """Initializes the modules by their own code, with a seed from ``generator``."""
        seed = int(torch.randint(2**62, (1,), generator=generator))
        for module, views in zip(modules_of(self.layers, self.sizes, self.stack, seed), self._named, strict=True):
            for name, tensor in module.named_parameters():
                views[name].copy_(tensor.detach())

    def forward(self, x: Tensor, buffers: MlpBuffers) -> Tensor:
        buffers.hidden[0].copy_(x)
        with torch.no_grad():
            for index, module in enumerate(self._modules):
                out = torch.func.functional_call(module, self._named[index], (buffers.hidden[0][index],))
                buffers.out[index].copy_(out.t())
        return buffers.out

    def backward(
        self,
        buffers: MlpBuffers,
        x_t: Tensor | None,
        gradient: Parameters | None,
        *,
        add: bool = False,
        streams: TwoStreams | None = None,
    ) -> Tensor:
        return self._gradients(buffers, buffers.grad_out, gradient, add=add)

    def derivative(self, buffers: MlpBuffers) -> Tensor:
        return self._gradients(buffers, torch.ones_like(buffers.grad_out), None, add=False)

    def _gradients(self, buffers: MlpBuffers, grad_out: Tensor, gradient: Parameters | None, *, add: bool) -> Tensor:
        """Gradients of the sum of ``grad_out`` [S, K, M] times the outputs; returns those of the buffers' input."""
        for index, module in enumerate(self._modules):
            with torch.inference_mode(False), torch.enable_grad():
                x = buffers.hidden[0][index].clone().requires_grad_()
                leaves = {name: view.detach().clone().requires_grad_() for name, view in self._named[index].items()}
                out = torch.func.functional_call(module, leaves, (x,))
                grad_x, *grads = torch.autograd.grad(out, [x, *leaves.values()], grad_out[index].t().clone())
            buffers.grads[0][index].copy_(grad_x)
            if isinstance(gradient, ModuleParameters):
                for view, value in zip(gradient._named[index].values(), grads, strict=True):
                    view.add_(value) if add else view.copy_(value)
        return buffers.grads[0]

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the first module's parameters, as ``inference.user_modules`` reads them."""
        return host_copies({f"net.{name}": view for name, view in self._named[0].items()})


def modules_of(layers: HiddenLayers, sizes: tuple[int, ...], stack: int, seed: int = 0) -> list[Any]:
    """S new modules, initialized by a seed; a ConfigError if the user's function returns no such module."""
    row = layers.custom
    assert row is not None
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(seed % 2**62)
        modules = [row.make(sizes[0], sizes[-1]) for _ in range(stack)]
        if not isinstance(modules[0], torch.nn.Module):
            raise ConfigError(
                f"network {row.name!r}: make returned {type(modules[0]).__name__}; expected a torch.nn.Module"
            )
        if any(True for _ in modules[0].buffers()):
            raise ConfigError(
                f"network {row.name!r} has buffers, such as those of batch norm, which are not published with the "
                f"weights; use layers without buffers"
            )
        like = next(modules[0].parameters())
        with torch.no_grad():
            out = modules[0](like.new_zeros(3, sizes[0]))
    if not isinstance(out, torch.Tensor):
        raise ConfigError(
            f"network {row.name!r}: it returned {type(out).__name__} instead of a tensor, like recurrent layers, which "
            "are not supported; use a network from rows to rows, or ppo.recurrent=lstm"
        )
    shape = tuple(out.shape)
    if shape != (3, sizes[-1]):
        raise ConfigError(
            f"network {row.name!r}: {sizes[0]} inputs of 3 rows gave the shape {shape}; expected (3, {sizes[-1]})"
        )
    return [module.eval() for module in modules]


def count_of(module: Any) -> int:
    """Length of the flat vector of one module."""
    return sum(math.prod(tensor.shape) for tensor in module.parameters())
