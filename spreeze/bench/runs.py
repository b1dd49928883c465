"""Figures of whole runs: the real command in processes of its own, seeds and modes in turn."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spreeze.bench import Row, row
from spreeze.errors import RunError, SpreezeError, UsageError
from spreeze.metrics.comparison import HELD
from spreeze.metrics.store import MetricsReader
from spreeze.run_directory import read_run
from spreeze.workers.evaluator import read_rows

Axes = Any
Document = dict[str, Any]
"""What ``train --json`` says of a run."""
Train = Callable[[list[str]], Document]
Say = Callable[[str], None]
_RATES = {
    "env_steps_per_s": "1/s", "updates_per_s": "1/s", "update_frames_per_s": "1/s", "samples_per_insert": "ratio",
    "policy_lag_mean": "updates", "eval_return_mean": "return", "eval_return_best": "return",
}

_FIRST = "time_to_target_s"
_TAKEN = {"updates": "updates", "updates_per_s": "1/s", "env_steps": "env steps", "eval_return_final": "return",
          "eval_return_best": "return"}


def train(arguments: list[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> Document:
    """One ``python -m spreeze.train ... --json`` with these variables added; returns its document.

    Raises:
        SpreezeError: it failed or took too long.
    """
    command = [sys.executable, "-m", "spreeze.train", *arguments, "--json"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False,
                              env={**os.environ, **(environment or {})})
    except subprocess.TimeoutExpired:
        raise SpreezeError(f"not done within {timeout_s:.0f} s: {' '.join(command)}") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise SpreezeError(f"{' '.join(command)}: exit code {done.returncode}: {lines[-1]}")
    document: Document = json.loads(done.stdout)
    return document


# --- rates, and time to a return ---


def rates_rows(env_id: str, seconds: float, repeats: int, runs_dir: str, extra: list[str]) -> list[Row]:
    """Env steps and updates a second of the asynchronous run, at the same time."""
    found = [
        train(["--env", env_id, "--samplers", "1", "--batch-size", "256", "--learner-threads", "1", "--seconds",
               str(seconds), "--seed", str(seed + 1), "--runs-dir", runs_dir, *extra], seconds + 120.0)
        for seed in range(repeats)
    ]
    targets = {"env_steps_per_s": ">= 1900", "updates_per_s": ">= 75"} if env_id.startswith("Walker2D") else {}
    return [row(name, unit, [document[name] for document in found], env=env_id, target=targets.get(name))
            for name, unit in _RATES.items()]


def time_to_target_rows(
    env_id: str, target: float, seeds: int, runs_dir: str, limit_s: float, extra: list[str], say: Say, *,
    held: bool = False,
) -> list[Row]:
    """Wall time from process start to the target return, both modes in turn, seed by seed.

    With ``held``, a run ends when the mean of ``HELD`` evaluations in a row reaches the target, and that time counts.
    """
    cases = {mode: ["--mode", mode] for mode in ("spreeze", "serial")}
    extra = [*extra, "--set", f"stop.target_evaluations={HELD}"] if held else extra
    found = in_turn(cases, seeds, _until_target(env_id, target, runs_dir, limit_s, extra), say)
    goals = {"spreeze": "<= 20 s"} if env_id == "Pendulum-v1" else {}
    return target_rows(found, env_id, {} if held else goals, "<= 0.6", "time_to_target_held_s" if held else _FIRST)


def _until_target(env_id: str, target: float, runs_dir: str, limit_s: float, extra: list[str]) -> Train:
    return lambda flags: train(["--env", env_id, "--target-return", str(target), "--seconds", str(limit_s),
                                "--runs-dir", runs_dir, *flags, *extra], limit_s + 120.0)


def in_turn(cases: Mapping[str, list[str]], seeds: int, train_once: Train, say: Say) -> dict[str, list[Document]]:
    """The documents of runs with the flags of each case, seed by seed."""
    found: dict[str, list[Document]] = {name: [] for name in cases}
    for seed in range(1, seeds + 1):
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
    found: Mapping[str, list[Document]], env_id: str, goals: Mapping[str, str], ratio_goal: str, key: str = _FIRST
) -> list[Row]:
    """Times to the target return of each mode, what they took, and the ratio of the first mode to the second.

    ``key`` of a document holds the time that counts.
    """
    rows, times = [], []
    for mode, documents in found.items():
        of_mode, reached = times_to_target(documents, key)
        times.append(of_mode)
        rows.append(row(key, "s", of_mode, mode=mode, env=env_id, reached=reached, target=goals.get(mode)))
        rows += [row(name, unit, [document[name] for document in documents], mode=mode, env=env_id)
                 for name, unit in _TAKEN.items() if all(document.get(name) is not None for document in documents)]
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return [*rows, row("time_over_serial", "ratio", ratios, env=env_id, target=ratio_goal)]


def times_to_target(documents: list[Document], key: str = _FIRST) -> tuple[list[float], int]:
    """Wall times [s] to the target return, and how many runs reached it.

    A run that did not get there counts with all of its time: never better than it was.
    """
    known = [document[key] for document in documents]
    times = [document["process_s"] if at_s is None else at_s for document, at_s in zip(documents, known, strict=True)]
    return times, sum(at_s is not None for at_s in known)


# --- another program beside a run ---

_SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while os.getppid() == int(sys.argv[2]):
    sum(range(10000))
"""


@contextlib.contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Another program that keeps that core busy, from a session of its own; ends with this process at the latest."""
    process = subprocess.Popen([sys.executable, "-c", _SPIN, str(core), str(os.getpid())], stdin=subprocess.DEVNULL,
                               start_new_session=True, env={"PATH": os.defpath})
    try:
        yield
    finally:
        process.kill()
        process.wait()


# --- a picture ---

_CURVE_AXES = (("wall_s", 60.0, "wall time [min]"), ("env_steps", 1e3, "env steps [1000]"),
               ("updates", 1e3, "updates [1000]"))
_TRAINING_POINTS = 300


def draw_curve(runs: list[Path], out: Path) -> None:
    """Draws greedy return against wall time, env steps and updates, and the return in training where it is known.

    Raises:
        UsageError: matplotlib is not installed.
        RunError: a run without evaluations.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UsageError("a picture needs matplotlib: pip install matplotlib") from None
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), sharey=True, constrained_layout=True)
    for number, path in enumerate(runs):
        _draw_greedy(axes, path, f"C{number}")
        _draw_training(axes, path, f"C{number}")
    for axis, (_, _, label) in zip(axes, _CURVE_AXES, strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("episode return")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{read_run(runs[0]).get('env_id', '')}: {read_run(runs[0]).get('machine', '')}", fontsize=10)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _draw_greedy(axes: list[Axes], path: Path, colour: str) -> None:
    """Mean of each evaluation, with a standard deviation on either side."""
    rows = read_rows(path / "eval.csv")
    if not rows:
        raise RunError(f"{path} has no evaluation in eval.csv")
    run = read_run(path)
    episodes = max(int(one["episodes"]) for one in rows)
    algo, mode, seed = (run.get(name, "?") for name in ("algo", "mode", "seed"))
    label = f"{algo}, mode {mode}, seed {seed}: greedy, {episodes} episodes"
    mean = [one["return_mean"] for one in rows]
    low, high = ([one["return_mean"] + sign * one["return_std"] for one in rows] for sign in (-1, 1))
    for axis, (name, scale, _) in zip(axes, _CURVE_AXES, strict=True):
        x = [one[name] / scale for one in rows]
        axis.plot(x, mean, linewidth=1.6, color=colour, label=label)
        axis.fill_between(x, low, high, alpha=0.2, linewidth=0, color=colour)


def _draw_training(axes: list[Axes], path: Path, colour: str) -> None:
    """Mean return of the latest episodes with exploration, over time and env steps."""
    series = MetricsReader(path / "metrics.db").series("episode_return", max_points=_TRAINING_POINTS)
    for axis, x, scale in ((axes[0], series.t, 60.0), (axes[1], series.step, 1e3)):
        axis.plot(x / scale, series.mean, linewidth=0.8, alpha=0.7, color=colour, label="episodes learned from")
