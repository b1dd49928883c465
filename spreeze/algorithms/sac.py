"""Soft actor-critic with automatic temperature and twin critics (Haarnoja et al. 2018, arXiv 1812.05905).

Departures from the authors' code: all networks take their step in the order critics, actor,
temperature, targets; the temperature's step is on log alpha; both of an update's action draws (at
``next_obs`` for the target, at ``obs`` for the actor) are one pass of the actor over 2 B rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spreeze.algorithms import losses
from spreeze.algorithms.nn.fused_mlp import Parameters, Tape, new_parameters
from spreeze.algorithms.nn.optimizers import FlatAdam
from spreeze.algorithms.nn.q_networks import Critics
from spreeze.algorithms.nn.two_thread_update import MlpPasses, ThreadPair
from spreeze.algorithms.off_policy import ActorCritic, Placement, Proposal
from spreeze.algorithms.temperature import Temperature
from spreeze.config.schema import SACConfig
from spreeze.types import TransitionBatch


class _Buffers:
    """Everything whose size depends on the batch: rows 0..B-1 are next_obs, B..2B-1 obs."""

    def __init__(self, parameters: Parameters, rows: int, action_dim: int, pair: ThreadPair | None) -> None:
        like, obs_dim = parameters.flat, parameters.sizes[0]
        self.rows = rows
        self.tape = Tape.allocate(parameters, 2 * rows)
        self.passes = MlpPasses(parameters, self.tape, pair)
        self.fresh = self.tape.part(rows, 2 * rows)
        self.fresh_passes = MlpPasses(parameters, self.fresh, pair)
        self.x = like.new_zeros(1, 2 * rows, obs_dim)
        self.x_next, self.x_obs = self.x[0, :rows], self.x[0, rows:]
        self.x_obs_t = self.x[0, rows:].t().unsqueeze(0)
        self.noise = like.new_zeros(action_dim, 2 * rows)
        self.mean, self.raw_log_std = self.tape.out[0, :action_dim], self.tape.out[0, action_dim:]
        self.grad_mean, self.grad_log_std = self.fresh.grad_out[0, :action_dim], self.fresh.grad_out[0, action_dim:]
        self.action = self.deviation = like.new_zeros(action_dim, rows)
        self.log_std = like.new_zeros(action_dim, 2 * rows)
        self.fresh_log_std, self.fresh_raw_log_std = self.log_std[:, rows:], self.raw_log_std[:, rows:]
        self.in_range = torch.ones_like(self.action)
        self.log_prob = like.new_zeros(rows)
        self.per_row, self.minus_per_row = like.new_full((), 1.0 / rows), like.new_full((), -1.0 / rows)
        self.minus_mean = like.new_full((rows,), -1.0 / rows)


class GaussianActor:
    """The actor side: squashed Gaussian policy, temperature, and their optimisers."""

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        config: SACConfig,
        init: torch.Generator,
        noise: torch.Generator,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        pair: ThreadPair | None = None,
    ) -> None:
        sizes = (obs_dim, *config.hidden_sizes, 2 * action_dim)
        self.online = new_parameters(sizes, 1, device, dtype)
        self.online.initialise(init)
        self.gradient = new_parameters(sizes, 1, device, dtype)
        self.adam = FlatAdam(self.online.flat, self.gradient.flat, config.actor_lr)
        self.temperature = Temperature(config, device, dtype)
        self._target_entropy = torch.full_like(self.temperature.alpha, config.target_entropy_per_action * action_dim)
        self._action_dim, self._noise = action_dim, noise
        self._pair = pair
        self._buffers: _Buffers | None = None

    def propose(self, next_obs: Tensor, obs: Tensor) -> Proposal:
        """Actions and log-densities at ``next_obs`` and actions at ``obs``, both [B, O]."""
        rows = obs.shape[0]
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _Buffers(self.online, rows, self._action_dim, self._pair)
        buffers = self._buffers
        buffers.x_next.copy_(next_obs)
        buffers.x_obs.copy_(obs)
        buffers.passes.forward(buffers.x)
        torch.clamp(buffers.raw_log_std, losses.LOG_STD_MIN, losses.LOG_STD_MAX, out=buffers.log_std)
        buffers.noise.normal_(generator=self._noise)
        action, log_prob, deviation = losses.squashed_gaussian(buffers.mean, buffers.log_std, buffers.noise)
        buffers.action, buffers.log_prob = action[:, rows:], log_prob[rows:]
        buffers.deviation = deviation[:, rows:]
        return Proposal(action[:, :rows], log_prob[:rows], buffers.action)

    def step(self, dq_da: Tensor) -> None:
        """Gradient step on ``mean(alpha log pi(a|s) - Q(s, a))`` (eq. 9), then on the temperature (eq. 18)."""
        buffers = self._buffers
        assert buffers is not None
        weight = self.temperature.alpha * buffers.per_row
        grad_action = dq_da * buffers.minus_per_row
        grad_mean, grad_log_std = losses.squashed_gaussian_backward(
            buffers.action, buffers.deviation, grad_action, weight
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
        """alpha, entropy, actor_loss and actor_grad_norm of the latest step (reads the device)."""
        entropy = None if self._buffers is None else -self._buffers.log_prob
        return self.temperature.metrics(self.adam, entropy, mean_action_value)

    def refused(self) -> int:
        """Steps of actor and temperature that were not applied (reads the device)."""
        return self.temperature.refused(self.adam)

    def drop_buffers(self) -> None:
        """Frees what depends on the size of the batch; the next update makes it anew."""
        self._buffers = None

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        return self.temperature.tensors(self.online.flat, self.adam)


class SAC(ActorCritic):
    """Soft actor-critic; see ``OffPolicyAlgorithm`` for what each member does."""

    name = "sac"

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        config: SACConfig,
        seed: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        pair: ThreadPair | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        placement, hidden = Placement.parse(device), config.hidden_sizes
        init = torch.Generator().manual_seed(seed)
        noise = torch.Generator(placement.actor).manual_seed(seed + 1)
        self.actor = GaussianActor(obs_dim, action_dim, config, init, noise, placement.actor, dtype, pair)
        self.critics = Critics(obs_dim, action_dim, hidden, 2, config.critic_lr, init, placement.critics, dtype, pair)
        self._tau = config.tau
        meta = {
            "policy": "squashed_gaussian",
            "obs_dim": obs_dim,
            "action_dim": action_dim,
            "hidden_sizes": list(hidden),
        }
        super().__init__(self.actor, self.critics, noise, meta, placement, overlap=overlap)

    def propose(self, batch: TransitionBatch) -> Proposal:
        """Actor side: one pass over next_obs and obs together."""
        return self.actor.propose(batch.next_obs, batch.obs)

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Critic side: target ``r + discount (min Q'(s', a') - alpha log pi(a'|s'))`` (eq. 5 to 7)."""
        assert next_log_prob is not None
        value = self.critics.next_value(batch.next_obs, next_action)
        value.addcmul_(next_log_prob, self._placement.to_critics(self.actor.temperature.alpha), value=-1.0)
        self.critics.step(batch.obs_action, losses.td_target(batch.reward, batch.terminated, batch.discount, value))

    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        """Critic side: gradient of the lesser critic."""
        return self.critics.action_gradient(batch.obs, action, least=True)

    def actor_step(self, dq_da: Tensor) -> None:
        """Actor side: actor, then temperature."""
        self.actor.step(dq_da)

    def update_targets(self) -> None:
        """Moves the target critics."""
        self.critics.update_target(self._tau)
        self.updates += 1

    def take_actor(self, other: ActorCritic) -> None:
        """Copies the actor and its temperature."""
        super().take_actor(other)
        assert isinstance(other, SAC)
        self.actor.temperature.log_alpha.copy_(other.actor.temperature.log_alpha, non_blocking=True)
        self.actor.temperature.derive()

    @property
    def actor_bytes(self) -> int:
        """Bytes that ``take_actor`` copies."""
        alpha = self.actor.temperature.alpha
        return super().actor_bytes + alpha.element_size()

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> bool:
        """Takes over what ``state_arrays`` gave; False if the noise was not taken over."""
        fits = super().load_state_arrays(arrays)
        self.actor.temperature.derive()
        return fits
