"""Prioritised replay against plain NumPy: sums, probabilities, weights, and rows that come and go."""

import dataclasses
from itertools import count

import numpy as np
import pytest
from batches import batches, made
from rings import put, ring_of
from test_frames import FRAME, collect

from spreeze.config.schema import SECTIONS, LearnerConfig
from spreeze.transport.prioritised_replay import PrioritisedReader, SumTree, open_reader
from spreeze.transport.replay_ring import ReplayReader, ShardWriter
from spreeze.transport.transitions import fill_with_synthetic_rows
from spreeze.types import Box, Choices, EnvSpec, RowLayout
from spreeze.workers.replay_trainer import ReplayTrainer


@pytest.mark.parametrize("size", [1, 33, 3000, 70_000])
def test_a_tree_finds_what_running_sums_find(size):
    rng, tree, plain = np.random.default_rng(size), SumTree(size), np.zeros(size)
    for changed in (size, max(1, size // 3), 1, min(size, 40)):
        index = rng.integers(0, size, changed)
        plain[index] = values = rng.exponential(size=changed) * (rng.random(changed) < 0.7)
        plain[index] = values  # of several for one index the last
        tree.set(index, values)
        assert tree.total == pytest.approx(plain.sum())
        assert np.array_equal(tree[np.arange(size)], plain)
        if plain.any():
            masses = rng.random(500) * tree.total
            found, running = tree.find(masses), plain.cumsum()
            assert (plain[found] > 0.0).all()
            assert (running[found] >= masses - 1e-9 * tree.total).all()
            assert (running[found] - plain[found] <= masses + 1e-9 * tree.total).all()


def test_the_ends_of_the_range_find_indices_that_have_a_priority():
    tree = SumTree(40_000)
    tree.set(np.array([7, 30_000]), np.array([0.1, 0.7]))
    assert tree.find(np.array([0.0, np.nextafter(0.1, 0.0), tree.total * (1 - 1e-16), tree.total])).tolist() == [
        7, 7, 30_000, 30_000,
    ]  # fmt: skip


def batch(reader, rng, size=64):
    """Numbers of the rows of a batch."""
    out = np.empty((size, reader.ring.spec.layout.width), np.float32)
    reader.sample(rng, out)
    return out[:, 0].astype(int)


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_rows_are_drawn_and_weighted_as_the_paper_says(exponent):
    # A row's error is its number modulo 5, plus 1.
    with ring_of(shards=2, rows=100) as ring:
        for shard in range(2):
            put(ShardWriter(ring, shard), 50 * shard, 50)
        reader, rng = PrioritisedReader(ring, exponent), np.random.default_rng(0)
        for _ in range(60):
            reader.set_errors((batch(reader, rng) % 5 + 1).astype(np.float32))
        drawn = np.concatenate([batch(reader, rng) for _ in range(1000)])
        probability = (np.arange(100) % 5 + 1.0) ** exponent
        probability /= probability.sum()
        found = np.bincount(drawn, minlength=100) / len(drawn)
        assert np.abs(found / probability - 1.0).max() < 0.25
        assert np.abs(found.reshape(-1, 5).sum(0) / probability.reshape(-1, 5).sum(0) - 1.0).max() < 0.06
        numbers = batch(reader, rng)
        expected = (100 * probability[numbers]) ** -0.4
        np.testing.assert_allclose(reader.importance_weights(0.4), expected / expected.max(), rtol=1e-5)


def test_new_rows_get_the_largest_error_and_overwritten_ones_leave_nothing_behind():
    with ring_of(rows=64) as ring:
        writer, reader, rng = ShardWriter(ring, 0), PrioritisedReader(ring, 1.0), np.random.default_rng(0)
        put(writer, 0, 60)
        for _ in range(10):
            reader.set_errors(np.where(batch(reader, rng) == 3, 1000.0, 0.01))
        assert np.mean(batch(reader, rng) == 3) > 0.9
        stale = reader._drawn
        put(writer, 60, 10)  # over row 3, and eight new ones
        numbers = batch(reader, rng, 1000)
        assert numbers.min() >= 6
        assert np.mean(numbers >= 60) > 0.9
        assert reader.importance_weights(1.0).max() == 1.0
        before = reader._tree[stale.row]
        reader._drawn = stale
        reader.set_errors(np.full(len(stale.row), 0.5))  # of rows that are gone: their places are others' by now
        left = stale.logical < reader.windows[0][0]
        assert left.any()
        assert np.array_equal(reader._tree[stale.row][left], before[left])


def test_errors_that_are_not_finite_count_as_none():
    with ring_of(rows=64) as ring:
        put(ShardWriter(ring, 0), 0, 20)
        reader, rng = PrioritisedReader(ring, 0.6), np.random.default_rng(0)
        batch(reader, rng)
        reader.set_errors(np.full(64, np.nan))
        assert reader.largest_error == 1.0
        assert np.isfinite(reader._tree.total)
        assert reader._tree.total > 0.0


def test_a_successor_of_a_dead_writer_and_a_restarted_learner_go_on_with_every_row():
    with ring_of(rows=64) as ring:
        writer, reader, rng = ShardWriter(ring, 0), PrioritisedReader(ring, 1.0), np.random.default_rng(0)
        put(writer, 0, 20)
        batch(reader, rng)
        reader.set_errors(np.full(64, 5.0))
        ring.words[ring.word(0, 0)] = 24  # announced, never committed
        put(ShardWriter(ring, 0), 20, 10)
        assert set(batch(reader, rng, 1000)) == set(range(30))
        again = PrioritisedReader(ring, 1.0)
        again.reset_priorities(reader.largest_error)
        assert set(batch(again, rng, 1000)) == set(range(30))
        assert again.importance_weights(1.0).min() == 1.0
        assert again.largest_error == 5.0


def test_image_rows_that_are_no_transition_are_tried_once():
    layout = RowLayout(0, 1, frame_bytes=FRAME, stack=2)
    with ring_of(layout, rows=400) as ring:
        rng = np.random.default_rng(0)
        collect(ring, 0, stack=2, n_step=1, envs=2, ends=0.2, steps=100, rng=rng, serials=count())
        reader = PrioritisedReader(ring, 0.5)
        rows, frames = np.empty((64, layout.width), np.float32), np.empty((64, 3, FRAME), np.uint8)
        for _ in range(100):
            reader.sample(rng, rows, frames)
            assert (rows[:, layout.num_steps] == 1.0).all()
        low, end = reader.windows[0]
        assert np.array_equal(reader._tree[np.arange(low, end)] > 0.0, ring.rows[low:end, layout.num_steps] > 0)


def test_a_setting_chooses_the_reader():
    with ring_of() as ring:
        assert type(open_reader(ring, 0.0)) is ReplayReader
        assert type(open_reader(ring, 0.5)) is PrioritisedReader


def learner(ring, name, spec, **changes):
    config = dataclasses.replace(SECTIONS[name](), hidden_sizes=(8, 8), n_step=1, priority_exponent=0.6, **changes)
    return ReplayTrainer(spec, name, config, ring.spec.layout, open_reader(ring, 0.6),
                         LearnerConfig(batch_size=32, device="cpu"), seed=1, normalize_obs=False)  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), [
    ("dqn", {}), ("sac", {}), ("discrete sac", {}), ("sac", {"critics": "quantile"}),
    ("td3", {"critics": "categorical"}), ("ddpg", {}),
])  # fmt: skip
def test_a_learner_weighs_rows_gives_their_errors_back_and_repeats(name, changes):
    algo, discrete = name.split()[-1], name in ("dqn", "discrete sac")
    spec = EnvSpec(env_id="x", import_module=None, obs_dim=3, max_episode_steps=None, reward_threshold=None,
                   action=Choices((3,)) if discrete else Box((-1.0,), (1.0,)))  # fmt: skip
    with ring_of(RowLayout(3, 1), rows=512) as ring:
        fill_with_synthetic_rows(ring, spec)
        first, again = (learner(ring, algo, spec, **changes) for _ in range(2))
        first.update_learning_rates(0.5)  # of importance weights: 0.7
        again.update_learning_rates(0.5)
        first.update()
        reader = first._prioritised
        expected = (first.algorithm.row_errors() + 1e-6) ** 0.6
        np.testing.assert_allclose(reader._tree[reader._drawn.row], expected, rtol=1e-4)
        assert (first.batches.batch().weight == 1.0).all()  # all were new
        for _ in range(20):
            first.update()
        again.update()
        for _ in range(20):
            again.update()
        assert first.batches.batch().weight.min() < 1.0
        assert first.parameters_sha256() == again.parameters_sha256()
        resumed = learner(ring, algo, spec, **changes)
        resumed.load_state(*first.state())
        assert resumed._prioritised.largest_error == reader.largest_error
        resumed.update()
        resumed._open_gpu_replay()  # as on a card
        assert not resumed.has_gpu_replay
        assert "batches are gathered on the host, without CUDA graphs: row priorities" in resumed.notes[-1]


@pytest.mark.parametrize("name", ["sac", "td3"])
@pytest.mark.parametrize("critics", ["twin", "quantile", "categorical"])
def test_a_weight_is_a_factor_of_the_rows_gradient(name, critics):
    found = []
    whole = next(batches(1, size=24))
    for weight in (None, np.ones(24), np.arange(24) / 10.0, 1.0 - np.arange(24) / 10.0):
        algorithm = made(name, critics=critics)
        algorithm.critics.adam.step = lambda: None  # the gradient alone
        tensor = None if weight is None else whole.reward.new_tensor(weight)
        algorithm.update(whole._replace(weight=tensor))
        found.append(algorithm.critics.gradient.flat.numpy().copy())
    assert np.array_equal(found[0], found[1])
    np.testing.assert_allclose(found[2] + found[3], found[1], atol=1e-5)
    assert not np.allclose(found[2], found[1])
