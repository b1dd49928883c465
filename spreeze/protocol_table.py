"""Runs compared by the protocol of HTS-RL: what is read of run directories, and the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spreeze.errors import ConfigError, RunError
from spreeze.formats import DASH, clean, number
from spreeze.protocol import (
    SPLIT_BY,
    Curve,
    Group,
    GroupReport,
    PairReport,
    Report,
    Rules,
    RunReport,
    Spread,
    parted,
    report,
)
from spreeze.rundir import read_config, read_run
from spreeze.store_reader import MetricsReader


def read_curve(path: Path) -> Curve | None:
    """A run of any mode, from its directory; None while it has no evaluation.

    Raises:
        RunError: the run's metrics cannot be read.
    """
    evaluations = MetricsReader(path / "metrics.db").evaluations()
    if not evaluations:
        return None
    run = read_run(path)
    seed, end_s = run.get("seed"), run.get("wall_s")
    env, algo, mode = (clean(run.get(key) or DASH, 200) for key in ("env_id", "algo", "mode"))
    return Curve(
        name=clean(path.name, 128), group=Group(env, algo, mode), seed=seed if isinstance(seed, int) else None,
        end_s=float(end_s) if isinstance(end_s, int | float) else evaluations[-1].t, evaluations=evaluations,
        settings={f"{part}.{name}": clean(value, 80) for part, fields in read_config(path).items()
                  for name, value in fields.items()},
    )


def report_of(paths: Sequence[Path], split_by: Sequence[str], rules: Rules) -> Report:
    """Runs compared; ``split_by`` names settings beside ``SPLIT_BY``.

    Raises:
        ConfigError: what is no ``part.field``.
        RunError: a run without an evaluation, or whose metrics cannot be read.
    """
    for key in split_by:
        if not all(key.partition(".")):
            raise ConfigError(f"--by {key}: expected part.field, for example ppo.epochs")
    found = {path: read_curve(path) for path in paths}
    for path, curve in found.items():
        if curve is None:
            raise RunError(f"{path.name} has no evaluation yet; wait for one, or leave the run out")
    return report(parted([curve for curve in found.values() if curve is not None], (*SPLIT_BY, *split_by)), rules)


def document(found: Report) -> dict[str, Any]:
    """The answer of ``--json``."""
    return {"protocol": "hts", **dataclasses.asdict(found)}


def text(found: Report) -> str:
    """The tables for a person, one block for each task."""
    rules = found.rules
    lines = [f"means over seeds, {100 * rules.level:g} % bootstrap interval of {rules.resamples:,} resamples; "
             f"final: all evaluation episodes of the last {rules.policies} policies"]
    for env in dict.fromkeys(run.group.env for run in found.runs):
        limit_s = next(run.limit_s for run in found.runs if run.group.env == env)
        lines += ["", f"{env}, time limit {limit_s:.4g} s"]
        lines += _aligned(_rows(found, env))
    return "\n".join([*lines, *_remarks(found)])


def _rows(found: Report, env: str) -> list[list[str]]:
    targets = found.rules.targets
    head = ["", "runs", "final metric", "final-time metric", *(f"time to {number(target)} [s]" for target in targets)]
    return [
        head,
        *(_run_row(run) for run in found.runs if run.group.env == env),
        *(_group_row(group) for group in found.groups if group.group.env == env),
        *(_pair_row(pair) for pair in found.pairs if pair.group.env == env),
    ]


def _run_row(run: RunReport) -> list[str]:
    seed = DASH if run.seed is None else str(run.seed)
    return [f"  {run.name} (seed {seed})", "1", number(run.final), number(run.final_time),
            *(number(value) for value in run.required_s)]


def _group_row(group: GroupReport) -> list[str]:
    times = zip(group.required_s, group.reached, strict=True)
    return [group.group.label, str(group.runs), spread_text(group.final), spread_text(group.final_time),
            *(f"{spread_text(value)} ({count} of {group.runs})" for value, count in times)]


def _pair_row(pair: PairReport) -> list[str]:
    return [f"{pair.group.label} less {pair.against.label}, same seeds", str(pair.seeds), spread_text(pair.final),
            spread_text(pair.final_time), *(f"{spread_text(value)} of its time" for value in pair.required_ratio)]


def spread_text(value: Spread | None, form: Callable[[float | None], str] = number) -> str:
    """``12.0 [10.0, 14.0]``; a dash where nothing is known, no interval for one seed."""
    if value is None:
        return DASH
    return form(value.mean) + ("" if value.low is None else f" [{form(value.low)}, {form(value.high)}]")


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _remarks(found: Report) -> list[str]:
    """What a reader has to know before believing the table."""
    told = []
    short = [run for run in found.runs if run.policies < found.rules.policies]
    if short:
        counts = ", ".join(f"{run.name} {run.policies}" for run in short)
        told.append(f"fewer than {found.rules.policies} policies were evaluated: {counts}")
    for group in found.groups:
        seeds = [run.seed for run in found.runs if run.group == group.group]
        if len(set(seeds)) < len(seeds):
            told.append(f"{group.group.env} {group.group.label}: a seed occurs twice; if the runs differ in a setting, "
                         "--by part.field parts them")
    return ["", *told] if told else []


def rules_of(*, policies: int, targets: Sequence[float], limit_s: float | None, resamples: int) -> Rules:
    """The rules that a command line asks for.

    Raises:
        ConfigError: a number out of range.
    """
    if policies < 1:
        raise ConfigError(f"--policies {policies}: at least 1")
    if resamples < 100:
        raise ConfigError(f"--resamples {resamples}: at least 100")
    if limit_s is not None and not limit_s > 0.0:
        raise ConfigError(f"--limit-s {limit_s:g}: more than 0")
    return Rules(policies=policies, targets=tuple(targets), limit_s=limit_s, resamples=resamples)

