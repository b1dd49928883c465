"""The pendulums on a cart, and an arm of two links in a plane that reaches for a point.

Roundings and their order are those of pybullet-envs-gymnasium 0.6.0.
"""

from __future__ import annotations

import abc
import math
from typing import Any

import numpy as np

from spreeze.envs.bullet.base import BulletJoint, BulletTask, Client, Physics, clipped

_STEP_S = 0.0165
_FALLEN_RAD = 0.2
_HANGING_RAD = 3.1415
_TIP_M = 0.3  # from the middle of the second pole to its tip
_REACHER_TORQUE = 0.05
_TARGET_M = 0.27
_ARM_RAD = 3.14


class _Cart(BulletTask):
    """A cart on a rail, pushed by the action; ``hinges`` are the joints of the poles, stacked on it."""

    def __init__(self, file: str, hinges: tuple[str, ...], obs_dim: int, force: float) -> None:
        super().__init__(Physics(gravity=9.8, substep_s=_STEP_S, substeps=1), obs_dim, 1)
        self._file, self._force = file, force
        self._names = ("slider", *hinges)

    def _load(self, client: Client) -> None:
        self._model = client.load_model(self._file, "cart")
        self._joints: list[BulletJoint] = [self._model.joints[name] for name in self._names]
        self._body = self._joints[0].body
        self._joint_ids = [joint.index for joint in self._joints]

    def _swing(self, client: Client, positions: list[float]) -> np.ndarray:
        """Puts the hinges at ``positions`` [rad], at rest."""
        for joint, position in zip(self._joints[1:], positions, strict=True):
            client.set_joint(joint, position)
        for joint in self._joints[1:]:
            client.push(joint, 0.0)
        return self._observe()

    def _advance(self, action: np.ndarray) -> np.ndarray:
        """Pushes the cart for one env step; returns the observation."""
        (value,) = clipped(np.asarray(action))
        slider, torque = self._joint_ids[0], self._api.TORQUE_CONTROL
        self._api.setJointMotorControl2(self._body, slider, torque, force=self._force * value, physicsClientId=self._id)
        self._api.stepSimulation(self._id)
        return self._observe()

    @abc.abstractmethod
    def _observe(self) -> np.ndarray:
        """The current observation, float32 [O]."""


class InvertedPendulum(_Cart):
    """Keep a pole upright, or swing it up; observation: cart x [m] and speed, cos, sin, speed of the angle."""

    def __init__(self, *, swing_up: bool = False) -> None:
        super().__init__("inverted_pendulum.xml", ("hinge",), 5, 100.0)
        self._swing_up = swing_up

    def _place(self, client: Client) -> np.ndarray:
        offset = self.np_random.uniform(low=-0.1, high=0.1)
        return self._swing(client, [_HANGING_RAD + offset if self._swing_up else offset])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One env step of 16.5 ms; reward 1 while upright, or the cosine when swinging up."""
        obs = self._advance(action)
        if self._swing_up:
            return obs, float(self._cosine), False, False, {}
        return obs, 1.0, abs(self._angle) > _FALLEN_RAD, False, {}

    def _observe(self) -> np.ndarray:
        cart, pole = self._api.getJointStates(self._body, self._joint_ids, self._id)
        self._angle: float = pole[0]
        self._cosine = np.cos(pole[0])
        return np.array([cart[0], cart[1], self._cosine, np.sin(pole[0]), pole[1]], dtype=np.float32)


class InvertedDoublePendulum(_Cart):
    """Keep two poles upright; observation: cart, x of the second pole, then cos, sin and speed of both angles."""

    def __init__(self) -> None:
        super().__init__("inverted_double_pendulum.xml", ("hinge", "hinge2"), 9, 200.0)

    def _load(self, client: Client) -> None:
        super()._load(client)
        self._pole = self._model.parts["pole2"].link

    def _place(self, client: Client) -> np.ndarray:
        return self._swing(client, self.np_random.uniform(low=-0.1, high=0.1, size=[2]).tolist())

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One env step of 16.5 ms; reward 10 minus a distance of the tip from upright."""
        obs = self._advance(action)
        x, _, z = self._position
        # NumPy's power: Python's may differ in the last bit.
        distance = 0.01 * np.float64(x) ** 2 + (np.float64(z) + _TIP_M - 2) ** 2
        return obs, 10.0 - float(distance), z + _TIP_M <= 1, False, {}

    def _observe(self) -> np.ndarray:
        cart, lower, upper = self._api.getJointStates(self._body, self._joint_ids, self._id)
        self._position: tuple[float, float, float] = self._api.getLinkState(self._body, self._pole, 0, 0, self._id)[0]
        values = [cart[0], cart[1], self._position[0]]
        for angle, speed, *_ in (lower, upper):
            values += [np.cos(angle), np.sin(angle), speed]
        return np.array(values, dtype=np.float32)


class Reacher(BulletTask):
    """Observation: target x, y [m], from target to fingertip, cos, sin and speed of the shoulder, the elbow."""

    def __init__(self) -> None:
        super().__init__(Physics(gravity=0.0, substep_s=_STEP_S, substeps=1), 9, 2, keeps_state=False)
        self._to_finger = np.zeros(3)

    def _load(self, client: Client) -> None:
        model = client.load_model("reacher.xml", "body0")
        self._arm = [model.joints["joint0"], model.joints["joint1"]]
        self._target = [model.joints["target_x"], model.joints["target_y"]]
        self._arm_body, self._target_body = self._arm[0].body, self._target[0].body
        self._arm_ids = [joint.index for joint in self._arm]
        self._target_ids = [joint.index for joint in self._target]
        self._scales = [(joint.lower, joint.upper - joint.lower) for joint in self._arm]
        self._finger_link, self._target_link = model.parts["fingertip"].link, model.parts["target"].link

    def _place(self, client: Client) -> np.ndarray:
        for joint in self._target:
            client.set_joint(joint, self.np_random.uniform(low=-_TARGET_M, high=_TARGET_M))
        for joint in self._arm:
            client.set_joint(joint, self.np_random.uniform(low=-_ARM_RAD, high=_ARM_RAD))
        return self._observe()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One env step of 16.5 ms; reward: 100 a metre closer, less electricity and a stuck elbow."""
        a = np.asarray(action)
        potential_before = self._potential
        torques = [_REACHER_TORQUE * value for value in clipped(a)]
        self._api.setJointMotorControlArray(
            self._arm_body, self._arm_ids, self._api.TORQUE_CONTROL, forces=torques, physicsClientId=self._id
        )
        self._api.stepSimulation(self._id)
        obs = self._observe()
        # In the action's own precision, term by term.
        work = abs(a[0] * self._shoulder_speed) + abs(a[1] * self._elbow_speed)
        electricity = -0.10 * work - 0.01 * (abs(a[0]) + abs(a[1]))
        stuck = -0.1 if abs(abs(self._elbow) - 1) < 0.01 else 0.0
        return obs, sum([self._potential - potential_before, float(electricity), stuck]), False, False, {}

    def _observe(self) -> np.ndarray:
        """Reads Bullet; also sets the potential and the scaled joint states; returns float32 [9]."""
        arm = self._api.getJointStates(self._arm_body, self._arm_ids, self._id)
        target = self._api.getJointStates(self._target_body, self._target_ids, self._id)
        (shoulder, self._shoulder_speed), (self._elbow, self._elbow_speed) = (
            (2 * (state[0] - lower) / span - 1.0, 0.1 * state[1])
            for state, (lower, span) in zip(arm, self._scales, strict=True)
        )
        finger = self._api.getLinkState(self._arm_body, self._finger_link, 0, 0, self._id)[0]
        goal = self._api.getLinkState(self._target_body, self._target_link, 0, 0, self._id)[0]
        to_finger = self._to_finger
        to_finger[0], to_finger[1], to_finger[2] = (a - b for a, b in zip(finger, goal, strict=True))
        self._potential = -100 * math.sqrt(to_finger.dot(to_finger))
        values = [
            target[0][0], target[1][0], to_finger[0], to_finger[1], np.cos(shoulder), np.sin(shoulder),
            self._shoulder_speed, self._elbow, self._elbow_speed,
        ]  # fmt: skip
        return np.array(values, dtype=np.float32)
