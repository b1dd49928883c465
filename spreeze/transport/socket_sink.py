"""A sampler's rows over a local socket: ``SocketSink`` in its process, ``Gateway`` beside the ring.

All messages have fixed binary fields. Each side proves that it knows the run's secret by an HMAC over a fresh nonce of
the other side. The sampler sends frames: a header, then complete rows. It keeps them until the gateway reports them as
committed, and sends them again after a reconnect: each row arrives complete, in order and exactly once, whichever
process is killed, as long as the memory behind the gateway lives. The buffers of both sides are bounded, and neither
waits except in a handshake.

Rows are not encrypted, so the only addresses are sockets of this machine, ``unix:PATH``.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.errors import TransportError
from spreeze.transport import files
from spreeze.transport.protocols import FrameColumns, ReplayCounts, TransitionSink
from spreeze.transport.replay_ring import NO_FRAMES, NO_STEPS, write_rows
from spreeze.types import RowLayout

SECRET_BYTES = 32
MOST_FRAME_BYTES = 1 << 22  # of rows; a connection that announces more is closed
_CHALLENGE = struct.Struct("<8s32s")  # magic with the version of this protocol, nonce
_HELLO = struct.Struct("<32sQI")  # nonce, layout, shard; then a proof
_REPORT = struct.Struct("<Qqqq")  # rows of the shard, inserted, baseline, sampled; the first one with a proof
_FRAME = struct.Struct("<IQq")  # rows, index of the first, policy version
_MAGIC = b"SPREEZE\x01"
_PROOF_BYTES = 32
_MOST_CONNECTIONS = 256
_CHUNK_BYTES = 1 << 18
_HANDSHAKE_S = 2.0
_RETRY_S = 0.2
_REPORT_S = 0.005


def create_secret(path: Path) -> bytes:
    """Writes a new secret into a file that only this user can read; an OSError if that fails."""
    secret = secrets.token_bytes(SECRET_BYTES)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    return secret


def read_secret(path: Path) -> bytes:
    """Reads the file of ``create_secret``; a TransportError if that fails."""
    try:
        return files.read_bytes(path, SECRET_BYTES)
    except (OSError, ValueError) as error:
        raise TransportError(f"the secret of the run cannot be read: {error}") from None


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), "sha256")


def _layout_hash(layout: RowLayout) -> int:
    return int.from_bytes(hashlib.sha256(repr(layout).encode()).digest()[:8], "little")


def _path_of(address: str) -> str:
    kind, _, path = address.partition(":")
    if kind != "unix" or not path:
        raise TransportError(f"address {address!r} is not unix:PATH")
    return path


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("it hung up")
        data += part
    return data


def _packed(
    layout: RowLayout, obs: Any, action: Any, reward: Any, terminated: Any, next_obs: Any, num_steps: Any,
    frames: FrameColumns | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The arguments of ``TransitionSink.write`` as rows [N, W] float32 and their frames [N, F] uint8."""
    rows = np.zeros((len(reward), layout.width), np.float32)
    images = np.zeros((len(reward), layout.frame_bytes), np.uint8)
    rows[:, layout.obs], rows[:, layout.action], rows[:, layout.next_obs] = obs, action, next_obs
    rows[:, layout.reward], rows[:, layout.terminated] = reward, terminated
    if layout.num_steps is not None:
        if num_steps is None:
            raise ValueError(NO_STEPS)
        rows[:, layout.num_steps] = num_steps
    if layout.frame_bytes:
        if frames is None:
            raise ValueError(NO_FRAMES)
        images[:], rows[:, layout.back], rows[:, layout.age] = frames
    return rows, images


class SocketSink:
    """A ``TransitionSink`` whose rows go to a gateway."""

    def __init__(
        self, address: str, secret: bytes, layout: RowLayout, shard: int, *, buffer_bytes: int = 2 * MOST_FRAME_BYTES,
        give_up_s: float = 30.0,
    ) -> None:
        """Connects; a TransportError if there is no gateway, or one of another run.

        There is no room while ``buffer_bytes`` are on their way, and an error after ``give_up_s`` without a gateway.
        """
        self.layout, self.next_logical = layout, 0
        self._address, self._secret, self._shard = address, secret, shard
        self._buffer_bytes, self._give_up_s = buffer_bytes, give_up_s
        self._most_rows = max(1, MOST_FRAME_BYTES // layout.row_bytes)
        self._kept: deque[tuple[int, bytes]] = deque()  # (index after the last row, frame), not committed yet
        self._kept_bytes = 0
        self._gone_since_s = self._retry_s = 0.0
        self._socket: socket.socket | None = None
        self._report: tuple[int, int, int, int] = (0, 0, 0, 0)
        self._connect()
        self.next_logical = self._report[0]

    @property
    def has_room(self) -> bool:
        return self._kept_bytes < self._buffer_bytes

    def counts(self) -> ReplayCounts:
        """As last reported; rows on their way count as inserted, so that a delay does not admit more of them."""
        self._pump()
        committed, inserted, baseline, sampled = self._report
        return ReplayCounts(inserted + self.next_logical - committed, baseline, sampled)

    def write(
        self, obs: Any, action: Any, reward: Any, terminated: Any, next_obs: Any, num_steps: Any = None,
        version: int = 0, frames: FrameColumns | None = None,
    ) -> None:
        if not self.has_room:
            raise TransportError(f"{self._kept_bytes} bytes are on their way to {self._address}: ask has_room first")
        rows, images = _packed(self.layout, obs, action, reward, terminated, next_obs, num_steps, frames)
        for start in range(0, len(rows), self._most_rows):
            part = rows[start : start + self._most_rows]
            header = _FRAME.pack(len(part), self.next_logical, version)
            data = header + part.tobytes() + images[start : start + self._most_rows].tobytes()
            self.next_logical += len(part)
            self._kept.append((self.next_logical, data))
            self._kept_bytes += len(data)
            self._unsent += data
        self._pump()

    def _pump(self) -> None:
        """Sends and receives without waiting; reconnects if the connection was lost."""
        if self._socket is None and time.monotonic() >= self._retry_s:
            try:
                self._connect()
            except TransportError:
                if time.monotonic() - self._gone_since_s >= self._give_up_s:
                    raise
                self._retry_s = time.monotonic() + _RETRY_S
        if self._socket is None:
            return
        try:
            with contextlib.suppress(BlockingIOError):
                while self._unsent:
                    del self._unsent[: self._socket.send(self._unsent[:_CHUNK_BYTES])]
            with contextlib.suppress(BlockingIOError):
                while data := self._socket.recv(_CHUNK_BYTES):
                    self._received += data
                raise ConnectionResetError("the gateway hung up")
        except OSError:
            self.close()
        whole = len(self._received) // _REPORT.size * _REPORT.size
        if whole:
            self._take(_REPORT.unpack_from(self._received, whole - _REPORT.size))
            del self._received[:whole]

    def _take(self, report: tuple[Any, ...]) -> None:
        """Drops the rows that are committed by now."""
        self._report = report
        while self._kept and self._kept[0][0] <= report[0]:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _connect(self) -> None:
        """Shakes hands, and continues after the last row that the gateway's sink has committed."""
        where, connection = _path_of(self._address), socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_HANDSHAKE_S)
            connection.connect(where)
            magic, challenge = _CHALLENGE.unpack(_exactly(connection, _CHALLENGE.size))
            nonce = secrets.token_bytes(32)
            hello = _HELLO.pack(nonce, _layout_hash(self.layout), self._shard)
            connection.sendall(hello + _proof(self._secret, b"sampler", challenge, hello))
            report = _exactly(connection, _REPORT.size)
            proof = _exactly(connection, _PROOF_BYTES)
            if magic != _MAGIC or not hmac.compare_digest(proof, _proof(self._secret, b"gateway", nonce, report)):
                raise ConnectionError("it does not know the secret")
        except OSError as error:
            connection.close()
            raise TransportError(
                f"no gateway for these rows at {self._address} ({error}): is it running, with this run's secret, "
                f"environment and version of Spreeze, and with a shard {self._shard}?"
            ) from None
        found = _REPORT.unpack(report)
        if self.next_logical and not self._report[0] <= found[0] <= self.next_logical:
            connection.close()
            self._give_up_s = 0.0  # waiting would not help
            raise TransportError(f"the shard behind {self._address} has {found[0]} rows, after {self._report[0]} were "
                                 "committed: it is another one now; start this sampler again")
        connection.setblocking(False)
        self._take(found)
        self._unsent, self._received = bytearray().join(data for _, data in self._kept), bytearray()
        self._socket = connection

    def close(self) -> None:
        """Closes the connection; rows on their way are lost unless ``write`` or ``counts`` is called again."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._gone_since_s = None, time.monotonic()


class _Peer:
    """A sampler's connection; ``shard`` is -1 until it has proved that it belongs to the run."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.since_s, self.shard = connection, time.monotonic(), -1
        self.nonce = secrets.token_bytes(32)
        self.received, self.unsent = bytearray(), bytearray(_CHALLENGE.pack(_MAGIC, self.nonce))
        self.reported = b""


class Gateway:
    """Writes the rows that samplers send into sinks; its owner calls ``turn`` repeatedly."""

    def __init__(
        self, address: str, secret: bytes, layout: RowLayout, open_sink: Callable[[int], TransitionSink]
    ) -> None:
        """Listens at an address; a TransportError if that fails.

        ``open_sink`` is called once per shard and raises a TransportError if there is no such shard.
        """
        self._secret, self._layout, self._open_sink = secret, layout, open_sink
        self._sinks: dict[int, TransitionSink] = {}
        self._peers: dict[Any, _Peer] = {}
        self._reported_s = 0.0
        self.address, self._path = address, Path(_path_of(address))
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            if self._path.is_socket():
                self._path.unlink()  # left by a gateway that was killed
            self._listener.bind(str(self._path))
            self._path.chmod(0o600)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise TransportError(f"cannot listen at {address}: {error}") from None
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def turn(self, timeout_s: float) -> None:
        """Waits for data for at most ``timeout_s``, writes the rows that have arrived completely, and reports."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif (peer := self._peers.get(key.fileobj)) is not None:
                self._guarded(self._receive, peer)
        now = time.monotonic()
        if now - self._reported_s >= _REPORT_S:
            self._reported_s = now
            for peer in list(self._peers.values()):
                self._guarded(self._report, peer)

    def _guarded(self, act: Callable[[_Peer], None], peer: _Peer) -> None:
        """Runs ``act``; a peer that is gone or breaks the protocol loses its connection."""
        try:
            act(peer)
        except (OSError, TransportError):
            self._hang_up(peer)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if len(self._peers) >= _MOST_CONNECTIONS:
                connection.close()
                return
            connection.setblocking(False)
            self._peers[connection] = peer = _Peer(connection)
            self._selector.register(connection, selectors.EVENT_READ)
            self._guarded(self._send, peer)

    def _receive(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            data = peer.socket.recv(_CHUNK_BYTES)
            if not data:
                raise ConnectionResetError("it hung up")
            peer.received += data
        if peer.shard < 0:
            self._welcome(peer)
        while peer.shard >= 0 and self._store(peer):
            pass

    def _welcome(self, peer: _Peer) -> None:
        if len(peer.received) < _HELLO.size + _PROOF_BYTES:
            return
        hello = bytes(peer.received[: _HELLO.size])
        proof = bytes(peer.received[_HELLO.size : _HELLO.size + _PROOF_BYTES])
        nonce, layout_hash, shard = _HELLO.unpack(hello)
        expected = _proof(self._secret, b"sampler", peer.nonce, hello)
        if not hmac.compare_digest(proof, expected) or layout_hash != _layout_hash(self._layout):
            raise TransportError("another secret, or other rows")
        if shard not in self._sinks:
            self._sinks[shard] = self._open_sink(shard)
        for other in [other for other in self._peers.values() if other.shard == shard]:
            self._hang_up(other)  # its sampler is dead, or has lost this connection
        del peer.received[: _HELLO.size + _PROOF_BYTES]
        peer.shard = shard
        report = self._state(shard)
        peer.unsent += report + _proof(self._secret, b"gateway", nonce, report)
        peer.reported = report
        self._send(peer)

    def _state(self, shard: int) -> bytes:
        return _REPORT.pack(self._sinks[shard].next_logical, *self._sinks[shard].counts())

    def _store(self, peer: _Peer) -> bool:
        """Writes one frame, if a whole one is here."""
        received, layout, sink = peer.received, self._layout, self._sinks[peer.shard]
        if len(received) < _FRAME.size:
            return False
        count, first, version = _FRAME.unpack_from(received)
        known = sink.next_logical - first  # rows that were sent before
        if not 1 <= count <= max(1, MOST_FRAME_BYTES // layout.row_bytes) or known < 0:
            raise TransportError(f"{count} rows from {first} on, where {sink.next_logical} is the next one")
        end = _FRAME.size + count * layout.row_bytes
        if len(received) < end:
            return False
        data = bytes(received[_FRAME.size : end])
        del received[:end]
        if known < count:
            rows = np.frombuffer(data, np.float32, count * layout.width).reshape(count, layout.width)
            frames = np.frombuffer(data, np.uint8, offset=rows.nbytes).reshape(count, layout.frame_bytes)
            write_rows(sink, rows[known:], version, frames[known:] if layout.frame_bytes else None)
        return True

    def _report(self, peer: _Peer) -> None:
        """Reports changed counters to a peer that reads; fails for one that does not shake hands in time."""
        if peer.shard < 0 and time.monotonic() - peer.since_s > _HANDSHAKE_S:
            raise TransportError("no handshake")
        if peer.shard >= 0 and not peer.unsent and (state := self._state(peer.shard)) != peer.reported:
            peer.reported = state
            peer.unsent += state
        self._send(peer)

    def _send(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            if peer.unsent:
                del peer.unsent[: peer.socket.send(peer.unsent)]

    def _hang_up(self, peer: _Peer) -> None:
        if self._peers.pop(peer.socket, None) is not None:
            self._selector.unregister(peer.socket)
            peer.socket.close()

    def close(self) -> None:
        """Closes all connections and releases the sinks, which stay open."""
        self._sinks.clear()
        for peer in list(self._peers.values()):
            self._hang_up(peer)
        self._selector.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)
