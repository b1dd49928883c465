"""Which processes belong to Spreeze: this user's other runs, tuners and dashboard page. Linux, read from ``/proc``.

They are told by the name that each takes as soon as its interpreter is up (see ``take_name``). The kernel
hands it out in ``/proc/PID/stat`` without waiting for the process. A command line or environment lies in
the process's own memory: reading that waits for a lock, which a process that hangs in a driver or on a
dead disk may never give back, and then the supervisor would hang as well.

What is ours, if it runs as this user:

* a worker (``sampler-0``, ``learner``, ...) that leads a process group of its own, as ours all do; what has
  a name of our own (``spreeze-...``); and all that these started;
* the process that started one of them, itself only: a supervisor or a tuner, which may be a notebook that
  starts other things too. The page is started by a person's shell, which stays a stranger.

A process is a stranger until it has its name: while a new run's supervisor or Streamlit is imported, about a
second.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from spreeze.metrics.table import SLOTS

_PREFIX = "spreeze-"
PAGE, EARLY, PROBE = _PREFIX + "page", _PREFIX + "early", _PREFIX + "probe"
"""Names of processes that are no workers: the page's server, a learner that waits for its job, what measures once."""
_LONGEST_NAME_BYTES = 15
_MOST_LOOKS = 8
"""A stranger is looked at again after 1, 2, 4, then every 8 looks: it may have been too young to have its name."""
_PARENT, _GROUP = 1, 2
"""Of ``/proc/PID/stat`` after the name."""


def take_name(name: str) -> None:
    """What ``top`` shows instead of python, and what siblings know this process by (Linux; at most 15 letters)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(name.encode("ascii")[:_LONGEST_NAME_BYTES])


def is_worker(process_name: str, role: str | None = None) -> bool:
    """Whether a process of this name (Linux: as ``top`` shows it) is a worker with its job, of this role if any."""
    return process_name.partition("-")[0] in (SLOTS if role is None else (role,))


class Found(NamedTuple):
    """Process ids of siblings."""

    roots: set[int]
    """What they started is theirs as well."""
    parents: set[int]
    """Who started a root; themselves only."""


class Siblings:
    """Looks for siblings, once a second; costs one system call for each process that is new or due again."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        """Args: ``proc`` is where processes are listed."""
        self._proc, self._user = proc, os.geteuid()
        self._look = 0
        self._strangers: dict[int, tuple[int, int]] = {}  # process id -> (look at which it is due, looks until then)

    def find(self, ours: Collection[int]) -> Found:
        """Siblings of this moment; any of them may be gone by the next.

        Args:
            ours: processes of the asking run itself, which are no siblings.

        Raises:
            OSError: the system does not list processes.
        """
        self._look += 1
        before, self._strangers = self._strangers, {}
        found = Found(set(), set())
        for pid in [int(name) for name in os.listdir(self._proc) if name.isdecimal()]:
            if pid in ours:
                continue
            due, pause = before.get(pid, (0, 0))
            if due > self._look:
                self._strangers[pid] = due, pause
            elif not self._enter(pid, found):
                pause = min(max(1, 2 * pause), _MOST_LOOKS)
                self._strangers[pid] = self._look + pause, pause
        found.parents.difference_update(ours, found.roots)
        return found

    def _enter(self, pid: int, found: Found) -> bool:
        """Puts a process down if it is a sibling; returns whether it is. One that is gone is none."""
        try:
            if (self._proc / str(pid)).stat().st_uid != self._user:
                return False
            text = (self._proc / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
            name, _, rest = text.partition("(")[2].rpartition(") ")  # a name may hold anything, brackets too
            fields = rest.split()
            parent, group = int(fields[_PARENT]), int(fields[_GROUP])
        except (OSError, ValueError, IndexError):
            return False
        if not (name.startswith(_PREFIX) or (is_worker(name) and group == pid)):
            return False
        found.roots.add(pid)
        if name != PAGE and parent > 0:
            found.parents.add(parent)
        return True


def main(argv: list[str]) -> None:
    """``NAME MODULE ARGUMENT...``: as ``python -m MODULE ARGUMENT...``, with its name before its first import."""
    take_name(argv[0])
    sys.argv[1:] = argv[2:]
    runpy.run_module(argv[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
