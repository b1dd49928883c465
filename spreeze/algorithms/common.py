"""What all algorithms here do alike: one update from its four functions, metrics, policy and state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spreeze.algorithms.adam import FlatAdam
from spreeze.algorithms.base import Proposal
from spreeze.algorithms.placement import Placement
from spreeze.algorithms.state import load_arrays, to_arrays
from spreeze.errors import CheckpointError
from spreeze.networks import ParameterCopy, Parameters, policy_arrays
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

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        ...


class CriticSide(Protocol):
    """What the common part needs of the critic side."""

    adam: FlatAdam

    def metrics(self) -> dict[str, float]:
        """Metrics of the latest step (reads the device)."""
        ...

    def mean_action_value(self) -> float:
        """Mean value of the latest fresh actions, NaN before the first (reads the device)."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        ...


class ActorCritic(ABC):
    """An ``OffPolicyAlgorithm`` but for the steps themselves, which each algorithm writes out."""

    name: str

    def __init__(
        self, actor: ActorSide, critics: CriticSide, noise: torch.Generator, meta: dict[str, Any],
        placement: Placement | None = None, *, overlap: bool = False,
    ) -> None:
        self.updates = 0
        self._placement = placement or Placement(noise.device, noise.device, split=False)
        self._overlap = overlap
        self._actor_side, self._critic_side, self._noise = actor, critics, noise
        self._meta = {"algo": self.name, **meta}

    @abstractmethod
    def propose(self, batch: TransitionBatch) -> Proposal:
        """Actor side: next and fresh actions."""

    @abstractmethod
    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Critic side: one gradient step."""

    @abstractmethod
    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        """Critic side: dQ/da."""

    @abstractmethod
    def actor_step(self, dq_da: Tensor) -> None:
        """Actor side: one gradient step."""

    @abstractmethod
    def update_targets(self) -> None:
        """Moves the target networks; ends the update."""

    @property
    def period(self) -> int:
        """Updates after which the same steps are taken again."""
        return 1

    @property
    def noise(self) -> torch.Generator:
        """Of all noise that updates draw."""
        return self._noise

    def update(self, batch: TransitionBatch, actor_batch: TransitionBatch | None = None) -> None:
        """One whole update."""
        self.update_timed(batch, actor_batch)

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

    def critic_metrics(self) -> dict[str, float]:
        """Those of the critics' latest step (reads the device)."""
        return _finite(self._critic_side.metrics())

    def actor_metrics(self) -> dict[str, float]:
        """Those of the actor's latest step (reads the device)."""
        return _finite(self._actor_side.metrics(self._critic_side.mean_action_value()))

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

    def updates_skipped(self) -> int:
        """Updates of which a step was refused: the critics' or the actor's, whichever is more."""
        return max(self._critic_side.adam.refused, self._actor_side.refused())

    def all_finite(self) -> bool:
        """Whether the latest gradients were finite."""
        norms = self._critic_side.adam.gradient_norm, self._actor_side.adam.gradient_norm
        return all(math.isfinite(norm) for norm in norms)

    def optimisers(self) -> list[FlatAdam]:
        """Those of the critics and of the actor."""
        return [self._critic_side.adam, self._actor_side.adam]

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the actor's weights by layer."""
        return {name: tensor.numpy() for name, tensor in policy_arrays(self._actor_side.online).items()}

    def policy_snapshot(self) -> Callable[[], dict[str, np.ndarray]]:
        """A copy of the actor's weights, to be had later."""
        copy = ParameterCopy(self._actor_side.online)
        return lambda: {name: tensor.numpy() for name, tensor in copy.policy_arrays().items()}

    def policy_meta(self) -> dict[str, Any]:
        """What the policy is."""
        return dict(self._meta)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of networks, targets, optimisers, temperature and random state."""
        return to_arrays(self._tensors(), self._noise)

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes over what ``state_arrays`` gave."""
        load_arrays(self._tensors(), self._noise, arrays)

    def state_json(self) -> dict[str, Any]:
        """Counters and identity."""
        return {"algo": self.name, "updates": self.updates}

    def load_state_json(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_json`` gave."""
        if state.get("algo") != self.name:
            raise CheckpointError(
                f"checkpoint was made by '{state.get('algo')}', not by '{self.name}'; use the same algorithm"
            )
        self.updates = int(state["updates"])

    def _tensors(self) -> dict[str, Tensor]:
        sides = {"actor": self._actor_side.tensors(), "critics": self._critic_side.tensors()}
        return {f"{side}.{name}": tensor for side, own in sides.items() for name, tensor in own.items()}


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _bytes(tensor: Tensor) -> int:
    return tensor.element_size() * tensor.nelement()
