"""The benches run and report; no test judges a speed."""

import json
import signal
import subprocess
import sys

import psutil
import pytest
import whole_runs
from figures import line
from harness import PATIENCE_S, REPO, poll
from whole_runs import curve_rows, draw_curve, time_to_target_rows, train

from spreeze.errors import RunError, SpreezeError, UsageError
from spreeze.metrics.comparison import Curve, RunGroup
from spreeze.metrics.store import EvaluationRow
from spreeze.workers.evaluator import COLUMNS

BENCHMARKS = REPO / "tests" / "benchmarks"


def _measured(*arguments):
    """Rows of ``parts.py``."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "parts.py"), *arguments, "--repeats", "1", "--seconds", "0.3", "--json"],
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return {row["metric"]: row for row in json.loads(done.stdout)["rows"]}


@pytest.mark.warm
@pytest.mark.parametrize("task", [("Pendulum-v1",), ("vector:CartPole-v1", "--envs-per-sampler", "64")])
def test_a_sampler_is_compared_with_a_bare_loop_of_the_same_environments(task):
    rows = _measured("--env", *task)
    assert rows["sampler_share_of_bare"]["value"] > 0.0
    assert rows["sampler_env_steps_per_s"]["value"] > 0.0
    assert rows["bare_env_steps_per_s"]["envs_per_sampler"] == int(task[-1]) if len(task) > 1 else 8


@pytest.mark.warm
def test_learner_bench_reports_updates():
    assert _measured("--parts", "learner", "--batch-size", "64")["updates_per_s"]["value"] > 0.0


def test_unknown_return_prints_as_a_dash():
    assert " -" in line({"metric": "x", "value": None, "unit": "s", "repeats": []})


def test_curve_of_a_run_without_evaluations_is_refused(tmp_path):
    with pytest.raises(RunError, match="no evaluation"):
        draw_curve([tmp_path], tmp_path / "out.png")


def test_curve_is_drawn_from_the_run_s_own_figures(tmp_path):
    rows = [",".join(COLUMNS)] + [f"{i}.5,{i * 100},{i},1,{i},10,{-100.0 + i},3.0,20.0" for i in range(1, 5)]
    (tmp_path / "eval.csv").write_text("\n".join(rows) + "\n")
    draw_curve([tmp_path], tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 5000


def test_one_picture_has_all_seeds_and_tasks(tmp_path):
    for seed in (1, 2, 3, 4):
        path = tmp_path / str(seed)
        path.mkdir()
        env = "Other-v0" if seed == 4 else "Task-v0"
        (path / "run.json").write_text(json.dumps({"env_id": env, "algo": "sac", "mode": "serial", "seed": seed}))
        rows = [",".join(COLUMNS)] + [f"{i}.5,{i * 100},{i},1,{i},10,{seed * i},3.0,20.0" for i in range(1, 3 + seed)]
        (path / "eval.csv").write_text("\n".join(rows) + "\n")
    draw_curve([tmp_path / str(seed) for seed in (1, 2, 3, 4)], tmp_path / "out.png", ("updates",))
    assert (tmp_path / "out.png").stat().st_size > 5000


def kept_curve(seed, scores, **settings):
    rows = [EvaluationRow(t=10.0 * i, env_steps=100 * i, updates=1000 * i, epoch=1, version=i, episodes=10,
                          return_mean=score, return_std=1.0, length_mean=20.0)
            for i, score in enumerate(scores, 1)]  # fmt: skip
    return Curve(
        name=f"run{seed}",
        group=RunGroup("Task-v0", "sac", "serial"),
        seed=seed,
        end_s=rows[-1].t,
        evaluations=rows,
        settings=settings,
    )


def test_figures_of_runs_are_told_by_what_was_kept_and_by_counts(tmp_path, monkeypatch):
    curves = {"1": kept_curve(1, [0.0, 90.0, 50.0, *[80.0] * 18, 40.0]), "2": kept_curve(2, [10.0] * 30)}
    monkeypatch.setattr(whole_runs, "read_curve", lambda path: curves.get(path.name))
    rows = curve_rows([tmp_path / "1", tmp_path / "2"], [80.0])
    found = {row["metric"]: row["repeats"] for row in rows}
    assert found["eval_return_final"] == [76.0, 10.0]
    assert found["eval_return_best"] == [90.0, 10.0]
    assert found["worst_over_mean"] == [pytest.approx(40.0 / (50.0 + 18 * 80.0 + 40.0) * 20), 1.0]
    assert found["updates_to_target_first"] == [2000, None]
    assert found["time_to_target_held_s"] == [80.0, None], "five of 80: the last one is the eighth"
    assert {row["seeds"] for row in rows} == {"1 2"}
    early = {row["metric"]: row["repeats"] for row in curve_rows([tmp_path / "1"], [80.0], 2000)}
    assert (early["eval_return_final"], early["updates"]) == ([45.0], [2000])
    with pytest.raises(RunError, match="has no evaluation in its first 500 updates"):
        curve_rows([tmp_path / "1"], [], 500)
    with pytest.raises(RunError, match=r"3 has no evaluation$"):
        curve_rows([tmp_path / "3"])


def test_runs_with_other_settings_have_figures_of_their_own(tmp_path, monkeypatch):
    curves = {"1": kept_curve(1, [1.0], **{"sac.n_step": "1"}), "2": kept_curve(2, [2.0], **{"sac.n_step": "3"})}
    monkeypatch.setattr(whole_runs, "read_curve", lambda path: curves[path.name])
    rows = [row for row in curve_rows([tmp_path / "1", tmp_path / "2"]) if row["metric"] == "eval_return_final"]
    assert [(row["value"], row["runs"]) for row in rows] == [
        (1.0, "sac serial sac.n_step=1"),
        (2.0, "sac serial sac.n_step=3"),
    ]


@pytest.mark.warm
def test_a_failing_run_is_told_with_its_last_line():
    with pytest.raises(SpreezeError, match="unknown environment"):
        train(["--env", "NoSuchTask-v0"], PATIENCE_S)


class Trained:
    """Runs that take ten seconds, twenty in the serial mode or with a batch of 256; seed 2 never gets there."""

    def __init__(self):
        self.commands = []

    def __call__(self, arguments, timeout_s):
        self.commands.append(arguments)
        slow = "serial" in arguments or "256" in arguments
        reached = "--seed" not in arguments or arguments[arguments.index("--seed") + 1] == "1"
        first = (20.0 if slow else 10.0) if reached else None
        return {
            "time_to_target_s": first,
            "time_to_target_held_s": first and 2.0 * first,
            "process_s": 60.0,
            "updates": 5,
            "updates_per_s": 2.0,
            "env_steps": 100,
            "eval_return_best": -150.0,
        }


def test_time_to_a_return_is_compared_seed_by_seed_and_who_never_got_there_has_no_time(monkeypatch):
    monkeypatch.setattr(whole_runs, "train", trained := Trained())
    said = []
    rows = time_to_target_rows("Pendulum-v1", -200.0, 2, "runs", 30.0, ["--plain-env"], said.append)
    spreeze, serial = (row for row in rows if row["metric"] == "time_to_target_s")
    assert (spreeze["repeats"], spreeze["reached"], spreeze["mode"]) == ([10.0, None], 1, "spreeze")
    assert (serial["repeats"], serial["reached"], serial["mode"]) == ([20.0, None], 1, "serial")
    assert spreeze["value"] is None  # half of the runs: the middle of one time and none
    assert (rows[-1]["repeats"], rows[-1]["reached"], rows[-1]["value"]) == ([0.5, None], 1, None)
    assert [command[command.index("--mode") + 1] for command in trained.commands] == ["spreeze", "serial"] * 2
    assert all("--plain-env" in command for command in trained.commands)
    assert "target after 10.0 s" in said[0]
    rows = time_to_target_rows("Pendulum-v1", -200.0, 1, "runs", 30.0, [], said.append, held=True)
    assert [row["repeats"] for row in rows if row["metric"] == "time_to_target_held_s"] == [[20.0], [40.0]]
    assert "stop.target_evaluations=5" in trained.commands[-1]
    rows = time_to_target_rows("AntBulletEnv-v0", 1.0, 1, "runs", 30.0, ["--algo", "ppo"], said.append,
                               modes=("hts", "serial"))  # fmt: skip
    assert [row["mode"] for row in rows if row["metric"] == "time_to_target_s"] == ["hts", "serial"]
    assert (rows[-1]["metric"], rows[-1]["value"]) == ("time_over_serial", 0.5)
    with pytest.raises(UsageError, match="--modes hts hts: expected two that differ"):
        time_to_target_rows("AntBulletEnv-v0", 1.0, 1, "runs", 30.0, [], said.append, modes=("hts", "hts"))


def test_a_bench_that_is_terminated_takes_its_runs_along(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "rates.py"), "--parts", "target", "--env", "Pendulum-v1",
               "--seconds", "10000", "--target-return", "1e9", "--runs-dir", str(tmp_path)]  # fmt: skip
    bench = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        children = psutil.Process(bench.pid).children
        poll(lambda: len(children(recursive=True)) >= 3, what="a run with its workers")
        family = children(recursive=True)
        bench.terminate()
        assert bench.wait(PATIENCE_S) == 128 + signal.SIGTERM
        _, left = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not left
    finally:
        bench.kill()
        bench.wait()
