"""Critics that learn distributions: the maths by hand and against autograd, and both algorithms with them."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from batches import ACT, OBS, batches, made, same

from spreeze.algorithms import create
from spreeze.algorithms.distributional import (
    CategoricalCritics,
    QuantileCritics,
    drop_top_quantiles,
    projected,
    quantile_huber_gradient,
)
from spreeze.algorithms.parallel_work import TwoThreads
from spreeze.config.schema import SECTIONS
from spreeze.errors import ConfigError
from spreeze.types import Choices, EnvSpec

QUANTILE = {"critics": "quantile", "quantiles": 5, "drop_quantiles": 1}
CATEGORICAL = {"critics": "categorical", "atoms": 11, "v_min": -5.0, "v_max": 5.0}
CASES = [(name, changes) for name in ("sac", "td3") for changes in (QUANTILE, CATEGORICAL)]


def test_the_highest_of_all_pooled_values_are_left_out():
    assert drop_top_quantiles(torch.tensor([[3.0, -1.0, 2.0, 9.0]]), 1).sort(1).values.tolist() == [[-1.0, 2.0, 3.0]]


def test_the_gradient_of_a_quantile_is_that_worked_out_by_hand():
    # Errors 0.5, -0.25, 3, -4 become 0.5, -0.25, 1, -1; those above count 0.75, those below 0.25.
    goals = torch.tensor([[1.5], [0.75], [4.0], [-3.0]])
    found = quantile_huber_gradient(torch.tensor([[1.0]]), goals, torch.tensor([0.75]))
    assert found.item() == pytest.approx(-(0.75 * 1.5 - 0.25 * 1.25) / 4)


def test_the_gradient_of_quantiles_is_that_of_autograd():
    generator = torch.Generator().manual_seed(1)
    quantiles, target = (2.0 * torch.randn(7, n, generator=generator) + 1000.0 for n in (5, 9))
    levels = (torch.arange(5) + 0.5) / 5
    quantiles.requires_grad_()
    error = target.unsqueeze(1) - quantiles.unsqueeze(2)
    huber = torch.nn.functional.huber_loss(quantiles.unsqueeze(2).expand_as(error), target.unsqueeze(1)
                                           .expand_as(error), reduction="none")  # fmt: skip
    loss = ((levels.unsqueeze(1) - (error.detach() < 0).float()).abs() * huber).mean(2).sum()
    (expected,) = torch.autograd.grad(loss, quantiles)
    found = quantile_huber_gradient(quantiles.detach().t(), target.t(), levels).t()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_probabilities_go_to_the_two_neighbours_on_the_grid():
    # A grid of -1, 0, 1; column by column: between two, on one, outside of both ends.
    prob = torch.tensor([[0.5, 0.2, 0.3], [0.25, 0.3, 0.3], [0.25, 0.5, 0.4]])
    target = torch.tensor([[-0.5, -1.0, -7.0], [0.25, 0.0, 0.0], [1.0, 1.0, 2.0]])
    found = projected(prob, target, -1.0, 1.0)
    expected = [[0.25, 0.2, 0.3], [0.25 + 0.75 * 0.25, 0.3, 0.3], [0.25 * 0.25 + 0.25, 0.5, 0.4]]
    torch.testing.assert_close(found, torch.tensor(expected))


def forward(critics, x, network):
    """The critics' outputs [S, B, K] by plain operations."""
    for weight, bias in zip(network.weights, network.biases, strict=True):
        x = torch.relu(x @ weight + bias)
    return x @ network.head_weight.transpose(1, 2) + network.head_bias.transpose(1, 2)


@pytest.mark.parametrize("rows", [32, 600])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("name", "changes"), CASES)
def test_gradients_are_those_of_autograd_in_chunks_and_by_two_threads(name, changes, threads, rows):
    config = dataclasses.replace(SECTIONS[name](), hidden_sizes=(16, 16), **changes)
    with contextlib.closing(TwoThreads()) as pair:
        algorithm = create(name, OBS, ACT, config, 1)
        algorithm.set_parallel(pair if threads == 2 else None)
        critics = algorithm.critics
        generator = torch.Generator().manual_seed(3)
        obs, next_obs = torch.randn(2, rows, OBS, generator=generator)
        action, next_action = torch.rand(2, ACT, rows, generator=generator)
        reward, x = torch.randn(rows, generator=generator), torch.cat((obs, action.t()), 1)
        critics.adam.step = lambda: None  # the gradient alone
        critics.target.flat.mul_(1.5)
        with torch.inference_mode():
            critics.step(x, reward + 0.9 * critics.next_value(next_obs, next_action))
            gradient = critics.gradient.flat.clone()
            descent = critics.action_gradient(obs, action, use_min=True).clone()
            value = critics.action_value.clone()
    expected, target = critics.online, forward(critics, torch.cat((next_obs, next_action.t()), 1), critics.target)
    leaves = [*expected.weights, *expected.biases, expected.head_weight, expected.head_bias]
    inputs = x.clone().requires_grad_()
    for leaf in leaves:
        leaf.requires_grad_()
    out = forward(critics, inputs, expected)
    if isinstance(critics, QuantileCritics):
        pooled = target.transpose(0, 1).flatten(1).sort(1).values[:, :-2]
        goal = (reward[:, None] + 0.9 * pooled)[None, :, None, :].expand(*out.shape, -1)
        error = goal.detach() - out.detach().unsqueeze(3)
        huber = torch.nn.functional.huber_loss(out.unsqueeze(3).expand_as(goal), goal.detach(), reduction="none")
        levels = ((torch.arange(5) + 0.5) / 5)[:, None]
        loss = ((levels - (error < 0).float()).abs() * huber).mean((2, 3)).sum()
        means = out.mean(2).mean(0)
    else:
        grid, prob = torch.linspace(-5.0, 5.0, 11), target.softmax(2)
        means_next = (prob * grid).sum(2)
        prob = torch.where((means_next[0] <= means_next[1])[:, None], prob[0], prob[1])
        goal = projected(prob.t(), reward + 0.9 * grid[:, None].expand(-1, rows), -5.0, 5.0).t()
        loss = -(goal.detach() * out.log_softmax(2)).sum()
        means = (out.softmax(2) * grid).sum(2).amin(0)
    for leaf, found in zip(leaves, torch.autograd.grad(loss / rows, leaves, retain_graph=True), strict=True):
        leaf.requires_grad_(False)
        offset = (leaf.data_ptr() - critics.online.flat.data_ptr()) // 4
        torch.testing.assert_close(gradient[offset : offset + leaf.numel()], found.flatten(), rtol=2e-4, atol=1e-5)
    (by_input,) = torch.autograd.grad(means.sum(), inputs)
    torch.testing.assert_close(descent, by_input[:, OBS:].t(), rtol=2e-4, atol=1e-6)
    torch.testing.assert_close(value, means.detach(), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_they_resume_bit_by_bit_and_tell_finite_metrics(name, changes):
    whole, first, second = (made(name, **changes) for _ in range(3))
    for index, batch in enumerate(batches(10)):
        whole.update(batch)
        (first if index < 5 else second).update(batch)
        if index == 4:
            second.load_state_arrays(first.state_arrays())
            second.load_state_json(first.state_json())
    assert same(whole.state_arrays(), second.state_arrays())
    found = whole.metrics()
    assert {"critic_loss", "q_mean", "actor_loss", "critic_grad_norm", "actor_grad_norm"} <= found.keys()
    assert all(np.isfinite(value) for value in found.values())
    whole.drop_buffers()
    whole.update(next(batches(1, size=8)))


@pytest.mark.parametrize("field", ["obs", "next_obs", "reward"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize(("name", "changes"), CASES)
def test_what_is_not_finite_is_refused_and_counted(name, changes, poison, field):
    algorithm = made(name, policy_delay=1, **changes) if name == "td3" else made(name, **changes)
    algorithm.update(next(batches(1)))
    before = algorithm.state_arrays()["critics.online"]
    batch = next(batches(1, seed=4))
    getattr(batch, field)[3] = poison
    algorithm.update(batch)
    assert algorithm.updates_skipped() == 1
    assert np.array_equal(algorithm.state_arrays()["critics.online"], before)
    assert np.isfinite(algorithm.state_arrays()["critics.online"]).all()


@pytest.mark.parametrize(("changes", "kind"), [(QUANTILE, QuantileCritics), (CATEGORICAL, CategoricalCritics)])
def test_they_learn_the_mean_of_a_constant_reward(changes, kind):
    algorithm = made("td3", gamma=0.0, critic_lr=3e-3, **changes)
    assert isinstance(algorithm.critics, kind)
    for batch in batches(400):
        algorithm.update(batch._replace(reward=torch.full_like(batch.reward, 1.25), discount=0.0))
    assert algorithm.metrics()["q_mean"] == pytest.approx(1.25, abs=0.1)


def test_one_quantile_that_nothing_is_dropped_of_is_the_median():
    algorithm = made("sac", gamma=0.0, critic_lr=3e-3, critics="quantile", quantiles=1, drop_quantiles=0)
    for index, batch in enumerate(batches(600)):
        reward = torch.where(torch.arange(32) < 20, 0.5, 30.0)
        reward = reward[torch.randperm(32, generator=torch.Generator().manual_seed(index))]
        algorithm.update(batch._replace(reward=reward, discount=0.0))
    assert algorithm.metrics()["q_mean"] < 6.0, "the mean is 11.6"


@pytest.mark.parametrize(("changes", "words"), [
    ({"quantiles": 5, "drop_quantiles": 5}, "drop fewer"), ({"v_min": 1.0, "v_max": 1.0}, "not below v_max"),
])  # fmt: skip
def test_settings_that_leave_nothing_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        SECTIONS["sac"](**changes)


def test_discrete_actions_take_twin_critics_only():
    spec = EnvSpec(env_id="x", import_module=None, obs_dim=3, action=Choices((2,)),
                   max_episode_steps=None, reward_threshold=None)  # fmt: skip
    SECTIONS["sac"]().check_task(spec)
    with pytest.raises(ConfigError, match="critics = quantile: with discrete actions"):
        SECTIONS["sac"](critics="quantile").check_task(spec)
