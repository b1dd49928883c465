"""The bench of a card, on a processor in small: rates from the tuner's probe, their verdict, the time that it keeps."""

import argparse
import dataclasses
import runpy

import pytest
import torch
from figures import row
from harness import PATIENCE_S, REPO

from spreeze.cli import bench
from spreeze.cli.bench import BATCHES, KINDS, Rate, gpu_rows, missing_device, rates_to_measure, timer
from spreeze.machine.hardware import GpuReport


@pytest.mark.warm
def test_rates_of_a_processor_come_from_the_tuners_probe(monkeypatch):
    for limit_s in ("spreeze.cli.bench._DEADLINE_S", "spreeze.tuner.measure._LOADING_S"):
        monkeypatch.setattr(limit_s, PATIENCE_S)
    with timer("cpu") as measure:
        found = measure(Rate("float32", 64, "eager"), 2)
        refused = [
            measure(Rate(precision, 64, kind), 2)
            for precision, kind in (("float32", "graph"), ("float32", "replay on the host"), ("tf32", "eager"))
        ]
    machine = bench.read_machine()
    small = dataclasses.replace(machine, memory=dataclasses.replace(machine.memory, usable_bytes=10**9))
    monkeypatch.setattr(bench, "read_machine", lambda: small)
    with timer("cpu") as measure:
        failed = measure(Rate("float32", 2**24, "eager"), 2)
    assert len(found["repeats"]) == 2
    assert min(found["repeats"]) > 0
    assert found["update_frames_per_s"] == pytest.approx(64 * found["value"])
    assert [one["value"] for one in [*refused, failed]] == [None] * 4
    assert "learner.precision = tf32" in refused[2]["failure"]
    assert failed["failure"].partition(":")[0] == "out of memory"


def test_a_card_is_timed_at_every_batch_and_kind_once():
    rates = rates_to_measure("cuda:0")
    assert len(rates) == len(set(rates))
    for precision in ("float32", "tf32"):
        assert [one.batch_size for one in rates if one[::2] == (precision, "graph")] == list(BATCHES)
    assert {one.kind for one in rates} == set(KINDS)
    assert {one.precision for one in rates} == {"float32", "tf32", "bfloat16"}
    assert {one.precision for one in rates_to_measure("cpu")} == {"float32", "bfloat16"}


def rate(batch_size, updates_per_s, kind="graph"):
    return row(
        "updates_per_s",
        "1/s",
        [updates_per_s] * 2,
        precision="tf32",
        batch_size=batch_size,
        kind=kind,
        update_frames_per_s=updates_per_s * batch_size,
    )


def test_every_figure_of_a_card_stands_beside_its_target():
    script = runpy.run_path(str(REPO / "tests" / "benchmarks" / "gpu.py"))
    verdict, knees = script["verdict"], script["knees"]
    rates = [rate(batch, 5000.0 / (1 + batch / 8192)) for batch in BATCHES]
    first, at_8192, best = verdict(rates)
    assert (first["value"], first["verdict"]) == (pytest.approx(4848.5, abs=0.1), "met")
    assert (at_8192["value"], at_8192["verdict"]) == (2500.0 * 8192, "met")
    assert (best["batch_size"], best["verdict"]) == (65_536, "met")
    # t(B) = (1 + B / 8192) / 5000: 85 % of the asymptotic rate needs 0.85 / 0.15 * 8192 = 46,421 rows.
    assert [one["value"] for one in knees(rates)] == [65_536]
    assert [one["verdict"] for one in verdict([rate(256, 10.0), rate(256, 9000.0, "eager")])] == [
        "missed", "not taken", "missed"]  # fmt: skip
    assert {one["verdict"] for one in verdict([])} == {"not taken"}


def test_what_does_not_fit_into_the_time_is_left_out(monkeypatch):
    taken, said, now = [], [], iter(range(0, 10**6, 20))

    class Timer:
        def __init__(self, device):
            pass

        def __enter__(self):
            return lambda one, repeats: taken.append(one) or rate(one.batch_size, 5.0, one.kind)

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(bench, "timer", Timer)
    args = argparse.Namespace(device="cpu", minutes=1.0, repeats=2)
    gpu_rows(args, said.append, clock=lambda: float(next(now)))
    assert 0 < len(taken) < len(rates_to_measure("cpu")) == len(said)
    assert "skipped: needs 40 s, more than is left of 1 minutes" in said[-1]


@pytest.mark.parametrize(
    ("built", "gpus", "words"),
    [
        (
            None,
            (),
            "is built without CUDA, and no NVIDIA driver: gone; install a CUDA build of PyTorch on a machine with",
        ),
        (None, ("a card",), "is built without CUDA; install a CUDA build of PyTorch, or try"),
        ("12.9", ("a card",), "PyTorch finds no GPU that it can use; update the NVIDIA driver"),
        ("12.9", (), "no CUDA device: no NVIDIA driver: gone; use a machine with an NVIDIA GPU and its driver, or try"),
    ],
)
def test_without_a_card_one_line_says_what_is_missing(monkeypatch, built, gpus, words):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "read_gpus", lambda: GpuReport(gpus, "no NVIDIA driver: gone"))
    said = missing_device()
    assert words in said
    assert said.endswith("try the bench itself with --device cpu")


def test_the_command_ends_with_the_code_of_a_request_that_cannot_work(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    shown = capsys.readouterr().err
    assert (shown.count("\n"), shown.startswith("error: no CUDA device")) == (1, True)
