r"""Environments that fail on purpose, and one that numbers its transitions.

::

    python -m spreeze.train --env spreeze/Faulty-v0 --import fault_envs  # SPREEZE_FAULT_ENV=my_robot:MyRobot-v0

    from fault_envs import FaultWrapper
    env = FaultWrapper(MyRobot(), p_crash=1e-4, p_crash_reset=1e-3, p_stall=5e-4, stall_s=3.0)

``spreeze/Numbered-v0`` numbers every transition, so that a torn, lost or repeated one shows; ``spreeze/Struck-v0`` does
so, too, and fails when ``fault_page`` tells its process to. ``spreeze/Grandchild-v0`` has child processes, and with
``fault_envs:FallingEnv`` every policy becomes poor.
``spreeze/Faulty-v0`` is any task with faults, ``spreeze/Fault-v0`` a small task of its own. Each fault is a keyword
argument or an environment variable ``SPREEZE_FAULT_<NAME>``; ``SPREEZE_FAULT_WORKERS`` lists the workers affected::

    SPREEZE_FAULT_P_CRASH=1e-4 SPREEZE_FAULT_P_STALL=5e-4 SPREEZE_FAULT_STALL_S=3 SPREEZE_FAULT_WORKERS=sampler-0 \
      python -m spreeze.train --env spreeze/Faulty-v0 --import fault_envs --profile pendulum
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import time
import typing
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
from fault_page import HANG_PID, LEAK_BYTES, LEAK_PID, NAN_PID, open_page

from spreeze.types import RowLayout

FAULT_ID = "spreeze/Fault-v0"
FAULTY_ID = "spreeze/Faulty-v0"
NUMBERED_ID = "spreeze/Numbered-v0"
STRUCK_ID = "spreeze/Struck-v0"
GRANDCHILD_ID = "spreeze/Grandchild-v0"
_PREFIX = "SPREEZE_FAULT_"
_WORKER = "SPREEZE_WORKER"
_INNER_ID = "Pendulum-v1"
HUGE_REWARD = 1e38
"""Finite as float32; its square is not."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults to inject; probabilities per step or reset, step numbers from 1 per environment."""

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
    """every step keeps that much memory forever."""
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


def make_faulty(render_mode: str | None = None, inner: str | None = None, **faults: Any) -> gymnasium.Env[Any, Any]:
    """The task ``inner``, else that which ``SPREEZE_FAULT_ENV`` names, else ``Pendulum-v1``; with faults."""
    env_id = inner or os.environ.get(_PREFIX + "ENV", _INNER_ID)
    return FaultWrapper(gymnasium.make(env_id, render_mode=render_mode), **faults)


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
        self._number, self._steps = secrets.randbits(23), 0

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


class StruckEnv(NumberedEnv):
    """Numbered transitions; hangs, gives NaN or takes memory while ``fault_page`` names its process."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 30}  # type: ignore[misc]
    _kept: ClassVar[list[bytes]] = []

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode, sleep_s=0.002)
        self._page = open_page()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        page, pid = self._page, os.getpid()
        while page[HANG_PID] == pid:
            time.sleep(0.05)
        if page[LEAK_PID] == pid and not self._kept:
            self._kept.append(os.urandom(1) * LEAK_BYTES)
        obs, *rest = super().step(action)
        return obs * np.float32(np.nan) if page[NAN_PID] == pid else obs, *rest

    def render(self) -> np.ndarray:
        return np.full((48, 64, 3), self._steps % 256, np.uint8)


class GrandchildEnv(FaultEnv):
    """Has helper processes of its own, as simulators do."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        for own_session in (False, True):
            subprocess.Popen(
                ["sleep", "1000"], start_new_session=own_session, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip


class FallingEnv(gymnasium.Env[Any, Any]):
    """Every policy of a process is poor at first, good for a while, and poor forever after."""

    good = range(20, 70)
    """Numbers of the good episodes."""
    begun = 0
    """Episodes of all environments of this process."""
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps, self._reward = 0, 10.0 if FallingEnv.begun in self.good else 0.0
        FallingEnv.begun += 1
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self.observation_space.sample(), self._reward, False, self._steps >= 5, {}


def count_numbered(rows: np.ndarray, layout: RowLayout) -> tuple[int, int]:
    """Rows [n, W] of ``NumberedEnv`` that are there again, and rows that it cannot have given: torn or made up."""
    obs, next_obs = rows[:, layout.obs], rows[:, layout.next_obs]
    good = (obs[:, 0] - obs[:, 1] == obs[:, 2]) & (next_obs[:, 0] - next_obs[:, 1] == next_obs[:, 2])
    good &= (obs[:, 0] == next_obs[:, 0]) & (obs[:, 1] + np.float32(NUMBER_UNIT) == next_obs[:, 1])
    good &= rows[:, layout.reward] == 1.0
    return len(rows) - len(np.unique(obs[:, :2], axis=0)), int(len(rows) - good.sum())


def register() -> None:
    """Makes the ids known to Gymnasium; harmless when they already are."""
    entries: dict[str, tuple[Any, int | None]] = {
        FAULT_ID: (FaultEnv, 50),
        FAULTY_ID: (make_faulty, None),
        NUMBERED_ID: (NumberedEnv, None),
        STRUCK_ID: (StruckEnv, None),
        GRANDCHILD_ID: (GrandchildEnv, 50),
    }
    for env_id, (entry_point, limit) in entries.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(id=env_id, entry_point=entry_point, max_episode_steps=limit)


register()
