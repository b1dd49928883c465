"""The actor on one device and the critics on another: the same numbers, few bytes, no reward on the actor's side."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from batches import ACT, OBS, batches, exact, same
from harness import run_command
from learner_rates import CountedSplit

from spreeze.algorithms import create
from spreeze.algorithms.off_policy import DeviceSplit
from spreeze.config.schema import SECTIONS
from spreeze.errors import ConfigError
from spreeze.metrics.store import MetricsReader
from spreeze.transport.checkpoint import CheckpointStore

NAMES = ["ddpg", "sac", "td3"]
ROWS = 32


def made(name, device, dtype=torch.float32, **options):
    config = dataclasses.replace(SECTIONS[name](), hidden_sizes=(16, 16))
    return exact(create, name, OBS, ACT, config, 1, device, dtype=dtype, **options)


def cast(batch, dtype):
    return type(batch)(*(x.to(dtype) if isinstance(x, torch.Tensor) else x for x in batch))


def seen_by_actor(batch):
    """What the actor's device is sent: a use of anything else fails."""
    return batch._replace(action=None, obs_action=None, reward=None, terminated=None, discount=None)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@pytest.mark.parametrize(("name", "updates"), [
    *((name, 100) for name in NAMES), *(pytest.param(name, 1000, marks=pytest.mark.slow) for name in NAMES),
])  # fmt: skip
def test_updates_of_the_split_are_those_of_one_device(name, updates, dtype, tolerance):
    one, split = made(name, "cpu", dtype), made(name, "cpu+cpu", dtype)
    for batch in batches(updates, ROWS):
        one.update(cast(batch, dtype))
        split.update(cast(batch, dtype), seen_by_actor(cast(batch, dtype)))
    theirs = split.state_arrays()
    for key, value in one.state_arrays().items():
        if value.dtype.kind == "f":
            assert abs(theirs[key] - value).max() <= tolerance * max(abs(value).max(), 1e-12), key


@pytest.mark.parametrize("name", NAMES)
def test_no_more_crosses_in_an_update_than_actions_densities_and_gradients(name):
    split = made(name, "cpu+cpu")
    devices = CountedSplit(split)
    for batch in batches(10, ROWS):
        split.update(batch)
    temperature = 4 if name == "sac" else 0
    assert 0 < devices.crossed_bytes <= 10 * (4 * ROWS * (3 * ACT + 2) + temperature)


def test_nothing_crosses_on_one_device():
    one = made("sac", "cpu")
    devices = CountedSplit(one)
    for batch in batches(3, ROWS):
        one.update(batch)
    assert devices.crossed_bytes == 0


@pytest.mark.parametrize("name", NAMES)
def test_overlapped_the_actor_follows_the_critics_of_before_the_update(name):
    overlapped, parts = made(name, "cpu+cpu", overlap=True), made(name, "cpu")
    for batch in batches(6, ROWS):
        overlapped.update(batch)
        with torch.inference_mode():
            outputs = parts.actor_forward(batch)
            moves = outputs.action is not None
            dq_da = parts.action_gradient(batch, outputs.action).clone() if moves else None
            parts.critic_step(batch, outputs.next_action, outputs.next_log_prob)
            if moves:
                parts.actor_step(dq_da)
            parts.update_targets()
            parts.updates += 1
    assert same(overlapped.state_arrays(), parts.state_arrays())


@pytest.mark.warm
def test_a_split_run_ends_with_the_very_parameters_of_one_device(tmp_path):
    hashes = {
        json.loads(
            run_command(
                *f"train --env Pendulum-v1 --mode serial --updates 60 --device {device} --json".split(),
                *("--set", "sac.hidden_sizes=[16,16]", "--runs-dir", tmp_path / device),
            ).stdout
        )["parameters_sha256"]
        for device in ("cpu", "cpu+cpu")
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("text", ["cpu+cpu+cpu", "gpu", "cpu+", "cuda:x+cpu"])
def test_what_is_no_device_is_refused_with_the_form_expected(text):
    with pytest.raises(ConfigError, match="expected"):
        DeviceSplit.parse(text)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu+cuda:0", "cuda:0+cuda:0"])
@pytest.mark.parametrize("name", ["ddpg"])  # the others draw noise, which differs between device kinds
def test_with_a_gpu_the_split_is_close_to_one_device(name, device):
    one, split = made(name, "cpu"), made(name, device)
    for batch in batches(100, ROWS):
        one.update(batch)
        there = type(batch)(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in batch))
        actor = there if device.startswith("cuda") else batch
        split.update(there, actor)
    theirs = split.policy_arrays()
    for key, value in one.policy_arrays().items():
        assert abs(theirs[key] - value).max() <= 1e-3, key


class CudaGenerator:
    """As far as a checkpoint sees it, a generator of a CUDA device: its state is seed and offset, 16 bytes."""

    def __init__(self):
        self.state = torch.zeros(16, dtype=torch.uint8)

    def get_state(self):
        return self.state.clone()

    def set_state(self, state):
        if state.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        self.state = state.clone()

    def manual_seed(self, seed):
        self.state = torch.from_numpy(cuda_state(seed))


def cuda_state(seed=1, offset=40):
    return np.array([seed, offset], dtype=np.int64).view(np.uint8)


def trained_five(name):
    algorithm = made(name, "cpu")
    for batch in batches(5, ROWS):
        algorithm.update(batch)
    return algorithm


def of_cuda(arrays):
    """The arrays of a checkpoint as they would be from a GPU."""
    return {key: cuda_state() if key.endswith("generator") else value for key, value in arrays.items()}


def without_noise(arrays):
    return {key: value for key, value in arrays.items() if not key.endswith("generator")}


def noise_of(algorithm):
    return {key: value for key, value in algorithm.state_arrays().items() if key.endswith("generator")}


@pytest.mark.parametrize("name", NAMES)
def test_noise_of_a_gpu_is_seeded_anew_on_the_processor_and_all_else_taken_over(name):
    first = trained_five(name)
    stored, state, found = of_cuda(first.state_arrays()), first.state_json(), []
    for seed, updates in ((1, 5), (1, 5), (2, 5), (1, 6)):
        other = made(name, "cpu")
        untouched = noise_of(other)
        assert other.load_state_arrays(stored) is False
        other.load_state_json({**state, "updates": updates})
        other.seed_noise(seed)
        assert same(without_noise(other.state_arrays()), without_noise(stored))
        assert not same(noise_of(other), untouched), "the noise of the first updates is not drawn again"
        found.append(noise_of(other))
        for batch in batches(2, ROWS):
            other.update(batch)
        assert other.updates_skipped() == 0
    assert same(found[0], found[1])
    assert not same(found[0], found[2])
    assert not same(found[0], found[3])
    again = made(name, "cpu")
    assert again.load_state_arrays(first.state_arrays()) is True
    assert same(again.state_arrays(), first.state_arrays())


@pytest.mark.parametrize("name", NAMES)
def test_noise_of_a_processor_is_seeded_anew_on_a_gpu_and_that_of_another_gpu_taken_over(name):
    first, there = trained_five(name), made(name, "cpu")
    there.generator = CudaGenerator()
    assert there.load_state_arrays(first.state_arrays()) is False
    there.load_state_json(first.state_json())
    there.seed_noise(1)
    assert same(without_noise(there.state_arrays()), without_noise(first.state_arrays()))
    assert there.generator.get_state().any()
    assert there.load_state_arrays(of_cuda(first.state_arrays())) is True
    assert np.array_equal(there.generator.get_state().numpy(), cuda_state())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("first", "second"), [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:0")])
def test_with_a_gpu_state_moves_between_the_kinds_of_device(name, first, second):
    one, other = made(name, first), made(name, second)
    for batch in batches(5, ROWS):
        one.update(type(batch)(*(x.to(first) if isinstance(x, torch.Tensor) else x for x in batch)))
    fits = other.load_state_arrays(one.state_arrays())
    other.load_state_json(one.state_json())
    assert fits == (first == second)
    if not fits:
        other.seed_noise(1)
    assert same(without_noise(other.state_arrays()), without_noise(one.state_arrays()))
    for batch in batches(5, ROWS):
        other.update(type(batch)(*(x.to(second) if isinstance(x, torch.Tensor) else x for x in batch)))
    assert other.updates_skipped() == 0


@pytest.mark.warm
@pytest.mark.parametrize("mode", ["serial", pytest.param("spreeze", marks=pytest.mark.slow)])
def test_a_run_whose_gpu_is_gone_says_so_at_resume_and_goes_on_where_it_is_told_to(tmp_path, mode):
    common = ("--runs-dir", str(tmp_path), "--json", "--name", "x")
    first = run_command(
        *f"train --env Pendulum-v1 --mode {mode} --updates 5 --device cpu --samplers 1 --batch-size 32".split(),
        *("--no-visualizer", "--set", "sac.hidden_sizes=[8,8]", "--set", "replay.learning_starts=300"),
        *("--set", "evaluation.episodes=1", *common),
    )
    assert json.loads(first.stdout)["updates"] == 5
    # What a run of a GPU leaves behind: the name of the device, and a checkpoint with the state of its generator.
    settings = tmp_path / "x" / "config.toml"
    settings.write_text(settings.read_text().replace('device = "cpu"', 'device = "cuda:7"'))
    store = CheckpointStore(tmp_path / "x" / "checkpoints")
    kept = store.load_latest()
    store.save(of_cuda(kept.tensors), kept.state, epoch=kept.epoch + 1, updates=kept.updates, keep=1)
    resume = ("train", "--resume", "x", "--runs-dir", str(tmp_path), "--json", "--updates", "8")
    refused = run_command(*resume)
    assert refused.returncode == 2
    assert "learner.device = cuda:7: this machine has" in json.loads(refused.stdout)["error"]
    assert "use --device auto or cpu" in json.loads(refused.stdout)["error"]
    resumed = run_command(*resume, "--device", "cpu")
    assert json.loads(resumed.stdout)["updates"] == 8
    assert "the noise of updates is reseeded from seed 1 and update 5" in resumed.stderr
    events = [event.text for event in MetricsReader(tmp_path / "x" / "metrics.db").events(1000)]
    assert len([text for text in events if "reseeded" in text]) == 1
    # From then on it is a run of the processor: nothing is seeded again.
    again = run_command(*resume[:-1], "10", "--device", "cpu")
    assert json.loads(again.stdout)["updates"] == 10
    assert "reseeded" not in again.stderr
