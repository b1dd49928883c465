"""Hindsight in real runs: rows with other goals are no env steps, and a sampler that dies goes on with them."""

import json
import os
import signal

import pytest
from harness import Run, run_command, train

MODULE = "goal_tasks"
BITS = ("--env", "BitFlip-v0", "--env-arg", "bits=4", "--import", MODULE, "--algo", "dqn", "--no-visualizer",
        "--set", "replay.her=future", "--set", "dqn.hidden_sizes=[16]", "--batch-size", "16",
        "--set", "replay.learning_starts=100", "--samplers", "1", "--envs-per-sampler", "2",
        "--set", "evaluation.episodes=2")  # fmt: skip


def test_one_update_an_env_step_in_turns_and_the_success_is_told(tmp_path):
    run, code, document = train(tmp_path, *BITS, "--mode", "serial", "--env-steps", "600", tiny=())
    assert code == 0
    assert document["env_steps"] == pytest.approx(600, abs=4)
    assert document["updates"] == pytest.approx(500, abs=30)
    assert document["samples_per_insert"] == pytest.approx(16.0, rel=0.05)
    shown = run_command("evaluate", run.path, "--import", MODULE, "--json", "--episodes", "4")
    assert 0.0 <= json.loads(shown.stdout)["success_rate"] <= 1.0


def test_a_sampler_is_killed_and_the_saved_replay_goes_on_where_it_was(tmp_path):
    with Run(tmp_path, *BITS, "--save-replay", "--no-governor", name="killed", tiny=()) as run:
        run.until_updates(20)
        os.kill(run.children()["sampler-0"].pid, signal.SIGKILL)
        run.wait_for(lambda: run.numbers().get("restarts", 0) >= 1, what="another sampler")
        run.until_progress()
        code, document = run.stop()
    assert (code, document["error"]) == (0, None)
    more = ("--updates", str(document["updates"] + 50), "--no-visualizer", "--import", MODULE)
    _, code, document = train(tmp_path, "--resume", "killed", *more, tiny=())
    assert (code, document["error"]) == (0, None)


def test_a_run_without_hindsight_says_that_its_task_has_goals(tmp_path):
    off = ("--set", "replay.her=off", "--mode", "serial", "--env-steps", "200")
    run, code, _ = train(tmp_path, *BITS, *off, tiny=())
    assert code == 0
    assert "BitFlip-v0: it has goals; --set replay.her=future also learns from those" in run.stderr
