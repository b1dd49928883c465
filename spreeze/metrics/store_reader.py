"""Reads a run's metrics while it is being written, or long after; never writes, never hangs.

Every call opens the file, reads a little and closes it: a reader that stays open would keep the
writer's log from being folded back, and a file that is replaced or removed is noticed.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from spreeze.errors import RunError
from spreeze.formatting import clean
from spreeze.metrics.store import TIERS, EvaluationRow, Event

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
    """Read-only access to a ``metrics.db``. An absent or still empty file gives empty results."""

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
        """The newest events, oldest of them first."""
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
        """Worst and best of each of at most ``groups`` equal parts of those numbered ``after + 1`` to ``last``."""
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
        """How many evaluations there are, and the newest of them."""
        with self._session() as query:
            fields = ", ".join(EvaluationRow._fields)
            rows = query(f"SELECT rowid, {fields} FROM evaluations ORDER BY rowid DESC LIMIT 1")
            return (int(rows[0][0]), _evaluation(rows[0][1:])) if rows else (0, None)

    @contextlib.contextmanager
    def held(self) -> Iterator[MetricsReader]:
        """A reader for many questions at one moment: its calls share one connection and its time limit."""
        with self._session() as query:
            shared = MetricsReader(self._path, self._timeout_s)
            shared._shared = query
            try:
                yield shared
            finally:
                shared._shared = None

    @contextlib.contextmanager
    def _session(self) -> Iterator[Query]:
        """One short-lived connection under a time limit; every failure leaves it as a RunError."""
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
        """Read-only; a folder where no lock file can be made is taken as one that nobody writes."""
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

    60 s roll-ups up to where the 10 s ones begin, those up to where the raw points begin, then raw
    points. Where a roll-up already gives a row a bucket, only its unfinished tail comes from finer ones.
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
        rows += query(
            f"SELECT t, step, mean, min, max FROM {table} WHERE series = ? AND bucket >= ? AND bucket < ? AND t > ? "
            "ORDER BY bucket",
            number,
            first,
            last,
            covered,
        )
        covered = rows[-1][0] if rows else covered
    return rows + _raw(query, number, covered, end, max_points)


def _raw(query: Query, number: int, after: float, end: float, max_points: int) -> list[tuple[Any, ...]]:
    """Raw points later than ``after``; by buckets of equal time where there are more than ``max_points``."""
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
        table = np.column_stack(
            [
                table[last, 0],
                table[last, 1],
                np.add.reduceat(table[:, 2], starts) / counts,
                np.minimum.reduceat(table[:, 3], starts),
                np.maximum.reduceat(table[:, 4], starts),
            ]
        )
    t, step, mean, low, high = table.T
    return Series(*head, t, step, mean, low, high)
