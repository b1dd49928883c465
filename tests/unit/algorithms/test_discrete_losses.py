"""DQN and discrete SAC: gradients against NumPy's numerical ones and autograd, targets by hand, the contract."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from batches import exact
from numpy_reference import central_difference, forward
from test_losses import layers_of, numeric

from spreeze.algorithms import create, losses
from spreeze.algorithms.dqn import DQNConfig
from spreeze.algorithms.sac import SACConfig
from spreeze.config.algorithms import rows
from spreeze.config.schema import SECTIONS
from spreeze.errors import CheckpointError, ConfigError
from spreeze.inference.policy import Policy
from spreeze.metrics.table import by_name
from spreeze.types import RowLayout

OBS, K, B, GAMMA, ALPHA = 4, 3, 9, 0.9, 0.3
HIDDEN = (8, 7)
VARIANTS = {
    "dqn": {}, "dqn plain": {"double": False}, "dqn dueling": {"dueling": True},
    "dqn hard": {"tau": 1.0, "target_interval": 3}, "sac": {},
}  # fmt: skip
NAMES = sorted(VARIANTS)


def batch_of(seed=0, size=B, dtype=np.float64, n_step=1):
    layout = RowLayout(OBS, 1, n_step)
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(size, layout.width))
    rows[:, layout.action] = rng.integers(K, size=(size, 1))
    rows[:, layout.terminated] = np.arange(size) % 3 == 0
    if layout.num_steps is not None:
        rows[:, layout.num_steps] = rng.integers(1, n_step + 1, size)
    return layout.split(torch.from_numpy(rows.astype(dtype)), GAMMA)


def made(variant, seed=5, dtype=torch.float64, hidden=HIDDEN, **changes):
    name = variant.split()[0]
    config = dataclasses.replace(SECTIONS[name](), hidden_sizes=hidden, **VARIANTS[variant], **changes)
    return exact(create, name, OBS, 1, config, seed, num_actions=K, dtype=dtype)


def q_of(parameters, obs, flat=None, dueling=False):
    """[S, B, K] in NumPy; ``flat`` stands in for the parameters' own vector."""
    nets = layers_of(parameters, flat)
    out = np.stack([forward(layers, head, obs) for layers, head in nets])
    return out[..., :1] + out[..., 1:] - out[..., 1:].mean(-1, keepdims=True) if dueling else out


def huber(error):
    size = np.abs(error)
    return np.where(size <= 1.0, 0.5 * error**2, size - 0.5)


@pytest.mark.parametrize("variant", NAMES)
def test_after_buffers_were_dropped_the_next_update_is_what_it_would_have_been(variant):
    found = []
    for drops in (False, True):
        algorithm = made(variant)
        for seed in range(4):
            algorithm.update(batch_of(seed))
            if drops:
                algorithm.drop_buffers()
                algorithm.metrics()
        algorithm.update(batch_of(9, size=B - 2))
        found.append(algorithm.state_arrays())
    assert all(np.array_equal(found[1][name], array) for name, array in found[0].items())


def test_huber_gradient_is_the_derivative_of_huber_s_loss_by_hand():
    errors = torch.tensor([-3.0, -0.5, 0.0, 1.0, 7.0])
    assert losses.huber_gradient(errors).tolist() == [-1.0, -0.5, 0.0, 1.0, 1.0]
    assert losses.huber_gradient(errors, 4.0).tolist() == [-3.0, -0.5, 0.0, 1.0, 4.0]


@pytest.mark.parametrize("threshold", [0.0, 1.0])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_dqn_gradient_is_that_of_its_loss_to_its_target(double, dueling, threshold):
    config = DQNConfig(hidden_sizes=HIDDEN, double=double, dueling=dueling, huber=threshold, max_grad_norm=1e9)
    dqn, batch = exact(create, "dqn", OBS, 1, config, 5, num_actions=K), batch_of()
    dqn.critics.target.flat.mul_(-0.8)  # online and target choose different actions
    obs, next_obs, action = batch.obs.numpy(), batch.next_obs.numpy(), batch.action.numpy()[:, 0].astype(int)
    online, target = (q_of(net, next_obs, dueling=dueling)[0] for net in (dqn.critics.online, dqn.critics.target))
    assert (online.argmax(1) != target.argmax(1)).any()
    chosen = (online if double else target).argmax(1)
    goal = batch.reward.numpy() + GAMMA * (1 - batch.terminated.numpy()) * target[np.arange(B), chosen]
    flat = dqn.critics.online.flat.numpy().copy()

    def error():
        return q_of(dqn.critics.online, obs, flat, dueling)[0][np.arange(B), action] - goal

    assert 0 < (np.abs(error()) > 1.0).sum() < B
    indices, expected = numeric(lambda: (huber(error()) if threshold else 0.5 * error() ** 2).mean(), flat)
    outputs = dqn.actor_forward(batch)
    np.testing.assert_array_equal(outputs.next_action.numpy(), chosen[None])
    assert outputs.next_log_prob is None
    assert outputs.action is None
    mean_square = (error() ** 2).mean()
    dqn.critic_step(batch, outputs.next_action, None)
    np.testing.assert_allclose(dqn.critics.gradient.flat.numpy()[indices], expected, rtol=1e-5, atol=1e-8)
    assert dqn.metrics()["critic_loss"] == pytest.approx(mean_square)


def test_dqn_gradient_equals_autograd():
    dqn, batch = made("dqn dueling", huber=1.0, max_grad_norm=1e9), batch_of(3)
    flat = dqn.critics.online.flat.clone().requires_grad_()
    net = type(dqn.critics.online)(flat, dqn.critics.online.sizes, 1)
    hidden = batch.obs
    for weight, bias in zip(net.weights, net.biases, strict=True):
        hidden = torch.relu(hidden @ weight[0] + bias[0])
    out = hidden @ net.head_weight[0].t() + net.head_bias[0, :, 0]
    q = out[:, :1] + out[:, 1:] - out[:, 1:].mean(1, keepdim=True)
    chosen = q.gather(1, batch.action.long())[:, 0]
    next_action = dqn.actor_forward(batch).next_action
    next_q = dqn.critics.values(batch.next_obs, target=True)[0].gather(0, next_action)[0]
    goal = losses.td_target(batch.reward, batch.terminated, batch.discount, next_q)
    torch.nn.functional.smooth_l1_loss(chosen, goal.detach()).backward()
    dqn.critic_step(batch, next_action, None)
    own = flat.grad.clone()
    type(net)(own, net.sizes, 1).head_weight.mul_(dqn.critics._dueling.mask)  # the other stream's block stays zero
    torch.testing.assert_close(dqn.critics.gradient.flat, own, rtol=1e-9, atol=1e-12)


def test_dueling_streams_stay_apart_and_the_published_head_gives_the_same_values():
    dqn, half = made("dqn dueling", dtype=torch.float32), HIDDEN[-1]
    for seed in range(4):
        dqn.update(batch_of(seed, dtype=np.float32))
    head = dqn.critics.online.head_weight[0]
    assert head.shape == (1 + K, 2 * half)
    assert (head[0, half:] == 0).all()
    assert (head[1:, :half] == 0).all()
    obs = np.random.default_rng(0).normal(size=(50, OBS)).astype(np.float32)
    policy = Policy.from_weights(dqn.policy_arrays(), dqn.policy_meta())
    q = q_of(dqn.critics.online, obs, dueling=True)[0]
    np.testing.assert_allclose(policy._forward(obs, ())[0], q, atol=1e-5)
    np.testing.assert_array_equal(policy.act(obs, ())[0][:, 0], q.argmax(1))


def test_dqn_target_moves_softly_or_as_a_copy_every_so_often():
    hard = made("dqn hard")
    moved = []
    for seed in range(6):
        before = hard.critics.target.flat.clone()
        hard.update(batch_of(seed))
        moved.append(not torch.equal(before, hard.critics.target.flat))
    assert moved == [False, False, True] * 2
    assert torch.equal(hard.critics.target.flat, hard.critics.online.flat)
    soft = made("dqn", tau=0.25)
    start = soft.critics.target.flat.clone()
    soft.update(batch_of())
    torch.testing.assert_close(soft.critics.target.flat, start.lerp(soft.critics.online.flat, 0.25))


def test_soft_policy_gradient_by_hand():
    # pi = (1/4, 3/4), Q = (2, 0), alpha = 0: f = (-2, 0), its mean -1/2; pi (f - mean) = (-3/8, 3/8).
    prob = torch.tensor([[0.25], [0.75]], dtype=torch.float64)
    values = torch.tensor([[2.0], [0.0]], dtype=torch.float64)
    grad, mean_log = losses.soft_policy_gradient(prob, prob.log(), values, torch.tensor([0.0], dtype=torch.float64))
    assert grad.tolist() == [[-0.375], [0.375]]
    assert mean_log.item() == pytest.approx(0.25 * math.log(0.25) + 0.75 * math.log(0.75))


def soft_setup():
    sac, batch = made("sac", initial_alpha=ALPHA), batch_of()
    sac.critics.target.flat.mul_(-0.8)
    return sac, batch


def policy_of(sac, obs, flat=None):
    logits = q_of(sac.actor.online, obs, flat)[0]
    log_prob = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return np.exp(log_prob), log_prob


def test_sac_critics_follow_the_soft_value_of_the_whole_policy():
    sac, batch = soft_setup()
    prob, log_prob = policy_of(sac, batch.next_obs.numpy())
    least = q_of(sac.critics.target, batch.next_obs.numpy()).min(0)
    value = (prob * (least - ALPHA * log_prob)).sum(1)
    goal = batch.reward.numpy() + GAMMA * (1 - batch.terminated.numpy()) * value
    flat, action = sac.critics.online.flat.numpy().copy(), batch.action.numpy()[:, 0].astype(int)

    def loss():
        chosen = q_of(sac.critics.online, batch.obs.numpy(), flat)[:, np.arange(B), action]
        return 0.5 * ((chosen - goal) ** 2).mean(1).sum()

    indices, expected = numeric(loss, flat)
    outputs = sac.actor_forward(batch)
    np.testing.assert_allclose(outputs.next_action.numpy().T, prob, rtol=1e-9)
    sac.critic_step(batch, outputs.next_action, outputs.next_log_prob)
    np.testing.assert_allclose(sac.critics.gradient.flat.numpy()[indices], expected, rtol=1e-5, atol=1e-8)


def test_sac_actor_and_temperature_gradients_are_those_of_the_expected_losses():
    sac, batch = soft_setup()
    obs, flat = batch.obs.numpy(), sac.actor.online.flat.numpy().copy()
    least = q_of(sac.critics.online, obs).min(0)

    def loss():
        prob, log_prob = policy_of(sac, obs, flat)
        return (prob * (ALPHA * log_prob - least)).sum(1).mean()

    indices, expected = numeric(loss, flat)
    prob, log_prob = policy_of(sac, obs)
    value = (prob * least).sum(1).mean()
    outputs = sac.actor_forward(batch)
    slope = sac.action_gradient(batch, outputs.action)
    np.testing.assert_allclose(slope.numpy().T, least, rtol=1e-9)
    sac.actor_step(slope)
    np.testing.assert_allclose(sac.actor.gradient.flat.numpy()[indices], expected, rtol=1e-5, atol=1e-8)
    # d/d log_alpha of log_alpha (entropy - target), target half of log K: eq. 11.
    entropy = -(prob * log_prob).sum(1).mean()
    assert sac.alpha_gradient.item() == pytest.approx(entropy - 0.5 * math.log(K))
    metrics = sac.metrics()
    assert metrics["entropy"] == pytest.approx(entropy)
    assert sac.critics.mean_action_value() == pytest.approx(value)


def test_value_slope_is_the_gradient_to_each_probability():
    sac, batch = soft_setup()
    prob = np.full((B, K), 1 / K)
    flat, least = prob.reshape(-1), q_of(sac.critics.online, batch.obs.numpy()).min(0)
    expected = central_difference(lambda: (prob * least).sum(), flat, range(flat.size))
    got = sac.action_gradient(batch, torch.from_numpy(prob.T.copy()))
    np.testing.assert_allclose(got.numpy().T.reshape(-1), expected, rtol=1e-6, atol=1e-8)


def test_sac_temperature_follows_the_entropy_ratio():
    def alpha(ratio, bound=1e9):
        sac = made("sac", alpha_lr=0.01, initial_alpha=1.0, target_entropy_ratio=ratio, max_alpha=bound)
        for seed in range(10):
            sac.update(batch_of(seed))
        return sac.metrics()["alpha"]

    assert alpha(0.1) < 0.95 < alpha(1.0)
    assert alpha(1.0, bound=0.5) == pytest.approx(0.5), "it does not grow forever where the target is out of reach"


def test_a_large_gradient_of_dqn_is_scaled_down():
    dqn, batch = made("dqn", max_grad_norm=0.01), batch_of()
    dqn.update(batch._replace(reward=batch.reward * 100.0))
    assert dqn.metrics()["critic_grad_norm"] > 0.01
    assert float(dqn.critics.gradient.flat.norm()) == pytest.approx(0.01)


def single(variant, **changes):
    return made(variant, dtype=torch.float32, **changes)


def floats(count, **options):
    return [batch_of(seed, 32, np.float32, **options) for seed in range(count)]


def same(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("variant", NAMES)
def test_resume_is_bit_exact(variant):
    whole, resumed = single(variant), single(variant, seed=99)
    for batch in floats(11):
        whole.update(batch)
    arrays, state = whole.state_arrays(), json.loads(json.dumps(whole.state_json()))
    resumed.load_state_arrays(arrays)
    resumed.load_state_json(state)
    for batch in floats(7):
        whole.update(batch)
        resumed.update(batch)
    assert same(whole.state_arrays(), resumed.state_arrays())
    assert not same(arrays, whole.state_arrays())
    assert whole.state_json() == resumed.state_json()


@pytest.mark.parametrize("variant", NAMES)
def test_update_is_its_four_functions_and_leaves_the_batch(variant):
    whole, parts = single(variant), single(variant)
    for batch in floats(5):
        kept = batch.obs_action.clone()
        whole.update(batch)
        outputs = parts.actor_forward(batch)
        parts.critic_step(batch, outputs.next_action, outputs.next_log_prob)
        if outputs.action is not None:
            parts.actor_step(parts.action_gradient(batch, outputs.action))
        parts.update_targets()
        parts.updates += 1
        assert torch.equal(kept, batch.obs_action)
    assert same(whole.state_arrays(), parts.state_arrays())
    assert all(np.isfinite(value) and by_name(key) for key, value in whole.metrics().items())


@pytest.mark.parametrize("variant", NAMES)
def test_n_step_batches_other_sizes_and_poison_are_taken_as_by_the_others(variant):
    algorithm = single(variant)
    assert all(np.isfinite(value) for value in algorithm.metrics().values())
    for size in (32, 7):
        algorithm.update(batch_of(1, size, np.float32, n_step=3))
    bad = floats(1)[0]
    bad.reward[3] = np.nan
    algorithm.update(bad)
    skipped = algorithm.updates_skipped()
    assert skipped >= 1
    assert all(np.isfinite(array).all() for array in algorithm.state_arrays().values())
    algorithm.update(floats(1)[0])
    assert algorithm.updates_skipped() == skipped
    with pytest.raises(CheckpointError, match="shape"):
        algorithm.load_state_arrays(single(variant, hidden=(8, 9)).state_arrays())


@pytest.mark.parametrize("variant", NAMES)
def test_numpy_policy_acts_as_the_network(variant):
    algorithm = single(variant)
    obs = np.random.default_rng(0).normal(size=(16, OBS)).astype(np.float32)
    policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    net = algorithm.actor.online if variant == "sac" else algorithm.critics.online
    expected = q_of(net, obs, dueling=variant == "dqn dueling")[0]
    np.testing.assert_array_equal(policy.act(obs, ())[0][:, 0], expected.argmax(1))


def test_every_name_for_discrete_actions_is_covered_and_others_are_refused_with_a_hint():
    assert {variant.split()[0] for variant in NAMES} == {row.name for row in rows().values() if row.discrete}
    with pytest.raises(ConfigError, match="no algorithm 'td3' for discrete actions"):
        create("td3", OBS, 1, SACConfig(), 0, num_actions=K)
    with pytest.raises(ConfigError, match="no algorithm 'dqn' for continuous actions"):
        create("dqn", OBS, 1, DQNConfig(), 0)
