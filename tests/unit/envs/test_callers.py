"""How an environment of a calling program gets its name, by which the processes of a run find it."""

import functools
import subprocess
import sys

import gymnasium
import nested_env
import pytest
from harness import PATIENCE_S, REPO

import spreeze
from spreeze.envs.callers import name_of
from spreeze.errors import EnvironmentError_, UsageError
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
    (3, None, "expected the Gymnasium id of a task, such as 'Pendulum-v1', or the class or function that makes it"),
    (outside(), None, "made inside of a function, where no other process can find it; put it at the top of a module"),
    (lambda: None, None, "made inside of a function"),
    (functools.partial(nested_env.made, wide=True), None, "give the class or function itself, and its arguments"),
    (nested_env.NestedGoal, "image_env", "module 'image_env' has no such class or function"),
    ("Pendulum-v1", "__main__", "import_module='__main__': the environment is defined in the calling program itself"),
    (gymnasium.envs.registration.EnvSpec("Nowhere-v0", "a:B"), None, "it is not registered"),
    (gymnasium.envs.registration.EnvSpec("Pendulum-v1", "a:B"), None, "it differs from what is registered"),
])  # fmt: skip
def test_what_no_other_process_could_find_is_refused_with_what_to_give_instead(task, module, words):
    with pytest.raises(UsageError) as caught:
        name_of(task, module)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_environment_that_was_made_is_refused_with_its_id():
    with gymnasium.make("Pendulum-v1") as env, pytest.raises(UsageError, match="its id, 'Pendulum-v1', or its class"):
        spreeze.train(env)
    with pytest.raises(UsageError, match="give its id or its class"):
        spreeze.train(nested_env.NestedGoal())


SCRIPT = """
import gymnasium
import spreeze

class Here(gymnasium.Env):
    pass

gymnasium.register("Here-v0", Here)
gymnasium.register("Named-v0", "__main__:Here")
for task, module in (("Here-v0", None), ("Named-v0", None), (Here, None), ("Here-v0", "__main__")):
    try:
        spreeze.train(task, import_module=module, runs_dir="runs")
    except spreeze.errors.UsageError as error:
        print(error)
"""


@pytest.mark.parametrize("name", ["walks.py", "my-walks.py", None])
def test_what_a_script_itself_defines_is_refused_with_what_to_do(tmp_path, name):
    if name is not None:
        (tmp_path / name).write_text(SCRIPT)
    command = [sys.executable, *(["-c", SCRIPT] if name is None else [name])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    for line in lines:
        assert f"in the calling program itself ({name or 'this notebook or console'})" in line
        assert "into a module of its own, such as my_envs.py, and give import_module='my_envs'" in line
        assert ("import_module='walks' works if all that walks.py does stands under if __name__" in line) == (
            name == "walks.py"
        )
    assert not (tmp_path / "runs").exists()


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
    with pytest.raises(EnvironmentError_, match="give import_module='nested_env'"):
        spreeze.load_policy(run.path)
