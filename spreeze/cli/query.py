"""``python -m spreeze query``: SQL over the records of a run, for scripts and people. Nothing is ever written."""

from __future__ import annotations

import argparse
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spreeze.cli.arguments import Parser, print_result
from spreeze.errors import UsageError
from spreeze.formatting import DASH, aligned, clean
from spreeze.metrics.store import EvaluationRow, Event, MetricsReader
from spreeze.run_directory import find_run, read_config, read_run

TABLES = {
    "metrics": ("wall_s", "env_steps", "metric", "unit", "mean", "min", "max"),
    "evaluations": EvaluationRow._fields,
    "events": Event._fields,
    "settings": ("name", "value"),
    "run": ("name", "value"),
}
"""The tables that a query sees, and their columns."""
_MAX_ROWS = 100_000
_LONGEST_S = 60.0
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


def main(argv: Sequence[str] | None = None) -> int:
    tables = "; ".join(f"{name} ({', '.join(columns)})" for name, columns in TABLES.items())
    parser = Parser(
        prog="python -m spreeze query",
        description=f"Answer a SQL query over a run, also while it goes on. Tables: {tables}.",
        epilog='Example: spreeze query latest "SELECT metric, avg(mean) FROM metrics GROUP BY metric"',
    )
    parser.add_argument("run", metavar="RUN", help="name, path, or latest")
    parser.add_argument("sql", metavar="SQL", help="one SELECT statement of SQLite")
    parser.add_common_flags()
    return parser.run(argv, _query)


def _query(args: argparse.Namespace) -> int:
    columns, rows = run_query(find_run(args.run, Path(args.runs_dir)), args.sql)

    def text() -> str:
        return "\n".join(aligned([[_shown(value) for value in row] for row in (columns, *rows)]))

    return print_result(args, {"columns": columns, "rows": rows}, text)


def _shown(value: object) -> str:
    if value is None:
        return DASH
    return f"{value:.6g}" if isinstance(value, float) else clean(str(value), 200)


def run_query(run: Path, sql: str) -> tuple[list[str], list[list[Any]]]:
    """Column names and rows of a query over the run in that directory.

    A UsageError if it is not one SELECT statement, has an unknown name, or takes too long or too many rows; a RunError
    if the run's record cannot be read.
    """
    connection = sqlite3.connect(":memory:")
    try:
        for name, columns in TABLES.items():
            connection.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
            marks = ", ".join("?" * len(columns))
            connection.executemany(f"INSERT INTO {name} VALUES ({marks})", _rows(run, name))
        deadline_s = time.monotonic() + _LONGEST_S
        connection.set_progress_handler(lambda: time.monotonic() > deadline_s, 100_000)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        cursor = connection.execute(sql)
        rows = [list(row) for row in cursor.fetchmany(_MAX_ROWS + 1)]
        names = [column[0] for column in cursor.description or ()]
    except (sqlite3.Error, sqlite3.Warning) as error:
        known = f"tables: {', '.join(TABLES)}; only SELECT is allowed; at most {_LONGEST_S:g} s"
        raise UsageError(f"SQL: {error} ({known})") from None
    finally:
        connection.close()
    if not names:
        raise UsageError("SQL: a SELECT statement is needed")
    if len(rows) > _MAX_ROWS:
        raise UsageError(f"SQL: more than {_MAX_ROWS:,} rows; add LIMIT, or use export --format csv")
    return names, rows


def _rows(run: Path, table: str) -> Iterable[Sequence[Any]]:
    reader = MetricsReader(run / "metrics.db")
    if table == "evaluations":
        return reader.evaluations()
    if table == "events":
        return reader.events(_MAX_ROWS)
    if table == "settings":
        sections = read_config(run).items()
        return [(f"{section}.{name}", _plain(value)) for section, fields in sections for name, value in fields.items()]
    if table == "run":
        return [(name, _plain(value)) for name, value in read_run(run).items()]
    return metric_rows(reader)


def metric_rows(reader: MetricsReader) -> Iterable[Sequence[Any]]:
    """Every recorded value, as the columns of ``metrics``."""
    for name in reader.names():
        series = reader.whole_series(name)
        columns: Iterable[Any] = zip(*(column.tolist() for column in series[3:]), strict=True)
        for wall_s, step, *values in columns:
            yield wall_s, int(step), name, series.unit, *values


def _plain(value: object) -> object:
    return value if isinstance(value, int | float | str | None) else repr(value)
