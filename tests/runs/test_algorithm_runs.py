"""``train --auto`` without an algorithm on a task without a profile: several learn it, one goes on."""

import json

import pytest
from harness import HIDDEN_SIZES, Run, poll

from spreeze.files import read_json
from spreeze.metrics.store import MetricsReader
from spreeze.run_directory import read_run

SHORT = (
    "--env", "Pendulum-v1", "--profile", "none", "--auto", "--seconds", "20", "--set", "tuning.algorithm_share=0.5",
    "--set", "tuning.budget_s=5", "--set", "evaluation.episodes=2", "--set", f"sac.hidden_sizes={HIDDEN_SIZES}",
    "--set", f"ppo.hidden_sizes={HIDDEN_SIZES}", "--set", f"crossq.hidden_sizes={HIDDEN_SIZES}",
    "--set", "replay.learning_starts=200", "--no-visualizer",
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("nothing_known")


def test_algorithms_learn_in_turn_and_the_best_goes_on_with_what_it_learned(tmp_path):
    with Run(tmp_path, *SHORT, "--seconds", "8", tiny=()) as run:
        code, document = run.end()
    assert code == 0, run.stderr
    record = read_json(run.runs_dir / document["run_dir"].rsplit("/", 1)[-1] / "algorithms.json")
    assert {one["algo"] for one in record["candidates"]} == {"sac", "crossq", "ppo"}
    assert document["algo"] == record["algo"]
    assert document["algorithms"] == json.loads(json.dumps(record["candidates"]))
    runs = {one["algo"]: run.runs_dir / one["run"] for one in record["candidates"]}
    winner = runs.pop(record["algo"])
    assert len(read_run(winner)["session_starts"]) == 2, "it was continued"
    assert [len(read_run(other)["session_starts"]) for other in runs.values()] == [1, 1]
    times = [row.t for row in MetricsReader(winner / "metrics.db").evaluations()]
    assert times == sorted(times)
    with Run(tmp_path, *SHORT, tiny=(), name="again") as again:
        again.wait_for(lambda: "compared before" in again.stderr, what="the known algorithm")
        again.wait_for(lambda: read_run(again.path).get("algo") == record["algo"], what="its run")
        again.process.kill()


def test_ctrl_c_while_algorithms_are_compared_stops_the_one_that_learns(tmp_path):
    with Run(tmp_path, *SHORT, tiny=()) as run:
        first = run.runs_dir / "run-sac"
        run.wait_for(lambda: read_run(first).get("state") == "running", what="the first one")
        run.interrupt()
        code, _ = run.end()
    assert code == 130
    assert read_run(first)["state"] == "finished"
    assert "Traceback" not in run.stderr


def test_one_that_learns_ends_when_the_command_is_killed(tmp_path):
    with Run(tmp_path, *SHORT, tiny=()) as run:
        first = run.runs_dir / "run-sac"
        run.wait_for(lambda: read_run(first).get("state") == "running", what="the first one")
        run.process.kill()
        poll(lambda: read_run(first).get("state") == "finished", what="its end")
    assert read_run(first)["exit_reason"].startswith("interrupt"), "not by its own time"
