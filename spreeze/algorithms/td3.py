"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477)."""

from __future__ import annotations

import torch
from torch import Tensor

from spreeze.algorithms import losses
from spreeze.algorithms.nn.deterministic_actor import deterministic_parts
from spreeze.algorithms.nn.two_thread_update import ThreadPair
from spreeze.algorithms.off_policy import ActorCritic, Placement, Proposal
from spreeze.config.schema import TD3Config
from spreeze.types import TransitionBatch


class TD3(ActorCritic):
    """TD3; see ``OffPolicyAlgorithm`` for what each member does."""

    name = "td3"

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        config: TD3Config,
        seed: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        pair: ThreadPair | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        placement = Placement.parse(device)
        self.actor, self.critics, noise, meta = deterministic_parts(
            obs_dim, action_dim, config, seed, placement, dtype, num_critics=2, pair=pair
        )
        self._config = config
        super().__init__(self.actor, self.critics, noise, meta, placement, overlap=overlap)

    @property
    def period(self) -> int:
        """The actor moves at every ``policy_delay``-th update."""
        return self._config.policy_delay

    def propose(self, batch: TransitionBatch) -> Proposal:
        """Actor side: smoothed target actions; fresh ones at every ``policy_delay``-th update."""
        config = self._config
        next_action = self.actor.target_action(batch.next_obs, config.target_noise, config.target_noise_clip)
        return Proposal(next_action, None, self.actor.fresh_action(batch.obs) if self._moves_actor() else None)

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Critic side: target ``r + discount min Q'(s', a')`` (algorithm 1)."""
        value = self.critics.next_value(batch.next_obs, next_action)
        self.critics.step(batch.obs_action, losses.td_target(batch.reward, batch.terminated, batch.discount, value))

    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        """Critic side: gradient of the first critic."""
        return self.critics.action_gradient(batch.obs, action, least=False)

    def actor_step(self, dq_da: Tensor) -> None:
        """Actor side: the actor's gradient step."""
        self.actor.step(dq_da)

    def update_targets(self) -> None:
        """Moves the target networks, at the updates that move the actor."""
        if self._moves_actor():
            self.critics.update_target(self._config.tau)
            self.actor.update_target(self._config.tau)
        self.updates += 1

    def _moves_actor(self) -> bool:
        return (self.updates + 1) % self._config.policy_delay == 0
