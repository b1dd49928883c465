"""Means of the numbers that environments give in ``info``, over all samplers of a run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

MAX_NUMBERS = 32  # number of names that become metrics: the first ones of a run
SUCCESS = "is_success"
INFO = "info"  # name of the metric whose parts these numbers are
EPISODES = 100  # number of latest episodes to average
WINDOW_S = 1.0  # time over which steps are averaged


class InfoMeans:
    """Averages the sums that samplers send: values of env steps over time, those of episodes over ``EPISODES``."""

    def __init__(self) -> None:
        self._steps: dict[str, list[float]] = {}
        self._episodes: dict[str, deque[tuple[float, float]]] = {}
        self._values: dict[str, float] = {}
        self._window_s = 0.0
        self._names: set[str] = set()
        self._reported_kinds: set[str] = set()

    def add(self, message: Mapping[str, Any]) -> str | None:
        """Adds one message; returns a sentence on ignored values, once a run for each kind."""
        for name, (total, count) in _sums(message.get("steps")):
            if self._admits(name):
                entry = self._steps.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += count
        for name, (total, count) in _sums(message.get("episodes")):
            if self._admits(name):
                latest = self._episodes.setdefault(name, deque())
                latest.append((total, count))
                while sum(entry[1] for entry in latest) - latest[0][1] >= EPISODES:
                    latest.popleft()
                totals, counts = zip(*latest, strict=True)
                self._values[metric_of(name)] = sum(totals) / sum(counts)
        return self._sentence(message.get("ignored"))

    def means(self, now_s: float) -> dict[str, float]:
        """The newest mean of each number, by its metric's name."""
        if now_s - self._window_s >= WINDOW_S:
            self._window_s = now_s
            self._values |= {metric_of(name): total / count for name, (total, count) in self._steps.items()}
            self._steps.clear()
        return self._values

    def _admits(self, name: str) -> bool:
        if name not in self._names and name != SUCCESS and len(self._names) < MAX_NUMBERS:
            self._names.add(name)
        return name in self._names or name == SUCCESS

    def _sentence(self, ignored: Any) -> str | None:
        entries = ignored.items() if isinstance(ignored, dict) else ()
        kinds = {f"'{name}' ({reason})": "number" if "number" in str(reason) else "type" for name, reason in entries}
        new = {text: kind for text, kind in kinds.items() if kind not in self._reported_kinds}
        self._reported_kinds.update(new.values())
        if not new:
            return None
        names = ", ".join(new)
        return f"info: {names} not recorded; only numbers are, under the first {MAX_NUMBERS} names"


def metric_of(name: str) -> str:
    """The metric for a name in ``info``."""
    return "success_rate" if name == SUCCESS else f"{INFO}/{name}"


def _sums(part: Any) -> list[tuple[str, tuple[float, float]]]:
    """(name, (sum, count)) of each entry of a message."""
    entries = part.items() if isinstance(part, dict) else ()
    return [(str(name), (float(a), float(n))) for name, (a, n) in entries if math.isfinite(a) and n > 0]
