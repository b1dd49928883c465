"""Who wants the cores: this run's processes, its siblings, and all others. Linux, read from ``/proc``.

The kernel keeps for every thread how long it ran and how long it was ready but had to wait for a
core (``schedstat``). Both together are what a process wants, however little it is given.

Siblings are this user's other runs, tuners and the dashboard page (``spreeze.machine.process_names``). They are not
foreign: two runs that took each other for strangers would both rest, for as long as both are there.
What a process did in the fraction of a second before it ended is nobody's any more and counts as
foreign, once. Of a sibling that may use other cores too, the share counts that our cores are of its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spreeze.machine.hardware import CoreFacts, core_facts
from spreeze.machine.process_names import Siblings

_TICKS_PER_S = 100.0
"""Unit of ``/proc/stat`` (USER_HZ), the same on every architecture that this runs on."""
_BUSY_FIELDS = (0, 1, 2, 5, 6)
"""user, nice, system, irq, softirq: not idle, iowait or what a hypervisor took."""
_WAITING_CORES = 0.25
"""Waiting of all our threads together above which a quota that is not used up must be used by somebody else."""


@dataclass(frozen=True, kw_only=True)
class CpuContention:
    """Use of the cores since the sample before; everything in cores (seconds of processor time a second)."""

    usable_cores: float
    foreign_cores: float
    """Of the usable cores, what programs keep busy that belong neither to this run nor to a sibling."""
    sibling_cores: float = 0.0
    """What this user's other runs, tuners and the page keep busy."""
    ran: dict[str, float]
    """Per worker, what it was given."""
    wanted: dict[str, float]
    """Per worker, what it was given and what it waited for; its own children and threads included."""


_Threads = dict[int, tuple[float, float]]
"""thread id -> seconds (ran, waited)."""


class _Sample(NamedTuple):
    t_s: float
    busy_s: float
    threads: dict[str, _Threads]
    """By worker."""
    siblings: _Threads


class ContentionReader:
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
        self._siblings = Siblings(self._proc)
        self._before: _Sample | None = None

    def sample(self, pids: Mapping[str, int]) -> CpuContention | None:
        """Load since the last call; None at the first, and where the kernel does not tell.

        Args:
            pids: worker name -> process id. A worker's descendants count as the worker, unless they have
                a name of their own.
        """
        before = self._before
        try:
            self._before = now = self._now(pids)
        except (OSError, ValueError, IndexError):
            self._before = None
            return None
        if before is None or now.t_s <= before.t_s:
            return None
        return self._load(before, now)

    def _load(self, before: _Sample, now: _Sample) -> CpuContention:
        elapsed_s = now.t_s - before.t_s
        ran, wanted = {}, {}
        for name, threads in now.threads.items():
            ran_s, waited_s = _gained(before.threads.get(name, {}), threads)
            ran[name] = ran_s / elapsed_s
            wanted[name] = ran[name] + waited_s / elapsed_s
        ours, usable = sum(ran.values()), self._cores.usable
        busy = (now.busy_s - before.busy_s) / elapsed_s
        # What a sibling did before it had its name is in its sum as well: never more than there was.
        siblings = min(_gained(before.siblings, now.siblings)[0] / elapsed_s, max(0.0, busy - ours))
        beyond_quota = len(self._cores.ids) - usable
        foreign = busy - ours - siblings - beyond_quota
        if beyond_quota > 0 and sum(wanted.values()) - ours > _WAITING_CORES:
            foreign = max(foreign, usable - ours - siblings)  # somebody else lives on the same quota
        return CpuContention(
            usable_cores=usable,
            foreign_cores=min(max(0.0, foreign), usable),
            sibling_cores=siblings,
            ran=ran,
            wanted=wanted,
        )

    def _now(self, pids: Mapping[str, int]) -> _Sample:
        t_s, busy_s, threads = self._clock(), self._busy_s(), self._threads(pids)
        return _Sample(t_s, busy_s, threads, self._sibling_threads({tid for own in threads.values() for tid in own}))

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

    def _sibling_threads(self, ours: set[int]) -> _Threads:
        """Threads of all siblings, each once; ``ours`` are our own, whose processes are no siblings."""
        roots, parents = self._siblings.find(ours)
        found: _Threads = {}
        waiting = [*parents, *roots]
        while waiting:
            pid = waiting.pop()
            if pid in found:
                continue
            threads, children = self._process(pid)
            share = self._share_here(pid)
            found |= {tid: (share * ran_s, share * waited_s) for tid, (ran_s, waited_s) in threads.items()}
            if pid not in parents:
                waiting += [child for child in children if child not in ours and child not in parents]
        return found

    def _share_here(self, pid: int) -> float:
        """How many of the cores that a process may use are among ours, as a share; 1 where that is not told."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in (self._proc / str(pid) / "status").read_text(errors="replace").splitlines():
                if line.startswith("Cpus_allowed:"):
                    allowed = int(line.split()[1].replace(",", ""), 16)
                    ours = sum(1 << core for core in self._cores.ids)
                    return (allowed & ours).bit_count() / max(1, allowed.bit_count())
        return 1.0

    def _tree(self, pid: int, named: set[int]) -> _Threads:
        """Threads of a process and its nameless descendants; what ends meanwhile is left out."""
        found: _Threads = {}
        waiting = [pid]
        while waiting:
            threads, children = self._process(waiting.pop())
            found |= threads
            waiting += [child for child in children if child not in named]
        return found

    def _process(self, pid: int) -> tuple[_Threads, list[int]]:
        """Threads and children of a process."""
        tasks = self._proc / str(pid) / "task"
        threads: _Threads = {}
        children: list[int] = []
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for tid in os.listdir(tasks):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    ran_ns, waited_ns, _ = (tasks / tid / "schedstat").read_text().split()
                    threads[int(tid)] = (int(ran_ns) / 1e9, int(waited_ns) / 1e9)
                    children += map(int, (tasks / tid / "children").read_text().split())
        return threads, children


def _gained(before: _Threads, now: _Threads) -> tuple[float, float]:
    """Seconds (ran, waited) of the threads that there are now, since the sample before."""
    old = [before.get(tid, (0.0, 0.0)) for tid in now]
    ran_s = sum(ran for ran, _ in now.values()) - sum(ran for ran, _ in old)
    waited_s = sum(waited for _, waited in now.values()) - sum(waited for _, waited in old)
    return max(0.0, ran_s), max(0.0, waited_s)
