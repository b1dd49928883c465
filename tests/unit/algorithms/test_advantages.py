"""GAE and V-trace against numbers worked by hand and against their sums written out."""

import numpy as np
import pytest

from spreeze.algorithms.losses import advantages, explained_variance


def gae(*args):
    return advantages(*args)[1]


def column(*values):
    return np.array(values, np.float32).reshape(-1, 1)


NO = column(0, 0, 0)


def test_gae_is_that_of_numbers_worked_by_hand():
    # delta = 1 + .5*2 - 1 = 1, 0 + .5*4 - 2 = 0, 2 + .5*6 - 4 = 1; A = delta + .25 A'
    found = gae(column(1, 0, 2), column(1, 2, 4), column(2, 4, 6), NO, NO, 0.5, 0.5)
    np.testing.assert_allclose(found, column(1.0625, 0.25, 1.0))


def test_a_terminated_step_has_no_value_after_it_and_no_step_of_the_next_episode():
    # delta_1 = 0 - 2 = -2 whatever next_value says; the first step's sum ends there.
    found = gae(column(1, 0, 2), column(1, 2, 4), column(2, 99, 6), column(0, 1, 0), NO, 0.5, 0.5)
    np.testing.assert_allclose(found, column(0.5, -2.0, 1.0))


def test_a_truncated_step_keeps_its_value_and_takes_no_step_of_the_next_episode():
    # delta_1 = 0 + .5*10 - 2 = 3 by the true last state's value, not by that of the reset (4).
    found = gae(column(1, 0, 2), column(1, 2, 4), column(2, 10, 6), NO, column(0, 1, 0), 0.5, 0.5)
    np.testing.assert_allclose(found, column(1.75, 3.0, 1.0))


def test_vtrace_is_that_of_numbers_worked_by_hand():
    # delta = 1, 0, 1 as above; w = 1/2, 1, 1/4; gamma lam = 1/2: excess_2 = 1/4, excess_1 = 0 + 1/2 * 1/4 = 1/8,
    # excess_0 = 1/2 (1 + 1/2 * 1/8) = 17/32; A_t = delta + 1/2 excess_(t+1)
    weight = column(0.5, 1, 0.25)
    target, advantage = advantages(column(1, 0, 2), column(1, 2, 4), column(2, 4, 6), NO, NO, 0.5, 1.0, weight)
    np.testing.assert_allclose(target, column(1 + 17 / 32, 2 + 1 / 8, 4 + 1 / 4))
    np.testing.assert_allclose(advantage, column(1 + 1 / 16, 1 / 8, 1))


def random_interval(seed, steps=9, envs=4):
    rng = np.random.default_rng(seed)
    reward, value, next_value = rng.standard_normal((3, steps, envs))
    ended = rng.random((steps, envs))
    terminated, truncated = ended < 0.15, (ended > 0.85)
    following = np.concatenate((value[1:], rng.standard_normal((1, envs))))
    next_value = np.where(terminated | truncated, next_value, following)
    return reward, value, next_value, terminated, truncated


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_both_equal_their_sums_written_out(seed, lam):
    reward, value, next_value, terminated, truncated = interval = random_interval(seed)
    weight, gamma = np.random.default_rng(seed + 99).uniform(0.1, 1.0, reward.shape), 0.9
    found = gae(*interval, gamma, lam)
    target, advantage = advantages(*interval, gamma, lam, weight)
    steps, envs = reward.shape
    for env in range(envs):
        for t in range(steps):
            plain, corrected, factor, share = 0.0, value[t, env], 1.0, 1.0
            for k in range(t, steps):
                kept = 0.0 if terminated[k, env] else next_value[k, env]
                delta = reward[k, env] + gamma * kept - value[k, env]
                plain += factor * delta
                corrected += factor * share * weight[k, env] * delta
                if terminated[k, env] or truncated[k, env]:
                    break
                factor, share = factor * gamma * lam, share * weight[k, env]
            assert found[t, env] == pytest.approx(plain, abs=1e-5)
            assert target[t, env] == pytest.approx(corrected, abs=1e-5)
            assert weight[t, env] * advantage[t, env] == pytest.approx(corrected - value[t, env], abs=1e-5)


def test_targets_without_weights_are_advantages_and_values():
    interval = random_interval(3)
    target, advantage = advantages(*interval, 0.9, 0.8)
    np.testing.assert_allclose(target, advantage + interval[1], atol=1e-6)


def test_explained_variance_is_one_for_perfect_zero_for_constant_and_unknown_without_variance():
    target = np.array([1.0, 2.0, 4.0])
    assert explained_variance(target, target) == 1.0
    assert explained_variance(np.zeros(3), target) == 0.0
    assert np.isnan(explained_variance(target, np.ones(3)))
