"""Replay rows from env steps, of vectors and of images; each image is stored once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from spreeze.envs.task import ObsBuffer
from spreeze.transport.replay_ring import ShardWriter
from spreeze.transport.transitions import FrameLog, NStepBatch
from spreeze.types import EnvSpec


class StepBatch(NamedTuple):
    actions: np.ndarray  # [N, A], as the policy gave them
    reward: np.ndarray  # [N]
    terminated: np.ndarray  # [N]
    ended: dict[int, bool]  # environment -> truncated, of those whose episode ended
    failed: list[int]  # environments that raised; they get no row
    version: int  # of the policy
    kept: bool = True  # False: rows of vectors are dropped


class FlatObsRowWriter:
    """Writes rows of vector observations; ``obs`` [N, O] is current, and two buffers alternate."""

    def __init__(self, spec: EnvSpec, num_envs: int, writer: ShardWriter, n_step: int, gamma: float) -> None:
        self.obs = np.zeros((num_envs, spec.obs_dim), np.float32)
        self._next_obs = np.zeros_like(self.obs)
        self._writer = writer
        self._windows = NStepBatch(n_step, gamma, num_envs, spec.obs_dim, spec.action_dim) if n_step > 1 else None

    def start(self, index: int | slice, obs: np.ndarray) -> None:
        self.obs[index] = obs

    def set_next_obs(self, index: int | slice, obs: np.ndarray) -> None:
        self._next_obs[index] = obs

    def store(self, batch: StepBatch) -> None:
        columns = [self.obs, batch.actions, batch.reward, batch.terminated, self._next_obs]
        num_steps = None
        if self._windows is not None:
            *columns, num_steps = self._windows.push(
                *columns, ended=self._among(batch.ended), lost=self._among(batch.failed)
            )
        elif batch.failed:
            kept = ~self._among(batch.failed)
            columns = [column[kept] for column in columns]
        obs, actions, reward, terminated, next_obs = columns
        if len(obs) and batch.kept:
            self._writer.write(obs, actions, reward, terminated, next_obs, num_steps, batch.version)
        self.obs, self._next_obs = self._next_obs, self.obs

    def _among(self, indices: Iterable[int]) -> np.ndarray:
        """Bool [N]: True for these environments."""
        mask = np.zeros(len(self.obs), bool)
        mask[list(indices)] = True
        return mask


class FrameRowWriter:
    """Writes rows of images: frame stacks for the policy are kept here, each frame is stored once in replay."""

    def __init__(self, spec: EnvSpec, num_envs: int, writer: ShardWriter, n_step: int, gamma: float) -> None:
        assert spec.frames is not None
        self._rows = ObsBuffer(num_envs, spec)
        self._sign = spec.frames.sign_rewards
        self._log = FrameLog(writer, num_envs, n_step, gamma)

    @property
    def obs(self) -> np.ndarray:
        """[N, k, *frame] uint8."""
        return self._rows.array

    def start(self, index: int | slice, obs: np.ndarray) -> None:
        assert isinstance(index, int)
        self._rows.start(index, obs)
        self._log.start(index, obs.reshape(-1))

    def set_next_obs(self, index: int | slice, obs: np.ndarray) -> None:
        assert isinstance(index, int)
        self._rows.put(index, obs)

    def store(self, batch: StepBatch) -> None:
        newest = self._rows.array[:, -1]
        reward = np.sign(batch.reward) if self._sign else batch.reward
        for index in range(len(newest)):
            if index not in batch.failed:
                self._log.add(
                    index,
                    batch.actions[index],
                    float(reward[index]),
                    bool(batch.terminated[index]),
                    batch.ended.get(index, False),
                    newest[index].reshape(-1),
                )
        self._log.flush(batch.version)
