"""Prioritised replay: rows are drawn in proportion to a power of their latest error (Schaul et al. 2016, 1511.05952).

Priorities lie in the learner's process: writers know nothing of them, and there is no lock. A row is known by its
number in its shard. At each refresh rows that left the window of draws, soon to be overwritten or too old, lose their
priority; new rows get the largest so far, so that each is drawn soon. An error of a row that has left meanwhile is
dropped.

Rows that a killed writer announced but did not commit have none. A restarted learner gives every row, those of
``--save-replay`` too, the largest error of its checkpoint. So a resumed run draws other rows than one that was not
interrupted, until each has been drawn once.
"""

from __future__ import annotations

import numpy as np

from spreeze.errors import TransportError
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, SampledIndices

_FAN_OUT, _MAX_AT_ROOT = 32, 1024
_MIN_ERROR = 1e-6  # added to each error, so that a row without one is still drawn at times


def open_reader(ring: ReplayRing, priority_exponent: float) -> ReplayReader:
    """The reader for an algorithm's setting ``priority_exponent``; uniform where it is 0."""
    return PrioritisedReader(ring, priority_exponent) if priority_exponent else ReplayReader(ring)


class PrioritisedReader(ReplayReader):
    """Draws rows by priority: the total is cut into as many equal parts as there are draws, and each draws from one."""

    def __init__(self, ring: ReplayRing, exponent: float) -> None:
        """``exponent`` is alpha of the paper (eq. 1): 0 uniform, 1 in proportion to the errors."""
        self._exponent = exponent
        self._tree = SumTree(ring.spec.num_shards * ring.spec.stride_rows)
        self._known = [(0, 0)] * ring.spec.num_shards
        """The windows whose rows have priorities."""
        self.largest_error = 1.0
        super().__init__(ring)

    def refresh(self) -> None:
        """Reads the counters; costs a step for each row that was added or left."""
        super().refresh()
        if self.windows == self._known:
            return
        for shard, ((old_low, old_end), (low, end)) in enumerate(zip(self._known, self.windows, strict=True)):
            left, added = np.arange(old_low, min(low, old_end)), np.arange(max(old_end, low), end)
            priorities = np.zeros(len(left) + len(added))
            priorities[len(left) :] = self._priority(self.largest_error)
            # Added rows are last, since they may have the slots of those that left.
            self._tree.set(self._shard_start[shard] + np.concatenate((left, added)) % self._shard_rows, priorities)
        self._known = self.windows

    def reset_priorities(self, largest_error: float) -> None:
        """Gives all rows the priority of ``largest_error``."""
        self.largest_error, self._known = largest_error, [(0, 0)] * len(self._known)
        self.refresh()

    def _priority(self, error: np.ndarray | float) -> np.ndarray | float:
        return (error + _MIN_ERROR) ** self._exponent

    def _draw(self, rng: np.random.Generator, count: int) -> SampledIndices:
        total = self._tree.total
        if total <= 0.0:
            raise TransportError(f"no replay row can be drawn: {self.inserted} were inserted")
        row = self._tree.find((np.arange(count) + rng.random(count)) * (total / count))
        shard, position = np.divmod(row, self.ring.spec.stride_rows)
        low = np.array([low for low, _ in self.windows])[shard]
        return SampledIndices(shard, low + (position - low) % self._shard_rows, row)

    def _copy(self, drawn: SampledIndices, rows: np.ndarray, frames: np.ndarray | None) -> tuple[np.ndarray, int]:
        """Also takes the priority of rows that have to be drawn again: they are overwritten, or no transition."""
        bad, overwritten = super()._copy(drawn, rows, frames)
        self._tree.set(drawn.row[bad], np.zeros(len(bad)))
        return bad, overwritten

    def importance_weights(self, exponent: float) -> np.ndarray:
        """Weights [B] float64 of the rows of the latest batch, the largest 1 (section 3.4 of the paper).

        ``(N P(i))^-exponent`` over its maximum is ``(smallest p / p_i)^exponent``. A row that has left meanwhile counts
        as the most probable one.
        """
        assert self._drawn is not None
        priorities = self._tree[self._drawn.row]
        priorities[priorities == 0.0] = priorities.max()
        weights: np.ndarray = (priorities.min() / priorities) ** exponent
        return weights

    def set_errors(self, errors: np.ndarray) -> None:
        """Takes the errors [B], each 0 or more, of the rows of the latest batch; one that is not finite counts as 0."""
        drawn = self._drawn
        assert drawn is not None
        assert drawn.shard is not None
        errors = np.where(np.isfinite(errors), errors, 0.0).astype(np.float64)
        present = drawn.logical >= np.array([low for low, _ in self._known])[drawn.shard]
        self._tree.set(drawn.row[present], np.asarray(self._priority(errors[present])))
        self.largest_error = max(self.largest_error, float(errors.max()))


class SumTree:
    """Priorities, each 0 or more, and their sums: draws in proportion to them, in logarithmic time.

    A node has ``_FAN_OUT`` children, the root up to ``_MAX_AT_ROOT``: in NumPy few wide levels are faster than many
    narrow ones. Changed sums are computed anew from their children, so no rounding errors add up.
    """

    def __init__(self, size: int) -> None:
        """``size`` priorities of 0; 8 bytes each."""
        self._levels = [np.zeros(_whole(size))]
        """From the leaves up, float64."""
        while len(self._levels[-1]) > _MAX_AT_ROOT:
            self._levels.append(np.zeros(_whole(len(self._levels[-1]) // _FAN_OUT)))
        self._nodes = [level.reshape(-1, _FAN_OUT) for level in self._levels]

    @property
    def total(self) -> float:
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
        """Index [n] at which the running sum of priorities first exceeds each of ``masses`` [n], in [0, total).

        An index of priority 0 is never found.
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
            node = np.arange(0, sums.size, _FAN_OUT) + child
            masses = masses - (sums.ravel()[node] - children.ravel()[node])
            index = index * _FAN_OUT + child
        return index


def _below(masses: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Clips masses, which rounding may move out of [0, total), so that the child found has a priority."""
    below: np.ndarray = np.clip(masses, 0.0, np.nextafter(total, 0.0))
    return below


def _whole(count: int) -> int:
    return -(-count // _FAN_OUT) * _FAN_OUT
