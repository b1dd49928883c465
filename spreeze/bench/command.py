"""The command line of ``python -m spreeze.bench``."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from pathlib import Path

from spreeze.bench import Row, line
from spreeze.bench.hts import LAWS, PARTS
from spreeze.cli.arguments import guarded
from spreeze.machine.hardware import read_machine
from spreeze.machine.output import emit, say
from spreeze.run_directory import find_run, versions
from spreeze.tuner.model import FORMULAS

_WALKER = "Walker2DBulletEnv-v0"


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return guarded(lambda: _bench(args), as_json=args.json)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> None:
    """Ends by an exception, so that the runs and processes that a bench started are ended too."""
    raise SystemExit(128 + number)


def _bench(args: argparse.Namespace) -> int:
    rows = _BENCHES[args.bench](args)
    if args.json:
        emit({"bench": args.bench, "machine": read_machine().one_line(), "versions": versions(), "rows": rows})
    else:
        say(f"{args.bench} on {read_machine().one_line()}")
        for row in rows:
            say(line(row))
    return 0


# --- flags ---


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m spreeze.bench", description="Measure Spreeze on this machine.")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON document on standard output (default: off)")
    common.add_argument("--repeats", type=int, default=5, help="repeats of each figure (default: 5)")
    task = argparse.ArgumentParser(add_help=False)
    _add_env(task)
    task.add_argument("--samplers", type=int, default=1, help="sampler processes (default: 1)")
    task.add_argument("--envs-per-sampler", type=int, default=None, help="environments in a sampler (default: 8)")
    task.add_argument("--import", dest="import_module", metavar="MODULE", default=None,
                      help="module to import for it (default: none)")
    task.add_argument("--env-arg", action="append", default=[], metavar="KEY=VALUE",
                      help="for the environment's constructor, as often as needed (default: none)")
    _add_plain_env(task)
    task.add_argument("--seconds", type=float, default=None,
                      help="length of one measurement [s] (default: 3, of whole runs 90)")
    _add_runs_dir(task)

    def add(name: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return benches.add_parser(name, help=text, description=text, parents=[common, *parents])

    add("sampling", "the real sampler against a bare environment loop with the same actions", task)
    replay = add("replay", "writes, gathers and torn rows of the replay ring")
    replay.add_argument("--checked-rows", type=int, default=10_000_000, help="rows checked for tearing (default: 1e7)")
    _add_learner(add("learner", "updates a second against the matmuls that an update needs"))
    add("together", "sampler and learner alone, together, and with evaluator and visualizer", task)
    add("rates", "env steps/s and updates/s of whole runs, batch 256, one sampler", task)
    _add_goal(add("target", "wall time to a return, asynchronous and serial mode in turn", task))
    _add_tune(add("tune", "the tuner's pick against the exhaustive grid of batch sizes and samplers"))
    _add_hts(add("hts", "HTS-RL against its synchronous baselines, on step times as given and on tasks"))
    curve = add("curve", "picture of the return curves of finished runs")
    curve.add_argument("runs", nargs="+", help="run names or paths, or latest")
    _add_runs_dir(curve, "where runs are")
    curve.add_argument("--out", default="curve.png", help="picture to write (default: curve.png)")
    return parser


def _add_env(parser: argparse.ArgumentParser, what: str = "Gymnasium id") -> None:
    parser.add_argument("--env", default=_WALKER, help=f"{what} (default: {_WALKER})")


def _add_plain_env(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plain-env", action="store_true",
                        help="Bullet tasks as their package has them, not the fast equal ones (default: off)")


def _add_runs_dir(parser: argparse.ArgumentParser, what: str = "where runs go") -> None:
    parser.add_argument("--runs-dir", default="runs", help=f"{what} (default: runs)")


def _add_goal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target-return", type=float, default=-200.0,
                        help="mean of 10 greedy episodes (default: -200)")
    parser.add_argument("--limit", type=float, default=180.0, help="a run is given up after that [s] (default: 180)")


def _add_learner(learner: argparse.ArgumentParser) -> None:
    add = learner.add_argument
    add("--batch-size", type=int, nargs="+", default=[256], help="batch sizes (default: 256)")
    add("--algo", choices=("sac", "td3", "ddpg"), default="sac", help="algorithm (default: sac)")
    add("--threads", type=int, nargs="+", choices=(1, 2), default=[1],
        help="1, or 2 for a pair of threads; both are measured in turn (default: 1)")
    add("--precision", nargs="+", choices=("float32", "bfloat16"), default=["float32"],
        help="of the matmuls; all are measured in turn (default: float32)")
    add("--device", default=None, help="instead: the whole learner with draws from replay on this device or split, "
        "such as cuda:0, split or cpu+cpu (default: off)")
    add("--overlap", action="store_true", help="with --device: the actor one update late")
    add("--updates-per-launch", type=int, default=1,
        help="with --device: updates in one graph of a GPU, 0 for no graph (default: 1)")


def _add_tune(tune: argparse.ArgumentParser) -> None:
    _add_env(tune)
    _add_plain_env(tune)
    tune.add_argument("--objective", choices=tuple(FORMULAS), default="return", help="score (default: return)")
    tune.add_argument("--batch-size", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024],
                      help="batch sizes of the grid, while an update takes at most 0.1 s (default: 32 to 1024)")
    tune.add_argument("--rounds", type=int, default=2, help="rounds over the grid, of 3 measurements (default: 2)")
    tune.add_argument("--busy", action="store_true", help="beside a busy process on one core (default: off)")
    tune.add_argument("--cores", type=int, default=None, help="cores to use, by affinity (default: all)")


def _add_hts(hts: argparse.ArgumentParser) -> None:
    add = hts.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS[:1]),
        help="steps: step times as given; target, paired, correction: tasks (default: steps)")
    add("--seconds", type=float, default=10.0,
        help="what a rate is measured over where step times are given [s] (default: 10)")
    add("--laws", nargs="+", choices=LAWS, default=list(LAWS), help="step times of part steps (default: all)")
    add("--inference-workers", type=int, default=0,
        help="inference workers of HTS-RL where step times are given; 0: samplers infer for themselves (default: 0)")
    add("--env", nargs="+", default=["CartPole-v1"], help="tasks (default: CartPole-v1)")
    add("--algo", choices=("ppo", "a2c"), default="ppo", help="algorithm on tasks (default: ppo)")
    add("--task-seconds", type=float, default=120.0, help="training of one run on a task [s] (default: 120)")
    add("--target-return", type=float, default=475.0, help="mean of 10 greedy episodes of part target (default: 475)")
    add("--samplers", type=int, default=2, help="samplers of HTS-RL on tasks (default: 2)")
    add("--envs", type=int, default=16, help="environments in all on tasks, in either mode (default: 16)")
    add("--set", action="append", default=[], metavar="PART.FIELD=VALUE",
        help="setting of the runs on tasks, as often as needed (default: none)")
    _add_runs_dir(hts)


# --- what they measure ---


def _extra(args: argparse.Namespace) -> list[str]:
    """The task's flags as ``train`` has them."""
    envs = ["--envs-per-sampler", str(args.envs_per_sampler)] if args.envs_per_sampler else []
    module = ["--import", args.import_module] if args.import_module else []
    return [*envs, *module, *(["--plain-env"] if args.plain_env else []),
            *(f"--env-arg={text}" for text in args.env_arg)]


def _say(args: argparse.Namespace) -> Callable[[str], None]:
    return lambda text: say(text, as_json=args.json)


def _sampling(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench import sampling

    plan = sampling.task_plan(args.env, args.samplers, args.envs_per_sampler, args.import_module,
                              plain=args.plain_env, env_args=tuple(args.env_arg))
    seconds = args.seconds or 3.0
    if args.bench == "together":
        return sampling.together_rows(plan, args.repeats, seconds)
    return [*sampling.sampling_rows(plan, args.repeats, seconds), *sampling.policy_rows(plan, args.repeats),
            *sampling.samplers_rows(plan, args.repeats, seconds)]


def _replay(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.replay import replay_rows

    return replay_rows(args.repeats, checked_rows=args.checked_rows)


def _learner(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench import learner

    if args.device is not None:
        return learner.placed_rows(args.batch_size, args.repeats, args.device, args.algo, overlap=args.overlap,
                                   precision=args.precision[0], updates_per_launch=args.updates_per_launch)
    return learner.case_rows(learner.learner_cases(
        args.batch_size, args.repeats, threads=args.threads, algo=args.algo, precisions=args.precision))


def _rates(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.runs import rates_rows

    return rates_rows(args.env, args.seconds or 90.0, args.repeats, args.runs_dir, _extra(args))


def _goal(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.runs import time_to_target_rows

    return time_to_target_rows(args.env, args.target_return, args.repeats, args.runs_dir, args.limit, _extra(args),
                               _say(args))


def _tune(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.tune import Case, tune_rows

    case = Case(env_id=args.env, plain=args.plain_env, objective=args.objective, runs=args.repeats,
                batches=tuple(sorted(args.batch_size)), rounds=args.rounds, busy=args.busy, cores=args.cores)
    return tune_rows(case, _say(args))


def _hts(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.hts import hts_rows

    return hts_rows(args, _say(args))


def _curve(args: argparse.Namespace) -> list[Row]:
    from spreeze.bench.runs import draw_curve

    draw_curve([find_run(run, Path(args.runs_dir)) for run in args.runs], Path(args.out))
    return [{"metric": "picture", "value": args.out, "unit": "file"}]


_BENCHES: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "sampling": _sampling, "replay": _replay, "learner": _learner, "together": _sampling, "rates": _rates,
    "target": _goal, "tune": _tune, "hts": _hts, "curve": _curve,
}
