"""Forward and backward pass of one network, whole or by a pair of threads, exactly.

Each thread has half of the rows on the way up; on the way down one computes the weight gradients of
a layer while the other goes on to the next. No sum is cut between the two, so results differ from one
core's only where a kernel rounds another number of rows in another way.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from spreeze.algorithms.pair import Pair
from spreeze.networks import (
    Parameters,
    Tape,
    head_weight_gradients,
    input_gradients,
    mlp_backward,
    mlp_forward,
    weight_gradients,
)

_CHUNK_ROWS = 512
"""Rows that go through a network at once on a CPU, so that what a layer gives is in the core's cache for the next."""


class Passes:
    """Passes of one network over the rows of one tape."""

    def __init__(self, parameters: Parameters, tape: Tape, pair: Pair | None = None) -> None:
        self._parameters, self._tape, self._pair = parameters, tape, pair
        rows, lanes = tape.out.shape[2], 1 if pair is None else 2
        step = _CHUNK_ROWS if tape.out.device.type == "cpu" else rows

        def cut(begin: int, end: int) -> list[tuple[slice, Tape]]:
            ends = (slice(start, min(start + step, end)) for start in range(begin, end, step))
            return [(chunk, tape.part(chunk.start, chunk.stop)) for chunk in ends]

        self._lanes = [cut(*ends) for ends in pairwise(rows * lane // lanes for lane in range(lanes + 1))]
        self._down = cut(0, rows)

    def forward(self, x: Tensor) -> Tensor:
        """``mlp_forward`` of x [1, M, I]."""
        if self._pair is None:
            self._up(self._lanes[0], x)
        else:
            self._pair.both(lambda: self._up(self._lanes[0], x), lambda: self._up(self._lanes[1], x))
        return self._tape.out

    def _up(self, chunks: list[tuple[slice, Tape]], x: Tensor) -> None:
        for rows, tape in chunks:
            mlp_forward(self._parameters, x[:, rows], tape)

    def backward(self, x_t: Tensor, gradient: Parameters) -> None:
        """``mlp_backward`` of the tape's ``grad_out`` with weight gradients; x_t is [1, I, M]."""
        for rows, tape in self._down:
            if self._pair is None or len(tape.hidden) < 2:
                mlp_backward(self._parameters, tape, x_t[:, :, rows], gradient, add=rows.start > 0)
            else:
                self._by_both(self._pair, tape, x_t[:, :, rows], gradient, add=rows.start > 0)

    def _by_both(self, pair: Pair, tape: Tape, x_t: Tensor, gradient: Parameters, *, add: bool) -> None:
        head_weight_gradients(tape, gradient, add=add)
        input_gradients(self._parameters, tape, len(tape.hidden))
        for index in range(len(tape.hidden) - 1, 0, -1):

            def way_down(index: int = index) -> None:
                input_gradients(self._parameters, tape, index)
                if index == 1:
                    weight_gradients(tape, x_t, gradient, 0, add=add)

            pair.both(lambda index=index: weight_gradients(tape, x_t, gradient, index, add=add),  # type: ignore[misc]
                      way_down)
