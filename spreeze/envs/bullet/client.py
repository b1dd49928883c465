"""One headless Bullet server: connecting, physics settings, loading a model, releasing it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spreeze.envs.bullet.zeroed_links import zeroed_links

_SOLVER_ITERATIONS = 5
_CONTACT_ERP = 0.9
_GAIN = 0.1


@dataclass(frozen=True, slots=True)
class BulletJoint:
    """A joint that can be driven or read."""

    body: int
    index: int
    lower: float
    """Lower limit in rad or m."""
    upper: float
    """Upper limit in rad or m; below the lower one where there is no limit."""


@dataclass(frozen=True, slots=True)
class BulletLink:
    """A link of a body; link -1 is its base."""

    body: int
    link: int


@dataclass(frozen=True)
class Model:
    """What was found in a model file, in Bullet's order."""

    joints: dict[str, BulletJoint]
    parts: dict[str, BulletLink]
    root: BulletLink | None
    """The part with the root's name."""


@dataclass(frozen=True, kw_only=True)
class Physics:
    """Constants of a simulation."""

    gravity: float
    """Downwards, m/s^2."""
    substep_s: float
    substeps: int

    @property
    def step_s(self) -> float:
        """Simulated time of one env step."""
        return self.substep_s * self.substeps


def data_file(*names: str) -> str:
    """Path of a file that comes with Bullet."""
    import pybullet_data

    return str(Path(pybullet_data.getDataPath(), *names))


class Client:
    """A Bullet server of its own in this process; gone with ``close`` or with the last reference.

    ``api`` is the module ``pybullet``, imported with the first client because importing it prints.
    """

    def __init__(self) -> None:
        import pybullet

        self.api: Any = pybullet
        # DIRECT, never the default: that joins a Bullet server that any other process has open.
        self.id: int = self.api.connect(self.api.DIRECT)
        self._release = weakref.finalize(self, _disconnect, pybullet, self.id, os.getpid())
        self.api.resetSimulation(physicsClientId=self.id)
        self.api.setPhysicsEngineParameter(deterministicOverlappingPairs=1, physicsClientId=self.id)

    def configure(self, physics: Physics) -> None:
        """Sets the constants; done again at each reset."""
        self.api.setGravity(0, 0, -physics.gravity, physicsClientId=self.id)
        self.api.setDefaultContactERP(_CONTACT_ERP, physicsClientId=self.id)
        self.api.setPhysicsEngineParameter(
            fixedTimeStep=physics.step_s,
            numSolverIterations=_SOLVER_ITERATIONS,
            numSubSteps=physics.substeps,
            physicsClientId=self.id,
        )

    def load_ground(self) -> int:
        """Loads the plane that robots walk on; returns its body."""
        bodies = self.api.loadSDF(data_file("plane_stadium.sdf"), physicsClientId=self.id)
        for body in bodies:
            self.api.changeDynamics(body, -1, lateralFriction=0.8, restitution=0.5, physicsClientId=self.id)
        return int(bodies[-1])

    def load_model(self, file: str, root_name: str) -> Model:
        """Loads a robot; the motors that Bullet starts in each joint are switched off.

        Args:
            file: name among Bullet's MJCF files.
            root_name: name of the part whose pose is the robot's.
        """
        flags = self.api.URDF_USE_SELF_COLLISION | self.api.URDF_USE_SELF_COLLISION_EXCLUDE_ALL_PARENTS
        flags |= self.api.URDF_GOOGLEY_UNDEFINED_COLORS
        with zeroed_links():
            bodies = self.api.loadMJCF(data_file("mjcf", file), flags=flags, physicsClientId=self.id)
        joints: dict[str, BulletJoint] = {}
        parts: dict[str, BulletLink] = {}
        root: BulletLink | None = None
        for order, body in enumerate(bodies):
            count = self.api.getNumJoints(body, physicsClientId=self.id)
            if not count:
                parts[self.api.getBodyInfo(body, physicsClientId=self.id)[0].decode()] = BulletLink(body, -1)
            for index in range(count):
                self.api.setJointMotorControl2(
                    body, index, self.api.POSITION_CONTROL, positionGain=_GAIN, velocityGain=_GAIN, force=0,
                    physicsClientId=self.id,
                )  # fmt: skip
                info = self.api.getJointInfo(body, index, physicsClientId=self.id)
                joint_name, part_name = info[1].decode(), info[12].decode()
                parts[part_name] = BulletLink(body, index)
                if part_name == root_name:
                    root = parts[part_name]
                elif root is None and order == index == 0:
                    root = parts[root_name] = BulletLink(body, -1)
                if joint_name.startswith("ignore"):
                    self.motor_off(body, index)
                elif not joint_name.startswith("jointfix"):
                    joints[joint_name] = BulletJoint(body, index, info[8], info[9])
        return Model(joints, parts, root)

    def motor_off(self, body: int, index: int) -> None:
        """Lets a joint swing freely."""
        self.api.setJointMotorControl2(
            body, index, controlMode=self.api.POSITION_CONTROL, targetPosition=0, targetVelocity=0,
            positionGain=_GAIN, velocityGain=_GAIN, force=0, physicsClientId=self.id,
        )  # fmt: skip

    def place(self, joint: BulletJoint, position: float) -> None:
        """Puts a joint at a position (rad or m), at rest, its motor off."""
        self.api.resetJointState(
            joint.body, joint.index, targetValue=position, targetVelocity=0, physicsClientId=self.id
        )
        self.motor_off(joint.body, joint.index)

    def push(self, joint: BulletJoint, torque: float) -> None:
        """Applies a torque (N m) or force (N) during the next step."""
        self.api.setJointMotorControl2(
            joint.body, joint.index, self.api.TORQUE_CONTROL, force=torque, physicsClientId=self.id
        )

    def save(self) -> int:
        """Keeps the state in the server's memory; returns its number."""
        return int(self.api.saveState(physicsClientId=self.id))

    def restore(self, state: int) -> None:
        """Back to a saved state."""
        self.api.restoreState(state, physicsClientId=self.id)

    def close(self) -> None:
        """Ends the server; harmless when done twice."""
        self._release()


def _disconnect(api: Any, client: int, pid: int) -> None:
    if pid == os.getpid():  # a forked child shares nothing with the server and must not end it
        api.disconnect(physicsClientId=client)


def same_body(members: Iterable[BulletJoint | BulletLink]) -> int:
    """The body that all members belong to.

    Raises:
        ValueError: they belong to several; one batched call reaches one body.
    """
    bodies = {member.body for member in members}
    if len(bodies) != 1:
        raise ValueError(f"members of bodies {sorted(bodies)}: expected one body")
    return bodies.pop()
