"""Small tasks that are seen: ``--import spreeze.envs.image_tasks``.

``Docking-v0`` shows its goal in an image and tells its place in a vector; ``PendulumImage-v0`` is Pendulum-v1 drawn.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

_SIDE, _STEPS = 40, 10


class Docking(gymnasium.Env[Any, Any]):
    """A point on a line that has to go to a goal and stay: the reward of a step is minus the distance.

    The goal is the brightness of a lamp in the image ``camera``, the place is the number ``place``; both begin between
    -1 and 1. In ten steps, the best return is about -0.6; who sees one part alone loses as much as who stays, about -5.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, parts: str = "both", discrete: bool = False) -> None:
        """``parts`` is ``image``, ``vector`` or ``both``; with ``discrete`` a step is a quarter to a side, or none."""
        self.render_mode, self._parts, self._discrete = render_mode, parts, discrete
        camera, place = spaces.Box(0, 255, (_SIDE, _SIDE, 3), np.uint8), spaces.Box(-10.0, 10.0, (1,), np.float32)
        both = spaces.Dict({"camera": camera, "place": place})
        self.observation_space = camera if parts == "image" else place if parts == "vector" else both
        self.action_space = spaces.Discrete(3) if discrete else spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._goal = self.np_random.uniform(-1.0, 1.0, 2)
        self._left = _STEPS
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._place += 0.25 * (int(action) - 1) if self._discrete else 0.5 * float(action[0])
        self._left -= 1
        return self._observation(), -abs(self._place - self._goal), False, self._left == 0, {}

    def _observation(self) -> Any:
        place = np.array([self._place], np.float32)
        if self._parts == "vector":
            return place
        return self.render() if self._parts == "image" else {"camera": self.render(), "place": place}

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


gymnasium.register("Docking-v0", f"{__name__}:Docking")
gymnasium.register("PendulumImage-v0", f"{__name__}:PendulumImage", max_episode_steps=200)
