"""Judgements on a run's health by hand-worked numbers: each rule on both sides of its bound, unknown ones a dash."""

import pytest

from spreeze.metrics.health import SETTLED_UPDATES, Health, judgements
from spreeze.metrics.table import by_name

LATE = {"updates": float(SETTLED_UPDATES)}


def judged(metric, values, env_id=None):
    (found,) = (one for one in judgements(values, env_id) if one.metric == metric)
    return found


def test_nothing_is_known_of_a_run_without_numbers_and_every_judgement_has_a_chart():
    found = judgements({})
    assert {(one.value, one.level) for one in found} == {("-", Health.UNKNOWN)}
    assert all(one.sentence.startswith("Unknown: ") for one in found)
    assert all(by_name(one.metric).chart is not None for one in found)


@pytest.mark.parametrize(
    ("value", "came", "more", "level", "words"),
    [
        (118.0, 100.0, LATE, Health.GOOD, "The value at the start is 118, the actual discounted return 100"),
        (150.0, 100.0, LATE, Health.GOOD, "apart by 50 %, of which 50 % and less count as good"),
        (151.0, 100.0, LATE, Health.AMBER, "overestimated; lower the learning rate"),
        (-49.0, -100.0, LATE, Health.AMBER, "overestimated"),
        (49.0, 100.0, LATE, Health.AMBER, "underestimated; train on"),
        (0.0, 100.0, {"updates": SETTLED_UPDATES - 1.0}, Health.UNKNOWN, "far apart, as is usual before update"),
        (3.0, 0.0, {**LATE, "return_scale": 6.0}, Health.GOOD, "little apart beside the scale of the rewards, 6"),
        (3.1, 0.0, {**LATE, "return_scale": 6.0}, Health.AMBER, "overestimated"),
        (0.0, 0.0, LATE, Health.GOOD, "apart by 0 %"),
    ],
)
def test_a_value_is_compared_with_the_return_that_came(value, came, more, level, words):
    values = {"eval_start_value": value, "eval_discounted_return": came, **more}
    found = judged("eval_start_value", values)
    assert found.level is level
    assert words in found.sentence


def test_a_bias_that_rewards_of_entropy_explain_is_no_fault_of_the_critic():
    values = {"eval_start_value": 151.0, "eval_discounted_return": 100.0, **LATE, "eval_length": 3.0}
    soft = values | {"alpha": 0.5, "entropy": 4.0, "return_scale": 10.0}
    assert judged("eval_start_value", soft).level is Health.AMBER, "no discount, so nothing to compute it with"
    (found, *_) = judgements(soft, None, 0.5)
    assert found.level is Health.GOOD
    assert "includes rewards of entropy, worth 35" in found.sentence, "0.5 * 4 * 10 * (1 + 0.5 + 0.25)"
    (found, *_) = judgements(soft | {"eval_start_value": 190.0}, None, 0.5)
    assert found.level is Health.AMBER


def test_the_bias_is_told_with_its_sign():
    came = {"eval_discounted_return": 100.0}
    assert judged("eval_start_value", {"eval_start_value": 112.5, **came}).value == "+12.5"
    assert judged("eval_start_value", {"eval_start_value": 90.0, **came}).value == "-10"
    assert judged("eval_start_value", {"eval_start_value": 90.0}).level is Health.UNKNOWN


@pytest.mark.parametrize(
    ("metric", "value", "level", "text", "words"),
    [
        ("eval_actions_at_bound", 0.8, Health.GOOD, "80 %", "80 % of the action's numbers are at a bound."),
        ("eval_actions_at_bound", 0.81, Health.AMBER, "81 %", "if the return stagnates"),
        ("update_size", 5e-2, Health.GOOD, "5.0e-02", "changes the parameters by 5.0e-02"),
        ("update_size", 5.1e-2, Health.AMBER, "5.1e-02", "lower the learning rate"),
        ("update_size", 1e-7, Health.GOOD, "1.0e-07", "changes"),
        ("update_size", 9e-8, Health.AMBER, "9.0e-08", "raise the learning rate"),
        ("dead_units", 0.9, Health.GOOD, "90 %", "90 % of the hidden units"),
        ("dead_units", 0.91, Health.AMBER, "91 %", "start again with a lower learning rate"),
        ("eval_terminated", 1.0, Health.UNKNOWN, "100 %", "whether that is good depends on the task"),
    ],
)
def test_shares_and_sizes_are_judged_by_their_bounds(metric, value, level, text, words):
    found = judged(metric, {metric: value})
    assert (found.level, found.value) == (level, text)
    assert words in found.sentence


def test_ends_of_episodes_are_judged_only_where_they_are_falls():
    assert judged("eval_terminated", {"eval_terminated": 0.6}, "Hopper-v5").level is Health.AMBER
    assert judged("eval_terminated", {"eval_terminated": 0.5}, "Hopper-v5").level is Health.GOOD
    assert judged("eval_terminated", {"eval_terminated": 0.6}, "MountainCar-v0").level is Health.UNKNOWN


def test_what_has_no_value_after_an_evaluation_does_not_apply_and_is_left_out():
    labels = [one.label for one in judgements({"eval_terminated": 1.0, "update_size": 1e-3})]
    assert labels == ["Update size", "Terminated"]
