"""Writes the metrics of a run: its tables, and the only writer, which is part of the supervisor.

Roll-ups are written every ten minutes; those still in memory are rebuilt from the raw values after a crash.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.formatting import clean
from spreeze.metrics.store import (
    FORMAT,
    MAX_SERIES,
    RAW_S,
    RENAMED_SERIES,
    TIERS,
    US,
    EvaluationRow,
    RawValues,
    format_number,
)
from spreeze.metrics.table import TABLE

_TIER_AGES = tuple((table, keep_s, f"bucket < ? / {width_s}") for table, width_s, keep_s in TIERS if keep_s < math.inf)
_MAX_PENDING = 200_000  # most values kept in memory while the file cannot be written
_FIRST_EVENTS = 100  # events that are never dropped, because the first ones show what went wrong
_RETRY_S = 1.0
_BUSY_S = 3.0  # time that another program may lock the file before it is reported [s]
_UPKEEP_S = 600.0  # time between two writes of roll-ups, each followed by the removal of old rows
_CHECKPOINT_S = 3600.0
_CHECK_S = 2.0  # longest check of an existing file for damage
_MAX_DAMAGED = 9  # most damaged files that are kept beside the file
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
_SELECT_SERIES, _RENAME_SERIES = "SELECT name, id FROM series", "UPDATE OR IGNORE series SET name = ? WHERE name = ?"
_INSERT_SERIES = "INSERT INTO series VALUES (?, ?, ?, ?)"
_INSERT_SAMPLE = "INSERT INTO samples VALUES (?, ?, ?)"
_INSERT_POINT = "INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?)"
_INSERT_EVENT = "INSERT INTO events VALUES (?, ?, ?, ?)"
_INSERT_EVALUATION = "INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


class _Rollup:
    def __init__(self, table: str, width_s: float) -> None:
        self.insert = f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self._width_s = width_s
        self._bucket = 0
        self._points: dict[str, list[tuple[float, int, float]]] = {}

    def add(self, points: Iterable[tuple[str, float, int, float]], t: float) -> list[tuple[Any, ...]]:
        """Adds points of time ``t``, late ones to the open bucket; returns the rows of buckets that ended before."""
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
            t, step, last = max(reversed(points), key=lambda point: point[0])  # of equal times, the last added
            values = [value for _, _, value in points]
            spread = (min(values), max(values), sum(values) / len(values))
            rows.append((series, self._bucket, t, step, *spread, last, len(values)))
        return rows


class MetricsWriter:
    """The only writer of a run's metrics. Trouble with disk or file is reported, never raised."""

    def __init__(self, path: str | Path) -> None:
        """Opens or creates the file; a damaged one is renamed to ``*.damaged``."""
        self._path = Path(path)
        self._connection: sqlite3.Connection | None = None
        self._series: dict[str, int] = {}
        self._newest_us = -math.inf
        self._rollups = [_Rollup(table, width_s) for table, width_s, _ in TIERS]
        self._ended: list[tuple[str, tuple[Any, ...]]] = []  # roll-ups that are complete and not yet pending
        self._pending: list[tuple[str, tuple[Any, ...]]] = []
        self._pending_values = 0
        self._retry_at_s = 0.0
        self._upkeep_t = self._checkpoint_t = 0.0
        self._trouble_since_s: float | None = None
        self._trouble_reported = False
        self._lost_before = 0
        self._reports: list[tuple[str, str]] = []
        self.rows_dropped = 0
        """Rows (samples, events, evaluations, roll-ups) dropped because the trouble lasted too long."""
        self.trouble: str | None = None  # The last failure; None again once everything is stored.
        self._flush()

    def write(self, t: float, step: int, values: Mapping[str, float | None]) -> None:
        """Stores finite values of one time in one transaction; a KeyError if a name is not in the table of metrics."""
        for name in values:
            if name not in self._series:
                TABLE.by_name(name)
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
        upkeep_due = t - self._upkeep_t >= _UPKEEP_S
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
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """Writes all pending rows and closes the file; rows that cannot be written count as dropped."""
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
        for is_second in (False, True):
            try:
                self._store_pending()
                break
            except _TROUBLE as error:
                if is_second or not self._replaced_damaged(error):
                    self._fail(error)
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
                _add_series(connection, series, [name for name, *_ in row])
                rows = ((series[name], *rest) for name, *rest in row)
                us = round(row[0][1] * US)
                if us > newest_us and max(series.values()) <= MAX_SERIES:
                    newest_us, rows = us, ((us, row[0][2], _packed(series, row)),)
                else:
                    statement = _INSERT_POINT
            elif statement not in (_INSERT_EVENT, _INSERT_EVALUATION):
                _add_series(connection, series, [row[0]])
                rows = ((series[row[0]], *row[1:]),)
            rows_of.setdefault(statement, []).extend(rows)
        for statement, statement_rows in rows_of.items():
            connection.executemany(statement, statement_rows)
        connection.execute("COMMIT")
        self._series, self._newest_us = series, newest_us

    def _bound_pending(self) -> None:
        """Drops the oldest rows if too many are pending: samples first (their roll-ups stay), evaluations last."""
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
            self._connection = _open_for_writing(self._path)
            try:
                known = {str(name): int(number) for name, number in self._connection.execute(_SELECT_SERIES)}
                for old in RENAMED_SERIES.keys() & known:
                    self._connection.execute(_RENAME_SERIES, (RENAMED_SERIES[old], old))
                self._series = {RENAMED_SERIES.get(name, name): number for name, number in known.items()}
                (newest_us,) = self._connection.execute("SELECT max(us) FROM samples").fetchone()
                self._newest_us = -math.inf if newest_us is None else int(newest_us)
                if not self._ended and not any(rollup.rows() for rollup in self._rollups):
                    self._restore(self._connection)
            except (ValueError, TypeError, OverflowError) as error:  # a value is not of its column's type
                raise _damaged(error) from None
        return self._connection

    def _restore(self, connection: sqlite3.Connection) -> None:
        """Rebuilds the open buckets, and those that a crash kept from being stored, from the raw values."""
        raw = RawValues(lambda sql, *arguments: connection.execute(sql, arguments).fetchall())
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
        self._upkeep_t = t
        if self._connection is None:
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            if t > RAW_S:
                self._connection.execute("DELETE FROM samples WHERE us < ?", (round((t - RAW_S) * US),))
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
        self.trouble = clean(f"{self._path.name}: {error}")
        now_s = time.monotonic()
        self._retry_at_s = now_s + _RETRY_S
        if self._trouble_since_s is None:
            self._trouble_since_s, self._lost_before = now_s, self.rows_dropped
        code = _code(error)
        if not self._trouble_reported and (code not in _LOCKED or now_s - self._trouble_since_s >= _BUSY_S):
            self._trouble_reported = True
            text = f"metrics are not stored ({self.trouble}): they are kept in memory, the newest {_MAX_PENDING:,}"
            remedy = _REMEDIES.get(code or 0, "check the disk and the file")
            self._reports.append(("warning", f"{text} values at most; {remedy}"))
        self._disconnect()
        self._bound_pending()

    def _recovered(self) -> None:
        if self._trouble_reported and self._trouble_since_s is not None:
            lost, took_s = self.rows_dropped - self._lost_before, time.monotonic() - self._trouble_since_s
            cost = f"{lost:,} rows of them were lost" if lost else "none of them was lost"
            text = f"metrics are stored again after {took_s:.0f} s; {cost}"
            self._reports.append(("warning" if lost else "info", text))
        self.trouble, self._trouble_since_s, self._trouble_reported = None, None, False

    def _replaced_damaged(self, error: Exception) -> bool:
        """Renames a damaged file without overwriting an earlier one; returns whether a new file can be started."""
        if not self._path.is_dir() and not (self._path.is_file() and _code(error) in _DAMAGE):
            return False
        self._disconnect()
        first = f"{self._path.name}.damaged"
        names = (first, *(f"{first}-{count}" for count in range(2, _MAX_DAMAGED + 1)))
        free = next((name for name in names if not os.path.lexists(self._path.with_name(name))), None)
        if free is None:
            return False
        try:
            for suffix in ("-wal", "-shm"):  # the log of the damaged file may hold rows that the file lacks
                if os.path.lexists(log := self._path.with_name(self._path.name + suffix)):
                    log.replace(self._path.with_name(free + suffix))
            self._path.replace(self._path.with_name(free))
        except OSError:
            return False
        why = "is a folder" if self._path.with_name(free).is_dir() else f"is damaged ({clean(error, 200)})"
        text = f"{self._path.name} {why}: it was renamed to {free}, and a new file was started; earlier curves are in"
        self._reports.append(("warning", f"{text} the old file"))
        return True

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


_TROUBLE = (sqlite3.Error, OSError, ValueError, TypeError, OverflowError)  # failures of a transaction
_OTHER_TABLES = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH)
_DAMAGE = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, *_OTHER_TABLES)
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_REMEDIES = {
    **dict.fromkeys((sqlite3.SQLITE_FULL, sqlite3.SQLITE_TOOBIG), "free some disk space"),
    **dict.fromkeys(
        (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH),
        "make the file and its directory writable",
    ),
    **dict.fromkeys(_LOCKED, "stop the program that locks the file"),
}


def _code(error: Exception) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else int(code) & 0xFF


def _values_in(statement: str, row: tuple[Any, ...]) -> int:
    return len(row) if statement is _INSERT_SAMPLE else 1


def _packed(series: Mapping[str, int], points: Iterable[tuple[str, float, int, float]]) -> bytes:
    """The values of a sample, in order of their series' numbers."""
    values = {series[name]: value for name, _, _, value in points}
    data = np.full(max(values), math.nan, "<f8")
    data[[number - 1 for number in values]] = list(values.values())
    return data.tobytes()


def _add_series(connection: sqlite3.Connection, series: dict[str, int], names: Iterable[str]) -> None:
    """Gives every new name the next free number, in ``series`` and in the file."""
    for name in names:
        if name not in series:
            series[name] = 1 + max(series.values(), default=0)
            metric = TABLE.by_name(name)
            connection.execute(_INSERT_SERIES, (series[name], name, metric.unit, metric.meaning))


def _open_for_writing(path: Path) -> sqlite3.Connection:
    """A connection to a file with our tables, checked for damage where it is not new."""
    connection = sqlite3.connect(path, timeout=0.2, isolation_level=None)
    try:
        known = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if (version := format_number(connection)) > FORMAT:
            raise sqlite3.DatabaseError(f"it has format {version}, this version of Spreeze writes {FORMAT}")
        connection.execute("PRAGMA page_size = 1024")  # a commit touches a page or two
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.execute("PRAGMA secure_delete = OFF")  # otherwise deleted content is overwritten with zeros
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


def _check(connection: sqlite3.Connection) -> None:
    """Raises a DatabaseError for a damaged file, if the damage is found within ``_CHECK_S``."""
    deadline_s = time.monotonic() + _CHECK_S
    connection.set_progress_handler(lambda: int(time.monotonic() > deadline_s), 100_000)
    try:
        (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as error:
        if _code(error) != sqlite3.SQLITE_INTERRUPT:
            raise
        result = "ok"
    finally:
        connection.set_progress_handler(None, 0)
    if result != "ok":
        raise _damaged(str(result).strip().splitlines()[-1])


def _damaged(why: object) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(str(why))
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
