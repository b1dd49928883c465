"""The unit of rewards: the deviation of discounted returns, by hand and against absurd rewards."""

import numpy as np
import pytest

from spreeze.inference.normalizer import REWARD_CLIP, DiscountedReturns, ReturnMoments, scaled_rewards


def added(*blocks, gamma=0.5, ended=None):
    returns = DiscountedReturns(gamma)
    for reward in blocks:
        reward = np.asarray(reward, np.float32)
        returns.add(reward, np.zeros(reward.shape) if ended is None else np.asarray(ended))
    return returns


def test_the_scale_is_the_deviation_of_discounted_returns_that_go_on_over_rollouts_and_end_with_episodes():
    returns = added([[2.0], [2.0], [2.0]], ended=[[0], [1], [0]])
    assert returns.scale == pytest.approx(np.std([2, 3, 2]))  # the third begins an episode
    returns.add(np.array([[2.0]], np.float32), np.zeros((1, 1)))
    assert returns.scale == pytest.approx(np.std([2, 3, 2, 3]))
    again = DiscountedReturns(0.5)
    again.load_state(returns.state())
    assert again.state() == returns.state()


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_the_returns_are_those_of_one_step_after_the_other_however_they_are_cut(gamma):
    rng, states = np.random.default_rng(0), []
    reward, ended = rng.standard_normal((150, 5)).astype(np.float32), rng.random((150, 5)) < 0.1
    reward[:3] = 10.0  # of one size from the first block on
    running, expected = np.zeros(5), []
    for row, ends in zip(np.clip(reward, -10, 10), ended, strict=True):
        running = gamma * running + row
        expected.append(running)
        running = np.where(ends, 0.0, running)
    for cuts in ([], [1], [31, 32, 33, 100]):
        returns = DiscountedReturns(gamma)
        for part in np.split(np.arange(150), cuts):
            returns.add(reward[part], ended[part])
        assert returns.scale == pytest.approx(np.std(expected), rel=1e-9)
        states.append(returns.state()["returns"]["0"])
    np.testing.assert_allclose(states, [running] * 3, atol=1e-9)


def test_returns_go_on_in_each_source_s_own_rollouts():
    returns = DiscountedReturns(0.5)
    for source, reward in ((0, 1.0), (1, 3.0), (0, 1.0)):
        returns.add(np.full((3, 1), reward), np.zeros((3, 1)), source)
    assert returns.state()["returns"]["0"] == [1.96875]
    again = DiscountedReturns(0.5)
    again.load_state(returns.state())
    assert again.state() == returns.state()


@pytest.mark.parametrize("reward", [0.0, 1.0, -7.5, 1e-12, 1e30])
def test_where_all_returns_are_equal_rewards_stay_as_they_are(reward):
    assert added(np.full((500, 3), reward), gamma=0.0).scale == 1.0
    assert added(np.full((1, 1), reward)).scale == 1.0


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e12])
def test_the_unit_follows_rewards_of_any_size(size):
    reward = np.random.default_rng(0).standard_normal((2000, 4))
    assert added(reward * size, gamma=0.9).scale == pytest.approx(size * added(reward, gamma=0.9).scale, rel=1e-5)


@pytest.mark.parametrize("absurd", [1e30, -1e30, np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 7, 1999])
def test_a_single_absurd_reward_does_not_set_the_unit(absurd, at):
    reward = np.random.default_rng(0).standard_normal((2000, 1)).astype(np.float32)
    usual = added(reward, gamma=0.9).scale
    reward[at] = absurd
    assert added(*np.split(reward, 20), gamma=0.9).scale == pytest.approx(usual, rel=0.05)
    sparse = np.zeros((2000, 1), np.float32)
    sparse[5], sparse[1000::50] = absurd, 1.0
    found = added(*np.split(sparse, 20), gamma=0.9).scale
    assert 0.05 < found < 1.0, "before there was any other reward"


def test_rewards_that_are_rare_become_the_unit_once_there_were_three():
    reward = np.zeros((1000, 1))
    reward[[100, 300]] = 5.0
    assert added(reward).scale == 1.0
    reward[500] = 5.0
    assert added(reward).scale == pytest.approx(0.315, rel=0.02)


def test_scaled_rewards_are_bounded_and_not_a_number_is_not_hidden():
    found = scaled_rewards(np.array([1.0, -4.0, 1e30, -np.inf, np.nan]), 2.0)
    np.testing.assert_array_equal(found, np.array([0.5, -2.0, REWARD_CLIP, -REWARD_CLIP, np.nan], np.float32))


def test_moments_of_parts_are_those_of_the_whole_by_merging_and_by_sums():
    parts = [np.random.default_rng(seed).normal(seed, 1.0 + seed, 100) for seed in range(3)]
    whole, merged, sums = np.concatenate(parts), ReturnMoments(), np.zeros(3)
    for part in parts:
        own = ReturnMoments()
        own.merge(len(part), float(part.mean()), float(part.var() * len(part)))
        merged.merge(own.count, own.mean, own.m2)
        sums += own.sums()
    assert merged.scale == pytest.approx(whole.std())
    assert np.sqrt(sums[2] / sums[0] - (sums[1] / sums[0]) ** 2) == pytest.approx(whole.std())
    other = ReturnMoments()
    other.set_average(merged.averaged())
    assert other.scale == pytest.approx(merged.scale)
