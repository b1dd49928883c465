"""Small tasks for experiments: ``--import spreeze.envs.small_tasks``.

``Docking-v0`` shows its goal in an image and has its position in a vector; ``PendulumImage-v0`` renders Pendulum-v1. A
policy without memory cannot solve ``TMaze-v0``, nor ``CartPoleNoVel-v1`` and ``PendulumNoVel-v1``, which hide
velocities. The steps of ``spreeze/Synthetic-v0``, which needs no ``--import``, take a given time, to measure samplers::

    python -m spreeze.train --env spreeze/Synthetic-v0 --env-arg law=gamma --env-arg mean_s=0.002 --env-arg cv=0.5
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv

SYNTHETIC_ID = "spreeze/Synthetic-v0"
_AHEAD = 1024
_SIDE, _STEPS = 40, 10


class Docking(gymnasium.Env[Any, Any]):
    """A point on a line that has to go to a goal and stay: the reward of a step is minus the distance.

    The goal is the brightness of a lamp in the image ``camera``, the position is the number ``place``; both start
    between -1 and 1. In ten steps, the best return is about -0.6; a policy that sees only one part gets no more than
    one that never moves, about -5.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, parts: str = "both", discrete: bool = False) -> None:
        """``parts`` is ``image``, ``vector`` or ``both``; with ``discrete`` a step is -0.25, 0 or 0.25."""
        self.render_mode, self._parts, self._discrete = render_mode, parts, discrete
        camera, position = spaces.Box(0, 255, (_SIDE, _SIDE, 3), np.uint8), spaces.Box(-10.0, 10.0, (1,), np.float32)
        both = spaces.Dict({"camera": camera, "place": position})
        self.observation_space = camera if parts == "image" else position if parts == "vector" else both
        self.action_space = spaces.Discrete(3) if discrete else spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._position, self._goal = self.np_random.uniform(-1.0, 1.0, 2)
        self._left = _STEPS
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._position += 0.25 * (int(action) - 1) if self._discrete else 0.5 * float(action[0])
        self._left -= 1
        return self._observation(), -abs(self._position - self._goal), False, self._left == 0, {}

    def _observation(self) -> Any:
        position = np.array([self._position], np.float32)
        if self._parts == "vector":
            return position
        return self.render() if self._parts == "image" else {"camera": self.render(), "place": position}

    def render(self) -> Any:
        picture = np.zeros((_SIDE, _SIDE, 3), np.uint8)
        picture[12:28, 12:28] = round(127.5 * (self._goal + 1.0))
        return picture


class PendulumImage(gymnasium.ObservationWrapper[np.ndarray, Any, Any]):
    """Pendulum-v1 as a picture [64, 64] of its rod, drawn in a tenth of a millisecond."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(gymnasium.make("Pendulum-v1", render_mode=render_mode, disable_env_checker=True))
        self.observation_space = spaces.Box(0, 255, (64, 64), np.uint8)
        self._across, self._up = np.meshgrid(*2 * [np.linspace(-1.2, 1.2, 64, dtype=np.float32)])

    def observation(self, observation: np.ndarray) -> np.ndarray:
        cos, sin = observation[:2]
        along = np.clip(self._across * sin - self._up * cos, 0.0, 1.0)  # the picture's first row is its top
        distance = np.hypot(self._across - along * sin, self._up + along * cos)
        picture: np.ndarray = (255.0 * np.clip(1.5 - distance / 0.08, 0.0, 1.0)).astype(np.uint8)
        return picture


class TMaze(gymnasium.Env[np.ndarray, np.int64]):
    """A corridor of ``length`` cells and a junction (Bakker 2001): the goal's side is shown at the start alone.

    An observation is the side (-1 left, 1 right; 0 but at the first step) and whether this is the junction. Actions are
    forward, left and right. A turn at the junction ends the episode, with a reward of 1 on the goal's side and -1 on
    the other; any step against a wall costs 0.1. Without memory the best mean return is 0.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}  # type: ignore[misc]
    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, length: int = 20, render_mode: str | None = None) -> None:
        self.length, self.render_mode = length, render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._side, self._position = 1 - 2 * int(self.np_random.integers(2)), 0
        return np.array([self._side, 0.0], np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        turns, at_junction = action > 0, self._position == self.length
        terminated, reward = False, 0.0
        if turns != at_junction:
            reward = -0.1
        elif at_junction:
            terminated, reward = True, 1.0 if (action == 2) == (self._side == 1) else -1.0
        else:
            self._position += 1
        return np.array([0.0, self._position == self.length], np.float32), reward, terminated, False, {}

    def render(self) -> Any:
        """The maze from above, the agent in blue, the goal in green."""
        cells = np.zeros((3, self.length + 1, 3), np.uint8)
        cells[1], cells[:, -1] = 128, 128
        cells[1 + self._side, -1] = 0, 158, 115
        cells[1, self._position] = 0, 114, 178
        return cells.repeat(8, axis=0).repeat(8, axis=1)


def _only(env: gymnasium.Env[np.ndarray, Any], kept: list[int]) -> gymnasium.Env[np.ndarray, Any]:
    """The environment with only some entries of its observation: positions and angles."""
    space = env.observation_space
    assert isinstance(space, spaces.Box)
    part = spaces.Box(space.low[kept], space.high[kept], dtype=np.float32)
    return gymnasium.wrappers.TransformObservation(env, lambda obs: np.asarray(obs[kept], np.float32), part)


def cart_pole(render_mode: str | None = None) -> gymnasium.Env[np.ndarray, Any]:
    """CartPole that observes the cart's position and the pole's angle."""
    return _only(CartPoleEnv(render_mode=render_mode), [0, 2])


def pendulum(render_mode: str | None = None) -> gymnasium.Env[np.ndarray, Any]:
    """Pendulum that observes the cosine and sine of its angle."""
    return _only(PendulumEnv(render_mode=render_mode), [0, 1])


class SyntheticEnv(gymnasium.Env[np.ndarray, Any]):
    """A contextual bandit in noise: the observation [O] is standard normal and new at each step.

    With box actions [A] the reward is ``1 - mean((a - tanh(W o))^2)``, with discrete ones it is 1 for the largest of
    ``W o``, else 0; ``task_seed`` determines W. The optimal return is ``episode_steps``.
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
        """Takes the distribution of the step time and the sizes; a ValueError for a bad law, cost, kind or number.

        Args:
            render_mode: ``rgb_array`` draws the observation as grey columns.
            law: ``constant``, ``exponential`` or ``gamma``.
            mean_s: mean step time.
            cv: standard deviation over mean of the Gamma distribution; the exponential one has 1, the constant one 0.
            cost: ``sleep`` waits like a simulator in another process, ``spin`` takes that much CPU time.
            reset_s: time of a reset, of the same kind.
            obs_dim: O.
            action_dim: A, or the number of discrete actions.
            action_kind: ``box`` or ``discrete``.
            episode_steps: env steps after which an episode is truncated.
            p_terminated: probability that a step terminates its episode.
            task_seed: seed of the hidden matrix W.
        """
        laws, kinds = ("constant", "exponential", "gamma"), ("box", "discrete")
        texts = (("law", law, laws), ("cost", cost, ("sleep", "spin")), ("action_kind", action_kind, kinds))
        for name, kind, known in texts:
            if kind not in known:
                raise ValueError(f"{name} = {kind!r}: must be one of: {', '.join(known)}")
        minima = {
            "mean_s": (mean_s, 0),
            "reset_s": (reset_s, 0),
            "cv": (cv, 1e-3),
            "obs_dim": (obs_dim, 1),
            "action_dim": (action_dim, 1),
            "episode_steps": (episode_steps, 1),
            "p_terminated": (p_terminated, 0),
        }
        for name, (value, bound) in minima.items():
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
        self.observation_space = spaces.Box(-np.inf, np.inf, (obs_dim,), np.float32)
        self._discrete = action_kind == "discrete"
        self.action_space = (
            spaces.Discrete(action_dim) if self._discrete
            else spaces.Box(-1.0, 1.0, (action_dim,), np.float32)
        )  # fmt: skip
        self._obs = np.zeros(obs_dim, np.float32)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
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
        """Takes the time that was drawn; the reward depends on W and the last observation."""
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
    """Step times in seconds, drawn ahead: drawing one at a time would cost more than a short step."""

    def __init__(self, law: str, mean_s: float, cv: float) -> None:
        self._law, self._mean_s, self._cv = law, mean_s, cv
        self._rng = np.random.default_rng()
        self._drawn: list[float] = []
        self.seeded = False

    def seed(self, seed: int) -> None:
        self._rng, self.seeded = np.random.default_rng(seed), True
        self._drawn.clear()

    def next(self) -> float:
        if self._law == "constant" or not self._mean_s:
            return self._mean_s
        if not self._drawn and self._law == "exponential":
            self._drawn = self._rng.exponential(self._mean_s, _AHEAD).tolist()
        elif not self._drawn:
            shape = 1.0 / self._cv**2  # standard deviation / mean = 1 / sqrt(shape)
            self._drawn = self._rng.gamma(shape, self._mean_s / shape, _AHEAD).tolist()
        return self._drawn.pop()


def spin(seconds: float, clock: Callable[[], float] = time.thread_time) -> None:
    """Computes until this thread has used that much CPU time: a slow or shared core takes longer."""
    end = clock() + seconds
    while clock() < end:
        pass


gymnasium.register("Docking-v0", f"{__name__}:Docking")
gymnasium.register("PendulumImage-v0", f"{__name__}:PendulumImage", max_episode_steps=200)
gymnasium.register("TMaze-v0", f"{__name__}:TMaze", max_episode_steps=100, reward_threshold=0.95)
gymnasium.register("CartPoleNoVel-v1", f"{__name__}:cart_pole", max_episode_steps=500, reward_threshold=475.0)
gymnasium.register("PendulumNoVel-v1", f"{__name__}:pendulum", max_episode_steps=200)
gymnasium.register(SYNTHETIC_ID, f"{__name__}:SyntheticEnv")
