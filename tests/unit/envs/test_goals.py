"""Goals of an environment: where they lie, and rewards under other goals, whatever form its functions have."""

import gymnasium
import numpy as np
import pytest
from goal_tasks import BitFlip

from spreeze.envs.goals import GoalRewards, goals_of
from spreeze.envs.make import describe
from spreeze.envs.task import Task
from spreeze.errors import BadTransition
from spreeze.types import GoalSpec

S = gymnasium.spaces


class Goals(gymnasium.Env):
    action_space = S.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, achieved=None, desired=None):
        achieved = S.Box(-9.0, 9.0, (2,), np.float64) if achieved is None else achieved
        parts = {"achieved_goal": achieved, "desired_goal": desired or achieved, "observation": S.Discrete(3)}
        self.observation_space = S.Dict(parts)


class OfBatches(Goals):
    def compute_reward(self, achieved_goal, desired_goal, info):
        assert achieved_goal.dtype == np.float64
        return -np.linalg.norm(achieved_goal - desired_goal, axis=-1) - [each["cost"] for each in info]

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return False


class OfOne(Goals):
    """A batch would give one number for all of it, and an error."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -np.linalg.norm(achieved_goal - desired_goal) - info["cost"]

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return bool(np.linalg.norm(achieved_goal - desired_goal) < 0.5)


class OfOneThatTakesTwo(Goals):
    """A batch of two rows gives two numbers, which are wrong."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return np.abs(achieved_goal[0] - desired_goal[0])


class OfDistance(Goals):
    def compute_reward(self, achieved_goal, desired_goal, info):
        return -np.linalg.norm(achieved_goal - desired_goal)


ACHIEVED, DESIRED = np.array([[0.0, 0.0], [3.0, 4.0]], np.float32), np.array([[0.0, 0.25], [0.0, 0.0]], np.float32)
INFOS = [{"cost": 0.0}, {"cost": 1.0}]


def _rewards(env):
    return GoalRewards(Task(env, describe(env)))


def test_goals_are_found_by_their_places_in_the_flat_observation():
    assert describe(OfBatches()).goals == GoalSpec(achieved=(0, 2), desired=(2, 4), computes_reward=True)
    assert describe(Goals()).goals == GoalSpec(achieved=(0, 2), desired=(2, 4), computes_reward=False)
    assert goals_of(BitFlip(5)).desired == (5, 10)
    assert goals_of(Goals(S.Discrete(4))) is None, "a one-hot is no goal as the environment has it"
    assert goals_of(Goals(desired=S.Box(0.0, 1.0, (3,)))) is None
    assert [goals_of(env).sparse for env in (BitFlip(5), OfDistance(), OfOne(), Goals())] == [True, False, False, False]
    assert BitFlip(3).compute_reward(np.zeros((2, 3)), np.eye(2, 3), None).tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("env", [OfBatches, OfOne])
def test_rewards_of_a_batch_are_those_of_each_goal(env):
    found = _rewards(env()).rewards(ACHIEVED, DESIRED, INFOS)
    np.testing.assert_allclose(found, [-0.25, -6.0])


def test_ends_follow_the_other_goal_where_the_environment_says_so():
    assert _rewards(OfOne()).terminated(ACHIEVED, DESIRED, INFOS).tolist() == [True, False]
    assert _rewards(OfBatches()).terminated(ACHIEVED, DESIRED, INFOS).tolist() == [False, False]
    assert _rewards(OfOneThatTakesTwo()).terminated(ACHIEVED, DESIRED, INFOS) is None


def test_a_function_of_one_goal_that_a_batch_fits_by_chance_is_called_goal_by_goal():
    assert _rewards(OfOneThatTakesTwo()).rewards(ACHIEVED, DESIRED, INFOS).tolist() == [0.0, 3.0]


@pytest.mark.parametrize("value", [np.nan, 1e39, "much"])
def test_a_reward_that_is_no_number_is_named(value):
    env = OfOneThatTakesTwo()
    env.compute_reward = lambda *_: value
    with pytest.raises(BadTransition, match="compute_reward"):
        _rewards(env).rewards(ACHIEVED, DESIRED, INFOS)
