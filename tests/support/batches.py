"""Algorithms of other sizes and precisions, and batches of random rows to update them with."""

import dataclasses

import numpy as np
import torch

from spreeze.algorithms import create
from spreeze.config.algorithms import rows
from spreeze.config.schema import SECTIONS
from spreeze.types import RowLayout

OBS, ACT = 5, 2
NAMES = sorted(row.name for row in rows().values() if row.continuous)


def made(name, seed=1, hidden=(16, 16), **changes):
    return create(name, OBS, ACT, dataclasses.replace(SECTIONS[name](), hidden_sizes=hidden, **changes), seed)


def exact(make, *args, dtype=torch.float64, **options):
    """What ``make`` returns, with networks of another precision than float32, to compare it with exact numbers."""
    torch.set_default_dtype(dtype)
    try:
        return make(*args, **options)
    finally:
        torch.set_default_dtype(torch.float32)


def batches(count, size=32, seed=0, n_step=1):
    rng, layout = np.random.default_rng(seed), RowLayout(OBS, ACT, n_step)
    for _ in range(count):
        rows = rng.normal(size=(size, layout.width)).astype(np.float32)
        rows[:, layout.action] = np.tanh(rows[:, layout.action])
        rows[:, layout.terminated] = rng.random(size) < 0.1
        if layout.num_steps is not None:
            rows[:, layout.num_steps] = rng.integers(1, n_step + 1, size)
        yield layout.split(torch.from_numpy(rows), 0.99)


def same(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)
