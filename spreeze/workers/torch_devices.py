"""The learner's devices, threads and precision, from settings to what this machine has."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from spreeze.algorithms.parallel_work import TwoThreads
from spreeze.config.schema import LearnerConfig
from spreeze.errors import ConfigError
from spreeze.machine.hardware import check_precision, mkl_lacks_avx512, named_devices
from spreeze.types import EnvSpec

_TF32_CAPABILITY = 8  # Ampere: first compute capability with TF32
_MIN_FOR_ONEDNN = 2**22
"""Multiplications of a matmul from which an update is faster by oneDNN with AVX-512 than by MKL without: batch 64 with
256 units, or 256 with 128."""
_ALLOCATOR_WORDS = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")
"""Texts of PyTorch and of C++ when host memory runs out."""


def resolve_device(device: str) -> str:
    """Resolves "auto" and "split" to devices of this machine, or ``ACTOR+CRITICS``; a ConfigError if it has too few."""
    return "+".join(named_devices(device, torch.cuda.device_count() if torch.cuda.is_available() else 0))


def gpus_of(device: str) -> list[str]:
    """The GPUs among the resolved devices, each once."""
    return sorted({part for part in device.split("+") if part != "cpu"})


def synchronize(device: str) -> None:
    for gpu in gpus_of(device):
        torch.cuda.synchronize(gpu)


def forget_memory(device: str) -> None:
    """Frees GPU memory that earlier work of this process left, and resets ``peak_bytes``."""
    gc.collect()
    torch.cuda.init()  # type: ignore[no-untyped-call]  # or there is no peak yet that could be reset
    with contextlib.suppress(RuntimeError):  # the allocator does not free after a recording that failed
        release_cached()
    for gpu in gpus_of(device):
        torch.cuda.reset_peak_memory_stats(gpu)


def release_cached() -> None:
    """Returns the memory that PyTorch and cuBLAS cache to the GPUs; no recorded graph may run or be replayed again."""
    cuda: Any = torch.cuda
    if cuda.is_initialized() and hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
    cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """True if an error only means too little memory, which leaves the device usable.

    On a GPU only ``torch.OutOfMemoryError``, not other CUDA errors that mention memory. On a CPU PyTorch raises a
    RuntimeError, recognized by its text; Python and NumPy raise MemoryError.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _ALLOCATOR_WORDS)


def peak_bytes(device: str) -> int:
    """Peak reserved memory of the GPUs, or else of this process."""
    gpus = gpus_of(device)
    if gpus:
        return sum(int(torch.cuda.max_memory_reserved(gpu)) for gpu in gpus)
    return (1 if sys.platform == "darwin" else 1024) * int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@contextlib.contextmanager
def learner_threads(spec: EnvSpec, threads: int, device: str) -> Iterator[TwoThreads | None]:
    """Sets this process's threads of one matmul, and yields a second thread if the algorithms can use one.

    Denormal numbers become zero in this thread and those it starts: Adam's mean of a zero gradient (a unit switched off
    by the ReLU) is denormal after 900 updates, and slows a processor about a hundred times; in real runs only.
    """
    flushed = torch.set_flush_denormal(True)
    splits = device == "cpu" and spec.choices is None and threads > 1
    of_a_matmul = threads // 2 if splits else threads
    parallel = TwoThreads(of_a_matmul) if splits else None
    torch.set_num_threads(of_a_matmul)
    try:
        yield parallel
    finally:
        if parallel is not None:
            parallel.close()
        if flushed:
            torch.set_flush_denormal(False)


def largest_matmul(hidden_sizes: Sequence[int], rows: int) -> int:
    """Multiplications of the largest matmul of an update of that many rows: between two hidden layers."""
    return rows * max((first * second for first, second in pairwise(hidden_sizes)), default=0)


def _matmuls_round() -> bool:
    size, just_above_one = 256, 1.0 + 2.0**-12  # bfloat16 makes it 1
    product = torch.full((size, size), just_above_one) @ torch.ones(size, size)
    return bool((product != size * just_above_one).any())


@contextlib.contextmanager
def matmuls_in(precision: str, device: str, largest: int = 0) -> Iterator[None]:
    """Context in which float32 matmuls of this process round their inputs to ``precision``.

    ``largest``: multiplications of the largest one (``largest_matmul``), from which oneDNN's float32 kernels are used
    on processors where they are twice as fast as MKL's; small ones take longer. Networks must be created within this
    context. A ConfigError if a device does not have this precision.
    """
    gpus = gpus_of(device)
    check_precision(precision, on_gpu=bool(gpus))
    old = [gpu for gpu in gpus if torch.cuda.get_device_capability(gpu)[0] < _TF32_CAPABILITY]
    if precision == "tf32" and old:
        raise ConfigError(
            f"learner.precision = tf32: {old[0]} has a compute capability below {_TF32_CAPABILITY}.0, without "
            "TF32; use float32"
        )
    on_gpu, on_cpu = "tf32" if precision == "tf32" else "ieee", "bf16" if precision == "bfloat16" else "ieee"
    backends: Any = torch.backends
    settings = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting, value in zip(settings, (on_gpu, on_gpu, on_cpu, on_cpu), strict=True):
            setting.fp32_precision = value
        if precision == "float32" and not gpus and largest >= _MIN_FOR_ONEDNN and mkl_lacks_avx512():
            # Permission to round sends matmuls to oneDNN. It does not make use of it where it has no such kernel.
            backends.mkldnn.matmul.fp32_precision = "bf16"
            if _matmuls_round():
                backends.mkldnn.matmul.fp32_precision = "ieee"
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


@contextlib.contextmanager
def open_device(
    learner: LearnerConfig, spec: EnvSpec, hidden_sizes: Sequence[int], rows: int
) -> Iterator[tuple[str, TwoThreads | None]]:
    """Prepares this process for updates of that many rows: precision and threads. Yields device and second thread.

    Networks must be created within this context. A ConfigError if the device, or its precision, is not available.
    """
    device = resolve_device(learner.device)
    with (
        matmuls_in(learner.precision, device, largest_matmul(hidden_sizes, rows)),
        learner_threads(spec, learner.threads, device) as parallel,
    ):
        yield device, parallel


def malloc_trim() -> None:
    """Asks the allocator to return freed memory to the system (glibc only): it would add up over a week."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
