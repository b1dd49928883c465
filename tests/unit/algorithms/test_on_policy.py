"""PPO and A2C against plain NumPy: losses, gradients, corrections, statistics; checkpoints bit by bit."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from rollouts import FRAMES, learner, rollout, task

from spreeze.algorithms import create_on_policy
from spreeze.algorithms.a2c import A2CConfig
from spreeze.algorithms.losses import adaptive_lr_factor, clipped_value_error
from spreeze.algorithms.on_policy import Samples
from spreeze.algorithms.ppo import PPOConfig
from spreeze.errors import CheckpointError, ConfigError
from spreeze.inference.policy import Policy
from spreeze.types import RolloutBatch

NAMES = ("ppo", "a2c")
PLAIN_SGD = {"rmsprop_alpha": 1.0, "rmsprop_eps": 1.0, "lr": 0.1, "max_grad_norm": 1e6}
"""RMSProp whose mean square stays 0: steps of 0.1 times the gradient."""


def numpy_net(net):
    """(policy layers, value layers, log_std), arrays that share the network's memory."""
    p = net.networks
    layers = []
    for index in range(2):
        hidden = [(w[index].numpy(), b[index, 0].numpy()) for w, b in zip(p.weights, p.biases, strict=True)]
        layers.append([*hidden, (p.head_weight[index].numpy().T, p.head_bias[index, :, 0].numpy())])
    return layers[0], layers[1], net.log_std.numpy()


def run(layers, x):
    for weight, bias in layers[:-1]:
        x = np.tanh(x @ weight + bias)
    return x @ layers[-1][0] + layers[-1][1]


def numpy_log_prob(out, action, log_std, discrete):
    """Log-probabilities and mean entropy."""
    if discrete:
        log_pi = out - np.log(np.exp(out).sum(1, keepdims=True))
        return log_pi[np.arange(len(out)), action[:, 0].astype(int)], -(np.exp(log_pi) * log_pi).sum(1).mean()
    density = np.exp(-0.5 * ((action - out) / np.exp(log_std)) ** 2) / (np.sqrt(2 * np.pi) * np.exp(log_std))
    return np.log(density).sum(1), (0.5 * np.log(2 * np.pi * np.e * np.exp(2 * log_std))).sum()


def numpy_loss(algorithm, s, discrete):
    policy, value, log_std = numpy_net(algorithm.net)
    config = algorithm._config
    log_prob, entropy = numpy_log_prob(run(policy, s.obs), s.action, log_std, discrete)
    v = run(value, s.obs)[:, 0]
    error = (v - s.target) ** 2
    if algorithm.name == "a2c":
        objective = log_prob * s.advantage
    else:
        ratio = np.exp(log_prob - s.log_prob)
        objective = np.minimum(ratio * s.advantage, np.clip(ratio, 1 - config.clip, 1 + config.clip) * s.advantage)
        if config.clip_value:
            near = s.value + np.clip(v - s.value, -config.clip, config.clip)
            error = np.maximum(error, (near - s.target) ** 2)
    return -objective.mean() + config.value_coef * 0.5 * error.mean() - config.entropy_coef * entropy


def random_samples(spec, rng, rows=24):
    action = rng.standard_normal((rows, spec.action_dim))
    if spec.choices:
        action = rng.integers(0, spec.choices.options, (rows, 1)).astype(float)
    columns = [rng.standard_normal(rows) for _ in range(3)]
    return Samples(
        rng.standard_normal((rows, spec.obs_dim)),
        action,
        -1.5 + 0.3 * columns[0],
        columns[1],
        0.5 * columns[2],
        0.5 * rng.standard_normal(rows),
    )


@pytest.mark.parametrize("discrete", [False, True], ids=["gaussian", "categorical"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("a2c", {"entropy_coef": 0.0}), ("a2c", {"entropy_coef": 0.3}), ("ppo", {}),
     ("ppo", {"entropy_coef": 0.2, "clip": 0.1}), ("ppo", {"clip_value": True, "clip": 0.3})],
)  # fmt: skip
def test_the_gradient_is_that_of_the_loss_written_in_numpy(name, settings, discrete):
    spec = task(actions=3 if discrete else 2, discrete=discrete)
    algorithm = learner(name, spec, dtype=torch.float64, hidden_sizes=(5, 4), initial_log_std=-0.3, **settings)
    rng = np.random.default_rng(0)
    algorithm.net.flat.add_(torch.from_numpy(0.3 * rng.standard_normal(len(algorithm.net.flat))))
    samples = random_samples(spec, rng)
    with torch.no_grad():
        algorithm._gradient(Samples(*(torch.from_numpy(column) for column in samples.columns)))
    flat, gradient, step = algorithm.net.flat.numpy(), algorithm.net.gradient.numpy(), 1e-6
    used = np.zeros(len(flat), bool)
    for index in range(len(flat)):
        kept = flat[index]
        flat[index] = kept + step
        high = numpy_loss(algorithm, samples, discrete)
        flat[index] = kept - step
        low = numpy_loss(algorithm, samples, discrete)
        flat[index] = kept
        used[index] = high != low
        assert gradient[index] == pytest.approx((high - low) / (2 * step), abs=1e-7), index
    assert used.sum() > 80
    found = algorithm.metrics()
    loss = found["policy_loss"] - algorithm._config.entropy_coef * found["entropy"]
    if not settings.get("clip_value"):
        loss += algorithm._config.value_coef * found["value_loss"]
        assert loss == pytest.approx(numpy_loss(algorithm, samples, discrete), abs=1e-9)


def test_rounding_zeroes_the_gradient_of_no_value_within_its_clip_range():
    value, old, target = torch.tensor([0.1]), torch.tensor([-0.05]), torch.zeros(1)
    assert clipped_value_error(value, target, old, clip=0.2).item() == value.item()
    assert clipped_value_error(value, target, old, clip=0.1).item() == value.item(), "0.05 is nearer to the target"
    assert clipped_value_error(torch.tensor([0.1]), torch.ones(1), old, clip=0.1).item() == 0.0, "0.05 is farther"


def gaussian_bandit(correction):
    """Policy N(mean, exp(log_std)): all other parameters are zero and stay so, for each has a zero factor."""
    spec = task(obs_dim=1, actions=1)
    settings = {"hidden_sizes": (2,), "value_coef": 0.0, "entropy_coef": 0.0, "lr_schedule": "constant", **PLAIN_SGD}
    algorithm = learner("a2c", spec, correction, dtype=torch.float64, **settings)
    algorithm.net.flat.zero_()
    if algorithm._before is not None:
        algorithm._before.zero_()
    return algorithm


def pulls(actions, rewards, log_prob=(0.0, 0.0)):
    """Two env steps, each an episode: advantages are the rewards, for all values are 0."""

    def column(values):
        return np.array(values, np.float32).reshape(2, 1)

    ones = np.ones((2, 1, 1), np.float32)
    return RolloutBatch(
        ones,
        column(actions)[..., None],
        column(log_prob),
        column(rewards),
        np.ones((2, 1), bool),
        np.zeros((2, 1), bool),
        ones,
    )


def two_parameters(algorithm):
    return algorithm.policy_arrays()["head_b"][0], algorithm.policy_arrays()["log_std"][0]


def test_the_delayed_update_is_equation_6_worked_by_hand():
    """d log pi / d mean = (a - mean) / std^2 and d log pi / d log_std = (a - mean)^2 / std^2 - 1; steps of 0.1."""
    algorithm = gaussian_bandit("delayed")
    # D(0) at theta(0) = (0, 0): ((1*1 + .5*2) / 2, (1*0 + .5*3) / 2) = (1, .75)
    algorithm.learn(pulls((1, 2), (1, 0.5)), None)
    assert two_parameters(algorithm) == pytest.approx((0.1, 0.075))
    # D(1) at theta(1) = (0, 0), not at theta(2): ((2*-1 + 0) / 2, (2*0 + 1*-1) / 2) = (-1, -.5), onto theta(2)
    algorithm.learn(pulls((-1, 0), (2, 1)), None)
    assert two_parameters(algorithm) == pytest.approx((0.0, 0.025))
    # D(2) at theta(2) = (.1, .075): (1 e^-.15 / 2, ((e^-.15 - 1) - 1) / 2), onto theta(3)
    algorithm.learn(pulls((1.1, 0.1), (1, 1)), None)
    shrunk = math.exp(-0.15)
    assert two_parameters(algorithm) == pytest.approx((0.05 * shrunk, 0.025 + 0.05 * (shrunk - 2)), abs=1e-7)


def test_without_correction_the_gradient_is_taken_where_theta_is_now():
    algorithm = gaussian_bandit("none")
    algorithm.learn(pulls((1, 2), (1, 0.5)), None)
    algorithm.learn(pulls((-1, 0), (2, 1)), None)
    mean, variance = 0.1, math.exp(0.15)
    slope = (2 * (-1 - mean) + 1 * (0 - mean)) / 2 / variance
    spread = (2 * ((-1 - mean) ** 2 / variance - 1) + (mean**2 / variance - 1)) / 2
    assert two_parameters(algorithm) == pytest.approx((0.1 + 0.1 * slope, 0.075 + 0.1 * spread))


def test_truncated_importance_sampling_weights_each_term_by_at_most_one():
    algorithm = gaussian_bandit("truncated-is")
    # Densities of N(0, 1) at 1 and 2 now; the one that collected gave twice and half of that.
    now = [-0.5 * a**2 - 0.5 * math.log(2 * math.pi) for a in (1, 2)]
    algorithm.learn(pulls((1, 2), (1, 0.5), (now[0] + math.log(2), now[1] - math.log(2))), None)
    assert two_parameters(algorithm) == pytest.approx((0.1 * (0.5 * 1 + 0.5 * 2) / 2, 0.1 * (0 + 0.5 * 3) / 2))


@pytest.mark.parametrize("discrete", [False, True])
def test_delayed_ppo_adds_the_displacement_of_serial_ppo_at_the_collector_to_theta(discrete):
    spec = task(discrete=discrete)
    settings = {"epochs": 3, "minibatch_size": 8, "hidden_sizes": (16, 16), "lr": 1e-2}
    delayed = learner("ppo", spec, "delayed", normalize_obs=True, **settings)
    serial = learner("ppo", spec, "on-policy", seed=5, normalize_obs=True, **settings)
    rng, batches = np.random.default_rng(0), []
    for _ in range(4):
        batches.append(rollout(delayed, spec, rng))  # the collector of this one is what learns from it next but one
        if len(batches) == 1:
            continue
        arrays, state, theta = delayed.state_arrays(), delayed.state_json(), delayed.net.flat.clone()
        serial.load_state_arrays(arrays | {"theta": arrays["theta_before"]})
        serial.load_state_json(state | {"correction": "on-policy", "normalizer": state["normalizer_before"]})
        delayed.learn(batches[-2], None)
        serial.learn(batches[-2], None)
        moved = serial.net.flat - torch.from_numpy(arrays["theta_before"])
        assert moved.abs().max() > 1e-3
        torch.testing.assert_close(delayed.net.flat, theta + moved, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(delayed.state_arrays()["theta_before"], theta.numpy())
        for name, tensor in serial.state_arrays().items():
            if name.startswith("optimiser"):
                np.testing.assert_array_equal(delayed.state_arrays()[name], tensor)


def test_with_one_step_delayed_ppo_and_delayed_a2c_take_the_same_gradient():
    spec = task(discrete=True)
    settings = {"gae_lambda": 0.9, "entropy_coef": 0.01, "normalize_advantage": False, "dtype": torch.float64}
    ppo = learner("ppo", spec, "delayed", epochs=1, minibatch_size=32, **settings)
    a2c = learner("a2c", spec, "delayed", **settings)
    rng = np.random.default_rng(0)
    for _ in range(3):
        before = ppo._before.clone()
        a2c._before.copy_(before)
        batch = rollout(ppo, spec, rng)
        theta, ppo_before = ppo.net.flat.clone(), before
        old = learner("ppo", spec, dtype=torch.float64)
        old.net.flat.copy_(ppo_before)
        samples, _ = old._samples(batch)
        with torch.no_grad():
            samples = samples._replace(log_prob=old._kind.log_prob(old.net.forward(samples.obs)[0], samples.action))
        batch = batch._replace(log_prob=samples.log_prob.numpy().reshape(batch.reward.shape))
        ppo.learn(batch, None)
        a2c.net.flat.copy_(theta)
        a2c.learn(batch, None)
        assert ppo.metrics()["grad_norm"] == pytest.approx(a2c.metrics()["grad_norm"], rel=1e-9)
        torch.testing.assert_close(ppo.net.gradient, a2c.net.gradient, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["gaussian", "categorical", "images", "normalized"])
def test_a_published_policy_draws_with_the_log_probabilities_of_the_network(name, kind):
    frames = FRAMES if kind == "images" else None
    spec = task(discrete=kind in ("categorical", "images"), actions=3, frames=frames)
    algorithm = learner(name, spec, hidden_sizes=(16, 8), normalize_obs=kind == "normalized")
    rng = np.random.default_rng(1)
    for _ in range(2):
        algorithm.learn(rollout(algorithm, spec, rng), None)
    batch = rollout(algorithm, spec, rng)
    with torch.no_grad():
        samples, _ = algorithm._samples(batch)
        out, value = algorithm.net.forward(samples.obs)
        log_prob = algorithm._kind.log_prob(out, samples.action)
    np.testing.assert_allclose(log_prob.numpy(), batch.log_prob.reshape(-1), atol=2e-5)
    torch.testing.assert_close(value, samples.value, atol=1e-5, rtol=1e-5)
    greedy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta()).act(batch.obs[0], ())[0]
    assert greedy.shape == (4, spec.action_dim)


@pytest.mark.parametrize("at_once", [True, False])
def test_the_gradient_over_images_is_that_of_autograd_over_the_whole_loss(at_once):
    spec = task(discrete=True, actions=3, frames=FRAMES)
    algorithm = learner("a2c", spec, hidden_sizes=(8,), dtype=torch.float64, entropy_coef=0.2, max_grad_norm=1e6)
    rng = np.random.default_rng(0)
    batch = rollout(algorithm, spec, rng, steps=50, envs=3)  # more rows than go through the trunk at once
    with torch.no_grad():
        samples, passed = algorithm._samples(batch)
        algorithm._gradient(samples, passed if at_once else None)
    leaves = [tensor for pair in algorithm.net._leaves for tensor in pair]
    out = algorithm.net._parameters.forward(samples.obs, algorithm.net._leaves)
    log_pi = torch.log_softmax(out[:, :3], 1)
    chosen = log_pi.gather(1, samples.action.long())[:, 0]
    entropy = -(log_pi.exp() * log_pi).sum(1).mean()
    loss = -(chosen * samples.advantage).mean() + 0.25 * (out[:, 3] - samples.target).square().mean() - 0.2 * entropy
    expected = torch.autograd.grad(loss, leaves)
    own = [tensor for pair in algorithm.net._gradients.tensors() for tensor in pair]
    for found, wanted in zip(own, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


STEPS = {"ppo": {"epochs": 10, "minibatch_size": 8}, "a2c": {}}
"""40 updates of a rollout of 32 env steps, or one."""


@pytest.mark.parametrize("correction", ["on-policy", "delayed", "none", "truncated-is"])
@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_checkpoint_goes_on_bit_by_bit(name, correction):
    spec = task()
    settings = {"hidden_sizes": (16, 16), "normalize_returns": True, "normalize_obs": True, **STEPS[name]}
    whole = learner(name, spec, correction, **settings)
    rng = np.random.default_rng(0)
    batches = [rollout(whole, spec, rng) for _ in range(4)]
    for batch in batches[:2]:
        whole.learn(batch, 0.1)
    arrays, state = whole.state_arrays(), whole.state_json()
    other = learner(name, spec, correction, seed=77, **settings)
    other.load_state_arrays(arrays)
    other.load_state_json(state)
    for batch in batches[2:]:
        whole.learn(batch, 0.2)
        other.learn(batch, 0.2)
    assert whole.state_json() == other.state_json()
    assert whole.updates == (4 * 40 if name == "ppo" else 4)
    for own, found in ((whole.state_arrays(), other.state_arrays()), (whole.policy_arrays(), other.policy_arrays())):
        assert sorted(own) == sorted(found)
        assert all(own[key].tobytes() == found[key].tobytes() for key in own)
    assert any(arrays[key].tobytes() != whole.state_arrays()[key].tobytes() for key in arrays)


def test_checkpoints_of_another_algorithm_correction_or_setting_are_refused():
    spec = task()
    ppo = learner("ppo", spec, "delayed", hidden_sizes=(8,))
    with pytest.raises(CheckpointError, match="made by 'ppo', not by 'a2c'"):
        learner("a2c", spec, "delayed").load_state_json(ppo.state_json())
    with pytest.raises(CheckpointError, match="made with correction 'delayed', not 'none'"):
        learner("ppo", spec, "none").load_state_json(ppo.state_json())
    with pytest.raises(CheckpointError, match="no 'normalizer'"):
        learner("ppo", spec, "delayed", normalize_obs=True).load_state_json(ppo.state_json())
    with pytest.raises(CheckpointError, match="no 'theta_before'"):
        learner("ppo", spec, "delayed", hidden_sizes=(8,)).load_state_arrays(
            learner("ppo", spec, "none", hidden_sizes=(8,)).state_arrays()
        )
    with pytest.raises(ConfigError, match=r"must be one of: .*; did you mean 'ppo'"):
        create_on_policy("pp", spec, PPOConfig(), 1, correction="none")


@pytest.mark.parametrize("correction", ["on-policy", "delayed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(name, correction):
    spec = task()
    algorithm = learner(name, spec, correction, normalize_obs=True, normalize_returns=True, **STEPS[name])
    rng = np.random.default_rng(0)
    algorithm.learn(rollout(algorithm, spec, rng), None)
    kept, updates = algorithm.state_arrays(), algorithm.updates
    batch = rollout(algorithm, spec, rng)
    batch.reward[-1, :] = np.nan
    algorithm.learn(batch, None)
    steps = 40 if name == "ppo" else 1
    assert (algorithm.updates - updates, algorithm.updates_skipped()) == (steps, steps)
    np.testing.assert_array_equal(algorithm.state_arrays()["theta"], kept["theta"])
    assert all(math.isfinite(value) for value in algorithm.metrics().values())
    broken = rollout(algorithm, spec, rng)
    broken.obs[0, 0, 0] = np.inf
    algorithm.learn(broken, None)
    unknown = rollout(algorithm, spec, rng)
    unknown.log_prob[:] = np.nan
    algorithm.learn(unknown, None)
    assert "clip_share" not in algorithm.metrics(), "nobody knows how many of such ratios are clipped"
    assert all(np.isfinite(array).all() for array in algorithm.policy_arrays().values())


@pytest.mark.parametrize("name", NAMES)
def test_a_large_gradient_is_scaled_down_and_the_step_size_falls_with_progress(name):
    spec = task()
    algorithm = learner(name, spec, max_grad_norm=0.01, value_coef=100.0, lr_schedule="linear", lr_end=0.0)
    batch = rollout(algorithm, spec, np.random.default_rng(0))
    algorithm.learn(batch, 0.25)
    found = algorithm.metrics()
    assert found["grad_norm"] > 0.01
    of_value = algorithm.net.gradient * algorithm.net.of_value
    norms = float(of_value.norm()), float((algorithm.net.gradient - of_value).norm())
    assert norms == pytest.approx((0.01, 0.01), rel=1e-4), "a large gradient of the value leaves the policy's alone"
    assert found["learning_rate"] == pytest.approx(0.75 * (PPOConfig if name == "ppo" else A2CConfig)().lr)
    kept = algorithm.net.flat.clone()
    algorithm.learn(batch, 1.0)
    torch.testing.assert_close(algorithm.net.flat, kept, rtol=0, atol=0)
    algorithm.learn(batch, None)
    assert algorithm.metrics()["learning_rate"] == (PPOConfig if name == "ppo" else A2CConfig)().lr
    assert not torch.equal(algorithm.net.flat, kept)
    together = learner(name, spec, max_grad_norm=0.01, value_coef=100.0, separate_grad_norms=False)
    together.learn(batch, None)
    assert float(together.net.gradient.norm()) == pytest.approx(0.01, rel=1e-4), "one norm of both"


def test_ppo_reports_clipping_divergence_and_explained_variance_of_what_it_learned_from():
    spec = task(discrete=True)
    algorithm = learner("ppo", spec, minibatch_size=32, epochs=1)
    batch = rollout(algorithm, spec, np.random.default_rng(0))
    assert algorithm.metrics() == {}
    shifted = batch._replace(log_prob=(batch.log_prob + np.where(np.arange(4) < 1, 1.0, 0.0)).astype(np.float32))
    algorithm.learn(shifted, None)
    found = algorithm.metrics()
    assert found["clip_share"] == 0.25
    assert found["approx_kl"] == pytest.approx(0.25 * (math.exp(-1) - 1 + 1), abs=1e-4)
    assert found["entropy"] == pytest.approx(math.log(2), abs=1e-3)
    assert found["explained_variance"] < 1.0


def test_the_step_size_follows_the_divergence_within_its_bounds():
    assert adaptive_lr_factor(0.9, 0.021, 0.01) == pytest.approx(0.6)
    assert [adaptive_lr_factor(0.6, divergence, 0.01) for divergence in (0.02, 0.01, 0.005)] == [0.6] * 3
    assert adaptive_lr_factor(0.4, 0.0049, 0.01) == pytest.approx(0.6)
    assert adaptive_lr_factor(0.9, 0.0, 0.01) == 1.0
    assert adaptive_lr_factor(0.012, 1.0, 0.01) == 0.01
    assert adaptive_lr_factor(0.9, math.nan, 0.01) == adaptive_lr_factor(0.9, math.inf, 0.01) == pytest.approx(0.6)


@pytest.mark.parametrize("name", ["ppo", "a2c"])
@pytest.mark.parametrize(("schedule", "rates"), [("constant", (0.02, 0.02)), ("linear", (0.0155, 0.002))])
def test_the_step_size_falls_with_the_share_of_the_run_that_is_over_to_a_tenth(name, schedule, rates):
    spec = task()
    made = learner(name, spec, "on-policy", lr=0.02, lr_schedule=schedule, hidden_sizes=(4,))
    for progress, rate in zip((0.25, 1.0), rates, strict=True):
        made.learn(rollout(made, spec, np.random.default_rng(0)), progress)
        assert made.optimizer.lr == pytest.approx(rate)


@pytest.mark.parametrize("name", NAMES)
def test_rewards_times_a_thousand_are_learned_as_they_were_and_shown_in_the_units_of_the_task(name):
    spec, found = task(), {}
    for factor in (1.0, 1000.0):
        made = learner(name, spec, "on-policy", normalize_returns=True)
        batch = rollout(made, spec, np.random.default_rng(0))
        made.learn(batch._replace(reward=batch.reward * np.float32(factor)), None)
        found[factor] = made.net.flat.clone(), made.metrics()
    torch.testing.assert_close(found[1.0][0], found[1000.0][0], rtol=1e-3, atol=1e-5)
    small, large = found[1.0][1], found[1000.0][1]
    assert large["return_scale"] == pytest.approx(1000.0 * small["return_scale"], rel=1e-4)
    assert large["value_loss"] == pytest.approx(1e6 * small["value_loss"], rel=0.02)


def test_rewards_that_are_signs_are_learned_as_they_are():
    spec = task(discrete=True, frames=dataclasses.replace(FRAMES, sign_rewards=True))
    made = learner("ppo", spec, normalize_returns=True, hidden_sizes=(16,))
    assert made.return_scale == 1.0
    assert "reward_scale" not in made.state_json()


@pytest.mark.parametrize("correction", ["on-policy", "delayed", "none", "truncated-is"])
def test_a_target_for_the_divergence_keeps_an_interval_s_policies_together_and_outlives_a_checkpoint(correction):
    spec, rng = task(), np.random.default_rng(0)
    settings = {"hidden_sizes": (16, 16), "lr": 0.03, "lr_schedule": "constant", **STEPS["ppo"]}
    free, bound = (learner("ppo", spec, correction, target_kl=target, **settings) for target in (None, 0.02))
    for _ in range(12):
        batch = rollout(free, spec, rng)
        free.learn(batch, None)
        bound.learn(rollout(bound, spec, rng), None)
    assert free.metrics()["learning_rate"] == 0.03
    assert bound.metrics()["learning_rate"] < 0.01
    assert bound.metrics()["approx_kl"] < free.metrics()["approx_kl"]
    other = learner("ppo", spec, correction, seed=5, target_kl=0.02, **settings)
    other.load_state_arrays(bound.state_arrays())
    other.load_state_json(bound.state_json())
    batch = rollout(bound, spec, rng)
    for each in (bound, other):
        each.learn(batch, None)
    assert bound.metrics() == other.metrics()
    assert bound.state_json() == other.state_json()
    assert "step_share" not in free.state_json()
    free.load_state_json(bound.state_json())
    free.learn(batch, None)
    assert free.metrics()["learning_rate"] == 0.03


def test_the_interval_s_memory_is_free_after_learning():
    spec = task()
    for name in NAMES:
        algorithm = learner(name, spec, "delayed")
        block = memoryview(bytearray(8 * 4 * 3 * 4))
        obs = np.frombuffer(block, np.float32).reshape(8, 4, 3)
        batch = rollout(algorithm, spec, np.random.default_rng(0))._replace(obs=obs)
        algorithm.learn(batch, None)
        algorithm.metrics()
        del obs, batch
        block.release()


@pytest.mark.parametrize(("name", "gradients"), [("ppo", 6), ("a2c", 1)])
def test_every_gradient_is_told_since_learning_from_one_rollout_may_take_minutes(name, gradients):
    spec = task()
    made = learner(name, spec, **({"epochs": 3, "minibatch_size": 16} if name == "ppo" else {}))
    told = []
    made.on_gradient = lambda: told.append(1)
    made.learn(rollout(made, spec, np.random.default_rng(0)), None)
    assert len(told) == gradients


@pytest.mark.parametrize(("rows", "size", "count"), [
    (2048, 64, 32), (1024, 128, 8), (16_384, 64, 256), (32, 64, 1), (2044, 64, 28), (7, 2, 7), (12, 5, 2), (1, 1, 1),
    (97, 10, 1),
])  # fmt: skip
def test_a_rollout_is_cut_into_equal_minibatches_of_about_the_size_that_is_set(rows, size, count):
    assert PPOConfig(minibatch_size=size).minibatches_of(rows) == count
    assert rows % count == 0


def test_updates_in_an_env_step_are_the_same_whatever_the_number_of_samplers():
    config, rows = PPOConfig(), [16 * 8 * samplers for samplers in (1, 2, 16)]
    assert [config.epochs * config.minibatches_of(count) / count for count in rows] == [10 / 64] * 3
