"""NVIDIA GPUs through NVML (package nvidia-ml-py): facts once, live use from a separate thread.

A driver that lost its GPU can hang every call (Xid 79). So no call is made from the caller's thread: facts are read
with a time limit, and a thread polls live use, whose newest reading the caller gets without waiting. A field is None if
the driver does not provide it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


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
        self._closing = False
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
        self._closing = True
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            with _session(self._nvml):
                handles = _visible_handles(self._nvml, self._visible)
                while handles:
                    self._wanted.wait()
                    if self._closing:
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
