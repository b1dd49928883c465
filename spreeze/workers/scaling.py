"""The normaliser's mean and deviation on the learner's device, for batches that are drawn there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spreeze.normalizer import Normalizer
from spreeze.types import RowLayout
from spreeze.workers.streams import Lane, Staging


class DeviceScale:
    """Scales batches as ``Normalizer.apply`` does, by the statistics of the latest ``renew``."""

    def __init__(self, normalizer: Normalizer, layout: RowLayout, device: torch.device, lane: Lane) -> None:
        """Makes the device's copy.

        Args:
            normalizer: of the learner; takes in batches on the host.
            layout: of the rows.
            device: of the batches.
            lane: order of the updates.
        """
        self._normalizer, self._columns, self._lane = normalizer, (layout.obs, layout.next_obs), lane
        shape = (2, layout.obs_dim)
        self._staging = Staging(shape, torch.float32, pinned=device.type == "cuda")
        self._mean, self._std = self._scale = torch.zeros(shape, device=device)
        self.renew()

    def renew(self) -> None:
        """Takes over what the normaliser has found so far; updates given from now on use it."""
        staged = self._staging.next()
        np.stack((self._normalizer.mean, self._normalizer.std), out=staged.numpy(), casting="same_kind")
        self._lane.copy(self._scale, staged)
        self._staging.sent(self._lane.mark())

    def apply(self, rows: Tensor) -> None:
        """Scales obs and next_obs of rows [B, W] in place; work of the device alone."""
        for columns in self._columns:
            rows[:, columns].sub_(self._mean).div_(self._std).clamp_(-Normalizer.CLIP, Normalizer.CLIP)
