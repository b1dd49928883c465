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

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

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
        """Copies of the actor's weights, as ``spreeze.policies`` reads them."""
        ...

    def policy_snapshot(self) -> Callable[[], dict[str, np.ndarray]]:
        """Copies the actor's weights without waiting for the device; what is returned gives them as ``policy_arrays``.

        It may be called in another thread, and waits there.
        """
        ...

    def policy_meta(self) -> dict[str, Any]:
        """JSON values that ``spreeze.policies`` needs besides the weights."""
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
