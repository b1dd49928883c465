"""The live answer: what changed in a run since the page asked last, and the newest numbers as text."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.config.compatibility import ON_POLICY
from spreeze.config.modes import wiring_of
from spreeze.dashboard import charts
from spreeze.dashboard.run_data import LIVE_STATES, newest_log, read_json
from spreeze.formatting import DASH, clean, duration, number, percent, size
from spreeze.metrics.bottleneck import bottleneck
from spreeze.metrics.snapshot import GpuSnapshot, Snapshot, measured, parts_of
from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.store_reader import MetricsReader, Point, Series
from spreeze.metrics.table import TABLE, MetricTable
from spreeze.run_directory import read_config, read_run, state_of

MAX_BUCKETS = 350
"""Buckets of a first answer: mean, lowest and highest each."""
_TAIL_ROWS = 600
_LOG_LINES = 8
STALE_S = 3.0


def answer(
    path: Path, since: float, evals_seen: int, epoch: str, table: MetricTable = TABLE
) -> dict[str, Any]:
    """What ``/api/live`` sends: everything when ``since`` is 0 or the epoch is another one, else the news.

    Args:
        path: the run.
        since: time of the newest value that the page has [s].
        evals_seen: evaluations that it has.
        epoch: session of the run that these are of.
        table: says what is drawn.

    Raises:
        RunError: the metrics are damaged or take too long to read.
    """
    run = read_run(path)
    state = state_of(path)
    now = f"{run.get('nonce')}:{run.get('sessions')}"
    if epoch != now:
        since, evals_seen = 0.0, 0
    with MetricsReader(path / "metrics.db").held() as reader:
        latest = reader.latest()
        newest = max((point.t for point in latest.values()), default=0.0)
        wanted = charts.wanted(list(latest), table)
        if since > 0.0:
            tail = reader.tail(wanted, since, _TAIL_ROWS) if newest > since else {}
            series = {name: _columns(points) for name, points in tail.items()}
        else:
            series = {name: _thinned(reader.series(name, 0.0, MAX_BUCKETS), latest[name]) for name in wanted}
        count, last = reader.last_evaluation()
        news = _news(reader, evals_seen, count)
        events = reader.events(12)
    fresh = {name: point.value for name, point in latest.items() if point.t > newest - STALE_S}
    if state not in LIVE_STATES:
        fresh.update(_whole_run(path))
    shown = snapshot(run, read_config(path), fresh, state, table)
    return {
        "epoch": now, "state": state, "next": newest, "series": series, "evals_next": count,
        "text": {**texts(shown, run, last, path), "restarts": number(fresh.get("restarts"))},
        "evals": _evaluations(news), "shares": _shares(shown),
        "cores": [round(use, 3) for use in shown.core_uses], "gpus": [_gpu(gpu) for gpu in shown.gpus],
        "log": newest_log(path, _LOG_LINES), "note": _note(shown, state, latest), "live": state in LIVE_STATES,
        "events": [[duration(event.t), event.level, event.source, event.text] for event in events],
    }


def snapshot(
    run: Mapping[str, Any], config: Mapping[str, Mapping[str, Any]], values: Mapping[str, float], state: str,
    table: MetricTable = TABLE,
) -> Snapshot:
    """The newest numbers in the form that the bottleneck sentence reads."""
    replay, learner = config.get("replay", {}), config.get("learner", {})
    active = [rate for rate in parts_of(values, "sampler_env_steps_per_s").values() if rate > 0.0]
    device = str(learner.get("device", ""))
    wiring = wiring_of(run, on_policy=run.get("algo") in ON_POLICY)
    lag = wiring.lag if wiring else None
    if lag is not None:
        replay, wanted = {}, config.get("rollout", {}).get("executors")
    else:
        wanted = config.get("sampling", {}).get("samplers")
    counts = {name: values.get(name, run.get(name)) for name in ("env_steps", "updates")}
    # The metrics tell how the learner works; an old run's configuration may not.
    known = measured({**values, **counts}, on_policy=bool(values.get("learner_learn_share")), table=table)
    return Snapshot(
        lag=lag, env_id=clean(run.get("env_id"), 80), algo=clean(run.get("algo"), 20), state=state,
        wall_s=run.get("wall_s"), learning_starts=replay.get("learning_starts"),
        samples_per_insert_min=replay.get("samples_per_insert_min"),
        samples_per_insert_max=replay.get("samples_per_insert_max"), samplers_wanted=wanted,
        eval_best=run.get("eval_best"),
        learner_device=device if device != "auto" else ("cuda:0" if known["gpus"] else "cpu"),
        samplers_alive=len(active) or None, **known,
    )


def texts(shown: Snapshot, run: Mapping[str, Any], last: EvaluationRow | None, path: Path) -> dict[str, str]:
    """Every number outside of the charts, as text; unknown is a dash."""
    interval = None if last is None else half_width(last)
    return {
        "state": shown.state, "wall": duration(shown.wall_s), "env_steps": number(shown.env_steps),
        "updates": number(shown.updates), "env_rate": number(shown.env_steps_per_s),
        "update_rate": number(shown.updates_per_s), "frame_rate": number(shown.update_frames_per_s),
        "return": DASH if last is None else number(last.return_mean),
        "interval": DASH if interval is None else f"\u00b1 {number(interval)}",
        "best": number(shown.eval_best), "ratio": number(shown.samples_per_insert), "fill": percent(shown.replay_fill),
        "lag": number(shown.policy_lag), "age": number(shown.transition_age), "cpu": percent(shown.cpu_use),
        "memory": size(shown.memory_used_bytes),
        "samplers": _samplers(shown), "picture": _picture_age(path),
        "heartbeat": _age(run.get("heartbeat")) if shown.state in LIVE_STATES else DASH,
    }


def _samplers(shown: Snapshot) -> str:
    """How many step now, of those the run was given; a fraction is one that the governor lets rest at times."""
    working = shown.samplers_active if shown.samplers_rest else shown.samplers_alive
    return DASH if working is None else f"{number(working)} of {number(shown.samplers_wanted)}"


def _whole_run(path: Path) -> dict[str, float]:
    """Rates and time split over a run that has ended: its last second says little."""
    document = read_json(path / "summary.json")
    split = document.get("time_split")
    found = {name: document.get(name) for name in ("env_steps_per_s", "updates_per_s", "update_frames_per_s")}
    found |= split if isinstance(split, dict) else {}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def half_width(record: EvaluationRow) -> float | None:
    """Half of the 95 % interval of the mean return (normal approximation); None for one episode."""
    return 1.96 * record.return_std / math.sqrt(record.episodes) if record.episodes > 1 else None


def _note(shown: Snapshot, state: str, latest: Mapping[str, Any]) -> str:
    if not latest:
        return "No numbers yet: they appear half a second after the samplers start."
    sentence = bottleneck(shown).sentence
    return sentence if state in LIVE_STATES else f"When it ended: {sentence}"


def _gpu(gpu: GpuSnapshot) -> str:
    """One line on a GPU: the share of time with any kernel says little without the power."""
    power = DASH if gpu.power_w is None else f"{gpu.power_w:.0f} W"
    return f"GPU {gpu.index}: busy {percent(gpu.use)}, {power}, {size(gpu.memory_used_bytes)} of its memory in use"


def _news(reader: MetricsReader, seen: int, count: int) -> list[EvaluationRow]:
    """Evaluations not yet sent; of very many the best and worst of each of 350 parts."""
    if count - seen > 2 * MAX_BUCKETS:
        return reader.extreme_evaluations(seen, count, MAX_BUCKETS)
    return reader.evaluations(seen) if count > seen else []


def _evaluations(chosen: list[EvaluationRow]) -> dict[str, list[float | int | None]]:
    """Columns of evaluations."""
    bounds = [_interval(record) for record in chosen]
    return {
        "t": [round(record.t, 3) for record in chosen], "s": [record.env_steps for record in chosen],
        "u": [record.updates for record in chosen], "y": [_finite(record.return_mean) for record in chosen],
        "lo": [low for low, _ in bounds], "hi": [high for _, high in bounds],
    }


def _interval(record: EvaluationRow) -> tuple[float | None, float | None]:
    """Ends of the 95 % interval; one episode has none."""
    half = half_width(record)
    if half is None:
        return None, None
    return _finite(record.return_mean - half), _finite(record.return_mean + half)


def _thinned(series: Series, newest: Point) -> dict[str, list[Any]]:
    """Columns of a bucketed series: its means, with the extremes where a bucket has several values.

    The newest value itself comes last: a page shows it as what is true now.
    """
    columns: dict[str, list[Any]] = {
        "t": [round(t, 2) for t in series.t.tolist()], "s": [int(step) for step in series.step.tolist()],
        "y": _rounded(series.mean),
    }
    if (series.low == series.high).all():
        return columns
    last = {"t": round(newest.t, 2), "s": newest.step, "y": _rounded([newest.value])[0]}
    columns |= {"lo": _rounded(series.low), "hi": _rounded(series.high)}
    return {name: [*values, last.get(name, last["y"])] for name, values in columns.items()}


def _rounded(values: Sequence[float] | np.ndarray) -> list[float]:
    """Six digits: more cannot be seen, and the answer is half as long."""
    array = np.asarray(values, np.float64)
    magnitudes = np.abs(array)
    digits = 5.0 - np.floor(np.log10(magnitudes, out=np.zeros_like(array), where=magnitudes > 0.0))
    up, down = 10.0 ** np.clip(digits, 0.0, 300.0), 10.0 ** np.clip(-digits, 0.0, 300.0)
    return list((np.rint(array * up / down) / up * down).tolist())


def _columns(points: Sequence[Point]) -> dict[str, list[float]]:
    t, step, value = zip(*points, strict=True)
    return {"t": [round(x, 3) for x in t], "s": list(step), "y": _rounded(value)}


def _shares(shown: Snapshot) -> dict[str, list[list[Any]]]:
    splits = {"sampler": shown.sampler_shares, "learner": shown.learner_shares}
    return {
        role: [[part, round(share, 4)] for part, share in split.items() if share >= 0.0]
        for role, split in splits.items()
    }


def _picture_age(path: Path) -> str:
    try:
        return _age((path / "live.jpg").stat().st_mtime)
    except OSError:
        return DASH


def _age(moment: Any) -> str:
    return duration(max(0.0, time.time() - moment)) if isinstance(moment, int | float) else DASH


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
