"""Each algorithm learns a tiny task in seconds, through rows, updates and the published NumPy policy."""

import numpy as np
import pytest
import torch
from n_step import NStep

from spreeze.algorithms import create
from spreeze.algorithms.sac import SACConfig
from spreeze.algorithms.td3 import DDPGConfig, TD3Config
from spreeze.inference.policy import Policy
from spreeze.types import RowLayout

STEPS, STRIDE, GAMMA = 5, 0.4, 0.9
COMMON = {"hidden_sizes": (32, 32), "actor_lr": 3e-3, "critic_lr": 3e-3, "gamma": GAMMA, "tau": 0.02}
CONFIGS = {
    "sac": SACConfig(**COMMON, alpha_lr=3e-3, initial_alpha=0.2, target_entropy_per_action=-2.0),
    "td3": TD3Config(**COMMON),
    "ddpg": DDPGConfig(**COMMON),
}


class Reach:
    """N points in the plane walk to the origin: reward is minus the distance; truncated after STEPS."""

    def __init__(self, rng, num):
        self.rng, self.num = rng, num

    def reset(self):
        self.position = self.rng.uniform(-1, 1, (self.num, 2)).astype(np.float32)
        return self.position.copy()

    def step(self, action):
        self.position = self.position + STRIDE * action
        return self.position.copy(), -np.linalg.norm(self.position, axis=1)


def greedy_return(policy, seed=123):
    task = Reach(np.random.default_rng(seed), 200)
    obs, total = task.reset(), 0.0
    for _ in range(STEPS):
        obs, reward = task.step(policy.act(obs, ())[0])
        total += reward.mean()
    return total


def best_return(seed=123):
    """Straight to the origin, as far as each component's stride allows."""
    task = Reach(np.random.default_rng(seed), 200)
    obs, total = task.reset(), 0.0
    for _ in range(STEPS):
        obs, reward = task.step(np.clip(-obs / STRIDE, -1, 1))
        total += reward.mean()
    return total


def collect(policy, rng, layout, episodes):
    """Rows of ``episodes`` exploring episodes."""
    task = Reach(rng, episodes)
    obs, rows = task.reset(), []
    windows = [NStep(layout.n_step, GAMMA) for _ in range(episodes)]
    for t in range(STEPS):
        action = policy.act(obs, (), rng)[0]
        next_obs, reward = task.step(action)
        for i, window in enumerate(windows):
            for row in window.push(obs[i], action[i], float(reward[i]), False, t == STEPS - 1, next_obs[i]):
                tail = [row.num_steps] if layout.n_step > 1 else []
                rows.append(np.concatenate([row.obs, row.action, [row.reward, row.terminated], row.next_obs, tail]))
        obs = next_obs
    return np.array(rows, np.float32)


def train(name, rounds=30, updates=20, n_step=1):
    rng, layout = np.random.default_rng(0), RowLayout(2, 2, n_step)
    algorithm = create(name, 2, 2, CONFIGS[name], seed=0)
    policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    untrained = greedy_return(policy)
    replay = np.zeros((0, layout.width), np.float32)
    for _ in range(rounds):
        replay = np.concatenate([replay, collect(policy, rng, layout, 10)])
        for _ in range(updates):
            drawn = torch.from_numpy(replay[rng.integers(len(replay), size=64)])
            algorithm.update(layout.split(drawn, GAMMA))
        policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
    assert algorithm.updates_skipped() == 0
    return untrained, greedy_return(policy)


def share_of_gap(untrained, learned):
    """1.0 is the best possible return, 0.0 that of the untrained policy."""
    return (learned - untrained) / (best_return() - untrained)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_learns_to_reach_the_target(name):
    assert share_of_gap(*train(name)) > 0.9


def test_learns_from_three_step_returns_too():
    assert share_of_gap(*train("td3", n_step=3)) > 0.7
