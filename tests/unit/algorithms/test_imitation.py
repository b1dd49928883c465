"""Behavior cloning in the actor's gradient: its formula by autograd, its phases, and a policy that it copies."""

import numpy as np
import pytest
import torch

from spreeze.algorithms import create
from spreeze.algorithms.losses import Imitation
from spreeze.algorithms.sac import SACConfig
from spreeze.algorithms.td3 import TD3Config
from spreeze.config.schema import SECTIONS
from spreeze.errors import ConfigError
from spreeze.types import Choices, EnvSpec, RowLayout

CPU = torch.device("cpu")


def _drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("updates", "alpha", "done"), [(0, 2.5, 0), (10, 0.0, 9), (10, 2.5, 9), (10, 0.0, 10), (10, 2.5, 10)]
)
def test_the_gradient_is_that_of_the_papers_loss(updates, alpha, done):
    demonstrated, weight = _drawn(6, 2), _drawn(2, 6)
    action = _drawn(2, 6).requires_grad_()
    value = (weight * action).sum(0) + 3.0  # Q [B]
    clones = done < updates
    scale = 0.0 if clones else alpha / value.abs().mean().item() if alpha else 1.0
    loss = -scale * value.mean() + (clones or alpha > 0.0) * (action.t() - demonstrated).square().mean()
    (expected,) = torch.autograd.grad(loss, action)
    imitation = Imitation(updates, alpha, CPU)
    imitation.begin(done)
    found = imitation.gradient(weight, value.detach(), demonstrated, action.detach())
    torch.testing.assert_close(found * (-1.0 / 6), expected)


@pytest.mark.parametrize(("algo", "config"), [
    ("td3", TD3Config(hidden_sizes=(16,), bc_updates=400, target_noise=0.0, tau=1.0)),
    ("sac", SACConfig(hidden_sizes=(16,), bc_updates=400)),
])  # fmt: skip
def test_an_actor_copies_what_was_done_whatever_it_was_worth(algo, config):
    made, layout = create(algo, 1, 1, config, 1), RowLayout(1, 1)
    rng = np.random.default_rng(0)
    rows = torch.zeros(64, layout.width)
    for _ in range(400):
        obs = torch.from_numpy(rng.uniform(-1.0, 1.0, 64).astype(np.float32))
        rows[:, 0], rows[:, 1], rows[:, 2] = obs, 0.5 * obs, -obs  # a reward that other actions would not change
        made.imitation.begin(made.updates)
        made.update(layout.split(rows, 0.9))
    rows[:, layout.next_obs] = rows[:, layout.obs]
    with torch.inference_mode():
        found = made.actor_forward(layout.split(rows, 0.9)).next_action[0].clone()
    assert (found - rows[:, 1]).abs().mean() < (0.05 if algo == "td3" else 0.3), "SAC draws its actions"


def test_without_its_settings_there_is_none():
    assert create("td3", 1, 1, TD3Config(hidden_sizes=(4,)), 1).imitation is None
    assert create("dqn", 1, 2, SECTIONS["dqn"](hidden_sizes=(4,)), 1, num_actions=2).imitation is None


def test_choices_are_not_imitated():
    spec = EnvSpec(env_id="x", import_module=None, obs_dim=1, action=Choices((2,)), max_episode_steps=None,
                   reward_threshold=None)  # fmt: skip
    with pytest.raises(ConfigError, match="bc_updates = 5: only continuous actions"):
        SACConfig(bc_updates=5).check_task(spec)
