"""A picture of runs' return curves from their own ``eval.csv``, and of the episodes that they learned from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spreeze.errors import RunError, UsageError
from spreeze.rundir import read_run
from spreeze.store_reader import MetricsReader
from spreeze.workers.evaluator import read_rows

Axes = Any
_COLUMNS = (("wall_s", 60.0, "wall time [min]"), ("env_steps", 1e3, "env steps [1000]"),
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
        _greedy(axes, path, f"C{number}")
        _training(axes, path, f"C{number}")
    for axis, (_, _, label) in zip(axes, _COLUMNS, strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("episode return")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{read_run(runs[0]).get('env_id', '')}: {read_run(runs[0]).get('machine', '')}", fontsize=10)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _greedy(axes: list[Axes], path: Path, colour: str) -> None:
    """Mean of each evaluation, with a deviation on either side."""
    rows = read_rows(path / "eval.csv")
    if not rows:
        raise RunError(f"{path} has no evaluation in eval.csv")
    run = read_run(path)
    episodes = max(int(row["episodes"]) for row in rows)
    algo, mode, seed = (run.get(name, "?") for name in ("algo", "mode", "seed"))
    label = f"{algo}, mode {mode}, seed {seed}: greedy, {episodes} episodes"
    mean = [row["return_mean"] for row in rows]
    low = [row["return_mean"] - row["return_std"] for row in rows]
    high = [row["return_mean"] + row["return_std"] for row in rows]
    for axis, (name, scale, _) in zip(axes, _COLUMNS, strict=True):
        x = [row[name] / scale for row in rows]
        axis.plot(x, mean, linewidth=1.6, color=colour, label=label)
        axis.fill_between(x, low, high, alpha=0.2, linewidth=0, color=colour)


def _training(axes: list[Axes], path: Path, colour: str) -> None:
    """Mean return of the latest episodes with exploration, over time and env steps."""
    series = MetricsReader(path / "metrics.db").series("episode_return", max_points=_TRAINING_POINTS)
    for axis, x, scale in ((axes[0], series.t, 60.0), (axes[1], series.step, 1e3)):
        axis.plot(x / scale, series.mean, linewidth=0.8, alpha=0.7, color=colour, label="episodes learned from")
