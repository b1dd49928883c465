"""Chunks: rows of another host on their way to this one, sealed, numbered, and stored exactly once.

Samplers of the other host write into a ring of their own, out of which a ``RowReader`` takes chunks of up to 4 MB. Rows
are numbered since that ring was made; its random ``ring_id`` distinguishes it from its predecessors. On the learner's
side a ``SequenceTracker`` admits each row at most once, by (host, ring_id, number), and counts the rows lost in gaps.

*Back-pressure.* The outlet gives the samplers' rate limiter as "sampled" the number of the last row that they may
write: as far as the learner's side allows, and never so far that a row not taken yet could be overwritten.

*Messages* are bytes with fixed fields, without pickle, behind an HMAC with the run's secret, checked before anything is
read.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from spreeze.errors import TransportError
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_ring import ReplayRing, RingSpec
from spreeze.types import RowLayout

MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1 << 20, 1 << 22
"""A chunk is sent at the first size, or after a while; it never exceeds the second."""
_PROOF_BYTES = 32
_MAX_FACTS_BYTES = 1 << 16
_HEAD = struct.Struct("<8sqqII")  # magic, ring_id, number of the first row, rows, bytes of facts
_MAGIC = b"SPCHUNK\x01"
_ALIGNMENT = 16  # Rows start at a multiple of it in a message, since facts end in as many blanks as that takes.


def sign(secret: bytes, kind: bytes, *parts: bytes | memoryview) -> bytes:
    """One message of these parts, signed with the secret; ``kind`` distinguishes it from other messages."""
    proof = hmac.new(secret, kind + b"\0", "sha256")
    for part in parts:
        proof.update(part)
    return b"".join((proof.digest(), *parts))


def verify(secret: bytes, kind: bytes, message: bytes) -> memoryview:
    """Sealed content; a TransportError if it is of another kind, another run, or damaged."""
    view = memoryview(message)
    proof = hmac.new(secret, kind + b"\0", "sha256")
    proof.update(view[_PROOF_BYTES:])
    if not hmac.compare_digest(proof.digest(), view[:_PROOF_BYTES]):
        raise TransportError(f"a message of {len(message)} bytes is not signed with this run's secret")
    return view[_PROOF_BYTES:]


def sign_json(secret: bytes, kind: bytes, content: dict[str, Any]) -> bytes:
    return sign(secret, kind, json.dumps(content).encode())


def verify_json(secret: bytes, kind: bytes, message: bytes) -> dict[str, Any]:
    """Inverse of ``sign_json``; a TransportError as ``verify``, or if it holds no JSON object."""
    return _object(verify(secret, kind, message))


def _object(data: memoryview) -> dict[str, Any]:
    try:
        content = json.loads(bytes(data))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise TransportError(f"a message of {len(data)} bytes is not a JSON object")
    return content


class RowChunk(NamedTuple):
    """Rows of one host, in the order in which they were taken, and the facts sent with them."""

    ring_id: int
    first: int  # number of the first row
    rows: np.ndarray  # [n, W] float32
    segments: tuple[tuple[int, int], ...]  # (rows, policy version) of each part from one sampler
    facts: dict[str, Any]


def sign_chunk(secret: bytes, ring_id: int, first: int, taken: Taken, facts: dict[str, Any]) -> bytes:
    """A chunk as one message; a TransportError if the facts are too long."""
    facts_json = json.dumps({**facts, "segments": taken.segments}).encode()
    facts_json += b" " * (-len(facts_json) % _ALIGNMENT)
    if len(facts_json) > _MAX_FACTS_BYTES:
        raise TransportError(f"the facts of a chunk have {len(facts_json)} bytes")
    head = _HEAD.pack(_MAGIC, ring_id, first, sum(rows for rows, _ in taken.segments), len(facts_json))
    return sign(secret, b"chunk", head, facts_json, *taken.data)


def verify_chunk(secret: bytes, layout: RowLayout, message: bytes) -> RowChunk:
    """Inverse of ``sign_chunk``, without a copy of the rows; a TransportError if it does not fit the layout."""
    body = verify(secret, b"chunk", message)
    if len(body) < _HEAD.size:
        raise TransportError(f"a chunk of {len(body)} bytes is too short: it was cut on its way")
    magic, ring_id, first, rows, facts_bytes = _HEAD.unpack_from(body)
    begins = _HEAD.size + facts_bytes
    if magic != _MAGIC or first < 0 or facts_bytes > _MAX_FACTS_BYTES or len(body) != begins + rows * layout.row_bytes:
        raise TransportError(
            f"a chunk of {rows} rows in {len(body)} bytes, but a row has {layout.row_bytes}; install the same "
            f"version of Spreeze on all hosts"
        )
    facts = _object(body[_HEAD.size : begins])
    try:
        segments = tuple((int(count), int(version)) for count, version in facts.pop("segments"))
    except (KeyError, TypeError, ValueError):
        raise TransportError("a chunk has no segments") from None
    if min((count for count, _ in segments), default=1) < 1 or sum(count for count, _ in segments) != rows:
        raise TransportError(f"segments of {sum(count for count, _ in segments)} rows in a chunk of {rows}")
    data = np.frombuffer(body[begins:], np.float32).reshape(rows, layout.width)
    return RowChunk(ring_id, first, data, segments, facts)


class Taken(NamedTuple):
    """Rows taken out of a ring: their bytes in order, and (rows, policy version) of each sampler's part."""

    data: list[memoryview]
    segments: list[tuple[int, int]]


def outlet_spec(layout: RowLayout, samplers: int, envs_per_sampler: int) -> RingSpec:
    """The ring of a host: every sampler's shard has room for all rows that may wait."""
    slack = 2 * samplers * envs_per_sampler
    return RingSpec(layout, samplers, max(2 * slack, MAX_CHUNK_BYTES // layout.row_bytes + slack))


def outlet_limiter(samplers: int, envs_per_sampler: int) -> RateLimiter:
    """The limiter of a host's samplers: one row for each that is "sampled", which the outlet sets."""
    return RateLimiter(1.0, 1e12, learning_starts=0, batch_size=1, rows_per_write=samplers * envs_per_sampler)


class RowReader:
    """Takes the committed rows out of a host's ring, in the order of their samplers, each once."""

    def __init__(self, ring: ReplayRing) -> None:
        """The ring must be one of ``outlet_spec``, and no sampler may have started."""
        self.ring_id = secrets.randbits(62) or 1
        self.taken = 0
        """Rows taken so far: the number of the next one."""
        self._ring, self._heads = ring, [0] * ring.spec.num_shards
        self._chunk_rows = MAX_CHUNK_BYTES // ring.spec.layout.row_bytes
        self._allowed = 0
        ring.begin_learning()

    def allow(self, rows: int) -> None:
        """Lets samplers write up to row number ``rows``, as far as there is room; earlier permissions remain."""
        self._allowed = max(self._allowed, rows)
        self._ring.in_order()  # rows that were taken are read before they may be overwritten
        self._ring.rows_drawn = min(self._allowed, self.taken + self._chunk_rows)

    @property
    def waiting(self) -> int:
        """Rows that could be taken now."""
        return self._ring.total_committed() - self.taken

    @property
    def fills_a_chunk(self) -> bool:
        """True if the waiting rows have the minimum size of a chunk."""
        return self.waiting * self._ring.spec.layout.row_bytes >= MIN_CHUNK_BYTES

    @property
    def quota_used(self) -> bool:
        """True if the samplers have written all that they may."""
        return self._ring.total_committed() >= self._ring.rows_drawn

    def take(self) -> Taken:
        """Takes waiting rows, at most one chunk. The bytes are the ring's memory: valid until the next ``allow``."""
        ring, spec, left = self._ring, self._ring.spec, self._chunk_rows
        taken = Taken([], [])
        counters = ring.counters()
        ring.in_order()
        for shard, (_, committed) in enumerate(counters):
            count = min(left, committed - self._heads[shard])
            if count > 0:
                block = self._heads[shard] % spec.rows_per_shard // spec.block_rows
                taken.segments.append((count, int(ring.stamps[shard, block, 1])))
                taken.data.extend(self._rows(shard, count))
                self._heads[shard] += count
                self.taken, left = self.taken + count, left - count
        return taken

    def _rows(self, shard: int, count: int) -> list[memoryview]:
        spec, rows = self._ring.spec, self._ring.rows
        start = self._heads[shard] % spec.rows_per_shard
        first = min(count, spec.rows_per_shard - start)
        base = shard * spec.stride_rows
        pieces = [rows[base + start : base + start + first], rows[base : base + count - first]]
        return [piece.reshape(-1).view(np.uint8).data for piece in pieces if len(piece)]


class SequenceTracker:
    """Tracks which rows of a host have arrived, so that each counts once."""

    def __init__(self) -> None:
        self.ring_id = 0
        """Id of the host's ring that rows come from now; 0 before the first chunk."""
        self.next_row = 0
        self.rows = 0
        """Rows admitted, over all rings."""
        self.chunks, self.lost_rows = 0, 0
        self.lost_chunks = 0
        """Chunks that never arrived, as the caller counts; the number of the next one tells their rows."""
        self.refused_rows = 0
        """Rows that arrived twice, or after the end of their ring."""
        self._closed: set[int] = set()

    def admit(self, chunk: RowChunk) -> int:
        """Notes a chunk; returns the number of its first rows that must not be stored: all of them if it is stale."""
        count = len(chunk.rows)
        if chunk.ring_id in self._closed:
            self.refused_rows += count
            return count
        if chunk.ring_id != self.ring_id:
            self.close()
            self.ring_id = chunk.ring_id
        known = min(count, max(0, self.next_row - chunk.first))
        self.lost_rows += max(0, chunk.first - self.next_row)
        self.next_row = max(self.next_row, chunk.first + count)
        self.refused_rows += known
        self.rows += count - known
        self.chunks += known < count
        return known

    def close(self) -> None:
        """Ends the ring: its later rows do not count."""
        if self.ring_id:
            self._closed.add(self.ring_id)
        self.ring_id = self.next_row = 0


def quotas(allowed: int | None, outstanding: Sequence[int], max_outstanding: int) -> list[int]:
    """Rows that each host may write beyond what it has already: an even part of what the limiter allows.

    ``allowed`` is the limiter's, None without a limit; ``outstanding`` are rows that each host may write already or
    that are on their way, at most ``max_outstanding`` of one host.
    """
    if not outstanding:
        return []
    even = max_outstanding if allowed is None else max(0, allowed - sum(outstanding)) // len(outstanding)
    return [max(0, min(max_outstanding - rows, even)) for rows in outstanding]
