"""Demonstrations from files: order, n-step transitions by hand, Minari's layout, and files of other tasks."""

import dataclasses
import json

import h5py
import numpy as np
import pytest
from rings import ring_of

from spreeze.errors import ConfigError
from spreeze.transport.checkpoint import dump_replay
from spreeze.transport.demonstrations import (
    find_demonstrations,
    load_demonstrations,
    read_demonstrations,
    rows_of,
    save_demonstrations,
)
from spreeze.transport.replay_ring import ShardWriter
from spreeze.types import Box, Choices, EnvSpec, RowLayout

SPEC = EnvSpec(
    env_id="Walk-v0", import_module=None, obs_dim=2, action=Box((-2.0,), (2.0,)), max_episode_steps=None,
    reward_threshold=None,
)  # fmt: skip
GAMMA = 0.5


def _arrays(steps=4, ends=("terminations",), last=1):
    """Two episodes of two steps; the first one ends as ``ends`` says."""
    place = np.arange(steps, dtype=np.float64)
    flags = {name: np.zeros(steps, bool) for name in ("terminations", "truncations")}
    for name in ends:
        flags[name][last] = True
    return {
        "observations": np.stack([place, -place], axis=1), "actions": (place[:, None] - 1.0).astype(np.float32),
        "rewards": place + 1.0, **flags,
    }  # fmt: skip


def _npz(tmp_path, **arrays):
    path = tmp_path / "walk.npz"
    np.savez(path, **arrays)
    return path


def _read(path, spec=SPEC):
    return read_demonstrations(path, str(path), spec)


def test_transitions_keep_their_order_and_actions_become_those_of_a_policy(tmp_path):
    found = _read(_npz(tmp_path, **_arrays(), next_observations=np.full((4, 2), 9.0)))
    assert found.obs[:, 0].tolist() == [0, 1, 2, 3]
    assert found.action[:, 0].tolist() == [-0.5, 0.0, 0.5, 1.0]
    assert found.ended.tolist() == [False, True, False, True]
    assert (found.next_obs == 9.0).all()


def test_without_the_observation_after_it_an_end_that_is_no_termination_is_left_out(tmp_path):
    found = _read(_npz(tmp_path, **_arrays(ends=("truncations",))))
    assert found.obs[:, 0].tolist() == [0, 2]
    assert found.next_obs[:, 0].tolist() == [1, 3]
    assert found.ended.tolist() == [True, True]
    found = _read(_npz(tmp_path, **_arrays()))
    assert found.obs[:, 0].tolist() == [0, 1, 2], "the last transition of the file, too"
    assert found.terminated.tolist() == [False, True, False]


def test_n_step_transitions_by_hand(tmp_path):
    found = _read(_npz(tmp_path, **_arrays(steps=5, last=2), next_observations=np.arange(10.0).reshape(5, 2)))
    rows = rows_of(found, RowLayout.of(SPEC, 2), GAMMA)
    # obs 2; action; reward; terminated; next obs 2; env steps
    assert rows[:, [3, 4, 5, 7]].tolist() == [
        [1 + 0.5 * 2, 0, 2, 2], [2 + 0.5 * 3, 1, 4, 2], [3, 1, 4, 1], [4 + 0.5 * 5, 0, 8, 2], [5, 0, 8, 1],
    ]  # fmt: skip


def test_a_minari_data_set_is_read_episode_by_episode_by_its_directory_or_its_id(tmp_path, monkeypatch):
    spec = dataclasses.replace(SPEC, obs_layout=("0:1 arm[0].goal (Box, (1,))", "1:2 place (MultiBinary, (1,))"))
    folder = tmp_path / "mine" / "walk-v0"
    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for number in (10, 2):
            group = file.create_group(f"episode_{number}")
            group["observations/arm/_index_0/goal"] = np.array([[number], [number + 0.25], [number + 0.5]])
            group["observations/place"] = np.array([[0], [1], [0]], np.int8)
            group["actions"], group["rewards"] = np.zeros((2, 1), np.float32), np.ones(2)
            group["terminations"], group["truncations"] = np.zeros(2, bool), np.array([False, True])
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    for text in (str(folder), "mine/walk-v0"):
        found = read_demonstrations(find_demonstrations(text), text, spec)
        assert found.obs.tolist() == [[2, 0], [2.25, 1], [10, 0], [10.25, 1]]
        assert found.next_obs.tolist() == [[2.25, 1], [2.5, 0], [10.25, 1], [10.5, 0]]
        assert found.ended.tolist() == [False, True, False, True]


def test_recorded_episodes_are_read_again_and_fill_the_shards_in_turn(tmp_path):
    episode = [(np.array([t, 0.0]), np.array([1.0]), -1.0, False, np.array([t + 1.0, 0.0])) for t in range(100)]
    path = tmp_path / "mine.npz"
    assert save_demonstrations(path, [episode, episode]) == 200
    with ring_of(RowLayout.of(SPEC), shards=2, rows=512) as ring:
        count, returns = load_demonstrations(str(path), SPEC, ring, GAMMA)
        assert (count, returns[0]) == (200, 200.0)
        assert returns[1] == pytest.approx(2 * -(200 - 2 * (1 - 0.5**100)), rel=1e-6)
        assert ring.committed.tolist() == [104, 96]
        assert ring.rows[0].tolist() == [0, 0, 0.5, -1, 0, 1, 0]
    with ring_of(RowLayout.of(SPEC), shards=1, rows=64) as ring:
        assert load_demonstrations(str(path), SPEC, ring, GAMMA)[0] == 64, "the newest, as many as there is room for"


OTHERS = {
    "observations of 3 values": {"observations": np.zeros((4, 3))},
    "discrete actions of size 1, but Walk-v0 has continuous ones of size 1": {"actions": np.zeros(4, np.int64)},
    "continuous actions of size 2": {"actions": np.zeros((4, 2))},
    "4 rewards, but 3 actions": {"actions": np.zeros((3, 1))},
    "rewards hold values that are not finite": {"rewards": np.full(4, np.nan)},
    "it cannot be read: Object arrays": {"rewards": np.array([{}] * 4, dtype=object)},
}


@pytest.mark.parametrize("message", OTHERS)
def test_a_file_of_another_task_is_refused_in_one_line(tmp_path, message):
    path = _npz(tmp_path, **_arrays() | OTHERS[message])
    with pytest.raises(ConfigError, match=message) as found:
        _read(path)
    assert str(found.value).startswith(f"--demonstrations {path}: ")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("content", [b"", b"junk", b"\x80\x04]\x94."])
def test_a_file_that_is_no_archive_is_refused_without_advice_to_unpickle_it(tmp_path, content):
    path = tmp_path / "episodes.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"episodes.npz: it is not an .npz file, or damaged$"):
        _read(path)


def test_actions_that_a_discrete_task_does_not_have_are_refused(tmp_path):
    spec = dataclasses.replace(SPEC, action=Choices((3,), (1,)))
    arrays = _arrays() | {"actions": np.array([1, 2, 3, 1])}
    assert _read(_npz(tmp_path, **arrays), spec).action[:, 0].tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="actions range from 0 to 3, outside those of Walk-v0"):
        _read(_npz(tmp_path, **arrays | {"actions": np.array([0, 1, 2, 3])}), spec)


def test_nothing_is_downloaded_and_what_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no data")
    for text, message in {
        "D4RL/pen/human-v2": "download it first: minari download D4RL/pen/human-v2",
        "nothing.npz": "nothing.npz: no such file",
        str(tmp_path / "empty"): "neither a Minari data set in HDF5 nor a run with saved replay",
        str(tmp_path / "notes.txt"): "expected .npz, .hdf5 or .safetensors",
    }.items():
        with pytest.raises(ConfigError, match=message):
            find_demonstrations(text)


def test_saved_replay_comes_with_the_returns_that_its_learner_had_seen(tmp_path):
    path = tmp_path / "replay.safetensors"
    with ring_of(RowLayout.of(SPEC), rows=64) as ring:
        ShardWriter(ring, 0).write(*(np.ones((3, size)) for size in (2, 1)), np.ones(3), np.zeros(3), np.ones((3, 2)))
        dump_replay(ring, path)
    for returns, sums in (({"count": 4.0, "mean": 2.0, "m2": 8.0}, (4.0, 8.0, 24.0)), (None, (0.0, 0.0, 0.0))):
        (tmp_path / "state.json").write_text(json.dumps({"returns": returns}))
        with ring_of(RowLayout.of(SPEC), shards=2, rows=64) as ring:
            assert load_demonstrations(str(path), SPEC, ring, GAMMA) == (3, sums)
    with (
        ring_of(RowLayout.of(SPEC, 3), rows=64) as ring,
        pytest.raises(ConfigError, match=r"n_step 1; this run has obs 2, action 1, n_step 3"),
    ):
        load_demonstrations(str(path), SPEC, ring, GAMMA)
