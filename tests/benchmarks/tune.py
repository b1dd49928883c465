"""The tuner beside the exhaustive grid, on this machine: how much of the best score its pick reaches.

The tuner runs first, some times and fresh. Then every batch size with every number of samplers, and what was picked, is
measured with the real learner and real samplers and scored by the same formula. The speed of a shared machine changes
by a third within minutes, so a few settings at a time run in turns with the same reference, the most frequent pick, and
a score is the median of the ratios to it. The best of many settings is partly the luckiest: the leaders and the picks
are measured once more, and only that counts for them.
"""

import argparse
import contextlib
import os
import random
import statistics
from collections.abc import Sequence
from typing import Any

from common import busy_core, main, on_cores, say
from figures import Row, row
from whole_runs import task_settings

from spreeze.config.layers import Layer
from spreeze.envs.probe import probe_of
from spreeze.errors import SpreezeError
from spreeze.machine.awake import AWAKE
from spreeze.machine.hardware import read_machine
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.tuner.measure import Measurer
from spreeze.tuner.model import joint_score
from spreeze.tuner.problem import BATCH, DEVICE, ENVS, PRECISION, RATIO, SAMPLERS, THREADS, Setting, TrialResult
from spreeze.tuner.run import TunerCallbacks, Tuning, only_tuner

SLOWEST_UPDATE_S = 0.1
"""Larger batches are left out of the grid once an update takes longer."""
WINDOW_S, START_S = 4.5, 8.0
"""All windows of one setting, and the start of a group of trials, about."""
TOGETHER, LEADERS, FINAL_ROUNDS = 3, 6, 2


class Grid:
    """Scores of settings over the reference's in the same turns."""

    def __init__(
        self, plan: RunPlan, step_us: float, reference: Setting, objective: str, interrupts: Interrupts
    ) -> None:
        self._plan, self._step_us, self._interrupts = plan, step_us, interrupts
        self.reference, self._objective = reference, objective
        self.ratios: dict[Setting, list[float]] = {reference: [1.0]}
        self._updates_per_s: dict[Setting, float] = {}
        self._dice = random.Random(0)

    def measure(self, settings: Sequence[Setting]) -> None:
        """Each once, a few trials at a time; settings of one trial differ by their samplers alone."""
        trials: dict[Setting, list[Setting]] = {}
        for one in dict.fromkeys(settings):
            if one != self.reference and not self._too_slow(one):
                trials.setdefault(one.without(SAMPLERS), []).append(one)
        groups = list(trials.values())
        self._dice.shuffle(groups)
        for at in range(0, len(groups), TOGETHER):
            wanted = [self.reference, *(one for group in groups[at : at + TOGETHER] for one in group)]
            found = {result.setting: result for result in self._results(wanted)}
            reference = found.get(self.reference)
            if reference is None or reference.failure:
                raise SpreezeError(f"the reference could not be measured: {reference and reference.failure}")
            for setting, result in found.items():
                if setting != self.reference:
                    pairs = zip(self._scores(result), self._scores(reference), strict=False)
                    self.ratios.setdefault(setting, []).extend(own / other for own, other in pairs if other > 0.0)
                    if result.updates_per_s:
                        self._updates_per_s[setting] = statistics.median(result.updates_per_s)

    def _results(self, wanted: Sequence[Setting]) -> list[TrialResult]:
        within_s, machine = WINDOW_S * len(wanted) + START_S, read_machine()
        with Measurer(
            self._plan,
            usable_cores=machine.cores.usable,
            memory_cap_bytes=machine.memory.usable_bytes,
            group_bytes=10**9,
            ends_s=AWAKE() + within_s,
            interrupts=self._interrupts,
        ) as measuring:
            measuring.step_us = self._step_us
            return list(measuring.joint(wanted, within_s=within_s, on_result=lambda rate: None))

    def _scores(self, rate: TrialResult) -> list[float]:
        return [
            joint_score(self._objective, rate.setting[BATCH], updates, steps)
            for updates, steps in zip(rate.updates_per_s, rate.env_steps_per_s, strict=True)
        ]

    def _too_slow(self, setting: Setting) -> bool:
        return any(
            rate * SLOWEST_UPDATE_S < 1.0
            and setting[BATCH] > other[BATCH]
            and all(setting.get(name) == other.get(name) for name in (DEVICE, THREADS, PRECISION))
            for other, rate in self._updates_per_s.items()
        )

    def score(self, setting: Setting) -> float:
        """Median ratio to the reference; 0 where nothing was measured."""
        return statistics.median(self.ratios.get(setting) or [0.0])


def tune(args: argparse.Namespace) -> list[Row]:
    """Score of each pick over the best of the grid, seconds that the tuner took, and every setting."""
    rows = []
    for count in args.cores:
        busy = busy_core(max(os.sched_getaffinity(0))) if args.busy else contextlib.nullcontext()
        with on_cores(count or None), busy, Interrupts() as interrupts:
            rows += [{**one, "cores": len(os.sched_getaffinity(0))} for one in _tuned_rows(args, interrupts)]
    return rows


def _tuned_rows(args: argparse.Namespace, interrupts: Interrupts) -> list[Row]:
    settings, spec = task_settings(
        [
            Layer(
                "benchmark",
                {"run": {"mode": "spreeze"}, "env": {"id": args.env}, "tuning": {"objective": args.objective}},
            )
        ]
    )
    probe = probe_of(settings.config, steps=1000)
    records: list[dict[str, Any]] = []
    for _ in range(args.repeats):
        listener = TunerCallbacks(say=lambda text: None)
        record = Tuning(settings, probe, read_machine(), interrupts, listener).measured(spent_s=0.0, fresh=True)
        records.append(record)
        say(f"  tuner: {_text(_pick(record))} in {record['seconds']:.0f} s")
    picks = [_pick(record) for record in records]
    reference, ratios = (
        statistics.mode(picks),
        {settings.config.replay.samples_per_insert_min, *(pick[RATIO] for pick in picks)},
    )
    pairs = spec.choices is None and reference[DEVICE] == "cpu" and read_machine().cores.usable >= 2.0
    threads = {1, 2} if pairs else {reference[THREADS]}
    grid = [
        Setting({**reference, THREADS: count, BATCH: batch, RATIO: ratio, SAMPLERS: samplers})
        for batch in args.batch_size
        for count in sorted(threads)
        for ratio in sorted(ratios)
        for samplers in args.samplers or range(1, int(read_machine().cores.usable) + 3 - count)
    ]
    measured = Grid(
        RunPlan(settings=settings, spec=spec, samplers=1, free_core=False),
        probe.step_us_median,
        reference,
        args.objective,
        interrupts,
    )
    with only_tuner(say, interrupts):
        for _ in range(args.rounds):
            measured.measure([*picks, *grid])
        leaders = sorted(measured.ratios, key=lambda one: -measured.score(one))[:LEADERS]
        for one in {*leaders, *picks} - {reference}:
            measured.ratios[one] = []
        for _ in range(FINAL_ROUNDS):
            measured.measure([*leaders, *picks])
    best = max({*leaders, *picks}, key=measured.score)
    return [
        row(
            "score_of_pick_over_best_of_grid",
            "share",
            [measured.score(pick) / measured.score(best) for pick in picks],
            best=_text(best),
            env=args.env,
            target=">= 0.95",
        ),
        row("tuning_s", "s", [record["seconds"] for record in records], target="<= 60"),
        *(
            row(f"score of {_text(one)}", "ratio", measured.ratios[one])
            for one in sorted(measured.ratios, key=lambda one: -measured.score(one))
        ),
    ]


def _pick(record: dict[str, Any]) -> Setting:
    names = (DEVICE, BATCH, THREADS, PRECISION, SAMPLERS, ENVS, RATIO)
    return Setting({name: record["choice"][name] for name in names})


def _text(setting: Setting) -> str:
    return (
        f"batch {setting[BATCH]}, {setting[THREADS]} threads on {setting[DEVICE]}, {setting[SAMPLERS]} samplers x "
        f"{setting[ENVS]}, {setting[RATIO]:g} samples per insert"
    )


if __name__ == "__main__":
    main(
        __doc__ or "",
        {"tune": tune},
        flags={
            "objective": "return",
            "batch_size": (32, 64, 128, 256, 512, 1024),
            "rounds": 2,
            "busy": False,
            "cores": (0,),
            "samplers": (),
        },
        env="Walker2DBulletEnv-v0",
    )
