"""``spreeze sweep --search``: settings proposed by Optuna (TPE, arXiv 1907.10902), runs below the median ended early.

``--set KEY`` searches around the value that a run would have, ``KEY=LOW:HIGH`` a range, ``KEY=A,B`` choices;
``KEY=VALUE`` is fixed. ``NAME.search.log`` beside the runs is the study's journal. Whoever reads it takes part: a
resumed search, and any number of commands at once, each with trials of its own. A trial is a run for each seed, and its
value the mean of their returns over the last fifth.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spreeze.cli.sweep_runs import (
    OF_EACH_RUN,
    POLL_S,
    RunProcess,
    Sweep,
    SweepRun,
    check_disk,
    checked_settings,
    claimed,
    core_shares,
    end,
    note_end,
    read_sweep,
    start,
    sweep_path,
)
from spreeze.config.layers import unknown_setting
from spreeze.config.profiles import profile_text
from spreeze.config.schema import Config, StopConfig, check_name, field_of, kind_of
from spreeze.config.section import literal_or_text, split_values
from spreeze.envs.probe import Probe
from spreeze.errors import ConfigError, ResourceError, RunError
from spreeze.files import replace_bytes
from spreeze.formatting import aligned
from spreeze.machine.awake import AWAKE
from spreeze.machine.hardware import read_machine, usable_cores
from spreeze.machine.output import emit, print_error, say
from spreeze.metrics import comparison, return_curve
from spreeze.metrics.store import EvaluationRow, MetricsReader
from spreeze.process_identity import process_identity, same_process
from spreeze.run_directory import describe, make_runs_dir, send_request
from spreeze.runtime.interrupts import Interrupts

if TYPE_CHECKING:
    import optuna


TRIALS = 20
_PARTS = 10  # parts of a run after which its return is compared with those of the other trials
_WINDOW = 0.2  # fraction of a run, at its end, whose evaluations count
_FEWEST = 3  # evaluations in such a fraction with which a run is compared before its end
_WARMUP_PARTS, _WARMUP_TRIALS = 4, 4  # parts of each run, and trials, in which none is ended
_RANDOM_TRIALS = 10
_LOOK_S = 0.5
_MAX_FAILURES = 3  # failed trials without a finished one after which the search ends: its settings do not work
_IMPORTANCE_FROM = 10  # complete trials; of fewer it is noise
_UNBORN_S = 60.0  # age from which a trial without a process is that of one that was killed
_USUAL = ("actor_lr", "critic_lr", "alpha_lr", "lr", "gamma", "tau", "gae_lambda", "clip", "entropy_coef")
"""Settings of an algorithm that are searched where none is named."""
_FACTOR, _WHOLE_FACTOR = 10.0, 4  # a range reaches from a value divided by it to that value times it
_DECADE = 10.0  # ratio of the ends of a range from which it is searched by its logarithm


@dataclass
class _Trial:
    """A trial that this process carries out."""

    asked: optuna.trial.Trial
    runs: list[SweepRun]
    child: RunProcess
    finals: list[float] = field(default_factory=list)  # returns of the seeds that are done
    told: int = 0  # parts of the runs, over all seeds, that the pruner has heard of
    pruned: str | None = None


class FrontPoint(NamedTuple):
    """A return that no run had reached earlier."""

    seconds: float
    return_mean: float
    run: str
    setting: str


def search(args: argparse.Namespace, runs_dir: Path, common: Sequence[str]) -> int:
    """Carries out a new search, or goes on with one; ``common`` are the flags of ``train`` for each of its runs."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("--search needs Optuna: pip install 'spreeze[search]', or give the values to try without it")
    sweep = read_sweep(runs_dir, args.resume) if args.resume else _new(args, common)
    plan: dict[str, Any] = sweep.search or {}
    plan["trials"] = plan["trials"] if args.trials is None else args.trials
    if plan["trials"] < 1:
        raise ConfigError(f"--trials {plan['trials']}: at least 1")
    sweep.side_by_side = sweep.side_by_side if args.side_by_side is None else args.side_by_side
    shares = core_shares(sorted(usable_cores()), sweep.side_by_side)
    axes, fixed, config = _checked(plan, args.json)
    say(_plan_text(sweep, axes), as_json=args.json)
    if args.dry_run:
        if args.json:
            emit({"sweep": sweep.as_json(), "space": [asdict(axis) for axis in axes]})
        return 0
    make_runs_dir(runs_dir)
    if not args.resume:
        sweep = claimed(sweep, runs_dir, named=args.name is not None)
    study = SettingSearch(sweep, runs_dir, axes, fixed, config, lambda text: say(text, as_json=args.json, keep=True))
    with Interrupts() as interrupts:
        study.carry_out(shares, interrupts)
    result = study.result()
    if args.json:
        emit({"sweep": sweep.as_json(), "search": result})
    if interrupts.stop_requested:
        say(f"continue: python -m spreeze sweep --resume {sweep.name} --runs-dir {runs_dir}", as_json=args.json)
        return 130
    if result["best"] is None:
        print_error(f"no trial of search {sweep.name} has finished: {study.last_error or 'none has an evaluation'}")
        return 1
    return 0


def _new(args: argparse.Namespace, common: Sequence[str]) -> Sweep:
    for flag, given in {"--auto": args.auto, "--like": args.like, "--target": args.target is not None}.items():
        if given:
            raise ConfigError(f"{flag}: it has no meaning with --search; remove it")
    seeds, first = 1 if args.seeds is None else args.seeds, 1 if args.first_seed is None else args.first_seed
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: at least 1")
    name = check_name(args.name or time.strftime("search-%Y%m%d-%H%M%S"))
    plan = {"trials": TRIALS, "arguments": [*common], "set": [*args.set], "seeds": [*range(first, first + seeds)]}
    return Sweep(name, args.stop_seconds, None, 1, [], plan)


def _checked(plan: dict[str, Any], as_json: bool) -> tuple[list[Axis], list[str], Config]:
    """Space, fixed assignments, and the configuration of a run with only these.

    A ConfigError for no stop condition, or for a run refused at either end of a range.
    """
    fixed = [text for text in plan["set"] if is_fixed(text)]
    given = [*plan["arguments"], *_flags(fixed)]
    probes: dict[str, Probe] = {}
    settings, notes = checked_settings(given, probes)
    for note in notes:
        say(note, as_json=as_json)
    config = settings.config
    axes, fixed = space(plan["set"], config)
    for axis in axes:
        for value in axis.choices or (axis.low, axis.high):
            text = f"{axis.key}={value if isinstance(value, str) else int(value) if axis.whole else f'{value:.6g}'}"
            checked_settings([*given, *_flags([text])], probes)
    return axes, fixed, config


def _flags(assignments: Sequence[str]) -> list[str]:
    return [word for text in assignments for word in ("--set", text)]


def _plan_text(sweep: Sweep, axes: Sequence[Axis]) -> str:
    plan = sweep.search or {}
    trials = f"{plan['trials']} trials of {len(plan['seeds'])} seed(s)"
    lines = [f"search {sweep.name}: {trials}, {sweep.side_by_side} at a time"]
    for axis in axes:
        scale = f", by the logarithm of {'1 - it' if axis.complement else 'it'}" if axis.by_logarithm else ""
        lines.append(f"  {axis.key}: {', '.join(axis.choices) or f'{axis.low:g} to {axis.high:g}{scale}'}")
    return "\n".join(lines)


def fraction_done(evaluation: EvaluationRow, stop: StopConfig) -> float:
    """Fraction of a run that is over at one of its evaluations, by the stop condition that is nearest; at most 1."""
    limits = ((evaluation.updates, stop.updates), (evaluation.env_steps, stop.env_steps), (evaluation.t, stop.seconds))
    return min(1.0, max(value / limit for value, limit in limits if limit))


def _return_between(
    since: float, until: float, evaluations: Sequence[EvaluationRow], stop: StopConfig, least: int = 1
) -> float | None:
    """Mean return between two fractions of a run; None with fewer evaluations than ``least``."""
    rows = [row for row in evaluations if since < fraction_done(row, stop) <= until]
    return return_curve.final_metric(rows, len(rows)) if len(rows) >= least else None


def late_return(evaluations: Sequence[EvaluationRow], stop: StopConfig) -> float | None:
    """Mean return over the last fifth of a run, by its length; None without evaluation."""
    over = max((fraction_done(row, stop) for row in evaluations), default=0.0)
    return _return_between(over - _WINDOW, over, evaluations, stop)


def returns_by_part(evaluations: Sequence[EvaluationRow], stop: StopConfig) -> list[float | None]:
    """Mean return over the fifth before each tenth that is over; None with few evaluations of a policy that learned."""
    trained = [row for row in evaluations if row.updates]
    over = max((fraction_done(row, stop) for row in trained), default=0.0)
    parts = [part / _PARTS for part in range(1, _PARTS + 1)]
    return [_return_between(part - _WINDOW, part, trained, stop, _FEWEST) for part in parts if part <= over]


class SettingSearch:
    """A study and the trials of it that this process carries out."""

    def __init__(
        self, sweep: Sweep, runs_dir: Path, axes: Sequence[Axis], fixed: Sequence[str], config: Config,
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Opens the study, whose first trial is ``config`` where the space has it: a run without searched settings."""
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep, self._runs_dir, self._axes, self._fixed, self._config = sweep, runs_dir, axes, fixed, config
        self._tell = tell
        self.last_error: str | None = None
        self._plan: dict[str, Any] = sweep.search or {}
        self._states = optuna.trial.TrialState
        journal = optuna.storages.JournalStorage(JournalFileBackend(str(runs_dir / f"{sweep.name}.search.log")))
        self._study = optuna.create_study(
            storage=journal, study_name=sweep.name, direction="maximize", load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(_WARMUP_TRIALS, _WARMUP_PARTS, n_min_trials=_WARMUP_TRIALS),
        )  # fmt: skip
        known = len(self._study.trials)
        starting = max(_WARMUP_TRIALS, min(_RANDOM_TRIALS, self._plan["trials"] // 3))
        self._study.sampler = optuna.samplers.TPESampler(n_startup_trials=starting, seed=known + 1)
        points = {axis.label: axis.parameter(_field(axis.key, config)[2]) for axis in axes}
        self._present = {label: point for label, point in points.items() if point is not None}
        if known == 0:
            self._study.enqueue_trial(self._present)

    def _take_over(self) -> None:
        """Trials of processes that are gone are done again."""
        for trial in self._study.get_trials(deepcopy=False, states=(self._states.RUNNING,)):
            process = trial.user_attrs.get("process")
            born_s = trial.datetime_start.timestamp() if trial.datetime_start is not None else 0.0
            if not same_process(process) if process is not None else time.time() - born_s > _UNBORN_S:
                with contextlib.suppress(RuntimeError, ValueError):  # another process was first
                    self._study.tell(trial.number, state=self._states.FAIL)
                    self._study.enqueue_trial(trial.params)

    def carry_out(self, shares: Sequence[Sequence[int]], interrupts: Interrupts) -> None:
        """Runs trials until as many as were planned have a result."""
        running: dict[int, _Trial] = {}
        look_s = 0.0
        try:
            while not interrupts.stop_requested:
                for slot, cores in enumerate(shares):
                    if slot not in running and self._needs_more_trials():
                        running[slot] = self._begin(cores)
                        self._write()
                if not running:
                    break
                if AWAKE() >= look_s:
                    look_s = AWAKE() + _LOOK_S
                    for trial in running.values():
                        self._report_progress(trial)
                for slot in [slot for slot, trial in running.items() if trial.child.process.poll() is not None]:
                    if not self._seed_ended(running[slot], shares[slot]):
                        running.pop(slot)
                        self._write()
                time.sleep(POLL_S)
        finally:
            end([trial.child for trial in running.values()], interrupts.again())
            for trial in running.values():
                self._keep(trial)
                self._study.tell(trial.asked, state=self._states.FAIL)
                self._study.enqueue_trial(trial.asked.params)  # --resume does it again
            self._write()

    def _needs_more_trials(self) -> bool:
        self._take_over()
        trials = self._study.get_trials(deepcopy=False)
        states = [trial.state for trial in trials]
        failed = sum("failed" in trial.user_attrs for trial in trials)
        if failed >= _MAX_FAILURES and self._states.COMPLETE not in states:
            return False
        taken = (self._states.COMPLETE, self._states.PRUNED, self._states.RUNNING)
        return bool(sum(states.count(state) for state in taken) + failed < self._plan["trials"])

    def _begin(self, cores: Sequence[int]) -> _Trial:
        asked = self._study.ask()
        asked.set_user_attr("process", process_identity(os.getpid()))
        chosen = [axis.ask(asked) for axis in self._axes]
        check_disk(self._runs_dir, len(self._plan["seeds"]))
        runs = []
        for seed in self._plan["seeds"]:
            arguments = [*self._plan["arguments"], *_flags([*self._fixed, *chosen]), "--seed", str(seed)]
            runs.append(SweepRun(" ".join(chosen), seed, arguments, f"{self._sweep.name}-t{asked.number + 1}-s{seed}"))
        trial = _Trial(asked, runs, start(runs[0], cores, self._runs_dir))
        self._keep(trial)
        return trial

    def _keep(self, trial: _Trial) -> None:
        """The runs of a trial into the journal, from which ``NAME.sweep.json`` is made."""
        trial.asked.set_user_attr("runs", [asdict(run) for run in trial.runs])

    def _report_progress(self, trial: _Trial) -> None:
        """Tells the pruner what the run has reached, and stops it where it is below the median."""
        path = self._runs_dir / trial.child.run.name
        if trial.pruned is not None or not (path / "control").is_dir():
            return
        with contextlib.suppress(RunError):
            returns = returns_by_part(MetricsReader(path / "metrics.db").evaluations(), self._config.stop)
            before, parts = len(trial.finals) * _PARTS, len(trial.runs) * _PARTS
            for part, value in enumerate(returns[max(0, trial.told - before) :], max(trial.told, before) + 1):
                trial.told = part
                if value is None:
                    continue
                mean = (sum(trial.finals) + value) / (len(trial.finals) + 1)
                trial.asked.report(mean, part)
                if part < parts and trial.asked.should_prune():
                    text = f"return {mean:.4g} after {part / parts:.0%} of it is below the median of the other trials"
                    trial.pruned = text
                    send_request(path, "stop")
                    return

    def _seed_ended(self, trial: _Trial, cores: Sequence[int]) -> bool:
        """Takes note of a run's end; False if it was its trial's last, whose result the study then knows."""
        self._report_progress(trial)
        run = trial.child.run
        note_end(trial.child, self._runs_dir, lambda text: None)
        path = self._runs_dir / run.name
        if trial.pruned is not None and run.state == "interrupted":
            run.state, run.error = "pruned", trial.pruned
            with contextlib.suppress(RunError):
                describe(path, note=f"pruned: {trial.pruned}", tags=("pruned",))
        final = None
        if run.state == "finished":
            curve = comparison.read_curve(path)
            final = None if curve is None else late_return(curve.evaluations, self._config.stop)
            if final is None:
                run.state, run.error = "failed", "no evaluation; let the runs last longer, by --seconds"
        if final is not None:
            trial.finals.append(final)
            if len(trial.finals) < len(trial.runs):
                trial.child = start(trial.runs[len(trial.finals)], cores, self._runs_dir)
                self._keep(trial)
                return True
        self._tell_study(trial, run)
        return False

    def _tell_study(self, trial: _Trial, run: SweepRun) -> None:
        value = None
        if run.state == "finished":
            value = sum(trial.finals) / len(trial.finals)
        elif run.state != "pruned":
            self.last_error = run.error or f"{run.name} was stopped"
            trial.asked.set_user_attr("failed", self.last_error)
        states = {"finished": self._states.COMPLETE, "pruned": self._states.PRUNED}
        self._keep(trial)
        self._study.tell(trial.asked, value, states.get(run.state, self._states.FAIL))
        outcome = f"return {value:.4g}" if value is not None else f"{run.state}: {run.error or 'stopped'}"
        self._tell(f"trial {trial.asked.number + 1}: {outcome}; {run.setting}")

    def _write(self) -> None:
        """``NAME.sweep.json`` as the journal has it, whoever carried the trials out."""
        trials = self._study.get_trials(deepcopy=False)
        self._sweep.runs = [SweepRun(**run) for trial in trials for run in trial.user_attrs.get("runs", ())]
        try:
            self._sweep.write(self._runs_dir)
        except OSError as error:
            raise ResourceError(f"{sweep_path(self._runs_dir, self._sweep.name)} cannot be written: {error}") from None

    def result(self) -> dict[str, Any]:
        """Best trial, importance of settings, front of return against time; told, and the best kept as a profile."""
        trials = self._study.get_trials(deepcopy=False)
        done = [trial for trial in trials if trial.state == self._states.COMPLETE]
        pruned = sum(trial.state == self._states.PRUNED for trial in trials)
        front = return_front(self._sweep.runs, self._runs_dir)
        if not done:
            nothing: dict[str, Any] = {
                "best": None,
                "importance": None,
                "front": [],
                "profile": None,
                "improved": False,
            }
            return {"trials": 0, "pruned": pruned, **nothing}
        best = self._study.best_trial
        run = SweepRun(**best.user_attrs["runs"][0])
        profile = self._write_profile(run, best.value or 0.0, len(done) + pruned)
        document: dict[str, Any] = {
            "best": {"trial": best.number + 1, "return": best.value, "setting": run.setting, "run": run.name},
            "trials": len(done),
            "pruned": pruned,
            "importance": self._importance() if len(done) >= _IMPORTANCE_FROM else None,
            "front": [point._asdict() for point in front],
            "profile": str(profile),
            "improved": best.params != self._present,
        }
        self._tell(_result_text(document, front))
        return document

    def _importance(self) -> dict[str, float]:
        """Importance of each setting for good trials (PED-ANOVA, arXiv 2304.10255); empty if not known."""
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        with warnings.catch_warnings(), contextlib.suppress(ValueError, RuntimeError):
            warnings.simplefilter("ignore")
            importances = get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator())
            return {label: round(float(value), 4) for label, value in importances.items()}
        return {}

    def _write_profile(self, run: SweepRun, value: float, trials: int) -> Path:
        probes: dict[str, Probe] = {}
        present, _ = checked_settings([*self._plan["arguments"], *_flags(self._fixed)], probes)
        settings, _ = checked_settings(run.arguments, probes)
        found = f"search {self._sweep.name}"
        sources = dict(settings.sources)
        for axis in self._axes:
            kept = _field(axis.key, settings.config)[2] == _field(axis.key, present.config)[2]
            sources[axis.key] = f"{present.source_of(axis.key)}, kept by {found}" if kept else found
        settings = replace(settings, sources=sources)
        machine = read_machine()
        record = {
            "machine_id": machine.identity(), "env": settings.config.env.id, "reasons": {},
            "objective": "return over the last fifth", "formula": f"{value:.6g}, the best of {trials} trials",
            "measured_at": time.strftime("%Y-%m-%d %H:%M"),
        }  # fmt: skip
        path = self._runs_dir / f"{self._sweep.name}.toml"
        text = profile_text(settings, record, machine.one_line(), "spreeze sweep --search")
        try:
            replace_bytes(path, text.encode())
        except OSError as error:
            raise ResourceError(f"cannot write {path}: {error}") from None
        return path


def return_front(runs: Sequence[SweepRun], runs_dir: Path) -> list[FrontPoint]:
    """Pareto front of return (mean of ``HELD`` evaluations in a row) against time over all runs, pruned ones too."""
    points = []
    for run in runs:
        with contextlib.suppress(RunError):
            rows = return_curve.whole(MetricsReader(runs_dir / run.name / "metrics.db").evaluations())
            means = return_curve.running_mean(rows, return_curve.HELD)
            late = list(zip(rows, means, strict=True))[return_curve.HELD - 1 :]
            points += [FrontPoint(row.t, float(mean), run.name, run.setting) for row, mean in late]
    front: list[FrontPoint] = []
    for point in sorted(points, key=lambda point: (point.seconds, -point.return_mean)):
        if not front or point.return_mean > front[-1].return_mean:
            front.append(point)
    return front


def _result_text(document: dict[str, Any], front: Sequence[FrontPoint]) -> str:
    best, importance = document["best"], document["importance"]
    lines = [
        f"{document['trials']} trials to their end, {document['pruned']} pruned; "
        f"best: trial {best['trial']}, return {best['return']:.4g}",
        *(f"  {text}" for text in best["setting"].split()),
    ]
    if importance is None:
        lines.append(f"importance: cannot be told before {_IMPORTANCE_FROM} complete trials")
    elif importance:
        lines.append("importance: " + ", ".join(f"{label} {value:.0%}" for label, value in importance.items()))
    if front:
        by_run = {point.run: point for point in front}.values()  # the best of each
        rows = [[f"{point.seconds:.1f} s", f"{point.return_mean:.4g}", point.run] for point in by_run]
        lines += ["highest return by time:", *aligned([["time", "return", "run"], *rows])]
    if document["improved"]:
        lines.append(f"best settings: --profile {document['profile']}")
    else:
        lines.append(f"no trial was better than the present settings, which --profile {document['profile']} holds")
    return "\n".join(lines)


@dataclass(frozen=True)
class Axis:
    """One searched setting: a range, or choices."""

    key: str
    low: float = 0.0
    high: float = 0.0
    whole: bool = False  # only integers
    choices: tuple[str, ...] = ()

    @property
    def complement(self) -> bool:
        """True if 1 - value is searched: for a discount 0.99 is as far from 0.9 as from 0.999."""
        return not self.choices and 0.5 <= self.low < self.high < 1.0 and 1.0 - self.low >= _DECADE * (1.0 - self.high)

    @property
    def label(self) -> str:
        return f"1 - {self.key}" if self.complement else self.key

    @property
    def _bounds(self) -> tuple[float, float]:
        return (1.0 - self.high, 1.0 - self.low) if self.complement else (self.low, self.high)

    @property
    def by_logarithm(self) -> bool:
        low, high = self._bounds
        return not self.choices and low > 0.0 and high >= _DECADE * low * (1.0 - 1e-9)

    def ask(self, trial: optuna.trial.Trial) -> str:
        """``section.field=value`` with the value that the sampler proposes."""
        if self.choices:
            return f"{self.key}={trial.suggest_categorical(self.key, self.choices)}"
        low, high = self._bounds
        if self.whole:
            return f"{self.key}={trial.suggest_int(self.label, int(low), int(high), log=self.by_logarithm)}"
        value = trial.suggest_float(self.label, low, high, log=self.by_logarithm)
        return f"{self.key}={1.0 - value if self.complement else value:.6g}"

    def parameter(self, value: Any) -> Any:
        """The searched parameter at a value of the setting; None where that is not in the space."""
        if self.choices:
            return next((text for text in self.choices if _same(literal_or_text(text), value)), None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return None
        return 1.0 - value if self.complement else value


def _same(chosen: Any, value: Any) -> bool:
    return bool((tuple(chosen) if isinstance(chosen, list) else chosen) == value)


def is_fixed(text: str) -> bool:
    """True for ``KEY=VALUE``, which is no axis."""
    _, given, raw = text.partition("=")
    return bool(given) and _ends(raw) is None and len(split_values(raw)) == 1


def space(texts: Sequence[str], config: Config) -> tuple[list[Axis], list[str]]:
    """The axes of ``--set`` texts, and the assignments that are fixed; the usual settings where no text has an axis.

    ``config``: a run without the searched settings. A ConfigError for an unknown or repeated setting, or a range that
    is empty or beyond the allowed one.
    """
    axes: list[Axis] = []
    fixed: list[str] = []
    for text in texts:
        key, given, raw = (word.strip() for word in text.partition("="))
        values = split_values(raw)
        if is_fixed(text):
            fixed.append(text)
        elif not given:
            axes.append(_around(key, config))
        elif (ends := _ends(raw)) is not None:
            axes.append(_range(key, *ends, config))
        else:
            if not all(values) or len(set(values)) < len(values):
                raise ConfigError(f"--set {text!r}: a value is empty or occurs twice")
            axes.append(Axis(key, choices=tuple(values)))
    keys = [axis.key for axis in axes] + [text.partition("=")[0].strip() for text in fixed]
    if own := [key for key in keys if key in OF_EACH_RUN]:
        raise ConfigError(f"--set {own[0]}: {OF_EACH_RUN[own[0]]}")
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise ConfigError(f"--set {twice[0]}: set twice; give it once")
    if axes:
        return axes, fixed
    usual = [f"{config.run.algo}.{name}" for name in _USUAL if 0.0 < getattr(config.algo_settings, name, 0.0) < 1.0]
    usual += ["learner.batch_size"] if config.on_policy is None else []
    return [_around(key, config) for key in usual if key not in keys], fixed


def _field(key: str, config: Config) -> tuple[Any, type, Any]:
    section, _, name = key.partition(".")
    try:
        return field_of(key, config), kind_of(key, config), getattr(config.sections()[section], name)
    except (KeyError, ValueError, AttributeError):
        if (known := config.sections().get(section)) is not None:
            raise ConfigError(
                f"--set {key}: {unknown_setting(section, name, [item.name for item in fields(known)])}"
            ) from None
        raise ConfigError(
            f"--set {key}: no such setting of a run with {config.run.algo}; write section.field, such as sac.gamma"
        ) from None


def _around(key: str, config: Config) -> Axis:
    item, kind, value = _field(key, config)
    if kind is bool:
        return Axis(key, choices=("false", "true"))
    if choices := item.metadata["choices"]:
        return Axis(key, choices=tuple(choices))
    lowest, highest = item.metadata["low"], item.metadata["high"]
    if kind not in (int, float) or not value or value < 0.0:
        raise ConfigError(
            f"--set {key}: no default range, because its current value is {value!r}; give {key}=LOW:HIGH or {key}=A,B"
        )
    if kind is int:
        low, high = value // _WHOLE_FACTOR, value * _WHOLE_FACTOR
        return _range(key, max(lowest or 1, low, 1), min(highest or math.inf, high), config)
    if 0.5 < value < 1.0 and highest is not None and highest <= 1.0:
        left = 1.0 - value
        return _range(key, 1.0 - min(0.5, left * _FACTOR), 1.0 - left / _FACTOR, config)
    low, high = value / _FACTOR, value * _FACTOR
    return _range(key, max(low, lowest or 0.0), high if highest is None else min(high, highest), config)


def _ends(text: str) -> tuple[float, float] | None:
    """Both ends of ``LOW:HIGH``; None for any other text."""
    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        return None


def _range(key: str, low: float, high: float, config: Config) -> Axis:
    item, kind, _ = _field(key, config)
    if kind not in (int, float):
        raise ConfigError(f"--set {key}: it is not a number; give its choices, as {key}=A,B")
    lowest = -math.inf if item.metadata["low"] is None else item.metadata["low"]
    highest = math.inf if item.metadata["high"] is None else item.metadata["high"]
    if not lowest <= low < high <= highest:
        raise ConfigError(
            f"--set {key}={low:g}:{high:g}: expected LOW:HIGH with LOW below HIGH, within {lowest:g} to {highest:g}"
        )
    return Axis(key, low, high, whole=kind is int)
