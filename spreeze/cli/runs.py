"""``python -m spreeze runs``: lists runs, steers a live one, describes any.

``python -m spreeze query``: SQL over the records of a run, for scripts and people. Nothing is ever written.
``python -m spreeze report``: one HTML file of a run, or of several compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spreeze.cli.arguments import Parser, check_output, print_result
from spreeze.config.schema import TuningConfig
from spreeze.errors import RunError, UsageError
from spreeze.formatting import DASH, aligned, clean, duration, number, percent, size
from spreeze.machine.output import say
from spreeze.metrics.store import EvaluationRow, Event, MetricsReader
from spreeze.run_directory import (
    describe,
    find_live_run,
    find_run,
    is_alive,
    kill_supervisor,
    list_runs,
    misnamed_runs,
    read_about,
    read_config,
    read_run,
    send_request,
    state_of,
    steer,
)

_REQUESTS: dict[str, tuple[str, str]] = {
    "pause": ("paused", "suspend all processes of a run; replay and networks stay in memory"),
    "continue": ("running", "resume a paused run"),
    "evaluate": ("", "evaluate the newest policy now"),
    "checkpoint": ("", "write a checkpoint now"),
    "timeline": ("", "record the phases of all workers for 0.25 s, shown on the Live page"),
}
"""Command -> the state to wait for, and its help text."""
_RESPONSE_S = 10.0
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


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m spreeze runs", description="List, steer, stop and describe runs.")
    parser.add_common_flags()
    common = Parser(add_help=False)  # a command's flags may stand on either side of it
    common.add_common_flags(inherited=True)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="list all runs, oldest first (default)", parents=[common])

    def command(name: str, text: str) -> Parser:
        subparser = commands.add_parser(name, help=text, parents=[common])
        subparser.add_argument("run", help="name, path, or latest")
        return subparser

    stop = command("stop", "stop a run like Ctrl-C, and wait for its end")
    stop.flag("--timeout", text="how long to wait [s]", default=30.0, shown="30")
    stop.flag("--force", text="kill the supervisor and its workers", default=False)
    for name, (_, text) in _REQUESTS.items():
        command(name, text)
    share = command("leave-free", "change the share of the cores to leave free for other programs")
    share.add_argument("share", type=float, help="share of the usable cores, 0 to 0.9")
    about = command("describe", "set title, note and tags of a run; without flags, show them")
    about.flag("--title", text="title shown instead of the name; empty: the name", shown="unchanged")
    about.flag("--note", text="free text", shown="unchanged")
    about.flag("--tags", text="comma-separated tags, which replace the present ones", shown="unchanged")
    rest = command("visualizer", "pause or resume a run's visualizer")
    rest.add_argument("what", choices=("pause", "resume"))
    bodies = {"stop": _stop, "leave-free": _leave_free, "describe": _describe, "visualizer": _visualizer}
    bodies |= dict.fromkeys(_REQUESTS, _request)
    return parser.run(argv, lambda args: bodies.get(args.command, _list)(args))


def _list(args: argparse.Namespace) -> int:
    rows = [_row(path) for path in list_runs(Path(args.runs_dir))]
    for path in misnamed_runs(Path(args.runs_dir)):
        text = "a name may have letters, digits, '.', '_' and '-'; rename it"
        say(f"not listed: {clean(path.name, 80)}; {text}", as_json=args.json)
    no_run = f"no run in {args.runs_dir}; start one with: python -m spreeze.train --auto"
    return print_result(args, {"runs": rows}, _table(rows) if rows else no_run)


def _table(rows: list[dict[str, Any]]) -> str:
    lines: list[tuple[str, ...]] = [("run", "state", "wall", "env steps", "updates", "best return", "last ten")]
    for row in rows:  # run directories may come from elsewhere
        name, state, wall = clean(row["name"], 128), clean(row["state"], 20), duration(row["wall_s"])
        counts = (number(row[column]) for column in ("env_steps", "updates", "eval_best", "eval_final"))
        lines.append((name, state, wall, *counts))
    return "\n".join(aligned(lines))


def _row(path: Path) -> dict[str, Any]:
    run = read_run(path)
    names: tuple[str, ...] = ("env_id", "algo", "mode", "seed", "started")
    names += ("wall_s", "env_steps", "updates", "eval_best", "eval_final", "exit_reason")
    return {
        "name": path.name,
        "state": state_of(path),
        **{name: run.get(name) for name in names},
        **dataclasses.asdict(read_about(path)),
    }


def _stop(args: argparse.Namespace) -> int:
    path = find_live_run(args.run, Path(args.runs_dir))
    if args.force:
        kill_supervisor(path)
    else:
        send_request(path, "stop")
    deadline = time.monotonic() + args.timeout
    while is_alive(path):
        if time.monotonic() > deadline:
            left_bytes = read_run(path).get("checkpoint_left_bytes")
            writes = isinstance(left_bytes, int) and left_bytes > 0
            phase = f"still writes its last checkpoint, {size(left_bytes)} left," if writes else "still runs"
            raise RunError(
                f"{path.name} {phase} after {args.timeout:g} s (--timeout); spreeze runs stop --force kills it"
            )
        time.sleep(0.1)
    return _done(args, path, state_of(path))


def _request(args: argparse.Namespace) -> int:
    path = steer(args.run, Path(args.runs_dir), args.command)
    wanted, _ = _REQUESTS[args.command]
    deadline = time.monotonic() + _RESPONSE_S
    while wanted and state_of(path) != wanted:
        if time.monotonic() > deadline:
            raise RunError(f"{path.name} is {state_of(path)} after {_RESPONSE_S:g} s, not {wanted}")
        time.sleep(0.02)
    return _done(args, path, state_of(path) if wanted else "requested; the result will be in the event log")


def _leave_free(args: argparse.Namespace) -> int:
    path = find_live_run(args.run, Path(args.runs_dir))
    share = TuningConfig(leave_free=args.share).leave_free  # rejects a value out of range
    if read_run(path).get("leave_free") is None:
        raise RunError(f"{path.name}: this run has no CPU governor (its mode, or --no-governor): nothing changes")
    send_request(path, "leave-free", repr(share))
    return _done(
        args,
        path,
        f"samplers are paused as needed to leave {percent(share)} of the usable cores free for other programs",
    )


def _describe(args: argparse.Namespace) -> int:
    path = find_run(args.run, Path(args.runs_dir))
    given = {"title": args.title, "note": args.note, "tags": None if args.tags is None else args.tags.split(",")}
    about = describe(path, **{name: value for name, value in given.items() if value is not None})
    text = f"{path.name}: {about.title or path.name}; tags: {', '.join(about.tags) or DASH}; note: {about.note or DASH}"
    return print_result(args, {"run": path.name, **dataclasses.asdict(about)}, text)


def _done(args: argparse.Namespace, path: Path, text: str) -> int:
    return print_result(args, {"run": path.name, "state": state_of(path)}, f"{path.name}: {text}")


def _visualizer(args: argparse.Namespace) -> int:
    path = find_run(args.run, Path(args.runs_dir))
    if args.what == "pause":
        send_request(path, "pause-visualizer")
    else:
        (path / "control" / "pause-visualizer").unlink(missing_ok=True)
    text = f"{path.name}: visualizer {'paused' if args.what == 'pause' else 'resumed'}"
    return print_result(args, {"run": path.name, "visualizer": args.what}, text)


def query(argv: list[str] | None = None) -> int:
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
            connection.executemany(f"INSERT INTO {name} VALUES ({marks})", _recorded(run, name))
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


def _recorded(run: Path, table: str) -> Iterable[Sequence[Any]]:
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


def report(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m spreeze report",
        description="Write a self-contained HTML file: learning curves, rates, settings with their sources, the "
        "tuner's table, machine, versions, events.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="name, path, or latest; several are compared")
    text = "also report the time to this return, first reached and held"
    parser.flag("--target", text=text, shown="off", type=float, metavar="R")
    parser.add_centre()
    parser.flag("--out", text="output file", default="report.html", metavar="FILE")
    parser.add_common_flags()
    return parser.run(argv, _report)


def _report(args: argparse.Namespace) -> int:
    from spreeze.metrics import html_report  # loads what draws, for which the other commands do not wait

    check_output(args.out)
    paths = list(dict.fromkeys(find_run(run, Path(args.runs_dir)) for run in args.runs))
    targets = {} if args.target is None else {clean(read_run(path).get("env_id"), 200): args.target for path in paths}
    text = html_report.make(paths, targets=targets, robust=args.centre == "iqm")
    try:
        Path(args.out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {args.out}: {error.strerror}") from None
    document = {"report": args.out, "runs": [path.name for path in paths], "bytes": len(text.encode())}
    return print_result(args, document, f"{args.out}: open it in a browser")
