"""Policies that come with Spreeze: found by name, behind runs of the same name, and as good as they say."""

import importlib.util

import pytest
from command_parsers import parser_of

from spreeze import load_policy
from spreeze.cli.evaluate import evaluate, find_weights, main, pretrained_policies
from spreeze.errors import RunError
from spreeze.transport.weights import read_weights

NAMES = sorted(pretrained_policies())
SCATTERED = ("humanoid", "reacher")
"""Policies whose returns differ much from episode to episode."""


def test_a_run_of_the_same_name_goes_first(tmp_path):
    assert find_weights("walker2d", tmp_path) == pretrained_policies()["walker2d"]
    (tmp_path / "walker2d" / "weights").mkdir(parents=True)
    (tmp_path / "walker2d" / "run.json").write_text("{}")
    with pytest.raises(RunError, match="run walker2d has no weights"):
        find_weights("walker2d", tmp_path)


def test_a_misspelt_policy_is_named(tmp_path):
    with pytest.raises(RunError, match=r"no run 'walker2e' .*did you mean 'walker2d'"):
        find_weights("walker2e", tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_is_small_and_acts_for_its_task(name, tmp_path):
    path = pretrained_policies()[name]
    assert path.stat().st_size < 700_000
    weights = read_weights(path)
    obs = [0.0] * weights.meta["obs_dim"]
    action = load_policy(name, runs_dir=tmp_path, seed=0).predict(obs, deterministic=True)
    assert action.shape == (weights.meta["action_dim"],)


@pytest.mark.skipif(importlib.util.find_spec("pybullet") is None, reason="Bullet has no wheel for this Python")
@pytest.mark.parametrize("name", NAMES)
def test_a_policy_still_has_the_return_that_its_file_names(name, tmp_path):
    promised = read_weights(pretrained_policies()[name]).meta["trained"]["return_mean"]
    episodes = "4" if name in SCATTERED else "2"
    args = [name, "--runs-dir", str(tmp_path), "--episodes", episodes, "--seed", "10000"]
    tasks = []
    try:
        found = evaluate(parser_of(main).parse_args(args), tasks)
    finally:
        for task in tasks:
            task.close()
    assert found["return_mean"] > promised - 0.2 * abs(promised)
