"""Figures of whole runs: the real command in processes of its own, seeds and modes in turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from spreeze.errors import SpreezeError

Row = dict[str, Any]
_RATES = {
    "env_steps_per_s": "1/s", "updates_per_s": "1/s", "update_frames_per_s": "1/s", "samples_per_insert": "ratio",
    "policy_lag_mean": "updates", "eval_return_mean": "return", "eval_return_best": "return",
}


def train(arguments: list[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """One ``python -m spreeze.train ... --json`` with these variables added; returns its document.

    Raises:
        SpreezeError: it failed or took too long.
    """
    command = [sys.executable, "-m", "spreeze.train", *arguments, "--json"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False,
                              env={**os.environ, **(environment or {})})
    except subprocess.TimeoutExpired:
        raise SpreezeError(f"not done within {timeout_s:.0f} s: {' '.join(command)}") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise SpreezeError(f"{' '.join(command)}: exit code {done.returncode}: {lines[-1]}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def rates_rows(env_id: str, seconds: float, repeats: int, runs_dir: str, extra: list[str]) -> list[Row]:
    """Env steps and updates a second of the asynchronous run, at the same time."""
    found = [
        train(["--env", env_id, "--samplers", "1", "--batch-size", "256", "--learner-threads", "1", "--seconds",
               str(seconds), "--seed", str(seed + 1), "--runs-dir", runs_dir, *extra], seconds + 120.0)
        for seed in range(repeats)
    ]
    targets = {"env_steps_per_s": ">= 1900", "updates_per_s": ">= 75"} if env_id.startswith("Walker2D") else {}
    return [row(name, [document[name] for document in found], unit=unit, env=env_id, target=targets.get(name))
            for name, unit in _RATES.items()]


def time_to_target_rows(
    env_id: str, target: float, seeds: int, runs_dir: str, limit_s: float, extra: list[str], say: Callable[[str], None]
) -> list[Row]:
    """Wall time from process start to the target return, both modes in turn, seed by seed."""
    found: dict[str, list[dict[str, Any]]] = {"spreeze": [], "serial": []}
    for seed in range(1, seeds + 1):
        for mode, documents in found.items():
            document = train(["--env", env_id, "--mode", mode, "--target-return", str(target), "--seed", str(seed),
                              "--seconds", str(limit_s), "--runs-dir", runs_dir, *extra], limit_s + 60.0)
            documents.append(document)
            reached = document["time_to_target_s"]
            say(f"  seed {seed} {mode}: " + (f"{reached:.1f} s" if reached is not None else "not reached")
                + f", {document['updates']} updates, {document['env_steps']} env steps")
    rows = []
    for mode, documents in found.items():
        times, reached_count = times_to_target(documents)
        rows.append(row("time_to_target_s", times, unit="s", mode=mode, env=env_id, reached=reached_count,
                         target="<= 20 s" if mode == "spreeze" and env_id == "Pendulum-v1" else None))
        rows.append(row("updates", [d["updates"] for d in documents], unit="updates", mode=mode))
        rows.append(row("updates_per_s", [d["updates_per_s"] for d in documents], mode=mode))
        rows.append(row("env_steps", [d["env_steps"] for d in documents], unit="env steps", mode=mode))
    ratios = [a / b for a, b in zip(rows[0]["repeats"], rows[4]["repeats"], strict=True)]
    rows.append(row("time_over_serial", ratios, unit="ratio", env=env_id, target="<= 0.6"))
    return rows


def times_to_target(documents: list[dict[str, Any]]) -> tuple[list[float], int]:
    """Wall times [s] to the target return, and how many runs reached it.

    A run that did not get there counts with all of its time: never better than it was.
    """
    known = [document["time_to_target_s"] for document in documents]
    times = [document["process_s"] if at_s is None else at_s for document, at_s in zip(documents, known, strict=True)]
    return times, sum(at_s is not None for at_s in known)


HAND_MADE = tuple((batch, samplers) for batch in (32, 64, 128, 256) for samplers in (1, 2))
"""Batch sizes and sampler counts that a careful person would try on a small machine."""


def pick_rows(
    env_id: str, target: float, seeds: int, runs_dir: str, limit_s: float, extra: list[str], say: Callable[[str], None]
) -> list[Row]:
    """Wall time to a return with the tuner's (cached) pick and with each hand-made setting, seed by seed in turn."""
    settings: dict[str, list[str]] = {"auto": ["--auto"]}
    settings |= {f"batch {batch}, {samplers} samplers": ["--batch-size", str(batch), "--samplers", str(samplers)]
                 for batch, samplers in HAND_MADE}
    found: dict[str, list[float]] = {name: [] for name in settings}
    reached: dict[str, int] = dict.fromkeys(settings, 0)
    train(["--env", env_id, "--auto", "--updates", "1", "--runs-dir", runs_dir, *extra], 300.0)  # fills the cache
    for seed in range(1, seeds + 1):
        for name, flags in settings.items():
            document = train(["--env", env_id, *flags, "--target-return", str(target), "--seed", str(seed),
                              "--seconds", str(limit_s), "--runs-dir", runs_dir, *extra], limit_s + 120.0)
            time_s = document["time_to_target_s"]
            reached[name] += time_s is not None
            found[name].append(time_s if time_s is not None else document["process_s"])
            say(f"  seed {seed}, {name}: " + (f"{time_s:.1f} s" if time_s is not None else "not reached")
                + f", {document['updates']} updates")
    rows = [row("time_to_target_s", times, unit="s", setting=name, env=env_id, reached=reached[name])
            for name, times in found.items()]
    best = min((row for row in rows if row["setting"] != "auto"), key=lambda row: float(row["value"]))
    rows.append(row("pick_over_best", [rows[0]["value"] / best["value"]], unit="ratio", env=env_id,
                     best=best["setting"], target="<= 1.1"))
    return rows


def row(name: str, values: list[Any], unit: str = "1/s", **more: Any) -> Row:
    """A reported figure: median of the known repeats, and what else is known of it."""
    known = [value for value in values if value is not None]
    return {"metric": name, "unit": unit, "value": statistics.median(known) if known else None, "repeats": values,
            **{key: value for key, value in more.items() if value is not None}}
