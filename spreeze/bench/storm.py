"""A storm of SIGKILLs over all roles of a real run with checksummed rows, and what must hold afterwards."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spreeze.bench.live_run import LiveRun
from spreeze.errors import SpreezeError
from spreeze.testing import ENV_ID
from spreeze.transport import board as words
from spreeze.transport.ring_reader import RingReader

Row = dict[str, Any]
SAMPLERS, ENVS = 2, 4
_SHARES = {"sampler-0": 0.33, "sampler-1": 0.33, "learner": 0.1, "evaluator": 0.14, "visualizer": 0.1}
_RECOVERY_LIMIT_S = 60.0
_RATE_S = 0.25
_CHECK_ROWS = 20_000
_COMMAND = [
    "--env", ENV_ID, "--import", "spreeze.testing", "--samplers", str(SAMPLERS), "--envs-per-sampler", str(ENVS),
    "--samples-per-insert", ":", "--batch-size", "32", "--replay-capacity", "50000",
    "--set", "replay.learning_starts=500", "--set", "sac.hidden_sizes=[32,32]", "--set", "evaluation.episodes=2",
    "--set", "replay.checksum=true", "--no-governor",
    "--set", "learner.checkpoint_interval_s=2", "--set", "run.forgiven_failures=1000000",
]


@dataclass
class Tally:
    """What the storm saw."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SHARES, 0))
    sampler_s: list[float] = field(default_factory=list)
    learner_s: list[float] = field(default_factory=list)
    updates_lost: list[float] = field(default_factory=list)
    rows_checked: int = 0
    rows_torn: int = 0
    versions_back: int = 0
    version: tuple[int, int] = (0, 0)


class Storm:
    """Kills at random and measures how the run comes back."""

    def __init__(self, run: LiveRun, seed: int) -> None:
        if run.board is None or run.ring is None:
            raise SpreezeError("the storm needs a run that was attached to")
        self._run, self._board, self._ring = run, run.board, run.ring
        self._dice, self._rng = random.Random(seed), np.random.default_rng(seed)
        self._reader = RingReader(run.ring)
        self._rows = np.empty((_CHECK_ROWS, run.ring.spec.layout.width), dtype=np.float32)
        self.tally = Tally()
        self._usual: dict[int, float] = {}

    def look(self) -> None:
        """Draws checked rows and reads the newest version."""
        tally = self.tally
        self._reader.sample(self._rng, self._rows)
        tally.rows_torn += self._reader.count_torn(self._rows)
        tally.rows_checked += len(self._rows)
        version = self._run.version()
        tally.versions_back += version < tally.version
        tally.version = max(tally.version, version)

    def measure_usual(self, seconds: float = 2.0) -> None:
        """The samplers' usual rates, to which they have to come back."""
        before, start = [self._steps(i) for i in range(SAMPLERS)], time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - start
        self._usual = {i: (self._steps(i) - before[i]) / passed for i in range(SAMPLERS)}

    def blow(self, until_s: float, kills_per_minute: float) -> None:
        """Kills until a monotonic time; each victim's recovery is measured before the next dies."""
        while time.monotonic() < until_s:
            begin = time.monotonic()
            workers = self._run.workers()
            present = [name for name in _SHARES if name in workers]
            if present:
                name = self._dice.choices(present, [_SHARES[name] for name in present])[0]
                self._kill(name, workers[name][0])
            pause = self._dice.expovariate(kills_per_minute / 60.0)
            while time.monotonic() < min(begin + pause, until_s):
                self.look()
                self._check_alive()

    def _kill(self, name: str, pid: int) -> None:
        role, _, index = name.partition("-")
        updates = self._updates()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.tally.kills[name] += 1
        start = time.monotonic()
        if role == "sampler":
            self._await_sampler(int(index))
            self.tally.sampler_s.append(time.monotonic() - start)
        elif role == "learner":
            self._await_learner(pid)
            self.tally.learner_s.append(time.monotonic() - start)
            self.tally.updates_lost.append(max(0.0, updates - self._updates()))

    def _await_sampler(self, index: int) -> None:
        """Until it samples at 90 % of its usual rate again, or of its neighbour's where the machine is slower now.

        Raises:
            SpreezeError: not within a minute.
        """
        others = [other for other in range(SAMPLERS) if other != index]
        end = time.monotonic() + _RECOVERY_LIMIT_S
        while time.monotonic() < end:
            before, start = [self._steps(i) for i in range(SAMPLERS)], time.monotonic()
            self._wait_a_little(start)
            passed = time.monotonic() - start
            rates = [(self._steps(i) - before[i]) / passed for i in range(SAMPLERS)]
            if rates[index] >= 0.9 * min(self._usual.get(index, 0.0), *(rates[i] for i in others)) > 0.0:
                return
        raise SpreezeError(f"sampler-{index} was not back at its rate within {_RECOVERY_LIMIT_S:.0f} s")

    def _await_learner(self, old_pid: int) -> None:
        """Until another process takes updates."""
        control = self._board.control(SAMPLERS)
        self._run.wait(lambda: int(control[words.PID]) != old_pid, _RECOVERY_LIMIT_S, "another learner")
        sampled = self._ring.sampled
        self._run.wait(lambda: self._ring.sampled != sampled, _RECOVERY_LIMIT_S, "updates of the new learner")
        time.sleep(0.05)  # the counter of updates follows within one of them

    def _wait_a_little(self, start: float) -> None:
        while time.monotonic() < start + _RATE_S:
            self.look()
        self._check_alive()

    def _check_alive(self) -> None:
        if self._run.process.poll() is not None:
            raise SpreezeError(f"the run ended in the storm: {self._run.last_output()}")

    def _steps(self, index: int) -> float:
        return float(self._board.slots(index)[0])

    def _updates(self) -> float:
        return self._board.named_slots(SAMPLERS, "learner")["updates"]

    def unaccounted_rows(self) -> float:
        """Rows committed beyond those counted: of each killed sampler at most one step of its environments."""
        counted = sum(self._steps(index) for index in range(SAMPLERS))
        return self._ring.total_committed() - counted

    def await_progress(self) -> None:
        """Learning goes on after the last kill."""
        steps, updates = self._ring.total_committed(), self._updates()
        self._run.wait(lambda: self._ring.total_committed() > steps and self._updates() > updates, _RECOVERY_LIMIT_S,
                       "env steps and updates after the storm")


def storm_rows(minutes: float, kills_per_minute: float, runs_dir: str, seed: int = 1) -> list[Row]:
    """One storm; every promise is a row with its target.

    Raises:
        SpreezeError: the run ended, or something did not come back within a minute.
    """
    shared = set(os.listdir("/dev/shm"))
    name = f"storm-{os.getpid()}-{int(time.time())}"
    with LiveRun(_COMMAND, runs_dir, name, {"SPREEZE_FAULT_STEP_S": "0.0005"}) as run:
        run.attach()
        storm = Storm(run, seed)
        run.wait(lambda: run.ring is not None and run.ring.sampled > 0, _RECOVERY_LIMIT_S, "the first update")
        run.wait(lambda: "visualizer" in run.workers(), _RECOVERY_LIMIT_S, "the visualizer")
        storm.measure_usual()
        storm.blow(time.monotonic() + 60.0 * minutes, kills_per_minute)
        storm.await_progress()
        storm.look()
        unaccounted = storm.unaccounted_rows()
        allowed = ENVS * (1 + sum(storm.tally.kills[f"sampler-{i}"] for i in range(SAMPLERS)))
        code = run.stop()
        orphans = run.orphans()
    return _rows(storm.tally, unaccounted, allowed, code, orphans, sorted(set(os.listdir("/dev/shm")) - shared))


def _rows(
    tally: Tally, unaccounted: float, allowed: int, code: int, orphans: int, leaked: list[str]
) -> list[Row]:
    def row(name: str, value: Any, unit: str, target: str | None = None, more: dict[str, int] | None = None) -> Row:
        return {"metric": name, "value": value, "unit": unit, **({"target": target} if target else {}), **(more or {})}

    return [
        row("kills", sum(tally.kills.values()), "kills", more=tally.kills),
        row("rows_torn", tally.rows_torn, "rows", "0", {"rows_checked": tally.rows_checked}),
        row("rows_unaccounted", unaccounted, "rows", f"0 .. {allowed}"),
        row("versions_going_back", tally.versions_back, "versions", "0"),
        row("exit_code", code, "code", "0"),
        row("orphans_after_5_s", orphans, "processes", "0"),
        row("shared_memory_left", len(leaked), "names", "0"),
        *_percentiles("sampler_recovery_s", tally.sampler_s, "p95 <= 3 s + start"),
        *_percentiles("learner_recovery_s", tally.learner_s, "<= 15 s"),
        *_percentiles("learner_updates_lost", tally.updates_lost, "one checkpoint interval", "updates"),
    ]


def _percentiles(name: str, values: list[float], target: str, unit: str = "s") -> list[Row]:
    if not values:
        return [{"metric": name, "value": None, "unit": unit, "target": target}]
    return [
        {"metric": f"{name}_p{q}", "value": float(np.percentile(values, q)), "unit": unit, "target": target,
         "repeats": values}
        for q in (50, 95, 100)
    ]
