"""Runs without a stop condition: when returns have stopped rising, and what else ends them."""

import numpy as np
import pytest

from spreeze.config.layers import Layer, resolve
from spreeze.metrics.published_returns import Published, published
from spreeze.metrics.return_curve import Trend, has_risen, is_stuck, robust_slope, trend_of
from spreeze.metrics.stop_conditions import Ending, ending_of, has_stopped_rising
from spreeze.metrics.store import EvaluationRow


def curve(returns_at, until_s=1500.0, noise=100.0, seed=1):
    """An evaluation each two seconds whose mean is ``returns_at(t)``, with normal noise."""
    drawn = np.random.default_rng(seed).normal(size=int(until_s / 2)) * noise
    times = (2.0 * (k + 1) for k in range(len(drawn)))

    def row(t, value):
        return EvaluationRow(t, int(t), int(t), 1, int(t), 10, value, 1.0, 9.0)

    return [row(t, returns_at(t) + drawn[k]) for k, t in enumerate(times)]


def levels_off(t):
    return 2000.0 * (1.0 - np.exp(-t / 100.0))


@pytest.mark.parametrize(
    ("returns_at", "until_s", "stopped"),
    [
        (levels_off, 1500.0, True),
        (levels_off, 500.0, False),  # too early to say
        (lambda t: t, 1500.0, False),
        (lambda t: 50.0 * np.sqrt(t), 1500.0, False),
        (lambda t: -200.0, 1500.0, False),  # it has not begun to learn
        (lambda t: -200.0 if t < 1000.0 else t - 1200.0, 1500.0, False),
        (lambda t: min(5.0 * t, 1000.0) if t < 900.0 else 100.0, 1500.0, False),  # it fell: it may come back
    ],
    ids=["levels off", "short", "line", "root", "flat", "late", "fallen"],
)
def test_returns_have_stopped_rising_only_where_they_rose_and_the_last_third_does_not(returns_at, until_s, stopped):
    assert [has_stopped_rising(curve(returns_at, until_s, seed=seed)) for seed in range(3)] == [stopped] * 3


def test_few_evaluations_tell_nothing():
    assert not has_stopped_rising([])
    assert not has_stopped_rising(curve(levels_off)[::20])


@pytest.mark.parametrize(
    ("returns", "risen"),
    [
        ([25.0, 40.0, 134.0, 60.0, 79.0, 66.0, 71.0, 64.0, 70.0], True),
        ([0.0, -0.01, 0.01, 0.0, -0.01, 0.01, 0.0, 0.0, -0.01], False),
        ([100.0, 20.0, 10.0, 15.0, 12.0, 11.0, 10.0, 14.0, 12.0], False),
        ([1.0], False),
    ],
)
def test_returns_have_risen_where_a_few_in_a_row_are_clearly_above_the_first(returns, risen):
    rows = [EvaluationRow(10.0 * k, k, k, 1, k, 10, value, 30.0, 9.0) for k, value in enumerate(returns)]
    assert has_risen(rows) is risen
    assert not is_stuck(rows, trend_of(rows)), "90 s say too little"


@pytest.mark.parametrize(("gain_per_s", "stuck"), [(0.0, True), (1.0, False)])
def test_a_run_is_stuck_after_minutes_without_a_rise(gain_per_s, stuck):
    rows = curve(lambda t: gain_per_s * t, until_s=300.0, noise=0.3)
    assert is_stuck(rows, trend_of(rows)) is stuck


def test_a_trend_s_slope_is_the_median_of_those_of_all_pairs_and_one_odd_value_does_not_move_it():
    x, y = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 2.0, 1.0, 3.0])
    # Slopes -1, 0.5, 0.5, 1, 2, 2; the margin of Sen's interval is 1.96 sqrt(4 * 3 * 13 / 18) = 5.8 of 6 ranks.
    assert robust_slope(x, y) == (0.75, -1.0, 2.0)
    flat = np.append(-500.0, np.full(19, 100.0))
    assert robust_slope(np.arange(20.0), flat) == (0.0, 0.0, 0.0)
    many = np.arange(1000.0)
    assert robust_slope(many, 3.0 * many) == pytest.approx((3.0, 3.0, 3.0)), "more points are averaged"


def test_the_trend_of_the_last_third_says_when_a_target_is_reached():
    assert trend_of([]) is None
    assert trend_of(curve(lambda t: t, until_s=80.0)[::8]) is None, "six evaluations are the fewest"
    assert trend_of(curve(lambda t: t, until_s=30.0)) is None, "it covers 28 s"
    assert trend_of(curve(lambda t: t, until_s=40.0)).span_s == 30.0, "more than a third of the time"
    rising = trend_of(curve(lambda t: 2.0 * t, until_s=300.0, noise=1.0))
    assert 1.95 < rising.low < 2.0 < rising.high < 2.05
    assert rising.low < rising.per_s < rising.high
    assert rising.level == pytest.approx(600.0, abs=2.0)
    assert rising.span_s == pytest.approx(100.0, abs=4.0)
    told = rising.sentence(720.0)
    assert told.startswith("Over the last 1:38: +120 a minute [+")
    assert told.endswith("720 in 1:00 to 1:01 at this slope")
    assert "reach" not in rising.sentence(500.0), "it is above that"
    assert Trend(0.1, -0.1, 0.3, 60.0, 0.0).sentence(6.0).endswith("6 in 1:00 at this slope, in 0:20 at the earliest")
    assert Trend(-0.1, -0.3, 0.1, 60.0, 0.0).sentence(6.0).endswith("6 is not reached at this slope")
    still = trend_of(curve(lambda t: 500.0 / 3.0, until_s=300.0, noise=0.0))
    assert still.sentence() == "Over the last 1:38: no change"
    assert "is not reached" in still.sentence(1000.0)
    assert "is not reached" not in still.sentence(1000.0, best=1000.0), "it has been reached before"
    falling = trend_of(curve(lambda t: -t, until_s=300.0, noise=1.0))
    assert falling.sentence(5.0).endswith("5 is not reached at this slope")


def test_a_budget_ends_what_a_plateau_does_not():
    ending = Ending(None, 60.0)
    assert ending.reason([], 59.0) is None
    assert ending.reason([], 60.0) == "budget"
    assert ending.reason(curve(levels_off), 50.0) == "plateau"


@pytest.mark.parametrize(
    ("stop", "target", "words"),
    [
        (
            {},
            -151.9,
            "ends by itself at the first of: a return of -151.9 on fresh starts (the best of RL Baselines3 Zoo); "
            "returns that have stopped rising (not before 10 min); 30 min",
        ),
        ({"budget_s": 120.0}, -151.9, "; 2 min"),
        ({"seconds": 0.0}, None, None),
        ({"updates": 9}, None, None),
        ({"target_return": -200.0}, None, None),
    ],
)
def test_a_run_ends_by_itself_where_nothing_else_is_said(stop, target, words):
    config = resolve([Layer("user", {"run": {"algo": "sac"}, "env": {"id": "Pendulum-v1"}, "stop": stop})]).config
    ending = ending_of(config, "Pendulum-v1")
    assert (ending is None) is (words is None)
    if ending is not None:
        assert ending.target.value == target
        assert words in ending.sentence


@pytest.mark.parametrize(("best", "target"), [(None, -151.9), (-160.0, -151.9), (-151.9, None), (-140.0, None)])
def test_a_resumed_run_that_has_had_the_published_return_goes_beyond_it(best, target):
    ending = ending_of(resolve([Layer("user", {"run": {"algo": "sac"}})]).config, "Pendulum-v1", best)
    assert (None if ending.target is None else ending.target.value) == target
    assert ending.sentence.endswith("returns that have stopped rising (not before 10 min); 30 min")


def test_without_an_evaluator_there_is_no_return_to_end_at():
    values = {"evaluation": {"enabled": False}}
    assert ending_of(resolve([Layer("user", values)]).config, "Pendulum-v1").target is None
    assert isinstance(ending_of(resolve([]).config, "Pendulum-v1").target, Published)


@pytest.mark.parametrize(
    ("env_id", "found"),
    [
        ("Pendulum-v1", "Pendulum-v1"),
        ("LunarLander-v3", "LunarLander-v2"),
        ("HalfCheetah-v5", "HalfCheetah-v3"),
        ("HalfCheetahBulletEnv-v0", "HalfCheetahBulletEnv-v0"),
        ("CartPole-v0", None),  # its episodes are shorter
        ("my_robot:Hopper-v5", None),
        ("Hopper", None),
        ("Hopper-v5000000000", None),
        ("", None),
        (None, None),
    ],
)
def test_a_task_is_compared_with_its_best_published_return_or_that_of_an_older_version(env_id, found):
    reference = published(env_id)
    assert (reference and reference.env_id) == found
    if reference is not None:
        assert f" on {found} after " in reference.label


def test_published_returns_are_the_best_of_each_task():
    assert published("Walker2d-v5").value == 4933.1
    assert published("MountainCar-v0").label == "RL Baselines3 Zoo, DQN on MountainCar-v0 after 120k env steps: -100.8"
    assert published("Hopper-v4").label.endswith("TQC on Hopper-v3 after 1 M env steps: 3754.2")
