"""A tree of sums over priorities: draws in proportion to them, in logarithmic time.

A node has ``_FAN_OUT`` children, the root up to ``_MOST_AT_ROOT``: in NumPy a level costs a handful of calls, so few
wide levels are faster than many narrow ones. A change computes the sums above it anew from their children, so no
rounding errors add up.
"""

from __future__ import annotations

import numpy as np

_FAN_OUT, _MOST_AT_ROOT = 32, 1024


class SumTree:
    """Priorities, each 0 or more, and their sums."""

    def __init__(self, size: int) -> None:
        """``size`` priorities of 0; 8 bytes each."""
        self._levels = [np.zeros(_whole(size))]
        """From the leaves up, float64."""
        while len(self._levels[-1]) > _MOST_AT_ROOT:
            self._levels.append(np.zeros(_whole(len(self._levels[-1]) // _FAN_OUT)))
        self._nodes = [level.reshape(-1, _FAN_OUT) for level in self._levels]

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._levels[-1].sum())

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        """Priorities [n] at ``index`` [n]."""
        return self._levels[0].take(index)

    def set(self, index: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities [n] at ``index`` [n]; of several for the same index the last one counts."""
        if not len(index):
            return
        self._levels[0][index] = priorities
        many = len(index) * _FAN_OUT > len(self._levels[0])
        for level, nodes in zip(self._levels[1:], self._nodes, strict=False):
            if many:
                level[: len(nodes)] = nodes.sum(1)
            else:
                index = index // _FAN_OUT
                level[index] = nodes.take(index, 0).sum(1)

    def find(self, masses: np.ndarray) -> np.ndarray:
        """The index [n] at which the running sum of the priorities first exceeds each of ``masses`` [n].

        A mass must be in [0, total). An index of priority 0 is never found.
        """
        sums = self._levels[-1].cumsum()
        masses = _below(masses, sums[-1])
        index = sums.searchsorted(masses, "right")
        masses = masses - (sums - self._levels[-1])[index]
        for nodes in self._nodes[-2::-1]:
            children = nodes.take(index, 0)
            sums = children.cumsum(1)
            masses = _below(masses, sums[:, -1])
            child = (sums <= masses[:, None]).argmin(1)
            place = np.arange(0, sums.size, _FAN_OUT) + child
            masses = masses - (sums.ravel()[place] - children.ravel()[place])
            index = index * _FAN_OUT + child
        return index


def _below(masses: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Masses from 0 to just below a total, of which they differ by rounding: then the child found has a priority."""
    below: np.ndarray = np.clip(masses, 0.0, np.nextafter(total, 0.0))
    return below


def _whole(count: int) -> int:
    return -(-count // _FAN_OUT) * _FAN_OUT
