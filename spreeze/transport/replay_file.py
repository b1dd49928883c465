"""Replay rows in a file: streamed block by block, so that saving takes no second ring's worth of memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from spreeze.errors import CheckpointError
from spreeze.transport.files import PIECE_BYTES
from spreeze.transport.ring import Ring, ShardWriter

_HEADER_BYTES = 1016
"""Length of the file's header, filled up with blanks: it is written last, when the number of rows is known."""
_TOLD_BYTES = 1 << 20


class _Block(NamedTuple):
    """Rows [first, stop) of a shard, which share one stamp."""

    clock: int
    shard: int
    first: int
    stop: int
    version: int


def dump_bytes(ring: Ring) -> int:
    """Size of the file that ``dump`` would write now, header aside."""
    oldest = np.maximum(0, ring.reserved - ring.spec.rows_per_shard)
    return int(np.maximum(0, ring.committed - oldest).sum()) * (4 * ring.spec.layout.width + 8)


def dump(ring: Ring, path: Path, on_written: Callable[[int], None] = lambda count: None) -> int:
    """Writes all rows that can be read as a safetensors file, oldest block first; returns how many.

    What was written is on the disk when this returns, and piece by piece before.

    Samplers may go on writing: what they overwrite meanwhile is left out.

    Args:
        ring: the replay.
        path: the new file.
        on_written: gets the number of bytes written since its last call (a heartbeat, say).

    Raises:
        OSError: no room or no permission.
    """
    blocks = sorted(block for shard in range(ring.spec.num_shards) for block in _blocks(ring, shard))
    counts: list[tuple[int, int]] = []
    with open(path, "xb", buffering=1 << 20) as file:
        pieces = _Pieces(file, on_written)
        file.write(bytes(8 + _HEADER_BYTES))
        for block in blocks:
            rows = _copy(ring, block)
            if len(rows):
                pieces.write(rows)
                counts.append((block.version, len(rows)))
        for version, count in counts:
            pieces.write(np.full(count, version, dtype="<i8"))
        total = sum(count for _, count in counts)
        file.seek(0)
        _write_header(file, ring, total)
        pieces.end()
    return total


class _Pieces:
    """Writes arrays, brings every so many bytes to the disk, and tells how far it is."""

    def __init__(self, file: IO[bytes], on_written: Callable[[int], None]) -> None:
        self._file, self._on_written = file, on_written
        self._untold_bytes = self._unsynced_bytes = 0

    def write(self, array: np.ndarray) -> None:
        """One contiguous array."""
        self._file.write(array.data)
        self._untold_bytes += array.nbytes
        self._unsynced_bytes += array.nbytes
        if self._unsynced_bytes >= PIECE_BYTES:
            self._sync()
        if self._untold_bytes >= _TOLD_BYTES:
            self._tell()

    def end(self) -> None:
        """After the last one."""
        self._sync()
        self._tell()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unsynced_bytes = 0

    def _tell(self) -> None:
        self._on_written(self._untold_bytes)
        self._untold_bytes = 0


def _blocks(ring: Ring, shard: int) -> list[_Block]:
    """The readable rows of a shard by stamp, oldest first."""
    spec = ring.spec
    capacity, size = spec.rows_per_shard, spec.block_rows
    stop, stamps = int(ring.committed[shard]), ring.stamps[shard]
    first = max(0, int(ring.reserved[shard]) - capacity)
    found: list[_Block] = []
    while first < stop:
        lap, position = divmod(first, capacity)
        end = min(stop, lap * capacity + min((position // size + 1) * size, capacity))
        clock, version = stamps[position // size].tolist()
        found.append(_Block(clock, shard, first, end, version))
        first = end
    # Rows that share a block with a newer lap lost their stamp to it; but no row is younger than the next one.
    for index in range(len(found) - 2, -1, -1):
        found[index] = found[index]._replace(clock=min(found[index].clock, found[index + 1].clock))
    return found


def _copy(ring: Ring, block: _Block) -> np.ndarray:
    """A copy of a block's rows [n, W] without those that may have been overwritten meanwhile."""
    spec = ring.spec
    start = block.shard * spec.stride_rows + block.first % spec.rows_per_shard
    with ring.shard_locks(block.shard, block.shard):
        rows = ring.rows[start : start + block.stop - block.first].copy()
    oldest = int(ring.reserved[block.shard]) - spec.rows_per_shard  # read after the copy is complete
    return rows[max(0, oldest - block.first) :]


def _write_header(file: IO[bytes], ring: Ring, count: int) -> None:
    width = ring.spec.layout.width
    end = 4 * count * width
    header = {
        "__metadata__": {"fields": _fields(ring), "width": str(width)},
        "rows": {"dtype": "F32", "shape": [count, width], "data_offsets": [0, end]},
        "policy_version": {"dtype": "I64", "shape": [count], "data_offsets": [end, end + 8 * count]},
    }
    file.write(_HEADER_BYTES.to_bytes(8, "little") + json.dumps(header).encode().ljust(_HEADER_BYTES))


def _fields(ring: Ring) -> str:
    layout = ring.spec.layout
    return f"obs {layout.obs_dim}, action {layout.action_dim}, n_step {layout.n_step}"


def load(path: Path, ring: Ring) -> int:
    """Writes a file's rows into an empty ring, whatever its number of shards; returns how many.

    Call it before any sampler has started. The newest rows are kept where the ring is smaller.

    Raises:
        CheckpointError: damaged, or rows of another task.
    """
    try:
        with safe_open(path, framework="np") as file:
            fields = (file.metadata() or {}).get("fields", "nothing")
            if fields != _fields(ring):
                raise CheckpointError(f"{path} holds rows of {fields}; this run has {_fields(ring)}")
            rows, versions = file.get_slice("rows"), file.get_tensor("policy_version")
            if rows.get_shape() != [len(versions), ring.spec.layout.width]:
                raise CheckpointError(f"{path} holds rows of shape {rows.get_shape()} with {len(versions)} versions")
            kept = min(len(versions), ring.spec.capacity)
            first, size = len(versions) - kept, ring.spec.block_rows
            writers = [ShardWriter(ring, shard) for shard in range(ring.spec.num_shards)]
            for index, start in enumerate(range(first, len(versions), size)):
                part = np.asarray(rows[start : min(start + size, len(versions))], dtype=np.float32)
                _append(ring, writers[index % len(writers)], part, int(versions[start]))
            return kept
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _append(ring: Ring, writer: ShardWriter, rows: np.ndarray, version: int) -> None:
    layout = ring.spec.layout
    batch = layout.split(rows, 1.0)
    steps = None if layout.num_steps is None else rows[:, layout.num_steps]
    writer.write(batch.obs, batch.action, batch.reward, batch.terminated, batch.next_obs, steps, version)
