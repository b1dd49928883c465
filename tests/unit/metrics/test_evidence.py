"""Statistics over runs, by hand-worked numbers."""

import numpy as np
import pytest

from spreeze.metrics.evidence import bootstrap_interval, improvement, main_effects, seeds_needed


def test_the_interval_of_two_values_by_hand():
    # Means of two draws from {0, 1}: 0 (1/4), 1/2 (1/2), 1 (1/4); the 50 % interval ends inside of the middle.
    assert bootstrap_interval([0.0, 1.0], level=0.95) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], level=0.4) == (0.5, 0.5)


def test_the_interval_of_one_value_is_that_value():
    assert bootstrap_interval([5.0]) == (5.0, 5.0)


def test_the_interval_agrees_with_the_normal_one_for_many_values():
    values = np.random.default_rng(1).normal(10.0, 2.0, 400)
    low, high = bootstrap_interval(values.tolist())
    expected = 1.96 * values.std() / 20.0
    assert low == pytest.approx(values.mean() - expected, abs=0.02)
    assert high == pytest.approx(values.mean() + expected, abs=0.02)
    assert (low, high) == bootstrap_interval(values.tolist())


def test_the_interval_of_the_interquartile_mean_does_not_reach_an_outlier():
    values = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 100.0]
    assert bootstrap_interval(values, level=0.4)[1] > 0.0
    assert bootstrap_interval(values, level=0.4, robust=True) == (0.0, 0.0)


# --- the metrics of one run ---


def test_improvement_is_the_share_of_pairs_that_are_won_and_half_of_those_that_are_even():
    assert improvement([3.0, 4.0, 5.0], [1.0, 3.0, 4.5])[0] == pytest.approx((1.5 + 2 + 3) / 9)
    assert improvement([1.0], [2.0]) == (0.0, 0.0, 0.0)
    assert improvement([2.0, 2.0], [2.0]) == (0.5, 0.5, 0.5)


def test_seeds_of_both_are_resampled_together_where_they_are_paired():
    # By seed 10 n + 1 against 10 n: resamples of one seed alone win all, those of both three of four.
    mine, others = [1.0, 11.0], [0.0, 10.0]
    chance, low, high = improvement(mine, others, level=0.4, paired=True)
    assert (chance, low, high) == (0.75, 0.75, 1.0)
    assert improvement(mine, others, level=0.9)[1] < 0.75, "apart, the worse seed of one meets the better of the other"


def test_seeds_needed_follow_the_standard_deviation_over_the_difference():
    # Variances of 4 and 4 for a difference of 2: 2.8 squared x 8 / 4.
    assert seeds_needed([10.0, 12.0, 14.0], [8.0, 10.0, 12.0]) == 16
    assert seeds_needed([10.0, 12.0, 14.0], [9.0, 11.5, 12.0], paired=True) == 4  # differences 1, 0.5, 2
    assert seeds_needed([1.0, 2.0], [2.0, 1.0]) is None
    assert seeds_needed([1.0], [2.0, 1.0]) is None


def test_main_effects_are_shares_of_the_variance_between_runs():
    runs = [
        ({"a": a, "b": b, "c": "0"}, result)
        for a, b, result in (("1", "x", 1.0), ("1", "y", 2.0), ("2", "x", 11.0), ("2", "y", 12.0))
    ]
    first, second = main_effects(runs)
    assert (first.settings, first.values) == (("a",), {"1": [1.0, 2.0], "2": [11.0, 12.0]})
    assert (first.share, second.share) == (pytest.approx(100 / 101), pytest.approx(1 / 101))
    assert main_effects([]) == []
    assert main_effects([*runs, ({"a": "1", "c": "0"}, 5.0)])[0].settings == ("a",), "b is not known of each run"


def test_settings_that_changed_together_are_one_effect_and_one_value_a_run_is_none():
    runs = [
        ({"a": a, "b": b, "seed": seed}, result)
        for a, b, seed, result in (
            ("1", "x", "1", 1.0),
            ("1", "x", "2", 2.0),
            ("2", "y", "3", 11.0),
            ("2", "y", "4", 12.0),
        )
    ]
    (effect,) = main_effects(runs)
    assert (effect.settings, list(effect.values)) == (("a", "b"), ["1, x", "2, y"])
    assert main_effects(runs[1:3]) == [], "of two runs any setting explains all"
