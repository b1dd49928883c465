"""The learner's side of mode impact, on rollouts in shared memory that are written here; and faults of RLlib's."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from rollouts import learner, rollout, task

from spreeze.inference.policy import Policy, exploring_arrays
from spreeze.transport.rollouts import Rollouts, RolloutSpec, RolloutWriter, StepRows
from spreeze.transport.weights import VersionedParameters, WeightsStore
from spreeze.workers.buffer_learner import BufferTrainer, PolicyBroadcast
from spreeze.workers.samplers import NewestPolicy

T, M = 4, 2
SPEC = task(discrete=True)


class Place:
    """Two samplers' slots, and a trainer."""

    def __init__(self, slots=4, uses=2, **settings):
        spec = RolloutSpec(sync_interval=T, num_envs=2 * M, obs_shape=(SPEC.obs_dim,), obs_dtype="float32",
                           action_dim=1, log_steps=1, num_slots=slots, max_uses=uses, asynchronous=True)  # fmt: skip
        self.rollouts = Rollouts.create(spec)
        self.sinks = [RolloutWriter(self.rollouts, first, M) for first in (0, M)]
        self.learner = partial(learner, "impact", SPEC, "none", slots=slots, uses=uses, least_uses=0, hidden_sizes=(4,),
                               **settings)  # fmt: skip
        self.made = self.learner()
        self.trainer = self.open()

    def open(self, base=0, session=1.0):
        return BufferTrainer(
            self.made,
            self.rollouts,
            M,
            meta={},
            progress=lambda env_steps: 0.0,
            previous_env_steps=base,
            session=session,
        )

    def close(self):
        for sink in self.sinks:
            sink.close()
        self.rollouts.close()

    def fill(self, writer, version=0):
        batch = rollout(self.made, SPEC, np.random.default_rng(version), T, M)
        for t in range(T):
            self.sinks[writer].commit([0, 1], StepRows(
                batch.obs[t], batch.action[t], batch.log_prob[t], version, batch.reward[t].tolist(), [False] * M,
                [False] * M, batch.next_obs[t]))  # fmt: skip


@pytest.fixture
def place():
    made = Place()
    yield made
    made.close()


def test_each_rollout_is_used_k_times_and_evaluated_once(place, monkeypatch):
    evaluated = []
    evaluate = place.made.evaluate
    monkeypatch.setattr(place.made, "evaluate", lambda *given: evaluated.append(given[1]) or evaluate(*given))
    assert not place.trainer.learn()
    place.fill(0)
    place.fill(1)
    assert [place.trainer.learn() for _ in range(5)] == [True] * 4 + [False]
    assert (evaluated, place.made.updates) == ([0, 1], 4), "with the sampler that it is of"
    numbers = place.trainer.metrics(wait_s=0.0, publish_s=0.0)
    assert (numbers["rollout_uses"], numbers["rollouts_dropped"], numbers["batch_size"]) == (1.5, 0, T * M)


def test_minibatches_have_equally_many_rows_of_every_rollout_and_each_of_them_once_in_a_use(monkeypatch):
    place, drawn = Place(uses=3, minibatches=2), []
    monkeypatch.setattr(place.made, "update_minibatch", lambda part, progress: drawn.append(part))
    try:
        place.fill(0)
        place.fill(1, version=1)
        while place.trainer.learn():
            pass
        rewards = [place.rollouts.fields["obs"][0, :, slice(first, first + M), 0].reshape(-1) for first in (0, M)]
    finally:
        place.close()
    rows = T * M
    assert [len(part.samples.target) for part in drawn] == [rows // 2] * 12
    found = torch.cat([part.samples.obs[:, 0] for part in drawn]).numpy()
    first, second = (np.isin(found, values) for values in rewards)
    assert first[:rows].all(), "the other one is not evaluated yet"
    assert second[5 * rows :].all(), "the first one is used up"
    for use in range(1, 5):
        mixed = slice(use * rows, (use + 1) * rows)
        assert (first[mixed].sum(), second[mixed].sum()) == (rows // 2, rows // 2)
    for of_one in (found[rows:][first[rows:]], found[rows:][second[rows:]]):
        for begin in (0, rows):
            assert len(np.unique(of_one[begin : begin + rows])) == rows, "each row before any again"
    assert not np.array_equal(found[:rows], rewards[0]), "in random order"


def test_a_restarted_learner_evaluates_again_what_has_uses_left(place):
    place.fill(0)
    place.trainer.learn()
    again = place.open()
    assert [again.learn(), again.learn()] == [True, False]
    assert place.made.updates == 2


def statistics_of(algorithm):
    state = algorithm.state_json()
    return [state[name]["count"] for name in ("normalizer", "reward_scale")]


def test_a_restarted_learner_counts_no_rollout_twice_in_its_statistics_and_leaves_none_out():
    place, other = (Place(normalize_obs=True, normalize_returns=True) for _ in range(2))
    try:
        place.fill(0)
        place.trainer.learn()
        tensors, state = place.trainer.state()
        place.fill(1)
        place.trainer.learn()  # it dies after this, and what came after the checkpoint is lost with it
        place.made, other.made = place.learner(), place.learner()
        again, resumed = place.open(), other.open(session=2.0)
        for trainer in (again, resumed):
            trainer.load_state(tensors, json.loads(json.dumps(state)))
        while again.learn():
            pass
        assert statistics_of(place.made) == [2 * T * M, 2 * T * M]
        other.fill(0)  # in the next session, whose rollouts are others
        resumed.learn()
        assert statistics_of(other.made) == [2 * T * M, 2 * T * M]
    finally:
        place.close()
        other.close()


def test_the_lag_is_that_of_the_batch_and_env_steps_are_those_that_were_collected(place):
    """Env steps belong to the batch that they came in (ray #59544), and are not counted once more at each use."""
    place.made.updates = 10
    place.fill(0, version=4)
    place.fill(1, version=8)
    place.trainer.learn()
    assert place.trainer.metrics(wait_s=0.0, publish_s=0.0)["policy_lag"] == 6.0
    while place.trainer.learn():
        pass
    assert place.trainer.env_steps == 2 * T * M
    assert place.open(base=100).env_steps == 100 + 2 * T * M


def test_the_oldest_come_first_and_what_is_too_old_is_gone(place):
    """RLlib served the newest first, so that a very old batch was served at last (ray #48702)."""
    for version in range(9):
        place.fill(0, version)
    lags = []
    place.made.updates = 100
    for count in range(3):
        place.trainer.learn()
        lags.append(100 + count - place.trainer._lags[-1])
    assert lags == [6, 7, 8], "of three slots that can be read, each once before any is used again"
    assert place.trainer.metrics(wait_s=0.0, publish_s=0.0)["rollouts_dropped"] == 6


def test_nothing_is_kept_of_rollouts_that_are_gone(place):
    for version in range(30):
        place.fill(0, version)
        place.trainer.learn()
    assert len(list(place.trainer._kept)) <= 4


@pytest.mark.parametrize("minibatches", [1, 2])
def test_what_a_sampler_has_written_over_before_it_rests_is_learned_from_no_more(monkeypatch, minibatches):
    """The reader gives it no more, so that it never comes to its last use."""
    place = Place(slots=3, uses=6, minibatches=minibatches)
    try:
        for version in range(2):
            place.fill(1, version)
            place.trainer.learn()
        for version in range(2, 4):  # the first two are gone with uses left
            place.fill(1, version)
        for version in range(4):
            place.fill(0, version)
            for _ in range(3 * minibatches):
                place.trainer.learn()
        assert not {(1, 0), (1, 1)} & set(place.trainer._kept)
    finally:
        place.close()


def test_an_average_of_the_policy_is_published_and_kept_while_samplers_get_the_newest(tmp_path):
    place = Place(uses=8, policy_average=0.6)
    try:
        expected = dict(place.made.policy_arrays())
        place.fill(0)
        for count in range(1, 7):
            place.trainer.learn()
            kept = min(0.6, count / (9 + count))
            newest = place.made.policy_arrays()
            expected = {name: kept * expected[name] + (1.0 - kept) * array for name, array in newest.items()}
        arrays, meta = place.trainer.policy_snapshot()
        tensors, state = place.trainer.state()
        again = Place(uses=8, policy_average=0.6)
        again.trainer.load_state(tensors, state)
        resumed, _ = again.trainer.policy_snapshot()
        again.close()
        for name, array in expected.items():
            np.testing.assert_allclose(arrays()[name], array, rtol=1e-5, atol=1e-7)
            np.testing.assert_array_equal(resumed()[name], arrays()[name])
            np.testing.assert_array_equal(exploring_arrays(arrays())[name], newest[name])
        WeightsStore(tmp_path).publish(arrays(), meta, 1, 6)
        sampler = NewestPolicy(WeightsStore(tmp_path))
        sampler.refresh()
        obs = np.ones((1, SPEC.obs_dim), np.float32)
        own = Policy.from_weights(newest, meta)
        np.testing.assert_array_equal(
            sampler.current().sample(obs, np.full((1, 1), 0.5, np.float32))[1],
            own.sample(obs, np.full((1, 1), 0.5, np.float32))[1],
        )
    finally:
        place.close()


def test_new_weights_reach_every_sampler_also_one_that_has_returned_nothing(place):
    """RLlib sent weights only to the workers whose samples had come back (ray #48314)."""
    policies = VersionedParameters.create(3)
    samplers = [NewestPolicy(VersionedParameters(policies.fds)) for _ in range(3)]
    broadcast = PolicyBroadcast(place.trainer, policies, 2, min_s=0.0)

    def seen():
        for sampler in samplers:
            sampler.refresh()
        return [None if sampler.current() is None else sampler.version for sampler in samplers]

    try:
        assert seen() == [None] * 3
        broadcast.after(place.trainer.learn(), 1)
        assert seen() == [0, 0, 0], "before there is anything to learn from"
        place.fill(0)
        place.fill(0)
        found = []
        for _ in range(5):
            broadcast.after(place.trainer.learn(), 1)
            found.append(seen()[2])
        assert found == [0, 2, 2, 4, 4]
        place.fill(1)
        broadcast.after(place.trainer.learn(), 1)
        assert (place.made.updates, seen()) == (5, [4] * 3)
        broadcast.after(False, 1)
        assert seen() == [5] * 3, "the learner waits: also what is less than two updates old"
        PolicyBroadcast(place.trainer, policies, 2).after(False, 2)
        assert samplers[0]._weights.read_latest((1, 5)).order == (2, 5), "a learner that was started again"
    finally:
        policies.close()


def test_a_learner_that_lost_updates_hands_over_again_though_no_file_tells_of_the_epoch_before(place):
    policies = VersionedParameters.create(3)
    try:
        place.made.updates = 500
        PolicyBroadcast(place.trainer, policies, 1).after(False, 1)
        place.made.updates = 300  # of the newest checkpoint
        successor = PolicyBroadcast(place.trainer, policies, 1, min_s=0.0)
        successor.after(False, 1)
        assert policies.read_latest().order == (2, 300)
        place.made.updates = 301
        successor.after(False, 1)
        assert policies.read_latest().order == (2, 301)
    finally:
        policies.close()


def test_a_policy_that_is_not_finite_is_kept_back(place):
    policies = VersionedParameters.create(3)
    try:
        PolicyBroadcast(place.trainer, policies, 1).after(False, 1)
        place.made.net.flat[0], place.made.updates = float("nan"), 5
        PolicyBroadcast(place.trainer, policies, 1).after(False, 1)
        assert policies.read_latest().version == 0
    finally:
        policies.close()


def test_its_state_comes_back(place):
    place.fill(0)
    place.trainer.learn()
    tensors, state = place.trainer.state()
    other = Place()
    other.trainer.load_state(tensors, state)
    assert torch.equal(other.made.net.flat, place.made.net.flat)
    assert other.trainer.parameters_sha256() == place.trainer.parameters_sha256()
    assert (other.trainer.updates, state["updates"]) == (1, 1)
    other.close()
