"""Deep deterministic policy gradient (Lillicrap et al. 2016, arXiv 1509.02971).

Departures from the paper: Gaussian instead of Ornstein-Uhlenbeck exploration noise, no weight decay,
no batch normalisation, and torch.nn.Linear's initialisation for all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spreeze import ops
from spreeze.algorithms.base import Proposal
from spreeze.algorithms.common import ActorCritic
from spreeze.algorithms.critics import Critics
from spreeze.algorithms.deterministic import DeterministicActor
from spreeze.config import DDPGConfig
from spreeze.types import TransitionBatch


class DDPG(ActorCritic):
    """DDPG; see ``OffPolicyAlgorithm`` for what each member does."""

    name = "ddpg"

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        config: DDPGConfig,
        seed: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        place, hidden = torch.device(device), config.hidden_sizes
        init = torch.Generator().manual_seed(seed)
        noise = torch.Generator(place).manual_seed(seed + 1)
        self.actor = DeterministicActor(obs_dim, action_dim, hidden, config.actor_lr, init, noise, place, dtype)
        critics = Critics(obs_dim, action_dim, hidden, 1, config.critic_lr, init, place, dtype)
        self._config = config
        meta = {
            "policy": "deterministic",
            "obs_dim": obs_dim,
            "action_dim": action_dim,
            "hidden_sizes": list(hidden),
            "exploration_noise": config.exploration_noise,
        }
        super().__init__(self.actor, critics, noise, meta)

    def propose(self, batch: TransitionBatch) -> Proposal:
        """Actor side: target actions and fresh ones."""
        return Proposal(self.actor.target_action(batch.next_obs), None, self.actor.fresh_action(batch.obs))

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Critic side: target ``r + discount Q'(s', pi'(s'))`` (algorithm 1)."""
        value = self.critics.next_value(batch.next_obs, next_action)
        self.critics.step(batch.obs_action, ops.td_target(batch.reward, batch.terminated, batch.discount, value))

    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        """Critic side: gradient of the first critic."""
        return self.critics.action_gradient(batch.obs, action, least=False)

    def actor_step(self, dq_da: Tensor) -> None:
        """Actor side: the actor's gradient step."""
        self.actor.step(dq_da)

    def update_targets(self) -> None:
        """Moves both target networks."""
        self.critics.update_target(self._config.tau)
        self.actor.update_target(self._config.tau)
        self.updates += 1
