"""Sequences for policies with memory, in replay (R2D2: Kapturowski et al. 2019).

The steps of an environment, one episode after the other, are a stream of slots, cut into sequences of T. So each step
is in one sequence, however short episodes are, and a row of replay stands for T env steps. A truncated episode
takes one more slot, for its last observation, from which the step before it bootstraps. Each sequence is preceded by
the b slots that lead to it, over which a learner only computes the state. The policy's state before the first of them
is stored.
"""

from __future__ import annotations

import numpy as np

from spreeze.transport.replay_ring import ShardWriter
from spreeze.types import EnvSpec
from spreeze.workers.collectors.transition_collector import (
    FlatObsRowWriter,
    FrameRowWriter,
    StepBatch,
    TransitionCollector,
)


class SequenceRowWriter(FlatObsRowWriter):
    """Writes a row whenever T more slots of an environment are full."""

    def __init__(self, spec: EnvSpec, num_envs: int, writer: ShardWriter, gamma: float) -> None:
        super().__init__(spec, num_envs, writer, 1, gamma)
        shape = writer.layout.sequence
        assert shape is not None
        self._length, self._burn_in, self._slots = shape.length, shape.burn_in, shape.slots
        self.state = np.zeros((num_envs, shape.state_dim), np.float32)
        slots = self._slots
        self._seen = np.zeros((num_envs, slots + 1, spec.obs_dim), np.float32)
        self._action = np.zeros((num_envs, slots, spec.action_dim), np.float32)
        self._scalars = np.zeros((num_envs, 4, slots), np.float32)  # reward, terminated, valid, begins
        self._states = np.zeros((num_envs, slots, shape.state_dim), np.float32)
        self._filled = np.full(num_envs, self._burn_in)  # there is nothing before a stream's first slot
        self._begins = np.ones(num_envs, np.float32)
        self._all = np.arange(num_envs)

    def store(self, batch: StepBatch) -> None:
        lost, rows = self._among(batch.failed), list[np.ndarray]()
        valid = np.where(lost, np.float32(0.0), np.float32(1.0))
        self._put(self._all, self.obs, batch.actions * valid[:, None], batch.reward, batch.terminated, valid, rows)
        self._begins[...] = 0.0
        ended = [index for index, truncated in batch.ended.items() if truncated and not batch.terminated[index]]
        if ended:
            nothing, last = np.zeros(len(ended), np.float32), np.array(ended)
            actions = np.zeros((len(ended), self._action.shape[2]), np.float32)
            self._put(last, self._next_obs[last], actions, nothing, nothing, nothing, rows)
        self._begins[[*batch.ended, *batch.failed]] = 1.0
        if rows:
            self._writer.write_packed(np.stack(rows), batch.version)
        self.obs, self._next_obs = self._next_obs, self.obs

    def _put(
        self,
        envs: np.ndarray,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        valid: np.ndarray,
        rows: list[np.ndarray],
    ) -> None:
        """Fills a slot of each of these environments, and adds the rows of the sequences that it completes."""
        at = self._filled[envs]
        self._seen[envs, at], self._action[envs, at], self._states[envs, at] = obs, action, self.state[envs]
        self._seen[envs, at + 1] = self._next_obs[envs]
        for number, values in enumerate((reward * valid, terminated * valid, valid, self._begins[envs])):
            self._scalars[envs, number, at] = values
        self._filled[envs] = at + 1
        for index in envs[at + 1 == self._slots].tolist():
            rows.append(self._row(index))
            for slots in (self._seen, self._action, self._states):
                slots[index, : self._burn_in] = slots[index, self._length : self._slots].copy()
            self._scalars[index, :, : self._burn_in] = self._scalars[index, :, self._length :].copy()
            self._filled[index] = self._burn_in

    def _row(self, index: int) -> np.ndarray:
        parts = (self._seen[index], self._action[index], self._scalars[index], self._states[index, 0])
        return np.concatenate(
            [part.reshape(-1) for part in parts] + [np.zeros(int(self._writer.layout.checksum), np.float32)]
        )


class SequenceCollector(TransitionCollector):
    """N environments whose steps are stored as sequences, with the policy's states."""

    def _new_row_writer(
        self, spec: EnvSpec, num_envs: int, writer: ShardWriter, n_step: int, gamma: float
    ) -> FlatObsRowWriter | FrameRowWriter:
        self._sequences = SequenceRowWriter(spec, num_envs, writer, gamma)
        return self._sequences

    def step(self, actions: np.ndarray, version: int) -> None:
        super().step(actions, version)
        if self.state:
            self._sequences.state = self.state[0].copy()
