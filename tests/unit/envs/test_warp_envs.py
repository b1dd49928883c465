"""MuJoCo Warp's walkers beside Gymnasium's, on the processor; and what is said where the package is missing."""

import importlib.util

import gymnasium
import numpy as np
import pytest

from spreeze.envs.families import mujoco_warp
from spreeze.envs.make import make_env
from spreeze.errors import EnvError

needs_mujoco = pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="mujoco is not installed")
needs_warp = pytest.mark.skipif(importlib.util.find_spec("mujoco_warp") is None, reason="mujoco-warp is not installed")


@pytest.fixture
def unoptimized(monkeypatch):
    """Kernels are compiled in half of the time."""
    monkeypatch.setattr("warp.config.optimization_level", 0)


@pytest.mark.skipif(importlib.util.find_spec("mujoco_warp") is not None, reason="mujoco-warp is installed")
def test_a_missing_package_is_named():
    with pytest.raises(EnvError, match=r"warp:Ant-v5 needs mujoco-warp: pip install 'spreeze\[warp\]'"):
        mujoco_warp("Ant-v5", 4, 0, {})


@needs_mujoco
def test_one_environment_is_gymnasiums_own():
    env = make_env("warp:Hopper-v5", args=("device=cpu", "reset_noise_scale=0.0"))
    assert env.spec.id == "Hopper-v5"
    assert env.reset(seed=1)[0][0] == 1.25
    env.close()


@needs_warp
@needs_mujoco
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Hopper-v5"])
def test_steps_are_gymnasiums_within_float32(name):
    import torch

    env = mujoco_warp(name, 4, 0, {"device": "cpu"})
    obs, _ = env.reset(seed=3)
    known = gymnasium.make(name).unwrapped
    known.reset(seed=0)
    known.set_state(*(env._state[part][0].double().numpy() for part in ("qpos", "qvel")))
    np.testing.assert_allclose(known._get_obs(), obs[0].numpy(), atol=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(3):
        action = rng.uniform(known.action_space.low, known.action_space.high).astype(np.float32)
        wanted, reward, terminated, *_ = known.step(action)
        _, rewards, ends, _, info = env.step(torch.from_numpy(np.stack([action] * 4)))
        np.testing.assert_allclose(info["final_obs"][0].numpy(), wanted, rtol=1e-3, atol=1e-3)
        assert rewards[0].item() == pytest.approx(reward, abs=1e-3)
        assert bool(ends[0]) == terminated


@needs_warp
@needs_mujoco
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("unoptimized")
def test_an_unhealthy_hopper_begins_again_and_keeps_its_last_observation():
    import torch

    env = mujoco_warp("Hopper-v5", 2, 0, {"device": "cpu"})
    env.reset(seed=1)
    env._state["qpos"][0, 1] = 0.3  # fallen
    obs, _, terminated, truncated, info = env.step(torch.zeros(2, 3))
    assert (terminated.tolist(), truncated.tolist()) == ([True, False], [False, False])
    assert info["final_obs"][0, 0] < 0.7 < obs[0, 0]
    assert torch.equal(info["final_obs"][1], obs[1])


@needs_warp
@needs_mujoco
def test_other_tasks_are_refused_by_name():
    with pytest.raises(EnvError, match=r"warp has no 'Reacher-v5'.*it has HalfCheetah-v5, Hopper-v5"):
        mujoco_warp("Reacher-v5", 2, 0, {})
