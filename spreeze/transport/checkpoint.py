"""Durable checkpoints: a directory that is complete or does not count.

Built under a temporary name, every file and directory synced, the manifest written last, then renamed.
Loading takes the newest that verifies, and never falls back to a fresh start when any exists.
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
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy

from spreeze.errors import CheckpointError, ResourceError
from spreeze.transport import files, replay_file
from spreeze.transport.ring import Ring

FORMAT_VERSION = 1
_NAME = re.compile(r"^ckpt-(\d{6,})-(\d{12,})(?:-(\d+))?$")
_TENSORS, _STATE, _REPLAY, _MANIFEST = "tensors.safetensors", "state.json", "replay.safetensors", "MANIFEST.json"
_MAX_BYTES = 1 << 36
_MAX_MANIFEST_BYTES = 1 << 20
_SPARE_BYTES = 1 << 20
"""Room for the small files of a checkpoint."""
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)


@dataclass(frozen=True)
class Checkpoint:
    """What was saved, verified."""

    path: Path
    epoch: int
    updates: int
    tensors: dict[str, np.ndarray]
    state: dict[str, Any]
    replay_path: Path | None
    """File with the replay rows for ``replay_file.load``, if they were saved."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that did not verify, each with the reason."""


class _Left:
    """Counts down what a save still has to write, and to read again for the hashes."""

    def __init__(self, file_bytes: int, tell: Callable[[int], None]) -> None:
        self._left_bytes, self._tell = 2 * file_bytes, tell

    def done(self, count: int) -> None:
        """So many bytes were written or read."""
        self._left_bytes = max(0, self._left_bytes - count)
        self._tell(self._left_bytes)


class CheckpointStore:
    """A directory of checkpoints with one writer."""

    def __init__(self, directory: Path, on_progress: Callable[[int], None] = lambda left_bytes: None) -> None:
        """Args: ``on_progress`` gets what is left to write and check, at least once for every piece of a save."""
        self.directory = Path(directory)
        self._progress = on_progress

    def save(
        self,
        tensors: dict[str, np.ndarray],
        state: dict[str, Any],
        *,
        epoch: int,
        updates: int,
        ring: Ring | None = None,
        keep: int = 3,
    ) -> Path:
        """Saves a checkpoint and prunes old ones, the latter only after success.

        Args:
            tensors: by name; any shapes and types that safetensors knows.
            state: a JSON object: counters, random states, settings.
            epoch: how often a learner was started in this run.
            updates: gradient steps so far.
            ring: replay to store as well, or None.
            keep: newest checkpoints that stay.

        Raises:
            ResourceError: less than twice the needed space is free on the disk.
            OSError: writing failed; older checkpoints are untouched.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.remove_unfinished()
        payload = sum(array.nbytes for array in tensors.values()) + _SPARE_BYTES
        self._check_room(payload + (ring.spec.size_bytes if ring is not None else 0))
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
        self._prune(keep)
        return path

    def _check_room(self, needed_bytes: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < 2 * needed_bytes:
            raise ResourceError(
                f"checkpoint needs {2 * needed_bytes} bytes free in {self.directory}, {free} are available; "
                "free some space or save without replay"
            )

    def _write(
        self,
        temp: Path,
        tensors: dict[str, np.ndarray],
        state: dict[str, Any],
        epoch: int,
        updates: int,
        ring: Ring | None,
    ) -> None:
        """All files of a checkpoint, the manifest last, each on the disk before the next."""
        contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
        arrays, texts = safetensors_numpy.save(contiguous), files.json_bytes(state)
        left = _Left(len(arrays) + len(texts) + (0 if ring is None else replay_file.dump_bytes(ring)), self._progress)
        left.done(0)
        files.write_bytes(temp / _TENSORS, arrays, durable=True, on_written=left.done)
        files.write_bytes(temp / _STATE, texts, durable=True, on_written=left.done)
        names = [_TENSORS, _STATE]
        if ring is not None:
            replay_file.dump(ring, temp / _REPLAY, left.done)
            names.append(_REPLAY)
        entries = {
            name: {
                "bytes": (temp / name).stat().st_size,
                "sha256": files.sha256_of_file(temp / name, left.done),
            }
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
        """A name that is not taken: no checkpoint is ever replaced by another."""
        name = f"ckpt-{epoch:06d}-{updates:012d}"
        taken = {path.name for path in self.paths()}
        attempt, candidate = 0, name
        while candidate in taken:
            attempt += 1
            candidate = f"{name}-{attempt}"
        return self.directory / candidate

    def paths(self) -> list[Path]:
        """Finished checkpoints, oldest first, verified or not."""
        if not self.directory.is_dir():
            return []
        found = [
            (match, self.directory / match[0]) for name in os.listdir(self.directory) if (match := _NAME.match(name))
        ]
        return [path for match, path in sorted(found, key=lambda pair: _order(pair[0]))]

    def _prune(self, keep: int) -> None:
        for path in self.paths()[: -max(1, keep)]:
            # Renamed first: a half-deleted directory must not look like a damaged checkpoint.
            doomed = self.directory / files.temp_name()
            with contextlib.suppress(OSError):
                os.rename(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def remove_unfinished(self) -> None:
        """Clears what a killed writer left; there is one writer, so nothing under such a name is in use."""
        for name in os.listdir(self.directory) if self.directory.is_dir() else []:
            if name.startswith(files.TEMP_PREFIX):
                shutil.rmtree(self.directory / name, ignore_errors=True)

    def load_latest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies; None if there is none at all.

        Raises:
            CheckpointError: there are some, but none verifies.
        """
        skipped: list[str] = []
        for path in reversed(self.paths()):
            try:
                return load(path, tuple(skipped))
            except CheckpointError as error:
                skipped.append(str(error))
        if skipped:
            raise CheckpointError(
                f"no checkpoint in {self.directory} verifies ({'; '.join(skipped)}); start a new run instead"
            )
        return None

    def latest_replay(self) -> Path | None:
        """Replay rows of the newest checkpoint that verifies, for ``replay_file.load``; None if it has none.

        Raises:
            CheckpointError: there are checkpoints, but none verifies.
        """
        newest = self.load_latest()
        return None if newest is None else newest.replay_path


def _order(match: re.Match[str]) -> tuple[int, int, int]:
    return int(match[1]), int(match[2]), int(match[3] or 0)


def load(path: Path, skipped: tuple[str, ...] = ()) -> Checkpoint:
    """Loads one checkpoint after checking every file against the manifest.

    Raises:
        CheckpointError: incomplete, damaged, or of another format.
    """
    try:
        manifest = json.loads(files.read_bytes(path / _MANIFEST, _MAX_MANIFEST_BYTES))
        if manifest["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {manifest['format_version']!r}, this version reads {FORMAT_VERSION}")
        name = _NAME.match(path.name)
        if name is not None and _order(name)[:2] != (manifest["epoch"], manifest["updates"]):
            raise ValueError("the manifest is that of another checkpoint")
        names = [_TENSORS, _STATE] + ([_REPLAY] if manifest["replay_saved"] else [])
        for file in names:
            _verify(path / file, manifest["files"][file])
        tensors = safetensors_numpy.load(files.read_bytes(path / _TENSORS, _MAX_BYTES))
        state = dict(json.loads(files.read_bytes(path / _STATE, _MAX_BYTES)))
        replay = path / _REPLAY if manifest["replay_saved"] else None
        return Checkpoint(path, int(manifest["epoch"]), int(manifest["updates"]), tensors, state, replay, skipped)
    except _DAMAGE as error:
        raise CheckpointError(f"{path.name}: {type(error).__name__}: {error}") from None


def _verify(path: Path, entry: dict[str, Any]) -> None:
    size_bytes = path.stat().st_size
    if size_bytes != entry["bytes"]:
        raise ValueError(f"{path.name} has {size_bytes} bytes, the manifest says {entry['bytes']}")
    if files.sha256_of_file(path) != entry["sha256"]:
        raise ValueError(f"{path.name} does not match its hash")
