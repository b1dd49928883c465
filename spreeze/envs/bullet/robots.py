"""The five walking robots in figures: model files, motors, feet, and when each counts as fallen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Alive = Callable[[Any, float, Sequence[float]], float]
"""From torso height [m], pitch [rad] and the feet's last contacts to the reward for standing; below 0 is fallen."""


@dataclass(frozen=True, kw_only=True)
class Robot:
    """One robot."""

    file: str
    obs_dim: int
    power: float
    """Torque at full action, over ``motor_power``."""
    feet: tuple[str, ...]
    """Parts whose contact with the ground is observed."""
    alive: Alive
    motor_power: tuple[tuple[str, float], ...] = ()
    """Joints whose motor differs from ``default_power``."""
    default_power: float = 100.0
    motors: tuple[str, ...] | None = None
    """Joints in the order of the action; None: in the model's order."""
    single_torque: bool = False
    """Torques are products in the action's own precision."""
    start_height: float | None = None
    """Height that the observed one counts from, m; None: the height at reset."""
    electricity_cost: float = -2.0
    """Reward per mean of |action x joint speed|."""
    stall_cost: float = -0.1
    """Reward per mean of squared action."""
    ends_fallen: bool = True


def _upright(height: Any, pitch: float, feet: Sequence[float]) -> float:
    return 1.0 if height > 0.8 and abs(pitch) < 1.0 else -1.0


def _runs_on_feet(height: Any, pitch: float, feet: Sequence[float]) -> float:
    """Shins and thighs on the ground count as fallen."""
    return 1.0 if abs(pitch) < 1.0 and not (feet[1] or feet[2] or feet[4] or feet[5]) else -1.0


def _above(limit: float, bonus: float) -> Alive:
    def alive(height: Any, pitch: float, feet: Sequence[float]) -> float:
        # Compared in the height's own precision: the Humanoid's is a float32.
        return bonus if height > limit else -1.0

    return alive


_SIDES = ("right", "left")
_HUMANOID_MOTORS: tuple[tuple[str, float], ...] = (
    *((f"abdomen_{axis}", 100.0) for axis in "zyx"),
    *(
        (f"{side}_{joint}", power)
        for side in _SIDES
        for joint, power in (("hip_x", 100.0), ("hip_z", 100.0), ("hip_y", 300.0), ("knee", 200.0))
    ),
    *((f"{side}_{joint}", 75.0) for side in _SIDES for joint in ("shoulder1", "shoulder2", "elbow")),
)

ROBOTS: dict[str, Robot] = {
    "Walker2D": Robot(
        file="walker2d.xml",
        obs_dim=22,
        power=0.40,
        feet=("foot", "foot_left"),
        alive=_upright,
        motor_power=(("foot_joint", 30.0), ("foot_left_joint", 30.0)),
    ),
    "Hopper": Robot(file="hopper.xml", obs_dim=15, power=0.75, feet=("foot",), alive=_upright),
    "HalfCheetah": Robot(
        file="half_cheetah.xml",
        obs_dim=26,
        power=0.90,
        feet=("ffoot", "fshin", "fthigh", "bfoot", "bshin", "bthigh"),
        alive=_runs_on_feet,
        motor_power=(
            ("bthigh", 120.0),
            ("bshin", 90.0),
            ("bfoot", 60.0),
            ("fthigh", 140.0),
            ("fshin", 60.0),
            ("ffoot", 30.0),
        ),
        ends_fallen=False,
    ),
    "Ant": Robot(
        file="ant.xml",
        obs_dim=28,
        power=2.5,
        feet=("front_left_foot", "front_right_foot", "left_back_foot", "right_back_foot"),
        alive=_above(0.26, 1.0),
    ),
    "Humanoid": Robot(
        file="humanoid_symmetric.xml",
        obs_dim=44,
        power=0.41,
        feet=("right_foot", "left_foot"),
        alive=_above(0.78, 2.0),
        motor_power=_HUMANOID_MOTORS,
        motors=tuple(name for name, _ in _HUMANOID_MOTORS),
        single_torque=True,
        start_height=0.8,
        electricity_cost=4.25 * -2.0,
        stall_cost=4.25 * -0.1,
    ),
}
