"""Returns of trained agents that others have published, by task and algorithm."""

from __future__ import annotations

from typing import NamedTuple

ZOO = "RL Baselines3 Zoo"
SOURCE = (
    f"{ZOO}, benchmark.md (github.com/DLR-RM/rl-baselines3-zoo): mean return of its trained agent over "
    "150,000 env steps; one training run each, tuned settings"
)


class Published(NamedTuple):
    value: float
    env_steps: int

    @property
    def label(self) -> str:
        """Legend of its line."""
        steps = f"{self.env_steps // 1_000_000} M" if self.env_steps >= 1_000_000 else f"{self.env_steps // 1000}k"
        return f"{ZOO} after {steps} env steps: {self.value:g}"


_MILLION = 1_000_000
PUBLISHED: dict[str, dict[str, tuple[float, int]]] = {
    "AntBulletEnv-v0": {"sac": (3073.1, _MILLION), "td3": (3300.0, _MILLION), "ddpg": (2399.1, _MILLION)},
    "BipedalWalker-v3": {"sac": (297.7, 500_000), "td3": (306.0, _MILLION), "ddpg": (197.5, _MILLION)},
    "HalfCheetahBulletEnv-v0": {"sac": (2792.2, _MILLION), "td3": (2821.6, _MILLION), "ddpg": (2078.3, _MILLION)},
    "HopperBulletEnv-v0": {"sac": (2603.5, _MILLION), "td3": (2681.6, _MILLION), "ddpg": (1157.1, _MILLION)},
    "LunarLanderContinuous-v2": {"sac": (260.4, 500_000)},
    "MountainCarContinuous-v0": {"sac": (94.7, 50_000), "td3": (93.5, 300_000), "ddpg": (93.5, 300_000)},
    "Pendulum-v1": {"sac": (-157.0, 20_000), "td3": (-151.9, 20_000), "ddpg": (-152.1, 20_000)},
    "ReacherBulletEnv-v0": {"sac": (18.1, 300_000), "td3": (17.1, 300_000), "ddpg": (15.6, 300_000)},
    "Walker2DBulletEnv-v0": {"sac": (2292.3, _MILLION), "td3": (2213.7, _MILLION), "ddpg": (1387.6, _MILLION)},
}
"""Task -> algorithm -> return and env steps in ``SOURCE``."""


_LIKE = {"crossq": "sac"}
"""Algorithms that are compared with the return of another one, because ``SOURCE`` lacks theirs."""


def published(algo: str | None, env_id: str | None) -> Published | None:
    """The return of a task in ``SOURCE``, if it has one."""
    returns = PUBLISHED.get(env_id or "", {})
    entry = returns.get(algo or "") or returns.get(_LIKE.get(algo or "", ""))
    return None if entry is None else Published(*entry)
