"""A run whose return falls: it says so, and its learner rolls back to the best checkpoint."""

import re

import pytest
from harness import train_until

from spreeze.transport.checkpoint import CheckpointStore
from spreeze.workers.best_policy import best_updates

FALLING = ("--env", "fault_envs:FallingEnv", "--import", "fault_envs", "--set", "evaluation.episodes=1",
           "--set", "learner.publish_interval_s=0.05", "--set", "learner.checkpoint_interval_s=0.5")  # fmt: skip


@pytest.mark.parametrize("rolls_back", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_falls_says_so_and_rolls_back_to_its_best_checkpoint(tmp_path, rolls_back):
    said = "rolled back at update" if rolls_back else "the return has fallen"
    run, code, document = train_until(
        tmp_path, lambda run: any(said in event for event in run.events()), *FALLING,
        "--set", f"replay.roll_back={str(rolls_back).lower()}",
    )  # fmt: skip
    assert (code, document["error"], document["restarts"]) == (0, None, 0)
    (fallen,) = (event for event in run.events() if "the return has fallen" in event)
    assert "of what was gained from 0.0 to 50.0" in fallen, "five steps of 10"
    state = CheckpointStore(run.path / "checkpoints").load_latest().state
    if not rolls_back:
        assert state["rollbacks"] == 0
        return
    assert state["rollbacks"] == 1
    (back,) = (event for event in run.events() if said in event)
    at, of, best = map(
        int, re.search(r"update (\d+) to the checkpoint of update (\d+), .* policy \((\d+)\)", back).groups()
    )
    assert best == best_updates(run.path)
    assert of < at <= state["updates"]
    assert abs(of - best) < abs(at - best)
    assert "learning rates are 0.5 of the settings" in back
    assert not any("publishing weights failed" in event for event in run.events())
