"""The fit of the tuner's score finds constants that made the counts, and is not misled by runs given up."""

import itertools

import pytest

from spreeze.bench.score_fit import Point, fit, left_out, points, rank_correlation, shape

SETTINGS = list(itertools.product((32, 128, 1024), (0.03, 0.5, 4.0)))


def counted(b0, r0, cap=float("inf")):
    found = []
    for (task, scale), (batch, ratio) in itertools.product((("easy", 500.0), ("hard", 4000.0)), SETTINGS):
        updates = scale * shape(batch, ratio, b0, r0)
        found.append(Point(task, batch, ratio, min(updates, cap), updates < cap))
    return found


def test_constants_that_made_the_counts_are_found():
    found = fit(counted(32.0, 1.0))
    assert (found.batch_constant, found.ratio_constant) == (32.0, 1.0)
    assert found.typical_factor == pytest.approx(1.0)


def test_a_run_given_up_only_counts_where_the_model_says_fewer_updates():
    found = fit(counted(32.0, 1.0, cap=12_000.0))
    assert (found.batch_constant, found.ratio_constant) == (32.0, 1.0)


def test_a_task_left_out_is_predicted_from_the_others():
    for constants, factor, correlation in left_out(counted(64.0, 2.0)).values():
        assert (constants.batch_constant, constants.ratio_constant) == (64.0, 2.0)
        assert factor == pytest.approx(1.0)
        assert correlation == pytest.approx(1.0)


def test_seeds_of_a_setting_become_their_median():
    base = {"env_id": "task", "batch_size": 64, "updates_per_env_step": 0.25}
    found = points([{**base, "updates": n, "reached": n < 900} for n in (100, 900, 300)])
    assert found == [Point("task", 64, 0.25, 300.0, True)]


def test_rank_correlation_of_a_hand_worked_case_with_a_tie():
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 2], [3, 1, 1]) == pytest.approx(-1.0)
