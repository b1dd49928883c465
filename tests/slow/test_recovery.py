"""How long workers of a real run take to be back after SIGKILL, one at a time.

By hand: ``SPREEZE_LONG_TESTS=1 SPREEZE_STRESS_KILLS=60 pytest tests/slow/test_recovery.py``. What holds under kills and
other faults is asked by ``test_storm.py``.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from fault_envs import FAULT_ID
from figures import Row
from live_run import AttachedRun
from long_form import LIMIT_S, asked, by_hand
from watched_run import FORGIVING

from spreeze.errors import SpreezeError
from spreeze.transport import status_table
from spreeze.transport.checkpoint import CheckpointStore

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into the run's memory through /proc"),
]
SAMPLERS, ENVS = 2, 4
CHECKPOINT_S = 2.0
_LOOK_S = 0.05
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
_ENVIRONMENT = {"SPREEZE_FAULT_STEP_S": "0.0005"}
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
        if run.status is None:
            raise SpreezeError("recoveries are seen only in a run that was attached to")
        self._status, self._samplers = run.status, samplers
        self._checkpoints = CheckpointStore(run.path / "checkpoints")
        self._paces = [SamplerPace() for _ in range(samplers)]
        self._rows = run.rows
        self._killed: dict[str, tuple[float, int]] = {}
        self._lost_from: tuple[float, float] = (0.0, 0.0)
        self._life: deque[tuple[float, float]] = deque(maxlen=100_000)
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
        self._look_at_learner(now_s)
        for name in [name for name, (killed_s, _) in self._killed.items() if now_s - killed_s > LIMIT_S]:
            if name.startswith("sampler") and self._is_new(name) and self._pace(name).rate > 0.0:
                seen.slow += 1
                seen.sampler_s.append(now_s - self._killed[name][0])
            else:
                seen.hung.append(name)
            del self._killed[name]

    def _is_new(self, name: str) -> bool:
        """Another process has the place of the killed one."""
        return int(self._status.control(self._rows[name])[status_table.PID]) != self._killed[name][1]

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


def kill_singly(run: AttachedRun, kills: int, seed: int = 1) -> Recoveries:
    """Kills one sampler or the learner at a time and waits until it is back; returns what that took."""
    watch, dice = RecoveryWatch(run, SAMPLERS), random.Random(seed)

    def calm(seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            watch.look()
            time.sleep(_LOOK_S)
            if run.process.poll() is not None:
                raise SpreezeError(f"the run ended: {run.last_output()}")

    calm(2.0)  # the samplers' usual rates
    for number in range(kills):
        calm(1.0 + dice.random())
        name = ("sampler-0", "learner", "sampler-1")[number % 3]
        run.wait(lambda name=name: name in run.workers(), LIMIT_S, name)
        pid = run.workers()[name]
        watch.killed(name, pid, time.monotonic())
        os.kill(pid, signal.SIGKILL)
        while watch.recovering():
            calm(_LOOK_S)
    return watch.seen


def recovery_rows(kills: int, runs_dir: str) -> list[Row]:
    """Percentiles of what recoveries take, with targets.

    Raises:
        SpreezeError: the run ended.
    """
    with AttachedRun(_COMMAND, runs_dir, f"recovery-{os.getpid()}", _ENVIRONMENT, program=FORGIVING) as run:
        run.attach()
        run.wait(lambda: run.ring is not None and run.ring.rows_drawn > 0, LIMIT_S, "the first update")
        seen = kill_singly(run, kills)
        run.stop()
    hangs = {
        "metric": "hangs",
        "value": len(seen.hung),
        "unit": "workers",
        "target": "0",
        "slower_than_a_minute": seen.slow,
    }
    return [hangs, *_recoveries(seen)]


def _recoveries(seen: Recoveries) -> list[Row]:
    return [
        *_percentiles("sampler_recovery_s", seen.sampler_s, "p95 <= 3 s + environment start"),
        *_percentiles("learner_recovery_s", seen.learner_s, "<= 15 s"),
        *_percentiles("learner_work_lost_s", seen.work_lost_s, f"<= {CHECKPOINT_S:g} s and a save"),
        *_percentiles("learner_updates_lost", seen.updates_lost, None, "updates"),
    ]


def _percentiles(name: str, values: list[float], target: str | None, unit: str = "s") -> list[Row]:
    more = {"target": target} if target else {}
    if not values:
        return [{"metric": name, "value": None, "unit": unit, **more}]
    return [
        {"metric": f"{name}_p{q}", "value": float(np.percentile(values, q)), "unit": unit, **more, "repeats": values}
        for q in (50, 95, 100)
    ]


KILLS = asked("KILLS", 60)


def test_killed_workers_are_back_and_the_learner_goes_on_from_its_checkpoint(tmp_path):
    rows = {row["metric"]: row for row in recovery_rows(2, str(tmp_path / "runs"))}
    assert rows["hangs"]["value"] == 0
    assert rows["sampler_recovery_s_p95"]["value"] > 0
    assert rows["learner_recovery_s_p95"]["value"] > 0
    assert rows["learner_updates_lost_p100"]["value"] >= 0


@by_hand
@pytest.mark.timeout(2.0 * LIMIT_S * KILLS + 900.0)
def test_how_long_many_recoveries_take(tmp_path, report):
    assert report(recovery_rows(KILLS, str(tmp_path / "runs")))["hangs"]["value"] == 0


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
