"""Parameters from one learner to any number of readers: files on disk, or slots in shared memory.

``WeightsStore`` keeps immutable files and an atomically replaced pointer. Nothing is fsynced: these files are replaced
many times a minute, and the checkpoint is the durable copy. ``VersionedParameters`` keeps the newest N versions in
memory files of the supervisor, which outlive every worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy

from spreeze import files
from spreeze.errors import WeightsError, refuse_newer
from spreeze.transport.shared_memory import Handle, in_order
from spreeze.types import Arrays

FORMAT = 1  # format number of a weights file, in its metadata
LATEST = "LATEST.json"
_NAME = re.compile(r"^w-(\d{6,})-(\d{12,})\.safetensors$")
_MAX_BYTES = 1 << 32
_MAX_POINTER_BYTES = 1 << 16


@dataclass(frozen=True)
class Weights:
    """One published version of a network's arrays."""

    arrays: Arrays
    meta: dict[str, Any]
    epoch: int
    version: int
    path: Path = Path()  # of its file, if it has one

    @property
    def order(self) -> tuple[int, int]:
        """The epoch rises when a learner starts, the version with its updates."""
        return self.epoch, self.version

    def to_bytes(self) -> bytes:
        return encode(self.arrays, self.meta, self.epoch, self.version)


class ParameterPublisher(Protocol):
    """The learner's side: one at any time, which never waits for a reader."""

    def publish(self, arrays: Arrays, meta: dict[str, Any], epoch: int, version: int) -> object:
        """Makes a version visible atomically; one that was already published stays, perhaps with an error.

        Raises:
            WeightsError: a newer version was published, or a value is not finite; nothing was changed.
            OSError: no room; the previous version is still there.
        """
        ...


class ParameterSource(Protocol):
    """A reader's side; it may be opened late and never goes back to an older version."""

    def read_latest(self, newer_than: tuple[int, int] | None = None) -> Weights | None:
        """The newest version; None if there is none newer than (epoch, version), or while it is being written."""
        ...


class ParameterStore(ParameterPublisher, ParameterSource, Protocol):
    """Both sides in one, for weights that are found by a path."""


def sha256_of(arrays: Arrays, more: bytes = b"") -> str:
    """Hash of arrays, names included, and of further bytes."""
    digest = hashlib.sha256(more)
    for name, array in sorted(arrays.items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def check_finite(arrays: Arrays, where: str) -> None:
    """A WeightsError that starts with ``where`` if a value is not finite."""
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = int(array.size - np.isfinite(array).sum())
            raise WeightsError(f"{where}: {name} has {bad} of {array.size} values that are not finite")


def _checksum(arrays: Arrays, meta_text: str) -> int:
    """CRC-32 of everything that a reader uses."""
    value = zlib.crc32(meta_text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        value = zlib.crc32(f"{name} {array.dtype.name} {array.shape}".encode(), value)
        value = zlib.crc32(np.asarray(array, order="C").reshape(-1).view(np.uint8).data, value)
    return value


def encode(arrays: Arrays, meta: dict[str, Any], epoch: int, version: int) -> bytes:
    """The bytes of a weights file: safetensors with meta, epoch, version and format as JSON in its metadata."""
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    text = json.dumps({"meta": meta, "epoch": epoch, "version": version, "format": FORMAT}, sort_keys=True)
    # One entry, because safetensors writes several in any order, and equal weights must give equal bytes.
    return safetensors_numpy.save(arrays, {"spreeze": f"{_checksum(arrays, text)} {text}"})


def decode(data: bytes, path: Path) -> Weights:
    """Reads back ``encode``; a WeightsError, or one of ``DAMAGE`` if the bytes were not made by it."""
    arrays = safetensors_numpy.load(data)
    header_bytes = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + header_bytes])["__metadata__"]["spreeze"]
    checksum, _, text = entry.partition(" ")
    if int(checksum) != _checksum(arrays, text):
        raise WeightsError(f"{path}: checksum differs; the file is damaged")
    check_finite(arrays, str(path))
    header = json.loads(text)
    refuse_newer(header.get("format"), FORMAT, path, WeightsError)
    return Weights(arrays, dict(header["meta"]), int(header["epoch"]), int(header["version"]), path)


DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, SafetensorError)
"""Errors of reading arbitrary bytes as a weights file or pointer (UnicodeError and JSON's are ValueErrors)."""


def read_weights(path: Path) -> Weights:
    """Reads one weights file; a WeightsError if it is missing, damaged, or holds values that are not finite."""
    try:
        return decode(files.read_bytes(path, _MAX_BYTES), path)
    except DAMAGE as error:
        raise WeightsError(f"weights {path} cannot be read: {type(error).__name__}: {error}") from None


class WeightsStore:
    """A directory with one publisher and any number of readers."""

    def __init__(
        self, directory: Path, *, keep: int = 3, min_age_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The ``keep`` newest versions stay, and all that are younger than ``min_age_s``."""
        self.directory = Path(directory)
        self.keep, self.min_age_s, self._clock = max(1, keep), min_age_s, clock
        self._last: tuple[int, int] | None = None
        self._present: deque[tuple[float, str]] | None = None

    def publish(self, arrays: Arrays, meta: dict[str, Any], epoch: int, version: int) -> str:
        """Makes a new version visible, file first, pointer second; returns the file's path."""
        check_finite(arrays, f"version {epoch}-{version} is not published")
        self.directory.mkdir(parents=True, exist_ok=True)
        last = self._last
        if last is None:
            with contextlib.suppress(*DAMAGE):
                _, last = self._pointer()
        if last is not None and (epoch, version) <= last:
            raise _not_newer(epoch, version, last)
        data = encode(arrays, meta, epoch, version)
        name = f"w-{epoch:06d}-{version:012d}.safetensors"
        path = os.path.join(self.directory, name)  # see files.replace_bytes
        files.replace_bytes(path, data)
        pointer = {"epoch": epoch, "version": version, "file": name, "sha256": hashlib.sha256(data).hexdigest()}
        files.write_json(self.directory / LATEST, pointer)
        self._last = (epoch, version)
        self._prune(path)
        return path

    def _pointer(self) -> tuple[dict[str, Any], tuple[int, int]]:
        """The pointer and its (epoch, version); one of ``DAMAGE`` if it cannot be read."""
        pointer = json.loads(files.read_bytes(self.directory / LATEST, _MAX_POINTER_BYTES))
        return pointer, (int(pointer["epoch"]), int(pointer["version"]))

    def versions(self) -> list[tuple[tuple[int, int], Path]]:
        """Returns all version files as ((epoch, version), path), oldest first."""
        matches = [match for entry in os.listdir(self.directory) if (match := _NAME.match(entry))]
        return sorted(((int(match[1]), int(match[2])), self.directory / match[0]) for match in matches)

    def _prune(self, published: str) -> None:
        """Deletes old versions; the directory is listed once, since it may hold hundreds of young files."""
        now = self._clock()
        if self._present is None:
            self._present = deque((now, str(path)) for _, path in self.versions() if str(path) != published)
            for left in self.directory.glob(f"{files.TEMP_PREFIX}*"):  # by a publisher that was killed
                with contextlib.suppress(OSError):
                    left.unlink()
        self._present.append((now, published))
        while len(self._present) > self.keep and now - self._present[0][0] > self.min_age_s:
            _, path = self._present.popleft()
            with contextlib.suppress(OSError):
                os.unlink(path)

    def read_latest(self, newer_than: tuple[int, int] | None = None) -> Weights | None:
        """The newest version; None if there is none newer, or if it is inconsistent."""
        with contextlib.suppress(*DAMAGE, WeightsError):
            pointer, order = self._pointer()
            if newer_than is None or order > newer_than:
                return self._checked(pointer, order)
        return None

    def _checked(self, pointer: dict[str, Any], order: tuple[int, int]) -> Weights:
        """The version that a pointer names, if everything agrees; otherwise raises one of many errors."""
        match = _NAME.match(pointer["file"])
        if match is None or (int(match[1]), int(match[2])) != order:
            raise WeightsError(f"pointer to {pointer['file']!r} does not match version {order[0]}-{order[1]}")
        path = self.directory / match[0]
        data = files.read_bytes(path, _MAX_BYTES)
        if hashlib.sha256(data).hexdigest() != pointer["sha256"]:
            raise WeightsError(f"{path} differs from what was published")
        return decode(data, path)


def _not_newer(epoch: int, version: int, newest: tuple[int, int]) -> WeightsError:
    return WeightsError(f"version {epoch}-{version} was not published: {newest[0]}-{newest[1]} is already there")


class _SlotHeader(NamedTuple):
    """Starts a slot; -1 stands for epoch and version while it is empty or being written."""

    epoch: int
    version: int
    description_bytes: int  # length of the JSON that follows


_EMPTY = _SlotHeader(-1, -1, 0)
_HEADER = struct.Struct("<3q")


@dataclass(frozen=True, kw_only=True)
class ParametersHandle(Handle):
    """Carries a ``VersionedParameters``: the descriptor of each slot."""

    attached_owns = False

    def attach(self) -> VersionedParameters:
        return VersionedParameters(self.fds)


class VersionedParameters:
    """Arrays and metadata of the newest versions in N slots; one writer, any number of readers.

    The writer stores a slot's header last, and a reader checks it again after reading. An unfinished slot of a killed
    writer counts as empty. There are no checksums: no other process has these files.
    """

    def __init__(self, fds: tuple[int, ...]) -> None:
        self.fds = fds

    @classmethod
    def create(cls, slots: int = 2) -> VersionedParameters:
        return cls(tuple(files.anonymous_file("spreeze-parameters") for _ in range(slots)))

    @property
    def handle(self) -> ParametersHandle:
        return ParametersHandle(fds=self.fds)

    def publish(self, arrays: Arrays, meta: dict[str, Any], epoch: int, version: int) -> None:
        """Stores version v in slot v mod N for ``read``; leaves it if it is there, since a reader may be using it."""
        self._write(self.fds[version % len(self.fds)], arrays, meta, epoch, version)

    def publish_over_oldest(self, arrays: Arrays, meta: dict[str, Any], epoch: int, version: int) -> None:
        """Publishes for ``read_latest``: the newest ones stay, whatever their versions are."""
        self._write(min(self.fds, key=_slot_header), arrays, meta, epoch, version)

    @property
    def newest(self) -> tuple[int, int] | None:
        """Epoch and version; None before the first."""
        newest = max(map(_slot_header, self.fds))
        return None if newest == _EMPTY else newest[:2]

    def _write(self, fd: int, arrays: Arrays, meta: dict[str, Any], epoch: int, version: int) -> None:
        order, headers = (epoch, version), [_slot_header(slot)[:2] for slot in self.fds]
        if order in headers:
            return
        if max(headers) > order:
            raise _not_newer(epoch, version, max(headers))
        arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        layout = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
        description = json.dumps({"meta": meta, "arrays": layout}).encode()
        parts: list[Any] = [description, *(array.reshape(-1).view(np.uint8).data for array in arrays.values())]
        os.pwrite(fd, _HEADER.pack(*_EMPTY), 0)
        in_order()
        offset = _HEADER.size
        for data in parts:
            _pwrite(fd, data, offset)
            offset += len(data)
        in_order()
        os.pwrite(fd, _HEADER.pack(epoch, version, len(description)), 0)

    def read(self, version: int) -> Weights | None:
        """A version; None if it is not there (any more) or is being written."""
        fd = self.fds[version % len(self.fds)]
        header = _slot_header(fd)
        return self._read(fd, header) if header.version == version else None

    def read_latest(self, newer_than: tuple[int, int] | None = None) -> Weights | None:
        """The newest version; None if there is none, or none that is newer than (epoch, version)."""
        newest, fd = max((_slot_header(fd), fd) for fd in self.fds)
        if newest == _EMPTY or (newer_than is not None and newest[:2] <= newer_than):
            return None
        return self._read(fd, newest)

    def _read(self, fd: int, header: _SlotHeader) -> Weights | None:
        """The content of a slot with that header; None if it was overwritten in the meantime."""
        in_order()
        text = _pread(fd, header.description_bytes, _HEADER.size)
        in_order()
        if _slot_header(fd) != header:
            return None
        description = json.loads(text)
        arrays, offset = {}, _HEADER.size + header.description_bytes
        for name, dtype, shape in description["arrays"]:
            data = _pread(fd, math.prod(shape) * np.dtype(dtype).itemsize, offset)
            arrays[name] = np.frombuffer(data, dtype).reshape(shape)
            offset += len(data)
        in_order()
        if _slot_header(fd) != header:
            return None
        return Weights(arrays, description["meta"], header.epoch, header.version)

    def close(self) -> None:
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def _slot_header(fd: int) -> _SlotHeader:
    data = os.pread(fd, _HEADER.size, 0)
    return _SlotHeader(*_HEADER.unpack(data)) if len(data) == _HEADER.size else _EMPTY


def _pwrite(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _pread(fd: int, size_bytes: int, offset: int) -> bytearray:
    """Reads that many bytes; zeros after the end of the file."""
    data = bytearray(size_bytes)
    view = memoryview(data)
    while view and (count := os.preadv(fd, [view], offset)):
        view, offset = view[count:], offset + count
    return data


class LocalParameters(VersionedParameters):
    """The newest parameters, from a learner to a sampler of the same process: the arrays themselves."""

    def __init__(self) -> None:
        super().__init__(())
        self._newest: Weights | None = None

    def publish(self, arrays: Arrays, meta: dict[str, Any], epoch: int, version: int) -> None:
        self._newest = Weights(arrays, meta, epoch, version)

    def read_latest(self, newer_than: tuple[int, int] | None = None) -> Weights | None:
        newest = self._newest
        return None if newest is None or newest.order == newer_than else newest


@dataclass(frozen=True, kw_only=True)
class LocalHandle(ParametersHandle):
    """Carries ``LocalParameters`` to a worker of the same process."""

    channel: LocalParameters

    def attach(self) -> LocalParameters:
        return self.channel
