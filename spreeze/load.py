"""Who wants the cores: this run's processes, and all others. Linux, read from ``/proc``.

The kernel keeps for every thread how long it ran and how long it was ready but had to wait for a
core (``schedstat``). Both together are what a process wants, however little it is given.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spreeze.hardware import CoreFacts, core_facts

_TICKS_PER_S = 100.0
"""Unit of ``/proc/stat`` (USER_HZ), the same on every architecture that this runs on."""
_BUSY_FIELDS = (0, 1, 2, 5, 6)
"""user, nice, system, irq, softirq: not idle, iowait or what a hypervisor took."""
_WAITING_CORES = 0.25
"""Waiting of all our threads together above which a quota that is not used up must be used by somebody else."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Use of the cores since the sample before; everything in cores (seconds of processor time a second)."""

    usable_cores: float
    foreign_cores: float
    """Of the usable cores, what programs keep busy that do not belong to this run."""
    ran: dict[str, float]
    """Per worker, what it was given."""
    wanted: dict[str, float]
    """Per worker, what it was given and what it waited for; its own children and threads included."""


class _Sample(NamedTuple):
    t_s: float
    busy_s: float
    threads: dict[str, dict[int, tuple[float, float]]]
    """worker -> thread id -> seconds (ran, waited)."""


class LoadReader:
    """Takes samples; each is compared with the one before."""

    def __init__(
        self, *, cores: CoreFacts | None = None, root: str | Path = "/", clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads nothing yet.

        Args:
            cores: cores that may be used; of this process if None.
            root: where ``proc`` lies, for tests.
            clock: monotonic seconds.
        """
        self._cores = core_facts(root) if cores is None else cores
        self._proc = Path(root) / "proc"
        self._clock = clock
        self._before: _Sample | None = None

    def sample(self, pids: Mapping[str, int]) -> Load | None:
        """Load since the last call; None at the first, and where the kernel does not tell.

        Args:
            pids: worker name -> process id. A worker's descendants count as the worker, unless they have
                a name of their own.
        """
        before = self._before
        try:
            self._before = now = _Sample(self._clock(), self._busy_s(), self._threads(pids))
        except (OSError, ValueError, IndexError):
            self._before = None
            return None
        if before is None or now.t_s <= before.t_s:
            return None
        return self._load(before, now)

    def _load(self, before: _Sample, now: _Sample) -> Load:
        elapsed_s = now.t_s - before.t_s
        ran, wanted = {}, {}
        for name, threads in now.threads.items():
            old = before.threads.get(name, {})
            gained = [(run - old.get(tid, (0.0, 0.0))[0], wait - old.get(tid, (0.0, 0.0))[1])
                      for tid, (run, wait) in threads.items()]
            ran[name] = max(0.0, sum(run for run, _ in gained)) / elapsed_s
            wanted[name] = ran[name] + max(0.0, sum(wait for _, wait in gained)) / elapsed_s
        ours, usable = sum(ran.values()), self._cores.usable
        beyond_quota = len(self._cores.ids) - usable
        foreign = (now.busy_s - before.busy_s) / elapsed_s - ours - beyond_quota
        if beyond_quota > 0 and sum(wanted.values()) - ours > _WAITING_CORES:
            foreign = max(foreign, usable - ours)  # somebody else lives on the same quota
        return Load(usable_cores=usable, foreign_cores=min(max(0.0, foreign), usable), ran=ran, wanted=wanted)

    def _busy_s(self) -> float:
        wanted = {f"cpu{core}" for core in self._cores.ids}
        ticks = 0
        for line in (self._proc / "stat").read_text().splitlines():
            name, _, rest = line.partition(" ")
            if name in wanted:
                fields = rest.split()
                ticks += sum(int(fields[index]) for index in _BUSY_FIELDS)
        return ticks / _TICKS_PER_S

    def _threads(self, pids: Mapping[str, int]) -> dict[str, dict[int, tuple[float, float]]]:
        named = set(pids.values())
        return {name: self._tree(pid, named) for name, pid in pids.items()}

    def _tree(self, pid: int, named: set[int]) -> dict[int, tuple[float, float]]:
        """Threads of a process and its nameless descendants; what ends meanwhile is left out."""
        found: dict[int, tuple[float, float]] = {}
        waiting = [pid]
        while waiting:
            tasks = self._proc / str(waiting.pop()) / "task"
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for tid in os.listdir(tasks):
                    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                        ran_ns, waited_ns, _ = (tasks / tid / "schedstat").read_text().split()
                        found[int(tid)] = (int(ran_ns) / 1e9, int(waited_ns) / 1e9)
                        children = (tasks / tid / "children").read_text().split()
                        waiting += [child for child in map(int, children) if child not in named]
        return found
