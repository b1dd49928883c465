"""Gossip between learners: neighbours, staleness, messages in shared memory, and the bounds of its theory.

Each learner has its newest few messages in slots of its own (``VersionedParameters``), in memory of the supervisor. A
message is there whole or not at all, whichever process is killed; a newer one replaces an older one. Every host has
slots for the learners of all hosts (``GossipMemory``), and a process copies messages between hosts
(``runtime.cluster.learner_bridge``), so no learner waits for a reader or for the network.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy

from spreeze.errors import TransportError, WeightsError
from spreeze.process_identity import pid_exists
from spreeze.transport.chunks import sign, verify
from spreeze.transport.shared_memory import ArraySpec, Handle, SharedArrays
from spreeze.transport.weights import ParametersHandle, VersionedParameters, Weights
from spreeze.types import Jsonable

SILENT_S = 3.0  # silence after which a learner of another host counts as gone
_HANDLE_VARIABLE = "SPREEZE_GOSSIP"
"""Environment variable by which a run inherits memory for messages from the process that started it."""
_PARAMETERS = "parameters"
_MAX_SLOTS = 9  # Each is a descriptor in every learner.


def messages_kept(learners: int) -> int:
    """Messages kept of each learner: in lockstep, one of a small ring gets almost that far ahead of its reader."""
    return min(learners + 1, _MAX_SLOTS)


class GossipMessage(NamedTuple):
    """Parameters that another learner sent."""

    sender: int
    number: int  # of the sender's update after which it was sent
    parameters: np.ndarray  # [d]
    epoch: int = 0  # of the sender's start; numbers rise within it


class Gossip:
    """One learner's side of the exchange of parameters in a directed graph of learners; ``slots[i]`` are learner i's.

    Each message is received whole, at most once by each out-neighbour; the newest of a sender replaces older ones. No
    method waits.
    """

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
        self._learner, self._topology, self._max_staleness = learner, topology, max_staleness
        self._slots, self._epoch = list(slots), epoch
        self._number = -1
        self._received = [(-1, -1)] * len(slots)
        self.in_neighbours: tuple[int, ...] = ()
        """The learners whose messages this one receives."""
        self.staleness: dict[int, int] = {}
        """In-neighbour -> messages sent here since its last message was received."""
        self.restrict_to(range(len(slots)))

    def restrict_to(self, living: Sequence[int]) -> None:
        """Leaves the others out of the graph, until they are among the living again."""
        self.in_neighbours = in_neighbours(self._topology, self._learner, living)
        self.staleness = {peer: self.staleness.get(peer, 0) for peer in self.in_neighbours}

    def send(self, parameters: np.ndarray, number: int) -> None:
        """Makes parameters [d] visible to the out-neighbours. Numbers rise; the array may be reused."""
        self._slots[self._learner].publish({_PARAMETERS: parameters}, {}, self._epoch, number)
        self._number = number
        self.staleness = {peer: updates + 1 for peer, updates in self.staleness.items()}

    def receive(self) -> list[GossipMessage]:
        """The newest message of each in-neighbour that was not received yet."""
        messages = [message for peer in self.in_neighbours if (message := self._due(peer)) is not None]
        for message in messages:
            self._received[message.sender] = message.epoch, message.number
            self.staleness[message.sender] = 0
        return messages

    def _due(self, peer: int) -> GossipMessage | None:
        """The peer's newest message not received yet; in lockstep the one of the same number, if it is there."""
        received, message = self._received[peer], None
        if self._max_staleness == 0:
            if received[1] == self._number:
                return None  # the peer's next one is for the next mix
            message = self._numbered(peer, self._number) if received[1] < self._number else None
        return self.newest(peer, received) if message is None else message

    def overdue(self) -> tuple[int, ...]:
        """Neighbours above the staleness limit, from which the learner must receive before it continues."""
        if self._max_staleness is None:
            return ()
        return tuple(
            peer
            for peer, age in self.staleness.items()
            if age > self._max_staleness and not (self._max_staleness == 0 and self._received[peer][1] >= self._number)
        )  # a neighbour that is ahead is not waited for

    def newest(self, peer: int, newer_than: tuple[int, int] | None = None) -> GossipMessage | None:
        """A learner's newest message, received or not; None if there is none, or none newer than (epoch, number)."""
        return _message(peer, self._slots[peer].read_latest(newer_than))

    def at(self, peer: int, number: int) -> GossipMessage | None:
        """A learner's message of that number, or a newer one if it was overwritten; None while neither exists."""
        if (message := self._numbered(peer, number)) is not None:
            return message
        newest = self.newest(peer)
        return newest if newest is not None and newest.number > number else None

    def _numbered(self, peer: int, number: int) -> GossipMessage | None:
        return _message(peer, self._slots[peer].read(number))


def _message(peer: int, weights: Weights | None) -> GossipMessage | None:
    return None if weights is None else GossipMessage(peer, weights.version, weights.arrays[_PARAMETERS], weights.epoch)


@dataclass(frozen=True, kw_only=True)
class GossipHandle(Jsonable):
    """Carries a ``GossipMemory``."""

    presence: Handle
    messages: tuple[ParametersHandle, ...]
    own: tuple[int, ...]  # number of each learner of this host among those of all hosts
    joined: bool = False  # True if the others may have learned for a while

    @property
    def learners(self) -> int:
        """Number of learners of all hosts together."""
        return len(self.messages)

    def attach(self) -> GossipMemory:
        presence = SharedArrays.attach(self.presence.fds[0], _presence(self.learners))
        return GossipMemory(presence, [messages.attach() for messages in self.messages], self.own)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a run whose learners are to have this memory; it inherits the descriptors."""
        return {_HANDLE_VARIABLE: json.dumps(self.to_json())}

    @classmethod
    def inherited(cls) -> GossipHandle | None:
        """The memory that this process has inherited; None if there is none."""
        text = os.environ.get(_HANDLE_VARIABLE)
        return None if text is None else cls.from_json(json.loads(text))


def _presence(learners: int) -> tuple[ArraySpec, ...]:
    """Each learner's process on this host (0: none), or when one of another host was last alive (monotonic time)."""
    return ArraySpec("pid", (learners,), "int64"), ArraySpec("heard_s", (learners,), "float64")


class GossipMemory:
    """The newest messages of the learners of all hosts, and which of these learners are alive, in one host's memory."""

    def __init__(self, presence: SharedArrays, messages: Sequence[VersionedParameters], own: Sequence[int]) -> None:
        self._presence, self._messages, self.own = presence, list(messages), tuple(own)

    @classmethod
    def create(cls, learners: int, own: Sequence[int]) -> GossipMemory:
        """Memory for ``learners`` of all hosts, of which those numbered ``own`` are this host's."""
        messages = [VersionedParameters.create() for _ in range(learners)]
        return cls(SharedArrays.create("spreeze-presence", _presence(learners)), messages, own)

    def handle(self, *, joined: bool = False) -> GossipHandle:
        presence, messages = Handle(fds=(self._presence.fd,)), tuple(slots.handle for slots in self._messages)
        return GossipHandle(presence=presence, messages=messages, own=self.own, joined=joined)

    def enter(self, number: int, *, topology: str, max_staleness: int | None) -> Gossip:
        """Registers this process as that learner; the numbers of its messages may begin anew."""
        epoch = self.newest_version(number)[0] + 1
        self._presence["pid"][number] = os.getpid()
        return Gossip(number, self._messages, topology=topology, max_staleness=max_staleness, epoch=epoch)

    def leave(self) -> None:
        """Withdraws this process as a learner."""
        pids = self._presence["pid"]
        pids[pids == os.getpid()] = 0

    def living(self) -> tuple[int, ...]:
        """Numbers of all learners that are known to be alive."""
        return tuple(number for number in range(len(self._messages)) if self._is_alive(number))

    def _is_alive(self, number: int) -> bool:
        if number not in self.own:
            return time.monotonic() - float(self._presence["heard_s"][number]) < SILENT_S
        return pid_exists(int(self._presence["pid"][number]))

    def note_alive(self, numbers: Iterable[int]) -> None:
        """Notes that these learners are alive now; ignores this host's own."""
        for number in set(numbers).intersection(range(len(self._messages))).difference(self.own):
            self._presence["heard_s"][number] = time.monotonic()

    def lose(self, number: int) -> None:
        """Notes that a learner of another host is gone."""
        self._presence["heard_s"][number] = -SILENT_S

    def newest_version(self, number: int) -> tuple[int, int]:
        """Epoch and number of a learner's newest message; -1 each before the first."""
        return self._messages[number].newest or (-1, -1)

    def newest(self, number: int, newer_than: tuple[int, int]) -> GossipMessage | None:
        """A learner's newest message; None if there is none newer than (epoch, number)."""
        return _message(number, self._messages[number].read_latest(newer_than))

    def put(self, message: GossipMessage) -> None:
        """Stores a message of another host's learner, unless a newer one is there; a TransportError for any other."""
        if message.sender in self.own or not 0 <= message.sender < len(self._messages):
            raise TransportError(f"learner {message.sender} does not learn on another host")
        with contextlib.suppress(WeightsError):
            self._messages[message.sender].publish({_PARAMETERS: message.parameters}, {}, message.epoch, message.number)

    def close(self) -> None:
        for messages in self._messages:
            messages.close()
        self._presence.close()


def sign_messages(secret: bytes, kind: bytes, messages: Sequence[GossipMessage]) -> bytes:
    """Messages of different learners as bytes, signed with the secret; ``kind`` distinguishes them from others."""
    arrays = {
        json.dumps([sent.sender, sent.epoch, sent.number]): np.ascontiguousarray(sent.parameters) for sent in messages
    }
    return sign(secret, kind, safetensors_numpy.save(arrays))


def verify_messages(secret: bytes, kind: bytes, data: bytes) -> list[GossipMessage]:
    """Inverse of ``sign_messages``; a TransportError if the bytes are of another kind or secret, or are damaged."""
    messages = []
    try:
        for name, parameters in safetensors_numpy.load(bytes(verify(secret, kind, data))).items():
            sender, epoch, number = json.loads(name)
            messages.append(GossipMessage(int(sender), int(number), parameters, int(epoch)))
    except (SafetensorError, ValueError, TypeError) as error:
        raise TransportError(f"a message of a learner is damaged: {error}") from None
    return messages


# --- mixing matrices and bounds of GALA (arXiv 1906.04585, section 3) ---
#
# n learners hold parameters X [n, d]. One gossip step is X <- P (X + G) with a row-stochastic P [n, n], where row i
# gives one weight to learner i and to each of its in-neighbours, and G [n, d] are the optimizers' updates. The radius
# of the ball around their mean is ||X - mean X||, the Frobenius norm.


def _distances(topology: str, count: int) -> list[int]:
    """Offsets of the in-neighbours in a ring of ``count`` learners."""
    if topology == "full":
        return list(range(1, count))
    if topology == "exponential":
        return [2**power for power in range(count.bit_length()) if 2**power < count]
    return [1] if count > 1 else []


def in_neighbours(topology: str, learner: int, living: Sequence[int]) -> tuple[int, ...]:
    """In-neighbours of a learner among the ``living``; the others are skipped.

    ring: the one before it; exponential: those 1, 2, 4, ... before it; full: all.
    """
    ring = sorted({*living, learner})
    index = ring.index(learner)
    return tuple(ring[(index - distance) % len(ring)] for distance in _distances(topology, len(ring)))


def mixing_matrix(topology: str, count: int) -> np.ndarray:
    """P [n, n]; its columns sum to 1 as well."""
    matrix = np.eye(count)
    for learner in range(count):
        matrix[learner, list(in_neighbours(topology, learner, range(count)))] = 1.0
    return np.asarray(matrix / matrix.sum(1, keepdims=True))


def contraction(matrix: np.ndarray) -> float:
    """beta: the factor by which P shrinks a deviation from the mean, its second largest singular value.

    cos(pi / n) of the ring, so that two learners agree at once; 0 of the full graph.
    """
    count = len(matrix)
    largest = float(np.linalg.norm((np.eye(count) - 1.0 / count) @ matrix, 2))
    return largest if largest > 1e-12 else 0.0


def hops(topology: str, count: int) -> int:
    """Gossip steps until each learner's parameters have reached every other."""
    reached, matrix, steps = np.eye(count), mixing_matrix(topology, count), 0
    while not (reached > 0.0).all():
        reached, steps = reached @ matrix, steps + 1
    return steps


def radius(parameters: np.ndarray) -> float:
    """``||X - mean X||`` of parameters [n, d]."""
    return float(np.linalg.norm(parameters - parameters.mean(0, dtype=np.float64)))


def synchronous_bound(norms: np.ndarray, beta: float) -> float:
    """Proposition 1: the largest radius where all learners mix at every step, and start with the same parameters.

    ``norms`` [n, k]: those of each learner's latest k updates, newest last; older ones are left out.
    """
    stacked = np.linalg.norm(norms, axis=0)
    return float((stacked * beta ** np.arange(len(stacked), 0, -1.0)).sum())


def asynchronous_bound(largest_update: float, topology: str, count: int, staleness: float) -> float:
    """Proposition 2: the largest radius whatever the delays, ``L beta~ / (1 - beta)``.

    ``largest_update``: largest norm of one learner's update; ``staleness``: most updates that a learner took between
    two messages of an in-neighbour. Constants are the worst case: in a window of T = 2 hops (staleness + 2) updates,
    each learner has reached every other, with a weight of at least (1 / (1 + in-neighbours))^T. So a window shrinks the
    largest distance by 1 minus that, which is beta^T, and beta~ = beta^(1 - T). From distances to radius it is a factor
    of 2 sqrt(n).
    """
    if count < 2 or largest_update <= 0.0:
        return 0.0
    window = 2.0 * hops(topology, count) * (staleness + 2.0)
    log_weight = -window * math.log(1 + len(_distances(topology, count)))
    log_beta = math.log1p(-math.exp(log_weight)) / window
    if log_beta == 0.0:
        return math.inf
    return 2.0 * math.sqrt(count) * largest_update * math.exp((1.0 - window) * log_beta) / -math.expm1(log_beta)
