"""Sums for metrics of the numbers in an environment's ``info``, at little cost per step.

A number that is present at every step is averaged over steps, the first ``STEPS`` of each report, because a sampler
makes thousands a second. One that is present only at an episode's end, as in ``info["episode"]``, is averaged over
episodes. Entries of a dictionary within ``info`` have the names of both, such as ``reward/forward``. For
``is_success``, the value at the episode's end counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from spreeze.envs.obs_flattening import MASK
from spreeze.metrics.info_means import MAX_NUMBERS, SUCCESS

_SUCCESS_NAMES = (SUCCESS, "success")
NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
_EXPECTED = frozenset({MASK, f"_{MASK}", "final_observation", "final_obs", "final_info", "terminal_observation"})
"""Known entries that are not numbers, which are ignored silently."""
_UNFIT = re.compile(r"[^\w./\-]+")
STEPS = 64  # steps whose numbers are summed until the next report
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
        self._of_steps: set[str] = set()
        """Names that have occurred before an episode's end."""
        self.left = STEPS
        """Number of steps still counted until the next report."""

    def add(self, info: dict[Any, Any], *, ended: bool) -> None:
        """Adds the ``info`` of one step; ``ended``: it was an episode's last."""
        self.left -= 1
        for name, value in self.numbers(info):
            if not ended and name != SUCCESS:
                self._of_steps.add(name)
            if name in self._of_steps:
                _count(self._steps, name, value)
            elif ended:
                _count(self._episodes, name, value)

    def take(self) -> dict[str, Any] | None:
        """Returns and clears the sums: ``steps``, ``episodes`` and (name -> reason) ``ignored``; None if empty."""
        self.left = STEPS
        sums: dict[str, Any] = {"steps": self._steps, "episodes": self._episodes, "ignored": self._ignored}
        self._steps, self._episodes, self._ignored = {}, {}, {}
        return sums if any(sums.values()) else None

    def numbers(self, info: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        """Name and value of each number, NaN if not finite."""
        for key, value in info.items():
            if key in _SUCCESS_NAMES and isinstance(value, NUMBERS):
                if key == SUCCESS or SUCCESS not in info:
                    yield SUCCESS, float(bool(value))
            elif isinstance(value, Mapping) and key not in _EXPECTED:
                for inner, part in value.items():
                    yield from self._number((key, inner), part)
            elif key not in _EXPECTED:
                yield from self._number((key,), value)

    def _number(self, path: tuple[Any, ...], value: Any) -> Iterator[tuple[str, float]]:
        name = _name_of(path)
        if not isinstance(value, NUMBERS):
            if value is not None:
                self._refuse(name, type(value).__name__)
        elif name not in self._names and len(self._names) >= MAX_NUMBERS:
            self._refuse(name, f"beyond the first {MAX_NUMBERS} numbers")
        else:
            self._names.add(name)
            yield name, float(value) if _is_finite(value) else math.nan

    def _refuse(self, name: str, reason: str) -> None:
        if name not in self._refused and len(self._refused) < _MAX_REFUSED:
            self._refused.add(name)
            self._ignored[name] = reason


@lru_cache(1000)
def _name_of(path: tuple[Any, ...]) -> str:
    return "/".join(_UNFIT.sub("_", str(key)) for key in path)[:_LONGEST_NAME]


def success_of(info: Any) -> bool | None:
    """True if the ``info`` of an episode's last step reports success; None if it has no such entry."""
    values = [info.get(name) for name in _SUCCESS_NAMES] if isinstance(info, Mapping) else []
    return next((bool(value) for value in values if isinstance(value, NUMBERS)), None)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _count(sums: Sums, name: str, value: float) -> None:
    if math.isfinite(value):
        entry = sums.setdefault(name, [0.0, 0])
        entry[0] += value
        entry[1] += 1
