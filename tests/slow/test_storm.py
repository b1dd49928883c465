"""A storm of SIGKILLs over all roles of a real run with checksummed rows, and what must hold afterwards.

By hand: ``SPREEZE_LONG_TESTS=1 SPREEZE_STRESS_MINUTES=10 SPREEZE_STRESS_KILLS_PER_MINUTE=12 pytest
tests/slow/test_storm.py``; ``SPREEZE_STRESS_SINGLE_KILLS`` (60) are made one at a time after the storm, to time the
recovery of samplers and learner.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fault_envs import FAULT_ID
from live_run import AttachedRun
from long_form import LIMIT_S, asked, by_hand
from rings import count_torn

from spreeze.bench import Row
from spreeze.errors import SpreezeError
from spreeze.transport import status_table as words
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.replay_ring import ReplayReader

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into the run's memory through /proc"),
]
SAMPLERS, ENVS = 2, 4
_SHARES = {"sampler-0": 0.33, "sampler-1": 0.33, "learner": 0.1, "evaluator": 0.14, "visualizer": 0.1}
CHECKPOINT_S = 2.0
_LOOK_S = 0.05
_CHECK_ROWS = 10_000
_SAY_S = 60.0
_COMMAND = [
    "--env",
    FAULT_ID,
    "--import",
    "fault_envs",
    "--samplers",
    str(SAMPLERS),
    "--envs-per-sampler",
    str(ENVS),
    "--samples-per-insert",
    ":",
    "--batch-size",
    "32",
    "--replay-capacity",
    "50000",
    "--set",
    "replay.learning_starts=500",
    "--set",
    "sac.hidden_sizes=[32,32]",
    "--set",
    "evaluation.episodes=2",
    "--no-governor",
    "--set",
    f"learner.checkpoint_interval_s={CHECKPOINT_S:g}",
]
_ENVIRONMENT = {
    "SPREEZE_FAULT_STEP_S": "0.0005",
    "SPREEZE_TEST_CHECKSUM": "1",
    "SPREEZE_TEST_UNCOUNTED_CRASHES": "1000000",
}
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

    def __init__(self, run: AttachedRun, samplers: int) -> None:
        if run.status is None or run.ring is None:
            raise SpreezeError("recoveries are seen only in a run that was attached to")
        self._status, self._ring, self._samplers = run.status, run.ring, samplers
        self._checkpoints = CheckpointStore(run.path / "checkpoints")
        self._paces = [SamplerPace() for _ in range(samplers)]
        self._rows = run.rows
        self._killed: dict[str, tuple[float, int]] = {}
        self._lost_from: tuple[float, float] = (0.0, 0.0)
        self._life: deque[tuple[float, float]] = deque(maxlen=100_000)
        self._committed = [0] * samplers
        self.seen = Recoveries()

    def _pace(self, name: str) -> SamplerPace:
        return self._paces[int(name.partition("-")[2])]

    def recovering(self) -> set[str]:
        """Who was killed and is not back yet."""
        return set(self._killed)

    def killed(self, name: str, pid: int, now_s: float) -> None:
        """Notes a kill."""
        self._killed[name] = now_s, pid
        if name == "learner":
            self._lost_from = self.updates(), float(self._saved_updates())
        elif name.startswith("sampler"):
            self._pace(name).restart()

    def updates(self) -> float:
        """The learner's updates now."""
        return self._status.named_slots(self._rows["learner"], "learner")["updates"]

    def env_steps(self, index: int) -> float:
        """Env steps counted by a sampler and its predecessors."""
        return float(self._status.named_slots(self._rows[f"sampler-{index}"], "sampler")["env_steps"])

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
            if name.startswith("sampler") and self._is_new(name) and self._pace(name).rate > 0.0:
                seen.slow += 1
                seen.sampler_s.append(now_s - self._killed[name][0])
            else:
                seen.hung.append(name)
            del self._killed[name]

    def _is_new(self, name: str) -> bool:
        """Another process has the place of the killed one."""
        return int(self._status.control(self._rows[name])[words.PID]) != self._killed[name][1]

    def _look_at_sampler(self, index: int, now_s: float) -> None:
        """Back is who has 90 % of his usual rate, or of his neighbours' where the machine is slower now."""
        name, pace = f"sampler-{index}", self._paces[index]
        recovering = name in self._killed
        if recovering and not self._is_new(name):
            return
        if not pace.look(now_s, self.env_steps(index), recovering=recovering) or not recovering:
            return
        others = [
            other.rate for at, other in enumerate(self._paces) if at != index and f"sampler-{at}" not in self._killed
        ]
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


@dataclass
class ReturnStats:
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

    def __init__(self, run: AttachedRun, seed: int, say: Callable[[str], None]) -> None:
        if run.ring is None:
            raise SpreezeError("the storm needs a run that was attached to")
        self._run, self._ring, self._say = run, run.ring, say
        self._dice, self._rng = random.Random(seed), np.random.default_rng(seed)
        self._reader = ReplayReader(run.ring)
        self._rows = np.empty((_CHECK_ROWS, run.ring.spec.layout.width), dtype=np.float32)
        self.watch = RecoveryWatch(run, SAMPLERS)
        self.stats = ReturnStats()

    def look(self) -> None:
        """Draws rows, checks each one's checksum, and reads the newest version and all counters."""
        stats = self.stats
        self._reader.sample(self._rng, self._rows)
        stats.rows_torn += count_torn(self._reader, self._rows)
        stats.rows_checked += len(self._rows)
        version = self._run.version()
        stats.versions_back += version < stats.version
        stats.version = max(stats.version, version)
        self.watch.look()
        if self._run.process.poll() is not None:
            raise SpreezeError(f"the run ended after {stats.kills}: {self._run.last_output()}")

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
                self._say(
                    f"  {(now_s - begin_s) / 60.0:.0f} min: {sum(self.stats.kills.values())} kills, "
                    f"{self.stats.rows_checked:.3g} rows checked, {self.stats.rows_torn} torn"
                )
            self.look()
            time.sleep(_LOOK_S)
        self.stats.kills_per_minute = 60.0 * sum(self.stats.kills.values()) / (time.monotonic() - begin_s)

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
        self.stats.kills[name] += 1
        self.watch.killed(name, pid, now_s)
        return True

    def settle(self) -> None:
        """Everybody comes back, and learning goes on.

        Raises:
            SpreezeError: no progress within a minute.
        """
        self.await_all()
        steps, updates = self._ring.total_committed(), self.watch.updates()
        self._run.wait(
            lambda: self._ring.total_committed() > steps and self.watch.updates() > updates,
            LIMIT_S,
            "env steps and updates after the storm",
        )
        self.look()

    def count_rows(self) -> None:
        """Compares rows with env steps; call it after the run's end, when nobody writes any more."""
        self.stats.rows_written = self._ring.total_committed()
        counted = sum(self.watch.env_steps(index) for index in range(SAMPLERS))
        self.stats.unaccounted = self.stats.rows_written - counted


def storm_rows(
    minutes: float,
    kills_per_minute: float,
    single_kills: int,
    runs_dir: str,
    seed: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """One storm, and kills one at a time after it; every promise is a row with its target.

    Raises:
        SpreezeError: the run ended, or learning did not go on.
    """
    shared = set(os.listdir("/dev/shm"))
    name = f"storm-{os.getpid()}-{int(time.time())}"
    with AttachedRun(_COMMAND, runs_dir, name, _ENVIRONMENT) as run:
        run.attach()
        run.wait(lambda: run.ring is not None and run.ring.sampled > 0, LIMIT_S, "the first update")
        run.wait(lambda: "visualizer" in run.workers() and "evaluator" in run.workers(), LIMIT_S, "the visualizer")
        storm = Storm(run, seed, say)
        storm.calm(2.0)  # the samplers' usual rates
        storm.blow(minutes, kills_per_minute)
        singly = storm.kill_singly(single_kills)
        storm.settle()
        storm.stats.exit_code = run.stop()
        storm.count_rows()
        storm.stats.orphans = run.orphans()
    leaked = sorted(set(os.listdir("/dev/shm")) - shared)
    return [
        *_promises(storm.stats, storm.watch.seen, len(leaked)),
        *_recoveries(singly),
        *_recoveries(storm.watch.seen, "_in_storm"),
    ]


def _promises(stats: ReturnStats, seen: Recoveries, leaked: int) -> list[Row]:
    def row(name: str, value: Any, unit: str, target: str | None = None, **more: Any) -> Row:
        return {"metric": name, "value": value, "unit": unit, **({"target": target} if target else {}), **more}

    # Of each killed sampler at most one step of its environments is in replay and not counted.
    allowed = ENVS * sum(stats.kills[f"sampler-{index}"] for index in range(SAMPLERS))
    kills = sum(stats.kills.values())
    return [
        row("kills", kills, "kills", ">= 1000", **stats.kills),
        row("kills_per_minute", stats.kills_per_minute, "1/min", ">= 10"),
        row("hangs", len(seen.hung), "workers", "0", slower_than_a_minute=seen.slow),
        row(
            "rows_torn",
            stats.rows_torn,
            "rows",
            "0 of >= 1e8",
            rows_checked=stats.rows_checked,
            rows_written=stats.rows_written,
        ),
        row("rows_unaccounted", stats.unaccounted, "rows", f"0 .. {allowed}"),
        row("replay_rows_lost", seen.rows_lost, "rows", "0"),
        row("versions_going_back", stats.versions_back, "versions", "0"),
        row("exit_code", stats.exit_code, "code", "0"),
        row("orphans_after_5_s", stats.orphans, "processes", "0"),
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
    return [
        {"metric": f"{name}_p{q}", "value": float(np.percentile(values, q)), "unit": unit, **more, "repeats": values}
        for q in (50, 95, 100)
    ]


MINUTES, KILLS_PER_MINUTE = asked("MINUTES", 10.0), asked("KILLS_PER_MINUTE", 12.0)
SINGLE_KILLS, SEED = asked("SINGLE_KILLS", 60), asked("SEED", 1)


def keeps_every_promise(rows):
    unaccounted, allowed = rows["rows_unaccounted"]["value"], int(rows["rows_unaccounted"]["target"].split()[-1])
    assert 0 <= unaccounted <= allowed
    for name in ("rows_torn", "hangs", "replay_rows_lost", "versions_going_back", "exit_code", "orphans_after_5_s",
                 "shared_memory_left"):  # fmt: skip
        assert rows[name]["value"] == 0, name


def test_f02_a_short_storm_over_all_roles_keeps_every_promise(tmp_path):
    rows = {row["metric"]: row for row in storm_rows(0.08, 60.0, 2, str(tmp_path / "runs"), seed=3)}
    keeps_every_promise(rows)
    assert rows["kills"]["value"] >= 3, "one at least in the storm, and two after it"
    assert rows["rows_torn"]["rows_checked"] > 0
    assert rows["rows_torn"]["rows_written"] >= 500
    assert sum(rows["kills"][f"sampler-{index}"] for index in range(SAMPLERS)) >= 1
    assert rows["sampler_recovery_s_p95"]["value"] > 0
    assert rows["learner_recovery_s_p95"]["value"] > 0
    assert rows["learner_updates_lost_p100"]["value"] >= 0


@by_hand
@pytest.mark.timeout(60.0 * MINUTES + LIMIT_S * SINGLE_KILLS + 900.0)
def test_f02_a_long_storm_keeps_every_promise(tmp_path, report, say):
    keeps_every_promise(report(storm_rows(MINUTES, KILLS_PER_MINUTE, SINGLE_KILLS, str(tmp_path / "runs"), SEED, say)))


def test_a_sampler_s_usual_rate_is_the_median_of_the_windows_before_it_was_killed():
    pace = SamplerPace()
    steps = [0.0, 100.0, 200.0, 260.0]
    assert [pace.look(0.25 * i, count, recovering=False) for i, count in enumerate(steps)] == [False, True, True, True]
    assert (pace.usual, pace.rate) == (400.0, 240.0)
    pace.restart()
    assert pace.rate == 0.0
    assert not pace.look(2.0, 260.0, recovering=True), "a window begins"
    assert not pace.look(2.1, 260.0, recovering=True), "it is too short"
    assert pace.look(2.25, 349.0, recovering=True)
    assert (pace.usual, pace.rate) == (400.0, 356.0), "what it does on its way back is not usual"
