"""Named arrays laid out one after the other in one block of shared memory, and the order of stores between them."""

from __future__ import annotations

import math
import os
import platform
import sys
from typing import NamedTuple

import numpy as np

from spreeze.errors import TransportError
from spreeze.transport.memory import Block, allocate, attach

_LINE_BYTES = 64
STRONGLY_ORDERED = platform.machine().lower() in ("x86_64", "amd64")
"""True where stores and loads of one process are seen in program order by the others."""


class Field(NamedTuple):
    """One array of a block."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Its bytes, rounded up to whole cache lines."""
        raw = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return -(-raw // _LINE_BYTES) * _LINE_BYTES


class Fields:
    """A block as named arrays, zero at first; every process that attaches sees the same."""

    def __init__(self, block: Block, fields: tuple[Field, ...]) -> None:
        self.block = block
        self._arrays: dict[str, np.ndarray] = {}
        offset = _LINE_BYTES
        for field in fields:
            raw = np.frombuffer(block.view, np.uint8, math.prod(field.shape) * np.dtype(field.dtype).itemsize, offset)
            self._arrays[field.name] = raw.view(field.dtype).reshape(field.shape)
            offset += field.size_bytes

    @staticmethod
    def size_bytes(fields: tuple[Field, ...]) -> int:
        """Bytes of such a block."""
        return _LINE_BYTES + sum(field.size_bytes for field in fields)

    @classmethod
    def create(cls, name: str, fields: tuple[Field, ...]) -> Fields:
        """Allocates the block.

        Raises:
            ResourceError: no room in shared memory.
        """
        made = cls(allocate(name, cls.size_bytes(fields)), fields)
        np.frombuffer(made.block.view, np.int64, 1)[0] = cls.size_bytes(fields)
        return made

    @classmethod
    def attach(cls, fd: int, fields: tuple[Field, ...]) -> Fields:
        """Attaches to an inherited descriptor.

        Raises:
            TransportError: it is no block of these fields.
        """
        block = attach(fd, cls.size_bytes(fields))
        found, wanted = int(np.frombuffer(block.view, np.int64, 1)[0]), cls.size_bytes(fields)
        if found != wanted:
            block.close()
            raise TransportError(f"descriptor {fd} holds {found} bytes of arrays, {wanted} are expected")
        return cls(block, fields)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def in_order(self) -> None:
        """What was stored or loaded before is so for everybody who sees what comes after.

        Free on x86-64. Elsewhere writer and reader pass through one lock of the operating system, which the
        kernel releases when its holder dies: who has seen the counter takes it after the writer gave it back.
        """
        if STRONGLY_ORDERED:
            return
        if sys.platform != "win32":
            import fcntl

            fcntl.lockf(self.block.fd, fcntl.LOCK_EX, 1, 0, os.SEEK_SET)
            fcntl.lockf(self.block.fd, fcntl.LOCK_UN, 1, 0, os.SEEK_SET)

    def close(self) -> None:
        """Drops the arrays and the mapping."""
        self._arrays = {}
        self.block.close()
