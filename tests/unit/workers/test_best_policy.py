"""Which policy of a run is kept as the best: bounds by hand, the rule step by step, an evaluator that follows it."""

import contextlib
import json

import numpy as np
import pytest
from linear_policy import BAD, FAULT, FAULT_MODULE, GOOD, IDLE, arrays, policy_of, publish
from test_evaluator import expected_return, job_of

from spreeze.envs.task import make_task
from spreeze.transport.weights import WeightsStore, read_weights
from spreeze.workers import evaluator
from spreeze.workers.best_policy import BestPolicy, Candidate, ReturnStats
from spreeze.workers.episodes.lockstep import fresh_seeds, run_episodes, score
from spreeze.workers.evaluator import Evaluation, WeightsWatch


def candidate(mean, std=0.0, name=b"w"):
    return Candidate(ReturnStats(10, mean, std), name, {"return_mean": mean})


def kept(folder):
    facts = json.loads((folder / "checkpoints" / "best.json").read_text())
    return (folder / "checkpoints" / "best.safetensors").read_bytes(), facts["return"], facts["confirmed"]


def test_the_bound_is_that_of_students_distribution():
    returns = np.arange(1.0, 11.0)
    stats = ReturnStats(10, returns.mean(), returns.std())
    assert stats.bound == pytest.approx(5.5 - 1.383 * 3.02765 / 10**0.5, abs=0.01), "t of a table, 9 degrees of freedom"
    assert ReturnStats(1, 3.0, 0.0).bound == 3.0


def test_two_tallies_together_are_that_of_all_episodes():
    first, second = np.array([1.0, 2.0, 6.0]), np.array([-4.0, 10.0])
    both = ReturnStats(3, first.mean(), first.std()).with_more(ReturnStats(2, second.mean(), second.std()))
    together = np.concatenate([first, second])
    assert both == pytest.approx((5, together.mean(), together.std()))


def test_before_any_test_the_higher_bound_is_kept_and_not_the_higher_mean(tmp_path):
    best = BestPolicy(tmp_path)
    best.offer(candidate(100.0, 10.0, b"steady"))
    best.offer(candidate(120.0, 90.0, b"lucky"))
    assert kept(tmp_path) == (b"steady", 100.0, False)
    best.offer(candidate(110.0, 10.0, b"better"))
    assert kept(tmp_path) == (b"better", 110.0, False)


def test_a_confirmed_policy_is_replaced_only_by_one_that_is_better_over_all_of_its_episodes(tmp_path):
    best = BestPolicy(tmp_path)
    for _ in range(7):
        best.offer(candidate(0.0, 1.0))
    assert best.due() is None
    best.offer(candidate(100.0, 10.0, b"first"))
    best.record_retest(best.due(), ReturnStats(10, 90.0, 10.0))
    assert kept(tmp_path) == (b"first", 95.0, True)
    best.offer(candidate(94.0, 0.0, b"no better"))
    assert best._challenger is None
    for _ in range(7):
        best.offer(candidate(130.0, 1.0, b"lucky"))
    best.offer(candidate(125.0, 90.0, b"wide"))
    lucky = best.due()
    assert lucky.data == b"lucky"
    best.record_retest(lucky, ReturnStats(10, 40.0, 30.0))
    assert kept(tmp_path) == (b"first", 95.0, True)
    assert best.due() is best._challenger is None
    best.offer(candidate(120.0, 1.0, b"second"))
    assert best.due() is None, "one test in eight evaluations"
    best.record_retest(best._challenger, ReturnStats(10, 118.0, 1.0))  # the end of the run
    assert kept(tmp_path) == (b"second", 119.0, True)
    again = BestPolicy(tmp_path)
    again.offer(candidate(118.5, 0.0, b"later"))
    assert again._challenger is None, "a later session goes on from there"


def test_a_policy_far_above_a_confirmed_one_waits_for_no_test(tmp_path):
    best = BestPolicy(tmp_path)
    for _ in range(8):
        best.offer(candidate(40.0, 30.0))
    best.record_retest(best.due(), ReturnStats(10, 38.0, 30.0))
    best.offer(candidate(270.0, 30.0, b"near"))
    assert kept(tmp_path) == (b"w", 39.0, True)
    best.offer(candidate(290.0, 30.0, b"far"))
    assert kept(tmp_path) == (b"far", 290.0, False)
    assert best._challenger is None
    best.record_retest(best.due(last=True), ReturnStats(10, 280.0, 30.0))
    assert kept(tmp_path) == (b"far", 285.0, True)


def test_tests_that_no_challenger_took_do_not_follow_at_once(tmp_path):
    best = BestPolicy(tmp_path)
    for _ in range(8):
        best.offer(candidate(100.0, 10.0))
    best.record_retest(best.due(), ReturnStats(10, 100.0, 10.0))
    for _ in range(40):
        best.offer(candidate(50.0, 1.0))
    best.offer(candidate(130.0, 1.0))
    best.record_retest(best.due(), ReturnStats(10, 30.0, 1.0))
    for _ in range(7):
        best.offer(candidate(131.0, 1.0))
        assert best.due() is None
    best.offer(candidate(129.0, 1.0))
    assert best.due() is not None


def test_the_challenger_outlives_its_process_and_a_confirmed_bound_is_that_of_all_episodes(tmp_path):
    best = BestPolicy(tmp_path)
    best.offer(candidate(100.0, 10.0, b"first"))
    again = BestPolicy(tmp_path)  # before it is confirmed
    for _ in range(8):
        again.offer(candidate(0.0))
    again.record_retest(again.due(), ReturnStats(10, 90.0, 10.0))
    facts = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert facts["bound"] == ReturnStats(10, 100.0, 10.0).with_more(ReturnStats(10, 90.0, 10.0)).bound
    again.offer(candidate(130.0, 1.0, b"second"))
    last = BestPolicy(tmp_path)
    assert last._challenger.data == b"second"
    last.record_retest(last._challenger, ReturnStats(10, 128.0, 1.0))
    assert kept(tmp_path) == (b"second", 129.0, True)
    assert BestPolicy(tmp_path)._challenger is None


def test_a_test_without_a_result_changes_nothing_and_is_not_repeated_at_once(tmp_path):
    best = BestPolicy(tmp_path)
    for _ in range(8):
        best.offer(candidate(1.0))
    best.record_retest(best.due(), None)
    assert kept(tmp_path) == (b"w", 1.0, False)
    assert best.due() is None


def test_the_evaluator_tests_the_best_on_seeds_that_no_evaluation_uses(tmp_path, monkeypatch):
    seeds, run = [], evaluator.run_episodes

    def noted(make, act, some, *more, **options):
        seeds.append(some)
        return run(make, act, some, *more, **options)

    monkeypatch.setattr(evaluator, "run_episodes", noted)
    store, told = WeightsStore(tmp_path / "weights"), []
    job = job_of(tmp_path, episodes=2)
    with contextlib.closing(Evaluation(job, print, on_failure=told.append)) as evaluation:
        for version, gain in enumerate([IDLE, BAD, IDLE, GOOD, IDLE, BAD, IDLE, IDLE, IDLE], start=1):
            publish(store, gain, version)
            evaluation.evaluate(WeightsWatch(tmp_path).newer(0))
            evaluation.test_best()
    assert [len(each) for each in seeds] == [2] * 10
    assert len({seed for each in seeds for seed in each}) == 20
    best = read_weights(tmp_path / "checkpoints" / "best.safetensors")
    assert np.array_equal(best.arrays["head_w"], arrays(GOOD)["head_w"])
    facts = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    again = np.mean(
        [
            expected_return(GOOD, 4, episodes=2),
            score(
                run_episodes(
                    lambda: make_task(FAULT, FAULT_MODULE), policy_of(GOOD).act, fresh_seeds(2, 10, 1, 4, 1, 2)
                )
            )["return_mean"],
        ]
    )
    assert facts["return"] == pytest.approx(again)
    assert (facts["played"], facts["confirmed"], facts["version"], told) == (4, True, 4, [])
