"""The command line of the benches that last: storm, stops, orphans, faults, soak, page (Linux)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spreeze.cli import say
from spreeze.rundir import find_run

Row = dict[str, Any]
_TASKS = ("Pendulum-v1", "CartPole-v1")


def add_lasting_benches(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds their flags; ``add(name, text)`` makes a parser."""
    storm = add("storm", "SIGKILL to all roles of a real run at random, and what must hold afterwards (Linux)")
    storm.add_argument("--minutes", type=float, default=10.0, help="length of the storm [min] (default: 10)")
    storm.add_argument("--kills-per-minute", type=float, default=12.0, help="on average [1/min] (default: 12)")
    storm.add_argument("--single-kills", type=int, default=60,
                       help="after it, of samplers and learner, one at a time, to time their recovery (default: 60)")
    stops = add("stops", "Ctrl-C, once and twice, at random moments of real runs (Linux)")
    stops.add_argument("--twice", type=int, default=None, help="runs with two (default: a fourth of --runs)")
    orphans = add("orphans", "SIGKILL to the supervisor at random moments of real runs (Linux)")
    for parser, runs in ((stops, 200), (orphans, 100)):
        parser.add_argument("--runs", type=int, default=runs, help=f"runs (default: {runs})")
        parser.add_argument("--together", type=int, default=1, help="runs at a time (default: 1)")
    faults = add("faults", "wall time to a return, clean and with environments that raise and stall in one of two "
                 "samplers, in turn; --repeats: seeds (Linux)")
    faults.add_argument("--env", choices=_TASKS, default=None, help="one of its two tasks (default: both)")
    faults.add_argument("--limit", type=float, default=180.0, help="a run is given up after that [s] (default: 180)")
    soak = add("soak", "slopes of memory, descriptors, threads, disk and throughput over a long run (Linux)")
    soak.add_argument("--hours", type=float, default=1.0, help="length of the run [h] (default: 1)")
    soak.add_argument("--env", default="Walker2DBulletEnv-v0", help="Gymnasium id (default: Walker2DBulletEnv-v0)")
    soak.add_argument("--samplers", type=int, default=None, help="sampler processes (default: as train chooses)")
    page = add("page", "the Live page in a real browser beside a run: what it costs the run, whether it grows (Linux)")
    page.add_argument("--minutes", type=float, default=60.0, help="how long it is watched [min] (default: 60)")
    page.add_argument("--seconds", type=float, default=20.0,
                      help="length of a window with the page open or closed [s] (default: 20)")
    page.add_argument("--run", default=None, help="a run that is alive (default: one is started)")
    page.add_argument("--env", default="Walker2DBulletEnv-v0",
                      help="task of the run that is started (default: Walker2DBulletEnv-v0)")
    for parser in (storm, stops, orphans):
        parser.add_argument("--seed", type=int, default=1, help="seed of the moments (default: 1)")
    for parser in (storm, stops, orphans, faults, soak, page):
        parser.add_argument("--runs-dir", default="runs", help="where runs go (default: runs)")


def _say(args: argparse.Namespace) -> Callable[[str], None]:
    return lambda text: say(text, as_json=args.json)


def _storm(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.storm import storm_rows

    return storm_rows(args.minutes, args.kills_per_minute, args.single_kills, args.runs_dir, args.seed, _say(args))


def _stops(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.endings import stops_rows

    twice = args.runs // 4 if args.twice is None else args.twice
    return stops_rows(args.runs, twice, args.together, args.runs_dir, args.seed, _say(args))


def _orphans(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.endings import orphans_rows

    return orphans_rows(args.runs, args.together, args.runs_dir, args.seed, _say(args))


def _faults(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.faults import GOALS, faults_rows

    goals = tuple(goal for goal in GOALS if args.env in (None, goal.env_id))
    return faults_rows(goals, args.repeats, args.limit, args.runs_dir, _say(args))


def _soak(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.soak import soak_rows

    extra = [f"--samplers={args.samplers}"] if args.samplers else []
    return soak_rows(args.hours, args.env, args.runs_dir, extra, say=_say(args))


def _page(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.page import page_rows

    run = None if args.run is None else find_run(args.run, Path(args.runs_dir))
    return page_rows(args.minutes, args.repeats, args.seconds, run, args.env, args.runs_dir)


LASTING: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "storm": _storm, "stops": _stops, "orphans": _orphans, "faults": _faults, "soak": _soak, "page": _page,
}
