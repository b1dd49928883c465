"""State buffer and action buffer between executors and actors, in shared memory: one slot an environment.

An executor writes observation and noise and then the question's number; an actor
writes the answer and then the same number into ``answered`` (HTS-RL, arXiv 2012.09849, section 3). Whoever is
killed in between leaves a question without an answer, which the next one answers alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spreeze.transport.rollouts import RolloutSpec
from spreeze.transport.shared_memory import ArraySpec, SharedArrays


class Answers(NamedTuple):
    """What actors answered about some environments."""

    action: np.ndarray  # [n, A]
    log_prob: np.ndarray  # [n]
    version: np.ndarray | int  # [n] interval of the parameters

    def of(self, rows: list[int]) -> Answers:
        """Those about some of the environments."""
        version = self.version if isinstance(self.version, int) else self.version[rows]
        return Answers(self.action[rows], self.log_prob[rows], version)


class InferenceMailbox:
    """Typed view of the block."""

    def __init__(self, fields: SharedArrays) -> None:
        self._fields = fields
        self.asked, self.answered = fields["asked"], fields["answered"]
        self.obs, self.noise = fields["obs"], fields["noise"]

    @staticmethod
    def fields(spec: RolloutSpec) -> tuple[ArraySpec, ...]:
        """The arrays of the block."""
        count = spec.num_envs
        return (
            ArraySpec("asked", (count,), "int64"),
            ArraySpec("answered", (count,), "int64"),
            ArraySpec("obs", (count, *spec.obs_shape), spec.obs_dtype),
            ArraySpec("noise", (count, spec.noise_dim), "float32"),
            ArraySpec("action", (count, spec.action_dim), "float32"),
            ArraySpec("log_prob", (count,), "float32"),
            ArraySpec("version", (count,), "int64"),
        )

    @classmethod
    def create(cls, spec: RolloutSpec) -> InferenceMailbox:
        """Allocates empty buffers.

        Raises:
            ResourceError: no room in shared memory.
        """
        return cls(SharedArrays.create("spreeze-mailbox", cls.fields(spec)))

    @classmethod
    def attach(cls, fd: int, spec: RolloutSpec) -> InferenceMailbox:
        """Attaches to an inherited descriptor.

        Raises:
            TransportError: it holds something else.
        """
        return cls(SharedArrays.attach(fd, cls.fields(spec)))

    @property
    def fd(self) -> int:
        """The descriptor that children inherit."""
        return self._fields.block.fd

    def ask(self, envs: np.ndarray, obs: np.ndarray, noise: np.ndarray, numbers: np.ndarray) -> None:
        """Asks about ``envs`` [n]; ``numbers`` [n], from 1 on, all different, come from ``RolloutWriter.question``."""
        self.obs[envs] = obs
        self.noise[envs] = noise
        self._fields.in_order()
        self.asked[envs] = numbers

    def pending(self, envs: slice) -> np.ndarray:
        """Those of ``envs`` (with a start) whose question nobody has answered."""
        waiting = np.flatnonzero(self.asked[envs] != self.answered[envs])
        self._fields.in_order()
        found: np.ndarray = waiting * (envs.step or 1) + envs.start
        return found

    def answer(self, envs: np.ndarray, answers: Answers) -> None:
        """Answers the questions of ``envs`` [n]; only their actor may call this."""
        fields = self._fields
        fields["action"][envs], fields["log_prob"][envs] = answers.action, answers.log_prob
        fields["version"][envs] = answers.version
        fields.in_order()
        self.answered[envs] = self.asked[envs]

    def answers(self, envs: np.ndarray) -> Answers:
        """Copies of the answers to ``envs`` [n], which must be there."""
        fields = self._fields
        fields.in_order()
        return Answers(fields["action"][envs], fields["log_prob"][envs], fields["version"][envs])

    def close(self) -> None:
        """Drops the views and the mapping."""
        del self.asked, self.answered, self.obs, self.noise
        self._fields.close()
