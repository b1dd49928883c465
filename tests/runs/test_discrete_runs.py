"""Discrete tasks through the verbs: train, evaluate, play, resume, serial; with real processes."""

import json

import pytest
from harness import HIDDEN_SIZES, TINY, refused, run_command, train, train_until

_CART = ("--env", "CartPole-v1")
_SMALL = (*TINY, "--set", f"dqn.hidden_sizes={HIDDEN_SIZES}")
_RAINBOW = tuple(part for setting in ("critics=categorical", "noisy=true", "dueling=true", "priority_exponent=0.5")
                 for part in ("--set", f"dqn.{setting}"))  # fmt: skip


def test_an_unnamed_algorithm_is_chosen_learns_is_evaluated_shown_and_resumed(tmp_path):
    run, code, document = train(tmp_path, *_CART, *_RAINBOW, "--updates", "60", tiny=_SMALL)
    assert code == 0
    assert (document["algo"], document["updates"], document["restarts"]) == ("dqn", 60, 0)
    assert "algorithm dqn: the default for 2 discrete actions (sac fits too)" in run.stderr
    assert 'algo = "dqn"  # action space' in (run.path / "config.toml").read_text()
    scored = run_command("evaluate", run.path, "--episodes", "3", "--json")
    assert scored.returncode == 0, scored.stderr
    assert json.loads(scored.stdout)["return_mean"] >= 8.0  # a pole cannot fall sooner
    clip = tmp_path / "clip.mp4"
    shown = run_command("play", run.path, "--clip", clip)
    assert shown.returncode == 0, shown.stderr
    assert clip.stat().st_size > 0
    _, code, second = train(tmp_path, "--resume", "run", "--updates", "100", tiny=())
    assert code == 0
    assert (second["algo"], second["updates"]) == ("dqn", 100)
    assert second["env_steps"] > document["env_steps"]


def test_soft_actor_critic_learns_discrete_actions_under_its_own_name(tmp_path):
    def seen(run):
        return run.numbers().get("updates", 0) >= 150 and "eval_return" in run.numbers()

    _, code, document = train_until(tmp_path, seen, *_CART, "--algo", "sac")
    assert code == 0
    assert (document["algo"], document["updates"] >= 150) == ("sac", True)
    assert document["eval_return_mean"] >= 8.0  # a pole cannot fall sooner


@pytest.mark.parametrize("settings", [
    _RAINBOW, *(pytest.param(("--set", f"dqn.n_step={n_step}"), marks=pytest.mark.slow) for n_step in (1, 3)),
])  # fmt: skip
def test_serial_runs_of_one_seed_are_equal_bit_by_bit(tmp_path, settings):
    def sha(name):
        _, code, document = train(
            tmp_path, *_CART, *settings, "--mode", "serial", "--updates", "60", tiny=_SMALL, name=name
        )
        assert code == 0
        return document["parameters_sha256"]

    assert sha("first") == sha("again")


def test_overlapped_updates_are_refused_for_discrete_actions(tmp_path, capsys):
    document, _ = refused(capsys, tmp_path, *_SMALL, *_CART, "--set", "learner.overlap=true")
    assert document["error"].startswith("learner.overlap = true: it needs an actor with continuous actions")
    assert list(tmp_path.iterdir()) == []
