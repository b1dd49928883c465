"""An arm of two links in a plane that reaches for a point.

Roundings and their order are those of pybullet-envs-gymnasium 0.6.0.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spreeze.envs.bullet.base import BulletTask, Client, Physics, clipped, same_body

PHYSICS = Physics(gravity=0.0, substep_s=0.0165, substeps=1)
_TORQUE = 0.05
_TARGET_M = 0.27
_ARM_RAD = 3.14


class Reacher(BulletTask):
    """Observation: target x, y [m], from target to fingertip, cos, sin and speed of the shoulder, the elbow."""

    def __init__(self) -> None:
        super().__init__(PHYSICS, 9, 2, keeps_state=False)
        self._away = np.zeros(3)

    def _load(self, client: Client) -> None:
        model = client.load_model("reacher.xml", "body0")
        self._arm = [model.joints["joint0"], model.joints["joint1"]]
        self._target = [model.joints["target_x"], model.joints["target_y"]]
        self._arm_body, self._target_body = same_body(self._arm), same_body(self._target)
        self._arm_ids = [joint.index for joint in self._arm]
        self._target_ids = [joint.index for joint in self._target]
        self._scales = [(joint.lower, joint.upper - joint.lower) for joint in self._arm]
        self._finger_link, self._target_link = model.parts["fingertip"].link, model.parts["target"].link

    def _place(self, client: Client) -> np.ndarray:
        for joint in self._target:
            client.place(joint, self.np_random.uniform(low=-_TARGET_M, high=_TARGET_M))
        for joint in self._arm:
            client.place(joint, self.np_random.uniform(low=-_ARM_RAD, high=_ARM_RAD))
        return self._observe()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One env step of 16.5 ms; reward: 100 a metre closer, less electricity and a stuck elbow."""
        a = np.asarray(action)
        old = self._potential
        torques = [_TORQUE * value for value in clipped(a)]
        self._api.setJointMotorControlArray(
            self._arm_body, self._arm_ids, self._api.TORQUE_CONTROL, forces=torques, physicsClientId=self._id
        )
        self.simulate()
        obs = self._observe()
        # In the action's own precision, term by term.
        work = abs(a[0] * self._shoulder_speed) + abs(a[1] * self._elbow_speed)
        electricity = -0.10 * work - 0.01 * (abs(a[0]) + abs(a[1]))
        stuck = -0.1 if abs(abs(self._elbow) - 1) < 0.01 else 0.0
        return obs, sum([self._potential - old, float(electricity), stuck]), False, False, {}

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
        away = self._away
        away[0], away[1], away[2] = (a - b for a, b in zip(finger, goal, strict=True))
        self._potential = -100 * math.sqrt(away.dot(away))
        values = [
            target[0][0], target[1][0], away[0], away[1], np.cos(shoulder), np.sin(shoulder),
            self._shoulder_speed, self._elbow, self._elbow_speed,
        ]  # fmt: skip
        return np.array(values, dtype=np.float32)
