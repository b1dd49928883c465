"""A checker outside of a run's processes: eight invariants that hold whatever faults are thrown at the run.

It maps the run's shared memory, reads its files, and counts processes; it asks no process of the run for anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fault_envs import count_numbered
from harness import shared_memory
from live_run import AttachedRun, marked
from long_form import LEFT_S, LIMIT_S
from rings import torn_rows

from spreeze.errors import CheckpointError
from spreeze.files import TEMP_PREFIX, read_json
from spreeze.run_directory import read_run
from spreeze.transport import status_table
from spreeze.transport.checkpoint import CheckpointStore, load

VERSIONS, TORN, TWICE, COUNTERS, CHECKPOINTS, LEFT, HEARTBEAT, TOLD = INVARIANTS = (
    "weight versions rise", "no row is torn", "no row is there twice", "counters never fall",
    "each checkpoint verifies", "nothing is left over", "heartbeats and learning go on", "the run tells each fault",
)  # fmt: skip
_COUNTED = ("env_steps", "episodes", "env_errors", "transitions_rejected")
_NEWEST_ROWS = 2000
"""Rows of each shard that are compared with each other: more than come between two looks."""
_ROWS_S = 0.3
"""Rows are looked at so often; whatever is wrong with one stays to be seen."""
_CHECKSUMS = 200
"""Of those rows, so many have their checksum computed each time."""
ENVS = 4
"""Environments of each sampler."""
_RUN_JSON = "run.json"
RESTED = ("visualizer",)
"""Workers that may rest or end while a run goes on."""
ENDED = "(ended|exited|terminated|silent|was)"
"""After a worker's name: its end."""


class Checker:
    """Looks at one run, session after session, and collects what it must not see."""

    def __init__(self, mark: tuple[str, str], each: Callable[[], None] = lambda: None) -> None:
        """``mark``: name and value of a variable in the environment of all processes of the run.

        ``each`` is called at each look.
        """
        self._mark, self._each, self._shared = mark, each, shared_memory()
        self.violations: list[tuple[str, str]] = []
        self.spoiled: set[Path] = set()
        """Checkpoints that a fault has damaged, which need not verify."""
        self.rows_checked = self.checkpoints_checked = 0
        self._verified: set[Path] = set()
        self._rng = np.random.default_rng(0)
        self._version = (0, 0)
        self._counters: dict[str, float] = {}
        self._beats: dict[str, tuple[float, float]] = {}
        self._rows_s = 0.0

    def found(self, invariant: str, what: str) -> None:
        """Notes a violation."""
        self.violations.append((invariant, what))

    def begin(self, run: AttachedRun) -> None:
        """Looks at a session that has begun."""
        self._run, self._counters, self._beats = run, {}, {}
        self._fields = set(read_run(run.path))
        self._first_counters = self._read_counters()
        while not self._rows().items() <= self._first_counters.items():  # rows came while it was read
            self._first_counters = self._read_counters()

    def look(self) -> None:
        """Checks all that can be seen at one moment."""
        self._each()
        self.see_version(self._run.version())
        self.see_counters(self._read_counters())
        self.see_checkpoints(CheckpointStore(self._run.path / "checkpoints").paths())
        now_s = time.monotonic()
        self.see_beats(self.beats(), now_s)
        if now_s - self._rows_s < _ROWS_S:
            return
        self._rows_s, ring = now_s, self._run.ring
        rows, logical = map(
            np.concatenate, zip(*(newest_rows(ring, s) for s in range(ring.spec.num_shards)), strict=True)
        )
        self.see_rows(rows, logical, ring.spec.layout)

    def see_version(self, version: tuple[int, int]) -> None:
        """Takes a reading of (epoch, version); (0, 0) while the pointer cannot be read."""
        if version == (0, 0):
            return
        if version < self._version:
            self.found(VERSIONS, f"{self._version} -> {version}")
        self._version = version

    def _rows(self) -> dict[str, float]:
        run = self._run
        return {
            f"rows of {'' if shard < run.shards else 'hosts in '}shard {shard}": float(count)
            for shard, count in enumerate(run.ring.committed.tolist())
        }

    def _read_counters(self) -> dict[str, float]:
        run, found = self._run, self._rows()
        for name, row in run.rows.items():
            if name.startswith("sampler"):
                slots = run.status.named_slots(row, "sampler")
                found |= {f"{counter} of {name}": slots[counter] for counter in _COUNTED}
        return found

    def see_counters(self, counters: dict[str, float]) -> None:
        """Takes a reading of counters that one session has."""
        for name, value in counters.items():
            if value < self._counters.get(name, 0.0):
                self.found(COUNTERS, f"{name}: {self._counters[name]:.0f} -> {value:.0f}")
        self._counters = counters

    def see_checkpoints(self, paths: list[Path]) -> None:
        """Verifies those that are new."""
        for path in paths:
            if path in self._verified or path in self.spoiled:
                continue
            self._verified.add(path)
            try:
                load(path)
                self.checkpoints_checked += 1
            except CheckpointError as error:
                if path.exists():  # else it was removed meanwhile
                    self.found(CHECKPOINTS, str(error))

    def see_rows(self, rows: np.ndarray, logical: np.ndarray, layout) -> None:
        """Checks rows [n, W] of ``NumberedEnv`` with their logical indices [n]."""
        if not len(rows):
            return
        self.rows_checked += len(rows)
        some = self._rng.integers(0, len(rows), min(_CHECKSUMS, len(rows)))
        again, torn = count_numbered(rows, layout)
        torn += torn_rows(rows[some], logical[some])
        if torn:
            self.found(TORN, f"{torn} of {len(rows)} rows")
        if again:
            self.found(TWICE, f"{again} of {len(rows)} rows")

    def beats(self) -> dict[str, float]:
        """What has to change while a run goes on: heartbeats, rows, updates, and the time in a whole ``run.json``."""
        run, told = self._run, read_run(self._run.path)
        found = {
            name: float(run.status.control(row)[status_table.HEARTBEAT])
            for name, row in run.rows.items()
            if name not in RESTED
        }
        updates = run.status.named_slots(run.rows["learner"], "learner")["updates"]
        written = float(told.get("heartbeat") or 0.0) if self._fields <= set(told) else 0.0
        return found | {"rows": float(run.ring.total_committed()), "updates": updates, _RUN_JSON: written}

    def see_beats(self, beats: dict[str, float], now_s: float) -> None:
        """Takes a reading of what has to change; whoever does not for ``LIMIT_S`` is hung."""
        for name, value in beats.items():
            before, since_s = self._beats.get(name, (None, now_s))
            if value == before and now_s - since_s > LIMIT_S:
                self.found(HEARTBEAT, f"nothing of {name} for {now_s - since_s:.0f} s")
            elif value == before:
                continue
            self._beats[name] = value, now_s

    def see_progress(self, *, written: bool = False) -> None:
        """Waits until every worker is there, beats, collects and learns, and ``run.json`` is ``written``."""
        before, end_s = self._progress(), time.monotonic() + LIMIT_S
        waited_for = {name for name in (*self._run.rows, *before) if name not in RESTED}
        waited_for -= set() if written else {_RUN_JSON}  # takes seconds: ``look`` sees it, too
        while waited_for:
            workers, now = self._run.workers(), self._progress()
            waited_for -= {
                name for name in waited_for if now.get(name) != before.get(name)
                and (name in workers or name not in self._run.rows)
            }  # fmt: skip
            self.look()
            if self._run.process.poll() is not None:
                self.found(HEARTBEAT, f"the run ended with code {self._run.process.poll()}: {self._run.last_output()}")
                return
            if time.monotonic() > end_s:
                self.found(HEARTBEAT, f"after {LIMIT_S:.0f} s nothing of {sorted(waited_for)}")
                return
            time.sleep(0.05)

    def _progress(self) -> dict[str, float]:
        """What beats, and the rows of other hosts, which may be cut off for longer than others may be silent."""
        others = self._run.ring.committed[self._run.shards :]
        return self.beats() | ({"rows of hosts": float(others.sum())} if self._run.has_hosts else {})

    def see_end(self, code: int, deaths: int, refused: int) -> None:
        """Checks what a session that was stopped leaves, after so many faults that kill and that spoil a transition."""
        path = self._run.path
        self.see_nothing_left()
        unfinished = [*path.rglob(f"{TEMP_PREFIX}*"), *path.glob("*.tmp"), *(path / "control").iterdir()]
        if unfinished:
            self.found(LEFT, f"files {[left.relative_to(path).as_posix() for left in unfinished]}")
        summary = read_json(path / "summary.json")
        self._see_accounts(int(summary.get("restarts") or 0))
        told = {"restarts": deaths, "transitions_rejected": refused}
        for name, least in told.items():
            if (summary.get(name) or 0) < least:
                self.found(TOLD, f"{name} = {summary.get(name)} in summary.json after {least} such faults")
        if code != 0 or summary.get("error") is not None:
            self.found(HEARTBEAT, f"exit code {code}, error {summary.get('error')!r}: {self._run.last_output()}")

    def _see_accounts(self, restarts: int) -> None:
        """Rows are env steps, but for refused ones, and for one step of a sampler's environments at each restart.

        At the first look a sampler may have written the rows of a step that it had not counted yet.
        """
        now, first = self._read_counters(), self._first_counters

        def more(what: str) -> float:
            return sum(value - first.get(name, 0.0) for name, value in now.items() if name.startswith(what))

        missing = more("rows of shard") - more("env_steps of") + more("transitions_rejected of")
        if not -ENVS * self._run.shards <= missing <= ENVS * restarts + more("transitions_rejected of"):
            self.found(COUNTERS, f"{missing:.0f} rows were not counted, with {restarts} restarts")

    def see_nothing_left(self) -> None:
        """Checks that no process and no shared memory outlives a session."""
        end_s = time.monotonic() + LEFT_S
        while (left := marked(*self._mark)) and time.monotonic() < end_s:
            time.sleep(0.1)
        if left:
            self.found(LEFT, f"{len(left)} processes")
        if shared := shared_memory() - self._shared:
            self.found(LEFT, f"shared memory {sorted(shared)}")


def newest_rows(ring, shard: int) -> tuple[np.ndarray, np.ndarray]:
    """The newest rows [n, W] of a shard and their logical indices [n], without any that was overwritten meanwhile."""
    spec = ring.spec
    capacity, stop = spec.rows_per_shard, int(ring.committed[shard])
    first = max(0, stop - _NEWEST_ROWS, int(ring.reserved[shard]) - capacity)
    logical = np.arange(first, stop)
    rows = ring.rows[shard * spec.stride_rows + logical % capacity]
    kept = logical >= int(ring.reserved[shard]) - capacity
    return rows[kept], logical[kept]


def lose_unsynced(
    run: Path, synced: dict[tuple[int, int], tuple[int, int]], dice, *, within_s: float = 30.0
) -> list[str]:
    """Spoils the files of a run as a power loss may: what was renamed stays, what was not synced is cut or gone.

    ``synced`` is that of ``fault_page.synced_files``. Older files count as written back. Of files that grow at their
    end only the last bytes are lost; ``metrics.db`` itself is synced by SQLite. Returns what was spoiled.
    """
    lost, oldest_s = [], time.time() - within_s
    for path in sorted(run.rglob("*")):
        found = path.lstat()
        kept = synced.get((found.st_dev, found.st_ino)) == (found.st_size, found.st_mtime_ns)
        if not path.is_file() or kept or found.st_mtime < oldest_s or path.name in ("metrics.db", "run.lock"):
            continue
        lost.append(path.relative_to(run).as_posix())
        grows = path.suffix in (".csv", ".log", ".jsonl", ".db-wal")
        if dice.random() < 0.3 and any(map(str.isdigit, path.stem)):  # a new name; others are replaced by renames
            path.unlink()
        else:
            os.truncate(path, dice.randint(max(0, found.st_size - 4096) if grows else 0, found.st_size))
    return lost
