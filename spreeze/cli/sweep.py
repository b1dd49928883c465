"""``python -m spreeze sweep``: a grid of settings times seeds as runs, one after the other or side by side.

The order is seed by seed, so that the runs before an interruption compare all settings. Each run is a run
directory like any other; ``NAME.sweep.json`` beside them lists the runs that belong together and the state of each.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from spreeze.cli.arguments import Parser, guarded
from spreeze.cli.sweep_runs import (
    OF_EACH_RUN,
    POLL_S,
    RunProcess,
    Sweep,
    SweepRun,
    check_disk,
    checked_settings,
    claimed,
    core_shares,
    end,
    note_end,
    read_sweep,
    start,
    sweep_path,
)
from spreeze.cli.sweep_search import TRIALS, search
from spreeze.config.layers import DEFAULT, sources_of, toml_value
from spreeze.config.profiles import or_in_runs_dir
from spreeze.config.schema import check_name
from spreeze.config.section import split_values
from spreeze.envs.probe import Probe
from spreeze.errors import ConfigError, ResourceError, RunError
from spreeze.formatting import aligned
from spreeze.machine.hardware import usable_cores
from spreeze.machine.output import background_output, emit, print_error, say
from spreeze.metrics import comparison, return_curve
from spreeze.metrics.comparison import Rules, Spread
from spreeze.run_directory import find_run, make_runs_dir, read_config, take_lock
from spreeze.runtime.interrupts import Interrupts

_NOT_REPEATED = {*OF_EACH_RUN, "run.algo", "run.mode", "env.id", "env.import_module"}
"""Settings that the repetition of a run gets from flags instead."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    with background_output():
        return guarded(lambda: _sweep(args), as_json=args.json)


def _parser() -> Parser:
    parser = Parser(prog="python -m spreeze sweep", description="Train each combination of settings with many seeds.")
    parser.flag("--env", text="environment", shown="as in train", metavar="ID")
    parser.add_import()
    parser.flag("--algo", text="algorithm", shown="from environment and mode", metavar="NAME")
    parser.flag("--mode", text="mode", shown="as in train", metavar="NAME")
    parser.flag("--profile", text="profile", shown="that of the environment", metavar="NAME|PATH")
    text = (
        "run the tuner for each setting, before its first run, so that all its seeds train with one choice; only one "
        "run at a time, since the tuner measures the whole machine"
    )
    parser.flag("--auto", text=text, default=False)
    parser.flag("--seeds", text="number of seeds", shown="3, or with --search 1", type=int, metavar="N")
    parser.flag("--first-seed", text="the first of them", shown="1, or with --like the next one", type=int, metavar="K")
    text = "more seeds of this run: its settings as they were, tuned ones too; may be repeated"
    parser.flag("--like", text=text, default=[], metavar="RUN")
    text = "values of a setting, may be repeated; write lists in brackets"
    parser.flag("--set", text=text, default=[], metavar="SECTION.FIELD=VALUE,VALUE")
    text, shown = "training time per run [s]", "none; stop.env_steps or stop.updates must be set"
    parser.flag("--seconds", "--stop-seconds", text=text, shown=shown, dest="stop_seconds", type=float, metavar="S")
    text = "report the time to this return; unlike --target-return of train, runs do not stop"
    parser.flag("--target", text=text, shown="off", type=float, metavar="R")
    text = "number of parallel runs, each on its own cores"
    parser.flag("--side-by-side", text=text, shown="1, or as the sweep was started", type=int, metavar="N")
    text = "let Optuna propose the settings, and end runs below the median; --set KEY=LOW:HIGH is a range, --set KEY "
    text += "one around the value that it has, without any the usual ones are searched"
    parser.flag("--search", text=text, default=False)
    text, shown = "with --search: number of settings to try in total, those before a --resume too", str(TRIALS)
    parser.flag("--trials", text=text, shown=f"{shown}, or as the search was started", type=int, metavar="N")
    parser.flag("--name", text="name of the sweep", shown="from the time", metavar="NAME")
    text = "continue a sweep; unfinished runs start again"
    parser.flag("--resume", text=text, shown="a new sweep", metavar="NAME")
    parser.flag("--dry-run", text="print the plan without running it", default=False)
    parser.add_common_flags()
    return parser


def _sweep(args: argparse.Namespace) -> int:
    runs_dir = Path(args.runs_dir)
    resumed = read_sweep(runs_dir, args.resume) if args.resume else None
    if args.search if resumed is None else resumed.search:
        if resumed is not None:
            _refuse_changes(args)
        return search(args, runs_dir, _common(args))
    if args.trials is not None or args.search:
        flag, more = "--search" if args.search else "--trials", "" if args.resume else "add --search, or "
        raise ConfigError(f"{flag}: this sweep is not a search; {more}remove {flag}")
    sweep = _continued(args, runs_dir) if args.resume else _new(args, runs_dir)
    left = [run for run in sweep.runs if run.state != "finished"]
    if sweep.side_by_side > 1 and sweep.tunes:
        raise ConfigError(
            f"--side-by-side {sweep.side_by_side}: with --auto one run at a time, for the tuner measures "
            "the whole machine; " + ("add --side-by-side 1" if args.resume else "remove one of them")
        )
    shares = core_shares(sorted(usable_cores()), sweep.side_by_side)
    check_disk(runs_dir, len(left))
    for note in _check_settings(left):
        say(note, as_json=args.json)
    if args.dry_run:
        say(plan_text(sweep, len(left)), as_json=args.json)
        if args.json:
            emit({"sweep": asdict(sweep), "left": [run.name for run in left]})
        return 0
    make_runs_dir(runs_dir)
    if not args.resume:
        sweep = claimed(sweep, runs_dir, named=args.name is not None)
    with _locked(runs_dir, sweep.name):
        if args.resume:  # another process may have continued it in the meantime
            sweep = _continued(args, runs_dir)
        left = [run for run in sweep.runs if run.state != "finished"]
        say(plan_text(sweep, len(left)), as_json=args.json)
        return _run_sweep(args, sweep, left, shares, runs_dir)


@contextlib.contextmanager
def _locked(runs_dir: Path, name: str) -> Iterator[None]:
    """Holds the sweep's lock; a RunError if another process has it."""
    with open(runs_dir / f".{name}.sweep.lock", "w") as file:
        if take_lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB) is False:
            raise RunError(f"sweep {name} is running in another process; wait for it, or stop it with Ctrl-C")
        yield


def _run_sweep(
    args: argparse.Namespace, sweep: Sweep, left: list[SweepRun], shares: list[list[int]], runs_dir: Path
) -> int:
    sweep.write(runs_dir)
    report = functools.partial(say, as_json=args.json, keep=True)  # few lines, all of them results
    with Interrupts() as interrupts:
        _run_all(sweep, left, shares, runs_dir, interrupts, report)
        if interrupts.stop_requested:
            report(f"interrupted; continue: python -m spreeze sweep --resume {sweep.name} --runs-dir {runs_dir}")
    rows = table(sweep, runs_dir)
    if not left:
        report(table_text(rows, sweep.target))
    if args.json:
        emit({"sweep": asdict(sweep), "table": rows})
    if interrupts.stop_requested:
        return 130
    stopped, failed = ([run.name for run in sweep.runs if run.state == state] for state in ("interrupted", "failed"))
    remedy = f"--resume {sweep.name} runs them again"
    if stopped:
        say(f"excluded, because they did not finish: {', '.join(stopped)}; {remedy}", as_json=args.json)
    if failed:
        print_error(f"{len(failed)} of {len(sweep.runs)} runs failed: {', '.join(failed)}; {remedy}")
    return 1 if failed else 0


def _continued(args: argparse.Namespace, runs_dir: Path) -> Sweep:
    """The sweep to continue, perhaps with more runs side by side; finished runs without a directory are done again."""
    _refuse_changes(args)
    sweep = read_sweep(runs_dir, args.resume)
    if args.side_by_side is not None:
        sweep.side_by_side = args.side_by_side
    for run in sweep.runs:
        if run.state == "finished" and not (runs_dir / run.name).exists():
            run.state = "waiting"
    return sweep


def _refuse_changes(args: argparse.Namespace) -> None:
    same = ("env", "algo", "mode", "profile", "auto", "seeds", "set", "like", "target", "name")
    planned = {name: f"--{name}" for name in same}
    planned |= {"import_module": "--import", "stop_seconds": "--seconds", "first_seed": "--first-seed"}
    values = {flag: getattr(args, name) for name, flag in planned.items()}
    given = [flag for flag, value in values.items() if value is not None and value is not False and value != []]
    if given:
        raise ConfigError(f"--resume {args.resume}: a sweep keeps its settings; remove {', '.join(given)}")


def _new(args: argparse.Namespace, runs_dir: Path) -> Sweep:
    seeds = 3 if args.seeds is None else args.seeds
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: at least 1")
    name = check_name(args.name or time.strftime("sweep-%Y%m%d-%H%M%S"))
    common = _common(args)
    repeated = repeated_runs([find_run(run, runs_dir) for run in args.like])
    if repeated and any(getattr(args, name) for name in ("env", "algo", "mode", "profile", "auto")):
        raise ConfigError("--like takes them from the run: remove --env, --algo, --mode, --profile and --auto")
    if repeated and args.stop_seconds is not None:  # after the assignments of the run, which may have a time, too
        common += ["--set", f"stop.seconds={args.stop_seconds:g}"]
    first = 1 + max((run.seed for run in repeated), default=0) if args.first_seed is None else args.first_seed
    runs = []
    for seed in range(first, first + seeds):
        plans = itertools.product(repeated or [RepeatedRun("", [], 0)], grid(args.set))
        for number, (base, (varied, chosen)) in enumerate(plans, 1):
            arguments = [*base.arguments, *common, *(argument for text in chosen for argument in ("--set", text))]
            arguments += ["--seed", str(seed)]
            setting = " ".join(part for part in (base.setting, varied) if part)
            runs.append(SweepRun(setting, seed, arguments, check_name(f"{name}-c{number}-s{seed}")))
    sweep = Sweep(name, args.stop_seconds, args.target, 1 if args.side_by_side is None else args.side_by_side, runs)
    if args.name is not None and (taken := sweep.taken(runs_dir)) is not None:
        raise RunError(f"{taken} exists; choose another --name than {name}")
    return sweep


def _common(args: argparse.Namespace) -> list[str]:
    # An absolute path is found from another directory, too, when the sweep is resumed.
    profile = or_in_runs_dir(args.profile, args.runs_dir)
    if profile is not None and profile.endswith(".toml"):
        profile = str(Path(profile).resolve())
    flags = {
        "--env": args.env,
        "--import": args.import_module,
        "--algo": args.algo,
        "--mode": args.mode,
        "--profile": profile,
        "--seconds": args.stop_seconds,
    }
    # Runs that compared algorithms would be several runs each, and might choose different ones.
    tuned = ["--auto", "--set", "tuning.while_training=false", "--set", "tuning.algorithm_share=0"]
    return _words(flags) + (tuned if args.auto else [])


def _words(flags: dict[str, Any]) -> list[str]:
    return [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]


class RepeatedRun(NamedTuple):
    """A run to repeat with more seeds."""

    setting: str  # settings in which it differs from the others
    arguments: list[str]
    seed: int  # its own seed; 0 if unknown


def repeated_runs(paths: Sequence[Path]) -> list[RepeatedRun]:
    """Flags that reproduce each run's configuration; a ConfigError if one has no readable ``config.toml``."""
    curves, commands = [], []
    for path in paths:
        config = read_config(path)
        run, env = config.get("run", {}), config.get("env", {})
        if not {"algo", "mode"} <= run.keys() or "id" not in env:
            raise ConfigError(f"--like {path.name}: its config.toml is missing or damaged; name another run")
        flags = {"--env": env["id"], "--import": env.get("import_module"), "--algo": run["algo"], "--mode": run["mode"]}
        arguments = [*_words(flags), "--profile", "none"]
        for key, source in sources_of((path / "config.toml").read_text(encoding="utf-8")).items():
            section, _, name = key.partition(".")
            value = config.get(section, {}).get(name)
            if value is not None and source != DEFAULT and key not in _NOT_REPEATED:
                arguments += ["--set", f"{key}={toml_value(tuple(value) if isinstance(value, list) else value)}"]
        commands.append(arguments)
        curves.append(comparison.curve_of(path, []))
    names = [curve.group.label for curve in comparison.split_by_settings(curves)]
    return [
        RepeatedRun(name if len(paths) > 1 else "", arguments, curve.seed or 0)
        for name, arguments, curve in zip(names, commands, curves, strict=True)
    ]


def grid(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each combination: the text of its varied settings, and all of its assignments ``section.field=value``."""
    axes: dict[str, list[tuple[str, bool]]] = {}
    for text in texts:
        key, sep, raw = (word.strip() for word in text.partition("="))
        if not sep or not all(key.partition(".")):
            raise ConfigError(f"--set {text!r}: expected section.field=value,value, for example sac.gamma=0.98,0.99")
        values = split_values(raw)
        if not all(values) or len(set(values)) < len(values):
            raise ConfigError(f"--set {text!r}: a value is empty or occurs twice")
        if key in axes:
            raise ConfigError(f"--set {text!r}: {key} is set twice; give all of its values in one --set")
        if key in OF_EACH_RUN:
            raise ConfigError(f"--set {text!r}: {OF_EACH_RUN[key]}")
        axes[key] = [(f"{key}={value}", len(values) > 1) for value in values]
    return [
        (" ".join(text for text, varied in point if varied), [text for text, _ in point])
        for point in itertools.product(*axes.values())
    ]


def _check_settings(runs: Sequence[SweepRun]) -> list[str]:
    """Rejects invalid settings of all runs before the first one; returns lines on settings without effect."""
    probes: dict[str, Probe] = {}
    notes: dict[str, None] = {}
    for run in {run.setting: run for run in runs}.values():
        notes |= dict.fromkeys(checked_settings(run.arguments, probes)[1])
    return [*notes]


def plan_text(sweep: Sweep, left: int) -> str:
    settings = list(dict.fromkeys(run.setting for run in sweep.runs))
    seeds = len({run.seed for run in sweep.runs})
    text = f"sweep {sweep.name}: {len(settings)} settings x {seeds} seeds = {len(sweep.runs)} runs, {left} to do"
    if sweep.stop_seconds is not None:
        rounds = -(-left // sweep.side_by_side)
        text += f", {rounds * sweep.stop_seconds / 60.0:.1f} min of training, and a few seconds to start each"
        text += ", a minute more for each setting that is tuned" * sweep.tunes
    return "\n".join([text, *(f"  {setting}" for setting in settings if setting)])


def _run_all(
    sweep: Sweep,
    left: Sequence[SweepRun],
    shares: Sequence[list[int]],
    runs_dir: Path,
    interrupts: Interrupts,
    report: Callable[[str], None],
) -> None:
    waiting = list(left)
    children: dict[int, RunProcess] = {}
    unwritten: OSError | None = None

    def write() -> None:
        nonlocal unwritten
        try:
            sweep.write(runs_dir)
        except OSError as error:  # runs outlive a full disk, so a sweep does, too
            if unwritten is None:
                report(f"{sweep_path(runs_dir, sweep.name)} cannot be written: {error}; the sweep goes on")
            unwritten = error
        else:
            unwritten = None

    try:
        while (waiting or children) and not interrupts.stop_requested:
            for slot in [slot for slot in range(len(shares)) if slot not in children and waiting]:
                children[slot] = start(waiting.pop(0), shares[slot], runs_dir)
                write()
            for slot in [slot for slot, child in children.items() if child.process.poll() is not None]:
                note_end(children.pop(slot), runs_dir, report)
                write()
                report(table_text(table(sweep, runs_dir), sweep.target))
            time.sleep(POLL_S)
    finally:
        end(list(children.values()), interrupts.again())
        write()
    if unwritten is not None:
        raise ResourceError(
            f"{sweep_path(runs_dir, sweep.name)} cannot be written: {unwritten}; free some disk space, and "
            f"--resume {sweep.name} runs again what it does not name as finished"
        )


def table(sweep: Sweep, runs_dir: Path) -> list[dict[str, Any]]:
    """One row a setting, over its finished runs; a time only if every one of them reached the target.

    Runs whose metrics can no longer be read count as finished, without values.
    """
    rows = []
    for setting in dict.fromkeys(run.setting for run in sweep.runs):
        done = [run for run in sweep.runs if run.setting == setting and run.state == "finished"]
        curves = []
        for run in done:
            with contextlib.suppress(RunError):
                if (curve := comparison.read_curve(runs_dir / run.name)) is not None:
                    curves.append(curve.evaluations)
        finished = [return_curve.whole(rows) for rows in curves]
        row: dict[str, Any] = {"setting": setting or "as given", "seeds": len(done)}
        row["final"] = _as_row([value for rows in curves if (value := return_curve.final_metric(rows)) is not None])
        row["best"] = _as_row([max(record.return_mean for record in rows) for rows in finished])
        for key, count in (("to_target_s", 1), ("held_s", return_curve.HELD)) if sweep.target is not None else ():
            times = [return_curve.required_time(rows, sweep.target or 0.0, count) for rows in finished]
            reached = [at_s for at_s in times if at_s is not None]
            row[key] = _as_row(reached) if len(reached) == len(done) else None
            row[f"{key}_reached"] = len(reached)
        rows.append(row)
    return rows


def _as_row(values: Sequence[float]) -> dict[str, Any] | None:
    """Interquartile mean with its bootstrap interval (Agarwal et al. 2021)."""
    spread = comparison.spread(values, Rules(robust=True))
    return None if spread is None else dataclasses.asdict(spread)


def table_text(rows: Sequence[dict[str, Any]], target: float | None) -> str:
    keys = {"final": "final metric", "best": "best"}
    if target is not None:
        keys |= {"to_target_s": f"to {target:g} [s]", "held_s": "held [s]"}
    lines = [["setting", "seeds", *keys.values()]]
    for row in rows:
        counts = {key: row.get(f"{key}_reached", row[key]["seeds"] if row[key] else 0) for key in keys}
        cells = [
            comparison.spread_text(None if row[key] is None else Spread(**row[key]))
            + (f" ({counts[key]} of {row['seeds']})" if counts[key] < row["seeds"] else "")
            for key in keys
        ]
        lines.append([row["setting"], str(row["seeds"]), *cells])
    return "\n".join(aligned(lines))
