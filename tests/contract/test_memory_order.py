"""Fences between data and counters: what a processor that reorders stores and loads needs, seen by a fence that notes.

Nothing here ran on such a processor: a test sees only that each protocol has its fence, and where.
"""

import numpy as np
import pytest
from harness import race
from rings import put, ring_of

from spreeze.transport import replay_ring, rollouts, shared_memory, status_table
from spreeze.transport.replay_ring import ReplayReader, ShardWriter
from spreeze.transport.rollouts import InferenceMailbox, Responses, Rollouts, RolloutSpec
from spreeze.transport.status_table import RetunedSettings, StatusTable
from spreeze.transport.weights import VersionedParameters

SPEC = RolloutSpec(sync_interval=2, num_envs=1, obs_shape=(1,), obs_dtype="float32", action_dim=1, log_steps=2)


@pytest.fixture
def fences(monkeypatch):
    """Sets what is noted at each fence, whatever this machine's processor; returns the notes."""
    monkeypatch.setattr(shared_memory, "STRONGLY_ORDERED", False)

    def begin(module, seen):
        notes = []
        monkeypatch.setattr(module, "memory_fence", lambda: notes.append(seen()))
        return notes

    return begin


def test_a_fence_can_be_called_by_several_threads_at_once():
    race(lambda: [shared_memory.memory_fence() for _ in range(200)])


def test_rows_are_written_between_their_announcement_and_their_publication(fences):
    with ring_of(fenced=True) as ring:
        writer = ShardWriter(ring, 0)
        notes = fences(replay_ring, lambda: (int(ring.reserved[0]), float(ring.rows[2, 0]), int(ring.committed[0])))
        for packed in (False, True):
            notes.clear()
            before = writer.next_logical
            ring.rows[before + 2, 0] = 0.0
            if packed:
                writer.write_packed(np.full((3, ring.spec.layout.width), 7.0, np.float32))
            else:
                put(writer, 5, 3)
            assert [(reserved, committed) for reserved, _, committed in notes] == [(before + 3, before)] * 2
            if not packed:
                assert [value for _, value, _ in notes] == [0.0, 7.0]


def test_rows_are_read_between_two_looks_at_the_counters(fences, monkeypatch):
    with ring_of(fenced=True) as ring:
        put(ShardWriter(ring, 0), 0, 32)
        reader, rng = ReplayReader(ring), np.random.default_rng(0)
        out = np.zeros((4, ring.spec.layout.width), np.float32)
        notes = fences(replay_ring, lambda: "fence")
        counters = ring.counters
        monkeypatch.setattr(ring, "counters", lambda: (notes.append(f"counters, rows {out.any()}"), counters())[1])
        reader.sample(rng, out)
        assert notes == ["counters, rows False", "fence", "fence", "counters, rows True"]
        notes.clear()
        reader.newer(0, 0, slice(None))
        assert notes == ["fence", "counters, rows True"]


def test_a_step_counts_after_its_row(fences):
    memory = Rollouts.create(SPEC)
    writer = rollouts.RolloutWriter(memory, 0, 1)
    ones = np.ones((1, 1), np.float32)
    notes = fences(shared_memory, lambda: (float(memory.fields["reward"][0, 0, 0]), int(memory.steps[0])))
    writer.commit([0], rollouts.StepRows(ones, ones, np.ones(1), 0, [3.0], [False], [False], ones))
    assert notes == [(3.0, 0)]
    assert memory.steps[0] == 1
    memory.swap()
    assert len(notes) == 2
    memory.close()


def test_a_rollout_begins_for_readers_before_it_covers_an_older_one(fences):
    memory = Rollouts.create(RolloutSpec(**{**vars(SPEC), "asynchronous": True}))
    memory.steps[0] = 4
    writer = rollouts.RolloutWriter(memory, 0, 1)
    notes = fences(shared_memory, lambda: int(memory.steps[0]))
    assert writer.may_step() == [0]
    assert notes == [4]
    memory.close()


def test_requests_and_responses_are_announced_after_they_are_written(fences):
    mail, envs, ones = InferenceMailbox.create(SPEC), np.array([0]), np.ones((1, 1), np.float32)
    notes = fences(shared_memory, lambda: (float(mail.obs[0, 0]), int(mail.requested[0]), int(mail.answered[0])))
    mail.request(envs, ones, ones, (), np.array([1]))
    assert mail.pending(slice(0, 1)).tolist() == [0]
    mail.respond(envs, Responses(ones, np.ones(1, np.float32), 0))
    assert mail.responses(envs).action == 1.0
    assert notes == [(1.0, 0, 0), (1.0, 1, 0), (1.0, 1, 0), (1.0, 1, 1)]
    mail.close()


def test_parameters_lie_between_two_versions_of_their_header(fences):
    slots = VersionedParameters.create()
    notes = fences(shared_memory, lambda: slots.newest)
    slots.publish({"w": np.ones(3)}, {}, 0, 0)
    assert notes == [None, None]
    notes.clear()
    assert slots.read_latest().arrays["w"].tolist() == [1.0, 1.0, 1.0]
    assert notes == [(0, 0)] * 3
    slots.close()


def test_settings_are_in_force_after_they_are_written(fences):
    status = StatusTable.create(1)
    word = status.header[status_table.BATCH_SIZE : status_table.BATCH_SIZE + 1]
    notes = fences(shared_memory, lambda: (int(word[0]), int(status.header[status_table.RETUNED])))
    status.retune(RetunedSettings(64, 1, 1.0, 2.0))
    assert status.retuned_settings().batch_size == 64
    assert notes == [(64, 0), (64, 1)]
    word = None
    status.close()
