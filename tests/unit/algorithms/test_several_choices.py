"""MultiDiscrete and MultiBinary actions: probabilities, gradients, masks, exported policies, and runs that learn."""

import dataclasses
import itertools
import shutil

import choices_env
import numpy as np
import pytest
import torch
from harness import run_command, train
from rollouts import learner, rollout, task

import spreeze
from spreeze.algorithms import losses
from spreeze.algorithms.on_policy import CategoricalDistribution
from spreeze.envs.action_spaces import uniform_actions
from spreeze.envs.task import make_task
from spreeze.errors import BadTransition, UsageError
from spreeze.inference.policy import Policy
from spreeze.transport.weights import encode
from spreeze.types import Choices

pytestmark = pytest.mark.warm

NVEC = (3, 2, 4)
SPEC = dataclasses.replace(task(obs_dim=5), action=Choices(NVEC, (1, 0, 5), (3,)))
MASKED = dataclasses.replace(SPEC, obs_dim=5 + sum(NVEC), action_mask=True)
ID, MODULE = "tests/Choices-v0", "choices_env"
ON_POLICY = ("ppo", "a2c", "impact", "appo", "impala")


def made(name="ppo", spec=SPEC, **settings):
    correction = "on-policy" if name in ("ppo", "a2c") else "none"
    return learner(name, spec, correction, **{"hidden_sizes": (8,), **settings})


def parts(logits):
    """Log-probabilities [N, n] of each choice, from logits [N, K]."""
    split = np.split(logits, np.cumsum(NVEC)[:-1], 1)
    return [part - np.log(np.exp(part).sum(1, keepdims=True)) for part in split]


def samples(rows=64, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, sum(NVEC))), rng.integers(NVEC, size=(rows, len(NVEC)))


# --- probabilities and gradients ---


def test_log_probability_and_entropy_are_sums_over_the_choices():
    logits, index = samples()
    distribution = CategoricalDistribution(NVEC)
    found = distribution.log_prob(torch.tensor(logits).t(), torch.tensor(index, dtype=torch.float64))
    log_pi = parts(logits)
    expected = sum(part[np.arange(64), index[:, number]] for number, part in enumerate(log_pi))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    entropy = -sum((np.exp(part) * part).sum(1).mean() for part in log_pi)
    assert distribution.entropy() == pytest.approx(entropy, abs=1e-12)


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_gradient_is_that_of_autograd(weight):
    logits, index = samples()
    out, action = torch.tensor(logits).t().contiguous(), torch.tensor(index, dtype=torch.float64)
    by_log_prob = torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    distribution = CategoricalDistribution(NVEC)
    distribution.log_prob(out, action)
    found = distribution.backward(by_log_prob, weight)
    leaf = out.clone().requires_grad_()
    loss = 0.0
    for number, part in enumerate(leaf.split(NVEC)):
        one = torch.distributions.Categorical(logits=part.t())
        loss = loss + (by_log_prob * one.log_prob(action[:, number])).sum() - weight * one.entropy().sum()
    loss.backward()
    torch.testing.assert_close(found, leaf.grad, rtol=0.0, atol=1e-6)


def test_divergence_and_its_gradient_are_those_of_autograd():
    first, second = (torch.tensor(samples(seed=seed)[0]).t().contiguous() for seed in (1, 2))
    divergence, gradient = CategoricalDistribution(NVEC).kl(first, first[:0], second)[:2]
    leaf = second.clone().requires_grad_()
    pick = torch.distributions.Categorical
    expected = sum(
        torch.distributions.kl_divergence(pick(logits=p.t()), pick(logits=q.t()))
        for p, q in zip(first.split(NVEC), leaf.split(NVEC), strict=True)
    )
    expected.sum().backward()
    torch.testing.assert_close(divergence, expected.detach())
    torch.testing.assert_close(gradient, leaf.grad, rtol=0.0, atol=1e-6)


def test_one_choice_is_bit_by_bit_the_plain_categorical_policy():
    out, action = torch.randn(5, 40), torch.randint(5, (40, 1)).float()
    by_log_prob, distribution = torch.randn(40), CategoricalDistribution((5,))
    log_pi, chosen = losses.categorical(out, action.t().long())
    assert torch.equal(distribution.log_prob(out, action), chosen)
    expected = losses.categorical_backward(log_pi, action.t().long(), by_log_prob, 0.1)
    assert torch.equal(distribution.backward(by_log_prob, 0.1), expected)


@pytest.mark.parametrize("name", ON_POLICY)
def test_every_on_policy_algorithm_learns_from_its_own_rollouts(name):
    algorithm = made(name)
    before = algorithm.parameters()
    rng = np.random.default_rng(0)
    for _ in range(3):
        algorithm.learn(rollout(algorithm, SPEC, rng), None)
    assert algorithm.updates_skipped() == 0
    assert not np.array_equal(before, algorithm.parameters())
    assert 0.0 < algorithm.metrics()["entropy"] <= np.log(NVEC).sum() + 1e-6


# --- the sampler's policy ---


def policy_of(algorithm):
    return Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())


def test_sampler_and_learner_agree_on_the_log_probability():
    algorithm, rng = made(), np.random.default_rng(3)
    obs = rng.standard_normal((30, 5)).astype(np.float32)
    action, log_prob, _ = policy_of(algorithm).sample(obs, rng.random((30, 3), np.float32))
    out, _ = algorithm.net.forward(torch.from_numpy(obs))
    np.testing.assert_allclose(CategoricalDistribution(NVEC).log_prob(out, torch.from_numpy(action)), log_prob,
                               atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("way", ["draw", "act"])
def test_each_combination_is_drawn_as_often_as_its_probability(way):
    rng, count = np.random.default_rng(5), 60_000
    bias = rng.standard_normal(sum(NVEC)).astype(np.float32)
    policy = Policy.from_weights(
        {"head_w": np.zeros((5, sum(NVEC)), np.float32), "head_b": bias},
        {"policy": "categorical", "nvec": list(NVEC), "obs_dim": 5},
    )
    obs = np.zeros((count, 5), np.float32)
    action = policy.sample(obs, rng.random((count, 3), np.float32))[0] if way == "draw" else policy.act(obs, (), rng)[0]
    log_pi = [part[0] for part in parts(bias[None])]
    for combination in itertools.product(*map(range, NVEC)):
        probability = float(np.exp(sum(part[one] for part, one in zip(log_pi, combination, strict=True))))
        share = (action == combination).all(1).mean()
        assert share == pytest.approx(probability, abs=5.0 * (probability / count) ** 0.5)
    assert policy.act(obs[:1], ())[0].tolist() == [[float(part.argmax()) for part in log_pi]]


def test_a_row_s_draw_does_not_depend_on_the_other_rows():
    policy, rng = policy_of(made()), np.random.default_rng(2)
    obs, noise = rng.standard_normal((21, 5)).astype(np.float32), rng.random((21, 3), np.float32)
    whole = policy.sample(obs, noise)[:2]
    for row in range(21):
        alone = policy.sample(obs[row : row + 1], noise[row : row + 1])[:2]
        assert [part.tobytes() for part in alone] == [part[row : row + 1].tobytes() for part in whole]


# --- masks ---


def masked_obs(rows, seed=0):
    """Random observations whose masks allow at least one option of each choice."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, sum(NVEC))) < 0.4
    for part in MASKED.choices.slices:
        mask[np.arange(rows), rng.integers(part.start, part.stop, size=rows)] = True
    return np.concatenate([rng.standard_normal((rows, 5)), mask], 1).astype(np.float32)


def allowed(obs, action):
    """Whether the masks [N, K] at the end of obs allow each choice of the actions [N, A]."""
    columns = action.astype(int) + [part.start for part in MASKED.choices.slices]
    return np.take_along_axis(obs[:, 5:], columns, 1) == 1.0


def test_no_forbidden_option_is_drawn_and_the_others_share_its_probability():
    algorithm, rng, obs = made(spec=MASKED), np.random.default_rng(4), masked_obs(500)
    policy = policy_of(algorithm)
    action, log_prob, _ = policy.sample(obs, rng.random((500, 3), np.float32))
    for found in (action, policy.act(obs, (), rng)[0], policy.act(obs, ())[0], uniform_actions(MASKED, 500, rng, obs)):
        assert allowed(obs, found).all()
    out = algorithm.net.forward(torch.from_numpy(obs))[0].numpy().T
    log_pi = parts(np.where(obs[:, 5:] == 1.0, out, -1e30))
    expected = sum(part[np.arange(500), action[:, number].astype(int)] for number, part in enumerate(log_pi))
    np.testing.assert_allclose(log_prob, expected, atol=1e-5)


def test_a_mask_that_allows_nothing_of_one_choice_is_an_error():
    one = make_task(ID, MODULE, args=("masked=True",))
    one.reset(seed=1)
    one.env.unwrapped._next = lambda: (np.zeros(7, np.float32), {"action_mask": np.array([1, 1, 1, 0, 0, 0, 0], bool)})
    with pytest.raises(BadTransition, match="all False for choice 1, but the episode continues"):
        one.step(uniform_actions(one.spec, 1, np.random.default_rng(0), one.env.unwrapped.mask[None])[0])


# --- whole runs ---


COMMAND = ("--env", ID, "--import", MODULE, "--algo", "ppo", "--samplers", "1", "--envs-per-sampler", "8",
           "--sync-interval", "64", "--no-visualizer", "--no-governor", "--set", "evaluation.episodes=2",
           "--set", "ppo.hidden_sizes=[32]", "--set", "ppo.lr=0.003", "--set", "ppo.lr_schedule=constant",
           "--set", "ppo.gamma=0", "--set", "ppo.gae_lambda=0")  # fmt: skip


def wanted(space):
    """All observations, and for each the one action that is rewarded."""
    nvec, start = choices_env.counts_of(space)
    index = np.array(list(itertools.product(*map(range, nvec))))
    obs = np.concatenate([np.eye(count, dtype=np.float32)[index[:, number]] for number, count in enumerate(nvec)], 1)
    return obs, index + start


def learned_by_a_run(folder, mode, kind="discrete", masked=False):
    task = ("--env-arg", f"kind={kind}", "--env-arg", f"masked={masked}")
    run, code, document = train(folder, *COMMAND, *task, "--mode", mode, "--env-steps", "12000", tiny=())
    assert code == 0, run.stderr[-3000:]
    assert document["env_errors"] == 0
    return run, document


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A run of mode hts that has learned."""
    return learned_by_a_run(tmp_path_factory.mktemp("learned"), "hts")


@pytest.mark.parametrize(("kind", "mode", "masked"), [
    ("discrete", "hts", False), ("discrete", "serial", True),
    pytest.param("binary", "serial", False, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_learns_every_choice(kind, mode, masked, tmp_path, request):
    shared = mode == "hts"
    run, document = request.getfixturevalue("learned") if shared else learned_by_a_run(tmp_path, mode, kind, masked)
    space = choices_env.SPACES[kind]
    obs, actions = wanted(space)
    policy = spreeze.load_policy(run.path, import_module=MODULE)
    mask = np.ones((len(obs), policy.spec.mask_dim)) if masked else None
    found = policy.predict(obs, action_mask=mask)
    assert found.shape == actions.shape
    # A policy that left one choice out would be right in at most half of the rows.
    assert (found == actions).all(1).mean() >= 0.9
    one = policy.predict(obs[0], action_mask=None if mask is None else mask[0])
    assert space.contains(one.astype(space.dtype))
    assert document["eval_return_best"] >= 0.8 * choices_env.STEPS


def test_a_run_goes_on_plays_and_is_exported(tmp_path, learned):
    run, first = learned
    copy = shutil.copytree(run.path, tmp_path / "copied" / "run")
    steps = str(first["env_steps"] + 1024)
    again, code, document = train(tmp_path, "--resume", copy, "--import", MODULE, "--env-steps", steps, tiny=())
    assert code == 0, again.stderr[-3000:]
    assert document["env_steps"] >= int(steps)
    for name, *args in (("evaluate", run.path, "--episodes", "1"), ("doctor", "--env", ID)):
        done = run_command(name, *args, "--import", MODULE)
        assert done.returncode in (0, 1), done.stderr
        assert "Traceback" not in done.stderr
    out = tmp_path / "policy.npz"
    done = run_command("export", run.path, "--format", "numpy", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "the same action for each" in done.stdout
    refused, code, _ = train(tmp_path, "--env", ID, "--import", MODULE, "--algo", "dqn", name="refused", tiny=())
    assert code == 2
    assert (
        "--algo dqn: it supports one choice at a time only; tests/Choices-v0 has 2 choices at once among 3, 4 discrete "
        "actions; ppo, a2c, impact, appo and impala fit" in refused.stderr
    )


def test_predict_takes_a_mask_that_allows_something_of_each_choice(tmp_path):
    algorithm = made(spec=MASKED)
    spec = dataclasses.replace(MASKED, obs_layout=("0:5 observation (Box)", "5:14 info['action_mask']"))
    path = tmp_path / "w.safetensors"
    meta = algorithm.policy_meta() | {"env": dataclasses.asdict(spec)}
    path.write_bytes(encode(algorithm.policy_arrays(), meta, 1, 1))
    policy = spreeze.load_policy(path)
    obs = masked_obs(40)
    found = policy.predict(obs[:, :5], action_mask=obs[:, 5:])
    assert allowed(obs, found - np.array(spec.choices.start)).all()
    with pytest.raises(UsageError, match="at least one of each choice"):
        policy.predict(obs[0, :5], action_mask=[1, 1, 1, 0, 0, 1, 1, 1, 1])
