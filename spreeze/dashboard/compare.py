"""Compare: runs and seeds side by side, any metric, with the three metrics of the HTS-RL protocol."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import streamlit as st

from spreeze.dashboard import components, control, navigation, run_data
from spreeze.dashboard.live_api import COLOURS, charted_metrics
from spreeze.dashboard.run_data import SAMPLE, SAMPLE_NAME, row, rows, run_names, run_path, runs_dir, varied_settings
from spreeze.errors import RunError
from spreeze.files import read_json
from spreeze.formatting import DASH, clean, duration, number, percent, whole
from spreeze.metrics import comparison, evidence, return_curve
from spreeze.metrics.comparison import Curve, Line, Report, Rules, RunGroup
from spreeze.metrics.evidence import RESAMPLES
from spreeze.metrics.html_report import MAX_RUNS
from spreeze.metrics.published_returns import published
from spreeze.metrics.store import MetricsReader
from spreeze.metrics.tuning_record import better_run
from spreeze.run_directory import read_about, read_run

if TYPE_CHECKING:
    import plotly.graph_objects as go

_AXES = {"wall time [s]": "t", "env steps": "env_steps", "updates": "updates"}
_GREEDY = "greedy return"
_SETTINGS, _TUNED, _EACH = "settings", "tuned or fixed", "run"
_GROUPINGS = (_SETTINGS, _TUNED, _EACH)
_RUNS = navigation.COMPARED
_MAX_RUNS, _FIRST_RUNS, _SEARCHED = 20, 6, 60
"""Runs in a comparison, those that it starts with, and the newest runs among which these are searched."""
_MAX_POINTS = 400
_MAX_VERDICT = 2000
_ALL = "all metrics"
_SMALL_PER_ROW = 3
_CELL = 62  # Width of a number [px], by which the list of runs fits a screen of 1,280.
_CENTRES = ("mean", "interquartile mean")
_CENTRE, _HAD_OWN = "compare_centre", "compare_had_own"
_OFF = ("displayModeBar", "displaylogo", "showTips", "showSendToCloud")
CONFIG: dict[str, Any] = dict.fromkeys(_OFF, False) | {"plotlyServerURL": ""}


def page() -> None:
    st.title("Compare runs", anchor=False)
    names = run_names(runs_dir())
    if not names:
        navigation.need_run()
    current, sweeps = navigation.current(), _sweeps()
    had_own, st.session_state[_HAD_OWN] = st.session_state.get(_HAD_OWN, True), names[0] != SAMPLE_NAME
    first_own = not had_own and st.session_state[_HAD_OWN] and st.session_state.get(_RUNS) == [SAMPLE_NAME]
    if first_own and current == SAMPLE:
        current = run_path(names[0], runs_dir())
    if _RUNS not in st.session_state or first_own:
        its_sweeps = [name for name, sweep in sweeps.items() if current and row(current).name in sweep.runs]
        st.session_state[_RUNS] = its_sweeps[:1] or _of_task(names, current)
    elif not set(st.session_state[_RUNS]) <= {*sweeps, *names}:  # one was deleted
        st.session_state[_RUNS] = [name for name in st.session_state[_RUNS] if name in sweeps or name in names]
    text = "Remove a run with its cross; click the legend to hide a curve."
    more: dict[str, Any] = {"max_selections": _MAX_RUNS, "key": _RUNS, "persist_state": "session", "help": text}
    picked = st.multiselect("Runs", [*sweeps, *names], format_func=_with_title, **more)
    read = _read(list(dict.fromkeys(run for name in picked for run in sweeps.get(name, _Sweep([name])).runs)))
    if not read:
        st.info("Nothing to compare: choose runs with at least one evaluation.")
        return
    cells = st.columns([1.2, 1, 1, 1.7])
    known = _metrics(list(read))
    text = "Greedy return: mean of 3 evaluations. All metrics: a small chart of each."
    metric = cells[0].selectbox("Metric", [*known, _ALL], help=text)
    axis = cells[1].selectbox("Horizontal axis", list(_AXES), help="Wall time is the time that you wait.")
    if _CENTRE not in st.session_state:  # from then on it is the user's, even if runs are added
        st.session_state[_CENTRE] = _CENTRES[all(name in sweeps for name in picked)]
    text = "Average over runs, in chart and table. The interquartile mean (as in sweeps) drops the best and "
    text += "the worst quarter of four or more runs; of fewer it is the mean."
    centre = cells[2].selectbox("Centre", _CENTRES, key=_CENTRE, persist_state="session", help=text)
    text = "Runs are always separated by environment, algorithm and mode. Seeds with the same settings form "
    text += "one curve with a band."
    more = {"default": _SETTINGS, "required": True, "key": "compare_group", "help": text}
    grouping = cells[3].segmented_control("One curve per", _GROUPINGS, **more)
    varied = sorted({key for name in picked if name in sweeps for key in sweeps[name].varied})
    curves = grouped(read, grouping or _SETTINGS, varied)
    in_order, robust = list(curves.values()), centre != "mean"
    charts = {name: _lines(curves, name, _AXES[axis]) for name in (known if metric == _ALL else [metric])}
    st.plotly_chart(figure(charts, axis, robust), config=CONFIG, key="compare_chart")
    st.caption(
        f"Each curve is the {centre} over the runs of its group, where all of them have values; without runs less "
        "than half as long as the longest of the group. Band: 95 % bootstrap interval (1,000 resamples) from "
        f"{comparison.MIN_RUNS} runs on."
    )
    scores = _scores(in_order, robust=robust)
    reports, by_name = list(scores.values()), {curve.name: curve for curve in in_order}
    targets = {task: report.rules.targets[0] for task, report in scores.items()}
    crowded = f"A report can have {MAX_RUNS} runs, not {len(curves)}: remove some."
    st.download_button(
        "Report of these runs",
        lambda: control.report_html(list(curves), targets=targets, robust=robust, also=varied),
        "report.html",
        "text/html",
        key="compare_report",
        on_click=_say_where,
        disabled=len(curves) > MAX_RUNS,
        help=crowded if len(curves) > MAX_RUNS else "A self-contained HTML file.",
    )
    differ = comparison.differing(in_order, varied)
    _protocol(reports, by_name, differ)
    tuned = comparison.only_tuned(in_order) - {*varied}
    _effects(reports, by_name, [name for name in differ if name not in tuned])
    _differences(curves, differ)


def _with_title(name: str) -> str:
    """A choice of the list with the title that the user gave it; sweeps have none."""
    title = read_about(runs_dir() / name).title
    return f"{title} ({name})" if title else name


def _of_task(names: list[str], current: Path | None) -> list[str]:
    """The run that is shown, and the newest other ones of its task: not those that lost a comparison of algorithms."""
    if current is None:
        return names[:1]
    shown = row(current)
    others = [name for name in names[:_SEARCHED] if name not in (shown.name, SAMPLE_NAME)]  # recorded elsewhere
    others = [name for name in others if row(run_path(name, runs_dir())).env_id == shown.env_id]
    if better_run(current) is None:
        others = [name for name in others if better_run(run_path(name, runs_dir())) is None]
    return [shown.name, *others][:_FIRST_RUNS] if shown.name in names else names[:1]


class _Sweep(NamedTuple):
    runs: list[str]  # names of the finished ones
    varied: Sequence[str] = ()  # settings in which they differ, as ``section.field``


def _sweeps() -> dict[str, _Sweep]:
    sweeps = {}
    for path in sorted(runs_dir().glob("*.sweep.json")):
        names = read_json(path).get("finished")
        if isinstance(names, list):
            words = [
                word for run in run_data.sweep_runs(path) for word in str(run.get("setting")).split() if "=" in word
            ]
            varied = sorted({word.partition("=")[0] for word in words})
            sweep = _Sweep([name for name in names if isinstance(name, str)], varied)
            sweeps[f"sweep {path.name.removesuffix('.sweep.json')}"] = sweep
    return sweeps


def _read(names: list[str]) -> dict[Path, Curve]:
    curves, without, deleted = dict[Path, Curve](), list[str](), list[str]()
    present = {*run_names(runs_dir())}
    for name in names:
        if name not in present:
            deleted.append(name)
            continue
        try:
            path = run_path(name, runs_dir())
            curve = comparison.read_curve(path)
        except RunError as error:
            st.warning(components.plain(str(error)))
            continue
        if curve is not None:
            curves[path] = dataclasses.replace(curve, name=name)
        else:
            without.append(name)
    for reason, left_out in (("have no evaluation", without), ("were deleted", deleted)):
        if left_out:
            st.caption(components.plain(f"Left out, because they {reason}: {', '.join(left_out)}"))
    return curves


def grouped(curves: Mapping[Path, Curve], grouping: str, varied: Sequence[str] = ()) -> dict[Path, Curve]:
    """The curves with the groups that make one curve each; ``varied`` settings always separate runs."""
    if grouping == _SETTINGS:
        return dict(zip(curves, comparison.split_by_settings(list(curves.values()), also=varied), strict=True))
    variants = {path: curve.name if grouping == _EACH else _tuned_or_fixed(path) for path, curve in curves.items()}
    return {
        path: dataclasses.replace(curve, group=dataclasses.replace(curve.group, variant=variants[path]))
        for path, curve in curves.items()
    }


def _tuned_or_fixed(path: Path) -> str:
    record = read_json(path / "tune.json")
    if record.get("choice") and record.get("fell_back") is not True:
        return "tuned"
    return "tuner without a choice" if record or "--auto" in (read_run(path).get("command") or ()) else "fixed"


def _metrics(paths: list[Path]) -> list[str]:
    known = {name for path in paths for name in MetricsReader(path / "metrics.db").names()}
    names = [metric.name for metric in charted_metrics() if metric.name in known and metric.name != "eval_return"]
    return [_GREEDY, *names]


def _series(path: Path, name: str, axis: str) -> Line:
    with MetricsReader(path / "metrics.db").connected() as reader:
        series = reader.series(name, max_points=_MAX_POINTS)
        if axis == "updates" and len(series.t):
            updates = reader.series("updates", max_points=_MAX_POINTS)
            return np.interp(series.t, updates.t, updates.mean) if len(updates.t) else series.t, series.mean
    return series.t if axis == "t" else series.step, series.mean


def _say_where() -> None:
    st.toast("report.html is on its way to the downloads of your browser; another click makes it again.")


def _lines(curves: Mapping[Path, Curve], metric: str, axis: str) -> dict[str, list[Line]]:
    lines: dict[str, list[Line]] = {}
    for path, curve in curves.items():
        line = comparison.returns(curve.evaluations, axis) if metric == _GREEDY else _series(path, metric, axis)
        lines.setdefault(f"{curve.group.env} {curve.group.label}", []).append(line)
    return lines


def figure(charts: Mapping[str, Mapping[str, Sequence[Line]]], axis: str, robust: bool) -> go.Figure:
    """A chart for each metric, in it one curve with a band for each group; a group has one colour in all of them."""
    from plotly.subplots import make_subplots  # slow to import (0.5 s), so only here

    columns = min(_SMALL_PER_ROW, len(charts))
    charts_down = -(-len(charts) // columns)
    titles = [name.replace("_", " ") for name in charts]
    chart = make_subplots(charts_down, columns, subplot_titles=titles if len(charts) > 1 else None)
    for index, groups in enumerate(charts.values()):
        at = {"row": index // columns + 1, "col": index % columns + 1}
        for i, (name, lines) in enumerate(groups.items()):
            colour = COLOURS[i % len(COLOURS)]
            band = comparison.band(*comparison.on_grid(lines), robust)
            both = np.isfinite(band.low)
            if both.any():
                x = np.concatenate([band.x[both], band.x[both][::-1]])
                y = np.concatenate([band.high[both], band.low[both][::-1]])
                fill = {"fill": "toself", "fillcolor": colour, "opacity": 0.2, "line_width": 0, "legendgroup": name}
                more = {"mode": "lines", "hoverinfo": "skip", "showlegend": False, **fill, **at}
                chart.add_scatter(x=x.tolist(), y=y.tolist(), **more)
            known = np.isfinite(band.centre)
            drawn = int(band.runs.max(initial=0))
            left_out = f"{drawn} of " if 0 < drawn < len(lines) else ""
            title = html.escape(f"{name} ({left_out}{len(lines)} run{'s' if len(lines) > 1 else ''})", quote=False)
            across, up = (values[known].tolist() for values in (band.x, band.centre))
            shape = "lines" if len(set(across)) > 1 else "markers"  # a single evaluation is no line
            more = {"mode": shape, "name": title, "line": {"color": colour, "width": 2}, "legendgroup": name}
            chart.add_scatter(x=across, y=up, showlegend=index == 0, **more, **at)
    chart.update_layout(
        height=420 if len(charts) == 1 else 60 + 220 * charts_down,
        margin={"l": 50, "r": 10, "t": 10 if len(charts) == 1 else 60, "b": 40},
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.02 if len(charts) == 1 else 1.0 + 0.2 / charts_down, "yanchor": "bottom"},
    )
    if len(charts) == 1:
        smoothed = f", mean of {comparison.SMOOTHING} evaluations" if titles[0] == _GREEDY else ""
        chart.update_yaxes(title=titles[0] + smoothed)
    chart.update_xaxes(title=axis, row=charts_down)
    return chart


def _scores(curves: list[Curve], *, robust: bool) -> dict[str, Report]:
    """Task -> the metrics of the HTS-RL paper, with a target of its own for each task."""
    tasks = list(dict.fromkeys(curve.group.env for curve in curves))
    cells = st.columns(max(3, len(tasks)))
    reports = {}
    for cell, task in zip(cells, tasks, strict=False):
        of_task = [curve for curve in curves if curve.group.env == task]
        key, usual = f"target_{task}", _target(of_task)
        before = st.session_state.get(f"{key}_usual")
        st.session_state[f"{key}_usual"] = usual
        if st.session_state.get(key, before) == before:  # not set by the user
            st.session_state[key] = usual
        text = "For the times to target. At first the published return where a group reached it in every run, else the "
        text += "highest mean of ten evaluations that a group has in every run."
        target = cell.number_input(f"Target return of {components.plain(task)}", key=key, step=0.1, help=text)
        reports[task] = comparison.report(of_task, Rules(targets=(float(target),), robust=robust))
    return reports


def _protocol(reports: list[Report], curves: Mapping[str, Curve], differ: Sequence[str]) -> None:
    flags = " --centre iqm" if reports[0].rules.robust else ""
    names = [name for name in differ if name.replace(".", "_").isidentifier()]  # they come out of files of runs
    if any(name.startswith(comparison.IGNORED) for name in names):
        flags += "".join(f" --by {name}" for name in names)
    for sentence in (sentence for report in reports for sentence in comparison.verdicts(report)):
        st.markdown(f"**{components.plain(sentence, _MAX_VERDICT)}.**")
    components.show_errors(runs_dir())
    for report in reports:
        _offer_seeds(report)
    _group_table(reports)
    _run_table(reports, curves)
    st.caption(
        f"From all episodes of the last {return_curve.FINAL_EVALUATIONS} evaluated policies, with a [95 % bootstrap "
        f"interval over seeds, {RESAMPLES:,} resamples]. These are the three metrics of the HTS-RL paper, called "
        "final, final-time and required-time there; "
        f"`python -m spreeze evaluate --protocol hts RUN ...{flags}` gives the same."
    )


def _offer_seeds(report: Report) -> None:
    """A button that trains the seeds needed to tell the two best groups apart, if these are not too many."""
    folder, env = runs_dir(), report.runs[0].group.env
    ahead = report.standings.get(env)
    if ahead is None or not ahead.more or ahead.more > comparison.MAX_SEEDS:
        return
    repeated = [next(run.name for run in report.runs if run.group == group) for group in (ahead.first, ahead.second)]
    if not all((folder / name).is_dir() for name in repeated):  # the recording
        return
    taken = [run.seed for run in rows(folder) if run.env_id == env and run.seed is not None]  # compared or not
    flags = [argument for name in repeated for argument in ("--like", name)]
    flags += ["--seeds", str(ahead.more), "--first-seed", str(1 + max(taken, default=0))]
    try:
        module = next((module for name in repeated if (module := control.module_to_trust(folder / name))), None)
    except RunError:
        return
    if module is None:  # else a click would run code named by a run directory
        label = f"Train {ahead.more} more {'seed' if ahead.more == 1 else 'seeds'} of both"
        text = "With the settings of the runs, tuned ones too, one after the other."
        more = {"note": "Started: see the Live page.", "key": f"compare_seeds_{env}", "help": text}
        components.act_button(st, label, control.start_sweep, flags, folder, **more)
    components.show_command(f"seeds_{env}", control.sweep_command(flags, folder))


def _target(curves: list[Curve]) -> float:
    """The return that ended all runs, else the published one if a group reached it in every run, else its best."""
    ends = {curve.ended_at for curve in curves}
    if len(ends) == 1 and (end := ends.pop()) is not None:
        return end
    listed = published(curves[0].group.env)
    reached: dict[RunGroup, float] = {}
    for curve in curves:
        means = return_curve.running_mean(curve.evaluations, return_curve.FINAL_EVALUATIONS)
        best = max(means[return_curve.FINAL_EVALUATIONS - 1 :] or means[-1:])  # fewer than ten policies reach nothing
        reached[curve.group] = min(best, reached.get(curve.group, math.inf))
    highest = max(reached.values())
    return listed.value if listed is not None and highest >= listed.value else math.floor(10.0 * highest) / 10.0


def _show_table(
    table: list[dict[str, str]], key: str, helps: Mapping[str, str], widths: Mapping[str, int] | None = None
) -> None:
    """A table; ``helps`` is column title -> tooltip, ``widths`` column title -> pixels."""
    columns = {**dict.fromkeys(helps), **(widths or {})}
    text = st.column_config.TextColumn
    config = {title: text(help=helps.get(title), width=width) for title, width in columns.items()}
    st.dataframe(table, hide_index=True, key=key, column_config=config)


def _group_table(reports: list[Report]) -> None:
    table = [
        ({"task": report.runs[0].group.env} if len(reports) > 1 else {}) | cells
        for report in reports
        for cells in comparison.group_cells(report)
    ]
    helps = {
        "final return": "mean over all episodes of the last evaluated policies, at most "
        f"{return_curve.FINAL_EVALUATIONS}, {comparison.LONG_ENOUGH}",
        "return at equal time": "the same for all runs, up to the wall time that all runs of the environment reached",
    }
    for title, (_, what) in comparison.TIMES.items():
        helps[title] = f"wall time until {what} reached the target [h:min:s], a dash until all seeds did"
    helps["a run that its own target return ended"] = "its end counts where it had fewer evaluations"
    st.markdown(components.table(list(table[0]), [list(cells.values()) for cells in table]))  # its cells wrap
    st.caption("; ".join(f"{title}: {text}" for title, text in helps.items()) + ".")


def _run_table(reports: list[Report], curves: Mapping[str, Curve]) -> None:
    table, worst, policies = [], f"worst of {return_curve.WORST_OF}", return_curve.FINAL_EVALUATIONS
    swept = varied_settings(runs_dir())
    titles = {title.removesuffix(" at target"): entry for title, entry in comparison.TIMES.items()}
    runs = [run for report in reports for run in report.runs]
    alike = len({(run.group.algo, run.group.mode) for run in runs}) == 1
    for run in runs:
        evaluations = curves[run.name].evaluations
        task = {"task": run.group.env} if len(reports) > 1 else {}
        final = {"final": number(run.final), "equal time": number(run.final_time)}
        times = {title: duration(getattr(run, kind)[0]) for title, (kind, _) in titles.items()}
        best = {"best": number(max(record.return_mean for record in return_curve.whole(evaluations)))}
        last = {
            worst: number(return_curve.worst_of_last(evaluations)),
            "evaluated at [env steps]": number(evaluations[-1].env_steps),
        }
        name = _label(run_path(run.name, runs_dir()), run.seed, swept, run.name.replace(f"{run.group.env}_", ""))
        group = run.group.variant if alike and run.group.variant else run.group.label
        table.append({"run": name} | task | {"group": group} | final | times | best | last)
    limits = ((duration(report.runs[0].limit_s), report.runs[0].group.env) for report in reports)
    helps = {
        "final": f"Mean over all episodes of its last {policies} evaluated policies, or fewer if it has fewer.",
        "equal time": "; ".join(f"the same, up to {limit} of {env} [h:min:s]" for limit, env in limits),
        "best": "Highest mean return of one evaluation.",
        worst: f"Lowest of the latest {return_curve.WORST_OF} evaluations, or of as many as there are.",
        "evaluated at [env steps]": "Those of the last evaluated policy.",
    } | {
        title: f"Wall time until {what} reached the target [h:min:s]; of a run that ended because it reached the "
        "target, its end."
        for title, (_, what) in titles.items()
    }
    names = {"run": 165, "group": 110} if len(reports) == 1 else {"run": 130, "task": 90, "group": 90}
    widths = dict.fromkeys(table[0], _CELL) | names
    _show_table(table, "compare_runs_table", helps, widths)


def _label(path: Path, seed: int | None, swept: Mapping[str, str], otherwise: str) -> str:
    """A run's name in a table: what its sweep varied, else its title, else ``otherwise``."""
    varied = swept.get(path.name)
    return f"{varied} s{whole(seed)}" if varied else read_about(path).title or otherwise


def _effects(reports: list[Report], curves: Mapping[str, Curve], differ: Sequence[str]) -> None:
    """Which of several settings matters: the variance that each explains, and all runs as parallel coordinates."""
    for report in reports:
        env = report.runs[0].group.env
        results = [(curves[run.name].settings, run.final_time) for run in report.runs]
        runs = [({name: settings.get(name, DASH) for name in differ}, y) for settings, y in results if y is not None]
        effects = evidence.main_effects(runs)
        if len(effects) < 2:
            continue
        st.markdown(f"**What matters in {components.plain(env)}** (return at equal time)")
        table = []
        for effect in effects:
            returns = sorted(effect.values.items(), key=lambda item: _by_number(item[0]))
            spreads = [(value, comparison.spread(y, report.rules), len(y)) for value, y in returns]
            cell = "; ".join(f"{value}: {comparison.spread_text(spread)} ({n})" for value, spread, n in spreads)
            line = {"setting": ", ".join(effect.settings), "explains": percent(effect.share)}
            table.append(line | {"value: return (runs)": cell})
        helps = {
            "explains": "Share of the variance between runs that the values of this setting explain, whatever the "
            "others are (eta squared). Settings in one line always changed together."
        }
        _show_table(table, f"compare_effects_{env}", helps)
        st.plotly_chart(coordinates(runs, [name for effect in effects for name in effect.settings]), config=CONFIG)


def coordinates(runs: Sequence[tuple[dict[str, str], float]], settings: Sequence[str]) -> go.Figure:
    """Parallel coordinates: one line a run through its settings to its return, coloured by the return."""
    import plotly.graph_objects as go

    dimensions: list[dict[str, Any]] = []
    for name in settings:
        texts = [values[name] for values, _ in runs]
        order = sorted(set(texts), key=_by_number)
        ranks = [order.index(text) for text in texts]
        dimensions.append({"label": name, "values": ranks, "tickvals": [*range(len(order))], "ticktext": order})
    results = [result for _, result in runs]
    dimensions.append({"label": "return at equal time", "values": results})
    line = {"color": results, "colorscale": "Cividis", "showscale": False}
    chart = go.Figure(go.Parcoords(line=line, dimensions=dimensions))
    chart.update_layout(height=320, margin={"l": 90, "r": 60, "t": 50, "b": 30})
    return chart


def _by_number(text: str) -> tuple[float, str]:
    """Sorts numbers by size, and other texts after them."""
    try:
        return float(text), ""
    except ValueError:
        return math.inf, text


def _differences(curves: Mapping[Path, Curve], names: Sequence[str]) -> None:
    """Everything in which the runs differ, one a line: settings, versions, machine."""
    if len(curves) < 2:
        return
    swept = varied_settings(runs_dir())
    labels = {path: _label(path, row(path).seed, swept, path.name) for path in curves}
    if len(set(labels.values())) < len(labels):
        labels = {path: path.name for path in curves}
    table = [
        {"what": name} | {labels[path]: curve.settings.get(name, DASH) for path, curve in curves.items()}
        for name in names
    ]
    known = {labels[path]: _circumstances(path) for path in curves}
    for name in dict.fromkeys(name for entries in known.values() for name in entries):
        values = {run: entries.get(name, DASH) for run, entries in known.items()}
        if len(set(values.values())) > 1:
            table.append({"what": name} | values)
    st.markdown("**How these runs differ**")
    if table:
        _show_table(table, "compare_settings", {})
    else:
        st.caption(
            "They do not differ in anything that matters: machine, versions and settings are the same, but for seeds, "
            "names, stop conditions, evaluations and logs."
        )


def _circumstances(path: Path) -> dict[str, str]:
    run = read_run(path)
    versions = run.get("versions") or {}
    known = {"machine": run.get("machine")} | {f"version of {name}": value for name, value in versions.items()}
    return {name: clean(value, 80) for name, value in known.items() if value is not None}
