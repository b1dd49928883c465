"""Reads the file of an episode's pictures, as the page's player does."""

import struct
from collections.abc import Iterator

_FRAME = struct.Struct("<II")


def frame_records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(env steps, JPEG) of the whole records in ``data``."""
    start = 0
    while start + _FRAME.size <= len(data):
        step, length = _FRAME.unpack_from(data, start)
        start += _FRAME.size
        if start + length > len(data):
            return
        yield step, data[start : start + length]
        start += length
