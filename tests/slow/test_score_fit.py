"""The constants of the tuner's score: counted training runs, the fit to them, and what was chosen by it.

By hand: ``SPREEZE_LONG_TESTS=1 SPREEZE_STRESS_ENV=Pendulum-v1 SPREEZE_STRESS_TARGET_RETURN=-200
SPREEZE_STRESS_SEEDS=3 SPREEZE_STRESS_OUT=score.jsonl pytest tests/slow/test_score_fit.py`` counts the runs of a task
(given up after ``SPREEZE_STRESS_MAX_UPDATES``, 12,000), adds them to that file, and fits the constants to all in it.
The runs that the constants rest on are ``score_runs.jsonl`` (72, to early returns) and ``late_runs.jsonl`` (to later
ones of Walker2D and Hopper: counts from the tables of ``assets/figures.md``, or times and the rate they were made of).
"""

import dataclasses
import itertools
import math
import statistics
from pathlib import Path

import pytest
from long_form import asked, by_hand
from sampler_cost import task_plan
from score_fit import (
    COUNTED,
    Goal,
    Point,
    fit,
    fit_rows,
    left_out,
    points,
    rank_correlation,
    read_records,
    residuals,
    run_all,
    shape,
    worst_loss,
)

from spreeze.config.layers import Layer, resolve
from spreeze.config.profiles import task_profile
from spreeze.tuner.model import BATCH_HALF_WORTH, UPDATES_PER_STEP

KEPT = Path(__file__).with_name("score_runs.jsonl")

SETTINGS = list(itertools.product((32, 128, 1024), (0.03, 0.5, 4.0)))


def counted(b0, r0, cap=float("inf")):
    found = []
    for (task, scale), (batch, ratio) in itertools.product((("easy", 500.0), ("hard", 4000.0)), SETTINGS):
        updates = scale * shape(batch, ratio, b0, r0)
        found.append(Point(task, batch, ratio, min(updates, cap), updates < cap))
    return found


def test_constants_that_made_the_counts_are_found():
    found = fit(counted(32.0, 1.0))
    assert (found.batch_constant, found.ratio_constant) == (32.0, 1.0)
    assert found.typical_factor == pytest.approx(1.0)


def test_a_run_given_up_only_counts_where_the_model_says_fewer_updates():
    found = fit(counted(32.0, 1.0, cap=12_000.0))
    assert (found.batch_constant, found.ratio_constant) == (32.0, 1.0)


def test_a_task_left_out_is_predicted_from_the_others():
    for constants, factor, correlation in left_out(counted(64.0, 2.0)).values():
        assert (constants.batch_constant, constants.ratio_constant) == (64.0, 2.0)
        assert factor == pytest.approx(1.0)
        assert correlation == pytest.approx(1.0)


def test_seeds_of_a_setting_become_their_median():
    base = {"env_id": "task", "batch_size": 64, "updates_per_env_step": 0.25}
    found = points([{**base, "updates": n, "reached": n < 900} for n in (100, 900, 300)])
    assert found == [Point("task", 64, 0.25, 300.0, True)]


def test_rank_correlation_of_a_hand_worked_case_with_a_tie():
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 2], [3, 1, 1]) == pytest.approx(-1.0)


EARLY, LATE = points(read_records(KEPT)), points(read_records(KEPT.with_name("late_runs.jsonl")))
PROCESSORS, GPUS = (20.0, 40.0, 80.0), [20.0 * 2.0 ** (k / 2) for k in range(17)]


def test_how_soon_a_late_return_comes_depends_far_more_on_the_batch_than_an_early_one_does():
    assert (len(EARLY), len(LATE)) == (24, 9)
    assert fit(EARLY).batch_constant < 10.0
    late = {
        task: fit([point for point in LATE if point.task == task], UPDATES_PER_STEP).batch_constant
        for task in {point.task for point in LATE}
    }
    assert 20.0 < min(late.values()) < 40.0, "Hopper's"
    assert 100.0 < max(late.values()) <= 256.0, "Walker2D's"
    assert fit(LATE, UPDATES_PER_STEP).batch_constant == pytest.approx(BATCH_HALF_WORTH, rel=0.2)


def test_the_ratio_constant_predicts_the_kept_runs_as_well_as_their_own_fit():
    own = fit(EARLY)
    errors = residuals(EARLY, own.batch_constant, UPDATES_PER_STEP)
    typical_factor = math.exp(math.sqrt(statistics.mean(error * error for error in errors)))
    assert own.typical_factor <= typical_factor < 1.03 * own.typical_factor


def test_the_tuner_s_batch_constant_loses_least_where_it_is_wrong():
    truths = [7.0, 16.0, 31.0, 64.0, 128.0, 250.0]
    least = min(worst_loss(2.0 ** (k / 4), truths, GPUS) for k in range(8, 36))
    assert worst_loss(BATCH_HALF_WORTH, truths, GPUS) == pytest.approx(least, rel=0.01)
    assert least < 1.2
    assert worst_loss(BATCH_HALF_WORTH, truths, PROCESSORS) == 1.0, "the least batch is best whatever is true"
    assert worst_loss(16.0, truths, GPUS) > 1.8
    assert worst_loss(250.0, truths, GPUS) > 1.4


def test_a_pick_that_is_right_loses_no_more_than_a_tie():
    assert worst_loss(64.0, [64.0], GPUS) < 1.0 / 0.97 + 1e-9


def test_runs_hold_the_ratio_and_are_kept_so_that_none_is_repeated(tmp_path):
    plan = task_plan("Pendulum-v1", envs_per_sampler=8)
    out, said = tmp_path / "runs.jsonl", []
    goal = Goal(target_return=1e9, max_updates=200)
    records = run_all(plan, goal, [(32, 0.25), (16, 2.0)], 1, out, said.append)
    for record in records:
        assert not record["reached"]
        assert 200 <= record["updates"] < 216
        after_start = record["env_steps"] - plan.config.replay.learning_starts
        assert abs(record["updates"] - record["updates_per_env_step"] * after_start) <= 32
    assert read_records(out) == records
    assert len(said) == 2
    assert run_all(plan, goal, [(32, 0.25), (16, 2.0)], 1, out, said.append) == records
    assert len(said) == 2


ENV, SEEDS, OUT = asked("ENV", "Pendulum-v1"), asked("SEEDS", 3), asked("OUT", "")
GOAL = Goal(target_return=asked("TARGET_RETURN", -200.0), max_updates=asked("MAX_UPDATES", 12_000))


@by_hand
@pytest.mark.timeout(0.2 * GOAL.max_updates * SEEDS * len(COUNTED) + 600.0)
def test_the_constants_are_fitted_to_counted_runs(tmp_path, report, say):
    profile = task_profile(ENV)
    starts = resolve([profile]).config.replay.learning_starts if profile else 1000
    plan = task_plan(ENV)
    plan = dataclasses.replace(
        plan, settings=plan.settings.with_layer(Layer("test", {"replay": {"learning_starts": starts}}))
    )
    out = Path(OUT) if OUT else tmp_path / "score.jsonl"
    run_all(plan, GOAL, COUNTED, SEEDS, out, say)
    report(fit_rows(read_records(out)))
