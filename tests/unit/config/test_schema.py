import dataclasses
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spreeze.algorithms.sac import SACConfig
from spreeze.config.schema import SECTIONS, Config, LearnerConfig, ReplayConfig, RunConfig, SamplingConfig, check_name
from spreeze.errors import ConfigError

FIELDS = [(part, item) for part, cls in SECTIONS.items() for item in dataclasses.fields(cls)]


def _taken(part, item, value, message):
    """Lines on a value that a part takes, or refuses in other words than those of a pattern."""
    try:
        SECTIONS[part](**{item.name: value})
    except ConfigError as error:
        return [] if re.search(message, str(error)) else [f"{part}.{item.name} = {value!r}: {error}"]
    return [f"{part}.{item.name} = {value!r} is taken"]


def test_every_setting_says_what_it_means():
    units = {f"{part}.{item.name}": ("1/s" if item.name.endswith("_per_s") else "s", item.metadata["unit"])
             for part, item in FIELDS if item.name.endswith("_s")}  # fmt: skip
    assert {name: unit for name, (due, unit) in units.items() if unit != due} == {}
    assert [f"{part}.{item.name}" for part, item in FIELDS if not item.metadata["doc"]] == []


def test_every_number_is_refused_outside_of_its_range_by_name():
    found = []
    for part, item in FIELDS:
        for bound, step in (("low", -1), ("high", 1)):
            limit = item.metadata[bound]
            if limit is not None:
                value = limit + step * max(1.0, abs(limit))
                value = value if "float" in str(item.type) else int(value)
                value = (value,) if "tuple" in str(item.type) else value
                found += _taken(part, item, value, rf"^{item.name} = .*must be")
    assert found == []


def test_wrong_types_are_refused_by_name():
    values = ({}, b"x", object(), [[]], math.nan)
    assert [line for part, item in FIELDS for value in values for line in _taken(part, item, value, item.name)] == []


def test_whole_numbers_count_as_floats_but_not_the_other_way_and_bools_are_no_numbers():
    assert SACConfig(actor_lr=1).actor_lr == 1.0
    assert isinstance(SACConfig(actor_lr=1).actor_lr, float)
    for value in (256.0, True, "256"):
        with pytest.raises(ConfigError, match=r"batch_size = .*expected int"):
            LearnerConfig(batch_size=value)
    with pytest.raises(ConfigError, match="actor_lr"):
        SACConfig(actor_lr=True)


def test_lists_become_tuples_and_each_entry_is_checked():
    assert SACConfig(hidden_sizes=[64, 32]).hidden_sizes == (64, 32)
    for value in ([], [0], [64, "x"], 64, [1.5]):
        with pytest.raises(ConfigError, match="hidden_sizes"):
            SACConfig(hidden_sizes=value)


def test_choices_suggest_the_near_one():
    with pytest.raises(ConfigError, match=r"must be one of: drop, fail; did you mean 'drop'"):
        SamplingConfig(nan_policy="dropp")
    known = "sac, crossq, td3, ddpg, dqn, qmix, ppo, a2c, impact, appo, impala"
    with pytest.raises(ConfigError, match=rf"must be one of: {known} .*; did you mean 'sac'"):
        Config(run=RunConfig(algo="sacc"))


def test_parts_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"batch_size = 512 is larger than replay.capacity = 100"):
        Config(learner=LearnerConfig(batch_size=512), replay=ReplayConfig(capacity=100))
    with pytest.raises(ConfigError, match="would deadlock"):
        ReplayConfig(samples_per_insert_min=9.0, samples_per_insert_max=8.0)


def test_settings_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().run.seed = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", ["a", "Run-1.2_x", "a" * 128, "console", "nul_1"])
def test_ordinary_names_are_taken(name):
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/abs", "-flag", ".hidden", "a\n", "a b", "CON", "nul", "aux.txt", "latest",
     "Latest", "a" * 129, "a" * 300, "\0", "ä", "a\\b", "C:x"],
)  # fmt: skip
def test_names_that_leave_the_directory_or_trouble_a_file_system_are_refused(name):
    with pytest.raises(ConfigError, match="name"):
        check_name(name)


@given(st.text(max_size=200))
def test_a_name_that_is_taken_is_one_harmless_path_component(name):
    refused = None
    try:
        check_name(name)
    except ConfigError as error:
        refused = str(error)
    if refused is not None:
        assert "\n" not in refused
    else:
        assert name.isascii()
        assert name.isprintable()
        assert not set(name) & set("/\\: ")
        assert name not in (".", "..")
