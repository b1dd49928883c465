"""Chooses the algorithm for an untuned task: candidates train in turn, and the best one continues its run.

Each candidate is a separate run, continued at each round until it is clearly worse. The result is cached for the same
machine and task, like those of the tuner.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spreeze.cli.arguments import user_values
from spreeze.config.algorithms import find_row, fitting_algorithms
from spreeze.config.layers import DEFAULT, USER, Settings
from spreeze.envs.probe import Probe
from spreeze.errors import RunError, SpreezeError
from spreeze.files import existing_parent, read_json, write_json
from spreeze.formatting import clean, number
from spreeze.machine.hardware import Machine, usable_cores
from spreeze.machine.processes import kill_and_wait
from spreeze.metrics.comparison import read_curve
from spreeze.metrics.return_curve import FINAL_EVALUATIONS, Level, level_of
from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.tuning_record import ALGORITHMS
from spreeze.run_directory import free_names, new_name, versions
from spreeze.runtime.interrupts import Interrupts
from spreeze.transport.shared_memory import readable
from spreeze.tuner.run import cache_dir, cache_key
from spreeze.types import EnvSpec, RowLayout

_BESIDE = ("crossq", "ppo")  # algorithms that are compared with the default, where they fit
_ROUNDS_S = (60.0, 120.0, 240.0)  # training time of each candidate at the end of a round
_MAX_S, _MIN_S = 300.0, 20.0  # maximum time that all candidates but the best may take, and minimum time of each
_MIN_STEPS = 1_000  # env steps in the first round below which no candidate has learned anything
_CLEARLY = 2.0
"""A candidate is clearly worse if intervals of this many standard errors around the two levels do not overlap."""
_CLOSING_S, _POLL_S = 60.0, 0.2


@dataclass
class ComparedAlgorithm:
    """An algorithm that is compared, with its run."""

    algo: str
    run: Path
    seconds: float = 0.0  # training time so far
    level: Level | None = None  # the mean of its latest evaluations; None while there is none
    failure: str | None = None

    def clearly_below(self, best: Level) -> bool:
        level = self.level
        return level is not None and level.mean + _CLEARLY * level.error < best.mean - _CLEARLY * best.error

    @property
    def text(self) -> str:
        if self.failure is not None:
            return f"{self.algo} failed ({self.failure})"
        if self.level is None:
            return f"{self.algo} was not evaluated in {self.seconds:.0f} s"
        error = number(_CLEARLY * self.level.error)
        return f"{self.algo} {number(self.level.mean)} +- {error} after {self.seconds:.0f} s"


def candidates_for(args: argparse.Namespace, settings: Settings, spec: EnvSpec) -> list[str]:
    """The algorithms to compare for a new run; none if an algorithm or profile is set, or time is short."""
    stop, sources = settings.config.stop, settings.sources
    if {*sources.values()} - {USER, DEFAULT}:
        return []
    counted = stop.updates is not None or stop.env_steps is not None
    if not args.auto or args.resume or counted or "run.algo" in sources or sources.get("run.mode") == USER:
        return []
    if not settings.config.evaluation.enabled or settings.config.cluster.address:
        return []
    default, *others = fitting_algorithms(spec)
    names = [default, *(name for name in _BESIDE if name in others)]
    return names if len(names) > 1 and rounds_of(settings, len(names)) else []


def rounds_of(settings: Settings, candidates: int) -> tuple[float, ...]:
    """Training times of each candidate at which candidates are compared; empty where the run is too short."""
    fraction, limit_s = settings.config.tuning.algorithm_share, settings.config.stop.limit_s or math.inf
    max_s = min(fraction * limit_s, _MAX_S) / (candidates - 1) if fraction else 0.0
    if max_s < _MIN_S and (not fraction or settings.sources.get("tuning.algorithm_share") != USER):
        return ()
    return tuple(end_s for end_s in _ROUNDS_S if end_s <= max_s) or (max_s,)


def step_us_of(settings: Settings, probe: Probe) -> float | None:
    """Time of an env step [us], as set or else as measured; None if unknown."""
    return settings.config.tuning.step_us or probe.step_us_median


def too_slow(settings: Settings, names: Sequence[str], step_us: float | None, cores: float) -> str | None:
    """Why the first round shows nothing of an environment whose steps take so long; None if it may show something."""
    first_s, samplers = rounds_of(settings, len(names))[0], max(1.0, cores - 1.0)
    if step_us is None or samplers * first_s * 1e6 / step_us >= _MIN_STEPS:
        return None
    return (
        f"{', '.join(names)} are not compared: with {step_us / 1e3:.0f} ms an env step, {first_s:.0f} s each would "
        f"show nothing; {names[0]} is the default, --algo NAME chooses another"
    )


def latest_level(curve: Sequence[EvaluationRow]) -> Level | None:
    """The level of at most ten evaluations in a run's second half, by a policy that has learned; None if too few."""
    learned = [row for row in curve if row.updates] or [*curve]
    rows = [row for row in learned[-FINAL_EVALUATIONS:] if row.t >= curve[-1].t / 2.0]
    if len(rows) > 1:
        return level_of(rows)
    (row,) = rows
    if row.episodes < 2:
        return None
    return Level(row.return_mean, row.return_std / math.sqrt(row.episodes - 1), row.t)


class AlgorithmChoice:
    """Compares algorithms on a task by runs of the user's command."""

    def __init__(
        self,
        command: Sequence[str],
        args: argparse.Namespace,
        settings: Settings,
        probe: Probe,
        machine: Machine,
        say: Callable[[str], None],
    ) -> None:
        self._command, self._args, self._settings, self._say = list(command), args, settings, say
        run, spec, self._step_us = settings.config.run, probe.spec, step_us_of(settings, probe)
        self._folder = Path(run.runs_dir)
        self._stem = run.name or new_name(spec.env_id, "", run.seed).replace("__", "_")
        row_bytes = math.inf if spec.frames is not None else RowLayout.of(spec).row_bytes
        free_bytes = shutil.disk_usage(existing_parent(self._folder)).free
        self._saves_replay = 4 * settings.config.replay.capacity * row_bytes < free_bytes  # a save writes a second copy
        key = cache_key({"machine": machine.identity(), "env": dataclasses.asdict(spec), "versions": versions()})
        self._path = cache_dir() / f"algorithm-{key}.json"

    def known(self, names: Sequence[str]) -> str | None:
        """The best of these algorithms in an earlier comparison; None without one."""
        record = {} if self._args.fresh else read_json(self._path)
        algo = record.get("algo")
        if algo not in names or record.get("compared") != list(names):
            return None
        self._say(f"algorithm {algo}: {clean(record.get('reason'), 400)} (compared before; --fresh compares again)")
        return str(algo)

    def best(self, names: Sequence[str], interrupts: Interrupts) -> ComparedAlgorithm:
        """Trains the candidates in turn; returns the best. A RunError if all fail, a KeyboardInterrupt on request."""
        rounds = rounds_of(self._settings, len(names))
        times = ", ".join(f"{end_s:.0f}" for end_s in rounds)
        self._say(
            f"algorithms {', '.join(names)} learn the task in turn and are compared after {times} s each; the best "
            "goes on with what it has learned (--algo NAME skips the comparison)"
        )
        folders = {name: next(free_names(self._folder, f"{self._stem}-{name}")) for name in names}
        candidates = [ComparedAlgorithm(name, self._folder / folder) for name, folder in folders.items()]
        left = list(candidates)
        for end_s in rounds:
            for candidate in left:
                self._learn(candidate, end_s, interrupts)
            left = [candidate for candidate in left if candidate.failure is None]
            if not left:
                failures = "; ".join(candidate.text for candidate in candidates)
                raise RunError(f"no algorithm could learn the task: {failures}")
            best = max((candidate.level for candidate in left if candidate.level is not None), default=None)
            left = [candidate for candidate in left if best is None or not candidate.clearly_below(best)]
            self._say(f"algorithms: {', '.join(candidate.text for candidate in candidates)}")
            if len(left) == 1:
                break
        chosen = max(left, key=lambda candidate: -math.inf if candidate.level is None else candidate.level.mean)
        self._keep(chosen, candidates, names)
        return chosen

    def _keep(self, chosen: ComparedAlgorithm, candidates: Sequence[ComparedAlgorithm], names: Sequence[str]) -> None:
        others = ", ".join(candidate.text for candidate in candidates if candidate is not chosen)
        record = {
            "algo": chosen.algo,
            "run": chosen.run.name,
            "reason": f"{chosen.text}; {others}",
            "compared": list(names),
            "candidates": [
                {
                    "algo": candidate.algo,
                    "run": candidate.run.name,
                    "seconds": candidate.seconds,
                    "return_mean": None if candidate.level is None else candidate.level.mean,
                    "return_error": None if candidate.level is None else candidate.level.error,
                    "failure": candidate.failure,
                }
                for candidate in candidates
            ],
            "measured_at": time.strftime("%Y-%m-%d %H:%M"),
        }
        self._say(f"algorithm {chosen.algo}: {record['reason']}")
        with contextlib.suppress(OSError):
            for candidate in candidates:
                if candidate.run.is_dir():
                    write_json(candidate.run / ALGORITHMS, record)
            if chosen.level is None:  # nothing is known: the next start compares again
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, record)

    def _learn(self, candidate: ComparedAlgorithm, end_s: float, interrupts: Interrupts) -> None:
        """Trains a candidate until its training time is ``end_s``."""
        seconds = ["--seconds", f"{end_s - candidate.seconds:g}"]
        if candidate.seconds:
            module = self._settings.config.env.import_module
            task = ["--resume", str(candidate.run.absolute()), *(["--import", module] if module else [])]
            task += [word for callback in self._args.callback or () for word in ("--callback", callback)]
        else:
            task = [*self._start_command(candidate.algo), "--runs-dir", str(self._folder), "--name", candidate.run.name]
        self._say(f"algorithms: {candidate.algo} learns for {end_s - candidate.seconds:.0f} s")
        code, last = self._run_training([*task, *seconds], candidate.algo, interrupts)
        candidate.seconds = end_s
        if code != 0:
            candidate.failure = last or f"exit code {code}"
            return
        with contextlib.suppress(SpreezeError, OSError):
            curve = read_curve(candidate.run)
            if curve is not None and curve.evaluations:
                candidate.level = latest_level(curve.evaluations)

    def _start_command(self, algo: str) -> list[str]:
        """The command that starts a candidate, without its folder and time.

        Only the best one is tuned, when it continues, since that takes most of a round; for that, replay is saved.
        """
        command = [word for word in _without_own(self._command) if word not in ("--auto", "--fresh", "--json")]
        saved = ["--save-replay"] if self._saves_replay and not find_row(algo).on_policy else []
        timed = [] if self._step_us is None else ["--set", f"tuning.step_us={self._step_us:g}"]
        return [*command, *saved, *timed, "--algo", algo]

    def _run_training(self, arguments: Sequence[str], algo: str, interrupts: Interrupts) -> tuple[int, str]:
        """Runs ``spreeze.train`` and forwards its output; returns exit code and last line."""
        from spreeze.cli.sweep_runs import run_command  # which imports the module that imports this one

        process = subprocess.Popen(
            run_command(usable_cores(), arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        pending, last, stop_sent_s = b"", "", 0.0
        try:
            while True:
                if interrupts.stop_requested and not stop_sent_s:
                    process.send_signal(signal.SIGINT)
                    stop_sent_s = time.monotonic()
                if stop_sent_s and time.monotonic() - stop_sent_s > _CLOSING_S:
                    break
                if not readable([process.stdout.fileno()], _POLL_S):
                    continue
                data = os.read(process.stdout.fileno(), 65536)
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    last = clean(line.decode(errors="replace"), 400)
                    self._say(f"{algo} | {last}")
                if not data:
                    break
        finally:
            code = process.wait() if process.poll() is not None or not stop_sent_s else kill_and_wait(process)
            process.stdout.close()
        if interrupts.stop_requested:
            raise KeyboardInterrupt
        return code or 0, last


_OWN = ("stop.seconds", "run.name", "run.runs_dir")  # settings that a comparison gives to each of its runs


def _is_own(assignment: str) -> bool:
    return assignment.partition("=")[0].strip() in _OWN


def _without_own(command: Sequence[str]) -> list[str]:
    """The words of a command without ``--set`` of a comparison's own settings, which would have precedence."""
    words, kept = iter(command), list[str]()
    for word in words:
        if word == "--set":
            assignment = next(words, "")
            kept += [] if _is_own(assignment) else [word, assignment]
        elif not (word.startswith("--set=") and _is_own(word.removeprefix("--set="))):
            kept.append(word)
    return kept


def continued(args: argparse.Namespace, chosen: ComparedAlgorithm, elapsed_s: float) -> argparse.Namespace:
    """The command line that continues the best candidate, ``elapsed_s`` after the comparison began."""
    changes: dict[str, Any] = {"resume": str(chosen.run.absolute()), "profile": None, "--name": None, "--algo": None}
    changes |= {"compared": True, "set": [text for text in args.set if not _is_own(text)]}
    if not getattr(args, "--save-replay") and not find_row(chosen.algo).on_policy:
        changes["--save-replay"] = False  # the replay that the candidate saved is loaded anyway
    changes["auto"] = not (chosen.run / "tune.json").is_file()  # else its settings are the tuner's choice
    changes["fresh"] = args.fresh and changes["auto"]
    if seconds := user_values(args).get("stop", {}).get("seconds"):
        changes["--seconds"] = max(seconds - elapsed_s, 1.0)
    return argparse.Namespace(**{**vars(args), **changes})
