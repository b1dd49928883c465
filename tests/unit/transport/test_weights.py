"""Weights through files: whole or absent, in order, never a dead reader."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import PATIENCE_S, REPO
from hypothesis import given, settings
from hypothesis import strategies as st

from spreeze import files
from spreeze.errors import WeightsError
from spreeze.transport.weights import LATEST, WeightsStore, encode, read_weights


def arrays(value=1.0):
    return {
        "actor.0.weight": np.full((4, 3), value, dtype=np.float32),
        "actor.0.bias": np.full(4, value, dtype=np.float32),
        "count": np.array(7, dtype=np.int64),
    }


@pytest.fixture
def store(tmp_path):
    return WeightsStore(tmp_path / "weights")


def test_what_is_published_comes_back(store):
    path = Path(store.publish(arrays(2.5), {"algo": "sac", "sizes": [4, 3], "gamma": 0.99}, 1, 20))
    assert path.name == "w-000001-000000000020.safetensors"
    for weights in (store.read_latest(), read_weights(path)):
        assert weights.order == (1, 20)
        assert weights.meta == {"algo": "sac", "sizes": [4, 3], "gamma": 0.99}
        assert weights.path == path
        assert weights.to_bytes() == path.read_bytes()
        assert weights.arrays.keys() == arrays().keys()
        np.testing.assert_array_equal(weights.arrays["actor.0.weight"], arrays(2.5)["actor.0.weight"])
        assert weights.arrays["count"].shape == ()


def test_the_name_of_a_version_does_not_stay_in_the_interpreter_s_table(store):
    store.publish(arrays(), {}, 1, 20_240_228)  # lists the directory, once, by Paths; Python 3.12 never forgets those
    path = store.publish(arrays(), {}, 1, 20_240_229)
    name = os.path.basename(path)
    assert sys.intern(name) is name, "an equal string was there before: a Path was made of it"


def test_views_that_are_not_contiguous_are_stored_as_seen(store):
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    store.publish({"t": matrix.T}, {}, 1, 1)
    np.testing.assert_array_equal(store.read_latest().arrays["t"], matrix.T)


def test_where_nothing_is_published_nothing_is_read(store):
    assert store.read_latest() is None


def test_only_newer_versions_are_read_and_epoch_counts_more_than_version(store):
    store.publish(arrays(), {}, 1, 500)
    assert store.read_latest((1, 500)) is None
    assert store.read_latest((1, 499)).order == (1, 500)
    store.publish(arrays(), {}, 2, 10)
    assert store.read_latest((1, 500)).order == (2, 10)


@pytest.mark.parametrize("order", [(1, 5), (1, 4), (0, 9)])
def test_a_version_that_is_not_newer_is_not_published(tmp_path, order):
    WeightsStore(tmp_path).publish(arrays(), {}, 1, 5)
    with pytest.raises(WeightsError, match="1-5 is already there"):
        WeightsStore(tmp_path).publish(arrays(), {}, *order)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_never_published(store, bad):
    store.publish(arrays(1.0), {}, 1, 1)
    before = sorted(os.listdir(store.directory))
    broken = arrays()
    broken["actor.0.bias"][2] = bad
    with pytest.raises(WeightsError, match=r"actor\.0\.bias has 1 of 4 values"):
        store.publish(broken, {}, 1, 2)
    assert sorted(os.listdir(store.directory)) == before
    assert store.read_latest().version == 1


def test_the_newest_three_stay_and_so_does_what_is_young(tmp_path):
    now = [0.0]
    young = WeightsStore(tmp_path / "young", clock=lambda: now[0])
    old = WeightsStore(tmp_path / "old", min_age_s=-1.0)
    for version in range(6):
        now[0] = 0.0 if version < 2 else 55.0
        young.publish(arrays(), {}, 1, version)
        old.publish(arrays(), {}, 1, version)
    now[0] = 60.0
    young.publish(arrays(), {}, 1, 6)
    assert [order for order, _ in old.versions()] == [(1, 3), (1, 4), (1, 5)]
    assert [order[1] for order, _ in young.versions()] == [2, 3, 4, 5, 6]


def test_versions_of_an_earlier_publisher_are_deleted_too(tmp_path):
    for version in range(4):
        WeightsStore(tmp_path).publish(arrays(), {}, 1, version)
    now = [0.0]
    store = WeightsStore(tmp_path, clock=lambda: now[0])
    store.publish(arrays(), {}, 2, 0)
    now[0] = 60.0
    store.publish(arrays(), {}, 2, 1)
    assert [order for order, _ in store.versions()] == [(1, 3), (2, 0), (2, 1)]


def test_temporary_names_match_nothing_a_reader_looks_for(store):
    store.publish(arrays(), {}, 1, 1)
    (store.directory / files.temp_name()).write_bytes(b"half")
    assert [order for order, _ in store.versions()] == [(1, 1)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda pointer: {**pointer, "file": "../../etc/passwd"},
        lambda pointer: {**pointer, "file": 5},
        lambda pointer: {**pointer, "version": 99},
        lambda pointer: {**pointer, "version": None},
        lambda pointer: {**pointer, "sha256": "0" * 64},
        lambda pointer: {**pointer, "file": "w-000001-000000000099.safetensors", "version": 99},
        lambda pointer: [pointer],
        lambda pointer: {},
    ],
)
def test_a_pointer_that_lies_is_refused(store, damage):
    store.publish(arrays(), {}, 1, 1)
    pointer = store.directory / LATEST
    pointer.write_text(json.dumps(damage(json.loads(pointer.read_text()))))
    assert store.read_latest() is None


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_as_pointer_or_weights_end_in_a_refusal(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("weights")
    (directory / LATEST).write_bytes(data)
    store = WeightsStore(directory)
    assert store.read_latest() is None
    path = directory / "w-000001-000000000001.safetensors"
    path.write_bytes(data)
    with pytest.raises(WeightsError):
        read_weights(path)


def test_every_flipped_byte_and_every_truncation_is_refused_or_changes_nothing(store):
    path = Path(store.publish(arrays(), {"algo": "sac"}, 1, 1))
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    other = WeightsStore(store.directory)
    for index in range(len(good)):
        path.write_bytes(good[:index] + bytes([good[index] ^ 0x10]) + good[index + 1 :])
        assert other.read_latest() is None
        try:
            weights = read_weights(path)
        except WeightsError:
            continue
        assert index < header  # only a byte without meaning, such as padding, may pass
        assert (weights.meta, weights.order) == ({"algo": "sac"}, (1, 1))
        for name, array in arrays().items():
            np.testing.assert_array_equal(weights.arrays[name], array)
    for length in range(0, len(good), 7):
        path.write_bytes(good[:length])
        assert other.read_latest() is None
        with pytest.raises(WeightsError):
            read_weights(path)


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(WeightsError, match="cannot be read"):
        read_weights(tmp_path / "none.safetensors")


@pytest.mark.parametrize("name", ["open", "write", "replace"])
def test_a_disk_that_fails_keeps_the_old_version(store, monkeypatch, name):
    store.publish(arrays(1.0), {}, 1, 1)

    def no_room(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, name, no_room)
        with pytest.raises(OSError, match="No space"):
            store.publish(arrays(2.0), {}, 1, 2)
    assert not [entry for entry in os.listdir(store.directory) if entry.startswith(files.TEMP_PREFIX)]
    assert store.read_latest().version == 1
    store.publish(arrays(2.0), {}, 1, 3)
    assert store.read_latest().version == 3


READER = """
import sys
from pathlib import Path
import numpy as np
from spreeze.transport.weights import WeightsStore
store, seen, reads = WeightsStore(Path(sys.argv[1])), None, 0
while seen is None or seen[1] < int(sys.argv[2]):
    weights = store.read_latest(seen)
    if weights is not None:
        assert seen is None or weights.order > seen
        assert (weights.arrays["w"] == weights.version).all()
        seen, reads = weights.order, reads + 1
print(reads)
"""


@pytest.mark.warm
def test_readers_live_through_a_publisher_that_deletes_at_once(tmp_path):
    """Two reader processes against publish with keep=1 and no minimum age."""
    last = 150
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", READER, str(tmp_path), str(last)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(2)]
    store = WeightsStore(tmp_path, keep=1, min_age_s=-1.0)
    try:
        for version in range(1, last + 1):
            store.publish({"w": np.full(5000, version, dtype=np.float32)}, {}, 1, version)
        outputs = [child.communicate(timeout=PATIENCE_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
    assert [child.returncode for child in children] == [0, 0]
    assert all(int(output) >= 1 for output in outputs)


def test_encoding_is_the_same_bytes_for_the_same_weights():
    assert encode(arrays(), {"b": 1, "a": 2}, 1, 1) == encode(arrays(), {"a": 2, "b": 1}, 1, 1)
