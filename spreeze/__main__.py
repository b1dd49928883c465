"""``spreeze <command>``, or ``python -m spreeze <command>`` if the script is not on the path."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from spreeze import __version__
from spreeze.config import SHIPPED
from spreeze.errors import did_you_mean
from spreeze.machine.output import print_error, say, standard_streams

COMMANDS: dict[str, str] = {
    "train": "train an agent",
    "sweep": "train every combination of settings with several seeds, or search, and compare",
    "dashboard": "start, watch and compare runs in a browser",
    "tune": "measure this machine for a task and choose batch size, threads and samplers",
    "evaluate": "play greedy episodes of a run's weights: mean, interval, CSV, video",
    "play": "watch a run's policy in a window, or as a clip",
    "runs": "list, steer, stop and describe runs",
    "export": "write a run's policy as a file that runs without Spreeze, or its metrics as CSV",
    "query": "run SQL queries over metrics, evaluations, events and settings of a run",
    "report": "write one HTML file about a run, or about several compared",
    "push": "send a run's policy to a model hub, with a page about it",
    "pull": "take a policy from a model hub",
    "doctor": "say what this machine has and what is missing",
    "bench": "measure updates a second on a GPU by batch, precision and kind of launch",
    "completion": "print the script that completes commands, flags, environments and runs in a shell",
}


_ENTRIES = {"push": "hub:push", "pull": "hub:pull", "query": "runs:query", "report": "runs:report"}
"""Command -> module and function that implement it, where these are not ``COMMAND:main``."""


def main_of(command: str) -> Callable[[list[str]], int]:
    """The function that implements a command; imports its module."""
    module, _, name = _ENTRIES.get(command, f"{command}:main").partition(":")
    main_function: Callable[[list[str]], int] = getattr(importlib.import_module(f"spreeze.cli.{module}"), name)
    return main_function


def main(argv: list[str] | None = None) -> int:
    with standard_streams():
        return _main(argv)


def _main(argv: list[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if "SPREEZE_COMPLETE" in os.environ and len(arguments) < 2:
        say("\n".join(command for command in COMMANDS if command.startswith("".join(arguments))))
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {command:10s} {text}" for command, text in COMMANDS.items()]
        text = "\n".join(
            ["usage: spreeze <command> [flags]", "", *lines, "", "spreeze <command> --help lists its flags"]
        )
        text += f"; documentation: {SHIPPED / 'assets' / 'docs'}"
        say(text)
        return 0
    command, *rest = arguments
    if command == "--version":
        say(f"spreeze {__version__}")
        return 0
    if command not in COMMANDS:
        print_error(f"no command '{command}'{did_you_mean(command, COMMANDS)} (commands: {', '.join(COMMANDS)})")
        return 2
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the import prints no traceback
    command_main = main_of(command)
    signal.signal(signal.SIGINT, previous_handler)
    return command_main(rest)


def run() -> NoReturn:
    """Entry point; exits when the command returns, even if an environment or a module has left threads running."""
    code = main()
    from spreeze.machine.processes import exit_process  # only now: Ctrl-C during an import would print a traceback

    exit_process(code)


if __name__ == "__main__":
    run()
