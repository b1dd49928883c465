"""Sums for metrics of the numbers in an environment's ``info``, at little cost per step.

A number that is present at every step is averaged over steps, the first ``STEPS`` of each report, because a sampler
makes thousands a second. One that is present only at an episode's end, as in ``info["episode"]``, is averaged over
episodes. Entries of a dictionary within ``info`` have the names of both, such as ``reward/forward``. For
``is_success``, the value at the episode's end counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from spreeze.envs.obs_flattening import MASK
from spreeze.metrics.info_means import MAX_NUMBERS, SUCCESS

_SUCCESS_NAMES = (SUCCESS, "success")
NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
_EXPECTED = frozenset({MASK, f"_{MASK}", "final_observation", "final_obs", "final_info", "terminal_observation"})
"""Known entries that are not numbers, which are ignored silently."""
_UNFIT = re.compile(r"[^\w./\-]+")
STEPS = 512  # steps whose numbers are summed until the next report
_LONGEST_NAME, _MAX_REFUSED = 60, 8

Sums = dict[str, list[float]]  # name -> [sum, count]


class InfoNumbers:
    """Sums over the steps and episodes of one process since the last ``take``."""

    def __init__(self) -> None:
        self._steps: Sums = {}
        self._episodes: Sums = {}
        self._names: set[str] = set()
        self._ignored: dict[str, str] = {}
        self._refused: set[str] = set()
        """Names ignored so far, at most ``_MAX_REFUSED``."""
        self._size = -1
        """Number of entries of an ``info`` that ``_read`` can read."""
        self._read: Callable[[Mapping[str, Any]], Sequence[Any]] = tuple
        self._columns: tuple[str, ...] = ()
        self._rows: list[Sequence[Any]] = []
        self.left = STEPS
        """Number of steps still counted until the next report."""

    def add(self, info: dict[Any, Any], *, ended: bool) -> None:
        """Adds the ``info`` of one step; ``ended``: it was an episode's last."""
        self.left -= 1
        if ended:
            for _, name, value in self._numbers(info):
                _count(self._steps if name in self._columns or name in self._steps else self._episodes, name, value)
        elif len(info) != self._size:
            self._learn(info)
        else:
            try:
                self._rows.append(self._read(info))
            except (KeyError, TypeError):
                self._learn(info)

    def take(self) -> dict[str, Any] | None:
        """Returns and clears the sums: ``steps``, ``episodes`` and (name -> reason) ``ignored``; None if empty."""
        self._sum_rows()
        self.left = STEPS
        sums: dict[str, Any] = {"steps": self._steps, "episodes": self._episodes, "ignored": self._ignored}
        self._steps, self._episodes, self._ignored = {}, {}, {}
        return sums if any(sums.values()) else None

    def _learn(self, info: Mapping[str, Any]) -> None:
        """Counts the numbers of a step with a new structure, and prepares to read more of that structure."""
        self._sum_rows()
        paths: dict[str, tuple[Any, ...]] = {}
        for path, name, value in self._numbers(info):
            if name != SUCCESS:
                _count(self._steps, name, value)
                paths[name] = path
        self._columns = tuple(sorted(paths, key=lambda name: len(paths[name])))
        self._read, self._size = _reader([paths[name] for name in self._columns]), len(info)

    def _sum_rows(self) -> None:
        rows, self._rows = self._rows, []
        for name, column in zip(self._columns, zip(*rows, strict=True), strict=False):
            try:
                total = math.fsum(column)
            except Exception:  # a value is no longer a number
                total = math.nan
            if math.isfinite(total):
                _count(self._steps, name, total, len(column))
                continue
            for value in column:
                if isinstance(value, NUMBERS) and _is_finite(value):
                    _count(self._steps, name, float(value))

    def _numbers(self, info: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], str, float]]:
        """(path of keys, name, value) of each number, NaN if not finite; ``is_success`` has an empty path."""
        for key, value in info.items():
            if key in _SUCCESS_NAMES and isinstance(value, NUMBERS):
                if key == SUCCESS or SUCCESS not in info:
                    yield (), SUCCESS, float(bool(value))
            elif isinstance(value, Mapping) and key not in _EXPECTED:
                for inner, part in value.items():
                    yield from self._number((key, inner), part)
            elif key not in _EXPECTED:
                yield from self._number((key,), value)

    def _number(self, path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], str, float]]:
        name = "/".join(_UNFIT.sub("_", str(key)) for key in path)[:_LONGEST_NAME]
        if not isinstance(value, NUMBERS):
            if value is not None:
                self._refuse(name, type(value).__name__)
        elif name not in self._names and len(self._names) >= MAX_NUMBERS:
            self._refuse(name, f"beyond the first {MAX_NUMBERS} numbers")
        else:
            self._names.add(name)
            yield path, name, float(value) if _is_finite(value) else math.nan

    def _refuse(self, name: str, reason: str) -> None:
        if name not in self._refused and len(self._refused) < _MAX_REFUSED:
            self._refused.add(name)
            self._ignored[name] = reason


def success_of(info: Any) -> bool | None:
    """True if the ``info`` of an episode's last step reports success; None if it has no such entry."""
    values = [info.get(name) for name in _SUCCESS_NAMES] if isinstance(info, Mapping) else []
    return next((bool(value) for value in values if isinstance(value, NUMBERS)), None)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _count(sums: Sums, name: str, total: float, count: int = 1) -> None:
    if not math.isfinite(total):
        return
    entry = sums.setdefault(name, [0.0, 0])
    entry[0] += total
    entry[1] += count


def _reader(paths: list[tuple[Any, ...]]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """A function that reads the values at these paths, those of one key before those of two."""
    plain = _values([path[0] for path in paths if len(path) == 1])
    nested: dict[Any, list[Any]] = {}
    for path in paths:
        if len(path) == 2:
            nested.setdefault(path[0], []).append(path[1])
    if not nested:
        return plain
    parts = [(key, _values(inner)) for key, inner in nested.items()]

    def read(info: Mapping[str, Any]) -> list[Any]:
        values = list(plain(info))
        for key, inner in parts:
            values += inner(info[key])
        return values

    return read


def _values(keys: list[Any]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    if len(keys) > 1:
        return itemgetter(*keys)
    return (lambda info: (info[keys[0]],)) if keys else (lambda info: ())
