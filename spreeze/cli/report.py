"""``python -m spreeze report``: one HTML file of a run, or of several compared."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from spreeze.cli.arguments import Parser, check_output, print_result
from spreeze.errors import RunError
from spreeze.formatting import clean
from spreeze.metrics import html_report
from spreeze.run_directory import find_run, read_run


def main(argv: Sequence[str] | None = None) -> int:
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
