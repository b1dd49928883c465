"""Stand-ins for CUDA graphs, and a ring to record updates from."""

import contextlib

import numpy as np
import torch
from rings import ring_of

from spreeze.transport.replay_ring import ShardWriter
from spreeze.types import Box, EnvSpec, RowLayout

LAYOUT = RowLayout(3, 1)
SPEC = EnvSpec(env_id="x", import_module=None, obs_dim=3, action=Box((-1.0,), (1.0,)),
               max_episode_steps=None, reward_threshold=None)  # fmt: skip


class PlayedGraph:
    """Does again what was recorded; recording leaves everything on the device as it was."""

    def __init__(self, algorithm):
        self.algorithm, self.replays = algorithm, 0

    def record(self, work, generators):
        assert all(isinstance(generator, torch.Generator) for generator in generators)
        assert len(generators) == 2
        before, states = self.algorithm.state_arrays(), [generator.get_state() for generator in generators]
        work()
        self.algorithm.load_state_arrays(before)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        self.work = work

    def replay(self):
        before = self.algorithm.updates
        self.work()
        self.algorithm.updates = before
        self.replays += 1


@contextlib.contextmanager
def filled(rows=400, discrete=False):
    with ring_of(LAYOUT, rows=512) as ring:
        rng = np.random.default_rng(0)
        obs = rng.standard_normal((rows, 3), np.float32)
        action = rng.integers(0, 2, (rows, 1)) if discrete else np.tanh(rng.standard_normal((rows, 1)))
        ShardWriter(ring, 0).write(obs, action, obs[:, 0], obs[:, 1] > 1.5, obs + 0.1)
        yield ring
