"""The cells of samplers against torch's, and policies with a memory: their state, and rows that mix with no other."""

import numpy as np
import pytest
import torch
from rollouts import learner, task

from spreeze.errors import UsageError, WeightsError
from spreeze.inference.policy import TILE, Policy, begin_episode
from spreeze.inference.recurrence import CELLS, Cell, state_dim

KINDS = list(CELLS)


def torch_cell(kind, inputs, size):
    torch.manual_seed(3)
    return {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](inputs, size)


def arrays_of(module):
    names = {"cell_x": "weight_ih_l0", "cell_h": "weight_hh_l0", "cell_x_bias": "bias_ih_l0",
             "cell_h_bias": "bias_hh_l0"}  # fmt: skip
    return {name: getattr(module, own).detach().t().contiguous().numpy() for name, own in names.items()}


def policy_of(kind, *, discrete=True, **settings):
    spec = task(obs_dim=3, actions=4 if discrete else 2, discrete=discrete)
    algorithm = learner("ppo", spec, recurrent=kind, recurrent_size=6, hidden_sizes=(5,), **settings)
    algorithm.net.flat.add_(0.3 * torch.randn(algorithm.net.flat.shape, generator=torch.Generator().manual_seed(0)))
    return Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_equals_torchs_over_many_steps(kind):
    module, rng = torch_cell(kind, 5, 7), np.random.default_rng(0)
    cell = Cell(arrays_of(module), {"recurrent": kind, "recurrent_size": 7})
    x = 2.0 * rng.standard_normal((200, 9, 5)).astype(np.float32)
    with torch.no_grad():
        expected, after = module(torch.from_numpy(x))
    state, found = np.zeros((9, state_dim(kind, 7)), np.float32), []
    for row in x:
        state = cell(row, state)
        found.append(state[:, :7])
    np.testing.assert_allclose(np.stack(found), expected.numpy(), rtol=0, atol=1e-6)
    parts = [part[0].numpy() for part in (after if kind == "lstm" else (after,))]
    np.testing.assert_allclose(state, np.concatenate(parts, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_zeros_is_an_empty_one_and_begins_an_episode(kind):
    policy, rng = policy_of(kind), np.random.default_rng(1)
    first, second = rng.standard_normal((2, 4, 3)).astype(np.float32)
    _, state = policy.act(first, ())
    assert state[0].shape == (4, policy.state_dim)
    kept = state[0].copy()
    _, following = policy.act(second, state)
    np.testing.assert_array_equal(state[0], kept)  # whoever holds an earlier state may use it again
    begin_episode(following, 2)
    _, again = policy.act(first, following)
    np.testing.assert_allclose(again[0][2], kept[2], atol=1e-6)
    assert np.abs(again[0] - kept).max(1)[[0, 1, 3]].min() > 1e-3


@pytest.mark.parametrize("discrete", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_drawn_row_does_not_depend_on_the_others(kind, discrete):
    policy, rng = policy_of(kind, discrete=discrete), np.random.default_rng(2)
    rows = 2 * TILE + 3
    obs = rng.standard_normal((rows, 3)).astype(np.float32)
    noise = (rng.random if discrete else rng.standard_normal)((rows, policy._head.noise_dim)).astype(np.float32)
    state = rng.standard_normal((rows, policy.state_dim)).astype(np.float32)
    action, log_prob, (following,) = policy.sample(obs, noise, (state,))
    for row in range(rows):
        one = slice(row, row + 1)
        alone = policy.sample(obs[one], noise[one], (state[one],))
        assert [alone[0].tobytes(), alone[1].tobytes(), alone[2][0].tobytes()] == [
            action[one].tobytes(), log_prob[one].tobytes(), following[one].tobytes()
        ]  # fmt: skip
    _, (acted,) = policy.act(obs, (state,))
    np.testing.assert_allclose(acted, following, atol=1e-6)


def test_a_state_of_another_shape_is_refused_with_the_one_that_fits():
    policy = policy_of("lstm")
    with pytest.raises(UsageError, match=r"\[\(1, 12\)\]; expected one array \(2, 12\)"):
        policy.act(np.zeros((2, 3), np.float32), (np.zeros((1, 12), np.float32),))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"cell_x": np.zeros((3, 20), np.float32)}, "cell_x"), ({"cell_h_bias": None}, "cell_h_bias"),
     ({"cell_x": np.zeros((4, 24), np.float32)}, "the recurrent cell has 4 inputs, expected 3")],
)  # fmt: skip
def test_weights_of_no_cell_are_refused(change, message):
    algorithm = learner("ppo", task(obs_dim=3), recurrent="lstm", recurrent_size=6)
    arrays = algorithm.policy_arrays() | change
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(WeightsError, match=message):
        Policy.from_weights(arrays, algorithm.policy_meta())
    with pytest.raises(WeightsError, match="kind 'rnn'"):
        Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta() | {"recurrent": "rnn"})
