"""A memory learned from sequences in replay, against a plain loop of torch over episodes and steps."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from batches import exact

from spreeze.algorithms import create
from spreeze.algorithms.dqn import DQNConfig
from spreeze.algorithms.networks.recurrent_networks import n_step_sums
from spreeze.algorithms.sac import SACConfig
from spreeze.errors import ConfigError
from spreeze.inference.policy import Policy
from spreeze.types import Box, Choices, EnvSpec, FrameSpec, RowLayout, SequenceShape

KINDS = ("lstm", "gru")
B, T, LEAD, O, H, N, GAMMA = 4, 6, 3, 3, 5, 3, 0.9  # noqa: E741
SETTINGS = {"recurrent_size": H, "sequence_length": T, "burn_in": LEAD, "n_step": N, "hidden_sizes": (4,)}


def made(name, kind, *, dtype=torch.float64, **settings):
    config = {"dqn": DQNConfig, "sac": SACConfig}[name](recurrent=kind, **{**SETTINGS, **settings})
    count = 3 if name == "dqn" else None
    algorithm = exact(create, name, O, 2 if count is None else 1, config, 1, num_actions=count, dtype=dtype)
    noise = torch.Generator().manual_seed(0)
    networks = [algorithm.critics, algorithm.encoder, *([algorithm.actor] if algorithm.actor else [])]
    for flat in [each.online.flat for each in networks] + [each.target.flat for each in networks[:2]]:
        flat.add_(0.3 * torch.randn(flat.shape, generator=noise, dtype=flat.dtype))
    return algorithm, config


def batch_of(config, actions, seed=0, dtype=torch.float64):
    """Sequences whose episodes end, and are cut off, anywhere."""
    rng, states = np.random.default_rng(seed), config.sequence.state_dim
    layout = RowLayout(O, 2 if actions is None else 1, sequence=SequenceShape(T, LEAD, states))
    rows = torch.from_numpy(rng.standard_normal((B, layout.width))).to(dtype)
    batch = layout.split_sequences(rows, GAMMA)
    ends = rng.random((B, LEAD + T))
    terminated, dead = ends < 0.2, ends > 0.8
    begins = np.zeros((B, LEAD + T), bool)
    begins[:, 1:] = (terminated | dead)[:, :-1]
    begins[0] = terminated[0] = dead[0] = False  # one is the middle of an episode
    begins[0, 0] = begins[1, LEAD] = True
    for own, flags in ((batch.terminated, terminated), (batch.valid, ~dead), (batch.begins, begins)):
        own.copy_(torch.from_numpy(flags))
    if actions is not None:
        batch.action.copy_(torch.from_numpy(rng.integers(0, actions, batch.action.shape)))
    return batch._replace(weight=torch.from_numpy(rng.random(B)).to(dtype))


class PlainCell:
    """The cell, step by step."""

    def __init__(self, cell, flat=None):
        self.kind = cell.kind
        make = torch.nn.LSTMCell if cell.kind == "lstm" else torch.nn.GRUCell
        self.cell = make(O, H).to(cell.flat.dtype)
        for own, view in zip(self.cell.parameters(), cell.weights, strict=True):
            own.data.copy_(view)

    def __call__(self, batch):
        """Outputs [T + 1][B, H]; the gradient ends at the burn-in."""
        state, found = batch.state, []
        for step in range(LEAD + T + 1):
            if step < LEAD + T:
                state = state * (1.0 - batch.begins[:, step : step + 1])
            given = batch.obs[:, step]
            state = (
                torch.cat(self.cell(given, tuple(state.chunk(2, 1))), 1) if self.kind == "lstm"
                else self.cell(given, state)
            )  # fmt: skip
            if step < LEAD:
                state = state.detach()
            else:
                found.append(state[:, :H])
        return found


def leaves_of(parameters):
    return [view.detach().clone().requires_grad_() for view in parameters.views()]


def perceptron(views, x):
    """Outputs [S, M, K] of inputs [M, I]."""
    first, bias, head, head_bias = views
    return torch.einsum("skh,smh->smk", head, torch.relu(x @ first + bias)) + head_bias.transpose(1, 2)


def windows(batch):
    """For each slot that is a step: (sequence, slot, sum of rewards, slot of the bootstrap, its factor)."""
    for row in range(B):
        for slot in range(T):
            total, factor, at = 0.0, 1.0, slot
            while at - slot < N and at < T and batch.valid[row, LEAD + at]:
                total += GAMMA ** (at - slot) * batch.reward[row, LEAD + at].item()
                at += 1
                if batch.terminated[row, LEAD + at - 1]:
                    factor = 0.0
                    break
            if at > slot:
                yield row, slot, total, at, factor * GAMMA ** (at - slot)


def check(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_of_dqn_has_the_gradient_of_a_plain_loop(kind):
    algorithm, config = made("dqn", kind, max_grad_norm=1e9)
    batch, critics, cell = batch_of(config, 3), algorithm.critics, algorithm.encoder
    online, target = PlainCell(cell.online), PlainCell(cell.target)
    heads, target_heads = leaves_of(critics.online), critics.target.views()
    features = online(batch)
    with torch.no_grad():
        of_target = target(batch)
    loss, count = 0.0, sum(1 for _ in windows(batch))
    for row, slot, total, at, factor in windows(batch):
        q = perceptron(heads, features[slot][row : row + 1])[0, 0]
        with torch.no_grad():
            best = perceptron(heads, features[at][row : row + 1])[0, 0].argmax()
            ahead = perceptron(target_heads, of_target[at][row : row + 1])[0, 0, best]
        error = q[batch.action[row, LEAD + slot, 0].long()] - (total + factor * ahead)
        loss = loss + 0.5 * batch.weight[row] * error**2 / count
    loss.backward()
    algorithm.update(batch)
    for found, own in zip(critics.gradient.views(), heads, strict=True):
        check(found, own.grad)
    for found, own in zip(cell.gradient.weights, online.cell.parameters(), strict=True):
        check(found, own.grad)
    assert cell.gradient.flat.abs().min() > 0.0
    assert algorithm.row_errors().shape == (B,)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_of_sac_has_the_gradient_of_a_plain_loop(kind):
    algorithm, config = made("sac", kind)
    algorithm.draw_noise = lambda out: out.zero_()  # each action is the mean
    batch, critics, cell = batch_of(config, None), algorithm.critics, algorithm.encoder
    online, target = PlainCell(cell.online), PlainCell(cell.target)
    heads, target_heads, actor = leaves_of(critics.online), critics.target.views(), algorithm.actor.online.views()
    features, alpha = online(batch), config.initial_alpha
    with torch.no_grad():
        of_target = target(batch)
        actor = [view.clone() for view in actor]
    loss, count = 0.0, sum(1 for _ in windows(batch))
    for row, slot, total, at, factor in windows(batch):
        q = perceptron(heads, torch.cat((features[slot][row], batch.action[row, LEAD + slot]))[None])[:, 0, 0]
        with torch.no_grad():
            out = perceptron(actor, features[at][row][None])[0, 0]
            mean, log_std = out[:2], out[2:].clamp(-20.0, 2.0)
            action = mean.tanh()
            log_prob = (-log_std - 0.5 * math.log(2.0 * math.pi) - torch.log(1.0 - action**2)).sum()
            ahead = perceptron(target_heads, torch.cat((of_target[at][row], action))[None])[:, 0, 0].min()
        error = q - (total + factor * (ahead - alpha * log_prob))
        loss = loss + 0.5 * batch.weight[row] * error.square().sum() / count
    loss.backward()
    algorithm.update(batch)
    for found, own in zip(critics.gradient.views(), heads, strict=True):
        torch.testing.assert_close(found, own.grad, rtol=0, atol=1e-11)
    for found, own in zip(cell.gradient.weights, online.cell.parameters(), strict=True):
        torch.testing.assert_close(found, own.grad, rtol=0, atol=1e-11)


def test_sums_of_rewards_end_with_episodes_and_sequences():
    reward = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0]])
    terminated, valid = torch.zeros(1, 5), torch.ones(1, 5)
    terminated[0, 1], valid[0, 3] = 1.0, 0.0
    total, count, ended = n_step_sums(reward, terminated, valid, 0.5, 3)
    assert total.tolist() == [[2.0, 2.0, 4.0, 0.0, 16.0]]
    assert count.tolist() == [[2, 1, 1, 0, 1]]
    assert ended.tolist() == [[1.0, 1.0, 0.0, 0.0, 0.0]]
    assert n_step_sums(reward, terminated, valid, 0.5, 64)[0].tolist() == total.tolist()


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_what_is_no_step_and_what_precedes_an_episode_change_nothing(name):
    found = []
    for changed in (0.0, 7.0):
        algorithm, config = made(name, "gru", max_grad_norm=1e9) if name == "dqn" else made(name, "gru")
        batch = batch_of(config, 3 if name == "dqn" else None)
        dead = batch.valid == 0.0
        batch.reward[dead] += changed
        if name == "sac":
            batch.action[dead] += changed
        batch.reward[:, :LEAD] += changed
        batch.obs[1, :LEAD] += changed
        batch.state[0] += changed  # its first slot begins an episode
        algorithm.update(batch)
        found.append(algorithm.critics.online.flat.clone())
        found.append(algorithm.encoder.online.flat.clone())
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=0)
    torch.testing.assert_close(found[1], found[3], rtol=0, atol=0)


def test_the_priority_of_a_sequence_is_mostly_its_largest_error():
    algorithm, config = made("dqn", "gru")
    batch = batch_of(config, 3)
    algorithm.update(batch)
    errors = algorithm.critics.td_error.abs()[0].view(B, T) * batch.valid[:, LEAD:]
    expected = 0.9 * errors.amax(1) + 0.1 * errors.sum(1) / batch.valid[:, LEAD:].sum(1)
    np.testing.assert_allclose(algorithm.row_errors(), expected)


VARIANTS = [
    ("dqn", {}), ("dqn", {"dueling": True}), ("dqn", {"critics": "quantile"}), ("dqn", {"critics": "categorical"}),
    ("dqn", {"noisy": True}), ("sac", {}), ("sac", {"critics": "quantile"}), ("sac", {"actor_layer_norm": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=lambda value: str(value))
@pytest.mark.parametrize("kind", KINDS)
def test_the_samplers_policy_is_that_of_the_learner(name, settings, kind):
    algorithm, config = made(name, kind, dtype=torch.float32, **settings)
    actions = 3 if name == "dqn" else None
    for seed in range(3):
        algorithm.update(batch_of(config, actions, seed, torch.float32))
    assert algorithm.updates_skipped() == 0
    policy, batch = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta()), batch_of(config, actions)
    batch = type(batch)(*(part.float() if isinstance(part, torch.Tensor) else part for part in batch))
    batch.begins[:, 1:] = 0.0
    batch.begins[:, 0] = 1.0
    state, found = (), []
    for step in range(LEAD + T):
        action, state = policy.act(batch.obs[:, step].numpy(), state)
        found.append(action)
    assert state[0].shape == (B, config.sequence.state_dim)
    plain = PlainCell(algorithm.encoder.online)
    with torch.inference_mode():
        for step, features in enumerate(plain(batch)[:-1]):
            if name == "dqn":
                if algorithm.critics.noisy:
                    algorithm.critics.draw(lambda out: out.zero_())
                expected = algorithm.critics.values(features)[0].argmax(0).unsqueeze(1).float()
            else:
                out = Policy.from_weights(
                    {name: array for name, array in algorithm.policy_arrays().items() if not name.startswith("cell")},
                    {key: value for key, value in algorithm.policy_meta().items() if "recurrent" not in key}
                    | {"obs_dim": H},
                ).act(features.numpy(), ())[0]
                expected = torch.from_numpy(out)
            np.testing.assert_allclose(found[LEAD + step], expected, atol=1e-5)


def test_a_state_that_was_stored_and_loaded_goes_on_with_the_same_bits():
    first, config = made("sac", "lstm", dtype=torch.float32)
    batches = [batch_of(config, None, seed, torch.float32) for seed in range(4)]
    for batch in batches[:2]:
        first.update(batch)
    second, _ = made("sac", "lstm", dtype=torch.float32)
    assert second.load_state_arrays(first.state_arrays())
    second.load_state_json(first.state_json())
    for algorithm in (first, second):
        for batch in batches[2:]:
            algorithm.update(batch)
    for name, array in first.state_arrays().items():
        np.testing.assert_array_equal(array, second.state_arrays()[name], name)


def test_what_a_memory_cannot_be_combined_with_is_said():
    spec = EnvSpec(env_id="x", import_module=None, obs_dim=4, action=Choices((2,)), max_episode_steps=None,
                   reward_threshold=None)  # fmt: skip
    frames = FrameSpec(channels=1, height=36, width=36, stack=2, sign_rewards=False, options={})
    config = DQNConfig(recurrent="gru")
    config.check_task(spec)
    for changes, text in (({"frames": frames}, "with images"), ({"action_mask": True}, "with action masks")):
        with pytest.raises(ConfigError, match=f"recurrent = gru: .*{text}"):
            config.check_task(dataclasses.replace(spec, **changes))
    with pytest.raises(ConfigError, match="recurrent = lstm: it cannot be combined with network = own"):
        SACConfig(recurrent="lstm", network="own").check_task(dataclasses.replace(spec, action=Box((-1.0,), (1.0,))))
    assert config.row_layout(spec).sequence == SequenceShape(32, 16, 64)
    assert DQNConfig().row_layout(spec) == RowLayout(4, 1, 3)
