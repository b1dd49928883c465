"""Live use of the machine by metric name.

A rate needs two samples, so the first one has none; values that cannot be read are left out.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import psutil

from spreeze.machine.gpu import GpuMonitor
from spreeze.machine.hardware import core_facts

_MIN_INTERVAL_S = 0.02
"""Processor times come in ticks of 10 ms; a rate over a shorter interval would be noise."""


class _ProcessTimes(NamedTuple):
    process: psutil.Process
    cpu_s: float
    written_bytes: int | None


class _Sample(NamedTuple):
    t_s: float
    cores: dict[int, tuple[float, float]]
    processes: dict[str, _ProcessTimes]


class Utilisation:
    """Samples cores, memory, this run's processes and the GPUs; never waits for a driver."""

    def __init__(
        self, pids: Mapping[str, int], *, core_ids: tuple[int, ...] | None = None,
        gpu_monitor: GpuMonitor | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``pids`` is by worker; ``core_ids`` None means the cores that this process may use."""
        self._core_ids = core_facts().ids if core_ids is None else core_ids
        self._gpus = GpuMonitor() if gpu_monitor is None else gpu_monitor
        self._clock = clock
        self._pids = dict(pids)
        self._before: _Sample | None = None

    @property
    def trouble(self) -> str | None:
        """Why the figures of a GPU are missing, or None."""
        return self._gpus.trouble

    def sample(self, pids: Mapping[str, int] | None = None) -> dict[str, float]:
        """Current values, and rates since the previous sample; None for ``pids`` keeps the known processes."""
        if pids is not None:
            self._pids = dict(pids)
        values: dict[str, float] = {}
        memory = psutil.virtual_memory()
        values["memory_used_bytes"] = float(memory.total - memory.available)
        before = self._before
        now = _Sample(self._clock(), self._core_times(), self._process_times(values))
        if before is None or now.t_s - before.t_s >= _MIN_INTERVAL_S:
            self._before = now
            if before is not None:
                values |= _core_rates(before, now) | _process_rates(before, now)
        return values | self._gpus.poll()

    def close(self) -> None:
        self._gpus.close()

    def _core_times(self) -> dict[int, tuple[float, float]]:
        """(busy, all) seconds since boot per core; waiting for a disk is not busy."""
        times = psutil.cpu_times(percpu=True)
        found = {}
        for core in self._core_ids:
            if core < len(times):
                one = times[core]
                total = sum(one) - getattr(one, "guest", 0.0) - getattr(one, "guest_nice", 0.0)
                found[core] = (_core_busy_s(one), total)
        return found

    def _process_times(self, values: dict[str, float]) -> dict[str, _ProcessTimes]:
        known = {} if self._before is None else self._before.processes
        found: dict[str, _ProcessTimes] = {}
        for name, pid in self._pids.items():
            try:
                process = known[name].process if name in known and known[name].process.pid == pid else None
                if process is None or not process.is_running():  # the pid may have been reused
                    process = psutil.Process(pid)
                with process.oneshot():
                    times = process.cpu_times()
                    values[f"process_memory_bytes/{name}"] = float(process.memory_info().rss)
                found[name] = _ProcessTimes(process, times.user + times.system, _written_bytes(process))
            except (psutil.Error, OSError):
                values.pop(f"process_memory_bytes/{name}", None)
        return found


def _core_busy_s(one: Any) -> float:
    """Busy seconds of one core; guests' time is already part of the user time."""
    total = sum(one) - getattr(one, "guest", 0.0) - getattr(one, "guest_nice", 0.0)
    return float(total - one.idle - getattr(one, "iowait", 0.0))


def _written_bytes(process: psutil.Process) -> int | None:
    try:
        return int(process.io_counters().write_bytes)
    except (psutil.Error, OSError, AttributeError):
        return None


def _core_rates(before: _Sample, now: _Sample) -> dict[str, float]:
    uses: dict[str, float] = {}
    for core, (busy, total) in now.cores.items():
        if core in before.cores and total > before.cores[core][1]:
            share = (busy - before.cores[core][0]) / (total - before.cores[core][1])
            uses[f"cpu_core_use/{core}"] = min(1.0, max(0.0, share))
    if uses:
        uses["cpu_use"] = sum(uses.values()) / len(uses)
    return uses


def _process_rates(before: _Sample, now: _Sample) -> dict[str, float]:
    elapsed_s = now.t_s - before.t_s
    values: dict[str, float] = {}
    written: int | None = None
    for name, after in now.processes.items():
        first = before.processes.get(name)
        if first is None or first.process != after.process:
            continue
        values[f"process_cpu_use/{name}"] = max(0.0, after.cpu_s - first.cpu_s) / elapsed_s
        if after.written_bytes is not None and first.written_bytes is not None:
            written = (written or 0) + max(0, after.written_bytes - first.written_bytes)
    if written is not None:
        values["disk_write_bytes_per_s"] = written / elapsed_s
    return values


class ExternalLoad:
    """Measures from now on how many cores other programs keep busy."""

    def __init__(self, core_ids: tuple[int, ...], clock: Callable[[], float] = time.monotonic) -> None:
        self._core_ids, self._clock = core_ids, clock
        self._start_s, self._busy_s, self._own_s = clock(), _busy_s(core_ids), _own_s()

    def cores(self) -> float | None:
        """Cores that other programs than this process and its children kept busy; None if unknown."""
        elapsed_s = self._clock() - self._start_s
        busy_s = _busy_s(self._core_ids)
        if elapsed_s < _MIN_INTERVAL_S or busy_s is None or self._busy_s is None:
            return None
        return max(0.0, (busy_s - self._busy_s) - (_own_s() - self._own_s)) / elapsed_s


def _busy_s(core_ids: tuple[int, ...]) -> float | None:
    """Seconds that these cores were busy since boot; None if a core is not listed."""
    times = psutil.cpu_times(percpu=True)
    if not core_ids or max(core_ids) >= len(times):
        return None
    return sum(_core_busy_s(times[core]) for core in core_ids)


def _own_s() -> float:
    """Processor time of this process, its living descendants, and its ended children."""
    total = float(sum(os.times()[:4]))
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
