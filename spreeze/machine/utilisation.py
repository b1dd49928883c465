"""Use of the machine: live values by metric name, cores that other programs keep busy, memory of processes.

``ContentionReader`` attributes CPU use to this run, to the user's other runs, and to external programs. The CPU time
that a thread wants is how long it ran plus how long it was ready but waited for a core (``schedstat``). Not external
are programs at low priority (nice 10 or more), which use only idle cores, and siblings: this user's other runs, tuners
and the dashboard page, which would otherwise pause for each other. A sibling is

* a worker (``sampler-0``, ``learner``, ...) that leads its own process group, as all workers do; a process with a name
  of ours (``spreeze-...``, ``processes.take_name``); or any descendant of these;
* the parent of one of them, itself only: a supervisor or a tuner, which may be a notebook that starts other programs
  too. The parent of the page, a user's shell, is not a sibling.

Names come from ``/proc/PID/stat``: reading a command line or an environment waits for a lock that a process hung in a
driver may never release. A process counts as external until it has its name, about a second. A sibling that may also
use other cores counts by the share of its cores that are ours.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from spreeze.machine.hardware import GPU_ENERGY, CoreFacts, GpuMonitor, core_facts
from spreeze.machine.processes import LOW_PRIORITY, OWN_PREFIX, PAGE

_MIN_INTERVAL_S = 0.02  # Processor times come in ticks of 10 ms; a rate over a shorter interval would be noise.
_TICKS_PER_S = 100.0  # Unit of ``/proc/stat`` (USER_HZ), the same on every supported architecture.
_BUSY_FIELDS = (0, 1, 2, 5, 6)
"""user, nice, system, irq, softirq: without idle, iowait and steal (the time that a hypervisor took)."""
_PROC = Path("/proc")
_POWERCAP = Path("/sys/class/powercap")


class Utilisation:
    """Samples cores, memory, this run's processes and GPUs. Rates need two samples; unreadable values are absent."""

    def __init__(
        self,
        pids: Mapping[str, int],
        *,
        gpu_monitor: GpuMonitor | None = None,
        clock: Callable[[], float] = time.monotonic,
        powercap: Path = _POWERCAP,
        cores: CoreFacts | None = None,
    ) -> None:
        """``pids``: name of a worker -> process id."""
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
            usable = {f"cpu_core_use/{core}": uses_of[core] / 100 for core in self._core_ids if core in uses_of}
            values |= self._process_values(elapsed_s)
            if elapsed_s:
                values |= usable | {"cpu_use": sum(usable.values()) / max(1, len(usable))}
                if self._usable < len(self._core_ids):  # relative to a quota: other programs use the same cores
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
            # A reloaded driver counts from 0.
            self._energy_j += max(0.0, now_j - self._gpu_energy_j.get(name, now_j))
            self._gpu_energy_j[name] = now_j
            known = True
        return gpus | {"energy_j": self._energy_j} if known else gpus

    def _process_values(self, elapsed_s: float) -> dict[str, float]:
        known, self._processes = self._processes, {}
        written_before, self._written = self._written, {}
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
                if not hasattr(process, "io_counters"):
                    continue
                self._written[name] = process.io_counters().write_bytes
                if not is_new and name in written_before and elapsed_s:
                    rate = max(0, self._written[name] - written_before[name]) / elapsed_s
                    values["disk_write_bytes_per_s"] = values.get("disk_write_bytes_per_s", 0.0) + rate
        return values

    def close(self) -> None:
        self._gpus.close()


def _package_counters(root: Path) -> dict[Path, int]:
    """Energy counters of processor packages (RAPL), mostly only for root -> value at which each wraps [uJ]."""
    wraps = {}
    for folder in sorted(root.glob("intel-rapl:*")):  # AMD's too
        with contextlib.suppress(OSError, ValueError):
            if (folder / "name").read_text().startswith("package") and _counter(folder / "energy_uj") is not None:
                wraps[folder / "energy_uj"] = int((folder / "max_energy_range_uj").read_text()) + 1
    return wraps


def _counter(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


class ExternalLoad:
    """Measures how many cores other programs keep busy, from its creation on."""

    def __init__(self, core_ids: tuple[int, ...]) -> None:
        self._core_ids = core_ids
        self._start_s, self._busy_s, self._own_s = time.monotonic(), busy_s(core_ids), _own_s()

    def cores(self) -> float:
        """Cores that other programs than this process and its children kept busy."""
        others_s = (busy_s(self._core_ids) - self._busy_s) - (_own_s() - self._own_s)
        return max(0.0, others_s) / max(_MIN_INTERVAL_S, time.monotonic() - self._start_s)


def _core_numbers(proc: Path = _PROC) -> list[int]:
    """Core numbers in the order in which the kernel, and so psutil, lists them, with gaps where cores are offline."""
    if not (proc / "stat").exists():
        return list(range(psutil.cpu_count() or 1))
    labels = [line.split(None, 1)[0] for line in (proc / "stat").read_text().splitlines() if line.startswith("cpu")]
    return [int(label[3:]) for label in labels if label[3:].isdigit()]


def busy_s(core_ids: tuple[int, ...], proc: Path = _PROC) -> float:
    """Processor time that all programs together have used on these cores [s]."""
    if proc == _PROC and not (proc / "stat").exists():
        times = [use for core, use in enumerate(psutil.cpu_times(percpu=True)) if core in core_ids]
        return float(sum(use.user + use.nice + use.system for use in times))
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


def private_memory_bytes(pid: int) -> int | None:
    """Unshared resident memory of a process; None if it has ended, or where the system does not tell (macOS)."""
    with contextlib.suppress(psutil.Error, OSError, AttributeError):
        memory = psutil.Process(pid).memory_info()
        return int(memory.rss - memory.shared)
    return None


def tree_memory_bytes(pid: int) -> int:
    """Unshared resident memory of a process and, by the kernel's lists (psutil is slow), of all that it started."""
    pids, used = [pid], 0
    for member in pids:  # the loop appends to it
        used += private_memory_bytes(member) or 0
        for path in Path(f"/proc/{member}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pids += map(int, path.read_text(encoding="ascii").split())
    return used


_WAITING_CORES = 0.25
"""Cores that our threads wait for, in sum, above which an unused quota must be used by other processes."""
_MAX_ROUNDS = 8
"""Other processes are examined again after 1, 2, 4, then every 8 rounds: they may not have had their name yet."""
_PARENT, _GROUP, _NICE = 1, 2, 16  # Fields of ``/proc/PID/stat`` after the name.

RoleOf = Callable[[str], object]
"""Role of a worker by the name of its process (``workers.roles.role_of``); None for all other processes."""


class ExemptProcesses:
    """Finds processes that are no external load, siblings and low priority; examines those new or due again."""

    def __init__(self, proc: Path, role_of: RoleOf) -> None:
        self._proc, self._role_of, self._user = proc, role_of, os.geteuid()
        self._round = 0
        self._postponed: dict[int, tuple[int, int]] = {}  # process id -> (round at which it is due, rounds until then)

    def find(self, ours: Collection[int]) -> tuple[set[int], set[int]]:
        """Roots, whose descendants are exempt too, and the siblings' parents (themselves only), without ``ours``.

        An OSError if the system does not list processes.
        """
        self._round += 1
        before, self._postponed = self._postponed, {}
        roots, parents = set[int](), set[int]()
        for pid in [int(name) for name in os.listdir(self._proc) if name.isdecimal()]:
            if pid in ours:
                continue
            due, pause = before.get(pid, (0, 0))
            if due > self._round:
                self._postponed[pid] = due, pause
            elif not self._add(pid, roots, parents):
                pause = min(max(1, 2 * pause), _MAX_ROUNDS)
                self._postponed[pid] = self._round + pause, pause
        return roots, parents.difference(ours, roots)

    def _add(self, pid: int, roots: set[int], parents: set[int]) -> bool:
        """Adds a process that is no external load, and a sibling's parent; returns True if it added any."""
        try:
            is_ours = os.stat(f"{self._proc}/{pid}").st_uid == self._user
            with open(f"{self._proc}/{pid}/stat", encoding="ascii", errors="replace") as file:
                text = file.read()
            name, _, rest = text.partition("(")[2].rpartition(") ")  # a name may have any character, even brackets
            fields = rest.split()
            parent, group = int(fields[_PARENT]), int(fields[_GROUP])
            nice = int(fields[_NICE]) if len(fields) > _NICE else 0
        except (OSError, ValueError, IndexError):
            return False
        if not is_ours or not (name.startswith(OWN_PREFIX) or (self._role_of(name) and group == pid)):
            if nice >= LOW_PRIORITY:
                roots.add(pid)
            return nice >= LOW_PRIORITY
        roots.add(pid)
        if name != PAGE and parent > 0:
            parents.add(parent)
        return True


@dataclass(frozen=True, kw_only=True)
class CpuContention:
    """Use of the cores since the previous sample, in cores (seconds of CPU time per second)."""

    usable_cores: float
    external_cpu_cores: float  # usable cores kept busy by programs that belong neither to this run nor to a sibling
    sibling_cores: float = 0.0
    """Cores kept busy by this user's other runs, tuners and the page, and by programs of low priority."""
    ran: dict[str, float]  # per worker, the cores that it used
    wanted: dict[str, float]  # per worker, the cores that it used or waited for; children and threads included


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
        self._exempt = ExemptProcesses(self._proc, role_of)
        self._before: tuple[float, float, dict[str, _Threads], _Threads] | None = None

    def sample(self, pids: Mapping[str, int]) -> CpuContention | None:
        """Use since the last call, None at first or if unknown; descendants count as their worker, unless named."""
        before, self._before = self._before, None
        try:
            now_s, used_s = self._clock(), busy_s(self._cores.ids, self._proc)
            named = set(pids.values())
            threads = {name: self._tree(pid, named) for name, pid in pids.items()}
            exempt = self._exempt_threads({tid for worker_threads in threads.values() for tid in worker_threads})
        except (OSError, ValueError, IndexError):
            return None
        self._before = now_s, used_s, threads, exempt
        if before is None or now_s <= before[0]:
            return None
        elapsed_s = now_s - before[0]
        ran, wanted = {}, {}
        for name, worker_threads in threads.items():
            ran_s, waited_s = _gained(before[2].get(name, {}), worker_threads)
            ran[name] = ran_s / elapsed_s
            wanted[name] = ran[name] + waited_s / elapsed_s
        ours, usable, busy = sum(ran.values()), self._cores.usable, (used_s - before[1]) / elapsed_s
        # The sum includes a sibling's use from before it had its name; it is bounded by the total use.
        sibling = min(_gained(before[3], exempt)[0] / elapsed_s, max(0.0, busy - ours))
        beyond_quota = len(self._cores.ids) - usable
        external = busy - ours - sibling - beyond_quota
        if beyond_quota > 0 and sum(wanted.values()) - ours > _WAITING_CORES:
            external = max(external, usable - ours - sibling)  # other processes share the quota
        return CpuContention(
            usable_cores=usable,
            external_cpu_cores=min(max(0.0, external), usable),
            sibling_cores=sibling,
            ran=ran,
            wanted=wanted,
        )

    def _exempt_threads(self, ours: set[int]) -> _Threads:
        """Threads of all exempt processes, each once; ``ours`` are our own threads."""
        roots, parents = self._exempt.find(ours)
        total: _Threads = {}
        waiting = [*parents, *roots]
        while waiting:
            pid = waiting.pop()
            if pid in total:
                continue
            threads, children = self._process(pid)
            fraction = self._share_here(pid)
            total |= {tid: (fraction * ran_s, fraction * waited_s) for tid, (ran_s, waited_s) in threads.items()}
            if pid not in parents:
                waiting += [child for child in children if child not in ours and child not in parents]
        return total

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
        """Threads of a process and its descendants outside ``named``; skips processes that have ended."""
        total: _Threads = {}
        waiting = [pid]
        while waiting:
            threads, children = self._process(waiting.pop())
            total |= threads
            waiting += [child for child in children if child not in named]
        return total

    def _process(self, pid: int) -> tuple[_Threads, list[int]]:
        tasks = f"{self._proc}/{pid}/task"
        threads: _Threads = {}
        children: list[int] = []
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for tid in os.listdir(tasks):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    with open(f"{tasks}/{tid}/schedstat", encoding="ascii") as file:  # pathlib takes twice as long
                        ran_ns, waited_ns, _ = file.read().split()
                    threads[int(tid)] = (int(ran_ns) / 1e9, int(waited_ns) / 1e9)
                    with open(f"{tasks}/{tid}/children", encoding="ascii") as file:
                        children += map(int, file.read().split())
        return threads, children


def _gained(before: _Threads, now: _Threads) -> tuple[float, float]:
    """Seconds (ran, waited) of the present threads since the previous sample."""
    old = [before.get(tid, (0.0, 0.0)) for tid in now]
    ran_s = sum(ran for ran, _ in now.values()) - sum(ran for ran, _ in old)
    waited_s = sum(waited for _, waited in now.values()) - sum(waited for _, waited in old)
    return max(0.0, ran_s), max(0.0, waited_s)
