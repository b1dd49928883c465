"""A network of one's own: one file with a module of torch and a row, for learner and samplers of every algorithm."""

import contextlib
import dataclasses
import json
import sys

import numpy as np
import pytest
import torch
from harness import PENDULUM, run_command, train
from rollouts import learner, rollout, task
from torch.func import functional_call

from spreeze.algorithms import create
from spreeze.algorithms.networks.fused_mlp import HiddenLayers, MlpBuffers, new_parameters
from spreeze.algorithms.parallel_work import TwoThreads
from spreeze.config.algorithms import NetworkRow, find_network
from spreeze.config.schema import SECTIONS, LearnerConfig
from spreeze.errors import ConfigError, WeightsError
from spreeze.inference.policy import Policy
from spreeze.types import Box, EnvSpec, RowLayout
from spreeze.workers.replay_trainer import ReplayTrainer

pytestmark = pytest.mark.warm

MODULE = "made_up_networks"
SOURCE = """
import torch

from spreeze.config.algorithms import NetworkRow


class Residual(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first = torch.nn.Linear(inputs, 8)
        self.block = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.SiLU(), torch.nn.Linear(8, 8))
        self.last = torch.nn.Linear(8, outputs)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.block(x))


NETWORKS = (
    NetworkRow(name="residual", make=Residual),
    NetworkRow(name="wrong", make=lambda inputs, outputs: torch.nn.Linear(inputs, outputs + 1)),
    NetworkRow(name="batch_norm", make=lambda inputs, outputs: torch.nn.BatchNorm1d(inputs)),
    NetworkRow(name="recurrent", make=torch.nn.GRU),
)
"""
ENV = {"env": {"import_module": MODULE}}


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield MODULE
    sys.modules.pop(MODULE, None)


def policy_of(algorithm):
    return Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta() | ENV)


def test_gradients_of_a_stack_of_own_modules_equal_autograd(module):
    layers = HiddenLayers(custom=find_network("residual", module))
    torch.set_default_dtype(torch.float64)
    try:
        parameters = new_parameters((5, 99, 2), 2, torch.device("cpu"), layers=layers)
        gradient = new_parameters((5, 99, 2), 2, torch.device("cpu"), layers=layers)
        parameters.initialize(torch.Generator().manual_seed(1))
    finally:
        torch.set_default_dtype(torch.float32)
    x = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 2, 7, dtype=torch.float64)
    leaves = [{name: view.clone().requires_grad_() for name, view in each.items()} for each in parameters._named]
    out = torch.stack([functional_call(own, leaves[index], (x[index],)).t()
                       for index, own in enumerate(parameters._modules)])  # fmt: skip
    out.backward(upstream)
    with torch.inference_mode():
        buffers = MlpBuffers.allocate(parameters, 7)
        torch.testing.assert_close(parameters.forward(x, buffers), out)
        for part in (slice(0, 3), slice(3, 7)):
            some = buffers.part(part.start, part.stop)
            some.grad_out.copy_(upstream[:, :, part])
            first = parameters.backward(some, x[:, part].transpose(1, 2), gradient, add=part.start > 0)
            torch.testing.assert_close(first @ parameters.weights[0].transpose(1, 2), x.grad[:, part])
        for index in range(2):
            for name, leaf in leaves[index].items():
                torch.testing.assert_close(gradient._named[index][name], leaf.grad)
        ones = parameters.derivative(buffers).clone()
    expected, = torch.autograd.grad(sum(functional_call(own, leaves[index], (x[index],)).sum()
                                        for index, own in enumerate(parameters._modules)), x)  # fmt: skip
    torch.testing.assert_close(ones, expected)
    assert not torch.equal(parameters.flat[: len(parameters.flat) // 2], parameters.flat[len(parameters.flat) // 2 :])
    assert parameters.one(1)._named[0]["last.bias"].data_ptr() == parameters._named[1]["last.bias"].data_ptr()


def test_two_threads_do_not_share_the_module_of_a_network_of_ones_own(module):
    """Each call puts parameters of its own into the one module and takes them out again."""
    spec = EnvSpec(env_id="Any-v0", import_module=module, obs_dim=3, action=Box((-1.0,), (1.0,)),
                   max_episode_steps=50, reward_threshold=None)  # fmt: skip
    with contextlib.closing(TwoThreads()) as parallel:
        for network, shared in (("", parallel), ("residual", None)):
            config = dataclasses.replace(SECTIONS["sac"](), hidden_sizes=(8,), network=network)
            how = LearnerConfig(batch_size=8, device="cpu")
            trainer = ReplayTrainer(
                spec, "sac", config, RowLayout(3, 1), None, how, seed=1, normalize_obs=False, parallel=parallel
            )
            assert trainer.algorithm.critics.parallel is shared


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg", "dqn", "discrete sac"])
def test_every_replay_algorithm_learns_with_it_and_resumes_bit_by_bit(module, name):
    algo, discrete, rng = name.split()[-1], name in ("dqn", "discrete sac"), np.random.default_rng(0)
    config = dataclasses.replace(SECTIONS[algo](), network="residual")
    layout = RowLayout(3, 1 if discrete else 2)

    def made(seed):
        return create(algo, 3, 1 if discrete else 2, config, seed, num_actions=3 if discrete else None,
                      import_module=module)  # fmt: skip

    def batch(seed):
        rows = np.random.default_rng(seed).uniform(0.0, 1.0, (16, layout.width)).astype(np.float32)
        if discrete:
            rows[:, layout.action] = np.random.default_rng(seed).integers(3, size=(16, 1))
        return layout.split(torch.from_numpy(rows), 0.9)

    first, second = made(1), made(2)
    before = first.state_arrays()
    for seed in range(4):
        first.update(batch(seed))
    networks = [key for key in before if key.endswith("online")]
    assert networks
    assert all((first.state_arrays()[key] != before[key]).any() for key in networks)
    assert first.updates_skipped() == 0
    second.load_state_arrays(first.state_arrays())
    second.load_state_json(first.state_json())
    for algorithm in (first, second):
        algorithm.update(batch(9))
    assert all(np.array_equal(second.state_arrays()[key], array) for key, array in first.state_arrays().items())
    obs = rng.standard_normal((5, 3)).astype(np.float32)
    net = first.critics.online if first.actor is None else first.actor.online
    expected = net.forward(torch.from_numpy(obs)[None], MlpBuffers.allocate(net, 5))[0].t().numpy()
    np.testing.assert_allclose(policy_of(first)._forward(obs, ())[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(first.policy_snapshot()()["net.last.bias"], first.policy_arrays()["net.last.bias"])


@pytest.mark.parametrize("name", ["ppo", "a2c", "impact", "appo", "impala"])
def test_rollout_algorithms_learn_with_it_and_a_row_drawn_depends_on_that_row_alone(module, name, monkeypatch):
    spec, rng = dataclasses.replace(task(), import_module=module), np.random.default_rng(0)
    algorithm = learner(name, spec, network="residual")
    with_env = algorithm.policy_meta() | ENV
    monkeypatch.setattr(algorithm, "policy_meta", lambda: with_env)  # as a run publishes it
    before = algorithm.net.flat.clone()
    for _ in range(2):
        algorithm.learn(rollout(algorithm, spec, rng), None)
    assert not torch.equal(before, algorithm.net.flat)
    assert algorithm.updates_skipped() == 0
    policy = policy_of(algorithm)
    obs, noise = rng.standard_normal((11, 3)).astype(np.float32), rng.standard_normal((11, 2)).astype(np.float32)
    action, log_prob, _ = policy.sample(obs, noise)
    for index in (0, 3, 10):
        alone = policy.sample(obs[index : index + 1], noise[index : index + 1])
        np.testing.assert_array_equal(alone[0][0], action[index])
        assert alone[1][0] == log_prob[index]


def test_what_does_not_fit_is_refused_with_the_remedy(module):
    def made(network):
        config = dataclasses.replace(SECTIONS["dqn"](), network=network)
        return create("dqn", 3, 1, config, 0, num_actions=2, import_module=module)

    with pytest.raises(ConfigError, match=r"network = 'residuel': must be one of: residual.*did you mean 'residual'"):
        made("residuel")
    with pytest.raises(ConfigError, match=r"'wrong': 3 inputs of 3 rows gave the shape \(3, 3\); expected \(3, 2\)"):
        made("wrong")
    with pytest.raises(ConfigError, match="'batch_norm' has buffers"):
        made("batch_norm")
    with pytest.raises(ConfigError, match="'recurrent': it returned tuple instead of a tensor, like recurrent layers"):
        made("recurrent")
    algorithm = made("residual")
    with pytest.raises(WeightsError, match=r"need the network 'residual', which --import None does not declare"):
        Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    arrays = algorithm.policy_arrays() | {"net.last.bias": np.zeros(5, np.float32)}
    with pytest.raises(WeightsError, match=r"'last.bias' \(2,\); the weights have \(5,\)"):
        Policy.from_weights(arrays, algorithm.policy_meta() | ENV)
    assert isinstance(find_network("wrong", module), NetworkRow)


def test_a_run_trains_with_it_and_is_evaluated(module, tmp_path):
    run, code, document = train(
        tmp_path, *PENDULUM, "--import", module, "--updates", "60", "--set", "sac.network=residual"
    )
    assert code == 0, run.stderr[-3000:]
    assert (document["updates"], document["restarts"]) == (60, 0)
    assert 'network = "residual"' in (run.path / "config.toml").read_text()
    scored = run_command("evaluate", run.path, "--episodes", "1", "--json", "--import", module)
    assert scored.returncode == 0, scored.stderr
    assert json.loads(scored.stdout)["algo"] == "sac"
