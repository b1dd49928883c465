"""A picture of what ``bench hts`` measured: speed-up by step-time law, learning beside rollout, and Claim 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spreeze.bench.runs import Row
from spreeze.errors import UsageError

Axes = Any


def draw_hts(rows: list[Row], out: Path, machine: str) -> None:
    """Draws the rows of ``steps``, ``learner`` and ``sweep``; a part that was not measured stays empty.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UsageError("a picture needs matplotlib: pip install matplotlib") from None
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.2), constrained_layout=True, width_ratios=(1.2, 0.8, 1.6))
    _bars(axes[0], rows, "hts_over_step", "over the step-synchronous baseline")
    _bars(axes[1], rows, "hts_over_alternating", "learner = rollout: over alternating")
    _sweep(axes[2], rows)
    figure.suptitle(f"HTS-RL on spreeze/Synthetic-v0, steps of 2 ms on average: {machine}", fontsize=10)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _bars(axis: Axes, rows: list[Row], metric: str, title: str) -> None:
    """Measured ratios with their range, and the simulated ones beside them."""
    found = [row for row in rows if row["metric"] == metric]
    places = range(len(found))
    values = [row["value"] for row in found]
    below = [row["value"] - min(row["repeats"]) for row in found]
    above = [max(row["repeats"]) - row["value"] for row in found]
    axis.bar([place - 0.2 for place in places], values, 0.4, yerr=[below, above], capsize=3,
             label="measured (range of repeats)")
    axis.bar([place + 0.2 for place in places], [row["simulated"] for row in found], 0.4, label="simulated")
    axis.set_xticks(list(places), [row["law"].replace(" ", "\n") for row in found], fontsize=8)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_title(title, fontsize=9)
    axis.set_ylabel("env steps/s, ratio")
    if found:
        axis.legend(fontsize=7)


def _sweep(axis: Axes, rows: list[Row]) -> None:
    """Time of a step of all environments over the interval, for each number of executors."""
    found = [row for row in rows if row["metric"] == "time_for_a_state"]
    for place, n in enumerate(sorted({row["executors"] for row in found})):
        own = sorted((row for row in found if row["executors"] == n), key=lambda row: int(row["interval"]))
        x = [row["interval"] for row in own]
        colour = f"C{place}"
        axis.plot(x, [1e3 * n * row["value"] for row in own], "o", color=colour, markersize=4, label=f"{n} executors")
        axis.plot(x, [1e3 * n * row["simulated_s"] for row in own], "-", color=colour, linewidth=1.2)
        axis.plot(x, [1e3 * n * row["formula_s"] for row in own], ":", color=colour, linewidth=1.2)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("synchronization interval alpha [env steps]")
    axis.set_ylabel("ms for a step of all environments")
    axis.set_title("exponential steps: measured (dots), simulated with overhead (lines), Claim 1 (dotted)", fontsize=9)
    axis.grid(alpha=0.3)
    if found:
        axis.legend(fontsize=7)
