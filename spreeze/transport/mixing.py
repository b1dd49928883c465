"""Parameter mixing of several learners: gossip, and three baselines.

==========  =========================================================================================================
gossip      after its update a learner sends its parameters and takes the mean of its own and of what has arrived
            (GALA, arXiv 1906.04585, Algorithm 1); it waits only at the staleness limit
all_reduce  the gradients of all learners are averaged before each step, so each waits for all others (A2C)
average     at intervals a learner takes the mean of its parameters and of those that the others sent since its
            last averaging; no learner waits (TianJi, arXiv 2502.20190, section 3.3)
hogwild     each adds its update to parameters that all share, without a lock, and continues from these (as in A3C)
none        nothing is shared
==========  =========================================================================================================

Messages contain the running statistics of observations and returns, too, which are averaged like the parameters. A
learner whose process is gone, or that has finished, is left out. A returning one starts with a neighbour's parameters
after the first rollout that it learns, which its samplers collect with its own.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spreeze.files import anonymous_file
from spreeze.transport.gossip import Gossip, GossipHandle, GossipMemory, messages_kept
from spreeze.transport.shared_memory import ArraySpec, Handle, SharedArrays, in_order
from spreeze.transport.weights import ParametersHandle, VersionedParameters, Weights
from spreeze.types import Arrays, Jsonable

NORMS = 256  # updates of which the norms are kept for the bound of Proposition 1
_THETA, _STATISTICS = "theta", "statistics"
_BARRIER_S = 60.0  # Longest wait at the start for learners that are still loading.
_NEIGHBOUR_S, _OTHERS_S = 5.0, 1.0
"""Longest wait of a learner that returns or joins for a neighbour's parameters, and for others to be seen at all."""
_SENDING_PARAMETERS = ("gossip", "average")
_PAST_WEIGHT = 0.9  # Weight of the past in the mean number of messages.


@dataclass(frozen=True, kw_only=True)
class MixHandle(Jsonable):
    """Carries a ``MixMemory``; one entry for each learner in every tuple."""

    board: Handle
    shared: Handle
    messages: tuple[ParametersHandle, ...]
    mixed: tuple[ParametersHandle, ...]

    def attach_board(self) -> SharedArrays:
        return SharedArrays.attach(self.board.fds[0], board_fields(len(self.mixed)))


@dataclass(frozen=True, kw_only=True)
class MixSpec(Jsonable):
    """One learner's part in the sharing, and the memory for it."""

    learner: int
    learners: int
    mixing: str
    topology: str
    max_staleness: int | None
    average_interval: int  # mixes between two averagings (average)
    rows: tuple[int, ...]  # rows of the learners in the status table
    memory: MixHandle
    policies: tuple[ParametersHandle, ...] = ()
    """Each learner's policy; empty where this learner does not publish their mean."""
    hosts: GossipHandle | None = None
    """Messages of the learners of all hosts; None: only this host has learners, with ``memory``."""


def board_fields(learners: int) -> tuple[ArraySpec, ...]:
    """Numbers that each learner posts for the others and the supervisor, one entry each."""
    return (
        ArraySpec("env_steps", (learners,), "int64"),  # of finished rollouts since the run started
        ArraySpec("number", (learners,), "int64"),  # of the latest mix
        ArraySpec("left", (learners,), "int64"),  # 1 once it has finished
        ArraySpec("norms", (learners, NORMS), "float64"),  # of update k at k mod NORMS
        ArraySpec("largest", (learners,), "float64"),  # norm of an update of this session
        ArraySpec("staleness", (learners,), "float64"),  # the most so far
    )


class MixMemory(NamedTuple):
    """Memory of all learners, owned by the supervisor."""

    board: SharedArrays
    shared_fd: int  # the parameters that all share (hogwild)
    messages: tuple[VersionedParameters, ...]
    mixed: tuple[VersionedParameters, ...]

    @classmethod
    def create(cls, learners: int, *, lockstep: bool = False) -> MixMemory:
        """In ``lockstep``, parameters stay until all learners have reached the same mix."""
        board, kept = SharedArrays.create("spreeze-board", board_fields(learners)), messages_kept(learners)
        messages, mixed = (
            tuple(VersionedParameters.create(slots) for _ in range(learners))
            for slots in (kept, kept if lockstep else 2)
        )
        return cls(board, anonymous_file("spreeze-shared"), messages, mixed)

    @property
    def handle(self) -> MixHandle:
        sent, mixed = (tuple(slots.handle for slots in channel) for channel in (self.messages, self.mixed))
        return MixHandle(
            board=Handle(fds=(self.board.fd,)), shared=Handle(fds=(self.shared_fd,)), messages=sent, mixed=mixed
        )

    def aligned(self) -> list[np.ndarray] | None:
        """Each learner's parameters after the same mix, the newest that all have; None if one of these is gone."""
        number = int(self.board["number"].min())
        return _thetas(parameters.read(number) for parameters in self.mixed)

    def newest(self) -> list[np.ndarray] | None:
        """Each learner's newest parameters; None if one has none yet, or they were just being written."""
        return _thetas(parameters.read_latest() for parameters in self.mixed)

    def close(self) -> None:
        for parameters in (*self.messages, *self.mixed):
            parameters.close()
        os.close(self.shared_fd)
        self.board.close()


def _thetas(versions: Iterable[Weights | None]) -> list[np.ndarray] | None:
    weights = list(versions)
    return None if None in weights else [version.arrays[_THETA] for version in weights if version is not None]


class Mixer:
    """One learner's side; ``mix`` comes after each of its updates, ``reduce`` before each gradient step."""

    def __init__(self, spec: MixSpec, living: Callable[[], Sequence[int]], wait: Callable[[], bool]) -> None:
        """``wait`` is a short sleep; False: the run is being stopped, which ends all waiting."""
        self.spec, self._living, self._wait = spec, living, wait
        self.board = spec.memory.attach_board()
        self._hosts: GossipMemory | None = None
        self._gossip = self._open_gossip()
        self._mixed = [mixed.attach() for mixed in spec.memory.mixed]
        self._policies = [policies.attach() for policies in spec.policies]
        self._shared: np.ndarray | None = None
        self._shared_before = np.zeros(0, np.float32)
        """Statistics as they were at the latest addition to what all share."""
        self._rejoined, self._ahead = False, 0
        self.waited_s = self.messages = 0.0
        self.statistics = np.zeros(0)
        """Own running statistics [k]: to be set before ``begin``, ``reduce`` and ``mix``, which average them."""

    def _open_gossip(self) -> Gossip:
        spec = self.spec
        topology = "full" if spec.mixing in ("all_reduce", "average") else spec.topology
        if spec.hosts is None:
            messages = [slots.attach() for slots in spec.memory.messages]
            return Gossip(spec.learner, messages, topology=topology, max_staleness=spec.max_staleness)
        self._hosts = hosts = spec.hosts.attach()
        self._living = hosts.living
        return hosts.enter(spec.hosts.own[spec.learner], topology=topology, max_staleness=spec.max_staleness)

    def _wait_for_neighbour(self) -> None:
        """Waits for a neighbour's parameters, if there is one; messages come after connections."""
        start, gossip = time.monotonic(), self._gossip
        while (elapsed_s := time.monotonic() - start) < _NEIGHBOUR_S:
            living = self._living()
            gossip.restrict_to(living)
            is_single = len(living) == 1 and elapsed_s > _OTHERS_S
            if is_single or any(gossip.newest(peer) for peer in gossip.in_neighbours) or not self._wait():
                return

    def begin(self, parameters: np.ndarray, number: int) -> None:
        """Registers this learner with the others; at the start of a run, waits until all have done so."""
        learner = self.spec.learner
        self._rejoined = self._mixed[learner].read_latest() is not None
        self.board["left"][learner] = 0
        self._wait()  # from now on it counts as living, before anyone can see that all are there
        if not self._rejoined:
            self.board["number"][learner] = number
            self._publish(parameters, number)
        if self.spec.mixing == "hogwild":
            self._share(self._joined(parameters))
        end_s = time.monotonic() + _BARRIER_S
        while time.monotonic() < end_s and any(mixed.read_latest() is None for mixed in self._mixed):
            if not self._wait():
                return
        if self.spec.hosts is not None and self.spec.mixing in _SENDING_PARAMETERS:
            self._rejoined |= self.spec.hosts.joined
            if self._rejoined:
                self._wait_for_neighbour()

    def _share(self, parameters: np.ndarray) -> None:
        """Maps the shared parameters; learner 0 stores them first, for all start with the same."""
        (fd,), size_bytes = self.spec.memory.shared.fds, 8 + parameters.nbytes
        if os.fstat(fd).st_size < size_bytes:
            os.ftruncate(fd, size_bytes)
        memory = mmap.mmap(fd, size_bytes)
        stored, self._shared = np.frombuffer(memory, np.int64, 1), np.frombuffer(memory, np.float32, offset=8)
        if not stored[0] and self.spec.learner == 0:
            self._shared[:] = parameters
            in_order()
            stored[0] = 1
        while not stored[0] and self._wait():
            pass
        in_order()
        self._shared_before = as_float32(self.statistics)

    def _publish(self, parameters: np.ndarray, number: int) -> None:
        arrays = {_THETA: parameters, _STATISTICS: as_float32(self.statistics)}
        self._mixed[self.spec.learner].publish(arrays, {}, 0, number)

    def _joined(self, parameters: np.ndarray) -> np.ndarray:
        """A message: parameters or gradient [d], and the statistics behind them."""
        return np.concatenate((parameters, as_float32(self.statistics)))

    def _mean_of(self, messages: Sequence[np.ndarray]) -> np.ndarray:
        """The mean of the messages' parameters or gradients; that of their statistics becomes the own ones."""
        size = len(messages[0]) - 2 * len(self.statistics)
        if len(self.statistics):
            self.statistics = np.mean([as_float64(message[size:]) for message in messages], 0)
        return _mean([message[:size] for message in messages])

    def reduce(self, gradient: np.ndarray, number: int) -> np.ndarray:
        """The mean of the gradients [d] of all living learners at their step of that number."""
        gossip = self._gossip
        if self._rejoined and not self._ahead:
            newest = [latest.number for peer in range(self.spec.learners) if (latest := gossip.newest(peer))]
            self._ahead = max(0, max(newest, default=0) - number)
        number += self._ahead
        message = self._joined(gradient)
        gossip.send(message, number)
        start, received = time.monotonic(), {}
        while True:
            gossip.restrict_to(self._living())
            for peer in gossip.in_neighbours:
                if peer not in received and (sent := gossip.at(peer, number)) is not None:
                    received[peer] = sent.parameters
            if set(gossip.in_neighbours) <= set(received) or not self._wait():
                break
        self.waited_s += time.monotonic() - start
        return self._mean_of([message, *received.values()]) if received else gradient

    def mix(self, before: np.ndarray, after: np.ndarray, number: int) -> np.ndarray:
        """The parameters [d] to continue with, where an update led from ``before`` to ``after``; numbers rise."""
        board, learner = self.board, self.spec.learner
        norm = float(np.linalg.norm(after - before))
        board["norms"][learner, number % NORMS] = norm
        board["largest"][learner] = max(float(board["largest"][learner]), norm)
        newest = self._neighbours() if self._rejoined and self.spec.mixing != "none" else None
        self._rejoined = False
        mixed = after if newest is None else self._mean_of([newest])  # the others get that, too: its own are old
        hosts = self.spec.hosts
        is_new = newest is not None and hosts is not None and hosts.joined  # no learner takes its parameters
        due = self.spec.mixing == "gossip" or (
            self.spec.mixing == "average" and number % self.spec.average_interval == 0
        )
        if due and not is_new:
            mixed = self._gossiped(mixed, number)
        elif self._shared is not None:
            self._shared += self._joined(after) - np.concatenate((before, self._shared_before))
            mixed = self._mean_of([self._shared.copy()])
            self._shared_before = as_float32(self.statistics)
        self._publish(mixed, number)
        board["number"][learner] = number
        return mixed

    def _gossiped(self, parameters: np.ndarray, number: int) -> np.ndarray:
        """Sends, and takes the mean with what has arrived; waits for those that are overdue."""
        gossip, board = self._gossip, self.board
        gossip.restrict_to(self._living())
        message = self._joined(parameters)
        gossip.send(message, number)
        stale, learner = max(gossip.staleness.values(), default=0), self.spec.learner
        board["staleness"][learner] = max(board["staleness"][learner], stale)
        received = {message.sender: message.parameters for message in gossip.receive()}
        start = time.monotonic()
        while gossip.overdue() and self._wait():
            received |= {message.sender: message.parameters for message in gossip.receive()}
            gossip.restrict_to(self._living())
        self.waited_s += time.monotonic() - start
        self.messages += (1.0 - _PAST_WEIGHT) * (len(received) - self.messages)
        return self._mean_of([message, *received.values()]) if received else parameters

    def metrics(self) -> dict[str, float]:
        """Metrics of the messages; empty where there are none."""
        if self.spec.mixing not in _SENDING_PARAMETERS:
            return {}
        stale = max(self._gossip.staleness.values(), default=0)
        return {"gossip_staleness": float(stale), "gossip_messages": self.messages}

    def _neighbours(self) -> np.ndarray | None:
        """The newest message of an in-neighbour, or else of any other learner of this host."""
        if self.spec.hosts is not None and self.spec.mixing in _SENDING_PARAMETERS:
            newest = (self._gossip.newest(peer) for peer in self._gossip.in_neighbours)
            return next((message.parameters for message in newest if message is not None), None)
        peers = [*self._gossip.in_neighbours, *(peer for peer in self._living() if peer != self.spec.learner)]
        for peer in peers:
            if (weights := self._mixed[peer].read_latest()) is not None:
                return np.concatenate((weights.arrays[_THETA], weights.arrays[_STATISTICS]))
        return None

    @property
    def publishes(self) -> bool:
        """True if this learner's weights are the run's."""
        return self.spec.mixing in ("none", "average") or self.spec.learner == 0

    def mean_policy(self, arrays: Arrays) -> Arrays:
        """The mean of all learners' newest policies; ``arrays`` count for this one."""
        newest = [slots.read_latest() for learner, slots in enumerate(self._policies) if learner != self.spec.learner]
        others = [weights.arrays for weights in newest if weights is not None]
        return {name: _mean([array, *(other[name] for other in others)]) for name, array in arrays.items()}

    def leave(self) -> None:
        """Tells the others that no more messages follow."""
        self.board["left"][self.spec.learner] = 1
        if self._hosts is not None:
            self._hosts.leave()


def as_float32(values: np.ndarray) -> np.ndarray:
    """Float64 [k] as float32 [2 k], each a number and its rounding error."""
    high = values.astype(np.float32)
    return np.concatenate((high, (values - high).astype(np.float32)))


def as_float64(pairs: np.ndarray) -> np.ndarray:
    """The inverse of ``as_float32``, to fourteen digits."""
    high, low = np.split(pairs.astype(np.float64), 2)
    return np.asarray(high + low)


def _mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of arrays of one shape, in their type; of one alone itself."""
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total if len(arrays) == 1 else np.asarray(total / arrays[0].dtype.type(len(arrays)))
