"""The maths against numbers worked by hand and plain NumPy."""

import math

import numpy as np
import pytest
import torch
from numpy_reference import squashed_log_prob

from spreeze.algorithms import losses
from spreeze.algorithms.networks.fused_mlp import new_parameters
from spreeze.algorithms.optimizers import TrainedNetworks


def test_target_bootstraps_unless_terminated():
    target = losses.td_target(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), 0.5, torch.tensor([10.0, 10.0]))
    assert target.tolist() == [6.0, 2.0]


def test_target_takes_one_discount_for_each_row():
    discount = torch.tensor([0.5, 0.25, 0.125])
    target = losses.td_target(torch.zeros(3), torch.tensor([0.0, 0.0, 1.0]), discount, torch.full((3,), 8.0))
    assert target.tolist() == [4.0, 2.0, 0.0]


def test_log_prob_at_the_mean_is_the_normal_constant():
    action, log_prob, _ = losses.squashed_gaussian(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1))
    assert action.item() == 0.0
    assert log_prob.item() == pytest.approx(-0.5 * math.log(2 * math.pi), abs=1e-6)


def test_log_prob_equals_change_of_variables():
    rng = np.random.default_rng(0)
    mean, log_std, noise = rng.normal(size=(3, 3, 50)) * np.array([0.5, 0.3, 1.0])[:, None, None]
    action, log_prob, deviation = losses.squashed_gaussian(*(torch.from_numpy(x) for x in (mean, log_std, noise)))
    expected_action, expected = squashed_log_prob(mean.T, log_std.T, noise.T)
    np.testing.assert_allclose(action.numpy(), expected_action.T, rtol=1e-12)
    np.testing.assert_allclose(log_prob.numpy(), expected, rtol=1e-10)
    np.testing.assert_allclose(deviation.numpy(), np.exp(log_std) * noise, rtol=1e-12)


@pytest.mark.parametrize("mean", [-1e4, -60.0, -15.0, 15.0, 60.0, 1e4])
def test_log_prob_stays_exact_where_tanh_saturates(mean):
    _, log_prob, _ = losses.squashed_gaussian(torch.full((1, 1), mean), torch.zeros(1, 1), torch.zeros(1, 1))
    # log(1 - tanh(u)^2) = 2 log 2 - 2 |u| up to exp(-2 |u|), which is below float32 here.
    expected = -0.5 * math.log(2 * math.pi) - (2 * math.log(2) - 2 * abs(mean))
    assert log_prob.item() == pytest.approx(expected, rel=1e-5)


def test_gradient_of_the_sample_equals_autograd():
    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise, grad = torch.randn(4, 3, 20, dtype=torch.float64, generator=generator)
    mean.requires_grad_()
    log_std.requires_grad_()
    u = mean + log_std.exp() * noise
    action = u.tanh()
    log_prob = (-0.5 * noise**2 - log_std - torch.log(1 - action**2)).sum(0)
    ((grad * action).sum() + 0.7 * log_prob.sum()).backward()
    with torch.no_grad():
        found_action, _, deviation = losses.squashed_gaussian(mean, log_std, noise)
        got = losses.squashed_gaussian_backward(found_action, deviation, grad, torch.tensor(0.7, dtype=torch.float64))
    torch.testing.assert_close(got[0], mean.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got[1], log_std.grad, rtol=1e-9, atol=1e-12)


def test_gradient_through_tanh_by_hand():
    action = torch.tensor([[0.5, -0.5, 0.0]])
    assert losses.tanh_backward(action, torch.tensor([[4.0, 4.0, 4.0]])).tolist() == [[3.0, 3.0, 4.0]]


def test_targets_move_by_tau():
    networks = TrainedNetworks(lambda: new_parameters((1, 2, 1), 1, torch.device("cpu")), 1e-3, torch.Generator())
    networks.target.flat.zero_()
    networks.online.flat.fill_(10.0)
    networks.update_target(0.25)
    assert set(networks.target.flat.tolist()) == {2.5}
    assert set(networks.online.flat.tolist()) == {10.0}


def test_smoothed_action_clips_noise_and_action():
    noise = torch.tensor([[1.0, 10.0, 10.0, -10.0]])
    action = torch.tensor([[0.0, 0.0, 0.75, -0.875]])
    smoothed = losses.smoothed_action(action, noise, 0.25, 0.5)
    assert smoothed.tolist() == [[0.25, 0.5, 1.0, -1.0]]
