"""Acting and learning on a device, for a learner that steps environments there (mode ``device``).

Actions are chosen by the parameters that the algorithm trains: no copy of them is made. The distributions are those of
``inference.heads`` for actions that are numbers. Noise has its own generator, so that the number of actions does not
affect updates.

Advantages are those of ``losses.advantages``, in torch; a step without a transition (a reset, a bad value) has
advantage 0 and its own value as the target.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spreeze.algorithms import losses
from spreeze.algorithms.networks.fused_mlp import MlpBuffers
from spreeze.algorithms.off_policy import OffPolicyAlgorithm
from spreeze.algorithms.on_policy import MlpActorCritic, OnPolicyAlgorithm, Samples
from spreeze.envs.vector_task import VectorStep
from spreeze.errors import UsageError
from spreeze.inference.heads import LOG_STD_MAX, LOG_STD_MIN
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.inference.normalizer import OBS_CLIP, REWARD_CLIP, Normalizer


class DeviceActor:
    """A policy for N environments at a time."""

    def __init__(self, algorithm: OffPolicyAlgorithm | OnPolicyAlgorithm, seed: int) -> None:
        """Raises a UsageError for a policy of another kind."""
        meta: dict[str, Any] = algorithm.policy_meta()
        self._kind, self._actions = meta["policy"], int(meta.get("action_dim", 0))
        net: Any = algorithm.net if isinstance(algorithm, OnPolicyAlgorithm) else algorithm.actor
        if self._kind not in ("squashed_gaussian", "deterministic", "gaussian") or net is None:
            raise UsageError(f"a policy of kind {self._kind} cannot act on a device; it needs numbers as actions")
        self._net: Any = net if isinstance(algorithm, OnPolicyAlgorithm) else net.online
        minimum = float(meta.get("exploration_noise", 0.0))
        self._noise = minimum, float(meta.get("exploration_noise_max", minimum))
        self.device = self._net.flat.device
        self._scale: Tensor | None = None
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._buffers: MlpBuffers | None = None
        self.log_prob: Tensor | None = None
        """[N], in nat, of the latest actions of an on-policy algorithm."""

    def scale_by(self, normalizer: Normalizer | None) -> None:
        """Scales observations by these statistics from now on."""
        if normalizer is not None:
            self._scale = statistics_of(normalizer, self.device)

    def uniform(self, rows: int) -> Tensor:
        """Actions [N, A], each as likely as any other."""
        return torch.rand((rows, self._actions), generator=self._generator, device=self.device) * 2.0 - 1.0

    def act(self, obs: Tensor) -> Tensor:
        """Actions [N, A] for observations [N, O], in [-1, 1]; those of on-policy algorithms are as sampled."""
        out = self._outputs(obs if self._scale is None else scaled(obs, self._scale))
        noise = torch.randn((len(obs), self._actions), generator=self._generator, device=self.device)
        if self._kind == "gaussian":
            action: Tensor = out.t() + self._net.log_std.exp() * noise
            self.log_prob = losses.gaussian(out, self._net.log_std, action.t())[1]
            return action
        if self._kind == "deterministic":
            sizes = torch.linspace(*self._noise, len(obs), device=self.device).unsqueeze(1)
            return (out.t().tanh() + sizes * noise).clamp(-1.0, 1.0)
        std = out[self._actions :].t().clamp(LOG_STD_MIN, LOG_STD_MAX).exp()
        return (out[: self._actions].t() + std * noise).tanh()

    def _outputs(self, obs: Tensor) -> Tensor:
        """Outputs [K, N] of the network, which the next call overwrites."""
        if isinstance(self._net, MlpActorCritic):
            return self._net.forward(obs)[0]
        if self._buffers is None or self._buffers.out.shape[2] != len(obs):
            self._buffers = MlpBuffers.allocate(self._net, len(obs))
        out: Tensor = self._net.forward(obs.unsqueeze(0), self._buffers)
        return out[0]


def statistics_of(normalizer: Normalizer, device: torch.device) -> Tensor:
    """Means and deviations of observations [2, O] on a device."""
    return torch.from_numpy(np.stack((normalizer.mean, normalizer.std)).astype(np.float32)).to(device)


def scaled(obs: Tensor, statistics: Tensor) -> Tensor:
    """Observations [M, O] as the networks take them, a new tensor."""
    return ((obs - statistics[0]) / statistics[1]).clamp_(-OBS_CLIP, OBS_CLIP)


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

    def store(self, obs: Tensor, action: Tensor, step: VectorStep, good: Tensor, ended: Tensor, version: int) -> None:
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


def learn_rollout(algorithm: OnPolicyAlgorithm, rollout: DeviceRollout, progress: float | None) -> None:
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
