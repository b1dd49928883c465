"""Statistics by which batches from replay are scaled: of observations, and of the samplers' discounted returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from spreeze.inference.normalizer import (
    OBS_CLIP,
    REWARD_CLIP,
    Normalizer,
    ReturnMoments,
    averaged_statistics,
    set_averaged_statistics,
)
from spreeze.transport.replay_ring import ReplayReader
from spreeze.types import RowLayout
from spreeze.workers.gpu_replay import DeviceStream, Staging
from spreeze.workers.on_device.device_replay import DeviceReplay

_MIN_NEW_ROWS = 256  # new rows that the normalizer waits for: adding this many takes no longer than adding a few
_RAW_CLIP = 1e15
"""Bound of rewards that are not scaled: the square of a larger one, summed over weights, is beyond float32."""


class ReplayStatistics:
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

    @property
    def return_scale(self) -> float:
        """Divisor of rewards [return]; 1 where they are not scaled."""
        return 1.0 if self.returns is None else self.returns.scale

    def averaged_statistics(self) -> np.ndarray:
        """Statistics to average beside the parameters: counts, means and deviations, float64 [k]."""
        return averaged_statistics((self.normalizer, self.returns))

    def set_averaged_statistics(self, values: np.ndarray) -> None:
        """Replaces the statistics by the mean over several learners."""
        set_averaged_statistics((self.normalizer, self.returns), values)
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
            "counted": {"rows": self._rows_counted, "returns": self._returns_counted.tolist()},
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

    def apply(self, rows: Tensor) -> None:
        """Scales rewards, obs and next_obs of rows [B, W] in place, on the device alone."""
        reward = rows[:, self._reward]
        reward.mul_(self._factor).nan_to_num_(0.0, 0.0, 0.0).clamp_(self._low, self._high)
        if self._normalizes:
            for columns in self._columns:
                rows[:, columns].sub_(self._mean).div_(self._std).clamp_(-OBS_CLIP, OBS_CLIP)
