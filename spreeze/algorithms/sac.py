"""Soft actor-critic with twin critics, for continuous and for discrete actions.

Haarnoja et al. 2018 (arXiv 1812.05905), with automatic temperature; Christodoulou 2019 (arXiv 1910.07207). Departures
from the authors' code: all networks take their step in the order critics, actor, temperature, targets; the
temperature's step is on log alpha; both of an update's action draws (at ``next_obs`` for the target, at ``obs`` for the
actor) are one pass of the actor over 2 B rows. With discrete actions every expectation over actions is computed exactly
from the policy's probabilities: no action is drawn.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from spreeze.algorithms import losses
from spreeze.algorithms.fused_mlp import (
    MlpPasses,
    Parameters,
    Tape,
    ThreadPair,
    mlp_backward,
    mlp_forward,
    new_parameters,
)
from spreeze.algorithms.off_policy import ActorCritic, ActorNetworks, Critics, DiscreteCritics, Placement, Proposal
from spreeze.algorithms.optimizers import FlatAdam
from spreeze.config.schema import SACConfig
from spreeze.inference.policy import LOG_STD_MAX, LOG_STD_MIN
from spreeze.types import TransitionBatch


class Temperature:
    """``alpha`` [1], moved by gradient steps on its logarithm (arXiv 1812.05905, eq. 18)."""

    def __init__(self, config: SACConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.tuned = config.tune_alpha
        self.log_alpha = torch.full((1,), math.log(config.initial_alpha), device=device, dtype=dtype)
        self.alpha = self.log_alpha.exp()
        self.gradient = torch.zeros_like(self.log_alpha)
        """[1], to log alpha; filled in before ``step``."""
        self.adam = FlatAdam(self.log_alpha, self.gradient, config.alpha_lr)

    def step(self) -> None:
        self.adam.step()
        self.derive()

    def derive(self) -> None:
        """Makes ``alpha`` follow its logarithm: after a step, or after a checkpoint was loaded."""
        torch.exp(self.log_alpha, out=self.alpha)


class _Buffers:
    """Everything whose size depends on the batch: rows 0..B-1 are next_obs, B..2B-1 obs."""

    def __init__(self, parameters: Parameters, rows: int) -> None:
        like, obs_dim = parameters.flat, parameters.sizes[0]
        self.rows = rows
        self.tape = Tape.allocate(parameters, 2 * rows)
        self.fresh = self.tape.part(rows, 2 * rows)
        self.x = like.new_zeros(1, 2 * rows, obs_dim)
        self.x_next, self.x_obs = self.x[0, :rows], self.x[0, rows:]
        self.x_obs_t = self.x_obs.t().unsqueeze(0)
        self.log_prob = like.new_zeros(rows)


class _GaussianBuffers(_Buffers):
    """The same for actions that are drawn."""

    def __init__(self, parameters: Parameters, rows: int, pair: ThreadPair | None) -> None:
        super().__init__(parameters, rows)
        like, action_dim = parameters.flat, parameters.sizes[-1] // 2
        self.passes = MlpPasses(parameters, self.tape, pair)
        self.fresh_passes = MlpPasses(parameters, self.fresh, pair)
        self.noise = like.new_zeros(action_dim, 2 * rows)
        self.mean, self.raw_log_std = self.tape.out[0, :action_dim], self.tape.out[0, action_dim:]
        self.grad_mean, self.grad_log_std = self.fresh.grad_out[0, :action_dim], self.fresh.grad_out[0, action_dim:]
        self.action = self.scaled_noise = like.new_zeros(action_dim, rows)
        self.log_std = like.new_zeros(action_dim, 2 * rows)
        self.fresh_log_std, self.fresh_raw_log_std = self.log_std[:, rows:], self.raw_log_std[:, rows:]
        self.in_range = torch.ones_like(self.action)
        self.per_row, self.minus_per_row = like.new_full((), 1.0 / rows), like.new_full((), -1.0 / rows)
        self.minus_mean = like.new_full((rows,), -1.0 / rows)


class SoftActor(ActorNetworks):
    """The common part of both policies: the temperature, its metrics and its state."""

    def __init__(
        self, sizes: tuple[int, ...], config: SACConfig, init: torch.Generator, device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(lambda: new_parameters(sizes, 1, device, dtype), config.actor_lr, init, target=False)
        self.temperature = Temperature(config, device, dtype)
        self._entropy: Tensor | None = None
        """[B], estimates of the latest step."""

    def metrics(self, mean_action_value: float) -> dict[str, float]:
        alpha = self.temperature.log_alpha.exp().item()
        if self._entropy is None:
            return {"alpha": alpha}
        entropy = self._entropy.mean().item()
        found = {"alpha": alpha, "entropy": entropy, "actor_loss": -alpha * entropy - mean_action_value}
        return found | {"actor_grad_norm": self.adam.gradient_norm}

    def rejected(self) -> int:
        """Rejected steps of the actor or of its temperature, whichever are more."""
        return max(super().rejected(), self.temperature.adam.rejected)

    def drop_buffers(self) -> None:
        super().drop_buffers()
        self._entropy = None

    def tensors(self) -> dict[str, Tensor]:
        own = super().tensors() | {"log_alpha": self.temperature.log_alpha}
        return own | {f"alpha_adam.{name}": tensor for name, tensor in self.temperature.adam.tensors().items()}


class GaussianActor(SoftActor):
    """Squashed Gaussian policy."""

    _buffers: _GaussianBuffers | None

    def __init__(
        self, obs_dim: int, action_dim: int, config: SACConfig, init: torch.Generator, noise: torch.Generator,
        device: torch.device, dtype: torch.dtype = torch.float32, pair: ThreadPair | None = None,
    ) -> None:
        super().__init__((obs_dim, *config.hidden_sizes, 2 * action_dim), config, init, device, dtype)
        self._target_entropy = torch.full_like(self.temperature.alpha, config.target_entropy_per_action * action_dim)
        self._noise, self._pair = noise, pair

    def propose(self, next_obs: Tensor, obs: Tensor) -> Proposal:
        """Actions and log-densities at ``next_obs`` and actions at ``obs``, both [B, O]."""
        rows = obs.shape[0]
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _GaussianBuffers(self.online, rows, self._pair)
        buffers = self._buffers
        buffers.x_next.copy_(next_obs)
        buffers.x_obs.copy_(obs)
        buffers.passes.forward(buffers.x)
        torch.clamp(buffers.raw_log_std, LOG_STD_MIN, LOG_STD_MAX, out=buffers.log_std)
        buffers.noise.normal_(generator=self._noise)
        action, log_prob, scaled_noise = losses.squashed_gaussian(buffers.mean, buffers.log_std, buffers.noise)
        buffers.action, buffers.log_prob = action[:, rows:], log_prob[rows:]
        buffers.scaled_noise = scaled_noise[:, rows:]
        return Proposal(action[:, :rows], log_prob[:rows], buffers.action)

    def step(self, dq_da: Tensor) -> None:
        """Gradient step on ``mean(alpha log pi(a|s) - Q(s, a))`` (eq. 9), then on the temperature (eq. 18)."""
        buffers = self._buffers
        assert buffers is not None
        grad_mean, grad_log_std = losses.squashed_gaussian_backward(
            buffers.action, buffers.scaled_noise, dq_da * buffers.minus_per_row,
            self.temperature.alpha * buffers.per_row,
        )
        buffers.grad_mean.copy_(grad_mean)
        # Outside of its range log_std is constant, so it gets no gradient there.
        torch.eq(buffers.fresh_log_std, buffers.fresh_raw_log_std, out=buffers.in_range)
        torch.mul(grad_log_std, buffers.in_range, out=buffers.grad_log_std)
        buffers.fresh_passes.backward(buffers.x_obs_t, self.gradient)
        self.adam.step()
        if self.temperature.tuned:
            gradient = self.temperature.gradient
            torch.sub(torch.dot(buffers.log_prob, buffers.minus_mean), self._target_entropy, out=gradient)
            self.temperature.step()

    def metrics(self, mean_action_value: float) -> dict[str, float]:
        self._entropy = None if self._buffers is None else -self._buffers.log_prob
        return super().metrics(mean_action_value)


class CategoricalActor(SoftActor):
    """Softmax policy."""

    _buffers: _Buffers | None

    def __init__(
        self, obs_dim: int, num_actions: int, config: SACConfig, init: torch.Generator, device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__((obs_dim, *config.hidden_sizes, num_actions), config, init, device, dtype)
        self._target_entropy = config.target_entropy_ratio * math.log(num_actions)
        self._prob = self.online.flat[:0]

    def propose(self, next_obs: Tensor, obs: Tensor) -> Proposal:
        """Probabilities and their logarithms at ``next_obs`` and probabilities at ``obs``, both [B, O]."""
        rows = obs.shape[0]
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _Buffers(self.online, rows)
        buffers = self._buffers
        buffers.x_next.copy_(next_obs)
        buffers.x_obs.copy_(obs)
        log_prob = mlp_forward(self.online, buffers.x, buffers.tape)[0].log_softmax(0)
        prob = log_prob.exp()
        buffers.log_prob, self._prob = log_prob[:, rows:], prob[:, rows:]
        return Proposal(prob[:, :rows], log_prob[:, :rows], self._prob)

    def step(self, values: Tensor) -> None:
        """Gradient step on ``mean E_pi(alpha log pi(a|s) - Q(s, a))`` (eq. 12), then on the temperature (eq. 11).

        Args:
            values: [K, B], Q of each action.
        """
        buffers = self._buffers
        assert buffers is not None
        grad, mean_log_prob = losses.soft_policy_gradient(self._prob, buffers.log_prob, values, self.temperature.alpha)
        self._entropy = mean_log_prob.neg_()
        torch.mul(grad, 1.0 / buffers.rows, out=buffers.fresh.grad_out[0])
        mlp_backward(self.online, buffers.fresh, buffers.x_obs_t, self.gradient)
        self.adam.step()
        if self.temperature.tuned:
            self.temperature.gradient.copy_(self._entropy.mean()).sub_(self._target_entropy)
            self.temperature.step()

    def drop_buffers(self) -> None:
        super().drop_buffers()
        self._prob = self.online.flat[:0]


class _SoftActorCritic(ActorCritic):
    """What both kinds of actions share."""

    actor: GaussianActor | CategoricalActor
    critics: Critics | DiscreteCritics
    _tau: float

    def propose(self, batch: TransitionBatch) -> Proposal:
        """One pass over next_obs and obs together."""
        return self.actor.propose(batch.next_obs, batch.obs)

    def actor_step(self, dq_da: Tensor) -> None:
        """Actor, then temperature."""
        self.actor.step(dq_da)

    def update_targets(self) -> None:
        self.critics.update_target(self._tau)
        self.updates += 1

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> bool:
        fits = super().load_state_arrays(arrays)
        self.actor.temperature.derive()
        return fits


class SAC(_SoftActorCritic):
    actor: GaussianActor
    critics: Critics
    name = "sac"

    def __init__(
        self, obs_dim: int, action_dim: int, config: SACConfig, seed: int, device: str = "cpu",
        dtype: torch.dtype = torch.float32, pair: ThreadPair | None = None, *, overlap: bool = False,
    ) -> None:
        placement, hidden = Placement.parse(device), config.hidden_sizes
        init = torch.Generator().manual_seed(seed)
        noise = torch.Generator(placement.actor).manual_seed(seed + 1)
        self.actor = GaussianActor(obs_dim, action_dim, config, init, noise, placement.actor, dtype, pair)
        self.critics = Critics(obs_dim, action_dim, hidden, 2, config.critic_lr, init, placement.critics, dtype, pair)
        self._tau = config.tau
        meta = {"policy": "squashed_gaussian", "obs_dim": obs_dim, "action_dim": action_dim,
                "hidden_sizes": list(hidden)}  # fmt: skip
        super().__init__(self.actor, self.critics, noise, meta, placement, overlap=overlap)

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Target ``r + discount (min Q'(s', a') - alpha log pi(a'|s'))`` (eq. 5 to 7)."""
        assert next_log_prob is not None
        value = self.critics.next_value(batch.next_obs, next_action)
        value.addcmul_(next_log_prob, self._placement.to_critics(self.actor.temperature.alpha), value=-1.0)
        self.critics.step(batch.obs_action, losses.td_target(batch.reward, batch.terminated, batch.discount, value))

    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        """Of the lesser critic."""
        return self.critics.action_gradient(batch.obs, action, least=True)


class DiscreteSAC(_SoftActorCritic):
    """SAC over n actions."""

    actor: CategoricalActor
    critics: DiscreteCritics
    name = "sac"

    def __init__(
        self, obs_dim: int, num_actions: int, config: SACConfig, seed: int, device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        place, hidden = torch.device(device), config.hidden_sizes
        init = torch.Generator().manual_seed(seed)
        noise = torch.Generator(place).manual_seed(seed + 1)
        self.actor = CategoricalActor(obs_dim, num_actions, config, init, place, dtype)
        self.critics = DiscreteCritics(obs_dim, num_actions, hidden, 2, config.critic_lr, init, place, dtype)
        self._tau = config.tau
        meta = {"policy": "categorical", "obs_dim": obs_dim, "num_actions": num_actions, "hidden_sizes": list(hidden)}
        super().__init__(self.actor, self.critics, noise, meta)

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Target ``r + discount E_pi(min Q'(s', a') - alpha log pi(a'|s'))`` (eq. 10)."""
        assert next_log_prob is not None
        soft = self.critics.least(batch.next_obs, target=True)
        soft.addcmul_(next_log_prob, self.actor.temperature.alpha, value=-1.0)
        value = soft.mul_(next_action).sum(0)
        target = losses.td_target(batch.reward, batch.terminated, batch.discount, value)
        self.critics.step(batch.obs, batch.action[:, 0].long(), target)

    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        """The lesser value of each action, which is the gradient of E_pi Q to its probability."""
        values = self.critics.least(batch.obs)
        self.critics.action_value = (values * action).sum(0)
        return values
