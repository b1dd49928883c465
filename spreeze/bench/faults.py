"""Learning while environments fail: wall time to a return, clean and with faults on half of the samplers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from spreeze.bench.runs import train
from spreeze.store_reader import MetricsReader
from spreeze.testing import WRAPPED_ID

Row = dict[str, Any]
SAMPLERS = 2
RATES = {"P_CRASH": "1e-4", "P_CRASH_RESET": "1e-3", "P_STALL": "5e-4", "STALL_S": "2", "STALL_MAX_S": "5"}
"""RLlib's crashing and stalling CartPole (rllib/examples/fault_tolerance/crashing_and_stalling_env.py)."""


class Goal(NamedTuple):
    """A task and when it counts as learned."""

    env_id: str
    profile: str
    target_return: float


GOALS = (Goal("Pendulum-v1", "pendulum", -200.0), Goal("CartPole-v1", "cartpole", 475.0))


def faults_rows(
    goals: tuple[Goal, ...], seeds: int, limit_s: float, runs_dir: str, say: Callable[[str], None]
) -> list[Row]:
    """Per task: times of both kinds, seed by seed in turn, and the ratio of their medians.

    Raises:
        SpreezeError: a run failed.
    """
    return [row for goal in goals for row in _goal_rows(goal, seeds, limit_s, runs_dir, say)]


def _goal_rows(goal: Goal, seeds: int, limit_s: float, runs_dir: str, say: Callable[[str], None]) -> list[Row]:
    times: dict[str, list[float]] = {"clean": [], "faults": []}
    reached = dict.fromkeys(times, 0)
    errors: list[float] = []
    for seed in range(1, seeds + 1):
        for kind, found in times.items():
            document = _train(goal, seed, limit_s, runs_dir, RATES if kind == "faults" else {})
            time_s = document["time_to_target_s"]
            reached[kind] += time_s is not None
            # A run that did not get there counts with all of its time: never better than it was.
            found.append(document["process_s"] if time_s is None else time_s)
            count = _env_errors(Path(document["run_dir"]))
            if kind == "faults":
                errors.append(count)
            say(f"  {goal.env_id} seed {seed} {kind}: " + ("not reached" if time_s is None else f"{time_s:.1f} s")
                + f", {document['updates']} updates, {count:.0f} env errors, {document['restarts']} restarts")
    rows = [{"metric": f"time_to_target_s_{kind}", "value": statistics.median(found), "unit": "s", "repeats": found,
             "env": goal.env_id, "reached": reached[kind], "target": f"{seeds} of {seeds} reached"}
            for kind, found in times.items()]
    ratios = [b / a for a, b in zip(times["clean"], times["faults"], strict=True)]
    ratio = statistics.median(times["faults"]) / statistics.median(times["clean"])
    return [*rows,
            {"metric": "faults_over_clean", "value": ratio, "unit": "ratio", "repeats": ratios, "env": goal.env_id,
             "target": "<= 1.5"},
            {"metric": "env_errors", "value": statistics.median(errors), "unit": "errors", "repeats": errors,
             "env": goal.env_id}]


def _train(goal: Goal, seed: int, limit_s: float, runs_dir: str, rates: dict[str, str]) -> dict[str, Any]:
    """One run; clean ones step the same wrapper, without a fault."""
    faulty = ",".join(f"sampler-{index}" for index in range(SAMPLERS // 2))
    variables = {"ENV": goal.env_id, "SEED": str(seed), "WORKERS": faulty, **rates}
    return train(
        ["--env", WRAPPED_ID, "--import", "spreeze.testing", "--profile", goal.profile, "--samplers", str(SAMPLERS),
         "--target-return", str(goal.target_return), "--seed", str(seed), "--seconds", str(limit_s),
         "--runs-dir", runs_dir],
        limit_s + 120.0, {f"SPREEZE_FAULT_{name}": value for name, value in variables.items()},
    )  # fmt: skip


def _env_errors(run: Path) -> float:
    point = MetricsReader(run / "metrics.db").latest().get("env_errors")
    return point.value if point is not None else 0.0
