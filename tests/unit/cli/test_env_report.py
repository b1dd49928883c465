"""What the doctor says of an environment, good ones and bad ones."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from harness import run_command
from row_sinks import Rows

from spreeze.cli.doctor import check_env
from spreeze.envs.make import make_env
from spreeze.envs.probe import plain_text
from spreeze.envs.task import make_task, open_task
from spreeze.errors import EnvError, WorkerError
from spreeze.workers.collectors.transition_collector import TransitionCollector

pytestmark = pytest.mark.warm

EXTENDING = (Path(__file__).resolve().parents[3] / "assets/docs/extending.md").read_text(encoding="utf-8")
BAD_ENVS = """
import gymnasium
import numpy as np

BOX = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)


class Plain(gymnasium.Env):
    observation_space = action_space = BOX

    def __init__(self, render_mode=None):
        self.render_mode, self.steps = render_mode, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 1).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), 0.0, False, False, {}


class OnlyWindow(Plain):
    metadata = {"render_modes": ["human"]}


class Unseeded(Plain):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.random.default_rng().uniform(-1, 1, 1).astype(np.float32), {}


class Growing(Plain):
    def step(self, action):
        self.steps += 1
        return np.zeros(1 + self.steps // 40, np.float32), 0.0, False, False, {}


for cls in (OnlyWindow, Unseeded, Growing):
    gymnasium.register(f"{cls.__name__}-v0", cls, max_episode_steps=100)
gymnasium.register("Elsewhere-v0", "no_such_module_here:Env")
"""


@pytest.fixture
def bad_envs(tmp_path, monkeypatch):
    (tmp_path / "bad_envs.py").write_text(BAD_ENVS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "bad_envs"


def _named(checks):
    return {check.name: check for check in checks}


def test_a_good_environment_is_described_timed_weighed_and_drawn():
    checks, found = check_env("spreeze/Synthetic-v0", None, ("law=constant", "mean_s=0.001", "obs_dim=5"))
    checks = _named(checks)
    assert [check.status for check in checks.values()] == ["ok"] * 8 or checks["env speed"].status == "warn"
    assert "it has no registered time limit" in checks["env notes"].text
    assert "5 observation values, 2 continuous actions" in checks["environment"].text
    assert "sac" in checks["environment"].text
    assert ".recurrent=lstm" in checks["recurrent"].text
    assert "for each additional one" in checks["env memory"].text
    assert "draws 60 x 48" in checks["env pictures"].text
    checkup = found["checkup"]
    assert 1000 <= checkup["step_us_p50"] <= checkup["step_us_p99"] <= checkup["step_us_max"]
    assert checkup["steps_per_s"] <= 1000
    assert checkup["reset_us_median"] > 0
    assert found["memory_bytes"] > 0


def test_uneven_steps_are_a_warning_with_what_to_try():
    checks, _ = check_env("spreeze/Synthetic-v0", None, ("law=gamma", "mean_s=0.0005", "cv=4.0"))
    assert _named(checks)["env speed"].status == "warn"
    assert "--envs-per-sampler" in _named(checks)["env speed"].remedy


def test_an_environment_that_draws_only_in_a_window_trains_and_says_so(bad_envs):
    checks, found = check_env("OnlyWindow-v0", bad_envs)
    assert found is not None
    picture = _named(checks)["env pictures"]
    assert (picture.status, "only as human, which needs a display" in picture.text) == ("warn", True)
    with pytest.raises(EnvError, match="no clips and no live picture"):
        make_env("OnlyWindow-v0", bad_envs, "rgb_array")
    make_env("OnlyWindow-v0", bad_envs).close()


def test_an_environment_that_ignores_its_seed_is_found_out(bad_envs):
    checks, _ = check_env("Unseeded-v0", bad_envs)
    note = _named(checks)["env checker"]
    assert note.status == "warn"
    assert "evaluations are not reproducible" in note.text


def test_an_observation_that_changes_its_shape_is_named_with_environment_and_shapes(bad_envs):
    (found,), figures = check_env("Growing-v0", bad_envs)
    assert (found.status, figures) == ("fail", None)
    assert "Growing-v0 returned observation = shape (2,); expected (1,)" in found.text


def test_a_sampler_of_it_ends_with_that_line_too(bad_envs):
    spec = make_task("Growing-v0", bad_envs).spec
    sampling = TransitionCollector(lambda: open_task(spec), 2, spec, Rows(), n_step=1, gamma=0.9, seeds=[0, 1])

    def sample():
        for _ in range(1000):
            sampling.step(np.zeros((2, 1), np.float32), 0)

    with pytest.raises(WorkerError, match=r"Growing-v0 returned observation = shape \(2,\); expected \(1,\)"):
        sample()
    sampling.close()


def test_a_module_that_is_missing_is_named(bad_envs):
    with pytest.raises(EnvError, match="No module named 'no_such_module_here'"):
        make_env("Elsewhere-v0", bad_envs)
    with pytest.raises(EnvError, match=r"comes from module 'minigrid': (pip install minigrid, then )?add"):
        make_env("MiniGrid-Empty-5x5-v0")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("\x1b[33mWARN: For Box action spaces, we recommend using a symmetric and normalized space\x1b[0m", None),
        ("Deterministic step observations are not equivalent for the same seed and action", "are not reproducible"),
        ("\x1b[33mWARN: something  new\x1b[0m", "something new"),
    ],
)
def test_the_checker_speaks_plainly(said, words):
    spoken = plain_text(said)
    assert spoken is None if words is None else words in spoken


def test_the_example_environment_is_examined(tmp_path, monkeypatch):
    """Trained on it is by ``tests/runs/test_printed_commands.py``."""
    section = EXTENDING[EXTENDING.index("## Your own environment in five minutes") :]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    (tmp_path / "my_robot.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    command = next(line for line in section.splitlines() if line.startswith("python -m spreeze doctor"))
    done = run_command("doctor", *command.split()[4:])
    assert "MyRobot-v0: 2 observation values, one continuous action, at most 100 env steps" in " ".join(
        done.stdout.split()
    )
    assert "no warnings" in " ".join(done.stdout.split())
