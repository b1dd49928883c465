"""Paced rollouts and the mailbox: rows land where they belong, and every prefix of a commit is whole."""

import os

import numpy as np
import pytest
from fingerprints import trajectories_sha256

from spreeze.errors import CheckpointError, TransportError
from spreeze.transport.rollouts import (
    InferenceMailbox,
    Responses,
    Rollouts,
    RolloutsHandle,
    RolloutSpec,
    RolloutWriter,
    StepRows,
)

SPEC = RolloutSpec(sync_interval=3, num_envs=2, obs_shape=(2,), obs_dtype="float32", action_dim=1, log_steps=4)


@pytest.fixture
def rollouts():
    made = Rollouts.create(SPEC)
    yield made
    made.close()


@pytest.fixture
def columns(rollouts):
    made = RolloutWriter(rollouts, 0, 2)
    yield made
    made.close()


def rows(value, ended=(False, False)):
    """A step of both environments, all its numbers made of ``value``."""
    count = len(ended)
    return StepRows(
        obs=np.full((count, 2), value, np.float32), action=np.arange(count, dtype=np.float32).reshape(-1, 1) + value,
        log_prob=np.full(count, -value, np.float32), version=np.zeros(count, np.int64),
        reward=np.full(count, value, np.float32), terminated=np.array(ended), truncated=np.zeros(count, bool),
        next_obs=np.full((count, 2), value + 1, np.float32),
    )  # fmt: skip


BOTH = np.arange(2)


def fill(columns, first, ended=(False, False)):
    for step in range(3):
        columns.commit((0, 1), rows(first + step, ended))


def test_intervals_alternate_between_the_sides_and_each_is_read_while_the_other_is_written(rollouts, columns):
    assert not rollouts.full
    fill(columns, 10)
    assert rollouts.full
    rollouts.swap()
    assert (rollouts.current, rollouts.full) == (1, False)
    columns.commit((1,), rows(20, (False,)))
    batch = rollouts.batch(0)
    assert batch.reward.tolist() == [[10, 10], [11, 11], [12, 12]]
    assert batch.action[:, :, 0].tolist() == [[10, 11], [11, 12], [12, 13]]
    assert batch.next_obs[2, 1].tolist() == [13, 13]
    assert rollouts.batch(1).reward[0].tolist() == [0, 20]
    assert rollouts.steps.tolist() == [3, 4]
    assert not rollouts.full


def test_an_episode_is_counted_from_the_row_after_the_one_that_ended(rollouts, columns):
    columns.commit((0, 1), rows(1, (True, False)))
    start, episode = rollouts.episode_of(BOTH)
    assert (start.tolist(), episode.tolist()) == ([1, 0], [1, 0])
    columns.commit((0, 1), rows(2))
    assert rollouts.played(0).tolist() == [[2]]
    assert rollouts.played(1).tolist() == [[2], [3]]
    assert rollouts.last_obs(0).tolist() == [3, 3]


def test_an_episode_that_was_announced_but_whose_last_row_was_not_committed_goes_on(rollouts, columns):
    columns.commit((0, 1), rows(1))
    before = rollouts.steps.copy()
    columns.commit((0, 1), rows(2, (True, True)))
    rollouts.steps[:] = before  # as if the sampler had been killed just before the last store
    successor = RolloutWriter(rollouts, 0, 2)
    start, episode = rollouts.episode_of(BOTH)
    assert (start.tolist(), episode.tolist()) == ([0, 0], [0, 0])
    assert rollouts.played(1).tolist() == [[2]]
    successor.commit((0, 1), rows(2, (True, True)))
    assert [part.tolist() for part in rollouts.episode_of(BOTH)] == [[2, 2], [1, 1]]
    successor.close()


def test_an_abandoned_episode_ends_truncated_at_its_last_row_and_the_next_one_begins(rollouts, columns):
    columns.commit((0, 1), rows(1))
    request_id = columns.request_id(0)
    columns.abandon(0)
    assert columns.request_id(0) == request_id + 1, "the old answer is none to the new question"
    assert columns.request_id(1) == request_id
    assert [part.tolist() for part in rollouts.episode_of(BOTH)] == [[1, 0], [1, 0]]
    assert rollouts.played(0).tolist() == []
    columns.commit((0, 1), rows(2, (True, False)))
    columns.abandon(0)  # at a reset that failed: no row belongs to it
    assert [part.tolist() for part in rollouts.episode_of(BOTH)] == [[2, 0], [3, 0]]
    columns.commit((0, 1), rows(3))
    assert rollouts.batch(0).truncated.tolist() == [[1, 0], [0, 0], [0, 0]]
    assert rollouts.batch(0).terminated.tolist() == [[0, 0], [1, 0], [0, 0]]
    rollouts.mark()
    rollouts.swap()
    columns.abandon(0)
    assert rollouts.batch(0).truncated[2].tolist() == [0, 0], "the learner may be reading it"
    assert [part.tolist() for part in rollouts.episode_of(BOTH)] == [[3, 0], [4, 0]]


@pytest.mark.parametrize("stores", range(4))
@pytest.mark.parametrize("announced", [False, True])
def test_whoever_is_killed_while_an_episode_is_abandoned_leaves_it_or_the_next_one(
    rollouts, columns, monkeypatch, stores, announced
):
    columns.commit((0, 1), rows(1, (True, False)))
    columns.commit((0, 1), rows(2))
    if announced:  # by one that was killed before it committed the row that ends the episode
        before = rollouts.steps.copy()
        columns.commit((0, 1), rows(3, (True, True)))
        rollouts.steps[:] = before
    dying = RolloutWriter(rollouts, 0, 2)
    assert (dying.steps, dying.episode) == ([2, 2], [1, 0])
    left = [stores]

    def killed():
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1

    monkeypatch.setattr(rollouts.fields, "in_order", killed)
    if stores < 3:
        with pytest.raises(KeyboardInterrupt):
            dying.abandon(0)
    else:
        dying.abandon(0)
    dying.close()
    monkeypatch.undo()
    found = [part.tolist() for part in rollouts.episode_of(BOTH)]
    assert found == ([[2, 0], [2, 0]] if stores == 3 else [[1, 0], [1, 0]])
    successor = RolloutWriter(rollouts, 0, 2)
    successor.abandon(0)
    assert [part.tolist() for part in rollouts.episode_of(BOTH)] == [[2, 0], [found[1][0] + 1, 0]]
    successor.close()


def test_a_longer_episode_than_is_kept_can_be_collected_but_not_replayed(rollouts, columns):
    for step in range(5):
        if rollouts.full:
            rollouts.swap()
        assert rollouts.played(0) is not None
        columns.commit((0, 1), rows(step))
    assert rollouts.played(0) is None


def test_a_checkpoint_begins_the_interval_again_whatever_was_written_since(rollouts, columns):
    fill(columns, 1, ended=(False, True))
    rollouts.mark()
    rollouts.swap()
    saved = rollouts.state_arrays(with_batch=True)
    trajectories = trajectories_sha256(rollouts, 0)
    columns.commit((0, 1), rows(9, (True, True)))
    assert {name: array.tolist() for name, array in rollouts.state_arrays(with_batch=True).items()} == {
        name: array.tolist() for name, array in saved.items()
    }
    other = Rollouts.create(SPEC)
    try:
        assert other.restore(saved, 1, 600)
        assert (other.current, other.first, other.steps.tolist()) == (1, 0, [3, 3])
        assert (other.env_steps_before(1), other.env_steps_before(2)) == (600, 606)
        assert [part.tolist() for part in other.episode_of(BOTH)] == [[0, 3], [0, 3]]
        assert other.played(0).tolist() == [[1], [2], [3]]
        assert other.played(1).tolist() == []
        assert trajectories_sha256(other, 0) == trajectories
        assert other.last_obs(1).tolist() == [4, 4]
    finally:
        other.close()


@pytest.mark.parametrize("changed", [{"num_envs": 3}, {"sync_interval": 4}])
def test_with_a_checkpoint_of_other_sizes_all_environments_begin_new_episodes(rollouts, columns, changed):
    fill(columns, 1)
    columns.abandon(1)
    rollouts.mark()
    rollouts.swap()
    saved = rollouts.state_arrays(with_batch=True)
    other = Rollouts.create(RolloutSpec(**(SPEC.to_json() | {"obs_shape": (2,)} | changed)))
    steps, envs = other.spec.sync_interval, np.arange(other.spec.num_envs)
    try:
        assert not other.restore(saved, 1, 6)
        assert (other.current, other.first) == (1, 1), "the rollout before has other sizes and cannot be learned from"
        assert (other.env_steps_before(1), other.env_steps_before(2)) == (6, 6 + other.spec.rows)
        start, episode = other.episode_of(envs)
        assert (start == steps).all()
        assert (episode == saved["episode"].max() + 1).all(), "no episode is played twice"
        assert all(not len(other.played(env)) for env in envs)
        assert not any(name.startswith("side_") for name in other.state_arrays(with_batch=True))
    finally:
        other.close()


# --- the state of a policy with memory ---

WITH_MEMORY = RolloutSpec(**(SPEC.to_json() | {"obs_shape": (2,), "state_dim": 2}))


@pytest.fixture
def remembering():
    rollouts = Rollouts.create(WITH_MEMORY)
    columns = RolloutWriter(rollouts, 0, 2)
    yield rollouts, columns
    columns.close()
    rollouts.close()


def step_of(value, ended=(False, False)):
    """A step whose state was ``value`` and is one more after it."""
    state = np.full((len(ended), 2), value, np.float32)
    return rows(value, ended)._replace(state=state, next_state=state + 1)


def test_the_state_before_each_rollout_and_before_the_next_step_is_kept(remembering):
    rollouts, columns = remembering
    assert rollouts.memory_of(BOTH).tolist() == [[0, 0], [0, 0]]
    for value in (1, 2, 3):
        columns.commit((0, 1), step_of(value, (False, value == 2)))
    assert rollouts.batch(0).state.tolist() == [[1, 1], [1, 1]]
    assert rollouts.memory_of(BOTH).tolist() == [[4, 4], [4, 4]]
    rollouts.mark()
    rollouts.swap()
    columns.commit((1,), step_of(7, (True,)))
    assert rollouts.memory_of(BOTH).tolist() == [[4, 4], [0, 0]], "an episode begins with zeros"
    columns.commit((0,), step_of(4, (False,)))
    columns.commit((0, 1), step_of(5))
    assert rollouts.batch(1).state.tolist() == [[4, 4], [7, 7]]
    assert rollouts.batch(0).state.tolist() == [[1, 1], [1, 1]]
    columns.abandon(0)
    assert rollouts.memory_of(BOTH).tolist() == [[0, 0], [6, 6]]


def test_a_step_that_was_not_committed_leaves_the_state_before_it(remembering):
    rollouts, columns = remembering
    for value in (1, 2):
        columns.commit((0, 1), step_of(value))
    before = rollouts.steps.copy()
    columns.commit((0, 1), step_of(9))
    rollouts.steps[:] = before
    assert rollouts.memory_of(BOTH).tolist() == [[3, 3], [3, 3]]


def test_a_checkpoint_begins_the_interval_with_its_states_and_needs_the_same_memory(remembering):
    rollouts, columns = remembering
    for value in (1, 2, 3):
        columns.commit((0, 1), step_of(value, (False, value == 3)))
    rollouts.mark()
    rollouts.swap()
    columns.commit((0, 1), step_of(8))
    saved = rollouts.state_arrays(with_batch=True)
    other = Rollouts.create(WITH_MEMORY)
    try:
        other.restore(saved, 1, 6)
        assert other.memory_of(BOTH).tolist() == [[4, 4], [0, 0]]
        assert other.batch(0).state.tolist() == [[1, 1], [1, 1]]
        assert other.state_arrays(with_batch=True)["memory"].tolist() == saved["memory"].tolist()
    finally:
        other.close()
    without = Rollouts.create(SPEC)
    try:
        with pytest.raises(CheckpointError, match="2 values of a policy's memory, now it is 0"):
            without.restore(saved, 1, 6)
    finally:
        without.close()


def test_questions_and_answers_carry_the_state():
    mailbox = InferenceMailbox.create(WITH_MEMORY)
    try:
        env, state = np.array([1]), np.array([[5.0, 6.0]], np.float32)
        mailbox.request(env, np.zeros((1, 2)), np.zeros((1, 1)), (state,), np.array([1]))
        assert mailbox.state_of(env)[0].tolist() == [[5, 6]]
        mailbox.respond(env, Responses(np.zeros((1, 1)), np.zeros(1), 3, (state + 1,)))
        assert mailbox.responses(env).state[0].tolist() == [[6, 7]]
        assert mailbox.state_of(env)[0].tolist() == [[5, 6]], "whoever answers again gives the same answer"
    finally:
        mailbox.close()


def test_blocks_of_other_sizes_are_not_attached(rollouts):
    smaller = RolloutSpec(**(SPEC.to_json() | {"obs_shape": (2,), "sync_interval": 2}))
    with pytest.raises(TransportError, match="other arrays"):
        RolloutsHandle(fds=(os.dup(rollouts.handle.fds[0]),), spec=smaller).attach()


def test_questions_are_pending_until_answered_and_answers_come_back_to_their_environment():
    mailbox = InferenceMailbox.create(SPEC)
    try:
        every, odd = slice(0, None, 1), slice(1, None, 2)
        assert mailbox.pending(every).size == 0
        mailbox.request(np.array([1]), np.array([[5, 6]]), np.array([[0.5]]), (), np.array([1]))
        assert mailbox.pending(every).tolist() == mailbox.pending(odd).tolist() == [1]
        mailbox.respond(np.array([1]), Responses(np.array([[7.0]]), np.array([-2.0]), np.array([4])))
        assert mailbox.pending(every).size == 0
        assert mailbox.answered.tolist() == [0, 1]
        action, log_prob, version, state = mailbox.responses(np.array([1]))
        assert (action.tolist(), log_prob.tolist(), version.tolist(), state) == ([[7.0]], [-2.0], [4], ())
    finally:
        mailbox.close()
