"""The contract of on-policy algorithms: they learn from intervals of T env steps of N environments.

theta(j) are the parameters that collect interval j, D(j) its data. A mode may collect interval j while the
algorithm learns from D(j - 1), so parameters can be one interval ahead of the data. What is done about that
is the *correction*:

=============  =========================================================================================
on-policy      theta(j + 1) from D(j), nothing to correct: rollout and learning take turns
delayed        the update that D(j - 1) asks for at theta(j - 1), which collected it, applied to theta(j):
               HTS-RL (arXiv 2012.09849, eq. 6)
none           the update at theta(j), as if theta(j) had collected D(j - 1)
truncated-is   the update at theta(j), each sample weighted by min(1, pi_theta(j) / pi_theta(j - 1))
=============  =========================================================================================
"""
from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spreeze.algorithms.advantages import RewardScale, explained_variance, gae, vtrace
from spreeze.algorithms.nn.actor_critic_networks import (
    ActorCriticNetwork,
    CategoricalDistribution,
    ConvActorCritic,
    Distribution,
    GaussianDistribution,
    MlpActorCritic,
)
from spreeze.algorithms.nn.optimizers import FlatAdam, FlatRMSProp
from spreeze.algorithms.state import load_arrays, to_arrays
from spreeze.config.schema import OnPolicyConfig
from spreeze.errors import CheckpointError, ConfigError
from spreeze.inference.normalizer import Normalizer
from spreeze.types import EnvSpec, RolloutBatch

CORRECTIONS = ("on-policy", "delayed", "none", "truncated-is")


class OnPolicyAlgorithm(Protocol):
    """Networks, losses and update of one on-policy algorithm."""

    name: str
    updates: int
    """Gradient steps so far, refused ones included."""

    def learn(self, batch: RolloutBatch, progress: float | None) -> None:
        """Everything that one interval's data is used for.

        A gradient that is not finite is not applied, and counted.

        Args:
            batch: collected by theta(j) with correction "on-policy", by theta(j - 1) with the others.
            progress: share of the run that is over, for the step size's schedule; None where nobody knows.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the latest update by their names in ``spreeze.metrics.table``; what is not finite is left out."""
        ...

    def updates_skipped(self) -> int:
        """Gradients that were not applied."""
        ...

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Copies of theta(j)'s policy as ``Policy.from_weights`` reads it, its own normaliser included."""
        ...

    def policy_meta(self) -> dict[str, Any]:
        """What the policy is."""
        ...

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of both thetas, the optimiser, the running statistics and the random state."""
        ...

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes over what ``state_arrays`` gave.

        Raises:
            CheckpointError: of another network or algorithm.
        """
        ...

    def state_json(self) -> dict[str, Any]:
        """Counters and identity."""
        ...

    def load_state_json(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_json`` gave.

        Raises:
            CheckpointError: of another algorithm or correction.
        """
        ...


class Samples(NamedTuple):
    """M env steps to take a gradient on; views of one row block."""

    obs: Tensor  # [M, O], normalised; of images uint8 [M, k, C, H, W]
    action: Tensor  # [M, A]
    log_prob: Tensor  # [M], the denominator of PPO's ratio
    advantage: Tensor  # [M], weighted where the correction says so
    target: Tensor  # [M], of the value
    value: Tensor  # [M], before the first gradient step


Passed = tuple[Tensor, Tensor]
"""Outputs [K, M] and values [M] of the network's latest forward pass, over all samples."""


class _Latest(NamedTuple):
    """Of the latest gradient, for metrics; no view of an interval's data, which is valid only during ``learn``."""

    objective: Tensor  # [M]
    log_ratio: Tensor  # [M]
    value: Tensor  # [M]
    target: Tensor  # [M]


class PolicyGradientBase(ABC):
    """An ``OnPolicyAlgorithm`` but for the update itself."""

    name: str
    single_step: bool
    """True where an interval gives one gradient step, on all of it: values and gradient take one pass together."""
    optimiser: FlatAdam | FlatRMSProp

    def __init__(
        self, spec: EnvSpec, config: OnPolicyConfig, seed: int, device: str, correction: str, *, normalize_obs: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if correction not in CORRECTIONS:
            raise ConfigError(f"correction = {correction!r}: allowed is {', '.join(CORRECTIONS)}")
        if normalize_obs and spec.frames is not None:
            raise ConfigError("env.normalize_obs = true: images are scaled by 1/255 already; leave it out")
        self.updates = 0
        self.correction = correction
        self._place, self._dtype, self._shared = torch.device(device), dtype, config
        generator = torch.Generator().manual_seed(seed)
        self.net = _network(spec, config, generator, self._place, dtype)
        self._kind: Distribution = (
            GaussianDistribution(self.net.log_std, self.net.grad_log_std) if spec.num_actions is None
            else CategoricalDistribution(spec.num_actions)
        )
        self._before = self.net.flat.clone() if correction == "delayed" else None
        """theta(j - 1)."""
        self._shuffle = torch.Generator().manual_seed(seed + 1)
        self._normalizer = Normalizer(spec.obs_dim) if normalize_obs else None
        self._normalizer_before = Normalizer(spec.obs_dim) if normalize_obs and correction == "delayed" else None
        self._reward_scale = RewardScale(config.gamma) if config.normalize_returns else None
        image = {"cnn": config.cnn, "image": self.net.image} if isinstance(self.net, ConvActorCritic) else {}
        self._meta = {
            "algo": self.name, **self._kind.meta(), "obs_dim": spec.obs_dim,
            "hidden_sizes": list(self.net.hidden_sizes), "activation": self.net.activation, **image,
        }
        self._latest: _Latest | None = None
        self._explained_variance = math.nan

    @abstractmethod
    def _update(self, samples: Samples, passed: Passed | None, theta: Tensor | None) -> None:
        """All gradient steps on an interval's samples.

        Args:
            samples: of the interval.
            passed: where ``single_step`` is set, the pass that they come from.
            theta: theta(j), where the network holds theta(j - 1); at the end it has to hold theta(j + 1).
        """

    @abstractmethod
    def _policy_slope(self, log_prob: Tensor, log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """The objective [M] to make great, and its derivative [M] by the log-probabilities; all [M]."""

    @abstractmethod
    def _value_error(self, value: Tensor, samples: Samples) -> Tensor:
        """Derivative [M] of the value loss by the values."""

    def learn(self, batch: RolloutBatch, progress: float | None) -> None:
        """One interval."""
        config = self._shared
        over = 0.0 if progress is None or config.lr_schedule == "constant" else min(max(progress, 0.0), 1.0)
        self.optimiser.lr = config.lr * (1.0 - over)
        with torch.no_grad():
            theta: Tensor | None = None
            if self._before is not None:
                theta = self.net.flat.clone()
                self.net.flat.copy_(self._before)
            self._update(*self._samples(batch), theta)
            if self._before is not None and theta is not None:
                self._before.copy_(theta)
        self._take_statistics(batch)

    def _samples(self, batch: RolloutBatch) -> tuple[Samples, Passed | None]:
        """The interval with advantages and targets by the parameters that the network holds now."""
        steps, envs = batch.reward.shape
        rows = steps * envs
        normalizer = self._normalizer if self._normalizer_before is None else self._normalizer_before
        obs = self._tensor(_normalised(batch.obs.reshape(rows, *batch.obs.shape[2:]), normalizer))
        action = self._tensor(np.array(batch.action).reshape(rows, -1))
        log_prob = self._tensor(np.array(batch.log_prob).reshape(rows))
        weighs = self.correction == "truncated-is"
        passed = self.net.forward(obs) if weighs or self.single_step else None
        value = self.net.values(obs) if passed is None else passed[1].clone()
        weight = None
        if weighs and passed is not None:
            now = self._kind.log_prob(passed[0], action)
            weight = (now - log_prob).clamp_(max=0.0).exp_()
            log_prob = now
        old = value.cpu().numpy().reshape(steps, envs)
        advantage, target = self._advantages(batch, old, self._next_values(batch, old, normalizer), weight)
        self._explained_variance = explained_variance(old, target)
        if self._shared.normalize_advantage:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        columns = self._tensor(np.stack((advantage.reshape(rows), target.reshape(rows)), 1))
        weighted = columns[:, 0] if weight is None else columns[:, 0] * weight
        samples = Samples(obs, action, log_prob, weighted, columns[:, 1], value)
        return samples, passed if self.single_step else None

    def _next_values(self, batch: RolloutBatch, value: np.ndarray, normalizer: Normalizer | None) -> np.ndarray:
        """Values [T, N] of the states after each step; where the MDP ended, any number."""
        following = np.empty_like(value)
        following[:-1] = value[1:]
        asked = np.array(batch.truncated, dtype=bool)
        asked[-1] = True
        own = self.net.values(self._tensor(_normalised(batch.next_obs[asked], normalizer)))
        following[asked] = own.cpu().numpy()
        return following

    def _advantages(
        self, batch: RolloutBatch, value: np.ndarray, next_value: np.ndarray, weight: Tensor | None
    ) -> tuple[np.ndarray, np.ndarray]:
        config, reward = self._shared, batch.reward
        ended = np.asarray(batch.terminated, bool), np.asarray(batch.truncated, bool)
        if self._reward_scale is not None:
            reward = self._reward_scale.apply(reward, *ended)
        if weight is None:
            advantage = gae(reward, value, next_value, *ended, config.gamma, config.gae_lambda)
            return advantage, advantage + value
        weights = weight.cpu().numpy().reshape(reward.shape)
        target, advantage = vtrace(reward, value, next_value, *ended, weights, config.gamma, config.gae_lambda)
        return advantage, target

    def _gradient(self, samples: Samples, passed: Passed | None = None) -> None:
        """The gradient of policy loss + value_coef value loss - entropy_coef entropy, all means over M."""
        config, rows = self._shared, len(samples.target)
        out, value = self.net.forward(samples.obs) if passed is None else passed
        log_prob = self._kind.log_prob(out, samples.action)
        log_ratio = log_prob - samples.log_prob
        objective, slope = self._policy_slope(log_prob, log_ratio, samples.advantage)
        error = self._value_error(value, samples)
        grad_out = self._kind.backward(slope.mul_(-1.0 / rows), config.entropy_coef / rows)
        self.net.backward(grad_out, error.mul_(config.value_coef / rows))
        self._latest = _Latest(objective, log_ratio, value, samples.target)

    def _take_statistics(self, batch: RolloutBatch) -> None:
        """The next theta's normaliser knows this interval too."""
        if self._normalizer is None:
            return
        if self._normalizer_before is not None:
            self._normalizer_before.load_state(self._normalizer.state())
        if np.isfinite(batch.obs).all():
            self._normalizer.update(batch.obs.reshape(-1, batch.obs.shape[2]))

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.to(self._place) if tensor.dtype == torch.uint8 else tensor.to(self._place, self._dtype)

    def metrics(self) -> dict[str, float]:
        """Of the latest minibatch and interval."""
        if self._latest is None:
            return {}
        objective, _, value, target = self._latest
        found = {
            "policy_loss": -objective.mean().item(),
            "value_loss": 0.5 * (value - target).square().mean().item(),
            "entropy": self._kind.entropy(),
            "approx_kl": self._divergence().item(),
            "explained_variance": self._explained_variance,
            "learning_rate": self.optimiser.lr,
            "grad_norm": self.optimiser.gradient_norm,
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _divergence(self) -> Tensor:
        """Of the latest minibatch's policies, in nat: the estimator k3 of Schulman 2020, never negative."""
        assert self._latest is not None
        log_ratio = self._latest.log_ratio
        return (log_ratio.exp() - 1.0 - log_ratio).mean()

    def updates_skipped(self) -> int:
        """Gradients that were refused."""
        return self.optimiser.refused

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Theta(j)'s policy and its normaliser."""
        arrays = {name: tensor.numpy() for name, tensor in self.net.policy_arrays().items()}
        if len(self.net.log_std):
            arrays["log_std"] = self.net.log_std.to("cpu", copy=True).numpy()
        return arrays if self._normalizer is None else arrays | self._normalizer.arrays()

    def policy_meta(self) -> dict[str, Any]:
        """What the policy is."""
        return dict(self._meta)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Thetas, optimiser, random state."""
        return to_arrays(self._tensors(), self._shuffle)

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes over what ``state_arrays`` gave."""
        load_arrays(self._tensors(), self._shuffle, arrays)

    def state_json(self) -> dict[str, Any]:
        """Counters, identity and running statistics."""
        parts = {"normalizer": self._normalizer, "normalizer_before": self._normalizer_before,
                 "reward_scale": self._reward_scale}  # fmt: skip
        statistics = {name: part.state() for name, part in parts.items() if part is not None}
        return {"algo": self.name, "correction": self.correction, "updates": self.updates, **statistics}

    def load_state_json(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_json`` gave."""
        for key, own in (("algo", self.name), ("correction", self.correction)):
            if state.get(key) != own:
                raise CheckpointError(f"checkpoint was made with {key} '{state.get(key)}', not '{own}'; use the same")
        parts = {"normalizer": self._normalizer, "normalizer_before": self._normalizer_before,
                 "reward_scale": self._reward_scale}  # fmt: skip
        for name, part in parts.items():
            if part is not None:
                if name not in state:
                    raise CheckpointError(f"checkpoint has no '{name}'; use the settings that it was made with")
                part.load_state(state[name])
        self.updates = int(state["updates"])

    def _tensors(self) -> dict[str, Tensor]:
        own = {"theta": self.net.flat}
        if self._before is not None:
            own["theta_before"] = self._before
        return own | {f"optimiser.{name}": tensor for name, tensor in self.optimiser.tensors().items()}


def _network(
    spec: EnvSpec, config: OnPolicyConfig, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> ActorCriticNetwork:
    outputs = spec.action_dim if spec.num_actions is None else spec.num_actions
    num_log_std = spec.action_dim if spec.num_actions is None else 0
    hidden = config.hidden_sizes
    net: MlpActorCritic | ConvActorCritic
    if spec.frames is None:
        net = MlpActorCritic(spec.obs_dim, outputs, num_log_std, hidden, generator, device, dtype)
    else:
        net = ConvActorCritic(spec.frames, outputs, num_log_std, config.cnn, hidden, generator, device, dtype)
    net.log_std.fill_(config.initial_log_std)
    return net


def _normalised(obs: np.ndarray, normalizer: Normalizer | None) -> np.ndarray:
    """A copy of observations [B, O] as a network takes them."""
    own = np.array(obs)
    if normalizer is not None:
        normalizer.apply(own)
    return own
