"""Durable checkpoints: complete or not there, whatever fails while they are written."""

import errno
import json
import os
import shutil
from collections import namedtuple

import numpy as np
import pytest

from spreeze import files
from spreeze.errors import CheckpointError, ResourceError
from spreeze.transport import checkpoint
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingSpec, ShardWriter
from spreeze.types import RowLayout

OPERATIONS = ("open", "write", "fsync", "close", "mkdir", "rename", "replace", "unlink", "rmdir")


class Crash(BaseException):
    """The process is gone: nothing after it happens."""


def tensors(value):
    return {
        "critic.weight": np.full((3, 2), value, dtype=np.float32),
        "adam.step": np.array(value, dtype=np.int64),
        "rng": np.arange(16, dtype=np.uint8),
    }


def save(store, updates, **options):
    state = {"updates": updates, "best": None, "sum": 0.1 + 0.2}
    return store.save(tensors(updates), state, epoch=1, updates=updates, **options)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def fail_at(monkeypatch, number, *, crash):
    """Makes the ``number``-th file operation fail: once as an error, or, as after a crash, all from there on."""
    count = [0]

    def wrap(name):
        original = getattr(os, name)

        def operation(*args, **kwargs):
            count[0] += 1
            if count[0] == number and not crash:
                raise OSError(28, "No space left on device")
            if count[0] >= number and crash:
                if name == "close":
                    original(*args, **kwargs)  # the kernel closes what a dead process had open
                raise Crash
            return original(*args, **kwargs)

        return operation

    for name in OPERATIONS:
        monkeypatch.setattr(os, name, wrap(name))
    return count


def test_what_is_saved_comes_back_exactly(store):
    calls = []
    store = CheckpointStore(store.directory, on_progress=calls.append)
    path = save(store, 40)
    assert path.name == "ckpt-000001-000000000040"
    loaded = store.load_latest()
    assert (loaded.path, loaded.epoch, loaded.updates, loaded.skipped) == (path, 1, 40, ())
    assert loaded.state == {"updates": 40, "best": None, "sum": 0.1 + 0.2}
    assert loaded.replay_path is None
    for name, array in tensors(40).items():
        np.testing.assert_array_equal(loaded.tensors[name], array)
        assert loaded.tensors[name].dtype == array.dtype
    assert calls == sorted(calls, reverse=True), "what is left only falls"
    assert (calls[0] > 0, calls[-1]) == (True, 0)


def test_none_at_all_is_none(store):
    assert store.load_latest() is None


def test_newest_by_epoch_and_updates_not_by_time(store):
    save(store, 100)
    store.save(tensors(5), {}, epoch=2, updates=5)
    os.utime(store.paths()[0])
    assert store.load_latest().epoch == 2


def test_the_same_step_saved_twice_keeps_both(store):
    first, second = save(store, 7), save(store, 7)
    assert first != second
    assert store.load_latest().path == second


def test_only_the_newest_are_kept(store):
    for updates in range(5):
        save(store, updates, keep=2)
    assert [path.name[-1] for path in store.paths()] == ["3", "4"]
    assert len(os.listdir(store.directory)) == 2


def test_every_truncation_and_every_flipped_bit_is_refused(store):
    path = save(store, 1)
    for name in sorted(os.listdir(path)):
        good = (path / name).read_bytes()
        for index in range(0, len(good), 3):
            flipped = good[:index] + bytes([good[index] ^ (1 << index % 8)]) + good[index + 1 :]
            for data in (flipped, good[:index]):
                (path / name).write_bytes(data)
                try:
                    loaded = store.load_latest()
                except CheckpointError:
                    continue
                assert name == "MANIFEST.json"  # a letter of a version number is no damage to what is loaded
                assert (loaded.epoch, loaded.updates, loaded.state["updates"]) == (1, 1, 1)
        (path / name).write_bytes(good)
    assert store.load_latest().updates == 1


def test_damage_falls_back_to_the_one_before_and_says_so(store):
    save(store, 1)
    newest = save(store, 2)
    (newest / "tensors.safetensors").unlink()
    loaded = store.load_latest()
    assert loaded.updates == 1
    assert "ckpt-000001-000000000002" in loaded.skipped[0]


def test_damage_everywhere_is_an_error_and_not_a_fresh_start(store):
    for updates in (1, 2):
        (save(store, updates) / "MANIFEST.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no valid checkpoint in .*"):
        store.load_latest()


def test_another_format_is_refused_by_name(store):
    path = save(store, 1)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    (path / "MANIFEST.json").write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(CheckpointError, match="format 99, this version reads 1"):
        store.load_latest()


def test_too_little_room_is_refused_before_anything_is_written(store, monkeypatch):
    save(store, 1)
    usage = namedtuple("usage", "total used free")(10, 10, 1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ResourceError, match=r"needs 2\.0 MiB free .* 1000 B are left; free disk space$"):
        save(store, 2)
    assert store.load_latest().updates == 1
    assert len(os.listdir(store.directory)) == 1


def test_large_files_are_synced_piece_by_piece_and_what_is_left_is_told_each_time(store, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", 1000)
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 1000)
    told, between, fsync = [], [], os.fsync

    def synced(fd):
        between.append(len(told))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", synced)
    ring = ReplayRing.create(RingSpec(RowLayout(3, 1), 1, 1024))
    try:
        rows = np.ones((1024, 3), np.float32)
        ShardWriter(ring, 0).write(rows, rows[:, :1], rows[:, 0], rows[:, 0], rows)
        arrays = {"weight": np.zeros(2500, np.float32)}
        CheckpointStore(store.directory, on_progress=told.append).save(arrays, {}, epoch=1, updates=1, ring=ring)
    finally:
        ring.close()
    total = told[0]
    assert total > 2 * (10_000 + 1024 * 4 * 8)
    assert told == sorted(told, reverse=True)
    assert told[-1] == 0
    assert len(between) > 10 + 40 / 4, "ten pieces of the weights, more of replay"
    assert len(set(between)) > 10, "each sync is followed by a word: nobody waits for all of them"
    assert store.load_latest().replay_path is not None


@pytest.mark.parametrize("crash", [True, False])
def test_failure_at_every_file_operation_leaves_a_loadable_checkpoint(tmp_path, monkeypatch, crash):
    reached, number = True, 0
    while reached:
        number += 1
        store = CheckpointStore(tmp_path / str(number))
        save(store, 1, keep=1)
        with monkeypatch.context() as patch:
            count = fail_at(patch, number, crash=crash)
            try:
                save(store, 2, keep=1)
                saved = True
            except (OSError, Crash):
                saved = False
            reached = count[0] >= number
        loaded = store.load_latest()
        assert loaded is not None
        assert loaded.updates == loaded.state["updates"] == int(loaded.tensors["adam.step"])
        if not crash and not saved and loaded.updates == 1:
            assert len(store.paths()) == 1  # a failed save prunes nothing
        if saved:
            assert loaded.updates == 2
        save(store, 3, keep=1)  # and the next one works, and clears what was left
        assert store.load_latest().updates == 3
        assert not [name for name in os.listdir(store.directory) if name.startswith(files.TEMP_PREFIX)]
        shutil.rmtree(store.directory)
    assert number > 20


def test_replay_is_saved_and_loaded_into_another_number_of_shards(store):
    layout = RowLayout(2, 1)
    ring = ReplayRing.create(RingSpec(layout, 2, 64))
    for shard in range(2):
        values = np.arange(50, dtype=np.float32) + 100 * shard
        obs = np.repeat(values[:, None], 2, axis=1)
        ShardWriter(ring, shard).write(obs, values[:, None] * 0, values, values * 0, obs)
    save(store, 1, ring=ring)
    ring.close()
    replay = store.load_latest().replay_path
    assert replay is not None
    ring = ReplayRing.create(RingSpec(layout, 3, 64))
    assert checkpoint.load_replay(replay, ring) == 100
    out = np.empty((5000, layout.width), dtype=np.float32)
    ReplayReader(ring).sample(np.random.default_rng(0), out)
    assert set(out[:, layout.reward]) == {float(v) for v in [*range(50), *range(100, 150)]}
    ring.close()
    assert CheckpointStore(store.directory.parent / "none").load_latest() is None


def test_the_one_nearest_to_the_best_policy_is_kept_beside_the_newest(store):
    for updates in (10, 20, 30, 40, 50, 60):
        save(store, updates, keep=2, best=22)
    assert [int(path.name[-2:]) for path in store.paths()] == [20, 50, 60]
    assert store.nearest(44).name.endswith("50")
    save(store, 70, keep=2, best=59)  # a later policy is the best one
    assert [int(path.name[-2:]) for path in store.paths()] == [60, 70]
    assert CheckpointStore(store.directory / "none").nearest(1) is None


def test_each_start_of_the_learner_has_an_epoch_of_its_own_also_where_its_files_are_damaged(store):
    assert [store.new_epoch() for _ in range(3)] == [1, 2, 3], "of these, nothing else was written"
    assert store.new_epoch(newest=7) == 8
    for damage in (b"", b"eight", b"-3", bytes(100)):
        (store.directory / "EPOCH").write_bytes(damage)
        assert store.new_epoch(newest=8) == 9
    store.save({"w": np.ones(2)}, {}, epoch=12, updates=1)
    (store.paths()[0] / "MANIFEST.json").write_bytes(b"")
    assert store.new_epoch() == 13, "a checkpoint that does not verify has used its epoch"


def test_an_epoch_that_a_full_disk_left_unnoted_is_noted_once_there_is_room(store, monkeypatch):
    def full(*args, **more):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "replace_bytes", full)
        assert store.new_epoch() == 1
        store.note_epoch()
    assert CheckpointStore(store.directory).new_epoch() == 1, "nothing was noted"
    (store.directory / "EPOCH").unlink()
    store.note_epoch()
    assert CheckpointStore(store.directory).new_epoch() == 2
