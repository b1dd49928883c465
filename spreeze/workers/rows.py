"""Where a sampler keeps its observations and how its steps become replay rows: of vectors, or of images."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from spreeze.envs.task import ObsRows
from spreeze.returns import NStep
from spreeze.transport.frames import FrameLog
from spreeze.transport.ring import ShardWriter
from spreeze.types import EnvSpec


class StepBatch(NamedTuple):
    """What one step of N environments gave besides observations."""

    actions: np.ndarray  # [N, A], as the policy gave them
    reward: np.ndarray  # [N]
    terminated: np.ndarray  # [N]
    ended: dict[int, bool]  # environment -> truncated, of those whose episode ended
    broken: list[int]  # environments that raised: nothing of theirs is stored
    version: int  # of the policy


class RowWriter(Protocol):
    """Where rows of vectors go: a shard of the ring."""

    def write(
        self, obs: np.ndarray, action: np.ndarray, reward: np.ndarray, terminated: np.ndarray, next_obs: np.ndarray,
        num_steps: np.ndarray | None = None, version: int = 0,
    ) -> None:
        """Appends N rows."""


class Rows(Protocol):
    """The observations of N environments and their way into replay."""

    @property
    def obs(self) -> np.ndarray:
        """Current observations, for the policy."""
        ...

    def start(self, index: int | slice, obs: np.ndarray) -> None:
        """An episode begins (of vectors, also several)."""
        ...

    def take(self, index: int | slice, obs: np.ndarray) -> None:
        """A step led here (of vectors, also several)."""
        ...

    def store(self, batch: StepBatch) -> None:
        """Writes the rows of a step; what it led to is current then."""
        ...


def rows_for(spec: EnvSpec, num_envs: int, writer: ShardWriter | RowWriter, n_step: int, gamma: float) -> Rows:
    """The rows of a task."""
    if spec.frames is None:
        return VectorRows(spec, num_envs, writer, n_step, gamma)
    assert isinstance(writer, ShardWriter)
    return FrameRows(spec, num_envs, writer, n_step, gamma)


class VectorRows:
    """Rows of vector observations [N, O]; two buffers that change places."""

    def __init__(self, spec: EnvSpec, num_envs: int, writer: RowWriter, n_step: int, gamma: float) -> None:
        self.obs = np.zeros((num_envs, spec.obs_dim), np.float32)
        self._next_obs = np.zeros_like(self.obs)
        self._writer = writer
        self._n_steps = [NStep(n_step, gamma) for _ in range(num_envs)] if n_step > 1 else None

    def start(self, index: int | slice, obs: np.ndarray) -> None:
        """An episode begins with ``obs`` [O]."""
        self.obs[index] = obs

    def take(self, index: int | slice, obs: np.ndarray) -> None:
        """A step led to ``obs`` [O]."""
        self._next_obs[index] = obs

    def store(self, batch: StepBatch) -> None:
        """Writes one row for each environment, or what the n-step windows give."""
        if self._n_steps is not None:
            self._store_n_step(batch)
        elif not batch.broken:
            self._writer.write(self.obs, batch.actions, batch.reward, batch.terminated, self._next_obs,
                               version=batch.version)
        else:
            keep = np.setdiff1d(np.arange(len(self.obs)), batch.broken)
            if keep.size:
                self._writer.write(self.obs[keep], batch.actions[keep], batch.reward[keep], batch.terminated[keep],
                                   self._next_obs[keep], version=batch.version)
        self.obs, self._next_obs = self._next_obs, self.obs

    def _store_n_step(self, batch: StepBatch) -> None:
        assert self._n_steps is not None
        rows = []
        for index, window in enumerate(self._n_steps):
            if index in batch.broken:
                window.clear()
                continue
            rows += window.push(self.obs[index], batch.actions[index], float(batch.reward[index]),
                                bool(batch.terminated[index]), batch.ended.get(index, False), self._next_obs[index])
        if not rows:
            return
        obs, action, returns, terminated, next_obs, spans = zip(*rows, strict=True)
        self._writer.write(np.stack(obs), np.stack(action), np.asarray(returns, np.float32),
                           np.asarray(terminated, np.float32), np.stack(next_obs),
                           num_steps=np.asarray(spans, np.float32), version=batch.version)


class FrameRows:
    """Rows of images: the stacks for the policy here, each frame once in replay."""

    def __init__(self, spec: EnvSpec, num_envs: int, writer: ShardWriter, n_step: int, gamma: float) -> None:
        assert spec.frames is not None
        self._rows = ObsRows(num_envs, spec)
        self._sign = spec.frames.sign_rewards
        self._log = FrameLog(writer, num_envs, n_step, gamma)

    @property
    def obs(self) -> np.ndarray:
        """[N, k, C, H, W] uint8."""
        return self._rows.array

    def start(self, index: int | slice, obs: np.ndarray) -> None:
        """An episode begins with the frame ``obs`` [C, H, W]."""
        assert isinstance(index, int)
        self._rows.start(index, obs)
        self._log.start(index, obs.reshape(-1))

    def take(self, index: int | slice, obs: np.ndarray) -> None:
        """A step led to the frame ``obs`` [C, H, W]."""
        assert isinstance(index, int)
        self._rows.put(index, obs)

    def store(self, batch: StepBatch) -> None:
        """Writes each environment's step with its newest frame."""
        newest = self._rows.array[:, -1]
        reward = np.sign(batch.reward) if self._sign else batch.reward
        for index in range(len(newest)):
            if index not in batch.broken:
                self._log.add(index, batch.actions[index], float(reward[index]), bool(batch.terminated[index]),
                              batch.ended.get(index, False), newest[index].reshape(-1))
        self._log.flush(batch.version)
