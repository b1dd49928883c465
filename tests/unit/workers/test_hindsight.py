"""Hindsight: other goals of an episode's transitions, worked by hand, and how their rows reach replay."""

import gc

import gymnasium
import numpy as np
import pytest
from rings import ring_of

from spreeze.config.layers import Layer, resolve
from spreeze.envs.goals import GoalRewards
from spreeze.envs.make import describe
from spreeze.envs.task import Task
from spreeze.errors import ConfigError
from spreeze.runtime.plan import RunPlan
from spreeze.transport.replay_ring import ShardWriter
from spreeze.types import RowLayout
from spreeze.workers.collectors.transition_collector import GoalCollector, GoalEpisode, Relabeling

S = gymnasium.spaces
GAMMA = 0.5


class Walk(gymnasium.Env):
    """One step to the right each time, for three steps; -1 a step away from the goal, 0 there, which is an end."""

    def __init__(self, ends=True, length=3):
        part = S.Box(-99.0, 99.0, (1,), np.float32)
        self.observation_space = S.Dict({"achieved_goal": part, "desired_goal": part, "observation": part})
        self.action_space = S.Box(-1.0, 1.0, (1,), np.float32)
        self.length, self.fails = length, False
        if ends:
            self.compute_terminated = lambda achieved, desired, info: achieved[..., 0] == desired[..., 0]

    def _observe(self):
        return {"achieved_goal": [self.place], "desired_goal": [50.0], "observation": [10.0 + self.place]}

    def reset(self, *, seed=None, options=None):
        self.place = 0.0
        return self._observe(), {}

    def step(self, action):
        self.place += 1.0
        return self._observe(), -1.0, False, self.place == self.length, {"place": self.place}

    def compute_reward(self, achieved_goal, desired_goal, info):
        if self.fails:
            raise RuntimeError("no reward")
        return -(achieved_goal[..., 0] != desired_goal[..., 0]).astype(float)


def _task(**options):
    env = Walk(**options)
    return Task(env, describe(env))


def _episode(task):
    episode, obs = GoalEpisode(), task.reset()
    for step in range(3):
        after, _, terminated, _ = task.step(np.zeros(1, np.float32))
        episode.obs.append(obs)
        episode.action.append(np.array([step], np.float32))
        episode.next_obs.append(after)
        episode.terminated.append(terminated)
        episode.info.append(task.info)
        obs = after
    return episode


def _rows(task, goals, *, future, n_step=1):
    layout = RowLayout.of(task.spec, n_step)
    relabeling = Relabeling(task.spec, layout, goals, GAMMA, future=future)
    return relabeling.rows(_episode(task), GoalRewards(task), np.random.default_rng(0))


def test_final_gives_each_transition_the_goal_that_the_episode_achieved_last():
    rows = _rows(_task(), 1, future=False)
    # obs: achieved, desired, observation; action; reward; terminated; next obs
    assert rows.tolist() == [
        [0, 3, 10, 0, -1, 0, 1, 3, 11],
        [1, 3, 11, 1, -1, 0, 2, 3, 12],
        [2, 3, 12, 2, 0, 1, 3, 3, 13],
    ]


def test_future_draws_goals_that_were_achieved_after_the_transition_or_by_it():
    rows = _rows(_task(), 50, future=True)
    assert len(rows) == 150
    start, goal, reached = rows[:, 0], rows[:, 1], rows[:, 6]
    assert {(int(a), int(b)) for a, b in zip(start, goal, strict=True)} == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3),
                                                                             (2, 3)}  # fmt: skip
    np.testing.assert_array_equal(rows[:, 7], goal)
    np.testing.assert_array_equal(rows[:, 4], np.where(goal == reached, 0.0, -1.0))
    np.testing.assert_array_equal(rows[:, 5], goal == reached)


@pytest.mark.parametrize(("ends", "expected"), [
    # reward, terminated, place after, env steps of windows of two
    (True, [[-1.5, 0, 2, 2], [-1.0, 1, 3, 2], [0.0, 1, 3, 1]]),
    (False, [[-1.5, 0, 2, 2], [-1.0, 0, 3, 2], [0.0, 0, 3, 1]]),
])  # fmt: skip
def test_windows_of_n_steps_sum_the_rewards_of_the_new_goal_and_end_with_it(ends, expected):
    rows = _rows(_task(ends=ends), 1, future=False, n_step=2)
    assert rows[:, [4, 5, 6, 9]].tolist() == expected


def test_a_window_ends_where_the_new_goal_is_reached_in_its_middle():
    task = _task()
    rows = _rows(task, 40, future=True, n_step=3)
    at_once = rows[(rows[:, 0] == 0) & (rows[:, 1] == 1)]
    assert len(at_once)
    assert {tuple(row) for row in at_once[:, [4, 5, 6, 9]].tolist()} == {(0.0, 1.0, 1.0, 1.0)}


def _collected(steps, num_envs=2, fails=False, **options):
    env = {"length": 3} | options
    spec = describe(Walk())
    with ring_of(RowLayout.of(spec), rows=4096) as ring:
        errors, committed = [], []
        made = []

        def make():
            made.append(Task(Walk(**env), spec))
            made[-1].env.fails = fails
            return made[-1]

        sampling = GoalCollector(
            make, num_envs, spec, ShardWriter(ring, 0), her="future", goals=4, n_step=1, gamma=GAMMA,
            seeds=list(range(num_envs)), on_error=lambda where, error, count, **effect: errors.append(where),
        )  # fmt: skip
        for _ in range(steps):
            sampling.step(np.zeros((num_envs, 1), np.float32), 7)
            committed.append(ring.total_committed())
        rows, counts = ring.rows[: committed[-1]].copy(), sampling.counts
        assert sampling.rows_per_step == 5
        sampling.close()
        del sampling
        gc.collect()  # it holds the ring's memory
    return counts, committed, rows, errors


def test_after_the_first_episode_each_env_step_gives_one_row_and_four_with_other_goals():
    counts, committed, rows, _ = _collected(9)
    assert np.diff([0, *committed]).tolist() == [2, 2, 10, 10, 10, 10, 10, 10, 10]
    assert counts.env_steps == 18, "those with other goals are no env steps"
    own = rows[rows[:, 1] == 50.0]
    assert len(own) == 18
    assert (own[:, 4] == -1.0).all()
    assert (rows[rows[:, 1] != 50.0][:, 1] <= 3.0).all()


def test_rewards_that_cannot_be_computed_cost_the_other_goals_alone():
    counts, committed, _, errors = _collected(6, num_envs=1, fails=True)
    assert committed[-1] == 6
    assert (counts.env_errors, counts.episodes) == (2, 2)
    assert errors == ["environment 0, rewards of other goals"]


def _plan(env, **replay):
    values = {"run": {"algo": "sac"}, "env": {"id": "x"}, "replay": {"her": "future"} | replay}
    return RunPlan(settings=resolve([Layer("test", values)]), spec=describe(env), samplers=1, free_core=False)


class Goalless(Walk):
    def __init__(self):
        super().__init__()
        self.observation_space = S.Box(-1.0, 1.0, (2,), np.float32)


class Rewardless(Walk):
    @property
    def compute_reward(self):
        raise AttributeError("compute_reward")


@pytest.mark.parametrize(("env", "found"), [(Goalless, "has no goals"), (Rewardless, "has no compute_reward")])
def test_hindsight_without_goals_or_their_rewards_is_refused_in_one_line(env, found):
    with pytest.raises(ConfigError, match=f"replay.her = future: .*{found}.*remove"):
        _plan(env())


def test_replay_has_to_hold_the_rows_with_other_goals_before_learning_starts():
    with pytest.raises(ConfigError, match="= 5000, 5 rows each, is above replay"):
        _plan(Walk(), capacity=20_000)
