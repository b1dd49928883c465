"""Normalization of observations, and scaling of rewards, by running standard deviations.

With returns in units of their deviation, one set of constants fits tasks of any reward size: learning rates, the
entropy coefficient, Huber's threshold, the grid of returns. Processes that step environments add their rewards to
``DiscountedReturns``; the learner divides rewards by ``scale``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spreeze.errors import WeightsError

OBS_CLIP = 10.0  # bound of a normalized observation
# As float32 arrays, since a ufunc takes a microsecond to find the type of a Python number.
_LOW, _HIGH = np.array(-OBS_CLIP, np.float32), np.array(OBS_CLIP, np.float32)
REWARD_CLIP = 10.0  # bound of a scaled reward, as in OpenAI's baselines
_LARGEST, _JUDGED = 3, 10
_STEPS = 64  # number of rewards whose returns are computed by one matmul
_MIN_FRACTION = 1e-9
"""Fraction of the mean square below which a variance is rounding error, so that all returns count as equal."""
SPIKE, SPIKES = 1000.0, 0.1
"""Distance of a spike, in standard deviations of at least 1; largest fraction of a batch that may be left out."""


def obs_scale(arrays: dict[str, np.ndarray], obs_dim: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and standard deviation [O] among a policy's arrays; None without a normalizer."""
    if "obs_mean" not in arrays:
        return None
    mean, std = (np.ascontiguousarray(arrays[name], np.float32) for name in ("obs_mean", "obs_std"))
    if mean.shape != (obs_dim,) or std.shape != (obs_dim,):
        raise WeightsError(f"normalizer has shapes {mean.shape} and {std.shape}; ({obs_dim},) is needed")
    return mean, std


def scaled(x: np.ndarray, scale: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray:
    """Observations [N, O], normalized and clipped if there is a normalizer."""
    if scale is None:
        return x
    mean, std = scale
    x = np.subtract(x, mean)
    x /= std
    np.maximum(x, _LOW, out=x)
    np.minimum(x, _HIGH, out=x)
    return x


def without_spikes(values: np.ndarray, centre: np.ndarray, std: np.ndarray | None) -> np.ndarray:
    """Values [B, O] with spikes replaced by ``centre`` [O], so that they do not distort running statistics.

    A spike lies more than ``SPIKE`` times ``std`` [O] (at least 1; None: the largest distance of nine tenths of the
    values) from the centre. A column with more than one spike, and more than the fraction ``SPIKES``, is left
    unchanged.
    """
    distance = np.abs(values - centre)
    if std is None:
        std = np.quantile(distance, 1.0 - SPIKES, axis=0)
    spikes = distance > SPIKE * np.maximum(std, 1.0)
    spikes &= spikes.sum(axis=0) <= max(1.0, SPIKES * len(values))
    return np.where(spikes, centre, values)


_FREE_BATCHES = 1000  # batches in which a value varied, before its bounds apply
_MAX_SHIFT, _MAX_STD = 0.5, 1.5
"""Bounds of what a later batch counts: its distance from the mean and its deviation, in running deviations."""
_MIN_STD = 1e-4


class Normalizer:
    """Running mean and standard deviation of observations in the learner (Welford's method in batches).

    A policy that falls over gives observations far from all before. Unbounded, a few of them shift the statistics so
    much that no policy works any more, not even the best one. So later batches count with bounds.
    """

    def __init__(self, obs_dim: int, mask_dim: int = 0) -> None:
        """The last ``mask_dim`` values, an action mask, are not normalized."""
        self._mask = slice(obs_dim - mask_dim, obs_dim)
        self.count = 0.0
        self._batches = np.zeros(obs_dim, np.int64)
        """Batches in which each value varied."""
        self.mean = np.zeros(obs_dim, np.float64)
        self._m2 = np.zeros(obs_dim, np.float64)

    def update(self, obs: np.ndarray) -> None:
        """Adds observations [B, O] (Chan et al. 1979, parallel variance)."""
        batch = obs.astype(np.float64)
        batch[:, self._mask] = 0.0
        count = float(len(batch))
        mean = batch.mean(axis=0)
        squares = ((batch - mean) ** 2).sum(axis=0)
        std = self.std if self.count else None
        if (squares > (0.5 * SPIKE * np.maximum(1.0 if std is None else std, 1.0)) ** 2).any():  # hardly ever
            batch = without_spikes(batch, np.median(batch, axis=0) if std is None else self.mean, std)
            mean = batch.mean(axis=0)
            squares = ((batch - mean) ** 2).sum(axis=0)
        delta = mean - self.mean
        unit = np.where(self._batches >= _FREE_BATCHES, np.inf if std is None else std, np.inf)
        delta = np.clip(delta, -_MAX_SHIFT * unit, _MAX_SHIFT * unit)
        squares = np.minimum(squares, count * (_MAX_STD * unit) ** 2)
        self._batches += squares > 0.0
        total = self.count + count
        self.mean = self.mean + delta * (count / total)
        self._m2 = self._m2 + squares + delta**2 * (self.count * count / total)
        self.count = total

    @property
    def std(self) -> np.ndarray:
        """Standard deviation [O]; 1 before the second observation, never below 1e-4."""
        if self.count < 2:
            return np.ones_like(self.mean)
        std = np.maximum(np.sqrt(self._m2 / self.count), _MIN_STD)
        std[self._mask] = 1.0
        return std

    def apply(self, obs: np.ndarray) -> None:
        """Normalizes observations [B, O] in place; in frames uint8 [B, k, F], the newest numbers."""
        if obs.dtype == np.uint8:
            newest = obs[:, -1, obs.shape[2] - 4 * len(self.mean) :]
            numbers = np.ascontiguousarray(newest).view(np.float32)
            self.apply(numbers)
            newest[...] = numbers.view(np.uint8)
            return
        obs -= self.mean.astype(np.float32)
        obs /= self.std.astype(np.float32)
        np.clip(obs, -OBS_CLIP, OBS_CLIP, out=obs)

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays for a policy: float32 ``obs_mean`` and ``obs_std`` [O]."""
        return {"obs_mean": self.mean.astype(np.float32), "obs_std": self.std.astype(np.float32)}

    def averaged(self) -> np.ndarray:
        """Count, means and deviations [1 + 2 O], which are averaged over learners like the parameters."""
        return np.concatenate(([self.count], self.mean, np.sqrt(self._m2 / max(self.count, 1.0))))

    def set_average(self, values: np.ndarray) -> None:
        """Continues from averages of ``averaged`` over learners."""
        self.count = float(values[0])
        self.mean, deviation = np.split(values[1:].copy(), 2)
        self._m2 = deviation**2 * self.count

    def state(self) -> dict[str, Any]:
        batches = self._batches.tolist()
        return {"count": self.count, "batches": batches, "mean": self.mean.tolist(), "m2": self._m2.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.count = float(state["count"])
        self._batches = np.asarray(state.get("batches", np.zeros_like(self._batches)), np.int64)
        self.mean = np.asarray(state["mean"], np.float64)
        self._m2 = np.asarray(state["m2"], np.float64)


class ReturnMoments:
    """Count, mean and sum of squared differences from the mean of discounted returns."""

    def __init__(self) -> None:
        self.count = self.mean = self.m2 = 0.0

    def merge(self, count: float, mean: float, m2: float) -> None:
        """Adds the moments of other returns (Chan et al. 1979, parallel variance)."""
        if count <= 0.0:
            return
        delta, total = mean - self.mean, self.count + count
        self.m2 += m2 + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def scale(self) -> float:
        """Divisor of rewards: the standard deviation [return]; 1 if all returns so far are equal."""
        if self.count < 2.0:
            return 1.0
        variance = self.m2 / self.count
        return math.sqrt(variance) if variance > _MIN_FRACTION * (variance + self.mean**2) else 1.0

    def sums(self) -> tuple[float, float, float]:
        """Count, sum and sum of squares, which can be summed over processes."""
        return self.count, self.mean * self.count, self.m2 + self.mean**2 * self.count

    def averaged(self) -> np.ndarray:
        """Count, mean and deviation, which are averaged over learners like the parameters."""
        return np.array([self.count, self.mean, math.sqrt(self.m2 / self.count) if self.count else 0.0])

    def set_average(self, values: np.ndarray) -> None:
        """Continues from averages of ``averaged`` over learners."""
        self.count, self.mean, deviation = values.tolist()
        self.m2 = deviation**2 * self.count

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state(self, state: dict[str, Any]) -> None:
        self.count, self.mean, self.m2 = (float(state[name]) for name in ("count", "mean", "m2"))


class DiscountedReturns(ReturnMoments):
    """Moments of the discounted returns of environments, each from the start of its episode up to each env step.

    Each environment's return continues over the calls of its source; the end of an episode resets it. Rewards are
    bounded by the third largest magnitude so far, so that one outlier does not set the unit. Repeated outliers of a
    thousand times the unit count as 0, unless they are a tenth of all rewards.
    """

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self._gamma = gamma
        ages = np.subtract.outer(np.arange(_STEPS), np.arange(_STEPS))
        self._decay = np.where(ages < 0, 0.0, float(gamma) ** np.maximum(ages, 0))
        """[T, T], weight of each step's reward in the return of each step."""
        self._returns: dict[int, np.ndarray] = {}
        self._largest = np.zeros(_LARGEST)

    def add(self, reward: np.ndarray, ended: np.ndarray, source: int = 0) -> None:
        """Adds rewards [T, N] of T env steps of N environments; ``ended`` [T, N] is true where an episode ended."""
        finite = reward.astype(np.float64)
        if not math.isfinite(finite.sum()):
            finite = np.nan_to_num(finite, nan=0.0, posinf=0.0, neginf=0.0)
        if finite.size >= _JUDGED:
            known = np.array([self.scale]) if self.count else None
            finite = without_spikes(finite.reshape(-1, 1), np.zeros(1), known).reshape(finite.shape)
        sizes = np.concatenate((self._largest, np.abs(finite).reshape(-1)))
        self._largest = np.partition(sizes, -_LARGEST)[-_LARGEST:]
        bound = float(self._largest.min())
        np.clip(finite, -bound, bound, out=finite)
        returns = self._returns.get(source, np.zeros(0))
        if len(returns) != finite.shape[1]:
            returns = np.zeros(finite.shape[1])
        for begin in range(0, len(finite), _STEPS):
            at = slice(begin, begin + _STEPS)
            finite[at], returns = self._block(finite[at], ended[at], returns)
        self._returns[source] = returns
        mean = float(finite.mean())
        finite -= mean
        self.merge(float(finite.size), mean, float(np.vdot(finite, finite)))

    def _block(self, reward: np.ndarray, ended: np.ndarray, returns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Discounted returns [T, N] of a block, given those before it [N]; and those after it, for the next block."""
        steps = len(reward)
        totals = self._decay[:steps, :steps] @ reward
        weights = self._gamma * self._decay[:steps, 0]
        totals += weights[:, np.newaxis] * returns
        for t, env in np.argwhere(ended).tolist():  # in order of time: returns from before an end are removed after it
            totals[t + 1 :, env] -= weights[: steps - t - 1] * totals[t, env]
        return totals, np.where(ended[-1], 0.0, totals[-1])

    def state(self) -> dict[str, Any]:
        returns = {str(source): values.tolist() for source, values in self._returns.items()}
        return super().state() | {"returns": returns, "largest": self._largest.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._returns = {int(source): np.asarray(values, np.float64) for source, values in state["returns"].items()}
        self._largest = np.asarray(state["largest"], np.float64)


class ScalingStatistics:
    """Base of classes with statistics of observations and of returns, if these are scaled."""

    normalizer: Normalizer | None
    returns: ReturnMoments | None

    @property
    def return_scale(self) -> float:
        """Divisor of rewards [return]; 1 if they are not scaled."""
        return 1.0 if self.returns is None else self.returns.scale

    def statistics_to_average(self) -> np.ndarray:
        """Statistics to average over learners like the parameters: counts, means and deviations, float64 [k]."""
        parts = [part.averaged() for part in (self.normalizer, self.returns) if part is not None]
        return np.concatenate([np.zeros(0), *parts])

    def set_average_statistics(self, values: np.ndarray) -> None:
        """Continues from averages [k] of ``statistics_to_average`` over learners."""
        for part in (self.normalizer, self.returns):
            if part is not None:
                averaged, values = np.split(values, [len(part.averaged())])
                part.set_average(averaged)


def scaled_rewards(reward: np.ndarray, scale: float) -> np.ndarray:
    """Rewards of any shape in units of ``scale``, float32, bounded by ``REWARD_CLIP``; NaN stays NaN."""
    with np.errstate(over="ignore"):
        return np.clip(reward / scale, -REWARD_CLIP, REWARD_CLIP).astype(np.float32)
