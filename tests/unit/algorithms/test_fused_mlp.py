"""Hand-derived forward and backward passes against autograd, and initialization."""

import contextlib
import dataclasses
import math

import numpy as np
import pytest
import torch
from batches import exact
from rollouts import FRAMES, learner, rollout, task
from torch.nn import functional

from spreeze.algorithms import create
from spreeze.algorithms.networks.fused_mlp import HiddenLayers, MlpBuffers, MlpPasses, new_parameters
from spreeze.algorithms.parallel_work import TwoThreads
from spreeze.config.schema import SECTIONS
from spreeze.errors import ConfigError
from spreeze.inference.policy import ACTIVATIONS, Policy
from spreeze.types import RowLayout

CPU = torch.device("cpu")
CASES = [((5, 8, 7, 1), 2), ((5, 8, 7, 1), 1), ((3, 16, 6), 1), ((4, 8, 8, 8, 2), 2)]


def made(sizes, stack, dtype=torch.float64):
    parameters = exact(new_parameters, sizes, stack, CPU, dtype=dtype)
    parameters.initialize(torch.Generator().manual_seed(3))
    return parameters


def autograd_twin(parameters, x):
    """The same networks from leaf tensors; returns output [S, K, M] and the leaves."""
    leaves = [t.clone().requires_grad_() for t, _ in parameters.blocks()]
    h = x
    for index in range(len(parameters.weights)):
        h = torch.relu(h @ leaves[2 * index] + leaves[2 * index + 1])
    return leaves[-2] @ h.transpose(1, 2) + leaves[-1], leaves


@pytest.mark.parametrize(("sizes", "stack"), CASES)
def test_forward_and_weight_gradients_equal_autograd(sizes, stack):
    parameters, gradient = made(sizes, stack), exact(new_parameters, sizes, stack, CPU, dtype=torch.float64)
    buffers = MlpBuffers.allocate(parameters, 11)
    rows = torch.randn(11, sizes[0] + 3, dtype=torch.float64)  # a strided view, as from a row block
    x = rows[:, : sizes[0]].expand(stack, -1, -1)
    out, leaves = autograd_twin(parameters, x)
    torch.testing.assert_close(parameters.forward(x, buffers), out.detach(), rtol=1e-10, atol=1e-12)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    buffers.grad_out.copy_(upstream)
    parameters.backward(buffers, x.transpose(1, 2), gradient)
    for (got, _), leaf in zip(gradient.blocks(), leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("sizes", "stack"), CASES)
def test_input_gradient_equals_autograd_and_touches_no_weight_gradient(sizes, stack):
    parameters = made(sizes, stack)
    buffers = MlpBuffers.allocate(parameters, 6)
    x = torch.randn(stack, 6, sizes[0], dtype=torch.float64, requires_grad=True)
    out, _ = autograd_twin(parameters, x)
    out.sum().backward()
    with torch.no_grad():
        parameters.forward(x, buffers)
        buffers.grad_out.fill_(1.0)
        first = parameters.backward(buffers, None, None)
        got = first @ parameters.weights[0].transpose(1, 2)
    torch.testing.assert_close(got, x.grad, rtol=1e-9, atol=1e-12)


def test_backward_over_a_part_of_the_rows_is_that_of_those_rows_alone():
    sizes = (4, 8, 3)
    parameters = made(sizes, 1)
    gradient, alone = (exact(new_parameters, sizes, 1, CPU, dtype=torch.float64) for _ in range(2))
    x, upstream = torch.randn(1, 10, 4, dtype=torch.float64), torch.randn(1, 3, 6, dtype=torch.float64)
    buffers = MlpBuffers.allocate(parameters, 10)
    part = buffers.part(4, 10)
    parameters.forward(x, buffers)
    part.grad_out.copy_(upstream)
    parameters.backward(part, x[:, 4:].transpose(1, 2), gradient)
    small = MlpBuffers.allocate(parameters, 6)
    parameters.forward(x[:, 4:], small)
    small.grad_out.copy_(upstream)
    parameters.backward(small, x[:, 4:].transpose(1, 2), alone)
    torch.testing.assert_close(gradient.flat, alone.flat, rtol=1e-12, atol=1e-14)


def test_first_of_a_stack_shares_memory_and_gives_the_same_values():
    parameters = made((5, 8, 8, 1), 2)
    x, buffers = torch.randn(2, 4, 5, dtype=torch.float64), MlpBuffers.allocate(parameters, 4)
    both = parameters.forward(x, buffers).clone()
    one = parameters.one(0).forward(x[:1], buffers.under(buffers.out[:1], buffers.grad_out[:1]))
    torch.testing.assert_close(one[0], both[0])
    assert parameters.one(0).head_weight.data_ptr() == parameters.head_weight.data_ptr()


def test_initial_weights_lie_within_the_linear_default_and_follow_the_seed():
    first, second = made((22, 256, 256, 12), 1), made((22, 256, 256, 12), 1)
    assert torch.equal(first.flat, second.flat)
    for tensor, fan_in in first.blocks():
        bound = 1.0 / math.sqrt(fan_in)
        assert tensor.abs().max() <= bound
        assert tensor.abs().max() > 0.5 * bound
    assert first.weights[1].std().item() == pytest.approx(1 / math.sqrt(3 * 256), rel=0.02)


def test_policy_arrays_are_copies_in_the_layout_of_numpy():
    parameters = made((3, 4, 2), 1)
    arrays = parameters.arrays()
    x = torch.randn(5, 3, dtype=torch.float64)
    hidden = np.maximum(x.numpy() @ arrays["w0"] + arrays["b0"], 0)
    expected = parameters.forward(x[None], MlpBuffers.allocate(parameters, 5))[0].t().clone()
    np.testing.assert_allclose(hidden @ arrays["head_w"] + arrays["head_b"], expected.numpy())
    parameters.flat.zero_()
    assert np.abs(arrays["w0"]).sum() > 0
    assert np.abs(arrays["head_w"]).sum() > 0


# --- other hidden layers than ReLU ---

LAYERS = [HiddenLayers(name, norm) for name in ACTIVATIONS for norm in (False, True)]
TORCH = {"relu": torch.relu, "tanh": torch.tanh, "silu": functional.silu, "elu": functional.elu,
         "gelu": lambda x: functional.gelu(x, approximate="tanh")}  # fmt: skip


def made_of(layers, sizes, stack, dtype=torch.float64):
    parameters = exact(new_parameters, sizes, stack, CPU, layers, dtype=dtype)
    parameters.initialize(torch.Generator().manual_seed(3))
    parameters.flat.mul_(2.0)
    return parameters


def torch_twin(parameters, x):
    """The same networks by torch's own layer norm and activations."""
    leaves = [t.clone().requires_grad_() for t, _ in parameters.blocks()]
    h = x
    for index, weight in enumerate(parameters.weights):
        h = h @ leaves[2 * index]
        if parameters.layers.layer_norm:
            h = functional.layer_norm(h, (weight.shape[2],))
        h = TORCH[parameters.layers.activation](h + leaves[2 * index + 1])
    return leaves[-2] @ h.transpose(1, 2) + leaves[-1], leaves


@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize(("sizes", "stack"), CASES)
def test_every_activation_with_and_without_layer_norm_equals_autograd(layers, sizes, stack):
    parameters, rows = made_of(layers, sizes, stack), 11
    gradient, buffers = (
        exact(new_parameters, sizes, stack, CPU, dtype=torch.float64),
        MlpBuffers.allocate(parameters, rows),
    )
    x = torch.randn(stack, rows, sizes[0], dtype=torch.float64, requires_grad=True)
    out, leaves = torch_twin(parameters, x)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    with torch.no_grad():
        torch.testing.assert_close(parameters.forward(x, buffers), out, rtol=1e-10, atol=1e-12)
        for part in (slice(0, 4), slice(4, rows)):  # as chunks are summed
            some = buffers.part(part.start, part.stop)
            some.grad_out.copy_(upstream[:, :, part])
            first = parameters.backward(some, x[:, part].transpose(1, 2), gradient, add=part.start > 0)
            got = first @ parameters.weights[0].transpose(1, 2)
            torch.testing.assert_close(got, x.grad[:, part], rtol=1e-9, atol=1e-12)
    for (found, _), leaf in zip(gradient.blocks(), leaves, strict=True):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_the_derivative_of_a_value_by_its_input_equals_autograd(layers):
    parameters = made_of(layers, (5, 8, 7, 1), 2)
    x = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
    torch_twin(parameters, x)[0].sum().backward()
    with torch.no_grad():
        buffers = MlpBuffers.allocate(parameters, 6)
        parameters.forward(x, buffers)
        got = parameters.derivative(buffers) @ parameters.weights[0].transpose(1, 2)
    torch.testing.assert_close(got, x.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_two_threads_and_the_sampler_s_numpy_give_the_same(layers):
    sizes = (4, 9, 8, 3)
    parameters = made_of(layers, sizes, 1, torch.float32)
    x, upstream = torch.randn(1, 10, 4), torch.randn(1, 3, 10)
    found = []
    with contextlib.closing(TwoThreads()) as pair, torch.inference_mode():
        for threads in (None, pair):
            buffers, gradient = MlpBuffers.allocate(parameters, 10), new_parameters(sizes, 1, CPU)
            passes = MlpPasses(parameters, buffers, threads)
            out = passes.forward(x).clone()
            buffers.grad_out.copy_(upstream)
            passes.backward(x.transpose(1, 2), gradient)
            found.append((out, gradient.flat))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    meta = {"policy": "categorical", "num_actions": 3, "obs_dim": 4, "hidden_sizes": [9, 8], **layers.meta}
    policy = Policy.from_weights(parameters.arrays(), meta)
    np.testing.assert_allclose(policy._forward(x[0].numpy(), ())[0], found[0][0][0].t(), rtol=1e-4, atol=1e-5)


def test_layer_norm_by_hand():
    parameters = exact(new_parameters, (1, 2, 1), 1, CPU, HiddenLayers("relu", layer_norm=True), dtype=torch.float64)
    parameters.weights[0][0] = torch.tensor([[3.0, 1.0]])  # the sums 3 and 1 become 1 and -1
    parameters.biases[0][0] = torch.tensor([[0.5, 4.0]])
    parameters.head_weight[0] = torch.tensor([[10.0, 100.0]])
    out = parameters.forward(torch.ones(1, 1, 1, dtype=torch.float64), MlpBuffers.allocate(parameters, 1))
    assert out.item() == pytest.approx(10.0 * 1.5 + 100.0 * 3.0, rel=1e-5)


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg", "dqn", "discrete sac", "ppo", "a2c", "impact"])
def test_every_algorithm_learns_with_them_and_publishes_what_samplers_compute(name):
    algo = name.split()[-1]
    rng, discrete = np.random.default_rng(0), name in ("dqn", "discrete sac")
    norms = {"layer_norm": True} if algo in ("dqn", "ppo", "a2c", "impact") else {
        "actor_layer_norm": True, "critic_layer_norm": True}  # fmt: skip
    changes = {"hidden_sizes": (8, 8), "activation": "silu", **norms}
    obs = rng.standard_normal((5, 3)).astype(np.float32)
    if algo in ("ppo", "a2c", "impact"):
        spec = task()
        algorithm = learner(algo, spec, **changes)
        for _ in range(3):
            algorithm.learn(rollout(algorithm, spec, rng), None)
        with torch.no_grad():
            expected = algorithm.net.forward(torch.from_numpy(obs))[0].t().numpy().copy()
    else:
        config = dataclasses.replace(SECTIONS[algo](), **changes)
        algorithm = create(algo, 3, 1 if discrete else 2, config, 0, num_actions=3 if discrete else None)
        layout = RowLayout(3, 1 if discrete else 2)
        for _ in range(3):
            rows = rng.uniform(0.0, 1.0, (16, layout.width)).astype(np.float32)
            if discrete:
                rows[:, layout.action] = rng.integers(3, size=(16, 1))
            algorithm.update(layout.split(torch.from_numpy(rows), 0.9))
        net = algorithm.critics.online if algorithm.actor is None else algorithm.actor.online
        expected = net.forward(torch.from_numpy(obs)[None], MlpBuffers.allocate(net, 5))[0].t().numpy().copy()
    assert algorithm.updates_skipped() == 0
    policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    np.testing.assert_allclose(policy._forward(obs, ())[0], expected, rtol=1e-4, atol=1e-5)


def test_images_have_layers_of_their_own_and_say_so():
    images, sections = task(discrete=True, frames=FRAMES), SECTIONS
    for config in (sections["ppo"](), sections["ppo"](activation="relu"), sections["dqn"]()):
        config.check_task(images)
    with pytest.raises(ConfigError, match=r"^activation = elu: networks for images use relu"):
        sections["ppo"](activation="elu").check_task(images)
    with pytest.raises(ConfigError, match=r"^layer_norm = True: networks for images use relu"):
        sections["dqn"](layer_norm=True).check_task(images)
    for name in ("ppo", "dqn", "sac"):
        with pytest.raises(ConfigError, match=r"^network = 'mine': for images set cnn"):
            sections[name](network="mine").check_task(images)
