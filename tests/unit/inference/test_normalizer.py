import json

import numpy as np
import pytest

from spreeze.inference.normalizer import Normalizer

RNG = np.random.default_rng(3)
DATA = (RNG.standard_normal((1000, 3)) * [1.0, 50.0, 0.01] + [0.0, 1e4, -3.0]).astype(np.float32)


def _fed(*batches):
    normalizer = Normalizer(3)
    for batch in batches:
        normalizer.update(batch)
    return normalizer


def test_two_values_by_hand():
    normalizer = Normalizer(1)
    normalizer.update(np.array([[1.0], [3.0]], np.float32))
    assert normalizer.mean.tolist() == [2.0]
    assert normalizer.std.tolist() == [1.0]
    obs = np.array([[4.0]], np.float32)
    normalizer.apply(obs)
    assert obs.tolist() == [[2.0]]


def test_batches_add_up_to_the_whole():
    normalizer = _fed(DATA[:1], DATA[1:7], DATA[7:500], DATA[500:])
    exact = DATA.astype(np.float64)
    np.testing.assert_allclose(normalizer.mean, exact.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(normalizer.std, exact.std(axis=0), rtol=1e-9)
    assert normalizer.count == 1000


def test_nothing_seen_changes_nothing():
    obs = DATA[:4].copy()
    obs[:, 1] = 0.0
    before = obs.copy()
    Normalizer(3).apply(obs)
    np.testing.assert_array_equal(obs, before)


def test_a_constant_component_gives_zero_not_infinity():
    normalizer = _fed(np.full((100, 3), 7.0, np.float32))
    obs = np.full((2, 3), 7.0, np.float32)
    normalizer.apply(obs)
    np.testing.assert_array_equal(obs, 0.0)
    assert normalizer.std.min() == pytest.approx(1e-4)


def test_outliers_are_clipped_and_rows_are_changed_in_place():
    normalizer = _fed(DATA)
    rows = np.zeros((4, 9), np.float32)
    rows[:, 2:5] = 1e9
    normalizer.apply(rows[:, 2:5])
    np.testing.assert_array_equal(rows[:, 2:5], 10.0)
    np.testing.assert_array_equal(rows[:, :2], 0.0)


def test_state_survives_json_exactly():
    first, second = _fed(DATA[:300]), Normalizer(3)
    second.load_state(json.loads(json.dumps(first.state())))
    for normalizer in (first, second):
        normalizer.update(DATA[300:])
    assert first.state() == second.state()


def test_a_policy_gets_what_the_learner_uses():
    normalizer = _fed(DATA)
    arrays = normalizer.arrays()
    obs = DATA[:5].copy()
    normalizer.apply(obs)
    np.testing.assert_array_equal(obs, np.clip((DATA[:5] - arrays["obs_mean"]) / arrays["obs_std"], -10, 10))


def _after_many_batches(rng, deviations):
    normalizer = Normalizer(len(deviations))
    for _ in range(1200):
        normalizer.update((rng.standard_normal((64, len(deviations))) * deviations).astype(np.float32))
    return normalizer


def test_observations_of_a_policy_that_fell_hardly_move_the_statistics():
    """Pitch of a robot that runs, 0.3 rad, and then lies on its back and turns over for a twelfth of its steps."""
    rng = np.random.default_rng(1)
    normalizer = _after_many_batches(rng, [0.3])
    for _ in range(100):
        normalizer.update((3.0 + 1.5 * rng.standard_normal((64, 1))).astype(np.float32))
    assert abs(normalizer.mean[0]) < 0.02  # unbounded: 0.23
    assert normalizer.std[0] == pytest.approx(0.3, rel=0.1)  # unbounded: 0.99


def test_statistics_still_follow_what_lasts():
    rng = np.random.default_rng(2)
    normalizer = _after_many_batches(rng, [1.0])
    for _ in range(12_000):
        normalizer.update((2.0 + rng.standard_normal((64, 1))).astype(np.float32))
    assert 1.0 < normalizer.mean[0] < 2.0  # after eleven times as many batches
    assert 1.0 < normalizer.std[0] < 1.5


def test_a_value_that_was_constant_counts_unbounded_once_it_moves():
    rng = np.random.default_rng(3)
    normalizer = _after_many_batches(rng, [1.0, 0.0])
    for _ in range(1200):
        normalizer.update((5.0 * rng.standard_normal((64, 2))).astype(np.float32))
    assert normalizer.std[1] == pytest.approx(3.5, abs=0.5)


def test_bounds_continue_after_a_resume():
    first, second = _after_many_batches(np.random.default_rng(4), [0.3]), Normalizer(1)
    second.load_state(json.loads(json.dumps(first.state())))
    for normalizer in (first, second):
        normalizer.update(np.full((64, 1), 50.0, np.float32))
    assert first.state() == second.state()
    assert second.mean[0] < 0.002  # unbounded: 0.04
