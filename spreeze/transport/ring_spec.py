"""Shape of the replay ring and the place of everything in its memory.

In int64 words: header | sampled | baseline_inserted | (free) | one line per shard | stamps
``[S, blocks, 2]``; then, from a page of their own, float32 rows ``[S, stride, W]``; then, for images, from
a page of their own, uint8 frames ``[S, stride, F]``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from spreeze.errors import ConfigError
from spreeze.transport.memory import PAGE_BYTES
from spreeze.types import RowLayout

LINE_WORDS = 16
"""128 bytes: two cache lines, since processors fetch them in pairs."""
FIRST_SHARD_WORD = 4 * LINE_WORDS
"""Where the line of shard 0 starts."""
_MAGIC = 0x535052494E470A01
_VERSION = 1
_STAMP_ROWS = 256
_ROW_ALIGNMENT = 16
"""16 rows of float32 are a multiple of 64 bytes whatever the width, so every shard starts on a line."""


@dataclass(frozen=True)
class RingSpec:
    """Shape of a ring: S shards of C rows."""

    layout: RowLayout
    num_shards: int
    rows_per_shard: int

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.rows_per_shard < 1:
            raise ConfigError(f"replay of {self.num_shards} shards of {self.rows_per_shard} rows: at least 1 of each")

    @property
    def capacity(self) -> int:
        """Rows that all shards hold together."""
        return self.num_shards * self.rows_per_shard

    @property
    def block_rows(self) -> int:
        """Rows that share one stamp: 256, fewer in small rings."""
        return min(_STAMP_ROWS, max(1, self.rows_per_shard // 16))

    @property
    def blocks_per_shard(self) -> int:
        """Stamps of a shard."""
        return -(-self.rows_per_shard // self.block_rows)

    @property
    def stride_rows(self) -> int:
        """Rows from the start of one shard to the start of the next."""
        return -(-self.rows_per_shard // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    @property
    def stamps_word(self) -> int:
        """Index of the first word of the stamps."""
        return FIRST_SHARD_WORD + self.num_shards * LINE_WORDS

    @property
    def rows_offset_bytes(self) -> int:
        """Where the rows start."""
        words = self.stamps_word + 2 * self.num_shards * self.blocks_per_shard
        return -(-8 * words // PAGE_BYTES) * PAGE_BYTES

    @property
    def size_bytes(self) -> int:
        """Memory of the whole ring."""
        return self.frames_offset_bytes + self.num_shards * self.stride_rows * self.layout.frame_bytes

    @property
    def frames_offset_bytes(self) -> int:
        """Where the frames start, if there are any."""
        end = self.rows_offset_bytes + 4 * self.num_shards * self.stride_rows * self.layout.width
        return -(-end // PAGE_BYTES) * PAGE_BYTES if self.layout.frame_bytes else end

    @property
    def schema_hash(self) -> int:
        """63 bits that differ when the meaning of a row differs."""
        text = f"{self.layout!r} float32 blocks of {self.block_rows}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def header(self) -> list[int]:
        """First words of the memory."""
        return [_MAGIC, _VERSION, self.schema_hash, self.rows_per_shard, self.num_shards, self.layout.width]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, for a child's command line."""
        layout = self.layout
        return {
            "obs_dim": layout.obs_dim,
            "action_dim": layout.action_dim,
            "n_step": layout.n_step,
            "checksum": layout.checksum,
            "frame_bytes": layout.frame_bytes,
            "stack": layout.stack,
            "num_shards": self.num_shards,
            "rows_per_shard": self.rows_per_shard,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RingSpec:
        """Reads back ``to_json``."""
        names = ("obs_dim", "action_dim", "n_step", "checksum", "frame_bytes", "stack")
        layout = RowLayout(**{name: value[name] for name in names})
        return cls(layout, value["num_shards"], value["rows_per_shard"])
