"""Learning while environments fail, and while workers are killed and stopped.

Wall time to a return, clean and with faults on half of the samplers; return after as many updates, clean and with a
worker killed or stopped every ten seconds.

By hand: ``SPREEZE_LONG_TESTS=1 SPREEZE_STRESS_SEEDS=5 pytest tests/slow/test_faulty_training.py``; a run is given
up after ``SPREEZE_STRESS_LIMIT_S`` (180).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from fault_envs import FAULTY_ID
from figures import Row, row
from harness import SUPPORT
from long_form import PATIENCE_S, asked, by_hand
from watched_run import FORGIVING, LiveRun
from whole_runs import ratio_row, time_row, train

from spreeze.cli import evaluate
from spreeze.errors import SpreezeError
from spreeze.files import read_json
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


PACED = {
    "inner": "CartPole-v1", "p_stall": "1", "stall_s": "0.002",
    "workers": ",".join(f"sampler-{index}" for index in range(SAMPLERS)),
}  # fmt: skip
"""CartPole with steps of two milliseconds, so that faults meet a policy that still learns: else it takes 4 s."""
TASKS = {
    "Pendulum-v1": ["--env", "Pendulum-v1"],
    "CartPole-v1": ["--env", FAULTY_ID, "--import", "fault_envs", "--profile", "cartpole", "--algo", "ppo",
                    *(f"--env-arg={key}={value}" for key, value in PACED.items())],
}  # fmt: skip
"""Task -> what ``train`` is told of it."""


def return_rows(
    env_id: str, updates: int, seeds: int, runs_dir: str, say: Callable[[str], None], *, every_s: float = 10.0
) -> list[Row]:
    """Return of the last policy over a hundred episodes with equal starts, seed by seed in turn; and the share.

    Where returns are below zero, the share is that of the costs.

    Raises:
        SpreezeError: a run failed.
    """
    found: dict[str, list[float]] = {"clean": [], "faults": []}
    thrown: list[float] = []
    for seed in range(1, seeds + 1):
        for kind, returns in found.items():
            name = f"{env_id}-{kind}-{seed}"
            faults, run = _train_under_kills(
                env_id, updates, seed, runs_dir, name, every_s if kind == "faults" else None
            )
            returns.append(_last_return(run))
            thrown += [faults] if kind == "faults" else []
            took_s = read_json(run / "summary.json")["wall_s"]
            say(f"  {name}: {faults} faults, return {returns[-1]:.1f}, {took_s:.0f} s")
    shares = [
        faulty / clean if clean > 0 else clean / faulty
        for clean, faulty in zip(found["clean"], found["faults"], strict=True)
    ]
    return [
        *(row(f"return_{kind}", "return", returns, env=env_id) for kind, returns in found.items()),
        row("faults_over_clean", "ratio", shares, env=env_id, target=">= 0.95"),
        row("faults", "faults", thrown, env=env_id),
    ]


def _train_under_kills(
    env_id: str, updates: int, seed: int, runs_dir: str, name: str, every_s: float | None
) -> tuple[int, Path]:
    """One run, and a kill or a stop of two seconds so often; how many there were, and its directory."""
    dice, thrown, limit_s = random.Random(seed), 0, PATIENCE_S + updates / 10
    arguments = [*TASKS[env_id], "--samplers", str(SAMPLERS), "--updates", str(updates), "--seed", str(seed),
                 "--no-visualizer", "--set", "learner.checkpoint_interval_s=5"]  # fmt: skip
    paths = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    with LiveRun(arguments, runs_dir, name, {"PYTHONPATH": paths}, program=FORGIVING) as run:
        run.await_learning(PATIENCE_S)
        end_s = time.monotonic() + limit_s
        while _waited(run, every_s or limit_s) is None:
            if time.monotonic() > end_s:
                raise SpreezeError(f"{name} did not end: {run.last_output()}")
            if workers := sorted(run.children().items()):
                thrown += _strike(dice.choice(workers)[1], run, stops=dice.random() < 0.3)
        if run.process.returncode != 0:
            raise SpreezeError(f"{name}: exit code {run.process.returncode}: {run.last_output()}")
    return thrown, Path(runs_dir) / name


def _waited(run: LiveRun, seconds: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return run.process.wait(seconds)
    return None


def _strike(worker: psutil.Process, run: LiveRun, *, stops: bool) -> int:
    """Kills a worker, or stops it for two seconds; 1 unless it had ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.send_signal(signal.SIGSTOP if stops else signal.SIGKILL)
        if stops:
            _waited(run, 2.0)
            worker.resume()
        return 1
    return 0


def _last_return(run: Path) -> float:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = evaluate.main(
            [str(run), "--checkpoint", "latest", "--episodes", "100", "--seed", "7", "--json", "--import", "fault_envs"]
        )
    if code != 0:
        raise SpreezeError(f"{run} was not evaluated")
    return float(json.loads(out.getvalue())["return_mean"])


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


@pytest.mark.parametrize(("env_id", "updates"), [("CartPole-v1", 200), ("Pendulum-v1", 400)])
def test_returns_are_taken_clean_and_with_kills_and_stops_in_turn(tmp_path, env_id, updates):
    said = []
    rows = return_rows(env_id, updates, 1, str(tmp_path / "runs"), said.append, every_s=1.0)
    clean, faulty, share, faults = rows
    assert ["clean" in said[0], "faults" in said[1], len(said)] == [True, True, 2]
    values = [clean["value"], faulty["value"]]
    assert share["value"] == (values[1] / values[0] if values[0] > 0 else values[0] / values[1]) > 0.0
    assert faults["value"] > 0
    assert "clean-1: 0 faults" in said[0]


@by_hand
@pytest.mark.timeout(2 * SEEDS * 900.0)
@pytest.mark.parametrize(("env_id", "updates"), [("CartPole-v1", 5_000), ("Pendulum-v1", 6_000)])
def test_a_fault_every_ten_seconds_costs_at_most_a_twentieth_of_the_return(tmp_path, env_id, updates, report, say):
    rows = report(return_rows(env_id, updates, SEEDS, str(tmp_path / "runs"), say))
    assert rows["faults_over_clean"]["value"] >= 0.95
