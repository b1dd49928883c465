"""When a dead worker may come back: back-off, limits, quarantine. Pure, with the clock handed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RestartLimit:
    """How often a role may fail."""

    failures: int
    """Failures within the window after which the worker rests for ``quarantine_s``, or for ever."""
    window_s: float
    quarantine_s: float | None
    """None: no further restart."""
    first_delay_s: float = 0.0
    backoff_s: float = 0.5
    max_delay_s: float = 30.0


LIMITS: dict[str, RestartLimit] = {
    "sampler": RestartLimit(failures=5, window_s=60.0, quarantine_s=300.0),
    "executor": RestartLimit(failures=5, window_s=60.0, quarantine_s=None),
    "actor": RestartLimit(failures=5, window_s=60.0, quarantine_s=None),
    "learner": RestartLimit(failures=3, window_s=600.0, quarantine_s=None),
    "evaluator": RestartLimit(failures=3, window_s=600.0, quarantine_s=None, first_delay_s=1.0),
    "visualizer": RestartLimit(failures=3, window_s=600.0, quarantine_s=None, first_delay_s=1.0),
}
"""Erlang's one-for-one supervision with figures for this job (reliability reference, 3.3)."""


@dataclass
class Restarts:
    """The failures of one worker."""

    limit: RestartLimit
    forgiven: int = 0
    """Failures that are mended at once and do not count."""
    total: int = 0
    due_s: float | None = None
    """Monotonic time of the next start; None while it runs or after it was given up."""
    quarantined: bool = False
    given_up: bool = False
    _times: deque[float] = field(default_factory=deque)

    def failed(self, now_s: float) -> None:
        """Notes a failure and decides when to start again.

        The first failure in a window comes back at once; then 0.5 s, doubling up to 30 s.
        """
        if self.forgiven > 0:
            self.forgiven -= 1
            self.due_s = now_s
            return
        self._times.append(now_s)
        while self._times and self._times[0] < now_s - self.limit.window_s:
            self._times.popleft()
        recent = len(self._times)
        self.quarantined = recent >= self.limit.failures
        if self.quarantined and self.limit.quarantine_s is None:
            self.given_up, self.due_s = True, None
            return
        if self.quarantined:
            self.due_s = now_s + (self.limit.quarantine_s or 0.0)
        elif recent == 1:
            self.due_s = now_s + self.limit.first_delay_s
        else:
            self.due_s = now_s + min(self.limit.backoff_s * 2.0 ** (recent - 2), self.limit.max_delay_s)

    def due(self, now_s: float) -> bool:
        """True when the worker should be started now."""
        return self.due_s is not None and now_s >= self.due_s

    def restarted(self) -> None:
        """Notes the start."""
        self.total += 1
        self.due_s = None
        self.quarantined = False
