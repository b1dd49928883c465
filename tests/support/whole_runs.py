"""Figures of whole runs: the real command in processes of its own, seeds and modes in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from figures import Row, row, row_of_reached

from spreeze.config.layers import Layer, Settings, resolve, with_algorithm
from spreeze.config.profiles import task_profile
from spreeze.envs.probe import probe_of
from spreeze.errors import RunError, SpreezeError, UsageError
from spreeze.metrics.comparison import Curve, RunGroup, read_curve, split_by_settings
from spreeze.metrics.return_curve import HELD, WORST_OF, final_metric, reached, whole, worst_of_last
from spreeze.metrics.store import MetricsReader
from spreeze.run_directory import read_run
from spreeze.types import EnvSpec
from spreeze.workers.evaluator import read_rows

Axes = Any
Document = dict[str, Any]
"""Document of ``train --json``."""
Train = Callable[[list[str]], Document]
Say = Callable[[str], None]
OUTSIDE_S = 180.0
"""Time that a run may take besides its training, at most."""
_RATES = {
    "env_steps_per_s": "1/s",
    "updates_per_s": "1/s",
    "update_frames_per_s": "1/s",
    "samples_per_insert": "ratio",
    "policy_lag_mean": "updates",
    "eval_return_mean": "return",
    "eval_return_best": "return",
}

_FIRST = "time_to_target_s"
_TAKEN = {
    "updates": "updates",
    "updates_per_s": "1/s",
    "env_steps": "env steps",
    "eval_return_final": "return",
    "eval_return_best": "return",
    "eval_return_worst_of_20": "return",
}


def train(
    arguments: list[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "spreeze.train"),
) -> Document:
    """One ``python -m spreeze.train ... --json`` with these variables added; returns its document.

    Raises:
        SpreezeError: it failed or took too long.
    """
    command = [sys.executable, *program, *arguments, "--json"]
    try:
        variables = {**os.environ, **(environment or {})}
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False, env=variables
        )
    except subprocess.TimeoutExpired:
        raise SpreezeError(f"not done within {timeout_s:.0f} s: {' '.join(command)}") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise SpreezeError(f"{' '.join(command)}: exit code {done.returncode}: {lines[-1]}")
    document: Document = json.loads(done.stdout)
    return document


def task_settings(layers: list[Layer]) -> tuple[Settings, EnvSpec]:
    """A task's settings as ``spreeze.train`` has them, its profile and the algorithm that fits below these layers."""
    profile = task_profile(resolve(layers).config.env.id)
    layers = [*([profile] if profile else []), *layers]
    spec = probe_of(resolve(layers).config).spec
    return with_algorithm(layers, spec).settings, spec


# --- rates, and time to a return ---


def rates_rows(env_id: str, seconds: float, repeats: int, runs_dir: str, extra: list[str]) -> list[Row]:
    """Env steps and updates a second of the asynchronous run, at the same time."""
    flags = [f"--env={env_id}", "--samplers=1", "--batch-size=256", "--learner-threads=1", f"--runs-dir={runs_dir}"]
    flags += [f"--seconds={seconds}", *extra]
    found = [train([*flags, f"--seed={seed + 1}"], seconds + OUTSIDE_S) for seed in range(repeats)]
    targets = {"env_steps_per_s": ">= 1900", "updates_per_s": ">= 75"} if env_id.startswith("Walker2D") else {}
    return [
        row(name, unit, [document[name] for document in found], env=env_id, target=targets.get(name))
        for name, unit in _RATES.items()
    ]


def time_to_target_rows(
    env_id: str,
    target: float,
    seeds: int,
    runs_dir: str,
    limit_s: float,
    extra: list[str],
    say: Say,
    *,
    modes: Sequence[str] = ("spreeze", "serial"),
    held: bool = False,
) -> list[Row]:
    """Wall time from process start to the target return, both modes in turn, seed by seed.

    With ``held``, a run ends when the mean of ``HELD`` evaluations in a row reaches the target, and that time counts.
    """
    cases = {mode: ["--mode", mode] for mode in modes}
    if len(cases) != 2:
        raise UsageError(f"--modes {' '.join(modes)}: expected two that differ")
    extra = [*extra, "--set", f"stop.target_evaluations={HELD}"] if held else extra
    found = in_turn(cases, seeds, until_target(env_id, target, runs_dir, limit_s, extra), say)
    goals = {"spreeze": "<= 20 s"} if env_id == "Pendulum-v1" else {}
    return target_rows(
        found,
        env_id,
        {} if held else goals,
        "<= 0.6" if [*cases] == ["spreeze", "serial"] else None,
        "time_to_target_held_s" if held else _FIRST,
    )


def until_target(env_id: str, target: float, runs_dir: str, limit_s: float, extra: list[str]) -> Train:
    """A run that ends at the target, or is given up; takes further flags."""
    ends = [f"--env={env_id}", f"--target-return={target}", f"--seconds={limit_s}", f"--runs-dir={runs_dir}"]
    return lambda flags: train([*ends, *flags, *extra], limit_s + OUTSIDE_S)


def in_turn(
    cases: Mapping[str, list[str]], seeds: int, train_once: Train, say: Say, first_seed: int = 1
) -> dict[str, list[Document]]:
    """The documents of runs with the flags of each case, seed by seed."""
    found: dict[str, list[Document]] = {name: [] for name in cases}
    for seed in range(first_seed, first_seed + seeds):
        for name, flags in cases.items():
            document = train_once([*flags, "--seed", str(seed)])
            found[name].append(document)
            best, final = document["eval_return_best"], document.get("eval_return_final")
            reached_s, held_s = document["time_to_target_s"], document.get("time_to_target_held_s")
            told = [f"{document['env_steps']} env steps, {document['updates']} updates"]
            told += [f"best return {best:.1f}"] if best is not None else []
            told += [f"last ten {final:.1f}"] if final is not None else []
            told += [f"target after {reached_s:.1f} s"] if reached_s is not None else []
            told += [f"held after {held_s:.1f} s"] if held_s is not None else []
            say(f"  seed {seed}, {name}: {', '.join(told)}")
    return found


def target_rows(
    found: Mapping[str, list[Document]],
    env_id: str,
    goals: Mapping[str, str],
    ratio_goal: str | None,
    key: str = _FIRST,
) -> list[Row]:
    """Times to the target return of each mode, what they took, and the ratio of the first mode to the second.

    ``key`` of a document holds the time that counts.
    """
    rows = []
    for mode, documents in found.items():
        rows.append(time_row(documents, key, mode=mode, env=env_id, target=goals.get(mode)))
        rows += [
            row(name, unit, [document[name] for document in documents], mode=mode, env=env_id)
            for name, unit in _TAKEN.items()
            if all(document.get(name) is not None for document in documents)
        ]
    first, second = found.values()
    return [*rows, ratio_row(f"time_over_{list(found)[1]}", first, second, key, env=env_id, target=ratio_goal)]


def time_row(documents: list[Document], key: str = _FIRST, **more: Any) -> Row:
    """Wall times to the target return; None for a run that did not get there."""
    return row_of_reached(key, "s", [document[key] for document in documents], **more)


def ratio_row(metric: str, documents: list[Document], others: list[Document], key: str = _FIRST, **more: Any) -> Row:
    """Times to the target return over those of others, run by run; None where the first did not get there.

    Where only the other did not, the time after which it was given up counts: the true ratio is lower.
    """
    found = [
        None if one[key] is None else one[key] / (other["process_s"] if other[key] is None else other[key])
        for one, other in zip(documents, others, strict=True)
    ]
    return row_of_reached(metric, "ratio", found, **more)


# --- figures and a picture of finished runs ---

_AXES = {
    "wall_s": (60.0, "wall time [min]"),
    "env_steps": (1e3, "env steps [1000]"),
    "updates": (1e3, "updates [1000]"),
}
CURVE_AXES = tuple(_AXES)
_TRAINING_POINTS = 300


@contextlib.contextmanager
def picture(out: Path, title: str, lines: int = 1, panels: int = 3, **options: Any) -> Iterator[Any]:
    """Axes [lines, panels], which are written to ``out`` at the end; a UsageError if matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UsageError("a picture needs matplotlib: pip install matplotlib") from None
    figure, grid = pyplot.subplots(
        lines, panels, figsize=(4 * panels, 3.6 * lines), squeeze=False, constrained_layout=True, **options
    )
    try:
        yield grid
        for axis in grid.flat:
            axis.grid(alpha=0.3)
        figure.suptitle(title, fontsize=10, wrap=True)
        figure.savefig(out, dpi=110)
    finally:
        pyplot.close(figure)


def curve_rows(runs: list[Path], targets: Sequence[float] = (), most_updates: float = math.inf) -> list[Row]:
    """Results of runs, by task, algorithm, mode and the settings in which they differ; a repeat is a run.

    ``worst_over_mean`` is the worst of the last twenty evaluations over their mean, where that is above 0. A target
    counts from the first evaluation that reaches it, held from the last of five whose mean does; who never gets there
    has no time. Beside the wall time stand the updates, which do not depend on how busy the machine was.
    ``most_updates``: later evaluations are left out.

    Raises:
        RunError: a run without evaluations up to there.
    """
    curves = []
    for path in runs:
        curve = read_curve(path)
        kept = [one for one in curve.evaluations if one.updates <= most_updates] if curve is not None else []
        if curve is None or not kept:
            raise RunError(
                f"{path} has no evaluation"
                + (f" in its first {most_updates:g} updates" if math.isfinite(most_updates) else "")
            )
        curves.append(dataclasses.replace(curve, evaluations=kept))
    groups: dict[RunGroup, list[Curve]] = {}
    for curve in split_by_settings(curves):
        groups.setdefault(curve.group, []).append(curve)
    return [row for group, of_group in groups.items() for row in _group_rows(group, of_group, targets)]


def _group_rows(group: RunGroup, curves: list[Curve], targets: Sequence[float]) -> list[Row]:
    found = [curve.evaluations for curve in curves]
    more = {"env": group.env, "runs": group.label, "seeds": " ".join(str(curve.seed) for curve in curves)}
    worst = [_over(worst_of_last(one), final_metric(one, WORST_OF)) for one in found]
    rows = [
        row("eval_return_final", "return", [final_metric(one) for one in found], **more),
        row("eval_return_best", "return", [max(each.return_mean for each in whole(one)) for one in found], **more),
        row("worst_over_mean", "ratio", worst, **more),
        row("updates", "updates", [one[-1].updates for one in found], **more),
        row("env_steps", "env steps", [one[-1].env_steps for one in found], **more),
    ]
    for target, (name, policies) in itertools.product(targets, (("first", 1), ("held", HELD))):
        at = [reached(whole(one), target, policies) for one in found]
        more_of = {**more, "of": target}
        rows += [
            row_of_reached(f"time_to_target_{name}_s", "s", [one and one.t for one in at], **more_of),
            row_of_reached(f"updates_to_target_{name}", "updates", [one and one.updates for one in at], **more_of),
        ]
    return rows


def _over(part: float | None, whole: float | None) -> float | None:
    return None if part is None or whole is None or whole <= 0.0 else part / whole


def draw_curve(runs: list[Path], out: Path, axes: Sequence[str] = CURVE_AXES) -> None:
    """Draws greedy return over wall time, env steps and updates, one row a task.

    Runs of the same algorithm, mode and settings share a colour: a thin line for each, and a thick one through their
    medians where there are three or more. A run alone has a band of one standard deviation, and its return in training
    where that is known.

    Raises:
        UsageError: matplotlib is not installed.
        RunError: a run without evaluations.
    """
    known = {path: curve for path in runs if (curve := read_curve(path)) is not None}
    variants = {
        path: curve.group.variant for path, curve in zip(known, split_by_settings([*known.values()]), strict=True)
    }
    tasks: dict[str, dict[str, list[Path]]] = {}
    for path in runs:
        run = read_run(path)
        label = ", ".join(filter(None, (f"{run.get('algo', '?')}, mode {run.get('mode', '?')}", variants.get(path))))
        tasks.setdefault(str(run.get("env_id", "")), {}).setdefault(label, []).append(path)
    task = "" if len(tasks) > 1 else f"{next(iter(tasks))}: "
    title = f"{task}{read_run(runs[0]).get('machine', '')}"
    with picture(out, title, len(tasks), len(axes), sharey="row") as grid:
        for line, (task, groups) in zip(grid, tasks.items(), strict=True):
            for number, (label, paths) in enumerate(groups.items()):
                _draw_group(dict(zip(axes, line, strict=True)), label, paths, f"C{number}")
            for axis, name in zip(line, axes, strict=True):
                axis.set_xlabel(_AXES[name][1])
            line[0].set(ylabel="episode return", title=task if len(tasks) > 1 else "")
            line[0].legend(fontsize=8)


def _draw_group(axes: dict[str, Axes], label: str, paths: list[Path], colour: str) -> None:
    curves = [read_rows(path / "eval.csv") for path in paths]
    for path, rows in zip(paths, curves, strict=True):
        if not rows:
            raise RunError(f"{path} has no evaluation in eval.csv")
    episodes = max(int(one["episodes"]) for rows in curves for one in rows)
    seeds = ", ".join(str(read_run(path).get("seed", "?")) for path in paths)
    label = textwrap.fill(f"{label}, seed{'s' * (len(paths) > 1)} {seeds}: greedy, {episodes} episodes", _LEGEND_WIDTH)
    for name, axis in axes.items():
        scale = _AXES[name][0]
        lines = [
            (np.array([one[name] for one in rows]) / scale, np.array([one["return_mean"] for one in rows]))
            for rows in curves
        ]
        width = 1.6 if len(lines) == 1 else 0.8
        for number, line in enumerate(lines):
            axis.plot(*line, linewidth=width, color=colour, alpha=0.9, label="" if number else label)
        if len(lines) >= _MIN_FOR_MEDIAN:
            # Up to where the shortest run ends: a median of fewer would jump.
            x = np.linspace(max(one[0][0] for one in lines), min(one[0][-1] for one in lines), _TRAINING_POINTS)
            axis.plot(x, np.median([np.interp(x, *one) for one in lines], 0), linewidth=2.2, color=colour)
    if len(paths) == 1:
        _draw_spread(axes, paths[0], curves[0], colour)


_MIN_FOR_MEDIAN = 3
_LEGEND_WIDTH = 42  # characters that fit into one of three axes


def _draw_spread(axes: dict[str, Axes], path: Path, rows: list[Document], colour: str) -> None:
    """A standard deviation of each evaluation, and the mean return of episodes with exploration where it is known."""
    low, high = ([one["return_mean"] + sign * one["return_std"] for one in rows] for sign in (-1, 1))
    for name, axis in axes.items():
        axis.fill_between([one[name] / _AXES[name][0] for one in rows], low, high, alpha=0.2, linewidth=0, color=colour)
    series = MetricsReader(path / "metrics.db").series("episode_return", max_points=_TRAINING_POINTS)
    for name, x in (("wall_s", series.t), ("env_steps", series.step)):
        if name in axes:
            style = {"linewidth": 0.8, "alpha": 0.7, "color": colour, "label": "episodes learned from"}
            axes[name].plot(x / _AXES[name][0], series.mean, **style)
