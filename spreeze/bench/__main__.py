"""The command line of ``python -m spreeze.bench``."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from spreeze.bench import Row, line
from spreeze.bench.runs import Say
from spreeze.cli.arguments import Parser, guarded
from spreeze.machine.hardware import read_machine
from spreeze.machine.output import emit, say
from spreeze.run_directory import find_run, versions

_WALKER = "Walker2DBulletEnv-v0"


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return guarded(lambda: _bench(args), as_json=args.json)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> None:
    """Ends by an exception, so that the runs and processes that a bench started are ended too."""
    raise SystemExit(128 + number)


def _bench(args: argparse.Namespace) -> int:
    rows = BENCHES[args.bench].rows(args, lambda text: say(text, as_json=args.json))
    if args.json:
        emit({"bench": args.bench, "machine": read_machine().one_line(), "versions": versions(), "rows": rows})
    else:
        say(f"{args.bench} on {read_machine().one_line()}")
        for row in rows:
            say(line(row))
    return 0


def build_parser() -> Parser:
    parser = Parser(prog="python -m spreeze bench", description="Measure Spreeze on this machine.")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, bench in BENCHES.items():
        one = benches.add_parser(name, help=bench.help, description=bench.help)
        one.flag("--json", text="one JSON document on standard output", default=False)
        one.flag("--repeats", text="repeats of each figure", default=5)
        bench.add_flags(one)
    return parser


# --- flags ---


def _add_task(parser: Parser) -> None:
    parser.flag("--env", text="Gymnasium id", default=_WALKER)
    text = "use the package's own Bullet tasks, not our faster equivalents"
    parser.flag("--plain-env", text=text, default=False)
    parser.flag("--envs-per-sampler", text="environments in a sampler", shown="8", type=int)
    parser.add_import()
    text = "for the environment's constructor, as often as needed"
    parser.flag("--env-arg", text=text, default=[], metavar="KEY=VALUE")


def _add_sampling(parser: Parser) -> None:
    _add_task(parser)
    parser.flag("--seconds", text="length of one measurement [s]", default=3.0, shown="3")


def _add_rates(parser: Parser) -> None:
    _add_task(parser)
    parser.flag("--seconds", text="length of one run [s]", default=90.0, shown="90")
    parser.flag("--runs-dir", text="where runs go", default="runs")


def _add_target(parser: Parser) -> None:
    _add_task(parser)
    parser.flag("--runs-dir", text="where runs go", default="runs")
    parser.flag("--target-return", text="mean of 10 greedy episodes", default=-200.0, shown="-200, for Pendulum-v1")
    parser.flag("--algo", text="algorithm", shown="follows from task and mode")
    parser.flag(
        "--modes",
        text="the two that are compared, such as hts and serial with --algo ppo",
        default=("spreeze", "serial"),
        shown="spreeze serial",
        type=str,
        nargs=2,
        metavar="MODE",
    )
    text = "runs end, and are timed, when the mean of 5 evaluations in a row reaches it"
    parser.flag("--held", text=text, default=False, shown="the first evaluation that does")
    parser.flag("--limit", text="a run is given up after that [s]", default=180.0, shown="180")


def _add_learner(parser: Parser) -> None:
    parser.add_argument("--batch-size", type=int, nargs="+", default=[256], help="batch sizes (default: 256)")
    parser.flag("--algo", text="algorithm", default="sac", choices=("sac", "td3", "ddpg"))
    parser.flag("--threads", text="threads of the learner", default=1, type=int, choices=(1, 2))
    parser.flag("--precision", text="of the matmuls", default="float32", choices=("float32", "bfloat16"))
    parser.flag("--device", text="device or split, such as cuda:0, split or cpu+cpu", default="cpu")
    parser.flag("--overlap", text="the actor one update late", default=False)
    parser.flag("--updates-per-launch", text="updates in one graph of a GPU, 0 for no graph", default=1)


def _add_gpu(parser: Parser) -> None:
    parser.flag("--device", text="device to measure; cpu tries the bench itself", shown="the first GPU")
    parser.flag("--minutes", text="time after which nothing is begun any more", default=8.0, shown="8")
    parser.flag("--small", text="small networks, short measurements: to try the bench", default=False)


def _add_curve(parser: Parser) -> None:
    from spreeze.bench.runs import CURVE_AXES

    parser.add_argument("runs", nargs="+", help="run names or paths, or latest")
    parser.flag("--runs-dir", text="where runs are", default="runs")
    parser.flag("--out", text="picture to write", default="curve.png")
    text = "what returns are drawn over"
    parser.flag("--axes", text=text, default=CURVE_AXES, shown="all", nargs="+", choices=CURVE_AXES)
    text = "returns whose times are told, first and held"
    parser.flag("--target-return", text=text, default=(), shown="none", type=float, nargs="+", metavar="R")
    text = "evaluations up to so many updates"
    parser.flag("--updates", text=text, default=math.inf, shown="all", metavar="N")


# --- what they measure ---


def _extra(args: argparse.Namespace) -> list[str]:
    """The task's flags as ``train`` has them."""
    found = ["--envs-per-sampler", str(args.envs_per_sampler)] if args.envs_per_sampler else []
    found += ["--import", args.import_module] if args.import_module else []
    found += ["--plain-env"] if args.plain_env else []
    return found + [f"--env-arg={text}" for text in args.env_arg]


def _sampling(args: argparse.Namespace, say: Say) -> list[Row]:
    from spreeze.bench.sampling import sampling_rows, task_plan

    plan = task_plan(
        args.env,
        envs_per_sampler=args.envs_per_sampler,
        import_module=args.import_module,
        plain=args.plain_env,
        env_args=tuple(args.env_arg),
    )
    return sampling_rows(plan, args.repeats, args.seconds)


def _learner(args: argparse.Namespace, say: Say) -> list[Row]:
    from spreeze.bench.learner import learner_rows

    learner = {name: getattr(args, name) for name in ("threads", "precision", "overlap", "updates_per_launch")}
    return learner_rows(args.batch_size, args.repeats, args.device, args.algo, **learner)


def _rates(args: argparse.Namespace, say: Say) -> list[Row]:
    from spreeze.bench.runs import rates_rows

    return rates_rows(args.env, args.seconds, args.repeats, args.runs_dir, _extra(args))


def _target(args: argparse.Namespace, say: Say) -> list[Row]:
    from spreeze.bench.runs import time_to_target_rows

    extra = [*_extra(args), *(["--algo", args.algo] if args.algo else [])]
    task = args.env, args.target_return, args.repeats, args.runs_dir, args.limit
    return time_to_target_rows(*task, extra, say, modes=args.modes, held=args.held)


def _curve(args: argparse.Namespace, say: Say) -> list[Row]:
    from spreeze.bench.runs import curve_rows, draw_curve

    runs = [find_run(run, Path(args.runs_dir)) for run in args.runs]
    rows = curve_rows(runs, args.target_return, args.updates)
    draw_curve(runs, Path(args.out), args.axes)
    return [*rows, {"metric": "picture", "value": args.out, "unit": "file"}]


def _gpu(args: argparse.Namespace, say: Say) -> list[Row]:
    from spreeze.bench.learner import gpu_rows

    return gpu_rows(args, say)


class Bench(NamedTuple):
    help: str
    add_flags: Callable[[Parser], None]
    rows: Callable[[argparse.Namespace, Say], list[Row]]


BENCHES = {
    "sampling": Bench("the real sampler against a bare environment loop, same actions", _add_sampling, _sampling),
    "learner": Bench("updates a second of the whole learner, by batch size and device", _add_learner, _learner),
    "rates": Bench("env steps/s and updates/s of whole runs, batch 256, one sampler", _add_rates, _rates),
    "target": Bench("wall time to a return, two modes in turn", _add_target, _target),
    "gpu": Bench("updates a second on one GPU by batch, precision and kind, and the verdict on them", _add_gpu, _gpu),
    "curve": Bench("what finished runs reached and kept, and a picture of their curves", _add_curve, _curve),
}


if __name__ == "__main__":
    sys.exit(main())
