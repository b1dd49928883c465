"""Use of the machine: live figures by metric name, and who keeps the cores busy (Linux, read from ``/proc``).

The kernel records for every thread how long it ran and how long it was ready but had to wait for a core
(``schedstat``). Their sum is what a process wants, however little it is given.

No external load are programs at low priority (nice 10 or more), which take a core only as far as others leave it, and
siblings: this user's other runs, tuners and the dashboard page, which would otherwise rest for each other. A sibling is

* a worker (``sampler-0``, ``learner``, ...) that leads its own process group, as all workers do; a process with a name
  of ours (``spreeze-...``, ``processes.take_name``); or any descendant of these;
* the parent of one of them, itself only: a supervisor or a tuner, which may be a notebook that starts other programs
  too. The parent of the page, a user's shell, is not a sibling.

Names are read from ``/proc/PID/stat``: to read a command line or an environment waits for a lock that a process which
hangs in a driver may never release. A process counts as external until it has its name, about a second. A sibling that
may also use other cores counts by the share of its cores that are ours.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from spreeze.machine.gpu import GPU_ENERGY, GpuMonitor
from spreeze.machine.hardware import CoreFacts, core_facts
from spreeze.machine.processes import LOW_PRIORITY, OWN_PREFIX, PAGE

_MIN_INTERVAL_S = 0.02  # Processor times come in ticks of 10 ms; a rate over a shorter interval would be noise.
_TICKS_PER_S = 100.0  # Unit of ``/proc/stat`` (USER_HZ), the same on every supported architecture.
_BUSY_FIELDS = (0, 1, 2, 5, 6)
"""user, nice, system, irq, softirq: without idle, iowait and the time that a hypervisor took."""
_WAITING_CORES = 0.25
"""Cores that our threads wait for, in sum, above which an unused quota must be used by other processes."""
_MOST_LOOKS = 8
"""Other processes are examined again after 1, 2, 4, then every 8 looks: they may not have had their name yet."""
_PARENT, _GROUP, _NICE = 1, 2, 16  # Fields of ``/proc/PID/stat`` after the name.
_PROC = Path("/proc")
_POWERCAP = Path("/sys/class/powercap")


class Utilisation:
    """Samples cores, memory, this run's processes and the GPUs; never waits for a driver.

    A rate needs two samples, so the first one has none; values that cannot be read are left out.
    """

    def __init__(
        self,
        pids: Mapping[str, int],
        *,
        gpu_monitor: GpuMonitor | None = None,
        clock: Callable[[], float] = time.monotonic,
        powercap: Path = _POWERCAP,
        cores: CoreFacts | None = None,
    ) -> None:
        """``pids`` is by worker."""
        cores = core_facts() if cores is None else cores
        self._core_ids, self._usable = cores.ids, cores.usable
        self._gpus = GpuMonitor() if gpu_monitor is None else gpu_monitor
        self._clock = clock
        self._pids = dict(pids)
        self._before_s: float | None = None
        self._processes: dict[str, psutil.Process] = {}
        self._written: dict[str, int] = {}
        self._packages = _package_counters(powercap)
        self._energy_uj = {path: _counter(path) for path in self._packages}
        self._gpu_energy_j: dict[str, float] = {}
        self._energy_j = 0.0

    @property
    def trouble(self) -> str | None:
        """Why the GPU metrics are missing, or None."""
        return self._gpus.trouble

    def sample(self, pids: Mapping[str, int] | None = None) -> dict[str, float]:
        """Current values, and rates since the previous sample; None for ``pids`` keeps the known processes."""
        if pids is not None:
            self._pids = dict(pids)
        memory = psutil.virtual_memory()
        values = {"memory_used_bytes": float(memory.total - memory.available)}
        before_s, now_s = self._before_s, self._clock()
        elapsed_s = 0.0 if before_s is None else now_s - before_s
        if before_s is None or elapsed_s >= _MIN_INTERVAL_S:
            self._before_s = now_s
            uses = psutil.cpu_percent(percpu=True)
            uses_of = dict(zip(_core_numbers(), uses, strict=False))
            own = {f"cpu_core_use/{core}": uses_of[core] / 100 for core in self._core_ids if core in uses_of}
            values |= self._process_values(elapsed_s)
            if elapsed_s:
                values |= own | {"cpu_use": sum(own.values()) / max(1, len(own))}
                if self._usable < len(self._core_ids):  # of a quota; the cores themselves are others' too
                    used = sum(use for name, use in values.items() if name.startswith("process_cpu_use/"))
                    values["cpu_use"] = min(1.0, used / self._usable)
        return values | self._with_energy(self._gpus.poll())

    def _with_energy(self, gpus: dict[str, float]) -> dict[str, float]:
        """The figures of the GPUs, with the energy since the first sample in place of each GPU's own counter."""
        known = False
        for path, wraps_at in self._packages.items():
            before, now = self._energy_uj[path], _counter(path)
            if before is not None and now is not None:
                self._energy_j += ((now - before) % wraps_at) / 1e6
                known = True
            self._energy_uj[path] = now
        for name in [name for name in gpus if name.startswith(GPU_ENERGY)]:
            now_j = gpus.pop(name)
            # A driver that was loaded again counts from 0.
            self._energy_j += max(0.0, now_j - self._gpu_energy_j.get(name, now_j))
            self._gpu_energy_j[name] = now_j
            known = True
        return gpus | {"energy_j": self._energy_j} if known else gpus

    def _process_values(self, elapsed_s: float) -> dict[str, float]:
        known, self._processes = self._processes, {}
        earlier, self._written = self._written, {}
        values: dict[str, float] = {}
        for name, pid in self._pids.items():
            with contextlib.suppress(psutil.Error, OSError):
                process = known.get(name)
                is_new = process is None or process.pid != pid or not process.is_running()  # the pid may be reused
                if process is None or is_new:
                    process = psutil.Process(pid)
                with process.oneshot():
                    use, memory = process.cpu_percent() / 100, float(process.memory_info().rss)
                self._processes[name] = process
                values[f"process_memory_bytes/{name}"] = memory
                if not is_new:
                    values[f"process_cpu_use/{name}"] = use
                self._written[name] = process.io_counters().write_bytes
                if not is_new and name in earlier and elapsed_s:
                    rate = max(0, self._written[name] - earlier[name]) / elapsed_s
                    values["disk_write_bytes_per_s"] = values.get("disk_write_bytes_per_s", 0.0) + rate
        return values

    def close(self) -> None:
        self._gpus.close()


def _package_counters(root: Path) -> dict[Path, int]:
    """The energy counters of the processor's packages (RAPL) that may be read -> where each wraps [uJ].

    Most systems let only root read them, and a virtual machine has none.
    """
    found = {}
    for folder in sorted(root.glob("intel-rapl:*")):  # AMD's too
        with contextlib.suppress(OSError, ValueError):
            if (folder / "name").read_text().startswith("package") and _counter(folder / "energy_uj") is not None:
                found[folder / "energy_uj"] = int((folder / "max_energy_range_uj").read_text()) + 1
    return found


def _counter(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


class ExternalLoad:
    """Measures from now on how many cores other programs keep busy."""

    def __init__(self, core_ids: tuple[int, ...]) -> None:
        self._core_ids = core_ids
        self._start_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(core_ids), _own_s()

    def cores(self) -> float:
        """Cores that other programs than this process and its children kept busy."""
        others_s = (_busy_s(self._core_ids) - self._busy_s) - (_own_s() - self._own_s)
        return max(0.0, others_s) / max(_MIN_INTERVAL_S, time.monotonic() - self._start_s)


def _core_numbers(proc: Path = _PROC) -> list[int]:
    """Numbers of the cores in the order in which the kernel, and so psutil, lists them: cores may be offline."""
    words = [line.split(None, 1)[0] for line in (proc / "stat").read_text().splitlines() if line.startswith("cpu")]
    return [int(word[3:]) for word in words if word[3:].isdigit()]


def _busy_s(core_ids: tuple[int, ...], proc: Path = _PROC) -> float:
    wanted = {f"cpu{core}" for core in core_ids}
    lines = [line.split() for line in (proc / "stat").read_text().splitlines()]
    return sum(int(line[1 + index]) for line in lines if line[0] in wanted for index in _BUSY_FIELDS) / _TICKS_PER_S


def _own_s() -> float:
    """Processor time of this process, its living descendants, and its ended children."""
    total = float(sum(os.times()[:4]))
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


RoleOf = Callable[[str], object]
"""Role of a worker by the name of its process (``workers.roles.role_of``); None for all other processes."""


class Found(NamedTuple):
    roots: set[int]
    """Their descendants are siblings too."""
    parents: set[int]
    """Parents of roots; their other descendants are not siblings."""


class Siblings:
    """Finds siblings and programs of low priority; costs one system call for each process that is new or due again."""

    def __init__(self, proc: Path, role_of: RoleOf) -> None:
        self._proc, self._role_of, self._user = proc, role_of, os.geteuid()
        self._look = 0
        self._others: dict[int, tuple[int, int]] = {}  # process id -> (look at which it is due, looks until then)

    def find(self, ours: Collection[int]) -> Found:
        """The current siblings; ``ours`` are the calling run's processes.

        Raises:
            OSError: the system does not list processes.
        """
        self._look += 1
        before, self._others = self._others, {}
        found = Found(set(), set())
        for pid in [int(name) for name in os.listdir(self._proc) if name.isdecimal()]:
            if pid in ours:
                continue
            due, pause = before.get(pid, (0, 0))
            if due > self._look:
                self._others[pid] = due, pause
            elif not self._enter(pid, found):
                pause = min(max(1, 2 * pause), _MOST_LOOKS)
                self._others[pid] = self._look + pause, pause
        found.parents.difference_update(ours, found.roots)
        return found

    def _enter(self, pid: int, found: Found) -> bool:
        """Adds a process to ``found`` if it is no external load, and returns whether; False if it is gone."""
        try:
            is_ours = (self._proc / str(pid)).stat().st_uid == self._user
            text = (self._proc / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
            name, _, rest = text.partition("(")[2].rpartition(") ")  # a name may hold anything, brackets too
            fields = rest.split()
            parent, group = int(fields[_PARENT]), int(fields[_GROUP])
            nice = int(fields[_NICE]) if len(fields) > _NICE else 0
        except (OSError, ValueError, IndexError):
            return False
        if not is_ours or not (name.startswith(OWN_PREFIX) or (self._role_of(name) and group == pid)):
            if nice >= LOW_PRIORITY:
                found.roots.add(pid)
            return nice >= LOW_PRIORITY
        found.roots.add(pid)
        if name != PAGE and parent > 0:
            found.parents.add(parent)
        return True


@dataclass(frozen=True, kw_only=True)
class CpuContention:
    """Use of the cores since the previous sample, in cores (seconds of CPU time per second)."""

    usable_cores: float
    external_cpu_cores: float
    """Usable cores kept busy by programs that belong neither to this run nor to a sibling."""
    sibling_cores: float = 0.0
    """Cores kept busy by this user's other runs, tuners and the page, and by programs of low priority."""
    ran: dict[str, float]
    """Per worker, what it used."""
    wanted: dict[str, float]
    """Per worker, what it used and what it waited for; its children and threads included."""


_Threads = dict[int, tuple[float, float]]  # thread id -> seconds (ran, waited).


class ContentionReader:
    """Takes samples and compares each with the previous one."""

    def __init__(
        self,
        role_of: RoleOf,
        *,
        cores: CoreFacts | None = None,
        root: str | Path = "/",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cores = core_facts(root) if cores is None else cores
        self._proc = Path(root) / "proc"
        self._clock = clock
        self._siblings = Siblings(self._proc, role_of)
        self._before: tuple[float, float, dict[str, _Threads], _Threads] | None = None

    def sample(self, pids: Mapping[str, int]) -> CpuContention | None:
        """Use since the last call; None at the first call, and if the kernel does not report it.

        Descendants of a worker in ``pids`` count as the worker, unless they are named there themselves.
        """
        before, self._before = self._before, None
        try:
            now_s, busy_s = self._clock(), self._busy_s()
            named = set(pids.values())
            threads = {name: self._tree(pid, named) for name, pid in pids.items()}
            siblings = self._sibling_threads({tid for own in threads.values() for tid in own})
        except (OSError, ValueError, IndexError):
            return None
        self._before = now_s, busy_s, threads, siblings
        if before is None or now_s <= before[0]:
            return None
        elapsed_s = now_s - before[0]
        ran, wanted = {}, {}
        for name, own in threads.items():
            ran_s, waited_s = _gained(before[2].get(name, {}), own)
            ran[name] = ran_s / elapsed_s
            wanted[name] = ran[name] + waited_s / elapsed_s
        ours, usable, busy = sum(ran.values()), self._cores.usable, (busy_s - before[1]) / elapsed_s
        # The sum includes what a sibling did before it had its name; it cannot exceed what was used.
        sibling = min(_gained(before[3], siblings)[0] / elapsed_s, max(0.0, busy - ours))
        beyond_quota = len(self._cores.ids) - usable
        foreign = busy - ours - sibling - beyond_quota
        if beyond_quota > 0 and sum(wanted.values()) - ours > _WAITING_CORES:
            foreign = max(foreign, usable - ours - sibling)  # other processes share the quota
        external = min(max(0.0, foreign), usable)
        return CpuContention(
            usable_cores=usable, external_cpu_cores=external, sibling_cores=sibling, ran=ran, wanted=wanted
        )

    def _busy_s(self) -> float:
        return _busy_s(self._cores.ids, self._proc)

    def _sibling_threads(self, ours: set[int]) -> _Threads:
        """Threads of all siblings, each once; ``ours`` are our own threads."""
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
        """Share of a process's allowed cores that are ours; 1 if unknown."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in (self._proc / str(pid) / "status").read_text(errors="replace").splitlines():
                if line.startswith("Cpus_allowed:"):
                    allowed = int(line.split()[1].replace(",", ""), 16)
                    ours = sum(1 << core for core in self._cores.ids)
                    return (allowed & ours).bit_count() / max(1, allowed.bit_count())
        return 1.0

    def _tree(self, pid: int, named: set[int]) -> _Threads:
        """Returns threads of a process and its descendants outside ``named``; skips those that have ended."""
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
    """Seconds (ran, waited) of the present threads since the previous sample."""
    old = [before.get(tid, (0.0, 0.0)) for tid in now]
    ran_s = sum(ran for ran, _ in now.values()) - sum(ran for ran, _ in old)
    waited_s = sum(waited for _, waited in now.values()) - sum(waited for _, waited in old)
    return max(0.0, ran_s), max(0.0, waited_s)


def private_memory_bytes(pid: int) -> int | None:
    """Unshared resident memory of a process; None if it has ended."""
    with contextlib.suppress(psutil.Error, OSError):
        memory = psutil.Process(pid).memory_info()
        return int(memory.rss - getattr(memory, "shared", 0))
    return None


def tree_memory_bytes(pid: int) -> int:
    """Unshared resident memory of a process and, on Linux, of all that it started; 0 if it has ended.

    The children come from the kernel's own lists, since ``psutil`` finds them by reading every process of the machine.
    """
    found, used = [pid], 0
    for member in found:  # grows on the way
        used += private_memory_bytes(member) or 0
        for path in Path(f"/proc/{member}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, path.read_text(encoding="ascii").split())
    return used
