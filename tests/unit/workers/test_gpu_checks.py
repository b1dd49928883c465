"""Checks of a card: at full size on a GPU (``pytest -m gpu``), small on a processor, graphs on stand-ins."""

import gpu_checks
import pytest
import torch
from gpu_checks import CHECKS, Place, in_child
from played_graphs import PlayedGraph

from spreeze.workers.gpu_replay import NotRecorded

CPU = Place(device="cpu", small=True)
IN_A_CHILD = "out of memory in mid-run"
COMPILES = "fused against eager"


class Pretended(Place):
    """A processor that the checks take for a GPU."""

    on_gpu = True


PRETENDED = Pretended(device="cpu", small=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_a_card_gives_what_it_should(name):
    others = tuple(f"cuda:{index}" for index in range(1, torch.cuda.device_count()))
    found = in_child(name, Place(device="cuda:0", others=others))
    if found.ok is None:
        pytest.skip(found.text)
    assert found.ok, found.text


@pytest.mark.warm
@pytest.mark.parametrize("name", sorted({*CHECKS} - {IN_A_CHILD, COMPILES}))
def test_each_check_runs_on_a_processor(name):
    found = CHECKS[name](CPU)
    only_on_gpus = name in ("graph against eager", "failed capture")
    assert found.ok is (None if only_on_gpus else True), found
    assert "\n" not in found.text


@pytest.mark.warm
def test_a_check_runs_in_a_process_of_its_own(monkeypatch):
    found = in_child(IN_A_CHILD, CPU)
    assert found.ok, found
    assert "times halved, continuing with" in found.text
    assert "KeyError: 'made up'" in in_child("made up", CPU).text
    monkeypatch.setattr(gpu_checks, "LIMIT_S", 0.01)
    assert in_child(IN_A_CHILD, CPU) == (False, "not done within 0 s")


@pytest.mark.slow
def test_fused_kernels_give_the_same_parameter_change():
    found = in_child(COMPILES, CPU)  # the compiler keeps processes of its own
    assert found.ok, found


# --- what only a card has, on stand-ins ---


class Idle(PlayedGraph):
    def replay(self):
        self.replays += 1


class Refusing(PlayedGraph):
    def record(self, work, generators):
        super().record(work, generators)
        raise NotRecorded("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("graph", "ok", "words"),
    [
        (PlayedGraph, True, "tolerance 0.01), 10 cases; the host waited 0 times"),
        (Idle, False, "parameter changes differ by"),
        (Refusing, False, "sac: no CUDA graphs: recording failed"),
    ],
)
def test_graphs_are_compared_with_single_kernels(monkeypatch, graph, ok, words):
    monkeypatch.setattr(gpu_checks, "new_graph", lambda trainer, device: graph(trainer.algorithm))
    found = gpu_checks.graph_against_eager(PRETENDED)
    assert (found.ok, words in found.text) == (ok, True), found


def test_a_recording_that_fails_is_right_where_updates_go_on(monkeypatch):
    class Spoils:
        def __init__(self, device):
            assert device == torch.device("cpu")

        def record(self, work, generators):
            raise NotRecorded("a wait of the host (pretended)")

    monkeypatch.setattr(gpu_checks, "CudaGraph", Spoils)
    found = gpu_checks.failed_capture(PRETENDED)
    assert found.ok, found
    assert found.text.endswith("recording failed: a wait of the host (pretended)")


def test_parameter_changes_that_differ_are_wrong_and_the_worst_case_is_named(monkeypatch):
    change = gpu_checks._parameter_change

    def off(case, place, device, dtype, **options):
        return change(case, place, device, dtype, **options) * (1.2 if device == "cpu+cpu" else 1.0)

    monkeypatch.setattr(gpu_checks, "_parameter_change", off)
    found = gpu_checks.split_against_one(CPU)
    assert not found.ok
    assert "parameter changes differ by 2.0e-01 relative to their length at most" in found.text
