"""The actor on one device and the critics on another: the same numbers, few bytes, no reward on the actor's side."""

import dataclasses
import json

import pytest
import torch
from harness import verb
from test_algorithms import ACT, OBS, batches, same

from spreeze.algorithms import create
from spreeze.algorithms.placement import Placement
from spreeze.config import PARTS
from spreeze.errors import ConfigError

NAMES = ["ddpg", "sac", "td3"]
ROWS, UPDATES = 32, 1000


def made(name, device, dtype=torch.float32, **options):
    config = dataclasses.replace(PARTS[name](), hidden_sizes=(16, 16))
    return create(name, OBS, ACT, config, 1, device, dtype=dtype, **options)


def cast(batch, dtype):
    return type(batch)(*(x.to(dtype) if isinstance(x, torch.Tensor) else x for x in batch))


def seen_by_actor(batch):
    """What the actor's device is sent: a use of anything else fails."""
    return batch._replace(action=None, obs_action=None, reward=None, terminated=None, discount=None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_a_thousand_updates_of_the_split_are_those_of_one_device(name, dtype, tolerance):
    one, split = made(name, "cpu", dtype), made(name, "cpu+cpu", dtype)
    for batch in batches(UPDATES, ROWS):
        one.update(cast(batch, dtype))
        split.update(cast(batch, dtype), seen_by_actor(cast(batch, dtype)))
    theirs = split.state_arrays()
    for key, value in one.state_arrays().items():
        if value.dtype.kind == "f":
            assert abs(theirs[key] - value).max() <= tolerance * max(abs(value).max(), 1e-12), key


@pytest.mark.parametrize("name", NAMES)
def test_no_more_crosses_in_an_update_than_actions_densities_and_gradients(name):
    split = made(name, "cpu+cpu")
    for batch in batches(10, ROWS):
        split.update(batch)
    temperature = 4 if name == "sac" else 0
    assert 0 < split.crossed_bytes <= 10 * (4 * ROWS * (3 * ACT + 2) + temperature)


def test_nothing_crosses_on_one_device():
    one = made("sac", "cpu")
    for batch in batches(3, ROWS):
        one.update(batch)
    assert one.crossed_bytes == 0


@pytest.mark.parametrize("name", NAMES)
def test_overlapped_the_actor_follows_the_critics_of_before_the_update(name):
    overlapped, parts = made(name, "cpu+cpu", overlap=True), made(name, "cpu")
    for batch in batches(6, ROWS):
        overlapped.update(batch)
        with torch.inference_mode():
            proposal = parts.propose(batch)
            moves = proposal.action is not None
            dq_da = parts.action_gradient(batch, proposal.action).clone() if moves else None
            parts.critic_step(batch, proposal.next_action, proposal.next_log_prob)
            if moves:
                parts.actor_step(dq_da)
            parts.update_targets()
    assert same(overlapped.state_arrays(), parts.state_arrays())


def test_a_split_run_ends_with_the_very_parameters_of_one_device(tmp_path):
    hashes = {
        json.loads(
            verb("train", "--env", "Pendulum-v1", "--mode", "serial", "--updates", "60", "--device", device,
                 "--runs-dir", str(tmp_path / device), "--set", "sac.hidden_sizes=[16,16]", "--json").stdout
        )["parameters_sha256"]
        for device in ("cpu", "cpu+cpu")
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("text", ["cpu+cpu+cpu", "gpu", "cpu+", "cuda:x+cpu"])
def test_what_is_no_device_is_refused_with_the_form_expected(text):
    with pytest.raises(ConfigError, match="expected"):
        Placement.parse(text)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
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


def test_a_run_whose_gpu_is_gone_says_so_at_resume_and_goes_on_where_it_is_told_to(tmp_path):
    common = ("--runs-dir", str(tmp_path), "--json", "--name", "x")
    first = verb("train", "--env", "Pendulum-v1", "--mode", "serial", "--updates", "5", "--device", "cpu",
                 "--set", "sac.hidden_sizes=[8,8]", "--set", "replay.learning_starts=300", *common)
    assert json.loads(first.stdout)["updates"] == 5
    settings = tmp_path / "x" / "config.toml"
    settings.write_text(settings.read_text().replace('device = "cpu"', 'device = "cuda:7"'))
    resume = ("train", "--resume", "x", "--runs-dir", str(tmp_path), "--json", "--updates", "8")
    refused = verb(*resume)
    assert refused.returncode == 2
    assert "learner.device = cuda:7: this machine has" in json.loads(refused.stdout)["error"]
    assert "use --device auto or cpu" in json.loads(refused.stdout)["error"]
    assert json.loads(verb(*resume, "--device", "cpu").stdout)["updates"] == 8
