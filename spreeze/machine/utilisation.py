"""Use of the machine: live values by metric name, cores that other programs keep busy, memory of processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from spreeze.machine.gpu import GPU_ENERGY, GpuMonitor
from spreeze.machine.hardware import CoreFacts, core_facts

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
    labels = [line.split(None, 1)[0] for line in (proc / "stat").read_text().splitlines() if line.startswith("cpu")]
    return [int(label[3:]) for label in labels if label[3:].isdigit()]


def busy_s(core_ids: tuple[int, ...], proc: Path = _PROC) -> float:
    """Processor time that all programs together have used on these cores [s]."""
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
    """Unshared resident memory of a process; None if it has ended."""
    with contextlib.suppress(psutil.Error, OSError):
        memory = psutil.Process(pid).memory_info()
        return int(memory.rss - getattr(memory, "shared", 0))
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
