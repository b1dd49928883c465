"""The governor at work in a run: feeds it once a second and puts what it decides on the board.

Samplers rest in turn. Each has a shard of the replay of its own: were it always the same ones that rest, their rows
would grow too old to be drawn, and one of four samplers at work would leave a quarter of the replay. In turn all write
equally much, and the shards together hold the newest rows as one common ring would (``RingReader`` has the arithmetic).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from spreeze.formats import number
from spreeze.load import Load, LoadReader
from spreeze.transport import board as words
from spreeze.transport.board import Board
from spreeze.workers.gauges import Reading, samples_per_insert
from spreeze.workers.governor import Change, Facts, Governor
from spreeze.workers.plan import RunPlan

_EVERY_S = 1.0
_LONGEST_S = 3.0
"""A look later than this after the last one tells nothing: the machine slept, or was stuck."""

_TURN_SHARE = 1 / 32
"""A turn is over when each active sampler has written this share of its shard, about; looks come twice a second."""
_LONGEST_TURN_S = 10.0
"""Nor does it wait longer for a sampler that is slow, or just dead."""

_BLIND_TIMES = 5
"""Looks in a row without a load, the first of all is always one, until that is said."""


class Reader(Protocol):
    """Where the load comes from."""

    def sample(self, pids: Mapping[str, int]) -> Load | None:
        """Load since the last call, or None."""


class Governing:
    """One run's governor with its readings; called by the supervisor, which need not know when it acts."""

    def __init__(
        self, plan: RunPlan, board: Board, on_event: Callable[[str, str], None], *, reader: Reader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lets every sampler work until there is a reason against it.

        Args:
            plan: the run.
            board: where the number of active samplers is posted.
            on_event: is told of each change (level, text).
            reader: stand-in for tests.
            clock: monotonic seconds.
        """
        self._governor = Governor(plan.samplers, plan.config.tuning.leave_free)
        self._maximum, self._board, self._on_event, self._clock = plan.samplers, board, on_event, clock
        self._reader: Reader = LoadReader() if reader is None else reader
        self._before: tuple[float, int | None, float] | None = None
        self._foreign_cores: float | None = None
        self._blind = 0
        self._turn_rows = _TURN_SHARE * plan.ring_spec().rows_per_shard
        self._turn_began = (0.0, 0)  # seconds, rows inserted
        self._board.header[words.SAMPLERS] = self._maximum
        self._post(self._governor.active)

    def look(self, reading: Reading, pids: Mapping[str, int]) -> dict[str, float | None]:
        """Acts if a second has passed; returns its metrics.

        Args:
            reading: counters of this moment.
            pids: name -> process id of the running workers and of the supervisor.
        """
        now_s, learner, wait_s = self._clock(), pids.get("learner"), reading.learner["wait_s"]
        if self._before is None or now_s - self._before[0] >= _EVERY_S:
            load = self._reader.sample(pids)
            self._note_blind(load is None)
            facts = None if load is None else self._facts(load, reading, now_s, learner)
            self._foreign_cores = None if load is None else load.foreign_cores
            self._before = (now_s, learner, wait_s)
            change = self._governor.feed(facts)
            if change is not None:
                self._apply(change)
        self._pass_turn(now_s, reading.inserted)
        return {"samplers_active": self._governor.active, "foreign_cores": self._foreign_cores}

    def _pass_turn(self, now_s: float, inserted: int) -> None:
        """Lets the next sampler be the first, while some rest, when those at work have written enough."""
        began_s, before = self._turn_began
        active, header = self._governor.active, self._board.header
        enough = inserted - before >= self._turn_rows * max(1.0, active) or now_s - began_s >= _LONGEST_TURN_S
        if enough:
            self._turn_began = now_s, inserted
            if active < self._maximum:
                header[words.FIRST_SAMPLER] = (int(header[words.FIRST_SAMPLER]) + 1) % self._maximum

    def _note_blind(self, blind: bool) -> None:
        """Says once that there is nothing to govern by."""
        self._blind = self._blind + 1 if blind else 0
        if self._blind == _BLIND_TIMES:
            self._on_event("info", "governor: this system does not tell how long threads wait for a core "
                                   "(/proc/PID/schedstat), so samplers give way by their priority alone")

    def _facts(self, load: Load, reading: Reading, now_s: float, learner: int | None) -> Facts | None:
        """This second's facts; None while learning has not begun or the learner has just been started again."""
        if self._before is None or learner is None or learner != self._before[1] or reading.baseline_inserted < 0:
            return None
        elapsed_s = now_s - self._before[0]
        if elapsed_s > _LONGEST_S or reading.learner["updates"] <= 0:
            return None
        samplers = sum(cores for name, cores in load.wanted.items() if name.startswith("sampler"))
        return Facts(
            usable_cores=load.usable_cores, foreign_cores=load.foreign_cores,
            sibling_cores=load.sibling_cores,
            learner_cores=load.wanted.get("learner", 0.0), sampler_cores=samplers,
            other_cores=sum(load.wanted.values()) - samplers - load.wanted.get("learner", 0.0),
            learner_wait_share=min(max(0.0, reading.learner["wait_s"] - self._before[2]) / elapsed_s, 1.0),
            samples_per_insert=samples_per_insert(reading),
        )

    def _apply(self, change: Change) -> None:
        before = number(int(self._board.header[words.ACTIVE_SAMPLERS]) + self._board.header[words.SLOWED_SHARE] / 1000)
        self._post(change.active)
        self._on_event("info", f"governor: {before} -> {number(change.active)} of {self._maximum} samplers active: "
                               f"{change.reason}")

    def _post(self, active: float) -> None:
        """Two stores; what lies between them for a moment is at most one sampler too few."""
        whole = int(active)
        self._board.header[words.SLOWED_SHARE] = 0
        self._board.header[words.ACTIVE_SAMPLERS] = whole
        self._board.header[words.SLOWED_SHARE] = round(1000 * (active - whole))
