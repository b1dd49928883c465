"""Synthetic rows, so that a learner that is only measured has something to draw from at once."""

from __future__ import annotations

import numpy as np

from spreeze.envs.task import uniform_actions
from spreeze.transport.replay_ring import ReplayRing, ShardWriter
from spreeze.transport.transitions import FrameLog
from spreeze.types import EnvSpec

_DRAWN_ROWS = 4096
_IMAGES = 2000


def fill_with_synthetic_rows(ring: ReplayRing, spec: EnvSpec) -> None:
    """Fills every shard with rows of normal observations and uniform actions; before anybody else writes."""
    layout, rng = ring.spec.layout, np.random.default_rng(0)
    if spec.frames is not None:
        for shard in range(ring.spec.num_shards):
            _fill_frames(ring, shard, spec, rng)
        return
    count = min(_DRAWN_ROWS, ring.spec.rows_per_shard)
    obs, next_obs = (rng.standard_normal((count, layout.obs_dim), np.float32) for _ in range(2))
    action, reward = uniform_actions(spec, count, rng), rng.standard_normal(count, np.float32)
    steps, terminated = None if layout.num_steps is None else np.ones(count), np.zeros(count)
    for shard in range(ring.spec.num_shards):
        writer, left = ShardWriter(ring, shard), ring.spec.rows_per_shard
        while left > 0:
            part = slice(0, min(count, left))
            writer.write(obs[part], action[part], reward[part], terminated[part], next_obs[part],
                         None if steps is None else steps[part])
            left -= count


def _fill_frames(ring: ReplayRing, shard: int, spec: EnvSpec, rng: np.random.Generator) -> None:
    """One long episode of noise."""
    log = FrameLog(ShardWriter(ring, shard), 1, ring.spec.layout.n_step, 0.99)
    frames = rng.integers(256, size=(16, ring.spec.layout.frame_bytes), dtype=np.uint8)
    log.start(0, frames[0])
    for step, action in enumerate(uniform_actions(spec, min(_IMAGES, ring.spec.rows_per_shard) - 1, rng)):
        log.add(0, action, 0.0, False, False, frames[step % len(frames)])
        log.flush(0)
