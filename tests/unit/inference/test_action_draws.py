"""Actions by given noise: right in distribution, and bit by bit a function of one row alone."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spreeze.errors import WeightsError
from spreeze.inference import policy
from spreeze.inference.policy import TILE, Policy, is_position_independent


def policy_of(kind, *, obs_dim=5, hidden=(64, 64), actions=3, seed=0, activation="tanh", normalized=False):
    rng = np.random.default_rng(seed)
    sizes = (obs_dim, *hidden, actions)
    arrays, names = {}, [*(str(index) for index in range(len(hidden))), None]
    for name, fan_in, fan_out in zip(names, sizes[:-1], sizes[1:], strict=True):
        weight, bias = ("head_w", "head_b") if name is None else (f"w{name}", f"b{name}")
        arrays[weight] = (rng.standard_normal((fan_in, fan_out)) / math.sqrt(fan_in)).astype(np.float32)
        arrays[bias] = rng.standard_normal(fan_out).astype(np.float32)
    size = "action_dim" if kind == "gaussian" else "num_actions"
    arrays["log_std"] = rng.uniform(-1.0, 0.5, actions).astype(np.float32)
    if normalized:
        arrays |= {"obs_mean": rng.standard_normal(obs_dim).astype(np.float32), "obs_std": np.full(obs_dim, 0.7, "f4")}
    meta = {"policy": kind, "obs_dim": obs_dim, size: actions, "hidden_sizes": list(hidden), "activation": activation}
    return Policy.from_weights(arrays, meta), arrays


def inputs(rng, rows, obs_dim, policy):
    size = policy._head.noise_dim
    noise = (rng.random if size == 1 else rng.standard_normal)((rows, size))
    return rng.standard_normal((rows, obs_dim)).astype(np.float32), noise.astype(np.float32)


def hidden_layers(arrays, obs):
    x = obs.astype(np.float64)
    for index in range(2):
        x = np.tanh(x @ arrays[f"w{index}"] + arrays[f"b{index}"])
    return x @ arrays["head_w"] + arrays["head_b"]


def test_a_gaussian_action_is_mean_plus_deviation_times_noise_with_its_log_density():
    policy, arrays = policy_of("gaussian")
    obs, noise = inputs(np.random.default_rng(1), 20, 5, policy)
    action, log_prob, _ = policy.sample(obs, noise)
    assert (policy._head.noise_dim, action.shape, action.dtype, log_prob.dtype) == (3, (20, 3), np.float32, np.float32)
    mean, std = hidden_layers(arrays, obs), np.exp(arrays["log_std"].astype(np.float64))
    np.testing.assert_allclose(action, mean + std * noise, atol=1e-5)
    density = np.exp(-0.5 * ((action - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
    np.testing.assert_allclose(log_prob, np.log(density.prod(1)), atol=1e-4)
    assert np.abs(action).max() > 1.0, "drawn actions are not clipped"
    np.testing.assert_allclose(policy.act(obs, ())[0], np.clip(mean, -1, 1), atol=1e-5)
    assert np.abs(policy.act(obs, (), np.random.default_rng(0))[0]).max() == 1.0


def test_a_discrete_action_is_where_the_cumulative_probability_passes_the_noise():
    policy, arrays = policy_of("categorical")
    obs = np.repeat(np.random.default_rng(1).standard_normal((1, 5)).astype(np.float32), 4000, 0)
    noise = ((np.arange(4000) + 0.5) / 4000).astype(np.float32)[:, None]
    action, log_prob, _ = policy.sample(obs, noise)
    out = hidden_layers(arrays, obs[:1])[0]
    prob = np.exp(out - out.max())
    prob /= prob.sum()
    assert policy._head.noise_dim == 1
    np.testing.assert_array_equal(np.diff(action[:, 0]) >= 0, True)
    np.testing.assert_allclose(np.bincount(action[:, 0].astype(int), minlength=3) / 4000, prob, atol=3e-4)
    np.testing.assert_allclose(log_prob, np.log(prob)[action[:, 0].astype(int)], atol=1e-5)


def test_an_action_of_no_probability_is_never_drawn_whatever_the_noise():
    policy, arrays = policy_of("categorical", actions=4)
    arrays["head_w"][:] = 0.0
    arrays["head_b"][:] = [-200.0, 0.0, 0.0, -200.0]
    policy = Policy.from_weights(
        arrays,
        {"policy": "categorical", "obs_dim": 5, "num_actions": 4, "hidden_sizes": [64, 64], "activation": "tanh"},
    )
    noise = np.array([[0.0], [1e-30], [0.5], [np.nextafter(np.float32(1), np.float32(0))]], np.float32)
    action, log_prob, _ = policy.sample(np.zeros((4, 5), np.float32), noise)
    assert action[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
    np.testing.assert_allclose(log_prob, math.log(0.5), atol=1e-6)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 40),
    obs_dim=st.sampled_from([1, 3, 4, 17, 28, 65]),
    hidden=st.sampled_from([(64, 64), (33,), (256, 256), (7, 5)]),
    actions=st.sampled_from([2, 3, 6, 17]),
    normalized=st.booleans(),
    activation=st.sampled_from(["tanh", "relu"]),
)
def test_a_row_has_the_same_bits_at_every_place_and_in_any_company(
    kind, seed, rows, obs_dim, hidden, actions, normalized, activation
):
    policy, _ = policy_of(
        kind, obs_dim=obs_dim, hidden=hidden, actions=actions, normalized=normalized, activation=activation
    )
    rng = np.random.default_rng(seed)
    obs, noise = inputs(rng, rows, obs_dim, policy)
    whole = policy.sample(obs, noise)[:2]
    order = rng.permutation(rows)
    shuffled = policy.sample(obs[order], noise[order])[:2]
    cut = int(rng.integers(0, rows))
    parts = policy.sample(obs[cut:], noise[cut:])[:2]
    for one, other, part in zip(whole, shuffled, parts, strict=True):
        assert one[order].tobytes() == other.tobytes()
        assert one[cut:].tobytes() == part.tobytes()
    row = int(rng.integers(0, rows))
    alone = policy.sample(obs[row : row + 1], noise[row : row + 1])[:2]
    assert all(one[row : row + 1].tobytes() == own.tobytes() for one, own in zip(whole, alone, strict=True))


def test_without_tiles_the_bits_do_depend_on_the_company():
    """The negative control: what the test above would find if ``draw`` were one product of all rows."""
    policy, _ = policy_of("gaussian", obs_dim=64)
    obs, _ = inputs(np.random.default_rng(0), 64, 64, policy)
    whole = policy.act(obs, ())[0].tobytes()
    rows = b"".join(policy.act(obs[row : row + 1], ())[0].tobytes() for row in range(64))
    if is_position_independent(64, 64) and np.dot(obs[:1], obs)[0].tobytes() == np.dot(obs, obs)[0].tobytes():
        pytest.skip("this machine's products do not depend on the number of rows")
    assert whole != rows


def test_where_products_depend_on_the_place_rows_are_multiplied_one_by_one(monkeypatch):
    tiled, _ = policy_of("gaussian")
    monkeypatch.setattr(policy, "is_position_independent", lambda inputs, outputs: False)
    single, _ = policy_of("gaussian")
    obs, noise = inputs(np.random.default_rng(2), 2 * TILE + 3, 5, tiled)
    whole = single.sample(obs, noise)[:2]
    for one, other in zip(whole, tiled.sample(obs, noise)[:2], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    alone = [single.sample(obs[row : row + 1], noise[row : row + 1])[:2] for row in range(len(obs))]
    assert np.concatenate([action for action, _ in alone]).tobytes() == whole[0].tobytes()


def test_a_row_that_is_not_finite_spoils_no_other():
    policy, _ = policy_of("categorical")
    obs, noise = inputs(np.random.default_rng(3), TILE, 5, policy)
    kept = policy.sample(obs, noise)[:2]
    broken = obs.copy()
    broken[3] = np.nan
    others = np.arange(TILE) != 3
    with np.errstate(invalid="ignore"):
        found = policy.sample(broken, noise)[:2]
    assert all(one[others].tobytes() == other[others].tobytes() for one, other in zip(kept, found, strict=True))
    again = policy.sample(obs[:2], noise[:2])[:2]
    assert all(one[:2].tobytes() == other.tobytes() for one, other in zip(kept, again, strict=True))


def test_policies_that_make_their_own_noise_and_unknown_activations_are_refused():
    rng = np.random.default_rng(0)
    arrays = {"head_w": rng.standard_normal((5, 4)).astype(np.float32), "head_b": np.zeros(4, np.float32)}
    policy = Policy.from_weights(arrays, {"policy": "squashed_gaussian", "obs_dim": 5, "action_dim": 2})
    with pytest.raises(WeightsError, match="SquashedGaussian generates its own noise"):
        policy.sample(np.zeros((1, 5), np.float32), np.zeros((1, 2), np.float32))
    meta = {"policy": "categorical", "obs_dim": 5, "num_actions": 4}
    with pytest.raises(WeightsError, match="activation 'gellu'; known are relu, tanh"):
        Policy.from_weights(arrays, meta | {"activation": "gellu"})
    gaussian = {"policy": "gaussian", "obs_dim": 5, "action_dim": 4}
    with pytest.raises(WeightsError, match="no 'log_std'"):
        Policy.from_weights(arrays, gaussian)
    with pytest.raises(WeightsError, match=r"'log_std' have shape \(3,\); \(4,\) is needed"):
        Policy.from_weights(arrays | {"log_std": np.zeros(3, np.float32)}, gaussian)
