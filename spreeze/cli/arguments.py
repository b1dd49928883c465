"""Shared by the commands: the parser, one-line errors, and the command line of ``spreeze.train``.

A flag that sets a setting is declared with it, in ``config/schema.py``; only the other flags are added here.
Command lines as users of other libraries type them (``train CartPole``, ``--algo SAC``, ``--total-timesteps 100000``,
``--algo ppo --lr 1e-3``) are accepted where they are unambiguous; else the error says what to type.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from spreeze.config.algorithms import ALGORITHMS, rows
from spreeze.config.layers import OTHER_NAMES, SAMPLES_PER_INSERT_BOUNDS, Values, parse_assignment
from spreeze.config.schema import FLAG_OF, SECTIONS, SamplingConfig, field_of, kind_of
from spreeze.config.section import NO_LIMIT
from spreeze.errors import ConfigError, ResourceError, RunError, SpreezeError, UsageError
from spreeze.machine.output import emit, print_error, say

CHECKPOINTS = ("best", "latest")
COMPLETION_VARIABLE = "SPREEZE_COMPLETE"
"""Environment variable with which a command line is completed instead of executed (``completion``)."""


_GROUPS = {
    "task": ("env", "--env-arg", "--profile"),
    "learning": ("run.algo", "run.mode", "run.seed", "run.learners", "replay", "rollout.sync_interval", "gala",
                 "rollout.correction", "rollout.synchrony", "learner.batch_size", "--samples-per-insert", "--set"),
    "machine": ("sampling", "rollout", "learner", "cluster", "tuning", "--auto", "--fresh"),
    "stop and resume": ("stop", "--resume"),
    "output": ("run", "evaluation", "visualizer", "logging", "--callback", "--json"),
}  # fmt: skip
"""Groups of flags in the help text: settings, sections or flags; others stand with their section."""
_NEEDED_FIRST = (
    "--env", "--import", "--algo", "--seed", "--set", "--auto",
    "--seconds", "--env-steps", "--target-return", "--resume",
)  # fmt: skip
_SAME = dict.fromkeys(("--total-timesteps", "--n-timesteps", "--timesteps"), "--env-steps") | {
    "--algorithm": "--algo",
    "--env-id": "--env",
    "--buffer-size": "--replay-capacity",
    "--gym-packages": "--import",
}
"""Flags of other libraries, and ours of the same meaning."""
_SETTINGS = {
    f"--{name.replace('_', '-')}": OTHER_NAMES.get(name, name)
    for name in ("gamma", "tau", "lr", "gae_lambda", *OTHER_NAMES)
}
"""Flags that mean a setting of the algorithm."""
_AMBIGUOUS = dict.fromkeys(("--n-envs", "--num-envs"), "--samplers (processes) and --envs-per-sampler") | {
    "--steps": "--env-steps, or --updates for gradient steps",
    "--n-steps": "--sync-interval (env steps of each environment in a rollout), or --set ALGO.n_step for returns",
    "--learning-starts": "--set replay.learning_starts=N",
    "--tensorboard-log": "--log tensorboard",
    "--track": "--log wandb",
    "--env-kwargs": "--env-arg KEY=VALUE for each",
    "--hyperparams": "--set ALGO.NAME=VALUE for each",
    "--policy": "--set ALGO.hidden_sizes=[64,64]; the kind of network follows from the observations",
    "--eval-episodes": "--set evaluation.episodes=N",
    "--save-freq": "--set learner.checkpoint_interval_s=S",
    "--eval-freq": "--set evaluation.cpu_share=S; evaluations follow each other as that share of a core allows",
}
"""Flags that may mean several things or take their values in another form, and what to type."""


class _HelpAll(argparse.Action):
    """Prints every flag."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        say(parser.format_help().rstrip())
        sys.exit(0)


class Parser(argparse.ArgumentParser):
    """Reports a usage error like every other error: one line, exit code 2, a JSON document with ``--json``."""

    shown_first: Collection[str] = _NEEDED_FIRST
    """Flags that ``--help`` of a command with the flags of ``train`` shows; ``--help-all`` shows every one."""
    trains = False
    """True for the parser of ``spreeze.train``, which also accepts flags of other libraries (``translated``)."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        if COMPLETION_VARIABLE in os.environ:
            from spreeze.cli.completion import complete

            complete(self, arguments)
        as_json = "--json" in arguments
        try:
            return super().parse_args(self._ours(arguments) if self.trains else arguments, namespace)
        except UsageError as error:  # perhaps of a subparser, which sees only its part of the command line
            sys.exit(_report_error(error, as_json=as_json))

    def run(self, argv: Sequence[str] | None, command: Callable[[argparse.Namespace], int]) -> int:
        """Runs a command with its arguments; returns the exit code (see ``guarded``)."""
        args = self.parse_args(argv)
        return guarded(lambda: command(args), as_json=getattr(args, "json", False))

    def _ours(self, arguments: list[str]) -> list[str]:
        try:
            return translated(arguments, lambda text: say(text, as_json=True))
        except UsageError as error:
            self.error(str(error))

    def print_help(self, file: Any = None) -> None:
        """Prints the flags that are needed first; ``--help-all`` prints all."""
        if not self.trains:
            super().print_help(file)
            return
        texts = {action: action.help for action in self._actions}
        for action in texts:
            if action.option_strings and not {*action.option_strings} & {*self.shown_first, "--help", "--help-all"}:
                action.help = argparse.SUPPRESS
        super().print_help(file)
        for action, text in texts.items():
            action.help = text

    def _print_message(self, message: str, file: Any = None) -> None:
        with contextlib.suppress(OSError):  # its reader is gone; some versions of Python 3.11 raise that
            super()._print_message(message, file)

    def group_of(self, name: str) -> argparse._ArgumentGroup:
        """The group of the help text for a flag, or for the flag of a setting."""
        wanted = (name, name.partition(".")[0])
        title = next((title for key in wanted for title, names in _GROUPS.items() if key in names), "learning")
        known = {group.title: group for group in self._action_groups}
        return known.get(title) or self.add_argument_group(title)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def flag(
        self,
        *names: str,
        text: str,
        default: Any = None,
        shown: str | None = None,
        group: argparse._ArgumentGroup | None = None,
        **more: Any,
    ) -> argparse.Action:
        """Adds a flag, with its default in the help text and of its default's type; a switch where that is False.

        A list as default: the flag may be repeated. ``shown`` is the text of a default that says more than its value.
        """
        if default is False:
            more |= {"action": "store_true"}
        elif isinstance(default, list):
            more |= {"action": "append"}
        elif default is not None and "choices" not in more:
            more.setdefault("type", type(default))
        if shown is None:
            shown = "off" if default is False else "none" if default is None or default == [] else str(default)
        if self.trains and group is None and names[0] in sum(_GROUPS.values(), ()):
            group = self.group_of(names[0])
        return (group or self).add_argument(*names, default=default, help=f"{text} (default: {shown})", **more)

    def add_common_flags(self, *, inherited: bool = False) -> None:
        """``--runs-dir`` and ``--json``; ``inherited`` where another parser sets their defaults."""
        flags = [
            self.flag("--runs-dir", text="parent directory of run directories", default="runs", metavar="DIR"),
            self.flag("--json", text="print one JSON document to standard output", default=False),
        ]
        for flag in flags if inherited else ():
            flag.default = argparse.SUPPRESS

    def add_import(self) -> None:
        """``--import``, for commands that have no settings of a run."""
        self.flag("--import", text="Python module to import first", dest="import_module", metavar="MODULE")

    def add_checkpoint(self, more: str = "") -> None:
        """``--checkpoint``, for commands that load weights."""
        self.flag("--checkpoint", text=f"best or latest weights{more}", default="best", choices=CHECKPOINTS)

    def add_centre(self, more: str = "", group: argparse._ArgumentGroup | None = None) -> None:
        """``--centre``, for commands that average over seeds."""
        text = f"average over seeds: mean, or iqm (interquartile mean{more})"
        self.flag("--centre", text=text, default="mean", choices=("mean", "iqm"), group=group)

    def add_start_deadline(self) -> None:
        """``--start-deadline-s``, for commands that make an environment and have no settings of a run."""
        text, default = "longest time to construct and reset an environment [s]", SamplingConfig().start_deadline_s
        self.flag("--start-deadline-s", text=text, default=default, shown=f"{default:g}", type=_seconds, metavar="S")


def guarded(body: Callable[[], int], *, as_json: bool = False) -> int:
    """Runs a command; a ``SpreezeError``, or a full or forbidden disk, becomes one line on stderr and its exit code."""
    try:
        return body()
    except SpreezeError as error:
        return _report_error(error, as_json=as_json)
    except KeyboardInterrupt:
        say("interrupted", as_json=True)
        if as_json:
            emit({"error": "interrupted", "kind": "KeyboardInterrupt"})
        return 130
    except BrokenPipeError:
        return 0
    except OSError as error:
        known = _error_of_system(error)
        if known is None:
            raise
        return _report_error(known, as_json=as_json)


def _error_of_system(error: OSError) -> SpreezeError | None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"{error}; free some disk space")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename is not None:
        return ResourceError(f"{error}; choose another path or change its permissions")
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR):
        return RunError(f"{error.strerror}: {str(error.filename)[:100]}; check the path")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ResourceError(f"{error.strerror}: raise the limit of open files with ulimit -n, or close other programs")
    return None


def _report_error(error: SpreezeError, *, as_json: bool) -> int:
    line = " ".join(str(error).split())
    print_error(line)
    if as_json:
        emit({"error": line, "kind": type(error).__name__})
    return error.exit_code


def print_result(args: argparse.Namespace, document: Any, text: str | Callable[[], str]) -> int:
    """Prints the result of a command: its text, which may be made here, or its document with ``--json``. Returns 0."""
    if args.json:
        emit(document)
    else:
        say(text if isinstance(text, str) else text())
    return 0


def as_argument(path: str) -> str:
    """A run's directory as commands take it, for lines that are copied: with a separator, since else it is a name."""
    return shlex.quote(path if os.sep in path else os.path.join(os.curdir, path))


def check_output(path: str | None) -> None:
    """Raises a RunError, before any work, if an output file cannot be written (no such folder, or a folder itself)."""
    if path is None:
        return
    if not Path(path).resolve().parent.is_dir():
        raise RunError(f"cannot write {path}: no such directory: {Path(path).resolve().parent}")
    if Path(path).is_dir():
        raise RunError(f"cannot write {path}: it is a directory; name a file in it")


def _seconds(text: str) -> float:
    value = float(text)
    if not 1.0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 to 1e6")
    return value


def build_parser() -> Parser:
    """The parser of ``spreeze.train``; the help of each setting gives its unit and default."""
    parser = Parser(
        prog="python -m spreeze train",
        description="Train an agent with samplers, learner, evaluation and visualization in parallel. "
        "The environment's profile may change the defaults below.",
        epilog="Ctrl-C stops the run with a checkpoint and a final evaluation; press it twice to stop at once.",
    )
    parser.trains = True
    parser.set_defaults(compared=False)  # True for the run that continues after a comparison of algorithms
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all flags")
    for title in _GROUPS:
        parser.add_argument_group(title)
    added = set()
    for key, flag in FLAG_OF.items():
        if flag not in added:
            _add(parser, flag, key)
            added.add(flag)
    parser.flag(
        "--env-arg",
        text="keyword argument of the environment's constructor, may be repeated; VALUE is a Python or JSON "
        "literal (True, None, [1, 2], '{\"a\": 1}') or a string without quotes",
        default=[],
        metavar="KEY=VALUE",
    )
    parser.flag(
        "--callback",
        text="a spreeze.BaseCallback that follows and steers the run, may be repeated; "
        "'my_callbacks:Curriculum(goal=5)' gives it arguments",
        default=[],
        metavar="MODULE:CLASS",
    )
    parser.flag(
        "--samples-per-insert",
        text="transitions drawn / transitions inserted: samplers wait below MIN, the learner waits above MAX [ratio]",
        shown=_bands_text(),
        metavar="MIN:MAX",
    )
    parser.flag(
        "--auto",
        text="let the tuner measure this machine (up to 60 s, cached) and choose batch size, learner threads and "
        "samplers; settings given here are kept",
        default=False,
    )
    parser.flag("--fresh", text="with --auto: ignore the cached result", default=False)
    parser.flag(
        "--profile",
        text="settings from profiles/NAME.toml, NAME.toml in --runs-dir or a .toml file; `none`: no profile",
        shown="that of the environment",
        metavar="NAME|PATH",
    )
    text = "resume a run by name or path, or the latest one"
    parser.flag("--resume", text=text, shown="a new run", metavar="RUN|latest")
    parser.flag("--json", text="print one JSON document to standard output at the end", default=False)
    text = "any setting, such as --set sac.gamma=0.98; config.toml of a run lists them all"
    parser.flag("--set", text=text, default=[], metavar="SECTION.FIELD=VALUE")
    return parser


def _bands_text() -> str:
    """The default bounds of samples per insert, then those of algorithms with other ones."""
    replay = SECTIONS["replay"]()
    usual = {f"replay.{name}": getattr(replay, name) for name in SAMPLES_PER_INSERT_BOUNDS}
    bands = {"": usual} | {
        f"{name}: ": {key: row.defaults.get(key, usual[key]) for key in usual} for name, row in rows().items()
    }
    return "; ".join(
        name + ":".join(f"{bound:g}" for bound in band.values())
        for name, band in bands.items()
        if not name or band != usual
    )


def _add(parser: Parser, flag: str, key: str) -> None:
    item, kind = field_of(key), kind_of(key)
    doc, unit, choices = (item.metadata[name] for name in ("doc", "unit", "choices"))
    group = parser.group_of(key)
    if kind is bool:
        text = f"{item.metadata['inverse'] or doc} (default: off)"
        if item.default and not item.metadata["inverse"]:
            text = f"do not {doc} (default: it does)"
        group.add_argument(flag, dest=flag, default=None, action="store_const", const=not item.default, help=text)
        return
    doc, _, default_text = doc.partition("; default: ")
    default = (
        default_text
        or item.metadata["default_text"]
        or ("none" if item.default is None or item.default in ((), "") else item.default)
    )
    text = f"{doc}{f' [{unit}]' if unit else ''}".replace("%", "%%")
    more: dict[str, Any] = {"type": kind, "choices": choices, "metavar": None if choices else item.name.upper()}
    if kind is tuple:
        more = {"type": lambda text: tuple(filter(None, map(str.strip, text.split(",")))), "metavar": "NAME,NAME"}
    parser.flag(flag, text=text, shown=str(default).replace("%", "%%"), dest=flag, group=group, **more)


def user_values(args: argparse.Namespace) -> Values:
    """The values set on the command line, as a layer; a ConfigError for a malformed --set or --samples-per-insert."""
    values: Values = {}
    for key, flag in FLAG_OF.items():
        value = getattr(args, flag)
        if value is not None:
            section, name = key.split(".")
            values.setdefault(section, {})[name] = value
    if args.samples_per_insert is not None:
        low, high = parse_band(args.samples_per_insert)
        values.setdefault("replay", {}).update(samples_per_insert_min=low, samples_per_insert_max=high)
    if args.env_arg:
        values.setdefault("env", {})["args"] = tuple(args.env_arg)
    if args.callback:
        values.setdefault("callback", {})["classes"] = tuple(args.callback)
    for text in args.set:
        for section, fields in parse_assignment(text).items():
            values.setdefault(section, {}).update(fields)
    return values


def parse_band(text: str) -> tuple[float, float]:
    """Parses ``MIN:MAX``, either of which may be left out (0, no upper bound); a ConfigError for other texts."""
    try:
        low, high = text.split(":", 1)
        return float(low or 0.0), float(high or NO_LIMIT)
    except ValueError:
        raise ConfigError(f"--samples-per-insert {text!r}: expected MIN:MAX, for example 8:512") from None


def translated(arguments: list[str], note: Callable[[str], None]) -> list[str]:
    """Translates flags of other libraries, and tells ``note`` what changed; a UsageError for ambiguous ones."""
    words = _with_our_flags(arguments)
    algo = _known_algorithm(words)
    _note_newest_version(words, note)
    if "--import" in words[:-1] and not {"--env", "--resume", "--profile", "--like"} & {*words}:
        module = words[words.index("--import") + 1]
        note(f"--import {module} without --env: the default task; --env {module}:CLASS trains a class of it")
    for index, name in enumerate(words[:-1]):
        if name in _SETTINGS:
            words[index : index + 2] = ["--set", f"{_setting(name, algo, words[index + 1])}={words[index + 1]}"]
    return words


def _with_our_flags(arguments: list[str]) -> list[str]:
    """The words with our names of flags, and ``--env`` before a task that comes first."""
    words = ["--env"] if arguments and not arguments[0].startswith("-") else []
    for argument in arguments:
        name, sep, value = argument.partition("=")
        if name in _AMBIGUOUS:
            raise UsageError(f"{name}: use {_AMBIGUOUS[name]}")
        ours = _SAME.get(name, name)
        known = name in _SAME or ours in ("--algo", "--env", *_SETTINGS)
        words += [ours, *([value] if sep else [])] if known else [argument]
    return words


def _known_algorithm(words: list[str]) -> str | None:
    """Writes names of algorithms in lower case; returns the last one."""
    algo = None
    for index, (name, value) in enumerate(itertools.pairwise(words), 1):
        if name == "--algo":
            algo = words[index] = value.lower() if value.lower() in ALGORITHMS else value
    return algo


def _note_newest_version(words: list[str], note: Callable[[str], None]) -> None:
    """Gives each task without a version its newest one."""
    for index, (name, value) in enumerate(itertools.pairwise(words), 1):
        if name == "--env":
            from spreeze.envs.make import newest_version  # not needed by commands without a task

            if (newest := newest_version(value)) is not None:
                words[index] = newest
                note(f"--env {value}: {newest}, its newest version")


def _setting(flag: str, algo: str | None, value: str) -> str:
    name = _SETTINGS[flag]
    if algo is None or algo not in ALGORITHMS:
        raise UsageError(f"{flag}: use --set ALGO.{name}={value}, such as --set ppo.{name}={value}, or add --algo")
    fields = SECTIONS[algo].__dataclass_fields__
    if name in fields:
        return f"{algo}.{name}"
    parts = [other for other in fields if other.endswith(f"_{name}")]
    if not parts:
        raise UsageError(f"{flag}: {algo} has no setting {name}")
    raise UsageError(f"{flag}: use {' '.join(f'--set {algo}.{part}={value}' for part in parts)}")
