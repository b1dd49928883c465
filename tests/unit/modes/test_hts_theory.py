"""Claims 1 and 2 of HTS-RL: the formulas against hand-worked numbers and against simulation."""

import itertools
import math

import numpy as np
import pytest
from hts_theory import (
    expected_lag,
    expected_largest,
    expected_run_time,
    gamma_cdf,
    gamma_density,
    gamma_quantile,
    gamma_shape_rate,
    simulated_lag,
    simulated_rounds,
    simulated_run_time,
    simulated_speedup,
    step_times,
)


def rng():
    return np.random.default_rng(1)


# --- the Gamma law ---


@pytest.mark.parametrize("x", [0.01, 0.5, 1.0, 3.0, 20.0])
def test_the_distribution_of_shapes_one_two_and_a_half_in_closed_form(x):
    assert gamma_cdf(x, 1.0) == pytest.approx(1.0 - math.exp(-x), abs=1e-13)
    assert gamma_cdf(x, 2.0) == pytest.approx(1.0 - (1.0 + x) * math.exp(-x), abs=1e-13)
    assert gamma_cdf(x, 0.5) == pytest.approx(math.erf(math.sqrt(x)), abs=1e-13)


@pytest.mark.parametrize("shape", [1 / 9, 0.5, 1.0, 7.1, 64.0, 512.0, 2048.0])
def test_quantile_and_distribution_undo_each_other_and_the_density_is_the_slope(shape):
    for p in (0.01, 0.5, 0.875, 0.9375, 0.999):
        x = gamma_quantile(p, shape)
        assert gamma_cdf(x, shape) == pytest.approx(p, abs=1e-10)
        assert gamma_quantile(p, shape, rate=500.0) == pytest.approx(x / 500.0, rel=1e-12)
        step = 1e-5 * x
        slope = (gamma_cdf(x + step, shape) - gamma_cdf(x - step, shape)) / (2.0 * step)
        assert gamma_density(x, shape) == pytest.approx(slope, rel=1e-4)


def test_a_distribution_has_ends():
    assert gamma_cdf(0.0, 2.0) == 0.0
    assert gamma_cdf(1e9, 2.0) == 1.0
    assert gamma_quantile(0.0, 2.0) == 0.0
    with pytest.raises(ValueError, match="below 1"):
        gamma_quantile(1.0, 2.0)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_the_laws_have_their_mean_and_coefficient_of_variation(cv):
    drawn = step_times("gamma", 0.002, cv)(rng(), (400_000,))
    assert drawn.mean() == pytest.approx(0.002, rel=0.02)
    assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=0.02)
    shape, rate = gamma_shape_rate(0.002, cv)
    assert (shape / rate, 1.0 / math.sqrt(shape)) == (pytest.approx(0.002), pytest.approx(cv))


def test_the_other_laws_and_none_besides():
    assert step_times("constant", 0.002)(rng(), (2, 3)).tolist() == [[0.002] * 3] * 2
    assert step_times("exponential", 0.002)(rng(), (100_000,)).std() == pytest.approx(0.002, rel=0.02)
    with pytest.raises(ValueError, match="must be one of: constant"):
        step_times("normal", 0.002)


# --- Claim 1 ---


def test_the_printed_form_by_hand():
    # Shape 1: F^-1(1 - 1/n) = ln n / beta, so the largest of n is (ln n + 0.5772) / beta; the harmonic sum is exact.
    assert expected_largest(8, 1.0, 500.0, printed=True) == pytest.approx((math.log(8) + 0.5772157) / 500.0, rel=1e-6)
    # There n f(b) = beta, so that both forms agree.
    assert expected_largest(8, 1.0, 500.0) == pytest.approx(expected_largest(8, 1.0, 500.0, printed=True), rel=1e-9)
    assert expected_largest(1, 4.0, 2.0) == 2.0
    assert expected_run_time(1600, 8, 4, 1.0, 500.0, 0.001, printed=True) == pytest.approx(
        1600 / 32 * expected_largest(8, 4.0, 500.0, printed=True) + 0.2
    )


@pytest.mark.parametrize(
    ("n", "interval", "simulated", "printed", "fitted"),
    [(16, 4, 8.24, 7.99, 8.30), (16, 128, 148.85, 146.4, 149.4), (2, 4, 5.10, 4.25, 5.05)],
)
def test_both_forms_and_the_simulation_at_three_known_points(n, interval, simulated, printed, fitted):
    assert expected_largest(n, float(interval), 1.0, printed=True) == pytest.approx(printed, rel=0.002)
    assert expected_largest(n, float(interval), 1.0) == pytest.approx(fitted, rel=0.002)
    rounds = simulated_rounds(rng(), step_times("exponential", 1.0), 20_000, n, interval)
    assert rounds.mean() == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize(("cv", "interval", "n"), [
    case if case[1] == 64 else pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product((0.5, 1.0, 3.0), (4, 64, 512), (2, 8, 16))
])  # fmt: skip
def test_claim_one_agrees_with_simulation_as_well_as_it_does(cv, interval, n):
    shape, rate = gamma_shape_rate(0.002, cv)
    states = n * interval * (300 if interval == 512 else 1500)
    found = simulated_run_time(rng(), step_times("gamma", 0.002, cv), states, n, interval, actor_s=0.0001)
    fitted = expected_run_time(states, n, interval, shape, rate, actor_s=0.0001)
    printed = expected_run_time(states, n, interval, shape, rate, actor_s=0.0001, printed=True)
    summed = shape * interval
    assert fitted == pytest.approx(found, rel=0.025 if summed >= 4.0 else 0.08 if n >= 8 else 0.45)
    assert printed == pytest.approx(found, rel=0.18)
    if summed >= 4.0:
        assert abs(fitted - found) < abs(printed - found), "the scale before the limit fits better"


def test_one_environment_waits_for_nobody():
    draw = step_times("exponential", 0.002)
    assert simulated_speedup(rng(), draw, 1, 64) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(("cv", "speedup"), [(0.5, 1.7), (1.0, 2.3), (3.0, 3.5)])
def test_less_synchronization_pays_more_where_step_times_vary_more(cv, speedup):
    found = simulated_speedup(rng(), step_times("gamma", 0.002, cv), 8, 64, states=500_000)
    assert found == pytest.approx(speedup, abs=0.1)


def test_learning_beside_rollout_by_hand():
    draw = step_times("constant", 0.5)
    # Four rounds of 2 s: alternating 4 (2 + 3); at once 2 + 3 x max(2, 3) + 3.
    assert simulated_run_time(rng(), draw, 32, 2, 4, learner_s=3.0, concurrent=False) == 20.0
    assert simulated_run_time(rng(), draw, 32, 2, 4, learner_s=3.0) == 14.0
    assert simulated_run_time(rng(), draw, 33, 2, 4, actor_s=0.25) == 15.0, "a round more, of 3 s with the actors"


# --- Claim 2 ---


@pytest.mark.parametrize("inference_workers", [1, 4, 9])
def test_the_lag_is_the_length_of_the_queue(inference_workers):
    found = simulated_lag(rng(), inference_workers, 1.0, 12.0, data=1_000_000)
    assert found == pytest.approx(expected_lag(inference_workers, 1.0, 12.0), rel=0.03)


def test_the_lag_by_hand_and_without_end():
    assert expected_lag(3, 1.0, 4.0) == 3.0
    with pytest.raises(ValueError, match=r"4 actors send 1 times"):
        expected_lag(4, 1.0, 4.0)
