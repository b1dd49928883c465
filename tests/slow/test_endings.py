"""How whole runs end: Ctrl-C once and twice at random moments, and SIGKILL to the supervisor.

By hand: ``SPREEZE_LONG_TESTS=1 SPREEZE_STRESS_RUNS=200 pytest tests/slow/test_endings.py``. Of each kind there are so
many runs (if no number is said, 100 that lose their supervisor), a fourth of it with two Ctrl-C
(``SPREEZE_STRESS_TWICE``), ``SPREEZE_STRESS_TOGETHER`` (1) at a time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
from figures import Row
from live_run import AttachedRun, marked
from long_form import LEFT_S, LIMIT_S, PATIENCE_S, asked, by_hand

from spreeze.errors import SpreezeError
from spreeze.run_directory import read_run
from spreeze.transport.checkpoint import CheckpointStore

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes by their environment in /proc"),
]
Say = Callable[[str], None]
FIRST_S, LAST_S = 0.5, 6.0
"""Moments of the signal: of every other run since its process began (the interpreter's own start is left out), of
the others since the first weights that an update made, so that a busy machine does not make all of them early ones."""
_SECOND_S = 1.0
_MARK = "SPREEZE_STRESS_RUN"
_STARTED_CODES = (0, 130, -int(signal.SIGINT))
"""Exit codes of a run that was stopped before learning began; the last one while Python imported."""
_COMMAND = ["--env", "Pendulum-v1", "--samplers", "1", "--no-governor", "--set", "learner.checkpoint_interval_s=1"]


@dataclass(frozen=True)
class Ending:
    """One run and its end."""

    moment_s: float
    """When the signal came (see ``LAST_S``)."""
    took_s: float
    learned: bool
    """Updates had been taken when the signal came."""
    troubles: tuple[str, ...] = ()


End = Callable[[AttachedRun, random.Random, str], Ending]
"""Ends a run: the run, dice for the moment, the name that all of its processes carry."""


@dataclass
class Endings:
    """Starts runs, several at a time, and ends each in its own way."""

    runs_dir: str
    seed: int
    say: Say
    name: str = field(default_factory=lambda: f"{os.getpid()}-{int(time.time())}")

    def all(self, end: End, kind: str, runs: int, together: int) -> list[Ending]:
        """Ends that many runs by ``end``, ``together`` at a time."""
        found: list[Ending] = []
        with ThreadPoolExecutor(max_workers=together) as pool:
            waiting = [pool.submit(self._one, end, f"{kind}-{self.name}-{number}") for number in range(runs)]
            try:
                for task in waiting:
                    found.append(task.result())
                    if found[-1].troubles:
                        self.say(f"  {kind}, run {len(found)} at {found[-1].moment_s:.2f} s: {found[-1].troubles}")
                    if len(found) % 20 == 0:
                        self.say(f"  {kind}: {len(found)} of {runs}, {sum(bool(e.troubles) for e in found)} troubles")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return found

    def _one(self, end: End, name: str) -> Ending:
        dice = random.Random(f"{self.seed} {name.split('-')[0]} {name.rsplit('-', 1)[1]}")
        with AttachedRun(_COMMAND, self.runs_dir, name, {_MARK: name}) as run:
            ending = end(run, dice, name)
        if not ending.troubles:
            shutil.rmtree(run.path, ignore_errors=True)
        return ending


def _await_moment(run: AttachedRun, dice: random.Random) -> float:
    """Waits; returns the moment, in seconds since the process began or since learning did."""
    if int(run.path.name.rsplit("-", 1)[1]) % 2:
        run.wait(lambda: run.version()[1] > 0, LIMIT_S, "weights that an update made")
        moment_s = dice.uniform(0.0, LAST_S)
    else:
        moment_s = dice.uniform(FIRST_S, LAST_S)
    try:
        run.process.wait(moment_s)
    except subprocess.TimeoutExpired:
        return moment_s
    raise SpreezeError(f"the run ended by itself: {run.last_output()}")


def _interrupt(run: AttachedRun) -> None:
    """Ctrl-C, as a terminal sends it: to the whole foreground group."""
    os.killpg(run.process.pid, signal.SIGINT)


def _awaited_code(run: AttachedRun) -> int | None:
    """The exit code; None if the run had to be killed."""
    try:
        return run.process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None


def stop_once(run: AttachedRun, dice: random.Random, name: str) -> Ending:
    """One Ctrl-C: checkpoint and summary of the same update, code 0, nobody left."""
    moment_s = _await_moment(run, dice)
    start_s = time.monotonic()
    _interrupt(run)
    code = _awaited_code(run)
    took_s = time.monotonic() - start_s
    troubles = _common_troubles(run, name, code)
    updates = int(read_run(run.path).get("updates") or 0)
    if code == 0 and updates > 0:
        checkpoint = CheckpointStore(run.path / "checkpoints").load_latest()
        document = json.loads((run.path / "summary.json").read_bytes())
        if checkpoint is None or not checkpoint.updates == document["updates"] == updates:
            troubles.append(f"checkpoint and summary are not of update {updates}")
    elif updates > 0 or code not in _STARTED_CODES:
        troubles.append(f"exit code {code} after {updates} updates: {run.last_output()}")
    return Ending(moment_s, took_s, updates > 0, tuple(troubles))


def stop_twice(run: AttachedRun, dice: random.Random, name: str) -> Ending:
    """Ctrl-C, and another one within a second; the time counts from the second."""
    moment_s = _await_moment(run, dice)
    _interrupt(run)
    start_s = time.monotonic()
    try:
        code: int | None = run.process.wait(dice.uniform(0.0, _SECOND_S))
        took_s = 0.0
    except subprocess.TimeoutExpired:
        start_s = time.monotonic()
        _interrupt(run)
        code = _awaited_code(run)
        took_s = time.monotonic() - start_s
    troubles = _common_troubles(run, name, code)
    if code not in _STARTED_CODES:
        troubles.append(f"exit code {code}: {run.last_output()}")
    learned = bool(CheckpointStore(run.path / "checkpoints").load_latest())
    return Ending(moment_s, took_s, learned, tuple(troubles))


def _common_troubles(run: AttachedRun, name: str, code: int | None) -> list[str]:
    troubles = []
    if code is None:
        troubles.append(f"not ended within {LIMIT_S:.0f} s")
    if "Traceback" in run.output():
        troubles.append(f"a traceback: {run.last_output()}")
    left, end_s = marked(_MARK, name), time.monotonic() + LEFT_S
    while left and time.monotonic() < end_s:
        time.sleep(0.1)
        left = marked(_MARK, name)
    if left:
        troubles.append(f"{len(left)} processes left after {LEFT_S:g} s")
    return troubles


def kill_supervisor(run: AttachedRun, dice: random.Random, name: str) -> Ending:
    """SIGKILL to the supervisor alone; the time until no process of the run is left, its watcher included."""
    moment_s = _await_moment(run, dice)
    learned = run.version()[1] > 0
    start_s = time.monotonic()
    run.process.kill()
    run.process.wait()
    while (left := marked(_MARK, name)) and time.monotonic() < start_s + LIMIT_S:
        time.sleep(0.05)
    took_s = time.monotonic() - start_s
    return Ending(moment_s, took_s, learned, (f"{len(left)} processes left",) if left else ())


def stops_rows(runs: int, twice: int, together: int, runs_dir: str, seed: int, say: Say) -> list[Row]:
    """Times of graceful and of hurried stops, and how many went wrong.

    Raises:
        SpreezeError: a run ended by itself.
    """
    endings = Endings(runs_dir, seed, say)
    once = endings.all(stop_once, "stop", runs, together)
    hurried = endings.all(stop_twice, "hurry", twice, together)
    return [
        _count_row("stops_in_order", once, f"{runs} of {runs}"),
        *_time_rows("stop_s", once, "p99 <= 15 s"),
        _count_row("hurried_stops_in_order", hurried, f"{twice} of {twice}"),
        *_time_rows("second_interrupt_s", hurried, "<= 3 s"),
    ]


def orphans_rows(runs: int, together: int, runs_dir: str, seed: int, say: Say) -> list[Row]:
    """How long what a killed supervisor had started lives on, and what stays in shared memory.

    Raises:
        SpreezeError: a run ended by itself.
    """
    shared = set(os.listdir("/dev/shm"))
    killed = Endings(runs_dir, seed, say).all(kill_supervisor, "orphan", runs, together)
    leaked = set(os.listdir("/dev/shm")) - shared
    gone = sum(not ending.troubles and ending.took_s <= 5.0 for ending in killed)
    return [
        {
            "metric": "all_gone_within_5_s",
            "value": gone,
            "unit": "runs",
            "target": f"{runs} of {runs}",
            "after_learning_began": sum(ending.learned for ending in killed),
        },
        *_time_rows("all_gone_s", killed, "<= 5 s"),
        {"metric": "shared_memory_left", "value": len(leaked), "unit": "names", "target": "0"},
    ]


def _count_row(name: str, found: list[Ending], target: str) -> Row:
    troubles = [trouble for ending in found for trouble in ending.troubles]
    return {
        "metric": name,
        "value": sum(not ending.troubles for ending in found),
        "unit": "runs",
        "target": target,
        "after_learning_began": sum(ending.learned for ending in found),
        **({"first_trouble": troubles[0]} if troubles else {}),
    }


def _time_rows(name: str, found: list[Ending], target: str) -> list[Row]:
    times = [ending.took_s for ending in found]
    if not times:
        return []
    return [
        {
            "metric": f"{name}_p{q}",
            "value": float(np.percentile(times, q)),
            "unit": "s",
            "target": target,
            "repeats": times,
        }
        for q in (50, 99, 100)
    ]


RUNS, KILLED_RUNS = asked("RUNS", 200), asked("RUNS", 100)
TWICE, TOGETHER, SEED = asked("TWICE", RUNS // 4), asked("TOGETHER", 1), asked("SEED", 1)


def test_runs_stopped_once_and_twice_end_in_order(tmp_path):
    said = []
    rows = {row["metric"]: row for row in stops_rows(2, 1, 2, str(tmp_path / "runs"), 1, said.append)}
    assert said == []
    assert rows["stops_in_order"]["value"] == 2
    assert rows["stops_in_order"]["after_learning_began"] >= 1
    assert rows["hurried_stops_in_order"]["value"] == 1
    assert rows["stop_s_p99"]["repeats"] != rows["second_interrupt_s_p99"]["repeats"]
    assert list((tmp_path / "runs").iterdir()) == []


@by_hand
@pytest.mark.timeout(2.0 * LIMIT_S * (RUNS + TWICE))
def test_all_of_many_runs_stopped_once_and_twice_end_in_order(tmp_path, report, say):
    rows = report(stops_rows(RUNS, TWICE, TOGETHER, str(tmp_path / "runs"), SEED, say))
    assert rows["stops_in_order"]["value"] == RUNS
    assert rows["hurried_stops_in_order"]["value"] == TWICE


def test_a_killed_supervisor_leaves_nobody(tmp_path):
    rows = {row["metric"]: row for row in orphans_rows(1, 1, str(tmp_path / "runs"), 1, print)}
    assert rows["all_gone_s_p100"]["value"] < PATIENCE_S
    assert rows["shared_memory_left"]["value"] == 0


@by_hand
@pytest.mark.timeout(2.0 * LIMIT_S * KILLED_RUNS)
def test_none_of_many_killed_supervisors_leaves_anybody(tmp_path, report, say):
    rows = report(orphans_rows(KILLED_RUNS, TOGETHER, str(tmp_path / "runs"), SEED, say))
    assert rows["all_gone_within_5_s"]["value"] == KILLED_RUNS
    assert rows["shared_memory_left"]["value"] == 0
