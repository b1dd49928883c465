"""Who wants the cores: this run's processes, its siblings, and all others. Linux, read from ``/proc``.

The kernel keeps for every thread how long it ran and how long it was ready but had to wait for a
core (``schedstat``). Both together are what a process wants, however little it is given.

Siblings are this user's other runs, tuners and the dashboard page. They are not foreign: two runs that took each other
for strangers would both rest, for as long as both are there. They are told by the name that each takes as soon as its
interpreter is up (``processes.take_name``), which the kernel hands out in ``/proc/PID/stat``. A command line or
environment lies in the process's own memory: reading that waits for a lock, which a process that hangs in a driver or
on a dead disk may never give back, and then the supervisor would hang as well. Until it has its name, about a second, a
process counts as foreign; so does, once, what a process did in the fraction of a second before it ended. A sibling, if
it runs as this user, is

* a worker (``sampler-0``, ``learner``, ...) that leads a process group of its own, as ours all do; what has a name of
  our own (``spreeze-...``); and all that these started;
* the process that started one of them, itself only: a supervisor or a tuner, which may be a notebook that starts other
  things too. The page is started by a person's shell, which stays a stranger.

Of a sibling that may use other cores too, the share counts that our cores are of its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spreeze.machine.hardware import CoreFacts, core_facts
from spreeze.machine.processes import OWN_PREFIX, PAGE, is_worker

_TICKS_PER_S = 100.0
"""Unit of ``/proc/stat`` (USER_HZ), the same on every architecture that this runs on."""
_BUSY_FIELDS = (0, 1, 2, 5, 6)
"""user, nice, system, irq, softirq: not idle, iowait or what a hypervisor took."""
_WAITING_CORES = 0.25
"""Waiting of all our threads together above which a quota that is not used up must be used by somebody else."""
_MOST_LOOKS = 8
"""A stranger is looked at again after 1, 2, 4, then every 8 looks: it may have been too young to have its name."""
_PARENT, _GROUP = 1, 2
"""Of ``/proc/PID/stat`` after the name."""


class Found(NamedTuple):
    roots: set[int]
    """What they started is theirs as well."""
    parents: set[int]
    """Who started a root; themselves only."""


class Siblings:
    """Looks for siblings; costs one system call for each process that is new or due again."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc, self._user = proc, os.geteuid()
        self._look = 0
        self._strangers: dict[int, tuple[int, int]] = {}  # process id -> (look at which it is due, looks until then)

    def find(self, ours: Collection[int]) -> Found:
        """Siblings of this moment, which any of them may leave by the next; ``ours`` are the asking run's processes.

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
        """Adds a process to ``found`` if it is a sibling; returns whether it is. One that is gone is none."""
        try:
            if (self._proc / str(pid)).stat().st_uid != self._user:
                return False
            text = (self._proc / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
            name, _, rest = text.partition("(")[2].rpartition(") ")  # a name may hold anything, brackets too
            fields = rest.split()
            parent, group = int(fields[_PARENT]), int(fields[_GROUP])
        except (OSError, ValueError, IndexError):
            return False
        if not (name.startswith(OWN_PREFIX) or (is_worker(name) and group == pid)):
            return False
        found.roots.add(pid)
        if name != PAGE and parent > 0:
            found.parents.add(parent)
        return True


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
        self._cores = core_facts(root) if cores is None else cores
        self._proc = Path(root) / "proc"
        self._clock = clock
        self._siblings = Siblings(self._proc)
        self._before: _Sample | None = None

    def sample(self, pids: Mapping[str, int]) -> CpuContention | None:
        """Load since the last call; None at the first, and where the kernel does not tell.

        Descendants of a worker in ``pids`` count as the worker, unless they are named there themselves.
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
        return CpuContention(usable_cores=usable, foreign_cores=min(max(0.0, foreign), usable),
                             sibling_cores=siblings, ran=ran, wanted=wanted)

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
