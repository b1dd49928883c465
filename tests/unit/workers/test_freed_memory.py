"""Freed memory goes back to the system."""

import sys

import psutil
import pytest

from spreeze.workers.torch_devices import malloc_trim


def _private_bytes():
    held = psutil.Process().memory_info()
    return held.rss - getattr(held, "shared", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_what_was_freed_between_blocks_that_stay_is_given_back():
    blocks = [b"\1" * 100_000 for _ in range(400)]
    kept = blocks[::20]
    del blocks
    before = _private_bytes()
    malloc_trim()
    assert before - _private_bytes() > 20_000_000
    assert all(block[0] == 1 for block in kept)
