"""Counts the kernels of an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spreeze.workers.replay_trainer import ReplayTrainer
from spreeze.workers.torch_devices import gpus_of, synchronize

_VIEWS = {
    "alias",
    "as_strided",
    "detach",
    "diagonal",
    "expand",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
    "_unsafe_view",
}
"""Operations of PyTorch that compute nothing."""


class Operations(TorchDispatchMode):
    """Counts the operations within this context that compute something; for a GPU each is a kernel, or a few."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.partition("::")[2] not in _VIEWS
        return func(*args, **(kwargs or {}))


def kernels_of(work: Callable[[], object], device: str) -> int:
    """Kernels and copies that ``work`` runs on a GPU; its operations on a CPU and where no profiler can count."""
    if gpus_of(device):
        profiler: Any = torch.profiler
        on_gpu = torch.profiler.ProfilerActivity.CUDA.name
        synchronize(device)
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
            work()
            synchronize(device)
        found = [event for event in profile.events() if str(event.device_type).endswith(on_gpu)]
        if found:
            return len(found)
    counted = Operations()
    with counted:
        work()
    return counted.count


def kernels_of_update(trainer: ReplayTrainer) -> int:
    """Kernels of one update with its draw from GPU replay, which this runs; on a GPU by its profiler.

    On a CPU, and where the profiler sees nothing, these are the operations that compute; a few of them are more
    than one kernel.
    """
    launches, period = trainer._graphed, trainer.algorithm.period

    def single() -> None:
        for _ in range(period):
            trainer.update(1) if launches is None else trainer._update_with(launches.gpu_replay.draw())

    found = kernels_of(single, trainer._device_text) / period
    trainer.updates = trainer.algorithm.updates
    return round(found)
