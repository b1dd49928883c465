"""Files that are either complete or absent: written under a temporary name, then renamed; JSON and nameless files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spreeze.process_identity import pid_exists

TEMP_PREFIX = ".tmp-"  # readers ignore files with this prefix
_CHUNK_BYTES = 1 << 20
_MAX_JSON_BYTES, _TAIL_BYTES = 1_000_000, 64_000
PIECE_BYTES = 1 << 25
"""Large files are written and synced in pieces of this size: one sync of several GB would make the writer look dead."""


def temp_name() -> str:
    return f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"


def write_bytes(
    path: Path | str,
    data: bytes,
    *,
    durable: bool = False,
    mode: int = 0o666,
    on_written: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes a new file in place; with ``durable`` its bytes are on the disk when this returns.

    ``mode``: its permissions, less the umask. ``on_written`` gets the number of bytes of each piece (for a heartbeat).
    An OSError if the name is taken.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        left = memoryview(data)
        while left:
            count = os.write(fd, left[:PIECE_BYTES])
            left = left[count:]
            if durable and left:
                os.fsync(fd)
            on_written(count)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def replace_bytes(path: Path | str, data: bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Replaces a file's content atomically: a reader sees all of the old content or all of the new.

    After an OSError the old content is untouched. The temporary name never becomes a ``Path``, whose parts Python 3.11
    keeps for the life of the process.
    """
    folder = os.path.dirname(path)
    temp = os.path.join(folder, temp_name())
    try:
        write_bytes(temp, data, durable=durable, mode=mode)
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise
    if durable:
        sync_directory(Path(folder or os.curdir))


def anonymous_file(name: str) -> int:
    """Descriptor of an empty file that no other process can find, on Linux in memory; an OSError if none is left."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fd, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)
    return fd


def remove_unfinished(folder: Path) -> None:
    """Removes the temporary files of writers that have ended, as by a kill; no directories, which belong to others."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            is_file = entry.name.startswith(TEMP_PREFIX) and not entry.is_dir(follow_symlinks=False)
            if is_file and not _is_being_written(entry.name):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def _is_being_written(temporary: str) -> bool:
    """True if the process that a temporary name belongs to lives."""
    pid = temporary.removeprefix(TEMP_PREFIX).partition("-")[0]
    return pid.isdecimal() and pid_exists(int(pid))


def json_bytes(value: Any) -> bytes:
    """Encodes a JSON document; Python floats survive exactly, NaN and infinity included."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode("utf-8")


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Reads a whole file; does not map it, because it may be truncated meanwhile. A ValueError above ``max_bytes``.

    An OSError for what is no regular file: a pipe, which a run from elsewhere may hold, would block its reader.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > max_bytes:
            raise ValueError(f"{path.name} has {status.st_size} bytes; at most {max_bytes}")
        return file.read()


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_of_file(path: Path, on_read: Callable[[int], None] = lambda count: None) -> str:
    """SHA-256 of a file's bytes; ``on_read`` gets the number of bytes of each piece (for a heartbeat)."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            on_read(len(chunk))
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file; an empty dictionary if it is missing, damaged or too large.

    Numbers that are not finite or do not fit in 64 bits become None, because they could fail wherever they are used.
    """
    try:
        text = read_bytes(path, _MAX_JSON_BYTES)
        data = json.loads(text, parse_constant=lambda name: None, parse_float=_finite, parse_int=_integer)
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _integer(text: str) -> int | None:
    return int(text) if len(text) < 20 and -(2**63) <= int(text) < 2**63 else None


def write_json(path: Path, data: Any, *, durable: bool = False) -> None:
    """Replaces a JSON file atomically, errors as ``replace_bytes``; ``durable``: it is on the disk at the end."""
    replace_bytes(path, (json.dumps(data, indent=1) + "\n").encode(), durable=durable)


def tail_text(path: Path) -> str:
    """The end of a text file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def existing_parent(path: Path) -> Path:
    """The nearest folder that exists, which may be ``path`` itself."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
