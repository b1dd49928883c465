"""What a GPU would run, on tensors without values: no wait of the host, no second device, how many kernels.

Tensors on the device ``meta`` have shapes and a device but no values: whatever reads one (``item``, ``if``, a copy to
the host) raises, as does an operation that mixes them with tensors of the processor. Code that asks whether it is on a
processor takes the way of a GPU.
"""

import dataclasses

import numpy as np
import pytest
import torch
from kernel_count import Operations, kernels_of

from spreeze.algorithms import create, optimizers
from spreeze.algorithms.networks.fused_mlp import MlpBuffers, new_parameters, relu_layer
from spreeze.algorithms.optimizers import FlatAdam
from spreeze.config.schema import SECTIONS
from spreeze.types import RowLayout, TeamSpec
from spreeze.workers.torch_devices import forget_memory

META, ROWS, OBS, ACT = "meta", 256, 22, 6
TEAM = TeamSpec(actions=(3, 2), obs_dim=8, state_dim=6)
CASES = [
    ("sac", {}, {}, 104), ("sac", {"critics": "quantile"}, {}, 123), ("sac", {"critics": "categorical"}, {}, 132),
    ("sac", {"actor_layer_norm": True, "critic_layer_norm": True}, {}, 221), ("sac", {"policy_delay": 2}, {}, 79),
    ("crossq", {}, {}, 143),
    ("sac", {"weight_decay": 0.01, "lr_schedule": "linear"}, {}, 104), ("td3", {}, {}, 62),
    ("td3", {"critics": "categorical", "critic_layer_norm": True}, {}, 155), ("ddpg", {}, {}, 68),
    ("sac", {"activation": "gelu"}, {}, 135), ("sac", {"activation": "tanh"}, {}, 115),
    ("sac", {}, {"num_actions": 4}, 87), ("sac", {}, {"num_actions": 4, "masked": True}, 93),
    ("sac", {}, {"num_actions": 4, "num_continuous": 3}, 140),
    ("dqn", {}, {"num_actions": 4}, 40), ("dqn", {"dueling": True}, {"num_actions": 4, "masked": True}, 47),
    ("qmix", {}, {"num_actions": 3, "team": TEAM}, 170),
]  # fmt: skip


@pytest.fixture
def no_values(monkeypatch):
    """Generators and the fused optimizer, which the device without values does not have."""
    processor = torch.Generator

    class Generator(processor):
        def __new__(cls, device="cpu"):
            return processor.__new__(processor)

    monkeypatch.setattr(torch, "Generator", Generator)
    for name in ("_fused_adam_", "_fused_adamw_"):

        def fused(parameters, gradients, means, squares, most, steps, *, found_inf, lr, **options):
            given = [*parameters, *gradients, *means, *squares, *steps, found_inf]
            assert {part.device.type for part in given} == {META}
            assert not isinstance(lr, torch.Tensor) or lr.device.type == META
            parameters[0].add_(found_inf)  # one kernel

        monkeypatch.setattr(torch, name, fused)


@pytest.mark.parametrize(("name", "changes", "options", "most"), CASES)
def test_an_update_on_a_gpu_reads_no_value_and_runs_few_kernels(no_values, name, changes, options, most):
    config = dataclasses.replace(SECTIONS[name](), **changes)
    algorithm = create(name, OBS, ACT, config, 1, device=META, **options)
    layout = RowLayout(
        OBS, len(TEAM.actions) if name == "qmix" else 1 + options.get("num_continuous", 0) if options else ACT
    )
    rows = torch.zeros(ROWS, layout.width, device=META)

    def period():
        for _ in range(algorithm.period):
            algorithm.update(layout.split(rows, 0.99))

    period()
    period()
    found = kernels_of(period, "cpu") / algorithm.period
    assert found <= most
    assert algorithm.updates == 3 * algorithm.period


def test_a_value_that_is_read_is_found_out(no_values):
    algorithm = create("ddpg", OBS, ACT, SECTIONS["ddpg"](), 1, device=META)
    with pytest.raises(RuntimeError):
        algorithm.updates_skipped()
    with pytest.raises(RuntimeError):
        algorithm.update(RowLayout(OBS, ACT).split(torch.zeros(ROWS, RowLayout(OBS, ACT).width), 0.99))


def test_views_are_no_kernels():
    x = torch.zeros(4, 4)
    with Operations() as counted:
        x.t()[1:].reshape(-1).add_(x.view(16)[:12])
    assert counted.count == 2  # the reshape of a transposed matrix copies


@pytest.mark.parametrize("fails", [False, True])
def test_what_earlier_work_left_on_a_gpu_is_given_back_before_memory_is_measured(monkeypatch, fails):
    class Cyclic:
        def __init__(self):
            self.own = self

        def __del__(self):
            done.append("freed")

    def empty_cache():
        done.append("returned")
        if fails:
            raise RuntimeError("a recording that failed is considered unfinished (pretended)")

    done = []
    monkeypatch.setattr(torch.cuda, "init", lambda: done.append("begun"))
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", done.append)
    Cyclic()
    forget_memory("cuda:0+cuda:0")
    assert done == ["freed", "begun", "returned", "cuda:0"]


@pytest.mark.parametrize("stack", [1, 2])
def test_a_layer_as_one_kernel_is_the_layer(stack):
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((1, 9, 5), (stack, 5, 7), (stack, 1, 7)))
    x = x.expand(stack, -1, -1)
    found = relu_layer(x, weight, bias, torch.zeros(stack, 9, 7))
    np.testing.assert_allclose(found, torch.relu(torch.bmm(x, weight) + bias), rtol=1e-6, atol=1e-6)


def test_the_guard_of_a_gpu_counts_and_rejects_as_that_of_a_processor(monkeypatch):
    """The way of a GPU, on values; the fused kernel takes the flag there, and here a stand-in does."""
    fused = torch._fused_adam_

    def takes_the_flag(parameters, *others, found_inf, **options):
        if not found_inf:
            fused(parameters, *others, found_inf=None, **options)

    found = []
    for on_cpu in (True, False):
        parameters, gradient = torch.ones(5), torch.full((5,), 0.5)
        adam = FlatAdam(parameters, gradient, 0.1)
        if not on_cpu:
            adam._on_cpu = False
            monkeypatch.setattr(torch, "_fused_adam_", takes_the_flag)
        for bad in (None, np.nan, None, np.inf, -np.inf):
            gradient[2] = 0.5 if bad is None else bad
            adam.step()
        found.append((parameters.tolist(), adam.skipped, float(adam.tensors()["steps"])))
    assert found[0] == found[1]
    assert found[0][1:] == (3, 2.0)


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_steps_of_a_vector_in_parts_are_those_of_the_whole(monkeypatch, decay):
    found = []
    for size in (5000, 768):
        monkeypatch.setattr(optimizers, "_part_size", lambda vector, size=size: size)
        generator = torch.Generator().manual_seed(1)
        parameters, gradient = torch.randn(5000, generator=generator), torch.zeros(5000)
        adam = FlatAdam(parameters, gradient, 1e-2)
        adam.weight_decay = decay
        for _ in range(5):
            gradient.copy_(torch.randn(5000, generator=generator))
            adam.step()
        found.append([parameters, *adam.tensors().values()])
    for whole, parts in zip(*found, strict=True):
        np.testing.assert_allclose(parts, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("length", "parts"), [(1, 1), (2048, 1), (2049, 2), (148_000, 36), (3_000_000, 36)])
def test_a_vector_on_a_gpu_is_taken_in_parts_that_fill_one_launch(length, parts):
    vector = torch.empty(length, device=META)
    size = optimizers._part_size(vector)
    assert len(vector.split(size)) <= parts
    assert parts == 1 or len(vector.split(size)) >= parts - 1
    assert size % 16 == 0
    assert optimizers._part_size(torch.empty(length)) == length


@pytest.mark.parametrize("rows", [16, 2048])
def test_weight_gradients_by_the_way_of_a_gpu_are_those_of_a_processor(rows):
    generator = torch.Generator().manual_seed(1)
    parameters = new_parameters((5, 16, 16, 1), 2, torch.device("cpu"))
    parameters.initialize(generator)
    x = torch.randn(1, rows, 5, generator=generator).expand(2, -1, -1)
    found = []
    for on_gpu in (False, True):
        buffers, gradient = (
            MlpBuffers.allocate(parameters, rows),
            new_parameters((5, 16, 16, 1), 2, torch.device("cpu")),
        )
        buffers.ones = torch.ones(2, 1, rows) if on_gpu else None
        parameters.forward(x, buffers)
        buffers.grad_out.copy_(torch.linspace(-1.0, 1.0, rows))
        parameters.backward(buffers, x.transpose(1, 2), gradient)
        found.append(gradient.flat)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-4)
