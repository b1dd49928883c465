"""Deep deterministic policy gradient (Lillicrap et al. 2016, arXiv 1509.02971).

Departures from the paper: Gaussian instead of Ornstein-Uhlenbeck exploration noise, no weight decay,
no batch normalisation, and torch.nn.Linear's initialisation for all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spreeze.algorithms import losses
from spreeze.algorithms.nn.deterministic_actor import deterministic_parts
from spreeze.algorithms.nn.two_thread_update import ThreadPair
from spreeze.algorithms.off_policy import ActorCritic, Placement, Proposal
from spreeze.config.schema import DDPGConfig
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
        pair: ThreadPair | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        placement = Placement.parse(device)
        self.actor, self.critics, noise, meta = deterministic_parts(
            obs_dim, action_dim, config, seed, placement, dtype, num_critics=1, pair=pair
        )
        self._config = config
        super().__init__(self.actor, self.critics, noise, meta, placement, overlap=overlap)

    def propose(self, batch: TransitionBatch) -> Proposal:
        """Actor side: target actions and fresh ones."""
        return Proposal(self.actor.target_action(batch.next_obs), None, self.actor.fresh_action(batch.obs))

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Critic side: target ``r + discount Q'(s', pi'(s'))`` (algorithm 1)."""
        value = self.critics.next_value(batch.next_obs, next_action)
        self.critics.step(batch.obs_action, losses.td_target(batch.reward, batch.terminated, batch.discount, value))

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
