"""Data of the episode player: which evaluations have recorded episodes, the numbers of one, and its pictures."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spreeze.dashboard import control
from spreeze.dashboard.live_api import HEADERS
from spreeze.dashboard.run_data import SAMPLE, run_path, runs_dir
from spreeze.errors import RunError
from spreeze.formatting import clean
from spreeze.metrics.health import return_change
from spreeze.metrics.recorded_episodes import (
    KINDS,
    EvaluationKey,
    RecordedEpisode,
    Recording,
    frames_path,
    is_term,
    kept_evaluations,
    marks_of,
    names_of,
    read_frames,
    read_recording,
    returns_to_go,
    step_numbers,
)
from spreeze.run_directory import LIVE_STATES, finite_number, gamma_of, is_alive, read_config, read_run, state_of

_MAX_FRAME_BYTES = 1_000_000  # Bytes of pictures in one response.
_DRAWERS = 2  # Processes that draw at a time; a further one ends the oldest.
_MAX_COLUMNS, _MAX_NUMBERS, _BINS, _MAX_BINS = 100, 2000, 30, 40
"""Evaluations of a histogram over time, numbers of each, bins, and those of whole numbers."""
_COLUMNS = 8  # Lines of one strip.
_OF_STEPS = "Of the env steps in the best, median and worst episode of each evaluation that is kept; line: median."
_NO_TERMS = "its terms are unknown: the task reports none in info"
_NO_VALUES = (
    "no values: these networks take images, a memory, or what else an episode does not keep, or were not published yet"
)
_SPREAD = {
    "value": ("Values", "return", "Values by the critic, Q or V."),
    "action": ("Actions", "ratio", "Numbers of actions, bounds scaled to -1 .. 1, or else numbers of options."),
    "advantage": ("Advantages", "return", "The actual discounted return, less the critic's value."),
}
_GROUP: dict[str, Any] = {"group": "Distributions", "series": ()}
HISTOGRAMS = tuple(
    {"key": f"steps_{name}", "title": title, "unit": unit, "help": f"{text} {_OF_STEPS}", **_GROUP}
    for name, (title, unit, text) in _SPREAD.items()
)
"""Charts of the Live page that ``histograms`` fills."""
_COMMAND = (sys.executable, "-m", "spreeze.workers.episodes.episode_redraw")
_drawing: dict[Path, subprocess.Popen[bytes]] = {}
_spare: list[subprocess.Popen[bytes]] = []
"""A process that has loaded what drawing needs, started when the pointer is on a curve; at most one."""
_lock = threading.Lock()


def routes(base: str) -> list[Route]:
    return [
        Route(f"{base}/api/episodes", _json_route(evaluations)),
        Route(f"{base}/api/episode", _json_route(episode)),
        Route(f"{base}/api/episode/frames", frames),
        Route(f"{base}/api/episode/histograms", _json_route(histograms)),
        Route(f"{base}/api/episode/draw", _json_route(draw), methods=["POST"]),
        Route(f"{base}/api/episode/warm", _json_route(warm), methods=["POST"]),
    ]


def _json_route(work: Callable[[Request], dict[str, Any]]) -> Callable[[Request], Response]:
    """A route that responds with a JSON document, or with ``error`` if something is missing or damaged."""

    def respond(request: Request) -> Response:
        try:
            text = json.dumps(work(request), separators=(",", ":"), allow_nan=False)
        except (RunError, ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError) as error:
            text = json.dumps({"error": clean(error)})
        return Response(text, media_type="application/json", headers=HEADERS)

    return respond


def _requested_episode(request: Request) -> tuple[Path, EvaluationKey, str]:
    """Run directory, evaluation and kind of episode that a request names; a RunError if it names none."""
    query = request.query_params
    kind = query.get("kind", KINDS[0])
    path, key = run_path(query.get("run", ""), runs_dir()), EvaluationKey.parse(query.get("evaluation", ""))
    frames_path(path, key, kind)
    return path, key, kind


def evaluations(request: Request) -> dict[str, Any]:
    """Evaluations of the run ``run`` with recorded episodes, as columns in the order of time."""
    path = run_path(request.query_params.get("run", ""), runs_dir())
    keys = kept_evaluations(path)
    return {
        "id": [key.id for key in keys],
        "t": [key.wall_s for key in keys],
        "s": [key.env_steps for key in keys],
        "u": [key.updates for key in keys],
        "group": [key.group for key in keys],
        "why": "" if keys else _why_none(path),
    }


def _why_none(path: Path) -> str:
    config = read_config(path).get("evaluation", {})
    if config.get("enabled") is False:
        return "This run does not evaluate its policy (evaluation.enabled = false), so there are no episodes."
    if config.get("keep_episodes", 0) == 0:
        return "This run keeps no episodes: start one with evaluation.keep_episodes above 0."
    if path == SAMPLE:
        return "The recorded run comes without its episodes; runs of your own keep them."
    if state_of(path) not in LIVE_STATES:
        return "This run has ended without a kept episode: they come with evaluations."
    return "No episodes yet: the first ones come with the first evaluation."


def episode(request: Request) -> dict[str, Any]:
    """The numbers of one recorded episode, in strips of lines, with sentences on it."""
    path, key, kind = _requested_episode(request)
    recording = read_recording(path, key)
    chosen, facts = recording.of_kind(kind), recording.facts
    run, config = read_run(path), read_config(path)
    gamma, is_soft = gamma_of(run, config), "initial_alpha" in config.get(str(run.get("algo")), {})
    return {
        "id": key.id,
        **key._asdict(),
        "played": finite_number(facts.get("played")),
        "return_mean": finite_number(facts.get("return_mean")),
        "kind": kind,
        "kinds": [
            {"kind": name, "return": _finite(one.episode_return), "length": one.length}
            for name in KINDS
            for one in recording.episodes
            if name in one.kinds
        ],
        "seed": chosen.seed,
        "length": chosen.length,
        "fps": finite_number(facts.get("fps"), 1e4, 1e-2) or 30.0,
        "marks": [
            {"text": clean(mark.text, 300), "step": mark.step} for mark in marks_of(chosen, facts, gamma, is_soft)
        ],
        "strips": _strips(chosen, facts, gamma),
        "change": _change(path, recording),
        "note": clean(facts.get("note") or "", 300),
        "drawable": facts.get("repeats") is not False,
        "frames": chosen.kinds[0],
        "drawn": frames_path(path, key, chosen.kinds[0]).is_file(),
    }


def _change(path: Path, recording: Recording) -> dict[str, Any] | None:
    with contextlib.suppress(RunError):
        if change := return_change(path, recording):
            return {"title": clean(change.title, 300), "sentences": [clean(text, 300) for text in change.sentences]}
    return None


def histograms(request: Request) -> dict[str, Any]:
    """Distributions of the numbers of kept episodes, by evaluation: ``HISTOGRAMS`` as columns by their keys.

    ``shares`` [evaluation][bin] begin at ``low``, in bins of ``step``; values beyond are in the outermost bins.
    """
    path = run_path(request.query_params.get("run", ""), runs_dir())
    keys, gamma = kept_evaluations(path), gamma_of(read_run(path), read_config(path))
    indices = np.linspace(0, max(len(keys) - 1, 0), min(len(keys), _MAX_COLUMNS)).round().astype(int)
    keys = [keys[index] for index in indices]
    known = [(key.wall_s, _step_values(path, key, gamma)) for key in keys]
    columns = {name: [(t, values[name]) for t, values in known if len(values.get(name, ()))] for name in _SPREAD}
    return {f"steps_{name}": _histogram(column) for name, column in columns.items() if column}


@lru_cache(1024)
def _step_values(path: Path, key: EvaluationKey, gamma: float | None) -> dict[str, np.ndarray]:
    """At most some thousand values of each kind; none of a damaged recording."""
    with contextlib.suppress(RunError, KeyError, ValueError):
        values = step_numbers(read_recording(path, key), gamma)
        return {name: part[:: 1 + len(part) // _MAX_NUMBERS].astype(np.float32) for name, part in values.items()}
    return {}


def _histogram(columns: Sequence[tuple[float, np.ndarray]]) -> dict[str, Any]:
    pooled = np.concatenate([values for _, values in columns])
    integral = bool((pooled == pooled.round()).all()) and pooled.min() >= 0.0 and pooled.max() < _MAX_BINS
    low, high = (pooled.min() - 0.5, pooled.max() + 0.5) if integral else np.percentile(pooled, (0.5, 99.5))
    bins = round(high - low) if integral else _BINS
    if high <= low:
        low, high = low - 0.5, high + 0.5
    shares, ends = [], np.linspace(low, high, bins + 1)
    for _, values in columns:
        counts = np.histogram(np.clip(values, low, high), ends)[0]
        shares.append([round(float(count) / len(values), 4) for count in counts])
    quantiles = {"y": 50, "lo": 5, "hi": 95}
    lines = {name: [_finite(float(np.percentile(values, q))) for _, values in columns] for name, q in quantiles.items()}
    scale = {"low": float(low), "step": float(high - low) / bins}
    return {"t": [t for t, _ in columns], **lines, **scale, "shares": shares}


def _strips(chosen: RecordedEpisode, facts: Any, gamma: float | None) -> list[dict[str, Any]]:
    """Reward and its terms, value and return, actions, observations, other numbers; step 0 is the reset."""

    def named(name: str, columns: np.ndarray) -> list[tuple[str, np.ndarray]]:
        return list(zip(names_of(facts, name), columns.T, strict=False))

    info = named("info", chosen.info)
    terms = [(name, column) for name, column in info if is_term(name)]
    others = [(name, column) for name, column in info if not is_term(name)]
    values = [("value", chosen.value)] if len(chosen.value) else []
    values += [] if gamma is None else [("actual discounted return", returns_to_go(chosen, gamma))]
    strips = (
        _strip("Reward", [("reward", chosen.reward), *terms], 1) | {"note": "" if terms else _NO_TERMS},
        _strip("Value and return", values, 1) | {"note": "" if len(chosen.value) else _NO_VALUES},
        _strip("Action", named("actions", chosen.action), 1),
        _strip("Observation", named("obs", chosen.obs), 0),
        _strip("Other numbers of info", others, 1),
    )
    return [strip for strip in strips if strip["lines"]]


def _strip(title: str, lines: Sequence[tuple[str, np.ndarray]], first: int) -> dict[str, Any]:
    shown = [{"name": clean(name, 60), "y": [_finite(value) for value in column]} for name, column in lines]
    return {"title": title, "first": first, "most": _COLUMNS, "lines": shown}


def _finite(value: float) -> float | None:
    """A number with five digits, which halves the length of the response."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def frames(request: Request) -> Response:
    """Pictures of an episode from byte ``from`` on; ``X-Done``: these are the last, ``X-Drawing``: more are drawn."""
    try:
        path, key, kind = _requested_episode(request)
        offset = max(0, int(request.query_params.get("from", 0)))
        data, done = read_frames(frames_path(path, key, kind), offset, _MAX_FRAME_BYTES)
    except (RunError, ValueError, OverflowError) as error:
        return Response(clean(error), 404, media_type="text/plain", headers=HEADERS)
    with _lock:
        process = _drawing.get(frames_path(path, key, kind))
        busy = process is not None and process.poll() is None
    headers = {**HEADERS, "X-Done": str(int(done)), "X-Drawing": str(int(busy))}
    return Response(data, media_type="application/octet-stream", headers=headers)


def draw(request: Request) -> dict[str, Any]:
    """Starts a process that draws an episode again, unless it is drawn already.

    A run directory may come from anywhere, so the module that an ended run names is imported only if ``trust`` does.
    """
    path, key, kind = _requested_episode(request)
    target = frames_path(path, key, read_recording(path, key).of_kind(kind).kinds[0])
    if target.is_file():
        return {"state": "drawn"}
    module = _foreign_module(path)
    if module is not None and request.query_params.get("trust") != module:
        return {"state": "untrusted", "module": clean(module)}
    arguments = [str(path), key.id, kind]
    with _lock:
        for known in [known for known, process in _drawing.items() if process.poll() is not None]:
            del _drawing[known]
        if target not in _drawing:
            while len(_drawing) >= _DRAWERS:
                _end(_drawing.pop(next(iter(_drawing))))
            _drawing[target] = _started(arguments)
    return {"state": "drawing"}


def _foreign_module(path: Path) -> str | None:
    """The module that drawing would import from an ended run, which may come from anywhere."""
    return None if is_alive(path) else control.module_to_trust(path)


def warm(request: Request) -> dict[str, Any]:
    """Starts the process that will draw, to load packages and construct the task ahead, if its module is trusted."""
    path = run_path(request.query_params.get("run", ""), runs_dir())
    with _lock:
        if not _spare or _spare[0].poll() is not None:
            _spare[:] = [_process([] if _foreign_module(path) else [str(path)])]
    return {"state": "warm"}


def _started(arguments: list[str]) -> subprocess.Popen[bytes]:
    """A process that draws: the one that was started ahead, if it still waits."""
    process = _spare.pop() if _spare else None
    if process is not None and process.poll() is None and process.stdin is not None:
        with contextlib.suppress(OSError), process.stdin as pipe:
            pipe.write(json.dumps(arguments).encode() + b"\n")
            pipe.flush()
            return process
    return _process(arguments)


def _process(arguments: list[str]) -> subprocess.Popen[bytes]:
    quiet: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    stdin = subprocess.DEVNULL if len(arguments) == 3 else subprocess.PIPE
    command = [*_COMMAND, *arguments]
    process = subprocess.Popen(command, stdin=stdin, env=control.environment(), start_new_session=True, **quiet)
    control.reap(process)
    return process


def end_drawing() -> None:
    """Ends the processes that draw, because the server ends."""
    with _lock:
        while _drawing:
            _end(_drawing.popitem()[1])
        while _spare:
            _end(_spare.pop())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # an unfinished drawing starts over next time
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
