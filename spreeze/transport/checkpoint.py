"""Durable checkpoints: a directory that is complete or does not count.

It is built under a temporary name, with every file and directory synced and the manifest written last, then renamed.
Loading takes the newest checkpoint that verifies. Where checkpoints exist, it never falls back to a fresh start.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors import numpy as safetensors_numpy

from spreeze import files
from spreeze.errors import CheckpointError, ResourceError
from spreeze.files import PIECE_BYTES
from spreeze.formatting import size
from spreeze.transport.replay_ring import ReplayRing, fill
from spreeze.transport.weights import DAMAGE
from spreeze.types import Arrays

FORMAT_VERSION = 1
_NAME = re.compile(r"^ckpt-(\d{6,})-(\d{12,})(?:-(\d+))?$")
_TENSORS, STATE, _REPLAY, _MANIFEST = "tensors.safetensors", "state.json", "replay.safetensors", "MANIFEST.json"
_EPOCH, _MAX_EPOCH_BYTES = "EPOCH", 20
_MAX_BYTES = 1 << 36
_MAX_MANIFEST_BYTES = 1 << 20
_SPARE_BYTES = 1 << 20  # for the small files of a checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A loaded and verified checkpoint."""

    path: Path
    epoch: int
    updates: int
    tensors: dict[str, np.ndarray]
    state: dict[str, Any]
    replay_path: Path | None  # for load_replay, if the rows were saved
    skipped: tuple[str, ...] = ()  # newer checkpoints that did not verify, each with the reason


class CheckpointStore:
    """A directory of checkpoints with one writer."""

    def __init__(self, directory: Path, on_progress: Callable[[int], None] = lambda left_bytes: None) -> None:
        """``on_progress`` gets the number of bytes left to write and check, at least once for every piece of a save."""
        self.directory, self._progress = Path(directory), on_progress
        self._unnoted_epoch: int | None = None

    def new_epoch(self, newest: int = 0) -> int:
        """Counts a start of the learner: above ``newest`` and every earlier epoch, even if files were lost since.

        Weights are not synced, so the number is on the disk before it is used.
        """
        noted = 0
        with contextlib.suppress(OSError, ValueError):
            noted = int(files.read_bytes(self.directory / _EPOCH, _MAX_EPOCH_BYTES))
        named = (int(path.name.split("-")[1]) for path in self.paths())
        self._unnoted_epoch = epoch = 1 + max(newest, noted, *named)
        self.note_epoch()
        return epoch

    def note_epoch(self) -> None:
        """Notes the newest epoch where a full disk left no room for that; called before each use of it."""
        if self._unnoted_epoch is not None:
            with contextlib.suppress(OSError):
                self.directory.mkdir(parents=True, exist_ok=True)
                files.replace_bytes(self.directory / _EPOCH, b"%d\n" % self._unnoted_epoch, durable=True)
                self._unnoted_epoch = None

    def save(
        self,
        tensors: dict[str, np.ndarray],
        state: dict[str, Any],
        *,
        epoch: int,
        updates: int,
        ring: ReplayRing | None = None,
        keep: int = 3,
        best: int | None = None,
    ) -> Path:
        """Saves a checkpoint, then deletes all but the ``keep`` newest and the one that is nearest to update ``best``.

        ``state`` is a JSON object, ``epoch`` counts the learner's starts in this run; ``ring`` is stored as well. A
        ResourceError if less than twice the needed space is free. After an OSError older checkpoints are untouched.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.remove_unfinished()
        needed = sum(array.nbytes for array in tensors.values()) + (ring.spec.size_bytes if ring else 0) + _SPARE_BYTES
        free = shutil.disk_usage(self.directory).free
        if free < 2 * needed:
            raise ResourceError(
                f"a checkpoint needs {size(2 * needed)} free in {self.directory}, where {size(free)} are left; "
                f"free disk space{', or remove --save-replay' if ring else ''}"
            )
        temp = self.directory / files.temp_name()
        try:
            os.mkdir(temp)
            self._write(temp, tensors, state, epoch, updates, ring)
            path = self._free_name(epoch, updates)
            os.rename(temp, path)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        files.sync_directory(self.directory)
        self._prune(keep, best)
        return path

    def _write(
        self, temp: Path, tensors: Arrays, state: dict[str, Any], epoch: int, updates: int, ring: ReplayRing | None
    ) -> None:
        """Writes all files of a checkpoint, the manifest last, each synced before the next."""
        contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
        arrays, texts = safetensors_numpy.save(contiguous), files.json_bytes(state)
        left_bytes = 2 * (len(arrays) + len(texts) + (0 if ring is None else dump_bytes(ring)))  # write, read to check

        def done(count: int) -> None:
            nonlocal left_bytes
            left_bytes = max(0, left_bytes - count)
            self._progress(left_bytes)

        done(0)
        files.write_bytes(temp / _TENSORS, arrays, durable=True, on_written=done)
        files.write_bytes(temp / STATE, texts, durable=True, on_written=done)
        names = [_TENSORS, STATE]
        if ring is not None:
            dump_replay(ring, temp / _REPLAY, done)
            names.append(_REPLAY)
        entries = {
            name: {"bytes": (temp / name).stat().st_size, "sha256": files.sha256_of_file(temp / name, done)}
            for name in names
        }
        manifest = {
            "format_version": FORMAT_VERSION,
            "epoch": epoch,
            "updates": updates,
            "files": entries,
            "replay_saved": ring is not None,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        files.write_bytes(temp / _MANIFEST, files.json_bytes(manifest), durable=True)
        files.sync_directory(temp)

    def _free_name(self, epoch: int, updates: int) -> Path:
        """An unused name: no checkpoint ever replaces another."""
        name, taken = f"ckpt-{epoch:06d}-{updates:012d}", {path.name for path in self.paths()}
        names = (name, *(f"{name}-{attempt}" for attempt in range(1, len(taken) + 1)))
        return self.directory / next(free for free in names if free not in taken)

    def paths(self) -> list[Path]:
        """Finished checkpoints, oldest first, not verified."""
        names = os.listdir(self.directory) if self.directory.is_dir() else []
        matches = sorted((match for name in names if (match := _NAME.match(name))), key=_order)
        return [self.directory / match[0] for match in matches]

    def nearest(self, updates: int) -> Path | None:
        """The checkpoint whose number of updates is nearest, not verified; None without one."""
        return min(self.paths(), key=lambda path: abs(int(path.name.split("-")[2]) - updates), default=None)

    def _prune(self, keep: int, best: int | None) -> None:
        kept = None if best is None else self.nearest(best)
        for path in self.paths()[: -max(1, keep)]:
            if path == kept:
                continue
            # Renamed first: a half-deleted directory must not look like a damaged checkpoint.
            doomed = self.directory / files.temp_name()
            with contextlib.suppress(OSError):
                os.rename(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def remove_unfinished(self) -> None:
        """Removes the temporary directories of a killed writer; as there is one writer, none of them is in use."""
        for name in os.listdir(self.directory) if self.directory.is_dir() else []:
            if name.startswith(files.TEMP_PREFIX):
                shutil.rmtree(self.directory / name, ignore_errors=True)

    def load_latest(self, *, large: bool = True) -> Checkpoint | None:
        """The newest checkpoint that verifies; None if there is none at all, a CheckpointError if none verifies.

        ``large`` as for ``load``: if false, ``load_latest`` with all files may still pass over it.
        """
        skipped: list[str] = []
        for path in reversed(self.paths()):
            try:
                return load(path, tuple(skipped), large=large)
            except CheckpointError as error:
                skipped.append(str(error))
        if skipped:
            raise CheckpointError(
                f"no valid checkpoint in {self.directory} ({'; '.join(skipped)}); start a new run instead"
            )
        return None


def _order(match: re.Match[str]) -> tuple[int, int, int]:
    return int(match[1]), int(match[2]), int(match[3] or 0)


def load(path: Path, skipped: tuple[str, ...] = (), *, large: bool = True) -> Checkpoint:
    """Loads one checkpoint after checking every file against the manifest; a CheckpointError if that fails.

    If ``large`` is false, of all files but the state only sizes are checked, and the tensors are left out.
    """
    try:
        manifest = json.loads(files.read_bytes(path / _MANIFEST, _MAX_MANIFEST_BYTES))
        if manifest["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {manifest['format_version']!r}, this version reads {FORMAT_VERSION}")
        name = _NAME.match(path.name)
        if name is not None and _order(name)[:2] != (manifest["epoch"], manifest["updates"]):
            raise ValueError("the manifest belongs to another checkpoint")
        for file in [_TENSORS, STATE] + ([_REPLAY] if manifest["replay_saved"] else []):
            entry = manifest["files"][file]
            if (size_bytes := (path / file).stat().st_size) != entry["bytes"]:
                raise ValueError(f"{file} has {size_bytes} bytes, expected {entry['bytes']}")
            if (large or file == STATE) and files.sha256_of_file(path / file) != entry["sha256"]:
                raise ValueError(f"{file} does not match its hash")
        tensors = safetensors_numpy.load(files.read_bytes(path / _TENSORS, _MAX_BYTES)) if large else {}
        state = dict(json.loads(files.read_bytes(path / STATE, _MAX_BYTES)))
        replay = path / _REPLAY if manifest["replay_saved"] else None
        return Checkpoint(path, int(manifest["epoch"]), int(manifest["updates"]), tensors, state, replay, skipped)
    except DAMAGE as error:
        raise CheckpointError(f"{path.name}: {type(error).__name__}: {error}") from None


_HEADER_BYTES = 1016  # padded with blanks: the header is written last, when the number of rows is known


class _Block(NamedTuple):
    """Rows [first, stop) of a shard that share one stamp."""

    clock: int
    shard: int
    first: int
    stop: int
    version: int


def dump_bytes(ring: ReplayRing) -> int:
    """Size of the file that ``dump_replay`` would write now, without its header."""
    oldest = np.maximum(0, ring.reserved - ring.spec.rows_per_shard)
    return int(np.maximum(0, ring.committed - oldest).sum()) * (4 * ring.spec.layout.width + 8)


def dump_replay(ring: ReplayRing, path: Path, on_written: Callable[[int], None] = lambda count: None) -> int:
    """Writes all readable rows into a safetensors file, oldest block first; returns their number.

    The file is synced piece by piece, and completely on return. ``on_written`` gets the bytes of each block (for a
    heartbeat). Rows that samplers overwrite in the meantime are left out.
    """
    blocks = sorted(block for shard in range(ring.spec.num_shards) for block in _blocks(ring, shard))
    counts: list[tuple[int, int]] = []
    unsynced_bytes = 0
    with open(path, "xb", buffering=1 << 20) as file:

        def write(array: np.ndarray) -> None:
            nonlocal unsynced_bytes
            file.write(array.data)
            unsynced_bytes += array.nbytes
            if unsynced_bytes >= PIECE_BYTES:
                _sync(file)
                unsynced_bytes = 0
            on_written(array.nbytes)

        file.write(bytes(8 + _HEADER_BYTES))
        for block in blocks:
            rows = _copy(ring, block)
            if len(rows):
                write(rows)
                counts.append((block.version, len(rows)))
        for version, count in counts:
            write(np.full(count, version, dtype="<i8"))
        total = sum(count for _, count in counts)
        file.seek(0)
        file.write(_header(ring, total))
        _sync(file)
    return total


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _blocks(ring: ReplayRing, shard: int) -> list[_Block]:
    """The readable rows of a shard by stamp, oldest first."""
    spec = ring.spec
    capacity, size = spec.rows_per_shard, spec.block_rows
    stop, stamps = int(ring.committed[shard]), ring.stamps[shard]
    first = max(0, int(ring.reserved[shard]) - capacity)
    ring.in_order()
    blocks: list[_Block] = []
    while first < stop:
        lap, position = divmod(first, capacity)
        end = min(stop, lap * capacity + min((position // size + 1) * size, capacity))
        clock, version = stamps[position // size].tolist()
        blocks.append(_Block(clock, shard, first, end, version))
        first = end
    # Rows in a block that a newer lap has begun lost their stamp to it; but no row is younger than the next one.
    for index in range(len(blocks) - 2, -1, -1):
        blocks[index] = blocks[index]._replace(clock=min(blocks[index].clock, blocks[index + 1].clock))
    return blocks


def _copy(ring: ReplayRing, block: _Block) -> np.ndarray:
    """A copy of a block's rows [n, W] without those that may have been overwritten in the meantime."""
    spec = ring.spec
    start = block.shard * spec.stride_rows + block.first % spec.rows_per_shard
    rows = ring.rows[start : start + block.stop - block.first].copy()
    ring.in_order()
    oldest = int(ring.reserved[block.shard]) - spec.rows_per_shard  # read after the copy is complete
    return rows[max(0, oldest - block.first) :]


def _header(ring: ReplayRing, count: int) -> bytes:
    width = ring.spec.layout.width
    end = 4 * count * width
    header = {
        "__metadata__": {"fields": _fields(ring), "width": str(width)},
        "rows": {"dtype": "F32", "shape": [count, width], "data_offsets": [0, end]},
        "policy_version": {"dtype": "I64", "shape": [count], "data_offsets": [end, end + 8 * count]},
    }
    return _HEADER_BYTES.to_bytes(8, "little") + json.dumps(header).encode().ljust(_HEADER_BYTES)


def _fields(ring: ReplayRing) -> str:
    layout = ring.spec.layout
    sequence = "" if layout.sequence is None else f", {layout.sequence.length} steps after {layout.sequence.burn_in}"
    return f"obs {layout.obs_dim}, action {layout.action_dim}, n_step {layout.n_step}{sequence}"


def load_replay(path: Path, ring: ReplayRing) -> int:
    """Writes a file's rows into an empty ring with any number of shards; returns how many were kept, the newest.

    Call it before any sampler has started. A CheckpointError if the file is damaged, or its rows belong to another
    task.
    """
    try:
        with safe_open(path, framework="np") as file:
            fields = (file.metadata() or {}).get("fields", "nothing")
            if fields != _fields(ring):
                raise CheckpointError(f"{path} holds rows of {fields}; this run has {_fields(ring)}")
            rows, versions = file.get_slice("rows"), file.get_tensor("policy_version")
            if rows.get_shape() != [len(versions), ring.spec.layout.width]:
                raise CheckpointError(f"{path} holds rows of shape {rows.get_shape()} with {len(versions)} versions")
            return fill(ring, rows, versions)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
