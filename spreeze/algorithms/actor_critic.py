"""What the algorithms with an actor beside their critics do alike: an update over two sides, one or two devices."""

from __future__ import annotations

from abc import abstractmethod
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from spreeze.algorithms.adam import FlatAdam
from spreeze.algorithms.common import CriticSide, OffPolicy, finite
from spreeze.algorithms.placement import Placement
from spreeze.networks import Parameters
from spreeze.types import TransitionBatch


class ActorSide(Protocol):
    """What the common part needs of the actor side."""

    online: Parameters
    adam: FlatAdam

    def metrics(self, mean_action_value: float) -> dict[str, float]:
        """Metrics of the latest step (reads the device)."""
        ...

    def refused(self) -> int:
        """Steps that were not applied (reads the device)."""
        ...

    def drop_buffers(self) -> None:
        """Frees what depends on the size of the batch."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        ...


class ActorCritic(OffPolicy):
    """An ``OffPolicyAlgorithm`` but for the steps themselves, which each algorithm writes out."""

    def __init__(
        self, actor: ActorSide, critics: CriticSide, noise: torch.Generator, meta: dict[str, Any],
        placement: Placement | None = None, *, overlap: bool = False,
    ) -> None:
        super().__init__(actor.online, critics, noise, meta)
        self._placement = placement or Placement(noise.device, noise.device, split=False)
        self._overlap = overlap
        self._actor_side = actor

    @abstractmethod
    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        """Critic side: dQ/da."""

    @abstractmethod
    def actor_step(self, dq_da: Tensor) -> None:
        """Actor side: one gradient step."""

    def update_timed(self, batch: TransitionBatch, actor_batch: TransitionBatch | None = None) -> tuple[float, float]:
        """One whole update and its (critic_s, actor_s)."""
        placement = self._placement
        with torch.inference_mode():
            start_s = perf_counter()
            proposal = placement.send(self.propose(batch if actor_batch is None else actor_batch))
            dq_da: Tensor | None = None
            if self._overlap and proposal.action is not None:
                # By the critics of before this update: the actor's device need not wait for their step.
                dq_da = placement.to_actor(self.action_gradient(batch, proposal.action).clone())
            self.critic_step(batch, proposal.next_action, proposal.next_log_prob)
            critic_done_s = perf_counter()
            if proposal.action is not None:
                if dq_da is None:
                    dq_da = placement.to_actor(self.action_gradient(batch, proposal.action))
                self.actor_step(dq_da)
            self.update_targets()
            return critic_done_s - start_s, perf_counter() - critic_done_s

    @property
    def crossed_bytes(self) -> int:
        """Bytes that went from one side to the other so far; 0 on one device."""
        return self._placement.crossed_bytes

    def metrics(self) -> dict[str, float]:
        """Metrics of the latest update; one that is not finite is left out, never shown as a number."""
        return self.critic_metrics() | self.actor_metrics()

    def actor_metrics(self) -> dict[str, float]:
        """Those of the actor's latest step (reads the device)."""
        return finite(self._actor_side.metrics(self._critic_side.mean_action_value()))

    def take_actor(self, other: ActorCritic) -> None:
        """Copies the actor of an algorithm of the same kind, maybe on another device."""
        self._actor_side.online.flat.copy_(other._actor_side.online.flat, non_blocking=True)

    def take_critics(self, other: ActorCritic) -> None:
        """Copies the critics of an algorithm of the same kind, maybe on another device."""
        self._critic_side.tensors()["online"].copy_(other._critic_side.tensors()["online"], non_blocking=True)

    @property
    def actor_bytes(self) -> int:
        """Bytes that ``take_actor`` copies."""
        return _bytes(self._actor_side.online.flat)

    @property
    def critic_bytes(self) -> int:
        """Bytes that ``take_critics`` copies."""
        return _bytes(self._critic_side.tensors()["online"])

    def drop_buffers(self) -> None:
        """Frees what depends on the size of the batch; the next update makes it anew."""
        super().drop_buffers()
        self._actor_side.drop_buffers()

    def updates_skipped(self) -> int:
        """Updates of which a step was refused: the critics' or the actor's, whichever is more."""
        return max(self._critic_side.adam.refused, self._actor_side.refused())

    def optimisers(self) -> list[FlatAdam]:
        """Those of the critics and of the actor."""
        return [self._critic_side.adam, self._actor_side.adam]

    def _sides(self) -> dict[str, dict[str, Tensor]]:
        return {"actor": self._actor_side.tensors(), **super()._sides()}


def _bytes(tensor: Tensor) -> int:
    return tensor.element_size() * tensor.nelement()
