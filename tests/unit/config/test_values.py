"""Values that users write as text: no text that counts as true where False was meant, and none of another type."""

import contextlib
import enum
import math
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spreeze
from spreeze import api
from spreeze.cli.arguments import build_parser, user_values
from spreeze.config.layers import Layer, from_toml, resolve, to_toml
from spreeze.config.section import literal, literal_or_text, value_text
from spreeze.envs.make import parse_args
from spreeze.errors import ConfigError


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("False", False), ("true", True), ("None", None), ("null", None), ("1e3", 1000.0), ("1_000", 1000), ("-0", 0),
        ("-0.0", -0.0), ("inf", math.inf), ("-inf", -math.inf), ("[inf, None]", [math.inf, None]), ("0x10", 16),
        ("[]", []), ("{}", {}), ("()", ()), ("[1, [true, 'a']]", [1, [True, "a"]]), ('{"a": {"b": null}}',
        {"a": {"b": None}}), ("{1: (2,)}", {1: (2,)}), (" 'a b' ", "a b"), ('"1"', "1"), (r'"a\/b"', "a/b"),
        (r'"\ud83d\ude00"', "\U0001f600"), ("", ""), ("medium", "medium"), ("a b", "a b"), ("007", "007"),
        ("2020-10-11", "2020-10-11"), ("...", "..."), ("1-2", "1-2"), ("os.system('x')", "os.system('x')"),
        ("/tmp/[a]", "/tmp/[a]"), ("noisy", "noisy"),
    ],
)  # fmt: skip
def test_a_text_means_what_it_means_in_python_or_json(text, value):
    found = literal_or_text(text)
    assert (repr(found), type(found)) == (repr(value), type(value))


def test_nan_is_a_number():
    assert math.isnan(literal_or_text("nan"))
    assert math.isnan(literal_or_text("NaN"))


@pytest.mark.parametrize(
    ("text", "words"),
    [("TRUE", "write True, or"), ("fALSE", "write False"), ("NONE", "write None"), ("Null", "write None"),
     ("off", "write False"), ("Yes", "write True"), ("[a, b", "not a valid list"), ("[a, b]", "quote the strings"),
     ("{a: 1}", "dictionary: quote"), ("(1, 2", "valid tuple"), ("'abc", "close its quote"), ("[" * 500, "valid list")],
)  # fmt: skip
def test_what_would_become_a_text_that_is_true_is_refused_with_the_spelling_wanted(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        literal_or_text(text)
    assert "\n" not in str(caught.value)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(max_size=9)
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.lists(inner).map(tuple)
                      | st.dictionaries(SCALARS, inner), max_leaves=12)  # fmt: skip


@given(VALUES)
def test_a_value_comes_back_equal_and_of_the_same_types(value):
    assert repr(literal(value_text(value))) == repr(value)
    assert repr(literal_or_text(value_text(value))) == repr(value)


@given(st.text(max_size=40))
def test_any_text_is_a_value_or_one_error(text):
    with contextlib.suppress(ConfigError):
        literal_or_text(text)


@pytest.mark.parametrize(
    ("value", "plain"),
    [(np.float64(1.5), 1.5), (np.array([[1, 2]]), [[1, 2]]), ({"a": np.bool_(True)}, {"a": True}), (Colour.RED, "red"),
     (Level.HIGH, 3), (pathlib.Path("/x"), "/x"), (torch.tensor([1.0]), [1.0])],
)  # fmt: skip
def test_values_of_others_become_python_s_own(value, plain):
    found = literal(value_text(value))
    assert (found, type(found)) == (plain, type(plain))


def test_what_no_text_can_hold_is_refused_in_one_line():
    endless = []
    endless.append(endless)
    for value in (object(), {1, 2}, [print], {"a": 1j}, 10**5000, endless, np.datetime64("2020-01-01"), torch):
        with pytest.raises(ConfigError, match="expected a number, True, False, None") as caught:
            value_text(value)
        assert "\n" not in str(caught.value)


ARGS = {"tasks": ["a", "it's"], "config": {"a": 1, "b": [None, True, {"c": -0.0}]}, "fast": False, "parts": None,
        "shape": (3, 4), "limit": math.inf, "text": "False", "path": 'C:\\new\n"x"', "empty": ""}  # fmt: skip


def test_arguments_of_the_environment_from_python_are_recorded_and_come_back_equal(monkeypatch):
    started = []
    monkeypatch.setattr(api, "_train", lambda options, module, quiet: started.extend(options))
    spreeze.train(
        "Pendulum-v1", env_args=ARGS, settings={"stop.seconds": None, "sac.hidden_sizes": [64], "env.image": False}
    )
    settings = resolve([Layer("user", user_values(build_parser().parse_args(started)))])
    again = from_toml(to_toml(settings), "resumed run").config
    assert again == settings.config
    assert repr(parse_args(again.env.args)) == repr(ARGS)
    assert (again.stop.seconds, again.algorithm.hidden_sizes, again.env.image) == (None, (64,), False)


def test_a_setting_recorded_by_its_earlier_name_is_taken():
    earlier = {"run": {"algo": "dqn"}, "dqn": {"duelling": True}, "replay": {"go_back": False}}
    settings = resolve([Layer("config.toml", earlier)])
    assert (settings.config.algo_settings.dueling, settings.source_of("dqn.dueling")) == (True, "config.toml")
    assert not settings.config.replay.roll_back
