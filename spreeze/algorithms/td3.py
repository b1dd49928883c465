"""Twin delayed deep deterministic policy gradient (TD3), and its predecessor DDPG.

Lillicrap et al. 2016 (arXiv 1509.02971); Fujimoto et al. 2018 (arXiv 1802.09477): two critics, smoothed target actions
and fewer updates of the actor. Departures from the first paper: Gaussian instead of Ornstein-Uhlenbeck exploration
noise, no weight decay, no batch normalisation, and torch.nn.Linear's initialisation for all layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spreeze.algorithms import losses
from spreeze.algorithms.fused_mlp import MlpPasses, Parameters, Tape, ThreadPair, new_parameters
from spreeze.algorithms.off_policy import ActorCritic, ActorNetworks, Critics, Placement, Proposal
from spreeze.config.schema import DDPGConfig, TD3Config
from spreeze.types import TransitionBatch


class _Buffers:
    """Everything whose size depends on the batch."""

    def __init__(self, online: Parameters, target: Parameters, rows: int, pair: ThreadPair | None) -> None:
        like, action_dim = online.flat, online.sizes[-1]
        self.rows = rows
        self.tape = Tape.allocate(online, rows)
        self.online, self.target = MlpPasses(online, self.tape, pair), MlpPasses(target, self.tape, pair)
        self.noise = like.new_zeros(action_dim, rows)
        self.action = like.new_zeros(action_dim, rows)
        self.x_obs_t = like.new_zeros(1, online.sizes[0], rows)
        self.minus_per_row = like.new_full((), -1.0 / rows)


class DeterministicActor(ActorNetworks):
    """Policy a = tanh(net(s)) and its target copy."""

    _buffers: _Buffers | None

    def __init__(
        self, obs_dim: int, action_dim: int, hidden_sizes: tuple[int, ...], lr: float, init: torch.Generator,
        noise: torch.Generator, device: torch.device, dtype: torch.dtype = torch.float32,
        pair: ThreadPair | None = None,
    ) -> None:
        super().__init__(lambda: new_parameters((obs_dim, *hidden_sizes, action_dim), 1, device, dtype), lr, init)
        self._noise, self._pair = noise, pair

    def target_action(self, next_obs: Tensor, noise_std: float = 0.0, clip: float = 0.0) -> Tensor:
        """Target policy's action [A, B] at next_obs [B, O], with clipped noise if ``noise_std`` > 0."""
        buffers = self._sized(next_obs.shape[0])
        action = buffers.target.forward(next_obs.unsqueeze(0))[0].tanh()
        if noise_std == 0.0:
            return action
        buffers.noise.normal_(generator=self._noise)
        return losses.smoothed_action(action, buffers.noise, noise_std, clip)

    def fresh_action(self, obs: Tensor) -> Tensor:
        """Policy's action [A, B] at obs [B, O]; its activations are kept for ``step``."""
        buffers = self._sized(obs.shape[0])
        buffers.x_obs_t = obs.t().unsqueeze(0)
        buffers.action = buffers.online.forward(obs.unsqueeze(0))[0].tanh()
        return buffers.action

    def step(self, dq_da: Tensor) -> None:
        """Gradient step on ``-mean Q(s, pi(s))`` (deterministic policy gradient, arXiv 1509.02971, eq. 6)."""
        buffers = self._buffers
        assert buffers is not None
        buffers.tape.grad_out[0].copy_(losses.tanh_backward(buffers.action, dq_da * buffers.minus_per_row))
        buffers.online.backward(buffers.x_obs_t, self.gradient)
        self.adam.step()

    def _sized(self, rows: int) -> _Buffers:
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _Buffers(self.online, self.target, rows, self._pair)
        return self._buffers


class _Deterministic(ActorCritic):
    """What both algorithms share."""

    num_critics: int

    def __init__(
        self, obs_dim: int, action_dim: int, config: DDPGConfig | TD3Config, seed: int, device: str = "cpu",
        dtype: torch.dtype = torch.float32, pair: ThreadPair | None = None, *, overlap: bool = False,
    ) -> None:
        place, hidden = Placement.parse(device), config.hidden_sizes
        # Networks are drawn in this order from one generator, so that a seed means the same weights for ever.
        init = torch.Generator().manual_seed(seed)
        noise = torch.Generator(place.actor).manual_seed(seed + 1)
        self.actor = DeterministicActor(obs_dim, action_dim, hidden, config.actor_lr, init, noise, place.actor, dtype,
                                        pair)
        self.critics = Critics(obs_dim, action_dim, hidden, self.num_critics, config.critic_lr, init, place.critics,
                               dtype, pair)
        self._tau = config.tau
        meta = {"policy": "deterministic", "obs_dim": obs_dim, "action_dim": action_dim, "hidden_sizes": list(hidden),
                "exploration_noise": config.exploration_noise}  # fmt: skip
        super().__init__(self.actor, self.critics, noise, meta, place, overlap=overlap)

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Target ``r + discount min Q'(s', a')`` (algorithm 1 of both papers); DDPG's minimum is of one."""
        value = self.critics.next_value(batch.next_obs, next_action)
        self.critics.step(batch.obs_action, losses.td_target(batch.reward, batch.terminated, batch.discount, value))

    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        return self.critics.action_gradient(batch.obs, action, least=False)

    def actor_step(self, dq_da: Tensor) -> None:
        self.actor.step(dq_da)

    def update_targets(self) -> None:
        self.critics.update_target(self._tau)
        self.actor.update_target(self._tau)
        self.updates += 1


class DDPG(_Deterministic):
    name = "ddpg"
    num_critics = 1

    def propose(self, batch: TransitionBatch) -> Proposal:
        return Proposal(self.actor.target_action(batch.next_obs), None, self.actor.fresh_action(batch.obs))


class TD3(_Deterministic):
    name = "td3"
    num_critics = 2

    def __init__(self, obs_dim: int, action_dim: int, config: TD3Config, *args: Any, **options: Any) -> None:
        self._config = config
        super().__init__(obs_dim, action_dim, config, *args, **options)

    @property
    def period(self) -> int:
        """The actor moves at every ``policy_delay``-th update."""
        return self._config.policy_delay

    def propose(self, batch: TransitionBatch) -> Proposal:
        """Smoothed target actions; fresh ones at every ``policy_delay``-th update."""
        config = self._config
        next_action = self.actor.target_action(batch.next_obs, config.target_noise, config.target_noise_clip)
        return Proposal(next_action, None, self.actor.fresh_action(batch.obs) if self._moves_actor() else None)

    def update_targets(self) -> None:
        if self._moves_actor():
            super().update_targets()
        else:
            self.updates += 1

    def _moves_actor(self) -> bool:
        return (self.updates + 1) % self._config.policy_delay == 0
