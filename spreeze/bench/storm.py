"""A storm of SIGKILLs over all roles of a real run with checksummed rows, and what must hold afterwards."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spreeze.bench.live_run import LiveRun
from spreeze.bench.recovery import LIMIT_S, Recoveries, RecoveryWatch
from spreeze.errors import SpreezeError
from spreeze.testing import ENV_ID
from spreeze.transport.ring_reader import RingReader

Row = dict[str, Any]
SAMPLERS, ENVS = 2, 4
_SHARES = {"sampler-0": 0.33, "sampler-1": 0.33, "learner": 0.1, "evaluator": 0.14, "visualizer": 0.1}
CHECKPOINT_S = 2.0
_LOOK_S = 0.05
_CHECK_ROWS = 10_000
_SAY_S = 60.0
_COMMAND = [
    "--env", ENV_ID, "--import", "spreeze.testing", "--samplers", str(SAMPLERS), "--envs-per-sampler", str(ENVS),
    "--samples-per-insert", ":", "--batch-size", "32", "--replay-capacity", "50000",
    "--set", "replay.learning_starts=500", "--set", "sac.hidden_sizes=[32,32]", "--set", "evaluation.episodes=2",
    "--set", "replay.checksum=true", "--no-governor",
    "--set", f"learner.checkpoint_interval_s={CHECKPOINT_S:g}", "--set", "run.forgiven_failures=1000000",
]


@dataclass
class Tally:
    """What the storm saw."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SHARES, 0))
    kills_per_minute: float = 0.0
    rows_checked: int = 0
    rows_torn: int = 0
    rows_written: int = 0
    unaccounted: float = 0.0
    versions_back: int = 0
    version: tuple[int, int] = (0, 0)
    exit_code: int = -1
    orphans: int = -1


class Storm:
    """Kills at random, whoever is at work; others may die while one comes back."""

    def __init__(self, run: LiveRun, seed: int, say: Callable[[str], None]) -> None:
        if run.ring is None:
            raise SpreezeError("the storm needs a run that was attached to")
        self._run, self._ring, self._say = run, run.ring, say
        self._dice, self._rng = random.Random(seed), np.random.default_rng(seed)
        self._reader = RingReader(run.ring)
        self._rows = np.empty((_CHECK_ROWS, run.ring.spec.layout.width), dtype=np.float32)
        self.watch = RecoveryWatch(run, SAMPLERS)
        self.tally = Tally()

    def look(self) -> None:
        """Draws rows, checks each one's checksum, and reads the newest version and all counters."""
        tally = self.tally
        self._reader.sample(self._rng, self._rows)
        tally.rows_torn += self._reader.count_torn(self._rows)
        tally.rows_checked += len(self._rows)
        version = self._run.version()
        tally.versions_back += version < tally.version
        tally.version = max(tally.version, version)
        self.watch.look()
        if self._run.process.poll() is not None:
            raise SpreezeError(f"the run ended after {tally.kills}: {self._run.last_output()}")

    def calm(self, seconds: float) -> None:
        """Looks without killing anybody."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.look()
            time.sleep(_LOOK_S)

    def blow(self, minutes: float, kills_per_minute: float) -> None:
        """Kills at random moments; who is on the way back is spared until then."""
        begin_s = next_kill_s = time.monotonic()
        end_s, next_word_s = begin_s + 60.0 * minutes, begin_s + _SAY_S
        while (now_s := time.monotonic()) < end_s:
            if now_s >= next_kill_s and self._kill():
                next_kill_s += self._dice.expovariate(kills_per_minute / 60.0)
            if now_s >= next_word_s:
                next_word_s += _SAY_S
                self._say(f"  {(now_s - begin_s) / 60.0:.0f} min: {sum(self.tally.kills.values())} kills, "
                          f"{self.tally.rows_checked:.3g} rows checked, {self.tally.rows_torn} torn")
            self.look()
            time.sleep(_LOOK_S)
        self.tally.kills_per_minute = 60.0 * sum(self.tally.kills.values()) / (time.monotonic() - begin_s)

    def kill_singly(self, kills: int) -> Recoveries:
        """Kills one sampler or the learner at a time and waits until it is back; returns what that took."""
        self.await_all()
        before, self.watch.seen = self.watch.seen, Recoveries()
        for number in range(kills):
            self.calm(1.0 + self._dice.random())
            self._kill(("sampler-0", "learner", "sampler-1")[number % 3])
            self.await_all()
        found, self.watch.seen = self.watch.seen, before
        before.hung += found.hung
        before.slow += found.slow
        before.rows_lost += found.rows_lost
        return found

    def await_all(self) -> None:
        """Until everybody is back, or counts as hung."""
        while self.watch.recovering():
            self.calm(_LOOK_S)

    def _kill(self, *names: str) -> bool:
        """Kills one of these, of all roles if none is named; False if nobody was there."""
        workers = self._run.workers()
        present = [name for name in names or _SHARES if name in workers and name not in self.watch.recovering()]
        if not present:
            return False
        name = self._dice.choices(present, [_SHARES[name] for name in present])[0]
        pid = workers[name]
        now_s = time.monotonic()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.tally.kills[name] += 1
        self.watch.killed(name, pid, now_s)
        return True

    def settle(self) -> None:
        """Everybody comes back, and learning goes on.

        Raises:
            SpreezeError: no progress within a minute.
        """
        self.await_all()
        steps, updates = self._ring.total_committed(), self.watch.updates()
        self._run.wait(lambda: self._ring.total_committed() > steps and self.watch.updates() > updates, LIMIT_S,
                       "env steps and updates after the storm")
        self.look()

    def count_rows(self) -> None:
        """Compares rows with env steps; call it after the run's end, when nobody writes any more."""
        self.tally.rows_written = self._ring.total_committed()
        counted = sum(self.watch.env_steps(index) for index in range(SAMPLERS))
        self.tally.unaccounted = self.tally.rows_written - counted


def storm_rows(
    minutes: float, kills_per_minute: float, single_kills: int, runs_dir: str, seed: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """One storm, and kills one at a time after it; every promise is a row with its target.

    Raises:
        SpreezeError: the run ended, or learning did not go on.
    """
    shared = set(os.listdir("/dev/shm"))
    name = f"storm-{os.getpid()}-{int(time.time())}"
    with LiveRun(_COMMAND, runs_dir, name, {"SPREEZE_FAULT_STEP_S": "0.0005"}) as run:
        run.attach()
        run.wait(lambda: run.ring is not None and run.ring.sampled > 0, LIMIT_S, "the first update")
        run.wait(lambda: "visualizer" in run.workers() and "evaluator" in run.workers(), LIMIT_S, "the visualizer")
        storm = Storm(run, seed, say)
        storm.calm(2.0)  # the samplers' usual rates
        storm.blow(minutes, kills_per_minute)
        singly = storm.kill_singly(single_kills)
        storm.settle()
        storm.tally.exit_code = run.stop()
        storm.count_rows()
        storm.tally.orphans = run.orphans()
    leaked = sorted(set(os.listdir("/dev/shm")) - shared)
    return [*_promises(storm.tally, storm.watch.seen, len(leaked)), *_recoveries(singly),
            *_recoveries(storm.watch.seen, "_in_storm")]


def _promises(tally: Tally, seen: Recoveries, leaked: int) -> list[Row]:
    def row(name: str, value: Any, unit: str, target: str | None = None, **more: Any) -> Row:
        return {"metric": name, "value": value, "unit": unit, **({"target": target} if target else {}), **more}

    # Of each killed sampler at most one step of its environments is in replay and not counted.
    allowed = ENVS * sum(tally.kills[f"sampler-{index}"] for index in range(SAMPLERS))
    kills = sum(tally.kills.values())
    return [
        row("kills", kills, "kills", ">= 1000", **tally.kills),
        row("kills_per_minute", tally.kills_per_minute, "1/min", ">= 10"),
        row("hangs", len(seen.hung), "workers", "0", slower_than_a_minute=seen.slow),
        row("rows_torn", tally.rows_torn, "rows", "0 of >= 1e8", rows_checked=tally.rows_checked,
            rows_written=tally.rows_written),
        row("rows_unaccounted", tally.unaccounted, "rows", f"0 .. {allowed}"),
        row("replay_rows_lost", seen.rows_lost, "rows", "0"),
        row("versions_going_back", tally.versions_back, "versions", "0"),
        row("exit_code", tally.exit_code, "code", "0"),
        row("orphans_after_5_s", tally.orphans, "processes", "0"),
        row("shared_memory_left", leaked, "names", "0"),
    ]


def _recoveries(seen: Recoveries, when: str = "") -> list[Row]:
    """With targets for kills one at a time; in the storm the starts of the others take the processor."""
    targets = [None] * 3 if when else ["p95 <= 3 s + environment start", "<= 15 s", f"<= {CHECKPOINT_S:g} s and a save"]
    return [
        *_percentiles(f"sampler_recovery{when}_s", seen.sampler_s, targets[0]),
        *_percentiles(f"learner_recovery{when}_s", seen.learner_s, targets[1]),
        *_percentiles(f"learner_work_lost{when}_s", seen.work_lost_s, targets[2]),
        *_percentiles(f"learner_updates_lost{when}", seen.updates_lost, None, "updates"),
    ]


def _percentiles(name: str, values: list[float], target: str | None, unit: str = "s") -> list[Row]:
    more = {"target": target} if target else {}
    if not values:
        return [{"metric": name, "value": None, "unit": unit, **more}]
    return [{"metric": f"{name}_p{q}", "value": float(np.percentile(values, q)), "unit": unit, **more,
             "repeats": values} for q in (50, 95, 100)]
