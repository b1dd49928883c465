"""What products round to: refused where a device lacks it, close to float64 where it has it, restored afterwards."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from batches import ACT, OBS, batches, exact

from spreeze.algorithms import create
from spreeze.algorithms.networks.fused_mlp import MlpBuffers, new_parameters
from spreeze.algorithms.optimizers import FlatAdam
from spreeze.config.schema import SECTIONS, LearnerConfig
from spreeze.errors import ConfigError
from spreeze.machine.hardware import check_precision, has_bfloat16_unit, mkl_lacks_avx512
from spreeze.workers import torch_devices
from spreeze.workers.torch_devices import largest_matmul, matmuls_in

NAMES = ["ddpg", "sac", "td3"]
CPU, ROWS = torch.device("cpu"), 256
WIDE = "avx2 avx512f avx512bw avx512dq avx512vl"
HAS_UNIT = pytest.mark.skipif(not has_bfloat16_unit(), reason="this CPU has no bfloat16 unit")


def machine(tmp_path, flags, vendor="GenuineIntel", family=6):
    (tmp_path / "proc").mkdir(exist_ok=True)
    (tmp_path / "proc/cpuinfo").write_text(
        f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t\t: fpu {flags}\n\nprocessor\t: 1\n"
    )
    return tmp_path


def test_the_unit_is_read_from_the_processors_flags(tmp_path):
    assert has_bfloat16_unit(machine(tmp_path, "avx2 avx512_bf16 amx_bf16"))
    assert not has_bfloat16_unit(machine(tmp_path, "avx2 avx512_bf16 amx_tile")), "oneDNN stays in float32 with these"
    assert not has_bfloat16_unit(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("flags", "vendor", "family", "lacks"),
    [
        (WIDE, "AuthenticAMD", 26, True),
        (WIDE, "AuthenticAMD", 25, False),
        ("avx2", "AuthenticAMD", 26, False),
        (WIDE, "GenuineIntel", 26, False),
    ],
)
def test_where_mkl_leaves_avx512_unused(tmp_path, flags, vendor, family, lacks):
    assert mkl_lacks_avx512(machine(tmp_path, flags, vendor, family)) is lacks
    assert not mkl_lacks_avx512(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("rounds", "largest", "expected"), [(False, 2**22, "bf16"), (False, 2**22 - 1, "ieee"), (True, 2**22, "ieee")]
)
def test_large_float32_matmuls_go_to_onednn_only_where_it_does_not_round(monkeypatch, rounds, largest, expected):
    monkeypatch.setattr(torch_devices, "mkl_lacks_avx512", lambda: True)
    monkeypatch.setattr(torch_devices, "_matmuls_round", lambda: rounds)
    with matmuls_in("float32", "cpu", largest):
        assert torch.backends.mkldnn.matmul.fp32_precision == expected
        assert torch.backends.mkldnn.conv.fp32_precision == "ieee"


def test_rounding_to_bfloat16_is_recognized(monkeypatch):
    assert not torch_devices._matmuls_round()
    one_rounds = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: one_rounds(a.bfloat16().float(), b))
    assert torch_devices._matmuls_round()


@pytest.mark.parametrize(
    ("precision", "on_gpu", "words"),
    [("tf32", False, "needs a GPU"), ("bfloat16", True, "use tf32"), ("bfloat16", False, "; use float32")],
)
def test_what_a_device_does_not_have_is_refused_with_what_to_use(tmp_path, precision, on_gpu, words):
    with pytest.raises(ConfigError, match=f"learner.precision = {precision}: .*{words}"):
        check_precision(precision, on_gpu=on_gpu, root=machine(tmp_path, "avx2"))


def test_what_a_device_has_is_accepted(tmp_path):
    root = machine(tmp_path, "amx_bf16")
    for precision, on_gpu in (("float32", False), ("float32", True), ("tf32", True), ("bfloat16", False)):
        check_precision(precision, on_gpu=on_gpu, root=root)


def test_a_gpu_that_is_too_old_for_tf32_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (7, 5))
    with (
        pytest.raises(ConfigError, match=r"tf32: cuda:0 has a compute capability below 8.0"),
        matmuls_in("tf32", "cuda:0"),
    ):
        pass


def test_the_switches_of_every_library_are_set_and_put_back(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    places = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul]
    before = [place.fp32_precision for place in places]
    with matmuls_in("tf32", "cuda:0"):
        assert [place.fp32_precision for place in places] == ["tf32", "tf32", "ieee"]
    with matmuls_in("float32", "cpu"):
        assert [place.fp32_precision for place in places] == ["ieee", "ieee", "ieee"]
    assert [place.fp32_precision for place in places] == before


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="float32, tf32, bfloat16"):
        LearnerConfig(precision="float16")


def passed(precision, dtype):
    """Output and weight gradients of one pass, by name."""
    with matmuls_in(precision, "cpu", largest_matmul((256, 256), ROWS)):
        generator = torch.Generator().manual_seed(3)
        parameters = new_parameters((22, 256, 256, 1), 2, CPU)
        gradient = exact(new_parameters, parameters.sizes, 2, CPU, dtype=dtype)
        parameters.initialize(generator)
        x = torch.randn(1, ROWS, 22, generator=generator).expand(2, -1, -1).to(dtype)
        used = exact(new_parameters, parameters.sizes, 2, CPU, dtype=dtype)
        used.flat.copy_(parameters.flat)
        buffers = MlpBuffers.allocate(used, ROWS)
        used.forward(x, buffers)
        buffers.grad_out.copy_(torch.linspace(0.5, 1.5, ROWS, dtype=dtype).expand(2, 1, ROWS))
        used.backward(buffers, x.transpose(1, 2), gradient)
        return {
            "out": buffers.out.double(),
            "first": gradient.weights[0].double(),
            "second": gradient.weights[1].double(),
            "head": gradient.head_weight.double(),
        }


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("float32", 1e-5), pytest.param("bfloat16", 5e-2, marks=HAS_UNIT)]
)
def test_values_and_gradients_are_those_of_float64_within_the_precisions_rounding(precision, tolerance):
    # Norm of the error over that of the values; bfloat16 rounds by at most 2^-9 = 0.002; a sum over rows whose
    # terms cancel, as those of the first layer's weights do here, has the error of the terms.
    exact, found = passed("float32", torch.float64), passed(precision, torch.float32)
    errors = {name: float((found[name] - value).norm() / value.norm()) for name, value in exact.items()}
    assert max(errors.values()) < tolerance, errors


@HAS_UNIT
def test_bfloat16_really_rounds_the_inputs_of_large_products_and_only_these():
    exact, found = passed("float32", torch.float32), passed("bfloat16", torch.float32)
    assert not torch.equal(exact["second"], found["second"])
    with matmuls_in("bfloat16", "cpu"):
        gradient = torch.full((100_000,), 1.0 + 2.0**-9)  # bfloat16 would make it 1
        adam = FlatAdam(torch.zeros_like(gradient), gradient, 0.0)
        adam.step()
        assert adam.gradient_norm == pytest.approx(math.sqrt(100_000) * (1.0 + 2.0**-9), rel=5e-4)


@HAS_UNIT
@pytest.mark.parametrize("name", NAMES)
def test_after_many_updates_bfloat16_is_close_to_float32(name):
    config = dataclasses.replace(SECTIONS[name](), hidden_sizes=(64, 64))
    policies = []
    for precision in ("float32", "bfloat16"):
        with matmuls_in(precision, "cpu"):
            algorithm = create(name, OBS, ACT, config, 1)
            policies.append(np.concatenate([v.ravel() for v in algorithm.policy_arrays().values()]))
            for batch in batches(100, ROWS):
                algorithm.update(batch)
            assert algorithm.updates_skipped() == 0
            policies.append(np.concatenate([v.ravel() for v in algorithm.policy_arrays().values()]))
    first, plain, _, rounded = policies
    assert 0 < np.linalg.norm(rounded - plain) < 0.1 * np.linalg.norm(plain - first)
