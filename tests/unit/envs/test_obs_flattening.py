"""Nested observations become one vector whose order depends on names alone."""

import json
from collections import OrderedDict

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from harness import train

from spreeze.cli import doctor
from spreeze.envs.make import describe
from spreeze.envs.obs_flattening import Flattener, leaves_of, text_left_out
from spreeze.envs.task import BadTransition, Task
from spreeze.errors import EnvError

S = spaces
NESTED = S.Dict({
    "speed": S.Box(-1.0, 1.0, (2,), np.float64),
    "arm": S.Tuple((S.Discrete(3, start=1), S.Box(0.0, 9.0, (2, 2), np.float32))),
    "flags": S.MultiBinary(2),
    "dials": S.MultiDiscrete([2, 3]),
})  # fmt: skip
VALUE = {
    "speed": np.array([0.5, -0.5]), "arm": (2, np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)),
    "flags": np.array([1, 0], np.int8), "dials": np.array([1, 2]),
}  # fmt: skip


class Fixed(gymnasium.Env):
    """Gives the observations it is told to."""

    action_space = S.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, space, values):
        self.observation_space, self.values = space, list(values)

    def reset(self, *, seed=None, options=None):
        return self.values[0], {}

    def step(self, action):
        return self.values[1], 0.0, False, False, {}


def _task(space, *values):
    env = Fixed(space, values)
    return Task(env, describe(env))


def test_the_order_by_hand():
    # arm[0]: 2 of {1, 2, 3}; arm[1] row by row; dials: 1 of 2, 2 of 3; flags; speed.
    task = _task(NESTED, VALUE)
    assert task.reset().tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 0, 0, 1, 1, 0, 0.5, -0.5]
    assert task.spec.obs_dim == 16
    assert task.spec.obs_layout == (
        "0:3 arm[0] (one-hot of 3)", "3:7 arm[1] (Box, (2, 2))", "7:12 dials (one-hots of 2, 3)",
        "12:14 flags (MultiBinary, (2,))", "14:16 speed (Box, (2,))",
    )  # fmt: skip


@pytest.mark.parametrize("space", [
    NESTED, S.Discrete(4), S.Discrete(5, start=-2), S.MultiDiscrete([[2, 3], [4, 2]]), S.MultiBinary((2, 3)),
    S.Tuple((S.Discrete(2), NESTED)), S.Dict({"b": S.Dict({"d": S.Discrete(2), "c": S.MultiBinary(3)}), "a": NESTED}),
], ids=str)  # fmt: skip
def test_it_is_what_gymnasium_makes_of_it(space):
    flatten = Flattener(leaves_of(space, "space"))
    space.seed(0)
    for _ in range(20):
        value = space.sample()
        np.testing.assert_array_equal(flatten(value), np.asarray(S.flatten(space, value), np.float32))


def test_the_order_in_which_keys_were_given_does_not_matter():
    one = S.Dict(OrderedDict([("b", S.Discrete(2)), ("a", S.MultiBinary(1))]))
    other = S.Dict(OrderedDict([("a", S.MultiBinary(1)), ("b", S.Discrete(2))]))
    assert [leaf.text() for leaf in leaves_of(one, "")] == [leaf.text() for leaf in leaves_of(other, "")]
    value = {"b": 1, "a": np.array([1], np.int8)}
    assert Flattener(leaves_of(one, ""))(value).tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speed": np.zeros(3)}, r"speed = shape \(3,\); expected \(2,\)"),
        ({"speed": np.array([np.nan, 0.0])}, r"observation\[14\] = nan"),
        ({"arm": (0, VALUE["arm"][1])}, r"arm\[0\] = 0; expected 1 to 3"),
        ({"arm": (2,)}, r"arm\[1\] = missing"),
        ({"dials": np.array([1, 3])}, r"dials = \[1 3\]; expected 0 to 2 for a component"),
        ({"flags": "on"}, r"flags = on \(str\)"),
    ],
)
def test_a_part_that_does_not_fit_is_named_with_its_environment(change, words):
    task = _task(NESTED, VALUE, VALUE | change)
    task.reset()
    with pytest.raises(BadTransition, match=rf"^Fixed returned {words}"):
        task.step(np.zeros(1, np.float32))


def test_a_missing_key_and_a_bare_array_are_refused():
    task = _task(NESTED, VALUE, {"speed": VALUE["speed"]})
    task.reset()
    with pytest.raises(BadTransition, match=r"arm\[0\] = missing"):
        task.step(np.zeros(1, np.float32))
    with pytest.raises(BadTransition, match="missing"):
        _task(S.Dict({"a": S.Discrete(2)}), np.float32(0.0)).reset()


class Mission(S.Space):
    """A space of sentences that is no Text, as MiniGrid has one."""

    def __init__(self):
        super().__init__(dtype=str)

    def sample(self, mask=None, probability=None):
        return "go to the door"

    def contains(self, x):
        return isinstance(x, str)


def test_text_beside_numbers_is_left_out_and_said():
    space = S.Dict(
        {"door": S.Discrete(2), "mission": Mission(), "more": S.Tuple((S.Text(4), S.Box(-1.0, 1.0, (1,), np.float32)))}
    )
    task = _task(space, {"door": 1, "mission": "go", "more": ("up", np.array([0.5], np.float32))})
    assert task.reset().tolist() == [0.0, 1.0, 0.5]
    assert text_left_out(space).endswith("read no text: mission, more[0]")
    assert text_left_out(S.Text(4)) is None


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (S.Text(4), "'observation' is a Text, which has no fixed length"),
        (S.Tuple((S.Sequence(S.Discrete(2)), S.Discrete(2))), r"'\[0\]' is a Sequence, which has no fixed length"),
        (S.Dict({"mission": S.Text(4)}), "is empty"),
        (S.Dict({"n": S.Discrete(10**7)}), "'n' would be a one-hot of 10000000"),
    ],
)
def test_what_cannot_be_part_of_a_vector_is_refused_with_the_reason(space, words):
    with pytest.raises(EnvError, match=words) as caught:
        describe(Fixed(space, ()))
    assert "\n" not in str(caught.value)


@pytest.mark.warm
def test_a_nested_task_is_probed_shown_by_the_doctor_and_trained_on(tmp_path):
    checks, probe = doctor.check_env("NestedGoal-v0", "nested_env")
    found = next(check for check in checks if "layout" in check.name)
    layout = ["0:3 phase (one-hot of 3)", "3:4 state.distance (Box, (1,))", "4:5 state.speed (Box, (1,))"]
    assert probe["spec"]["obs_layout"] == tuple(layout), found.text
    assert all(text in found.text for text in layout)
    run, code, _ = train(tmp_path, "--env", "NestedGoal-v0", "--import", "nested_env", "--updates", "30")
    assert code == 0, run.stderr
    assert json.loads((run.path / "env.json").read_text())["obs_layout"] == layout
