"""A picture of runs' return curves from their own ``eval.csv``."""

from __future__ import annotations

from pathlib import Path

from spreeze.errors import RunError, UsageError
from spreeze.rundir import read_run
from spreeze.workers.evaluator import read_rows


def draw_curve(runs: list[Path], out: Path) -> None:
    """Draws greedy return against wall time, env steps and updates.

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
    for path in runs:
        rows = read_rows(path / "eval.csv")
        if not rows:
            raise RunError(f"{path} has no evaluation in eval.csv")
        run = read_run(path)
        mean = [row["return_mean"] for row in rows]
        low = [row["return_mean"] - row["return_std"] for row in rows]
        high = [row["return_mean"] + row["return_std"] for row in rows]
        for axis, (name, scale) in zip(axes, (("wall_s", 60.0), ("env_steps", 1e3), ("updates", 1e3)), strict=True):
            x = [row[name] / scale for row in rows]
            axis.plot(x, mean, linewidth=1.6, label=f"{run.get('algo', '?')}, seed {run.get('seed', '?')}")
            axis.fill_between(x, low, high, alpha=0.2, linewidth=0)
    for axis, label in zip(axes, ("wall time [min]", "env steps [1000]", "updates [1000]"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("greedy episode return (10 episodes)")
    axes[0].legend(loc="lower right", fontsize=8)
    figure.suptitle(f"{read_run(runs[0]).get('env_id', '')}: {read_run(runs[0]).get('machine', '')}", fontsize=10)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
