"""Compare: runs and seeds against wall time, with the three metrics of the HTS-RL protocol."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import streamlit as st

from spreeze.dashboard import navigation
from spreeze.dashboard.live_api import COLOURS, published
from spreeze.dashboard.run_data import row, run_names, run_path, runs_dir
from spreeze.errors import RunError
from spreeze.formatting import duration, number
from spreeze.metrics.comparison import (
    POLICIES,
    RESAMPLES,
    Curve,
    Report,
    Rules,
    bootstrap_interval,
    parted,
    read_curve,
    report,
    running_mean,
    spread_text,
)
from spreeze.metrics.store import EvaluationRow

if TYPE_CHECKING:
    import plotly.graph_objects as go

_AXES = {"wall time [s]": "t", "env steps": "env_steps", "updates": "updates"}
_MAX_RUNS = 20
CONFIG: dict[str, Any] = {"displayModeBar": False, "displaylogo": False, "showTips": False, "showSendToCloud": False,
                          "plotlyServerURL": ""}


def page() -> None:
    st.subheader("Compare runs", anchor=False)
    names = run_names(runs_dir())
    if not names:
        navigation.need_run()
    current = navigation.current()
    first = [name for name in names if current is not None and name == row(current).name] or names[:1]
    chosen = st.multiselect("Runs", names, default=first, max_selections=_MAX_RUNS, key="compare_runs",
                            help="Runs of the same task and algorithm are taken as seeds of one curve.")
    cells = st.columns(3)
    axis = cells[0].selectbox("Horizontal axis", list(_AXES), help="Wall time is what a user waits for.")
    centre = cells[1].selectbox("Centre", ["mean", "interquartile mean"],
                                help="Over runs; the interquartile mean drops the best and worst quarter.")
    curves = _read(chosen)
    if not curves:
        st.info("Nothing to compare: choose runs that have at least one evaluation.")
        return
    target = cells[2].number_input("Target return", value=_target(curves), help="For the required-time metric.")
    st.plotly_chart(figure(grouped(curves), _AXES[axis], axis, centre != "mean"), config=CONFIG, key="compare_chart")
    st.caption("Band: 95 % bootstrap interval over runs (1,000 resamples). A single run has no band: one seed says "
               "nothing about the spread.")
    found = report(curves, Rules(targets=(float(target),)))
    _group_table(found)
    _run_table(found, curves)
    st.caption(f"Metrics of the HTS-RL paper, from all episodes of the last {found.rules.policies} evaluated policies; "
               f"[95 % bootstrap interval over seeds, {RESAMPLES:,} resamples]. `python -m spreeze evaluate --protocol "
               "hts RUN ...` gives the same.")


def grouped(curves: list[Curve]) -> dict[str, list[Sequence[EvaluationRow]]]:
    """Curves by task, algorithm, mode and the settings that differ."""
    found: dict[str, list[Sequence[EvaluationRow]]] = {}
    for curve in curves:
        found.setdefault(f"{curve.group.env} {curve.group.label}", []).append(curve.evaluations)
    return found


def figure(groups: Mapping[str, Sequence[Sequence[EvaluationRow]]], axis: str, title: str, robust: bool) -> go.Figure:
    """One curve with a band for each group."""
    import plotly.graph_objects as go  # slow to import (0.5 s), so only here

    chart = go.Figure()
    for i, (name, curves) in enumerate(groups.items()):
        colour = COLOURS[i % len(COLOURS)]
        found = band(*on_grid([smoothed(curve) for curve in curves], axis), robust)
        both = np.isfinite(found.low)
        if both.any():
            x = np.concatenate([found.x[both], found.x[both][::-1]])
            y = np.concatenate([found.high[both], found.low[both][::-1]])
            chart.add_scatter(x=x.tolist(), y=y.tolist(), fill="toself", line_width=0, fillcolor=colour, opacity=0.2,
                              hoverinfo="skip", showlegend=False, mode="lines")
        known = np.isfinite(found.centre)
        seeds = f"{len(curves)} run" + ("s" if len(curves) > 1 else "")
        chart.add_scatter(x=found.x[known].tolist(), y=found.centre[known].tolist(), name=f"{name} ({seeds})",
                          mode="lines", line={"color": colour, "width": 2})
    chart.update_layout(height=420, margin={"l": 50, "r": 10, "t": 10, "b": 40}, hovermode="x unified",
                        showlegend=True, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    chart.update_xaxes(title=title)
    chart.update_yaxes(title="return of greedy episodes, mean of 3 evaluations")
    return chart


def _read(names: list[str]) -> list[Curve]:
    found = []
    for name in names:
        try:
            curve = read_curve(run_path(name, runs_dir()))
        except RunError as error:
            st.warning(str(error))
            continue
        if curve is not None:
            found.append(dataclasses.replace(curve, name=name))
    return parted(found)


def _target(curves: list[Curve]) -> float:
    """The published return if all runs have reached it, else the best that all of them reached."""
    listed = published(curves[0].group.algo, curves[0].group.env)
    best = min(max(running_mean(curve.evaluations, POLICIES)) for curve in curves)
    return listed.value if listed is not None and best >= listed.value else math.floor(10.0 * best) / 10.0


def _group_table(found: Report) -> None:
    st.dataframe(
        [
            {
                "task": group.group.env, "group": group.group.label, "runs": group.runs,
                "final metric": spread_text(group.final), "final-time metric": spread_text(group.final_time),
                "required time": spread_text(group.required_s[0], duration),
                "reached": f"{group.reached[0]} of {group.runs}",
            }
            for group in found.groups
        ],
        hide_index=True, key="compare_groups",
        column_config={
            "final-time metric": st.column_config.TextColumn(
                help="Up to the wall time that all runs of the task reached."),
            "required time": st.column_config.TextColumn(
                help=f"Wall time to {number(found.rules.targets[0])} [h:min:s]; a dash until all seeds reached it."),
        },
    )


def _run_table(found: Report, curves: list[Curve]) -> None:
    st.dataframe(
        [
            {
                "run": run.name, "task": run.group.env, "group": run.group.label, "seed": number(run.seed),
                "final metric": number(run.final), "final-time metric": number(run.final_time),
                "time limit": duration(run.limit_s), "required time": duration(run.required_s[0]),
                "best return": number(max(record.return_mean for record in curve.evaluations)),
                "env steps": number(curve.evaluations[-1].env_steps), "policies": run.policies,
            }
            for run, curve in zip(found.runs, curves, strict=True)
        ],
        hide_index=True, key="compare_runs_table",
    )


# --- curves over several runs ---

_BAND_RESAMPLES = 1000
SMOOTHING = 3
"""Evaluations of one run that are averaged (a median would hide a collapse)."""


class Band(NamedTuple):
    """A curve and its 95 % interval at K common points; float64 [K], nan where unknown."""

    x: np.ndarray
    centre: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: np.ndarray
    """Number of runs that reach each point."""


def on_grid(curves: Sequence[Sequence[EvaluationRow]], axis: str, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Step curves on a common grid: x [K], values [runs, K]; nan before a run's first and after its last point.

    Args:
        curves: the evaluations of each run, oldest first.
        axis: horizontal axis, a field of ``EvaluationRow``: t, env_steps or updates.
        points: K.
    """
    columns = [[(float(getattr(e, axis)), e.return_mean) for e in curve] for curve in curves]
    end = max((column[-1][0] for column in columns if column), default=0.0)
    x = np.linspace(0.0, end, points)
    values = np.full((len(curves), points), np.nan)
    for line, column in zip(values, columns, strict=True):
        if column:
            at, returns = (np.array(part, dtype=np.float64) for part in zip(*column, strict=True))
            index = np.searchsorted(at, x, side="right") - 1
            line[:] = np.where(index >= 0, returns[np.maximum(index, 0)], np.nan)
            line[x > at[-1]] = np.nan
    return x, values


def iqm(values: np.ndarray) -> np.ndarray:
    """Interquartile mean over the first axis, [R, ...] -> [...]: the mean of the middle half.

    Agarwal et al. 2021 (arXiv 2108.13264): more robust than the mean, more efficient than the median.
    """
    ordered = np.sort(values, axis=0)
    count = len(ordered)
    cut = count // 4
    return np.asarray(ordered[cut : count - cut].mean(axis=0))


def band(x: np.ndarray, values: np.ndarray, robust: bool, seed: int = 0) -> Band:
    """Mean or interquartile mean over runs, with a percentile bootstrap over runs; values [runs, K]."""
    centre = np.full(len(x), np.nan)
    low, high = centre.copy(), centre.copy()
    counts = np.isfinite(values).sum(axis=0)
    for k in np.flatnonzero(counts):
        column = values[np.isfinite(values[:, k]), k]
        centre[k] = iqm(column) if robust else column.mean()
        if len(column) > 1:
            drawn = (lambda rows: iqm(rows.T)) if robust else None
            low[k], high[k] = bootstrap_interval(column, resamples=_BAND_RESAMPLES, seed=seed, centre=drawn)
    return Band(x, centre, low, high, counts)


def smoothed(curve: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """Replaces each return by the mean of it and the ones before (``SMOOTHING`` in all)."""
    means = running_mean(curve, SMOOTHING)
    return [record._replace(return_mean=mean) for record, mean in zip(curve, means, strict=True)]
