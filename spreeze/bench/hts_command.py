"""``python -m spreeze.bench hts``: its flags, and which part measures what."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from spreeze.bench.runs import Row
from spreeze.errors import ConfigError
from spreeze.hardware import read_machine

PARTS = ("steps", "learner", "sweep", "waiting", "target", "paired", "correction")
LAWS = ("constant", "exponential", "gamma 0.5", "gamma 1", "gamma 3")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the bench."""
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS[:3]),
        help="steps, learner, sweep: step times as given; waiting: what it costs; target, paired, correction: tasks "
             "(default: the first three)")
    add("--seconds", type=float, default=10.0,
        help="what a rate is measured over where step times are given [s] (default: 10)")
    add("--laws", nargs="+", choices=LAWS, default=list(LAWS), help="step times of steps and learner (default: all)")
    add("--actors", type=int, default=0,
        help="actor processes of HTS-RL where step times are given; 0: executors infer for themselves (default: 0)")
    add("--env", nargs="+", default=["CartPole-v1"], help="tasks (default: CartPole-v1)")
    add("--algo", choices=("ppo", "a2c"), default="ppo", help="algorithm on tasks (default: ppo)")
    add("--task-seconds", type=float, default=120.0, help="training of one run on a task [s] (default: 120)")
    add("--target-return", type=float, default=475.0, help="mean of 10 greedy episodes of part target (default: 475)")
    add("--executors", type=int, default=2, help="executors of HTS-RL on tasks (default: 2)")
    add("--envs", type=int, default=16, help="environments in all on tasks, in either mode (default: 16)")
    add("--set", action="append", default=[], metavar="PART.FIELD=VALUE",
        help="setting of the runs on tasks, as often as needed (default: none)")
    add("--runs-dir", default="runs", help="where runs go (default: runs)")
    add("--picture", metavar="FILE", default=None, help="also draw the step times as given (default: none)")
    add("--rows", metavar="FILE", default=None,
        help="measure nothing: take the rows of an earlier --json document (default: none)")


def hts_rows(args: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    """Measures the parts that were asked for, and draws them.

    Raises:
        ConfigError: environments that do not divide among the executors, or a file that is no document.
        SpreezeError: a run failed.
    """
    machine = read_machine().one_line()
    if args.rows:
        rows, machine = _read(Path(args.rows))
    else:
        rows = _measured(args, say)
    if args.picture:
        from spreeze.bench.hts_picture import draw_hts

        draw_hts(rows, Path(args.picture), machine)
    return rows


def _measured(args: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    from spreeze.bench import hts, hts_tasks, hts_waiting

    if args.envs % args.executors:
        raise ConfigError(f"--envs {args.envs}: not divisible by --executors {args.executors}")
    given = hts.HtsBench(runs_dir=args.runs_dir, seconds=args.seconds, repeats=args.repeats, say=say,
                         laws=tuple(args.laws), actors=args.actors)
    tasks = hts_tasks.TasksBench(
        env_ids=tuple(args.env), algo=args.algo, seeds=args.repeats, seconds=args.task_seconds,
        target_return=args.target_return, runs_dir=args.runs_dir, say=say, executors=args.executors, envs=args.envs,
        extra=tuple(text for setting in args.set for text in ("--set", setting)),
    )
    parts: dict[str, Callable[[], list[Row]]] = {
        "steps": lambda: hts.steps_rows(given), "learner": lambda: hts.learner_rows(given),
        "sweep": lambda: hts.sweep_rows(given),
        "waiting": lambda: hts_waiting.waiting_rows(args.seconds, args.repeats, say),
        "target": lambda: hts_tasks.target_rows(tasks),
        "paired": lambda: hts_tasks.paired_rows(tasks), "correction": lambda: hts_tasks.correction_rows(tasks),
    }
    rows = []
    for part in args.parts:
        say(f"{part}:")
        rows += [{**row, "part": part} for row in parts[part]()]
    return rows


def _read(path: Path) -> tuple[list[Row], str]:
    """Rows and machine of a ``--json`` document of this bench."""
    try:
        document = json.loads(path.read_bytes())
        return list(document["rows"]), str(document["machine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--rows {path}: no document of bench hts --json: {error}") from None
