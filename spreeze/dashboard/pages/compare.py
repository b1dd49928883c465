"""Compare: several runs and seeds against wall time, with the three metrics of the HTS-RL protocol."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import streamlit as st

from spreeze.dashboard import charts, run_picker
from spreeze.dashboard.charts import COLOURS, published
from spreeze.dashboard.run_data import row, run_names, run_path, runs_dir
from spreeze.errors import RunError
from spreeze.formatting import duration, number
from spreeze.metrics.hts_metrics import (
    POLICIES,
    RESAMPLES,
    Curve,
    Report,
    Rules,
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
    """The page."""
    st.subheader("Compare runs", anchor=False)
    names = run_names(runs_dir())
    if not names:
        run_picker.need_run()
    current = run_picker.current()
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
    """Curves by task, algorithm, mode and the settings in which these differ."""
    found: dict[str, list[Sequence[EvaluationRow]]] = {}
    for curve in curves:
        found.setdefault(f"{curve.group.env} {curve.group.label}", []).append(curve.evaluations)
    return found


def figure(groups: Mapping[str, Sequence[Sequence[EvaluationRow]]], axis: str, title: str, robust: bool) -> go.Figure:
    """One curve with a band for each group."""
    import plotly.graph_objects as go  # half a second that the Live page need not wait for

    chart = go.Figure()
    for i, (name, curves) in enumerate(groups.items()):
        colour = COLOURS[i % len(COLOURS)]
        band = charts.band(*charts.on_grid([charts.smoothed(curve) for curve in curves], axis), robust)
        both = np.isfinite(band.low)
        if both.any():
            x = np.concatenate([band.x[both], band.x[both][::-1]])
            y = np.concatenate([band.high[both], band.low[both][::-1]])
            chart.add_scatter(x=x.tolist(), y=y.tolist(), fill="toself", line_width=0, fillcolor=colour, opacity=0.2,
                              hoverinfo="skip", showlegend=False, mode="lines")
        known = np.isfinite(band.centre)
        seeds = f"{len(curves)} run" + ("s" if len(curves) > 1 else "")
        chart.add_scatter(x=band.x[known].tolist(), y=band.centre[known].tolist(), name=f"{name} ({seeds})",
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
    """The published return where there is one, else the best that all runs reached."""
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
