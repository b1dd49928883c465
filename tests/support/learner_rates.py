"""Updates/s of the whole learner, with its draws from replay, and how often the host waits for a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any, Self

import torch
from figures import Row, row

from spreeze.algorithms.off_policy import DeviceSplit, OffPolicyAlgorithm
from spreeze.cli.bench import synthetic_spec
from spreeze.config.algorithm_bases import AlgorithmConfig
from spreeze.config.schema import SECTIONS, LearnerConfig
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingSpec
from spreeze.transport.transitions import fill_with_synthetic_rows
from spreeze.tuner.update_probe import updates_per_s
from spreeze.types import RowLayout
from spreeze.workers.replay_trainer import ReplayTrainer
from spreeze.workers.torch_devices import gpus_of, largest_matmul, learner_threads, matmuls_in, resolve_device

_REPLAY_ROWS, _WARMUP_UPDATES = 2**17, 16


class CountedSplit(DeviceSplit):
    """Counts the bytes that cross, or that would cross if one device were two."""

    def __init__(self, algorithm: OffPolicyAlgorithm) -> None:
        """Counts those of ``algorithm`` from now on; updates in a CUDA graph count once."""
        devices = algorithm._devices
        super().__init__(devices.actor, devices.critics, split=devices.split)
        self.crossed_bytes = 0
        algorithm._devices = self

    def _moved(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.crossed_bytes += tensor.nbytes if self.split else 0
        return super()._moved(tensor, device)


class HostWaits:
    """Counts the operations within this context that made the host wait for a GPU.

    Explicit waits (``synchronize``, events) do not count. On a CPU nothing waits.
    """

    def __init__(self, device: str) -> None:
        self.count = 0
        self._on_gpu = bool(gpus_of(device))
        self._catching = warnings.catch_warnings(record=True)
        self._caught: list[warnings.WarningMessage] = []

    def __enter__(self) -> Self:
        if self._on_gpu:
            caught = self._catching.__enter__()
            self._caught = [] if caught is None else caught
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode("default")
            # Not the one that says, at first use, that the mode does not know all such operations.
            self.count = sum("called a synchroniz" in str(warning.message) for warning in self._caught)
            self._catching.__exit__(None, None, None)


def learner_rows(
    batch_sizes: Sequence[int],
    repeats: int,
    device: str = "cpu",
    algo: str = "sac",
    *,
    threads: int = 1,
    precision: str = "float32",
    overlap: bool = False,
    updates_per_launch: int = 1,
    repeat_s: float = 2.0,
) -> list[Row]:
    """Rates, the parts of an update's time, what crosses a split, and how often the host waits for the device.

    Networks and learning rates are the algorithm's defaults, replay holds synthetic rows. On a GPU, batches come from
    the GPU replay.

    Raises:
        ConfigError: the device or the precision is not there.
    """
    spec = synthetic_spec()
    layout, config, device = RowLayout.of(spec), SECTIONS[algo](), resolve_device(device)
    assert isinstance(config, AlgorithmConfig)
    rows: list[Row] = []
    with contextlib.closing(ReplayRing.create(RingSpec(layout, 1, _REPLAY_ROWS))) as ring:
        fill_with_synthetic_rows(ring, spec)
        for batch_size in batch_sizes:
            largest = largest_matmul(config.hidden_sizes, batch_size)
            with matmuls_in(precision, device, largest), learner_threads(spec, threads, device) as parallel:
                learner = LearnerConfig(
                    batch_size=batch_size, device=device, overlap=overlap, updates_per_launch=updates_per_launch
                )
                more: dict[str, Any] = {"seed": 0, "normalize_obs": False, "parallel": parallel}
                trainer = ReplayTrainer(spec, algo, config, layout, ReplayReader(ring), learner, **more)
                case: dict[str, object] = {"batch_size": batch_size, "algo": algo, "device": device}
                case |= {"learner_threads": threads, "precision": precision, "overlap": str(overlap)}
                case["notes"] = trainer.notes
                rows += _measured(trainer, repeats, repeat_s, device, case)
    return rows


def _measured(trainer: ReplayTrainer, repeats: int, repeat_s: float, device: str, case: dict[str, object]) -> list[Row]:
    while trainer.updates < _WARMUP_UPDATES:
        trainer.update()
    began, devices = trainer.updates, CountedSplit(trainer.algorithm)
    before_s = trainer.gather_s, trainer.critic_s, trainer.actor_s
    rates = [updates_per_s(trainer, repeat_s, device) for _ in range(repeats)]
    updates = trainer.updates - began
    parts_s = [
        now - before
        for now, before in zip((trainer.gather_s, trainer.critic_s, trainer.actor_s), before_s, strict=True)
    ]
    crossed = devices.crossed_bytes
    with HostWaits(device) as waits:
        checked = trainer.update()
    return [
        row("updates_per_s", "1/s", rates, **case),
        row("update_frames_per_s", "1/s", [rate * trainer.batch_size for rate in rates], **case),
        *(
            row(f"learner_{part}_share", "share", [part_s / sum(parts_s)], **case)
            for part, part_s in zip(("gather", "critic", "actor"), parts_s, strict=True)
        ),
        row("crossed_bytes_per_update", "bytes", [crossed / updates], **case),
        row("host_waits_per_update", "waits", [waits.count / checked], **case),
    ]
