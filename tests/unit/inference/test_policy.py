"""NumPy policies against the torch networks they were published from."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from harness import PATIENCE_S, race

from spreeze.algorithms import create
from spreeze.algorithms.networks.fused_mlp import MlpBuffers
from spreeze.algorithms.sac import SACConfig
from spreeze.algorithms.td3 import DDPGConfig, TD3Config
from spreeze.errors import UsageError, WeightsError
from spreeze.inference.policy import Policy

OBS, ACT = 6, 3
CONFIGS = {"sac": SACConfig, "td3": TD3Config, "ddpg": DDPGConfig}


def algorithm_of(name, **changes):
    return create(name, OBS, ACT, CONFIGS[name](hidden_sizes=(32, 24), **changes), seed=4)


def policy_of(algorithm, **extra):
    return Policy.from_weights(algorithm.policy_arrays() | extra, algorithm.policy_meta())


def torch_output(algorithm, obs):
    net = algorithm.actor.online
    return net.forward(torch.from_numpy(obs)[None], MlpBuffers.allocate(net, len(obs)))[0].t().numpy().copy()


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("rows", [1, 2, 8, 16])
def test_greedy_action_equals_the_torch_network(name, rows):
    algorithm = algorithm_of(name)
    obs = np.random.default_rng(rows).normal(size=(rows, OBS)).astype(np.float32)
    expected = np.tanh(torch_output(algorithm, obs)[:, :ACT])
    action = policy_of(algorithm).act(obs, ())[0]
    assert action.dtype == np.float32
    np.testing.assert_allclose(action, expected, atol=1e-5)


def test_sampled_action_is_tanh_of_mean_plus_deviation_times_noise():
    algorithm = algorithm_of("sac")
    obs = np.random.default_rng(0).normal(size=(5, OBS)).astype(np.float32)
    out = torch_output(algorithm, obs)
    noise = np.random.default_rng(9).standard_normal((5, ACT), np.float32)
    action = policy_of(algorithm).act(obs, (), np.random.default_rng(9))[0]
    assert action.dtype == np.float32
    np.testing.assert_allclose(action, np.tanh(out[:, :ACT] + np.exp(out[:, ACT:]) * noise), atol=1e-5)


@pytest.mark.parametrize("name", ["td3", "ddpg"])
def test_deterministic_policy_explores_with_clipped_noise(name):
    policy = policy_of(algorithm_of(name, exploration_noise=0.5))
    obs = np.zeros((4000, OBS), np.float32)
    action = policy.act(obs, (), np.random.default_rng(0))[0]
    assert np.abs(action).max() <= 1.0
    spread = (action - policy.act(obs, ())[0])[np.abs(action).max(1) < 1.0].std()
    assert 0.35 < spread < 0.55
    quiet = policy_of(algorithm_of(name, exploration_noise=0.0))
    np.testing.assert_array_equal(quiet.act(obs[:2], (), np.random.default_rng(0))[0], quiet.act(obs[:2], ())[0])


@pytest.mark.parametrize("name", ["td3", "ddpg"])
def test_noise_may_grow_from_the_first_environment_of_a_sampler_to_its_last(name):
    policy = policy_of(algorithm_of(name, exploration_noise=0.0, exploration_noise_max=0.4))
    obs, rng = np.zeros((5, OBS), np.float32), np.random.default_rng(0)
    difference = np.stack([policy.act(obs, (), rng)[0] - policy.act(obs, ())[0] for _ in range(2000)])
    np.testing.assert_allclose(difference.std((0, 2)), np.linspace(0.0, 0.4, 5), rtol=0.1)
    one = policy.act(obs[:1], (), rng)[0]
    np.testing.assert_array_equal(one, policy.act(obs[:1], ())[0], "a lone environment explores with the least")


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_the_actor_may_have_other_layers_than_the_critics(name):
    algorithm = algorithm_of(name, actor_hidden_sizes=(16,))
    assert algorithm.policy_meta()["hidden_sizes"] == [16]
    assert algorithm.critics.online.sizes[1:-1] == (32, 24)
    obs = np.random.default_rng(0).normal(size=(3, OBS)).astype(np.float32)
    expected = np.tanh(torch_output(algorithm, obs)[:, :ACT])
    np.testing.assert_allclose(policy_of(algorithm).act(obs, ())[0], expected, atol=1e-5)


def test_normalizer_scales_and_clips_observations():
    algorithm = algorithm_of("sac")
    mean, std = np.arange(OBS, dtype=np.float32), np.full(OBS, 2.0, np.float32)
    obs = np.array([[1.0, 3.0, 1000.0, -1000.0, 4.0, 5.0]], np.float32)
    kept = obs.copy()
    plain = policy_of(algorithm).act(np.clip((obs - mean) / std, -10, 10), ())[0]
    np.testing.assert_allclose(policy_of(algorithm, obs_mean=mean, obs_std=std).act(obs, ())[0], plain, atol=1e-6)
    np.testing.assert_array_equal(obs, kept)


def test_returned_actions_are_not_overwritten_by_the_next_call():
    policy, obs = policy_of(algorithm_of("sac")), np.ones((2, OBS), np.float32)
    greedy, sampled = policy.act(obs, ())[0], policy.act(obs, (), np.random.default_rng(0))[0]
    kept = greedy.copy(), sampled.copy()
    policy.act(-obs, ())
    policy.act(-obs, (), np.random.default_rng(1))
    np.testing.assert_array_equal(greedy, kept[0])
    np.testing.assert_array_equal(sampled, kept[1])


def test_number_of_rows_may_change_between_calls():
    policy = policy_of(algorithm_of("td3"))
    obs = np.random.default_rng(0).normal(size=(4, OBS)).astype(np.float32)
    whole = policy.act(obs, ())[0]
    np.testing.assert_allclose(policy.act(obs[:1], ())[0], whole[:1], atol=1e-6)
    np.testing.assert_allclose(policy.act(obs, ())[0], whole, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w1": None}, "no 'w1'"),
        ({"w0": np.zeros((OBS + 1, 32), np.float32)}, "has 7 inputs, expected 6"),
        ({"head_w": np.zeros((24, 5), np.float32), "head_b": np.zeros(5, np.float32)}, "5 outputs; 6"),
        ({"b0": np.zeros(3, np.float32)}, "have shape"),
        ({"obs_mean": np.zeros(2, np.float32), "obs_std": np.zeros(2, np.float32)}, "normalizer has shapes"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(change, message):
    algorithm = algorithm_of("sac")
    arrays = algorithm.policy_arrays() | change
    arrays = {key: value for key, value in arrays.items() if value is not None}
    with pytest.raises(WeightsError, match=message):
        Policy.from_weights(arrays, algorithm.policy_meta())


def test_unknown_kind_of_policy_is_refused():
    with pytest.raises(WeightsError, match="'mystery'"):
        Policy.from_weights({}, {"policy": "mystery"})


def test_policies_and_returns_load_without_torch():
    code = "import sys, spreeze.inference.policy, spreeze.transport.transitions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _gaussian():
    rng, sizes = np.random.default_rng(1), ((OBS, 32), (32, 24), (24, ACT))
    arrays = {f"w{i}": rng.standard_normal(size).astype(np.float32) for i, size in enumerate(sizes[:-1])}
    arrays |= {f"b{i}": np.zeros(size[1], np.float32) for i, size in enumerate(sizes[:-1])}
    arrays |= {"head_w": rng.standard_normal(sizes[-1]).astype(np.float32), "head_b": np.zeros(ACT, np.float32),
               "log_std": np.zeros(ACT, np.float32)}  # fmt: skip
    meta = {"policy": "gaussian", "obs_dim": OBS, "action_dim": ACT, "hidden_sizes": [32, 24]}
    return Policy.from_weights(arrays, meta)


ASKED = {
    "greedy": (lambda: policy_of(algorithm_of("sac")), lambda policy, obs, rng: policy.act(obs, ())[0]),
    "sampled": (lambda: policy_of(algorithm_of("sac")), lambda policy, obs, rng: policy.act(obs, (), rng)[0]),
    "drawn": (_gaussian, lambda policy, obs, rng: policy.sample(obs, rng.standard_normal((len(obs), ACT)))[0]),
}


@pytest.mark.parametrize("kind", ASKED)
def test_two_threads_at_once_are_refused_and_never_get_wrong_answers(kind):
    make, ask = ASKED[kind]
    batches = [np.random.default_rng(seed).normal(size=(1 + seed % 3, OBS)).astype(np.float32) for seed in range(40)]
    alone = [ask(make(), obs, np.random.default_rng(0)) for obs in batches]
    shared, wrong, refused = make(), [], []

    def work():
        while not refused and not wrong:
            for obs, own in zip(batches, alone, strict=True):
                try:
                    found = ask(shared, obs, np.random.default_rng(0))
                except UsageError as error:
                    refused.append(str(error))
                else:
                    wrong.extend([] if np.array_equal(found, own) else [found])

    race(work)
    assert wrong == []
    assert "used by two threads at once" in refused[0]
    assert np.array_equal(ask(shared, batches[0], np.random.default_rng(0)), alone[0]), "it serves the next one"


@pytest.mark.parametrize(("module", "status"), [("spreeze.inference.policy", 0), ("users_code", 1)])
def test_a_false_flag_of_the_matrix_library_warns_of_nothing_in_our_products_alone(module, status):
    program = (
        "import warnings, spreeze.inference; "
        f"warnings.warn_explicit('invalid value encountered in dot', RuntimeWarning, 'x.py', 1, {module!r})"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == status, done.stderr
