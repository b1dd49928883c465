"""Autotune: measurements on this machine, the choice, and its reasons."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import streamlit as st

from spreeze.dashboard import components, control, navigation, start
from spreeze.dashboard.compare import CONFIG
from spreeze.dashboard.live_api import COLOURS
from spreeze.dashboard.run_data import row, runs_dir, sweep_runs
from spreeze.errors import SpreezeError
from spreeze.files import read_json
from spreeze.formatting import DASH, clean, number
from spreeze.metrics.comparison import sources_in
from spreeze.metrics.tuning_record import (
    ALGORITHMS,
    BATCH,
    SAMPLERS,
    THREADS,
    MeasuredRow,
    TuningView,
    paper_batch,
    read,
    setting_text,
)
from spreeze.run_directory import LIVE_STATES, read_config, read_run, state_of
from spreeze.tuner.knobs import tunable_settings
from spreeze.tuner.model import FORMULAS, joint_score

if TYPE_CHECKING:
    import plotly.graph_objects as go

TUNING_S = 60.0  # longest time that a tuner takes
_HELP = {
    "spread": st.column_config.TextColumn(
        help="Difference between fastest and slowest repeat, relative to the median; the larger of both rates."
    ),
    "score": st.column_config.TextColumn(help="What the tuner maximizes; higher is better."),
    "samples/insert": st.column_config.TextColumn(help="Samplers wait for the learner below this value."),
    "cpu": st.column_config.TextColumn(help="Share of the usable cores that learner and samplers kept busy."),
    "note": st.column_config.TextColumn(width="large"),
}
_OF_ROLLOUTS = ("samplers", "envs_per_sampler", "inference_workers", "sync_interval")
_MAIN = (BATCH, THREADS, SAMPLERS, "sampling.envs_per_sampler", *(f"rollout.{name}" for name in _OF_ROLLOUTS))
_CHOSEN = {"symbol": "circle-open", "color": "#D55E00", "line": {"width": 3}}


# --- the page ---


def page() -> None:
    folder = runs_dir()
    now = followed_activity(navigation.current(), folder)
    if shows_start(navigation.current(), now):
        show_start(now.name or "", folder)
        return
    path = navigation.need_run()
    st.title(f"Autotune of {row(path).name}", anchor=False)
    _algorithms(path)
    tuning = read(path)
    if not tuning.rows and not tuning.choice:
        st.info(_untuned(read_run(path), live=state_of(path) in LIVE_STATES))
        _settings(path)
        return
    if not tuning.choice and state_of(path) not in LIVE_STATES:
        st.info(_unfinished(tuning))
    _choices(tuning)
    _measured(tuning)
    _reasons(tuning)
    _pins(path, tuning)
    _settings(path)


def _unfinished(tuning: TuningView) -> str:
    """The settings of a run that ended before its tuner had chosen."""
    ended = "This run ended before its tuner had chosen"
    if tuning.of("rollout"):  # these are measured in processes of their own
        return f"{ended}: it ran with the settings below, not with one of these rows."
    began = "until the tuner began, they ran with the settings below"
    return f"{ended}. Its workers took turns with the settings of these rows; {began}."


def _untuned(run: Mapping[str, Any], *, live: bool) -> str:
    """A sentence on why there are neither rows nor a choice of the tuner."""
    if "--auto" not in (run.get("command") or ()):
        if (run.get("sessions") or 1) > 1:
            return "The tuner did not run since this run was resumed. Its settings are below."
        return "Autotune (--auto) was off for this run. Its settings are below."
    if not live:
        return "This run ended before its tuner had measured anything. The settings with which it ran are below."
    if run.get("tuning_began") is not None:
        return "The tuner is measuring while the run trains. Its rows appear here."
    return "The tuner begins some seconds after the first update."


def _algorithms(path: Path) -> None:
    """The algorithms that were compared on the task, if the command named none."""
    record = read_json(path / ALGORITHMS)
    candidates = [entry for entry in record.get("candidates") or () if isinstance(entry, dict)]
    if not candidates:
        return
    known = any(isinstance(entry.get("return_mean"), int | float) for entry in candidates)
    why = "the best of those that learned this task in turn" if known else "the first one: none was evaluated"
    st.markdown(f"**Algorithm {components.plain(record.get('algo'))}**: {why}")
    heads = {"algo": "algorithm", "run": "run", "seconds": "trained for [s]", "return_mean": "return"}
    heads |= {"return_error": "standard error", "failure": "failure"}
    rows = [tuple(_cell(entry.get(name)) for name in heads) for entry in candidates]
    st.markdown(components.table(tuple(heads.values()), rows))


def _cell(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else clean(value or DASH, 80)


def followed_activity(chosen: Path | None, folder: Path) -> control.Activity:
    """Activity of the chosen run; after Start that of the new run, which becomes the chosen one once it is there."""
    following = st.session_state.get("follow")
    now = control.activity(folder, None if chosen is None or following else chosen.name)
    if following and now.name is not None and (folder / now.name / "run.json").is_file():
        del st.session_state["follow"]
        navigation.choose(now.name)
        st.rerun()
    return now


def shows_start(chosen: Path | None, now: control.Activity) -> bool:
    """True if a page shows how a run starts: the chosen run, or any where none is chosen or Start was just pressed."""
    expected = chosen is None or chosen.name == now.name or bool(st.session_state.get("follow"))
    return now.phase == "starting" and expected


@st.fragment(run_every=1.0)
def show_start(name: str, folder: Path) -> None:
    """A run that is starting, drawn each second: the machine, the tuner's rows so far, and the run's output."""
    now = control.activity(folder, name)
    appeared = st.session_state.get("follow") and (folder / name / "run.json").is_file()
    if now.name != name or now.phase != "starting" or appeared:
        st.rerun()
    run, tuning = read_run(folder / name), read(folder / name)
    what = "a run of " if sweep_runs(folder / f"{name}.sweep.json") else ""
    st.title(f"Starting {what}{components.plain(name)}", anchor=False)
    st.caption(components.plain(run.get("machine") or "Testing the environment in a separate process."))
    if run.get("state") == "tuning":
        began, left_s, left = run.get("tuning_began"), TUNING_S, DASH
        if began is not None:
            left_s = min(max(0.0, began + TUNING_S - time.time()), TUNING_S)
            left = f"{left_s:.0f}"
        text = f"Autotune measures this machine: settings measured so far {len(tuning.rows)}, at most {left} s left"
        st.progress(1.0 - left_s / TUNING_S, text)
        st.caption(
            "Training waits for it, because its choices include processes or memory that are fixed once this run "
            "trains. The result is kept, and later starts reuse it within seconds. Without Autotune a start does not "
            "wait."
        )
    _measured(tuning)
    if now.lines:
        st.code("\n".join(now.lines), language=None, wrap_lines=True)


def _choices(tuning: TuningView) -> None:
    """The four most important choices; all of them, with reasons, come after the charts."""
    main = [key for key in _MAIN if key in tuning.choice]
    for cell, key in zip(st.columns(4), main, strict=False):
        why = components.plain(tuning.reasons.get(key))
        title = components.title(key).partition(": ")[2]
        cell.metric(title[0].upper() + title[1:], _value(tuning, key), help=why, border=True)
    record = tuning.record
    if tuning.doubts:
        st.warning(
            f"Provisional: {components.plain('; '.join(tuning.doubts))}. A later start measures again if this is over "
            "by then (of other programs: if they use at most half as much), else it takes these settings."
        )
    if record:
        measured_at, objective, formula = (
            components.plain(record.get(key)) for key in ("measured_at", "objective", "formula")
        )
        if record.get("reused"):
            cells = st.columns([5, 1.4], vertical_alignment="center")
            cells[0].info(f"From the cache; measured at {measured_at}.")
            text = "At the next start, like the box of the same name in Settings next to Start."
            if cells[1].button("Measure again", key="measure_again", width="stretch", help=text):
                st.session_state[start.FRESH] = True
                st.toast("The next start measures again.")
        text = f"Measured {measured_at} in {number(record.get('seconds'))} s; objective: {objective}; score: {formula}"
        if len({measured.setting.get(BATCH) for measured in tuning.of("learner")}) > 1:
            paper = paper_batch(tuning)
            rule = "lies far beyond what was measured" if paper is None else f"would choose batch size {number(paper)}"
            text += (
                " (U updates/s, B batch size, E env steps/s). The Spreeze paper's rule "
                f"(0.85 of the highest update frame rate of the line through the chosen learner's rows) {rule}"
            )
        st.caption(f"{text}.")


def _value(tuning: TuningView, key: str) -> str:
    return _cell(tuning.choice.get(key))


def _reasons(tuning: TuningView) -> None:
    if tuning.choice:
        st.markdown("**Chosen settings and reasons**")
        rows = [(components.title(key), _value(tuning, key), tuning.reasons.get(key)) for key in tuning.choice]
        st.markdown(components.table(("setting", "chosen", "why"), rows))
    if notes := (*_texts(tuning, "notes"), *_texts(tuning, "limits")):
        st.markdown(components.bullets(notes))


def _texts(tuning: TuningView, key: str) -> list[str]:
    texts = tuning.record.get(key)
    return [text for text in texts if isinstance(text, str)] if isinstance(texts, list) else []


def _pins(path: Path, tuning: TuningView) -> None:
    """The user's values for the next start; the tuner keeps them and chooses the rest."""
    run = row(path)
    wanted: dict[str, Any] = {}
    try:
        mode, seed = str(read_run(path).get("mode", control.Request.mode)), 1 if run.seed is None else run.seed
        request = control.Request(env_id=run.env_id or "", mode=mode, algo=run.algo or "", seed=seed)
        st.markdown("**Overrides**: values that you set here are used by the next start; the tuner chooses the others.")
        columns = st.columns(4)
        for index, key in enumerate(tunable_settings(request.config)):
            known, blank = st.session_state.get(start.field(key)), f"automatic: {_value(tuning, key)}"
            with columns[index % len(columns)]:
                wanted[key] = components.setting_input(request.config, key, "pin", known, blank)
    except SpreezeError as error:
        st.caption(components.plain(error))
        return
    if st.button("Use for the next start", key="pin"):
        start.fill(wanted)
        st.toast("Saved: see Settings next to Start on the Live page, and the command below them.")


def _measured(tuning: TuningView) -> None:
    together = tuning.of("joint") or tuning.of("rollout")
    charts = [*([_batch_chart] if tuning.of("learner") else ()), *([_score_chart] if together else ())]
    for cell, draw in zip(st.columns(len(charts)) if charts else (), charts, strict=True):
        with cell:
            draw(tuning)
    for title, rows in tuning.stages:
        st.markdown(f"**{title}**")
        st.dataframe(tuning.table(rows), hide_index=True, column_config=_HELP)


def _batch_chart(tuning: TuningView) -> None:
    st.markdown("**Batch size vs. update frames/s** (updates/s times batch size)")
    st.plotly_chart(batch_figure(tuning), config=CONFIG, key="tune_batch")


def _score_chart(tuning: TuningView) -> None:
    rows, objective = tuning.of("joint") or tuning.of("rollout"), str(tuning.record.get("objective"))
    spread = ", with the spread of their repeats" if any(row.spread for row in rows) else ""
    st.markdown(f"**Score of the settings that were measured in a run**{spread}")
    if tuning.of("joint") and objective in FORMULAS:
        options = list(FORMULAS)
        objective = st.segmented_control("Objective", options, default=objective, key="tune_objective") or objective
        st.caption(components.plain(FORMULAS[objective]))
    st.plotly_chart(score_figure(tuning, rows, objective), config=CONFIG, key="tune_score")
    text = (
        "The tuner compares settings within each turn, by its own objective, since a turn's load is the same for all: "
        "percentages of its reasons differ from those of these scores. A spread is the larger one of two rows."
    )
    careful = "Batch size and samples/insert change what is learned: they move only for more than the spread. "
    st.caption(text if tuning.of("rollout") else careful + text)


def batch_figure(tuning: TuningView) -> go.Figure:
    """Measured update frame rates by threads, the fitted curve ``B / (a + b B)``, and the choice."""
    chart = _figure("batch size [transitions]", "update frames/s")
    alone = tuning.of("learner")
    for i, threads in enumerate(sorted({r.setting[THREADS] for r in alone})):
        rows = [r for r in alone if r.setting[THREADS] == threads and r.frames_per_s is not None]
        marker = {"size": 9, "color": COLOURS[i % len(COLOURS)]}
        _add_points(chart, rows, f"{threads} thread" + ("s" if threads > 1 else ""), marker)
    a, b = tuning.record.get("cost_a_s"), tuning.record.get("cost_b_s_per_row")
    measured = sorted({r.setting[BATCH] for r in alone})
    if isinstance(a, float) and isinstance(b, float):
        sizes, grey = np.geomspace(measured[0], measured[-1], 100), {"color": "#888888"}
        fit = {"mode": "lines", "name": "fit B / (a + b B)", "line": grey | {"width": 1.5}}
        chart.add_scatter(x=sizes.tolist(), y=(sizes / (a + b * sizes)).tolist(), **fit)
        paper, dotted = paper_batch(tuning), grey | {"dash": "dot"}
        if paper is not None:
            chart.add_vline(x=paper, line=dotted)
            chart.add_scatter(x=[None], y=[None], mode="lines", name="knee of the paper's rule", line=dotted)
    _add_points(chart, [r for r in alone if r.is_choice(tuning.choice)], "chosen", _CHOSEN | {"size": 16})
    chart.update_xaxes(type="log", tickvals=measured, ticktext=[number(size) for size in measured])
    entries = sum(trace.showlegend is not False for trace in chart.data)
    return chart.update_layout(height=290 + 20 * entries)  # the legend gets height of its own


def score_figure(tuning: TuningView, rows: list[MeasuredRow], objective: str) -> go.Figure:
    """Measured settings by their score, the best one on top; the chosen one in another colour."""
    newest = {tuple(sorted(row.setting.items())): row for row in rows if row.env_steps_per_s is not None}
    own = tuning.record.get("objective")
    scored = sorted(((_score(row, objective, own), row) for row in newest.values()), key=lambda pair: pair[0])
    varied = [key for key in tuning.labels if len({row.setting.get(key) for _, row in scored}) > 1]
    texts = [", ".join(_part(tuning, row, key) for key in varied) or "as configured" for _, row in scored]
    is_chosen = [row.is_choice(tuning.choice) for _, row in scored]
    places = list(range(len(scored)))
    chart = _figure("score", "")
    chart.add_bar(
        x=[score for score, _ in scored],
        y=places,
        orientation="h",
        marker_color=[_CHOSEN["color"] if chosen else COLOURS[0] for chosen in is_chosen],
        error_x={"type": "data", "array": [0.5 * score * (row.spread or 0.0) for score, row in scored]},
        customdata=[[number(row.env_steps_per_s), number(row.updates_per_s)] for _, row in scored],
        hovertemplate="score %{x:.3s}, %{customdata[0]} env steps/s, %{customdata[1]} updates/s<extra></extra>",
    )
    ticks = [f"<b>{text}</b>" if chosen else text for text, chosen in zip(texts, is_chosen, strict=True)]
    chart.update_yaxes(tickvals=places, ticktext=ticks, automargin=True)
    return chart.update_layout(height=90 + 28 * len(scored), showlegend=False)


def _score(row: MeasuredRow, objective: str, own: object) -> float:
    """Score of a measured setting; the tuner's own by its objective, or if that has no formula."""
    batch, updates, env_steps = row.setting.get(BATCH), row.updates_per_s, row.env_steps_per_s
    by_formula = objective in FORMULAS and (objective != own or row.score is None)
    if not by_formula or not isinstance(batch, int) or updates is None or env_steps is None:
        return row.score or env_steps or 0.0
    return joint_score(objective, batch, updates, env_steps)


def _part(tuning: TuningView, row: MeasuredRow, key: str) -> str:
    value, label = row.setting.get(key), tuning.label(key)
    return f"{setting_text(value)} {label.removesuffix('s') if value == 1 else label}"


def _add_points(chart: go.Figure, rows: list[MeasuredRow], name: str, marker: dict[str, Any]) -> None:
    """Draws a point for each row, if there are any: batch size across, update frames up."""
    if rows:
        x, y = [row.setting[BATCH] for row in rows], [row.frames_per_s for row in rows]
        chart.add_scatter(x=x, y=y, mode="markers", name=name, marker=marker)


def _figure(x: str, y: str) -> go.Figure:
    import plotly.graph_objects as go  # slow to import (0.5 s), so only here

    chart = go.Figure()
    chart.update_layout(
        margin={"l": 50, "r": 50, "t": 10, "b": 40},
        legend={"yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
    )
    chart.update_xaxes(title=x, automargin=True)
    chart.update_yaxes(title=y, rangemode="tozero")
    return chart


def _settings(path: Path) -> None:
    config, sources = read_config(path), sources_in(path)
    shown = [
        {"setting": f"{part}.{name}", "value": clean(value), "from": sources.get(f"{part}.{name}", DASH)}
        for part in ("sampling", "learner", "replay", "evaluation", "visualizer")
        for name, value in config.get(part, {}).items()
    ]
    with st.expander("Settings of the run"):
        st.dataframe(shown, hide_index=True)
