"""Gossip between learners through shared memory of the supervisor.

Each learner has the newest few of its messages in slots of its own (``VersionedParameters``). So a message is there
whole or not at all, whichever process is killed, a newer one replaces an older one, and nobody waits for a reader.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spreeze.transport.protocols import GossipMessage
from spreeze.transport.topology import in_neighbours, out_neighbours
from spreeze.transport.weights import VersionedParameters

_PARAMETERS = "parameters"
_MOST_SLOTS = 9
"""Each is a descriptor in every learner."""


class SharedGossip:
    """A ``Gossip`` in memory files; ``slots[i]`` are those of learner i."""

    def __init__(
        self, learner: int, slots: Sequence[VersionedParameters], *, topology: str, max_staleness: int | None
    ) -> None:
        self._learner, self._slots = learner, list(slots)
        self._topology, self._max_staleness = topology, max_staleness
        self._number = -1
        self._held = [-1] * len(self._slots)
        self._in_neighbours: tuple[int, ...] = ()
        self.staleness: dict[int, int] = {}
        self.close_over(range(len(self._slots)))

    @staticmethod
    def slots_of(learners: int) -> int:
        """Messages kept of each: in lockstep, a learner of a small ring gets almost that far ahead of its reader."""
        return min(learners + 1, _MOST_SLOTS)

    @property
    def in_neighbours(self) -> tuple[int, ...]:
        return self._in_neighbours

    @property
    def out_neighbours(self) -> tuple[int, ...]:
        return out_neighbours(self._topology, self._learner, self._living)

    def close_over(self, living: Sequence[int]) -> None:
        self._living = tuple(living)
        self._in_neighbours = in_neighbours(self._topology, self._learner, self._living)
        self.staleness = {peer: self.staleness.get(peer, 0) for peer in self._in_neighbours}

    def send(self, parameters: np.ndarray, number: int) -> None:
        self._slots[self._learner].publish({_PARAMETERS: parameters}, {}, 0, number)
        self._number = number
        self.staleness = {peer: updates + 1 for peer, updates in self.staleness.items()}

    def receive(self) -> list[GossipMessage]:
        found = [message for peer in self._in_neighbours if (message := self._newest(peer)) is not None]
        for message in found:
            self._held[message.sender] = message.number
            self.staleness[message.sender] = 0
        return found

    def _newest(self, peer: int) -> GossipMessage | None:
        """The peer's newest message not received yet; in lockstep the one of the same number, if it is there."""
        slots, message = self._slots[peer], None
        if self._max_staleness == 0:
            if self._held[peer] >= self._number:
                return None  # a peer that is one ahead has to wait for the next mix
            message = slots.read(self._number)
        if message is None:
            message = slots.read_latest((0, self._held[peer]))
        return None if message is None else GossipMessage(peer, message.version, message.arrays[_PARAMETERS])

    def overdue(self) -> tuple[int, ...]:
        if self._max_staleness is None:
            return ()
        return tuple(peer for peer, updates in self.staleness.items() if updates > self._max_staleness)

    def latest(self, peer: int) -> GossipMessage | None:
        message = self._slots[peer].read_latest()
        return None if message is None else GossipMessage(peer, message.version, message.arrays[_PARAMETERS])

    def at(self, peer: int, number: int) -> GossipMessage | None:
        """A peer's message of that number, or a newer one where it is gone; None while there is neither."""
        message = self._slots[peer].read(number) or self._slots[peer].read_latest((0, number))
        return None if message is None else GossipMessage(peer, message.version, message.arrays[_PARAMETERS])
