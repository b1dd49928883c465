"""The tuner beside the exhaustive grid, on this machine: how much of the best score its pick reaches.

The tuner runs first, some times and fresh. Then every batch size with every number of samplers, and what was
picked, is measured with the real learner and real samplers in turns with the most frequent pick, and scored by the
same formula.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spreeze.autotune.records import JointSetting, LearnerSetting
from spreeze.bench.busy import busy_core
from spreeze.bench.grid import Point, measure_grid
from spreeze.envs.probe import probe_env
from spreeze.errors import ConfigError, SpreezeError
from spreeze.hardware import read_machine
from spreeze.modes.measure import Measuring
from spreeze.settings import Layer, Settings, resolve, task_profile, with_algorithm
from spreeze.tune_cache import only_tuner
from spreeze.tuning import Listener, tuned_layer
from spreeze.workers.interrupts import Interrupts
from spreeze.workers.plan import RunPlan

Row = dict[str, Any]
Say = Callable[[str], None]


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


def tune_rows(case: Case, say: Say) -> list[Row]:
    """Score of each pick over the best of the grid, seconds used, and every grid point.

    Raises:
        SpreezeError: the tuner failed, or nothing of the grid could be measured.
    """
    if case.cores is not None:
        _use_cores(case.cores)
    with Interrupts() as interrupts, busy_core(max(os.sched_getaffinity(0))) if case.busy else contextlib.nullcontext():
        settings = _settings(case)
        records = []
        for number in range(case.runs):
            records.append(_tuned(settings, interrupts))
            say(f"  tuner {number + 1}: {_short(_setting_of(records[-1]))} in {records[-1]['seconds']:.0f} s")
        points = _grid(case, settings, [_setting_of(record) for record in records], interrupts, say)
    return _rows(case, records, points)


def _use_cores(count: int) -> None:
    own = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(own):
        raise ConfigError(f"--cores {count}: this process may use {len(own)}")
    os.sched_setaffinity(0, own[:count])


def _settings(case: Case) -> Settings:
    profile = task_profile(case.env_id)
    layers = [*([profile] if profile else []), Layer("bench", {
        "env": {"id": case.env_id, "plain": case.plain}, "tuning": {"objective": case.objective},
    })]
    settings = resolve(layers)
    image = dataclasses.asdict(settings.config.image)
    return with_algorithm(layers, settings, probe_env(case.env_id, steps=0, plain=case.plain, image=image).spec)[0]


def _tuned(settings: Settings, interrupts: Interrupts) -> dict[str, Any]:
    """A fresh tuning, its environment's probe included in its time."""
    start = time.monotonic()
    part = settings.config.env
    probe = probe_env(part.id, steps=0, plain=part.plain, image=dataclasses.asdict(settings.config.image))
    _, record = tuned_layer(settings, probe, read_machine(), interrupts, Listener(say=lambda text: None), fresh=True,
                            spent_s=time.monotonic() - start)
    return record


def _setting_of(record: dict[str, Any]) -> JointSetting:
    choice = record["choice"]
    learner = LearnerSetting(batch_size=choice["learner.batch_size"], threads=choice["learner.threads"],
                             device=choice["learner.device"], precision=choice["learner.precision"])
    return JointSetting(learner=learner, samplers=choice["sampling.samplers"],
                        envs_per_sampler=choice["sampling.envs_per_sampler"],
                        samples_per_insert_min=choice["replay.samples_per_insert_min"])


def _grid(
    case: Case, settings: Settings, picks: Sequence[JointSetting], interrupts: Interrupts, say: Say
) -> dict[JointSetting, Point]:
    """Every batch, one thread and a pair, with every number of samplers, at the configured and the picks' ratios."""
    machine = read_machine()
    config = settings.config
    most = int(machine.cores.usable) + 1
    ratios = sorted({config.replay.samples_per_insert_min, *(pick.samples_per_insert_min for pick in picks)})
    kinds = {(pick.learner.threads, pick.learner.device, pick.learner.precision, pick.envs_per_sampler)
             for pick in picks}
    probe = probe_env(case.env_id, steps=1000, plain=case.plain, image=dataclasses.asdict(config.image))
    if probe.spec.num_actions is None and machine.cores.usable >= 2.0:
        kinds |= {(threads, *kind[1:]) for kind in kinds for threads in (1, 2)}
    grid = [
        JointSetting(learner=LearnerSetting(batch_size=batch, threads=threads, device=device, precision=precision),
                     samplers=samplers, envs_per_sampler=envs, samples_per_insert_min=ratio)
        for batch in case.batches for threads, device, precision, envs in sorted(kinds)
        for ratio in ratios for samplers in range(1, most + 2 - threads)
    ]
    plan = RunPlan(settings=settings, spec=probe.spec, samplers=1, free_core=False)

    def open_measuring(within_s: float) -> Measuring:
        measuring = Measuring(
            plan, usable_cores=machine.cores.usable, memory_cap_bytes=machine.memory.usable_bytes,
            crew_bytes=10**9, ends_s=time.monotonic() + within_s, interrupts=interrupts,
        )
        measuring.step_us = probe.step_us_median
        return measuring

    with only_tuner(say, interrupts):
        return measure_grid(grid, picks, case.rounds, case.objective, open_measuring, say)


def _rows(case: Case, records: Sequence[dict[str, Any]], points: dict[JointSetting, Point]) -> list[Row]:
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
            "updates_per_s": point.updates_per_s, "batch_size": setting.learner.batch_size,
            "samplers": setting.samplers, "samples_per_insert_min": setting.samples_per_insert_min,
            **({"failure": point.failure} if point.failure else {}),
        })
    return rows


def _short(setting: JointSetting) -> str:
    learner = setting.learner
    more = "" if learner.device == "cpu" else f" on {learner.device}"
    return (f"batch {learner.batch_size} x {learner.threads} thr{more}, {setting.samplers} smp x "
            f"{setting.envs_per_sampler}, spi >= {setting.samples_per_insert_min:g}")
