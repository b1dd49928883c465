"""Gossip between learners on several hosts, over pairs of ``torch.distributed`` (gloo); needs torch.

*Who is there* stands in a ``TCPStore`` outside of the learners (``MemberStore``, held by the supervisor). Ten times a
second each learner writes its record: epoch (of its start), beat, whether it has left, and whose messages it wants.
Who is silent for ``DEAD_S`` is not among the living, until its record moves again. So is an alive one to which no
connection can be made. Runs on other hosts claim numbers there for their learners (``claim``).

*Messages.* A process group of gloo cannot change its members. So each direction between two learners is a group of two
ranks, under a name with both epochs, opened when the receiver wants it and dropped with the first error; a returning
learner has a new epoch and so new groups. Gloo sends only what a receiver waits for: a slow one holds up its own
connection alone, which then goes on with the newest message.

*Nobody waits for the network* but threads of this module: they send, receive, and read the store, and each of their
waits has a limit. A learner puts a message down and picks up what has arrived. Gloo raises at once when the peer's
process is killed, and after the limit when it is silent; this was measured with SIGKILL and SIGSTOP.

*Who is believed.* Every value in the store and every message bears an HMAC with the run's secret over all of it and
over its place, checked before anything of it is read. Nothing is unpickled. The store and gloo themselves know no
authentication: who reaches their ports can disturb the exchange, but not say anything in it. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from spreeze.errors import TransportError
from spreeze.transport.gossip import GlooPlace, NeighbourGossip, messages_kept, read_secret
from spreeze.transport.protocols import GossipMessage

DEAD_S = 0.7
"""Silence in the store after which a learner counts as dead."""
_BEAT_S = 0.1
_KEEP_S = 0.25
"""Between two signs of life on a connection that carries nothing."""
_SILENT_S = 1.5
"""Silence after which a connection is dropped; more for a message, by its size and ``_SLOWEST_BYTES_PER_S``."""
_SLOWEST_BYTES_PER_S = 125_000.0
_CONNECT_S = 2.0
_UNREACHABLE_S = 3.0
"""Without a connection to an alive learner, before it counts as out of reach."""
_RETRY_S = 0.3
_CLOSE_S = 3.0
_GONE_S = 3.0
"""Silence after which another host may take a learner's number."""
_POLL_S = 0.005
_PROOF_BYTES = 32
_RECORD = struct.Struct("<QQ?")  # epoch, beat, left; then for each learner the number of the wanted link
_FRAME = struct.Struct("<32sBBQQQ")  # proof, kind, type, place in the connection, number, payload or announced bytes
_SIGN_OF_LIFE, _ANNOUNCEMENT, _MESSAGE = range(3)
_TYPES = ("<f4", "<f8")
_MOST_BYTES = 1 << 32
_TAG = 1
_RING = "ring"
"""Key of what the host of the store says of it."""


class _Forged(TransportError):
    """Something was not signed with the run's secret, or not for its place."""


def _listener(host: str) -> socket.socket:
    """A socket that listens at a free port of an address; a TransportError if that fails."""
    found = socket.socket()
    try:
        found.bind((host, 0))
        found.listen()
    except OSError as error:
        found.close()
        raise TransportError(
            f"cannot listen at {host}: {error}; set exchange.listen to an address of this machine"
        ) from None
    return found


class MemberStore:
    """Where the learners of a run find each other; it outlives all of them."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Listens at a free port of ``host``; a TransportError if that fails."""
        with _listener(host) as listener:
            port = int(listener.getsockname()[1])
            # Given the socket, since by itself a TCPStore listens at all addresses of the machine.
            self._store: TCPStore | None = TCPStore(
                host, port, None, True, timedelta(seconds=_CONNECT_S), False, False, listener.detach()
            )
        self.address = f"{host}:{port}"

    def describe(self, secret: bytes, count: int, learners: int, facts: Mapping[str, Any]) -> None:
        """Tells those who join: of how many learners the first ``count`` are taken, and what all have in common."""
        assert self._store is not None
        told = json.dumps({"taken": count, "learners": learners, "facts": dict(facts)}, default=str)
        SignedStore(self._store, secret, "", lambda: False).set(_RING, told.encode())

    def close(self) -> None:
        self._store = None


def connected(address: str) -> TCPStore:
    """A store that another process holds; a TransportError if it cannot be reached."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()  # TCPStore would retry, with much to say
        return TCPStore(host, int(port), None, False, timedelta(seconds=_CONNECT_S), False)
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        raise TransportError(f"no store of learners at {address}: {str(error).splitlines()[0]}") from None


def claim(
    address: str, secret: bytes, count: int, claimant: str, facts: Mapping[str, Any]
) -> tuple[int, tuple[int, ...]]:
    """The number of all learners, and ``count`` numbers for those of a claimant.

    These are the ones that it had before, then those that nobody claimed, then those whose learner has been silent.

    Raises:
        TransportError: the store cannot be reached, does not know the secret, has other facts, or has no room.
    """
    store = SignedStore(connected(address), secret, "", lambda: False)
    ring = json.loads(store.get(_RING))
    own = json.loads(json.dumps(dict(facts), default=str))
    differing = [name for name in {**own, **ring["facts"]} if own.get(name) != ring["facts"].get(name)]
    if differing:
        told = (f"{name} is {own.get(name)!r} here and {ring['facts'].get(name)!r} there" for name in differing[:3])
        raise TransportError(f"the run at {address} cannot be joined: {'; '.join(told)}")
    numbers, mine = range(int(ring["taken"]), int(ring["learners"])), claimant.encode()
    claimed = {number: store.get(f"claim {number}") if store.has(f"claim {number}") else None for number in numbers}
    silent: set[int] = set()
    if sum(one in (mine, None) for one in claimed.values()) < count:
        before = {number: _record(store, number) for number in numbers}
        time.sleep(_GONE_S)
        silent = {number for number in numbers if _record(store, number) == before[number]}
    order = sorted(numbers, key=lambda number: (claimed[number] != mine, claimed[number] is not None, number))
    taken: list[int] = []
    for number in order:
        free = claimed[number] in (mine, None) or number in silent
        if len(taken) < count and free and store.replace(f"claim {number}", claimed[number], mine):
            taken.append(number)
    if len(taken) < count:
        raise TransportError(
            f"the run at {address} has room for {len(taken)} more of its {ring['learners']} learners, "
            f"not for {count}; use fewer here, or raise exchange.learners there"
        )
    return int(ring["learners"]), tuple(sorted(taken))


def _record(store: SignedStore, number: int) -> bytes | None:
    """Latest record of a learner; None before the first, or where it is not signed."""
    try:
        return store.get(f"member {number}") if store.has(f"member {number}") else None
    except _Forged:
        return None


class SignedStore(Store):
    """A store whose values are signed; gloo's own entries too, for it is given to gloo."""

    def __init__(self, store: TCPStore, secret: bytes, prefix: str, is_over: Callable[[], bool]) -> None:
        """``is_over`` ends waits."""
        super().__init__()
        self._store, self._secret, self._prefix, self._is_over = store, secret, prefix, is_over

    def _proof(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, f"{self._prefix}{key}".encode() + b"\0" + value, "sha256")

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(self._prefix + key, self._proof(key, bytes(value)) + bytes(value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value, waited for; ``_Forged`` if it was not written by one who knows the secret."""
        self.wait([key])
        data = self._store.get(self._prefix + key)
        proof, value = data[:_PROOF_BYTES], data[_PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(key, value)):
            raise _Forged(f"{self._prefix}{key} in the learners' store was not signed with this run's secret")
        return value

    def replace(self, key: str, before: bytes | None, value: bytes) -> bool:
        """Sets a value if the present one is ``before`` (None: if there is none); whether it is there now."""
        signed = self._proof(key, value) + value
        expected = b"" if before is None else self._proof(key, before) + before
        return bool(self._store.compare_set(self._prefix + key, expected, signed) == signed)  # type: ignore[arg-type]

    def has(self, key: str) -> bool:
        return bool(self._store.check([self._prefix + key]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there; a TransportError after a while. Polls, so that other threads may use the store."""
        end_s = time.monotonic() + _CONNECT_S
        while not self._store.check([self._prefix + key for key in keys]):
            if time.monotonic() >= end_s or self._is_over():
                raise TransportError(f"nobody wrote {', '.join(keys)} at {self._prefix}")
            time.sleep(_POLL_S)

    def has_extended_api(self) -> bool:
        return False


def _seconds(size_bytes: int) -> timedelta:
    """Longest wait for that many bytes to pass."""
    return timedelta(seconds=_SILENT_S + size_bytes / _SLOWEST_BYTES_PER_S)


class _Outgoing(NamedTuple):
    number: int
    type_index: int
    data: np.ndarray  # bytes


class _Outbox:
    """The newest few messages of this learner, for all connections."""

    def __init__(self, kept: int, *, every: bool) -> None:
        """``every``: one after the other as far as they are kept, not only the newest."""
        self._messages: deque[_Outgoing] = deque(maxlen=kept)
        self._every, self._change = every, threading.Condition()

    def put(self, parameters: np.ndarray, number: int) -> None:
        array = np.array(parameters, order="C")
        type_index = _TYPES.index(array.dtype.str)
        with self._change:
            if self._messages and number <= self._messages[-1].number:
                return  # sent before this learner went back to a checkpoint
            self._messages.append(_Outgoing(number, type_index, array.reshape(-1).view(np.uint8)))
            self._change.notify_all()

    def after(self, number: int, timeout_s: float) -> _Outgoing | None:
        """The message to send after that one; None if there was none in time."""

        def due() -> _Outgoing | None:
            newer = (
                message
                for message in (self._messages if self._every else reversed(self._messages))
                if message.number > number
            )
            return next(newer, None)

        with self._change:
            self._change.wait_for(lambda: due() is not None, timeout_s)
            return due()


class _Link:
    """One direction between two learners, with a thread of its own; it ends with its first error."""

    def __init__(self, gossip: GlooGossip, peer: int, name: str, rank: int) -> None:
        """``name`` is the same on both sides; rank 0 sends, rank 1 receives."""
        self.peer, self.name, self._gossip, self.rank = peer, name, gossip, rank
        self.up, self.stopping = False, False
        self.heard_s = time.monotonic()
        self.error: str | None = None
        self._place = 0
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()

    def is_over(self) -> bool:
        return self.stopping

    def _run(self) -> None:
        try:
            group = self._gossip.open_group(self)
            (self._send if self.rank == 0 else self._receive)(group)
        except (RuntimeError, OSError, TransportError) as error:  # of gloo, of the store, of this protocol
            self.error = str(error)
            self._gossip.rejected += isinstance(error, _Forged)
        finally:
            self.up = False

    def _proof(self, frame: np.ndarray) -> bytes:
        """Proof of a frame, valid in this link and nowhere else."""
        digest = hmac.new(self._gossip.secret, self.name.encode() + b"\0", hashlib.sha256)
        digest.update(frame[_PROOF_BYTES:].data)
        return digest.digest()

    def _send(self, group: Any) -> None:
        number, announced, buffer = -1, 0, np.empty(_FRAME.size, np.uint8)
        while not self.stopping:
            message = self._gossip.outbox.after(number, _KEEP_S)
            if message is None:
                self._send_frame(group, buffer[: _FRAME.size], _SIGN_OF_LIFE)
                continue
            if len(message.data) != announced:
                announced = len(message.data)
                self._send_frame(group, buffer[: _FRAME.size], _ANNOUNCEMENT, size_bytes=announced)
                buffer = np.empty(_FRAME.size + announced, np.uint8)
            number = message.number
            buffer[_FRAME.size :] = message.data
            self._send_frame(group, buffer, _MESSAGE, message.type_index, number, announced)

    def _send_frame(
        self, group: Any, frame: np.ndarray, kind: int, type_index: int = 0, number: int = 0, size_bytes: int = 0
    ) -> None:
        _FRAME.pack_into(frame.data, 0, b"", kind, type_index, self._place, number, size_bytes)
        frame[:_PROOF_BYTES] = np.frombuffer(self._proof(frame), np.uint8)
        group.send([torch.from_numpy(frame)], 1, _TAG).wait(_seconds(len(frame)))
        self._place, self.up = self._place + 1, True

    def _receive(self, group: Any) -> None:
        size_bytes = 0
        buffer = np.zeros(_FRAME.size, np.uint8)
        while not self.stopping:
            group.recv([torch.from_numpy(buffer)], 0, _TAG).wait(_seconds(len(buffer)))
            proof, kind, type_index, place, number, told_bytes = _FRAME.unpack_from(buffer.data)
            frame = buffer if kind == _MESSAGE else buffer[: _FRAME.size]
            if not hmac.compare_digest(proof, self._proof(frame)) or place != self._place:
                raise _Forged(f"what came over {self.name} was not signed with this run's secret")
            self._place, self.up, self.heard_s = self._place + 1, True, time.monotonic()
            if kind == _ANNOUNCEMENT and told_bytes <= _MOST_BYTES:
                size_bytes = told_bytes
                buffer = np.zeros(_FRAME.size + size_bytes, np.uint8)
            elif kind == _MESSAGE:
                parameters = np.frombuffer(buffer[_FRAME.size :].tobytes(), _TYPES[type_index])
                self._gossip.arrived(self.peer, self.epoch, number, parameters)

    @property
    def epoch(self) -> int:
        """Epoch of the sender's start."""
        return int(self.name.split()[1].partition(".")[2])


class _Member:
    """State of another learner, as known here."""

    def __init__(self) -> None:
        self.epoch = self.beat = -1
        self.left, self.moved_s = False, float("-inf")
        self.wants = 0
        """Number of the link by which it wants this learner's messages; 0: it does not."""


class GlooGossip(NeighbourGossip):
    """A ``Gossip`` between hosts; the caller closes it."""

    def __init__(
        self, index: int, place: GlooPlace, *, topology: str, max_staleness: int | None, every: bool = False
    ) -> None:
        """Joins as this host's learner ``index``; a TransportError if the store cannot be reached.

        In lockstep, or with ``every``, all of the few messages that are kept are sent, in order; else the newest.
        """
        self.secret = read_secret(Path(place.secret_file))
        learner, learners = place.own[index], place.learners
        self._place, self.learners = place, learners
        kept = messages_kept(learners)
        every = every or max_staleness == 0
        self.outbox = _Outbox(kept if every else 1, every=every)
        self._arrived: list[deque[GossipMessage]] = [deque(maxlen=kept if every else 1) for _ in range(learners)]
        self._lock = threading.Lock()
        self._members = [_Member() for _ in range(learners)]
        self._incoming: dict[int, _Link] = {}
        self._outgoing: dict[int, _Link] = {}
        self._retired: list[_Link] = []
        self._wanted: dict[int, int] = {}
        """Learner whose messages are wanted -> number of the link to it."""
        self._alone_s: dict[int, float] = {}
        """Learner whose messages are wanted -> since when there is no connection to it."""
        self._retry_s: dict[int, float] = {}
        self._followed: frozenset[int] = frozenset()
        self._links = self._beat = 0
        self.rejected = 0
        """Records and messages so far that were not signed as they must be."""
        self._left = self._replaced = False
        self._closing, self._change = threading.Event(), threading.Event()
        self._store = connected(place.store)
        self.epoch = int(self._store.add(f"epoch {learner}", 1))
        # One listening socket for all connections of this learner.
        self._device = ProcessGroupGloo.create_device(hostname=place.listen)
        super().__init__(learner, learners, topology=topology, max_staleness=max_staleness)
        self._thread = threading.Thread(target=self._run, name="members", daemon=True)
        self._thread.start()

    def _signed(self, prefix: str, is_over: Callable[[], bool]) -> SignedStore:
        return SignedStore(self._store, self.secret, prefix, is_over)

    # --- what the learner calls; none of it waits ---

    def _put(self, parameters: np.ndarray, number: int) -> None:
        self.outbox.put(parameters, number)

    def _numbered(self, peer: int, number: int) -> GossipMessage | None:
        with self._lock:
            return next((message for message in reversed(self._arrived[peer]) if message.number == number), None)

    def _newest(self, peer: int, newer_than: tuple[int, int] | None = None) -> GossipMessage | None:
        with self._lock:
            messages = self._arrived[peer]
            newest = messages[-1] if messages else None
        return newest if newest and (newer_than is None or (newest.epoch, newest.number) > newer_than) else None

    def close_over(self, living: Sequence[int]) -> None:
        super().close_over(living)
        followed = frozenset(self.in_neighbours)
        if followed != self._followed:
            self._followed = followed
            self._change.set()

    def living(self) -> tuple[int, ...]:
        """This learner and all that are there and can be reached, as far as is known by now.

        One whose number another host has taken, since it was silent for too long, is alone from then on.
        """
        now_s = time.monotonic()
        if self._replaced:
            return (self._learner,)
        return tuple(
            peer
            for peer in range(self.learners)
            if peer == self._learner or (self._is_alive(peer, now_s) and not self._is_out_of_reach(peer, now_s))
        )

    def _is_alive(self, peer: int, now_s: float) -> bool:
        """True if its record moves, or it is heard although the store is out of reach."""
        member, link = self._members[peer], self._incoming.get(peer)
        heard = link is not None and link.up and now_s - link.heard_s < DEAD_S
        return not member.left and (now_s - member.moved_s < DEAD_S or heard)

    def _is_out_of_reach(self, peer: int, now_s: float) -> bool:
        return now_s - self._alone_s.get(peer, now_s) > _UNREACHABLE_S

    def close(self) -> None:
        """Tells the others that it leaves, and ends all threads; gives up on one that the network holds."""
        if self._closing.is_set():
            return
        self._left = True
        self._closing.set()
        self._change.set()
        end_s = time.monotonic() + _CLOSE_S
        self._thread.join(max(0.0, end_s - time.monotonic()))
        for link in self._all_links():
            link.stopping = True
        for link in self._all_links():
            link.thread.join(max(0.0, end_s - time.monotonic()))
        del self._store, self._device  # with them go their descriptors

    def _all_links(self) -> list[_Link]:
        return [*self._incoming.values(), *self._outgoing.values(), *self._retired]

    # --- what the threads call ---

    def open_group(self, link: _Link) -> Any:
        """The process group of a link; an error if the other side does not come."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads = [self._device], 1
        options._timeout = timedelta(seconds=_CONNECT_S)
        return ProcessGroupGloo(self._signed(f"{link.name}/", link.is_over), link.rank, 2, options)

    def arrived(self, peer: int, epoch: int, number: int, parameters: np.ndarray) -> None:
        with self._lock:
            self._arrived[peer].append(GossipMessage(peer, number, parameters, epoch))

    def _run(self) -> None:
        reachable = True
        while True:
            closing = self._closing.is_set()
            if closing and not reachable:
                return
            try:
                if not reachable:
                    self._store = connected(self._place.store)
                self._look(self._signed("member ", self._closing.is_set))
                reachable = True
            except (RuntimeError, TransportError):  # the supervisor's machine may come back
                reachable = False
            if closing:
                return
            self._change.wait(_BEAT_S)
            self._change.clear()

    def _look(self, store: SignedStore) -> None:
        """Writes this learner's record, reads the others', and opens and drops connections."""
        now_s = time.monotonic()
        own = str(self._learner)
        if store.has(own) and _RECORD.unpack_from(store.get(own))[0] > self.epoch:
            self._left = self._replaced = True  # another host took its number while it was out of reach
        self._beat += 1
        self._follow(now_s)
        if self._replaced:
            return
        wants = [self._wanted.get(peer, 0) for peer in range(self.learners)]
        store.set(own, _RECORD.pack(self.epoch, self._beat, self._left) + struct.pack(f"<{self.learners}Q", *wants))
        for peer, member in enumerate(self._members):
            if peer != self._learner and store.has(str(peer)):
                try:
                    self._read(member, store.get(str(peer)))
                except _Forged:
                    self.rejected += 1
        self._serve()
        self._retired = [link for link in self._retired if not link.ended]

    def _read(self, member: _Member, record: bytes) -> None:
        if len(record) != _RECORD.size + 8 * self.learners:
            raise TransportError(f"a record of {len(record)} bytes: all learners need the same version of Spreeze")
        epoch, beat, left = _RECORD.unpack_from(record)
        wants = struct.unpack_from("<Q", record, _RECORD.size + 8 * self._learner)[0]
        if (epoch, beat) != (member.epoch, member.beat):
            member.moved_s = time.monotonic()
        member.epoch, member.beat, member.left, member.wants = epoch, beat, left, wants

    def _follow(self, now_s: float) -> None:
        """Keeps a connection from each learner whose messages are wanted, and tries those out of reach again."""
        lost = {peer for peer in self._alone_s if self._is_out_of_reach(peer, now_s) and self._is_alive(peer, now_s)}
        wanted = set() if self._left else self._followed | lost
        for peer in {*self._incoming, *self._wanted} - wanted:
            self._drop(self._incoming.pop(peer, None))
            self._wanted.pop(peer, None)
        for peer in [peer for peer in self._alone_s if peer not in wanted]:
            del self._alone_s[peer]
        for peer in wanted:
            member, link = self._members[peer], self._incoming.get(peer)
            if member.epoch < 0 or not self._is_alive(peer, now_s):
                self._alone_s.pop(peer, None)
                continue
            if link is not None and link.up:
                self._alone_s.pop(peer, None)
            else:
                self._alone_s.setdefault(peer, now_s)
            if link is not None and not link.ended and link.epoch == member.epoch:
                continue
            if now_s >= self._retry_s.get(peer, 0.0):
                self._drop(link)
                self._retry_s[peer] = now_s + _RETRY_S
                self._links += 1
                self._wanted[peer] = self._links
                self._incoming[peer] = _Link(
                    self, peer, _name(peer, member.epoch, self._learner, self.epoch, self._links), 1
                )

    def _serve(self) -> None:
        """Keeps a connection to each learner that wants this one's messages."""
        for peer, member in enumerate(self._members):
            link = self._outgoing.get(peer)
            name = _name(self._learner, self.epoch, peer, member.epoch, member.wants)
            if link is not None and (not member.wants or link.name != name):
                self._drop(self._outgoing.pop(peer))
                link = None
            if member.wants and link is None and not self._closing.is_set():
                self._outgoing[peer] = _Link(self, peer, name, 0)

    def _drop(self, link: _Link | None) -> None:
        if link is not None:
            link.stopping = True
            self._retired.append(link)


def _name(sender: int, sender_epoch: int, receiver: int, receiver_epoch: int, link: int) -> str:
    return f"link {sender}.{sender_epoch} {receiver}.{receiver_epoch} {link}"
