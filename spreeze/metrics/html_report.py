"""The report: one HTML file of a run, or of several compared, that needs no network and no script.

Charts are SVG, drawn here. All that comes from a run directory is text of unknown origin: it is cleaned, shortened and
escaped, and a policy in the file forbids scripts and anything from elsewhere.
"""

from __future__ import annotations

import base64
import contextlib
import html
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spreeze import __version__
from spreeze.config.algorithms import ALGORITHMS
from spreeze.config.layers import DEFAULT
from spreeze.errors import ConfigError
from spreeze.files import read_bytes
from spreeze.formatting import DASH, clean, duration, number, percent, whole
from spreeze.metrics import comparison, return_curve, tuning_record
from spreeze.metrics.comparison import LONG_ENOUGH, Curve, Line, Rules, sources_in
from spreeze.metrics.evidence import RESAMPLES
from spreeze.metrics.health import Health, judgements
from spreeze.metrics.info_means import INFO
from spreeze.metrics.store import MetricsReader
from spreeze.metrics.table import by_name
from spreeze.run_directory import gamma_of, read_config, read_run, state_of


def _minute(started: object) -> str:
    return clean(started, 40)[:16].replace("T", " ")


MAX_RUNS = 60
_MAX_ROWS = 400
_MAX_EVENTS = 100
_MAX_PICTURE_BYTES = 400_000
_POINTS = 240
_RATES = ("env_steps_per_s", "updates_per_s", "update_frames_per_s", "cpu_use", "samples_per_insert", "policy_lag")
"""Metrics that get a chart over wall time, where a run has them."""
_OVERVIEW = (
    ("state", "state", clean),
    ("env_id", "task", clean),
    ("algo", "algorithm", clean),
    ("mode", "mode", clean),
    ("seed", "seed", whole),
    ("started", "started", _minute),
    ("wall_s", "wall time [h:min:s]", duration),
    ("env_steps", "env steps", number),
    ("updates", "updates", number),
    ("eval_best", "best return", number),
    ("last_return", "last return", number),
    ("eval_final", "mean of the last ten", number),
    ("exit_reason", "ended by", clean),
)
"""(name, title, formatter) of the overview's columns."""
_SUMMARY = (
    ("env_steps_per_s", "env steps/s", number),
    ("updates_per_s", "updates/s", number),
    ("update_frames_per_s", "update frames/s", number),
    ("rates_measured_s", "measured over [s]", number),
    ("samples_per_insert", "samples per insert", number),
    ("policy_lag_mean", "mean policy lag", number),
    ("energy_per_million_steps_kj", "energy per million env steps [kJ]", number),
    ("restarts", "restarts", number),
    ("env_errors", "errors of environments", number),
    ("time_to_target_s", "time to target [s]", number),
    ("time_to_target_held_s", "target held from [s]", number),
    ("bottleneck", "bottleneck", clean),
)


class _Run(NamedTuple):
    path: Path
    state: Mapping[str, Any]  # ``run.json``, with the state as it is now
    summary: Mapping[str, Any]
    curve: Curve | None

    @property
    def name(self) -> str:
        return clean(self.path.name, 128)


def make(
    paths: Sequence[Path], *, targets: Mapping[str, float] | None = None, robust: bool = False, also: Sequence[str] = ()
) -> str:
    """The whole file, as text; a ConfigError for too many runs, a RunError if metrics cannot be read.

    Args:
        paths: run directories.
        targets: target return for each task; the times to it are shown.
        robust: the centre over seeds is their interquartile mean.
        also: settings that separate runs although they define no other experiment, as in a sweep that varies them.
    """
    if not 0 < len(paths) <= MAX_RUNS:
        raise ConfigError(f"a report of {len(paths)} runs: from 1 to {MAX_RUNS} fit on a page")
    runs = [_read(path) for path in paths]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    is_single = len(runs) == 1
    parts = [
        _overview(runs),
        _picture(runs[0]) if is_single else "",
        _curves(runs, targets or {}, robust, also),
        _task(runs),
        _rates(runs),
        _health(runs[0]) if is_single else _differences(runs, also),
        *(_details(run, folded=not is_single) for run in runs),
    ]
    created = f"Made {time.strftime('%Y-%m-%d %H:%M')} by Spreeze {__version__}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        'style-src \'unsafe-inline\'"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}: Spreeze report</title><style>{_STYLE}</style></head><body><main>"
        f"<header><h1>{_text(title)}</h1><p>{_text(created)}</p></header>{''.join(parts)}</main></body></html>\n"
    )


def _read(path: Path) -> _Run:
    state, curve = read_run(path), comparison.read_curve(path)
    last = curve.evaluations[-1].return_mean if curve else None
    return _Run(path, {**state, "state": state_of(path), "last_return": last}, comparison.read_summary(path), curve)


# --- text ---


def _text(value: object, limit: int = 300) -> str:
    return html.escape(clean(value, limit))


def _formatted(value: object, formatter: Callable[[Any], str]) -> str:
    """A formatted value of a run's files; a dash if it is unknown or of a type that the formatter rejects."""
    if formatter not in (clean, _minute) and (not isinstance(value, int | float) or isinstance(value, bool)):
        return DASH
    try:
        return DASH if value is None or value == "" else formatter(value)
    except OverflowError:  # an integer of hundreds of digits
        return DASH


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], *, wide: Sequence[int] = ()) -> str:
    """A table with its own scroll bar, if it has rows; columns in ``wide`` hold sentences, which wrap."""

    def line(cells: Sequence[object], tag: str) -> str:
        kinds = (' class="wide"' if column in wide else "" for column in range(len(cells)))
        return "".join(f"<{tag}{kind}>{_text(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in list(rows)[:_MAX_ROWS])
    return (
        body
        and f'<div class="scroll"><table><thead><tr>{line(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{''.join(parts)}</section>" if any(parts) else ""


def _folded(title: str, *parts: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{''.join(parts)}</details>" if any(parts) else ""


def _note(text: object) -> str:
    return f'<p class="note">{_text(text, 600)}</p>'


# --- sections ---


def _overview(runs: Sequence[_Run]) -> str:
    rows = [[_formatted(run.state.get(name), formatter) for name, _, formatter in _OVERVIEW] for run in runs]
    titles = [title for _, title, _ in _OVERVIEW]
    if len(runs) > 1:
        named = ([run.name, *row] for run, row in zip(runs, rows, strict=True))
        return _section("Runs", _table(("run", *titles), named))
    cells = (f"<dt>{_text(title)}</dt><dd>{_text(cell)}</dd>" for title, cell in zip(titles, rows[0], strict=True))
    return f"<section><dl>{''.join(f'<div>{cell}</div>' for cell in cells)}</dl></section>"


def _picture(run: _Run) -> str:
    path, data = run.path / "live.jpg", b""
    with contextlib.suppress(OSError, ValueError):
        if not path.is_symlink():
            data = read_bytes(path, _MAX_PICTURE_BYTES)
    if not data.startswith(b"\xff\xd8\xff"):
        return ""
    return _section(
        "The last picture",
        '<img alt="the environment as the policy last saw it" '
        f'src="data:image/jpeg;base64,{base64.b64encode(data).decode()}">',
    )


def _curves(runs: Sequence[_Run], targets: Mapping[str, float], robust: bool, also: Sequence[str]) -> str:
    """Greedy returns of each task over wall time and env steps, with the protocol's metrics where seeds repeat."""
    curves = comparison.split_by_settings([run.curve for run in runs if run.curve is not None], also=also)
    if not curves:
        return _section("Learning curves", _note("No evaluation has ended yet."))
    parts = []
    for task in dict.fromkeys(curve.group.env for curve in curves):
        of_task = [curve for curve in curves if curve.group.env == task]
        charts = []
        for axis, title in (("t", "wall time [s]"), ("env_steps", "env steps")):
            groups: dict[str, list[Line]] = {}
            for curve in of_task:
                groups.setdefault(curve.group.label, []).append(comparison.returns(curve.evaluations, axis))
            counts = {label: f"{len(lines)} run{'s' if len(lines) > 1 else ''}" for label, lines in groups.items()}
            traces = [_trace(f"{label} ({counts[label]})", lines, robust) for label, lines in groups.items()]
            charts.append(_chart(traces, title, "greedy return"))
        parts.append(_charts(f"{task}: greedy return, mean of {comparison.SMOOTHING} evaluations", charts))
        parts.append(_scores(of_task, targets.get(task), robust))
    centre = "interquartile mean" if robust else "mean"
    caption = "One run: one seed says nothing about the spread over seeds."
    if len(curves) > 1:
        caption = (
            f"A curve is the {centre} over the runs of the same settings, up to the end of the shortest; "
            "the band is the 95 % bootstrap interval over them, and one run has none."
        )
    metrics = (
        f"Metrics of the HTS-RL paper: mean over the episodes of the last {return_curve.FINAL_EVALUATIONS} evaluated "
        f"policies, at the end ({LONG_ENOUGH}), and up to the wall time that all runs of a task reached; the {centre} "
        f"over seeds [95 % bootstrap interval, {RESAMPLES:,} resamples]."
    )
    parts += [_note(caption), _note(metrics)]
    return _section("Learning curves", *parts)


def _scores(curves: Sequence[Curve], target: float | None, robust: bool) -> str:
    """The protocol's metrics of one task, group by group, and the times to its target, if there is one."""
    rules = Rules(targets=() if target is None else (target,), robust=robust)
    rows = comparison.group_cells(comparison.report(curves, rules))
    titles = [title if target is None else title.replace("target", number(target)) for title in rows[0]]
    return _table(titles, (list(row.values()) for row in rows))


def _over_time(runs: Sequence[_Run], names: Iterable[str], *, from_zero: bool = True) -> list[str]:
    """A chart over wall time of each metric that one of the runs has."""
    charts = []
    for name in names:
        metric = by_name(name)
        if (chart := metric.chart) is None:
            continue
        known = ((run.name, MetricsReader(run.path / "metrics.db").series(name, max_points=_POINTS)) for run in runs)
        traces = [_Trace(label, one.t, chart.scale * one.mean, None, None) for label, one in known if len(one.t)]
        title = f"{name.partition('/')[2] or chart.title} [{chart.unit or metric.unit}]"
        charts += [_chart(traces, "wall time [s]", title, from_zero=from_zero)] if traces else []
    return charts


def _task(runs: Sequence[_Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in MetricsReader(run.path / "metrics.db").names())
    rates = _over_time(runs, (name for name in ("eval_success_rate", "success_rate") if name in names))
    info = _over_time(runs, (name for name in names if name.startswith(f"{INFO}/")), from_zero=False)
    return _section("Task", _charts("", rates + info))


def _rates(runs: Sequence[_Run]) -> str:
    """Rates over wall time, then those without warm-up from the summaries."""
    charts = _over_time(runs, _RATES)
    known = [row for row in _SUMMARY if any(run.summary.get(row[0]) is not None for run in runs)]
    titles = ["run", *(title for _, title, _ in known)]
    rows = [[run.name, *(_formatted(run.summary.get(name), formatter) for name, _, formatter in known)] for run in runs]
    if len(runs) > 1:
        return _section("Rates", _charts("", charts), _table(titles, rows, wide=(len(known),)) if known else "")
    table = _table(("figure", "value"), list(zip(titles, rows[0], strict=True))[1:], wide=(1,))
    return _section("Rates", _charts("", charts), table, _time_split(runs[0]))


def _health(run: _Run) -> str:
    latest = MetricsReader(run.path / "metrics.db").latest()
    values = {name: point.value for name, point in latest.items()}
    judged = judgements(values, run.state.get("env_id"), gamma_of(run.state, read_config(run.path)))
    if all(judgement.level is Health.UNKNOWN for judgement in judged):
        return ""
    rows = [judgement[:4] for judgement in judged]  # label, value, level, sentence
    return _section("Is it healthy", _table(("number", "at the end", "judged", "why"), rows, wide=(3,)))


def _time_split(run: _Run) -> str:
    split = run.summary.get("time_split")
    rows = [
        (str(name).removesuffix("_share").replace("_", ": ", 1), percent(value))
        for name, value in (split.items() if isinstance(split, dict) else ())
        if isinstance(value, int | float)
    ]
    return _folded("Where the time went", _table(("role: activity", "share of its time"), rows))


def _differences(runs: Sequence[_Run], also: Sequence[str]) -> str:
    curves = [run.curve for run in runs if run.curve is not None]
    rows = (
        [name, *(curve.settings.get(name, DASH) for curve in curves)] for name in comparison.differing(curves, also)
    )
    return _section("Settings in which they differ", _table(("setting", *(curve.name for curve in curves)), rows))


def _details(run: _Run, *, folded: bool) -> str:
    body = (
        _section("The tuner", *_tuner(run.path))
        + _section("Settings", *_settings(run.path))
        + _section("Machine and versions", _machine(run))
        + _section("Events", _events(run.path))
    )
    head = f"{run.name}: tuner, settings, machine, events"
    return f'<details class="run"><summary>{_text(head)}</summary>{body}</details>' if folded else body


def _tuner(path: Path) -> list[str]:
    tuning = tuning_record.read(path)
    if not tuning.rows and not tuning.choice:
        return []
    parts, record = [], tuning.record
    if record:
        measured_at, objective, formula = (record.get(key) or DASH for key in ("measured_at", "objective", "formula"))
        text = f"Measured {measured_at}; objective: {objective}; score: {formula}"
        parts.append(_note(f"{text} (U updates/s, B batch size, E env steps/s)."))
    if tuning.doubts:
        parts.append(_note(f"Provisional: {'; '.join(tuning.doubts)}."))
    chosen = ([key, value, tuning.reasons.get(key) or DASH] for key, value in tuning.choice.items())
    parts.append(_table(("setting", "chosen", "why"), chosen, wide=(2,)))
    for title, rows in tuning.stages:
        cells = tuning.table(rows[:_MAX_ROWS])
        parts.append(f"<h3>{_text(title)}</h3>" + _table(list(cells[0]), (list(line.values()) for line in cells)))
    return parts


def _settings(path: Path) -> list[str]:
    """Each value that the algorithm reads, with its source: first the chosen ones, then the defaults."""
    config, sources = read_config(path), sources_in(path)
    if not config:
        return []
    others = {*ALGORITHMS} - {str(config.get("run", {}).get("algo"))}
    rows = [
        (f"{part}.{name}", value, sources.get(f"{part}.{name}", DEFAULT))
        for part, fields in config.items()
        if part not in others
        for name, value in fields.items()
    ]
    chosen = [row for row in rows if row[2] != DEFAULT]
    defaults = [row for row in rows if row[2] == DEFAULT]
    head = ("setting", "value", "source")
    return [_table(head, chosen), _folded(f"{len(defaults)} defaults", _table(head, defaults))]


def _machine(run: _Run) -> str:
    rows = [("machine", run.state.get("machine") or DASH)]
    rows += [(name, value or "not installed") for name, value in (run.state.get("versions") or {}).items()]
    if command := run.state.get("command"):
        rows.append(("arguments", " ".join(map(str, command[1:]))))
    return _table(("what", "value"), rows, wide=(1,))


def _events(path: Path) -> str:
    events = MetricsReader(path / "metrics.db").events(_MAX_EVENTS)
    rows = ([duration(event.t), event.level, event.source, event.text] for event in events)
    return _table(("wall time", "level", "from", "what"), rows, wide=(3,))


# --- charts ---

_WIDTH, _HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 40
_MAX = 1e100  # larger values are drawn as this one
_COLOURS = 6  # number of colours in _STYLE; they come round again


class _Trace(NamedTuple):
    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None


def _trace(name: str, lines: Sequence[Line], robust: bool) -> _Trace:
    """One run as it is, several as their centre with its interval, as ``comparison.on_grid`` compares them."""
    if len(lines) == 1:
        return _Trace(name, *lines[0], None, None)
    band = comparison.band(*comparison.on_grid(lines, _POINTS), robust)
    known = band.runs > 0
    return _Trace(name, band.x[known], band.centre[known], band.low[known], band.high[known])


def _charts(title: str, charts: Sequence[str]) -> str:
    head = f"<h3>{_text(title)}</h3>" if title else ""
    return f'{head}<div class="charts">{"".join(charts)}</div>' if charts else ""


def ticks(low: float, high: float) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from ``low`` to ``high``, at most six."""
    if not (math.isfinite(low) and math.isfinite(high) and high > low):
        return [low] if math.isfinite(low) else []
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * k for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _chart(traces: Sequence[_Trace], x_title: str, y_title: str, *, from_zero: bool = False) -> str:
    """An SVG with axes, a line and a band for each trace, and a legend below if there are several."""
    x_low, x_high = _range([trace.x for trace in traces], from_zero=True)
    bounds = [array for trace in traces for array in (trace.y, trace.low, trace.high) if array is not None]
    y_low, y_high = _range(bounds, from_zero=from_zero)
    plot = _Plot(x_low, x_high, y_low, y_high)
    marks = [_axes(plot, x_title)]
    for i, trace in enumerate(traces):
        kind = f"s{i % _COLOURS}"
        if trace.low is not None and trace.high is not None:
            both = np.isfinite(trace.low) & np.isfinite(trace.high)
            low, high = (plot.points(trace.x[both], side[both]) for side in (trace.low, trace.high))
            marks.append(f'<polygon class="band {kind}" points="{" ".join([*high, *reversed(low)])}"/>' if low else "")
        known = np.isfinite(trace.y)
        points = plot.points(trace.x[known], trace.y[known])
        if len(points) > 1:
            marks.append(f'<polyline class="{kind}" points="{" ".join(points)}"/>')
        for x, y in (point.split(",") for point in points if len(points) == 1):
            marks.append(f'<circle class="{kind}" r="3" cx="{x}" cy="{y}"/>')
    label = _text(f"{y_title} over {x_title}")
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(marks)}</svg>'
    names = (f'<span class="s{i % _COLOURS}"><i></i>{_text(trace.name)}</span>' for i, trace in enumerate(traces))
    legend = "".join(names) if len(traces) > 1 else ""
    return f"<figure><h4>{_text(y_title)}</h4>{picture}<figcaption>{legend}</figcaption></figure>"


class _Plot(NamedTuple):
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (_HEIGHT - _TOP - _BOTTOM)

    def points(self, x: np.ndarray, y: np.ndarray) -> list[str]:
        pixels = ((self.x(float(a)), self.y(float(b))) for a, b in zip(x, y, strict=True))
        return [f"{min(max(a, -9999.0), 9999.0):.1f},{min(max(b, -9999.0), 9999.0):.1f}" for a, b in pixels]


def _axes(plot: _Plot, x_title: str) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    marks = []
    for value in ticks(plot.y_low, plot.y_high):
        y = f"{plot.y(value):.1f}"
        marks.append(
            f'<line x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
            f'<text x="{_LEFT - 6}" y="{y}" dy="4" text-anchor="end">{_text(number(value))}</text>'
        )
    centred = 'text-anchor="middle"'
    marks += [
        f'<text x="{plot.x(value):.1f}" y="{bottom + 16}" {centred}>{_text(number(value))}</text>'
        for value in ticks(plot.x_low, plot.x_high)
    ]
    marks.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" {centred}>{_text(x_title)}</text>')
    return "".join(marks)


def _range(arrays: Sequence[np.ndarray], *, from_zero: bool = False) -> tuple[float, float]:
    """Smallest and largest finite value, with a small margin, so that they always differ."""
    values = np.concatenate([np.asarray(array, np.float64) for array in arrays])
    values = np.clip(values[np.isfinite(values)], -_MAX, _MAX)
    if len(values) == 0:
        return 0.0, 1.0
    low, high = (0.0 if from_zero else float(values.min())), float(values.max())
    margin = 0.04 * (high - low) or 0.5 * abs(high) or 0.5
    return (low if from_zero else low - margin), high + (0.0 if from_zero and high > low else margin)


_STYLE = """
:root{--back:#fff;--text:#1a1f26;--soft:#5c6670;--line:#d9dee3;--c0:#0072b2;--c1:#b87500;--c2:#00805e;--c3:#d55e00;
--c4:#b0568a;--c5:#2f8fc4}
@media (prefers-color-scheme:dark){:root{--back:#12161b;--text:#e6e9ec;--soft:#9aa5b0;--line:#2e363e;--c0:#56b4e9;
--c1:#e69f00;--c2:#2fc79a;--c3:#f08040;--c4:#d98fb8;--c5:#8cc8ee}}
@media print{:root{--back:#fff;--text:#000;--soft:#444;--line:#bbb;--c0:#0072b2;--c1:#b87500;--c2:#00805e;--c3:#d55e00;
--c4:#b0568a;--c5:#2f8fc4}
.charts{grid-template-columns:1fr 1fr!important}figure,tr,img{break-inside:avoid}h2,h3{break-after:avoid}
.scroll{overflow:visible!important}
details::details-content{content-visibility:visible;height:auto}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;print-color-adjust:exact}
main{max-width:1100px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:24px;margin:0;overflow-wrap:anywhere}h2{font-size:18px;margin:36px 0 10px}
h3{font-size:15px;margin:18px 0 6px}
h4{font-size:13px;font-weight:600;margin:6px 0 0}
header p,.note,dt,figcaption{color:var(--soft);margin:4px 0;font-size:13px}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:12px;margin:18px 0}
dd{margin:0;font-size:17px;overflow-wrap:anywhere}
img{max-width:min(100%,320px);border-radius:6px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:14px}
figure{margin:0}svg{width:100%;max-width:640px;height:auto;display:block;font:13px system-ui,sans-serif}
svg text{fill:var(--soft)}svg line{stroke:var(--line)}
polyline{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}circle{fill:currentColor}
.band{fill:currentColor;opacity:.2}
.s0{color:var(--c0)}.s1{color:var(--c1)}.s2{color:var(--c2)}.s3{color:var(--c3)}.s4{color:var(--c4)}.s5{color:var(--c5)}
figcaption{display:flex;flex-wrap:wrap;gap:2px 14px}figcaption i{display:inline-block;width:14px;height:3px;
background:currentColor;margin-right:5px;vertical-align:middle}
.scroll{overflow-x:auto;margin:8px 0}
table{border-collapse:collapse;font-size:13px}th,td{text-align:left;padding:4px 14px 4px 0;border-bottom:1px solid
var(--line);vertical-align:top;white-space:nowrap}th{color:var(--soft);font-weight:600}
.wide{white-space:normal;min-width:220px;overflow-wrap:anywhere}
summary{cursor:pointer;padding:6px 0}details.run{border-top:1px solid var(--line);margin-top:20px}
"""
"""Colours of Okabe and Ito (2008), darker on white and lighter on black."""
