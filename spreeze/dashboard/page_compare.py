"""Compare: several runs and seeds against wall time, with the tables of final and required time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import streamlit as st

from spreeze.dashboard import choice, stats
from spreeze.dashboard.charts import COLOURS
from spreeze.dashboard.data import RunRow, row, run_names, run_path, runs_dir
from spreeze.dashboard.references import published
from spreeze.errors import RunError
from spreeze.formats import DASH, duration, number
from spreeze.store import Evaluation
from spreeze.store_reader import MetricsReader

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
        choice.need_run()
    current = choice.current()
    first = [name for name in names if current is not None and name == row(current).name] or names[:1]
    chosen = st.multiselect("Runs", names, default=first, max_selections=_MAX_RUNS, key="compare_runs",
                            help="Runs of the same task and algorithm are taken as seeds of one curve.")
    cells = st.columns(3)
    axis = cells[0].selectbox("Horizontal axis", list(_AXES), help="Wall time is what a user waits for.")
    centre = cells[1].selectbox("Centre", ["mean", "interquartile mean"],
                                help="Over runs; the interquartile mean drops the best and worst quarter.")
    runs = _read(chosen)
    if not runs:
        st.info("Nothing to compare: choose runs that have at least one evaluation.")
        return
    groups = grouped(runs)
    target = cells[2].number_input("Target return", value=_target(runs), help="For the required-time table.")
    st.plotly_chart(figure(groups, _AXES[axis], axis, centre != "mean"), config=CONFIG, key="compare_chart")
    st.caption("Band: 95 % bootstrap interval over runs (1,000 resamples). A single run has no band: one seed says "
               "nothing about the spread.")
    _tables(runs, float(target))


def grouped(runs: list[tuple[RunRow, list[Evaluation]]]) -> dict[str, list[list[Evaluation]]]:
    """Curves by task and algorithm."""
    found: dict[str, list[list[Evaluation]]] = {}
    for facts, curve in runs:
        found.setdefault(f"{facts.env_id} {facts.algo}", []).append(curve)
    return found


def figure(groups: dict[str, list[list[Evaluation]]], axis: str, title: str, robust: bool) -> go.Figure:
    """One curve with a band for each group."""
    import plotly.graph_objects as go  # half a second that the Live page need not wait for

    chart = go.Figure()
    for i, (name, curves) in enumerate(groups.items()):
        colour = COLOURS[i % len(COLOURS)]
        band = stats.band(*stats.on_grid([stats.smoothed(curve) for curve in curves], axis), robust)
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
                        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    chart.update_xaxes(title=title)
    chart.update_yaxes(title="return of greedy episodes, mean of 3 evaluations")
    return chart


def _read(names: list[str]) -> list[tuple[RunRow, list[Evaluation]]]:
    found = []
    for name in names:
        try:
            path = run_path(name, runs_dir())
            curve = MetricsReader(path / "metrics.db").evaluations()
        except RunError as error:
            st.warning(str(error))
            continue
        if curve:
            found.append((row(path), curve))
    return found


def _target(runs: list[tuple[RunRow, list[Evaluation]]]) -> float:
    """The published return where there is one, else the best that all runs reached."""
    facts = runs[0][0]
    listed = published(facts.algo, facts.env_id)
    best = min(max(record.return_mean for record in stats.smoothed(curve)) for _, curve in runs)
    return listed.value if listed is not None and best >= listed.value else math.floor(10.0 * best) / 10.0


def _tables(runs: list[tuple[RunRow, list[Evaluation]]], target: float) -> None:
    limit_s = min(curve[-1].t for _, curve in runs)
    st.dataframe(
        [
            {
                "run": facts.name, "task": facts.env_id or DASH, "algorithm": facts.algo or DASH,
                "seed": number(facts.seed), "final-time return": number(stats.final_return(curve, limit_s)),
                "required time": duration(stats.required_time(curve, target)),
                "best return": number(max(record.return_mean for record in curve)),
                "env steps": number(curve[-1].env_steps),
            }
            for facts, curve in runs
        ],
        hide_index=True,
        column_config={
            "final-time return": st.column_config.TextColumn(
                help=f"Mean of the last three evaluations up to {duration(limit_s)}, the wall time all runs reached."),
            "required time": st.column_config.TextColumn(
                help=f"Wall time at which the mean of three evaluations first reached {number(target)} [h:min:s]."),
        },
    )
