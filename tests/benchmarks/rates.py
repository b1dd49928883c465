"""Whole runs: env steps/s and updates/s at batch 256 with one sampler, and the time to a return in two modes.

A run of the latter is given up after ``--seconds``.
"""

import argparse

from common import main, say
from figures import Row
from whole_runs import rates_rows, time_to_target_rows


def _extra(args: argparse.Namespace) -> list[str]:
    flags = ["--plain-env"] if args.plain_env else []
    return [*flags, *(["--algo", args.algo] if args.algo else []), *(f"--set={text}" for text in args.set)]


def rates(args: argparse.Namespace) -> list[Row]:
    return rates_rows(args.env, args.seconds, args.repeats, args.runs_dir, _extra(args))


def target(args: argparse.Namespace) -> list[Row]:
    task = args.env, args.target_return, args.repeats, args.runs_dir, args.seconds
    return time_to_target_rows(*task, _extra(args), say, modes=args.modes, held=args.held)


if __name__ == "__main__":
    main(
        __doc__ or "",
        {"rates": rates, "target": target},
        flags={"plain_env": False, "algo": "", "modes": ("spreeze", "serial"), "held": False},
        env="Walker2DBulletEnv-v0",
        seconds=90.0,
        target_return=-200.0,
    )
