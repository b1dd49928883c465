"""Learning while environments fail: wall time to a return, clean and with faults on half of the samplers.

By hand: ``SPREEZE_LONG_TESTS=1 SPREEZE_STRESS_SEEDS=5 pytest tests/slow/test_faulty_training.py``; a run is given
up after ``SPREEZE_STRESS_LIMIT_S`` (180).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fault_envs import FAULTY_ID
from figures import Row, row
from long_form import PATIENCE_S, asked, by_hand
from whole_runs import ratio_row, time_row, train

from spreeze.metrics.store import MetricsReader

pytestmark = pytest.mark.timeout(600)
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
    found: dict[str, list[dict[str, Any]]] = {"clean": [], "faults": []}
    errors: list[float] = []
    for seed in range(1, seeds + 1):
        for kind, documents in found.items():
            document = _train(goal, seed, limit_s, runs_dir, RATES if kind == "faults" else {})
            documents.append(document)
            count = _env_errors(Path(document["run_dir"]))
            if kind == "faults":
                errors.append(count)
            time_s = document["time_to_target_s"]
            say(
                f"  {goal.env_id} seed {seed} {kind}: "
                + ("not reached" if time_s is None else f"{time_s:.1f} s")
                + f", {document['updates']} updates, {count:.0f} env errors, {document['restarts']} restarts"
            )
    return [
        *(
            {
                **time_row(documents, env=goal.env_id, target=f"{seeds} of {seeds} reached"),
                "metric": f"time_to_target_s_{kind}",
            }
            for kind, documents in found.items()
        ),
        ratio_row("faults_over_clean", found["faults"], found["clean"], env=goal.env_id, target="<= 1.5"),
        row("env_errors", "errors", errors, env=goal.env_id),
    ]


def _train(goal: Goal, seed: int, limit_s: float, runs_dir: str, rates: dict[str, str]) -> dict[str, Any]:
    """One run; clean ones step the same wrapper, without a fault."""
    faulty = ",".join(f"sampler-{index}" for index in range(SAMPLERS // 2))
    variables = {"ENV": goal.env_id, "SEED": str(seed), "WORKERS": faulty, **rates}
    return train(
        ["--env", FAULTY_ID, "--import", "fault_envs", "--profile", goal.profile, "--samplers", str(SAMPLERS),
         "--target-return", str(goal.target_return), "--seed", str(seed), "--seconds", str(limit_s),
         "--runs-dir", runs_dir],
        limit_s + 120.0, {f"SPREEZE_FAULT_{name}": value for name, value in variables.items()},
    )  # fmt: skip


def _env_errors(run: Path) -> float:
    point = MetricsReader(run / "metrics.db").latest().get("env_errors")
    return point.value if point is not None else 0.0


SEEDS, LIMIT_S = asked("SEEDS", 5), asked("LIMIT_S", 180.0)


def test_time_to_a_return_is_taken_clean_and_with_faults_in_turn(tmp_path):
    goal, said = Goal("Pendulum-v1", "pendulum", -1900.0), []
    rows = {row["metric"]: row for row in faults_rows((goal,), 1, PATIENCE_S, str(tmp_path / "runs"), said.append)}
    assert ["clean" in said[0], "faults" in said[1], len(said)] == [True, True, 2]
    clean, faulty = rows["time_to_target_s_clean"], rows["time_to_target_s_faults"]
    assert (clean["reached"], faulty["reached"]) == (1, 1)
    assert rows["faults_over_clean"]["value"] == faulty["value"] / clean["value"]


@by_hand
@pytest.mark.timeout(2 * SEEDS * (LIMIT_S + 120.0))
@pytest.mark.parametrize("goal", GOALS, ids=[goal.env_id for goal in GOALS])
def test_every_seed_reaches_its_return_with_faults(tmp_path, goal, report, say):
    rows = report(faults_rows((goal,), SEEDS, LIMIT_S, str(tmp_path / "runs"), say))
    assert rows["time_to_target_s_faults"]["reached"] == SEEDS
