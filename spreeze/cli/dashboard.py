"""``spreeze dashboard``: the page in a browser, as ``streamlit run app.py`` starts it from a checkout."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from spreeze.cli.arguments import Parser, guarded
from spreeze.config import SHIPPED
from spreeze.errors import ResourceError


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m spreeze dashboard",
        description="Serve the dashboard on this machine. The address in the terminal ends in a token that works once.",
    )
    parser.flag("--port", text="port to listen on", default=8501, metavar="N")
    parser.flag("--runs-dir", text="directory of runs", shown="$SPREEZE_RUNS_DIR, else runs", metavar="DIR")
    parser.add_import()
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return guarded(lambda: _serve(args.port, args.runs_dir, args.import_module))


def _serve(port: int, runs_dir: str | None, module: str | None) -> int:
    """Replaces this process by the server, so that signals and the exit code are the server's."""
    app = SHIPPED / "app.py"
    if not app.is_file():
        raise ResourceError(f"no {app}: reinstall Spreeze, of which this file is a part")
    if runs_dir is not None:
        os.environ["SPREEZE_RUNS_DIR"] = runs_dir
    more = [] if module is None else ["--", "--import", module]
    command = [sys.executable, "-m", "streamlit", "run", str(app), f"--server.port={port}", *more]
    os.execv(sys.executable, command)
