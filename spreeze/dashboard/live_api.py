"""Data of the Live page: its charts, from the table of metrics, and its response each second, the news of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from spreeze.config.modes import DataFlow
from spreeze.dashboard import control
from spreeze.dashboard.run_data import data_flow, newest_log, newest_timeline, run_path, runs_dir, takes_turns
from spreeze.errors import RunError
from spreeze.formatting import DASH, clean, duration, number, percent, size
from spreeze.metrics.bottleneck import OTHERS_LIMIT, bottleneck
from spreeze.metrics.comparison import read_summary
from spreeze.metrics.health import judgements
from spreeze.metrics.info_means import INFO, MAX_NUMBERS
from spreeze.metrics.published_returns import published
from spreeze.metrics.recorded_episodes import kept_evaluations
from spreeze.metrics.return_curve import FINAL_EVALUATIONS, Trend, final_metric, has_risen, is_stuck, trend_of
from spreeze.metrics.snapshot import LOADS_S, OTHER_LOADS, GpuSnapshot, Snapshot, parts_of, snapshot_of
from spreeze.metrics.stop_conditions import stop_reason
from spreeze.metrics.store import EvaluationRow, Event, MetricsReader, Point, Series
from spreeze.metrics.table import GROUPS, RETURN, TABLE, Kind, Metric
from spreeze.metrics.tuning_record import better_run
from spreeze.run_directory import (
    LIVE_STATES,
    TIMELINE,
    finite_number,
    gamma_of,
    kept_policy,
    read_config,
    read_run,
    session_starts,
    state_of,
)

MAX_BUCKETS = 350  # buckets of a first response; each has mean, minimum and maximum
_TAIL_ROWS, _TAIL_S = 600, 240.0
"""Newest points that a later response may have, and time that they cover: there are two a second."""
_LOG_LINES, _EVENTS, _MARKS = 8, 12, 60  # Lines of the log, events in the list, and events that are marked in charts.
STALE_S = 3.0
_FALLEN = 0.25  # share of the best return whose loss is reported
_STUCK = (
    "The return has not risen since the run began: the policy may be stuck. Look at what it does (Watch); more "
    "exploration, another algorithm or a reward that guides it may help."
)
_NEW_S = 5.0  # age of a timeline or of marks that are sent again, until every page has them
_RESTARTING = "; restarting "  # in the warning of a worker that has ended and is started again
_MARK_TEXT = 160  # characters of a mark's sentence

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
"""Okabe and Ito (2008): distinguishable with any colour vision."""

_RETURN_OF = operator.attrgetter("return_mean")
_TREND_EVALUATIONS = 10_000  # Evaluations among which the trend looks for the last third of the time.
_SMOOTHED = ("cpu_use", *(metric.name for metric in TABLE.metrics if metric.kind is Kind.SHARE))
_SMOOTHED_S = 8.0  # over which these are means, as other programs' loads are over ``LOADS_S``
_MAX_PARTS = 8
_SPLIT = (INFO, "callback")  # metrics whose parts have a chart each


def charted_metrics() -> list[Metric]:
    """The metrics that the Live page draws, ordered by groups of charts."""
    order = (RETURN, *GROUPS)
    charted = [(order.index(metric.chart.group), metric) for metric in TABLE.metrics if metric.chart]
    return [metric for _, metric in sorted(charted, key=lambda entry: entry[0])]


def lag_unit(data_flow: DataFlow | None) -> str:
    """Unit of the policy lag: updates, or rollouts where samplers and learner wait for each other."""
    return "updates" if data_flow is None or data_flow.from_replay or data_flow.asynchronous else "rollouts"


def chart_specs(unit_of_lag: str) -> list[dict[str, Any]]:
    """The charts for the page's script, each with help text; the script defines the return chart itself."""
    charts: dict[str, dict[str, Any]] = {}
    for metric in charted_metrics():
        chart = metric.chart
        if chart is None or chart.group == RETURN:
            continue
        unit = unit_of_lag if metric.name == "policy_lag" else chart.unit or metric.unit
        part, split = metric.parts or "group", metric.name in _SPLIT
        card = chart._asdict() | {"unit": unit, "series": (), "part": part, "split": split, "help": ""}
        card = charts.setdefault(chart.key, card)
        card["series"] += metric.series
        card["help"] = f"{card['help']} {metric.sentence}".strip()
    return list(charts.values())


def series_to_plot(names: list[str]) -> list[str]:
    """Returns the ``names`` that a chart shows: at most eight parts or groups of a metric, all numbers of info."""
    plotted: list[str] = []
    for metric in charted_metrics():
        plotted += [name for name in names if name == metric.name and not metric.parts and name != "eval_return"]
        limit = MAX_NUMBERS if metric.name in _SPLIT else _MAX_PARTS
        plotted += [name for name in names if name.startswith(f"{metric.name}/")][:limit]
    return plotted


_WHEN = (
    "in the last seconds; of a run that has ended, the mean of its last session from the first update on, with "
    "pauses for the tuner."
)
_STATE = (
    f"State of the run: {', '.join(LIVE_STATES)}; finished (Stop included), stopped (while it was tuned, or in a "
    "hurry), failed; crashed or damaged."
)
_WALL = "Time that the run has taken without pauses, with earlier sessions and closing."
_BEST = (
    "Highest mean return of one evaluation. The policy to play and download is chosen by the lower "
    "confidence bound of its mean return, after additional episodes on fresh seeds."
)
_PROGRESS = (
    "Share of the stop condition that comes first, and the time until then [h:min:s]: at most, where returns may "
    "end the run earlier. Seconds of a resumed run count from its resume."
)
_TILES: tuple[tuple[str, str, str, str], ...] = (
    ("state", "State", "", _STATE),
    ("wall", "Wall time [h:min:s]", "", _WALL),
    ("env_steps", "Env steps", "", ""),
    ("updates", "Updates", "", ""),
    ("env_steps_per_s", "Sampling", "steps/s", f"Env steps of all samplers, {_WHEN}"),
    ("updates_per_s", "Learning", "updates/s", f"Gradient steps of the critics, {_WHEN}"),
    ("update_frames_per_s", "Update frames", "/s", f"Updates times batch size, {_WHEN}"),
    ("eval_return", "Return", "", ""),
    ("interval", "95 % interval", "", "Half-width of the 95 % confidence interval of the latest mean return."),
    ("best", "Best return", "", _BEST),
    ("final", "Last ten", "", "Mean return over all episodes of the last ten evaluations, or of as many as there are."),
    ("cpu_use", "Processor", "", ""),
    ("memory_used_bytes", "Memory", "", ""),
    ("restarts", "Restarts, this session", "", ""),
    ("progress", "Progress", "", _PROGRESS),
    ("since_best", "Since best", "", "Training time since the highest evaluation [h:min:s]."),
    (
        "heartbeat",
        "Heartbeat [min:s]",
        "",
        "Time since the run last wrote its state: every two seconds, at times less often while it stops.",
    ),
)
"""(metric, or a name of ``texts``; label; unit; help text, empty for a metric's own)."""
_LARGE = {"eval_return": ("interval", "best", "since_best"), "state": ("wall", "progress", "heartbeat", "restarts")}
"""Tiles that are large -> the numbers that stand below them."""


def tiles() -> tuple[dict[str, Any], ...]:
    """The tiles of the Live page, the large ones first."""
    known = {
        name: {"id": name, "label": label, "unit": unit, "help": text or TABLE.by_name(name).sentence}
        for name, label, unit, text in _TILES
    }
    below = {name for names in _LARGE.values() for name in names}
    large = [known[name] | {"more": tuple(map(known.__getitem__, names))} for name, names in _LARGE.items()]
    return (*large, *(known[name] for name in known if name not in below and name not in _LARGE))


def pipeline(parts: DataFlow | None) -> tuple[dict[str, Any], ...]:
    """The stages through which data reaches the learner, with the metrics in each; empty if unknown."""

    def item(metric: Metric) -> dict[str, str]:
        unit = lag_unit(parts) if metric.name == "policy_lag" else metric.box_unit
        return {"id": metric.name, "label": metric.box_label, "help": metric.sentence, "unit": unit}

    return tuple(
        {
            "title": clean(stage.title, 40),
            "split": stage.split,
            "items": [item(metric) for name in stage.items if (metric := TABLE.get(name)) is not None],
        }
        for stage in (parts.stages if parts else ())
    )


HEADERS = {"Cache-Control": "no-store", "Content-Encoding": "identity"}
"""No compression: on one machine it takes longer than sending, and Streamlit would compress even pictures."""


def live(request: Request) -> Response:
    """Route ``/api/live``: news of the run ``run`` since ``since``, as ``live_response`` gives them."""
    query = request.query_params
    activity = control.activity(runs_dir(), query.get("run"))
    document: dict[str, Any] = {"page": {"key": activity.key, "lines": activity.lines}}
    try:
        path = run_path(query.get("run", ""), runs_dir())
        since, seen = max(0.0, float(query.get("since", 0))), max(0, int(query.get("evals", 0)))
        document |= live_response(path, since, seen, query.get("epoch", ""), scores=query.get("scores", ""))
        text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    except (RunError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:  # of a damaged run
        text = json.dumps({"page": document["page"], "error": clean(error)})
    return Response(text, media_type="application/json", headers=HEADERS)


def live_response(path: Path, since: float, evals_seen: int, epoch: str, scores: str = "") -> dict[str, Any]:
    """Response of ``/api/live``: everything if ``since`` is 0 or the epoch has changed, else the new values.

    Args:
        path: the run directory.
        since: time of the newest value that the page has [s].
        evals_seen: number of evaluations that it has.
        epoch: session of the run that these belong to.
        scores: ``scores`` of the last response, which change with the learners' returns.
    """
    run = read_run(path)
    state = state_of(path)
    is_live = state in LIVE_STATES
    now = f"{run.get('nonce')}:{run.get('sessions')}"
    if epoch != now:
        since, evals_seen = 0.0, 0
    with MetricsReader(path / "metrics.db").connected() as reader:
        latest = reader.latest()
        newest = max((point.t for point in latest.values()), default=0.0)
        # A page that was away for long gets all: the newest points alone would leave a gap.
        gap = newest - since > _TAIL_S
        series, whole, scored = _series(reader, latest, 0.0 if gap else since, scores)
        count, last = reader.last_evaluation()
        best = reader.best_evaluation()
        evaluations = _evaluations(reader, evals_seen, count)
        events = reader.events(_MARKS)
        loads = _loads(reader, newest, max(session_starts(run), default=0.0), live=is_live)
    recent = {name: point.value for name, point in latest.items() if point.t > newest - STALE_S}
    fresh = _fresh(path, run, state, recent, loads)
    curve = _latest_returns(path, str(run.get("nonce")), count)
    config, parts = read_config(path), data_flow(run)
    left: dict[str, Any] = {name: run.get(name) for name in ("progress", "eta_s")}
    shown = snapshot_of(run, config, fresh, parts, state=state, **left)
    if best is not None and last is not None and 2 * last.episodes >= best.episodes:  # run.json follows by seconds
        known = best.return_mean if shown.eval_best is None else shown.eval_best
        shown = dataclasses.replace(shown, eval_best=max(last.return_mean, known))
    alert = _alert(run, events, live=is_live)
    fallen = _fallen(best, last) if curve.risen else ""
    return {
        "epoch": now,
        "state": state,
        "next": newest,
        "series": series,
        "whole": whole,
        "scores": scored,
        "evals_next": count,
        "text": {
            **texts(shown, fresh, run, last, path, config.get("evaluation", {}).get("episodes")),
            "progress": DASH if not is_live or state == "stopping" else shown.time_left or DASH,
            "final": number(curve.final) + (f" (n={count})" if 0 < count < FINAL_EVALUATIONS else ""),
            "since_best": DASH if best is None or shown.wall_s is None else duration(max(0.0, shown.wall_s - best.t)),
            "trend": _trend(curve, run, config.get("stop", {}), state, best),
            "no_picture": _no_picture(path, config, state, rendered=not takes_turns(run, config)),
        },
        "evals": evaluations,
        "shares": {
            role: [[part, round(fraction, 4)] for part, fraction in split.items() if fraction >= 0.0]
            for role, split in (("sampler", shown.sampler_shares), ("learner", shown.learner_shares))
        },
        "cores": [round(use, 3) for use in shown.core_uses],
        "gpus": [_gpu(gpu, shown) for gpu in shown.gpus],
        "log": newest_log(path, _LOG_LINES),
        "live": is_live,
        "health": _health(run, latest, gamma_of(run, config)),
        **_note(path, run, shown, "" if alert is None else alert[-1], fallen if latest else None),
        "timeline": _new_timeline(path, since),
        "marks": _marks(run, events, best, since),
        "processes": _processes(fresh),
        "hosts": _hosts(fresh),
        "learners": _learners(fresh, latest),
        "events": [_event_row(event) for event in events[-_EVENTS:]],
        "alert": alert,
    }


def _series(
    reader: MetricsReader, latest: Mapping[str, Point], since: float, scores: str
) -> tuple[dict[str, dict[str, list[Any]]], list[str], str]:
    """The lines of the charts, the names of those that are whole, and the current ``scores``."""
    names = series_to_plot(list(latest))
    # These carry the time of their weights, which is before the newest time that a page has.
    late = [name for name in names if TABLE.by_name(name).is_evaluated]
    scored = ",".join(f"{latest[name].t}:{latest[name].value}" for name in late)
    whole, series = names, dict[str, dict[str, list[Any]]]()
    if since > 0.0:
        whole, others = late if scored != scores else [], [name for name in names if name not in late]
        newer = [name for name in others if latest[name].t > since]
        for name, points in reader.tail(newer, since, _TAIL_ROWS).items():
            t, step, value = zip(*points, strict=True)
            series[name] = {"t": [round(x, 3) for x in t], "s": list(step), "y": _rounded(value)}
    series |= {name: _thinned(reader.series(name, 0.0, MAX_BUCKETS), latest[name]) for name in whole}
    return series, whole, scored


def _fresh(
    path: Path, run: Mapping[str, Any], state: str, recent: Mapping[str, float], loads: Mapping[str, float]
) -> dict[str, float]:
    """The ``recent`` values that hold now, with ``loads``; of a run that has ended, rates and shares over all of it."""
    fresh = dict(recent)
    if state not in LIVE_STATES:
        fresh |= {**_whole_run(path), **loads}
    else:
        fresh |= {name: value for name, value in loads.items() if name not in _SMOOTHED or name in fresh}
    if state == "paused":
        lasting = {metric.name for metric in TABLE.metrics if metric.kind not in (Kind.RATE, Kind.SHARE)}
        lasting -= {name for name in lasting if name.endswith("_use")}
        fresh = {name: value for name, value in fresh.items() if name.partition("/")[0] in lasting}
    return {name: float(run[name]) for name in ("env_steps", "updates") if run.get(name) is not None} | fresh


def _loads(reader: MetricsReader, newest: float, session_start_s: float, *, live: bool) -> dict[str, float]:
    """Means of other programs' load and of the time splits in the last seconds; of an ended run over its session.

    Splits of a live run count from its first update in these seconds on: before, the learner waits for replay to fill.
    """
    if live:
        splits = reader.tail(("updates_per_s", *_SMOOTHED), newest - _SMOOTHED_S)
        updates = splits.pop("updates_per_s", [])
        learns_s = next((point.t for point in updates if point.value > 0.0), 0.0)
        if updates and updates[0].value == 0.0:
            splits = {name: [point for point in points if point.t > learns_s] for name, points in splits.items()}
        tails = reader.tail(OTHER_LOADS, newest - LOADS_S) | splits
        return {name: math.fsum(point.value for point in known) / len(known) for name, known in tails.items() if known}
    names = (*OTHER_LOADS, "cpu_use", "samplers_active")
    session = {name: reader.series(name, session_start_s, MAX_BUCKETS).mean for name in names}
    return {name: float(means.mean()) for name, means in session.items() if len(means)}


def _event_row(event: Event) -> list[str]:
    return [duration(event.t), event.level, event.source, event.text]


def _alert(run: Mapping[str, Any], events: Sequence[Event], *, live: bool) -> list[str] | None:
    """The newest warning or error of this session that still applies; a completed restart does not."""
    session_start_s = max(session_starts(run), default=0.0)
    back = set[str]()
    for event in reversed(events):
        name, _, rest = event.text.partition(" ")
        if event.level == "info":
            back |= {name} if rest.startswith("is back") else set()
        elif event.t >= session_start_s and name not in back and (live or _RESTARTING not in rest):
            return _event_row(event)
    return None


def _health(run: Mapping[str, Any], latest: Mapping[str, Point], gamma: float | None) -> list[list[str]]:
    judged = judgements({name: point.value for name, point in latest.items()}, run.get("env_id"), gamma)
    charts = [TABLE.by_name(judgement.metric).chart for judgement in judged]
    return [[*judgement[:4], chart.key if chart else ""] for judgement, chart in zip(judged, charts, strict=True)]


def _marks(
    run: Mapping[str, Any], events: Sequence[Event], best: EvaluationRow | None, since: float
) -> list[list[Any]] | None:
    """[time, level, sentence] of what every chart marks: resumes, events, the best evaluation; None without news."""
    starts = enumerate(session_starts(run)[1:], 2)
    marks: list[list[Any]] = [[t, "session", f"session {count} begins"] for count, t in starts]
    marks += [[event.t, event.level, f"{event.source}: {event.text}"[:_MARK_TEXT]] for event in events]
    if best is not None:
        marks.append([best.t, "best", f"best evaluation: {number(best.return_mean)}"])
    newest = max((mark[0] for mark in marks), default=0.0)
    return sorted(marks) if since <= 0.0 or newest > since - _NEW_S else None


def _new_timeline(path: Path, since: float) -> dict[str, Any] | None:
    """The newest timeline for a page that has none, or if it is new."""
    try:
        age_s = time.time() - (path / TIMELINE).stat().st_mtime
    except OSError:
        return None
    return newest_timeline(path) if since <= 0.0 or abs(age_s) < _NEW_S else None


def texts(
    shown: Snapshot,
    values: Mapping[str, float],
    run: Mapping[str, Any],
    last: EvaluationRow | None,
    path: Path,
    episodes: object = None,
) -> dict[str, str]:
    """Every number outside of the charts as text, metrics by their names; unknown ones are a dash.

    ``episodes`` is the number that an evaluation plays unless it is cut short.
    """
    parts = data_flow(run)
    names = [tile[0] for tile in _TILES] + [name for stage in (parts.stages if parts else ()) for name in stage.items]
    interval = None if last is None else last.half_width
    is_cut = last is not None and isinstance(episodes, int) and last.episodes < episodes
    of = f"; {last.episodes} of {episodes} episodes" if last is not None and is_cut else ""
    drawn_s: float | None = None
    with contextlib.suppress(OSError):
        drawn_s = (path / "live.jpg").stat().st_mtime
    return {
        **{
            name: {"share": percent, "B": size}.get(metric.unit, number)(values.get(name))
            for name in names
            if (metric := TABLE.get(name)) is not None
        },
        "state": shown.state,
        "wall": duration(shown.wall_s),
        "eval_return": DASH if last is None else number(last.return_mean),
        "interval": (DASH if interval is None else f"\u00b1 {number(interval)}") + of,
        "best": number(shown.eval_best),
        "samplers_active": _samplers(shown),
        "picture": f"picture {_age(drawn_s)} old [h:min:s]; drawn while somebody looks, late on busy cores"
        if shown.state in LIVE_STATES
        else "last picture of the run",
        "heartbeat": _age(run.get("heartbeat")) if shown.state in LIVE_STATES else DASH,
    }


def _no_picture(path: Path, config: Mapping[str, Any], state: str, *, rendered: bool) -> str:
    if not rendered:
        text = "This mode draws no picture during training."
    elif config.get("visualizer", {}).get("enabled") is False:
        text = "The visualizer is disabled (visualizer.enabled)."
    elif state not in LIVE_STATES:
        text = "No picture: the run ended before the first one."
    else:
        text = "No picture now: the newest policy is drawn while somebody looks, after some seconds on busy cores."
    has_episodes = not (path / "live.jpg").is_file() and kept_evaluations(path)
    return text + (" A click on the return shows recorded episodes." if has_episodes else "")


def _trend(
    curve: _Curve, run: Mapping[str, Any], stop: Mapping[str, Any], state: str, best: EvaluationRow | None
) -> str:
    """The slope of the latest returns, and while the run lives when they reach its target."""
    if curve.trend is None:
        return ""
    reference = published(run.get("env_id"))
    target = finite_number(stop.get("target_return"))
    if target is None and reference is not None:
        target = reference.value
    reached = -math.inf if best is None else best.return_mean
    text = f"{curve.trend.sentence(target if state in LIVE_STATES else None, reached)}."
    return f"{text} {_STUCK}" if curve.stuck and (target is None or reached < target) else text


class _Curve(NamedTuple):
    """A summary of the latest evaluations of a run."""

    trend: Trend | None
    final: float | None  # mean of the last ten
    risen: bool  # True if some in a row are clearly above the first
    stuck: bool  # True if they have not risen for minutes


@lru_cache(16)
def _latest_returns(path: Path, nonce: str, count: int) -> _Curve:
    """A summary after ``count`` evaluations of a run."""
    with MetricsReader(path / "metrics.db").connected() as reader:
        latest = reader.evaluations(max(0, count - _TREND_EVALUATIONS))
    trend = trend_of(latest)
    return _Curve(trend, final_metric(latest), risen=has_risen(latest), stuck=is_stuck(latest, trend))


def _samplers(shown: Snapshot) -> str:
    """Active samplers of all, in words; a fraction is one that the governor pauses part of the time."""
    working, wanted = shown.samplers_active if shown.samplers_paused else shown.samplers_alive, shown.samplers_wanted
    if working is not None and shown.samplers_paused and wanted == 1:
        return f"{percent(working)} of 1"
    if working is None or wanted is None:
        return number(working)
    return f"{number(min(working, wanted))} of {number(wanted)}"  # one that was just replaced still has a rate


def _whole_run(path: Path) -> dict[str, float]:
    """Rates and time split over a whole run that has ended, whose last second says little."""
    summary = read_summary(path)
    split = summary.get("time_split")
    values = {name: summary.get(name) for name in ("env_steps_per_s", "updates_per_s", "update_frames_per_s")}
    values |= split if isinstance(split, dict) else {}
    return {name: value for name, stored in values.items() if (value := finite_number(stored)) is not None}


def _note(path: Path, run: Mapping[str, Any], shown: Snapshot, alert: str, fallen: str | None) -> dict[str, Any]:
    """The sentences below the tiles, and whether they are about a problem.

    ``fallen``: a sentence on a fall of the return, or empty; None while there are no numbers of the run.
    """
    state, live = shown.state, shown.state in LIVE_STATES
    problem = state in ("failed", "crashed", "damaged")
    worker = alert.partition(" ")[0] if _RESTARTING in alert else ""  # not back yet, so rates show no bottleneck
    if state == "stopping":
        return {"note": "Stopping: the last evaluation and a checkpoint follow.", "problem": False}
    if fallen is None:
        text = f"The run ended before there were numbers: {clean(run.get('exit_reason') or 'see the Logs page', 600)}."
        if live:
            text = "No numbers yet: they appear 0.5 s after the samplers start."
        return {"note": text, "problem": problem}
    if state == "paused":
        text = "Paused: the processes are suspended and their cores are free; wall time and time left stand still."
        return {"note": text, "problem": False}
    if worker.startswith("learner"):
        return {"note": "The learner restarts: there are no updates until it is back.", "problem": True}
    if worker.startswith("sampler"):
        return {"note": f"{worker} restarts: fewer env steps are collected until it is back.", "problem": True}
    text = bottleneck(shown)
    problem = problem or shown.unevaluated or text.startswith(OTHERS_LIMIT)
    if not live:
        summary = read_summary(path)
        over = "Over its last session: " if (run.get("sessions") or 1) > 1 else "Over the whole run: "
        over = over if summary else "In its last seconds: "  # a run that was killed has none
        measured = shown.unevaluated or not shown.tuner_measures
        why = _why_ended(run.get("exit_reason"), summary.get("error"), kept_policy(path))
        text = f"{why} {over if measured else ''}{text}"
    if (won := better_run(path)) is not None:
        text = f"Run {won} won the comparison of algorithms on this task and went on. {text}"
    return {"note": text + fallen, "problem": problem}


def _why_ended(reason: str | None, error: object, kept: str) -> str:
    if error:
        return f"Ended by a failure: {clean(error, 600)} Next: read its errors (Logs)."
    if reason is None:
        return "No reason was recorded for its end."
    known = stop_reason(reason)
    why = known.sentence if known else clean(reason, 600)
    more = "see its episodes (a click on the return), train more seeds (Start form, Seeds and values), compare them"
    return f"Ended: {why}. {f'Kept: the policy of {kept}. ' if kept else ''}Next: {more}."


def _fallen(best: EvaluationRow | None, last: EvaluationRow | None) -> str:
    """A sentence where the newest policy is clearly worse than the best one was, by the intervals of both."""
    if best is None or last is None:
        return ""
    margin = math.hypot(best.half_width or 0.0, last.half_width or 0.0)
    if best.return_mean - last.return_mean <= max(2.0 * margin, _FALLEN * abs(best.return_mean)):
        return ""
    return (
        f" The latest evaluation, {number(last.return_mean)}, is below the best, {number(best.return_mean)}. "
        "The better policy is kept for play and download."
    )


def _processes(values: Mapping[str, float]) -> list[list[Any]]:
    uses = {name.partition("/")[2]: use for name, use in values.items() if name.startswith("process_cpu_use/")}
    return [
        [clean(name, 40), round(use, 3), size(values.get(f"process_memory_bytes/{name}"))]
        for name, use in sorted(uses.items())
    ]


def _hosts(values: Mapping[str, float]) -> list[list[str]]:
    """Name, env steps a second, policy lag, chunks, chunks lost, and clock difference of each other host."""
    rows = []
    for host, rate in parts_of(values, "host_env_steps_per_s").items():
        counts = (number(values.get(f"{name}/{host}")) for name in ("host_lag", "host_chunks", "host_chunks_lost"))
        clock_s = values.get(f"host_clock_difference_s/{host}")
        clock = DASH if clock_s is None else f"{1e3 * clock_s:+.0f} ms"
        rows.append([f"host {host}", f"{number(rate)}/s", *counts, clock])
    return rows


def _learners(values: Mapping[str, float], latest: Mapping[str, Point]) -> list[list[str]]:
    """Name, rates, newest return and staleness of each of several learners; nothing of one alone."""
    groups = parts_of({name: point.value for name, point in latest.items()}, "updates_per_s")
    if len(groups) < 2:
        return []
    known = {**values, **{name: point.value for name, point in latest.items() if name.startswith("eval_return/")}}
    metrics = [metric for metric in TABLE.metrics if metric.per_learner and not metric.parts]
    columns = []
    for metric in metrics:
        if f"{metric.name}/0" in latest:
            unit = metric.box_unit if metric.box_unit in ("", "/s") else f" [{metric.box_unit}]"
            columns.append(
                [metric.box_label + unit, *(number(known.get(f"{metric.name}/{group}")) for group in groups)]
            )
    return [list(row) for row in zip(["", *(f"learner {group}" for group in groups)], *columns, strict=True)]


def _gpu(gpu: GpuSnapshot, shown: Snapshot) -> str:
    """One line on a GPU, and the learner's own share of busy time where it computes there."""
    waits = shown.learner_shares.get("wait")
    busy = percent(None if waits is None else 1.0 - waits)
    learner = f", learner busy {busy}" if gpu in shown.learner_gpus else ""
    return f"GPU {gpu.index}: kernels run {percent(gpu.use)} of the time{learner}, {gpu.figures}"


def _evaluations(reader: MetricsReader, seen: int, count: int) -> dict[str, list[float | int | None]]:
    """Evaluations not yet sent with their 95 % intervals; of too many the best and worst of each bucket."""
    chosen = reader.evaluations(seen) if count > seen else []
    if len(chosen) > 2 * MAX_BUCKETS:
        width = math.ceil(len(chosen) / MAX_BUCKETS)
        parts = [sorted(chosen[at : at + width], key=_RETURN_OF) for at in range(0, len(chosen), width)]
        chosen = sorted({record for part in parts for record in (part[0], part[-1])})

    def bounds(sign: int) -> list[float | int | None]:
        halves = [(record.return_mean, record.half_width) for record in chosen]
        return [None if half is None else _finite(mean + sign * half) for mean, half in halves]

    return {
        "t": [round(record.t, 3) for record in chosen],
        "s": [record.env_steps for record in chosen],
        "u": [record.updates for record in chosen],
        "y": [_finite(record.return_mean) for record in chosen],
        "lo": bounds(-1),
        "hi": bounds(1),
    }


def _thinned(series: Series, newest: Point) -> dict[str, list[Any]]:
    """Columns of a bucketed series: means, minimum and maximum if these differ, and then the newest value."""
    columns: dict[str, list[Any]] = {
        "t": [round(t, 2) for t in series.t.tolist()],
        "s": [int(step) for step in series.step.tolist()],
        "y": _rounded(series.mean.tolist()),
    }
    if (series.low == series.high).all():
        return columns
    last = {"t": round(newest.t, 2), "s": newest.step, "y": _rounded([newest.value])[0]}
    columns |= {"lo": _rounded(series.low.tolist()), "hi": _rounded(series.high.tolist())}
    return {name: [*values, last.get(name, last["y"])] for name, values in columns.items()}


def _rounded(values: Iterable[float]) -> list[float]:
    """Rounds to six digits, which halves the length of the response."""
    return [float(f"{value:.6g}") for value in values]


def _age(moment: float | None) -> str:
    return DASH if moment is None else duration(max(0.0, time.time() - moment))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
