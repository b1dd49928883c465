"""Recorded episodes as files and as sentences, by hand-made arrays."""

import io
import itertools
import json
import zipfile

import numpy as np
import pytest
from kept_frames import frame_records

from spreeze.errors import RunError
from spreeze.metrics import recorded_episodes
from spreeze.metrics.recorded_episodes import (
    FOLDER,
    EvaluationKey,
    RecordedEpisode,
    Recording,
    at_bound,
    discounted_returns,
    frame_record,
    frames_path,
    marks_of,
    packed,
    prune,
    read_frames,
    read_recording,
    returns_to_go,
    step_numbers,
)

KEY = EvaluationKey(12.345, 2000, 100, 1)


def episode(**changes):
    fields = {
        "seed": 7, "episode_return": 3.0, "terminated": True, "success": None, "reward": np.array([1.0, 1.0, 1.0]),
        "action": np.zeros((3, 1), np.float32), "obs": np.zeros((4, 2), np.float32),
        "info": np.zeros((3, 0), np.float32), "value": np.zeros(0, np.float32), "kinds": ("best",),
    }  # fmt: skip
    return RecordedEpisode(**{**fields, **changes})


def stored(run_dir, data, key=KEY):
    (run_dir / FOLDER).mkdir(exist_ok=True)
    (run_dir / FOLDER / f"{key.id}.npz").write_bytes(data)


def test_a_recording_comes_back_as_it_was(tmp_path):
    one = episode(success=True, value=np.ones(3, np.float32), kinds=("best", "median"))
    stored(tmp_path, packed(Recording(key=KEY, facts={"fps": 30.0}, episodes=(one, episode(kinds=("worst",))))))
    found = read_recording(tmp_path, EvaluationKey.parse(KEY.id))
    assert found.key == KEY
    assert found.facts["fps"] == 30.0
    best = found.of_kind("median")
    assert (best.seed, best.success, best.kinds) == (7, True, ("best", "median"))
    for name in ("reward", "action", "obs", "info", "value"):
        np.testing.assert_array_equal(getattr(best, name), getattr(one, name))
        assert getattr(best, name).dtype == getattr(one, name).dtype


@pytest.mark.parametrize(
    "text", ["", "e1-2-3", "../e1-2-3-4", "e1-2-3-4/..", "e1-2-3-4\n", "e1-2-3-4.npz", "e-1-2-3-4", "e" + "9" * 30]
)
def test_only_an_evaluation_s_own_form_of_name_is_read(text):
    with pytest.raises(RunError, match="names no recorded evaluation"):
        EvaluationKey.parse(text)


def zipped(**entries):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(f"{name}.npy", data)
    return buffer.getvalue()


def array_bytes(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def test_files_that_are_damaged_too_large_or_run_code_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_episodes, "_MAX_BYTES", 10_000)
    whole = packed(Recording(key=KEY, facts={}, episodes=(episode(),)))
    facts = array_bytes(np.frombuffer(json.dumps({"episodes": [{}]}).encode(), np.uint8))
    for data, words in (
        (b"no archive", "is damaged"),
        (whole[:-40], "is damaged"),
        (zipped(facts=facts), "is damaged: KeyError"),
        (zipped(facts=array_bytes(np.array([print], object))), "is damaged: ValueError"),
        (zipped(facts=facts, **{"0.reward": b"0" * 20_000}), "unpacks to"),
        (packed(Recording(key=KEY, facts={}, episodes=(episode(obs=np.zeros((9, 2))),))), "shape"),
    ):
        stored(tmp_path, data)
        with pytest.raises(RunError, match=words):
            read_recording(tmp_path, KEY)
    with pytest.raises(RunError, match="is not kept"):
        read_recording(tmp_path, KEY._replace(group=2))


def test_links_that_lead_out_of_a_run_are_not_followed(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    stored(other, packed(Recording(key=KEY, facts={}, episodes=(episode(),))))
    (run / FOLDER).symlink_to(other / FOLDER)
    with pytest.raises(RunError, match="symbolic link"):
        read_recording(run, KEY)
    (run / FOLDER).unlink()
    (run / FOLDER).mkdir()
    (run / FOLDER / f"{KEY.id}.npz").symlink_to(other / FOLDER / f"{KEY.id}.npz")
    with pytest.raises(RunError, match="damaged"):
        read_recording(run, KEY)
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    frames_path(run, KEY, "best").symlink_to(secret)
    assert read_frames(frames_path(run, KEY, "best"), 0, 100) == (b"", False)


def test_pictures_are_read_in_pieces_while_they_are_drawn(tmp_path):
    path = frames_path(tmp_path, KEY, "worst")
    path.parent.mkdir()
    data = frame_record(0, b"first") + frame_record(3, b"second")
    unfinished = path.with_suffix(recorded_episodes.UNFINISHED)
    unfinished.write_bytes(data[:-2])
    got, done = read_frames(path, 0, 1000)
    assert (list(frame_records(got)), done) == ([(0, b"first")], False)
    unfinished.rename(path)
    path.write_bytes(data)
    assert read_frames(path, 13, 5) == (data[13:18], False)
    assert read_frames(path, 13, 1000) == (data[13:], True)
    assert list(frame_records(data[13:])) == [(3, b"second")]


def test_discounted_returns_by_hand():
    assert discounted_returns(np.array([1.0, 2.0, 4.0]), 0.5).tolist() == [3.0, 4.0, 4.0]


def texts(one, **facts):
    known = {"env_id": "X-v0", "limit": 10, "actions": ["action 0"], "options": [0], "bounds": [[-1.0, 1.0]]}
    return [(mark.text, mark.step) for mark in marks_of(one, {**known, **facts}, 0.5)]


def test_how_an_episode_ended_is_said_in_words():
    assert texts(episode())[0] == ("terminated at step 3 of at most 10", 3)
    assert texts(episode(), env_id="Walker2DBulletEnv-v0")[0] == ("fell at step 3 of at most 10", 3)
    assert texts(episode(terminated=False))[0] == ("ran to the time limit of 3 steps", 3)
    assert ("no success", None) in texts(episode(success=False))


def test_actions_at_their_bounds_and_choices_that_never_change_are_said():
    action = np.array([[0.0], [0.995], [-1.0]], np.float32)
    assert ("action 0 at its bound 67 % of the time", 2) in texts(episode(action=action))
    assert len(texts(episode(action=action / 2))) == 1
    choice = np.array([[1.0], [1.0], [1.0]], np.float32)
    assert ("action 0 chose 1 100 % of the time", None) in texts(episode(action=choice), options=[2], bounds=[])


def test_rewards_far_out_terms_and_the_critic_s_error_are_said():
    reward = np.ones(40)
    reward[29] = -50.0
    info = np.stack([np.full(40, -0.5), np.full(40, 2.0)], 1).astype(np.float32)
    value = np.full(40, 5.0, np.float32)
    long = episode(reward=reward, action=np.zeros((40, 1)), obs=np.zeros((41, 1)), info=info, value=value)
    found = dict(texts(long, info=["cost", "speed"]))
    assert found["least reward -50 at step 30"] == 30
    assert "sum of each term: cost -20.0" in found or "sum of each term: cost -20" in found
    assert found["value at the start 5, actual discounted return 2.00: 3.00 above it"] == 1


def test_the_return_of_an_episode_that_was_cut_goes_on_with_the_value_of_its_last_step():
    reward = np.array([1.0, 2.0, 4.0])
    assert discounted_returns(reward, 0.5, None)[0] == 1.0 + 0.5 * 2.0 + 0.25 * 4.0
    assert discounted_returns(reward, 0.5, 20.0)[0] == 1.0 + 0.5 * 2.0 + 0.25 * 20.0


def test_a_number_is_at_its_bound_within_a_hundredth_of_its_range():
    action = np.array([[-1.0, 5.0], [-0.98, 5.0], [-0.979, 0.0], [0.985, 0.1]])
    assert at_bound(action, [[-1.0, 1.0], [0.0, 10.0]]).tolist() == [
        [True, False], [True, False], [False, True], [True, True]]  # fmt: skip
    assert not at_bound(action, [[-1.0, 1.0], [0.0, np.inf]])[:, 1].any()


def test_after_the_time_limit_the_last_value_stands_for_what_would_have_followed():
    value = np.full(3, 2.0, np.float32)
    ended, cut = episode(value=value), episode(value=value, terminated=False)
    assert returns_to_go(ended, 0.5).tolist() == [1.75, 1.5, 1.0]
    assert returns_to_go(cut, 0.5).tolist() == [2.0, 2.0, 2.0], "rewards of 1 forever are worth 2"
    assert returns_to_go(episode(terminated=False), 0.5).tolist() == [1.75, 1.5, 1.0], "no value is known"
    told = {mark.text for mark in marks_of(cut, {}, 0.5)}
    assert "value at the start 2, actual discounted return 2: about right" in told
    soft = {mark.text for mark in marks_of(episode(value=np.full(3, 2.0, np.float32)), {}, 0.5, True)}
    assert "value at the start 2, actual discounted return 1.75: 0.25 above it, rewards of entropy included" in soft


def test_the_numbers_of_steps_are_scaled_actions_values_and_advantages():
    one = episode(value=np.array([2.0, 2.0, np.nan], np.float32), action=np.array([[3.0], [4.0], [5.0]], np.float32))
    facts = {"options": [0], "bounds": [[3.0, 5.0]]}
    found = step_numbers(Recording(key=KEY, facts=facts, episodes=(one,)), 0.5)
    assert {name: values.tolist() for name, values in found.items()} == {
        "action": [-1.0, 0.0, 1.0], "value": [2.0, 2.0], "advantage": [-0.25, -0.5]
    }  # fmt: skip
    facts = {"options": [0, 3], "bounds": [[-np.inf, 1.0]]}
    both = episode(action=np.array([[9.0, 2.0]] * 3, np.float32))
    assert step_numbers(Recording(key=KEY, facts=facts, episodes=(both,)), None)["action"].tolist() == [9.0] * 3
    options = episode(action=np.array([[2.0], [0.0], [1.0]], np.float32))
    facts = {"options": [3], "bounds": []}
    assert step_numbers(Recording(key=KEY, facts=facts, episodes=(options,)), None)["action"].tolist() == [
        2.0,
        0.0,
        1.0,
    ]


def keep(run_dir, wall_s, return_mean, group=0):
    key = EvaluationKey(wall_s, round(100 * wall_s), round(wall_s), group)
    path = run_dir / FOLDER / f"{key.id}.npz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(packed(Recording(key=key, facts={"return_mean": return_mean}, episodes=(episode(),))))


def test_of_evaluations_with_equal_returns_those_stay_that_cover_the_run_evenly(tmp_path):
    for wall_s in (0.0, 10.0, 11.0, 20.0, 30.0, 31.0, 40.0):
        keep(tmp_path, wall_s, 5.0)
    prune(tmp_path, 5, 1e9)
    kept = [key.wall_s for key in recorded_episodes.kept_evaluations(tmp_path)]
    assert kept in ([0.0, 10.0, 20.0, 30.0, 40.0], [0.0, 11.0, 20.0, 30.0, 40.0], [0.0, 11.0, 20.0, 31.0, 40.0])


def test_a_dip_of_the_return_stays_where_its_neighbours_are_deleted(tmp_path):
    for wall_s in range(40):
        keep(tmp_path, float(wall_s), 30.0 if wall_s == 23 else 100.0 + wall_s)
    prune(tmp_path, 6, 1e9)
    kept = [key.wall_s for key in recorded_episodes.kept_evaluations(tmp_path)]
    assert len(kept) == 6
    assert {0.0, 23.0, 39.0} <= set(kept)
    assert max(after - before for before, after in itertools.pairwise(kept)) < 20.0


def test_returns_of_one_learner_are_no_dips_of_another(tmp_path):
    for wall_s in range(40):
        keep(tmp_path, float(wall_s), -500.0 if wall_s % 2 else 30.0 if wall_s == 22 else 100.0, group=wall_s % 2)
    prune(tmp_path, 6, 1e9)
    assert 22.0 in [key.wall_s for key in recorded_episodes.kept_evaluations(tmp_path)]


def test_a_damaged_recording_counts_as_a_return_of_0_and_can_be_deleted(tmp_path):
    for wall_s in range(6):
        keep(tmp_path, float(wall_s), 0.0)
    (tmp_path / FOLDER / "e3000-300-3-0.npz").write_bytes(b"no archive")
    prune(tmp_path, 2, 1e9)
    assert [key.wall_s for key in recorded_episodes.kept_evaluations(tmp_path)] == [0.0, 5.0]
