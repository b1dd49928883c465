"""Real runs on images beside numbers: killed, resumed, evaluated, played, exported, loaded; by replay and rollouts."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from harness import PATIENCE_S, Run, refused, run_command, train

import spreeze
from spreeze.errors import UsageError

TASK = (
    "--import", "spreeze.envs.small_tasks", "--env", "Docking-v0", "--set", "image.size=36", "--set", "image.stack=2",
    "--samplers", "1", "--envs-per-sampler", "2", "--no-visualizer", "--set", "evaluation.episodes=1",
)  # fmt: skip
SAC = (*TASK, "--batch-size", "8", "--replay-capacity", "2000", "--set", "replay.learning_starts=50",
       "--set", "sac.cnn=impala_small", "--set", "sac.hidden_sizes=[16]", "--set", "sac.policy_average=0.9",
       "--set", "env.normalize_obs=true")  # fmt: skip


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run whose sampler and learner were killed, and which was resumed."""
    folder = tmp_path_factory.mktemp("killed")
    with Run(folder, name="killed", tiny=SAC) as run:
        for count, name in enumerate(("sampler-0", "learner"), 1):
            run.until_progress()
            os.kill(run.wait_for(lambda name=name: run.children().get(name), what=name).pid, signal.SIGKILL)
            run.wait_for(lambda count=count: run.numbers().get("restarts", 0) >= count, what=f"another {name}")
        run.until_progress()
        assert any("env steps, with" in event for event in run.events()), "rows of images are more than env steps"
        code, document = run.stop()
    assert (code, document["error"]) == (0, None), run.stderr
    again, code, resumed = train(
        folder, "--resume", str(run.path), *TASK[:2], "--updates", str(document["updates"] + 5), tiny=()
    )
    assert code == 0, again.stderr
    assert resumed["updates"] == document["updates"] + 5
    assert "replay may grow to 2,000 frames of 1.3 KiB, 2.5 MiB" in again.stderr
    return run.path


def test_a_run_is_evaluated_played_and_exported_with_a_program_that_scores_the_same(killed, tmp_path):
    clip, out = tmp_path / "docking.mp4", tmp_path / "policy.npz"
    imports = ("--import", "spreeze.envs.small_tasks")
    found = run_command("evaluate", killed, *imports, "--episodes", 3, "--seed", 0, "--checkpoint", "latest", "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["length_mean"] == 10
    shown = run_command("play", killed, *imports, "--clip", clip)
    assert shown.returncode == 0, shown.stderr
    assert clip.stat().st_size > 500
    told = run_command("export", killed, "--format", "numpy", "--checkpoint", "latest", "--out", out)
    assert told.returncode == 0, told.stderr
    program = subprocess.run(
        [sys.executable, tmp_path / "policy_numpy_example.py"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    returns = [float(line.rpartition(" ")[2]) for line in program.stdout.splitlines()]
    played = [row["episode_return"] for row in json.loads(found.stdout)["per_episode"]]
    assert returns == pytest.approx(played, abs=0.06)


def test_a_loaded_policy_acts_in_its_environment_and_refuses_another_observation(killed):
    policy = spreeze.load_policy(killed, import_module="spreeze.envs.small_tasks")
    env = policy.make_env()
    obs, _ = env.reset(seed=0)
    assert obs.shape == (2, 36 * 36 + 4)
    assert env.action_space.contains(policy.predict(obs))
    assert policy.predict(np.stack([obs, obs])).shape == (2, 1)
    env.close()
    with pytest.raises(UsageError, match=r"expected \(2, 1300\)"):
        policy.predict(obs[:1])


@pytest.mark.parametrize("algo", ["ppo", pytest.param("impact", marks=pytest.mark.slow)])
def test_rollouts_carry_both_parts(algo, tmp_path):
    args = (*TASK, "--algo", algo, "--env-arg", "discrete=True", "--env-steps", "400", "--sync-interval", "16",
            "--set", "env.normalize_obs=true", *(f"--set={algo}.{text}" for text in ("cnn=impala_small",
            "hidden_sizes=[16]")))  # fmt: skip
    run, code, document = train(tmp_path, tiny=args)
    assert code == 0, run.stderr
    assert document["updates"] > 0
    assert "treated as 1 image (camera (40, 40, 3) as 1 x 36 x 36; the last 2 frames) and 1 number" in run.stderr


def test_a_picture_that_is_none_beside_numbers_says_which(tmp_path, capsys):
    document, _ = refused(capsys, tmp_path, *TASK, "--env-arg", "parts=vector", "--set", "env.image=true")
    assert "env.image = true" in document["error"]


def test_images_alone_have_no_normalizer(tmp_path, capsys):
    alone = ("--env-arg", "parts=image", "--env-arg", "discrete=True", "--algo", "ppo")
    document, _ = refused(capsys, tmp_path, *TASK, *alone, "--set", "env.normalize_obs=true")
    assert "images are scaled by 1/255 already" in document["error"]
