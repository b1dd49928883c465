r"""Environments for tests and measurements: of a given cost (``spreeze/Synthetic-v0``), and failing on purpose.

::

    python -m spreeze.train --env spreeze/Synthetic-v0 --env-arg law=gamma --env-arg mean_s=0.002 --env-arg cv=0.5
    python -m spreeze.train --env spreeze/Faulty-v0 --import spreeze.testing  # SPREEZE_FAULT_ENV=my_robot:MyRobot-v0

    from spreeze.testing import FaultWrapper
    env = FaultWrapper(MyRobot(), p_crash=1e-4, p_crash_reset=1e-3, p_stall=5e-4, stall_s=3.0)

``spreeze/Numbered-v0`` numbers every transition, so that a torn, lost or repeated one shows.
``spreeze/Faulty-v0`` is any task with faults, ``spreeze/Fault-v0`` a small task of its own. Each fault is a keyword
argument or an environment variable ``SPREEZE_FAULT_<NAME>``; ``SPREEZE_FAULT_WORKERS`` lists the workers affected::

    SPREEZE_FAULT_P_CRASH=1e-4 SPREEZE_FAULT_P_STALL=5e-4 SPREEZE_FAULT_STALL_S=3 SPREEZE_FAULT_WORKERS=sampler-0 \
      python -m spreeze.train --env spreeze/Faulty-v0 --import spreeze.testing --profile pendulum
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import secrets
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np

from spreeze.types import RowLayout

FAULT_ID = "spreeze/Fault-v0"
FAULTY_ID = "spreeze/Faulty-v0"
SYNTHETIC_ID = "spreeze/Synthetic-v0"
NUMBERED_ID = "spreeze/Numbered-v0"
_PREFIX = "SPREEZE_FAULT_"
_WORKER = "SPREEZE_WORKER"
_INNER_ID = "Pendulum-v1"
HUGE_REWARD = 1e38
"""Finite as float32; its square is not."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Which faults happen; probabilities are per step or per reset, step numbers count from 1 per environment."""

    p_crash: float = 0.0
    """step raises."""
    p_crash_reset: float = 0.0
    """reset raises."""
    p_nan: float = 0.0
    """observation or reward is NaN."""
    p_huge: float = 0.0
    """reward is 1e38."""
    p_shape: float = 0.0
    """observation is one component too long."""
    p_stall: float = 0.0
    """step sleeps for stall_s."""
    stall_s: float = 0.0
    stall_max_s: float = 0.0
    """above stall_s: each sleep is drawn between both."""
    exit_at: int = 0
    """the process ends with code 0 at that step."""
    kill_at: int = 0
    """the process is killed (SIGKILL) at that step."""
    segfault_at: int = 0
    """the process reads address 0 at that step."""
    hang_at: int = 0
    """step never returns."""
    leak_bytes: int = 0
    """every step keeps that much memory for ever."""
    grandchildren: int = 0
    """processes that the constructor starts and nobody ends: in turns in a session of its own, in the worker's group,
    and in a session of its own without environment variables."""
    chatter_bytes: int = 0
    """every step prints that much, in turns by Python, by the descriptor and from C, as one line that ends in its
    number."""
    init_s: float = 0.0
    """the constructor takes that long."""
    step_s: float = 0.0
    """every step takes that long."""
    seed: int = 0
    once: str = ""
    """a path: exit, kill, segfault and hang happen only to the one process that can create it."""
    workers: str = ""
    """names such as ``sampler-0,sampler-1``: faults happen only there; everywhere if empty."""

    @classmethod
    def from_environment(cls, **given: Any) -> Faults:
        """Keywords first, then the environment variables, then no fault."""
        values: dict[str, Any] = dict(given)
        hints = typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            text = os.environ.get(_PREFIX + item.name.upper())
            if text is not None and item.name not in values:
                values[item.name] = hints[item.name](text)
        faults = cls(**values)
        if faults.workers and os.environ.get(_WORKER, "") not in faults.workers.split(","):
            return cls(seed=faults.seed, init_s=faults.init_s, step_s=faults.step_s)
        return faults


class Injector:
    """The faults of one environment: asked at its reset, before each step, and with what the step gave."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._dice = np.random.default_rng(faults.seed)
        self._steps = 0
        self._kept: list[bytearray] = []
        for index in range(faults.grandchildren):
            subprocess.Popen(
                ["sleep", "1000"], start_new_session=index % 3 != 1, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={} if index % 3 == 2 else None,
            )  # fmt: skip
        time.sleep(faults.init_s)

    def reset(self, seed: int | None) -> None:
        """Seeds the dice like the environment, or raises."""
        if seed is not None:
            self._dice = np.random.default_rng((self.faults.seed, seed))
        if self._dice.random() < self.faults.p_crash_reset:
            raise RuntimeError("injected fault: reset raises")

    def begin(self) -> tuple[float, float]:
        """One step begins: ends the process, hangs, stalls, raises, or gives the dice for ``spoil``."""
        self._steps += 1
        faults = self.faults
        self._fatal()
        crash, nan, shape, stall = self._dice.random(4).tolist()
        if stall < faults.p_stall:
            time.sleep(self._dice.uniform(faults.stall_s, max(faults.stall_s, faults.stall_max_s)))
        if faults.step_s:
            time.sleep(faults.step_s)
        if faults.leak_bytes:
            self._kept.append(bytearray(os.urandom(1)) * faults.leak_bytes)
        if faults.chatter_bytes:
            self._print(f"step {self._steps}".rjust(faults.chatter_bytes - 1, "."))
        if crash < faults.p_crash:
            raise RuntimeError(f"injected fault: step {self._steps} raises")
        return nan, shape

    def _print(self, text: str) -> None:
        if self._steps % 3 == 0:
            assert sys.__stdout__ is not None
            sys.__stdout__.write(text + "\n")
            sys.__stdout__.flush()
        elif self._steps % 3 == 1:
            os.write(1, text.encode() + b"\n")
        else:
            library = ctypes.CDLL(None)
            if library.puts(text.encode()) < 0 or library.fflush(None) != 0:
                raise OSError("puts failed")

    def spoil(self, dice: tuple[float, float], obs: Any, reward: Any) -> tuple[Any, Any]:
        """Observation and reward, made NaN, ill-shaped or huge where the dice say so."""
        nan, shape = dice
        if nan < self.faults.p_nan:
            obs, reward = (obs * np.float32(np.nan), reward) if self._steps % 2 else (obs, float("nan"))
        if shape < self.faults.p_shape:
            obs = np.append(obs, np.float32(0.0))
        if self.faults.p_huge and self._dice.random() < self.faults.p_huge:
            reward = HUGE_REWARD
        return obs, reward

    def _fatal(self) -> None:
        step, faults = self._steps, self.faults
        if step not in (faults.exit_at, faults.kill_at, faults.segfault_at, faults.hang_at) or not self._first():
            return
        if step == faults.exit_at:
            os._exit(0)
        if step == faults.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == faults.segfault_at:
            ctypes.string_at(0)
        while True:
            time.sleep(3600)

    def _first(self) -> bool:
        if not self.faults.once:
            return True
        try:
            os.close(os.open(self.faults.once, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


class FaultEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """Push a point to the origin; obs (position, velocity, time), reward -position^2, 50 steps."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array", "human"], "render_fps": 30}  # type: ignore[misc]

    def __init__(self, render_mode: str | None = None, **faults: Any) -> None:
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(-10.0, 10.0, (3,), np.float32)
        self.action_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)
        self._injector = Injector(Faults.from_environment(**faults))
        self._state = np.zeros(3, dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._injector.reset(seed)
        self._state = np.array([self.np_random.uniform(-1.0, 1.0), 0.0, 0.0], np.float32)
        return self._state.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        dice = self._injector.begin()
        position, velocity, clock = self._state.tolist()
        velocity = 0.9 * velocity + 0.05 * float(np.clip(action, -2.0, 2.0)[0])
        position = float(np.clip(position + velocity, -5.0, 5.0))
        self._state = np.array([position, velocity, clock + 0.02], np.float32)
        obs, reward = self._injector.spoil(dice, self._state.copy(), -position * position)
        return obs, reward, False, False, {}

    def render(self) -> np.ndarray:
        frame = np.full((48, 65, 3), 255, dtype=np.uint8)
        column = int(np.clip(32 + 6 * self._state[0], 1, 63))
        frame[:, column - 1 : column + 2] = 40
        return frame


class FaultWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any], **faults: Any) -> None:
        super().__init__(env)
        self._injector = Injector(Faults.from_environment(**faults))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._injector.reset(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        dice = self._injector.begin()
        obs, reward, terminated, truncated, info = self.env.step(action)
        return *self._injector.spoil(dice, obs, reward), terminated, truncated, info


def make_faulty(render_mode: str | None = None, **faults: Any) -> gymnasium.Env[Any, Any]:
    """The task that ``SPREEZE_FAULT_ENV`` names (``Pendulum-v1`` if none), with faults."""
    inner = os.environ.get(_PREFIX + "ENV", _INNER_ID)
    return FaultWrapper(gymnasium.make(inner, render_mode=render_mode), **faults)


# --- an environment whose cost is as given ---

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
        **faults: Any,
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
            faults: fields of ``Faults``, for example ``p_crash``.

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
        self._injector = Injector(Faults.from_environment(**faults)) if faults else None
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
        """Begins an episode; a seed also fixes all step times that follow."""
        super().reset(seed=seed)
        if seed is not None or not self._times.seeded:
            self._times.seed(int(self.np_random.integers(2**31)))
        if self._injector is not None:
            self._injector.reset(seed)
        if self._reset_s:
            self._spend(self._reset_s)
        self._steps = 0
        self._obs = self.np_random.standard_normal(len(self._obs), np.float32)
        return self._obs, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Spends the time that was drawn; rewards what W says of the last observation."""
        dice = None if self._injector is None else self._injector.begin()
        cost_s = self._times.next()
        if cost_s > 0.0:
            self._spend(cost_s)
        reward = self._reward(action)
        self._steps += 1
        self._obs = obs = self.np_random.standard_normal(len(self._obs), np.float32)
        terminated = self._p_terminated > 0.0 and self.np_random.random() < self._p_terminated
        truncated = not terminated and self._steps >= self._episode_steps
        if dice is not None and self._injector is not None:
            obs, reward = self._injector.spoil(dice, obs, reward)
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


NUMBER_UNIT = 2.0**-20
"""Unit of the observations of ``NumberedEnv``; sums and differences of its multiples below 16 are exact in float32."""


class NumberedEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """Every transition tells which instance and which step it is of, so that rows can be checked one by one.

    It observes a random number of the instance, its steps so far and their difference, in ``NUMBER_UNIT``, then zeros.
    """

    def __init__(
        self, render_mode: str | None = None, *, sleep_s: float = 0.0, obs_dim: int = 3, action_dim: int = 1
    ) -> None:
        self.render_mode, self._sleep_s = render_mode, sleep_s
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (max(obs_dim, 3),), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (action_dim,), np.float32)
        self._number, self._steps = secrets.randbits(20), 0

    def _obs(self) -> np.ndarray:
        obs = np.zeros(self.observation_space.shape or (), np.float32)
        obs[:3] = np.float32(NUMBER_UNIT) * np.array([self._number, self._steps, self._number - self._steps])
        return obs

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Goes on counting, so that no two transitions of an instance are equal."""
        super().reset(seed=seed)
        self._steps += 1
        return self._obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        self._steps += 1
        return self._obs(), 1.0, False, self._steps % 50 == 0, {}


def count_numbered(rows: np.ndarray, layout: RowLayout) -> tuple[int, int]:
    """Rows [n, W] of ``NumberedEnv`` that are there again, and rows that it cannot have given: torn or made up."""
    obs, next_obs = rows[:, layout.obs], rows[:, layout.next_obs]
    good = (obs[:, 0] - obs[:, 1] == obs[:, 2]) & (next_obs[:, 0] - next_obs[:, 1] == next_obs[:, 2])
    good &= (obs[:, 0] == next_obs[:, 0]) & (obs[:, 1] + np.float32(NUMBER_UNIT) == next_obs[:, 1])
    good &= rows[:, layout.reward] == 1.0
    return len(rows) - len(np.unique(obs[:, :2], axis=0)), int(len(rows) - good.sum())


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
    """Makes the ids known to Gymnasium; harmless when they already are."""
    entries: dict[str, tuple[Any, int | None]] = {
        FAULT_ID: (FaultEnv, 50),
        FAULTY_ID: (make_faulty, None),
        SYNTHETIC_ID: (SyntheticEnv, None),
        NUMBERED_ID: (NumberedEnv, None),
    }
    for env_id, (entry_point, limit) in entries.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(id=env_id, entry_point=entry_point, max_episode_steps=limit)


register()
