"""Advantages and value targets of T env steps of N environments, in NumPy; each with its source.

``terminated`` alone cuts the bootstrap, both flags cut the sum over later steps: what follows a truncated
step belongs to another episode, but its value still counts. All arrays are [T, N], time first.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def gae(
    reward: np.ndarray, value: np.ndarray, next_value: np.ndarray, terminated: np.ndarray, truncated: np.ndarray,
    gamma: float, lam: float,
) -> np.ndarray:
    """Generalised advantage estimates (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    ``A_t = delta_t + gamma lam A_(t+1)`` with ``delta_t = r_t + gamma V(s_(t+1)) - V(s_t)``; the target of the
    value is ``A_t + V(s_t)``.

    Args:
        reward: of the step.
        value: V of the state before it.
        next_value: V of the state after it, the true last one where the episode ends.
        terminated: true where the MDP ended.
        truncated: true where time ran out.
        gamma: discount of one env step.
        lam: 0 trusts the values, 1 the rewards.
    """
    return _backward(_delta(reward, value, next_value, terminated, gamma), _carried(terminated, truncated, gamma * lam))


def vtrace(
    reward: np.ndarray, value: np.ndarray, next_value: np.ndarray, terminated: np.ndarray, truncated: np.ndarray,
    weight: np.ndarray, gamma: float, lam: float,
) -> tuple[np.ndarray, np.ndarray]:
    """V-trace targets (Espeholt et al. 2018, arXiv 1802.01561, eq. 1, remark 2), and the advantages that go with them.

    ``v_t - V_t = w_t A_t`` with ``A_t = delta_t + gamma lam (v_(t+1) - V_(t+1))``. With weights of 1 the
    advantages are those of ``gae``; with ``lam`` 1 they are the paper's ``r_t + gamma v_(t+1) - V_t``.

    Args:
        reward: as all not named here, as for ``gae``.
        value: V.
        next_value: V.
        terminated: flag.
        truncated: flag.
        weight: importance weights ``min(1, pi / mu)``: both of the paper's rho and, times ``lam``, its c.
        gamma: discount of one env step.
        lam: as for ``gae``.

    Returns:
        Targets v_t, and advantages A_t without their own weight.
    """
    delta = _delta(reward, value, next_value, terminated, gamma)
    carried = _carried(terminated, truncated, gamma * lam)
    excess = _backward(weight * delta, weight * carried)
    later = np.zeros_like(excess)
    later[:-1] = excess[1:]
    return excess + value, delta + carried * later


def explained_variance(value: np.ndarray, target: np.ndarray) -> float:
    """``1 - var(target - value) / var(target)``; NaN where all targets are equal."""
    variance = float(np.var(target))
    return 1.0 - float(np.var(target - value)) / variance if variance > 0.0 else float("nan")


def _delta(
    reward: np.ndarray, value: np.ndarray, next_value: np.ndarray, terminated: np.ndarray, gamma: float
) -> np.ndarray:
    delta: np.ndarray = reward + gamma * np.where(terminated, 0.0, next_value).astype(value.dtype) - value
    return delta


def _carried(terminated: np.ndarray, truncated: np.ndarray, factor: float) -> np.ndarray:
    """Share of the next step's sum that reaches each step."""
    ended = np.logical_or(terminated, truncated)
    return np.where(ended, 0.0, factor).astype(np.float32)


def _backward(term: np.ndarray, carried: np.ndarray) -> np.ndarray:
    """``x_t = term_t + carried_t x_(t+1)``, nothing after the last step."""
    total = np.array(term)
    for t in range(len(total) - 2, -1, -1):
        total[t] += carried[t] * total[t + 1]
    return total


class RewardScale:
    """Divides rewards by the running deviation of their discounted returns, as OpenAI's baselines do.

    One return an environment goes on from interval to interval; an episode's end starts it at 0.
    """

    CLIP = 10.0

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma
        self._returns = np.zeros(0)
        self._count, self._mean, self._m2 = 0.0, 0.0, 0.0

    def apply(self, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray) -> np.ndarray:
        """Takes in an interval's rewards [T, N] and returns them scaled and clipped; all as they are if any is NaN."""
        if not np.isfinite(reward).all():
            return reward
        if len(self._returns) != reward.shape[1]:
            self._returns = np.zeros(reward.shape[1])
        found = np.empty(reward.shape)
        kept = 1.0 - np.logical_or(terminated, truncated)
        for t, row in enumerate(reward):
            found[t] = self._returns = self._gamma * self._returns + row
            self._returns = self._returns * kept[t]
        self._take(found)
        scaled = reward / max(np.sqrt(self._m2 / self._count), 1e-4)
        clipped: np.ndarray = np.clip(scaled, -self.CLIP, self.CLIP).astype(np.float32)
        return clipped

    def _take(self, values: np.ndarray) -> None:
        """Chan et al. 1979, parallel variance."""
        mean, count = float(values.mean()), float(values.size)
        delta, total = mean - self._mean, self._count + count
        self._m2 += float(((values - mean) ** 2).sum()) + delta**2 * self._count * count / total
        self._mean += delta * count / total
        self._count = total

    def state(self) -> dict[str, Any]:
        """JSON form of the exact state."""
        return {"count": self._count, "mean": self._mean, "m2": self._m2, "returns": self._returns.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what ``state`` gave."""
        self._count, self._mean, self._m2 = (float(state[name]) for name in ("count", "mean", "m2"))
        self._returns = np.asarray(state["returns"], np.float64)
