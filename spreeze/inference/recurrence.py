"""Recurrent cells in NumPy: the memory of a policy between env steps.

A cell lies between the observation and the perceptron. Its state is one row [S] per episode: the output h [H], which is
the perceptron's input, followed for an LSTM by the cell state c [H]. The cells are equivalent to those of ``torch.nn``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spreeze.errors import WeightsError
from spreeze.inference.convolution import array_of
from spreeze.types import Arrays

CELLS = {"lstm": 2, "gru": 1}
"""Kinds of cells (Hochreiter and Schmidhuber 1997; Cho et al. 2014, arXiv 1406.1078), and the parts of their state."""
_GATES = {"lstm": "ifgo", "gru": "rzn"}  # order of the gates in torch's weights, H columns for each
_HALF = np.array(0.5, np.float32)


def state_dim(kind: str, size: int) -> int:
    """S: values of the state of a cell with ``size`` units; 0 for "none"."""
    return CELLS.get(kind, 0) * size


class Cell:
    """A cell with H units over I inputs; an instance serves one thread at a time."""

    def __init__(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        """Reads torch's weights, transposed: ``cell_x`` [I, G H], ``cell_h`` [H, G H], and their biases [G H].

        A WeightsError if the kind is unknown, an array is missing, or its shape does not fit.
        """
        self.kind, self.size = str(meta["recurrent"]), int(meta["recurrent_size"])
        if self.kind not in CELLS:
            raise WeightsError(f"weights need a cell of kind {self.kind!r}; known are {', '.join(CELLS)}")
        size, gates = self.size, _GATES[self.kind]
        columns = len(gates) * size
        shapes = {"x": (-1, columns), "h": (size, columns), "x_bias": (columns,), "h_bias": (columns,)}
        parts = {name: array_of(arrays, f"cell_{name}", shape) for name, shape in shapes.items()}
        self.inputs, self.state_dim = len(parts["x"]), state_dim(self.kind, size)
        of_gate = {
            gate: {name: part[..., number * size : (number + 1) * size] for name, part in parts.items()}
            for number, gate in enumerate(gates)
        }
        blocks = []
        for gate in "ifog" if self.kind == "lstm" else "rzn":
            part = of_gate[gate]
            block = [np.concatenate((part["x"], part["h"])), part["x_bias"] + part["h_bias"]]
            if gate in "ifo" or gate in "rz":  # sigmoid(x) = (tanh(x / 2) + 1) / 2; half of a weight is exact
                block = [values * _HALF for values in block]
            if gate == "n":  # tanh(x part + r * h part)
                zeros = np.zeros_like
                blocks.append([np.concatenate((part["x"], zeros(part["h"]))), part["x_bias"]])
                block = [np.concatenate((zeros(part["x"]), part["h"])), part["h_bias"]]
            blocks.append(block)
        self.weight = np.concatenate([np.concatenate((weight, bias[None])) for weight, bias in blocks], 1)
        """[I + H + 1, 4 H]: maps inputs, h and 1 to the sums of an LSTM's gates i, f, o (halved) and g, or of a GRU's
        r, z (halved) and the two parts of n."""
        self._joined, self._sums = (np.zeros((0, width), np.float32) for width in self.weight.shape)

    def __call__(self, x: np.ndarray, state: np.ndarray, *, row_by_row: bool = False) -> np.ndarray:
        """The next state [N, S], a new array, from inputs [N, I] and the state [N, S]."""
        size, rows = self.size, len(x)
        if rows != len(self._sums):
            self._joined, self._sums = (np.ones((rows, width), np.float32) for width in self.weight.shape)
        joined, sums = self._joined, self._sums
        joined[:, : self.inputs] = x
        joined[:, self.inputs : -1] = state[:, :size]
        if row_by_row:
            np.matmul(joined[:, None], self.weight, out=sums[:, None])
        else:
            np.dot(joined, self.weight, out=sums)
        next_state = np.empty((rows, self.state_dim), np.float32)
        (self._lstm if self.kind == "lstm" else self._gru)(sums, state, next_state)
        return next_state

    def _lstm(self, sums: np.ndarray, state: np.ndarray, next_state: np.ndarray) -> None:
        size, h, c = self.size, next_state[:, : self.size], next_state[:, self.size :]
        np.tanh(sums, out=sums)
        gates, new = sums[:, : 3 * size], sums[:, 3 * size :]
        gates *= _HALF
        gates += _HALF
        np.multiply(gates[:, size : 2 * size], state[:, size:], out=c)
        new *= gates[:, :size]
        c += new
        np.tanh(c, out=h)
        h *= gates[:, 2 * size :]

    def _gru(self, sums: np.ndarray, state: np.ndarray, next_state: np.ndarray) -> None:
        size = self.size
        gates, new, recalled = sums[:, : 2 * size], sums[:, 2 * size : 3 * size], sums[:, 3 * size :]
        np.tanh(gates, out=gates)
        gates *= _HALF
        gates += _HALF
        recalled *= gates[:, :size]
        new += recalled
        np.tanh(new, out=new)
        np.subtract(state, new, out=next_state)
        next_state *= gates[:, size:]
        next_state += new
