"""Demonstrations in real runs: recorded, learned from before and without env steps, resumed, and refused."""

import json

import numpy as np
import pytest
from harness import PENDULUM, Run, refused, run_command, train

TD3 = ("--algo", "td3", "--set", "td3.hidden_sizes=[16,16]", "--batch-size", "16", "--no-visualizer",
       "--set", "evaluation.episodes=2", "--set", "replay.learning_starts=100")  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Episodes of a policy that has learned nothing yet."""
    folder = tmp_path_factory.mktemp("recorded")
    run, code, _ = train(folder, *PENDULUM, *TD3, "--mode", "serial", "--updates", "5", tiny=())
    assert code == 0
    path = folder / "episodes.npz"
    shown = run_command("evaluate", run.path, "--episodes", "3", "--record", str(path), "--json")
    assert json.loads(shown.stdout)["record"] == str(path)
    with np.load(path) as file:
        assert file["observations"].shape == (600, 3)
        assert file["truncations"].sum() == 3
    return path


def test_without_samplers_a_run_learns_and_goes_on(tmp_path, recorded):
    offline = ("--demonstrations", str(recorded), "--offline", "--set", "td3.bc_alpha=2.5")
    run, code, document = train(tmp_path, *PENDULUM, *TD3, *offline, "--set", "env.normalize_obs=true",
                                "--updates", "60", name="offline", tiny=())  # fmt: skip
    assert (code, document["error"], document["updates"], document["env_steps"]) == (0, None, 60, 0)
    assert document["eval_return_final"] is not None
    _, code, document = train(tmp_path, "--resume", "offline", "--updates", "80", tiny=())
    assert (code, document["error"], document["updates"], document["env_steps"]) == (0, None, 80, 0)
    assert run_command("report", run.path, "--out", tmp_path / "report.html").returncode == 0


@pytest.mark.parametrize("mode", ["spreeze", "serial"])
def test_samplers_wait_until_the_policy_has_been_cloned(tmp_path, recorded, mode):
    cloning = ("--demonstrations", str(recorded), "--set", "td3.bc_updates=40", "--samplers", "1")
    with Run(tmp_path, *PENDULUM, *TD3, *cloning, "--mode", mode, "--no-governor", tiny=()) as run:
        run.until_updates(60)
        code, document = run.stop()
    assert (code, document["error"]) == (0, None)
    assert document["env_steps"] > 0
    assert any("learning from 600 transitions in replay; samplers wait" in event for event in run.events())
    assert any("learning started after 600 transitions" in event for event in run.events())


@pytest.mark.parametrize(("args", "message"), [
    ((*PENDULUM, "--offline", "--updates", "9"), "--offline: there is nothing else to learn from"),
    ((*PENDULUM, "--offline", "--demonstrations", "{file}", "--env-steps", "9"), "--offline: no env steps are taken"),
    ((*PENDULUM, "--algo", "ppo", "--demonstrations", "{file}"), "ppo learns without replay"),
    (("--env", "CartPole-v1", "--demonstrations", "{file}"), "observations of 3 values"),
    ((*PENDULUM, "--demonstrations", "D4RL/pen/human-v2"), "minari download D4RL/pen/human-v2"),
])  # fmt: skip
def test_what_cannot_be_learned_from_is_refused_in_one_line(tmp_path, capsys, recorded, args, message):
    document, _ = refused(capsys, tmp_path, *(arg.format(file=recorded) for arg in args))
    assert message in document["error"]
