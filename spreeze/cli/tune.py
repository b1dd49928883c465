"""``python -m spreeze tune``: measures this machine for a task, prints the choice and its reasons."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from spreeze.cli.arguments import Parser, build_parser, check_output, guarded
from spreeze.cli.planning import layers_of, untunable_env
from spreeze.cli.terminal import show_tuning
from spreeze.config.layers import effect_notes, resolve, with_algorithm
from spreeze.config.profiles import export_path, profile_text
from spreeze.envs.probe import TIMED_STEPS, probe_of
from spreeze.errors import ConfigError, EnvError, ResourceError
from spreeze.files import replace_bytes, write_json
from spreeze.machine.hardware import read_machine
from spreeze.machine.output import background_output, emit, say
from spreeze.process_identity import process_age_s
from spreeze.runtime.interrupts import Interrupts
from spreeze.tuner.run import TunerCallbacks, Tuning, layer_of


def tune_parser() -> Parser:
    """The flags of ``spreeze.train``, and those of ``tune`` itself."""
    parser = build_parser()
    parser.prog = "python -m spreeze tune"
    parser.description = "Benchmark this machine with a task to choose batch size, threads, device and samplers."
    parser.epilog = "Takes the flags of train; settings given here are kept, the others are tuned."
    parser.flag("--out", text="also write the result to this file", shown="cache only", metavar="FILE")
    text = "tune only samplers and environments, as --cluster does on hosts without a learner"
    parser.flag("--no-learner", text=text, default=False)
    text = "save the result as profiles/NAME.toml or as a .toml file, for --profile"
    parser.flag("--export", text=text, metavar="NAME|PATH")
    parser.shown_first = {*parser.shown_first, "--out", "--no-learner", "--export"} - {"--resume"}
    return parser


def main(argv: list[str] | None = None) -> int:
    args = tune_parser().parse_args(argv)
    with background_output():
        return guarded(lambda: _tune(args), as_json=args.json)


def _tune(args: argparse.Namespace) -> int:
    check_output(args.out)
    if args.resume is not None:
        raise ConfigError(f"--resume {args.resume}: tune needs an environment, not a run; name it with --env")
    export = export_path(args.export) if args.export else None
    machine = read_machine()
    with Interrupts() as interrupts:
        layers, notes = layers_of(args, None, machine)
        settings = resolve(layers)
        for note in notes:
            say(note, as_json=args.json)
        probe = probe_of(
            settings.config,
            steps=TIMED_STEPS,
            interrupted=lambda: interrupts.stop_requested,
            second=True,
            on_wait=lambda text: say(text, as_json=args.json),
        )
        if (why := untunable_env(probe)) is not None:
            raise EnvError(f"{why}; train without --auto")
        layers, settings, why = with_algorithm(layers, probe.spec, probe.step_us_median)
        if why is not None:
            say(why, as_json=args.json)
        for note in effect_notes(settings, tuned=True):
            say(note, as_json=args.json)
        listener = TunerCallbacks(say=lambda text: say(text, as_json=args.json))
        tuning = Tuning(settings, probe, machine, interrupts, listener, samplers_only=args.no_learner)
        known = None if args.fresh else tuning.known()
        record = known or tuning.measured(spent_s=process_age_s(), fresh=args.fresh)
    show_tuning(record, sys.stderr if args.json else sys.stdout, reasons=True)
    if export is not None:
        tuned = resolve([*layers[:-1], layer_of(record), layers[-1]])
        text = profile_text(tuned, record, machine.one_line())
        try:
            replace_bytes(export, text.encode())  # runs that start in the meantime look through the folder
        except OSError as error:
            raise ResourceError(f"cannot write {export}: {error}") from None
        say(f"written: {export}; load it with --profile {args.export}", as_json=args.json)
    if args.out:
        write_json(Path(args.out), record)
    if args.json:
        emit(record)
    return 0
