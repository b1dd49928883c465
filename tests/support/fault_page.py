"""A page of shared numbers by which a test throws faults at the processes of a run, whenever it wants to.

``SPREEZE_FAULT_PAGE`` names the file. What needs no process of a certain kind is done by ``injected/sitecustomize.py``,
which Python imports before anything else where that folder is on ``PYTHONPATH``; the rest by ``fault_envs.StruckEnv``.
"""

import mmap
import os
from pathlib import Path

CLOCK_S, SLOW_S, NAN_PID, HANG_PID, LEAK_PID = range(5)
"""Seconds by which ``time.time`` is wrong; seconds that each sync and rename of a file takes longer; the process whose
environments give NaN, hang, or take ``LEAK_BYTES`` of memory."""
LEAK_BYTES = 400_000_000
VARIABLE = "SPREEZE_FAULT_PAGE"
_BYTES = 8 * 5


def open_page(path=None):
    """The numbers, as a writable memoryview of float64; all are 0, and nobody else sees them, without a file."""
    path = path or os.environ.get(VARIABLE)
    if not path:
        return memoryview(bytearray(_BYTES)).cast("d")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, _BYTES)
        return memoryview(mmap.mmap(fd, _BYTES)).cast("d")
    finally:
        os.close(fd)


def synced_files(path):
    """(device, inode) -> size and time [ns] of each file when it was last synced by a process of the run."""
    journal = Path(f"{path}.synced")
    lines = journal.read_text().splitlines() if journal.exists() else []
    entries = [tuple(map(int, line.split())) for line in lines]
    whole = (entry for entry in entries if len(entry) == 4)  # a process at its longest file writes part of a line
    return {(device, inode): (size, changed) for device, inode, size, changed in whole}
