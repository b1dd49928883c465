"""``spreeze <verb>``, or ``python -m spreeze <verb>`` if the script is not on the path."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import NoReturn

from spreeze import __version__
from spreeze.config import SHIPPED
from spreeze.errors import did_you_mean
from spreeze.machine.output import print_error, say, standard_streams

VERBS: dict[str, str] = {
    "train": "train an agent",
    "sweep": "train every combination of settings with several seeds, or search, and compare",
    "dashboard": "start, watch and compare runs in a browser",
    "tune": "measure this machine for a task and choose batch size, threads and samplers",
    "evaluate": "play greedy episodes of a run's weights: mean, interval, CSV, video",
    "play": "watch a run's policy in a window, or as a clip",
    "runs": "list, steer, stop and describe runs",
    "export": "write a run's policy as a file that runs without Spreeze, or its metrics as CSV",
    "query": "answer SQL about metrics, evaluations, events and settings of a run",
    "report": "write one HTML file about a run, or about several compared",
    "push": "send a run's policy to a model hub, with a page about it",
    "pull": "take a policy from a model hub",
    "doctor": "say what this machine has and what is missing",
    "bench": "measure updates a second on a GPU by batch, precision and kind of launch",
    "completion": "print the script that completes verbs, flags, environments and runs in a shell",
}


def module_of(verb: str) -> str:
    """The module whose ``main`` implements a verb."""
    return f"spreeze.cli.{verb}"


def main(argv: list[str] | None = None) -> int:
    with standard_streams():
        return _main(argv)


def _main(argv: list[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if "SPREEZE_COMPLETE" in os.environ and len(arguments) < 2:
        say("\n".join(verb for verb in VERBS if verb.startswith("".join(arguments))))
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {verb:10s} {text}" for verb, text in VERBS.items()]
        text = "\n".join(["usage: spreeze <verb> [flags]", "", *lines, "", "spreeze <verb> --help tells more"])
        text += f"; documentation: {SHIPPED / 'assets' / 'docs'}"
        say(text)
        return 0
    verb, *rest = arguments
    if verb == "--version":
        say(f"spreeze {__version__}")
        return 0
    if verb not in VERBS:
        print_error(f"no verb '{verb}'{did_you_mean(verb, VERBS)} (verbs: {', '.join(VERBS)})")
        return 2
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the import prints no traceback
    module = importlib.import_module(module_of(verb))
    signal.signal(signal.SIGINT, previous_handler)
    code: int = module.main(rest)
    return code


def run() -> NoReturn:
    """Entry point; exits when the verb returns, even if an environment or a module has left threads running."""
    code = main()
    from spreeze.machine.processes import leave  # only now: Ctrl-C during an import would print a traceback

    leave(code)


if __name__ == "__main__":
    run()
