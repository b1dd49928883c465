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


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m spreeze bench", description="Measure Spreeze on this machine.")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, bench in BENCHES.items():
        one = benches.add_parser(name, help=bench.help, description=bench.help)
        one.add_argument("--json", action="store_true", help="one JSON document on standard output (default: off)")
        one.add_argument("--repeats", type=int, default=5, help="repeats of each figure (default: 5)")
        bench.add_flags(one)
    return parser


# --- flags ---


def _add_task(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--env", default=_WALKER, help=f"Gymnasium id (default: {_WALKER})")
    add(
        "--plain-env",
        action="store_true",
        help="use the package's own Bullet tasks, not our faster equivalents (default: off)",
    )
    add("--envs-per-sampler", type=int, default=None, help="environments in a sampler (default: 8)")
    add(
        "--import",
        dest="import_module",
        metavar="MODULE",
        default=None,
        help="Python Python module to import first (default: none)",
    )
    add(
        "--env-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for the environment's constructor, as often as needed (default: none)",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    _add_task(parser)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement [s] (default: 3)")


def _add_rates(parser: argparse.ArgumentParser) -> None:
    _add_task(parser)
    parser.add_argument("--seconds", type=float, default=90.0, help="length of one run [s] (default: 90)")
    parser.add_argument("--runs-dir", default="runs", help="where runs go (default: runs)")


def _add_target(parser: argparse.ArgumentParser) -> None:
    _add_task(parser)
    parser.add_argument("--runs-dir", default="runs", help="where runs go (default: runs)")
    parser.add_argument(
        "--target-return",
        type=float,
        default=-200.0,
        help="mean of 10 greedy episodes (default: -200, for Pendulum-v1)",
    )
    parser.add_argument("--algo", default=None, help="algorithm (default: follows from task and mode)")
    parser.add_argument(
        "--modes",
        nargs=2,
        default=("spreeze", "serial"),
        metavar="MODE",
        help="the two that are compared, such as hts and serial with --algo ppo (default: spreeze serial)",
    )
    parser.add_argument(
        "--held",
        action="store_true",
        help="runs end, and are timed, when the mean of 5 evaluations in a row reaches it (default: "
        "the first evaluation that does)",
    )
    parser.add_argument("--limit", type=float, default=180.0, help="a run is given up after that [s] (default: 180)")


def _add_learner(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batch-size", type=int, nargs="+", default=[256], help="batch sizes (default: 256)")
    add("--algo", choices=("sac", "td3", "ddpg"), default="sac", help="algorithm (default: sac)")
    add("--threads", type=int, choices=(1, 2), default=1, help="threads of the learner (default: 1)")
    add("--precision", choices=("float32", "bfloat16"), default="float32", help="of the matmuls (default: float32)")
    add("--device", default="cpu", help="device or split, such as cuda:0, split or cpu+cpu (default: cpu)")
    add("--overlap", action="store_true", help="the actor one update late (default: off)")
    add("--updates-per-launch", type=int, default=1, help="updates in one graph of a GPU, 0 for no graph (default: 1)")


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default=None, help="device to measure; cpu tries the bench itself (default: the first GPU)")
    add("--minutes", type=float, default=8.0, help="time after which nothing is begun any more (default: 8)")
    add("--small", action="store_true", help="small networks, short measurements: to try the bench (default: off)")


def _add_curve(parser: argparse.ArgumentParser) -> None:
    from spreeze.bench.runs import CURVE_AXES

    add = parser.add_argument
    add("runs", nargs="+", help="run names or paths, or latest")
    add("--runs-dir", default="runs", help="where runs are (default: runs)")
    add("--out", default="curve.png", help="picture to write (default: curve.png)")
    add(
        "--axes", nargs="+", choices=CURVE_AXES, default=CURVE_AXES, help="what the return is drawn over (default: all)"
    )
    add(
        "--target-return",
        type=float,
        nargs="+",
        default=[],
        metavar="R",
        help="returns whose times are told, first and held (default: none)",
    )
    add(
        "--updates",
        type=float,
        default=math.inf,
        metavar="N",
        help="figures of the evaluations up to so many updates (default: all)",
    )


# --- what they measure ---


def _extra(args: argparse.Namespace) -> list[str]:
    """The task's flags as ``train`` has them."""
    envs = ["--envs-per-sampler", str(args.envs_per_sampler)] if args.envs_per_sampler else []
    module = ["--import", args.import_module] if args.import_module else []
    return [
        *envs,
        *module,
        *(["--plain-env"] if args.plain_env else []),
        *(f"--env-arg={text}" for text in args.env_arg),
    ]


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

    return learner_rows(
        args.batch_size,
        args.repeats,
        args.device,
        args.algo,
        threads=args.threads,
        precision=args.precision,
        overlap=args.overlap,
        updates_per_launch=args.updates_per_launch,
    )


def _rates(args: argparse.Namespace, say: Say) -> list[Row]:
    from spreeze.bench.runs import rates_rows

    return rates_rows(args.env, args.seconds, args.repeats, args.runs_dir, _extra(args))


def _target(args: argparse.Namespace, say: Say) -> list[Row]:
    from spreeze.bench.runs import time_to_target_rows

    extra = [*_extra(args), *(["--algo", args.algo] if args.algo else [])]
    return time_to_target_rows(
        args.env,
        args.target_return,
        args.repeats,
        args.runs_dir,
        args.limit,
        extra,
        say,
        modes=args.modes,
        held=args.held,
    )


def _curve(args: argparse.Namespace, say: Say) -> list[Row]:
    from spreeze.bench.runs import curve_rows, draw_curve

    runs = [find_run(run, Path(args.runs_dir)) for run in args.runs]
    rows = curve_rows(runs, args.target_return, args.updates)
    draw_curve(runs, Path(args.out), args.axes)
    return [*rows, {"metric": "picture", "value": args.out, "unit": "file"}]


def _gpu(args: argparse.Namespace, say: Say) -> list[Row]:
    from spreeze.bench.gpu import gpu_rows

    return gpu_rows(args, say)


class Bench(NamedTuple):
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    rows: Callable[[argparse.Namespace, Say], list[Row]]


BENCHES = {
    "sampling": Bench(
        "the real sampler against a bare environment loop with the same actions", _add_sampling, _sampling
    ),
    "learner": Bench("updates a second of the whole learner, by batch size and device", _add_learner, _learner),
    "rates": Bench("env steps/s and updates/s of whole runs, batch 256, one sampler", _add_rates, _rates),
    "target": Bench("wall time to a return, two modes in turn", _add_target, _target),
    "gpu": Bench("updates a second on one GPU by batch, precision and kind, and the verdict on them", _add_gpu, _gpu),
    "curve": Bench("what finished runs reached and kept, and a picture of their curves", _add_curve, _curve),
}


if __name__ == "__main__":
    sys.exit(main())
