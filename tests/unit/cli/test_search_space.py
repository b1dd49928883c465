"""Spaces of a search: what a range is by default, what is searched by its logarithm, and what is refused."""

import importlib.util

import pytest

from spreeze.cli.sweep_search import Axis, space
from spreeze.config.layers import Layer, resolve
from spreeze.errors import ConfigError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="Optuna is not installed")
CONFIG = resolve([Layer("x", {"run": {"algo": "sac"}, "sac": {"gamma": 0.99, "actor_lr": 1e-3}})]).config


def _asked(axis, **values):
    """What an axis gives where Optuna chose these values."""
    from optuna.trial import FixedTrial  # takes a second to import

    return axis.ask(FixedTrial(values))


def _one(text):
    (axis,), fixed = space([text], CONFIG)
    assert fixed == []
    return axis


def test_a_range_reaches_a_decade_to_each_side_of_the_present_value_by_its_logarithm():
    axis = _one("sac.actor_lr")
    assert (axis.low, axis.high) == (pytest.approx(1e-4), pytest.approx(1e-2))
    assert axis.by_logarithm


def test_a_discount_is_searched_by_its_distance_from_one():
    axis = _one("sac.gamma")
    assert (axis.low, axis.high, axis.label) == (pytest.approx(0.9), pytest.approx(0.999), "1 - sac.gamma")
    assert axis.parameter(0.99) == pytest.approx(0.01)
    assert _asked(axis, **{"1 - sac.gamma": 0.03}) == "sac.gamma=0.97"


def test_integers_stay_integers_and_within_what_the_setting_allows():
    axis = _one("learner.batch_size")
    assert (axis.low, axis.high, axis.whole) == (64, 1024, True)
    assert _asked(axis, **{"learner.batch_size": 100}) == "learner.batch_size=100"
    assert _one("sac.n_step").low == 1


@pytest.mark.parametrize(
    ("text", "logarithm"), [("sac.tau=0.01:0.1", True), ("sac.tau=0.02:0.1", False), ("sac.tau=0:1", False)]
)
def test_a_range_that_spans_a_decade_is_searched_by_its_logarithm(text, logarithm):
    assert _one(text).by_logarithm is logarithm


def test_choices_are_those_typed_or_all_that_there_are():
    assert _one("sac.hidden_sizes=[64,64],[128]").choices == ("[64,64]", "[128]")
    assert _one("sac.hidden_sizes=[64,64],[256, 256]").parameter((256, 256)) == "[256, 256]"
    assert _one("sac.explore_average").choices == ("false", "true")
    assert _one("sac.critics").choices == ("twin", "quantile", "categorical")
    assert _one("sac.gamma=0.9,0.99").parameter(0.95) is None


def test_what_is_fixed_is_not_searched_and_what_is_not_named_is_the_usual():
    axes, fixed = space(["sac.gamma=0.97", "learner.threads=1"], CONFIG)
    assert fixed == ["sac.gamma=0.97", "learner.threads=1"]
    assert [axis.key for axis in axes] == [
        "sac.actor_lr",
        "sac.critic_lr",
        "sac.alpha_lr",
        "sac.tau",
        "learner.batch_size",
    ]


@pytest.mark.parametrize(("texts", "words"), [
    (["sac.gama"], "did you mean 'sac.gamma'"), (["gamma"], "no such"), (["sac.gamma=0.9:1.1"], "within 0 to 1"),
    (["sac.learning_rate"], "did you mean 'sac.actor_lr' or 'sac.critic_lr'"), (["ppo.lr"], "no such setting"),
    (["sac.gamma=0.9:0.8"], "LOW below HIGH"), (["sac.weight_decay"], "give sac.weight_decay=LOW:HIGH"),
    (["sac.gamma", "sac.gamma=0.9"], "set twice"), (["sac.critics=1:2"], "not a number"), (["sac.tau=1,1"], "twice"),
    (["run.seed=5"], "use --seeds N"),
])  # fmt: skip
def test_what_cannot_be_searched_is_refused(texts, words):
    with pytest.raises(ConfigError, match=words):
        space(texts, CONFIG)


def test_a_present_value_outside_of_the_space_is_no_first_trial():
    assert Axis("sac.tau", 0.1, 0.2).parameter(0.02) is None
