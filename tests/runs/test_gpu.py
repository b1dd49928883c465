"""On a real GPU: what the stand-ins of the other files pretend, and whole runs. ``pytest -m gpu`` runs all of it.

Without a CUDA device every test that bears the mark is skipped with that reason (``conftest.py``).
"""

import json

import numpy as np
import pytest
import torch
from harness import HIDDEN_SIZES, PENDULUM, Run, train, train_until
from rings import put, ring_of, wait_for, writer_process

from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.replay_ring import ReplayReader, ShardWriter, row_checksum
from spreeze.transport.weights import WeightsStore
from spreeze.workers.gpu_replay import GpuReplay

pytestmark = pytest.mark.gpu
GPU = "cuda:0"
DRAWS = 4096
NO_FRAME = np.empty(0, np.uint8)


def _mirror(ring):
    return GpuReplay(ReplayReader(ring), DRAWS, torch.device(GPU), 5)


def test_rows_mirrored_on_the_gpu_are_the_ring_s_bit_for_bit_from_the_first_pull_on():
    for seed in range(20):  # each time new memory, whose zeros must not come after the rows
        with ring_of(rows=4096) as ring:
            put(ShardWriter(ring, 0), 1000 * seed + 1, 3000)
            mirror = _mirror(ring)
            mirror.pull()
            drawn, logical = mirror.draw().cpu().numpy(), mirror.logical.cpu().numpy()
            assert mirror.available == 3000
            assert drawn.tobytes() == ring.rows[logical].tobytes()


def test_no_row_on_the_gpu_is_torn_beside_a_writer_that_never_pauses():
    with ring_of(rows=2048) as ring, writer_process(ring, 0, 10**9):
        wait_for(lambda: ring.total_committed() > 4000)
        mirror, checked = _mirror(ring), 0
        while checked < 50 * DRAWS:
            mirror.pull()
            if not mirror.available:
                continue
            rows, logical = mirror.draw().cpu().numpy(), mirror.logical.tolist()
            expected = rows[:, -1].copy().view(np.uint32).tolist()
            assert [row_checksum(row, NO_FRAME, n) for row, n in zip(rows, logical, strict=True)] == expected
            checked += DRAWS


def _saved(path):
    return CheckpointStore(path / "checkpoints").load_latest()


def _learned(run, updates=200):
    return run.numbers().get("updates", 0) >= updates


def test_a_run_on_the_gpu_mirrors_replay_and_launches_graphs(tmp_path):
    run, code, document = train_until(tmp_path, _learned, *PENDULUM, "--device", GPU)
    assert code == 0, run.stderr
    assert (document["device"], document["restarts"], document["error"]) == (GPU, 0, None)
    events = run.events()
    assert any(f"replay is mirrored on {GPU}" in event for event in events), events
    assert not any("no CUDA graphs" in event for event in events), events
    assert run.numbers()["updates_skipped"] == 0
    weights = WeightsStore(run.path / "weights").read_latest()
    assert weights.version == document["updates"]
    assert all(np.isfinite(array).all() for array in weights.arrays.values())


@pytest.mark.parametrize("device", [f"{GPU}+{GPU}", f"cpu+{GPU}", f"{GPU}+cpu"])
def test_a_split_run_learns(tmp_path, device):
    run, code, document = train_until(tmp_path, _learned, *PENDULUM, "--device", device)
    assert code == 0, run.stderr
    assert (document["device"], document["restarts"], document["error"]) == (device, 0, None)


@pytest.mark.gpu(2)
def test_a_run_split_over_two_gpus_learns(tmp_path):
    run, code, document = train_until(tmp_path, _learned, *PENDULUM, "--device", "split")
    assert code == 0, run.stderr
    assert (document["device"], document["restarts"], document["error"]) == ("cuda:0+cuda:1", 0, None)


@pytest.mark.parametrize("mode", ["spreeze", "serial"])
@pytest.mark.parametrize(("first", "second"), [(GPU, "cpu"), ("cpu", GPU)])
def test_a_run_goes_on_on_the_other_kind_of_device(tmp_path, mode, first, second):
    run, code, document = train(tmp_path, *PENDULUM, "--mode", mode, "--device", first, "--updates", "50")
    assert (code, document["updates"], document["device"]) == (0, 50, first), run.stderr
    left = _saved(run.path)
    run, code, document = train(tmp_path, "--resume", "run", "--device", second, "--updates", "80", tiny=())
    assert (code, document["updates"], document["device"]) == (0, 80, second), run.stderr
    found = _saved(run.path)
    assert found.updates == 80
    assert {name: array.shape for name, array in found.tensors.items() if "generator" not in name} == {
        name: array.shape for name, array in left.tensors.items() if "generator" not in name}  # fmt: skip


def test_a_learner_on_the_gpu_that_is_killed_goes_on_from_its_checkpoint(tmp_path):
    with Run(tmp_path, *PENDULUM, "--device", GPU, "--set", "learner.checkpoint_interval_s=0.5") as run:
        store = CheckpointStore(run.path / "checkpoints")
        run.wait_for(store.paths, what="a checkpoint")
        run.children()["learner"].kill()
        run.wait_for(lambda: run.numbers().get("restarts", 0) >= 1, what="a restart")
        run.until_progress()
        code, document = run.stop()
    assert (code, document["restarts"], document["error"]) == (0, 1, None)


@pytest.mark.parametrize(("algo", "mode"), [("ppo", "serial"), ("a2c", "serial"), ("impact", "impact")])
def test_on_policy_learners_run_on_the_gpu(tmp_path, algo, mode):
    run, code, document = train(
        tmp_path, *PENDULUM, "--mode", mode, "--algo", algo, "--device", GPU, "--samplers", "1",
        "--envs-per-sampler", "4", "--sync-interval", "32", "--set", f"{algo}.hidden_sizes={HIDDEN_SIZES}",
        "--updates", "20", tiny=("--no-visualizer", "--set", "evaluation.episodes=1"),
    )  # fmt: skip
    assert (code, document["device"]) == (0, GPU), run.stderr
    assert document["updates"] >= 20
    assert json.loads((run.path / "summary.json").read_text())["error"] is None
