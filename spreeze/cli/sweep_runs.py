"""Runs of a sweep: what is planned and known of each, kept in ``NAME.sweep.json``, and their processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from spreeze.cli import train
from spreeze.cli.arguments import build_parser
from spreeze.cli.planning import layers_of
from spreeze.config.layers import Settings, effect_notes, resolve, with_algorithm
from spreeze.config.schema import check_name
from spreeze.envs.probe import Probe, probe_of
from spreeze.errors import ConfigError, ResourceError, RunError
from spreeze.files import existing_parent, read_json, write_json
from spreeze.machine.awake import AWAKE
from spreeze.machine.hardware import read_machine, use_cores
from spreeze.machine.processes import end_with_parent, kill_and_wait
from spreeze.metrics import comparison
from spreeze.metrics.stop_conditions import StopReason, stop_reason
from spreeze.run_directory import launch_log, names_from, read_run
from spreeze.tuner.run import check_tunable

_RUN_BYTES = 20_000_000  # disk that a run takes at least: two checkpoints of small networks, metrics and log
POLL_S = 0.1
_CLOSING_S = 60.0  # time of an interrupted run for its checkpoint and last evaluation


OF_EACH_RUN = {
    "run.seed": "use --seeds N for seeds 1 to N",
    "run.name": "use --name to name the sweep",
    "run.runs_dir": "use --runs-dir for the directory",
}
"""Settings that a sweep gives to each of its runs -> what to do instead."""


@dataclass
class SweepRun:
    setting: str  # ``section.field=value ...``; empty if nothing is varied
    seed: int
    arguments: list[str]  # flags of ``spreeze.train`` without the run's name and directory
    stem: str  # name of the first attempt; later ones end in ``-again2``, ``-again3``
    attempts: int = 0
    state: str = "waiting"
    """``waiting``, ``running``, ``finished``, ``interrupted``, ``failed``, or of a search ``pruned``."""
    error: str | None = None

    @property
    def name(self) -> str:
        return self.stem if self.attempts < 2 else f"{self.stem}-again{self.attempts}"


@dataclass
class Sweep:
    name: str
    stop_seconds: float | None
    target: float | None
    side_by_side: int
    runs: list[SweepRun]
    search: dict[str, Any] | None = None
    """Plan of a search (``sweep_search``): ``trials``, ``arguments``, ``set`` and ``seeds``; None for a grid."""

    @property
    def tunes(self) -> bool:
        return any("--auto" in run.arguments for run in self.runs)

    def renamed(self, name: str) -> Sweep:
        """This plan under another name, before its first run."""
        runs = [dataclasses.replace(run, stem=name + run.stem.removeprefix(self.name)) for run in self.runs]
        return dataclasses.replace(self, name=name, runs=runs)

    def taken(self, runs_dir: Path) -> Path | None:
        """The first of its runs' directories that exists."""
        return next((runs_dir / run.stem for run in self.runs if (runs_dir / run.stem).exists()), None)

    def write(self, runs_dir: Path) -> None:
        finished = [run.name for run in self.runs if run.state == "finished"]
        write_json(sweep_path(runs_dir, self.name), {**self.as_json(), "finished": finished})

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "search" or value}


def sweep_path(runs_dir: Path, name: str) -> Path:
    return runs_dir / f"{name}.sweep.json"


def read_sweep(runs_dir: Path, name: str) -> Sweep:
    """Reads the file of a sweep; a RunError if there is none, or it is damaged."""
    path = sweep_path(runs_dir, check_name(name))
    if not path.is_file():
        known = sorted(path.name.removesuffix(".sweep.json") for path in runs_dir.glob("*.sweep.json"))
        raise RunError(f"no sweep '{name}' in {runs_dir} (sweeps: {', '.join(known) or 'none'})")
    data: dict[str, Any] = read_json(path)
    data.pop("finished", None)  # for the page; follows from the runs
    try:
        return Sweep(**{**data, "runs": [SweepRun(**run) for run in data["runs"]]})
    except (KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}); start the sweep again under another name") from None


def claimed(sweep: Sweep, runs_dir: Path, *, named: bool) -> Sweep:
    """The sweep under a free name, whose file now exists: two sweeps that start at once get different ones.

    Raises a RunError if the user has ``named`` it, and that name is taken.
    """
    for name in (sweep.name,) if named else names_from(sweep.name):
        renamed = sweep.renamed(name)
        with contextlib.suppress(FileExistsError):
            if renamed.taken(runs_dir) is None:
                sweep_path(runs_dir, name).touch(exist_ok=False)
                return renamed
    raise RunError(
        f"sweep {sweep.name} exists in {runs_dir}; --resume {sweep.name} continues it, or choose another --name"
    )


def core_shares(cores: Sequence[int], count: int) -> list[list[int]]:
    """Deals the same number of cores to each of ``count`` runs; a ConfigError if there is not one for each."""
    if not 1 <= count <= len(cores):
        raise ConfigError(f"--side-by-side {count}: 1 to {len(cores)}, a core for each run")
    per_run = len(cores) // count
    return [list(cores[per_run * i : per_run * (i + 1)]) for i in range(count)]


def checked_settings(arguments: list[str], probes: dict[str, Probe]) -> tuple[Settings, list[str]]:
    """Settings of a run with these flags, with an algorithm that fits, and lines on settings without effect.

    ``probes`` keeps the probe of each environment. Raises the errors that would reject the run, and a ConfigError if it
    has no stop condition.
    """
    args = build_parser().parse_args(arguments)
    base, _ = layers_of(args, None, read_machine())
    config = resolve(base).config
    if not (config.stop.seconds or config.stop.env_steps or config.stop.updates):
        raise ConfigError("the runs have no stop condition; set --seconds or --set stop.env_steps=N")
    key = repr((config.env, config.image))
    probes[key] = probes.get(key) or probe_of(config)
    settings = with_algorithm(base, probes[key].spec).settings
    if args.auto:
        check_tunable(settings.config)
    return settings, effect_notes(settings, tuned=args.auto)


def check_disk(runs_dir: Path, count: int) -> None:
    folder = existing_parent(runs_dir)
    free = shutil.disk_usage(folder).free
    if count * _RUN_BYTES > free:
        raise ResourceError(
            f"{count} runs need at least {count * _RUN_BYTES / 1e6:.0f} MB of disk, "
            f"{free / 1e6:.0f} MB are free in {folder}; free some disk space, or choose fewer seeds or values"
        )


@dataclass
class RunProcess:
    run: SweepRun
    process: subprocess.Popen[bytes]
    errors: IO[bytes]


def start(run: SweepRun, cores: Sequence[int], runs_dir: Path) -> RunProcess:
    run.attempts += 1
    while (runs_dir / run.name).exists():
        run.attempts += 1
    run.state, run.error = "running", None
    errors = _open_log(run.name, runs_dir)
    command = run_command(cores, [*run.arguments, "--runs-dir", str(runs_dir), "--set", f"run.name={run.name}"])
    process = subprocess.Popen(
        [*command, "--json"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
    )
    return RunProcess(run, process, errors)


def _open_log(name: str, runs_dir: Path) -> IO[bytes]:
    """The file that takes a run's terminal output, where the dashboard finds it."""
    log = launch_log(name, runs_dir)
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    return open(os.open(log, flags, 0o600), "r+b")


def run_command(cores: Iterable[int], arguments: Sequence[str]) -> list[str]:
    """Command of a run's process that ends in order when this process dies."""
    entry = f"from {__name__} import begin; begin()"
    return [sys.executable, "-c", entry, str(os.getpid()), ",".join(map(str, cores)), *arguments]


def begin() -> None:
    """Entry of a run's process: pinned to its cores, stopped in order with the sweep; then ``spreeze.train``."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent, cores, *arguments = sys.argv[1:]
    end_with_parent(signal.SIGINT)
    if os.getppid() != int(parent):
        sys.exit(3)
    use_cores([int(core) for core in cores.split(",")])
    sys.argv = ["spreeze.train", *arguments]  # what run.json keeps as the command
    sys.exit(train.main(arguments))


def note_end(child: RunProcess, runs_dir: Path, tell: Callable[[str], None]) -> None:
    run, code = child.run, child.process.returncode
    reason = stop_reason(read_run(runs_dir / run.name).get("exit_reason"))
    asked = reason in (StopReason.REQUEST, StopReason.INTERRUPT)
    run.state = "failed" if code != 0 else "interrupted" if asked else "finished"
    child.errors.seek(0)
    lines = child.errors.read().decode(errors="replace").strip().splitlines()
    child.errors.close()
    if code != 0:
        run.error = f"exit code {code}: {lines[-1] if lines else 'no output'}"
    else:
        try:
            comparison.read_curve(runs_dir / run.name)
        except RunError as error:
            run.state, run.error = "failed", str(error)
    tell(f"{run.name} {run.state}" + (f" ({run.error})" if run.error else ""))


def end(children: Sequence[RunProcess], at_once: Callable[[], bool]) -> None:
    """Asks the runs to stop, which writes their checkpoints; another Ctrl-C, or too long a wait, kills them."""
    for child in children:
        child.run.state = "interrupted"
        child.process.send_signal(signal.SIGINT)
    deadline_s = AWAKE() + _CLOSING_S
    while any(child.process.poll() is None for child in children) and AWAKE() < deadline_s and not at_once():
        time.sleep(POLL_S)
    for child in children:
        if child.process.poll() is None:
            kill_and_wait(child.process)
        child.errors.close()
