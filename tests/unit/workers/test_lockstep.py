import gymnasium
import numpy as np
import pytest

from spreeze.envs.make import bullet_missing, describe
from spreeze.envs.task import Task, make_task
from spreeze.workers.episodes.lockstep import Episode, envs_at_once, run_episodes, score


class Countdown(gymnasium.Env):
    """Ends after ``seed`` steps; the reward is the action in its own unit (bounds 0 and 4)."""

    def __init__(self, made):
        self.observation_space = gymnasium.spaces.Box(-100.0, 100.0, (1,), np.float32)
        self.action_space = gymnasium.spaces.Box(0.0, 4.0, (1,), np.float32)
        self.closed = False
        made.append(self)

    def reset(self, *, seed=None, options=None):
        self.left = seed
        return np.array([self.left], np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.array([self.left], np.float32), float(action[0]), self.left == 0, False, {}

    def close(self):
        self.closed = True


def countdown(made):
    def make():
        env = Countdown(made)
        return Task(env, describe(env))

    return make


def half(obs, state=()):
    return np.full((len(obs), 1), 0.5, np.float32), state


def episode(value, length=1):
    return Episode(seed=0, episode_return=value, length=length, terminated=True)


@pytest.mark.parametrize("max_envs", [1, 2, 3, 16])
def test_every_seed_gets_its_own_episode_in_order_whatever_the_number_of_environments(max_envs):
    made = []
    found = run_episodes(countdown(made), half, [3, 1, 2, 5], max_envs=max_envs)
    assert [(e.seed, e.length, e.episode_return, e.terminated) for e in found] == [
        (3, 3, 9.0, True), (1, 1, 3.0, True), (2, 2, 6.0, True), (5, 5, 15.0, True),
    ]  # fmt: skip
    assert len(made) == min(4, max_envs)
    assert all(env.closed for env in made)


def test_one_policy_call_serves_all_environments_and_the_batch_keeps_its_size():
    sizes = []

    def act(obs, state):
        sizes.append(obs.shape)
        return half(obs)

    run_episodes(countdown([]), act, [4, 2, 1])
    assert sizes == [(3, 1)] * 4


@pytest.mark.parametrize("max_envs", [1, 2, 3])
def test_each_episode_begins_with_a_state_of_zeros_and_goes_on_with_its_own(max_envs):
    lengths = []

    def act(obs, state):
        (steps,) = state or (np.zeros(len(obs), np.float32),)
        lengths.append(list(zip(obs[:, 0].tolist(), steps.tolist(), strict=True)))
        return *half(obs)[:1], (steps + 1.0,)

    run_episodes(countdown([]), act, [4, 2, 3, 4], max_envs=max_envs, whole_rounds=True)
    seen = {pair for rows in lengths for pair in rows if pair[0] > 0}
    assert {(4.0, 0.0), (3.0, 1.0), (2.0, 2.0), (1.0, 3.0), (2.0, 0.0), (1.0, 1.0), (3.0, 0.0), (1.0, 2.0)} <= seen
    assert all(left + steps in (2.0, 3.0, 4.0) for left, steps in seen)


def test_environments_that_were_handed_in_are_used_again_and_stay_open():
    made, tasks = [], []
    for _ in range(2):
        run_episodes(countdown(made), half, [2, 2, 2], tasks=tasks, max_envs=2)
    assert len(made) == len(tasks) == 2
    assert not any(env.closed for env in made)


def test_each_environment_that_is_made_and_each_reset_has_a_heartbeat_before_it():
    happened, made = [], []
    make = countdown(made)
    run_episodes(
        lambda: happened.append("made") or make(),
        half,
        [2, 2, 2],
        max_envs=2,
        heartbeat=lambda: happened.append("beat"),
    )
    assert happened == ["made", "beat", "made", "beat", "beat", "beat"]


def test_a_stop_keeps_the_finished_episodes_only():
    asked = []
    found = run_episodes(countdown([]), half, [1, 9, 2], should_stop=lambda: len(asked) == 3 or asked.append(1))
    assert [e.seed for e in found] == [1, 2]


@pytest.mark.parametrize(("steps", "seeds"), [(3, []), (8, []), (9, [1, 9]), (12, [1, 9]), (13, [1, 9, 2, 4])])
def test_of_a_round_that_is_cut_no_episode_counts(steps, seeds):
    """Two at once; the short episodes of a round are over long before the long one, and say nothing alone."""
    asked = []
    found = run_episodes(
        countdown([]), half, [1, 9, 2, 4, 5], max_envs=2, whole_rounds=True,
        should_stop=lambda: len(asked) == steps or asked.append(1),
    )  # fmt: skip
    assert [e.seed for e in found] == seeds


def test_without_a_stop_whole_rounds_give_the_same_episodes_and_the_batch_keeps_its_size():
    sizes = []

    def act(obs, state):
        sizes.append(len(obs))
        return half(obs)

    seeds = [3, 1, 2, 5, 4]
    assert run_episodes(countdown([]), act, seeds, max_envs=2, whole_rounds=True) == run_episodes(
        countdown([]), half, seeds, max_envs=2
    )
    assert sizes == [2] * (3 + 5 + 4)


class Faulty(Countdown):
    """Raises, or gives NaN, at the second step of some seeds; or at their reset."""

    def __init__(self, made, raises=(), nan=(), resets=()):
        super().__init__(made)
        self.raises, self.nan, self.resets, self.resets_done = raises, nan, resets, []

    def reset(self, *, seed=None, options=None):
        self.seed, self.count = seed, 0
        self.resets_done.append(seed)
        if seed in self.resets:
            raise RuntimeError("no begin")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.count += 1
        if self.seed in self.raises and self.count == 2:
            raise RuntimeError("bad luck")
        obs, reward, *rest = super().step(action)
        return obs, float("nan") if self.seed in self.nan and self.count == 2 else reward, *rest


def faulty(made, **faults):
    def make():
        env = Faulty(made, **faults)
        return Task(env, describe(env))

    return make


def test_an_error_costs_its_episode_and_the_environment_is_made_anew():
    made, told, tasks = [], [], []
    seeds = [3, 4, 5, 6, 7]
    found = run_episodes(
        faulty(made, raises={4}, nan={6}, resets={5}), half, seeds, max_envs=2, tasks=tasks,
        on_error=lambda place, length, error: told.append((seeds[place], length, str(error))),
    )  # fmt: skip
    assert [(e.seed, e.length, e.episode_return) for e in found] == [(3, 3, 9.0), (7, 7, 21.0)]
    assert [(seed, length) for seed, length, _ in told] == [(4, 1), (5, 0), (6, 1)]
    assert [text for _, _, text in told][:2] == ["bad luck", "no begin"]
    assert "reward = nan" in told[2][2]
    assert [env.closed for env in made] == [False, True, True, True, False], "who failed is never used again"
    assert [task.env for task in tasks] == [made[0], made[4]]
    assert all(env.resets_done[0] == 0 for env in made), "each was reset once before its first episode"


def test_an_error_is_raised_where_nobody_is_told():
    made = []
    with pytest.raises(RuntimeError, match="bad luck"):
        run_episodes(faulty(made, raises={4}), half, [3, 4])
    assert all(env.closed for env in made)


def test_an_environment_whose_first_reset_raises_is_no_end():
    assert [e.seed for e in run_episodes(faulty([], resets={0}), half, [2])] == [2]


def test_each_reset_and_step_is_shown():
    seen = []
    run_episodes(countdown([]), half, [2, 1], on_step=lambda place, task, moment: seen.append((place, task.env.left)))
    assert seen == [(0, 2), (1, 1), (0, 1), (1, 0), (0, 0)]


def test_an_environment_that_never_ends_is_cut(monkeypatch):
    monkeypatch.setattr("spreeze.workers.episodes.lockstep.MAX_EVALUATION_STEPS", 7)
    (found,) = run_episodes(countdown([]), half, [100])
    assert (found.length, found.terminated) == (7, False)


def test_environments_are_closed_when_the_policy_fails():
    made = []
    with pytest.raises(ZeroDivisionError):
        run_episodes(countdown(made), lambda obs, state: 1 / 0, [1])
    assert made[0].closed


def test_no_seeds_give_no_episodes():
    assert run_episodes(countdown([]), half, []) == []


def test_a_real_task_repeats_exactly():
    def act(obs, state):
        return np.clip(-obs[:, 2:3] * obs[:, 0:1], -1.0, 1.0), state

    runs = [run_episodes(lambda: make_task("Pendulum-v1"), act, range(100, 103)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert [e.length for e in runs[0]] == [200, 200, 200]
    assert len({e.episode_return for e in runs[0]}) == 3


@pytest.mark.skipif(bullet_missing() is not None, reason="pybullet has no wheel here")
def test_an_episode_of_bullet_depends_on_its_seed_and_not_on_what_came_before():
    def act(obs, state):
        return np.tanh(obs[:, :3]), state

    def make():
        return make_task("HopperBulletEnv-v0")

    first = run_episodes(make, act, [5, 6], max_envs=1)
    other = run_episodes(make, act, [7, 6, 5], max_envs=1)
    assert first == [other[2], other[1]]


def test_the_score_by_hand():
    assert list(score([episode(1.0, 10), episode(3.0, 20)]).values()) == [2, 2.0, 1.0, 15.0]


def test_bullet_environments_are_few_because_they_are_large():
    task = make_task("Pendulum-v1")
    assert envs_at_once(task.spec) == 16
    task.close()


@pytest.mark.parametrize("fails", ["made", "reset"])
def test_where_there_can_be_no_second_environment_one_plays_all(fails):
    made, sizes = [], []

    class Second(Countdown):
        def __init__(self, made):
            if made and fails == "made":
                raise OSError("port in use")
            super().__init__(made)
            self.first = made == [self]

        def reset(self, *, seed=None, options=None):
            if not self.first:
                raise OSError("port in use")
            return super().reset(seed=seed)

    def make():
        env = Second(made)
        return Task(env, describe(env))

    def act(obs, state):
        sizes.append(len(obs))
        return half(obs)

    found = run_episodes(make, act, [3, 4, 5], max_envs=3)
    assert [(one.seed, one.length) for one in found] == [(3, 3), (4, 4), (5, 5)]
    assert set(sizes) == {3}, "the batch of the policy stays as it is"
    assert all(env.closed for env in made)


def test_there_are_no_more_environments_than_room():
    made = []
    assert len(run_episodes(countdown(made), half, [2, 3, 4, 5], max_envs=4, max_tasks=2)) == 4
    assert len(made) == 2


def test_when_an_environment_cannot_be_made_anew_the_others_play_on_and_without_any_the_rest_is_lost():
    made, lost = [], []
    make = faulty(made, raises={4})

    def once():
        if len(made) == 2:
            raise OSError("no licence")
        return make()

    seeds = [4, 3, 5]
    tell = {"on_error": lambda place, length, error: lost.append((seeds[place], str(error)))}
    found = run_episodes(once, half, seeds, max_envs=2, **tell)
    assert ([one.seed for one in found], lost) == ([3, 5], [(4, "bad luck")])
    made.clear()
    lost.clear()
    make, seeds = faulty(made, raises={4, 3}), [5, 4, 3, 7, 8]
    found = run_episodes(once, half, seeds, max_envs=2, **tell)
    assert {one.seed for one in found} == {5}
    assert {seed for seed, _ in lost} == {4, 3, 7, 8}
