"""Sinks of transitions: one that keeps them, and rows for others, whose every value tells their number."""

from types import SimpleNamespace

import numpy as np

from spreeze.transport.replay_ring import FrameColumns


def put(sink, count, version=0):
    """The sink's next rows; every value tells the row's number."""
    layout, first = sink.layout, sink.next_logical
    number = np.arange(first, first + count, dtype=np.float32)
    obs = np.repeat(number[:, None], layout.obs_dim, axis=1)
    frames = None
    if layout.frame_bytes:
        frame = np.repeat(number.astype(np.uint8)[:, None], layout.frame_bytes, axis=1)
        frames = FrameColumns(frame, number > 0, np.minimum(number, layout.depth))
    sink.write(obs, np.full((count, layout.action_dim), 0.5), number, number % 2, obs + 1,
               np.full(count, 1.0), version, frames)  # fmt: skip
    return number


class Rows:
    """A sink that keeps what it is given in lists."""

    layout = SimpleNamespace(sequence=None)

    def __init__(self):
        self.rows, self.versions, self.spans = [], [], []

    def write(self, obs, action, reward, terminated, next_obs, num_steps=None, version=0):
        rows = np.concatenate([obs, action, np.c_[reward], np.c_[terminated], next_obs], axis=1)
        self.rows += rows.tolist()
        self.versions += [version] * len(rows)
        self.spans += [] if num_steps is None else num_steps.tolist()
