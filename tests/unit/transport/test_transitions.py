"""n-step windows against returns worked by hand."""

import numpy as np
import pytest
from n_step import NStep

from spreeze.transport.transitions import NStepBatch


def steps(window, rewards, end=None, first=0):
    """Pushes one step a reward; observation t is [t], the action [10 t]; ``end`` ends at the last."""
    out = []
    for offset, reward in enumerate(rewards):
        t = first + offset
        last = offset == len(rewards) - 1
        out += window.push(
            np.array([t], np.float32),
            np.array([10 * t], np.float32),
            reward,
            last and end == "terminated",
            last and end == "truncated",
            np.array([t + 1], np.float32),
        )
    return out


def brief(rows):
    return [(r.obs[0], r.action[0], r.reward, r.terminated, r.next_obs[0], r.num_steps) for r in rows]


def test_mid_episode_each_step_finishes_the_transition_n_steps_back():
    rows = steps(NStep(3, 0.5), [1.0, 2.0, 4.0, 8.0])
    # 1 + 2/2 + 4/4 = 3;  2 + 4/2 + 8/4 = 6
    assert brief(rows) == [(0, 0, 3.0, False, 3, 3), (1, 10, 6.0, False, 4, 3)]


def test_termination_finishes_the_rest_with_fewer_steps_and_no_bootstrap():
    rows = steps(NStep(3, 0.5), [1.0, 2.0, 4.0, 8.0], end="terminated")
    assert brief(rows) == [
        (0, 0, 3.0, False, 3, 3),
        (1, 10, 6.0, True, 4, 3),
        (2, 20, 8.0, True, 4, 2),
        (3, 30, 8.0, True, 4, 1),
    ]


def test_truncation_finishes_the_rest_and_still_bootstraps():
    rows = steps(NStep(3, 0.5), [1.0, 2.0], end="truncated")
    assert brief(rows) == [(0, 0, 2.0, False, 2, 2), (1, 10, 2.0, False, 2, 1)]


def test_nothing_reaches_over_the_end_of_an_episode():
    window = NStep(3, 0.5)
    steps(window, [1.0, 1.0], end="terminated")
    rows = steps(window, [1.0, 2.0, 4.0], first=100)
    assert brief(rows) == [(100, 1000, 3.0, False, 103, 3)]


def test_one_step_window_is_the_plain_transition():
    assert brief(steps(NStep(1, 0.9), [5.0], end="terminated")) == [(0, 0, 5.0, True, 1, 1)]


def test_arrays_are_copied_because_environments_reuse_theirs():
    window, obs = NStep(2, 0.9), np.zeros(1, np.float32)
    window.push(obs, obs, 1.0, False, False, obs)
    obs[0] = 7.0
    (row,) = window.push(obs, obs, 1.0, False, False, obs)
    obs[0] = 9.0
    assert (row.obs[0], row.action[0], row.next_obs[0]) == (0.0, 0.0, 7.0)


def test_cleared_window_forgets_unfinished_transitions():
    window = NStep(3, 0.5)
    steps(window, [1.0, 1.0])
    window.clear()
    assert steps(window, [1.0, 1.0]) == []


@pytest.mark.parametrize("n", [2, 3, 7])
def test_windows_of_many_environments_give_the_rows_of_one_after_the_other(n):
    num_envs, rng = 5, np.random.default_rng(n)
    single, batch = [NStep(n, 0.9) for _ in range(num_envs)], NStepBatch(n, 0.9, num_envs, 2, 1)
    for step in range(200):
        obs, next_obs = (rng.normal(size=(num_envs, 2)).astype(np.float32) for _ in range(2))
        action, reward = rng.normal(size=(num_envs, 1)).astype(np.float32), rng.normal(size=num_envs).astype(np.float32)
        lost = rng.random(num_envs) < 0.05
        terminated, truncated = ((rng.random(num_envs) < 0.1) & ~lost for _ in range(2))
        expected = []
        for env, window in enumerate(single):
            if lost[env]:
                window.clear()
            else:
                expected += window.push(
                    obs[env],
                    action[env],
                    float(reward[env]),
                    bool(terminated[env]),
                    bool(truncated[env]),
                    next_obs[env],
                )
        found = batch.push(
            obs, action, reward, terminated.astype(np.float32), next_obs, ended=terminated | truncated, lost=lost
        )
        assert len(found[2]) == len(expected), step
        for at, one in enumerate(expected):
            for column, (name, value) in zip(found, one._asdict().items(), strict=True):
                wanted = np.asarray(value, np.float32)
                np.testing.assert_array_equal(column[at], wanted, str((step, name)))
