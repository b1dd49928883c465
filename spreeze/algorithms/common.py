"""What all off-policy algorithms here do alike: an update of critics alone, metrics, policy and state.

``actor_critic`` adds the actor.
"""

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
from spreeze.algorithms.state import generator_fits, load_arrays, seed_anew, to_arrays
from spreeze.errors import CheckpointError
from spreeze.networks import ParameterCopy, Parameters, policy_arrays
from spreeze.types import TransitionBatch


class CriticSide(Protocol):
    """What the common part needs of the critic side."""

    adam: FlatAdam

    def metrics(self) -> dict[str, float]:
        """Metrics of the latest step (reads the device)."""
        ...

    def mean_action_value(self) -> float:
        """Mean value of the latest fresh actions, NaN before the first (reads the device)."""
        ...

    def drop_buffers(self) -> None:
        """Frees what depends on the size of the batch."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        ...


class OffPolicy(ABC):
    """An ``OffPolicyAlgorithm`` whose policy is read from its critics, but for the steps that each one writes out."""

    name: str

    def __init__(self, online: Parameters, critics: CriticSide, noise: torch.Generator, meta: dict[str, Any]) -> None:
        self.updates = 0
        self._online, self._critic_side, self._noise = online, critics, noise
        self._meta = {"algo": self.name, **meta}

    @abstractmethod
    def propose(self, batch: TransitionBatch) -> Proposal:
        """Next actions, and fresh ones where there is an actor."""

    @abstractmethod
    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """One gradient step of the critics."""

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

    @property
    def crossed_bytes(self) -> int:
        """Bytes that went from one side to the other: there is one side."""
        return 0

    def update(self, batch: TransitionBatch, actor_batch: TransitionBatch | None = None) -> None:
        """One whole update."""
        self.update_timed(batch, actor_batch)

    def update_timed(self, batch: TransitionBatch, actor_batch: TransitionBatch | None = None) -> tuple[float, float]:
        """One whole update and its (critic_s, actor_s)."""
        with torch.inference_mode():
            start_s = perf_counter()
            proposal = self.propose(batch)
            self.critic_step(batch, proposal.next_action, proposal.next_log_prob)
            critic_done_s = perf_counter()
            self.update_targets()
            return critic_done_s - start_s, perf_counter() - critic_done_s

    def drop_buffers(self) -> None:
        """Frees what depends on the size of the batch; the next update makes it anew."""
        self._critic_side.drop_buffers()

    def metrics(self) -> dict[str, float]:
        """Metrics of the latest update; one that is not finite is left out, never shown as a number."""
        return self.critic_metrics()

    def critic_metrics(self) -> dict[str, float]:
        """Those of the critics' latest step (reads the device)."""
        return finite(self._critic_side.metrics())

    def updates_skipped(self) -> int:
        """Updates of which a step was refused."""
        return self._critic_side.adam.refused

    def all_finite(self) -> bool:
        """Whether the latest gradients were finite."""
        return all(math.isfinite(adam.gradient_norm) for adam in self.optimisers())

    def optimisers(self) -> list[FlatAdam]:
        """All of them."""
        return [self._critic_side.adam]

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the policy's weights by layer."""
        return {name: tensor.numpy() for name, tensor in policy_arrays(self._online).items()}

    def policy_snapshot(self) -> Callable[[], dict[str, np.ndarray]]:
        """A copy of the policy's weights, to be had later."""
        copy = ParameterCopy(self._online)
        return lambda: {name: tensor.numpy() for name, tensor in copy.policy_arrays().items()}

    def policy_meta(self) -> dict[str, Any]:
        """What the policy is."""
        return dict(self._meta)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of networks, targets, optimisers, temperature and random state."""
        return to_arrays(self._tensors(), self._noise)

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> bool:
        """Takes over what ``state_arrays`` gave; False if the noise was not taken over."""
        fits = generator_fits(self._noise, arrays)
        load_arrays(self._tensors(), self._noise if fits else None, arrays)
        return fits

    def seed_noise(self, seed: int) -> None:
        """New noise for the updates from here on."""
        seed_anew(self._noise, seed, self.updates)

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

    def _sides(self) -> dict[str, dict[str, Tensor]]:
        return {"critics": self._critic_side.tensors()}

    def _tensors(self) -> dict[str, Tensor]:
        return {f"{side}.{name}": tensor for side, own in self._sides().items() for name, tensor in own.items()}


def finite(values: dict[str, float]) -> dict[str, float]:
    """Those of them that are finite numbers."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
