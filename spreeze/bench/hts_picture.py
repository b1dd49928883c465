"""A picture of what ``bench hts`` measured: speed-up by step-time law, learning beside rollout, Claims 1 and 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from spreeze.bench.runs import Row
from spreeze.errors import UsageError
from spreeze.synchrony import expected_lag, simulated_lag

Axes = Any
_LOADS = (0.3, 0.5, 0.7, 0.8, 0.9)
"""What all actors send over what the learner can take."""


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
    figure, axes = pyplot.subplots(1, 4, figsize=(17, 4.2), constrained_layout=True, width_ratios=(1.1, 0.8, 1.6, 1.0))
    _bars(axes[0], rows, "hts_over_step", "over the step-synchronous baseline")
    _bars(axes[1], rows, "hts_over_alternating", "learner = rollout: over alternating")
    _sweep(axes[2], rows)
    _lag(axes[3], rows)
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
        axis.set_ylim(top=1.3 * max(*values, *(row["simulated"] for row in found)))  # room for the legend
        axis.legend(fontsize=7, loc="upper left")


def _sweep(axis: Axes, rows: list[Row]) -> None:
    """Time of a step of all environments over the interval, for each number of executors."""
    found = [row for row in rows if row["metric"] == "time_for_a_state"]
    for place, n in enumerate(sorted({row["executors"] for row in found})):
        own = sorted((row for row in found if row["executors"] == n), key=lambda row: int(row["interval"]))
        x = [row["interval"] for row in own]
        colour = f"C{place}"
        axis.plot(x, [1e3 * n * row["value"] for row in own], "o", color=colour, markersize=4, label=f"executors: {n}")
        axis.plot(x, [1e3 * n * row["simulated_s"] for row in own], "-", color=colour, linewidth=1.2)
        axis.plot(x, [1e3 * n * row["formula_s"] for row in own], ":", color=colour, linewidth=1.2)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("synchronization interval alpha [env steps]")
    axis.set_ylabel("ms for a step of all environments")
    axis.set_title("exponential steps: measured (dots), simulated with overhead (lines), Claim 1 (dotted)", fontsize=9)
    axis.grid(alpha=0.3)
    if found:
        axis.legend(fontsize=7)


def _lag(axis: Axes, rows: list[Row]) -> None:
    """Age of data that waits in a queue, by formula and simulation, and what HTS-RL measured in its place."""
    loads = np.linspace(0.05, 0.92, 60)
    axis.plot(loads, [expected_lag(1, load, 1.0) for load in loads], ":", color="C0", label="with a queue: Claim 2")
    rng = np.random.default_rng(1)
    axis.plot(_LOADS, [simulated_lag(rng, 8, load / 8, 1.0) for load in _LOADS], "o", color="C0", markersize=4,
              label="with a queue: simulated, 8 actors")
    lags = [lag for row in rows if row["metric"] == "policy_lag" for lag in row["repeats"]]
    if lags:
        axis.fill_between((0.0, 1.0), min(lags) - 0.04, max(lags) + 0.04, color="C1",
                          label=f"HTS-RL: measured in {len(lags)} runs")
    axis.set_xlim(0.0, 1.0)
    axis.set_xlabel("what is collected over what the learner can take")
    axis.set_ylabel("updates between collecting and learning")
    axis.set_title("how old data is", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
