"""Sentences on a change of the return, against hand-made evaluations, metrics and events."""

from contextlib import closing

import numpy as np
import pytest

from spreeze.metrics.health import return_change
from spreeze.metrics.recorded_episodes import EvaluationKey, RecordedEpisode, Recording
from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.writer import MetricsWriter


def row(t, return_mean, *, std=1.0, length=100.0, episodes=10):
    return EvaluationRow(t, round(100 * t), round(10 * t), 1, round(10 * t), episodes, return_mean, std, length)


def recorded(entry, **returns):
    empty = np.zeros((0, 0), np.float32)
    episodes = tuple(
        RecordedEpisode(
            seed=1, episode_return=value, terminated=True, success=None, reward=np.zeros(0), action=empty, obs=empty,
            info=empty, value=np.zeros(0, np.float32), kinds=(kind,),
        )
        for kind, value in returns.items()
    )  # fmt: skip
    return Recording(key=EvaluationKey(entry.t, entry.env_steps, entry.updates), facts={}, episodes=episodes)


def sentences(tmp_path, rows, *, metrics=(), events=(), **returns):
    """The change at the last of ``rows``; ``metrics`` are (t, name, value), ``events`` (t, level, text)."""
    with closing(MetricsWriter(tmp_path / "metrics.db")) as store:
        for t, name, value in metrics:
            store.write(t, round(100 * t), {name: value})
        for t, level, text in events:
            store.event(t, level, "learner", text)
        for entry in rows:
            store.evaluation(entry)
    return return_change(tmp_path, recorded(rows[-1], **returns))


def test_the_first_evaluation_has_nothing_to_be_compared_with(tmp_path):
    assert sentences(tmp_path, [row(10, 5.0)]) is None


def test_an_evaluation_that_is_not_on_record_has_no_change(tmp_path):
    sentences(tmp_path, [row(10, 5.0), row(20, 6.0)])
    assert return_change(tmp_path, recorded(row(15, 5.0))) is None


def test_a_fall_in_steps_that_each_may_be_chance_is_compared_with_where_it_began(tmp_path):
    returns = (400.0, 500.0, 400.0, 300.0, 200.0)
    rows = [row(10.0 * (1 + at), value, std=140.0, length=value) for at, value in enumerate(returns)]
    found = sentences(tmp_path, rows, events=[(25.0, "info", "resized")])
    expected = "Return 200, and 500 at 0:20, 3 evaluations before: it fell in steps that each may be chance"
    assert found.title == expected
    assert found.sentences[0] == "Episodes went from 500 to 200 env steps; the reward a step stayed 1."
    assert "0:25, learner: resized" in found.sentences


def test_a_fall_in_one_step_or_a_rise_is_compared_with_the_evaluation_before(tmp_path):
    fall = [row(10, 400.0), row(20, 500.0), row(30, 450.0), row(40, 200.0)]
    assert "450 at the evaluation before" in sentences(tmp_path, fall).title


def test_parts_by_length_and_by_reward_a_step_add_up_to_the_difference(tmp_path):
    found = sentences(tmp_path, [row(10, 3000.0, length=1000.0), row(20, 1200.0, length=600.0)])
    assert found.title == "Return 1,200, and 3,000 at the evaluation before, at 0:10"
    # -400 env steps x 2.5 a step, and -1 a step x 800 env steps.
    assert found.sentences[0] == (
        "Episodes went from 1,000 to 600 env steps, the reward a step from 3 to 2: -1,000 by length, -800 by reward."
    )


def test_a_fall_by_few_episodes_that_fail_is_not_called_chance(tmp_path):
    found = sentences(tmp_path, [row(10, 300.0, std=15.0), row(20, 40.0, std=434.0)])
    assert found.sentences[0].startswith(
        "Single episodes differ far more than before (standard deviation 434, before 15)"
    )


def test_a_difference_that_the_intervals_of_both_cover_is_called_chance(tmp_path):
    # Deviations of 30 over sqrt(9) are 10 each, times 2.262 (9 degrees of freedom) 22.6, of the difference 32.0.
    found = sentences(tmp_path, [row(10, 100.0, std=30.0), row(20, 75.0, std=30.0)])
    assert "Chance is enough" in found.sentences[0]
    assert "32.0 apart" in found.sentences[0]
    (tmp_path / "more").mkdir()
    found = sentences(tmp_path / "more", [row(10, 100.0, std=30.0), row(20, 67.0, std=30.0)])
    assert not any("Chance" in text for text in found.sentences)


def test_an_equal_return_did_not_change_and_numbers_that_read_equal_are_no_change(tmp_path):
    found = sentences(tmp_path, [row(10, 500.0, std=0.0), row(10.4, 500.0, std=0.0)])
    assert found.title == "Return 500, and 500 at the evaluation before, at 0:10, after 100 updates"
    assert found.sentences[0] == "The return did not change."
    assert found.sentences[1].startswith("Between the two")
    (tmp_path / "more").mkdir()
    found = sentences(tmp_path / "more", [row(10, 933.0, length=933.0), row(20, 500.0, length=500.0)])
    assert found.sentences[0] == "Episodes went from 933 to 500 env steps; the reward a step stayed 1."


@pytest.mark.parametrize(("median", "word"), [(95.0, "Few"), (42.0, "Most")])
def test_a_fall_says_whether_the_median_episode_shows_it(tmp_path, median, word):
    found = sentences(tmp_path, [row(10, 100.0), row(20, 50.0)], best=99.0, median=median, worst=-20.0)
    assert any(text.startswith(f"{word} episodes are worse: of 10 the median has") for text in found.sentences)


def test_a_metric_is_named_that_changed_far_more_than_usual(tmp_path):
    rows = [row(10.0 * i, 100.0) for i in range(1, 10)]
    entropies = [3.0, 3.1, 2.9, 3.05, 2.95, 3.1, 3.0, 3.0, 1.0]
    values = [(10.0 * i - 5.0, "entropy", value) for i, value in enumerate(entropies, 1)]
    values += [(10.0 * i - 4.0, "alpha", 0.5 + 0.01 * i) for i in range(1, 10)]
    found = sentences(tmp_path, rows, metrics=values)
    named = [text for text in found.sentences if "went from 3 to 1" in text]
    assert len(named) == 1
    assert named[0].startswith("Entropy went from 3 to 1 nat, ")
    assert not any("Entropy coefficient" in text for text in found.sentences)  # it rises steadily


def test_a_metric_that_had_never_changed_is_named_at_its_first_change(tmp_path):
    rows = [row(10.0 * i, 100.0) for i in range(1, 10)]
    values = [(10.0 * i - 5.0, "rollbacks", float(i == 9)) for i in range(1, 10)]
    found = sentences(tmp_path, rows, metrics=values)
    assert "Rollbacks went from 0 to 1 times, which had not changed before." in found.sentences


def test_a_metric_that_stood_still_but_for_its_beginning_is_not_said_to_have_never_changed(tmp_path):
    rows = [row(10.0 * i, 100.0) for i in range(1, 12)]
    steps = [0.0, 1800.0, *[0.0] * 8, 240.0]
    values = [(10.0 * i - 5.0, "env_steps_per_s", value) for i, value in enumerate(steps, 1)]
    found = sentences(tmp_path, rows, metrics=values)
    assert any(text.endswith("which hardly changed before.") for text in found.sentences), found.sentences


def test_events_between_the_two_are_listed_by_time_and_others_are_not(tmp_path):
    events = [(5.0, "error", "old"), (14.0, "info", "resumed"), (12.0, "warning", "restarted"), (30.0, "info", "x")]
    found = sentences(tmp_path, [row(10, 100.0), row(20, 50.0)], events=events)
    assert [text for text in found.sentences if "learner:" in text] == [
        "0:12, learner: restarted", "0:14, learner: resumed",
    ]  # fmt: skip


@pytest.mark.parametrize(("evaluations", "end"), [(2, "too few evaluations before"), (9, "no metric of learning")])
def test_nothing_unusual_is_said_as_such_only_where_it_can_be_known(tmp_path, evaluations, end):
    found = sentences(tmp_path, [row(10.0 * i, 100.0) for i in range(1, evaluations + 1)])
    assert found.sentences[-1].startswith("Between the two no event was recorded")
    assert end in found.sentences[-1]
