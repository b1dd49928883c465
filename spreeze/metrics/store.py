"""Reads the metrics of a run from its SQLite file; there may be any number of readers.

Raw values are kept for an hour, 10 s roll-ups for a day, 60 s roll-ups forever. A sample is one row with the values of
all series, so a commit writes one or two pages however many series there are. A late value, which is older than the
newest sample, is a row of ``points``. In WAL mode, a reader never blocks the writer (``metrics.writer``). ``t`` is wall
seconds since the run started, ``step`` the env steps at that time.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from spreeze.errors import RunError, refuse_newer
from spreeze.formatting import clean
from spreeze.metrics import student_quantile

FORMAT = 1  # format number of ``metrics.db``, in its ``user_version``
RAW_S = 3600.0
TIERS: tuple[tuple[str, float, float], ...] = (("rollup_10s", 10.0, 86_400.0), ("rollup_60s", 60.0, math.inf))
"""(table, bucket width in s, how long it is kept in s), finest first."""

MAX_SERIES = 4096  # series whose values a sample can hold; others would be points
US = 1e6  # microseconds in a second
_NAN = struct.pack("<d", math.nan)
_NORMAL = 1.959963984540054  # 97.5 % quantile of the normal distribution


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

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the mean return (Student 1908); None for one episode."""
        degrees = self.episodes - 1  # the standard deviation is the population one
        return student_quantile(_NORMAL, degrees) * self.return_std / math.sqrt(degrees) if degrees > 0 else None


RENAMED_SERIES = {"times_back": "rollbacks"}
"""Series that earlier versions recorded by another name."""

_CASES = " ".join(f"WHEN '{old}' THEN '{new}'" for old, new in RENAMED_SERIES.items())
_SERIES = f"(SELECT id, CASE name {_CASES} ELSE name END AS name, unit, meaning FROM series)"
_FIELDS = ", ".join(EvaluationRow._fields)


class Event(NamedTuple):
    """An event of a run; ``level`` is info, warning or error."""

    t: float
    level: str
    source: str
    text: str


def format_number(connection: sqlite3.Connection) -> int:
    """Format number of a file; 0 in a new one."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


_QUERY_TIMEOUT_S = 5.0
_MAX_ROWS = 500_000

_SLICE_ROWS = 1000
_MAX_RAW_BYTES = 200_000_000

Query = Callable[..., list[tuple[Any, ...]]]  # SQL and its arguments -> all rows


class RawValues:
    """The raw values of a file. Samples are read once, from the earliest requested time on."""

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
            # Of a point and a sample at the same time, the point is newer; np.unique keeps the first.
            table = table[np.unique(table[:, 0], return_index=True)[1]]
        return table

    def newest(self, number: int, after: float) -> tuple[float, int, float] | None:
        """The last (t, step, value) of a series that is later than ``after``."""
        t, step, value = self._sampled(number, after)
        sql = "SELECT t, step, value FROM points WHERE series = ? ORDER BY t DESC LIMIT 1"
        rows = [(float(at), int(steps), float(last)) for at, steps, last in self._query(sql, number)]
        rows += [(float(t[-1]), int(step[-1]), float(value[-1]))] if len(t) else []
        return max(rows, key=lambda row: row[0], default=None)

    def _sampled(self, number: int, after: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._read(after)
        if not 0 < number <= self._values.shape[1]:
            return np.empty(0), np.empty(0), np.empty(0)
        value = self._values[:, number - 1]
        known = np.isfinite(value) & (self._t > after)
        return self._t[known], self._step[known], value[known]

    def _read(self, after: float) -> None:
        begin_us = math.floor(max(-(2.0**62), min(after * US, 2.0**62)))
        if begin_us >= self._from_us:
            return
        rows, size_bytes, next_us = list[tuple[Any, ...]](), 0, begin_us
        sql = "SELECT us, step, data FROM samples WHERE us >= ? AND length(data) <= ? ORDER BY us LIMIT ?"
        while batch := self._query(sql, next_us, 8 * MAX_SERIES, _SLICE_ROWS):
            rows += batch
            next_us, size_bytes = int(batch[-1][0]) + 1, size_bytes + sum(len(data) for *_, data in batch)
            if size_bytes > _MAX_RAW_BYTES:
                raise ValueError(f"more than {_MAX_RAW_BYTES / 1e6:.0f} MB of samples")
        width = max((len(data) for *_, data in rows), default=0) // 8
        joined = b"".join(data + _NAN * (width - len(data) // 8) for *_, data in rows)
        self._values = np.frombuffer(joined, "<f8").reshape(len(rows), width)
        self._t = np.array([us for us, *_ in rows], np.float64) / US
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

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._shared: tuple[Query, RawValues] | None = None

    def names(self) -> list[str]:
        """Returns the names of all series, in order of appearance."""
        with self._session() as query:
            return [str(name) for (name,) in query(f"SELECT name FROM {_SERIES} ORDER BY id")]

    def series(self, name: str, since: float = 0.0, max_points: int = 1000) -> Series:
        """A series from ``since`` (seconds since the run started) on, in at most ``max_points`` buckets.

        A RunError, here and below, if the file is damaged or takes too long to read.
        """
        with self._session() as query:
            head = query(f"SELECT id, unit, meaning FROM {_SERIES} WHERE name = ?", name)
            if not head:
                return _bucketed((name, "", ""), np.empty((0, 5)), max_points)
            number, unit, meaning = head[0]
            rows = _rows(query, self._raw(query), number, since, max_points)
            return _bucketed((name, str(unit), str(meaning)), rows, max_points)

    def whole_series(self, name: str) -> Series:
        """A series in full: roll-ups, then all raw points."""
        with self.connected() as reader:
            rolled = reader.series(name, max_points=_MAX_ROWS)
            points = np.array(reader.tail([name], -1.0, _MAX_ROWS).get(name, []), np.float64).reshape(-1, 3)
        # A roll-up may already cover the first raw points.
        older = rolled.t < (points[0, 0] if len(points) else math.inf)
        t, step, value = points.T
        columns = zip(rolled[3:], (t, step, value, value, value), strict=True)
        return Series(*rolled[:3], *(np.concatenate([column[older], raw]) for column, raw in columns))

    def latest(self) -> dict[str, Point]:
        """The newest value of every series, however old."""
        newest: dict[str, Point] = {}
        table, width_s, _ = TIERS[-1]
        sql = f"SELECT t, step, last, bucket FROM {table} WHERE series = ? ORDER BY bucket DESC LIMIT 1"
        with self._session() as query:
            series, raw = query(f"SELECT id, name FROM {_SERIES} ORDER BY id"), self._raw(query)
            rolled = {number: row for number, _ in series for row in query(sql, number)}
            # The roll-ups of a bucket are written together, so newer values exist as raw values.
            after = max((float(bucket) * width_s for *_, bucket in rolled.values()), default=0.0)
            for number, name in series:
                rows = [rolled.get(number), raw.newest(number, math.nextafter(after, -math.inf))]
                if known := [row for row in rows if row is not None]:
                    t, step, value, *_ = max(known, key=lambda row: float(row[0]))
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
        with self._session() as query:
            numbers, raw = dict(query(f"SELECT name, id FROM {_SERIES}")), self._raw(query)
            columns = {name: raw.column(int(numbers.get(name, -1)), since)[-limit:].tolist() for name in names}
            return {name: [Point(t, int(step), y) for t, step, y in rows] for name, rows in columns.items() if rows}

    def evaluations(self, after: int = 0) -> list[EvaluationRow]:
        """Returns evaluations, oldest first, without the first ``after``."""
        with self._session() as query:
            return [_evaluation(row) for row in query(f"SELECT {_FIELDS} FROM evaluations WHERE rowid > ?", int(after))]

    def last_evaluation(self) -> tuple[int, EvaluationRow | None]:
        """The number of evaluations, and the newest one."""
        with self._session() as query:
            rows = query(f"SELECT rowid, {_FIELDS} FROM evaluations ORDER BY rowid DESC LIMIT 1")
            return (int(rows[0][0]), _evaluation(rows[0][1:])) if rows else (0, None)

    def best_evaluation(self) -> EvaluationRow | None:
        """The evaluation with the highest mean return, of those with at least half of the most episodes.

        A last one may be cut to a few.
        """
        whole = "2 * episodes >= (SELECT max(episodes) FROM evaluations)"
        with self._session() as query:
            rows = query(f"SELECT {_FIELDS} FROM evaluations WHERE {whole} ORDER BY return_mean DESC LIMIT 1")
            return _evaluation(rows[0]) if rows else None

    def copy_to(self, target: Path) -> None:
        """Copies all values to a new file, with those that the writer has not moved into its own file yet."""
        try:
            with contextlib.closing(self._open()) as source, contextlib.closing(sqlite3.connect(target)) as copy:
                source.backup(copy)
        except (sqlite3.Error, OSError) as error:
            raise RunError(f"{self._path} cannot be copied: {clean(error)}; see the log of the run") from None

    @contextlib.contextmanager
    def connected(self) -> Iterator[MetricsReader]:
        """Yields a reader for several queries, which share one connection and one time limit."""
        with self._session() as query:
            shared = MetricsReader(self._path)
            shared._shared = query, RawValues(query)
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
        deadline_s = time.monotonic() + _QUERY_TIMEOUT_S
        try:
            with contextlib.closing(self._open()) as connection:
                refuse_newer(format_number(connection), FORMAT, self._path, RunError)
                connection.set_progress_handler(lambda: int(time.monotonic() > deadline_s), 20_000)
                yield lambda sql, *arguments: _fetched(connection, sql, arguments)
        except (sqlite3.Error, OSError, OverflowError, TypeError, ValueError) as error:
            raise RunError(f"{self._path} cannot be read: {clean(error)}; see the log of the run") from None

    def _raw(self, query: Query) -> RawValues:
        return RawValues(query) if self._shared is None else self._shared[1]

    def _open(self) -> sqlite3.Connection:
        """Opens read-only; a folder in which no lock file can be made counts as one without a writer."""
        uri = f"file:{quote(str(self._path.absolute()))}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, timeout=1.0, isolation_level=None)
        try:
            connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
        except sqlite3.OperationalError as error:
            connection.close()
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            return sqlite3.connect(f"{uri}&immutable=1", uri=True, isolation_level=None)
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


def _rows(query: Query, raw: RawValues, number: int, since: float, max_points: int) -> np.ndarray:
    """(t, step, mean, min, max) by time, from the coarsest tables that are still fine enough.

    60 s roll-ups up to the first 10 s one, these up to the first raw value, then raw values. Where a roll-up gives a
    row per bucket, only its unfinished tail comes from finer tables.
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
    parts = [np.empty((0, 5))]
    covered = math.nextafter(since, -math.inf)
    for table, tier_s, until in plan:
        first = math.floor(since / tier_s) if len(parts) == 1 else math.floor(covered / tier_s) + 1
        last = min(until / tier_s, float(2**53))
        first_bucket = _first(query(f"SELECT min(bucket) FROM {table} WHERE series = ?", number))
        if first_bucket >= math.floor(last):  # the series started within this bucket: finer rows have all of it
            last = math.floor(last)
        sql = f"SELECT t, step, mean, min, max FROM {table} WHERE series = ? AND bucket >= ? AND bucket < ? AND t > ?"
        rows = query(f"{sql} ORDER BY bucket", number, first, last, covered)
        if rows:
            parts.append(np.array(rows, np.float64).reshape(-1, 5))
            covered = parts[-1][-1, 0]
    return np.concatenate([*parts, raw.column(number, covered)[:, [0, 1, 2, 2, 2]]])


def _first(rows: list[tuple[Any, ...]], otherwise: float = math.inf) -> float:
    return float(rows[0][0]) if rows and rows[0][0] is not None else otherwise


def _bucketed(head: tuple[str, str, str], table: np.ndarray, max_points: int) -> Series:
    """At most ``max_points`` buckets of equal time of rows [n, 5]; a bucket keeps its lowest and highest value."""
    if len(table) > max_points:
        t = table[:, 0]
        starts = np.unique(np.searchsorted(t, np.linspace(t[0], t[-1], max_points, endpoint=False)))
        counts = np.diff(np.append(starts, len(table)))
        last = starts + counts - 1
        mean = np.add.reduceat(table[:, 2], starts) / counts
        low, high = np.minimum.reduceat(table[:, 3], starts), np.maximum.reduceat(table[:, 4], starts)
        table = np.column_stack([table[last, 0], table[last, 1], mean, low, high])
    t, step, mean, low, high = table.T
    return Series(*head, t, step, mean, low, high)
