"""DQN's distributions of returns, dueling streams and noisy networks: by hand, by loops, by autograd in float64."""

import dataclasses

import numpy as np
import pytest
import torch
from batches import same
from rollouts import FRAMES

from spreeze.algorithms import create
from spreeze.algorithms.losses import projected
from spreeze.algorithms.networks.fused_mlp import new_parameters
from spreeze.algorithms.networks.value_heads import CategoricalReturns, NoisyNetworks, QuantileReturns
from spreeze.config.schema import SECTIONS
from spreeze.errors import ConfigError, WeightsError
from spreeze.inference.policy import Policy
from spreeze.types import Choices, EnvSpec, RowLayout

OBS, ACTIONS, B, GAMMA = 4, 3, 6, 0.9
KINDS = [
    {},
    {"critics": "quantile", "quantiles": 5},
    {"critics": "categorical", "atoms": 7, "v_min": -2.0, "v_max": 3.0},
]
CASES = [kind | {"dueling": dueling, "noisy": noisy} for kind in KINDS for dueling in (False, True)
         for noisy in (False, True)]  # fmt: skip
CPU = torch.device("cpu")


def made(dtype=torch.float32, seed=1, **changes):
    config = dataclasses.replace(SECTIONS["dqn"](), hidden_sizes=(8, 6), n_step=1, gamma=GAMMA, **changes)
    torch.set_default_dtype(dtype)
    try:
        return create("dqn", OBS, 1, config, seed, num_actions=ACTIONS)
    finally:
        torch.set_default_dtype(torch.float32)


def batch_of(dtype=torch.float32, seed=0, rows=B):
    rng, layout = np.random.default_rng(seed), RowLayout(OBS, 1)
    values = rng.normal(size=(rows, layout.width))
    values[:, layout.action] = rng.integers(0, ACTIONS, (rows, 1))
    values[:, layout.terminated] = rng.random(rows) < 0.3
    batch = layout.split(torch.tensor(values, dtype=dtype), GAMMA)
    return batch._replace(weight=torch.tensor(rng.random(rows), dtype=dtype))


def test_a_categorical_target_is_that_of_the_paper():
    # Grid -1, 0, 1; reward 0.25 and discount 0.5 move it to -0.25, 0.25, 0.75.
    head = CategoricalReturns(3, -1.0, 1.0, CPU)
    returns = head.next_returns(torch.tensor([0.2, 0.3, 0.5]).log()[:, None])
    goal = projected(head._next_prob, 0.25 + 0.5 * returns, -1.0, 1.0)[:, 0]
    assert goal.tolist() == pytest.approx([0.2 * 0.25, 0.2 * 0.75 + 0.3 * 0.75 + 0.5 * 0.25, 0.3 * 0.25 + 0.5 * 0.75])
    out = torch.zeros(3, 1)
    gradient, error, mean = head.loss_gradient(out, 0.25 + 0.5 * returns)
    assert gradient[:, 0].tolist() == pytest.approx([1 / 3 - value for value in goal.tolist()])
    assert mean.item() == pytest.approx(goal[2] - goal[0])
    assert error.item() == pytest.approx(-mean.item())
    assert head.row_losses().item() == pytest.approx(sum(p * np.log(3 * p) for p in goal.tolist()), rel=1e-5)
    assert head.means(torch.tensor([0.2, 0.3, 0.5]).log()[:, None]).item() == pytest.approx(0.3)


def test_a_quantile_loss_is_that_of_explicit_loops():
    rng, head = np.random.default_rng(0), QuantileReturns(4, CPU)
    out, target = 2.0 * rng.normal(size=(4, 5)), 2.0 * rng.normal(size=(3, 5))
    expected = np.zeros(5)
    for row in range(5):
        for quantile in range(4):
            for goal in range(3):
                error = target[goal, row] - out[quantile, row]
                huber = 0.5 * error**2 if abs(error) < 1.0 else abs(error) - 0.5
                expected[row] += abs((2 * quantile + 1) / 8 - (error < 0)) * huber / (4 * 3)
    leaf = torch.tensor(out, dtype=torch.float32, requires_grad=True)
    goals = torch.tensor(target, dtype=torch.float32)
    gradient, error, mean = head.loss_gradient(leaf.detach(), goals)
    np.testing.assert_allclose(head.row_losses(), expected, rtol=1e-5)
    np.testing.assert_allclose(error + mean, out.mean(0), rtol=1e-4)
    head._latest = leaf, goals
    (by_autograd,) = torch.autograd.grad(head.row_losses().sum(), leaf)
    np.testing.assert_allclose(gradient, by_autograd, rtol=1e-4, atol=1e-6)


def forward(networks, obs, algorithm, leaves=None):
    """Outputs [B, K, Z] by plain operations, with dueling streams joined as the paper says."""
    config, tensors = algorithm._config, networks.views() if leaves is None else leaves
    x = obs
    for weight, bias in zip(tensors[:-2:2], tensors[1:-2:2], strict=True):
        x = torch.relu(x @ weight[0] + bias[0])
    out = x @ tensors[-2][0].t() + tensors[-1][0, :, 0]
    outputs = {"mean": 1, "quantile": config.quantiles, "categorical": config.atoms}[config.critics]
    out = out.view(len(obs), -1, outputs)
    return out[:, :1] + out[:, 1:] - out[:, 1:].mean(1, keepdim=True) if config.dueling else out


def loss_of(algorithm, out, out_next, action_next, batch):
    """The weighted mean loss, by autograd's operations alone."""
    config, rows = algorithm._config, torch.arange(len(batch.obs))
    chosen, following = out[rows, batch.action[:, 0].long()], out_next[rows, action_next]
    kept = ((1.0 - batch.terminated) * GAMMA)[:, None]
    if config.critics == "categorical":
        grid = torch.linspace(config.v_min, config.v_max, config.atoms, dtype=out.dtype)
        moved = batch.reward[:, None] + kept * grid
        goal = projected(following.softmax(1).t(), moved.t(), config.v_min, config.v_max).t()
        each = -(goal * chosen.log_softmax(1)).sum(1)
    elif config.critics == "quantile":
        error = (batch.reward[:, None] + kept * following)[:, None, :] - chosen[:, :, None]
        levels = ((torch.arange(config.quantiles, dtype=out.dtype) + 0.5) / config.quantiles)[None, :, None]
        huber = torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")
        each = ((levels - (error.detach() < 0).to(out.dtype)).abs() * huber).mean((1, 2))
    else:
        each = 0.5 * (chosen - batch.reward[:, None] - kept * following)[:, 0] ** 2
    return (batch.weight * each).mean()


def means_of(algorithm, out):
    config = algorithm._config
    if config.critics == "categorical":
        grid = torch.linspace(config.v_min, config.v_max, config.atoms, dtype=out.dtype)
        return (out.softmax(2) * grid).sum(2)
    return out.mean(2)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_gradients_are_those_of_autograd_in_float64(changes, double):
    algorithm, batch = made(torch.float64, double=double, **changes), batch_of(torch.float64)
    critics = algorithm.critics
    critics.target.flat.mul_(1.5)
    critics.adam.step = lambda: None  # the gradient alone
    drawn = []  # noise: for the choice, the target, the step, or with one draw less
    algorithm.draw_noise = lambda out: drawn.append(out.normal_(generator=algorithm.generator).clone())
    with torch.inference_mode():
        choosing = algorithm.actor_forward(batch)
        at_choice = critics._online.flat.clone()
        algorithm.critic_step(batch, choosing.next_action, None)
    assert len(drawn) == ((3 if double else 2) if changes["noisy"] else 0)
    networks, following = critics._online, forward(critics._target, batch.next_obs, algorithm)
    leaves = [view.clone().requires_grad_() for view in networks.views()]
    by_choice = forward(networks.over(at_choice), batch.next_obs, algorithm) if double else following
    best = means_of(algorithm, by_choice).argmax(1)
    assert best.tolist() == choosing.next_action[0].tolist()
    loss = loss_of(algorithm, forward(None, batch.obs, algorithm, leaves), following, best, batch)
    expected = torch.autograd.grad(loss, leaves)
    for found, value, leaf in zip(critics._gradient.views(), expected, leaves, strict=True):
        shown = value if not changes["dueling"] or leaf is not leaves[-2] else value * critics._dueling.mask
        torch.testing.assert_close(found, shown, rtol=1e-9, atol=1e-12)
    if changes["noisy"]:
        noise = critics.online._noise.flat
        torch.testing.assert_close(critics.gradient.deviations.flat, critics._gradient.flat * noise)
        assert critics.gradient.deviations.flat.abs().max() > 0.0


class Told:
    """A generator that tells given numbers in turn."""

    def __init__(self, numbers):
        self.left = numbers

    def standard_normal(self, shape, dtype):
        count = int(np.prod(shape))
        found, self.left = self.left[:count], self.left[count:]
        return found.astype(dtype).reshape(shape)

    def random(self, rows):
        return np.ones(rows)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("changes", [case for case in CASES if case["noisy"]], ids=str)
def test_a_sampler_adds_the_noise_that_torch_puts_into_the_weights(changes, layer_norm):
    algorithm = made(layer_norm=layer_norm, **changes)
    critics = algorithm.critics
    with torch.inference_mode():
        critics.online.flat[: len(critics.mean.flat)].mul_(1.7)
        critics.draw(algorithm.draw_noise)
        obs = torch.randn(1, OBS)
        expected = critics.values(obs)[0].t().numpy()
    policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    numbers = critics.online._normal.numpy()
    told = Told(numbers.copy())
    np.testing.assert_allclose(policy._forward(obs.numpy(), (), told)[0], expected, rtol=1e-4, atol=1e-5)
    assert len(told.left) == 0
    assert policy.act(obs.numpy(), (), Told(numbers.copy()))[0].item() == expected.argmax()


def test_noise_explores_by_row_and_evaluation_has_none():
    algorithm = made(noisy=True)
    policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    obs, rng = np.ones((300, OBS), np.float32), np.random.default_rng(0)
    assert len(set(policy.act(obs, (), rng)[0][:, 0].tolist())) > 1
    assert len(set(policy.act(obs, ())[0][:, 0].tolist())) == 1
    assert (policy._head._start, policy._head._end) == (0.0, 0.0)
    with torch.inference_mode():
        plain = made().critics.values(torch.from_numpy(obs[:1]))[0, :, 0]
    np.testing.assert_allclose(policy._forward(obs[:1], ())[0][0], plain, rtol=1e-5)  # the same seed, the same means


def test_noise_is_factorised_and_begins_at_its_scale():
    networks = NoisyNetworks(lambda: new_parameters((50, 40, 3), 1, CPU), 0.5)
    networks.initialize(torch.Generator().manual_seed(1))
    assert networks.deviations.weights[0].unique().tolist() == pytest.approx([0.5 / 50**0.5])
    assert networks.deviations.head_bias.unique().tolist() == pytest.approx([0.5 / 40**0.5])
    generator = torch.Generator().manual_seed(2)
    networks.draw(lambda out: out.normal_(generator=generator))
    noise = networks._noise.weights[0][0]
    assert torch.linalg.matrix_rank(noise).item() == 1
    torch.testing.assert_close(noise[7, 9], torch.sign(networks._normal[7]) * networks._normal[7].abs().sqrt()
                               * networks._noise.biases[0][0, 0, 9])  # fmt: skip
    torch.testing.assert_close(networks.drawn.weights[0], networks.means.weights[0] + 0.5 / 50**0.5 * noise)


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_they_resume_bit_by_bit(changes):
    whole, first, second = (made(**changes) for _ in range(3))
    for index in range(8):
        batch = batch_of(seed=index)
        whole.update(batch)
        (first if index < 4 else second).update(batch)
        if index == 3:
            second.load_state_arrays(first.state_arrays())
            second.load_state_json(first.state_json())
    assert same(whole.state_arrays(), second.state_arrays())
    assert np.isfinite(list(whole.metrics().values())).all()
    assert np.isfinite(whole.row_errors()).all()


@pytest.mark.parametrize("field", ["obs", "reward"])
@pytest.mark.parametrize("changes", KINDS[1:], ids=str)
def test_what_is_not_finite_is_refused_and_counted(changes, field):
    algorithm = made(**changes)
    algorithm.update(batch_of())
    before, batch = algorithm.state_arrays()["critics.online"], batch_of(seed=1)
    getattr(batch, field)[3] = float("inf")
    algorithm.update(batch)
    assert algorithm.updates_skipped() == 1
    assert np.array_equal(algorithm.state_arrays()["critics.online"], before)


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_images_take_all_of_it(changes):
    config = dataclasses.replace(SECTIONS["dqn"](), hidden_sizes=(16,), cnn="impala_small", n_step=1, **changes)
    algorithm = create("dqn", 0, 1, config, 1, num_actions=ACTIONS, frames=FRAMES)
    layout = RowLayout(0, 1, frame_bytes=FRAMES.frame_bytes, stack=FRAMES.stack)
    generator = torch.Generator().manual_seed(1)
    rows = torch.zeros(5, layout.width)
    frames = torch.randint(0, 256, (5, layout.window, *FRAMES.shape), generator=generator, dtype=torch.uint8)
    batch = layout.split_frames(rows, frames, GAMMA)._replace(weight=torch.ones(5))
    before = algorithm.policy_arrays()
    algorithm.update(batch)
    after, critics = algorithm.policy_arrays(), algorithm.critics
    assert all(np.abs(after[name] - before[name]).max() > 0.0 for name in after if name != "atoms")
    policy = Policy.from_weights(after, algorithm.policy_meta())
    with torch.inference_mode():
        expected = critics.values_of(critics._q(batch.obs, critics.mean))[0].t()
    np.testing.assert_allclose(policy._forward(batch.obs.numpy(), ())[0], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"noisy": True}, "noisy"), ({"critics": "quantile"}, "critics"), ({"dueling": True}, "dueling")],
)
def test_a_custom_network_is_refused_with_the_setting(changes, named):
    config = dataclasses.replace(SECTIONS["dqn"](), network="mine", **changes)
    spec = EnvSpec(env_id="x", import_module=None, obs_dim=3, action=Choices((2,)), max_episode_steps=None,
                   reward_threshold=None)  # fmt: skip
    with pytest.raises(ConfigError, match=f"^{named} = .*: the custom network 'mine'"):
        config.check_task(spec)
    with pytest.raises(ConfigError, match="v_min = 3 is not below v_max = 3"):
        dataclasses.replace(SECTIONS["dqn"](), v_min=3.0, v_max=3.0)


def test_weights_whose_noise_does_not_fit_are_refused():
    algorithm = made(noisy=True)
    arrays, meta = algorithm.policy_arrays(), algorithm.policy_meta()
    with pytest.raises(WeightsError, match=r"noise of shape \(4, 5\) does not fit a layer of shape \(4, 8\)"):
        Policy.from_weights(arrays | {"noise_w0": np.zeros((4, 5), np.float32)}, meta)
    with pytest.raises(WeightsError):
        Policy.from_weights({name: value for name, value in arrays.items() if name != "noise_b1"}, meta)
