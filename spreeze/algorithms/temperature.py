"""SAC's temperature alpha and its optimiser, the same for continuous and discrete actions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spreeze.algorithms.nn.optimizers import FlatAdam
from spreeze.config.schema import SACConfig


class Temperature:
    """``alpha`` [1], moved by gradient steps on its logarithm (arXiv 1812.05905, eq. 18)."""

    def __init__(self, config: SACConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.tuned = config.tune_alpha
        self.log_alpha = torch.full((1,), math.log(config.initial_alpha), device=device, dtype=dtype)
        self.alpha = self.log_alpha.exp()
        self.gradient = torch.zeros_like(self.log_alpha)
        """[1], to log alpha; filled in before ``step``."""
        self._adam = FlatAdam(self.log_alpha, self.gradient, config.alpha_lr)

    def step(self) -> None:
        """Applies ``gradient``."""
        self._adam.step()
        self.derive()

    def derive(self) -> None:
        """Makes ``alpha`` follow its logarithm: after a step, or after a checkpoint was loaded."""
        torch.exp(self.log_alpha, out=self.alpha)

    def metrics(self, adam: FlatAdam, entropy: Tensor | None, mean_action_value: float) -> dict[str, float]:
        """alpha, entropy, actor_loss and actor_grad_norm of the actor's latest step (reads the device).

        Args:
            adam: of the actor.
            entropy: estimate [B] of the latest batch; None before the first step.
            mean_action_value: mean Q of the fresh actions.
        """
        alpha = self.log_alpha.exp().item()
        if entropy is None:
            return {"alpha": alpha}
        mean_entropy = entropy.mean().item()
        return {
            "alpha": alpha,
            "entropy": mean_entropy,
            "actor_loss": -alpha * mean_entropy - mean_action_value,
            "actor_grad_norm": adam.gradient_norm,
        }

    def refused(self, adam: FlatAdam) -> int:
        """Steps of actor (``adam``) and temperature that were not applied (reads the device)."""
        return max(adam.refused, self._adam.refused)

    def tensors(self, online: Tensor, adam: FlatAdam) -> dict[str, Tensor]:
        """The actor side's state that a checkpoint stores: networks, temperature, both optimisers."""
        own = {"online": online, "log_alpha": self.log_alpha}
        own |= {f"adam.{name}": tensor for name, tensor in adam.tensors().items()}
        return own | {f"alpha_adam.{name}": tensor for name, tensor in self._adam.tensors().items()}
