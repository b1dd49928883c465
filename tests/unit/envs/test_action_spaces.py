"""What an action is: spaces to specs and back, and which algorithms can learn it."""

import dataclasses
import json

import gymnasium
import numpy as np
import parts_env
import pytest
from gymnasium import spaces

from spreeze.config.algorithms import actions_text, check_algorithm, fitting_algorithms, rows
from spreeze.config.modes import find_mode
from spreeze.envs.action_spaces import action_of, row_of, uniform_actions
from spreeze.envs.make import describe
from spreeze.envs.obs_flattening import LeafError, mask_of
from spreeze.envs.single_env import SingleEnv
from spreeze.envs.task import ActionScaling, Task, make_task, spec_from
from spreeze.envs.vector_task import VectorTask
from spreeze.errors import ConfigError, EnvError
from spreeze.types import Box, Choices, EnvSpec, Mixed

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
    for action in task.to_env_units(drawn):
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
    with pytest.raises(EnvError, match="supported are 2 to 4096"):
        action_of("T-v0", space)


def test_a_description_comes_back_from_json():
    for _, action, _ in CASES.values():
        spec = spec_of(action)
        assert spec_from(json.loads(json.dumps(dataclasses.asdict(spec)))) == spec


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


# --- Dict and Tuple ---

INNER = spaces.Dict({"reach": spaces.Box(-2.0, 2.0, (), np.float64), "bits": spaces.MultiBinary(2)})
NESTED = {
    "all kinds": (spaces.Tuple((spaces.Discrete(3, start=5), INNER, spaces.MultiDiscrete([[3, 2]], start=[[1, 0]]))),
                  Mixed(Box((-2.0,), (2.0,), (1,)), Choices((3, 2, 2, 3, 2), (5, 0, 0, 1, 0), (5,))),
                  "5 choices at once among 3, 2 discrete actions beside one continuous action"),
    "boxes": (spaces.Dict({"b": spaces.Box(0.0, 1.0, (2,)), "a": spaces.Box(-1.0, 1.0, (2, 1), np.float64)}),
              Box((-1.0, -1.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0), (4,)), "4 continuous actions"),
    "one choice": (spaces.Dict({"gear": spaces.Discrete(4, start=1)}), Choices((4,), (1,), (1,)), "4 discrete actions"),
    "hybrid": (spaces.Tuple((spaces.Discrete(3), spaces.Box(0.0, 1.0, (1,)))),
               Mixed(Box((0.0,), (1.0,), (1,)), Choices((3,), (0,), (1,))),
               "3 discrete actions beside one continuous action"),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_a_nested_space_is_one_row_and_its_environment_gets_its_own_form(name):
    space, expected, text = NESTED[name]
    task = Task(Keeps(space), describe(Keeps(space)))
    spec = task.spec
    assert (spec.action, actions_text(spec)) == (expected, text)
    assert spec_from(json.loads(json.dumps(dataclasses.asdict(spec)))) == spec
    rows = task.to_env_units(uniform_actions(spec, 100, np.random.default_rng(0)))
    for row in rows:
        task.step(row)
    assert all(space.contains(action) for action in task.env.taken)
    for row, action in zip(rows, task.env.taken, strict=True):
        np.testing.assert_allclose(row_of(spec.action_parts, action), row, atol=1e-6)
    together = spec.form()(rows)
    for number, action in enumerate(gymnasium.vector.utils.iterate(
        gymnasium.vector.utils.batch_space(space, len(rows)), together)):  # fmt: skip
        np.testing.assert_allclose(row_of(spec.action_parts, action), rows[number], atol=1e-6)


@pytest.mark.parametrize(("space", "told"), [
    (spaces.Dict({}), "it is an empty Dict"),
    (spaces.Tuple((spaces.Discrete(2), spaces.Dict({}))), r"\[1\] is an empty"),
    (spaces.Dict({"say": spaces.Text(4)}), r"\['say'\] Text\(1, 4.* is not supported; wrap it as a Box, Discrete"),
    (spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))}), r"\['a'\] Sequence"),
    (spaces.Dict({"a": spaces.Graph(spaces.Box(0, 1, (1,)), None)}), r"\['a'\] Graph"),
    (spaces.Dict({"a": spaces.Box(-np.inf, np.inf, (2,)), "b": spaces.Discrete(2)}), r"\['a'\] Box.* is unbounded"),
    (spaces.Dict({"a": spaces.Box(0, 1, (0,))}), r"\['a'\] Box.* is empty"),
    (spaces.Dict({"a": spaces.Discrete(10**12)}), "has 1000000000000 actions; supported are 2 to 4096"),
    (spaces.Dict({"a": spaces.Discrete(3000), "b": spaces.Discrete(3000)}), "has 6000 actions in all"),
    (spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))), "OneOf"),
])  # fmt: skip
def test_a_space_that_no_policy_can_act_in_is_one_line(space, told):
    with pytest.raises(EnvError, match=told) as raised:
        action_of("T-v0", space)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("change", [
    {"action_parts": []}, {"action_parts": [{"path": ["a"], "begin": 0, "shape": [1], "dtype": "float32"}]},
    {"dtype": "nonsense"}, {"begin": 0}, {"start": [1, 2]}, {"start": None}, {"shape": [7]}, {"path": []},
])  # fmt: skip
def test_parts_that_do_not_fit_their_row_are_named(change):
    data = dataclasses.asdict(describe(Keeps(NESTED["hybrid"][0])))
    assert spec_from(data).action_parts
    data |= {name: value for name, value in change.items() if name == "action_parts"}
    if "action_parts" not in change:
        data["action_parts"] = [data["action_parts"][0], data["action_parts"][1] | change]
    with pytest.raises(ValueError, match="action_parts does not fit"):
        spec_from(data)


def test_masks_may_be_nested_like_the_action():
    spec = describe(Keeps(NESTED["all kinds"][0]))
    given = (
        np.array([1, 0, 1], np.int8),
        {"bits": np.array([2, 0], np.int8)},
        ((np.array([0, 1, 0]), np.array([1, 1])),),
    )
    expected = [1, 0, 1, 1, 1, 1, 0, 0, 1, 0, 1, 1]
    found = mask_of({"action_mask": given}, spec.choices, terminated=False, parts=spec.action_parts)
    assert found.tolist() == expected
    flat = mask_of({"action_mask": np.array(expected)}, spec.choices, terminated=False, parts=spec.action_parts)
    assert flat.tolist() == expected
    everything = (None, {}, None)
    assert mask_of({"action_mask": everything}, spec.choices, terminated=False, parts=spec.action_parts).all()
    with pytest.raises(LeafError, match="shape"):
        mask_of({"action_mask": (np.ones(7), {}, None)}, spec.choices, terminated=False, parts=spec.action_parts)


def test_engines_that_step_several_take_nested_actions_and_masks():
    spec = make_task("tests/Parts-v0", "parts_env", args=("masked=True",)).spec
    vector = gymnasium.vector.SyncVectorEnv([lambda: parts_env.Parts(masked=True)] * 3)  # a forbidden option raises
    several, scaled, rng = VectorTask(vector, spec), ActionScaling(spec), np.random.default_rng(0)
    obs = several.reset(1)
    for _ in range(2 * parts_env.STEPS):
        obs = several.step(scaled(uniform_actions(spec, 3, rng, obs))).obs
    several.close()
    one = SingleEnv("x:y", lambda seed: gymnasium.vector.SyncVectorEnv([lambda: parts_env.Parts(masked=True)]))
    obs, info = one.reset(seed=3)
    for _ in range(parts_env.STEPS):
        row = scaled(uniform_actions(spec, 1, rng, np.concatenate((obs, info["action_mask"]))[None]))[0]
        obs, _, _, truncated, info = one.step(spec.form()(row))
    assert truncated
    one.close()


def test_which_algorithms_take_a_nested_space_and_what_the_others_take():
    on_policy = ("ppo", "a2c", "impact", "appo", "impala")
    found = {name: describe(Keeps(space)) for name, (space, _, _) in NESTED.items()}
    assert fitting_algorithms(found["all kinds"]) == on_policy
    assert fitting_algorithms(found["hybrid"]) == ("sac", *on_policy)
    assert {"sac", "td3"} <= set(fitting_algorithms(found["boxes"]))
    assert {"dqn", "sac"} <= set(fitting_algorithms(found["one choice"]))
    whys = {row.name: row.why_not(found["hybrid"]) for row in rows().values()}
    assert whys["dqn"] == whys["td3"] == "no mixed continuous and discrete actions"
    assert whys["qmix"] == "several agents with discrete actions only"
    assert rows()["sac"].why_not(found["all kinds"]) == "one choice at a time only"
