"""Dict and Tuple actions: probabilities and gradients by hand and by autograd, hybrid SAC, masks, whole runs."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import parts_env
import pytest
import torch
from batches import exact
from harness import PATIENCE_S, run_command, train
from rollouts import learner, recurrent_rollout, rollout, task

import spreeze
from spreeze.algorithms import create, losses
from spreeze.algorithms.on_policy import distribution_of
from spreeze.algorithms.sac import SACConfig
from spreeze.envs.task import make_task
from spreeze.inference.policy import Policy
from spreeze.types import ActionPart, Box, Choices, Mixed, RowLayout

pytestmark = pytest.mark.warm

NVEC, AXES = (3, 2), 2
PARTS = (ActionPart(path=("push",), begin=0, shape=(AXES,), dtype="float32"),
         ActionPart(path=("dials",), begin=AXES, shape=(2,), dtype="int64", start=(1, 0)))  # fmt: skip
SPEC = dataclasses.replace(
    task(obs_dim=5), action=Mixed(Box((-2.0,) * AXES, (2.0,) * AXES, (AXES,)), Choices(NVEC, (1, 0), (2,))),
    action_parts=PARTS,
)  # fmt: skip
MASKED = dataclasses.replace(SPEC, obs_dim=5 + sum(NVEC), action_mask=True)
ON_POLICY = ("ppo", "a2c", "impact", "appo", "impala")
DOUBLE = torch.float64


def drawn(rows=64, seed=0):
    """Means, log standard deviations, logits, and actions, in float64."""
    rng = np.random.default_rng(seed)
    action = np.concatenate((rng.standard_normal((rows, AXES)), rng.integers(NVEC, size=(rows, 2))), 1)
    return (torch.tensor(rng.standard_normal(shape)) for shape in ((AXES, rows), (AXES,), (sum(NVEC), rows))), action


def as_torch(mean, log_std, logits):
    """The distributions of the numbers and of each choice."""
    choices = [torch.distributions.Categorical(logits=part.t()) for part in logits.split(NVEC)]
    return torch.distributions.Normal(mean.t(), log_std.exp()), choices


# --- probabilities and gradients ---


def test_log_probability_and_entropy_by_hand():
    # One number of mean 1 and deviation 2 at 3: z = 1. One choice of (1/4, 3/4) at its second option.
    spec = dataclasses.replace(SPEC, action=Mixed(Box((-1.0,), (1.0,)), Choices((2,))), action_parts=())
    kind = distribution_of(spec, torch.tensor([math.log(2.0)]), torch.zeros(1))
    out = torch.tensor([[1.0], [0.0], [math.log(3.0)]])
    expected = -0.5 - math.log(2.0) - 0.5 * math.log(2.0 * math.pi) + math.log(0.75)
    assert kind.log_prob(out, torch.tensor([[3.0, 1.0]])).item() == pytest.approx(expected, abs=1e-6)
    of_choice = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    assert kind.entropy() == pytest.approx(0.5 + 0.5 * math.log(2.0 * math.pi) + math.log(2.0) + of_choice, abs=1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_gradients_are_those_of_autograd(weight):
    (mean, log_std, logits), action = drawn()
    leaves = [part.clone().requires_grad_() for part in (mean, log_std, logits)]
    by_log_prob = torch.tensor(np.random.default_rng(1).standard_normal(64))
    numbers, choices = as_torch(*leaves)
    index = torch.tensor(action[:, AXES:])
    log_prob = numbers.log_prob(torch.tensor(action[:, :AXES])).sum(1)
    log_prob = log_prob + sum(one.log_prob(index[:, place]) for place, one in enumerate(choices))
    entropy = numbers.entropy().sum() + sum(one.entropy().sum() for one in choices)
    ((by_log_prob * log_prob).sum() - weight * entropy).backward()
    by_log_std = torch.zeros(AXES, dtype=DOUBLE)
    kind = distribution_of(SPEC, log_std, by_log_std)
    torch.testing.assert_close(kind.log_prob(torch.cat((mean, logits)), torch.tensor(action)), log_prob.detach())
    assert kind.entropy() * 64 == pytest.approx(entropy.item())
    found = kind.backward(by_log_prob, weight)
    torch.testing.assert_close(found, torch.cat((leaves[0].grad, leaves[2].grad)), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(by_log_std, leaves[1].grad, rtol=0.0, atol=1e-6)


def test_divergence_and_its_gradients_are_those_of_autograd():
    (p_mean, p_log_std, p_logits), _ = drawn(seed=1)
    (mean, log_std, logits), _ = drawn(seed=2)
    leaves = [part.clone().requires_grad_() for part in (mean, log_std, logits)]
    before, now = as_torch(p_mean, p_log_std, p_logits), as_torch(*leaves)
    expected = torch.distributions.kl_divergence(before[0], now[0]).sum(1)
    expected = expected + sum(map(torch.distributions.kl_divergence, before[1], now[1]))
    expected.sum().backward()
    kind = distribution_of(SPEC, log_std, torch.zeros_like(log_std))
    found, by_out, by_log_std = kind.kl(
        torch.cat((p_mean, p_logits)), p_log_std.unsqueeze(1).expand(-1, 64), torch.cat((mean, logits))
    )
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(by_out, torch.cat((leaves[0].grad, leaves[2].grad)), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(by_log_std.sum(1), leaves[1].grad, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("recurrent", [None, "lstm", "gru"])
@pytest.mark.parametrize("name", ON_POLICY)
def test_every_on_policy_algorithm_learns_from_what_its_own_sampler_drew(name, recurrent):
    settings = {"recurrent": recurrent, "recurrent_size": 6, "sequence_length": 4} if recurrent else {}
    settings |= {"kl_coef": 0.5} if name == "impact" else {}
    correction = "on-policy" if name in ("ppo", "a2c") else "none"
    algorithm = learner(name, MASKED, correction, hidden_sizes=(8,), **settings)
    before, rng = algorithm.parameters(), np.random.default_rng(0)
    for _ in range(3):
        batch = recurrent_rollout(algorithm, MASKED, rng)
        algorithm.learn(batch, None)
    assert algorithm.updates_skipped() == 0
    assert (algorithm.parameters() != before)[-AXES:].all(), "the log standard deviations"
    assert algorithm.metrics()["approx_kl"] < 0.5, "sampler and learner agree on the log-probability"


def test_a_ratio_of_one_says_that_sampler_and_learner_agree():
    algorithm = learner("ppo", SPEC, hidden_sizes=(8,), epochs=1, minibatch_size=32, lr=0.0)
    algorithm.learn(rollout(algorithm, SPEC, np.random.default_rng(0)), None)
    assert algorithm.metrics()["approx_kl"] < 1e-10


# --- the sampler's policy ---


def test_a_row_s_draw_does_not_depend_on_the_other_rows_and_is_distributed_as_told():
    policy = Policy.from_weights(
        {"head_w": np.zeros((5, 7), np.float32), "head_b": np.array([0.5, -1, 0, 1, 2, 0, 1], np.float32),
         "log_std": np.log(np.array([0.5, 2.0], np.float32))},
        {"policy": "mixed", "action_dim": 2, "nvec": [3, 2], "obs_dim": 5, "hidden_sizes": []},
    )  # fmt: skip
    rng, count = np.random.default_rng(1), 40_000
    obs, noise = np.zeros((count, 5), np.float32), np.zeros((count, 4), np.float32)
    noise[:, :2], noise[:, 2:] = rng.standard_normal((count, 2)), rng.random((count, 2))
    action, log_prob, _ = policy.sample(obs, noise)
    for row in range(20):
        alone = policy.sample(obs[row : row + 1], noise[row : row + 1])[:2]
        assert [part.tobytes() for part in alone] == [part[row : row + 1].tobytes() for part in (action, log_prob)]
    for found in (action, policy.act(obs, (), rng)[0]):
        share = np.mean(found[:, 2:] == [2, 1], 0)
        np.testing.assert_allclose(share, [np.e**2 / (1 + np.e + np.e**2), np.e / (1 + np.e)], atol=0.015)
    np.testing.assert_allclose((action[:, :2].mean(0), action[:, :2].std(0)), ([0.5, -1.0], [0.5, 2.0]), atol=0.05)
    assert policy.act(obs[:1], ())[0].tolist() == [[0.5, -1.0, 2.0, 1.0]]


def test_no_forbidden_option_is_drawn():
    algorithm, rng = learner("ppo", MASKED, hidden_sizes=(8,)), np.random.default_rng(4)
    mask = rng.random((500, sum(NVEC))) < 0.4
    mask[:, [1, 4]] = True
    obs = np.concatenate((rng.standard_normal((500, 5)), mask), 1).astype(np.float32)
    policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    noise = np.concatenate((rng.standard_normal((500, AXES)), rng.random((500, 2))), 1).astype(np.float32)
    for action in (policy.sample(obs, noise)[0], policy.act(obs, (), rng)[0], policy.act(obs, ())[0]):
        columns = action[:, AXES:].astype(int) + np.array([0, 3])
        assert np.take_along_axis(obs[:, 5:], columns, 1).all()


# --- hybrid SAC ---

OBS, NUMBERS, K, B, GAMMA = 4, 2, 3, 12, 0.9


def hybrid(dtype=DOUBLE, masked=False, **changes):
    config = SACConfig(hidden_sizes=(8, 7), n_step=1, initial_alpha=0.2, max_alpha=10.0, **changes)
    made = exact(
        create, "sac", OBS, NUMBERS + 1, config, 5, num_actions=K, num_continuous=NUMBERS, masked=masked, dtype=dtype
    )
    made.log_alpha[1] = math.log(0.7)
    torch.exp(made.log_alpha, out=made.alpha)
    return made


def batch_of(masked=False, seed=0, dtype=np.float64):
    layout, rng = RowLayout(OBS, NUMBERS + 1), np.random.default_rng(seed)
    rows = rng.normal(size=(B, layout.width))
    rows[:, layout.action.start : layout.action.stop - 1] = np.tanh(rng.normal(size=(B, NUMBERS)))
    rows[:, layout.action.stop - 1] = rng.integers(K, size=B)
    rows[:, layout.terminated] = np.arange(B) % 3 == 0
    if masked:
        for part in (layout.obs, layout.next_obs):
            rows[:, part.stop - K : part.stop] = rng.random((B, K)) < 0.5
            rows[:, part.stop - 1] = 1.0
    return layout.split(torch.from_numpy(rows.astype(dtype)), GAMMA)


def by_torch(networks, x, flat=None):
    """Outputs [S, B, K] of perceptrons whose parameters are ``flat``, through torch alone."""
    views = networks.over(networks.flat if flat is None else flat)
    for weight, bias in zip(views.weights, views.biases, strict=True):
        x = torch.relu(x @ weight + bias)
    return x @ views.head_weight.transpose(1, 2) + views.head_bias.transpose(1, 2)


def actor_of(sac, obs, noise, flat=None, masked=False):
    """Numbers [B, A], their log-density [B], and log-probabilities [B, K] of the choice."""
    out = by_torch(sac.actor.online, obs, flat)[0]
    mean, log_std, logits = out.split((NUMBERS, NUMBERS, K), 1)
    u = mean + log_std.clamp(-20.0, 2.0).exp() * noise
    density = torch.distributions.Normal(mean, log_std.clamp(-20.0, 2.0).exp()).log_prob(u)
    density = (density - 2.0 * (math.log(2.0) - u - torch.nn.functional.softplus(-2.0 * u))).sum(1)
    if masked:
        logits = logits.masked_fill(obs[:, -K:] == 0.0, -1e9)
    return torch.tanh(u), density, torch.log_softmax(logits, 1)


@pytest.mark.parametrize("masked", [False, True])
def test_hybrid_sac_follows_the_gradients_of_its_losses(masked):
    sac, batch = hybrid(masked=masked), batch_of(masked)
    sac.critics.target.flat.mul_(-0.8)
    noise = torch.randn(NUMBERS, 2 * B, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    sac.draw_noise = lambda out: out.copy_(noise[:, : out.shape[1]])
    alpha, of_choice = sac.alpha.tolist()
    numbers, density, log_pi = actor_of(sac, batch.next_obs, noise[:, :B].t(), masked=masked)
    least = by_torch(sac.critics.target, torch.cat((batch.next_obs, numbers), 1)).amin(0)
    soft = (log_pi.exp() * (least - of_choice * log_pi)).sum(1) - alpha * density
    goal = batch.reward + GAMMA * (1.0 - batch.terminated) * soft
    flat = sac.critics.online.flat.clone().requires_grad_()
    q = by_torch(sac.critics.online, batch.obs_action[:, :-1], flat)
    chosen = q.gather(2, batch.action[:, -1:].long().expand(2, -1, -1))[..., 0]
    (0.5 * (chosen - goal).square().mean(1).sum()).backward()

    critics_before = sac.critics.online.flat.clone()
    outputs = sac.actor_forward(batch)
    sac.critic_step(batch, outputs.next_action, outputs.next_log_prob)
    torch.testing.assert_close(sac.critics.gradient.flat, flat.grad)
    sac.critics.online.flat.copy_(critics_before)

    actor_flat = sac.actor.online.flat.clone().requires_grad_()
    numbers, density, log_pi = actor_of(sac, batch.obs, noise[:, B:].t(), actor_flat, masked)
    least = by_torch(sac.critics.online, torch.cat((batch.obs, numbers), 1)).amin(0)
    loss = (alpha * density + (log_pi.exp() * (of_choice * log_pi - least)).sum(1)).mean()
    loss.backward()
    sac.actor_step(sac.action_gradient(batch, outputs.action))
    torch.testing.assert_close(sac.actor.gradient.flat, actor_flat.grad)
    assert sac.critics.mean_action_value() == pytest.approx((log_pi.exp() * least).sum(1).mean().item())
    options = batch.obs[:, -K:].sum(1) if masked else torch.full((B,), float(K), dtype=DOUBLE)
    expected = (-density.mean() + NUMBERS, -(log_pi.exp() * log_pi).sum(1).mean() - 0.5 * options.log().mean())
    assert sac.alpha_gradient.tolist() == pytest.approx([part.item() for part in expected])


def test_hybrid_sac_reports_its_metrics_before_the_first_step_of_its_actor():
    sac = hybrid(torch.float32, policy_delay=3)
    sac.update(batch_of(dtype=np.float32))
    assert all(map(math.isfinite, sac.metrics().values()))


def test_hybrid_sac_continues_bit_by_bit_and_tells_of_both_parts():
    first, second = hybrid(torch.float32), hybrid(torch.float32)
    for seed in range(3):
        first.update(batch_of(seed=seed, dtype=np.float32))
    second.load_state_arrays(first.state_arrays())
    second.load_state_json(first.state_json())
    for made in (first, second):
        made.update(batch_of(seed=9, dtype=np.float32))
    assert all(np.array_equal(second.state_arrays()[name], array) for name, array in first.state_arrays().items())
    metrics = first.metrics()
    assert metrics["alpha"] == pytest.approx(0.7, rel=0.1)
    assert metrics["alpha_numbers"] == pytest.approx(0.2, rel=0.1)
    policy, rng = Policy.from_weights(first.policy_arrays(), first.policy_meta()), np.random.default_rng(0)
    obs = rng.standard_normal((50, OBS)).astype(np.float32)
    action = policy.act(obs, ())[0]
    out = by_torch(first.actor.online, torch.from_numpy(obs))[0].numpy()
    np.testing.assert_allclose(action[:, :NUMBERS], np.tanh(out[:, :NUMBERS]), atol=1e-5)
    assert (action[:, NUMBERS] == out[:, 2 * NUMBERS :].argmax(1)).all()
    assert np.abs(policy.act(obs, (), rng)[0][:, :NUMBERS]).max() <= 1.0


def test_masks_are_of_the_logits_alone():
    out, obs = torch.ones(4, 2), torch.tensor([[9.0, 1.0, 0.0], [9.0, 0.0, 1.0]])
    found = losses.mask_logits(out, obs, 2)
    assert found[:2].eq(1.0).all()
    assert (found[2:] < -1e8).tolist() == [[False, True], [True, False]]


# --- whole runs ---

COMMAND = ("--import", "parts_env", "--samplers", "1", "--envs-per-sampler", "8", "--no-visualizer", "--no-governor",
           "--set", "evaluation.episodes=2")  # fmt: skip
PPO = (*COMMAND, "--env", "tests/Parts-v0", "--algo", "ppo", "--sync-interval", "64", "--set", "ppo.hidden_sizes=[64]",
       "--set", "ppo.lr=0.003", "--set", "ppo.lr_schedule=constant", "--set", "ppo.gamma=0", "--set",
       "ppo.gae_lambda=0")  # fmt: skip


def test_a_masked_run_with_memory_repeats_bit_by_bit_goes_on_and_is_exported_and_played(tmp_path):
    arguments = (*PPO, "--set", "ppo.recurrent=lstm", "--set", "ppo.recurrent_size=8", "--env-arg", "masked=True")
    whole, code, document = train(tmp_path, *arguments, "--env-steps", "1024", name="whole", tiny=())
    assert code == 0, whole.stderr[-3000:]
    assert (document["mode"], document["env_steps"], document["env_errors"]) == ("hts", 1024, 0)
    run, code, _ = train(tmp_path, *arguments, "--env-steps", "512", "--inference-workers", "1", tiny=())
    assert code == 0, run.stderr[-3000:]
    again, code, other = train(tmp_path, "--resume", run.path, "--import", "parts_env", "--env-steps", "1024", tiny=())
    assert code == 0, again.stderr[-3000:]
    assert other["parameters_sha256"] == document["parameters_sha256"]
    folder = str(Path(parts_env.__file__).parent)
    done = run_command("export", run.path, "--format", "numpy", "--out", tmp_path / "policy.npz")
    assert done.returncode == 0, done.stderr
    assert "numbers of actions differ by at most" in done.stdout
    played = subprocess.run(
        [sys.executable, tmp_path / "policy_numpy_example.py"], capture_output=True, text=True, timeout=PATIENCE_S,
        check=False, env=os.environ | {"PYTHONPATH": folder},
    )  # fmt: skip
    assert played.stdout.count(": return ") == 3, played.stderr
    policy = spreeze.load_policy(run.path, import_module="parts_env")
    env = make_task("tests/Parts-v0", "parts_env", args=("masked=True",)).env
    obs, info = env.reset(seed=1)
    action, _ = policy.act(obs, (), action_mask=info["action_mask"])
    assert env.action_space.contains(action)
    env.step(action)  # raises where the mask forbids it
    flat = [np.concatenate((*info["action_mask"]["hand"][1], info["action_mask"]["tool"]))] * 3
    several, _ = policy.act(np.stack([obs] * 3), (), action_mask=flat)
    assert several["hand"][0].shape == (3, parts_env.AXES)
    assert several["tool"].tolist() == [action["tool"]] * 3
    doctor = run_command("doctor", "--env", "tests/Parts-v0", "--import", "parts_env", "--env-arg", "masked=True")
    assert "sac, crossq, td3, ddpg, dqn (one choice at a time only" in " ".join(doctor.stdout.split())
    assert "invalid actions are masked" in doctor.stdout


def test_hybrid_sac_runs_in_both_modes_of_replay_and_others_are_refused(tmp_path):
    hybrid = (*COMMAND, "--env", "tests/Hybrid-v0", "--set", "replay.learning_starts=200", "--set",
              "sac.hidden_sizes=[32]", "--env-steps", "1500")  # fmt: skip
    for mode in ("spreeze", "serial"):
        run, code, document = train(tmp_path, *hybrid, "--mode", mode, name=mode, tiny=())
        assert code == 0, run.stderr[-3000:]
        assert document["env_errors"] == 0
        assert document["updates"] > 0
    done = run_command("export", run.path, "--format", "onnx", "--out", tmp_path / "policy.onnx")
    assert done.returncode == 0, done.stderr
    refused, code, _ = train(tmp_path, *hybrid, "--algo", "dqn", name="refused", tiny=())
    assert code == 2
    assert (
        "--algo dqn: it supports no mixed continuous and discrete actions; tests/Hybrid-v0 has 3 discrete actions "
        "beside one " in (refused.stderr)
    )
