"""``spreeze dashboard``: the page in a browser, as ``streamlit run app.py`` starts it from a checkout."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from spreeze.cli.arguments import Parser
from spreeze.config import SHIPPED
from spreeze.errors import ResourceError


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m spreeze dashboard",
        description="Serve the dashboard on this machine. The address in the terminal ends in a token that works once.",
    )
    parser.flag("--port", text="port to listen on", default=8501, metavar="N")
    parser.flag("--runs-dir", text="directory of runs", shown="$SPREEZE_RUNS_DIR, else runs", metavar="DIR")
    parser.add_import()
    return parser.run(argv, _serve)


def _serve(args: argparse.Namespace) -> int:
    """Replaces this process by the server, so that signals and the exit code are the server's."""
    app = SHIPPED / "app.py"
    if not app.is_file():
        raise ResourceError(f"no {app}: reinstall Spreeze, of which this file is a part")
    if args.runs_dir is not None:
        os.environ["SPREEZE_RUNS_DIR"] = args.runs_dir
    more = [] if args.import_module is None else ["--", "--import", args.import_module]
    command = [sys.executable, "-m", "streamlit", "run", str(app), f"--server.port={args.port}", *more]
    os.execv(sys.executable, command)
