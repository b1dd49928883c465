"""Draws batches from replay on the host, scales them, and hands them to the devices of critics and actor."""

from __future__ import annotations

import numpy as np
import torch

from spreeze.algorithms.off_policy import DeviceSplit
from spreeze.config.algorithm_bases import AlgorithmConfig
from spreeze.transport.prioritised_replay import PrioritisedReader
from spreeze.transport.replay_ring import ReplayReader
from spreeze.types import EnvSpec, RowLayout, SequenceBatch, TransitionBatch
from spreeze.workers.on_device.device_replay import DeviceReplay
from spreeze.workers.replay_statistics import ReplayStatistics


class ReplayBatches:
    """One batch of host memory, filled again at each draw, and its copies on GPUs.

    With ``--device split`` the actor's device gets the observations alone.
    """

    def __init__(
        self,
        spec: EnvSpec,
        layout: RowLayout,
        reader: ReplayReader | DeviceReplay,
        statistics: ReplayStatistics,
        devices: DeviceSplit,
        config: AlgorithmConfig,
        *,
        seed: int,
    ) -> None:
        """``resize`` allocates the memory."""
        self._layout, self._reader, self._statistics, self._gamma = layout, reader, statistics, config.gamma
        self.prioritised = reader if isinstance(reader, PrioritisedReader) else None
        self._importance_exponent = config.importance_exponent
        self._weight: torch.Tensor | None = None
        """[B], importance weights of the batch's rows, with prioritised replay."""
        self._device, self._actor_device = devices.critics, devices.actor
        self._frame_shape = None if spec.frames is None else spec.frames.shape
        self.rng = np.random.default_rng([seed, 7])
        gpus = {device for device in (self._device, self._actor_device) if device.type == "cuda"}
        # A waiting host yields its core: samplers need it.
        self._copied = {gpu: torch.cuda.Event(blocking=True) for gpu in gpus}  # type: ignore[no-untyped-call]

    def resize(self, batch_size: int) -> None:
        """Draws that many env steps at once from now on; frees the old buffers first, since memory may be short."""
        pinned, layout = bool(self._copied), self._layout
        self.num_rows = max(1, batch_size // layout.env_steps_per_row)
        self.num_env_steps = self.num_rows * layout.env_steps_per_row
        """Env steps of an update; with sequences each row has several."""
        self._host_batch: TransitionBatch | SequenceBatch | None = None
        self._frames: torch.Tensor | None = None
        self._actor_obs: torch.Tensor | None = None
        self.rows, self._rows_np = torch.empty(0), np.empty(0, np.float32)
        self._rewards_np = self._rows_np
        self.rows = torch.empty((self.num_rows, layout.width), dtype=torch.float32, pin_memory=pinned)
        self._rows_np = self.rows.numpy()
        is_whole = layout.sequence is not None
        self._rewards_np = self._rows_np[:, layout.sequence_rewards if is_whole else layout.reward]
        if self.prioritised is not None:
            self._weight = torch.ones(self.num_rows, pin_memory=pinned)
        if self._frame_shape is not None:
            shape = (batch_size, layout.window, *self._frame_shape)
            self._frames = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        elif self._actor_device != self._device:
            self._actor_obs = torch.empty((2, batch_size, layout.obs_dim), pin_memory=pinned)
        self._frames_np = None if self._frames is None else self._frames.numpy()

    def draw(self, progress: float) -> int:
        """Draws and scales the next batch; returns the number of repeated draws.

        Importance weights are those at ``progress``, a fraction of the run.
        """
        for copied in self._copied.values():
            copied.synchronize()  # the copy of the pinned rows may not be done yet
        frames = self._frames_np
        frames = frames if frames is None else frames.reshape(*frames.shape[:2], -1)
        redrawn = self._reader.sample(self.rng, self._rows_np, frames)
        if self.prioritised is not None and self._weight is not None:
            exponent = self._importance_exponent
            exponent += (1.0 - exponent) * progress
            self._weight.numpy()[:] = self.prioritised.importance_weights(exponent)
        self._statistics.scale_rewards(self._rewards_np)
        if self._statistics.normalizer is not None:
            for obs in self._layout.observations(self._rows_np, self._frames_np):
                self._statistics.normalizer.apply(obs)
        return redrawn

    def batch(self) -> TransitionBatch | SequenceBatch:
        """The latest batch on the critics' device."""
        if self._device in self._copied:
            rows = self.rows.to(self._device, non_blocking=True)
            frames = None if self._frames is None else self._frames.to(self._device, non_blocking=True)
            self._copied[self._device].record(torch.cuda.current_stream(self._device))
            return self.split(rows, frames)
        if self._host_batch is None or self._layout.n_step > 1:
            # One-step batches are views of the same rows, made once.
            self._host_batch = self.split(self.rows, self._frames)
        return self._host_batch

    def actor_batch(self) -> TransitionBatch | None:
        """The actor's part of the latest batch on its own device; None if it shares the critics' device."""
        if self._actor_obs is None:
            return None
        torch.stack((self.rows[:, self._layout.obs], self.rows[:, self._layout.next_obs]), out=self._actor_obs)
        batch = _observations(self._actor_obs.to(self._actor_device, non_blocking=True))
        if self._actor_device in self._copied:
            self._copied[self._actor_device].record(torch.cuda.current_stream(self._actor_device))
        return batch

    def actor_batch_of(self, rows: torch.Tensor) -> TransitionBatch | None:
        """``actor_batch`` of rows that are on the critics' device."""
        if self._actor_obs is None:
            return None
        layout = self._layout
        return _observations(torch.stack((rows[:, layout.obs], rows[:, layout.next_obs])).to(self._actor_device))

    def split(self, rows: torch.Tensor, frames: torch.Tensor | None = None) -> TransitionBatch | SequenceBatch:
        """The columns of rows [B, W] by name."""
        layout, gamma = self._layout, self._gamma
        batch: TransitionBatch | SequenceBatch
        if layout.sequence is not None:
            batch = layout.split_sequences(rows, gamma)
        else:
            batch = layout.split(rows, gamma) if frames is None else layout.split_frames(rows, frames, gamma)
        if self._weight is None:
            return batch
        return batch._replace(weight=self._weight.to(self._device, non_blocking=True))


def _observations(both: torch.Tensor) -> TransitionBatch:
    """A batch of obs and next_obs [2, B, obs_dim] alone, as the actor needs them."""
    return TransitionBatch(both[0], None, None, None, None, None, both[1])
