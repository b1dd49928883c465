"""Sequences of a stream of episodes, worked by hand."""

import re

import numpy as np
import pytest
from rings import ring_of

from spreeze.config.layers import Layer, resolve
from spreeze.errors import ConfigError
from spreeze.inference.normalizer import Normalizer
from spreeze.modes.replay_modes import _limiter
from spreeze.runtime.plan import RunPlan
from spreeze.transport.checkpoint import _fields
from spreeze.transport.replay_ring import ReplayReader, ShardWriter
from spreeze.transport.transitions import fill_with_synthetic_rows
from spreeze.types import Choices, EnvSpec, RowLayout, SequenceShape
from spreeze.workers.collectors.transition_collector import SequenceRowWriter, StepBatch

SPEC = EnvSpec(
    env_id="x", import_module=None, obs_dim=1, action=Choices((9,)), max_episode_steps=None, reward_threshold=None
)
LAYOUT = RowLayout(1, 1, checksum=True, sequence=SequenceShape(length=3, burn_in=2, state_dim=2))


class Stream:
    """Two environments whose n-th observation is n, and 100 more in the second; actions are -n, rewards n / 10."""

    def __init__(self, ring):
        self.rows, self.count = SequenceRowWriter(SPEC, 2, ShardWriter(ring, 0), 0.99), 0.0
        self._begin(slice(None))

    def _begin(self, index):
        self.rows.start(index, np.array([[self.count], [100.0 + self.count]])[index])

    def step(self, terminated=(), truncated=(), broken=()):
        rows, before = self.rows, self.count
        self.count += 1.0
        rows.set_next_obs(slice(None), np.array([[self.count], [100.0 + self.count]]))
        flags, actions = np.zeros(2, np.float32), np.full((2, 1), -before, np.float32)
        flags[list(terminated)] = 1.0
        ended = {index: index in truncated for index in (*terminated, *truncated)}
        reward = np.full(2, before / 10.0, np.float32)
        rows.store(StepBatch(actions, reward, flags, ended, list(broken), 7))
        rows.state = np.full((2, 2), self.count, np.float32)
        for index in (*ended, *broken):
            self.count += 1.0
            self._begin(index)
            rows.state[index] = 0.0


def taken(ring, env):
    """The sequences of one environment: the first is recognized by observations below 100."""
    batch = LAYOUT.split_sequences(ring.rows[: ring.total_committed()], 0.99)
    mine = (batch.obs[:, 2, 0] >= 100.0) == bool(env)
    return [type(batch)(*(part[row] if isinstance(part, np.ndarray) else part for part in batch)) for row in
            np.flatnonzero(mine)]  # fmt: skip


def test_episodes_follow_one_another_in_sequences_that_overlap_by_the_burn_in():
    with ring_of(LAYOUT) as ring:
        stream = Stream(ring)
        stream.step()
        stream.step(terminated=[0])  # observations 0 1 | 3 4 5 6 (cut off at 7) | 8 9
        for _ in range(3):
            stream.step()
        stream.step(truncated=[0])
        stream.step()
        stream.step()
        first, second, third = taken(ring, 0)
        np.testing.assert_array_equal(first.obs[2:, 0], [0, 1, 3, 4])
        np.testing.assert_array_equal(first.valid, [0, 0, 1, 1, 1])  # nothing leads to the first sequence
        np.testing.assert_array_equal(first.begins, [0, 0, 1, 0, 1])
        np.testing.assert_array_equal(first.terminated, [0, 0, 0, 1, 0])
        np.testing.assert_array_equal(first.action[2:, 0], [0, -1, -3])
        np.testing.assert_allclose(first.reward[2:], [0.0, 0.1, 0.3])
        np.testing.assert_array_equal(first.state, [0, 0])
        np.testing.assert_array_equal(second.obs[:, 0], [1, 3, 4, 5, 6, 7])
        np.testing.assert_array_equal(second.begins, [0, 1, 0, 0, 0])
        np.testing.assert_array_equal(second.state, [1, 1])  # the policy's before observation 1
        np.testing.assert_array_equal(third.obs[:5, 0], [5, 6, 7, 8, 9])
        np.testing.assert_array_equal(third.valid, [1, 1, 0, 1, 1])  # 7 is where the episode was cut off
        np.testing.assert_array_equal(third.begins, [0, 0, 0, 1, 0])
        np.testing.assert_array_equal(third.terminated, np.zeros(5))
        np.testing.assert_array_equal(third.state, [5, 5])
        assert [len(each.obs) for each in taken(ring, 1)] == [6, 6]
        assert ring.stamps[0, 0, 1] == 7


def test_a_step_that_failed_leaves_the_observation_before_it():
    with ring_of(LAYOUT) as ring:
        stream = Stream(ring)
        stream.step()
        stream.step(broken=[0])
        stream.step()
        (found,) = taken(ring, 0)
        np.testing.assert_array_equal(found.obs[2:5, 0], [0, 1, 3])
        np.testing.assert_array_equal(found.valid[2:], [1, 0, 1])
        np.testing.assert_array_equal(found.begins[2:], [1, 0, 1])
        np.testing.assert_array_equal(found.action[2:, 0], [0, 0, -3])
        (other,) = taken(ring, 1)
        np.testing.assert_array_equal(other.valid[2:], [1, 1, 1])


def test_a_reader_draws_whole_rows_and_a_normalizer_counts_each_step_once():
    with ring_of(LAYOUT) as ring:
        stream = Stream(ring)
        for _ in range(12):
            stream.step()
        stream.step(truncated=[0])
        for _ in range(8):
            stream.step()
        rows = np.empty((50, LAYOUT.width), np.float32)
        assert ReplayReader(ring).sample(np.random.default_rng(0), rows) == 0
        assert {row.tobytes() for row in rows} <= {row.tobytes() for row in ring.rows}
        reader = ReplayReader(ring)
        reader.refresh()
        found, _ = reader.newer(0, 0, LAYOUT.normalized_columns)
        normalizer = Normalizer(1)
        normalizer.update(LAYOUT.counted(found))
        counted = LAYOUT.counted(found)[:, 0]
        assert sorted(counted[counted < 100]) == [*range(13), *range(14, 21)] + [21.0] * (normalizer.count > 41)
        view = LAYOUT.observations(found, None)[0]
        normalizer.apply(view)
        assert np.abs(found[:, :6]).max() < 5.0  # in place
        assert "3 steps after 2" in _fields(ring)


def test_rows_of_other_sequences_have_another_schema():
    with ring_of(LAYOUT) as one, ring_of(RowLayout(1, 1, checksum=True)) as plain:
        assert one.spec.meaning != plain.spec.meaning
        assert type(one.spec).from_json(one.spec.to_json()) == one.spec
        assert repr(plain.spec.layout) == (
            "RowLayout(obs_dim=1, action_dim=1, n_step=1, checksum=True, frame_bytes=0, stack=0, frame_numbers=0)"
        )
    assert LAYOUT.width == 6 + 5 + 4 * 5 + 2 + 1
    assert LAYOUT.env_steps_per_row == 3
    assert LAYOUT.step_bytes == pytest.approx(LAYOUT.row_bytes / 3, abs=1)


def _plan(run="dqn", **values):
    sections = {"run": {"algo": run}, run: {"recurrent": "gru", "recurrent_size": 2, "sequence_length": 10}, **values}
    return RunPlan(settings=resolve([Layer("test", sections)]), spec=SPEC, samplers=1, free_core=False)


def test_capacity_starts_and_batches_are_env_steps():
    plan = _plan(replay={"capacity": 1000, "learning_starts": 205}, learner={"batch_size": 64})
    assert plan.ring_spec().rows_per_shard == 100
    assert plan.layout.sequence == SequenceShape(10, 16, 2)
    with ring_of(plan.layout, rows=100) as ring:
        limiter = _limiter(plan, ring)
        assert (limiter.learning_starts, limiter.batch_size) == (21, 6)
        assert (limiter.minimum, limiter.maximum) == (8.0, 512.0)  # draws of a sequence are draws of its steps
        fill_with_synthetic_rows(ring, SPEC)
        assert ring.total_committed() == 100
        found = plan.layout.split_sequences(ring.rows[:100], 0.9)
        assert found.valid.all()
        assert set(np.unique(found.action)) <= set(range(9))


def test_what_needs_transitions_is_refused_beside_sequences():
    for values, text in (
        ({"learner": {"compile": True}}, "learner.compile = true"),
        ({"learner": {"device": "cuda:0+cuda:1"}}, "learner.device = cuda:0"),
        ({"replay": {"demonstrations": "file.npz"}}, "--demonstrations"),
        ({"replay": {"capacity": 30, "learning_starts": 1}, "learner": {"batch_size": 10}}, "replay.capacity = 30"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            _plan(**values)
