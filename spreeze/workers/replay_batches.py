"""Draws batches from replay on the host, scales them, and hands them to the devices of critics and actor.

They are scaled by statistics of observations, and of the samplers' discounted returns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from spreeze.algorithms.off_policy import DeviceSplit
from spreeze.config.algorithm_bases import AlgorithmConfig
from spreeze.inference.normalizer import OBS_CLIP, REWARD_CLIP, Normalizer, ReturnMoments, ScalingStatistics
from spreeze.transport.prioritised_replay import PrioritisedReader
from spreeze.transport.replay_ring import ReplayReader
from spreeze.types import EnvSpec, RowLayout, SequenceBatch, TransitionBatch
from spreeze.workers.gpu_replay import DeviceReplay, DeviceStream, Staging

_MIN_NEW_ROWS = 256  # new rows that the normalizer waits for: adding this many takes no longer than adding a few
_RAW_CLIP = 1e15
"""Bound of rewards that are not scaled: the square of a larger one, summed over weights, is beyond float32."""


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


class ReplayStatistics(ScalingStatistics):
    """Counts each row and each return once, also across sessions; batches on the host are scaled here."""

    def __init__(
        self,
        layout: RowLayout,
        normalizer: Normalizer | None,
        returns: ReturnMoments | None,
        *,
        session: float,
        loaded_rows: tuple[int, ...],
    ) -> None:
        """``session`` and ``loaded_rows`` as in ``ReplayTrainer``."""
        self._layout, self.normalizer, self.returns = layout, normalizer, returns
        self._session, self._rows_counted = session, list(loaded_rows)
        self._returns_counted = np.zeros(3)
        """Sums of this session that are in ``returns``."""
        self._reward_clip = np.float32(_RAW_CLIP if returns is None else REWARD_CLIP)
        self.on_device: DeviceNormalizer | None = None
        """Scales batches of GPU replay, if there is one."""

    def copy_to(self, device: DeviceNormalizer | None) -> None:
        """Keeps a copy on the device from now on; None: no longer."""
        self.on_device = device
        self._renew()

    def update_obs(self, reader: ReplayReader | DeviceReplay) -> None:
        """Counts the observations of rows that are new in replay; waits while there are few."""
        if self.normalizer is None:
            return
        self._rows_counted += [0] * (len(reader.ends) - len(self._rows_counted))
        # Replay on a device starts empty again with its learner.
        self._rows_counted = [min(both) for both in zip(self._rows_counted, reader.ends, strict=True)]
        waiting = (sum(reader.ends) - sum(self._rows_counted)) * self._layout.env_steps_per_row
        if waiting < _MIN_NEW_ROWS and self.normalizer.count:
            return
        for shard, begin in enumerate(self._rows_counted):
            obs, self._rows_counted[shard] = reader.newer(shard, begin, self._layout.normalized_columns)
            if len(obs := self._layout.counted(obs)):
                self.normalizer.update(obs)
        if waiting > 0:
            self._renew()

    def update_returns(self, sums: np.ndarray) -> None:
        """``sums``: count, sum and sum of squares of this session's discounted returns."""
        count, total, squares = (sums - self._returns_counted).tolist()
        if self.returns is None or count <= 0.0:
            return
        m2 = squares - total**2 / count
        if not m2 > -1e-6 * squares:
            return  # a sampler was just writing them
        self.returns.merge(count, total / count, max(m2, 0.0))
        self._returns_counted = np.array(sums)
        self._renew()

    def set_average_statistics(self, values: np.ndarray) -> None:
        super().set_average_statistics(values)
        self._renew()

    def _renew(self) -> None:
        if self.on_device is not None:
            self.on_device.renew(self.normalizer, 1.0 / self.return_scale, float(self._reward_clip))

    def scale_rewards(self, reward: np.ndarray) -> None:
        """Divides rewards in place by the scale of returns, and bounds them; one that is not finite becomes 0."""
        bound = self._reward_clip
        if self.returns is not None:
            reward *= np.float32(1.0 / self.returns.scale)
        if reward.max() <= bound and reward.min() >= -bound:
            return
        np.nan_to_num(reward, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        np.clip(reward, -bound, bound, out=reward)

    def state(self) -> dict[str, Any]:
        return {
            "normalizer": self.normalizer.state() if self.normalizer else None,
            "returns": self.returns.state() if self.returns else None,
            "session": self._session,
            "counted": {"rows": list(self._rows_counted), "returns": self._returns_counted.tolist()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues from ``state``, also of another session, whose counts mean other rows."""
        if self.normalizer is not None and state["normalizer"] is not None:
            self.normalizer.load_state(state["normalizer"])
        if self.returns is not None and state.get("returns") is not None:
            self.returns.load_state(state["returns"])
        if state.get("session") == self._session:
            self._rows_counted = [int(rows) for rows in state["counted"]["rows"]]
            self._returns_counted = np.array(state["counted"]["returns"])
        self._renew()


class DeviceNormalizer:
    """Scales batches as ``Normalizer.apply`` and ``ReplayStatistics`` do on the host."""

    def __init__(self, layout: RowLayout, device: torch.device, stream: DeviceStream) -> None:
        """``stream`` is that of the updates."""
        self._columns, self._reward, self._stream = (layout.obs, layout.next_obs), layout.reward, stream
        size = layout.obs_dim
        self._staging = Staging((2 * size + 3,), torch.float32, pinned=device.type == "cuda")
        self._values = torch.zeros(2 * size + 3, device=device)
        self._mean, self._std = self._values[:size], self._values[size : 2 * size]
        self._factor, self._low, self._high = self._values[2 * size :]
        self._normalizes = False

    def renew(self, normalizer: Normalizer | None, factor: float, bound: float) -> None:
        """Takes over the statistics of observations, if there are any, and the factor and bound of rewards."""
        self._normalizes = normalizer is not None
        values, staged = [factor, -bound, bound], self._staging.next()
        size = len(self._mean)
        if normalizer is not None:
            staged.numpy()[:size], staged.numpy()[size : 2 * size] = normalizer.mean, normalizer.std
        staged.numpy()[2 * size :] = values
        self._stream.copy(self._values, staged)
        self._staging.sent(self._stream.mark())

    def apply(self, rows: torch.Tensor) -> None:
        """Scales rewards, obs and next_obs of rows [B, W] in place, on the device alone."""
        reward = rows[:, self._reward]
        reward.mul_(self._factor).nan_to_num_(0.0, 0.0, 0.0).clamp_(self._low, self._high)
        if self._normalizes:
            for columns in self._columns:
                rows[:, columns].sub_(self._mean).div_(self._std).clamp_(-OBS_CLIP, OBS_CLIP)
