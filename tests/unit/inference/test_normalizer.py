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
