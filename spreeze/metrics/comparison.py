"""The evaluation protocol of HTS-RL (arXiv 2012.09849, section 5 and appendix G), as pure statistics.

*Final metric*: mean of the last 100 evaluation episodes, 10 for each of the last 10 policies. *Final-time metric*: the
same for the policies published up to a limit of wall time. *Required-time metric*: wall time at which the running mean
over the latest 10 policies first reaches a score. Each is a mean over seeds with a percentile bootstrap interval of
10,000 resamples.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spreeze.config.algorithms import ALGORITHMS, ON_POLICY
from spreeze.config.layers import DEFAULT, USER, sources_of
from spreeze.config.modes import data_flow_of
from spreeze.config.schema import SHARED_SECTIONS
from spreeze.config.section import not_offered
from spreeze.errors import ConfigError, RunError, did_you_mean
from spreeze.files import read_json
from spreeze.formatting import DASH, aligned, clean, duration, number, percent
from spreeze.metrics.evidence import LEVEL, RESAMPLES, bootstrap_interval, improvement, iqm, seeds_needed
from spreeze.metrics.return_curve import FINAL_EVALUATIONS, HELD, final_metric, required_time, running_mean, whole
from spreeze.metrics.stop_conditions import StopReason
from spreeze.metrics.store import EvaluationRow, MetricsReader
from spreeze.run_directory import finite_number, read_config, read_run

_IGNORED_SECTIONS = ("evaluation.", "logging.", "stop.", "tuning.", "visualizer.")
IGNORED = ("run.seed", "run.name", "run.runs_dir", "env.import_module", *_IGNORED_SECTIONS)
"""Settings, or prefixes of settings, that do not distinguish experiments."""
LONG_ENOUGH = "without runs less than half as long as the longest of their group, unless a target return ended them"
TIMES = {
    "first at target": ("first_s", "one evaluation"),
    "held": ("held_s", f"the mean of {HELD} evaluations in a row"),
    f"mean of {FINAL_EVALUATIONS} or end at target": (
        "required_s",
        f"the mean of {FINAL_EVALUATIONS} evaluations in a row",
    ),
}
"""Title of a time to a return -> its name in a report, and the quantity that reaches the return."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    policies: int = FINAL_EVALUATIONS
    targets: tuple[float, ...] = ()  # scores of the required-time metric
    limit_s: float | None = None  # wall time of the final-time metric; None: for each task, the end of its fastest run
    resamples: int = RESAMPLES
    level: float = LEVEL
    robust: bool = False
    """The centre over seeds is their interquartile mean, as the sweep's, not the mean of the protocol."""

    def __post_init__(self) -> None:
        """Raises a ConfigError, in words of the command line, if a number is out of range."""
        if self.policies < 1:
            raise ConfigError(f"--policies {self.policies}: at least 1")
        if self.resamples < 100:
            raise ConfigError(f"--resamples {self.resamples}: at least 100")
        if self.limit_s is not None and not self.limit_s > 0.0:
            raise ConfigError(f"--limit-s {self.limit_s:g}: more than 0")


MIN_RUNS = 3
_MAX_NAME, _NAMED = 100, 3
MAX_SEEDS = 50  # most additional seeds that are advised


@dataclass(frozen=True)
class RunGroup:
    env: str
    algo: str
    mode: str
    variant: str = ""  # settings in which it differs from the other groups, as ``section.field=value``

    @property
    def label(self) -> str:
        """Name without the task, which is in a table's heading."""
        return " ".join(part for part in (self.algo, self.mode, self.variant) if part)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run: its group, seed, end [s of wall time] and evaluations, oldest first."""

    name: str
    group: RunGroup
    seed: int | None
    end_s: float
    evaluations: Sequence[EvaluationRow] = field(repr=False)
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    """``section.field`` -> its value in the run's configuration, as text."""
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
    """``section.field`` -> where its value came from: default, profile, tuner, user."""
    ended_at: float | None = None  # target return that ended the run


@dataclass(frozen=True)
class Spread:
    """A centre over seeds with its interval; fewer than three have none, as a bootstrap of two is just their range."""

    centre: float
    low: float | None
    high: float | None
    seeds: int


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The three metrics of one run; None is unknown or not reached."""

    name: str
    group: RunGroup
    seed: int | None
    end_s: float
    cut_short: bool  # it is less than half as long as the longest of its group, and did not end at its target return
    policies: int  # evaluated policies behind the final metric; fewer than requested in a short run
    final: float | None
    final_time: float | None
    limit_s: float
    required_s: tuple[float | None, ...]  # one for each target
    first_s: tuple[float | None, ...]  # time of the first evaluation at each target, which may be luck
    held_s: tuple[float | None, ...]  # time from which the mean of ``HELD`` consecutive evaluations is at each target


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """The three metrics over the seeds of a group."""

    group: RunGroup
    runs: int
    final: Spread | None  # without runs that are cut short
    final_time: Spread | None
    required_s: tuple[Spread | None, ...]
    """None unless all seeds reached the target: the mean of the others would be biased."""
    first_s: tuple[Spread | None, ...]
    held_s: tuple[Spread | None, ...]
    """Times of the first evaluation at each target and of holding it; None unless all seeds reached it."""
    reached: tuple[int, ...]  # runs that have the required time of each target


@dataclass(frozen=True, kw_only=True)
class PairReport:
    """Two groups of the same task, compared seed by seed."""

    group: RunGroup
    against: RunGroup
    seeds: int  # number of common seeds
    final: Spread | None  # difference of the final metrics
    final_time: Spread | None  # difference of the final-time metrics
    required_ratio: tuple[Spread | None, ...]
    """Required time divided by that of ``against``; None if a seed of either has not reached the target."""
    improvement: Spread | None
    """Probability that a run has a higher final-time metric than one of ``against``, over the common seeds."""
    seeds_needed: int | None
    """Seeds needed to tell both apart, if difference and spread are as observed; None if unknown."""


class Standing(NamedTuple):
    """The two groups of a task with the highest returns at equal time."""

    first: RunGroup
    second: RunGroup
    best: Spread
    next_best: Spread
    limit_s: float
    improvement: Spread | None  # probability that a run of the first is the better one
    paired: bool  # True if both have the same seeds, so that its interval is over pairs of these
    seeds_needed: int | None
    """Seeds of each needed to tell them apart, if difference and spread are as observed; None if unknown."""
    apart: bool  # True if their intervals do not overlap

    @property
    def more(self) -> int | None:
        """Additional seeds of each needed to tell them apart; 0 if the present ones suffice, None if unknown."""
        seeds = min(self.best.seeds, self.next_best.seeds)
        if seeds < MIN_RUNS:
            return MIN_RUNS - seeds
        return 0 if self.apart else None if self.seeds_needed is None else max(1, self.seeds_needed - seeds)


@dataclass(frozen=True, kw_only=True)
class Report:
    rules: Rules
    runs: list[RunReport]
    groups: list[GroupReport]
    pairs: list[PairReport]

    @cached_property
    def standings(self) -> dict[str, Standing]:
        """Task -> its two best groups, for tasks with at least two that have a return."""
        tasks = dict.fromkeys(group.group.env for group in self.groups)
        return {env: standing for env in tasks if (standing := _standing(self, env)) is not None}


def spread(values: Sequence[float], rules: Rules) -> Spread | None:
    """Centre and bootstrap interval of the values, one a seed; None if there are none."""
    if not values:
        return None
    low, high = None, None
    if len(values) >= MIN_RUNS:
        low, high = bootstrap_interval(values, rules.level, rules.resamples, robust=rules.robust)
    return Spread(float(iqm(np.array(values))) if rules.robust else sum(values) / len(values), low, high, len(values))


def differing(curves: Sequence[Curve], also: Sequence[str] = ()) -> list[str]:
    """Names of the settings in which runs differ and that have an effect; ``IGNORED`` ones only if in ``also``."""
    unused = {*ALGORITHMS} - {curve.group.algo for curve in curves}
    ignored = (*IGNORED, *(f"{algo}." for algo in unused))
    names = {name for curve in curves for name in curve.settings if name in also or not name.startswith(ignored)}
    return sorted(name for name in names if len({*_values(curves, name)} - {DASH}) > 1)


def _values(curves: Sequence[Curve], name: str) -> list[str]:
    """A setting in each run; one that lacks it, such as a run of an older version, has the default of the others."""
    defaults = (curve.settings.get(name) for curve in curves if curve.sources.get(name) == DEFAULT)
    default = next((value for value in defaults if value is not None), "not set")
    return [curve.settings.get(name, default) for curve in curves]


def only_tuned(curves: Sequence[Curve]) -> frozenset[str]:
    """The settings that the tuner chose for at least one of these runs, and that no user set for any."""
    chosen = {name for curve in curves for name, source in curve.sources.items() if source == "tuner"}
    return frozenset(name for name in chosen if all(curve.sources.get(name) != "user" for curve in curves))


def split_by_settings(
    curves: Sequence[Curve], by: Sequence[str] | None = None, also: Sequence[str] = ()
) -> list[Curve]:
    """Curves with their groups split by the settings ``by``; None: by all in which runs of a group differ.

    Settings in ``also`` split even if ``IGNORED``; those that the tuner chose and no user set only if given, because it
    may choose differently at each start. If many differ, a group's name has only those that distinguish it.
    """
    split = list(curves)
    for group in dict.fromkeys(curve.group for curve in curves):
        indices = [index for index, curve in enumerate(curves) if curve.group == group]
        alike = [curves[index] for index in indices]
        tuned = only_tuned(alike) - {*(by or also)}
        differ = [name for name in differing(alike, by or also) if name not in tuned and (by is None or name in by)]
        named = differ if by is not None or len(differ) <= _NAMED else _distinguishing(alike, differ, also)
        left = len(differ) - len(named)
        more = f" and {left} more setting{'s' if left > 1 else ''}" if left else ""
        columns = [_values(alike, name) for name in named]
        for i, index in enumerate(indices):
            texts = (f"{name}={column[i]}" for name, column in zip(named, columns, strict=True))
            split[index] = replace(curves[index], group=replace(group, variant=", ".join(texts) + more))
    return split


def _distinguishing(curves: Sequence[Curve], differ: Sequence[str], first: Sequence[str]) -> list[str]:
    """A few of the settings that separate as many groups as all do: ``first``, then rather those that a user set."""
    columns = {name: _values(curves, name) for name in differ}
    by_user = {name for name in differ if any(curve.sources.get(name) == USER for curve in curves)}

    def groups(names: Sequence[str]) -> int:
        return len({*zip(*(columns[name] for name in names), strict=True)})

    chosen = [name for name in differ if name in first]
    while groups(chosen) < groups(differ):
        left = [name for name in differ if name not in chosen]
        chosen.append(max(left, key=lambda name: (groups([*chosen, name]), name in by_user)))
    return chosen


def report(curves: Sequence[Curve], rules: Rules) -> Report:
    """The three metrics of each run, of each group over its seeds, and of each pair of groups seed by seed."""
    ends, longest = dict[str, float](), dict[RunGroup, float]()
    for curve in curves:
        ends[curve.group.env] = min(curve.end_s, ends.get(curve.group.env, math.inf))
        longest[curve.group] = max(curve.end_s, longest.get(curve.group, 0.0))
    limits = ends if rules.limit_s is None else dict.fromkeys(ends, rules.limit_s)
    runs = [_run(curve, rules, limits[curve.group.env], longest[curve.group]) for curve in curves]
    groups: dict[RunGroup, list[RunReport]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    couples = [(first, second) for first, second in itertools.combinations(groups, 2) if first.env == second.env]
    pairs = [_pair(first, groups[first], second, groups[second], rules) for first, second in couples]
    return Report(
        rules=rules,
        runs=runs,
        groups=[_group(group, members, rules) for group, members in groups.items()],
        pairs=[pair for pair in pairs if pair is not None],
    )


def _run(curve: Curve, rules: Rules, limit_s: float, longest_s: float) -> RunReport:
    rows = curve.evaluations

    def times(policies: int) -> tuple[float | None, ...]:
        """Time to each target; a run with fewer evaluations that ended at its target return has reached it."""
        counted = rows if policies == rules.policies else whole(rows)
        at_end = -math.inf if curve.ended_at is None or len(counted) >= policies else curve.ended_at
        reached_s = [(target, required_time(counted, target, policies)) for target in rules.targets]
        return tuple(curve.end_s if at is None and target <= at_end else at for target, at in reached_s)

    return RunReport(
        name=curve.name,
        group=curve.group,
        seed=curve.seed,
        end_s=curve.end_s,
        cut_short=curve.ended_at is None and 2.0 * curve.end_s < longest_s,
        policies=min(rules.policies, len(rows)),
        final=final_metric(rows, rules.policies),
        final_time=final_metric(rows, rules.policies, limit_s),
        limit_s=limit_s,
        required_s=times(rules.policies),
        first_s=times(1),
        held_s=times(HELD),
    )


def _group(group: RunGroup, runs: Sequence[RunReport], rules: Rules) -> GroupReport:
    kinds = ("required_s", "first_s", "held_s")
    times = {kind: [*zip(*(getattr(run, kind) for run in runs), strict=True)] for kind in kinds}
    return GroupReport(
        group=group,
        runs=len(runs),
        final=spread([run.final for run in runs if run.final is not None and not run.cut_short], rules),
        final_time=spread([run.final_time for run in runs if run.final_time is not None], rules),
        **{kind: tuple(_of_all(values, rules) for values in columns) for kind, columns in times.items()},
        reached=tuple(sum(value is not None for value in values) for values in times["required_s"]),
    )


def _of_all(values: Sequence[float | None], rules: Rules) -> Spread | None:
    """Spread of the values; None unless every run has one."""
    known = [value for value in values if value is not None]
    return spread(known, rules) if len(known) == len(values) else None


def _pair(
    group: RunGroup, runs: Sequence[RunReport], against: RunGroup, others: Sequence[RunReport], rules: Rules
) -> PairReport | None:
    """None if the two have no seed in common."""
    mine, theirs = ({run.seed: run for run in part if run.seed is not None} for part in (runs, others))
    couples = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
    if not couples:
        return None
    times = [[(a.required_s[i], b.required_s[i]) for a, b in couples] for i in range(len(rules.targets))]
    chance, _, needed = _evidence([a for a, _ in couples], [b for _, b in couples], rules)
    return PairReport(
        group=group,
        against=against,
        seeds=len(couples),
        final=_of_all([_minus(a.final, b.final) for a, b in couples if not (a.cut_short or b.cut_short)], rules),
        final_time=_of_all([_minus(a.final_time, b.final_time) for a, b in couples], rules),
        required_ratio=tuple(_of_all([a / b if a is not None and b else None for a, b in row], rules) for row in times),
        improvement=chance,
        seeds_needed=needed,
    )


def _evidence(
    runs: Sequence[RunReport], others: Sequence[RunReport], rules: Rules
) -> tuple[Spread | None, bool, int | None]:
    """The probability that ``runs`` beat ``others`` at equal time, whether by pairs of seeds, and the seeds needed."""
    paired = [run.seed for run in runs] == [run.seed for run in others] and None not in {run.seed for run in runs}
    mine, theirs = ([run.final_time for run in part if run.final_time is not None] for part in (runs, others))
    paired = paired and len(mine) == len(theirs) == len(runs)
    if not mine or not theirs:
        return None, False, None
    chance, low, high = improvement(mine, theirs, rules.level, rules.resamples, paired=paired)
    seeds = min(len(mine), len(theirs))
    known = Spread(chance, low, high, seeds) if seeds >= MIN_RUNS else Spread(chance, None, None, seeds)
    return known, paired, seeds_needed(mine, theirs, paired=paired)


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def read_curve(path: Path) -> Curve | None:
    """A run of any mode; None while it has no evaluation, a RunError if its metrics cannot be read."""
    evaluations = MetricsReader(path / "metrics.db").evaluations()
    return curve_of(path, evaluations) if evaluations else None


def curve_of(path: Path, evaluations: Sequence[EvaluationRow]) -> Curve:
    """A curve of these evaluations, with the facts and settings of their run."""
    run = read_run(path)
    end_s, last_s = run.get("wall_s"), evaluations[-1].t if evaluations else 0.0
    env, algo, mode = (clean(run.get(key) or DASH, 200) for key in ("env_id", "algo", "mode"))
    config = read_config(path)
    summary = read_summary(path)
    by_target = summary.get("stopped_by") == StopReason.TARGET_RETURN
    return Curve(
        name=clean(path.name, 128),
        group=RunGroup(env, algo, mode),
        seed=run.get("seed"),
        end_s=last_s if end_s is None else float(end_s),
        evaluations=evaluations,
        settings=_settings(run, config),
        sources=sources_in(path),
        ended_at=finite_number(summary.get("target_return")) if by_target else None,
    )


def _settings(run: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """``section.field`` -> its value; a dash where it has no effect with the run's mode and algorithm."""
    data_flow = data_flow_of(run, on_policy=run.get("algo") in ON_POLICY)

    def has_effect(part: str, name: str) -> bool:
        section = SHARED_SECTIONS.get(part)
        if section is None or data_flow is None or name not in section.__dataclass_fields__:
            return True
        condition = section.condition_of(name)
        return condition is not_offered or condition(data_flow)

    return {
        f"{part}.{name}": clean(value, 80) if has_effect(part, name) else DASH
        for part, fields in config.items()
        for name, value in fields.items()
    }


_MAX_CONFIG = 1_000_000


def sources_in(run: Path) -> dict[str, str]:
    """The sources of a run's settings, from the comments in ``config.toml``; empty if it is missing."""
    with contextlib.suppress(OSError), open(run / "config.toml", encoding="utf-8", errors="replace") as file:
        return sources_of(file.read(_MAX_CONFIG))
    return {}


def read_summary(path: Path) -> dict[str, Any]:
    """``summary.json``; empty if it is from an earlier session, so that ``run.json`` has another wall time."""
    summary = read_json(path / "summary.json")
    return summary if summary.get("wall_s") == read_run(path).get("wall_s") else {}


def report_of(paths: Sequence[Path], by: Sequence[str] | None, rules: Rules) -> Report:
    """Compares runs, grouped by the settings in ``by``, or by all in which they differ.

    A ConfigError if a setting is not ``section.field`` or no run has it; a RunError if a run cannot be compared.
    """
    for key in by or ():
        if not all(key.partition(".")):
            raise ConfigError(f"--by {key}: expected section.field, for example ppo.epochs")
    curves = []
    for path in dict.fromkeys(paths):
        if (curve := read_curve(path)) is None:
            raise RunError(f"{path.name} has no evaluation yet; wait for one, or remove the run")
        curves.append(curve)
    known = sorted({name for curve in curves for name in curve.settings})
    for key in by or ():
        if key not in known:
            raise ConfigError(f"--by {key}: none of the runs has this setting{did_you_mean(key, known)}")
    return report(split_by_settings(curves, by), rules)


def text(report: Report) -> str:
    """The tables, one block per task."""
    rules = report.rules
    centre = "interquartile means" if rules.robust else "means"
    lines = [
        f"{centre} over seeds, {100 * rules.level:g} % bootstrap interval of {rules.resamples:,} resamples; "
        f"final: all evaluation episodes of the last {rules.policies} policies, {LONG_ENOUGH}"
    ]
    for env in dict.fromkeys(run.group.env for run in report.runs):
        limit_s = next(run.limit_s for run in report.runs if run.group.env == env)
        lines += ["", f"{env}, time limit {limit_s:.4g} s"]
        lines += aligned(_rows(report, env))
    sentences = verdicts(report)
    return "\n".join([*lines, *(["", *sentences] if sentences else []), *_remarks(report)])


def _rows(report: Report, env: str) -> list[list[str]]:
    """The table of one task: its runs, groups and pairs of groups."""
    targets = (f"time to {number(target)} [s]" for target in report.rules.targets)
    rows = [["", "runs", "final metric", "final-time metric", *targets]]
    for run in report.runs:
        if run.group.env == env:
            known = map(number, (run.final, run.final_time, *run.required_s))
            rows.append([f"  {run.name} (seed {DASH if run.seed is None else run.seed})", "1", *known])
    for group in report.groups:
        if group.group.env == env:
            times = [
                f"{spread_text(value)} ({count} of {group.runs})"
                for value, count in zip(group.required_s, group.reached, strict=True)
            ]
            scores = [_final_text(group), spread_text(group.final_time)]
            rows.append([group.group.label, str(group.runs), *scores, *times])
    for pair in report.pairs:
        if pair.group.env == env:
            title = f"{pair.group.label} minus {pair.against.label}, same seeds"
            scores = [spread_text(pair.final), spread_text(pair.final_time)]
            ratios = [f"{spread_text(value)} of its time" for value in pair.required_ratio]
            rows.append([title, str(pair.seeds), *scores, *ratios])
    return rows


def group_cells(report: Report) -> list[dict[str, str]]:
    """A row of a table for each group: title -> cell; the times are those to the only target, if there is one."""
    times = TIMES if report.rules.targets else {}
    return [
        {
            "group": group.group.label,
            "runs": number(group.runs),
            "final return": _final_text(group),
            "return at equal time": spread_text(group.final_time),
            **{title: _time_text(report, group, kind) for title, (kind, _) in times.items()},
        }
        for group in report.groups
    ]


def _final_text(group: GroupReport) -> str:
    seeds = 0 if group.final is None else group.final.seeds
    return spread_text(group.final) + (f" ({seeds} of {group.runs})" if 0 < seeds < group.runs else "")


def _time_text(report: Report, group: GroupReport, kind: str) -> str:
    """The time to the only target, ``kind`` being a field such as ``held_s``; ``(1 of 3)`` where not all have it."""
    known = sum(getattr(run, kind)[0] is not None for run in report.runs if run.group == group.group)
    shown = spread_text(getattr(group, kind)[0], duration)
    return shown if known == group.runs else f"{shown} ({known} of {group.runs})"


def spread_text(value: Spread | None, form: Callable[[float | None], str] = number) -> str:
    """``12.0 [10.0, 14.0]``; without an interval for one seed, a dash if unknown."""
    if value is None:
        return DASH
    return form(value.centre) + ("" if value.low is None else f" [{form(value.low)}, {form(value.high)}]")


def verdicts(report: Report) -> list[str]:
    """Sentences on the group that is ahead at equal time in each environment, and the first one at each target."""
    sentences = []
    for env in dict.fromkeys(group.group.env for group in report.groups):
        groups = [group for group in report.groups if group.group.env == env]
        if len(groups) > 1:
            at_limit = report.rules.limit_s is not None
            sentences += [_standing_text(report.standings[env], at_limit)] if env in report.standings else []
            sentences += [_verdict(env, i, groups, report) for i in range(len(report.rules.targets))]
    return sentences


def _standing(report: Report, env: str) -> Standing | None:
    """The two best groups of a task at equal time; None if fewer than two have a return."""
    known = [(group, group.final_time) for group in report.groups if group.group.env == env and group.final_time]
    if len(known) < 2:
        return None
    (first, best), (second, next_best), *_ = sorted(known, key=lambda pair: pair[1].centre, reverse=True)
    by_seed = sorted(report.runs, key=lambda run: (run.seed is None, run.seed or 0))
    mine, theirs = ([run for run in by_seed if run.group == part.group] for part in (first, second))
    chance, paired, needed = _evidence(mine, theirs, report.rules)
    apart = best.low is not None and next_best.high is not None and best.low > next_best.high
    return Standing(first.group, second.group, best, next_best, mine[0].limit_s, chance, paired, needed, apart)


def _standing_text(standing: Standing, at_limit: bool) -> str:
    """``at_limit``: the user chose the time; some runs may have ended before."""
    first, best, next_best = standing.first, standing.best, standing.next_best
    time = "the time limit" if at_limit else "the end of the shortest run"
    text = (
        f"{first.env}, after {_seconds_text(standing.limit_s)}, {time}: {_short(first)} has a return of "
        f"{spread_text(best)}, {_short(standing.second)} {spread_text(next_best)} (means over the last "
        f"{FINAL_EVALUATIONS} evaluations until then, or all if fewer)"
    )
    seeds = min(best.seeds, next_best.seeds)
    if seeds < MIN_RUNS:
        return f"{text}; fewer than {MIN_RUNS} seeds each cannot tell them apart"
    chance = standing.improvement
    if best.low == best.high == next_best.low == next_best.high:
        return f"{text}; all runs have the same return, so the groups do not differ at this time"
    if chance is not None and chance.centre == 1.0:  # the interval of a bootstrap is then 1 alone
        evidence = f"every run of {_short(first)} has a higher return than each of the other {next_best.seeds}"
    else:
        evidence = (
            f"a run of {_short(first)} has a higher return than one of {_short(standing.second)} with probability "
            f"{spread_text(chance, percent)}, ties count half"
        )
        if standing.paired:
            evidence += f" (interval over the {seeds} pairs of equal seeds)"
    if standing.apart:
        return f"{text}; {_short(first)} is better: {evidence}"
    text = f"{text}; {evidence}, but their intervals overlap, so {seeds} seeds cannot tell them apart"
    if standing.more is None:
        return text
    if standing.more > MAX_SEEDS:
        return f"{text}; a difference this small would need more than {MAX_SEEDS} additional seeds each"
    seeds_text = f"{standing.more} more seed{'' if standing.more == 1 else 's'}"
    return f"{text}; {seeds_text} each would suffice if the difference is real"


def _verdict(env: str, index: int, groups: Sequence[GroupReport], report: Report) -> str:
    """Sentence on who reached a target first, how long the others took, and who did not."""
    target, policies = report.rules.targets[index], report.rules.policies
    known = {_short(group.group): time for group in groups if (time := group.required_s[index]) is not None}
    times = {label: time.centre for label, time in known.items()}
    ends = {_short(group.group): max(run.end_s for run in report.runs if run.group == group.group) for group in groups}
    fastest_s = min(times.values(), default=0.0)
    late = [
        f"{name} ended before that, after {_seconds_text(ends[name])}"
        if ends[name] < fastest_s and not group.reached[index]
        else f"{name} did not"
        if group.runs == 1
        else f"{name} did with {group.reached[index]} of {group.runs} runs"
        for group in groups
        if (name := _short(group.group)) not in times
    ]
    mean = f" by its mean of {policies} evaluations" if policies > 1 else ""
    if not times:
        return f"{env}: no group reached {number(target)}{mean} in every run"
    (first, _), *others = sorted(times.items(), key=lambda item: item[1])
    level = [label for label, time_s in others if time_s <= 1.05 * fastest_s]
    who = f"{' and '.join([first, *level])} were level" if level else f"{first} was first"
    sentence = f"{env}: {who} at {number(target)}{mean}, after {_seconds_text(fastest_s)}"
    later = [
        f"{label} took {_seconds_text(time_s)}" + (f", {time_s / fastest_s:.1f} times as long" if fastest_s else "")
        for label, time_s in others[len(level) :]
    ]
    sentence = "; ".join([sentence, *later, *late])
    if min(group.runs for group in groups) < MIN_RUNS:
        sentence += f". With fewer than {MIN_RUNS} seeds each this may be chance"
    elif later and not _are_apart(known[first], known[others[len(level)][0]]):
        sentence += f". The intervals of {first} and {others[len(level)][0]} overlap, so this may be chance"
    return sentence


def _are_apart(earlier: Spread, later: Spread) -> bool:
    """True if the interval of the earlier time ends before that of the later one begins."""
    return earlier.high is not None and later.low is not None and earlier.high < later.low


def _short(group: RunGroup) -> str:
    """Name of a group in a sentence, shortened so that it does not hide the rest."""
    return clean(group.label, _MAX_NAME)


def _seconds_text(seconds: float) -> str:
    return f"{number(seconds)} s" if seconds < 100.0 else duration(seconds)


def _remarks(report: Report) -> list[str]:
    remarks = []
    short = [f"{run.name} {run.policies}" for run in report.runs if run.policies < report.rules.policies]
    if short:
        remarks.append(f"fewer than {report.rules.policies} policies were evaluated: {', '.join(short)}")
    for group in report.groups:
        seeds = [run.seed for run in report.runs if run.group == group.group]
        if len(set(seeds)) < len(seeds):
            remarks.append(f"{group.group.env} {group.group.label}: a seed occurs twice")
    return ["", *remarks] if remarks else []


# --- curves over several runs ---

_BAND_RESAMPLES = 1000
SMOOTHING = 3  # evaluations of one run that are averaged (a median would hide a collapse)
Line = tuple[np.ndarray, np.ndarray]  # horizontal positions and values of one run, float64 [K]


class Band(NamedTuple):
    """A curve and its 95 % interval at K common points; float64 [K], nan where unknown."""

    x: np.ndarray
    centre: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: np.ndarray  # number of runs that reach each point


def _not_overwritten(x: np.ndarray) -> np.ndarray:
    """Mask of the points that count: a resumed run's counters go back to its checkpoint; the later session counts."""
    later = np.minimum.accumulate(x[::-1])[::-1]
    return np.asarray(x < np.append(later[1:], np.inf))


def on_grid(lines: Sequence[Line], points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Step curves on a common grid: x [points], values [runs, points]; nan where not all runs have a value.

    Runs less than half as long as the longest are nan throughout: a mean that they join or leave jumps.
    """
    x = np.linspace(0.0, max((float(at[-1]) for at, _ in lines if len(at)), default=0.0), points)
    values = np.full((len(lines), points), np.nan)
    for line, (at, y) in zip(values, lines, strict=True):
        if len(at):
            counts = _not_overwritten(at)
            at, y = at[counts], y[counts]
            index = np.searchsorted(at, x, side="right") - 1
            line[:] = np.where((index >= 0) & (x <= at[-1]), y[np.maximum(index, 0)], np.nan)
    spans = np.array([at[-1] - at[0] if len(at) else -1.0 for at, _ in lines])
    if (longest := spans.max(initial=0.0)) > 0.0:
        short = spans < longest / 2.0
        values[short] = np.nan
        values[:, ~np.isfinite(values[~short]).all(axis=0)] = np.nan
    return x, values


def band(x: np.ndarray, values: np.ndarray, robust: bool) -> Band:
    """Mean or interquartile mean over runs, with a percentile bootstrap over runs; values [runs, K]."""
    centre = np.full(len(x), np.nan)
    low, high = centre.copy(), centre.copy()
    counts = np.isfinite(values).sum(axis=0)
    for k in np.flatnonzero(counts):
        column = values[np.isfinite(values[:, k]), k]
        centre[k] = iqm(column) if robust else column.mean()
        if len(column) >= MIN_RUNS:
            low[k], high[k] = bootstrap_interval(column, resamples=_BAND_RESAMPLES, robust=robust)
    return Band(x, centre, low, high, counts)


def returns(evaluations: Sequence[EvaluationRow], axis: str) -> Line:
    """Greedy returns of a run, each the mean of it and the ones before (``SMOOTHING`` in all)."""
    x = np.array([float(getattr(record, axis)) for record in evaluations])
    counts = _not_overwritten(x)
    known = [record for record, counted in zip(evaluations, counts, strict=True) if counted]
    return x[counts], np.array(running_mean(known, SMOOTHING), np.float64)
