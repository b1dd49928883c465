"""The metrics of one run in one SQLite file: one writer (the supervisor), any number of readers.

Raw points are kept for an hour, 10 s roll-ups for a day, 60 s roll-ups forever. Roll-ups of the open bucket live in
memory and are rebuilt from the raw points after a crash. In WAL mode, a reader never blocks the writer. ``t`` is wall
seconds since the run began, ``step`` the env steps at that time.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from spreeze.errors import RunError
from spreeze.formatting import clean
from spreeze.metrics.table import TABLE, MetricTable

RAW_S = 3600.0
TIERS: tuple[tuple[str, float, float], ...] = (("rollup_10s", 10.0, 86_400.0), ("rollup_60s", 60.0, math.inf))
"""(table, bucket width in s, how long it is kept in s), finest first."""

_TIER_AGES = tuple((table, keep_s, f"bucket < ? / {width_s}") for table, width_s, keep_s in TIERS if keep_s < math.inf)
_MAX_PENDING, _FIRST_EVENTS = 200_000, 50
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
    """An event of a run; ``level`` is info, warning or error."""

    t: float
    level: str
    source: str
    text: str


class _Cell:
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
        """Adds points of time ``t``; returns the rows of the buckets that ended before it.

        A late point joins the open bucket: an ended bucket is never written again.
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
        return [cell.row(series, self._bucket) for series, cell in self._cells.items()]


class MetricsWriter:
    """The only writer of a run's metrics. Trouble with disk or file is counted, never raised."""

    def __init__(
        self, path: str | Path, connect: Callable[[Path], sqlite3.Connection] | None = None,
        table: MetricTable = TABLE,
    ) -> None:
        """Opens or creates the file; a damaged one is renamed to ``*.damaged``. ``connect`` is for tests."""
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
        """Rows dropped because the trouble lasted too long."""
        self.trouble: str | None = None
        """The last failure; None again once everything is stored."""
        self._flush()

    def write(self, t: float, step: int, values: Mapping[str, float | None]) -> None:
        """Stores the values of one time in one transaction; None and non-finite values are left out.

        Raises:
            KeyError: a name is not in the table of metrics; nothing is stored.
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
        self._pending.append((_INSERT_EVENT, (float(t), clean(level, 20), clean(source, 80), clean(text, 2000))))
        self._flush()

    def evaluation(self, record: EvaluationRow) -> None:
        self._pending.append((_INSERT_EVALUATION, tuple(record)))
        self._flush()

    def close(self) -> None:
        self._pending += [(rollup.insert, row) for rollup in self._rollups for row in rollup.rows()]
        self._retry_at_s = 0.0
        self._flush()
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._disconnect()

    def _flush(self) -> None:
        """Writes all pending rows in one transaction; on failure they stay pending for the next call."""
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
        """Drops the oldest points where too much is pending; if that is not enough, events, and then anything."""
        for statements in ({_INSERT_POINT}, {_INSERT_EVENT}, {statement for statement, _ in self._pending}):
            excess = len(self._pending) - _MAX_PENDING
            if excess <= 0:
                return
            found = [index for index, (statement, _) in enumerate(self._pending) if statement in statements]
            first = _FIRST_EVENTS if statements == {_INSERT_EVENT} else 0  # they explain the others
            dropped = set(found[first : first + max(excess, _MAX_PENDING // 2)])
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
        """Rebuilds the open buckets, and those that a crash kept from being stored, from the raw points."""
        for (table, width_s, _), rollup in zip(TIERS, self._rollups, strict=True):
            (bucket,) = connection.execute(f"SELECT max(bucket) FROM {table}").fetchone()
            query = "SELECT name, t, step, value FROM points JOIN series ON id = series WHERE t >= ? ORDER BY t"
            for point in connection.execute(query, ((bucket or 0) * width_s,)).fetchall():
                self._pending += [(rollup.insert, row) for row in rollup.add([point], point[1])]

    def _prune(self, t: float) -> None:
        """Deletes old rows, and once an hour folds the log into the file."""
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
    """Rows by statement, in order within each statement."""
    groups: dict[str, list[tuple[Any, ...]]] = {}
    for statement, row in pending:
        groups.setdefault(statement, []).append(row)
    return list(groups.items())


def _open_for_writing(path: Path) -> sqlite3.Connection:
    """A connection to a file with our tables; a file that is not a database is renamed first."""
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


# --- reading ---

_QUERY_TIMEOUT_S = 5.0
_MAX_ROWS = 500_000

Query = Callable[..., list[tuple[Any, ...]]]
"""SQL and its arguments -> all rows."""


class Series(NamedTuple):
    """One metric over time, K buckets; ``low`` and ``high`` keep every peak. Arrays are float64 [K]."""

    name: str
    unit: str
    meaning: str
    t: np.ndarray
    step: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Point(NamedTuple):
    """The newest value of a series."""

    t: float
    step: int
    value: float


class MetricsReader:
    """Reads a ``metrics.db`` while it is being written, or long after; never writes, never hangs.

    An absent or empty file gives empty results. Every call opens and closes the file: a reader that stays open would
    keep the writer's log from being folded back and would miss a replaced file.
    """

    def __init__(self, path: str | Path, timeout_s: float = _QUERY_TIMEOUT_S) -> None:
        self._path = Path(path)
        self._timeout_s = timeout_s
        self._shared: Query | None = None

    def names(self) -> list[str]:
        """All series, in order of their first appearance."""
        with self._session() as query:
            return [str(name) for (name,) in query("SELECT name FROM series ORDER BY id")]

    def series(self, name: str, since: float = 0.0, max_points: int = 1000) -> Series:
        """A series from ``since`` (seconds since the run began) on, in at most ``max_points`` buckets.

        Raises:
            RunError: the file is damaged or takes too long to read.
        """
        with self._session() as query:
            found = query("SELECT id, unit, meaning FROM series WHERE name = ?", name)
            if not found:
                return _bucketed((name, "", ""), [], max_points)
            number, unit, meaning = found[0]
            rows = _rows(query, number, since, max_points)
            return _bucketed((name, str(unit), str(meaning)), rows, max_points)

    def whole_series(self, name: str) -> Series:
        """All that is stored of a series: roll-ups, then every raw point; errors as ``series``."""
        with self.held() as reader:
            found = reader.series(name, max_points=_MAX_ROWS)
            points = np.array(reader.tail([name], -1.0, _MAX_ROWS).get(name, []), np.float64).reshape(-1, 3)
        # The series may begin its points with a roll-up over the first of them.
        older = found.t < (points[0, 0] if len(points) else math.inf)
        t, step, value = points.T
        columns = zip(found[3:], (t, step, value, value, value), strict=True)
        return Series(*found[:3], *(np.concatenate([column[older], raw]) for column, raw in columns))

    def latest(self) -> dict[str, Point]:
        """The newest value of every series, however old."""
        newest: dict[str, Point] = {}
        sources = ((TIERS[-1][0], "bucket", "last"), ("points", "t", "value"))
        with self._session() as query:
            for number, name in query("SELECT id, name FROM series ORDER BY id"):
                for table, key, value in sources:
                    ask = f"SELECT t, step, {value} FROM {table} WHERE series = ? ORDER BY {key} DESC LIMIT 1"
                    for t, step, last in query(ask, number):
                        if name not in newest or newest[name].t <= float(t):
                            newest[str(name)] = Point(float(t), int(step), float(last))
        return newest

    def events(self, limit: int = 100) -> list[Event]:
        """The newest events, oldest first."""
        with self._session() as query:
            rows = query("SELECT t, level, source, text FROM events ORDER BY rowid DESC LIMIT ?", int(limit))
            return [
                Event(float(t), clean(level, 20), clean(source, 80), clean(text, 2000))
                for t, level, source, text in reversed(rows)
            ]

    def tail(self, names: Iterable[str], since: float, limit: int = 600) -> dict[str, list[Point]]:
        """Raw points of these series later than ``since``, the newest ``limit`` of each, oldest first."""
        found: dict[str, list[Point]] = {}
        with self._session() as query:
            numbers = dict(query("SELECT name, id FROM series"))
            for name in names:
                rows = query(
                    "SELECT t, step, value FROM points WHERE series = ? AND t > ? ORDER BY t DESC LIMIT ?",
                    numbers.get(name, -1), since, int(limit),
                )
                if rows:
                    found[name] = [Point(float(t), int(step), float(value)) for t, step, value in reversed(rows)]
        return found

    def evaluations(self, after: int = 0) -> list[EvaluationRow]:
        """All evaluations but the first ``after``, oldest first."""
        with self._session() as query:
            fields = ", ".join(EvaluationRow._fields)
            return [_evaluation(row) for row in query(f"SELECT {fields} FROM evaluations WHERE rowid > ?", int(after))]

    def extreme_evaluations(self, after: int, last: int, groups: int) -> list[EvaluationRow]:
        """Worst and best in each of at most ``groups`` equal parts of evaluations ``after + 1`` to ``last``."""
        width = max(1, math.ceil((last - after) / max(1, groups)))
        fields = ", ".join(EvaluationRow._fields)
        # SQLite takes the other columns from the row that has the minimum or maximum.
        ask = " UNION ".join(
            f"SELECT {fields} FROM (SELECT {fields}, {which}(return_mean) FROM evaluations WHERE rowid > ? "
            f"AND rowid <= ? GROUP BY (rowid - 1 - ?) / ?)" for which in ("min", "max")
        )
        with self._session() as query:
            return [_evaluation(row) for row in query(f"{ask} ORDER BY t", *(2 * (after, last, after, width)))]

    def last_evaluation(self) -> tuple[int, EvaluationRow | None]:
        """The number of evaluations, and the newest one."""
        with self._session() as query:
            fields = ", ".join(EvaluationRow._fields)
            rows = query(f"SELECT rowid, {fields} FROM evaluations ORDER BY rowid DESC LIMIT 1")
            return (int(rows[0][0]), _evaluation(rows[0][1:])) if rows else (0, None)

    @contextlib.contextmanager
    def held(self) -> Iterator[MetricsReader]:
        """A reader for several queries: its calls share one connection and one time limit."""
        with self._session() as query:
            shared = MetricsReader(self._path, self._timeout_s)
            shared._shared = query
            try:
                yield shared
            finally:
                shared._shared = None

    @contextlib.contextmanager
    def _session(self) -> Iterator[Query]:
        """One short-lived connection with a time limit; every failure becomes a RunError."""
        if self._shared is not None:
            yield self._shared
            return
        if not self._path.is_file() or self._path.stat().st_size == 0:
            yield lambda sql, *arguments: []
            return
        deadline_s = time.monotonic() + self._timeout_s
        try:
            with contextlib.closing(self._open()) as connection:
                connection.set_progress_handler(lambda: int(time.monotonic() > deadline_s), 20_000)
                yield lambda sql, *arguments: _fetched(connection, sql, arguments)
        except (sqlite3.Error, OSError, OverflowError, TypeError, ValueError) as error:
            raise RunError(f"{self._path} cannot be read as metrics: {clean(error)}; look into the run's log") from None

    def _open(self) -> sqlite3.Connection:
        """Opens read-only; a folder in which no lock file can be made counts as one without a writer."""
        place = f"file:{quote(str(self._path.absolute()))}?mode=ro"
        connection = sqlite3.connect(place, uri=True, timeout=1.0, isolation_level=None)
        try:
            connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
        except sqlite3.OperationalError as error:
            connection.close()
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            return sqlite3.connect(f"{place}&immutable=1", uri=True, isolation_level=None)
        except sqlite3.Error:
            connection.close()
            raise
        return connection


def _evaluation(row: tuple[Any, ...]) -> EvaluationRow:
    return EvaluationRow(float(row[0]), *(int(value) for value in row[1:6]), *(float(value) for value in row[6:]))


def _fetched(connection: sqlite3.Connection, sql: str, arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(sql, arguments).fetchmany(_MAX_ROWS)
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):  # the writer has not made it yet
            return []
        raise


def _rows(query: Query, number: int, since: float, max_points: int) -> list[tuple[Any, ...]]:
    """(t, step, mean, min, max) by time, from the coarsest tables that are still fine enough.

    60 s roll-ups up to the first 10 s one, these up to the first raw point, then raw points. If a roll-up already gives
    a row per bucket, only its unfinished tail comes from finer tables.
    """
    (start, width, _), (coarse, coarse_width, _) = TIERS[0], TIERS[1]
    raw_from = _first(query("SELECT min(t) FROM points WHERE series = ?", number))
    fine_from = _first(query(f"SELECT min(bucket) FROM {start} WHERE series = ?", number)) * width
    end = max(
        _first(query(f"SELECT max(t) FROM {table} WHERE series = ?", number), since) for table in ("points", coarse)
    )
    bucket_s = (end - since) / max(1, max_points)
    plan = (
        (coarse, coarse_width, math.inf if bucket_s >= coarse_width else fine_from),
        (start, width, math.inf if bucket_s >= width else raw_from),
    )
    rows: list[tuple[Any, ...]] = []
    covered = math.nextafter(since, -math.inf)
    for table, tier_s, until in plan:
        first = math.floor(since / tier_s) if not rows else math.floor(covered / tier_s) + 1
        last = min(until / tier_s, float(2**53))
        begun = _first(query(f"SELECT min(bucket) FROM {table} WHERE series = ?", number))
        if begun >= math.floor(last):  # the series began within this bucket: finer rows have all of it
            last = math.floor(last)
        rows += query(
            f"SELECT t, step, mean, min, max FROM {table} WHERE series = ? AND bucket >= ? AND bucket < ? AND t > ? "
            "ORDER BY bucket", number, first, last, covered,
        )
        covered = rows[-1][0] if rows else covered
    return rows + _raw(query, number, covered, end, max_points)


def _raw(query: Query, number: int, after: float, end: float, max_points: int) -> list[tuple[Any, ...]]:
    """Raw points later than ``after``; in buckets of equal time if there are more than ``max_points``."""
    where = "FROM points WHERE series = ? AND t > ?"
    if _first(query(f"SELECT count(*) {where}", number, after)) <= max_points:
        return query(f"SELECT t, step, value, value, value {where} ORDER BY t", number, after)
    width = (end - after) / max(1, max_points - 1) or 1.0
    columns = "max(t), max(step), avg(value), min(value), max(value)"
    return query(
        f"SELECT {columns} {where} GROUP BY CAST((t - ?) / ? AS INTEGER) ORDER BY 1", number, after, after, width
    )


def _first(found: list[tuple[Any, ...]], otherwise: float = math.inf) -> float:
    return float(found[0][0]) if found and found[0][0] is not None else otherwise


def _bucketed(head: tuple[str, str, str], rows: list[tuple[Any, ...]], max_points: int) -> Series:
    """At most ``max_points`` buckets of equal time; a bucket keeps its lowest and highest value."""
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    if len(table) > max_points:
        t = table[:, 0]
        edges = np.searchsorted(t, np.linspace(t[0], t[-1], max_points, endpoint=False))
        starts = np.unique(edges)
        counts = np.diff(np.append(starts, len(table)))
        last = starts + counts - 1
        table = np.column_stack([
            table[last, 0], table[last, 1], np.add.reduceat(table[:, 2], starts) / counts,
            np.minimum.reduceat(table[:, 3], starts), np.maximum.reduceat(table[:, 4], starts),
        ])
    t, step, mean, low, high = table.T
    return Series(*head, t, step, mean, low, high)
