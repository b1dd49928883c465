"""The command line of ``python -m spreeze.bench``."""

from __future__ import annotations

import argparse
import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spreeze.autotune.scores import FORMULAS
from spreeze.bench import hts_command, learner_command
from spreeze.bench.endurance import LASTING, add_lasting_benches
from spreeze.cli import emit, guarded, say
from spreeze.envs.probe import probe_env
from spreeze.hardware import read_machine
from spreeze.rundir import find_run, versions
from spreeze.settings import Layer, resolve, task_profile, with_algorithm
from spreeze.workers.plan import RunPlan

Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Runs one bench; returns the exit code."""
    args = _parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return guarded(lambda: _bench(args), as_json=args.json)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> None:
    """Ends by an exception, so that the runs and processes that a bench started are ended too."""
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m spreeze.bench", description="Measure Spreeze on this machine.")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON document on standard output (default: off)")
    common.add_argument("--repeats", type=int, default=5, help="repeats of each figure (default: 5)")
    task = argparse.ArgumentParser(add_help=False)
    task.add_argument("--env", default="Walker2DBulletEnv-v0", help="Gymnasium id (default: Walker2DBulletEnv-v0)")
    task.add_argument("--samplers", type=int, default=1, help="sampler processes (default: 1)")
    task.add_argument("--envs-per-sampler", type=int, default=None, help="environments in a sampler (default: 8)")
    task.add_argument("--import", dest="import_module", metavar="MODULE", default=None,
                      help="module to import for it (default: none)")
    task.add_argument("--env-arg", action="append", default=[], metavar="KEY=VALUE",
                      help="for the environment's constructor, as often as needed (default: none)")
    task.add_argument("--plain-env", action="store_true",
                      help="Bullet tasks as their package has them, not the fast equal ones (default: off)")
    task.add_argument("--seconds", type=float, default=None,
                      help="length of one measurement [s] (default: 3, of whole runs 90, of foreign load 20)")
    task.add_argument("--runs-dir", default="runs", help="where runs go (default: runs)")

    def add(name: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return benches.add_parser(name, help=text, description=text, parents=[common, *parents])

    add("sampling", "the real sampler against a bare environment loop with the same actions", task)
    add("checks", "what the ring's protocol, checksums and publication take of sampler and learner", task)
    env = add("env", "the fast Bullet tasks against their package, the same actions in turn")
    env.add_argument("--tasks", nargs="+", default=None, help="names such as Walker2D (default: all)")
    env.add_argument("--seconds", type=float, default=2.0, help="length of one repeat [s] (default: 2)")
    replay = add("replay", "writes, gathers and torn rows of the replay ring")
    replay.add_argument("--against", choices=("queue",), default=None, help="compare with a multiprocessing queue")
    replay.add_argument("--checked-rows", type=int, default=10_000_000, help="rows checked for tearing (default: 1e7)")
    learner_command.add_flags(add("learner", "updates a second against the matrix products that an update needs"))
    add("together", "sampler and learner alone, together, and with evaluator and visualizer", task)
    add("rates", "env steps/s and updates/s of whole runs, batch 256, one sampler", task)
    target = add("target", "wall time to a return, asynchronous and serial mode in turn", task)
    target.add_argument("--target-return", type=float, default=-200.0,
                        help="mean of 10 greedy episodes (default: -200)")
    target.add_argument("--limit", type=float, default=180.0, help="a run is given up after that [s] (default: 180)")
    pick = add("pick", "wall time to a return: the tuner's pick and eight hand-made settings in turn", task)
    pick.add_argument("--target-return", type=float, default=-200.0, help="mean of 10 greedy episodes (default: -200)")
    pick.add_argument("--limit", type=float, default=180.0, help="a run is given up after that [s] (default: 180)")
    governor = add("governor", "updates/s of a run before, beside and after a process that keeps one core busy", task)
    governor.add_argument("--batch-size", type=int, default=256, help="transitions in one update (default: 256)")
    governor.add_argument("--no-governor", action="store_true", help="priorities alone (default: off)")
    score = add("score", "updates that a return takes at each batch size; fits the tuner's constants", task)
    score.add_argument("--target-return", type=float, default=-200.0,
                       help="mean of 10 greedy episodes that ends a run (default: -200)")
    score.add_argument("--max-updates", type=int, default=12_000, help="a run is given up after them (default: 12000)")
    score.add_argument("--out", default="score.jsonl", help="file of runs, added to (default: score.jsonl)")
    score.add_argument("--fit", action="store_true", help="no runs, only the fit to those in the file (default: off)")
    add_lasting_benches(add)
    _add_tune(add("tune", "the tuner's pick against the exhaustive grid of batch sizes and samplers"))
    hts_command.add_flags(add("hts", "HTS-RL against its synchronous baselines, on step times as given and on tasks"))
    curve = add("curve", "picture of the return curves of finished runs")
    curve.add_argument("runs", nargs="+", help="run names or paths, or latest")
    curve.add_argument("--runs-dir", default="runs", help="where runs are (default: runs)")
    curve.add_argument("--out", default="curve.png", help="picture to write (default: curve.png)")
    return parser


def _add_tune(tune: argparse.ArgumentParser) -> None:
    tune.add_argument("--env", default="Walker2DBulletEnv-v0", help="Gymnasium id (default: Walker2DBulletEnv-v0)")
    tune.add_argument("--plain-env", action="store_true",
                      help="Bullet tasks as their package has them, not the fast equal ones (default: off)")
    tune.add_argument("--objective", choices=tuple(FORMULAS), default="return", help="score (default: return)")
    tune.add_argument("--batch-size", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024],
                      help="batch sizes of the grid, while an update takes at most 0.1 s (default: 32 to 1024)")
    tune.add_argument("--rounds", type=int, default=2, help="rounds over the grid, of 3 measurements (default: 2)")
    tune.add_argument("--busy", action="store_true", help="beside a busy process on one core (default: off)")
    tune.add_argument("--cores", type=int, default=None, help="cores to use, by affinity (default: all)")


def _bench(args: argparse.Namespace) -> int:
    rows = _BENCHES[args.bench](args)
    if args.json:
        emit({"bench": args.bench, "machine": read_machine().one_line(), "versions": versions(), "rows": rows})
    else:
        say(f"{args.bench} on {read_machine().one_line()}")
        for row in rows:
            say(_line(row))
    return 0


def _line(row: Row) -> str:
    known = ("metric", "value", "unit", "repeats", "target")
    extra = ", ".join(f"{key} {_short(value)}" for key, value in row.items()
                      if key not in known and isinstance(value, int | float | str))
    repeats = [value for value in row.get("repeats", []) if isinstance(value, int | float)]
    spread = f"  [{_short(min(repeats))} .. {_short(max(repeats))}, n={len(repeats)}]" if len(repeats) > 1 else ""
    target = f"  target {row['target']}" if row.get("target") else ""
    return f"  {row['metric']:44s} {_short(row['value']):>10s} {row['unit']:10s}{spread}{target}" + (
        f"  ({extra})" if extra else "")


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plan(args: argparse.Namespace) -> RunPlan:
    """The task's own settings, nobody throttled, the visualizer on."""
    sampling = {"samplers": args.samplers}
    if args.envs_per_sampler:
        sampling["envs_per_sampler"] = args.envs_per_sampler
    profile = task_profile(args.env)
    layers = [
        *([profile] if profile else []),
        Layer("bench", {
            "env": {"id": args.env, "import_module": args.import_module, "plain": args.plain_env,
                    "args": tuple(args.env_arg)},
            "sampling": sampling,
            "replay": {"samples_per_insert_min": 0.0, "samples_per_insert_max": 1e9, "learning_starts": 2000},
        }),
    ]
    settings = resolve(layers)
    spec = probe_env(args.env, args.import_module, steps=0, plain=args.plain_env, args=tuple(args.env_arg),
                     image=dataclasses.asdict(settings.config.image)).spec
    settings, _ = with_algorithm(layers, settings, spec)
    return RunPlan(settings=settings, spec=spec, samplers=args.samplers,
                   free_core=read_machine().cores.usable - args.samplers >= 2.0)


def _sampling(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.samplers import samplers_rows
    from spreeze.bench.sampling import policy_rows, sampling_rows

    plan = _plan(args)
    rows = sampling_rows(plan, args.repeats, args.seconds or 3.0) + policy_rows(plan, args.repeats)
    return rows + samplers_rows(plan, args.repeats, args.seconds or 3.0)


def _checks(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.checks import checks_rows

    return checks_rows(_plan(args), args.repeats)


def _env(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.env import env_rows

    return env_rows(args.repeats, args.seconds, tuple(args.tasks) if args.tasks else None)


def _replay(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.replay import against_queue_rows, replay_rows

    if args.against:
        return against_queue_rows(repeats=args.repeats)
    return replay_rows(args.repeats, checked_rows=args.checked_rows)


def _learner(args: argparse.Namespace) -> list[Row]:
    return learner_command.learner_rows(args, _plan)


def _together(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.together import together_rows

    return together_rows(_plan(args), args.repeats, args.seconds or 3.0)


def _rates(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.runs import rates_rows

    return rates_rows(args.env, args.seconds or 90.0, args.repeats, args.runs_dir, _extra(args))


def _target(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.runs import time_to_target_rows

    return time_to_target_rows(args.env, args.target_return, args.repeats, args.runs_dir, args.limit, _extra(args),
                               lambda text: say(text, as_json=args.json))


def _governor(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.governor import governor_rows

    extra = [*_extra(args), *(["--no-governor"] if args.no_governor else [])]
    return governor_rows(args.env, args.batch_size, args.samplers, args.seconds or 20.0, args.repeats,
                         lambda text: say(text, as_json=args.json), extra)


def _pick(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.runs import pick_rows

    return pick_rows(args.env, args.target_return, args.repeats, args.runs_dir, args.limit, _extra(args),
                     lambda text: say(text, as_json=args.json))


def _score(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.score import SETTINGS, Goal, read_records, run_all
    from spreeze.bench.score_fit import fit_rows

    out = Path(args.out)
    if not args.fit:
        plan = _plan(args)
        starts = resolve([profile]).config.replay.learning_starts if (profile := task_profile(args.env)) else 1000
        plan = dataclasses.replace(plan, settings=plan.settings.with_layer(Layer("bench", {
            "replay": {"learning_starts": starts}})))
        run_all(plan, Goal(target_return=args.target_return, max_updates=args.max_updates), SETTINGS, args.repeats, out,
                lambda text: say(text, as_json=args.json))
    return fit_rows(read_records(out))


def _tune(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.tune import Case, tune_rows

    case = Case(env_id=args.env, plain=args.plain_env, objective=args.objective, runs=args.repeats,
                batches=tuple(sorted(args.batch_size)), rounds=args.rounds, busy=args.busy, cores=args.cores)
    return tune_rows(case, lambda text: say(text, as_json=args.json))


def _hts(args: argparse.Namespace) -> list[Row]:
    return hts_command.hts_rows(args, lambda text: say(text, as_json=args.json))


def _extra(args: argparse.Namespace) -> list[str]:
    envs = ["--envs-per-sampler", str(args.envs_per_sampler)] if args.envs_per_sampler else []
    module = ["--import", args.import_module] if args.import_module else []
    return [*envs, *module, *(["--plain-env"] if args.plain_env else []),
            *(f"--env-arg={text}" for text in args.env_arg)]


def _curve(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.curve import draw_curve

    draw_curve([find_run(run, Path(args.runs_dir)) for run in args.runs], Path(args.out))
    return [{"metric": "picture", "value": args.out, "unit": "file"}]


_BENCHES: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "sampling": _sampling, "checks": _checks,
    "env": _env, "replay": _replay, "learner": _learner, "together": _together, "rates": _rates,
    "target": _target, "governor": _governor, "score": _score, "pick": _pick, "tune": _tune, "curve": _curve,
    "hts": _hts, **LASTING,
}
