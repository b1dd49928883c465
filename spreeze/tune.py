"""``python -m spreeze.tune``: measure this machine for a task, print the choice and why."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from spreeze.arguments import build_parser, user_values
from spreeze.cli import emit, guarded, say
from spreeze.envs.probe import probe_env
from spreeze.envs.registry import default_env_id
from spreeze.hardware import read_machine
from spreeze.lookup import check_output
from spreeze.rundir import write_json
from spreeze.settings import Layer, read_profile, resolve, task_profile, with_algorithm
from spreeze.tuning import tuned_layer
from spreeze.workers.interrupts import Interrupts


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = build_parser()
    parser.prog = "python -m spreeze.tune"
    parser.description = "Measure this machine for a task and choose batch size, learner threads and samplers."
    parser.epilog = "Takes the flags of spreeze.train; what you set yourself stays, the rest is tuned around it."
    parser.add_argument("--out", metavar="FILE", default=None, help="also write the record here (default: cache only)")
    args = parser.parse_args(argv)
    return guarded(lambda: _tune(args), as_json=args.json)


def _tune(args: argparse.Namespace) -> int:
    check_output(args.out)
    with Interrupts() as interrupts:
        user = Layer("user", user_values(args))
        env_id = user.values.get("env", {}).get("id") or default_env_id().value
        profile = read_profile(args.profile) if args.profile else task_profile(env_id)
        layers = [Layer("default", {"env": {"id": env_id}}), *([profile] if profile else []), user]
        settings = resolve(layers)
        part = settings.config.env
        probe = probe_env(env_id, part.import_module, steps=2000, plain=part.plain, args=part.args,
                          image=dataclasses.asdict(settings.config.image))
        settings, why = with_algorithm(layers, settings, probe.spec)
        if why is not None:
            say(why, as_json=args.json)
        _, record = tuned_layer(settings, probe, read_machine(), interrupts, fresh=args.fresh,
                                say=lambda text: say(text, as_json=args.json))
    if args.out:
        write_json(Path(args.out), record)
    if args.json:
        emit(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
