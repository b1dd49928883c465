"""The tuner beside the exhaustive grid, on this machine: how much of the best score its pick reaches.

The tuner runs first, some times and fresh. Then every batch size with every number of samplers, and what was picked,
is measured with the real learner and real samplers, and scored by the same formula.

The speed of a shared machine changes by a third within seconds and minutes. So each group of a few settings of the
grid runs in turns with the same reference, the most frequent pick, and a setting's score is the median of its ratios
to it. The best of so many settings is partly the luckiest: the leaders and what the tuner picked are measured once
more, and only that counts for them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spreeze.bench import Row
from spreeze.bench.runs import Say, busy_core, on_cores, task_settings
from spreeze.config.layers import Layer, Settings
from spreeze.envs.probe import probe_of
from spreeze.errors import SpreezeError
from spreeze.machine.hardware import read_machine
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.tuner.measure import Measurer
from spreeze.tuner.model import joint_score
from spreeze.tuner.problem import BATCH, DEVICE, ENVS, PRECISION, RATIO, SAMPLERS, THREADS, Setting, TrialResult
from spreeze.tuner.run import Listener, only_tuner, tuned_layer


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is compared."""

    env_id: str
    plain: bool
    objective: str
    runs: int
    """Fresh runs of the tuner."""
    batches: tuple[int, ...]
    rounds: int
    """Rounds over the whole grid, of three measurements each."""
    busy: bool
    """A busy process of another program on one core."""
    cores: int | None
    """Cores to use, by affinity; all if None."""
    samplers: tuple[int, ...] = ()
    """Numbers of samplers of the grid; all that the cores leave room for if empty."""


def tune_rows(case: Case, say: Say) -> list[Row]:
    """Score of each pick over the best of the grid, seconds used, and every grid point.

    Raises:
        SpreezeError: the tuner failed, or nothing of the grid could be measured.
    """
    with on_cores(case.cores), Interrupts() as interrupts, \
            busy_core(max(os.sched_getaffinity(0))) if case.busy else contextlib.nullcontext():
        settings = _settings(case)
        records = []
        for number in range(case.runs):
            records.append(_tuned(settings, interrupts))
            say(f"  tuner {number + 1}: {_short(_setting_of(records[-1]))} in {records[-1]['seconds']:.0f} s")
        points = _grid(case, settings, [_setting_of(record) for record in records], interrupts, say)
    return _rows(case, records, points)


def _settings(case: Case) -> Settings:
    return task_settings([Layer("bench", {
        "run": {"mode": "spreeze"}, "env": {"id": case.env_id, "plain": case.plain},
        "tuning": {"objective": case.objective},
    })])[0]


def _tuned(settings: Settings, interrupts: Interrupts) -> dict[str, Any]:
    """A fresh tuning, its environment's probe included in its time."""
    start = time.monotonic()
    probe = probe_of(settings.config)
    _, record = tuned_layer(settings, probe, read_machine(), interrupts, Listener(say=lambda text: None), fresh=True,
                            spent_s=time.monotonic() - start)
    return record


def _setting_of(record: dict[str, Any]) -> Setting:
    names = (DEVICE, BATCH, THREADS, PRECISION, SAMPLERS, ENVS, RATIO)
    return Setting({name: record["choice"][name] for name in names})


def _grid(
    case: Case, settings: Settings, picks: Sequence[Setting], interrupts: Interrupts, say: Say
) -> dict[Setting, GridPoint]:
    """Every batch, one thread and a pair, with every number of samplers, at the configured and the picks' ratios."""
    machine = read_machine()
    config = settings.config
    most = int(machine.cores.usable) + 1
    ratios = sorted({config.replay.samples_per_insert_min, *(pick[RATIO] for pick in picks)})
    kinds = {(pick[THREADS], pick[DEVICE], pick[PRECISION], pick[ENVS]) for pick in picks}
    probe = probe_of(config, steps=1000)
    if probe.spec.num_actions is None and machine.cores.usable >= 2.0:
        kinds |= {(threads, *kind[1:]) for kind in kinds for threads in (1, 2) if kind[1] == "cpu"}
    grid = [
        Setting({DEVICE: device, BATCH: batch, THREADS: threads, PRECISION: precision, SAMPLERS: samplers, ENVS: envs,
                 RATIO: ratio})
        for batch in case.batches for threads, device, precision, envs in sorted(kinds)
        for ratio in ratios for samplers in range(1, most + 2 - threads)
        if not case.samplers or samplers in case.samplers
    ]
    plan = RunPlan(settings=settings, spec=probe.spec, samplers=1, free_core=False)

    def open_measuring(within_s: float) -> Measurer:
        measuring = Measurer(
            plan, usable_cores=machine.cores.usable, memory_cap_bytes=machine.memory.usable_bytes,
            group_bytes=10**9, ends_s=time.monotonic() + within_s, interrupts=interrupts,
        )
        measuring.step_us = probe.step_us_median
        return measuring

    with only_tuner(say, interrupts):
        return measure_grid(grid, picks, case.rounds, case.objective, open_measuring, say)


def _rows(case: Case, records: Sequence[dict[str, Any]], points: dict[Setting, GridPoint]) -> list[Row]:
    scores = {setting: point.score for setting, point in points.items()}
    best = max((setting for setting, point in points.items() if point.final), key=lambda setting: scores[setting])
    if scores[best] <= 0.0:
        raise SpreezeError("nothing of the grid could be measured: "
                           + "; ".join(sorted({str(point.failure) for point in points.values()})))
    picks = [_setting_of(record) for record in records]
    shares = [scores[pick] / scores[best] for pick in picks]
    seconds = [record["seconds"] for record in records]
    machine = {"busy": str(case.busy), "cores": len(os.sched_getaffinity(0)), "env": case.env_id}
    whole = not case.busy and case.cores is None and read_machine().cores.usable >= len(os.sched_getaffinity(0))
    rows: list[Row] = [
        {"metric": "score_of_pick_over_best_of_grid", "unit": "share", "value": min(shares), "repeats": shares,
         "target": ">= 0.95" if whole else ">= 0.90", "best": _short(best), **machine},
        {"metric": "tuning_s", "unit": "s", "value": max(seconds), "repeats": seconds, "target": "<= 60"},
    ]
    for setting, point in sorted(points.items(), key=lambda item: -scores[item[0]]):
        rows.append({
            "metric": f"score over the reference's {_short(setting)}", "unit": "ratio", "value": scores[setting],
            "picked": picks.count(setting), "env_steps_per_s": point.env_steps_per_s,
            "updates_per_s": point.updates_per_s, "batch_size": setting[BATCH],
            "samplers": setting[SAMPLERS], "samples_per_insert_min": setting[RATIO],
            **({"failure": point.failure} if point.failure else {}),
        })
    return rows


def _short(setting: Setting) -> str:
    more = "" if setting[DEVICE] == "cpu" else f" on {setting[DEVICE]}"
    return (f"batch {setting[BATCH]} x {setting[THREADS]} thr{more}, {setting[SAMPLERS]} smp x {setting[ENVS]}, "
            f"spi >= {setting[RATIO]:g}")


# --- the grid ---

_SLOWEST_UPDATE_S = 0.1
"""Larger batches are left out of the grid once an update takes longer."""
_WINDOW_S, _START_S = 4.5, 8.0
"""All windows of one setting, and the start of a group of trials, about."""
_TOGETHER = 3
"""Trials that take turns with the reference; their start is the dearest part."""
_LEADERS, _FINAL_ROUNDS = 6, 2


@dataclass
class GridPoint:
    """Everything measured at one setting."""

    env_steps_per_s: list[float] = field(default_factory=list)
    updates_per_s: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """Scores over those of the reference in the same turns."""
    final: list[float] = field(default_factory=list)
    """The same, of the rounds among the leaders."""
    failure: str | None = None

    @property
    def score(self) -> float:
        """Median ratio to the reference, of the final rounds if it was in them; 0 where it could not run."""
        ratios = self.final or self.ratios
        return statistics.median(ratios) if ratios else 0.0

    def take(self, rate: TrialResult, reference: TrialResult, objective: str, *, final: bool) -> None:
        """Takes in a measurement and that of the reference in the same turns."""
        self.env_steps_per_s += rate.env_steps_per_s
        self.updates_per_s += rate.updates_per_s
        self.failure = rate.failure
        pairs = zip(_scores(rate, objective), _scores(reference, objective), strict=False)
        found = self.final if final else self.ratios
        found += [own / other for own, other in pairs if other > 0.0]


def _scores(rate: TrialResult, objective: str) -> list[float]:
    batch = rate.setting[BATCH]
    return [joint_score(objective, batch, updates, steps)
            for updates, steps in zip(rate.updates_per_s, rate.env_steps_per_s, strict=True)]


def measure_grid(
    settings: Sequence[Setting], picks: Sequence[Setting], rounds: int, objective: str,
    open_measuring: Callable[[float], Measurer], say: Say,
) -> dict[Setting, GridPoint]:
    """Every setting ``rounds`` times, in groups that change from round to round, then the leaders again.

    Settings of one trial (all but the number of samplers equal) stay together. The most frequent of the tuner's picks
    is the reference, which runs in every group. ``open_measuring`` opens the measuring for so many seconds.

    Raises:
        SpreezeError: the reference could not be measured.
    """
    reference = statistics.mode(picks)
    points = {setting: GridPoint() for setting in dict.fromkeys([reference, *picks, *settings])}
    points[reference].ratios.append(1.0)
    points[reference].final.append(1.0)
    grid = _Grid(points, reference, objective, open_measuring)
    dice = random.Random(0)
    for number in range(rounds):
        trials = _trials([one for one in points if one != reference and not _too_slow(one, points)])
        dice.shuffle(trials)
        grid.measure(trials, final=False)
        say(f"  grid: round {number + 1} of {rounds}, {sum(map(len, trials)) + 1} settings")
    others = sorted(set(points) - {reference}, key=lambda one: -points[one].score)
    leaders = _trials(list(dict.fromkeys([*others[:_LEADERS], *(one for one in picks if one != reference)])))
    for number in range(_FINAL_ROUNDS):
        dice.shuffle(leaders)
        grid.measure(leaders, final=True)
        say(f"  leaders: round {number + 1} of {_FINAL_ROUNDS}, {sum(map(len, leaders)) + 1} settings")
    return points


@dataclass(frozen=True)
class _Grid:
    points: dict[Setting, GridPoint]
    reference: Setting
    objective: str
    open_measuring: Callable[[float], Measurer]

    def measure(self, trials: Sequence[Sequence[Setting]], *, final: bool) -> None:
        """Once, in groups of trials, each in turns with the reference."""
        points, reference = self.points, self.reference
        for group in [trials[at : at + _TOGETHER] for at in range(0, len(trials), _TOGETHER)]:
            wanted = [reference, *itertools.chain.from_iterable(group)]
            within_s = _WINDOW_S * len(wanted) + _START_S
            with self.open_measuring(within_s) as measuring:
                found = {rate.setting: rate for rate in
                         measuring.joint(wanted, within_s=within_s, on_result=lambda rate: None)}
            if reference not in found or found[reference].failure:
                why = found[reference].failure if reference in found else "no time"
                raise SpreezeError(f"the reference could not be measured: {why}")
            for setting, rate in found.items():
                if setting != reference:
                    points[setting].take(rate, found[reference], self.objective, final=final)
            points[reference].env_steps_per_s += found[reference].env_steps_per_s
            points[reference].updates_per_s += found[reference].updates_per_s


def _trials(settings: Sequence[Setting]) -> list[list[Setting]]:
    """The settings that one trial can run."""
    found: dict[Setting, list[Setting]] = {}
    for one in settings:
        found.setdefault(one.without(SAMPLERS), []).append(one)
    return list(found.values())


def _too_slow(setting: Setting, points: dict[Setting, GridPoint]) -> bool:
    """True for a larger batch than one whose update already takes too long on the same learner."""
    return any(
        point.updates_per_s and statistics.median(point.updates_per_s) * _SLOWEST_UPDATE_S < 1.0
        and setting[BATCH] > other[BATCH]
        and all(setting.get(name) == other.get(name) for name in (DEVICE, THREADS, PRECISION))
        for other, point in points.items()
    )
