"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spreeze import ops
from spreeze.algorithms.base import Proposal
from spreeze.algorithms.critics import Critics
from spreeze.algorithms.deterministic import DeterministicActor
from spreeze.algorithms.run import checked_updates, finite_only, run_update
from spreeze.algorithms.state import load_arrays, to_arrays
from spreeze.config import TD3Config
from spreeze.networks import policy_arrays
from spreeze.types import TransitionBatch


class TD3:
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
    ) -> None:
        place, hidden = torch.device(device), config.hidden_sizes
        init = torch.Generator().manual_seed(seed)
        self._noise = torch.Generator(place).manual_seed(seed + 1)
        self.actor = DeterministicActor(obs_dim, action_dim, hidden, config.actor_lr, init, self._noise, place, dtype)
        self.critics = Critics(obs_dim, action_dim, hidden, 2, config.critic_lr, init, place, dtype)
        self._config = config
        self._meta = {
            "algo": self.name,
            "policy": "deterministic",
            "obs_dim": obs_dim,
            "action_dim": action_dim,
            "hidden_sizes": list(hidden),
            "exploration_noise": config.exploration_noise,
        }
        self.updates = 0

    def propose(self, batch: TransitionBatch) -> Proposal:
        """Actor side: smoothed target actions; fresh ones at every ``policy_delay``-th update."""
        config = self._config
        next_action = self.actor.target_action(batch.next_obs, config.target_noise, config.target_noise_clip)
        return Proposal(next_action, None, self.actor.fresh_action(batch.obs) if self._moves_actor() else None)

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Critic side: target ``r + discount min Q'(s', a')`` (algorithm 1)."""
        value = self.critics.next_value(batch.next_obs, next_action)
        self.critics.step(batch.obs_action, ops.td_target(batch.reward, batch.terminated, batch.discount, value))

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

    def update(self, batch: TransitionBatch) -> None:
        """One whole update."""
        run_update(self, batch)

    def update_timed(self, batch: TransitionBatch) -> tuple[float, float]:
        """One whole update and its (critic_s, actor_s)."""
        return run_update(self, batch)

    def metrics(self) -> dict[str, float]:
        """Finite metrics of the latest update."""
        actor = {"actor_loss": -self.critics.mean_action_value(), "actor_grad_norm": self.actor.adam.gradient_norm}
        return finite_only(self.critics.metrics() | (actor if self.updates else {}))

    def updates_skipped(self) -> int:
        """Updates of which a step was refused: the critic's or the actor's, whichever is more."""
        return max(self.critics.adam.refused, self.actor.adam.refused)

    def all_finite(self) -> bool:
        """Whether the latest gradients were finite."""
        return math.isfinite(self.critics.adam.gradient_norm) and math.isfinite(self.actor.adam.gradient_norm)

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the actor's weights by layer."""
        return {name: tensor.numpy() for name, tensor in policy_arrays(self.actor.online).items()}

    def policy_meta(self) -> dict[str, Any]:
        """What the policy is."""
        return dict(self._meta)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of networks, targets, optimisers and random state."""
        return to_arrays(self._tensors(), self._noise)

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes over what ``state_arrays`` gave."""
        load_arrays(self._tensors(), self._noise, arrays)

    def state_json(self) -> dict[str, Any]:
        """Counters and identity."""
        return {"algo": self.name, "updates": self.updates}

    def load_state_json(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_json`` gave."""
        self.updates = checked_updates(self.name, state)

    def _tensors(self) -> dict[str, Tensor]:
        sides = {"actor": self.actor.tensors(), "critics": self.critics.tensors()}
        return {f"{side}.{name}": tensor for side, own in sides.items() for name, tensor in own.items()}
