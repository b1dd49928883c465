"""Fills replay for measurements."""

from __future__ import annotations

from typing import Any

import numpy as np

from spreeze.envs.action_spaces import uniform_actions
from spreeze.transport.replay_ring import ReplayRing, ShardWriter
from spreeze.transport.transitions import FrameLog
from spreeze.types import EnvSpec

_DRAWN_ROWS, _DRAWN_IMAGES = 4096, 2000


def fill_with_synthetic_rows(ring: ReplayRing, spec: EnvSpec) -> None:
    """Fills every shard with normal observations and uniform actions for measurements; call before any other write."""
    layout, rng = ring.spec.layout, np.random.default_rng(0)
    if spec.frames is not None:
        for shard in range(ring.spec.num_shards):
            _fill_frames(ring, shard, spec, rng)
        return
    count = min(_DRAWN_ROWS, ring.spec.rows_per_shard)
    if layout.sequence is not None:
        _fill_sequences(ring, min(count, -(-_DRAWN_ROWS // layout.env_steps_per_row)), spec, rng)
        return
    obs, next_obs = (rng.standard_normal((count, layout.obs_dim), np.float32) for _ in range(2))
    for column in range(layout.obs_dim - spec.mask_dim, layout.obs_dim):
        obs[:, column] = next_obs[:, column] = 1.0  # all actions are allowed
    action, reward = uniform_actions(spec, count, rng), rng.standard_normal(count, np.float32)
    columns: list[Any] = [obs, action, reward, np.zeros(count), next_obs] + [np.ones(count)] * (
        layout.num_steps is not None
    )
    for shard in range(ring.spec.num_shards):
        writer, left = ShardWriter(ring, shard), ring.spec.rows_per_shard
        while left > 0:
            writer.write(*(column[:left] for column in columns))
            left -= count


def _fill_sequences(ring: ReplayRing, count: int, spec: EnvSpec, rng: np.random.Generator) -> None:
    layout = ring.spec.layout
    rows = rng.standard_normal((count, layout.width), np.float32)
    batch = layout.split_sequences(rows, 1.0)
    batch.action[...] = uniform_actions(spec, batch.action[..., 0].size, rng).reshape(batch.action.shape)
    batch.terminated[...], batch.valid[...], batch.begins[...] = 0.0, 1.0, 0.0
    for shard in range(ring.spec.num_shards):
        writer = ShardWriter(ring, shard)
        for begin in range(0, ring.spec.rows_per_shard, count):
            writer.write_packed(rows[: ring.spec.rows_per_shard - begin], 0)


def _fill_frames(ring: ReplayRing, shard: int, spec: EnvSpec, rng: np.random.Generator) -> None:
    log = FrameLog(ShardWriter(ring, shard), 1, ring.spec.layout.n_step, 0.99)
    frames = rng.integers(256, size=(16, ring.spec.layout.frame_bytes), dtype=np.uint8)
    frames[:, ring.spec.layout.normalized_columns] = np.ones((16, spec.vector_dim), np.float32).view(np.uint8)
    log.start(0, frames[0])
    for step, action in enumerate(uniform_actions(spec, min(_DRAWN_IMAGES, ring.spec.rows_per_shard) - 1, rng)):
        log.add(0, action, 0.0, False, False, frames[step % len(frames)])
        log.flush(0)
