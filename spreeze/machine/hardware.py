"""The hardware of this machine and the part that this process may use, with reasons; None means unknown.

Files of ``/proc`` and ``/sys`` are read below a given root, so that tests can simulate containers. The number of
cores is never ``cpu_count()`` but follows from affinity, cgroup quota and cpuset.

NVIDIA GPUs answer through NVML (package nvidia-ml-py). A driver that lost its GPU can hang every call (Xid 79). So no
call is made from the caller's thread: facts are read with a time limit, and a thread polls live use, whose newest
reading the caller gets without waiting.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from spreeze.errors import ConfigError
from spreeze.formatting import clean, size

PowerSource = Literal["battery", "mains"]


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Main memory; ``usable_bytes`` is what this process may still take within the limits of its cgroup."""

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None
    usable_bytes: int


@dataclass(frozen=True, kw_only=True)
class CoreFacts:
    """Processor cores; ``usable`` is a float because a quota may be half a core."""

    ids: tuple[int, ...]
    quota: float | None
    usable: float
    physical: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """One visible GPU (or MIG slice); ``index`` is its index among the visible ones."""

    index: int
    uuid: str | None
    name: str | None
    memory_bytes: int | None
    memory_free_bytes: int | None
    power_limit_w: float | None
    clock_max_hz: float | None
    driver: str | None
    is_mig: bool
    use: float | None = None
    """Share of the time in which any kernel runs; like power and clock, measured when the facts were read."""
    power_w: float | None = None
    clock_hz: float | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    cpu_model: str | None
    cores: CoreFacts
    memory: MemoryFacts
    power_source: PowerSource | None
    gpus: tuple[GpuFacts, ...]
    gpu_reason: str
    kernel: str | None
    python_version: str

    def identity(self) -> str:
        """A short cache key that changes when measured choices no longer hold on this machine."""
        memory_bytes = min(self.memory.total_bytes, self.memory.cgroup_limit_bytes or self.memory.total_bytes)
        memory_gib = round(memory_bytes / 2**30)
        gpus = [(gpu.uuid, gpu.name, gpu.driver) for gpu in self.gpus]
        text = repr((self.cpu_model, len(self.cores.ids), self.cores.usable, self.cores.quota, memory_gib, gpus))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{self.cores.usable:g}c-{memory_gib}g-{len(self.gpus)}gpu-{digest}"

    def one_line(self) -> str:
        cores = "1 usable core" if self.cores.usable == 1 else f"{self.cores.usable:g} usable cores"
        cpu = f"{cores} of {self.cpu_model or 'an unknown processor'}"
        gpus = ", ".join(f"{gpu.name or 'GPU'} {size(gpu.memory_bytes)}" for gpu in self.gpus) or "no GPU"
        return f"{cpu}, {size(self.memory.cgroup_limit_bytes or self.memory.total_bytes)}, {gpus}"


_PINS_CORES = hasattr(os, "sched_setaffinity")
_CORES = "SPREEZE_CORES"
"""Environment variable with the cores of a process and of all that it starts, where none can be pinned to cores."""


def usable_cores() -> set[int]:
    """Numbers of the cores that this process may use by its affinity; where there is none (macOS), of all."""
    if _PINS_CORES:
        return os.sched_getaffinity(0)
    return _id_list(os.environ.get(_CORES, "")) or set(range(os.cpu_count() or 1))


def use_cores(cores: Iterable[int]) -> None:
    """Limits this process, and all that it starts, to these cores; where none can be pinned, to their number."""
    if _PINS_CORES:
        os.sched_setaffinity(0, cores)
    else:
        os.environ[_CORES] = ",".join(map(str, cores))


def core_facts(root: str | Path = "/") -> CoreFacts:
    """Usable cores: the smallest of affinity, cpuset and cgroup quota."""
    base = Path(root)
    affinity = usable_cores()
    ids = sorted(affinity & _cpuset(base) or affinity)
    quota = _cpu_quota(base)
    reason = f"{len(ids)} core{'' if len(ids) == 1 else 's'}{' by affinity' if _PINS_CORES else ''}"
    if len(ids) < len(affinity):
        reason = f"cpuset leaves {len(ids)} of {len(affinity)} cores"
    usable = float(len(ids))
    if quota is not None and quota < usable:
        usable = quota
        reason = f"cgroup quota of {quota:g} cores (affinity would allow {len(ids)})"
    physical = _physical_cores(base, ids) if _PINS_CORES else psutil.cpu_count(logical=False)
    return CoreFacts(ids=tuple(ids), quota=quota, usable=usable, physical=physical, reason=reason)


def _physical_cores(base: Path, ids: list[int]) -> int | None:
    """Physical cores of the usable logical ones, by their SMT siblings; None if unknown."""
    groups = set()
    for core in ids:
        topology = base / f"sys/devices/system/cpu/cpu{core}/topology"
        siblings = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        if siblings is None:
            return None
        groups.add(frozenset(_id_list(siblings)))
    return len(groups) or None


def _cpuset(base: Path) -> set[int]:
    for folder in _cgroup_folders(base, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            if ids := _id_list(_read(folder / name) or ""):
                return ids
    return set()


def _cpu_quota(base: Path) -> float | None:
    """Cores by the tightest quota from this process's cgroup up to the root."""
    quotas = []
    for folder in _cgroup_folders(base, "cpu"):
        fields = (_read(folder / "cpu.max") or "").split()  # version 2: "50000 100000" or "max 100000"
        if len(fields) != 2:  # version 1
            fields = [_read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        quota_us, period_us = (_integer(field) or 0 for field in fields)
        if quota_us > 0 and period_us > 0:
            quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def _cgroup_folders(base: Path, controller: str) -> list[Path]:
    """Folders of this process's cgroup for a controller, innermost first, then its ancestors.

    In a container the path of ``/proc/self/cgroup`` may be invisible; ancestors end at the mount point, its own cgroup.
    """
    mounts: list[tuple[Path, str]] = []
    for line in (_read(base / "proc/self/cgroup") or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        if fields[1] == "":
            mounts += [(base / "sys/fs/cgroup", fields[2]), (base / "sys/fs/cgroup/unified", fields[2])]
        elif controller in fields[1].split(","):
            mounts += [(base / "sys/fs/cgroup" / name, fields[2]) for name in (fields[1], controller)]
    folders: dict[Path, None] = {}
    for mount, inner in mounts:
        parts = [part for part in inner.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folders[mount.joinpath(*parts[:depth])] = None
    return [folder for folder in folders if folder.is_dir()]


def memory_limits(root: str | Path = "/") -> MemoryFacts:
    """Main memory, and the part available within the tightest cgroup limit; reclaimable page cache counts as free."""
    base, machine = Path(root), psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    limit, usable = None, available
    for folder in _cgroup_folders(base, "memory"):
        bound = _integer(_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes"))
        if bound is None or bound >= total:  # version 1 gives "no limit" as a number near 2**63
            continue
        used = _integer(_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")) or 0
        cache = 0
        for line in (_read(folder / "memory.stat") or "").splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                cache = max(cache, _integer(value) or 0)
        limit = bound if limit is None else min(limit, bound)
        usable = min(usable, max(0, bound - max(0, used - cache)))
    return MemoryFacts(total_bytes=total, available_bytes=available, cgroup_limit_bytes=limit, usable_bytes=usable)


def _power_source() -> PowerSource | None:
    with contextlib.suppress(OSError, AttributeError):
        battery = psutil.sensors_battery()
        if battery is not None and battery.power_plugged is not None:
            return "mains" if battery.power_plugged else "battery"
    return None


def read_machine(root: str | Path = "/", nvml: Any = None) -> Machine:
    """Reads all facts; never fails on a missing or malformed file."""
    report = read_gpus(nvml)
    return Machine(
        cpu_model=_cpu_model(Path(root)),
        cores=core_facts(root),
        memory=memory_limits(root),
        power_source=_power_source(),
        gpus=report.gpus,
        gpu_reason=report.reason,
        kernel=_read(Path(root) / "proc/sys/kernel/osrelease") or platform.release() or None,
        python_version=".".join(str(part) for part in sys.version_info[:3]),
    )


def _cpu_model(base: Path) -> str | None:
    text = _read(base / "proc/cpuinfo") or ""
    matches = (re.search(rf"^{name}\s*:\s*(\S.*)$", text, re.MULTILINE) for name in ("model name", "Model", "Hardware"))
    return clean(next((match[1] for match in matches if match), platform.processor()), 80) or None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _integer(text: str | None) -> int | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return int(value) if math.isfinite(value) else None


def _id_list(text: str) -> set[int]:
    """``"0-2,5"`` as {0, 1, 2, 5}; empty for anything else."""
    ids: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        first, last = _integer(low), _integer(high or low)
        if first is None or last is None or not 0 <= first <= last < 2**16:
            return set()
        ids.update(range(first, last + 1))
    return ids


def canonical_device(text: str) -> str:
    """``learner.device`` without short names: ``cuda`` is cuda:0, ``split`` is cuda:0+cuda:1."""
    return "cuda:0+cuda:1" if text == "split" else "+".join("cuda:0" if x == "cuda" else x for x in text.split("+"))


def is_split(device: str) -> bool:
    """True if ``learner.device`` names one device for the actor and another for the critics."""
    return "+" in canonical_device(device)


def named_devices(text: str, num_gpus: int, gpu_reason: str | None = None) -> tuple[str, ...]:
    """The learner's device, or the actor's and the critics', each as ``cpu`` or ``cuda:N``; else a ConfigError.

    ``text``: ``auto``, ``cpu``, ``cuda``, ``cuda:N``, ``split``, or two devices as ACTOR+CRITICS; ``num_gpus`` GPUs are
    usable, and ``gpu_reason`` explains why there are no more.
    """
    if text == "auto":
        return ("cuda:0",) if num_gpus else ("cpu",)
    names = tuple(canonical_device(text).split("+"))
    if len(names) > 2 or not all(re.fullmatch("cpu|cuda:[0-9]+", name) for name in names):
        raise ConfigError(f"learner.device = {text}: must be auto, cpu, cuda, cuda:N, split, or two as ACTOR+CRITICS")
    if any(name != "cpu" and int(name.removeprefix("cuda:")) >= num_gpus for name in names):
        why = f" ({gpu_reason})" if gpu_reason else ""
        raise ConfigError(
            f"learner.device = {text}: this machine has {num_gpus} usable GPUs{why}; use --device auto or cpu"
        )
    return names


_BFLOAT16_UNIT = "amx_bf16"
"""oneDNN computes float32 matmuls in bfloat16 with these instructions only: with avx512_bf16 it stays in float32."""
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_ZEN_5 = 0x1A  # Family of AMD's first processors whose AVX-512 units are 512 bits wide.


def has_bfloat16_unit(root: str | Path = "/") -> bool:
    """True if the processor has instructions for bfloat16 matmuls."""
    return _BFLOAT16_UNIT in _cpu_flags(Path(root))


def mkl_lacks_avx512(root: str | Path = "/") -> bool:
    """True on AMD processors with wide AVX-512 units, which MKL leaves unused: it takes AVX2 instead."""
    text = _read(Path(root) / "proc/cpuinfo") or ""
    family = re.search(r"^cpu family\s*:\s*(\d+)", text, re.MULTILINE)
    wide = family is not None and int(family[1]) >= _ZEN_5
    return "AuthenticAMD" in text and wide and _cpu_flags(Path(root)) >= _AVX512


def _cpu_flags(root: Path) -> set[str]:
    lines = (_read(root / "proc/cpuinfo") or "").splitlines()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def check_precision(precision: str, *, on_gpu: bool, root: str | Path = "/") -> None:
    """Rejects a matmul precision that the learner's devices do not support; the ConfigError names one that works."""
    if precision == "tf32" and not on_gpu:
        raise ConfigError(
            "learner.precision = tf32: needs a GPU; on the CPU use float32, or bfloat16 if the CPU supports it"
        )
    if precision == "bfloat16" and on_gpu:
        raise ConfigError("learner.precision = bfloat16: needs a CPU; on a GPU use tf32 or float32")
    if precision == "bfloat16" and not has_bfloat16_unit(root):
        raise ConfigError(f"learner.precision = bfloat16: this CPU has no {_BFLOAT16_UNIT}; use float32")


class GpuReport(NamedTuple):
    gpus: tuple[GpuFacts, ...]
    reason: str


def read_gpus(nvml: Any = None, visible: str | None = None, timeout_s: float = 5.0) -> GpuReport:
    """The GPUs that this process may use, in order of CUDA_VISIBLE_DEVICES (or ``visible``); none of a hung driver."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    binding = nvml or importlib.import_module("pynvml")  # takes 30 ms, for which ``--help`` does not wait
    reports = [GpuReport((), f"the NVIDIA driver did not answer within {timeout_s:g} s")]
    thread = threading.Thread(target=lambda: reports.append(_read_report(binding, wanted)), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return reports[-1]


def _read_report(nvml: Any, visible: str | None) -> GpuReport:
    try:
        with _session(nvml):
            gpus = tuple(_facts(nvml, *device) for device in enumerate(_visible_handles(nvml, visible)))
            total = _query(nvml.nvmlDeviceGetCount) or 0
    except Exception as error:  # the binding raises one class per code, and OSError for a broken library
        return GpuReport((), f"no NVIDIA driver: {error}")
    if gpus:
        return GpuReport(gpus, f"{len(gpus)} of {total} visible")
    return GpuReport((), f"CUDA_VISIBLE_DEVICES={visible!r} hides all {total} GPUs" if total else "no NVIDIA GPU")


@contextlib.contextmanager
def _session(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def _visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """Devices in CUDA_VISIBLE_DEVICES up to the first invalid name, as in CUDA; slices (MIG) only if they are named."""
    handles = [_query(nvml.nvmlDeviceGetHandleByIndex, index) for index in range(int(nvml.nvmlDeviceGetCount()))]
    if visible is None:
        return [handle for handle in handles if handle is not None]
    chosen: list[Any] = []
    for name in (part.strip() for part in visible.split(",")):
        if name.isdecimal():
            matching = handles[int(name) : int(name) + 1]
        elif name.startswith("MIG-"):
            matching = [_query(nvml.nvmlDeviceGetHandleByUUID, name)]
        elif name.startswith("GPU-"):  # CUDA accepts any unambiguous prefix of a UUID
            uuids = [_query(nvml.nvmlDeviceGetUUID, handle) or "" for handle in handles]
            matching = [handle for handle, uuid in zip(handles, uuids, strict=True) if uuid.startswith(name)]
        else:
            break
        if len(matching) != 1 or matching[0] is None or matching[0] in chosen:
            break
        chosen += matching
    return chosen


def _facts(nvml: Any, index: int, handle: Any) -> GpuFacts:
    uuid = _query(nvml.nvmlDeviceGetUUID, handle)
    memory, live = _query(nvml.nvmlDeviceGetMemoryInfo, handle), _live(nvml, handle)
    names = ("power_limit_w", "clock_max_hz", "use", "power_w", "clock_hz")
    measured: dict[str, Any] = {name: live.get(f"gpu_{name}") for name in names}
    return GpuFacts(
        index=index,
        uuid=uuid,
        name=_query(nvml.nvmlDeviceGetName, handle),
        memory_bytes=None if memory is None else int(memory.total),
        memory_free_bytes=None if memory is None else int(memory.free),
        driver=_query(nvml.nvmlSystemGetDriverVersion),
        is_mig=str(uuid).startswith("MIG-"),
        **measured,
    )


def _query(function: Callable[..., Any] | None, *arguments: Any) -> Any:
    try:
        return None if function is None else function(*arguments)
    except Exception:  # "not supported" on MIG, WSL and Jetson, "GPU is lost": all mean unknown
        return None


GPU_ENERGY = "gpu_energy_j"
"""Energy that a GPU has drawn since its driver was loaded; ``utilisation.Utilisation`` subtracts the run's start."""


class GpuMonitor:
    """Polls the visible GPUs from its own thread; ``poll`` returns the newest reading and never waits."""

    def __init__(self, nvml: Any = None, visible: str | None = None, timeout_s: float = 3.0) -> None:
        self._nvml = nvml or importlib.import_module("pynvml")
        self._visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
        self._timeout_s = timeout_s
        self._wanted = threading.Event()
        self._closing = threading.Event()
        self._reading: tuple[float, dict[str, float]] | None = None
        self._requested_s: float | None = None
        self.trouble: str | None = None  # Why a GPU's figures are missing, or None.
        self._thread = threading.Thread(target=self._run, name="gpu-monitor", daemon=True)
        self._thread.start()

    def poll(self) -> dict[str, float]:
        """Newest figures by metric name; empty if there is no GPU or the driver does not answer."""
        now_s = time.monotonic()
        if not self._thread.is_alive():
            return {}
        if not self._wanted.is_set():
            self._requested_s = now_s
            self._wanted.set()
        elif self._requested_s is not None and now_s - self._requested_s > self._timeout_s:
            self.trouble = f"the NVIDIA driver has not answered for {now_s - self._requested_s:.0f} s"
        if self._reading is None or now_s - self._reading[0] > self._timeout_s:
            return {}
        return dict(self._reading[1])

    def close(self, timeout_s: float = 1.0) -> None:
        """Lets the thread shut NVML down; a hung driver is left alone after the time limit."""
        self._closing.set()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            with _session(self._nvml):
                handles = _visible_handles(self._nvml, self._visible)
                while handles and not self._closing.is_set():  # the end of a reading clears what close() has set
                    self._wanted.wait()
                    if self._closing.is_set():
                        break
                    self._reading = (time.monotonic(), self._read(handles))
                    self._wanted.clear()
        except Exception as error:
            if self._reading is not None:  # else there is no driver: nothing to poll, and read_gpus reports why
                self.trouble = f"the NVIDIA driver failed: {type(error).__name__}: {error}"

    def _read(self, handles: list[Any]) -> dict[str, float]:
        values: dict[str, float] = {}
        silent = []
        for index, handle in enumerate(handles):
            live = _live(self._nvml, handle)
            values.update({f"{name}/{index}": value for name, value in live.items()})
            if not live:
                silent.append(str(index))
        self.trouble = f"GPU {', '.join(silent)} does not respond (lost?)" if silent else None
        return values


def _live(nvml: Any, handle: Any) -> dict[str, float]:
    rates = _query(nvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _query(nvml.nvmlDeviceGetMemoryInfo, handle)
    power_mw = _query(nvml.nvmlDeviceGetPowerUsage, handle)
    clock_mhz = _query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
    limit_mw = _query(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    highest_mhz = _query(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
    energy_mj = _query(getattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", None), handle)
    values = _known(
        {
            "gpu_use": rates and rates.gpu / 100,
            "gpu_memory_used_bytes": memory and float(memory.used),
            "gpu_power_w": power_mw and power_mw / 1000,
            "gpu_clock_hz": clock_mhz and clock_mhz * 1e6,
            GPU_ENERGY: energy_mj and energy_mj / 1000,
        }
    )
    if not values:  # the driver may still know the limits of a lost GPU
        return {}
    limits = {"gpu_power_limit_w": limit_mw and limit_mw / 1000, "gpu_clock_max_hz": highest_mhz and highest_mhz * 1e6}
    return values | _known({"gpu_memory_bytes": memory and float(memory.total), **limits})


def _known(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}
