"""The matmuls that one update cannot avoid, alone: the floor of its time on a device.

Matmuls whose result an update throws away (gradients of the critics' weights in the actor step, of the input in the
critic step) are not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from spreeze.algorithms.fused_mlp import matmuls_by_onednn


class Matmul(NamedTuple):
    """``stack`` matmuls [m, k] x [k, n] and how many of them one update makes."""

    stack: int
    m: int
    k: int
    n: int
    times: float = 1.0

    @property
    def flop(self) -> float:
        """Operations in one update: a multiplication and an addition for each m n k."""
        return 2.0 * self.times * self.stack * self.m * self.k * self.n


def forward(stack: int, rows: int, sizes: tuple[int, ...], times: float = 1.0) -> list[Matmul]:
    return [Matmul(stack, rows, a, b, times) for a, b in pairwise(sizes)]


def weight_gradients(stack: int, rows: int, sizes: tuple[int, ...], times: float = 1.0) -> list[Matmul]:
    """Matmuls that give the weight gradients."""
    return [Matmul(stack, a, rows, b, times) for a, b in pairwise(sizes)]


def input_gradients(stack: int, rows: int, sizes: tuple[int, ...], times: float = 1.0) -> list[Matmul]:
    """Matmuls that carry the gradient down to the first layer; a head with one output needs none."""
    pairs = pairwise(sizes[1:])
    return [Matmul(stack, rows, b, a, times) for a, b in pairs if b > 1]


def matmuls(
    algo: str, batch_size: int, obs_dim: int, action_dim: int, hidden: tuple[int, ...], policy_delay: int = 1
) -> list[Matmul]:
    """The matmuls that one update of an algorithm cannot avoid."""
    critic = (obs_dim + action_dim, *hidden, 1)
    actor = (obs_dim, *hidden, 2 * action_dim if algo == "sac" else action_dim)
    stack = 1 if algo == "ddpg" else 2
    moves = 1.0 / policy_delay
    least_of = stack if algo == "sac" else 1
    b = batch_size
    return [
        *forward(1, b, actor),
        *forward(stack, b, critic, 2.0),
        *weight_gradients(stack, b, critic),
        *input_gradients(stack, b, critic),
        *forward(1, b, actor, moves),
        *forward(least_of, b, critic, moves),
        *input_gradients(least_of, b, critic, moves),
        Matmul(least_of, b, hidden[0], action_dim, moves),
        *weight_gradients(1, b, actor, moves),
        *input_gradients(1, b, actor, moves),
    ]


class MatmulRound:
    """All matmuls of ``count`` updates, ready to be run; one set of buffers for each shape."""

    def __init__(self, listed: list[Matmul], device: str = "cpu") -> None:
        self.flop = sum(matmul.flop for matmul in listed)
        merged: dict[tuple[int, int, int, int], float] = {}
        for matmul in listed:
            key = (matmul.stack, matmul.m, matmul.k, matmul.n)
            merged[key] = merged.get(key, 0.0) + matmul.times
        self._calls = [(_matmul_call(device, *shape), count) for shape, count in merged.items()]

    def run(self, updates: int) -> None:
        """Makes the matmuls of that many updates."""
        for call, count in self._calls:
            for _ in range(round(updates * count)):
                call()


def _matmul_call(device: str, stack: int, m: int, k: int, n: int) -> Callable[[], Any]:
    """One matmul, written the way that is fastest for its shape."""
    a, b = torch.randn(stack, m, k, device=device), torch.randn(stack, k, n, device=device)
    if n == 1:
        times_vector = torch.linalg.vecdot if matmuls_by_onednn() else torch.mv
        rows = [(a[index], b[index, :, 0].contiguous(), torch.empty(m, device=device)) for index in range(stack)]
        if m < k:
            rows = [(matrix.t().contiguous().t(), vector, out) for matrix, vector, out in rows]
        return lambda: [times_vector(matrix, vector, out=out) for matrix, vector, out in rows]
    if n < 64 <= m:
        out, a_t, b_t = torch.empty(stack, n, m, device=device), a.transpose(1, 2), b.transpose(1, 2).contiguous()
        return lambda: torch.bmm(b_t, a_t, out=out)
    if stack == 1:
        out, a0, b0 = torch.empty(m, n, device=device), a[0], b[0]
        return lambda: torch.mm(a0, b0, out=out)
    out = torch.empty(stack, m, n, device=device)
    return lambda: torch.bmm(a, b, out=out)
