"""Mode device with real processes, on the processor: it learns, repeats, survives its learner's death, and resumes."""

import os
import signal

import numpy as np
import pytest
from harness import HIDDEN_SIZES, Run, refused, run_command, train

from spreeze import load_policy

_PENDULUM = ("--env", "vector:DevicePendulum-v0", "--import", "device_envs", "--mode", "device", "--device", "cpu",
             "--envs-per-sampler", "64", "--seed", "1")  # fmt: skip
_SMALL = ("--set", "evaluation.episodes=2", "--set", "learner.checkpoint_interval_s=0.5", "--no-visualizer")
_SAC = ("--algo", "sac", "--batch-size", "64", "--set", "replay.learning_starts=500", "--set",
        f"sac.hidden_sizes={HIDDEN_SIZES}")  # fmt: skip
_PPO = ("--algo", "ppo", "--sync-interval", "16", "--set", f"ppo.hidden_sizes={HIDDEN_SIZES}")


@pytest.mark.parametrize("algo", [_SAC, _PPO], ids=["sac", "ppo"])
def test_equal_seeds_give_equal_bits_and_the_run_says_what_is_where_and_is_evaluated_and_exported(tmp_path, algo):
    found = []
    for name in ("one", "two"):
        run, code, document = train(tmp_path, *_PENDULUM, *algo, "--updates", "60", name=name, tiny=_SMALL)
        assert (code, document["mode"], document["error"]) == (0, "device", None)
        found.append(document["parameters_sha256"])
    assert found[0] == found[1]
    assert document["env_steps"] > 500
    assert any("64 environments, their rows and the updates are on cpu" in text for text in run.events())
    assert np.isfinite(load_policy(run.path).predict(np.array([1.0, 0.0, 0.0]))).all()
    if algo is _PPO:
        return
    for name, *options in (  # as a policy of any other mode
        ("evaluate", "--episodes", "2", "--import", "device_envs"),
        ("export", "--format", "numpy", "--out", str(tmp_path / "policy.npz")),
    ):
        done = run_command(name, str(run.path), *options)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("algo", [_SAC, pytest.param(_PPO, marks=pytest.mark.slow)], ids=["sac", "ppo"])
def test_a_killed_learner_continues_from_its_checkpoint_and_a_resumed_run_from_its_counts(tmp_path, algo):
    with Run(tmp_path, *_PENDULUM, *algo, tiny=_SMALL) as run:
        run.until_updates(50)
        run.wait_for(lambda: [*run.path.glob("checkpoints/ckpt-*")], what="a checkpoint")
        victim = run.children()["learner"]
        os.kill(victim.pid, signal.SIGKILL)
        run.wait_for(lambda: run.children().get("learner") not in (None, victim), what="another learner")
        run.until_progress()
        code, document = run.stop()
        assert (code, document["restarts"], document["error"]) == (0, 1, None)
        assert any("learner continues from update" in event for event in run.events())
        assert run.nonce_processes() == []
    _, code, again = train(
        tmp_path, "--resume", "run", "--import", "device_envs", "--updates", str(document["updates"] + 20), tiny=()
    )
    assert code == 0
    assert again["updates"] >= document["updates"] + 20
    assert again["env_steps"] > document["env_steps"]


@pytest.mark.parametrize(("given", "text"), [
    (("--env", "Pendulum-v1"), "environments on a device come from an engine"),
    (("--env", "vector:DevicePendulum-v0", "--import", "device_envs", "--save-replay"), "replay is on the device"),
    (("--env", "vector:DevicePendulum-v0", "--import", "device_envs", "--set", "sac.priority_exponent=0.6"),
     "priorities of rows are on the host"),
])  # fmt: skip
def test_what_cannot_be_on_a_device_is_refused_in_one_line(tmp_path, capsys, given, text):
    document, _ = refused(capsys, tmp_path, *given, "--mode", "device", "--algo", "sac")
    assert text in document["error"]


@pytest.mark.slow
def test_sixty_four_pendulums_are_learned_with_ppo(tmp_path):
    _, code, document = train(
        tmp_path, *_PENDULUM, "--algo", "ppo", "--sync-interval", "32", "--env-steps", "200000", tiny=_SMALL
    )
    assert code == 0
    assert document["eval_return_mean"] > -400
