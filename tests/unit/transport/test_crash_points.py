"""Every save, ended at its n-th file operation for all n; and what a power loss may leave of a checkpoint."""

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_checkpoint import Crash, fail_at

from spreeze import files
from spreeze.cli.resume import settings_of, write_settings
from spreeze.config.layers import Layer, resolve
from spreeze.files import write_json
from spreeze.run_directory import read_run
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.replay_ring import ReplayRing, RingSpec, ShardWriter
from spreeze.transport.weights import WeightsStore
from spreeze.types import RowLayout
from spreeze.workers.evaluator import COLUMNS, append_row, read_rows

LONG = "SPREEZE_LONG_TESTS" in os.environ
POWER_LOSSES = 2000 if LONG else 60


def _tensors(value):
    return {"critic": np.full((5, 3), value, dtype=np.float32), "step": np.array(value, dtype=np.int64)}


def _checkpoint(folder, value, ring=None):
    CheckpointStore(folder / "checkpoints").save(_tensors(value), {"updates": value}, epoch=1, updates=value,
                                                 ring=ring, keep=1)  # fmt: skip


def _checkpoint_after_a_crash(folder, value):
    left = folder / "checkpoints" / f"{files.TEMP_PREFIX}of-the-dead"
    left.mkdir(parents=True, exist_ok=True)
    (left / "tensors.safetensors").write_bytes(b"half")
    _checkpoint(folder, value)


def _loaded_checkpoint(folder):
    found = CheckpointStore(folder / "checkpoints").load_latest()
    assert found is not None
    assert found.updates == found.state["updates"] == int(found.tensors["step"])
    return found.updates


def _weights(folder, value):
    WeightsStore(folder / "weights", keep=1, min_age_s=-1.0).publish(_tensors(value), {"n": value}, 1, value)


def _loaded_weights(folder):
    found = WeightsStore(folder / "weights").read_latest()
    assert found is not None
    assert found.version == found.meta["n"] == int(found.arrays["step"])
    return found.version


def _run_file(folder, value):
    write_json(folder / "run.json", {"value": value})


def _loaded_run_file(folder):
    return read_run(folder)["value"]


def _best(folder, value):
    files.replace_bytes(folder / "best.safetensors", b"%d" % value)
    files.write_json(folder / "best.json", {"value": value})


def _loaded_best(folder):
    assert int((folder / "best.safetensors").read_bytes()) in (1, 2, 3)
    return min(files.json.loads((folder / "best.json").read_bytes())["value"], 3)


def _curve(folder, value):
    append_row(folder / "eval.csv", dict.fromkeys(COLUMNS, float(value)))


def _loaded_curve(folder):
    return int(read_rows(folder / "eval.csv")[-1][COLUMNS[0]])


def _settings(folder, value):
    write_settings(folder, resolve([Layer("user", {"run": {"seed": value}})]))


def _loaded_settings(folder):
    return settings_of(folder).config.run.seed


SAVES = {
    "checkpoint": (_checkpoint, _loaded_checkpoint),
    "checkpoint after a crash": (_checkpoint_after_a_crash, _loaded_checkpoint), "weights": (_weights, _loaded_weights),
    "run file": (_run_file, _loaded_run_file), "best weights": (_best, _loaded_best), "curve": (_curve, _loaded_curve),
    "settings": (_settings, _loaded_settings),
}  # fmt: skip


@pytest.fixture
def ring():
    made = ReplayRing.create(RingSpec(RowLayout(3, 1), 2, 200))
    for shard in range(2):
        rows = np.ones((150, 3), np.float32)
        ShardWriter(made, shard).write(rows, rows[:, :1], rows[:, 0], rows[:, 0], rows)
    yield made
    made.close()


def _points(folder, monkeypatch, save, loaded, crash):
    """Ends the second save at each of its operations; returns how many there were."""
    number = 0
    while True:
        number += 1
        here = folder / str(number)
        here.mkdir()
        save(here, 1)
        with monkeypatch.context() as patch:
            count = fail_at(patch, number, crash=crash)
            try:
                save(here, 2)
                ended = False
            except (OSError, Crash):
                ended = True
        assert loaded(here) in ((1, 2) if ended else (2,)), f"operation {number}"
        save(here, 3)
        assert loaded(here) == 3, f"the next save after operation {number}"
        if count[0] < number:
            return number - 1
        shutil.rmtree(here)


def test_f29_every_crash_point_of_every_save_loads(tmp_path, monkeypatch, ring):
    total = 0
    for crash in (True, False):
        for name, (save, loaded) in SAVES.items():
            folder = tmp_path / f"{name} {crash}"
            folder.mkdir()
            total += _points(folder, monkeypatch, save, loaded, crash)
        folder = tmp_path / f"with replay {crash}"
        folder.mkdir()
        total += _points(folder, monkeypatch, lambda at, n: _checkpoint(at, n, ring), _loaded_checkpoint, crash)
    print(f"{total} crash points")
    assert total >= 200


class Disk:
    """Records what a process does to its files, and what of it was synced; plays back what a power loss may leave.

    A rename, a new name and a removed name are kept or lost until their directory is synced, each for itself and in any
    order; bytes of a file are whole only after its fsync, else absent, cut, or partly old (zero).
    """

    def __init__(self, root):
        self.root, self.log = root, []
        self._paths = {}

    def install(self, patch):
        originals = {name: getattr(os, name) for name in ("open", "fsync", "rename", "replace", "write")}

        def opened(path, flags, *args, **kwargs):
            fd = originals["open"](path, flags, *args, **kwargs)
            self._paths[fd] = Path(path)
            if flags & os.O_CREAT:
                self.log.append(("create", Path(path)))
            return fd

        def synced(fd):
            originals["fsync"](fd)
            self.log.append(("sync", self._paths.get(fd)))

        def renamed(name):
            def operation(source, target):
                originals[name](source, target)
                self.log.append(("rename", Path(source), Path(target)))

            return operation

        patch.setattr(os, "open", opened)
        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "rename", renamed("rename"))
        patch.setattr(os, "replace", renamed("replace"))


def _after_power_loss(disk, before, after, target, stop, dice):
    """Builds what may be on the disk when the power fails after ``stop`` recorded operations."""
    shutil.copytree(before, target)
    synced, moved = set(), []
    for entry in disk.log[:stop]:
        if entry[0] == "sync" and entry[1] is not None:
            synced.add(entry[1])
        if entry[0] == "rename":
            moved.append((entry[1], entry[2]))
    for source, final in moved:
        durable = final.parent in synced and any(
            entry == ("sync", final.parent) for entry in disk.log[disk.log.index(("rename", source, final)) : stop]
        )
        if not durable and dice.random() < 0.5:
            continue  # the name never reached the disk
        place = target / final.relative_to(disk.root)
        origin = after / final.relative_to(disk.root)
        if not origin.exists():
            continue
        if origin.is_dir():
            shutil.copytree(origin, place, dirs_exist_ok=True)
            for path in place.iterdir():
                _spoil(path, source / path.name in synced, source in synced, dice)
        else:
            shutil.copy(origin, place)
            _spoil(place, source in synced, True, dice)


def _spoil(path, content_durable, name_durable, dice):
    """Drops, cuts or zeroes what was not synced."""
    if not name_durable and dice.random() < 0.3:
        path.unlink()
        return
    if content_durable:
        return
    data = path.read_bytes()
    how = dice.randrange(4)
    cut = dice.randrange(len(data) + 1)
    path.write_bytes((data, b"", data[:cut], data[:cut] + bytes(len(data) - cut))[how])


@pytest.mark.timeout(1800 if LONG else 600)
def test_f30_whatever_a_power_loss_leaves_the_newest_durable_checkpoint_loads(tmp_path, monkeypatch):
    root, before = tmp_path / "disk", tmp_path / "before"
    _checkpoint(root, 1)
    shutil.copytree(root, before)
    disk = Disk(root)
    with monkeypatch.context() as patch:
        disk.install(patch)
        CheckpointStore(root / "checkpoints").save(_tensors(2), {"updates": 2}, epoch=1, updates=2, keep=3)
    kinds = [entry[0] for entry in disk.log]
    assert kinds.count("sync") >= 4
    assert kinds.count("rename") == 1
    loaded = {1: 0, 2: 0}
    for number in range(POWER_LOSSES):
        dice = random.Random(number)
        stop = dice.randrange(len(disk.log) + 1) if number % 4 else len(disk.log)
        target = tmp_path / "after"
        _after_power_loss(disk, before, root, target, stop, dice)
        found = _loaded_checkpoint(target)
        loaded[found] += 1
        if stop == len(disk.log):
            assert found == 2, "a save that returned is on the disk"
        _checkpoint(target, 3)
        assert _loaded_checkpoint(target) == 3
        shutil.rmtree(target)
    print(f"{POWER_LOSSES} power losses: the new checkpoint loaded {loaded[2]} times, the one before {loaded[1]} times")
    assert min(loaded.values()) > 0


def test_f30_no_power_loss_gives_two_starts_of_the_learner_one_epoch(tmp_path, monkeypatch):
    root, before = tmp_path / "disk", tmp_path / "before"
    CheckpointStore(root / "checkpoints").new_epoch()
    shutil.copytree(root, before)
    disk = Disk(root)
    with monkeypatch.context() as patch:
        disk.install(patch)
        assert CheckpointStore(root / "checkpoints").new_epoch() == 2
    for number in range(50):
        _after_power_loss(disk, before, root, tmp_path / "after", len(disk.log), random.Random(number))
        assert CheckpointStore(tmp_path / "after" / "checkpoints").new_epoch() == 3
        shutil.rmtree(tmp_path / "after")


@pytest.mark.slow
def test_f30_a_power_loss_leaves_the_settings_of_this_session_or_of_the_one_before(tmp_path, monkeypatch):
    root, before = tmp_path / "disk", tmp_path / "before"
    root.mkdir()
    _settings(root, 1)
    shutil.copytree(root, before)
    disk = Disk(root)
    with monkeypatch.context() as patch:
        disk.install(patch)
        _settings(root, 2)
    assert [entry[0] for entry in disk.log] == ["create", "sync", "rename", "sync"], "bytes, then name, then its folder"
    loaded = {1: 0, 2: 0}
    for number in range(POWER_LOSSES):
        stop = number % (len(disk.log) + 1)
        _after_power_loss(disk, before, root, tmp_path / "after", stop, random.Random(number))
        found = _loaded_settings(tmp_path / "after")
        loaded[found] += 1
        if stop == len(disk.log):
            assert found == 2, "a session that began is on the disk"
        shutil.rmtree(tmp_path / "after")
    assert min(loaded.values()) > 0


def test_the_simulated_disk_finds_a_save_without_syncs(tmp_path, monkeypatch):
    root, before = tmp_path / "disk", tmp_path / "before"
    _checkpoint(root, 1)
    shutil.copytree(root, before)
    disk = Disk(root)
    with monkeypatch.context() as patch:
        disk.install(patch)
        patch.setattr(os, "fsync", lambda fd: None)
        CheckpointStore(root / "checkpoints").save(_tensors(2), {"updates": 2}, epoch=1, updates=2, keep=3)
    fell_back = 0
    for number in range(30):
        _after_power_loss(disk, before, root, tmp_path / "after", len(disk.log), random.Random(number))
        fell_back += _loaded_checkpoint(tmp_path / "after") == 1
        shutil.rmtree(tmp_path / "after")
    assert fell_back > 5
