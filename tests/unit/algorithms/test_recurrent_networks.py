"""Policy and value over a cell: gradients over sequences against a plain loop of torch, values, and burn-in."""

import dataclasses

import numpy as np
import pytest
import torch
from rollouts import FRAMES, learner, recurrent_rollout, task

from spreeze.algorithms.networks.recurrent_networks import Sequences
from spreeze.algorithms.ppo import PPOConfig
from spreeze.errors import ConfigError, UsageError
from spreeze.types import Choices

KINDS = ("lstm", "gru")
T, N, L = 12, 3, 4


class Plain(torch.nn.Module):
    """The same network, cell by cell."""

    def __init__(self, net, obs_dim):
        super().__init__()
        cell = torch.nn.LSTMCell if net.cell.kind == "lstm" else torch.nn.GRUCell
        self.size, self.cell = net.cell.size, cell(obs_dim, net.cell.size).to(net.flat.dtype)
        for own, view in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), net.cell.weights, strict=True):
            getattr(self.cell, own).data.copy_(view)
        self.heads = torch.nn.ParameterList(torch.nn.Parameter(view.detach().clone()) for view in net.networks.views())

    def forward(self, obs, begins, state):
        """Outputs [B, L, K] and values [B, L] of observations [B, L, O]."""
        first, bias, head, head_bias = self.heads
        found = []
        for step in range(obs.shape[1]):
            state = state * (~begins[:, step]).to(state.dtype).unsqueeze(1)
            if isinstance(self.cell, torch.nn.LSTMCell):
                state = torch.cat(self.cell(obs[:, step], tuple(state.chunk(2, 1))), 1)
            else:
                state = self.cell(obs[:, step], state)
            hidden = torch.tanh(state[:, : self.size] @ first + bias)
            found.append(torch.einsum("skh,smh->smk", head, hidden) + head_bias.transpose(1, 2))
        out = torch.stack(found, 2)
        return out[0], out[1, :, :, 0], state


def made(kind, name="ppo", **settings):
    spec = task(obs_dim=3, actions=2)
    settings = {"recurrent": kind, "recurrent_size": 5, "hidden_sizes": (4,), "sequence_length": L, **settings}
    algorithm = learner(name, spec, dtype=torch.float64, **settings)
    noise = torch.Generator().manual_seed(0)
    algorithm.net.flat.add_(0.3 * torch.randn(algorithm.net.flat.shape, generator=noise, dtype=torch.float64))
    return algorithm, spec


def by_sequence(array):
    return array.reshape(T // L, L, N, *array.shape[2:]).swapaxes(1, 2).reshape(T // L * N, L, *array.shape[2:])


def begins_of(batch):
    ended = batch.terminated | batch.truncated
    return np.concatenate((np.zeros((1, N), bool), ended[:-1]))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_over_sequences_equal_those_of_a_plain_loop(kind):
    algorithm, _ = made(kind)
    net, rng = algorithm.net, np.random.default_rng(0)
    begins = rng.random((6, L)) < 0.3
    obs = torch.from_numpy(rng.standard_normal((6, L, 3)))
    state = torch.from_numpy(rng.standard_normal((6, 10 if kind == "lstm" else 5)))
    by_out, by_value = torch.from_numpy(rng.standard_normal((6, L, 2))), torch.from_numpy(rng.standard_normal((6, L)))
    plain = Plain(net, 3)
    out, value, _ = plain(obs, torch.from_numpy(begins), state)
    ((out * by_out).sum() + (value * by_value).sum()).backward()
    with torch.inference_mode():  # as in a learner
        found = net.forward(obs.reshape(-1, 3), Sequences(begins, state))
        torch.testing.assert_close(found[0].t().view(6, L, 2), out, rtol=0, atol=1e-12)
        torch.testing.assert_close(found[1].view(6, L), value, rtol=0, atol=1e-12)
        net.backward(by_out.reshape(-1, 2).t(), by_value.reshape(-1))
    for found, own in zip(net._grad_cell.weights, plain.cell.parameters(), strict=True):
        torch.testing.assert_close(found, own.grad, rtol=0, atol=1e-11)
    for found, own in zip(net.gradients.views(), plain.heads, strict=True):
        torch.testing.assert_close(found, own.grad, rtol=0, atol=1e-11)
    assert net._grad_cell.flat.abs().min() > 0.0


@pytest.mark.parametrize("burn_in", [0, 2, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_values_go_along_the_rollout_and_to_where_an_episode_was_cut_off(kind, burn_in):
    algorithm, spec = made(kind, burn_in=burn_in)
    batch = recurrent_rollout(algorithm, spec, np.random.default_rng(1), T, N)
    plain, begins = Plain(algorithm.net, 3), begins_of(batch)
    first = torch.from_numpy(batch.state).double()
    with torch.no_grad():
        samples, _ = algorithm._samples(batch)
        found = algorithm._unrolled(batch, samples.obs, None)
        obs, flags = torch.from_numpy(batch.obs).double(), torch.from_numpy(begins)
        _, value, _ = plain(obs.transpose(0, 1), flags.t(), first)
        np.testing.assert_allclose(algorithm._grid(samples.value, T, N), value.t(), atol=1e-6)
        for at, env in zip(*np.nonzero(batch.truncated | (np.arange(T) == T - 1)[:, None]), strict=True):
            path = torch.cat((obs[: at + 1, env], torch.from_numpy(batch.next_obs[at, env]).double()[None]))
            own = torch.cat((flags[: at + 1, env], torch.zeros(1, dtype=bool)))
            _, ahead, _ = plain(path[None], own[None], first[env : env + 1])
            assert found.next_values[at, env] == pytest.approx(ahead[0, -1].item(), abs=1e-6)
        inside = ~(batch.truncated | batch.terminated)[:-1]
        np.testing.assert_allclose(found.next_values[:-1][inside], value.t()[1:][inside], atol=1e-6)
        # With the parameters unchanged the burn-in leads to the same states, and any minibatch to the same outputs.
        _, value = algorithm._forward(samples.obs, samples.sequences)
        np.testing.assert_allclose(value, samples.value, atol=1e-6)
        for part in samples.minibatches(3, torch.Generator().manual_seed(1)):
            out, value = algorithm._forward(part.obs, part.sequences)
            np.testing.assert_allclose(value, part.value, atol=1e-6)
            np.testing.assert_allclose(algorithm._kind.log_prob(out, part.action), part.log_prob, atol=1e-5)


def test_minibatches_are_whole_sequences_and_each_comes_once_an_epoch():
    algorithm, spec = made("gru")
    batch = recurrent_rollout(algorithm, spec, np.random.default_rng(2), T, N)
    samples, _ = algorithm._samples(batch)
    np.testing.assert_array_equal(samples.obs.view(-1, L, 3).numpy(), by_sequence(batch.obs))
    np.testing.assert_array_equal(samples.sequences.begins[:, 1:], by_sequence(begins_of(batch))[:, 1:])
    parts = list(samples.minibatches(3, torch.Generator().manual_seed(0)))
    assert [len(part.target) for part in parts] == [T] * 3
    drawn = torch.cat([part.obs for part in parts]).view(-1, L, 3).numpy()
    whole = samples.obs.view(-1, L, 3).numpy()
    found = [int(np.flatnonzero((whole == own).all((1, 2)))[0]) for own in drawn]
    assert sorted(found) == list(range(len(whole)))
    assert found != sorted(found)


def test_with_a_burn_in_an_update_begins_with_states_of_its_own_parameters():
    algorithm, spec = made("lstm", burn_in=L)
    batch = recurrent_rollout(algorithm, spec, np.random.default_rng(3), T, N)
    with torch.no_grad():
        samples, _ = algorithm._samples(batch)
        algorithm.net.flat.add_(0.1)
        value = algorithm._forward(samples.obs, samples.sequences)[1].clone()
        plain, begins = Plain(algorithm.net, 3), torch.from_numpy(begins_of(batch)).t()
        _, expected, _ = plain(
            torch.from_numpy(batch.obs).double().transpose(0, 1)[:, : 2 * L], begins[:, : 2 * L],
            torch.from_numpy(batch.state).double(),
        )  # fmt: skip
        _, stale = algorithm._forward(
            samples.obs, samples.sequences._replace(has_burn_in=np.zeros(len(samples.target) // L, bool))
        )
    found = value.view(T // L, N, L)
    np.testing.assert_allclose(found[:2].transpose(0, 1).reshape(N, 2 * L), expected, atol=1e-9)
    assert (found - stale.view(T // L, N, L)).abs().amax((1, 2)).tolist()[1] > 1e-4


SEVERAL = dataclasses.replace(task(obs_dim=3 + 5), action=Choices((3, 2)), action_mask=True)


@pytest.mark.parametrize("spec", [task(obs_dim=3), SEVERAL], ids=["continuous", "masked choices"])
@pytest.mark.parametrize("correction", ["on-policy", "none", "delayed", "truncated-is"])
@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_an_update_from_a_rollout_of_the_present_policy_has_ratios_of_one(name, correction, spec):
    settings = {"recurrent": "lstm", "recurrent_size": 8, "sequence_length": L}
    # With "delayed" the data are of a policy and a normalizer before the present ones.
    algorithm = learner(name, spec, correction, normalize_obs=correction != "delayed", **settings)
    for seed in range(3):
        batch = recurrent_rollout(algorithm, spec, np.random.default_rng(seed), T, N)
        before = algorithm.net.flat.clone()
        if correction == "delayed":
            algorithm._before.copy_(before)
        samples, passed = algorithm._samples(batch)
        with torch.no_grad():
            algorithm._gradient(samples, passed)
        assert algorithm._latest[1].abs().max() < 1e-5
        algorithm.learn(batch, None)
        assert not torch.equal(algorithm.net.flat, before)
    assert algorithm.updates_skipped() == 0


def test_a_checkpoint_goes_on_bit_by_bit():
    spec, rng = task(obs_dim=3), np.random.default_rng(4)
    settings = {"recurrent": "gru", "recurrent_size": 8, "sequence_length": L, "normalize_obs": True}
    one, two = learner("ppo", spec, **settings), learner("ppo", spec, seed=2, **settings)
    one.learn(recurrent_rollout(one, spec, rng, T, N), None)
    two.load_state_arrays(one.state_arrays())
    two.load_state_json(one.state_json())
    batch = recurrent_rollout(one, spec, rng, T, N)
    one.learn(batch, None)
    two.learn(batch, None)
    assert one.net.flat.numpy().tobytes() == two.net.flat.numpy().tobytes()


@pytest.mark.parametrize("name", ["impact", "appo", "impala"])
def test_rollouts_of_any_age_are_used_in_whole_sequences(name):
    spec = task(obs_dim=3, actions=3, discrete=True)
    settings = {"recurrent": "lstm", "recurrent_size": 8, "sequence_length": L, "burn_in": 2, "minibatches": 3}
    algorithm = learner(name, spec, correction="none", **settings)
    kept, rng = algorithm.new_rollout_cache(2), np.random.default_rng(6)
    for number in range(2):
        kept[0, number] = algorithm.evaluate(recurrent_rollout(algorithm, spec, rng, T, N))
    one = kept[0, 1]
    with torch.no_grad():
        for evaluated in (one, *one.chunk(3), kept.draw(), *kept.draw().chunk(3)):
            out, value = algorithm._forward(evaluated.samples.obs, evaluated.samples.sequences)
            np.testing.assert_allclose(value, evaluated.samples.value, atol=1e-6)
            np.testing.assert_allclose(out, evaluated.out, atol=1e-6)
    drawn = [kept.draw().samples.obs for _ in range(2)]
    whole = torch.cat([kept[0, number].samples.obs for number in range(2)]).view(-1, L, 3).numpy()
    found = [int(np.flatnonzero((whole == own).all((1, 2)))[0]) for own in torch.cat(drawn).view(-1, L, 3).numpy()]
    assert len(found) == len(whole)
    before = algorithm.net.flat.clone()
    for part in algorithm.parts(kept, (0, 1)):
        algorithm.update_minibatch(part, None)
    assert algorithm.updates_skipped() == 0
    assert not torch.equal(algorithm.net.flat, before)
    assert len(algorithm.metrics()) > 5


@pytest.mark.parametrize(("steps", "wanted", "length"), [(128, 64, 64), (96, 64, 48), (127, 64, 127), (16, 64, 16),
                                                         (509, 64, 509), (100, 1, 1)])  # fmt: skip
def test_a_rollout_is_cut_into_equal_sequences(steps, wanted, length):
    config = dataclasses.replace(made("lstm")[0]._config, sequence_length=wanted, minibatch_size=64)
    assert config.sequence_of(steps) == length
    assert (steps * 8 // length) % config.minibatches_of(steps * 8, steps) == 0
    assert dataclasses.replace(config, recurrent="none").sequence_of(steps) == 1


def test_what_a_recurrent_network_cannot_take_is_said():
    algorithm, spec = made("lstm")
    batch = recurrent_rollout(algorithm, spec, np.random.default_rng(5), T, N)
    with pytest.raises(UsageError, match="no state of the policy"):
        algorithm.learn(batch._replace(state=None), None)
    with pytest.raises(ConfigError, match="recurrent = 'rnn': must be one of: none, lstm, gru"):
        made("rnn")
    with pytest.raises(ConfigError, match="it cannot be combined with network = own"):
        PPOConfig(recurrent="lstm", network="own").check_task(spec)
    with pytest.raises(ConfigError, match="it is not supported with images"):
        PPOConfig(recurrent="lstm").check_task(task(frames=FRAMES))
