"""Values of an episode's states in NumPy are those of the learner's networks in torch."""

import numpy as np
import pytest
import torch
from batches import ACT, OBS, made

from spreeze.algorithms import create, create_on_policy
from spreeze.config.schema import SECTIONS
from spreeze.transport.weights import Weights
from spreeze.types import Box, Choices, EnvSpec
from spreeze.workers.episodes.episode_recorder import step_values

STEPS, SCALE = 7, 3.0
OBSERVED = np.random.default_rng(1).normal(size=(STEPS, OBS)).astype(np.float32)


def spec_of(action):
    return EnvSpec(
        env_id="Some-v0", import_module=None, obs_dim=OBS, action=action, max_episode_steps=None, reward_threshold=None
    )


def found(algorithm, spec, action, **more):
    arrays, meta = algorithm.value_snapshot(SCALE)
    policy = Weights({**algorithm.policy_arrays(), **more}, algorithm.policy_meta(), 1, 1)
    return step_values(Weights(arrays(), meta, 1, 1), policy, OBSERVED, action, spec)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("sac", {}), ("sac", {"critic_layer_norm": True, "activation": "silu"}),
     ("sac", {"critics": "quantile", "quantiles": 5}), ("sac", {"critics": "categorical", "atoms": 11}),
     ("crossq", {})],
)  # fmt: skip
def test_q_of_the_first_critic_in_the_unit_of_the_rewards(name, changes):
    algorithm, spec = made(name, **changes), spec_of(Box((-2.0,) * ACT, (4.0,) * ACT))
    unit = np.random.default_rng(2).uniform(-1.0, 1.0, (STEPS, ACT)).astype(np.float32)
    critics = algorithm.critics
    critics.action_gradient(torch.from_numpy(OBSERVED), torch.from_numpy(unit).t(), use_min=False)
    expected = critics._sized(STEPS).out[0]
    q = expected.mean(0)
    if "atoms" in changes:
        q = (expected.softmax(0) * critics.grid).sum(0)
    np.testing.assert_allclose(found(algorithm, spec, 3.0 * unit + 1.0), SCALE * q.numpy(), rtol=2e-4, atol=2e-5)


def test_q_of_the_chosen_action_where_the_policy_is_made_of_values():
    algorithm, spec = create("dqn", OBS, 1, SECTIONS["dqn"](), 1, num_actions=3), spec_of(Choices((3,)))
    action = np.array([[0], [1], [2], [0], [1], [2], [0]], np.float32)
    q = algorithm.critics.values(torch.from_numpy(OBSERVED))[0].t().numpy()
    expected = SCALE * q[np.arange(STEPS), action[:, 0].astype(int)]
    np.testing.assert_allclose(found(algorithm, spec, action), expected, rtol=2e-4, atol=2e-5)


def test_v_of_an_algorithm_that_learns_from_rollouts_with_its_normalizer():
    spec = spec_of(Box((-1.0,) * ACT, (1.0,) * ACT))
    algorithm = create_on_policy("ppo", spec, SECTIONS["ppo"](), 1, correction="on-policy")
    mean, std = np.full(OBS, 0.5, np.float32), np.full(OBS, 2.0, np.float32)
    expected = SCALE * algorithm.net.values(torch.from_numpy((OBSERVED - mean) / std)).numpy()
    values = found(algorithm, spec, np.zeros((STEPS, ACT), np.float32), obs_mean=mean, obs_std=std)
    np.testing.assert_allclose(values, expected, rtol=2e-4, atol=2e-5)


def test_networks_of_another_form_publish_nothing():
    assert made("sac", recurrent="gru").value_snapshot(SCALE) is None
