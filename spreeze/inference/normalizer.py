"""Running mean and deviation of observations (Welford's method in batches); NumPy only."""

from __future__ import annotations

from typing import Any

import numpy as np


class Normalizer:
    """Statistics over all observations seen; applied with clipping, the same in learner and policies."""

    CLIP = 10.0

    def __init__(self, obs_dim: int) -> None:
        self.count = 0.0
        self.mean = np.zeros(obs_dim, np.float64)
        self._m2 = np.zeros(obs_dim, np.float64)

    def update(self, obs: np.ndarray) -> None:
        """Takes in observations [B, O] (Chan et al. 1979, parallel variance)."""
        batch = obs.astype(np.float64)
        count = float(len(batch))
        mean = batch.mean(axis=0)
        delta = mean - self.mean
        total = self.count + count
        self.mean = self.mean + delta * (count / total)
        self._m2 = self._m2 + ((batch - mean) ** 2).sum(axis=0) + delta**2 * (self.count * count / total)
        self.count = total

    @property
    def std(self) -> np.ndarray:
        """Deviation [O]; 1 before anything was seen, never below 1e-4."""
        if self.count < 2:
            return np.ones_like(self.mean)
        return np.maximum(np.sqrt(self._m2 / self.count), 1e-4)

    def apply(self, obs: np.ndarray) -> None:
        """Normalises observations [B, O] in place."""
        obs -= self.mean.astype(np.float32)
        obs /= self.std.astype(np.float32)
        np.clip(obs, -self.CLIP, self.CLIP, out=obs)

    def arrays(self) -> dict[str, np.ndarray]:
        """What a policy needs: float32 ``obs_mean`` and ``obs_std`` [O]."""
        return {"obs_mean": self.mean.astype(np.float32), "obs_std": self.std.astype(np.float32)}

    def state(self) -> dict[str, Any]:
        """JSON form of the exact state."""
        return {"count": self.count, "mean": self.mean.tolist(), "m2": self._m2.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what ``state`` gave."""
        self.count = float(state["count"])
        self.mean = np.asarray(state["mean"], np.float64)
        self._m2 = np.asarray(state["m2"], np.float64)
