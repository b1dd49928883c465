"""Perceptrons with hand-derived gradients and preallocated buffers, optionally split over two threads or streams.

They replace ``torch.nn`` and autograd. All parameters of a network are one flat vector, its gradient another. ``stack``
networks of equal shape (twin critics) are evaluated by one batched matmul. Shapes, besides those of ``types``: S
stacked networks, M rows, K outputs, H hidden units.

*Layer normalization* (Ba et al. 2016, arXiv 1607.06450): a hidden layer is ``act(norm(x W) + b)``. The bias is the
norm's shift; the next layer's weights can absorb a gain, so networks have the same parameters without it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from spreeze.algorithms.parallel_work import Parallel, TwoStreams, TwoThreads
from spreeze.config.algorithms import NetworkRow
from spreeze.inference.lazy_torch import Tensor, functional, torch
from spreeze.inference.policy import ACTIVATIONS, NORM_EPS

_ALIGN = 16  # Float32 values in a cache line; each block of the flat vector starts on one
_ROWS_OF_ONE_MATMUL = 2048
"""Rows from which a GPU computes the weight gradients of stacked networks one by one: 2 x 51 instead of 640 us at
65,536 rows of 2 x 256 units (H200)."""
_MAX_DEAD_UNIT_ROWS = 512
CHUNK_ROWS = 512  # rows per pass on a CPU, so that the output of a layer stays in the cache of the core


@dataclass(frozen=True)
class HiddenLayers:
    """Operations of a network on the outputs of its hidden layers."""

    activation: str = ACTIVATIONS[0]
    layer_norm: bool = False
    custom: NetworkRow | None = None  # custom network in place of the perceptron (see ``custom_networks``)

    @property
    def keeps_preactivations(self) -> bool:
        """True if the gradient needs more than the activations: ``x W``, which is normalized with ``layer_norm``."""
        return self.custom is None and (self.layer_norm or self.activation not in ("relu", "tanh"))

    @property
    def meta(self) -> dict[str, Any]:
        """Metadata for ``inference.policy``, as far as it differs from the defaults."""
        if self.custom is not None:
            return {"network": self.custom.name}
        activation = {} if self.activation == ACTIVATIONS[0] else {"activation": self.activation}
        return activation | ({"layer_norm": True} if self.layer_norm else {})


RELU = HiddenLayers()
_CUSTOM = "spreeze.algorithms.networks.custom_networks"  # imported only for custom networks


def row_chunks(device: torch.device, rows: int, parts: int = 1) -> list[list[slice]]:
    """Splits rows into equal parts, and each part into chunks of at most ``CHUNK_ROWS``."""
    step = CHUNK_ROWS if device.type == "cpu" else rows
    return [
        [slice(start, min(start + step, end)) for start in range(begin, end, step)]
        for begin, end in pairwise(rows * index // parts for index in range(parts + 1))
    ]


def matmuls_by_onednn() -> bool:
    """True if oneDNN computes the float32 matmuls of this process, not MKL."""
    mkldnn: Any = torch.backends.mkldnn
    return bool(mkldnn.matmul.fp32_precision == "bf16")


class Parameters:
    """Views of a flat vector as the weights and biases of S stacked perceptrons.

    ``weights[i]`` is [S, in, out], ``biases[i]`` [S, 1, out] for hidden layer i; ``head_weight`` [S, K, H],
    ``head_bias`` [S, K, 1]: the output of the head is component-first.
    """

    def __init__(
        self,
        flat: Tensor,
        sizes: tuple[int, ...],
        stack: int,
        views: list[Tensor] | None = None,
        *,
        layers: HiddenLayers = RELU,
    ) -> None:
        self.flat, self.sizes, self.stack, self.layers = flat, sizes, stack, layers
        if views is None:
            views, offset = [], 0
            for shape in _shapes(sizes, stack):
                views.append(flat[offset : offset + math.prod(shape)].view(shape))
                offset += aligned(math.prod(shape))
        self._views = views
        self.weights, self.biases = views[:-2:2], views[1:-2:2]
        self.head_weight, self.head_bias = views[-2:]
        # Derived views are made once: at small sizes, a view costs as much as an addition.
        self.weights_t = [weight.transpose(1, 2) for weight in self.weights]
        self.head_rows = [self.head_weight[index, 0] for index in range(stack)]
        # For one output column, MKL's matrix-vector product is ten times faster than its matmul; oneDNN's is slower
        # than its matmul, so there a sum is used.
        self.head_matmul = torch.linalg.vecdot if matmuls_by_onednn() else torch.mv

    def over(self, flat: Tensor) -> Parameters:
        """Views of another vector with the same layout."""
        return Parameters(flat, self.sizes, self.stack, layers=self.layers)

    def forward(self, x: Tensor, buffers: MlpBuffers) -> Tensor:
        """S stacked perceptrons (``buffers.layers``, linear head) on the same rows: ``buffers.out`` [S, K, M].

        ``x`` is [S, M, I] (one input for all: ``expand``); columns contiguous, rows may be strided.
        """
        keeps_preactivations, tanh = buffers.layers.keeps_preactivations, buffers.layers.activation == "tanh"
        for index, (weight, bias, hidden) in enumerate(zip(self.weights, self.biases, buffers.hidden, strict=True)):
            if keeps_preactivations:
                x = _hidden_layer(x, weight, bias, buffers, index)
            elif tanh:
                x = torch.bmm(x, weight, out=hidden).add_(bias).tanh_()
            elif hidden.device.type == "cpu":
                # Torch has an operation that adds and clamps in one pass over memory only on the CPU.
                x = torch._add_relu_(torch.bmm(x, weight, out=hidden), bias)
            else:
                x = relu_layer(x, weight, bias, hidden)
        if self.sizes[-1] > 1:
            return torch.baddbmm(self.head_bias, self.head_weight, buffers.hidden_t[-1], out=buffers.out)
        for rows, weight, out in zip(buffers.last_rows, self.head_rows, buffers.out_rows, strict=True):
            self.head_matmul(rows, weight, out=out)
        return buffers.out.add_(self.head_bias)

    def backward(
        self,
        buffers: MlpBuffers,
        x_t: Tensor | None,
        gradient: Parameters | None,
        *,
        add: bool = False,
        streams: TwoStreams | None = None,
    ) -> Tensor:
        """Back-propagates ``buffers.grad_out`` to the first layer's pre-activation [S, M, H_0], which is returned.

        ``gradient``, if any, receives the weight gradients, which need the transposed input ``x_t`` [S, I, M]; ``add``
        adds to its values. With ``streams`` both gradients of a layer are computed at once.
        """
        for index in range(len(buffers.hidden), -1, -1):
            if streams is not None and gradient is not None and index:
                streams.both(
                    partial(input_gradients, self, buffers, index),
                    partial(weight_gradients, buffers, x_t, gradient, index, add=add),
                )
                continue
            if gradient is not None:
                weight_gradients(buffers, x_t, gradient, index, add=add)
            if index:
                input_gradients(self, buffers, index)
        return buffers.grads[0]

    def derivative(self, buffers: MlpBuffers) -> Tensor:
        """Derivative of each row's single output with respect to the first layer's pre-activation [S, M, H_0].

        Called after ``forward``; equals ``backward`` for a ``grad_out`` of ones, without the multiplication.
        """
        if buffers.layers == RELU:
            torch.ops.aten.threshold_backward.grad_input(
                self.head_weight, buffers.hidden[-1], 0.0, grad_input=buffers.grads[-1]
            )
        else:
            _through_activation(self, buffers, len(buffers.hidden) - 1, buffers.grads[-1].copy_(self.head_weight))
        for index in range(len(buffers.hidden) - 1, 0, -1):
            input_gradients(self, buffers, index)
        return buffers.grads[0]

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies on the CPU of a single network, by layer: ``w0`` [in, out], ``b0`` [out] ..., ``head_w`` [H, K]."""
        arrays: dict[str, Tensor] = {}
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            arrays |= {f"w{index}": weight[0], f"b{index}": bias[0, 0]}
        arrays |= {"head_w": self.head_weight[0].t().contiguous(), "head_b": self.head_bias[0, :, 0]}
        return host_copies(arrays)

    def one(self, index: int) -> Parameters:
        """One network of the stack, as views."""
        views = [view[index : index + 1] for view in self._views]
        return Parameters(self.flat, self.sizes, 1, views, layers=self.layers)

    def views(self) -> list[Tensor]:
        return self._views

    def initialize(self, generator: torch.Generator) -> None:
        for tensor, fan_in in self.blocks():
            uniform_(tensor, fan_in, generator)

    def blocks(self) -> list[tuple[Tensor, int]]:
        """Every weight and bias with the fan-in of its layer."""
        return [(view, self.sizes[index // 2]) for index, view in enumerate(self._views)]


def _shapes(sizes: tuple[int, ...], stack: int) -> list[tuple[int, int, int]]:
    hidden = [shape for size, width in pairwise(sizes[:-1]) for shape in ((stack, size, width), (stack, 1, width))]
    return [*hidden, (stack, sizes[-1], sizes[-2]), (stack, sizes[-1], 1)]


def aligned(count: int) -> int:
    """Length of a block of ``count`` values with its padding."""
    return -(-count // _ALIGN) * _ALIGN


def parameter_count(sizes: tuple[int, ...], stack: int, layers: HiddenLayers = RELU) -> int:
    """Length of the flat vector of S networks of these layer sizes, padding included."""
    if layers.custom is not None:
        custom: Any = importlib.import_module(_CUSTOM)
        return stack * int(custom.count_of(custom.modules_of(layers, sizes, 1)[0]))
    return sum(aligned(math.prod(shape)) for shape in _shapes(sizes, stack))


def new_parameters(sizes: tuple[int, ...], stack: int, device: torch.device, layers: HiddenLayers = RELU) -> Parameters:
    """Zeroed parameters (or their gradient) of S perceptrons; ``sizes`` = (inputs, hidden ..., outputs)."""
    flat = torch.zeros(parameter_count(sizes, stack, layers), device=device)
    return parameters_over(flat, sizes, stack, layers)


def parameters_over(flat: Tensor, sizes: tuple[int, ...], stack: int, layers: HiddenLayers) -> Parameters:
    """Views of a flat vector of the length ``parameter_count``."""
    if layers.custom is None:
        return Parameters(flat, sizes, stack, layers=layers)
    custom: Any = importlib.import_module(_CUSTOM)
    parameters: Parameters = custom.ModuleParameters(flat, sizes, layers, custom.modules_of(layers, sizes, stack))
    return parameters


class MlpBuffers:
    """Buffers of one forward and backward pass over M rows: activations and gradients.

    ``out`` [S, K, M] is the output, ``grad_out`` [S, K, M] its gradient, which the caller fills before
    ``backward``. ``hidden[i]`` [S, M, H_i] are the activations. The gradient at a layer overwrites the activations
    of the layer above: the less memory a pass touches, the more stays in the core's cache.

    With ``layers.keeps_preactivations``, ``preactivations[i]`` [S, M, H_i] are the sums before bias and activation.
    With layer normalization they are normalized, ``scales[i]`` [S, M, 1] are their factors, and ``bias_gradients[i]``
    [S, 1, H_i] the gradient of the bias. ``scratch[i]`` [S, M, H_i] is for intermediate products, since mapping new
    memory takes longer than the product; ``loss_scratch`` for those of the caller's loss, kept between passes.
    """

    loss_scratch: Tensor | None = None

    def __init__(self, by_layer: Sequence[list[Tensor]], out: Tensor, grad_out: Tensor, layers: HiddenLayers) -> None:
        """``by_layer``: hidden, grads, preactivations, scales and scratch; the latter three may be empty."""
        self._by_layer, self.out, self.grad_out, self.layers = by_layer, out, grad_out, layers
        hidden, grads, self.preactivations, self.scales, self.scratch = by_layer
        self.hidden, self.grads = hidden, grads
        self.bias_gradients = list(hidden)
        self.stack = out.shape[0]
        self.hidden_t = [tensor.transpose(1, 2) for tensor in hidden]
        self.grads_t = [tensor.transpose(1, 2) for tensor in grads]
        self.grad_out_t = grad_out.transpose(1, 2)
        self.ones = None if out.device.type == "cpu" else out.new_ones(self.stack, 1, out.shape[2])
        """[S, 1, M], for sums over rows on a GPU: its matrix-vector product takes half as long as its reduction."""
        self.last_rows = [hidden[-1][index] for index in range(self.stack)]
        self.out_rows = [out[index, 0] for index in range(self.stack)]

    @classmethod
    def allocate(cls, parameters: Parameters, rows: int) -> MlpBuffers:
        """Buffers for M = ``rows`` rows of these networks."""
        like, stack, outputs = parameters.flat, parameters.stack, parameters.sizes[-1]
        hidden = [like.new_zeros(stack, rows, size) for size in parameters.sizes[1:-1]]
        grads = [above if above.shape == below.shape else torch.zeros_like(below) for below, above in pairwise(hidden)]
        grads.append(torch.zeros_like(hidden[-1]))
        out, grad_out = like.new_zeros(stack, outputs, rows), like.new_zeros(stack, outputs, rows)
        preactivations = [torch.zeros_like(part) for part in hidden if parameters.layers.keeps_preactivations]
        scales = [part.new_zeros(stack, rows, 1) for part in preactivations]
        shared = {part.shape: torch.zeros_like(part) for part in preactivations}
        scratch = [shared[part.shape] for part in preactivations]
        return cls((hidden, grads, preactivations, scales, scratch), out, grad_out, parameters.layers)

    def part(self, begin: int, end: int) -> MlpBuffers:
        """Views of rows ``begin`` to ``end``."""
        return self._view(slice(begin, end), self.out[:, :, begin:end], self.grad_out[:, :, begin:end])

    def under(self, out: Tensor, grad_out: Tensor) -> MlpBuffers:
        """Buffers that share this memory, with other outputs [S, K, M] of at most this S and M."""
        return self._view(slice(0, out.shape[2]), out, grad_out)

    def _view(self, rows: slice, out: Tensor, grad_out: Tensor) -> MlpBuffers:
        by_layer = [[_closed(part[: len(out), rows]) for part in tensors] for tensors in self._by_layer]
        return MlpBuffers(by_layer, _closed(out), _closed(grad_out), self.layers)


def _closed(tensor: Tensor) -> Tensor:
    """Makes a stack of one contiguous: oneDNN copies matrices if the stride between them is not their size."""
    return tensor[0].unsqueeze(0) if tensor.shape[0] == 1 else tensor


def dead_units(networks: Iterable[tuple[Parameters, Tensor]]) -> float:
    """Share of the hidden ReLU units that are 0 in all of their rows [M, I]; NaN if there are none.

    Uses at most the first ``_MAX_DEAD_UNIT_ROWS`` rows (reads the device).
    """
    dead = units = 0
    for parameters, x in networks:
        if parameters.layers.custom is not None or parameters.layers.activation != "relu":
            continue
        x = x[:_MAX_DEAD_UNIT_ROWS]
        buffers = MlpBuffers.allocate(parameters, len(x))
        parameters.forward(x.expand(parameters.stack, -1, -1), buffers)
        for hidden in buffers.hidden:
            dead += int((hidden.amax(1) <= 0.0).sum())
            units += hidden.shape[0] * hidden.shape[2]
    return dead / units if units else math.nan


def _hidden_layer(x: Tensor, weight: Tensor, bias: Tensor, buffers: MlpBuffers, index: int) -> Tensor:
    """Hidden layer ``index``, with its preactivations stored in the buffers."""
    preactivations, hidden = torch.bmm(x, weight, out=buffers.preactivations[index]), buffers.hidden[index]
    if buffers.layers.layer_norm:
        preactivations.sub_(preactivations.mean(2, keepdim=True))
        scale = torch.linalg.vector_norm(preactivations, dim=2, keepdim=True, out=buffers.scales[index])
        preactivations.mul_(scale.square_().div_(preactivations.shape[2]).add_(NORM_EPS).rsqrt_())
    activation = buffers.layers.activation
    if activation == "relu" and preactivations.device.type == "cpu":
        return torch._add_relu(preactivations, bias, out=hidden)  # one pass over memory
    torch.add(preactivations, bias, out=hidden)
    if activation == "gelu":
        return hidden.copy_(functional.gelu(hidden, approximate="tanh"))
    if activation in ("silu", "elu"):
        function: Any = functional.silu if activation == "silu" else functional.elu
        return cast(Tensor, function(hidden, inplace=True))
    return hidden.tanh_() if activation == "tanh" else hidden.relu_()


def relu_layer(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """``relu(x W + b)`` of S networks into ``out`` [S, M, H]; kernels of cuBLASLt where possible: one a network."""
    for index in range(len(out)):
        torch._addmm_activation(bias[index, 0], x[index], weight[index], out=out[index])
    return out


def input_gradients(parameters: Parameters, buffers: MlpBuffers, index: int) -> None:
    """Propagates the gradient through layer ``index`` (the head is the last) and the activation before it."""
    below = buffers.grads[index - 1]
    if index < len(buffers.hidden):
        torch.bmm(buffers.grads[index], parameters.weights_t[index], out=below)
    elif parameters.sizes[-1] > 1:
        torch.bmm(buffers.grad_out_t, parameters.head_weight, out=below)
    else:
        torch.mul(buffers.grad_out_t, parameters.head_weight, out=below)
    _through_activation(parameters, buffers, index - 1, below)


def _through_activation(parameters: Parameters, buffers: MlpBuffers, index: int, grad: Tensor) -> None:
    """Converts the gradient of the activations of hidden layer ``index`` to that of its preactivations, in place."""
    activation, hidden = buffers.layers.activation, buffers.hidden[index]
    if activation == "relu":
        torch.ops.aten.threshold_backward.grad_input(grad, hidden, 0.0, grad_input=grad)
    elif activation == "tanh":
        torch.ops.aten.tanh_backward.grad_input(grad, hidden, grad_input=grad)
    elif activation == "elu":
        grad.copy_(torch.ops.aten.elu_backward(grad, 1.0, 1.0, 1.0, True, hidden))
    else:
        inputs = torch.add(buffers.preactivations[index], parameters.biases[index], out=buffers.scratch[index])
        grad.copy_(
            torch.ops.aten.silu_backward(grad, inputs)
            if activation == "silu"
            else torch.ops.aten.gelu_backward(grad, inputs, approximate="tanh")
        )
    if buffers.layers.layer_norm:
        # With n = scale (s - mean s): ds = scale (dn - mean dn - n mean(n dn)); the bias is added after the norm.
        buffers.bias_gradients[index] = grad.sum(1, keepdim=True)
        normal = buffers.preactivations[index]
        along = torch.mul(grad, normal, out=buffers.scratch[index]).mean(2, keepdim=True)
        grad.sub_(grad.mean(2, keepdim=True)).addcmul_(normal, along, value=-1.0).mul_(buffers.scales[index])


def weight_gradients(
    buffers: MlpBuffers, x_t: Tensor | None, gradient: Parameters, index: int, *, add: bool = False
) -> None:
    """Weight and bias gradients of a layer (the head is the last); ``x_t`` [S, I, M] is the input of the first."""
    if index == len(buffers.hidden):
        left, right, dim = buffers.grad_out, buffers.hidden[-1], 2
        weight, bias, values = gradient.head_weight, gradient.head_bias, buffers.grad_out
    else:
        inputs_t = buffers.hidden_t[index - 1] if index else x_t
        assert inputs_t is not None
        left, right, dim = inputs_t, buffers.grads[index], 1
        weight, bias = gradient.weights[index], gradient.biases[index]
        values = buffers.bias_gradients[index] if buffers.layers.layer_norm else right
    if add:
        torch.baddbmm(weight, left, right, out=weight)
        bias.add_(values.sum(dim, keepdim=True))
        return
    if buffers.ones is not None and buffers.ones.shape[2] >= _ROWS_OF_ONE_MATMUL:
        # cuBLAS distributes the rows of one product over all multiprocessors, but not those of a batch of products.
        for network in range(buffers.stack):
            torch.mm(left[network], right[network], out=weight[network])
    else:
        torch.bmm(left, right, out=weight)
    if dim == 1 and buffers.ones is not None and values is right:  # those are sums already
        torch.bmm(buffers.ones, values, out=bias)
    else:
        torch.sum(values, dim, keepdim=True, out=bias)


def uniform_(tensor: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """Draws weights or biases in +-1/sqrt(fan_in), as torch.nn does by default."""
    bound = 1.0 / math.sqrt(fan_in)
    tensor.copy_(torch.empty(tensor.shape, dtype=tensor.dtype).uniform_(-bound, bound, generator=generator))


def orthogonal_(matrix: Tensor, gain: float, generator: torch.Generator) -> None:
    """Fills a matrix [out, in], which may be a view, with orthonormal rows or columns times ``gain``."""
    values = torch.empty(matrix.shape, dtype=matrix.dtype)
    matrix.copy_(torch.nn.init.orthogonal_(values, gain, generator=generator))


HIDDEN_GAIN, POLICY_GAIN, VALUE_GAIN = math.sqrt(2.0), 0.01, 1.0
"""Gains of orthogonal initialization (Saxe et al. 2014, arXiv 1312.6120). Andrychowicz et al. 2021 (arXiv 2006.05990)
found that among such choices the small policy head matters most."""


class ActorCriticSpec(NamedTuple):
    """Sizes of policy and value, and what their weights are made with."""

    outputs: int  # K of the policy
    num_log_std: int
    hidden_sizes: tuple[int, ...]
    layers: HiddenLayers
    generator: torch.Generator
    device: torch.device


class ActorCriticMlp:
    """Policy and value as two perceptrons, stacked into one batched matmul; the value is the second one's first output.

    ``flat`` holds the perceptrons' parameters, ``extra`` others, and log standard deviations of a continuous policy.
    These and their gradient are the views ``log_std`` and ``grad_log_std`` [A]; the caller fills the latter.
    """

    def __init__(self, inputs: int, spec: ActorCriticSpec, extra: int = 0) -> None:
        sizes, layers = (inputs, *spec.hidden_sizes, spec.outputs), spec.layers
        count = parameter_count(sizes, 2, layers)
        self.hidden_sizes, self.layers = spec.hidden_sizes, layers
        self.meta = {"hidden_sizes": list(spec.hidden_sizes), **layers.meta, "activation": layers.activation}
        self.flat = torch.zeros(count + extra + spec.num_log_std, device=spec.device)
        self.gradient = torch.zeros_like(self.flat)
        vectors = self.flat, self.gradient
        self.log_std, self.grad_log_std = (vector[count + extra :] for vector in vectors)
        self._extra, self._extra_gradient = (vector[count : count + extra] for vector in vectors)
        self.networks, self.gradients = (parameters_over(vector[:count], sizes, 2, layers) for vector in vectors)
        self.policy_network, self.value_network = self.networks.one(0), self.networks.one(1)
        self._buffers = MlpBuffers.allocate(self.networks, 1)

    def _initialize(self, generator: torch.Generator) -> None:
        for weight in self.networks.weights:
            for network in weight:
                orthogonal_(network.t(), HIDDEN_GAIN, generator)
        orthogonal_(self.networks.head_weight[0], POLICY_GAIN, generator)
        orthogonal_(self.networks.head_weight[1, :1], VALUE_GAIN, generator)

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [K, M] (logits or means) and values [M] at rows [M, I], in buffers that the next call overwrites."""
        if self._buffers.out.shape[2] != len(x):
            self._buffers = MlpBuffers.allocate(self.networks, len(x))
        out = self.networks.forward(x.expand(2, -1, -1), self._buffers)
        return out[0], out[1, 0]

    def _backward(self, x: Tensor, grad_out: Tensor, grad_value: Tensor) -> Tensor:
        """Fills the perceptrons' ``gradients``; returns that of the first layers' pre-activations [2, M, H_0].

        The value network's other outputs have no gradient and are never trained.
        """
        self._buffers.grad_out[0].copy_(grad_out)
        self._buffers.grad_out[1, 0].copy_(grad_value)
        return self.networks.backward(self._buffers, x.t().expand(2, -1, -1), self.gradients)

    def values(self, x: Tensor) -> Tensor:
        """Values [M] at rows x [M, I]."""
        buffers = MlpBuffers.allocate(self.value_network, len(x))
        return self.value_network.forward(x.unsqueeze(0), buffers)[0, 0]

    def policy_arrays(self) -> dict[str, np.ndarray]:
        return self.policy_network.arrays()


def host_copies(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.to("cpu", copy=True).numpy() for name, tensor in tensors.items()}


def policy_snapshot(parameters: Parameters) -> Callable[[], dict[str, np.ndarray]]:
    """Starts a copy of a network's weights to the host.

    The returned function waits for the copy, also in another thread, and returns its ``arrays``.
    """
    source, copied = parameters.flat, None
    flat = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    flat.copy_(source, non_blocking=True)
    if source.is_cuda:
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a waiting thread yields its core
        copied.record(torch.cuda.current_stream(source.device))

    def read() -> dict[str, np.ndarray]:
        if copied is not None:
            copied.synchronize()
        return parameters.over(flat).arrays()

    return read


class MlpPasses:
    """Passes of one network over the rows of one set of buffers, by one thread, two threads, or two streams."""

    def __init__(self, parameters: Parameters, buffers: MlpBuffers, parallel: Parallel | None = None) -> None:
        self._parameters, self._buffers = parameters, buffers
        self._parallel = parallel if isinstance(parallel, TwoThreads) else None
        self._streams = parallel if isinstance(parallel, TwoStreams) else None
        device, rows = buffers.out.device, buffers.out.shape[2]

        def cut(chunks: list[slice]) -> list[tuple[slice, MlpBuffers]]:
            return [(chunk, buffers.part(chunk.start, chunk.stop)) for chunk in chunks]

        self._shares = [cut(chunks) for chunks in row_chunks(device, rows, 1 if self._parallel is None else 2)]
        self._down = cut(row_chunks(device, rows)[0])

    def forward(self, x: Tensor) -> Tensor:
        """``Parameters.forward`` of x [1, M, I]."""
        if self._parallel is None:
            self._up(self._shares[0], x)
        else:
            self._parallel.both(lambda: self._up(self._shares[0], x), lambda: self._up(self._shares[1], x))
        return self._buffers.out

    def _up(self, chunks: list[tuple[slice, MlpBuffers]], x: Tensor) -> None:
        for rows, buffers in chunks:
            self._parameters.forward(x[:, rows], buffers)

    def backward(self, x_t: Tensor, gradient: Parameters) -> None:
        """``Parameters.backward`` of the buffers' ``grad_out`` with weight gradients; x_t is [1, I, M]."""
        for rows, buffers in self._down:
            if self._parallel is None or len(buffers.hidden) < 2:
                self._parameters.backward(buffers, x_t[:, :, rows], gradient, add=rows.start > 0, streams=self._streams)
            else:
                self._by_both(self._parallel, buffers, x_t[:, :, rows], gradient, add=rows.start > 0)

    def _by_both(
        self, parallel: TwoThreads, buffers: MlpBuffers, x_t: Tensor, gradient: Parameters, *, add: bool
    ) -> None:
        weight_gradients(buffers, x_t, gradient, len(buffers.hidden), add=add)
        input_gradients(self._parameters, buffers, len(buffers.hidden))
        for index in range(len(buffers.hidden) - 1, 0, -1):

            def way_down(index: int = index) -> None:
                input_gradients(self._parameters, buffers, index)
                if index == 1:
                    weight_gradients(buffers, x_t, gradient, 0, add=add)

            parallel.both(
                lambda index=index: weight_gradients(buffers, x_t, gradient, index, add=add),  # type: ignore[misc]
                way_down,
            )
