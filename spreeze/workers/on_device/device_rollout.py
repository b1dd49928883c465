"""Rollouts on the learner's device: collected there, and learned from without a copy to the host.

Advantages are those of ``losses.advantages``, in torch. A step without a transition (a reset, a bad value) has
advantage 0 and its own value as the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spreeze.algorithms.on_policy import OnPolicyAlgorithm, Samples
from spreeze.envs.on_device.device_task import DeviceStep
from spreeze.inference.normalizer import REWARD_CLIP
from spreeze.workers.on_device.device_actor import DeviceActor, scaled, statistics_of


class DeviceRollout:
    """T env steps of N environments on a device; ``store`` fills it from the first step on."""

    def __init__(self, steps: int, num_envs: int, obs_dim: int, action_dim: int, actor: DeviceActor) -> None:
        """``actor`` has the log-probabilities of the actions that are stored."""
        shape, device, self._actor = (steps, num_envs), actor.device, actor
        self.obs, self.next_obs = (torch.zeros((*shape, obs_dim), device=device) for _ in range(2))
        self.action = torch.zeros((*shape, action_dim), device=device)
        self.log_prob, self.reward = (torch.zeros(shape, device=device) for _ in range(2))
        self.terminated, self.over, self.good = (torch.zeros(shape, dtype=torch.bool, device=device) for _ in range(3))
        self.steps, self.at = steps, 0

    @property
    def full(self) -> bool:
        return self.at == self.steps

    def store(self, obs: Tensor, action: Tensor, step: DeviceStep, good: Tensor, ended: Tensor, version: int) -> None:
        """Adds a step; where it is not ``good`` [N], values may not be finite. ``ended`` [N]: an episode is over."""
        t = self.at
        assert self._actor.log_prob is not None
        self.obs[t], self.next_obs[t], self.action[t] = obs.nan_to_num(0.0, 0.0, 0.0), step.next_obs, action
        self.log_prob[t], self.reward[t] = self._actor.log_prob, torch.where(good, step.reward, 0.0)
        self.terminated[t], self.over[t], self.good[t] = step.terminated & good, ended | ~good, good
        self.at = t + 1

    def read_back(self) -> None:
        """Does nothing: the host knows where the rollout ends."""

    def forget(self) -> None:
        self.at = 0


def advantages(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, over: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Value targets and generalized advantage estimates [T, N], as ``losses.advantages``; ``over`` ends an episode."""
    delta = reward + gamma * next_value.masked_fill(terminated, 0.0) - value
    carried = gamma * lam * (~over).float()
    for t in range(len(delta) - 2, -1, -1):
        delta[t].addcmul_(carried[t], delta[t + 1])
    return delta + value, delta


def learn(algorithm: OnPolicyAlgorithm, rollout: DeviceRollout, progress: float | None) -> None:
    """Learns from a full rollout that the current parameters have collected."""
    settings = algorithm.settings
    with torch.no_grad():
        obs, next_obs = (part.flatten(0, 1).nan_to_num(0.0, 0.0, 0.0) for part in (rollout.obs, rollout.next_obs))
        if algorithm.normalizer is not None:
            statistics = statistics_of(algorithm.normalizer, obs.device)
            obs, next_obs = scaled(obs, statistics), scaled(next_obs, statistics)
        value, next_value = (_values(algorithm, part).reshape(rollout.reward.shape) for part in (obs, next_obs))
        reward = rollout.reward
        if algorithm.returns is not None:
            reward = (reward / algorithm.return_scale).clamp_(-REWARD_CLIP, REWARD_CLIP)
        target, advantage = advantages(
            reward, value, next_value, rollout.terminated, rollout.over, settings.gamma, settings.gae_lambda
        )
        if settings.normalize_advantage:
            advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-8)
        target, advantage = torch.where(rollout.good, target, value), advantage * rollout.good
        columns = (part.flatten() for part in (rollout.log_prob, advantage, target, value))
        algorithm.learn_samples(Samples.of((obs, rollout.action.flatten(0, 1), *columns), None), progress)


def _values(algorithm: OnPolicyAlgorithm, obs: Tensor) -> Tensor:
    values: Tensor = algorithm.net.values(obs)  # without memory, which plans refuse
    return values
