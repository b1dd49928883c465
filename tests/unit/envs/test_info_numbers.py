"""Numbers in an environment's ``info``: summed by a sampler, averaged by the supervisor."""

import numpy as np
import pytest
from info_env import LENGTH, Talkative

from spreeze.envs.info_numbers import STEPS, InfoNumbers, success_of
from spreeze.envs.make import describe
from spreeze.envs.task import Task
from spreeze.metrics.info_means import EPISODES, MAX_NUMBERS, WINDOW_S, InfoMeans
from spreeze.workers.context import _MAX_MESSAGE_BYTES, _in_messages


def played(numbers, env, episodes):
    for _ in range(episodes):
        env.reset()
        ended = False
        while not ended:
            *_, ended, _, info = env.step(None)
            numbers.add(info, ended=ended)


def test_only_so_many_steps_of_a_report_count_and_all_ends_of_episodes():
    task = Task(Talkative(), describe(Talkative()))
    task.info_numbers = InfoNumbers()
    for _ in range(STEPS // LENGTH + 10):
        task.reset()
        while not task.step(np.zeros(1, np.float32))[2]:
            pass
    found = task.info_numbers.take()
    assert found["steps"]["step_number"][1] == pytest.approx(STEPS, abs=11)
    assert found["episodes"]["is_success"][1] == STEPS // LENGTH + 10
    assert task.info_numbers.left == STEPS
    assert task.success in (True, False)


def mean(sums):
    return {name: total / count for name, (total, count) in sums.items()}


def test_what_every_step_says_is_summed_by_step_and_what_the_end_says_by_episode():
    numbers = InfoNumbers()
    played(numbers, Talkative(), 60)
    found = numbers.take()
    assert mean(found["steps"]) == pytest.approx(
        {"step_number": 5.5, "reward/forward": 1.5, "reward/control": -0.5, "late": 2.0}
    )
    assert found["steps"]["step_number"][1] == 60 * LENGTH
    assert found["steps"]["late"][1] == 60 * (LENGTH - 1)  # without NaN
    assert mean(found["episodes"]) == {"is_success": 0.5, "episode/r": 10.0, "episode/l": LENGTH}
    assert found["ignored"] == {"picture": "ndarray", "mission": "str"}
    assert numbers.take() is None


def test_numbers_that_come_and_go_count_where_they_are():
    numbers = InfoNumbers()
    for step in range(1000):
        numbers.add({"x": step} if step % 3 else {"x": step, "hit": True}, ended=False)
        numbers.add({"y": 1, "z": 2} if step % 2 else {"z": 2, "w": 3}, ended=False)
    found = numbers.take()["steps"]
    assert {name: count for name, (_, count) in found.items()} == {"x": 1000, "hit": 334, "y": 500, "z": 1000, "w": 500}
    assert found["x"][0] == sum(range(1000))


@pytest.mark.parametrize("later", [None, "text", np.zeros(3), float("inf"), 10**400, object()])
def test_a_number_that_becomes_something_else_counts_no_more(later):
    numbers = InfoNumbers()
    for value in (1, 2, later, 3):
        numbers.add({"x": value, "y": np.float32(1.0)}, ended=False)
    assert numbers.take()["steps"] == {"x": [6.0, 3], "y": [4.0, 4]}


def test_success_is_what_it_is_at_the_end_of_an_episode():
    numbers = InfoNumbers()
    for success in (True, False, False):
        numbers.add({"success": True}, ended=False)
        numbers.add({"success": success}, ended=True)
    assert numbers.take() == {"steps": {}, "episodes": {"is_success": [1.0, 3]}, "ignored": {}}
    infos = ({"is_success": np.bool_(True)}, {"success": 0.0}, {"is_success": "yes"}, {}, None)
    assert [success_of(info) for info in infos] == [True, False, None, None, None]


def test_names_beyond_the_cap_are_told_once():
    numbers = InfoNumbers()
    played(numbers, Talkative(more=50), 2)
    found = numbers.take()
    assert len(found["steps"]) + len(found["episodes"]) == MAX_NUMBERS + 1  # and success
    assert set(found["ignored"].values()) == {"ndarray", "str", f"beyond the first {MAX_NUMBERS} numbers"}
    played(numbers, Talkative(more=50), 2)
    assert numbers.take()["ignored"] == {}
    means = InfoMeans()
    assert means.add(found).startswith("info: 'picture' (ndarray), 'mission' (str), 'more_")
    assert means.add(found) is None


def test_messages_hold_all_numbers_and_fit_the_pipe():
    sums = {f"{'n' * 55}{index}": [1.0 / 3.0, 123456789] for index in range(100)}
    parts = _in_messages({"steps": sums, "episodes": {}, "ignored": {"x": "str"}})
    assert all(len(str(part)) < _MAX_MESSAGE_BYTES for part in parts)
    assert {name: value for part in parts for name, value in part.get("steps", {}).items()} == sums


def test_means_are_over_all_samplers_by_time_and_over_the_latest_episodes():
    means = InfoMeans()
    means.add({"steps": {"x": [10.0, 10]}, "episodes": {"is_success": [0.0, EPISODES]}})
    means.add({"steps": {"x": [90.0, 30]}, "episodes": {"is_success": [EPISODES / 2, EPISODES / 2]}})
    assert means.means(10.0) == {"success_rate": pytest.approx(1 / 3), "info/x": 2.5}
    means.add({"episodes": {"is_success": [EPISODES / 2, EPISODES / 2]}})
    means.add({"steps": {"x": [7.0, 1]}})
    assert means.means(10.0 + WINDOW_S / 2)["info/x"] == 2.5
    assert means.means(10.0 + WINDOW_S) == {"success_rate": 1.0, "info/x": 7.0}
    assert means.means(20.0)["info/x"] == 7.0


def test_a_run_has_no_more_numbers_than_the_cap_whatever_samplers_send():
    means = InfoMeans()
    for sampler in range(3):
        means.add(
            {"steps": {f"{sampler}-{index}": [1.0, 1] for index in range(20)}, "episodes": {"is_success": [1.0, 1]}}
        )
    assert len(means.means(10.0)) == MAX_NUMBERS + 1
    for message in ({}, {"steps": 3}, {"steps": {"x": [float("nan"), 1], "y": [1.0, 0]}}):
        assert means.add(message) is None
