"""Actor and critics that train at once, each beside a copy of the other (PQL, arXiv 2307.12983).

Two whole algorithms of one kind: the first trains its actor against a copy of the critics, the second its
critics against a copy of the actor, on two devices or in two threads. Nothing of an update crosses; every
``interval`` updates both copies are made anew. Departures from PQL: both sides see the same batch and
take one step each an update, in one process, so the result follows from the seed. Each side draws
actions at obs and next_obs and uses one half of them: a ninth of its products.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spreeze.algorithms.nn.two_thread_update import ThreadPair
from spreeze.algorithms.off_policy import ActorCritic, Proposal
from spreeze.types import TransitionBatch

_ACTOR, _CRITICS = "actor_side.", "critic_side."


class PQL:
    """An ``OffPolicyAlgorithm`` made of two; see there for what each member does."""

    def __init__(self, actor_side: ActorCritic, critic_side: ActorCritic, interval: int,
                 pair: ThreadPair | None = None) -> None:
        """Args: both of one seed, each on its device; ``interval`` updates from copy to copy."""
        self.name = actor_side.name
        self.updates = 0
        self._actor_side, self._critic_side = actor_side, critic_side
        self._interval, self._pair = interval, pair
        self.crossed_bytes = 0
        self._mailbox_bytes = actor_side.actor_bytes + critic_side.critic_bytes

    @property
    def period(self) -> int:
        """Updates after which the same steps are taken again, copies aside: these are never recorded."""
        return self._actor_side.period

    @property
    def noise(self) -> torch.Generator:
        """Of the actor's side; the critics' side has its own."""
        return self._actor_side.noise

    def propose(self, batch: TransitionBatch) -> Proposal:
        """Actor side, by the actor itself."""
        return self._actor_side.propose(batch)

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Critic side."""
        self._critic_side.critic_step(batch, next_action, next_log_prob)

    def action_gradient(self, batch: TransitionBatch, action: Tensor) -> Tensor:
        """dQ/da of the copied critics."""
        return self._actor_side.action_gradient(batch, action)

    def actor_step(self, dq_da: Tensor) -> None:
        """Actor side."""
        self._actor_side.actor_step(dq_da)

    def update_targets(self) -> None:
        """Moves the target networks and, when it is time, renews the copies."""
        self._critic_side.update_targets()
        self._actor_side.updates += 1
        self.updates += 1
        if self.updates % self._interval == 0:
            self._actor_side.take_critics(self._critic_side)
            self._critic_side.take_actor(self._actor_side)
            self.crossed_bytes += self._mailbox_bytes

    def update(self, batch: TransitionBatch, actor_batch: TransitionBatch | None = None) -> None:
        """One whole update."""
        self.update_timed(batch, actor_batch)

    def update_timed(self, batch: TransitionBatch, actor_batch: TransitionBatch | None = None) -> tuple[float, float]:
        """One whole update and its (critic_s, actor_s), which overlap with a pair of threads."""
        seen = batch if actor_batch is None else actor_batch
        took_s = [0.0, 0.0]

        def train_critics() -> None:
            start_s = perf_counter()
            proposal = self._critic_side.propose(batch)
            self.critic_step(batch, proposal.next_action, proposal.next_log_prob)
            took_s[0] = perf_counter() - start_s

        def train_actor() -> None:
            start_s = perf_counter()
            action = self.propose(seen).action
            if action is not None:
                self.actor_step(self.action_gradient(seen, action))
            took_s[1] = perf_counter() - start_s

        with torch.inference_mode():
            if self._pair is None:
                train_actor()
                train_critics()
            else:
                self._pair.both(train_critics, train_actor)
            self.update_targets()
        return took_s[0], took_s[1]

    def drop_buffers(self) -> None:
        """Frees what depends on the size of the batch; the next update makes it anew."""
        self._actor_side.drop_buffers()
        self._critic_side.drop_buffers()

    def metrics(self) -> dict[str, float]:
        """Of the actor and of the critics that are trained."""
        return self._critic_side.critic_metrics() | self._actor_side.actor_metrics()

    def updates_skipped(self) -> int:
        """Updates of which a step was refused: the critics' or the actor's, whichever is more."""
        return max(self._actor_side.updates_skipped(), self._critic_side.updates_skipped())

    def all_finite(self) -> bool:
        """Whether the latest gradients were finite."""
        return self._actor_side.all_finite() and self._critic_side.all_finite()

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the trained actor's weights by layer."""
        return self._actor_side.policy_arrays()

    def policy_snapshot(self) -> Callable[[], dict[str, np.ndarray]]:
        """A copy of the trained actor's weights, to be had later."""
        return self._actor_side.policy_snapshot()

    def policy_meta(self) -> dict[str, Any]:
        """What the policy is."""
        return self._actor_side.policy_meta()

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of all of both sides."""
        sides = {_ACTOR: self._actor_side, _CRITICS: self._critic_side}
        return {prefix + name: array for prefix, side in sides.items() for name, array in side.state_arrays().items()}

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> bool:
        """Takes over what ``state_arrays`` gave; False if the noise was not taken over."""
        fits = [
            side.load_state_arrays({
                name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)
            })
            for prefix, side in ((_ACTOR, self._actor_side), (_CRITICS, self._critic_side))
        ]
        return all(fits)

    def seed_noise(self, seed: int) -> None:
        """New noise for the updates from here on, on both sides alike, as at the beginning."""
        self._actor_side.seed_noise(seed)
        self._critic_side.seed_noise(seed)

    def state_json(self) -> dict[str, Any]:
        """Counters and identity."""
        return {"algo": self.name, "updates": self.updates}

    def load_state_json(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_json`` gave."""
        self._actor_side.load_state_json(state)
        self._critic_side.load_state_json(state)
        self.updates = self._actor_side.updates
