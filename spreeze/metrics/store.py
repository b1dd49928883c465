"""The metrics of one run in one SQLite file: one writer (the supervisor), any number of readers.

Raw points stay an hour, 10 s roll-ups a day, 60 s roll-ups for ever. Roll-ups of the bucket that is
still open live in memory and are rebuilt from the raw points after a crash. WAL: a reader never
blocks the writer. ``t`` is wall seconds since the run began, ``step`` the env steps at that time.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from spreeze.formatting import clean
from spreeze.metrics.table import TABLE, MetricTable

RAW_S = 3600.0
TIERS: tuple[tuple[str, float, float], ...] = (("rollup_10s", 10.0, 86_400.0), ("rollup_60s", 60.0, math.inf))
"""(table, bucket width in s, how long it is kept in s), finest first."""

_TIER_AGES = tuple((table, keep_s, f"bucket < ? / {width_s}") for table, width_s, keep_s in TIERS if keep_s < math.inf)
_MAX_PENDING = 200_000
_RETRY_S = 1.0
_PRUNE_S = 60.0
_CHECKPOINT_S = 3600.0
_ROLLUP = (
    "(series INTEGER, bucket INTEGER, t REAL, step INTEGER, min REAL, max REAL, mean REAL, last REAL, n INTEGER, "
    "PRIMARY KEY (series, bucket)) WITHOUT ROWID"
)
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS series (id INTEGER PRIMARY KEY, name TEXT UNIQUE, unit TEXT, meaning TEXT)",
    "CREATE TABLE IF NOT EXISTS points (series INTEGER, t REAL, step INTEGER, value REAL, PRIMARY KEY (series, t)) "
    "WITHOUT ROWID",
    *(f"CREATE TABLE IF NOT EXISTS {table} {_ROLLUP}" for table, _, _ in TIERS),
    "CREATE TABLE IF NOT EXISTS evaluations (t REAL, env_steps INTEGER, updates INTEGER, epoch INTEGER, "
    "version INTEGER, episodes INTEGER, return_mean REAL, return_std REAL, length_mean REAL)",
    "CREATE TABLE IF NOT EXISTS events (t REAL, level TEXT, source TEXT, text TEXT)",
)
_INSERT_SERIES = "INSERT INTO series VALUES (?, ?, ?, ?)"
_INSERT_POINT = "INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?)"
_INSERT_EVENT = "INSERT INTO events VALUES (?, ?, ?, ?)"
_INSERT_EVALUATION = "INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


class EvaluationRow(NamedTuple):
    """One evaluation: greedy episodes of one version of the weights."""

    t: float
    env_steps: int
    updates: int
    epoch: int
    version: int
    episodes: int
    return_mean: float
    return_std: float
    length_mean: float


class Event(NamedTuple):
    """Something worth telling; ``level`` is info, warn or error."""

    t: float
    level: str
    source: str
    text: str


class _Cell:
    """The open bucket of one series."""

    def __init__(self, t: float, step: int, value: float) -> None:
        self.t, self.step, self.last = t, step, value
        self.low = self.high = self.total = value
        self.n = 1

    def add(self, t: float, step: int, value: float) -> None:
        self.t, self.step, self.last = t, step, value
        self.low, self.high = min(self.low, value), max(self.high, value)
        self.total += value
        self.n += 1

    def row(self, series: str, bucket: int) -> tuple[Any, ...]:
        return (series, bucket, self.t, self.step, self.low, self.high, self.total / self.n, self.last, self.n)


class _Rollup:
    """All open buckets of one width."""

    def __init__(self, table: str, width_s: float) -> None:
        self.insert = f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self._width_s = width_s
        self._bucket = 0
        self._cells: dict[str, _Cell] = {}

    def add(self, points: Iterable[tuple[str, float, int, float]], t: float) -> list[tuple[Any, ...]]:
        """Adds points of one time; returns the rows of buckets which that time has ended.

        A point that comes late joins the open bucket: an ended one is never written again.
        """
        bucket = math.floor(t / self._width_s)
        ended: list[tuple[Any, ...]] = []
        if bucket > self._bucket:
            ended, self._cells, self._bucket = self.rows(), {}, bucket
        for series, at, step, value in points:
            if series in self._cells:
                self._cells[series].add(at, step, value)
            else:
                self._cells[series] = _Cell(at, step, value)
        return ended

    def rows(self) -> list[tuple[Any, ...]]:
        """Rows of the open buckets, as they are now."""
        return [cell.row(series, self._bucket) for series, cell in self._cells.items()]


class MetricsWriter:
    """The one writer of a run's metrics. Trouble with disk or file is counted, never raised."""

    def __init__(
        self, path: str | Path, connect: Callable[[Path], sqlite3.Connection] | None = None,
        table: MetricTable = TABLE,
    ) -> None:
        """Opens or creates the file; a damaged one is set aside as ``*.damaged``.

        Args:
            path: the file, usually ``metrics.db`` in the run directory.
            connect: opens the file; another one in tests.
            table: the metrics that may be stored.
        """
        self._path = Path(path)
        self._connect, self._table = connect or _open_for_writing, table
        self._connection: sqlite3.Connection | None = None
        self._series: dict[str, int] = {}
        self._rollups = [_Rollup(table, width_s) for table, width_s, _ in TIERS]
        self._pending: list[tuple[str, tuple[Any, ...]]] = []
        self._retry_at_s = 0.0
        self._pruned_t = self._checkpoint_t = 0.0
        self.failures = 0
        """Transactions that failed so far."""
        self.rows_dropped = 0
        """Rows given up because the trouble lasted too long."""
        self.trouble: str | None = None
        """The last failure; None again once everything is stored."""
        self._flush()

    def write(self, t: float, step: int, values: Mapping[str, float | None]) -> None:
        """Stores one moment in one transaction; None and non-finite values are left out.

        Raises:
            KeyError: a name that the table of metrics does not have; nothing is stored.
        """
        for name in values:
            if name not in self._series:
                self._table.by_name(name)
        points = [
            (name, float(t), int(step), float(value))
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        ]
        for rollup in self._rollups:
            self._pending += [(rollup.insert, row) for row in rollup.add(points, t)]
        self._pending += [(_INSERT_POINT, point) for point in points]
        self._flush()
        if t - self._pruned_t >= _PRUNE_S:
            self._prune(t)

    def event(self, t: float, level: str, source: str, text: str) -> None:
        """Stores an event; control characters are taken out of its texts."""
        self._pending.append((_INSERT_EVENT, (float(t), clean(level, 20), clean(source, 80), clean(text, 2000))))
        self._flush()

    def evaluation(self, record: EvaluationRow) -> None:
        """Stores an evaluation."""
        self._pending.append((_INSERT_EVALUATION, tuple(record)))
        self._flush()

    def close(self) -> None:
        """Stores what is open, folds the log into the file and closes it."""
        self._pending += [(rollup.insert, row) for rollup in self._rollups for row in rollup.rows()]
        self._retry_at_s = 0.0
        self._flush()
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._disconnect()

    def _flush(self) -> None:
        """One transaction with all that is pending; on failure it stays pending for the next call."""
        if time.monotonic() < self._retry_at_s:
            self._bound_pending()
            return
        try:
            connection = self._connected()
            connection.execute("BEGIN IMMEDIATE")
            series = dict(self._series)
            for statement, rows in _grouped(self._pending):
                if statement not in (_INSERT_EVENT, _INSERT_EVALUATION):
                    _add_series(connection, series, rows, self._table)
                    rows = [(series[row[0]], *row[1:]) for row in rows]
                connection.executemany(statement, rows)
            connection.execute("COMMIT")
            self._series = series
        except (sqlite3.Error, OSError) as error:
            self._fail(error)
            return
        self._pending.clear()
        self.trouble = None

    def _bound_pending(self) -> None:
        excess = len(self._pending) - _MAX_PENDING
        if excess > 0:
            points = [index for index, (statement, _) in enumerate(self._pending) if statement is _INSERT_POINT]
            dropped = set(points[: max(excess, _MAX_PENDING // 2)])
            self._pending = [item for index, item in enumerate(self._pending) if index not in dropped]
            self.rows_dropped += len(dropped)

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._connect(self._path)
            self._series = dict(self._connection.execute("SELECT name, id FROM series"))
            if not any(rollup.rows() for rollup in self._rollups):
                self._restore(self._connection)
        return self._connection

    def _restore(self, connection: sqlite3.Connection) -> None:
        """Rebuilds the open buckets, and those a crash kept from being stored, from the raw points."""
        for (table, width_s, _), rollup in zip(TIERS, self._rollups, strict=True):
            (bucket,) = connection.execute(f"SELECT max(bucket) FROM {table}").fetchone()
            query = "SELECT name, t, step, value FROM points JOIN series ON id = series WHERE t >= ? ORDER BY t"
            for point in connection.execute(query, ((bucket or 0) * width_s,)).fetchall():
                self._pending += [(rollup.insert, row) for row in rollup.add([point], point[1])]

    def _prune(self, t: float) -> None:
        """Deletes what is too old, and once an hour folds the log into the file."""
        self._pruned_t = t
        if self._connection is None:
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for table, keep_s, oldest in (("points", RAW_S, "t < ?"), *_TIER_AGES):
                if t > keep_s:
                    rows = [(series, t - keep_s) for series in self._series.values()]
                    self._connection.executemany(f"DELETE FROM {table} WHERE series = ? AND {oldest}", rows)
            self._connection.execute("COMMIT")
            if t - self._checkpoint_t >= _CHECKPOINT_S:
                self._checkpoint_t = t
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self.trouble = clean(f"{self._path.name}: {error}")
        self._retry_at_s = time.monotonic() + _RETRY_S
        self._disconnect()
        self._bound_pending()

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def _add_series(
    connection: sqlite3.Connection, series: dict[str, int], rows: list[tuple[Any, ...]], table: MetricTable
) -> None:
    """Gives every new series in ``rows`` the next free number, in ``series`` and in the file."""
    for name in {row[0]: None for row in rows if row[0] not in series}:
        series[name] = 1 + max(series.values(), default=0)
        metric = table.by_name(name)
        connection.execute(_INSERT_SERIES, (series[name], name, metric.unit, metric.meaning))


def _grouped(pending: list[tuple[str, tuple[Any, ...]]]) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """Rows by statement, order kept within a statement."""
    groups: dict[str, list[tuple[Any, ...]]] = {}
    for statement, row in pending:
        groups.setdefault(statement, []).append(row)
    return list(groups.items())


def _open_for_writing(path: Path) -> sqlite3.Connection:
    """A connection to a file with our tables; a file that is no database is set aside first."""
    try:
        return _prepared(path)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise
    path.replace(path.with_name(f"{path.name}.damaged"))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return _prepared(path)


def _prepared(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=0.2, isolation_level=None)
    try:
        connection.execute("PRAGMA page_size = 1024")  # a commit touches a page for each series
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        for statement in _SCHEMA:
            connection.execute(statement)
    except sqlite3.Error:
        connection.close()
        raise
    return connection
