"""Each algorithm's gradients against losses in plain NumPy, differentiated numerically."""

import numpy as np
import pytest
import torch
from batches import exact
from lean_sac import CONFIG, LeanSAC, tensors_of
from matmul_floor import ACTION_DIM, OBS_DIM, synthetic_batch
from numpy_reference import central_difference, forward, squashed_log_prob

from spreeze.algorithms import create
from spreeze.algorithms.sac import SACConfig
from spreeze.algorithms.td3 import DDPGConfig, TD3Config
from spreeze.types import RowLayout

OBS, ACT, B, GAMMA, ALPHA = 4, 2, 9, 0.9, 0.3
HIDDEN = (8, 7)


def batch_of(seed=0):
    layout = RowLayout(OBS, ACT)
    rows = np.random.default_rng(seed).normal(size=(B, layout.width))
    rows[:, layout.action] = np.tanh(rows[:, layout.action])
    rows[:, layout.terminated] = np.arange(B) % 3 == 0
    return layout.split(torch.from_numpy(rows), GAMMA)


def made(name, **changes):
    config = {"sac": SACConfig, "td3": TD3Config, "ddpg": DDPGConfig}[name]
    if name == "td3":
        changes.setdefault("policy_delay", 1)
    if name == "sac":
        changes.setdefault("initial_alpha", ALPHA)
    algorithm = exact(create, name, OBS, ACT, config(hidden_sizes=HIDDEN, **changes), seed=5)
    # Targets that differ from the online networks, so that a mix-up shows.
    algorithm.critics.target.flat.mul_(0.8)
    if name != "sac":
        algorithm.actor.target.flat.mul_(0.7)
    return algorithm


def layers_of(parameters, flat=None):
    """NumPy views of the networks: for each of the stack (layers, head); writable through ``flat``."""
    if flat is None:
        flat = parameters.flat.numpy().copy()
    twin = type(parameters)(torch.from_numpy(flat), parameters.sizes, parameters.stack)
    return [
        (
            [(w[s].numpy(), b[s, 0].numpy()) for w, b in zip(twin.weights, twin.biases, strict=True)],
            (twin.head_weight[s].numpy().T, twin.head_bias[s, :, 0].numpy()),
        )
        for s in range(parameters.stack)
    ]


def q_values(nets, obs, action):
    x = np.concatenate([obs, action], 1)
    return np.stack([forward(layers, head, x)[:, 0] for layers, head in nets])


def numeric(loss, flat):
    indices = np.random.default_rng(1).choice(np.flatnonzero(flat), 60, replace=False)
    return indices, central_difference(loss, flat, indices)


def arrays(batch):
    return {name: getattr(batch, name).numpy() for name in ("obs", "action", "reward", "terminated", "next_obs")}


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_critic_gradient_is_that_of_half_the_squared_error(name):
    algorithm, batch = made(name), batch_of()
    data = arrays(batch)
    flat = algorithm.critics.online.flat.numpy().copy()
    nets, target_nets = layers_of(algorithm.critics.online, flat), layers_of(algorithm.critics.target)
    outputs = algorithm.actor_forward(batch)
    next_action = outputs.next_action.numpy().T.copy()
    value = q_values(target_nets, data["next_obs"], next_action).min(0)
    if name == "sac":
        value = value - ALPHA * outputs.next_log_prob.numpy()
    target = data["reward"] + GAMMA * (1 - data["terminated"]) * value

    def loss():
        return 0.5 * ((q_values(nets, data["obs"], data["action"]) - target) ** 2).mean(1).sum()

    indices, expected = numeric(loss, flat)
    mean_square = ((q_values(nets, data["obs"], data["action"]) - target) ** 2).mean()
    q_mean = q_values(nets, data["obs"], data["action"]).mean()
    algorithm.critic_step(batch, outputs.next_action, outputs.next_log_prob)
    np.testing.assert_allclose(algorithm.critics.gradient.flat.numpy()[indices], expected, rtol=1e-5, atol=1e-8)
    assert algorithm.metrics()["critic_loss"] == pytest.approx(mean_square)
    assert algorithm.metrics()["q_mean"] == pytest.approx(q_mean)


def test_sac_proposes_samples_with_their_density():
    algorithm, batch = made("sac"), batch_of()
    data = arrays(batch)
    ((layers, head),) = layers_of(algorithm.actor.online)
    outputs = algorithm.actor_forward(batch)
    noise = algorithm._buffers.noise.numpy().T
    out = forward(layers, head, np.concatenate([data["next_obs"], data["obs"]]))
    action, log_prob = squashed_log_prob(out[:, :ACT], np.clip(out[:, ACT:], -20, 2), noise)
    np.testing.assert_allclose(outputs.next_action.numpy().T, action[:B], rtol=1e-9)
    np.testing.assert_allclose(outputs.action.numpy().T, action[B:], rtol=1e-9)
    np.testing.assert_allclose(outputs.next_log_prob.numpy(), log_prob[:B], rtol=1e-9)


@pytest.mark.parametrize("raise_log_std", [0.0, 1.9])
def test_sac_actor_gradient_is_that_of_alpha_log_prob_minus_least_q(raise_log_std):
    algorithm, batch = made("sac"), batch_of()
    algorithm.actor.online.head_bias[0, ACT:] += raise_log_std  # 1.9: some components above their range
    obs = batch.obs.numpy()
    flat = algorithm.actor.online.flat.numpy().copy()
    ((layers, head),) = layers_of(algorithm.actor.online, flat)
    critic_nets = layers_of(algorithm.critics.online)
    outputs = algorithm.actor_forward(batch)
    noise = algorithm._buffers.noise.numpy().T[B:]

    def parts():
        out = forward(layers, head, obs)
        action, log_prob = squashed_log_prob(out[:, :ACT], np.clip(out[:, ACT:], -20, 2), noise)
        return log_prob, q_values(critic_nets, obs, action).min(0)

    def loss():
        log_prob, q = parts()
        return (ALPHA * log_prob - q).mean()

    indices, expected = numeric(loss, flat)
    log_prob, _ = parts()
    algorithm.actor_step(algorithm.action_gradient(batch, outputs.action))
    np.testing.assert_allclose(algorithm.actor.gradient.flat.numpy()[indices], expected, rtol=1e-5, atol=1e-8)
    # Temperature: d/d log_alpha of -log_alpha (mean log_prob + target entropy), target entropy -ACT.
    assert algorithm.alpha_gradient.item() == pytest.approx(-(log_prob.mean() - ACT))


@pytest.mark.parametrize("name", ["td3", "ddpg"])
def test_deterministic_actor_gradient_is_that_of_minus_the_first_q(name):
    algorithm, batch = made(name), batch_of()
    obs = batch.obs.numpy()
    flat = algorithm.actor.online.flat.numpy().copy()
    ((layers, head),) = layers_of(algorithm.actor.online, flat)
    critic_nets = layers_of(algorithm.critics.online)[:1]

    def loss():
        return -q_values(critic_nets, obs, np.tanh(forward(layers, head, obs)))[0].mean()

    indices, expected = numeric(loss, flat)
    outputs = algorithm.actor_forward(batch)
    algorithm.actor_step(algorithm.action_gradient(batch, outputs.action))
    np.testing.assert_allclose(algorithm.actor.gradient.flat.numpy()[indices], expected, rtol=1e-5, atol=1e-8)
    assert algorithm.critics.mean_action_value() == pytest.approx(-loss())


@pytest.mark.parametrize("name", ["td3", "ddpg"])
def test_deterministic_target_action_is_the_target_policys(name):
    algorithm, batch = made(name, **({"target_noise": 0.0} if name == "td3" else {})), batch_of()
    ((layers, head),) = layers_of(algorithm.actor.target)
    expected = np.tanh(forward(layers, head, batch.next_obs.numpy()))
    np.testing.assert_allclose(algorithm.actor_forward(batch).next_action.numpy().T, expected, rtol=1e-9)


def test_sac_action_gradient_follows_the_lesser_critic_of_each_row():
    algorithm, batch = made("sac"), batch_of()
    obs, action = batch.obs.numpy(), batch.action.numpy().copy()
    first, second = q_values(layers_of(algorithm.critics.online), obs, action)
    algorithm.critics.online.head_bias[1] += float(np.median(first - second)) + 1e-3
    nets = layers_of(algorithm.critics.online)
    flat = action.reshape(-1)
    expected = central_difference(lambda: q_values(nets, obs, action).min(0).sum(), flat, range(flat.size))
    got = algorithm.action_gradient(batch, batch.action.t())
    lesser = q_values(nets, obs, action).argmin(0)
    assert set(lesser) == {0, 1}
    np.testing.assert_allclose(got.numpy().T.reshape(-1), expected, rtol=1e-5, atol=1e-8)


def test_sac_updates_are_those_of_lean_autograd():
    ours, lean = exact(create, "sac", OBS_DIM, ACTION_DIM, CONFIG, 1), LeanSAC(torch.float64)
    lean.take(ours)
    batch = synthetic_batch(RowLayout(OBS_DIM, ACTION_DIM), 64, 0.99)
    batch = type(batch)(*(x.double() if isinstance(x, torch.Tensor) else x for x in batch))
    for _ in range(3):
        ours.update(batch)
        lean.update(batch, ours._buffers.noise.t().clone())
    pairs = ((lean.actor, ours.actor.online), (lean.critics, ours.critics.online), (lean.targets, ours.critics.target))
    for layers, theirs in pairs:
        for layer, value in zip(layers, tensors_of(theirs), strict=True):
            torch.testing.assert_close(layer.detach(), value, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(lean.log_alpha.detach(), ours.log_alpha, rtol=0.0, atol=1e-12)
