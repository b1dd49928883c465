"""Walker2D, Hopper, HalfCheetah, Ant and Humanoid: robots that are rewarded for going forward.

Each env step queries Bullet once for all joints, once for all links and once for all contacts. Sums, roundings and
their order are those of pybullet-envs-gymnasium 0.6.0, so that every observation and reward has the same bits; comments
mark the lines whose form follows from that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spreeze.envs.bullet.base import BulletJoint, BulletTask, Client, Physics, clipped

Vector = tuple[float, float, float]

PHYSICS = Physics(gravity=9.8, substep_s=0.0165 / 4, substeps=4)
TARGET_X_M = 1e3  # the robot runs towards a point one kilometre away
_HEAD = 8  # components of the observation before the joints
_LOWEST, _HIGHEST = np.float32(-5.0), np.float32(5.0)
_AT_LIMIT = np.float32(0.99)
_LIMIT_COST = -0.1
_ANY_LINK, _BASE = -2, -1


def pairwise_sum(values: list[float]) -> float:
    """The sum of 8 to 128 numbers in NumPy's order of additions: eight running sums."""
    a, b, c, d, e, f, g, h = values[:8]
    end = len(values) & ~7
    for i in range(8, end, 8):
        a += values[i]
        b += values[i + 1]
        c += values[i + 2]
        d += values[i + 3]
        e += values[i + 4]
        f += values[i + 5]
        g += values[i + 6]
        h += values[i + 7]
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for value in values[end:]:
        total += value
    return total


class Locomotion(BulletTask):
    """One of ``ROBOTS``; observation: height, direction, velocity, roll and pitch, joints, feet."""

    def __init__(self, name: str) -> None:
        self.robot = ROBOTS[name]
        action_dim = (self.robot.obs_dim - _HEAD - len(self.robot.feet)) // 2
        super().__init__(PHYSICS, self.robot.obs_dim, action_dim)
        self._feet = [0.0] * len(self.robot.feet)
        self._rotation = np.eye(3)
        self._velocity = np.zeros(3)
        self._to_target = np.zeros(2)
        self._positions = slice(_HEAD, _HEAD + 2 * action_dim, 2)
        self._speeds = slice(_HEAD + 1, _HEAD + 2 * action_dim, 2)

    def _load(self, client: Client) -> None:
        self._ground = client.load_ground()
        model = client.load_model(self.robot.file, "torso")
        if model.root is None:
            raise ValueError(f"{self.robot.file} has no part named torso")
        self._joints: list[BulletJoint] = list(model.joints.values())
        self._body = self._joints[0].body  # that of all parts
        self._joint_ids = [joint.index for joint in self._joints]
        self._scales = [(joint.lower, joint.upper - joint.lower) for joint in self._joints]
        names = self.robot.motors or tuple(model.joints)
        powers = {**dict.fromkeys(model.joints, self.robot.default_power), **dict(self.robot.motor_power)}
        self._motor_ids = [model.joints[name].index for name in names]
        self._gains = [self.robot.power * powers[name] for name in names]
        self._single_gains = np.array(self._gains, dtype=np.float32).tolist()
        parts = [part.link for part in model.parts.values()]
        self._links = [link for link in parts if link != _BASE]
        self._base_index = parts.index(_BASE) if _BASE in parts else None
        self._torso = None if model.root.link == _BASE else self._links.index(model.root.link)
        self._foot_links = [model.parts[name].link for name in self.robot.feet]
        # The robot's position is the mean of its parts and the ground, but without the ground in an environment's
        # very first observation.
        self._ground_position: Vector | None = None

    def _place(self, client: Client) -> np.ndarray:
        for joint in self._joints:
            client.set_joint(joint, self.np_random.uniform(low=-0.1, high=0.1))
        self._feet = [0.0] * len(self._feet)
        self._start_height: Any = self.robot.start_height
        obs = self._observe()[0]
        if self._ground_position is None:
            self._ground_position = self._api.getBasePositionAndOrientation(self._ground, self._id)[0]
        return obs

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One env step of 16.5 ms; ``action`` [A] holds torques over their greatest value."""
        action = np.asarray(action)
        old = self._potential
        self._push(action)
        self._api.stepSimulation(self._id)
        obs, raw, pitch = self._observe()
        alive = self.robot.alive(obs[0] + self._start_height, pitch, self._feet)
        total = float(np.add.reduce(obs))
        # Clipped values can only be NaN if not finite.
        fallen = (alive < 0 and self.robot.ends_fallen) or total != total
        contacts = self._api.getContactPoints(self._body, self._ground, _ANY_LINK, _BASE, self._id)
        touching = {contact[3] for contact in contacts}
        self._feet = [1.0 if link in touching else 0.0 for link in self._foot_links]
        electricity = self.robot.electricity_cost * _mean(np.absolute(action * raw[self._speeds]))
        electricity += self.robot.stall_cost * _mean(np.square(action))
        at_limit = int(np.count_nonzero(np.absolute(raw[self._positions]) > _AT_LIMIT))
        reward = sum([alive, self._potential - old, electricity, _LIMIT_COST * at_limit, 0.0])
        return obs, reward, fallen, False, {}

    def _push(self, action: np.ndarray) -> None:
        """Applies the torques; a Humanoid's are rounded to the action's precision."""
        single = self.robot.single_torque and action.dtype == np.float32
        gains = self._single_gains if single else self._gains
        torques = [gain * value for gain, value in zip(gains, clipped(action), strict=True)]
        if single:
            torques = np.array(torques, dtype=np.float32).tolist()
        self._api.setJointMotorControlArray(
            self._body, self._motor_ids, self._api.TORQUE_CONTROL, forces=torques, physicsClientId=self._id
        )

    def _pose(self) -> tuple[Vector, tuple[float, ...], Vector, float, float]:
        """Torso position [m], orientation and velocity [m/s], and the mean x and y of all parts [m]."""
        states = self._api.getLinkStates(self._body, self._links, self._torso is not None, 0, self._id)
        xs = [state[0][0] for state in states]
        ys = [state[0][1] for state in states]
        if self._torso is None:
            position, quaternion = self._api.getBasePositionAndOrientation(self._body, self._id)
            velocity = self._api.getBaseVelocity(self._body, self._id)[0]
        else:
            torso = states[self._torso]
            position, quaternion, velocity = torso[0], torso[1], torso[6]
        if self._base_index is not None:
            xs.insert(self._base_index, position[0])
            ys.insert(self._base_index, position[1])
        if self._ground_position is not None:
            xs.append(self._ground_position[0])
            ys.append(self._ground_position[1])
        return position, quaternion, velocity, pairwise_sum(xs) / len(xs), pairwise_sum(ys) / len(ys)

    def _observe(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Observation float32 [O], also before it is clipped, and pitch [rad]; also sets the potential."""
        position, quaternion, velocity, x, y = self._pose()
        height = position[2]
        if self._start_height is None:
            self._start_height = np.float64(height)
        roll, pitch, yaw = self._api.getEulerFromQuaternion(quaternion)
        # NumPy's trigonometry and BLAS matmuls differ from Python's in the last bit on some processors.
        to_target = self._to_target
        to_target[0], to_target[1] = 0.0 - y, TARGET_X_M - x
        angle = np.arctan2(0.0 - y, TARGET_X_M - x) - yaw
        self._potential = -math.sqrt(to_target.dot(to_target)) / PHYSICS.step_s
        vx, vy, vz = self._turned(velocity, yaw)
        values = [
            height - self._start_height, np.sin(angle), np.cos(angle), 0.3 * vx, 0.3 * vy, 0.3 * vz, roll, pitch,
        ]  # fmt: skip
        states = self._api.getJointStates(self._body, self._joint_ids, self._id)
        for state, (lower, span) in zip(states, self._scales, strict=True):
            values.append(2 * (state[0] - lower) / span - 1.0)
            values.append(0.1 * state[1])
        values += self._feet
        raw = np.array(values, dtype=np.float32)
        return np.minimum(np.maximum(raw, _LOWEST), _HIGHEST), raw, pitch

    def _turned(self, velocity: Vector, yaw: float) -> list[float]:
        """A velocity [m/s] in the frame of a body with heading ``yaw`` [rad]."""
        rotation, column = self._rotation, self._velocity
        rotation[0, 0] = rotation[1, 1] = np.cos(-yaw)
        sine = np.sin(-yaw)
        rotation[0, 1], rotation[1, 0] = -sine, sine
        column[0], column[1], column[2] = velocity
        turned: list[float] = rotation.dot(column).tolist()
        return turned


def _mean(values: np.ndarray) -> float:
    """Mean of [A] in the values' own precision, equal to ``ndarray.mean`` but in a third of the time."""
    return float(np.add.reduce(values) / len(values))


Alive = Callable[[Any, float, Sequence[float]], float]
"""Maps torso height [m], pitch [rad] and foot contacts to the reward for standing; below 0: fallen."""


@dataclass(frozen=True, kw_only=True)
class Robot:
    file: str
    obs_dim: int
    power: float  # torque at full action, over ``motor_power``
    feet: tuple[str, ...]  # parts whose contact with the ground is observed
    alive: Alive
    motor_power: tuple[tuple[str, float], ...] = ()  # joints whose motor differs from ``default_power``
    default_power: float = 100.0
    motors: tuple[str, ...] | None = None  # joints in the order of the action; None: in the model's order
    single_torque: bool = False  # torques are computed in the action's own precision
    start_height: float | None = None  # origin of the observed height [m]; None: the height at reset
    electricity_cost: float = -2.0  # reward per mean of |action x joint speed|
    stall_cost: float = -0.1  # reward per mean of squared action
    ends_fallen: bool = True


def _upright(height: Any, pitch: float, feet: Sequence[float]) -> float:
    return 1.0 if height > 0.8 and abs(pitch) < 1.0 else -1.0


def _runs_on_feet(height: Any, pitch: float, feet: Sequence[float]) -> float:
    """Shins and thighs on the ground count as fallen."""
    return 1.0 if abs(pitch) < 1.0 and not (feet[1] or feet[2] or feet[4] or feet[5]) else -1.0


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
        alive=_runs_on_feet,
        feet=("ffoot", "fshin", "fthigh", "bfoot", "bshin", "bthigh"),
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
        alive=lambda height, pitch, feet: 1.0 if height > 0.26 else -1.0,
        feet=("front_left_foot", "front_right_foot", "left_back_foot", "right_back_foot"),
    ),
    "Humanoid": Robot(
        file="humanoid_symmetric.xml",
        obs_dim=44,
        power=0.41,
        feet=("right_foot", "left_foot"),
        alive=lambda height, pitch, feet: 2.0 if height > 0.78 else -1.0,  # in the height's own precision, a float32
        motor_power=_HUMANOID_MOTORS,
        motors=tuple(name for name, _ in _HUMANOID_MOTORS),
        single_torque=True,
        start_height=0.8,
        electricity_cost=4.25 * -2.0,
        stall_cost=4.25 * -0.1,
    ),
}
