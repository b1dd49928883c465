"""The metrics of one run in one SQLite file: one writer (the supervisor), any number of readers.

Raw values are kept for an hour, 10 s roll-ups for a day, 60 s roll-ups forever. A sample is one row with the values of
all series, so a commit writes one or two pages however many series there are. A late value, which is older than the
newest sample, is a row of ``points``. Roll-ups are written every ten minutes; those still in memory are rebuilt from
the raw values after a crash. In WAL mode, a reader never blocks the writer. ``t`` is wall seconds
since the run started, ``step`` the env steps at that time.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from spreeze.errors import RunError, refuse_newer
from spreeze.formatting import clean
from spreeze.metrics.table import TABLE, MetricTable

FORMAT = 1
"""Format number of ``metrics.db``, in its ``user_version``."""
RAW_S = 3600.0
TIERS: tuple[tuple[str, float, float], ...] = (("rollup_10s", 10.0, 86_400.0), ("rollup_60s", 60.0, math.inf))
"""(table, bucket width in s, how long it is kept in s), finest first."""

_TIER_AGES = tuple((table, keep_s, f"bucket < ? / {width_s}") for table, width_s, keep_s in TIERS if keep_s < math.inf)
_MAX_PENDING = 200_000  # values that may wait in memory while the file cannot be written
_FIRST_EVENTS = 100  # events that are kept in any case, because the first ones tell what went wrong
_RETRY_S = 1.0
_BUSY_S = 3.0  # time that another program may lock the file before it is reported [s]
_UPKEEP_S = 600.0  # time between two writes of roll-ups, each with the removal of what is too old
_CHECKPOINT_S = 3600.0
_CHECK_S = 2.0  # longest check of an existing file for damage
_MOST_SERIES = 4096  # series whose values a sample can hold; others would be points
_MOST_DAMAGED = 9  # damaged files that may lie beside the file
_US = 1e6
_NAN = struct.pack("<d", math.nan)
_ROLLUP = (
    "(series INTEGER, bucket INTEGER, t REAL, step INTEGER, min REAL, max REAL, mean REAL, last REAL, n INTEGER, "
    "PRIMARY KEY (series, bucket)) WITHOUT ROWID"
)
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS series (id INTEGER PRIMARY KEY, name TEXT UNIQUE, unit TEXT, meaning TEXT)",
    "CREATE TABLE IF NOT EXISTS samples (us INTEGER PRIMARY KEY, step INTEGER, data BLOB)",
    "CREATE TABLE IF NOT EXISTS points (series INTEGER, t REAL, step INTEGER, value REAL, PRIMARY KEY (series, t)) "
    "WITHOUT ROWID",
    *(f"CREATE TABLE IF NOT EXISTS {table} {_ROLLUP}" for table, _, _ in TIERS),
    "CREATE TABLE IF NOT EXISTS evaluations (t REAL, env_steps INTEGER, updates INTEGER, epoch INTEGER, "
    "version INTEGER, episodes INTEGER, return_mean REAL, return_std REAL, length_mean REAL)",
    "CREATE TABLE IF NOT EXISTS events (t REAL, level TEXT, source TEXT, text TEXT)",
)
"""``samples.us`` is t in microseconds; ``data`` has a float64 for each series, in order of their ids, NaN for none."""
_INSERT_SERIES = "INSERT INTO series VALUES (?, ?, ?, ?)"
_INSERT_SAMPLE = "INSERT INTO samples VALUES (?, ?, ?)"
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


_FIELDS = ", ".join(EvaluationRow._fields)


class Event(NamedTuple):
    """An event of a run; ``level`` is info, warning or error."""

    t: float
    level: str
    source: str
    text: str


class _Rollup:
    """All open buckets of one width."""

    def __init__(self, table: str, width_s: float) -> None:
        self.insert = f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self._width_s = width_s
        self._bucket = 0
        self._points: dict[str, list[tuple[float, int, float]]] = {}

    def add(self, points: Iterable[tuple[str, float, int, float]], t: float) -> list[tuple[Any, ...]]:
        """Adds points of time ``t``; returns the rows of the buckets that ended before it.

        A late point joins the open bucket: an ended bucket is never written again.
        """
        bucket = math.floor(t / self._width_s)
        ended: list[tuple[Any, ...]] = []
        if bucket > self._bucket:
            ended, self._points, self._bucket = self.rows(), {}, bucket
        for series, at, step, value in points:
            self._points.setdefault(series, []).append((at, step, value))
        return ended

    def rows(self) -> list[tuple[Any, ...]]:
        rows = []
        for series, points in self._points.items():
            t, step, last = max(reversed(points), key=lambda point: point[0])  # of one time the one that came last
            values = [value for _, _, value in points]
            spread = (min(values), max(values), sum(values) / len(values))
            rows.append((series, self._bucket, t, step, *spread, last, len(values)))
        return rows


class MetricsWriter:
    """The only writer of a run's metrics. Trouble with disk or file is reported, never raised."""

    def __init__(
        self, path: str | Path, connect: Callable[[Path], sqlite3.Connection] | None = None, table: MetricTable = TABLE
    ) -> None:
        """Opens or creates the file; a damaged one is renamed to ``*.damaged``. ``connect`` is for tests."""
        self._path = Path(path)
        self._connect, self._table = connect or _open_for_writing, table
        self._connection: sqlite3.Connection | None = None
        self._series: dict[str, int] = {}
        self._newest_us = -math.inf
        self._rollups = [_Rollup(table, width_s) for table, width_s, _ in TIERS]
        self._ended: list[tuple[str, tuple[Any, ...]]] = []  # roll-ups that are complete and not yet pending
        self._pending: list[tuple[str, tuple[Any, ...]]] = []
        self._pending_values = 0
        self._retry_at_s = 0.0
        self._kept_t = self._checkpoint_t = 0.0
        self._trouble_since_s: float | None = None
        self._trouble_told = False
        self._lost_before = 0
        self._reports: list[tuple[str, str]] = []
        self.failures = 0
        """Transactions that failed so far."""
        self.rows_dropped = 0
        """Rows (samples, events, evaluations, roll-ups) dropped because the trouble lasted too long."""
        self.trouble: str | None = None
        """The last failure; None again once everything is stored."""
        self.set_aside: list[Path] = []
        """Paths to which damaged files were renamed."""
        self._flush()

    def write(self, t: float, step: int, values: Mapping[str, float | None]) -> None:
        """Stores the values of one time in one transaction; None and what is not finite are left out.

        Raises:
            KeyError: a name is not in the table of metrics; nothing is stored.
        """
        for name in values:
            if name not in self._series:
                self._table.by_name(name)
        if not math.isfinite(t):
            return
        points = [
            (name, float(t), int(step), float(value))
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        ]
        for rollup in self._rollups:
            self._ended += [(rollup.insert, row) for row in rollup.add(points, t)]
        if points:
            self._add(_INSERT_SAMPLE, tuple(points))
        upkeep_due = t - self._kept_t >= _UPKEEP_S
        if upkeep_due:
            self._add_ended()
        self._flush()
        if upkeep_due:
            self._remove_old(t)

    def event(self, t: float, level: str, source: str, text: str) -> None:
        self._add(_INSERT_EVENT, (float(t), clean(level, 20), clean(source, 80), clean(text, 2000)))
        self._flush()

    def evaluation(self, *records: EvaluationRow) -> None:
        """Stores evaluations; one with a number that is not finite is left out."""
        for record in records:
            if all(map(math.isfinite, record)):
                self._add(_INSERT_EVALUATION, tuple(record))
        self._flush()

    def reports(self) -> list[tuple[str, str]]:
        """Level and text of messages about the file since the last call: trouble, its end with rows lost, damage."""
        found, self._reports = self._reports, []
        return found

    def close(self) -> None:
        """Writes what is pending and closes the file; what cannot be written counts as dropped."""
        self._add_ended()
        for rollup in self._rollups:
            for row in rollup.rows():
                self._add(rollup.insert, row)
        self._retry_at_s = 0.0
        self._flush()
        self.rows_dropped += len(self._pending)
        self._pending.clear()
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._disconnect()

    def _add(self, statement: str, row: tuple[Any, ...]) -> None:
        self._pending.append((statement, row))
        self._pending_values += _values_in(statement, row)

    def _add_ended(self) -> None:
        for statement, row in self._ended:
            self._add(statement, row)
        self._ended = []

    def _flush(self) -> None:
        """Writes all pending rows in one transaction; on failure they stay pending for the next call."""
        if time.monotonic() < self._retry_at_s:
            self._bound_pending()
            return
        try:
            self._store_pending()
        except _TROUBLE as error:
            if not self._replaced_damaged(error):
                self._fail(error)
                return
            try:
                self._store_pending()
            except _TROUBLE as again:
                self._fail(again)
                return
        self._pending.clear()
        self._pending_values = 0
        self._recovered()

    def _store_pending(self) -> None:
        connection = self._connected()
        connection.execute("BEGIN IMMEDIATE")
        series, newest_us = dict(self._series), self._newest_us
        rows_of: dict[str, list[tuple[Any, ...]]] = {}
        for statement, row in self._pending:
            rows: Iterable[tuple[Any, ...]] = (row,)
            if statement is _INSERT_SAMPLE:
                _add_series(connection, series, [name for name, *_ in row], self._table)
                rows = ((series[name], *rest) for name, *rest in row)
                us = round(row[0][1] * _US)
                if us > newest_us and max(series.values()) <= _MOST_SERIES:
                    newest_us, rows = us, ((us, row[0][2], _packed(series, row)),)
                else:
                    statement = _INSERT_POINT
            elif statement not in (_INSERT_EVENT, _INSERT_EVALUATION):
                _add_series(connection, series, [row[0]], self._table)
                rows = ((series[row[0]], *row[1:]),)
            rows_of.setdefault(statement, []).extend(rows)
        for statement, found in rows_of.items():
            connection.executemany(statement, found)
        connection.execute("COMMIT")
        self._series, self._newest_us = series, newest_us

    def _bound_pending(self) -> None:
        """Drops the oldest rows where too much waits: samples first, whose roll-ups stay, evaluations last."""
        if self._pending_values <= _MAX_PENDING:
            return
        rollups = tuple(rollup.insert for rollup in self._rollups)
        for dropped in ((_INSERT_SAMPLE,), rollups, (_INSERT_EVENT,), (_INSERT_EVALUATION,)):
            kept, events = [], 0
            for statement, row in self._pending:
                events += statement is _INSERT_EVENT
                first = statement is _INSERT_EVENT and events <= _FIRST_EVENTS
                if statement in dropped and not first and self._pending_values > _MAX_PENDING // 2:
                    self._pending_values -= _values_in(statement, row)
                    self.rows_dropped += 1
                else:
                    kept.append((statement, row))
            self._pending = kept

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._connect(self._path)
            try:
                known = self._connection.execute("SELECT name, id FROM series")
                self._series = {str(name): int(number) for name, number in known}
                (newest_us,) = self._connection.execute("SELECT max(us) FROM samples").fetchone()
                self._newest_us = -math.inf if newest_us is None else int(newest_us)
                if not self._ended and not any(rollup.rows() for rollup in self._rollups):
                    self._restore(self._connection)
            except (ValueError, TypeError, OverflowError) as error:  # a value is not of its column's type
                raise _damaged(error) from None
        return self._connection

    def _restore(self, connection: sqlite3.Connection) -> None:
        """Rebuilds the open buckets, and those that a crash kept from being stored, from the raw values."""
        raw = _Raw(lambda sql, *arguments: connection.execute(sql, arguments).fetchall())
        for (table, width_s, _), rollup in zip(TIERS, self._rollups, strict=True):
            (bucket,) = connection.execute(f"SELECT max(bucket) FROM {table}").fetchone()
            begin_t = math.nextafter((bucket or 0) * width_s, -math.inf)
            points = [
                (name, float(t), int(step), float(value))
                for name, number in self._series.items()
                for t, step, value in raw.column(number, begin_t).tolist()
            ]
            for point in sorted(points, key=lambda point: point[1]):
                self._ended += [(rollup.insert, row) for row in rollup.add([point], point[1])]

    def _remove_old(self, t: float) -> None:
        """Deletes old rows, and once an hour folds the log into the file."""
        self._kept_t = t
        if self._connection is None:
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            if t > RAW_S:
                self._connection.execute("DELETE FROM samples WHERE us < ?", (round((t - RAW_S) * _US),))
            for table, keep_s, oldest in (("points", RAW_S, "t < ?"), *_TIER_AGES):
                if t > keep_s:
                    rows = [(series, t - keep_s) for series in self._series.values()]
                    self._connection.executemany(f"DELETE FROM {table} WHERE series = ? AND {oldest}", rows)
            self._connection.execute("COMMIT")
            if t - self._checkpoint_t >= _CHECKPOINT_S:
                self._checkpoint_t = t
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            if not self._replaced_damaged(error):
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self.trouble = clean(f"{self._path.name}: {error}")
        now_s = time.monotonic()
        self._retry_at_s = now_s + _RETRY_S
        if self._trouble_since_s is None:
            self._trouble_since_s, self._lost_before = now_s, self.rows_dropped
        code = _code(error)
        if not self._trouble_told and (code not in _HELD or now_s - self._trouble_since_s >= _BUSY_S):
            self._trouble_told = True
            text = f"metrics are not stored ({self.trouble}): they are kept in memory, the newest {_MAX_PENDING:,}"
            remedy = _REMEDIES.get(code or 0, "check the disk and the file")
            self._reports.append(("warning", f"{text} values at most; {remedy}"))
        self._disconnect()
        self._bound_pending()

    def _recovered(self) -> None:
        """Reports the end of a trouble that was reported, with the rows that it cost."""
        if self._trouble_told and self._trouble_since_s is not None:
            lost, took_s = self.rows_dropped - self._lost_before, time.monotonic() - self._trouble_since_s
            cost = f"{lost:,} rows of them were lost" if lost else "none of them was lost"
            text = f"metrics are stored again after {took_s:.0f} s; {cost}"
            self._reports.append(("warning" if lost else "info", text))
        self.trouble, self._trouble_since_s, self._trouble_told = None, None, False

    def _replaced_damaged(self, error: Exception) -> bool:
        """Renames a damaged file; whether a new one can be begun. No earlier damaged file is overwritten."""
        if not self._path.is_dir() and not (self._path.is_file() and _code(error) in _DAMAGE):
            return False
        self._disconnect()
        first = f"{self._path.name}.damaged"
        names = (first, *(f"{first}-{count}" for count in range(2, _MOST_DAMAGED + 1)))
        free = next((name for name in names if not os.path.lexists(self._path.with_name(name))), None)
        if free is None:
            return False
        try:
            for suffix in ("-wal", "-shm"):  # the log of the damaged file: it may hold what the file lacks
                if os.path.lexists(log := self._path.with_name(self._path.name + suffix)):
                    log.replace(self._path.with_name(free + suffix))
            self._path.replace(self._path.with_name(free))
        except OSError:
            return False
        self.set_aside.append(self._path.with_name(free))
        why = "is a folder" if self.set_aside[-1].is_dir() else f"is damaged ({clean(error, 200)})"
        text = f"{self._path.name} {why}: it was renamed to {free}, and a new file was started; earlier curves are in"
        self._reports.append(("warning", f"{text} the old file"))
        return True

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


_TROUBLE = (sqlite3.Error, OSError, ValueError, TypeError, OverflowError)  # failures of a transaction
_DAMAGE = (
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
)
"""SQLite's codes for a file that is no database, is damaged, or has other tables than ours."""
_HELD = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_REMEDIES = {
    **dict.fromkeys((sqlite3.SQLITE_FULL, sqlite3.SQLITE_TOOBIG), "free some disk space"),
    **dict.fromkeys(
        (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH),
        "make the file and its directory writable",
    ),
    **dict.fromkeys(_HELD, "stop the program that locks the file"),
}


def _code(error: Exception) -> int | None:
    """SQLite's primary error code."""
    found = getattr(error, "sqlite_errorcode", None)
    return None if found is None else int(found) & 0xFF


def _values_in(statement: str, row: tuple[Any, ...]) -> int:
    return len(row) if statement is _INSERT_SAMPLE else 1


def _packed(series: Mapping[str, int], points: Iterable[tuple[str, float, int, float]]) -> bytes:
    """The values of a sample by the numbers of their series."""
    values = {series[name]: value for name, _, _, value in points}
    data = np.full(max(values), math.nan, "<f8")
    data[[number - 1 for number in values]] = list(values.values())
    return data.tobytes()


def _add_series(
    connection: sqlite3.Connection, series: dict[str, int], names: Iterable[str], table: MetricTable
) -> None:
    """Gives every new name the next free number, in ``series`` and in the file."""
    for name in names:
        if name not in series:
            series[name] = 1 + max(series.values(), default=0)
            metric = table.by_name(name)
            connection.execute(_INSERT_SERIES, (series[name], name, metric.unit, metric.meaning))


def _open_for_writing(path: Path) -> sqlite3.Connection:
    """A connection to a file with our tables, checked for damage where it is not new."""
    connection = sqlite3.connect(path, timeout=0.2, isolation_level=None)
    try:
        known = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if (found := _format(connection)) > FORMAT:
            raise sqlite3.DatabaseError(f"it has format {found}, this version of Spreeze writes {FORMAT}")
        connection.execute("PRAGMA page_size = 1024")  # a commit touches a page or two
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.execute("PRAGMA secure_delete = OFF")  # else what is deleted is written once more, as zeros
        for statement in _SCHEMA:
            connection.execute(statement)
        if known:
            _check(connection)
        else:
            connection.execute(f"PRAGMA user_version = {FORMAT}")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _format(connection: sqlite3.Connection) -> int:
    """Format number of a file; 0 in a new one."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    return int(found)


def _check(connection: sqlite3.Connection) -> None:
    """Raises a DatabaseError for a damaged file, as far as that is found in ``_CHECK_S``."""
    deadline_s = time.monotonic() + _CHECK_S
    connection.set_progress_handler(lambda: int(time.monotonic() > deadline_s), 100_000)
    try:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as error:
        if _code(error) != sqlite3.SQLITE_INTERRUPT:
            raise
        found = "ok"
    finally:
        connection.set_progress_handler(None, 0)
    if found != "ok":
        raise _damaged(str(found).strip().splitlines()[-1])


def _damaged(why: object) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(str(why))
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


# --- reading ---

_QUERY_TIMEOUT_S = 5.0
_MAX_ROWS = 500_000

_SLICE_ROWS = 1000
_MAX_RAW_BYTES = 200_000_000

Query = Callable[..., list[tuple[Any, ...]]]
"""SQL and its arguments -> all rows."""


class _Raw:
    """The raw values of a file. Samples are read once, from the earliest time that was requested on."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._from_us = math.inf
        self._t = self._step = np.empty(0)
        self._values = np.empty((0, 0))

    def column(self, number: int, after: float) -> np.ndarray:
        """The (t, step, value) of a series [n, 3], later than ``after``, oldest first."""
        t, step, value = self._sampled(number, after)
        rows = self._query("SELECT t, step, value FROM points WHERE series = ? AND t > ? ORDER BY t", number, after)
        table = np.column_stack([t, step, value])
        if rows:
            table = np.concatenate([np.array(rows, np.float64).reshape(-1, 3), table])
            # Of two values of one time a point is the later one, and np.unique keeps the first.
            table = table[np.unique(table[:, 0], return_index=True)[1]]
        return table

    def newest(self, number: int, after: float) -> tuple[float, int, float] | None:
        """The last (t, step, value) of a series that is later than ``after``."""
        t, step, value = self._sampled(number, after)
        ask = "SELECT t, step, value FROM points WHERE series = ? ORDER BY t DESC LIMIT 1"
        found = [(float(at), int(steps), float(last)) for at, steps, last in self._query(ask, number)]
        found += [(float(t[-1]), int(step[-1]), float(value[-1]))] if len(t) else []
        return max(found, key=lambda row: row[0], default=None)

    def _sampled(self, number: int, after: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._read(after)
        if not 0 < number <= self._values.shape[1]:
            return np.empty(0), np.empty(0), np.empty(0)
        value = self._values[:, number - 1]
        known = np.isfinite(value) & (self._t > after)
        return self._t[known], self._step[known], value[known]

    def _read(self, after: float) -> None:
        begin_us = math.floor(max(-(2.0**62), min(after * _US, 2.0**62)))
        if begin_us >= self._from_us:
            return
        rows, size_bytes, next_us = list[tuple[Any, ...]](), 0, begin_us
        ask = "SELECT us, step, data FROM samples WHERE us >= ? AND length(data) <= ? ORDER BY us LIMIT ?"
        while found := self._query(ask, next_us, 8 * _MOST_SERIES, _SLICE_ROWS):
            rows += found
            next_us, size_bytes = int(found[-1][0]) + 1, size_bytes + sum(len(data) for *_, data in found)
            if size_bytes > _MAX_RAW_BYTES:
                raise ValueError(f"more than {_MAX_RAW_BYTES / 1e6:.0f} MB of samples")
        width = max((len(data) for *_, data in rows), default=0) // 8
        joined = b"".join(
            data if len(data) == 8 * width else data + _NAN * (width - len(data) // 8) for *_, data in rows
        )
        self._values = np.frombuffer(joined, "<f8").reshape(len(rows), width)
        self._t = np.array([us for us, *_ in rows], np.float64) / _US
        self._step = np.array([step for _, step, _ in rows], np.float64)
        self._from_us = begin_us


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
        self._shared: tuple[Query, _Raw] | None = None

    def names(self) -> list[str]:
        """Returns the names of all series, in order of appearance."""
        with self._session() as query:
            return [str(name) for (name,) in query("SELECT name FROM series ORDER BY id")]

    def series(self, name: str, since: float = 0.0, max_points: int = 1000) -> Series:
        """A series from ``since`` (seconds since the run started) on, in at most ``max_points`` buckets.

        Raises:
            RunError: the file is damaged or takes too long to read.
        """
        with self._session() as query:
            found = query("SELECT id, unit, meaning FROM series WHERE name = ?", name)
            if not found:
                return _bucketed((name, "", ""), np.empty((0, 5)), max_points)
            number, unit, meaning = found[0]
            rows = _rows(query, self._raw(query), number, since, max_points)
            return _bucketed((name, str(unit), str(meaning)), rows, max_points)

    def whole_series(self, name: str) -> Series:
        """Returns a series in full: roll-ups, then all raw points; errors as ``series``."""
        with self.held() as reader:
            found = reader.series(name, max_points=_MAX_ROWS)
            points = np.array(reader.tail([name], -1.0, _MAX_ROWS).get(name, []), np.float64).reshape(-1, 3)
        # The series may start its points with a roll-up over the first of them.
        older = found.t < (points[0, 0] if len(points) else math.inf)
        t, step, value = points.T
        columns = zip(found[3:], (t, step, value, value, value), strict=True)
        return Series(*found[:3], *(np.concatenate([column[older], raw]) for column, raw in columns))

    def latest(self) -> dict[str, Point]:
        """The newest value of every series, however old."""
        newest: dict[str, Point] = {}
        table, width_s, _ = TIERS[-1]
        ask = f"SELECT t, step, last, bucket FROM {table} WHERE series = ? ORDER BY bucket DESC LIMIT 1"
        with self._session() as query:
            series, raw = query("SELECT id, name FROM series ORDER BY id"), self._raw(query)
            rolled = {number: row for number, _ in series for row in query(ask, number)}
            # The roll-ups of a bucket are written together: what they lack is in its raw values or in later ones.
            after = max((float(bucket) * width_s for *_, bucket in rolled.values()), default=0.0)
            for number, name in series:
                point = raw.newest(number, math.nextafter(after, -math.inf))
                t, step, value = max(
                    (row[:3] for row in (rolled.get(number), point) if row is not None),
                    key=lambda row: float(row[0]),
                    default=(None, 0, 0.0),
                )
                if t is not None:
                    newest[str(name)] = Point(float(t), int(step), float(value))
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
            numbers, raw = dict(query("SELECT name, id FROM series")), self._raw(query)
            for name in names:
                rows = raw.column(int(numbers.get(name, -1)), since)[-limit:]
                if len(rows):
                    found[name] = [Point(t, int(step), value) for t, step, value in rows.tolist()]
        return found

    def evaluations(self, after: int = 0) -> list[EvaluationRow]:
        """Returns evaluations, oldest first, without the first ``after``."""
        with self._session() as query:
            return [_evaluation(row) for row in query(f"SELECT {_FIELDS} FROM evaluations WHERE rowid > ?", int(after))]

    def extreme_evaluations(self, after: int, last: int, groups: int) -> list[EvaluationRow]:
        """Worst and best in each of at most ``groups`` equal parts of evaluations ``after + 1`` to ``last``."""
        width = max(1, math.ceil((last - after) / max(1, groups)))
        # SQLite takes the other columns from the row that has the minimum or maximum.
        ask = " UNION ".join(
            f"SELECT {_FIELDS} FROM (SELECT {_FIELDS}, {which}(return_mean) FROM evaluations WHERE rowid > ? "
            f"AND rowid <= ? GROUP BY (rowid - 1 - ?) / ?)"
            for which in ("min", "max")
        )
        with self._session() as query:
            return [_evaluation(row) for row in query(f"{ask} ORDER BY t", *(2 * (after, last, after, width)))]

    def last_evaluation(self) -> tuple[int, EvaluationRow | None]:
        """The number of evaluations, and the newest one."""
        with self._session() as query:
            rows = query(f"SELECT rowid, {_FIELDS} FROM evaluations ORDER BY rowid DESC LIMIT 1")
            return (int(rows[0][0]), _evaluation(rows[0][1:])) if rows else (0, None)

    def best_evaluation(self) -> EvaluationRow | None:
        """The evaluation with the highest mean return."""
        with self._session() as query:
            rows = query(f"SELECT {_FIELDS} FROM evaluations ORDER BY return_mean DESC LIMIT 1")
            return _evaluation(rows[0]) if rows else None

    @contextlib.contextmanager
    def held(self) -> Iterator[MetricsReader]:
        """A reader for several queries: its calls share one connection and one time limit."""
        with self._session() as query:
            shared = MetricsReader(self._path, self._timeout_s)
            shared._shared = query, _Raw(query)
            try:
                yield shared
            finally:
                shared._shared = None

    @contextlib.contextmanager
    def _session(self) -> Iterator[Query]:
        """One short-lived connection with a time limit; every failure becomes a RunError."""
        if self._shared is not None:
            yield self._shared[0]
            return
        if not self._path.is_file() or self._path.stat().st_size == 0:
            yield lambda sql, *arguments: []
            return
        deadline_s = time.monotonic() + self._timeout_s
        try:
            with contextlib.closing(self._open()) as connection:
                refuse_newer(_format(connection), FORMAT, self._path, RunError)
                connection.set_progress_handler(lambda: int(time.monotonic() > deadline_s), 20_000)
                yield lambda sql, *arguments: _fetched(connection, sql, arguments)
        except (sqlite3.Error, OSError, OverflowError, TypeError, ValueError) as error:
            raise RunError(f"{self._path} cannot be read: {clean(error)}; see the log of the run") from None

    def _raw(self, query: Query) -> _Raw:
        """The raw values; with ``held`` those that the calls share."""
        return _Raw(query) if self._shared is None else self._shared[1]

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


def _rows(query: Query, raw: _Raw, number: int, since: float, max_points: int) -> np.ndarray:
    """(t, step, mean, min, max) by time, from the coarsest tables that are still fine enough.

    60 s roll-ups up to the first 10 s one, these up to the first raw value, then raw values. If a roll-up already gives
    a row per bucket, only its unfinished tail comes from finer tables.
    """
    (start, width, _), (coarse, coarse_width, _) = TIERS[0], TIERS[1]
    fine_from = _first(query(f"SELECT min(bucket) FROM {start} WHERE series = ?", number)) * width
    rolled_until = _first(query(f"SELECT max(t) FROM {coarse} WHERE series = ?", number), since)
    newest = raw.newest(number, rolled_until)
    bucket_s = (max(rolled_until, since if newest is None else newest[0]) - since) / max(1, max_points)
    raw_from = math.inf
    if bucket_s < width:
        values = raw.column(number, -math.inf)
        raw_from = values[0, 0] if len(values) else math.inf
    plan = ((coarse, coarse_width, math.inf if bucket_s >= coarse_width else fine_from), (start, width, raw_from))
    found = [np.empty((0, 5))]
    covered = math.nextafter(since, -math.inf)
    for table, tier_s, until in plan:
        first = math.floor(since / tier_s) if len(found) == 1 else math.floor(covered / tier_s) + 1
        last = min(until / tier_s, float(2**53))
        begun = _first(query(f"SELECT min(bucket) FROM {table} WHERE series = ?", number))
        if begun >= math.floor(last):  # the series started within this bucket: finer rows have all of it
            last = math.floor(last)
        ask = f"SELECT t, step, mean, min, max FROM {table} WHERE series = ? AND bucket >= ? AND bucket < ? AND t > ?"
        rows = query(f"{ask} ORDER BY bucket", number, first, last, covered)
        if rows:
            found.append(np.array(rows, np.float64).reshape(-1, 5))
            covered = found[-1][-1, 0]
    return np.concatenate([*found, raw.column(number, covered)[:, [0, 1, 2, 2, 2]]])


def _first(found: list[tuple[Any, ...]], otherwise: float = math.inf) -> float:
    return float(found[0][0]) if found and found[0][0] is not None else otherwise


def _bucketed(head: tuple[str, str, str], table: np.ndarray, max_points: int) -> Series:
    """At most ``max_points`` buckets of equal time of rows [n, 5]; a bucket keeps its lowest and highest value."""
    if len(table) > max_points:
        t = table[:, 0]
        edges = np.searchsorted(t, np.linspace(t[0], t[-1], max_points, endpoint=False))
        starts = np.unique(edges)
        counts = np.diff(np.append(starts, len(table)))
        last = starts + counts - 1
        mean = np.add.reduceat(table[:, 2], starts) / counts
        low, high = np.minimum.reduceat(table[:, 3], starts), np.maximum.reduceat(table[:, 4], starts)
        table = np.column_stack([table[last, 0], table[last, 1], mean, low, high])
    t, step, mean, low, high = table.T
    return Series(*head, t, step, mean, low, high)
