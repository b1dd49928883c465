"""PPO and A2C learn tiny tasks in seconds, one interval behind, through rollouts and the published NumPy policy."""

import numpy as np
import pytest
from rollouts import learner, task

from spreeze.envs.task import make_task
from spreeze.inference.policy import Policy
from spreeze.types import RolloutBatch

STEPS, ENVS = 32, 16


class Poles:
    """CartPole-v1 sixteen times."""

    def __init__(self, seed):
        self.tasks = [make_task("CartPole-v1") for _ in range(ENVS)]
        self.obs = np.stack([pole.reset(seed=seed + row) for row, pole in enumerate(self.tasks)])

    def rollout(self, policy, rng):
        steps = []
        for _ in range(STEPS):
            obs = self.obs.copy()
            action, log_prob, _ = policy.sample(obs, rng.random((ENVS, 1)).astype(np.float32))
            found = [pole.step(own) for pole, own in zip(self.tasks, action, strict=True)]
            next_obs, reward, terminated, truncated = (np.array(column) for column in zip(*found, strict=True))
            ended = np.flatnonzero(terminated | truncated)
            self.obs = next_obs.copy()
            for row in ended:
                self.obs[row] = self.tasks[row].reset()
            steps.append((obs, action, log_prob, reward.astype(np.float32), terminated, truncated, next_obs))
        return RolloutBatch(*(np.stack(column) for column in zip(*steps, strict=True)))

    def greedy_return(self, policy):
        obs, alive, total = self.obs, np.ones(ENVS, bool), 0
        for row, pole in enumerate(self.tasks):
            obs[row] = pole.reset(seed=1000 + row)
        while alive.any():
            action = policy.act(obs, ())[0]
            for row in np.flatnonzero(alive):
                obs[row], _, terminated, truncated = self.tasks[row].step(action[row])
                alive[row] = not (terminated or truncated)
                total += 1
        for row, pole in enumerate(self.tasks):
            obs[row] = pole.reset(seed=2000 + row)
        return total / ENVS


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_a_pole_stands_after_some_ten_thousand_steps_learned_from_one_interval_late(name):
    settings = {"gamma": 0.98, "gae_lambda": 0.9, "lr_schedule": "constant", "entropy_coef": 0.0}
    settings |= {"lr": 1e-3} if name == "ppo" else {"lr": 3e-3, "normalize_advantage": True}
    spec = task(obs_dim=4, discrete=True)
    algorithm = learner(name, spec, "delayed", **settings)
    poles, rng, before, best = Poles(1), np.random.default_rng(1), None, 0.0
    for interval in range(200):
        policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
        if interval % 10 == 9:
            best = max(best, poles.greedy_return(policy))
            if best >= 300:
                break
        collected = poles.rollout(policy, rng)
        if before is not None:
            algorithm.learn(before, None)
        before = collected
    assert best >= 300
    assert algorithm.updates_skipped() == 0
    for pole in poles.tasks:
        pole.close()


@pytest.mark.parametrize(("name", "correction"), [
    ("ppo", "on-policy"), ("ppo", "delayed"), ("a2c", "none"), ("a2c", "truncated-is"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("ppo", "none"), ("ppo", "truncated-is"), ("a2c", "on-policy"), ("a2c", "delayed"))),
])  # fmt: skip
def test_a_gaussian_policy_finds_the_best_action_of_a_bandit(name, correction):
    """Reward is minus the squared distance to (0.5, -0.5); every step ends its episode."""
    spec, rng = task(obs_dim=1), np.random.default_rng(0)
    settings = {"epochs": 4, "minibatch_size": 10**6} if name == "ppo" else {}
    algorithm = learner(
        name,
        spec,
        correction,
        lr=1e-2,
        lr_schedule="constant",
        hidden_sizes=(8,),
        initial_log_std=-1.0,
        normalize_advantage=True,
        **settings,
    )
    obs, ones, before = np.ones((64, 1, 1), np.float32), np.ones((64, 1), bool), None
    for _ in range(120):
        policy = Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta())
        action, log_prob, _ = policy.sample(obs[:, 0], rng.standard_normal((64, 2)).astype(np.float32))
        reward = -((action - [0.5, -0.5]) ** 2).sum(1, keepdims=True).astype(np.float32)
        collected = RolloutBatch(obs, action[:, None], log_prob[:, None], reward, ones, ~ones, obs)
        if (data := collected if correction == "on-policy" else before) is not None:
            algorithm.learn(data, None)
        before = collected
    np.testing.assert_allclose(policy.act(obs[0], ())[0][0], [0.5, -0.5], atol=0.12)
