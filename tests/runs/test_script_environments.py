"""A script's own environment, by the real commands: trained from the script, then used from the command line."""

import json
import os
import subprocess
import sys

import pytest
from harness import PATIENCE_S, REPO

ENVIRONMENT = """
import gymnasium
import numpy as np
import spreeze


class Slope(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, length=20, render_mode=None):
        self.length, self.render_mode = length, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, action[0], np.float32), float(action[0]), self.steps == self.length, False, {}

    def render(self):
        return np.zeros((64, 64, 3), np.uint8)


def make_env(render_mode=None):
    return Slope(10, render_mode)


gymnasium.register("Slope-v0", Slope, max_episode_steps=7)
print("imported")
"""
TRAINING = """
run = spreeze.train({task}, mode={mode!r}, updates=2, quiet=True, settings={{
    "replay.learning_starts": 50, "sac.hidden_sizes": [2], "evaluation.episodes": 1, "learner.batch_size": 2,
    "visualizer.enabled": False}})
print(run.config["env"]["id"], run.config["env"]["import_module"], *run.config["env"]["args"], run.summary["updates"])
"""
GUARD = "\nif __name__ == '__main__':\n    "


def script(*tasks, mode="serial", guarded=False):
    body = "".join(TRAINING.format(task=task, mode=mode) for task in tasks).strip()
    return ENVIRONMENT + (GUARD + body.replace("\n", "\n    ") if guarded else body) + "\n"


def done(*words, cwd):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=cwd, timeout=PATIENCE_S,
                          env={**os.environ, "PYTHONPATH": str(REPO)})  # fmt: skip


def output(*words, cwd):
    found = done(*words, cwd=cwd)
    assert found.returncode == 0, found.stderr
    return found.stdout


def last_error(*words, cwd):
    found = done(*words, cwd=cwd)
    assert found.returncode
    return found.stderr.splitlines()[-1]


@pytest.mark.parametrize(("guarded", "tasks"), [
    (False, {"'Slope-v0'": "Slope-v0 walks.py 2"}),
    (True, {"make_env": "walks.py:make_env walks.py 2"}),
    pytest.param(False, {"Slope": "walks.py:Slope walks.py 2", "lambda: Slope(length=5)":
                         "walks.py:Slope walks.py length=5 2"}, marks=pytest.mark.slow),
    pytest.param(True, {"lambda: Slope(5)": "walks.py:Slope walks.py length=5 2"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_script_trains_on_what_it_defines_with_and_without_a_main_guard(tmp_path, guarded, tasks):
    (tmp_path / "walks.py").write_text(script(*tasks, guarded=guarded))
    assert output("walks.py", cwd=tmp_path).splitlines() == ["imported", *tasks.values()]


def test_a_run_of_a_script_s_environment_is_used_from_the_command_line(tmp_path):
    path, own = tmp_path / "my-walks.py", ("--import", "my-walks.py")
    path.write_text(script("lambda: Slope(length=5)", mode="spreeze"))
    output(path.name, cwd=tmp_path)
    resumed = output("-m", "spreeze.train", "--resume", "latest", *own, "--updates=4", "--json", cwd=tmp_path)
    assert json.loads(resumed)["updates"] >= 4
    played = output("-m", "spreeze", "evaluate", "latest", "--episodes=1", *own, "--json", cwd=tmp_path)
    assert json.loads(played)["length_mean"] == 5
    output("-m", "spreeze", "export", "latest", "--format=numpy", "--out=policy.npz", cwd=tmp_path)
    path.write_text(ENVIRONMENT)
    assert "return" in output("policy_numpy_example.py", cwd=tmp_path)
    examined = output("-m", "spreeze", "doctor", "--env=my-walks.py:Slope", *own, "--json", cwd=tmp_path)
    assert {check["status"] for check in json.loads(examined)["checks"] if check["name"] == "environment"} == {"ok"}
    refused = last_error("-m", "spreeze", "evaluate", "latest", cwd=tmp_path)
    assert "if you trust it, add --import my-walks.py" in refused


@pytest.mark.parametrize("task", ["Slope", "lambda: Slope()"])
def test_what_a_notebook_or_console_defines_is_refused_with_what_to_do(tmp_path, task):
    line = last_error("-c", script(task), cwd=tmp_path)
    assert "Slope is defined in this notebook or console, which other processes cannot import" in line
    assert "%%writefile my_envs.py" in line
    assert not (tmp_path / "runs").exists()


def test_a_class_behind_the_main_guard_is_refused_with_the_reason(tmp_path):
    text = script("Late", guarded=True).replace(GUARD, f"{GUARD}class Late(Slope):\n        pass\n    ")
    (tmp_path / "walks.py").write_text(text)
    reason = "code under if __name__ == '__main__', or after its first training call, does not run"
    assert reason in last_error("walks.py", cwd=tmp_path)


@pytest.mark.parametrize(("module", "line", "reason"), [
    ("walks", "", "ImportError: walks trains when it is imported: put its training under if __name__ == '__main__'"),
    ("walks.py", "sys.exit(3)", "walks.py ends when it is imported: put what it does under if __name__"),
    ("walks.py", "1 / 0", "ZeroDivisionError: division by zero"),
    ("gone.py", "", "gone.py"),
])  # fmt: skip
def test_what_cannot_be_imported_is_refused_in_one_line(tmp_path, module, line, reason):
    (tmp_path / "walks.py").write_text(f"import sys\n{line}\n{script('Slope')}")
    assert reason in last_error("-m", "spreeze.train", f"--import={module}", f"--env={module}:Slope", cwd=tmp_path)


def test_a_script_whose_name_no_task_could_have_is_refused(tmp_path):
    (tmp_path / "my walks.py").write_text(script("Slope"))
    assert "my walks.py: rename this script" in last_error("my walks.py", cwd=tmp_path)
