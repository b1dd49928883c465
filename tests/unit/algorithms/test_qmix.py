"""QMIX and VDN: values and gradients by hand and in NumPy, the mixer's monotony, the two-step game, the policy."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from two_step_game import PAYOFF

from spreeze.algorithms import create
from spreeze.algorithms.qmix import QMIXConfig
from spreeze.errors import ConfigError
from spreeze.inference.normalizer import Normalizer
from spreeze.inference.policy import Policy
from spreeze.types import TeamSpec, TransitionBatch

TEAM = TeamSpec(actions=(2, 3), obs_dim=2, state_dim=3)
OBS, B = 7, 5


def made(team=TEAM, seed=0, double_precision=True, **changes):
    """QMIX over a team, in float64 where numbers are compared."""
    config = QMIXConfig(hidden_sizes=(6,), mixing_units=4, **changes)
    torch.set_default_dtype(torch.float64 if double_precision else torch.float32)
    try:
        obs_dim = team.size * team.obs_dim + team.state_dim
        return create("qmix", obs_dim, team.size, config, seed, num_actions=max(team.actions), team=team)
    finally:
        torch.set_default_dtype(torch.float32)


def batch_of(seed=0, rows=B):
    rng = np.random.default_rng(seed)
    action = np.stack([rng.integers(count, size=rows) for count in TEAM.actions], 1)
    ends = (rng.random(rows) < 0.4).astype(float)
    return TransitionBatch(*(torch.tensor(array, dtype=torch.float64) for array in (
        rng.normal(size=(rows, OBS)), action, np.zeros((rows, 0)), rng.normal(size=rows), ends, np.full(rows, 0.9),
        rng.normal(size=(rows, OBS)))))  # fmt: skip


def elu(x):
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def layers_of(networks, flat=None):
    flat = networks.flat if flat is None else flat
    return [(weight.numpy(), bias.numpy()) for weight, bias in networks._layers(flat)]


def team_value_in_numpy(networks, obs, action=None, flat=None, mixer="qmix"):
    """Q_tot of given actions, or of each agent's best ones; row by row and agent by agent."""
    (w0, b0), (w1, b1), *mixing = layers_of(networks, flat)
    found = []
    for row, own in enumerate(obs):
        values = []
        for agent, count in enumerate(TEAM.actions):
            x = np.concatenate((own[2 * agent : 2 * agent + 2], np.eye(2)[agent]))
            q = (np.maximum(x @ w0 + b0, 0) @ w1 + b1)[:count]
            values.append(q.max() if action is None else q[int(action[row, agent])])
        if mixer == "vdn":
            found.append(sum(values))
            continue
        state = own[4:] / np.sqrt(networks._state_square.item())
        state = state * min(1.0, 2.0 / np.sqrt(np.mean(state**2)))
        first, first_bias, second, hidden = (state @ w + b for w, b in mixing[:4])
        units = elu(np.array(values) @ np.abs(first).reshape(2, -1) + first_bias)
        found.append(units @ np.abs(second) + (np.maximum(hidden, 0) @ mixing[4][0] + mixing[4][1]).item())
    return np.array(found)


@pytest.mark.parametrize("mixer", ["qmix", "vdn"])
@pytest.mark.parametrize("double", [True, False])
def test_an_update_follows_the_numeric_gradient_of_the_squared_error_to_the_target(mixer, double):
    qmix, batch = made(mixer=mixer, double=double, tau=0.5), batch_of()
    critics = qmix.critics
    critics.target.flat.copy_(-0.8 * critics.online.flat)  # online and target choose different actions
    next_obs, obs, action = batch.next_obs.numpy(), batch.obs.numpy(), batch.action.numpy()
    chooser = critics.online if double else critics.target
    best = chooser.agent_values(batch.next_obs).numpy().argmax(2)
    critics.count_states(batch.obs)
    goal = batch.reward.numpy() + 0.9 * (1 - batch.terminated.numpy()) * team_value_in_numpy(
        critics.target, next_obs, best, mixer=mixer)  # fmt: skip
    if not double:
        np.testing.assert_allclose(
            team_value_in_numpy(critics.target, next_obs, mixer=mixer),
            team_value_in_numpy(critics.target, next_obs, best, mixer=mixer),
        )
    before = critics.online.flat.clone()

    def loss(flat):
        return np.mean((team_value_in_numpy(critics.online, obs, action, flat, mixer) - goal) ** 2) / 2

    expected = np.zeros(len(before))
    for index in range(len(before)):
        shift = torch.zeros_like(before)
        shift[index] = 1e-6
        expected[index] = (loss(before + shift) - loss(before - shift)) / 2e-6
    expected_loss = 2 * loss(before)
    qmix.update(batch)
    np.testing.assert_allclose(critics.gradient.flat.numpy(), expected, rtol=1e-4, atol=1e-8)
    assert np.count_nonzero(expected) > len(expected) / 2
    assert qmix.metrics()["critic_loss"] == pytest.approx(expected_loss)
    torch.testing.assert_close(critics.target.flat, 0.5 * (-0.8 * before + critics.online.flat))


def test_the_mixer_by_hand():
    """n = 2, E = 1, s = 2, scaled to 1: W1 = |(-4, 2) s| = (4, 2), b1 = 2 s, W2 = |-2 s| = 2, V = 6 relu(s) + 1 = 7."""
    team = TeamSpec(actions=(2, 2), obs_dim=1, state_dim=1)
    qmix = create("qmix", 3, 2, QMIXConfig(hidden_sizes=(1,), mixing_units=1), 0, num_actions=2, team=team)
    for (weight, bias), values in zip(
        qmix.critics.online._layers(qmix.critics.online.flat)[2:], ([-4.0, 2.0], 2.0, -2.0, 2.0, 3.0), strict=True
    ):
        weight.copy_(torch.tensor(values).view_as(weight))
        bias.zero_()
    bias.fill_(1.0)
    obs = torch.tensor([[0.0, 0.0, 2.0]])
    qmix.critics.count_states(obs)
    mixed = qmix.critics.online.mixed
    assert mixed(torch.tensor([[1.0, 0.5]]), obs).item() == pytest.approx(2 * (4 + 1 + 2) + 7)
    # elu(-4 + 2) = exp(-2) - 1
    assert mixed(torch.tensor([[-1.0, 0.0]]), obs).item() == pytest.approx(2 * (np.exp(-2.0) - 1) + 7)


def test_the_teams_value_tells_levels_apart_in_any_unit_but_does_not_grow_far_beyond_the_usual_ones():
    values = torch.ones(B, 2, dtype=torch.float64)

    def mixed(unit, times):
        critics, obs = made().critics, batch_of().obs
        critics.online.flat.mul_(3.0)
        obs[:, -TEAM.state_dim :] *= unit
        critics.count_states(obs)
        obs[:, -TEAM.state_dim :] *= times
        return critics.online.mixed(values, obs)

    torch.testing.assert_close(mixed(1000.0, 1.0), mixed(1.0, 1.0))
    assert ((mixed(1.0, 0.5) - mixed(1.0, 1.0)).abs() > 1e-3).all(), "the same direction, another level"
    torch.testing.assert_close(mixed(1.0, 1000.0), mixed(1.0, 100.0))
    networks, obs = made().critics.online, batch_of().obs
    nowhere = torch.zeros_like(obs)
    assert networks.mixed(values, nowhere).isfinite().all()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), agent=st.integers(0, 1), step=st.floats(1e-3, 10.0))
def test_the_teams_value_never_falls_when_an_agents_value_rises(seed, agent, step):
    networks = made(seed=seed).critics.online
    networks.flat.mul_(3.0)
    rng = np.random.default_rng(seed)
    obs, values = torch.tensor(rng.normal(size=(20, OBS)) * 3), torch.tensor(rng.normal(size=(20, 2)) * 3)
    higher = values.clone()
    higher[:, agent] += step
    assert (networks.mixed(higher, obs) >= networks.mixed(values, obs)).all()


def two_step_batch():
    """Each state with each pair of actions once: what uniform exploration finds, with equal weight."""
    rows = []
    for state in (0, 1, 2):
        for first in (0, 1):
            for second in (0, 1):
                after = 1 + first if state == 0 else state
                reward = 0.0 if state == 0 else PAYOFF[state][first][second]
                rows.append(
                    (
                        [state, state, *np.eye(3)[state]],
                        [first, second],
                        reward,
                        float(state > 0),
                        [after, after, *np.eye(3)[after]],
                    )
                )
    obs, action, reward, ends, following = (
        torch.tensor(np.array(column), dtype=torch.float32) for column in zip(*rows, strict=True)
    )
    return TransitionBatch(obs, action, None, reward, ends, 0.99, following)


@pytest.mark.parametrize(("mixer", "payoff"), [("qmix", 8.0), ("vdn", 7.0)])
def test_in_the_two_step_game_the_mixer_finds_8_and_the_sum_7(mixer, payoff):
    config = QMIXConfig(mixer=mixer, hidden_sizes=(32,), mixing_units=8, lr=5e-3, tau=0.05)
    team = TeamSpec(actions=(2, 2), obs_dim=1, state_dim=3)
    qmix, batch = create("qmix", 5, 2, config, 1, num_actions=2, team=team), two_step_batch()
    for _ in range(600):
        qmix.update(batch)
    policy = Policy.from_weights(qmix.policy_arrays(), qmix.policy_meta())
    state, reached = np.array([[0, 0, 1, 0, 0]], np.float32), []
    for _ in range(2):
        first, second = policy.act(state, ())[0][0].astype(int).tolist()
        reached.append((int(state[0, 0]), first, second))
        after = 1 + first
        state = np.array([[after, after, *np.eye(3)[after]]], np.float32)
    (_, _, _), (second_state, first, second) = reached
    assert PAYOFF[second_state][first][second] == payoff


def test_samplers_act_as_the_learner_values_and_explore_among_each_agents_own_actions():
    qmix = made(double_precision=False, epsilon_end=1.0, activation="gelu")
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(300, OBS)).astype(np.float32)
    normalizer = Normalizer(OBS)
    normalizer.update(3 * obs + 1)
    scaled = obs.copy()
    normalizer.apply(scaled)
    policy = Policy.from_weights(qmix.policy_arrays() | normalizer.arrays(), qmix.policy_meta())
    expected = qmix.critics.online.agent_values(torch.from_numpy(scaled)).argmax(2)
    np.testing.assert_array_equal(policy.act(obs, ())[0], expected.numpy())
    drawn = policy.act(obs, (), rng)[0]  # epsilon = 1
    assert drawn.shape == (300, 2)
    assert [sorted(set(drawn[:, agent].tolist())) for agent in (0, 1)] == [[0.0, 1.0], [0.0, 1.0, 2.0]]


def test_epsilon_falls_by_env_steps_not_by_agents():
    qmix = made(double_precision=False, epsilon_env_steps=100, epsilon_end=0.0)
    policy = Policy.from_weights(qmix.policy_arrays(), qmix.policy_meta())
    policy.act(np.zeros((50, OBS), np.float32), (), np.random.default_rng(0))
    assert policy._head.epsilon == pytest.approx(0.5)


def test_without_a_state_the_mixer_reads_all_observations():
    team = dataclasses.replace(TEAM, state_dim=0)
    qmix = made(team)
    obs = torch.tensor(np.random.default_rng(0).normal(size=(4, 4)))
    moved = obs.clone()
    moved[:, 3] += 1.0
    values = torch.zeros(4, 2, dtype=torch.float64)
    mixed = qmix.critics.online.mixed
    assert (mixed(values, obs) != mixed(values, moved)).all()


def test_an_algorithm_for_one_agent_does_not_take_a_team():
    with pytest.raises(ConfigError, match=r"no algorithm 'dqn' for a team's actions \(known: qmix\)"):
        create("dqn", 7, 2, QMIXConfig(), 0, num_actions=3, team=TEAM)
