"""Command lines as they are typed by users of other libraries."""

import pytest

from spreeze.cli import arguments
from spreeze.cli.arguments import build_parser, translated, user_values
from spreeze.config.algorithms import ALGORITHMS
from spreeze.config.schema import SECTIONS
from spreeze.errors import UsageError


def typed(text):
    notes = []
    return " ".join(translated(text.split(), notes.append)), notes


@pytest.mark.parametrize(("text", "meant"), [
    ("CartPole-v1 --seed 3", "--env CartPole-v1 --seed 3"),
    ("--env Pendulum-v1 --algo SAC", "--env Pendulum-v1 --algo sac"),
    ("--total-timesteps 1000", "--env-steps 1000"),
    ("--n-timesteps=1000", "--env-steps 1000"),
    ("--gym-packages robots --env Robot-v0", "--import robots --env Robot-v0"),
    ("--algo PPO --lr 1e-3 --gamma 0.98", "--algo ppo --set ppo.lr=1e-3 --set ppo.gamma=0.98"),
    ("--learning-rate=1e-3 --algo=dqn", "--set dqn.lr=1e-3 --algo dqn"),
    ("--set sac.gamma=0.9 --algo sac", "--set sac.gamma=0.9 --algo sac"),
    ("--env module:Own --algo my_own", "--env module:Own --algo my_own"),
])  # fmt: skip
def test_what_can_mean_one_thing_is_taken(text, meant):
    assert typed(text) == (meant, [])


@pytest.mark.parametrize(("text", "newest"), [
    ("CartPole", "CartPole-v1"), ("--env Pendulum", "Pendulum-v1"), ("--env=Walker2DBulletEnv", "Walker2DBulletEnv-v0"),
])  # fmt: skip
def test_an_environment_without_a_version_is_its_newest_and_that_is_said(text, newest):
    meant, notes = typed(text)
    assert meant == f"--env {newest}"
    assert notes == [f"--env {newest.rpartition('-')[0]}: {newest}, its newest version"]


@pytest.mark.parametrize(("text", "told"), [
    ("--n-envs 8", "--n-envs: use --samplers (processes) and --envs-per-sampler"),
    ("--steps=100", "--env-steps, or --updates"),
    ("--lr 1e-3", "--lr: use --set ALGO.lr=1e-3, such as --set ppo.lr=1e-3, or add --algo"),
    ("--algo sac --lr 1e-3", "--set sac.actor_lr=1e-3 --set sac.critic_lr=1e-3 --set sac.alpha_lr=1e-3"),
    ("--algo sac --clip-range 0.2", "sac has no setting clip"),
    ("--env-kwargs push:2", "--env-kwargs: use --env-arg KEY=VALUE for each"),
    ("--eval-episodes 20", "--set evaluation.episodes=N"),
])  # fmt: skip
def test_what_can_mean_several_things_is_told_with_what_to_type(text, told):
    with pytest.raises(UsageError) as refused:
        typed(text)
    assert told in str(refused.value)


@pytest.mark.parametrize("more", ["", "--env robot.py:Robot", "--resume latest"])
def test_a_module_without_a_task_of_it_is_told_to_train_the_default_task(more):
    _, notes = typed(f"--import robot.py {more}")
    told = "--import robot.py without --env: the default task; --env robot.py:CLASS trains a class of it"
    assert notes == ([] if more else [told])


def test_the_command_line_of_a_run_takes_them_and_tells_a_refusal_in_one_line(capsys):
    args = build_parser().parse_args(["CartPole", "--algo", "PPO", "--total-timesteps", "500", "--gamma", "0.9"])
    values = user_values(args)
    assert (values["env"], values["run"]) == ({"id": "CartPole-v1"}, {"algo": "ppo"})
    assert (values["stop"], values["ppo"]) == ({"env_steps": 500}, {"gamma": 0.9})
    assert capsys.readouterr().err == "--env CartPole: CartPole-v1, its newest version\n"
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--n-envs", "4"])
    assert "use --samplers (processes) and --envs-per-sampler" in capsys.readouterr().err


def test_every_setting_that_a_flag_means_is_one_of_some_algorithm():
    names = {name for algo in ALGORITHMS for name in SECTIONS[algo].__dataclass_fields__}
    assert set(arguments._SETTINGS.values()) <= names
    flags = set(build_parser()._option_string_actions)
    assert set(arguments._SAME.values()) <= flags
    assert not flags & {*arguments._SAME, *arguments._SETTINGS, *arguments._AMBIGUOUS}
