"""Known memory for Bullet's MJCF reader, which leaves part of a link as it found it.

``BulletMJCFImporter::createBody`` of pybullet 3.2.7 makes its ``UrdfLink`` with ``new`` and never sets
the link's transform (valgrind's memcheck names it). What the memory held before places the link
until the first reset, orders the tree of the broad phase and with it the contacts, so that now and
then the same seed and actions take another path.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from typing import Any

_LINK_BYTES = 768
"""Size of Bullet's ``UrdfLink`` in the wheels for Linux."""
_CHUNK_BYTES = _LINK_BYTES + 16
"""What glibc's heap keeps for it."""
_LINKS = 256
"""More than any of the models has."""
_APART_BYTES = 24


@contextlib.contextmanager
def zeroed_links() -> Iterator[None]:
    """Within it a new link of Bullet gets zeroed memory, as the first one of a fresh process does.

    The heap gives out free chunks of the exact size before it cuts larger ones: all of them are taken,
    zeroed and given back. Does nothing where the C library is not glibc. Also decorates a function that loads.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_info"):
        yield
        return
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    links, apart = [], []
    for _ in range(_free_chunks(libc) + _LINKS):
        links.append(libc.malloc(_LINK_BYTES))
        apart.append(libc.malloc(_APART_BYTES))  # kept meanwhile: free neighbours would become one chunk
    for link in filter(None, links):
        ctypes.memset(link, 0, _LINK_BYTES)
        libc.free(link)
    try:
        yield
    finally:
        for chunk in apart:
            libc.free(chunk)


def _free_chunks(libc: Any) -> int:
    """How many free chunks of the heap may have a link's size, by glibc's own report."""
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    report = ctypes.string_at(text, size.value).decode()
    libc.free(text)
    bins = re.findall(r'<(?:size|unsorted) from="(\d+)" to="(\d+)" total="\d+" count="(\d+)"/>', report)
    least, most = _CHUNK_BYTES, _CHUNK_BYTES + 1  # a size is told with the bit of a neighbour in use
    return sum(int(count) for low, high, count in bins if int(low) <= most and int(high) >= least)
