"""An environment with seeded faults, for tests of the supervision: ``spreeze/Fault-v0``.

Importing this module registers it; use it as ``--env spreeze/Fault-v0 --import spreeze.envs.faults``.
Each fault is set by a keyword or by an environment variable ``SPREEZE_FAULT_<NAME>``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import time
import typing
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np

from spreeze.types import flat_float32

ENV_ID = "spreeze/Fault-v0"
_PREFIX = "SPREEZE_FAULT_"


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Which faults happen; probabilities are per step or per reset, step numbers count from 1 per environment."""

    p_crash: float = 0.0
    """step raises."""
    p_crash_reset: float = 0.0
    """reset raises."""
    p_nan: float = 0.0
    """observation or reward is NaN."""
    p_shape: float = 0.0
    """observation is one component too long."""
    p_stall: float = 0.0
    """step sleeps for stall_s."""
    stall_s: float = 0.0
    exit_at: int = 0
    """the process ends with code 0 at that step."""
    segfault_at: int = 0
    """the process reads address 0 at that step."""
    hang_at: int = 0
    """step never returns."""
    init_s: float = 0.0
    """the constructor takes that long."""
    step_s: float = 0.0
    """every step takes that long."""
    seed: int = 0
    once: str = ""
    """a path: exit, segfault and hang happen only to the one process that can create it."""

    @classmethod
    def from_environment(cls, **given: Any) -> Faults:
        """Keywords first, then the environment variables, then no fault."""
        values: dict[str, Any] = dict(given)
        hints = typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            text = os.environ.get(_PREFIX + item.name.upper())
            if text is not None and item.name not in values:
                values[item.name] = hints[item.name](text)
        return cls(**values)


class Injector:
    """The faults of one environment: asked at its reset, before each step, and with what the step gave."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._dice = np.random.default_rng(faults.seed)
        self._steps = 0
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
        self._fatal()
        crash, nan, shape, stall = self._dice.random(4).tolist()
        if stall < self.faults.p_stall:
            time.sleep(self.faults.stall_s)
        if self.faults.step_s:
            time.sleep(self.faults.step_s)
        if crash < self.faults.p_crash:
            raise RuntimeError(f"injected fault: step {self._steps} raises")
        return nan, shape

    def spoil(self, dice: tuple[float, float], obs: np.ndarray, reward: float) -> tuple[np.ndarray, float]:
        """Observation and reward, made NaN or ill-shaped where the dice of ``begin`` say so."""
        nan, shape = dice
        if nan < self.faults.p_nan:
            obs, reward = (obs * np.float32(np.nan), reward) if self._steps % 2 else (obs, float("nan"))
        if shape < self.faults.p_shape:
            obs = np.append(obs, np.float32(0.0))
        return obs, reward

    def _fatal(self) -> None:
        step, faults = self._steps, self.faults
        if step not in (faults.exit_at, faults.segfault_at, faults.hang_at) or not self._first():
            return
        if step == faults.exit_at:
            os._exit(0)
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
        self._injector = Injector(Faults.from_environment(**faults))
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(-10.0, 10.0, (3,), np.float32)
        self.action_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)
        self._state = np.zeros(3, dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts at a seeded position."""
        super().reset(seed=seed)
        self._injector.reset(seed)
        self._state = flat_float32([self.np_random.uniform(-1.0, 1.0), 0.0, 0.0])
        return self._state.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One step of the point, or a fault."""
        dice = self._injector.begin()
        position, velocity, clock = self._state.tolist()
        velocity = 0.9 * velocity + 0.05 * float(np.clip(action, -2.0, 2.0)[0])
        position = float(np.clip(position + velocity, -5.0, 5.0))
        self._state = flat_float32([position, velocity, clock + 0.02])
        obs, reward = self._injector.spoil(dice, self._state.copy(), -position * position)
        return obs, reward, False, False, {}

    def render(self) -> np.ndarray:
        """A white field with a dark column at the position."""
        frame = np.full((48, 65, 3), 255, dtype=np.uint8)
        column = int(np.clip(32 + 6 * self._state[0], 1, 63))
        frame[:, column - 1 : column + 2] = 40
        return frame


def register() -> None:
    """Makes the id known to Gymnasium; harmless when it already is."""
    if ENV_ID not in gymnasium.registry:
        gymnasium.register(id=ENV_ID, entry_point=FaultEnv, max_episode_steps=50)


register()
