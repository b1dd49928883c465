"""Autotune: what was measured on this machine, what was chosen, and why."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import streamlit as st

from spreeze.config.schema import offered
from spreeze.dashboard import components, control, navigation
from spreeze.dashboard.live_api import COLOURS
from spreeze.dashboard.pages.compare import CONFIG
from spreeze.dashboard.run_data import read_json, row, runs_dir, tail_text
from spreeze.errors import SpreezeError
from spreeze.formatting import DASH, clean, number, percent
from spreeze.metrics.repeats import spread
from spreeze.run_directory import read_config, read_run

if TYPE_CHECKING:
    import plotly.graph_objects as go

PROGRESS = "tune-progress.jsonl"
"""Rows of a tuner at work; ``tune.json`` has them at its end."""
_HELP = {
    "spread": st.column_config.TextColumn(help="Fastest less slowest repeat, as a share of the median."),
    "score": st.column_config.TextColumn(help="What the tuner maximises; higher is better."),
    "samples/insert": st.column_config.TextColumn(help="Below it the samplers wait for the learner."),
    "processor": st.column_config.TextColumn(help="Share of the usable cores that was busy."),
    "note": st.column_config.TextColumn(width="large"),
}
_MAIN = ("learner.batch_size", "learner.threads", "sampling.samplers", "sampling.envs_per_sampler")
_MAIN_ROLLOUT = ("rollout.executors", "rollout.envs_per_executor", "rollout.actors", "rollout.sync_interval")
_SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up")


def page() -> None:
    folder = runs_dir()
    waiting = control.launching(folder)
    if waiting is not None and not (folder / waiting.name / "tune.json").is_file():
        _measuring(waiting.name, folder)
        return
    path = navigation.need_run()
    st.subheader(f"Autotune of {row(path).name}", anchor=False)
    tuning = read(path)
    if not tuning.measured:
        st.info("This run was not tuned (it was started without --auto). What it ran with is below.")
        _settings(path)
        return
    _choices(tuning)
    _measured(tuning)
    _reasons(tuning)
    _pins(path, tuning)
    _settings(path)


@st.fragment(run_every=1.0)
def _measuring(name: str, folder: Path) -> None:
    """The rows of a tuner at work, each second."""
    waiting = control.launching(folder)
    if waiting is None or waiting.name != name or (folder / name / "tune.json").is_file():
        st.rerun()
    st.subheader("Autotune is measuring this machine", anchor=False)
    tuning = read(folder / name)
    if not tuning.measured:
        st.info("The environment is being tried; the first rows come in a few seconds.")
    _measured(tuning)


def _choices(tuning: TuningView) -> None:
    """The four numbers that matter most; all of them, with reasons, come after the charts."""
    main = [key for key in (*_MAIN, *_MAIN_ROLLOUT) if key in tuning.choice][: len(_MAIN)]
    for cell, key in zip(st.columns(len(_MAIN)), main, strict=False):
        why = components.plain(tuning.reasons.get(key))
        cell.metric(components.title(key), _value(tuning, key), help=why, border=True)
    record = tuning.record
    if record:
        paper = _paper_batch(tuning)
        rule = "lies far beyond what was measured" if paper is None else f"would take batch {number(paper)}"
        st.caption(
            f"Measured {components.plain(record.get('measured_at'))} in {number(record.get('seconds'))} s; objective: "
            f"{components.plain(record.get('objective'))}; score: "
            f"{components.plain(record.get('formula') or record.get('score'))}."
            + ("" if tuning.rollouts else f" The Spreeze paper's rule (0.85 of the highest update frame rate) {rule}.")
        )


def _value(tuning: TuningView, key: str) -> str:
    value = tuning.choice.get(key)
    return number(value) if isinstance(value, int | float) else clean(value or DASH, 40)


def _reasons(tuning: TuningView) -> None:
    """Every choice with its reason, and what else the tuner has to say."""
    if tuning.choice:
        st.markdown("**What was chosen, and why**")
        rows = [(components.title(key), _value(tuning, key), tuning.reasons.get(key)) for key in tuning.choice]
        st.markdown(components.table(("setting", "chosen", "why"), rows))
    told = (*_texts(tuning, "notes"), *_texts(tuning, "limits"))
    if told:
        st.markdown(components.bullets(told))


def _texts(tuning: TuningView, key: str) -> list[str]:
    found = tuning.record.get(key)
    return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []


def _pins(path: Path, tuning: TuningView) -> None:
    """Values of one's own for the next start; the tuner keeps them and chooses the rest around them."""
    facts, run = row(path), read_run(path)
    wanted: dict[str, Any] = {}
    try:
        request = control.Request(env_id=facts.env_id or "", mode=str(run.get("mode", control.Request.mode)),
                                  algo=facts.algo or "", seed=facts.seed or 1)
        knobs, _ = offered(request.config)
        st.markdown("**Pin or override**: what you set here is taken over by the next start; the tuner chooses the "
                    "rest.")
        columns = st.columns(4)
        for place, key in enumerate(knobs):
            with columns[place % len(columns)]:
                wanted[key] = components.ask(key, "pin", st.session_state.get("pins", {}).get(key),
                                             f"tuner: {_value(tuning, key)}")
        wanted = {key: value for key, value in wanted.items() if value is not None}
        request = dataclasses.replace(request, settings=wanted)
    except SpreezeError as error:
        st.caption(components.plain(error))
        return
    cells = st.columns([1.3, 5], vertical_alignment="center")
    if cells[0].button("Use for the next start", key="pin", width="stretch"):
        st.session_state["pins"] = wanted
        st.toast("Taken over: see Settings beside Start on the Live page.")
    with cells[1]:
        components.show_command(
            "pins", control.shown("spreeze.train", *control.arguments(request), *control.place(runs_dir()))
        )


def _measured(tuning: TuningView) -> None:
    if tuning.rollouts:
        st.markdown("**Executors and actors beside the learner**")
        st.dataframe(_rollout_table(tuning), hide_index=True, column_config=_HELP)
        return
    left, right = st.columns(2)
    with left:
        st.markdown("**Batch size against update frames a second** (updates/s times batch size)")
        if tuning.updates:
            st.plotly_chart(batch_figure(tuning), config=CONFIG, key="tune_batch")
    with right:
        st.markdown("**Samplers against env steps a second**, the learner running beside them")
        if tuning.joint:
            st.plotly_chart(sampler_figure(tuning), config=CONFIG, key="tune_samplers")
    if tuning.updates:
        st.markdown("**The learner alone**")
        _table(_update_table(tuning), any(r.score is not None for r in tuning.updates))
    if tuning.joint:
        st.markdown("**Samplers beside the learner**")
        _table(_joint_table(tuning), any(r.score is not None for r in tuning.joint))


def _table(rows: list[dict[str, Any]], scored: bool) -> None:
    """Without the column of scores where none was told: a finished record has them for its choice alone."""
    shown = rows if scored else [{name: value for name, value in row.items() if name != "score"} for row in rows]
    st.dataframe(shown, hide_index=True, column_config=_HELP)


def _update_table(tuning: TuningView) -> list[dict[str, Any]]:
    return [
        {
            "batch size": number(r.batch_size), "threads": number(r.threads), "updates/s": number(r.updates_per_s),
            "spread": percent(r.spread), "update frames/s": number(r.frames_per_s), "score": number(r.score),
            "note": clean(r.failure or ("chosen" if _chosen(tuning, r.batch_size, r.threads) else "")),
        }
        for r in tuning.updates
    ]


def _joint_table(tuning: TuningView) -> list[dict[str, Any]]:
    return [
        {
            "samplers": number(r.samplers), "envs each": number(r.envs_per_sampler),
            "samples/insert": DASH if r.samples_per_insert_min is None
            else f"at least {number(r.samples_per_insert_min)}",
            "batch size": number(r.batch_size), "threads": number(r.threads),
            "env steps/s": number(r.env_steps_per_s), "updates/s": number(r.updates_per_s),
            "processor": percent(r.cpu_share), "score": number(r.score),
            "note": clean(r.failure or ("chosen" if r.is_choice(tuning.choice) else "")),
        }
        for r in tuning.joint
    ]


def _rollout_table(tuning: TuningView) -> list[dict[str, Any]]:
    return [
        {
            "executors": number(r.executors), "envs each": number(r.envs_per_executor), "actors": number(r.actors),
            "interval": number(r.sync_interval), "minibatches": number(r.minibatches),
            "env steps/s": number(r.env_steps_per_s), "processor": percent(r.cpu_share),
            "note": clean(r.failure or ("chosen" if r.is_choice(tuning.choice) else "")),
        }
        for r in tuning.rollouts
    ]


def batch_figure(tuning: TuningView) -> go.Figure:
    """Measured frame rates by threads, the fitted curve ``B / (a + b B)``, and the chosen point."""
    chart = _figure("batch size [transitions]", "update frames/s")
    for i, threads in enumerate(sorted({r.threads for r in tuning.updates})):
        rows = [r for r in tuning.updates if r.threads == threads and r.frames_per_s is not None]
        chart.add_scatter(x=[r.batch_size for r in rows], y=[r.frames_per_s for r in rows], mode="markers",
                          name=f"{threads} thread" + ("s" if threads > 1 else ""),
                          marker={"size": 9, "color": COLOURS[i % len(COLOURS)]})
    a, b = tuning.record.get("cost_a_s"), tuning.record.get("cost_b_s_per_row")
    measured = sorted({r.batch_size for r in tuning.updates})
    if isinstance(a, float) and isinstance(b, float):
        sizes = np.geomspace(measured[0], measured[-1], 100)
        chart.add_scatter(x=sizes.tolist(), y=(sizes / (a + b * sizes)).tolist(), mode="lines",
                          name="fit B / (a + b B)", line={"color": "#888888", "width": 1.5})
        paper = _paper_batch(tuning)
        if paper is not None:
            chart.add_vline(x=paper, line={"dash": "dot", "color": "#888888"})
            chart.add_scatter(x=[None], y=[None], mode="lines", name="knee of the paper's rule",
                              line={"dash": "dot", "color": "#888888"})
    chosen = [r for r in tuning.updates if _chosen(tuning, r.batch_size, r.threads)]
    if chosen:
        chart.add_scatter(x=[r.batch_size for r in chosen], y=[r.frames_per_s for r in chosen], mode="markers",
                          name="chosen", marker={"size": 16, "symbol": "circle-open", "color": "#D55E00",
                                                 "line": {"width": 3}})
    chart.update_xaxes(type="log", tickvals=measured, ticktext=[number(size) for size in measured])
    return _with_room_for_legend(chart)


def _paper_batch(tuning: TuningView) -> int | None:
    """What the paper's rule would take; None where the fit puts it far beyond what was measured."""
    paper, largest = tuning.record.get("paper_batch_size"), max((r.batch_size for r in tuning.updates), default=0)
    return paper if isinstance(paper, int) and paper <= 4 * largest else None


def sampler_figure(tuning: TuningView) -> go.Figure:
    """Env steps/s and, on the right axis, updates/s."""
    chart = _figure("samplers [processes]", "env steps/s")
    kinds = sorted({r.kind for r in tuning.joint if r.env_steps_per_s is not None})
    for i, kind in enumerate(kinds):
        rows = sorted((r for r in tuning.joint if r.kind == kind), key=lambda r: r.samplers)
        label = f", batch {kind[1]}, at least {kind[0]:g} samples/insert" if len(kinds) > 1 else ""
        for name, axis, colour, dash, y in (
            ("env steps/s", "y", COLOURS[0], "solid", [r.env_steps_per_s for r in rows]),
            ("updates/s (right)", "y2", COLOURS[1], "dot", [r.updates_per_s for r in rows]),
        ):
            chart.add_scatter(x=[r.samplers for r in rows], y=y, mode="lines+markers", name=name + label, yaxis=axis,
                              line={"color": colour, "dash": dash}, showlegend=i == 0 or axis == "y",
                              marker={"size": 9, "symbol": _SYMBOLS[i % len(_SYMBOLS)]})
    chosen = [r for r in tuning.joint if r.is_choice(tuning.choice)]
    if chosen:
        chart.add_scatter(x=[r.samplers for r in chosen], y=[r.env_steps_per_s for r in chosen], mode="markers",
                          name="chosen", marker={"size": 18, "symbol": "circle-open", "color": "#D55E00",
                                                 "line": {"width": 3}})
    chart.update_layout(yaxis2={"title": "updates/s", "overlaying": "y", "side": "right", "rangemode": "tozero",
                                "showgrid": False, "tickmode": "auto", "nticks": 5})
    counts = {r.samplers for r in tuning.joint}
    chart.update_xaxes(dtick=1 if max(counts) < 10 else None, range=[min(counts) - 0.5, max(counts) + 0.5])
    return _with_room_for_legend(chart)


def _figure(x: str, y: str) -> go.Figure:
    import plotly.graph_objects as go  # half a second that the Live page need not wait for

    chart = go.Figure()
    chart.update_layout(margin={"l": 50, "r": 50, "t": 10, "b": 40},
                        legend={"yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "xanchor": "left"})
    chart.update_xaxes(title=x, automargin=True)
    chart.update_yaxes(title=y, rangemode="tozero")
    return chart


def _with_room_for_legend(chart: go.Figure) -> go.Figure:
    """However many entries there are, the axes keep their height and the legend starts below their title."""
    entries = sum(trace.showlegend is not False for trace in chart.data)
    return chart.update_layout(height=290 + 20 * entries)


def _chosen(tuning: TuningView, batch_size: int, threads: int) -> bool:
    return (batch_size, threads) == (tuning.choice.get("learner.batch_size"), tuning.choice.get("learner.threads"))


def _settings(path: Path) -> None:
    config = read_config(path)
    shown = [
        {"setting": f"{part}.{name}", "value": clean(value)}
        for part in ("sampling", "learner", "replay", "evaluation", "visualizer")
        for name, value in config.get(part, {}).items()
    ]
    with st.expander("Settings that the run was started with"):
        st.dataframe(shown, hide_index=True)


# --- the rows ---


@dataclass(frozen=True)
class UpdateRow:
    """One batch size, measured."""

    batch_size: int
    threads: int
    updates_per_s: float | None
    spread: float | None
    """Fastest less slowest repeat, as a share of the median."""
    failure: str | None
    score: float | None = None

    @property
    def frames_per_s(self) -> float | None:
        """Update frames a second."""
        return None if self.updates_per_s is None else self.updates_per_s * self.batch_size


@dataclass(frozen=True)
class JointRow:
    """One number of samplers, measured beside the learner."""

    samplers: int
    env_steps_per_s: float | None
    updates_per_s: float | None
    batch_size: int | None = None
    envs_per_sampler: int | None = None
    score: float | None = None
    failure: str | None = None
    samples_per_insert_min: float | None = None
    threads: int | None = None
    cpu_share: float | None = None
    """Share of the usable cores that the run kept busy."""

    @property
    def kind(self) -> tuple[float, int, int, int]:
        """What but the number of samplers tells it from others; they are one curve."""
        return (self.samples_per_insert_min or 0.0, self.batch_size or 0, self.threads or 0, self.envs_per_sampler or 0)

    def is_choice(self, choice: dict[str, Any]) -> bool:
        """True where it has all that was chosen."""
        own = {
            "sampling.samplers": self.samplers, "sampling.envs_per_sampler": self.envs_per_sampler,
            "learner.batch_size": self.batch_size, "learner.threads": self.threads,
            "replay.samples_per_insert_min": self.samples_per_insert_min,
        }
        known = {key: value for key, value in own.items() if value is not None and key in choice}
        return bool(known) and all(choice[key] == value for key, value in known.items())


@dataclass(frozen=True)
class RolloutRow:
    """One way to collect for an on-policy algorithm, measured beside the learner."""

    executors: int
    envs_per_executor: int | None
    actors: int | None
    sync_interval: int | None
    minibatches: int | None
    env_steps_per_s: float | None
    cpu_share: float | None
    failure: str | None

    def is_choice(self, choice: dict[str, Any]) -> bool:
        """True where it has all that was chosen."""
        return bool(choice) and all(getattr(self, name) == choice.get(f"rollout.{name}") for name in (
            "executors", "envs_per_executor", "actors", "sync_interval"))


@dataclass(frozen=True)
class TuningView:
    """All that is known; ``choice`` is empty while the tuner is still at work."""

    updates: list[UpdateRow] = field(default_factory=list)
    joint: list[JointRow] = field(default_factory=list)
    choice: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    rollouts: list[RolloutRow] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        """Whether there is any row."""
        return bool(self.updates or self.joint or self.rollouts)


def read(path: Path) -> TuningView:
    """The tuner's result of a run, or what it has measured so far."""
    record = read_json(path / "tune.json")
    if record:
        entries = [*record.get("update_rates", []), *record.get("joint_rates", [])]
        return TuningView(*_rows(entries), _dict(record.get("choice")), _dict(record.get("reasons")), record,
                      _rollouts(record.get("rollout_rates")))
    entries = []
    for line in tail_text(path / PROGRESS).splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return TuningView(*_rows(entries), rollouts=_rollouts(entries))


def _rows(entries: list[Any]) -> tuple[list[UpdateRow], list[JointRow]]:
    updates, joint = [], []
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        rates = _rates(entry.get("updates_per_s"))
        middle = statistics.median(rates) if rates else None
        failure = entry["failure"] if isinstance(entry.get("failure"), str) else None
        if isinstance(entry.get("samplers"), int):
            steps, learner = _rates(entry.get("env_steps_per_s")), _dict(entry.get("learner"))
            joint.append(JointRow(
                entry["samplers"], statistics.median(steps) if steps else None, middle,
                _integer(learner.get("batch_size")), _integer(entry.get("envs_per_sampler")),
                _number(entry.get("score")), failure, _number(entry.get("samples_per_insert_min")),
                _integer(learner.get("threads")), _middle(entry.get("cpu_share")),
            ))
        elif isinstance(entry.get("batch_size"), int) and isinstance(entry.get("threads"), int):
            told = spread(rates) if len(rates) > 1 else _number(entry.get("spread"))
            score = _number(entry.get("score"))
            updates.append(UpdateRow(entry["batch_size"], entry["threads"], middle, told, failure, score))
    return updates, joint


def _rollouts(entries: Any) -> list[RolloutRow]:
    rows = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return [
        RolloutRow(
            executors=entry["executors"], envs_per_executor=_integer(entry.get("envs_per_executor")),
            actors=_integer(entry.get("actors")), sync_interval=_integer(entry.get("sync_interval")),
            minibatches=_integer(entry.get("minibatches")), env_steps_per_s=_middle(entry.get("env_steps_per_s")),
            cpu_share=_middle(entry.get("cpu_share")),
            failure=entry["failure"] if isinstance(entry.get("failure"), str) else None,
        )
        for entry in rows if _integer(entry.get("executors")) is not None
    ]


def _rates(value: Any) -> list[float]:
    """Repeats of a rate; a row of a tuner at work has their median alone."""
    values = value if isinstance(value, list) else [value]
    return [float(x) for x in values if _number(x) is not None]


def _middle(value: Any) -> float | None:
    rates = _rates(value)
    return statistics.median(rates) if rates else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
