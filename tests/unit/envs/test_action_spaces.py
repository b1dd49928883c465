"""What an action is: spaces to specs and back, files of earlier versions, and which algorithms can learn it."""

import dataclasses
import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from spreeze.config.algorithms import actions_text, check_algorithm, fitting_algorithms, rows
from spreeze.config.modes import find_mode
from spreeze.envs.action_spaces import action_of
from spreeze.envs.make import describe
from spreeze.envs.task import Task, uniform_actions
from spreeze.errors import ConfigError, EnvironmentError_
from spreeze.types import Box, Choices, EnvSpec, TeamSpec, spec_from

BASE = {"env_id": "T-v0", "import_module": None, "obs_dim": 4, "max_episode_steps": None, "reward_threshold": None}
CASES = {
    "box": (spaces.Box(-2.0, 2.0, (2, 1), np.float64), Box((-2.0, -2.0), (2.0, 2.0), (2, 1)), "2 continuous actions"),
    "discrete": (spaces.Discrete(3, start=5), Choices((3,), (5,)), "3 discrete actions"),
    "one of several": (spaces.MultiDiscrete([3], start=[1]), Choices((3,), (1,), (1,)), "3 discrete actions"),
    "several": (spaces.MultiDiscrete([3, 2, 3], start=[0, -1, 5], dtype=np.int32), Choices((3, 2, 3), (0, -1, 5), (3,)),
                "3 choices at once among 3, 2 discrete actions"),
    "table": (spaces.MultiDiscrete([[3, 1], [2, 4]]), Choices((3, 1, 2, 4), shape=(2, 2)),
              "4 choices at once among 3, 1, 2, 4 discrete actions"),
    "bits": (spaces.MultiBinary(3), Choices((2, 2, 2), shape=(3,)), "3 choices at once among 2 discrete actions"),
    "bit table": (spaces.MultiBinary([2, 2]), Choices((2,) * 4, shape=(2, 2)),
                  "4 choices at once among 2 discrete actions"),
}  # fmt: skip


class Keeps(gymnasium.Env):
    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)

    def __init__(self, space):
        self.action_space, self.taken = space, []

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.taken.append(action)
        return np.zeros(4, np.float32), 0.0, False, False, {}


def spec_of(action, **changes):
    return EnvSpec(**{**BASE, **changes}, action=action)


@pytest.mark.parametrize("name", CASES)
def test_a_space_is_described_and_its_environment_gets_only_actions_of_it(name):
    space, expected, text = CASES[name]
    task = Task(Keeps(space), describe(Keeps(space)))
    assert (task.spec.action, actions_text(task.spec)) == (expected, text)
    drawn = uniform_actions(task.spec, 200, np.random.default_rng(0))
    assert drawn.shape == (200, task.spec.action_dim)
    for action in task.unscale_action(drawn):
        task.step(action)
    assert all(space.contains(action) for action in task.env.taken)
    if task.spec.choices is not None:
        assert {np.asarray(action).tobytes() for action in task.env.taken} == {
            task.spec.choices.to_env(row[None])[0].astype(space.dtype).tobytes() for row in drawn
        }
        assert drawn.min(0).tolist() == [0.0] * task.spec.action_dim
        assert drawn.max(0).tolist() == [count - 1.0 for count in task.spec.choices.nvec]


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([1, 1]), spaces.MultiDiscrete([5000, 2]), spaces.Discrete(1)])
def test_too_few_and_too_many_options_are_refused(space):
    with pytest.raises(EnvironmentError_, match="supported are 2 to 4096"):
        action_of("T-v0", space)


def test_a_description_comes_back_from_json():
    for _, action, _ in CASES.values():
        spec = spec_of(action)
        assert spec_from(json.loads(json.dumps(dataclasses.asdict(spec)))) == spec


OLD = {
    "vector": ({"action_dim": 2, "action_low": [-1.0, 0.0], "action_high": [1.0, 2.0], "action_shape": [2]},
               Box((-1.0, 0.0), (1.0, 2.0), (2,))),
    "vector without shape": ({"action_dim": 1, "action_low": [-1.0], "action_high": [1.0]}, Box((-1.0,), (1.0,))),
    "discrete": ({"action_dim": 1, "action_low": [5.0], "action_high": [7.0], "num_actions": 3, "action_start": 5,
                  "action_shape": None}, Choices((3,), (5,))),
    "team": ({"action_dim": 2, "action_low": [0.0, 0.0], "action_high": [1.0, 3.0], "num_actions": 4,
              "team": {"actions": [2, 4], "obs_dim": 2, "state_dim": 0}}, Choices((2, 4), shape=(2,))),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_a_description_of_version_0_1_0_is_read(name):
    fields, action = OLD[name]
    team = TeamSpec(actions=(2, 4), obs_dim=2, state_dim=0) if name == "team" else None
    assert spec_from(BASE | fields) == spec_of(action, team=team)


@pytest.mark.parametrize(("action", "told"), [
    ({}, "missing"), ({"low": [0.0], "high": []}, "action.high"), ({"low": [1.0], "high": [0.0]}, "action.low"),
    ({"nvec": [3, 2], "shape": [3]}, "action.shape"), ({"nvec": [0], "shape": []}, "action.nvec"),
    ({"nvec": [3], "start": [1, 2]}, "action.start"), ({"nvec": [], "shape": [0]}, "action_dim"), (7, "action"),
    ({"nvec": [3], "high": [1.0]}, "unexpected|expected"), ({"low": "x", "high": [1.0]}, "low"),
    ({"nvec": [10**9]}, "action.nvec"), ({"nvec": [6 * 10**7] * 2, "shape": [2]}, "action.nvec"),
])  # fmt: skip
def test_a_contradiction_is_a_line_that_names_it(action, told):
    with pytest.raises(ValueError, match=told):
        spec_from(BASE | {"action": action})


def test_several_choices_are_for_the_on_policy_algorithms_and_others_say_so():
    spec = spec_of(CASES["several"][1])
    on_policy = ("ppo", "a2c", "impact", "appo", "impala")
    assert fitting_algorithms(spec) == on_policy
    for row in rows().values():
        if row.name not in on_policy:
            with pytest.raises(ConfigError, match=f"--algo {row.name}: .*T-v0 has 3 choices at once .* impala fit"):
                check_algorithm(row.name, spec, find_mode("spreeze"))
    one = spec_of(CASES["one of several"][1])
    assert {"dqn", "sac", "ppo"} <= set(fitting_algorithms(one))
