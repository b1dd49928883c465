"""How killed workers of a real run come back: watched from outside, several at a time."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field

from spreeze.bench.live_run import LiveRun
from spreeze.errors import SpreezeError
from spreeze.transport import board as words
from spreeze.transport.checkpoint import CheckpointStore

LIMIT_S = 60.0
"""Who does nothing until then counts as hung."""
_RATE_S = 0.25
_USUAL_WINDOWS = 40


@dataclass
class Recoveries:
    """What was measured, in seconds and updates."""

    sampler_s: list[float] = field(default_factory=list)
    learner_s: list[float] = field(default_factory=list)
    updates_lost: list[float] = field(default_factory=list)
    work_lost_s: list[float] = field(default_factory=list)
    """Learner time between the checkpoint that it goes on from and its death."""
    rows_lost: int = 0
    """Replay rows that were committed once and are not any more."""
    slow: int = 0
    """Samplers that worked again, but not at their rate within the limit."""
    hung: list[str] = field(default_factory=list)
    """Who did nothing at all within the limit."""


class SamplerPace:
    """Env steps of one sampler in windows of a quarter of a second, and its usual rate: the median of its good ones."""

    def __init__(self) -> None:
        self._good: deque[float] = deque(maxlen=_USUAL_WINDOWS)
        self._start: tuple[float, float] | None = None
        self.rate = 0.0
        """Env steps/s of the last window."""

    @property
    def usual(self) -> float:
        """Env steps/s when nobody had killed it."""
        return statistics.median(self._good) if self._good else 0.0

    def restart(self) -> None:
        """Begins a new window: the sampler was killed."""
        self._start, self.rate = None, 0.0

    def look(self, now_s: float, env_steps: float, *, recovering: bool) -> bool:
        """Takes a reading; True when a window ended with it."""
        if self._start is None:
            self._start = now_s, env_steps
            return False
        passed_s = now_s - self._start[0]
        if passed_s < _RATE_S:
            return False
        self.rate = (env_steps - self._start[1]) / passed_s
        self._start = now_s, env_steps
        if not recovering:
            self._good.append(self.rate)
        return True


class RecoveryWatch:
    """Notes who was killed when, and when each was back at work."""

    def __init__(self, run: LiveRun, samplers: int) -> None:
        if run.board is None or run.ring is None:
            raise SpreezeError("recoveries are seen only in a run that was attached to")
        self._board, self._ring, self._samplers = run.board, run.ring, samplers
        self._checkpoints = CheckpointStore(run.path / "checkpoints")
        self._paces = [SamplerPace() for _ in range(samplers)]
        self._rows = run.rows
        self._killed: dict[str, tuple[float, int]] = {}
        self._lost_from: tuple[float, float] = (0.0, 0.0)
        self._life: deque[tuple[float, float]] = deque(maxlen=100_000)
        self._committed = [0] * samplers
        self.seen = Recoveries()

    def recovering(self) -> set[str]:
        """Who was killed and is not back yet."""
        return set(self._killed)

    def killed(self, name: str, pid: int, now_s: float) -> None:
        """Notes a kill."""
        self._killed[name] = now_s, pid
        if name == "learner":
            self._lost_from = self.updates(), float(self._saved_updates())
        elif name.startswith("sampler"):
            self._paces[self._rows[name]].restart()

    def updates(self) -> float:
        """The learner's updates now."""
        return self._board.named_slots(self._rows["learner"], "learner")["updates"]

    def env_steps(self, index: int) -> float:
        """Env steps counted by a sampler and its predecessors."""
        return float(self._board.slots(index)[0])

    def _saved_updates(self) -> int:
        paths = self._checkpoints.paths()
        return int(paths[-1].name.split("-")[2]) if paths else 0

    def look(self) -> None:
        """Reads all counters once."""
        now_s, seen = time.monotonic(), self.seen
        for index in range(self._samplers):
            self._look_at_sampler(index, now_s)
        committed = [committed for _, committed in self._ring.counters()]
        seen.rows_lost += sum(max(0, old - new) for old, new in zip(self._committed, committed, strict=True))
        self._committed = committed
        self._look_at_learner(now_s)
        for name in [name for name in self._killed if name in ("evaluator", "visualizer") and self._is_new(name)]:
            del self._killed[name]
        for name in [name for name, (killed_s, _) in self._killed.items() if now_s - killed_s > LIMIT_S]:
            if name.startswith("sampler") and self._is_new(name) and self._paces[self._rows[name]].rate > 0.0:
                seen.slow += 1
                seen.sampler_s.append(now_s - self._killed[name][0])
            else:
                seen.hung.append(name)
            del self._killed[name]

    def _is_new(self, name: str) -> bool:
        """Another process has the place of the killed one."""
        return int(self._board.control(self._rows[name])[words.PID]) != self._killed[name][1]

    def _look_at_sampler(self, index: int, now_s: float) -> None:
        """Back is who has 90 % of his usual rate, or of his neighbours' where the machine is slower now."""
        name, pace = f"sampler-{index}", self._paces[index]
        recovering = name in self._killed
        if recovering and not self._is_new(name):
            return
        if not pace.look(now_s, self.env_steps(index), recovering=recovering) or not recovering:
            return
        others = [other.rate for at, other in enumerate(self._paces)
                  if at != index and f"sampler-{at}" not in self._killed]
        if pace.rate >= 0.9 * min(pace.usual, *others, float("inf")) and pace.rate > 0.0:
            self.seen.sampler_s.append(now_s - self._killed.pop(name)[0])

    def _look_at_learner(self, now_s: float) -> None:
        updates = self.updates()
        if "learner" not in self._killed:
            self._life.append((now_s, updates))
            return
        killed_s, _ = self._killed["learner"]
        at_death, saved = self._lost_from
        if not self._is_new("learner") or updates == at_death:
            return
        went_on_from = min(saved, updates)
        reached_s = next((t_s for t_s, count in self._life if count >= went_on_from), killed_s)
        self.seen.learner_s.append(now_s - killed_s)
        self.seen.updates_lost.append(max(0.0, at_death - went_on_from))
        self.seen.work_lost_s.append(killed_s - reached_s)
        self._life.clear()
        del self._killed["learner"]
