"""The best return of each task that RL Baselines3 Zoo has published."""

from __future__ import annotations

from typing import NamedTuple

ZOO = "RL Baselines3 Zoo"
SOURCE = (
    f"{ZOO}, benchmark.md (github.com/DLR-RM/rl-baselines3-zoo): mean return of its trained agent over "
    "150,000 env steps; one training run each, tuned settings"
)


class Published(NamedTuple):
    """The best return of a task in ``SOURCE``, over all of its algorithms."""

    value: float
    algo: str
    env_steps: int
    env_id: str

    @property
    def label(self) -> str:
        """Legend of its line."""
        steps = f"{self.env_steps // 1_000_000} M" if self.env_steps >= 1_000_000 else f"{self.env_steps // 1000}k"
        return f"{ZOO}, {self.algo.upper()} on {self.env_id} after {steps} env steps: {self.value:g}"


PUBLISHED = {
    found.env_id: found
    for found in (
        Published(-69.1, "qrdqn", 100_000, "Acrobot-v1"),
        Published(5813.3, "td3", 1_000_000, "Ant-v3"),
        Published(3456.7, "tqc", 1_000_000, "AntBulletEnv-v0"),
        Published(329.8, "tqc", 500_000, "BipedalWalker-v3"),
        Published(235.2, "tqc", 2_000_000, "BipedalWalkerHardcore-v3"),
        Published(500.0, "dqn", 50_000, "CartPole-v1"),
        Published(-9.3, "tqc", 1_000_000, "FetchPickAndPlace-v1"),
        Published(-8.8, "tqc", 1_000_000, "FetchPush-v1"),
        Published(-1.66, "tqc", 20_000, "FetchReach-v1"),
        Published(-29.2, "tqc", 3_000_000, "FetchSlide-v1"),
        Published(12089.9, "tqc", 1_000_000, "HalfCheetah-v3"),
        Published(3675.3, "tqc", 1_000_000, "HalfCheetahBulletEnv-v0"),
        Published(3754.2, "tqc", 1_000_000, "Hopper-v3"),
        Published(2681.6, "td3", 1_000_000, "HopperBulletEnv-v0"),
        Published(7239.3, "tqc", 2_000_000, "Humanoid-v3"),
        Published(242.1, "ppo", 1_000_000, "LunarLander-v2"),
        Published(278.0, "tqc", 500_000, "LunarLanderContinuous-v2"),
        Published(-100.8, "dqn", 120_000, "MountainCar-v0"),
        Published(96.7, "ars", 500_000, "MountainCarContinuous-v0"),
        Published(-36.6, "tqc", 1_000_000, "PandaPickAndPlace-v2"),
        Published(-8.7, "tqc", 1_000_000, "PandaPush-v2"),
        Published(-1.73, "tqc", 20_000, "PandaReach-v2"),
        Published(-36.8, "tqc", 3_000_000, "PandaSlide-v2"),
        Published(-151.9, "td3", 20_000, "Pendulum-v1"),
        Published(18.3, "tqc", 300_000, "ReacherBulletEnv-v0"),
        Published(365.7, "trpo", 1_000_000, "Swimmer-v3"),
        Published(2508.9, "tqc", 1_000_000, "Walker2DBulletEnv-v0"),
        Published(4933.1, "trpo", 1_000_000, "Walker2d-v3"),
        Published(-6.8, "tqc", 100_000, "parking-v0"),
    )
}
"""Task -> its best return in ``SOURCE``, less games of Atari, whose rules here are others (sticky actions)."""


def published(env_id: str | None) -> Published | None:
    """The best return of a task in ``SOURCE``, where an older version of the task stands for a newer one."""
    name, _, version = (env_id or "").rpartition("-v")
    older = range(int(version), -1, -1) if version.isascii() and version.isdigit() and len(version) < 3 else ()
    return next((PUBLISHED[key] for number in older if (key := f"{name}-v{number}") in PUBLISHED), None)
