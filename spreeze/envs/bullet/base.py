"""Base of all Bullet tasks: a headless server and its models, spaces, seeding, and the order of calls in a reset."""

from __future__ import annotations

import abc
import contextlib
import ctypes
import math
import os
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np

_SOLVER_ITERATIONS = 5
_CONTACT_ERP = 0.9
_GAIN = 0.1
_LINK_BYTES = 768  # size of Bullet's ``UrdfLink`` in the wheels for Linux
_CHUNK_BYTES = _LINK_BYTES + 16  # size of its chunk in glibc's heap
_LINKS = 256  # more than any of the models has
_APART_BYTES = 24


@dataclass(frozen=True, slots=True)
class BulletJoint:
    """A joint that can be driven or read."""

    body: int
    index: int
    lower: float  # lower limit in rad or m
    upper: float  # upper limit in rad or m; below the lower one where there is no limit


@dataclass(frozen=True, slots=True)
class BulletLink:
    """A link of a body; link -1 is its base."""

    body: int
    link: int


@dataclass(frozen=True)
class Model:
    """Bodies, parts and joints of a model file, in Bullet's order."""

    joints: dict[str, BulletJoint]
    parts: dict[str, BulletLink]
    root: BulletLink | None  # the part with the root's name


@dataclass(frozen=True, kw_only=True)
class Physics:
    gravity: float  # downwards, m/s^2
    substep_s: float
    substeps: int

    @property
    def step_s(self) -> float:
        return self.substep_s * self.substeps


def data_file(*names: str) -> str:
    import pybullet_data

    return str(Path(pybullet_data.getDataPath(), *names))


class Client:
    """A separate Bullet server in this process, which ends with ``close`` or with the last reference.

    ``api`` is the module ``pybullet``, imported with the first client because importing it prints.
    """

    def __init__(self) -> None:
        import pybullet

        self.api: Any = pybullet
        # DIRECT, never the default, which joins a Bullet server that any other process has open.
        self.id: int = self.api.connect(self.api.DIRECT)
        self._release = weakref.finalize(self, _disconnect, pybullet, self.id, os.getpid())
        self.api.resetSimulation(physicsClientId=self.id)
        self.api.setPhysicsEngineParameter(deterministicOverlappingPairs=1, physicsClientId=self.id)

    def configure(self, physics: Physics) -> None:
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
        """Loads one of Bullet's MJCF files, its motors off; the part ``root_name`` defines the robot's pose."""
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

    def set_joint(self, joint: BulletJoint, position: float) -> None:
        """Puts a joint at a position (rad or m), at rest, its motor off."""
        self.api.resetJointState(joint.body, joint.index, position, targetVelocity=0, physicsClientId=self.id)
        self.motor_off(joint.body, joint.index)

    def push(self, joint: BulletJoint, torque: float) -> None:
        """Applies a torque (N m) or force (N) during the next step."""
        self.api.setJointMotorControl2(
            joint.body, joint.index, self.api.TORQUE_CONTROL, force=torque, physicsClientId=self.id
        )

    def close(self) -> None:
        """Ends the server; may be called twice."""
        self._release()


def _disconnect(api: Any, client: int, pid: int) -> None:
    if pid == os.getpid():  # a forked child shares nothing with the server and must not end it
        api.disconnect(physicsClientId=client)


class BulletTask(gymnasium.Env[np.ndarray, np.ndarray], abc.ABC):
    """A task on its own Bullet server, which the first reset starts.

    Subclasses define ``_load`` (called once), ``_place`` (at each reset) and ``step``. The order of calls into Bullet
    in ``reset`` is part of the contract: saved contacts and warm starts depend on it.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "render_fps": 60}  # type: ignore[misc]

    def __init__(self, physics: Physics, obs_dim: int, action_dim: int, *, keeps_state: bool = True) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (obs_dim,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (action_dim,), np.float32)
        self.client: Client | None = None
        self._physics, self._keeps_state = physics, keeps_state
        self._saved: int | None = None
        """Number of the first episode's state in the server's memory."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode from the first one's state, with joints placed by the generator."""
        super().reset(seed=seed)
        first = self.client is None
        if self.client is None:
            self.client = Client()
            self._api, self._id = self.client.api, self.client.id
            self._saved = None
        elif self._saved is not None:
            self._api.restoreState(self._saved, physicsClientId=self._id)
        self.client.configure(self._physics)
        if first:
            self._load(self.client)
        obs = self._place(self.client)
        if self._keeps_state and self._saved is None:
            self._saved = int(self._api.saveState(physicsClientId=self._id))
        return obs, {}

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
    """Components of an action [A], within [-1, 1]; a ValueError if not finite: Bullet would keep NaN in every state."""
    values: list[float] = action.tolist()
    if not math.isfinite(sum(values)) and not np.isfinite(action).all():
        raise ValueError(f"action {values}: every component must be finite")
    return [-1.0 if value < -1.0 else 1.0 if value > 1.0 else value for value in values]


@contextlib.contextmanager
def zeroed_links() -> Iterator[None]:
    """Within the block, new links of Bullet get zeroed memory, as in a new process; nothing without glibc.

    ``BulletMJCFImporter::createBody`` of pybullet 3.2.7 never initializes the transform of its ``UrdfLink``; see the
    module. The heap returns free chunks of the exact size first, so all of these are allocated, zeroed and freed. Can
    also decorate a function that loads models.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_info"):
        yield
        return
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    links, apart = [], []
    for _ in range(_free_chunks(libc) + _LINKS):
        links.append(libc.malloc(_LINK_BYTES))
        apart.append(libc.malloc(_APART_BYTES))  # kept in the meantime: free neighbours would become one chunk
    for link in filter(None, links):
        ctypes.memset(link, 0, _LINK_BYTES)
        libc.free(link)
    try:
        yield
    finally:
        for chunk in apart:
            libc.free(chunk)


def _free_chunks(libc: Any) -> int:
    """Number of free chunks of the heap that may have a link's size, by glibc's own report."""
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    report = ctypes.string_at(text, size.value).decode()
    libc.free(text)
    bins = re.findall(r'<(?:size|unsorted) from="(\d+)" to="(\d+)" total="\d+" count="(\d+)"/>', report)
    # A reported size includes the PREV_INUSE bit.
    return sum(int(count) for low, high, count in bins if int(low) <= _CHUNK_BYTES + 1 and int(high) >= _CHUNK_BYTES)
