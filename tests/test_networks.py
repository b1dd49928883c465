"""Hand-derived forward and backward passes against autograd, and initialisation."""

import math

import numpy as np
import pytest
import torch

from spreeze.algorithms.fused_mlp import Tape, mlp_backward, mlp_forward, new_parameters, policy_arrays

CPU = torch.device("cpu")
CASES = [((5, 8, 7, 1), 2), ((5, 8, 7, 1), 1), ((3, 16, 6), 1), ((4, 8, 8, 8, 2), 2)]


def made(sizes, stack, dtype=torch.float64):
    parameters = new_parameters(sizes, stack, CPU, dtype)
    parameters.initialise(torch.Generator().manual_seed(3))
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
    parameters, gradient = made(sizes, stack), new_parameters(sizes, stack, CPU, torch.float64)
    tape = Tape.allocate(parameters, 11)
    rows = torch.randn(11, sizes[0] + 3, dtype=torch.float64)  # a strided view, as from a row block
    x = rows[:, : sizes[0]].expand(stack, -1, -1)
    out, leaves = autograd_twin(parameters, x)
    torch.testing.assert_close(mlp_forward(parameters, x, tape), out.detach(), rtol=1e-10, atol=1e-12)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    tape.grad_out.copy_(upstream)
    mlp_backward(parameters, tape, x.transpose(1, 2), gradient)
    for (got, _), leaf in zip(gradient.blocks(), leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("sizes", "stack"), CASES)
def test_input_gradient_equals_autograd_and_touches_no_weight_gradient(sizes, stack):
    parameters = made(sizes, stack)
    tape = Tape.allocate(parameters, 6)
    x = torch.randn(stack, 6, sizes[0], dtype=torch.float64, requires_grad=True)
    out, _ = autograd_twin(parameters, x)
    out.sum().backward()
    with torch.no_grad():
        mlp_forward(parameters, x, tape)
        tape.grad_out.fill_(1.0)
        first = mlp_backward(parameters, tape, None, None)
        got = first @ parameters.weights[0].transpose(1, 2)
    torch.testing.assert_close(got, x.grad, rtol=1e-9, atol=1e-12)


def test_backward_over_a_part_of_the_rows_is_that_of_those_rows_alone():
    sizes = (4, 8, 3)
    parameters = made(sizes, 1)
    gradient, alone = (new_parameters(sizes, 1, CPU, torch.float64) for _ in range(2))
    x, upstream = torch.randn(1, 10, 4, dtype=torch.float64), torch.randn(1, 3, 6, dtype=torch.float64)
    tape = Tape.allocate(parameters, 10)
    part = tape.part(4, 10)
    mlp_forward(parameters, x, tape)
    part.grad_out.copy_(upstream)
    mlp_backward(parameters, part, x[:, 4:].transpose(1, 2), gradient)
    small = Tape.allocate(parameters, 6)
    mlp_forward(parameters, x[:, 4:], small)
    small.grad_out.copy_(upstream)
    mlp_backward(parameters, small, x[:, 4:].transpose(1, 2), alone)
    torch.testing.assert_close(gradient.flat, alone.flat, rtol=1e-12, atol=1e-14)


def test_first_of_a_stack_shares_memory_and_gives_the_same_values():
    parameters = made((5, 8, 8, 1), 2)
    x, tape = torch.randn(2, 4, 5, dtype=torch.float64), Tape.allocate(parameters, 4)
    both = mlp_forward(parameters, x, tape).clone()
    one = mlp_forward(parameters.one(0), x[:1], tape.under(tape.out[:1], tape.grad_out[:1]))
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
    arrays = policy_arrays(parameters)
    x = torch.randn(5, 3, dtype=torch.float64)
    hidden = np.maximum(x.numpy() @ arrays["w0"] + arrays["b0"], 0)
    expected = mlp_forward(parameters, x[None], Tape.allocate(parameters, 5))[0].t().clone()
    np.testing.assert_allclose(hidden @ arrays["head_w"] + arrays["head_b"], expected.numpy())
    parameters.flat.zero_()
    assert np.abs(arrays["w0"]).sum() > 0
    assert np.abs(arrays["head_w"]).sum() > 0
