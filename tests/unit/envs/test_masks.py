"""Action masks: no forbidden action is ever taken, and learning counts the allowed ones alone."""

import contextlib
import dataclasses
import json
import math

import gymnasium
import masked_env
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from harness import run_command, train
from rollouts import learner, rollout, task

from spreeze.algorithms import create, losses
from spreeze.algorithms.dqn import DQNConfig
from spreeze.algorithms.on_policy import Samples
from spreeze.algorithms.sac import SACConfig
from spreeze.cli import evaluate, play
from spreeze.envs.action_spaces import uniform_actions
from spreeze.envs.probe import check_up, measure
from spreeze.envs.task import make_task, open_task
from spreeze.envs.vector_task import VectorTask
from spreeze.errors import BadTransition
from spreeze.inference.normalizer import Normalizer
from spreeze.inference.policy import Policy
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingSpec, ShardWriter
from spreeze.transport.rollouts import InferenceMailbox, Rollouts, RolloutSpec
from spreeze.transport.weights import VersionedParameters
from spreeze.types import Choices, RowLayout
from spreeze.workers.collectors.rollout_collector import RolloutCollector, RolloutPolicy
from spreeze.workers.collectors.transition_collector import TransitionCollector, VectorCollector
from spreeze.workers.episodes.lockstep import run_episodes
from spreeze.workers.gpu_replay import DeviceStream
from spreeze.workers.replay_batches import DeviceNormalizer
from spreeze.workers.samplers import Inference, MailboxClient

ID, MODULE, K = "tests/Masked-v0", "masked_env", masked_env.NUM_ACTIONS
MASKED = ("--env", ID, "--import", MODULE, "--samplers", "1", "--envs-per-sampler", "4", "--no-governor",
          "--set", "evaluation.episodes=2")  # fmt: skip
REPLAY = (*MASKED, "--batch-size", "16", "--set", "replay.learning_starts=100", "--updates", "150",
          "--set", "env.normalize_obs=true")  # fmt: skip


def made(*args):
    return make_task(ID, MODULE, args=args)


SPEC = made().spec


@pytest.fixture
def opened():
    with contextlib.ExitStack() as stack:
        yield stack


def ring_of(layout, opened):
    ring = ReplayRing.create(RingSpec(layout, 1, 1024))
    opened.callback(ring.close)
    return ring


def forbidden(obs, action):
    """Rows [N, O] whose action [N, 1] their own mask forbids."""
    return np.flatnonzero(obs[np.arange(len(obs)), obs.shape[1] - K + action[:, 0].astype(int)] != 1.0)


def test_a_task_with_masks_observes_them_behind_its_observation():
    assert (SPEC.action_mask, SPEC.mask_dim, SPEC.obs_dim, SPEC.action) == (True, K, 10 + K, Choices((K,), (2,)))
    assert SPEC.obs_layout == ("0:10 observation (Box)", "10:15 info['action_mask']")
    one = open_task(SPEC)
    obs = one.reset(seed=3)
    np.testing.assert_array_equal(obs[10:], one.env.unwrapped.mask)
    assert obs[:10].argmax() == one.env.unwrapped.state
    taxi = make_task(max(name for name in gymnasium.registry if name.startswith("Taxi-v")))
    assert (taxi.spec.action_mask, taxi.spec.obs_dim) == (True, 500 + 6)
    cart = make_task("CartPole-v1").spec
    assert (cart.action_mask, cart.mask_dim, cart.obs_dim, cart.obs_layout) == (False, 0, 4, ())


def test_after_a_terminated_episode_the_mask_does_not_matter_and_allows_all():
    one = made()
    seed = next(seed for seed in range(20) if one.reset(seed) is not None and not one.env.unwrapped.cut)
    obs, terminated = one.reset(seed), False
    while not terminated:
        obs, _, terminated, _ = one.step(np.float32(obs[10:].argmax()).reshape(1))
    assert obs[10:].tolist() == [1.0] * K


@pytest.mark.parametrize(
    ("fault", "found"),
    [("missing", "none, though the first reset had one"), ("long", r"shape \(6,\); expected one"),
     ("empty", "all False, but the episode continues"), ("number", "expected True or 1"), ("text", r"no \(str\)")],
)  # fmt: skip
def test_a_mask_that_is_missing_or_wrong_is_an_error_by_name_counted_like_other_bad_values(fault, found, opened):
    one = made(f"fault={fault}")
    obs = one.reset(seed=1)
    for _ in range(2):
        obs = one.step(np.float32(obs[10:].argmax()).reshape(1))[0]
    with pytest.raises(BadTransition, match=rf"Masked-v0 returned info\['action_mask'\] = .*{found}.*\(at step 3 of"):
        one.step(np.float32(obs[10:].argmax()).reshape(1))
    with pytest.raises(BadTransition, match=r"\(at reset\)"):
        open_task(dataclasses.replace(SPEC, args=(f"fault={fault}", "at=0"))).reset()
    ring = ring_of(RowLayout.of(SPEC), opened)
    told = []
    envs = TransitionCollector(
        lambda: made(f"fault={fault}"),
        1,
        SPEC,
        ShardWriter(ring, 0),
        n_step=1,
        gamma=0.9,
        seeds=[0],
        on_error=lambda where, error, count, **effect: told.append(str(error)),
    )
    rng = np.random.default_rng(0)
    for _ in range(8):
        envs.step(uniform_actions(SPEC, 1, rng, envs.obs), 0)
    assert (envs.counts.transitions_rejected, envs.counts.env_errors, envs.counts.env_steps) == (2, 0, 6)
    assert "info['action_mask']" in told[0]


def test_probe_and_doctor_take_allowed_actions_alone():
    one = made()
    one.reset(seed=0)
    assert measure(one, 200, 0, 0.0).step_us_median > 0.0  # a forbidden one would raise
    assert check_up({"env_id": ID, "import_module": MODULE})["notes"] == ()


# --- policies in NumPy ---


def policy_of(kind, out, **meta):
    """A policy whose outputs are ``out`` [K] whatever it observes."""
    arrays = {"head_w": np.zeros((2 + len(out), len(out)), np.float32), "head_b": np.array(out, np.float32)}
    return Policy.from_weights(arrays, {"policy": kind, "num_actions": len(out), "obs_dim": 2 + len(out),
                                        "hidden_sizes": [], "action_mask": True, **meta})  # fmt: skip


def masked_obs(*masks):
    return np.array([[0.3, -0.2, *mask] for mask in masks], np.float32)


EPSILON = {"epsilon_start": 1.0, "epsilon_end": 1.0, "epsilon_env_steps": 1}


def test_epsilon_greedy_takes_the_best_allowed_action_or_any_allowed_one():
    policy = policy_of("q_values", [5.0, 1.0, 2.0, 4.0], **EPSILON)
    obs = masked_obs([0, 1, 1, 0], [1, 0, 0, 0])
    assert policy.act(obs, ())[0].tolist() == [[2.0], [0.0]]
    taken = policy.act(np.repeat(obs[:1], 9000, 0), (), np.random.default_rng(0))[0][:, 0].astype(int)
    counts = np.bincount(taken, minlength=4)
    assert (counts[[0, 3]] == 0).all()
    assert abs(counts[1] - 4500) < 200


def test_a_categorical_policy_is_the_softmax_of_the_allowed_logits():
    policy = policy_of("categorical", np.log([0.5, 0.1, 0.3, 0.1]))
    mask = [0, 1, 1, 0]
    noise = np.array([[0.0], [0.2], [0.2500001], [0.9], [np.nextafter(np.float32(1), np.float32(0))]], np.float32)
    action, log_prob, _ = policy.sample(masked_obs(*[mask] * 5), noise)
    assert action[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]  # (1/4, 3/4) of the two that are allowed
    np.testing.assert_allclose(log_prob, np.log([0.25, 0.25, 0.75, 0.75, 0.75]), rtol=1e-6)
    sampled = policy.act(masked_obs(*[mask] * 8000), (), np.random.default_rng(1))[0][:, 0].astype(int)
    np.testing.assert_allclose(np.bincount(sampled, minlength=4) / 8000, [0, 0.25, 0.75, 0], atol=0.02)
    assert policy.act(masked_obs(mask, [1, 0, 0, 0]), ())[0].tolist() == [[2.0], [0.0]]


def test_rounding_leads_to_no_forbidden_last_action():
    policy = policy_of("categorical", [0.0, 1.0, 7.0])
    action, log_prob, _ = policy.sample(masked_obs([1, 1, 0], [1, 0, 0]), np.ones((2, 1), np.float32))
    assert action[:, 0].tolist() == [1.0, 0.0]
    assert np.isfinite(log_prob).all()


def test_the_normalizer_leaves_the_mask_as_it_is():
    normalizer, rng = Normalizer(3, 2), np.random.default_rng(0)
    rows = np.concatenate((rng.normal(5.0, 2.0, (100, 1)), rng.integers(0, 2, (100, 2))), 1).astype(np.float32)
    before = rows.copy()
    normalizer.update(rows)
    normalizer.apply(rows)
    np.testing.assert_array_equal(rows[:, 1:], before[:, 1:])
    assert abs(rows[:, 0].mean()) < 1e-5
    # On a device, as rows of GPU replay are scaled.
    layout, cpu = RowLayout(3, 1), torch.device("cpu")
    whole = torch.zeros(100, layout.width)
    whole[:, layout.obs] = whole[:, layout.next_obs] = torch.from_numpy(before)
    units = DeviceNormalizer(layout, cpu, DeviceStream(cpu))
    units.renew(normalizer, 1.0, 10.0)
    units.apply(whole)
    np.testing.assert_array_equal(whole[:, layout.next_obs], rows)


# --- losses ---


def test_a_forbidden_action_has_probability_0_and_changes_nothing_else_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.2], [0.1, 0.2], [0.4, 0.6]], dtype=torch.float64))
    obs = torch.tensor([[9.0, 0, 1, 1], [9.0, 1, 1, 1]], dtype=torch.float64)
    prob = losses.mask_logits(logits, obs).log_softmax(0).exp()
    assert prob[0, 0].item() == 0.0
    torch.testing.assert_close(prob, torch.tensor([[0.0, 0.2], [0.2, 0.2], [0.8, 0.6]], dtype=torch.float64))


def batch_of(masks, rewards, terminated):
    """Rows whose state, seen or next, is its mask behind one zero; action 0."""
    layout, count = RowLayout(1 + len(masks[0]), 1), len(masks)
    rows = torch.zeros(count, layout.width)
    rows[:, layout.obs] = rows[:, layout.next_obs] = torch.tensor([[0.0, *mask] for mask in masks])
    rows[:, layout.reward], rows[:, layout.terminated] = torch.tensor(rewards), torch.tensor(terminated)
    return layout.split(rows, 0.5)


def constant(networks, *heads):
    """Networks whose outputs are ``heads`` whatever they see."""
    networks.flat.zero_()
    for index, values in enumerate(heads):
        networks.head_bias[index, :, 0] = torch.tensor(values)


@pytest.mark.parametrize("double", [False, True])
def test_dqn_s_target_is_the_best_allowed_value_by_hand(double):
    dqn = create("dqn", 4, 1, DQNConfig(hidden_sizes=(4,), double=double), 0, num_actions=3, masked=True)
    constant(dqn.critics.online, [0.0, 6.0, 8.0])
    constant(dqn.critics.target, [9.0, 2.0, 4.0])
    dqn.update(batch_of([[0, 1, 0], [0, 1, 1], [1, 1, 1]], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]))
    # 1 + 0.5 * 2 with action 1 alone, 1 + 0.5 * 4 without action 0, 1 at the end of the task.
    assert dqn.critics.td_target.tolist() == [2.0, 3.0, 1.0]


def soft(masks, terminated):
    config = SACConfig(
        hidden_sizes=(4,), initial_alpha=0.5, target_entropy_ratio=0.5, alpha_lr=1e-9, actor_lr=1e-9, critic_lr=1e-9
    )
    sac, batch = create("sac", 4, 1, config, 0, num_actions=3, masked=True), batch_of(masks, [1.0] * 3, terminated)
    constant(sac.actor.online, [0.0, math.log(3.0), 5.0])
    constant(sac.critics.online, [1.0, 3.0, 50.0], [2.0, 2.0, 50.0])
    constant(sac.critics.target, [4.0, 8.0, -90.0], [6.0, 2.0, 90.0])
    sac.update(batch)
    return sac


def test_soft_targets_entropy_and_temperature_count_the_allowed_actions_by_hand():
    sac = soft([[1, 1, 0], [0, 1, 0], [1, 0, 0]], [0.0, 0.0, 1.0])
    # pi = (1/4, 3/4) of the first two; E min Q' = (4 + 3 * 2) / 4 = 2.5; entropy h; then one action without entropy.
    h = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    np.testing.assert_allclose(sac.critics.td_target, [1 + 0.5 * (2.5 + 0.5 * h), 1 + 0.5 * 2.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(sac._buffers.negative_entropy, [-h, 0.0, 0.0], atol=1e-7)
    np.testing.assert_allclose(sac.critics.action_value, [(1 + 3 * 2) / 4, 2.0, 1.0], rtol=1e-6)
    # The greatest entropies are log 2, 0 and 0: half of their mean is asked for.
    assert sac.alpha_gradient.item() == pytest.approx((h - 0.5 * math.log(2.0)) / 3)
    # d/dlogit of E(alpha log pi - Q) with f = (alpha log pi - Q): pi (f - E f), nothing for the forbidden one.
    f = 0.5 * np.log([0.25, 0.75]) - [1.0, 2.0]
    mean = 0.25 * f[0] + 0.75 * f[1]
    grad = sac._buffers.current.grad_out[0].numpy()
    np.testing.assert_allclose(grad[:, 0] * 3, [0.25 * (f[0] - mean), 0.75 * (f[1] - mean), 0.0], atol=1e-6)
    np.testing.assert_array_equal(grad[:, 1:], 0.0)


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_the_gradient_of_a_masked_policy_equals_autograd(name):
    spec = dataclasses.replace(task(obs_dim=3 + 4, actions=4, discrete=True), action_mask=True)
    algorithm = learner(name, spec, dtype=torch.float64, hidden_sizes=(5, 4), entropy_coef=0.3)
    rng, rows = np.random.default_rng(0), 16
    algorithm.net.flat.add_(torch.from_numpy(0.3 * rng.standard_normal(len(algorithm.net.flat))))
    mask = rng.random((rows, 4)) < 0.5
    action = rng.integers(0, 4, rows)
    mask[np.arange(rows), action] = True
    obs = torch.from_numpy(np.concatenate((rng.standard_normal((rows, 3)), mask), 1))
    columns = [torch.from_numpy(rng.standard_normal(rows)) for _ in range(3)]
    samples = Samples(obs, torch.from_numpy(action[:, None].astype(float)), columns[0] * 0.1 - 1.0, *columns[1:],
                      columns[0])  # fmt: skip
    with torch.no_grad():
        algorithm._gradient(samples)
    flat = algorithm.net.flat.clone().requires_grad_()
    net = type(algorithm.net.networks)(flat, algorithm.net.networks.sizes, 2)
    x, outs = obs, []
    for index in range(2):
        x = obs
        for weight, bias in zip(net.weights, net.biases, strict=True):
            x = torch.tanh(x @ weight[index] + bias[index])
        outs.append(x @ net.head_weight[index].t() + net.head_bias[index, :, 0])
    policy = torch.distributions.Categorical(logits=outs[0].masked_fill(~torch.from_numpy(mask), -1e8))
    log_prob = policy.log_prob(torch.from_numpy(action))
    ratio, config = (log_prob - samples.log_prob).exp(), algorithm._config
    objective = (
        log_prob * samples.advantage
        if name == "a2c"
        else torch.minimum(ratio * samples.advantage, ratio.clamp(1 - config.clip, 1 + config.clip) * samples.advantage)
    )
    error = 0.5 * (outs[1][:, 0] - samples.target).square()
    loss = -objective.mean() + config.value_coef * error.mean() - 0.3 * policy.entropy().mean()
    loss.backward()
    torch.testing.assert_close(algorithm.net.gradient, flat.grad, rtol=1e-9, atol=1e-12)
    assert algorithm.metrics()["entropy"] == pytest.approx(policy.entropy().mean().item())


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_collected_log_probabilities_are_those_that_learning_computes(name):
    spec = dataclasses.replace(task(obs_dim=3 + 4, actions=4, discrete=True), action_mask=True)
    algorithm, rng = learner(name, spec, hidden_sizes=(5, 4), normalize_obs=True), np.random.default_rng(2)
    batch = rollout(algorithm, spec, rng)
    masks = (rng.random((*batch.obs.shape[:2], 4)) < 0.4).astype(np.float32)
    masks[..., 1] = 1.0
    batch.obs[..., 3:] = masks
    policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    flat = batch.obs.reshape(-1, 7)
    action, log_prob, _ = policy.sample(flat, rng.random((len(flat), 1)).astype(np.float32))
    assert not np.flatnonzero(flat[np.arange(len(flat)), 3 + action[:, 0].astype(int)] == 0.0).size
    batch = batch._replace(action=action.reshape(*batch.action.shape), log_prob=log_prob.reshape(batch.log_prob.shape))
    with torch.no_grad():
        samples, _ = algorithm._samples(batch)
        out, _ = algorithm._forward(samples.obs)
        found = algorithm._kind.log_prob(out, samples.action)
    np.testing.assert_allclose(found, samples.log_prob, atol=1e-5)


# --- collecting ---


def actors():
    """name -> off-policy algorithm for the task."""
    rows = {"dqn": DQNConfig(hidden_sizes=(8,), epsilon_env_steps=200), "sac": SACConfig(hidden_sizes=(8,))}
    return {name: create(name, SPEC.obs_dim, 1, config, 0, num_actions=K, masked=True) for name, config in rows.items()}


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_replay_has_the_masks_of_both_states_and_no_forbidden_action(name, n_step, opened):
    algorithm, layout = actors()[name], RowLayout.of(SPEC, n_step)
    ring, rng = ring_of(layout, opened), np.random.default_rng(0)
    envs = TransitionCollector(made, 3, SPEC, ShardWriter(ring, 0), n_step=n_step, gamma=0.9, seeds=[0, 1, 2])
    reader, rows = ReplayReader(ring), np.empty((32, layout.width), np.float32)
    policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    for step in range(120):
        envs.step(uniform_actions(SPEC, 3, rng, envs.obs) if step < 20 else policy.act(envs.obs, (), rng)[0], step)
        if step >= 20:
            reader.sample(rng, rows)
            algorithm.update(layout.split(torch.from_numpy(rows), 0.9))
            policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    assert (envs.counts.env_errors, envs.counts.transitions_rejected, envs.counts.env_steps) == (0, 0, 360)
    stored = ring.rows[: ring.total_committed()]
    assert not forbidden(stored[:, layout.obs], stored[:, layout.action]).size
    assert (stored[:, layout.next_obs][:, 10:].sum(1) >= 1).all()
    assert algorithm.updates_skipped() == 0
    assert all(np.isfinite(value) for value in algorithm.metrics().values())
    episodes = run_episodes(made, policy.act, range(4))
    assert [episode.length in (7, 12) for episode in episodes] == [True] * 4


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=str)
def test_vector_engines_give_the_masks_of_the_last_and_of_the_first_state(mode, opened):
    layout, rng = RowLayout.of(SPEC), np.random.default_rng(0)
    ring = ring_of(layout, opened)
    envs = VectorCollector(
        made, 2, SPEC, ShardWriter(ring, 0), n_step=1, gamma=0.9, seeds=[0, 1],
        make_vector=lambda count, seed: VectorTask(masked_env.vector(count, mode=mode.value), SPEC),
    )  # fmt: skip
    for _ in range(100):
        envs.step(uniform_actions(SPEC, 2, rng, envs.obs), 0)
    assert (envs.counts.env_errors, envs.counts.transitions_rejected) == (0, 0)
    stored = ring.rows[: ring.total_committed()].copy()
    assert not forbidden(stored[:, layout.obs], stored[:, layout.action]).size
    ended = stored[:, layout.terminated] == 1.0
    assert 0 < ended.sum() < len(stored)
    assert (stored[ended][:, layout.next_obs][:, 10:] == 1.0).all()
    assert (stored[~ended][:, layout.next_obs][:, 10:].sum(1) <= 3).all()


def test_one_lane_of_an_engine_is_a_masked_task_too():
    one = make_task(f"vector:{ID}", MODULE)
    assert (one.spec.action_mask, one.spec.obs_dim) == (True, 10 + K)
    rng, obs = np.random.default_rng(0), one.reset(seed=0)
    for _ in range(30):
        obs, _, terminated, truncated = one.step(uniform_actions(one.spec, 1, rng, obs[None])[0])
        obs = one.reset() if terminated or truncated else obs
    one.close()


@pytest.mark.parametrize("asks", [False, True], ids=["own policy", "inference worker"])
@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_rollouts_hold_no_forbidden_action(name, asks, opened):
    spec = RolloutSpec.of(SPEC, 16, 3)
    algorithm = learner(name, SPEC, hidden_sizes=(8,), **({"minibatch_size": 16} if name == "ppo" else {}))
    rollouts, mailbox = Rollouts.create(spec), InferenceMailbox.create(spec)
    policies = VersionedParameters.create()
    envs = RolloutCollector(made, SPEC, rollouts, first=0, num_envs=3, seed=1)
    for part in (policies, rollouts, mailbox, envs):
        opened.callback(part.close)
    client, answers = MailboxClient(envs, mailbox, 0, 3), None
    for current in range(3):
        policies.publish(algorithm.policy_arrays(), algorithm.policy_meta(), 0, current)
        answers = RolloutPolicy(rollouts, policies) if answers is None else answers
        inference = Inference(answers, mailbox, slice(0, None, 1))
        while not rollouts.full:
            if asks:
                client.request()
                inference.respond()
                client.step()
            else:
                envs.advance(answers)
        batch = rollouts.batch(current)
        assert not forbidden(batch.obs.reshape(-1, SPEC.obs_dim), batch.action.reshape(-1, 1)).size
        algorithm.learn(batch, None)
        rollouts.mark()
        rollouts.swap()
    assert (envs.counts.env_errors, envs.counts.transitions_rejected) == (0, 0)
    assert algorithm.updates_skipped() == 0


# --- whole runs ---


def by_command(name, *args):
    """Output of a command in a process of its own."""
    done = run_command(name, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def in_process(capfd):
    """The same in this process: the import of what it needs takes longer than the command."""

    def call(name, *args):
        capfd.readouterr()
        code = {"evaluate": evaluate, "play": play}[name].main([*map(str, args)])
        said = capfd.readouterr()
        assert code == 0, said.err
        return said.out

    return call


def whole_run(tmp_path, monkeypatch, call, *args):
    """A run to its end in which no forbidden action was taken, evaluated and shown; ``call`` calls a command."""
    noted = tmp_path / "forbidden"
    # The harness takes our own settings out of the environment of runs, so this has another name.
    monkeypatch.setenv("FORBIDDEN_ACTIONS", str(noted))
    run, code, document = train(tmp_path, *args, tiny=())
    assert code == 0, run.stderr[-3000:]
    assert [document[name] for name in ("env_errors", "transitions_rejected", "restarts", "updates_skipped")
            if name in document] in ([0, 0, 0], [0, 0, 0, 0])  # fmt: skip
    assert document["eval_return_mean"] >= 0.0
    scored = call("evaluate", run.path, "--episodes", "3", "--json", "--import", MODULE)
    assert json.loads(scored)["length_mean"] <= 12
    if "--no-visualizer" in args:
        assert not noted.exists(), noted.read_text()
        return
    call("play", run.path, "--clip", tmp_path / "clip.mp4", "--import", MODULE)
    assert not noted.exists(), noted.read_text()


@pytest.mark.warm
def test_a_run_of_every_worker_takes_no_forbidden_action(tmp_path, monkeypatch):
    whole_run(tmp_path, monkeypatch, by_command, *REPLAY, "--algo", "dqn", "--set", "dqn.hidden_sizes=[8]",
              "--set", "dqn.n_step=3")  # fmt: skip


_RUNS = {
    "sac": (*REPLAY, "--algo", "sac", "--set", "sac.hidden_sizes=[8]"),
    "sac serial": (*REPLAY, "--algo", "sac", "--set", "sac.hidden_sizes=[8]", "--mode", "serial"),
    "dqn serial": (*REPLAY, "--algo", "dqn", "--set", "dqn.hidden_sizes=[8]", "--mode", "serial"),
    "dqn engine": (*REPLAY, "--algo", "dqn", "--set", "dqn.hidden_sizes=[8]", "--env", f"vector:{ID}",
                   "--no-visualizer"),
    **{f"{name} {mode}": (*MASKED, "--algo", name, "--mode", mode, "--sync-interval", "16", "--env-steps", "2000")
       for name in ("ppo", "a2c") for mode in ("hts", "serial")},
    **{name: (*MASKED, "--algo", name, "--env-steps", "2000") for name in ("impact", "appo", "impala")},
    "ppo hts inference": (*MASKED, "--algo", "ppo", "--mode", "hts", "--inference-workers", "1",
                          "--sync-interval", "16", "--env-steps", "2000"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(_RUNS))
def test_no_mode_and_no_algorithm_takes_a_forbidden_action(name, tmp_path, monkeypatch, in_process):
    whole_run(tmp_path, monkeypatch, in_process, *_RUNS[name])
