"""The contract of off-policy algorithms. They know no process, no clock but their own, no device map.

One update is four functions, two on each side; what crosses between the sides is in their arguments
and results and nowhere else::

    actor side                                   critic side
    propose(batch)         -- next actions, log-densities -->  critic_step(batch, ...)
                           -- fresh actions              -->  action_gradient(batch, action)
    actor_step(dq_da)      <-- dQ/da                     --

``update`` runs them in this order on one device or over two (``placement``); with ``overlap`` dQ/da is
taken before the critics' step, so that two devices work at once and the actor follows one update late.
Action-side tensors are component-first, [A, B]. An algorithm without an actor (DQN) has no ``action_gradient`` and
no ``actor_step``, and nothing crosses back.
"""
from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spreeze.algorithms.nn.fused_mlp import ParameterCopy, Parameters, policy_arrays
from spreeze.algorithms.nn.optimizers import FlatAdam
from spreeze.algorithms.state import generator_fits, load_arrays, seed_anew, to_arrays
from spreeze.errors import CheckpointError, ConfigError
from spreeze.types import TransitionBatch


class Proposal(NamedTuple):
    """What the actor side sends to the critic side for one update."""

    next_action: Tensor  # [A, B], at next_obs
    next_log_prob: Tensor | None  # [B] in nat; None where the algorithm has no entropy term
    action: Tensor | None  # [A, B], fresh actions at obs; None if this update moves no actor

    # A discrete policy hands over the probabilities [K, B] of all actions instead of one action, and their
    # logarithms [K, B]; dQ/da is then the value of each action [K, B]. DQN: the index of one action [1, B].


class OffPolicyAlgorithm(Protocol):
    """Networks, losses and update step of one off-policy algorithm."""

    name: str
    updates: int
    """Updates so far; whoever repeats recorded updates counts them here."""

    @property
    def crossed_bytes(self) -> int:
        """Bytes that went from one side to the other so far; 0 on one device. Recorded updates count once."""
        ...

    @property
    def period(self) -> int:
        """Updates after which the same steps are taken again: what an update does follows from its number."""
        ...

    @property
    def noise(self) -> torch.Generator:
        """Of all noise that updates draw."""
        ...

    def propose(self, batch: TransitionBatch) -> Proposal:
        """Actor side: actions at ``next_obs`` and fresh actions at ``obs``; draws all noise of the update."""
        ...

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Critic side: one gradient step of the critics toward the target."""
        ...

    def update_targets(self) -> None:
        """Moves the target networks; ends the update."""
        ...

    def update(self, batch: TransitionBatch, actor_batch: TransitionBatch | None = None) -> None:
        """One whole update. A step whose gradient is not finite is not applied, and counted.

        Args:
            batch: on the critics' device.
            actor_batch: obs and next_obs on the actor's device, where that is another one.
        """
        ...

    def update_timed(self, batch: TransitionBatch, actor_batch: TransitionBatch | None = None) -> tuple[float, float]:
        """``update``; returns the seconds of the critic step (with proposals) and of the actor step.

        On a GPU these are the times to enqueue the work, not to do it.
        """
        ...

    def drop_buffers(self) -> None:
        """Frees all memory that depends on the size of the batch; the next update takes what it needs anew."""
        ...

    def metrics(self) -> dict[str, float]:
        """Finite metrics of the latest update, by their names in the table of metrics (reads the device)."""
        ...

    def updates_skipped(self) -> int:
        """Gradient steps that were not applied because they were not finite (reads the device)."""
        ...

    def all_finite(self) -> bool:
        """Whether the latest gradients were finite (reads the device)."""
        ...

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the actor's weights, as ``spreeze.inference.policy`` reads them."""
        ...

    def policy_snapshot(self) -> Callable[[], dict[str, np.ndarray]]:
        """Copies the actor's weights without waiting for the device; what is returned gives them as ``policy_arrays``.

        It may be called in another thread, and waits there.
        """
        ...

    def policy_meta(self) -> dict[str, Any]:
        """JSON values that ``spreeze.inference.policy`` needs besides the weights."""
        ...

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of everything that a bit-exact resume needs: networks, targets, optimisers, random state."""
        ...

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> bool:
        """Takes over what ``state_arrays`` gave.

        Returns:
            False if all but the random state was: that is another kind of device's. Then call ``seed_noise``, once
            ``load_state_json`` has told how many updates there were.

        Raises:
            CheckpointError: names or shapes of another network.
        """
        ...

    def seed_noise(self, seed: int) -> None:
        """Noise that follows from this seed and the number of updates, from here on."""
        ...

    def state_json(self) -> dict[str, Any]:
        """Counters and identity, as JSON values."""
        ...

    def load_state_json(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_json`` gave.

        Raises:
            CheckpointError: the state of another algorithm.
        """
        ...


class Placement:
    """Devices of both sides; counts the bytes that cross."""

    def __init__(self, actor: torch.device, critics: torch.device, *, split: bool) -> None:
        self.actor, self.critics, self.split = actor, critics, split
        self.crossed_bytes = 0
        """Since this placement exists; a split over one and the same device counts what would cross."""

    @classmethod
    def parse(cls, text: str) -> Placement:
        """``cpu``, ``cuda:0``, or ``ACTOR+CRITICS`` such as ``cuda:0+cuda:1``.

        Raises:
            ConfigError: more than two devices, or not a device.
        """
        names = text.split("+")
        if len(names) > 2:
            raise ConfigError(f"device {text}: expected one device, or two as ACTOR+CRITICS")
        try:
            devices = [torch.device(name) for name in names]
        except RuntimeError:
            raise ConfigError(f"device {text}: expected cpu, cuda:N, or two of them as ACTOR+CRITICS") from None
        return cls(devices[0], devices[-1], split=len(devices) == 2)

    def send(self, proposal: Proposal) -> Proposal:
        """What the actor side proposes, on the critics' device."""
        if not self.split:
            return proposal
        next_action, next_log_prob, action = proposal
        return Proposal(
            self.to_critics(next_action), None if next_log_prob is None else self.to_critics(next_log_prob),
            None if action is None else self.to_critics(action),
        )

    def to_critics(self, tensor: Tensor) -> Tensor:
        """A tensor of the actor side on the critics' device."""
        return self._moved(tensor, self.critics)

    def to_actor(self, tensor: Tensor) -> Tensor:
        """A tensor of the critic side on the actor's device."""
        return self._moved(tensor, self.actor)

    def _moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        if not self.split:
            return tensor
        self.crossed_bytes += tensor.element_size() * tensor.nelement()
        # A copy to the processor is waited for: without that its numbers may be read before they are there.
        return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


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
