"""Forward and backward pass of one network, whole or by a pair of threads, exactly.

Each thread has half of the rows on the way up; on the way down one computes the weight gradients of
a layer while the other goes on to the next. No sum is cut, so results differ from one core's
only where a kernel rounds another number of rows in another way.
"""

from __future__ import annotations

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


class Passes:
    """Passes of one network over the rows of one tape."""

    def __init__(self, parameters: Parameters, tape: Tape, pair: Pair | None = None) -> None:
        self._parameters, self._tape, self._pair = parameters, tape, pair
        rows = tape.out.shape[2]
        self._middle = rows // 2
        self._halves = (tape.part(0, self._middle), tape.part(self._middle, rows)) if pair is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """``mlp_forward`` of x [1, M, I]."""
        if self._pair is None or self._halves is None:
            return mlp_forward(self._parameters, x, self._tape)
        first, second = self._halves
        self._pair.both(
            lambda: mlp_forward(self._parameters, x[:, : self._middle], first),
            lambda: mlp_forward(self._parameters, x[:, self._middle :], second),
        )
        return self._tape.out


def backward(parameters: Parameters, tape: Tape, x_t: Tensor, gradient: Parameters, pair: Pair | None) -> None:
    """``mlp_backward`` with weight gradients, by a pair of threads where there is one."""
    if pair is None or len(tape.hidden) < 2:
        mlp_backward(parameters, tape, x_t, gradient)
        return
    head_weight_gradients(tape, gradient)
    input_gradients(parameters, tape, len(tape.hidden))
    for index in range(len(tape.hidden) - 1, 0, -1):
        pair.both(
            lambda index=index: weight_gradients(tape, x_t, gradient, index),  # type: ignore[misc]
            lambda index=index: _way_down(parameters, tape, x_t, gradient, index),  # type: ignore[misc]
        )


def _way_down(parameters: Parameters, tape: Tape, x_t: Tensor, gradient: Parameters, index: int) -> None:
    input_gradients(parameters, tape, index)
    if index == 1:
        weight_gradients(tape, x_t, gradient, 0)
