"""The command line of ``spreeze.train``: flags are short names of settings, help comes from them."""

from __future__ import annotations

import argparse
import dataclasses

from spreeze.cli.common import Parser
from spreeze.config.layers import Values, parse_assignment
from spreeze.config.schema import PARTS
from spreeze.errors import ConfigError

FLAGS: dict[str, str] = {
    "--env": "env.id",
    "--import": "env.import_module",
    "--algo": "run.algo",
    "--mode": "run.mode",
    "--seed": "run.seed",
    "--runs-dir": "run.runs_dir",
    "--name": "run.name",
    "--learners": "run.learners",
    "--samplers": "sampling.samplers",
    "--envs-per-sampler": "sampling.envs_per_sampler",
    "--executors": "rollout.executors",
    "--envs-per-executor": "rollout.envs_per_executor",
    "--actors": "rollout.actors",
    "--sync-interval": "rollout.sync_interval",
    "--correction": "rollout.correction",
    "--synchrony": "rollout.synchrony",
    "--batch-size": "learner.batch_size",
    "--replay-capacity": "replay.capacity",
    "--learner-threads": "learner.threads",
    "--device": "learner.device",
    "--objective": "tuning.objective",
    "--cpu-target": "tuning.cpu_target",
    "--gpu-target": "tuning.gpu_target",
    "--leave-free": "tuning.leave_free",
    "--seconds": "stop.seconds",
    "--env-steps": "stop.env_steps",
    "--updates": "stop.updates",
    "--target-return": "stop.target_return",
}
"""flag -> part.field; any other field is reached by --set part.field=value."""

_TYPES = {"int": int, "float": float, "str": str, "bool": bool}


def build_parser() -> argparse.ArgumentParser:
    """The parser; every setting's flag states its unit and default."""
    parser = Parser(
        prog="python -m spreeze.train",
        description="Train an agent: samplers, shared-memory replay, learner, evaluation and visualization at once.",
        epilog="Stop with Ctrl-C: once writes a checkpoint and evaluates, twice ends at once.",
    )
    for flag, key in FLAGS.items():
        part, name = key.split(".")
        item = next(item for item in dataclasses.fields(PARTS[part]) if item.name == name)
        meta = item.metadata
        default = "not set" if item.default is None else item.default
        unit = f" [{meta['unit']}]" if meta["unit"] else ""
        parser.add_argument(flag, dest=key, default=None, type=_TYPES[str(item.type).split(" |")[0]],
                            choices=meta["choices"], metavar=None if meta["choices"] else name.upper(),
                            help=f"{meta['doc']}{unit} (default: {default})".replace("%", "%%"))
    parser.add_argument("--plain-env", action="store_true",
                        help="step Bullet tasks as their package has them, not the fast equal ones (default: off)")
    parser.add_argument("--env-arg", action="append", default=[], metavar="KEY=VALUE",
                        help="a number, true, false or text for the environment's constructor, as often as needed "
                             "(default: none)")
    parser.add_argument("--samples-per-insert", metavar="MIN:MAX", default=None,
                        help="band of transitions drawn / transitions inserted: below MIN samplers wait, above MAX the "
                             "learner waits [ratio] (default: 8:512)")
    parser.add_argument("--auto", action="store_true",
                        help="measure this machine (at most 60 s, then cached) and choose batch size, learner threads "
                             "and samplers; what you set yourself stays (default: off)")
    parser.add_argument("--fresh", action="store_true", help="with --auto: measure again (default: use the cache)")
    parser.add_argument("--profile", metavar="NAME|PATH", default=None,
                        help="settings from profiles/NAME.toml or a file (default: the task's own profile, if any)")
    parser.add_argument("--resume", metavar="RUN|latest", default=None,
                        help="continue a run: its name, its path, or latest (default: a new run)")
    parser.add_argument("--save-replay", action="store_true", help="store replay with each checkpoint (default: off)")
    parser.add_argument("--no-visualizer", action="store_true", help="no pictures and clips (default: on)")
    parser.add_argument("--no-governor", action="store_true",
                        help="samplers do not rest while other programs need the cores (default: they do)")
    parser.add_argument("--json", action="store_true",
                        help="exactly one JSON document on standard output at the end (default: off)")
    parser.add_argument("--set", action="append", default=[], metavar="PART.FIELD=VALUE",
                        help="any setting, for example --set sac.gamma=0.98 (default: none); see config.toml of a run")
    return parser


def user_values(args: argparse.Namespace) -> Values:
    """What the user set on the command line, as a settings layer.

    Raises:
        ConfigError: a malformed --set or --samples-per-insert.
    """
    values: Values = {}
    for key in FLAGS.values():
        value = getattr(args, key)
        if value is not None:
            part, name = key.split(".")
            values.setdefault(part, {})[name] = value
    if args.samples_per_insert is not None:
        low, high = parse_band(args.samples_per_insert)
        values.setdefault("replay", {}).update(samples_per_insert_min=low, samples_per_insert_max=high)
    if args.plain_env:
        values.setdefault("env", {})["plain"] = True
    if args.env_arg:
        values.setdefault("env", {})["args"] = tuple(args.env_arg)
    if args.save_replay:
        values.setdefault("replay", {})["save"] = True
    if args.no_visualizer:
        values.setdefault("visualizer", {})["enabled"] = False
    if args.no_governor:
        values.setdefault("tuning", {})["govern"] = False
    for text in args.set:
        for part, fields in parse_assignment(text).items():
            values.setdefault(part, {}).update(fields)
    return values


def parse_band(text: str) -> tuple[float, float]:
    """``MIN:MAX`` as two numbers; either may be left out (0, no upper bound).

    Raises:
        ConfigError: not two numbers.
    """
    low, sep, high = text.partition(":")
    try:
        if not sep:
            raise ValueError
        return float(low or 0.0), float(high or 1e9)
    except ValueError:
        raise ConfigError(f"--samples-per-insert {text!r}: expected MIN:MAX, for example 8:512") from None

