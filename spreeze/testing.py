"""An environment of a given cost, to measure samplers with: ``spreeze/Synthetic-v0``.

::

    python -m spreeze.train --env spreeze/Synthetic-v0 --env-arg law=gamma --env-arg mean_s=0.002 --env-arg cv=0.5
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np

SYNTHETIC_ID = "spreeze/Synthetic-v0"
LAWS = ("constant", "exponential", "gamma")
COSTS = ("sleep", "spin")
ACTIONS = ("box", "discrete")
_AHEAD = 1024


class SyntheticEnv(gymnasium.Env[np.ndarray, Any]):
    """A contextual bandit in noise: the observation [O] is standard normal and new at each step.

    With box actions [A] the reward is ``1 - mean((a - tanh(W o))^2)``, with discrete ones it is
    1 for the largest of ``W o`` and 0 else; W is fixed by ``task_seed``. So something can be learned,
    and the optimal return is known: ``episode_steps``.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 30}  # type: ignore[misc]

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        law: str = "constant",
        mean_s: float = 0.0,
        cv: float = 1.0,
        cost: str = "sleep",
        reset_s: float = 0.0,
        obs_dim: int = 8,
        action_dim: int = 2,
        action_kind: str = "box",
        episode_steps: int = 200,
        p_terminated: float = 0.0,
        task_seed: int = 0,
    ) -> None:
        """Takes the distribution of the step time and the sizes.

        Args:
            render_mode: ``rgb_array`` draws the observation as grey columns.
            law: ``constant``, ``exponential`` or ``gamma``.
            mean_s: mean step time.
            cv: standard deviation over mean of the Gamma distribution; the exponential one has 1, the constant one 0.
            cost: ``sleep`` waits like a simulator in another process, ``spin`` takes that much CPU time.
            reset_s: time of a reset, spent likewise.
            obs_dim: O.
            action_dim: A, or the number of discrete actions.
            action_kind: ``box`` or ``discrete``.
            episode_steps: env steps after which an episode is truncated.
            p_terminated: probability that a step terminates its episode.
            task_seed: of the hidden matrix W.

        Raises:
            ValueError: an unknown law, cost or kind, or a number out of range.
        """
        for name, word, known in (("law", law, LAWS), ("cost", cost, COSTS), ("action_kind", action_kind, ACTIONS)):
            if word not in known:
                raise ValueError(f"{name} = {word!r}: allowed is {', '.join(known)}")
        least = {
            "mean_s": (mean_s, 0),
            "reset_s": (reset_s, 0),
            "cv": (cv, 1e-3),
            "obs_dim": (obs_dim, 1),
            "action_dim": (action_dim, 1),
            "episode_steps": (episode_steps, 1),
            "p_terminated": (p_terminated, 0),
        }
        for name, (value, bound) in least.items():
            if not value >= bound:
                raise ValueError(f"{name} = {value!r}: at least {bound:g}")
        if p_terminated > 1.0:
            raise ValueError(f"p_terminated = {p_terminated!r}: at most 1")
        self.render_mode = render_mode
        self._times = _StepTimes(law, mean_s, cv)
        self._spend = time.sleep if cost == "sleep" else spin
        self._reset_s, self._episode_steps, self._p_terminated = reset_s, episode_steps, p_terminated
        weights = np.random.default_rng(task_seed).standard_normal((action_dim, obs_dim)) / math.sqrt(obs_dim)
        self._weights = weights.astype(np.float32)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (obs_dim,), np.float32)
        self._discrete = action_kind == "discrete"
        self.action_space = (
            gymnasium.spaces.Discrete(action_dim) if self._discrete
            else gymnasium.spaces.Box(-1.0, 1.0, (action_dim,), np.float32)
        )  # fmt: skip
        self._obs = np.zeros(obs_dim, np.float32)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode; a seed also fixes all step times that follow."""
        super().reset(seed=seed)
        if seed is not None or not self._times.seeded:
            self._times.seed(int(self.np_random.integers(2**31)))
        if self._reset_s:
            self._spend(self._reset_s)
        self._steps = 0
        self._obs = self.np_random.standard_normal(len(self._obs), np.float32)
        return self._obs, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Spends the time that was drawn; rewards what W says of the last observation."""
        cost_s = self._times.next()
        if cost_s > 0.0:
            self._spend(cost_s)
        reward = self._reward(action)
        self._steps += 1
        self._obs = obs = self.np_random.standard_normal(len(self._obs), np.float32)
        terminated = self._p_terminated > 0.0 and self.np_random.random() < self._p_terminated
        truncated = not terminated and self._steps >= self._episode_steps
        return obs, reward, terminated, truncated, {"step_s": cost_s}

    def _reward(self, action: Any) -> float:
        best = self._weights @ self._obs
        if self._discrete:
            return float(int(action) == int(best.argmax()))
        miss = np.asarray(action, np.float32) - np.tanh(best)
        return 1.0 - float(miss @ miss) / len(best)

    def render(self) -> np.ndarray:
        """The observation as grey columns, uint8 [48, W, 3]."""
        shades = (255.0 / (1.0 + np.exp(-self._obs))).astype(np.uint8)
        width = max(1, 64 // len(shades))
        columns = np.repeat(shades, width)[None, :, None]
        return np.ascontiguousarray(np.broadcast_to(columns, (48, columns.shape[1], 3)))


class _StepTimes:
    """Step times in seconds, drawn ahead: one at a time would cost more than a short step."""

    def __init__(self, law: str, mean_s: float, cv: float) -> None:
        self._law, self._mean_s, self._cv = law, mean_s, cv
        self._rng = np.random.default_rng()
        self._ready: list[float] = []
        self.seeded = False

    def seed(self, seed: int) -> None:
        self._rng, self.seeded = np.random.default_rng(seed), True
        self._ready.clear()

    def next(self) -> float:
        if self._law == "constant" or not self._mean_s:
            return self._mean_s
        if not self._ready:
            self._ready = self._draw()
        return self._ready.pop()

    def _draw(self) -> list[float]:
        if self._law == "exponential":
            return list(self._rng.exponential(self._mean_s, _AHEAD).tolist())
        shape = 1.0 / self._cv**2  # standard deviation / mean = 1 / sqrt(shape)
        return list(self._rng.gamma(shape, self._mean_s / shape, _AHEAD).tolist())


def spin(seconds: float, clock: Callable[[], float] = time.thread_time) -> None:
    """Computes until this thread has taken so much CPU time: a slow or shared core takes longer."""
    end = clock() + seconds
    while clock() < end:
        pass


def register() -> None:
    """Makes the id known to Gymnasium; harmless when it already is."""
    if SYNTHETIC_ID not in gymnasium.registry:
        gymnasium.register(id=SYNTHETIC_ID, entry_point=f"{__name__}:SyntheticEnv")


register()
