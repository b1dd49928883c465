"""What another program costs a run, and what the governor makes of it: a real run beside a busy process.

"Possible" is what the learner does under the same load while the samplers are stopped altogether (by
SIGSTOP, in turns with the governed run, so that drift of the machine meets both alike).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import psutil

from spreeze.bench import Row, row
from spreeze.bench.runs import Counters, LiveRun, Say, counters, rates
from spreeze.errors import SpreezeError
from spreeze.machine.hardware import core_facts
from spreeze.metrics.store_reader import MetricsReader

_START_S = 90.0
_BEFORE_S, _AFTER_S = 12.0, 25.0
"""The governor settles for five seconds; it takes back ten seconds after the load has ended."""
_TURN_S, _TURNS = 3.0, 7
_SETTLE_S = 0.5
_MARKS_S = (0.0, 5.0, 10.0, 20.0)
_TARGETS = {"share_of_possible": ">= 0.9", "share_of_possible_at_10_s": ">= 0.9", "changes_under_load": "<= 2"}
_UNITS = {"share": "ratio", "changes": "changes", "samplers": "samplers", "foreign": "cores"}
_SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while os.getppid() == int(sys.argv[2]):
    sum(range(10000))
"""


@contextlib.contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Another program that keeps that core busy, from a session of its own; ends with this process at the latest."""
    process = subprocess.Popen([sys.executable, "-c", _SPIN, str(core), str(os.getpid())], stdin=subprocess.DEVNULL,
                               start_new_session=True, env={"PATH": os.defpath})
    try:
        yield
    finally:
        process.kill()
        process.wait()


def governor_rows(
    env_id: str, batch_size: int, samplers: int, load_s: float, repeats: int, say: Say, extra: list[str]
) -> list[Row]:
    """Updates a second before, under and after the load, repeat by repeat.

    The busy process runs for ``load_s``, but at least 20 s, before the turns with stopped samplers.

    Raises:
        SpreezeError: a run failed or learning did not begin.
    """
    load_s = max(load_s, _MARKS_S[-1])
    found: list[dict[str, float]] = []
    for repeat in range(repeats):
        arguments = ["--env", env_id, "--batch-size", str(batch_size), "--samplers", str(samplers), "--learner-threads",
                     "1", "--no-visualizer", "--seed", str(repeat + 1), *extra]
        with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as folder, \
                LiveRun(arguments, folder, "run", {}) as run:
            run.await_learning(_START_S)
            found.append(_measure(run, load_s, say))
            run.stop()
        say("  " + ", ".join(f"{name} {value:.4g}" for name, value in found[-1].items()))
    return [row(name, _UNITS.get(name.split("_")[0], "1/s"), [values[name] for values in found if name in values],
                env=env_id, batch_size=batch_size, target=_TARGETS.get(name)) for name in found[0]]


def _watch(run: LiveRun, seconds: float) -> tuple[Counters, Counters]:
    """Counters now and so much later.

    Raises:
        SpreezeError: the run has ended.
    """
    before = counters(run.path)
    with contextlib.suppress(subprocess.TimeoutExpired):
        raise SpreezeError(f"the run ended early (exit code {run.process.wait(seconds)}): {run.last_output()}")
    after = counters(run.path)
    if before is None or after is None:
        raise SpreezeError(f"the run has written no metrics: {run.path}")
    return before, after


def _governed(run: LiveRun, when: str) -> dict[str, float]:
    """How many samplers are active beside how much foreign load, as far as known."""
    points = MetricsReader(run.path / "metrics.db").latest()
    return {f"{name}_{when}": points[name].value for name in ("samplers_active", "foreign_cores") if name in points}


def _changes(run: LiveRun, since_s: float, until_s: float) -> list[str]:
    """What the governor did between two moments of the run's clock."""
    events = MetricsReader(run.path / "metrics.db").events(1000)
    return [e.text for e in events if e.text.startswith("governor:") and since_s <= e.t <= until_s]


def _measure(run: LiveRun, load_s: float, say: Say) -> dict[str, float]:
    values: dict[str, float] = {}
    before = _watch(run, _BEFORE_S)
    values["updates_per_s_before"], values["env_steps_per_s_before"] = rates(*before)
    values |= _governed(run, "before")
    with busy_core(core_facts().ids[0]):
        began_s = before[1].t_s
        for start_s, end_s in itertools.pairwise(_MARKS_S):
            window = _watch(run, end_s - start_s)
            values[f"updates_per_s_at_{end_s:g}_s"], values["env_steps_per_s_under_load"] = rates(*window)
        if load_s > _MARKS_S[-1]:
            window = _watch(run, load_s - _MARKS_S[-1])
        changes = _changes(run, began_s, window[1].t_s)
        values |= _governed(run, "under_load")
        values["changes_under_load"] = len(changes)
        pairs = [_turn(run) for _ in range(_TURNS)]
        ended_s = _watch(run, _SETTLE_S)[1].t_s
    possible_per_s = statistics.median(possible for _, possible in pairs)
    values["updates_per_s_possible"] = possible_per_s
    values["share_of_possible"] = statistics.median(governed / possible for governed, possible in pairs)
    values["share_of_possible_at_10_s"] = values[f"updates_per_s_at_{_MARKS_S[2]:g}_s"] / possible_per_s
    _watch(run, _AFTER_S - _TURN_S)
    after = _watch(run, _TURN_S)
    values["updates_per_s_after"], values["env_steps_per_s_after"] = rates(*after)
    back = _changes(run, ended_s, after[1].t_s)
    values["changes_after"] = len(back)
    for text in (*changes, *back):
        say(f"  {text}")
    return values


def _turn(run: LiveRun) -> tuple[float, float]:
    """Updates a second under the governor, then with the samplers stopped."""
    _watch(run, _SETTLE_S)
    governed = rates(*_watch(run, _TURN_S))[0]
    samplers = [process for name, process in run.children().items() if name.startswith("sampler")]
    try:
        for sampler in samplers:
            sampler.send_signal(signal.SIGSTOP)
        _watch(run, _SETTLE_S)
        possible = rates(*_watch(run, _TURN_S))[0]
    finally:
        for sampler in samplers:
            with contextlib.suppress(psutil.Error):
                sampler.send_signal(signal.SIGCONT)
    if possible <= 0:
        raise SpreezeError("no update in a whole turn: raise --samples-per-insert's upper bound, or lower the batch")
    return governed, possible
