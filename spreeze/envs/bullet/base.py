"""What all Bullet tasks share: spaces, seeding, the order of a reset, closing."""

from __future__ import annotations

import abc
import math
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.utils import seeding

from spreeze.envs.bullet.client import Client, Physics


class BulletTask(gymnasium.Env[np.ndarray, np.ndarray], abc.ABC):
    """A task on a Bullet server of its own, made at the first reset.

    Subclasses give ``_load`` (once), ``_place`` (each reset) and ``step``. The order of calls into
    Bullet in ``reset`` is part of the contract: saved contacts and warm starts depend on it.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "render_fps": 60}  # type: ignore[misc]

    def __init__(self, physics: Physics, obs_dim: int, action_dim: int, *, keeps_state: bool = True) -> None:
        infinite = np.full(obs_dim, np.inf, dtype=np.float32)
        one = np.ones(action_dim, dtype=np.float32)
        self.observation_space = gymnasium.spaces.Box(-infinite, infinite, dtype=np.float32)
        self.action_space = gymnasium.spaces.Box(-one, one, dtype=np.float32)
        self.np_random = seeding.np_random(None)[0]
        self.client: Client | None = None
        self._physics = physics
        self._keeps_state = keeps_state
        self._saved: int | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode from the first one's state, with joints placed by the generator."""
        if seed is not None:
            self.np_random = seeding.np_random(seed)[0]
        first = self.client is None
        if self.client is None:
            self.client = Client()
            self._api, self._id = self.client.api, self.client.id
            self._saved = None
        elif self._saved is not None:
            self.client.restore(self._saved)
        self.client.configure(self._physics)
        if first:
            self._load(self.client)
        obs = self._place(self.client)
        if self._keeps_state and self._saved is None:
            self._saved = self.client.save()
        return obs, {}

    def simulate(self) -> None:
        """The physics of one env step: what no task can do without."""
        self._api.stepSimulation(self._id)

    @abc.abstractmethod
    def _load(self, client: Client) -> None:
        """Loads the models into a fresh server."""

    @abc.abstractmethod
    def _place(self, client: Client) -> np.ndarray:
        """Starts an episode; returns its first observation, float32 [O]."""

    def close(self) -> None:
        """Ends the server; a later reset starts another."""
        if self.client is not None:
            self.client.close()
            self.client = None


def clipped(action: np.ndarray) -> list[float]:
    """Components of an action [A], each within [-1, 1].

    Raises:
        ValueError: not finite; Bullet would carry NaN into every later state.
    """
    values: list[float] = action.tolist()
    if not math.isfinite(sum(values)) and not np.isfinite(action).all():
        raise ValueError(f"action {values}: every component must be finite")
    return [-1.0 if value < -1.0 else 1.0 if value > 1.0 else value for value in values]
