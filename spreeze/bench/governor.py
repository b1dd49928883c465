"""What another program costs a run, and what the governor makes of it: a real run beside a busy process.

"Possible" is what the learner does under the same load while the samplers are stopped altogether (by
SIGSTOP, in turns with the governed run, so that drift of the machine meets both alike).
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from spreeze.bench.busy import busy_core
from spreeze.errors import RunError, SpreezeError
from spreeze.hardware import core_facts
from spreeze.siblings import is_worker
from spreeze.store_reader import MetricsReader

Row = dict[str, Any]
_START_S = 90.0
_BEFORE_S, _AFTER_S = 12.0, 25.0
"""The governor settles for five seconds; it takes back ten seconds after the load has ended."""
_TURN_S, _TURNS = 3.0, 7
_SETTLE_S = 0.5
_MARKS_S = (0.0, 5.0, 10.0, 20.0)


class Counters(NamedTuple):
    """What the run had done at one moment of its own clock."""

    t_s: float
    updates: float
    env_steps: float


class _Run:
    """A training process, read through its run directory."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self.process, self._path = process, path
        self.reader = MetricsReader(path / "metrics.db")

    def counters(self) -> Counters | None:
        """The newest sample; None before the first."""
        try:
            points = self.reader.latest()
        except RunError:
            return None
        if not {"updates", "env_steps"} <= set(points):
            return None
        return Counters(points["updates"].t, points["updates"].value, points["env_steps"].value)

    def watch(self, seconds: float) -> tuple[Counters, Counters]:
        """Counters now and so much later.

        Raises:
            SpreezeError: the run has ended.
        """
        before = self.counters()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.process.poll() is not None:
                raise SpreezeError(f"the run ended early (exit code {self.process.returncode}): {self._path}")
            time.sleep(min(left, 0.1))
        after = self.counters()
        if before is None or after is None:
            raise SpreezeError(f"the run has written no metrics: {self._path}")
        return before, after

    def samplers(self) -> list[psutil.Process]:
        """The sampler processes."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if is_worker(child.name(), "sampler"):
                    found.append(child)
        return found

    def governed(self, when: str) -> dict[str, float]:
        """How many samplers are active beside how much foreign load, as far as known."""
        points = self.reader.latest()
        return {f"{name}_{when}": points[name].value for name in ("samplers_active", "foreign_cores") if name in points}

    def changes(self, since_s: float, until_s: float) -> list[str]:
        """What the governor did between two moments of the run's clock."""
        events = self.reader.events(1000)
        return [e.text for e in events if e.text.startswith("governor:") and since_s <= e.t <= until_s]

    def stop(self) -> None:
        """Asks the run to end."""
        (self._path / "control" / "stop").touch()


def governor_rows(
    env_id: str, batch_size: int, samplers: int, load_s: float, repeats: int, say: Callable[[str], None],
    extra: list[str],
) -> list[Row]:
    """Updates a second before, under and after the load, repeat by repeat.

    Args:
        env_id: the task.
        batch_size: B.
        samplers: sampler processes.
        load_s: how long the busy process runs before the turns with stopped samplers, at least 20 s.
        repeats: runs.
        say: told of each repeat.
        extra: further arguments of the run.

    Raises:
        SpreezeError: a run failed or learning did not begin.
    """
    load_s = max(load_s, _MARKS_S[-1])
    found: list[dict[str, float]] = []
    for repeat in range(repeats):
        command = ["--env", env_id, "--batch-size", str(batch_size), "--samplers", str(samplers), "--learner-threads",
                   "1", "--no-visualizer", "--seed", str(repeat + 1), *extra]
        with _running(command) as run:
            found.append(_measure(run, load_s, say))
        say("  " + ", ".join(f"{name} {value:.4g}" for name, value in found[-1].items()))
    return [_row(name, [values[name] for values in found if name in values], env=env_id, batch_size=batch_size)
            for name in found[0]]


@contextlib.contextmanager
def _running(arguments: list[str]) -> Iterator[_Run]:
    """A run that has been learning for a while; it has ended when this ends."""
    with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as folder:
        command = [sys.executable, "-m", "spreeze.train", *arguments, "--runs-dir", folder, "--name", "run", "--json"]
        with open(Path(folder) / "errors.txt", "wb") as errors:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
        run = _Run(process, Path(folder) / "run")
        try:
            deadline = time.monotonic() + _START_S
            while (now := run.counters()) is None or now.updates <= 0:
                if process.poll() is not None or time.monotonic() > deadline:
                    text = (Path(folder) / "errors.txt").read_text(errors="replace").strip()[-500:]
                    raise SpreezeError(f"no learning within {_START_S:.0f} s: {' '.join(command)}: {text}")
                time.sleep(0.1)
            yield run
            run.stop()
            process.wait(timeout=60.0)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _measure(run: _Run, load_s: float, say: Callable[[str], None]) -> dict[str, float]:
    values: dict[str, float] = {}
    before = run.watch(_BEFORE_S)
    values["updates_per_s_before"], values["env_steps_per_s_before"] = _rates(before)
    values |= run.governed("before")
    with busy_core(core_facts().ids[0]):
        began_s = before[1].t_s
        for start_s, end_s in itertools.pairwise(_MARKS_S):
            window = run.watch(end_s - start_s)
            values[f"updates_per_s_at_{end_s:g}_s"], values["env_steps_per_s_under_load"] = _rates(window)
        if load_s > _MARKS_S[-1]:
            window = run.watch(load_s - _MARKS_S[-1])
        changes = run.changes(began_s, window[1].t_s)
        values |= run.governed("under_load")
        values["changes_under_load"] = len(changes)
        pairs = [_turn(run) for _ in range(_TURNS)]
        ended_s = run.watch(_SETTLE_S)[1].t_s
    possible_per_s = statistics.median(possible for _, possible in pairs)
    values["updates_per_s_possible"] = possible_per_s
    values["share_of_possible"] = statistics.median(governed / possible for governed, possible in pairs)
    values["share_of_possible_at_10_s"] = values[f"updates_per_s_at_{_MARKS_S[2]:g}_s"] / possible_per_s
    run.watch(_AFTER_S - _TURN_S)
    after = run.watch(_TURN_S)
    values["updates_per_s_after"], values["env_steps_per_s_after"] = _rates(after)
    back = run.changes(ended_s, after[1].t_s)
    values["changes_after"] = len(back)
    for text in (*changes, *back):
        say(f"  {text}")
    return values


def _turn(run: _Run) -> tuple[float, float]:
    """Updates a second under the governor, then with the samplers stopped."""
    run.watch(_SETTLE_S)
    governed = _rates(run.watch(_TURN_S))[0]
    samplers = run.samplers()
    try:
        for sampler in samplers:
            sampler.send_signal(signal.SIGSTOP)
        run.watch(_SETTLE_S)
        possible = _rates(run.watch(_TURN_S))[0]
    finally:
        for sampler in samplers:
            with contextlib.suppress(psutil.Error):
                sampler.send_signal(signal.SIGCONT)
    if possible <= 0:
        raise SpreezeError("no update in a whole turn: raise --samples-per-insert's upper bound, or lower the batch")
    return governed, possible


def _rates(window: tuple[Counters, Counters]) -> tuple[float, float]:
    """(updates, env steps) a second."""
    first, last = window
    seconds = max(last.t_s - first.t_s, 1e-9)
    return (last.updates - first.updates) / seconds, (last.env_steps - first.env_steps) / seconds


def _row(name: str, values: list[float], **more: Any) -> Row:
    targets = {"share_of_possible": ">= 0.9", "share_of_possible_at_10_s": ">= 0.9", "changes_under_load": "<= 2"}
    units = {"share": "ratio", "changes": "changes", "samplers": "samplers", "foreign": "cores"}
    unit = units.get(name.split("_")[0], "1/s")
    return {"metric": name, "unit": unit, "value": statistics.median(values), "repeats": values, **more,
            **({"target": targets[name]} if name in targets else {})}
