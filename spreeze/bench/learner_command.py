"""``python -m spreeze.bench learner``: its flags, and which of them measures what."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spreeze.hardware import read_machine
from spreeze.workers.plan import RunPlan

Row = dict[str, Any]
_UNITS = {
    "updates_per_s": "1/s", "update_frames_per_s": "1/s", "product_floor_share": "share", "matrix_flop_per_s": "flop/s",
    "over_one_thread": "ratio", "over_float32": "ratio", "product_flop": "flop", "learner_critic_share": "share",
    "learner_actor_share": "share",
}

_FLOOR_TARGETS = {256: ">= 0.85", 1024: ">= 0.92", 8192: ">= 0.92"}
_BESIDE: dict[str, Any] = {
    "samplers": 1, "envs_per_sampler": None, "import_module": None, "plain_env": False, "env_arg": [],
}
"""A task's options that the learner's bench does not have."""


def add_flags(learner: argparse.ArgumentParser) -> None:
    """The flags of the bench."""
    learner.add_argument("--batch-size", type=int, nargs="+", default=[256], help="batch sizes (default: 256)")
    learner.add_argument("--algo", choices=("sac", "td3", "ddpg"), default="sac", help="algorithm (default: sac)")
    learner.add_argument("--threads", type=int, nargs="+", choices=(1, 2), default=[1],
                         help="1, or 2 for a pair of threads; both are measured in turn (default: 1)")
    learner.add_argument("--precision", nargs="+", choices=("float32", "bfloat16"), default=["float32"],
                         help="of the products; all are measured in turn (default: float32)")
    learner.add_argument("--device", default=None, help="instead: the whole learner with draws from replay on this "
                         "device or split, such as cuda:0, split or cpu+cpu (default: off)")
    learner.add_argument("--overlap", action="store_true", help="with --device: the actor one update late")
    learner.add_argument("--updates-per-launch", type=int, default=1,
                         help="with --device: updates in one graph of a GPU, 0 for no graph (default: 1)")
    learner.add_argument("--copy-interval", type=int, default=0,
                         help="besides: a pair of threads, actor and critics beside copies of each other that are "
                         "made anew after so many updates (default: 0, not measured)")
    learner.add_argument("--plot", default=None, metavar="FILE", help="picture to write besides (default: none)")
    learner.add_argument("--publish", action="store_true",
                         help="instead: what 10 publications/s of the weights cost (default: off)")
    learner.add_argument("--guard", action="store_true",
                         help="instead: what the guard against non-finite gradients costs (default: off)")
    learner.add_argument("--against", choices=("sb3",), default=None,
                         help="instead: our SAC update against that of stable-baselines3 (default: none)")
    learner.add_argument("--beside", action="store_true",
                         help="instead: two threads over one, each with a sampler held back beside it (default: off)")
    learner.add_argument("--env", default="Walker2DBulletEnv-v0",
                         help="task whose sizes --against and --beside take (default: Walker2DBulletEnv-v0)")


def learner_rows(args: argparse.Namespace, plan_of: Callable[[argparse.Namespace], RunPlan]) -> list[Row]:
    """Measures what was asked for; ``plan_of`` gives a task's plan from its flags."""
    from spreeze.bench import learner
    from spreeze.bench.placed import placed_rows

    measure = _instead(args, plan_of)
    if measure is not None:
        return [row for size in args.batch_size for row in measure(size)]
    if args.device is not None:
        return placed_rows(args.batch_size, args.repeats, args.device, args.algo, precision=args.precision[0],
                           overlap=args.overlap, updates_per_launch=args.updates_per_launch)
    cases = learner.learner_rows(args.batch_size, args.repeats, threads=args.threads, algo=args.algo,
                                 precisions=args.precision, copy_interval=args.copy_interval)
    rows: list[Row] = []
    for case in cases:
        more = {name: case[name] for name in ("batch_size", "algo", "learner_threads", "precision", "copy_interval")}
        for name, unit in _UNITS.items():
            if name not in case:
                continue
            plain = case["learner_threads"] == 1 and case["precision"] == "float32"
            target = _FLOOR_TARGETS.get(case["batch_size"]) if plain and name == "product_floor_share" else None
            rows.append({"metric": name, "value": case[name], "unit": unit, "repeats": case["repeats"].get(name, []),
                         **more, **({"target": target} if target else {})})
    if args.plot:
        from spreeze.bench.learner_plot import draw_learner

        draw_learner(cases, read_machine().one_line(), Path(args.plot))
        rows.append({"metric": "picture", "value": args.plot, "unit": "file"})
    return rows


def _instead(
    args: argparse.Namespace, plan_of: Callable[[argparse.Namespace], RunPlan]
) -> Callable[[int], list[Row]] | None:
    """What else the learner's bench was asked to measure at a batch size, None for updates over products."""
    from spreeze.bench.beside import beside_rows
    from spreeze.bench.costs import guard_rows, publication_rows
    from spreeze.bench.peers import against_rows

    if args.against:
        return lambda size: against_rows(args.env, size, args.repeats)
    if args.beside:
        plan = plan_of(argparse.Namespace(**vars(args), **_BESIDE))
        return lambda size: beside_rows(plan, size, args.repeats, 3.0)
    if args.publish:
        return lambda size: publication_rows(size, args.algo, args.repeats)
    if args.guard:
        return lambda size: guard_rows(size, args.algo, args.repeats)
    return None
