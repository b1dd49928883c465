"""``spreeze completion SHELL``: the script that lets a shell complete commands, flags, environments, settings and runs.

The script calls the program itself: with ``SPREEZE_COMPLETE`` set, it prints the completions of the last word instead
of executing the command line.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from spreeze.cli.arguments import COMPLETION_VARIABLE, Parser
from spreeze.config.algorithms import ALGORITHMS
from spreeze.config.modes import modes
from spreeze.config.profiles import NO_PROFILE, profile_names
from spreeze.config.schema import SECTIONS
from spreeze.envs.make import known_ids
from spreeze.machine.output import say, write
from spreeze.run_directory import list_runs

_BASH = """_spreeze() {
    local IFS=$'\\n'
    COMPREPLY=($(%s=1 spreeze "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _spreeze spreeze"""
_SCRIPTS = {
    "bash": _BASH,
    "zsh": "autoload -U +X bashcompinit && bashcompinit\n" + _BASH.replace(" && compopt -o nospace", " && true"),
    "fish": "complete -c spreeze -a '(env %s=1 spreeze (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'",
}
_INSTALL = {
    "bash": 'eval "$(spreeze completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(spreeze completion zsh)"   # in ~/.zshrc, below compinit',
    "fish": "spreeze completion fish > ~/.config/fish/completions/spreeze.fish",
}


def main(argv: Sequence[str] | None = None) -> int:
    lines = "; ".join(_INSTALL.values())
    parser = Parser(prog="python -m spreeze completion", description="Print a shell's completion script.", epilog=lines)
    parser.add_argument("shell", choices=tuple(_SCRIPTS), help="the shell")
    shell = parser.parse_args(argv).shell
    say(f"# {_INSTALL[shell]}\n{_SCRIPTS[shell] % COMPLETION_VARIABLE}")
    return 0


def complete(parser: argparse.ArgumentParser, words: Sequence[str]) -> NoReturn:
    """Prints the completions of a command line's last word, one a line, and exits."""
    write(sys.stdout, "".join(f"{text}\n" for text in candidates(parser, words)), keep=True)
    sys.stdout.flush()
    sys.exit(0)


def candidates(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Completions of the last word; none where the shell completes it, such as a file name."""
    *before, prefix = words or [""]
    runs_dir = next((after for word, after in itertools.pairwise(before) if word == "--runs-dir"), "runs")
    begin = 0
    for index, word in enumerate(before):
        if (subparser := _commands_of(parser).get(word)) is not None:
            parser, begin = subparser, index + 1
    flag = before[-1] if len(before) > begin else ""
    action = parser._option_string_actions.get(flag)
    if action is not None and action.nargs != 0:
        texts = _values(action, flag, Path(runs_dir))
    elif prefix.startswith("-"):
        texts = parser._option_string_actions
    else:
        texts = _positional(parser, before[begin:], Path(runs_dir))
    return sorted(text for text in {str(text) for text in texts} if text.startswith(prefix))


def _commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((action.choices for action in actions), {})


def _values(action: argparse.Action, flag: str, runs_dir: Path) -> Iterable[str]:
    end = ".sweep.json"
    known: dict[str, Callable[[], Iterable[str]]] = {
        "--env": known_ids,
        "--algo": lambda: ALGORITHMS,
        "--mode": modes,
        "--profile": lambda: (*profile_names(), NO_PROFILE),
        "--set": lambda: (f"{name}.{field}=" for name, kind in SECTIONS.items() for field in kind.__dataclass_fields__),
        "--resume": lambda: (*_runs(runs_dir), *(path.name.removesuffix(end) for path in runs_dir.glob(f"*{end}"))),
        "--like": lambda: _runs(runs_dir),
    }
    return action.choices or known.get(flag, tuple)()


def _positional(parser: argparse.ArgumentParser, before: Sequence[str], runs_dir: Path) -> Iterable[str]:
    if commands := _commands_of(parser):
        return commands
    if getattr(parser, "trains", False):
        return () if before else known_ids()  # ``train CartPole-v1``
    for action in parser._get_positional_actions():
        if action.choices:
            return action.choices
        if action.metavar == "RUN" or action.dest in ("run", "runs"):
            return _runs(runs_dir)
    return ()


def _runs(runs_dir: Path) -> Iterable[str]:
    from spreeze.cli.evaluate import pretrained_policies

    names = [path.name for path in list_runs(runs_dir)]
    return (*names, *(["latest"] if names else []), *pretrained_policies())
