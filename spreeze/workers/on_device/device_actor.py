"""Exploring actions on the learner's device, by the parameters that it trains: no copy of them is made.

The distributions are those of ``inference.heads`` for actions that are numbers. Noise has its own
generator, so that the number of actions does not affect updates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from spreeze.algorithms import losses
from spreeze.algorithms.fused_mlp import MlpBuffers, mlp_forward
from spreeze.algorithms.off_policy import OffPolicyAlgorithm
from spreeze.algorithms.on_policy import MlpActorCritic, OnPolicyAlgorithm
from spreeze.errors import UsageError
from spreeze.inference.heads import LOG_STD_MAX, LOG_STD_MIN
from spreeze.inference.normalizer import OBS_CLIP, Normalizer


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
        return mlp_forward(self._net, obs.unsqueeze(0), self._buffers)[0]


def statistics_of(normalizer: Normalizer, device: torch.device) -> Tensor:
    """Means and deviations of observations [2, O] on a device."""
    return torch.from_numpy(np.stack((normalizer.mean, normalizer.std)).astype(np.float32)).to(device)


def scaled(obs: Tensor, statistics: Tensor) -> Tensor:
    """Observations [M, O] as the networks take them, a new tensor."""
    return ((obs - statistics[0]) / statistics[1]).clamp_(-OBS_CLIP, OBS_CLIP)
