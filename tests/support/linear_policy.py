"""A policy of one matrix, a = tanh(gain obs), for tests of those who only look at policies."""

import dataclasses

import numpy as np
from fault_envs import FAULT_ID as FAULT
from harness import poll

from spreeze.inference.policy import Policy
from spreeze.types import Box, EnvSpec

FAULT_MODULE = "fault_envs"
SPEC = EnvSpec(
    env_id=FAULT, import_module=FAULT_MODULE, obs_dim=3, action=Box((-2.0,), (2.0,)),
    max_episode_steps=50, reward_threshold=None,
)  # fmt: skip
GOOD = np.array([[-2.0, -4.0, 0.0]], np.float32)
IDLE = np.zeros((1, 3), np.float32)
BAD = np.array([[2.0, 0.0, 0.0]], np.float32)


def arrays(gain):
    return {"head_w": np.ascontiguousarray(gain.T), "head_b": np.zeros(len(gain), np.float32)}


def policy_of(gain):
    return Policy.from_weights(arrays(gain), meta(1))


def meta(version):
    return {
        "algo": "sac",
        "policy": "deterministic",
        "hidden_sizes": [],
        "obs_dim": 3,
        "action_dim": 1,
        "env": dataclasses.asdict(SPEC),
        "env_steps": 100 * version,
        "updates": version,
        "wall_s": version / 2,
    }


def publish(store, gain, version, epoch=1):
    return store.publish(arrays(gain), meta(version), epoch, version)


def wait_until(condition):
    poll(condition, what="what the test waits for")
