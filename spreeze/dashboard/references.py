"""Returns that others publish, to compare with: a table, with its source."""

from __future__ import annotations

from typing import NamedTuple

SOURCE = (
    "RL Baselines3 Zoo, benchmark.md (github.com/DLR-RM/rl-baselines3-zoo): mean return of its trained agent over "
    "150,000 env steps; one training run each, tuned settings"
)


class Published(NamedTuple):
    """A published mean return and the env steps it took to train."""

    value: float
    env_steps: int

    @property
    def label(self) -> str:
        """Legend of its line."""
        steps = f"{self.env_steps // 1_000_000} M" if self.env_steps >= 1_000_000 else f"{self.env_steps // 1000}k"
        return f"RL Baselines3 Zoo after {steps} env steps: {self.value:g}"


PUBLISHED: dict[tuple[str, str], Published] = {
    ("sac", "AntBulletEnv-v0"): Published(3073.1, 1_000_000),
    ("sac", "BipedalWalker-v3"): Published(297.7, 500_000),
    ("sac", "HalfCheetahBulletEnv-v0"): Published(2792.2, 1_000_000),
    ("sac", "HopperBulletEnv-v0"): Published(2603.5, 1_000_000),
    ("sac", "LunarLanderContinuous-v2"): Published(260.4, 500_000),
    ("sac", "MountainCarContinuous-v0"): Published(94.7, 50_000),
    ("sac", "Pendulum-v1"): Published(-157.0, 20_000),
    ("sac", "ReacherBulletEnv-v0"): Published(18.1, 300_000),
    ("sac", "Walker2DBulletEnv-v0"): Published(2292.3, 1_000_000),
    ("td3", "AntBulletEnv-v0"): Published(3300.0, 1_000_000),
    ("td3", "BipedalWalker-v3"): Published(306.0, 1_000_000),
    ("td3", "HalfCheetahBulletEnv-v0"): Published(2821.6, 1_000_000),
    ("td3", "HopperBulletEnv-v0"): Published(2681.6, 1_000_000),
    ("td3", "MountainCarContinuous-v0"): Published(93.5, 300_000),
    ("td3", "Pendulum-v1"): Published(-151.9, 20_000),
    ("td3", "ReacherBulletEnv-v0"): Published(17.1, 300_000),
    ("td3", "Walker2DBulletEnv-v0"): Published(2213.7, 1_000_000),
    ("ddpg", "AntBulletEnv-v0"): Published(2399.1, 1_000_000),
    ("ddpg", "BipedalWalker-v3"): Published(197.5, 1_000_000),
    ("ddpg", "HalfCheetahBulletEnv-v0"): Published(2078.3, 1_000_000),
    ("ddpg", "HopperBulletEnv-v0"): Published(1157.1, 1_000_000),
    ("ddpg", "MountainCarContinuous-v0"): Published(93.5, 300_000),
    ("ddpg", "Pendulum-v1"): Published(-152.1, 20_000),
    ("ddpg", "ReacherBulletEnv-v0"): Published(15.6, 300_000),
    ("ddpg", "Walker2DBulletEnv-v0"): Published(1387.6, 1_000_000),
}
"""(algorithm, task) -> what the source lists."""


def published(algo: str | None, env_id: str | None) -> Published | None:
    """What is published for a task and an algorithm, or None."""
    return PUBLISHED.get((algo or "", env_id or ""))
