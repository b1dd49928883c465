"""Shared by the verbs: the parser, one-line errors, and the command line of ``spreeze.train``.

A flag that sets a setting is declared with it, in ``config/schema.py``; only flags that are no setting are added here.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from spreeze.config.layers import Values, parse_assignment
from spreeze.config.schema import FLAG_OF, SamplingConfig, field_of, kind_of
from spreeze.errors import ConfigError, ResourceError, RunError, SpreezeError, UsageError
from spreeze.machine.output import emit, print_error, say


class Parser(argparse.ArgumentParser):
    """Reports a usage error like every other error: one line, exit code 2, a JSON document with ``--json``."""

    _as_json = False

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Of the class: a subparser, which may find the error, sees only its part of the command line.
        Parser._as_json = "--json" in (sys.argv[1:] if args is None else args)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        line = " ".join(f"{message} (see {self.prog} --help)".split())
        print_error(line)
        if self._as_json:
            emit({"error": line, "kind": UsageError.__name__})
        sys.exit(2)


def guarded(body: Callable[[], int], *, as_json: bool = False) -> int:
    """Runs a verb; a ``SpreezeError``, or a full or forbidden disk, becomes one line on stderr and its exit code."""
    try:
        return body()
    except SpreezeError as error:
        return _told(error, as_json=as_json)
    except KeyboardInterrupt:
        say("interrupted", as_json=True)
        if as_json:
            emit({"error": "interrupted", "kind": "KeyboardInterrupt"})
        return 130
    except BrokenPipeError:
        return 0
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _told(ResourceError(f"{error}; free some disk space"), as_json=as_json)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename is not None:
            return _told(ResourceError(f"{error}; choose another path or change its permissions"), as_json=as_json)
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR):
            return _told(RunError(f"{error.strerror}: {str(error.filename)[:100]}; check the path"), as_json=as_json)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return _told(
                ResourceError(
                    f"{error.strerror}: raise the limit of open files with ulimit -n, or close other programs"
                ),
                as_json=as_json,
            )
        raise


def _told(error: SpreezeError, *, as_json: bool) -> int:
    line = " ".join(str(error).split())
    print_error(line)
    if as_json:
        emit({"error": line, "kind": type(error).__name__})
    return error.exit_code


def check_output(path: str | None) -> None:
    """Checks before any work that an output file can be written.

    Raises:
        RunError: its folder does not exist, or the path is a folder.
    """
    if path is None:
        return
    if not Path(path).resolve().parent.is_dir():
        raise RunError(f"cannot write {path}: no such directory: {Path(path).resolve().parent}")
    if Path(path).is_dir():
        raise RunError(f"cannot write {path}: it is a directory; name a file in it")


def add_common_flags(parser: argparse.ArgumentParser, *, inherited: bool = False) -> None:
    """``--runs-dir`` and ``--json``; ``inherited`` where another parser sets their defaults."""
    runs_dir, as_json = (argparse.SUPPRESS, argparse.SUPPRESS) if inherited else ("runs", False)
    parser.add_argument(
        "--runs-dir", default=runs_dir, metavar="DIR", help="parent directory of run directories (default: runs)"
    )
    parser.add_argument(
        "--json", action="store_true", default=as_json, help="print one JSON document to standard output (default: off)"
    )


def add_start_deadline(parser: argparse.ArgumentParser) -> None:
    """``--start-deadline-s``, for verbs that make an environment and have no settings of a run."""
    parser.add_argument(
        "--start-deadline-s",
        type=_seconds,
        default=SamplingConfig().start_deadline_s,
        metavar="S",
        help="longest time to construct and reset an environment [s] (default: 120)",
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 1.0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text}: allowed is 1 to 1e6")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``spreeze.train``; the help of each setting gives its unit and default."""
    parser = Parser(
        prog="python -m spreeze train",
        description="Train an agent with samplers, learner, evaluation and visualization in parallel. "
        "The environment's profile may change the defaults below.",
        epilog="Ctrl-C stops the run with a checkpoint and a final evaluation; press it twice to stop at once.",
    )
    added = set()
    for key, flag in FLAG_OF.items():
        if flag not in added:
            _add(parser, flag, key)
            added.add(flag)
    parser.add_argument(
        "--env-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="keyword argument of the environment's constructor, may be repeated; VALUE is a Python or JSON "
        "literal (True, None, [1, 2], '{\"a\": 1}') or a string without quotes (default: none)",
    )
    parser.add_argument(
        "--callback",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="a spreeze.BaseCallback that hears of the run and steers it, as often as needed; "
        "'my_callbacks:Curriculum(goal=5)' gives it arguments (default: none)",
    )
    parser.add_argument(
        "--samples-per-insert",
        metavar="MIN:MAX",
        default=None,
        help="transitions drawn / transitions inserted: samplers wait below MIN, the learner waits above MAX "
        "[ratio] (default: 8:512; td3: 16:512)",
    )
    parser.add_argument(
        "--auto",
        action="store_true",
        help="benchmark this machine (up to 60 s, cached) to choose batch size, learner threads and samplers; "
        "settings given here are kept (default: off)",
    )
    parser.add_argument("--fresh", action="store_true", help="with --auto: ignore the cached result (default: off)")
    parser.add_argument(
        "--profile",
        metavar="NAME|PATH",
        default=None,
        help="settings from profiles/NAME.toml or a .toml file; none: no profile (default: that of the environment)",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN|latest",
        default=None,
        help="resume a run by name or path, or the latest one (default: a new run)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document to standard output at the end (default: off)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="any setting, such as --set sac.gamma=0.98; config.toml of a run lists them all (default: none)",
    )
    return parser


def _add(parser: argparse.ArgumentParser, flag: str, key: str) -> None:
    item, kind = field_of(key), kind_of(key)
    doc, unit, choices = (item.metadata[name] for name in ("doc", "unit", "choices"))
    if kind is bool:
        text = f"do not {doc} (default: on)" if item.default else f"{doc} (default: off)"
        parser.add_argument(flag, dest=flag, default=None, action="store_const", const=not item.default, help=text)
        return
    doc, _, told = doc.partition("; default: ")
    default = (
        told
        or item.metadata["default_text"]
        or ("none" if item.default is None else item.default or "none" if kind is tuple else item.default)
    )
    text = f"{doc}{f' [{unit}]' if unit else ''} (default: {default})".replace("%", "%%")
    if kind is tuple:  # of names; the setting itself checks each
        parser.add_argument(flag, dest=flag, default=None, type=_names, help=text, metavar="NAME,NAME")
        return
    parser.add_argument(
        flag,
        dest=flag,
        default=None,
        type=kind,
        choices=choices,
        help=text,
        metavar=None if choices else item.name.upper(),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def user_values(args: argparse.Namespace) -> Values:
    """The values that the user set on the command line, as a settings layer.

    Raises:
        ConfigError: a malformed --set or --samples-per-insert.
    """
    values: Values = {}
    for key, flag in FLAG_OF.items():
        value = getattr(args, flag)
        if value is not None:
            part, name = key.split(".")
            values.setdefault(part, {})[name] = value
    if args.samples_per_insert is not None:
        low, high = parse_band(args.samples_per_insert)
        values.setdefault("replay", {}).update(samples_per_insert_min=low, samples_per_insert_max=high)
    if args.env_arg:
        values.setdefault("env", {})["args"] = tuple(args.env_arg)
    if args.callback:
        values.setdefault("callback", {})["classes"] = tuple(args.callback)
    for text in args.set:
        for part, fields in parse_assignment(text).items():
            values.setdefault(part, {}).update(fields)
    return values


def parse_band(text: str) -> tuple[float, float]:
    """Parses ``MIN:MAX``; either may be left out (0, no upper bound).

    Raises:
        ConfigError: not two numbers.
    """
    low, sep, high = text.partition(":")
    try:
        if not sep:
            raise ValueError
        return float(low or 0.0), float(high or 1e9)
    except ValueError:
        raise ConfigError(f"--samples-per-insert {text!r}: expected MIN:MAX, for example 8:512") from None
