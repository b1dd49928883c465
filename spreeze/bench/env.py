"""The fast Bullet tasks against the package that they equal: env steps per second, and the physics alone.

Both sides are stepped in turns within one run, with the same seeds and actions, so that both go
through the same states and call the same physics.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spreeze.bench import Row, row
from spreeze.errors import EnvironmentError_

_SLICE_S = 0.1
_ACTIONS = 4096


@dataclass
class _Side:
    """One environment that is stepped in slices, and the time that its steps took."""

    env: Any
    time_s: float = 0.0
    place: int = 0
    physics_s: list[float] = field(default_factory=list)

    def run(self, actions: np.ndarray, steps: int) -> None:
        """Steps with the next of ``actions`` [N, A]; resets count, as they do in sampling."""
        start = time.perf_counter()
        for index in range(self.place, self.place + steps):
            _, _, terminated, truncated, _ = self.env.step(actions[index % len(actions)])
            if terminated or truncated:
                self.env.reset()
        self.time_s += time.perf_counter() - start
        self.place += steps


def env_rows(repeats: int = 5, seconds: float = 2.0, tasks: tuple[str, ...] | None = None) -> list[Row]:
    """Rates of the fast tasks and of pybullet-envs-gymnasium's, their ratio, and the physics call's time.

    The slower side is stepped for ``seconds`` a repeat; all fast tasks are measured if none is named.

    Raises:
        EnvironmentError_: the package is not here, or equality is not proven for what is.
    """
    from spreeze.envs import bullet

    reason = bullet.unproven()
    if reason is not None:
        raise EnvironmentError_(f"no comparison of Bullet environments: {reason}")
    return [row for task in tasks or bullet.TASKS for row in _task_rows(task, repeats, seconds)]


def _task_rows(task: str, repeats: int, seconds: float) -> list[Row]:
    from spreeze.envs.bullet import pair

    sides = fast, plain = tuple(_Side(env) for env in pair(task))
    try:
        space = fast.env.action_space
        actions = np.random.default_rng(0).uniform(-1.0, 1.0, (_ACTIONS, *space.shape)).astype(np.float32)
        for side in sides:
            side.env.reset(seed=0)
        _time_physics(fast)
        found = [_repeat(fast, plain, actions, seconds) for _ in range(repeats)]
    finally:
        for side in sides:
            side.env.close()
    fast_us, plain_us, physics_us = (list(column) for column in zip(*found, strict=True))
    ratios = [slow / quick for quick, slow in zip(fast_us, plain_us, strict=True)]
    limits = [slow / alone for alone, slow in zip(physics_us, plain_us, strict=True)]
    return [
        row("env_steps_per_s", "1/s", [1e6 / us for us in fast_us], task=task),
        row("package_env_steps_per_s", "1/s", [1e6 / us for us in plain_us], task=task),
        row("env_speedup", "ratio", ratios, task=task),
        row("physics_us_per_step", "us", physics_us, task=task),
        row("env_speedup_limit", "ratio", limits, task=task),
    ]


def _time_physics(side: _Side) -> None:
    """Times each physics call of a fast task; costs its steps about 0.2 us."""
    task = side.env.unwrapped
    simulate: Callable[[], None] = task.simulate

    def timed() -> None:
        start = time.perf_counter()
        simulate()
        side.physics_s.append(time.perf_counter() - start)

    task.simulate = timed


def _repeat(fast: _Side, plain: _Side, actions: np.ndarray, seconds: float) -> tuple[float, float, float]:
    """Mean times in us of a fast step, of the package's step, and of the physics call."""
    steps = 20
    for side in (fast, plain):
        side.run(actions, steps)
        side.time_s = 0.0
    fast.physics_s.clear()
    first = fast.place
    while plain.time_s < seconds:
        for side in (fast, plain):
            side.run(actions, steps)
        steps = max(1, round(_SLICE_S / plain.time_s * (plain.place - first)))
    done = fast.place - first
    return tuple(1e6 * total / done for total in (fast.time_s, plain.time_s, sum(fast.physics_s)))  # type: ignore[return-value]
