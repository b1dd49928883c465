"""How an environment of a calling program gets its name, by which the processes of a run find it."""

import functools

import gymnasium
import nested_env
import numpy as np
import pytest
from harness import REPO

import spreeze
from spreeze.envs.callers import name_of, unwrap_call
from spreeze.errors import EnvError, UsageError
from spreeze.run_directory import read_config


@pytest.fixture
def registry(monkeypatch):
    """Where a test may register what it likes."""
    made = dict(gymnasium.registry)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", made)
    return made


def add(registry, env_id, entry_point, **more):
    registry[env_id] = gymnasium.envs.registration.EnvSpec(id=env_id, entry_point=entry_point, **more)
    return registry[env_id]


def outside():
    class Inside(gymnasium.Env):
        pass

    return Inside


@pytest.mark.parametrize(("task", "module", "expected"), [
    ("Pendulum-v1", None, ("Pendulum-v1", None)),
    ("Mine-v0", "mine", ("Mine-v0", "mine")),
    ("mine:Mine-v0", None, ("mine:Mine-v0", "mine")),
    ("parallel:mine", None, ("parallel:mine", "mine")),
    ("vector:CartPole-v1", None, ("vector:CartPole-v1", None)),
    ("Walker2DBulletEnv-v0", None, ("Walker2DBulletEnv-v0", None)),
    (gymnasium.spec("Pendulum-v1"), None, ("Pendulum-v1", None)),
    (gymnasium.spec("NestedGoal-v0"), None, ("NestedGoal-v0", "nested_env")),
    ("NestedGoal-v0", None, ("NestedGoal-v0", "nested_env")),
    (nested_env.NestedGoal, None, ("nested_env:NestedGoal", "nested_env")),
    (nested_env.made, None, ("nested_env:made", "nested_env")),
    (nested_env.made, "nested_env", ("nested_env:made", "nested_env")),
])  # fmt: skip
def test_what_other_processes_can_import_gets_a_name(task, module, expected):
    assert name_of(task, module) == expected


def test_what_this_program_has_registered_is_found_by_the_module_that_makes_it(registry):
    add(registry, "Text-v0", "nested_env:NestedGoal")
    add(registry, "Partial-v0", functools.partial(nested_env.made, wide=True))
    add(registry, "VectorOnly-v0", None, vector_entry_point="nested_env:made")
    names = ("Text-v0", "Partial-v0", "VectorOnly-v0")
    assert [name_of(name)[1] for name in names] == ["nested_env", "nested_env", None]


@pytest.mark.parametrize(("task", "module", "words"), [
    (3, None, "expected the Gymnasium id of a task, such as 'Pendulum-v1', or a class or function that constructs it"),
    (outside(), None, "defined inside a function, so other processes cannot import it; define it at module level"),
    (nested_env.NestedGoal, "image_env", "module 'image_env' does not define it"),
    (gymnasium.envs.registration.EnvSpec("Nowhere-v0", "a:B"), None, "it is not registered"),
    (gymnasium.envs.registration.EnvSpec("Pendulum-v1", "a:B"), None, "it differs from the registered one"),
])  # fmt: skip
def test_what_no_other_process_could_find_is_refused_with_what_to_give_instead(task, module, words):
    with pytest.raises(UsageError) as caught:
        name_of(task, module)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_environment_that_was_made_is_refused_with_its_id():
    with gymnasium.make("Pendulum-v1") as env, pytest.raises(UsageError, match="its id, 'Pendulum-v1', or its class"):
        spreeze.train(env)
    with pytest.raises(UsageError, match="pass its id or its class"):
        spreeze.train(nested_env.NestedGoal())


def nothing():
    raise AssertionError("called")


def sized(size):
    raise AssertionError("called")


SIZE = 3


def inside(width):
    return lambda: nested_env.made(wide=width)


@pytest.mark.parametrize(("task", "made", "arguments"), [
    (lambda: nested_env.made(wide=True), nested_env.made, {"wide": True}),
    (lambda: sized(SIZE), sized, {"size": 3}),
    (lambda size=4: nested_env.made(wide=size), nested_env.made, {"wide": 4}),
    (inside(5), nested_env.made, {"wide": 5}),
    (functools.partial(nested_env.made, wide=True), nested_env.made, {"wide": True}),
    (lambda: gymnasium.make("Pendulum-v1", g=5.0), "Pendulum-v1", {"g": 5.0}),
    (lambda: nothing(), nothing, {}),
    (nested_env.made, nested_env.made, {}),
])  # fmt: skip
def test_a_function_without_a_name_stands_for_what_it_calls(task, made, arguments):
    assert unwrap_call(task) == (made, arguments)


@pytest.mark.parametrize("task", [
    lambda: gymnasium.Wrapper(nested_env.made()),
    lambda: nested_env.made(wide=object()),
    lambda: nested_env.made(wide=np.zeros),
    lambda: nested_env.made(wrong=1),
    lambda: 3,
    lambda size: nested_env.made(wide=size),
    lambda: nested_env.made(SIZE + undefined),  # noqa: F821
    functools.partial(max, 1),
])  # fmt: skip
def test_a_function_without_a_name_that_does_more_is_refused_with_what_to_write(task):
    with pytest.raises(UsageError, match=r"write def make_env\(\): return \.\.\. at the top") as caught:
        unwrap_call(task)
    assert "\n" not in str(caught.value)


@pytest.mark.warm
def test_a_class_is_trained_and_its_run_finds_it_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    run = spreeze.train(nested_env.NestedGoal, mode="serial", updates=2, runs_dir=tmp_path, quiet=True,
                        env_args={"max_episode_steps": 20},
                        settings={"replay.learning_starts": 50, "sac.hidden_sizes": [2], "evaluation.episodes": 1,
                                  "learner.batch_size": 2})  # fmt: skip
    env = read_config(run.path)["env"]
    assert (env["id"], env["import_module"]) == ("nested_env:NestedGoal", "nested_env")
    assert run.resume(updates=4, quiet=True).summary["updates"] >= 4
    with run.policy("latest").make_env() as made:
        assert isinstance(made.unwrapped, nested_env.NestedGoal)
    with pytest.raises(EnvError, match="give import_module='nested_env'"):
        spreeze.load_policy(run.path)
