"""Critics with batch normalization: the joint pass against autograd and by hand, the actor's view, state, refusals."""

import contextlib

import numpy as np
import pytest
import torch
from batches import ACT, OBS, batches, exact, made

from spreeze.algorithms.crossq import CrossQ, CrossQConfig
from spreeze.algorithms.parallel_work import TwoThreads
from spreeze.config.algorithms import fitting_algorithms
from spreeze.errors import ConfigError
from spreeze.types import Box, Choices, EnvSpec

ROWS, EPS = 6, 1e-3


def critics_of(obs_dim=4, action_dim=2, **changes):
    config = CrossQConfig(**{"hidden_sizes": (8, 7), **changes})
    generator, device = torch.Generator().manual_seed(1), torch.device("cpu")
    return exact(CrossQ._create_critics, config, obs_dim, action_dim, 2, generator, device)


def normal(x):
    variance, mean = torch.var_mean(x, 1, keepdim=True, correction=0)
    return (x - mean) * torch.rsqrt(variance + EPS)


def drawn():
    torch.manual_seed(2)
    return [torch.randn(shape, dtype=torch.float64) for shape in ((ROWS, 6), (ROWS, 4), (2, ROWS), (ROWS,))]


@pytest.mark.parametrize("paired", [False, True])
def test_the_step_is_autograds_through_the_statistics_of_both_halves(paired):
    critics, (obs_action, next_obs, next_action, target) = critics_of(), drawn()
    leaves = [leaf.clone().requires_grad_() for leaf, _ in critics.online.blocks()]
    h = torch.cat((obs_action, torch.cat((next_obs, next_action.t()), 1))).expand(2, -1, -1)
    for index in range(2):
        h = torch.relu(normal(h @ leaves[2 * index]) + leaves[2 * index + 1])
    out = (leaves[4] @ h.transpose(1, 2) + leaves[5])[:, 0]
    (0.5 * (out[:, :ROWS] - target).square().mean(1).sum()).backward()
    with contextlib.closing(TwoThreads()) as pair:
        critics.parallel = pair if paired else None
        critics.set_joint_batch(obs_action)
        torch.testing.assert_close(critics.next_value(next_obs, next_action), out[:, ROWS:].amin(0).detach())
        critics.adam.step = lambda: None
        critics.step(obs_action, target)
    for (got, _), leaf in zip(critics.gradient.blocks(), leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad, rtol=1e-9, atol=1e-12)


def test_the_actor_follows_the_critics_by_their_running_statistics():
    critics, (obs_action, obs, action, target) = critics_of(), drawn()
    for _ in range(3):
        critics.set_joint_batch(obs_action)
        critics.next_value(obs, action)
        critics.step(obs_action, target)
    action.requires_grad_()
    h, online = torch.cat((obs, action.t()), 1).expand(2, -1, -1), critics.online
    for weight, bias, mean, variance in zip(
        online.weights, online.biases, critics.means, critics.variances, strict=True
    ):
        h = torch.relu((h @ weight - mean) * torch.rsqrt(variance + EPS) + bias)
    least = (online.head_weight @ h.transpose(1, 2) + online.head_bias)[:, 0].amin(0)
    least.sum().backward()
    found = critics.action_gradient(obs, action.detach(), use_min=True)
    torch.testing.assert_close(found, action.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(critics.action_value, least.detach())


def test_one_unit_by_hand():
    """Sums 1, 3 of replay and 5, 7 of what follows: mean 4, variance 5; running 0.99 x 0 + 0.01 x 4, 0.99 + 0.05."""
    critics = critics_of(1, 1, hidden_sizes=(1,))
    critics.online.weights[0][:] = torch.tensor([[1.0], [0.0]])
    critics.online.biases[0][:], critics.online.head_weight[:], critics.online.head_bias[:] = 2.0, 10.0, 0.5
    obs, zero = torch.tensor([[1.0], [3.0]], dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    critics.set_joint_batch(torch.cat((obs, zero), 1))
    value = critics.next_value(obs + 4.0, zero.t())
    scale = (5.0 + EPS) ** -0.5
    np.testing.assert_allclose(value, [10.0 * (2.0 + scale) + 0.5, 10.0 * (2.0 + 3.0 * scale) + 0.5])
    critics.step(torch.cat((obs, zero), 1), torch.zeros(2, dtype=torch.float64))
    np.testing.assert_allclose(critics.statistics, [0.04, 0.04, 1.04, 1.04])


@pytest.mark.parametrize("changes", [{}, {"critics": "quantile", "quantiles": 5}, {"critics": "categorical"}])
def test_a_run_that_is_resumed_goes_on_as_it_would_have(changes):
    changes = {"policy_delay": 2, **changes}
    first, second = made("crossq", **changes), made("crossq", **changes)
    for batch in batches(7):
        first.update(batch)
    state = first.state_arrays()
    assert "critics.statistics" in state
    assert "critics.target" not in state
    second.load_state_arrays(state)
    second.load_state_json(first.state_json())
    for algorithm in (first, second):
        for batch in batches(3):
            algorithm.update(batch)
    assert first.updates_skipped() == 0
    assert first.effective_tau == 1.0
    for name, array in first.state_arrays().items():
        np.testing.assert_array_equal(second.state_arrays()[name], array, err_msg=name)


def test_the_order_of_rows_does_not_matter_to_the_gradient():
    found, order = [], torch.tensor([3, 0, 5, 1, 4, 2])
    for rows in (torch.arange(ROWS), order):
        critics, (obs_action, next_obs, next_action, target) = critics_of(), drawn()
        critics.set_joint_batch(obs_action[rows])
        critics.next_value(next_obs[rows], next_action[:, rows])
        critics.step(obs_action[rows], target[rows])
        found.append(critics.gradient.flat.clone())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("changes", [
    {"critic_layer_norm": True}, {"activation": "silu"}, {"network": "some"},
])  # fmt: skip
def test_what_it_is_not_built_for_is_refused(changes):
    with pytest.raises(ConfigError, match=f"^{next(iter(changes))} = "):
        CrossQConfig(**changes)


@pytest.mark.parametrize("choices", [None, Choices((3,))])
def test_it_fits_continuous_actions_alone(choices):
    spec = EnvSpec(
        env_id="Some-v0",
        import_module=None,
        obs_dim=OBS,
        action=choices or Box((-1.0,) * ACT, (1.0,) * ACT),
        max_episode_steps=None,
        reward_threshold=None,
    )
    assert ("crossq" in fitting_algorithms(spec)) == (choices is None)
