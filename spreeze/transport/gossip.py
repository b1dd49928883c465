"""Gossip between learners: the interface of every transport, and its implementation in shared memory.

In memory of the supervisor each learner has the newest few of its messages in slots of its own
(``VersionedParameters``). So a message is there whole or not at all, whichever process is killed, a newer one replaces
an older one, and nobody waits for a reader. Between hosts they travel by ``gloo_gossip``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.errors import TransportError
from spreeze.transport import files
from spreeze.transport.protocols import GossipMessage
from spreeze.transport.topology import in_neighbours
from spreeze.transport.weights import VersionedParameters, Weights
from spreeze.types import Jsonable

_PARAMETERS = "parameters"
_MOST_SLOTS = 9
"""Each is a descriptor in every learner."""
_SECRET_BYTES = 32


def create_secret(path: Path, secret: bytes | None = None) -> bytes:
    """Writes a secret (None: a new one) into a file that only this user can read; an OSError if that fails."""
    secret = secrets.token_bytes(_SECRET_BYTES) if secret is None else secret
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    return secret


def read_secret(path: Path) -> bytes:
    """Reads the file of ``create_secret``; a TransportError if that fails."""
    try:
        secret = files.read_bytes(path, _SECRET_BYTES)
    except (OSError, ValueError) as error:
        raise TransportError(f"the secret of the run cannot be read: {error}") from None
    if len(secret) != _SECRET_BYTES:
        raise TransportError(f"the secret of the run in {path} has {len(secret)} bytes, not {_SECRET_BYTES}")
    return secret


def messages_kept(learners: int) -> int:
    """Messages kept of each learner: in lockstep, one of a small ring gets almost that far ahead of its reader."""
    return min(learners + 1, _MOST_SLOTS)


@dataclass(frozen=True, kw_only=True)
class GlooPlace(Jsonable):
    """Where learners meet that exchange messages by gloo."""

    store: str
    """host:port of the ``MemberStore``."""
    secret_file: str
    """File that holds the secret."""
    listen: str
    """Address of this machine at which its learners take connections."""
    learners: int
    """Number of learners of all hosts together."""
    own: tuple[int, ...]
    """Number of each learner of this host among all."""
    joined: bool = False
    """True if the others may have learned for a while."""

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, folder: Path, listen: str, count: int, learners: int, facts: Mapping[str, Any]
    ) -> Iterator[GlooPlace]:
        """A place for ``learners``, the first ``count`` of which are of this host; this loads torch.

        The secret is in ``folder`` meanwhile. Whoever joins must have the same ``facts``.

        Raises:
            TransportError: no port of the address ``listen`` can be opened.
            OSError: the secret cannot be written.
        """
        from spreeze.transport.gloo_gossip import MemberStore

        secret_file = folder / "secret"
        secret_file.unlink(missing_ok=True)  # of a session that was killed
        secret = create_secret(secret_file)
        try:
            with contextlib.closing(MemberStore(listen)) as store:
                store.describe(secret, count, learners, facts)
                yield cls(
                    store=store.address,
                    secret_file=str(secret_file),
                    listen=listen,
                    learners=learners,
                    own=tuple(range(count)),
                )
        finally:
            secret_file.unlink(missing_ok=True)

    @classmethod
    def joining(
        cls, store: str, secret_file: Path, listen: str, count: int, claimant: str, facts: Mapping[str, Any]
    ) -> GlooPlace:
        """The place of another host's run, with ``count`` learners of this host there; this loads torch.

        The same ``claimant`` gets the same numbers again.

        Raises:
            TransportError: it cannot be reached, has other facts, or has no room for so many.
        """
        from spreeze.transport.gloo_gossip import claim

        learners, own = claim(store, read_secret(secret_file), count, claimant, facts)
        return cls(store=store, secret_file=str(secret_file), listen=listen, learners=learners, own=own, joined=True)


class NeighbourGossip:
    """A ``Gossip`` but for how messages travel: neighbours, staleness, and which message is received."""

    def __init__(self, learner: int, learners: int, *, topology: str, max_staleness: int | None) -> None:
        self._learner, self._topology, self._max_staleness = learner, topology, max_staleness
        self._number = -1
        self._held = [(-1, -1)] * learners
        self.in_neighbours: tuple[int, ...] = ()
        self.staleness: dict[int, int] = {}
        self.close_over(range(learners))

    def _put(self, parameters: np.ndarray, number: int) -> None:
        """Makes a message visible to the out-neighbours."""
        raise NotImplementedError

    def _numbered(self, peer: int, number: int) -> GossipMessage | None:
        """A peer's message of that number, if it is there."""
        raise NotImplementedError

    def _newest(self, peer: int, newer_than: tuple[int, int] | None = None) -> GossipMessage | None:
        """A peer's newest message; None if there is none, or none newer than (epoch, number)."""
        raise NotImplementedError

    def close_over(self, living: Sequence[int]) -> None:
        self._living = tuple(living)
        self.in_neighbours = in_neighbours(self._topology, self._learner, self._living)
        self.staleness = {peer: self.staleness.get(peer, 0) for peer in self.in_neighbours}

    def send(self, parameters: np.ndarray, number: int) -> None:
        self._put(parameters, number)
        self._number = number
        self.staleness = {peer: updates + 1 for peer, updates in self.staleness.items()}

    def receive(self) -> list[GossipMessage]:
        found = [message for peer in self.in_neighbours if (message := self._due(peer)) is not None]
        for message in found:
            self._held[message.sender] = message.epoch, message.number
            self.staleness[message.sender] = 0
        return found

    def _due(self, peer: int) -> GossipMessage | None:
        """The peer's newest message not received yet; in lockstep the one of the same number, if it is there."""
        held, message = self._held[peer], None
        if self._max_staleness == 0:
            if held[1] == self._number:
                return None  # the peer's next one is for the next mix
            message = self._numbered(peer, self._number) if held[1] < self._number else None
        return self._newest(peer, held) if message is None else message

    def overdue(self) -> tuple[int, ...]:
        if self._max_staleness is None:
            return ()
        return tuple(
            peer
            for peer, age in self.staleness.items()
            if age > self._max_staleness and not (self._max_staleness == 0 and self._held[peer][1] >= self._number)
        )  # one that is ahead is not waited for

    def latest(self, peer: int) -> GossipMessage | None:
        return self._newest(peer)

    def at(self, peer: int, number: int) -> GossipMessage | None:
        message = self._numbered(peer, number)
        if message is None:
            newest = self._newest(peer)
            message = newest if newest is not None and newest.number > number else None
        return message


class SharedGossip(NeighbourGossip):
    """A ``Gossip`` in memory files; ``slots[i]`` are those of learner i."""

    def __init__(
        self,
        learner: int,
        slots: Sequence[VersionedParameters],
        *,
        topology: str,
        max_staleness: int | None,
        epoch: int = 0,
    ) -> None:
        """Numbers rise within an ``epoch``: one learner's start, or the whole run if they go on after a restart."""
        self._slots, self._epoch = list(slots), epoch
        super().__init__(learner, len(self._slots), topology=topology, max_staleness=max_staleness)

    def _put(self, parameters: np.ndarray, number: int) -> None:
        self._slots[self._learner].publish({_PARAMETERS: parameters}, {}, self._epoch, number)

    def _numbered(self, peer: int, number: int) -> GossipMessage | None:
        return _message(peer, self._slots[peer].read(number))

    def _newest(self, peer: int, newer_than: tuple[int, int] | None = None) -> GossipMessage | None:
        return _message(peer, self._slots[peer].read_latest(newer_than))

    def close(self) -> None:
        """Does nothing: the slots are their owner's."""


def _message(sender: int, weights: Weights | None) -> GossipMessage | None:
    return (
        None if weights is None else GossipMessage(sender, weights.version, weights.arrays[_PARAMETERS], weights.epoch)
    )
