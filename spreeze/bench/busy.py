"""Another program on this machine: a process that keeps one core busy, for benches."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while os.getppid() == int(sys.argv[2]):
    sum(range(10000))
"""


@contextlib.contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Keeps that core busy, from a session of its own as other programs are; ends with this process at the latest."""
    process = subprocess.Popen([sys.executable, "-c", _SPIN, str(core), str(os.getpid())], stdin=subprocess.DEVNULL,
                               start_new_session=True, env={"PATH": os.defpath})
    try:
        yield
    finally:
        process.kill()
        process.wait()
