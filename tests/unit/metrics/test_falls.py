"""A fall of the return is one that stays, of a policy that was clearly better; each is said once."""

import numpy as np
import pytest

from spreeze.metrics.return_curve import FallWatch
from spreeze.metrics.store import EvaluationRow


def rows(returns, every_s=4.0):
    return [EvaluationRow(every_s * (k + 1), k, k, 1, k, 10, value, 1.0, 9.0) for k, value in enumerate(returns)]


def said_at(curve, watch=None):
    """The numbers of evaluations after which a fall is said."""
    watch = watch or FallWatch(30.0)
    return [end for end in range(1, len(curve) + 1) if watch.fallen(curve[:end])]


def ramp(low, high, count):
    return list(np.linspace(low, high, count))


def test_a_fall_is_said_once_the_mean_of_ten_has_been_low_ten_times_in_a_row():
    # First five: 0; best mean of ten: 100, so low is below 50. Of n zeros after it a mean of ten is 100 - 10 n, first
    # low for n = 6; the tenth such mean is that of 15 zeros.
    curve = rows([0.0] * 5 + [100.0] * 20 + [0.0] * 60)
    assert said_at(curve) == [40]
    # With an evaluation a second it takes 30 s: the first low mean is that of evaluation 31.
    assert said_at(rows([row.return_mean for row in curve], every_s=1.0)) == [61]


def test_what_is_negative_is_judged_by_what_was_gained():
    gained = [-1600.0] * 5 + ramp(-1600.0, -150.0, 30) + [-150.0] * 20
    assert said_at(rows(gained + [-300.0] * 60)) == []  # twice as bad, and yet nine tenths of what was gained
    assert len(said_at(rows(gained + [-1200.0] * 60))) == 1


@pytest.mark.parametrize("returns", [
    ramp(0.0, 100.0, 40) + [0.0] * 8 + [100.0] * 40,  # it comes back
    list(np.random.default_rng(3).normal(0.0, 50.0, 400)),  # noise without a gain
    ramp(100.0, 0.0, 100),  # it never gained anything
    [float(20 + 10 * (k % 7)) for k in range(300)],
    [0.0] * 10 + [100.0 if k % 30 == 0 else 2.0 for k in range(300)],  # lucky ones
], ids=["dip", "noise", "only down", "steady", "lucky"])  # fmt: skip
def test_no_fall_is_said(returns):
    assert said_at(rows(returns)) == []


def test_a_second_fall_counts_after_a_recovery_and_a_return_is_given_its_time():
    fallen = [0.0] * 5 + [100.0] * 20 + [0.0] * 30
    assert len(said_at(rows(fallen + [100.0] * 30 + [0.0] * 30))) == 2
    watch, curve = FallWatch(30.0), rows(fallen + [0.0] * 40)
    assert watch.fallen(curve[:40])
    watch.judge_from(curve[:40])
    # Ten means of ten evaluations since then are nineteen evaluations.
    assert [end for end in range(41, 80) if watch.fallen(curve[:end])] == [59]


def test_a_resumed_run_is_judged_by_its_own_evaluations_and_by_the_best_of_all():
    watch, curve = FallWatch(30.0), rows([0.0] * 5 + [100.0] * 20 + [0.0] * 50)
    watch.judge_from(curve[:50])  # the return fell before the run ended
    assert [end for end in range(51, 76) if watch.fallen(curve[:end])] == [69]


def test_another_task_begins_another_curve():
    watch, curve = FallWatch(30.0), rows([0.0] * 5 + [100.0] * 20 + [0.0] * 60)
    watch.fallen(curve[:25])
    watch.reset(curve[:25])
    assert [end for end in range(26, 86) if watch.fallen(curve[:end])] == []
