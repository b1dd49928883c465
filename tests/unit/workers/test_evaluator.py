import contextlib
import csv
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from harness import NOBODY, PATIENCE_S
from linear_policy import BAD, FAULT, FAULT_MODULE, GOOD, IDLE, SPEC, policy_of, publish, wait_until

from spreeze.config.schema import EvaluationConfig
from spreeze.envs.task import make_task
from spreeze.transport.status_table import STOP, WEIGHTS_COUNTER, StatusTable
from spreeze.transport.weights import WeightsStore, read_weights
from spreeze.workers import evaluator
from spreeze.workers.best_policy import BestPolicy, Candidate, ReturnStats
from spreeze.workers.context import WorkerContext
from spreeze.workers.episodes import episode_recorder, lockstep
from spreeze.workers.episodes.lockstep import fresh_seeds, run_episodes, score
from spreeze.workers.evaluator import (
    COLUMNS,
    Evaluation,
    WeightsWatch,
    append_row,
    final_evaluation,
    read_rows,
    run_evaluator,
)
from spreeze.workers.jobs import EvaluatorJob
from spreeze.workers.roles import Address


@pytest.fixture
def store(tmp_path):
    return WeightsStore(tmp_path / "weights")


def job_of(tmp_path, **changes):
    part = EvaluationConfig(episodes=changes.pop("episodes", 4), seed=10, cpu_share=changes.pop("cpu_share", 0.5))
    fields = {"run_dir": str(tmp_path), "spec": SPEC, "config": part, "has_free_core": True}
    return EvaluatorJob(**{**fields, **changes})


class Running:
    """The evaluator in a thread, its status and the messages that it sent."""

    def __init__(self, job, pauses=None):
        self.status = StatusTable.create(7)
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.context = WorkerContext(Address("evaluator"), self.status, 0, self._write_fd, Path(job.run_dir) / "errors")
        if pauses is not None:
            self.context.pauses = lambda seconds, **until: (pauses.append(seconds), time.sleep(0.005))
        self.error = None
        self._text = b""
        self._thread = threading.Thread(target=self._body, args=(job,))
        self._thread.start()

    def _body(self, job):
        try:
            for _ in run_evaluator(self.context, job):
                pass
        except Exception as error:
            self.error = error

    def hint(self):
        self.status.header[WEIGHTS_COUNTER] += 1

    def messages(self, kind):
        with contextlib.suppress(BlockingIOError):
            self._text += os.read(self.read_fd, 1 << 16)
        found = [json.loads(line) for line in self._text.splitlines()]
        return [message for message in found if message["kind"] == kind]

    def stop(self):
        self.status.header[STOP] = 1
        self._thread.join(PATIENCE_S)
        return self.ended()

    def ended(self):
        return not self._thread.is_alive()


@contextlib.contextmanager
def running(job):
    body = Running(job)
    try:
        yield body
    finally:
        assert body.stop()
        body.messages("")
        os.close(body.read_fd)
        body.context.close()


def expected_return(gain, version, episodes=4, group=0):
    """Mean return of ``gain`` over the fresh starts that the evaluator plays for that version of the weights."""
    seeds = fresh_seeds(episodes, 10, 1, version, 0, group)
    found = run_episodes(lambda: make_task(FAULT, FAULT_MODULE), policy_of(gain).act, seeds)
    return score(found)["return_mean"]


def test_each_new_version_is_evaluated_and_written_down_and_the_best_is_kept(tmp_path, store):
    publish(store, IDLE, 3)
    with running(job_of(tmp_path)) as body:
        for number, gain in enumerate((GOOD, BAD), start=1):
            wait_until(lambda n=number: len(body.messages("evaluation")) == n)
            publish(store, gain, 3 + number)
            body.hint()
        wait_until(lambda: len(body.messages("evaluation")) == 3)
        sent = body.messages("evaluation")
        slots = body.status.named_slots(0, "evaluator")
    with open(tmp_path / "eval.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [int(row["version"]) for row in rows] == [3, 4, 5]
    assert [float(row["return_mean"]) for row in rows] == [m["return_mean"] for m in sent]
    assert sent[1]["return_mean"] == expected_return(GOOD, 4) > sent[0]["return_mean"] > sent[2]["return_mean"]
    assert (sent[1]["wall_s"], sent[1]["env_steps"], sent[1]["updates"]) == (2.0, 400, 4)
    assert (slots["evaluations"], slots["policy_version"], slots["eval_length"]) == (3.0, 5.0, 50.0)
    best = read_weights(tmp_path / "checkpoints" / "best.safetensors")
    assert (best.epoch, best.version) == (1, 4)
    np.testing.assert_array_equal(best.arrays["head_w"], GOOD.T)
    facts = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert (facts["return"], facts["version"], facts["epoch"]) == (sent[1]["return_mean"], 4, 1)


def test_the_best_of_an_earlier_session_is_not_replaced_by_a_worse_one(tmp_path, store):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.json").write_text(
        json.dumps({"return": 1.0, "std": 0.1, "played": 30, "confirmed": True, "version": 9, "epoch": 1})
    )
    publish(store, GOOD, 1)
    with running(job_of(tmp_path)) as body:
        wait_until(lambda: body.messages("evaluation"))
    assert not (tmp_path / "checkpoints" / "best.safetensors").exists()


def test_what_a_killed_evaluator_left_is_removed_and_an_unfinished_checkpoint_is_not(tmp_path, store):
    folder = tmp_path / "checkpoints"
    (folder / f".tmp-{NOBODY}-cd").mkdir(parents=True)
    (folder / f".tmp-{NOBODY}-ab").write_bytes(b"half of the best weights")
    publish(store, GOOD, 1)
    with running(job_of(tmp_path)) as body:
        wait_until(lambda: body.messages("evaluation"))
    assert sorted(path.name for path in folder.iterdir()) == [f".tmp-{NOBODY}-cd", "best.json", "best.safetensors"]


def test_a_stop_is_obeyed_in_the_middle_of_an_evaluation(tmp_path, store, monkeypatch):
    monkeypatch.setenv("SPREEZE_FAULT_STEP_S", "0.02")
    publish(store, GOOD, 1)
    with running(job_of(tmp_path, episodes=10_000)) as body:  # hours, if nobody stopped it
        wait_until(lambda: int(body.status.control(0)[1]) == int(evaluator.Phase.EVALUATE))
        assert body.stop()
    assert not (tmp_path / "eval.csv").exists()


def test_without_a_free_core_it_rests_after_an_evaluation(tmp_path, store, monkeypatch):
    rests = []
    monkeypatch.setattr(evaluator.time, "process_time", itertools.count(step=60).__next__)
    publish(store, GOOD, 1)
    job = job_of(tmp_path, has_free_core=False, cpu_share=0.1)
    body = Running(job, pauses=rests)
    wait_until(lambda: any(rest > 1.0 for rest in rests))
    body.stop()
    os.close(body.read_fd)
    body.context.close()
    assert max(rests) <= 600.0  # a minute of processor time at a share of 0.1, less what has passed


def test_an_error_costs_its_episode_and_the_score_says_so(tmp_path, store, monkeypatch):
    monkeypatch.setenv("SPREEZE_FAULT_P_CRASH", "0.005")  # of these four starts one in fifty steps
    publish(store, GOOD, 1)
    with running(job_of(tmp_path)) as body:
        wait_until(lambda: body.messages("evaluation"))
        (sent,), (event, *_) = body.messages("evaluation"), body.messages("event")
    assert (sent["episodes"], sent["episodes_lost"], sent["episodes_cut"], sent["whole"]) == (3, 1, 0, True)
    told = r"evaluation, seed \d+, step (\d+): RuntimeError: .*: step \1 raises \(fault_envs\.py:\d+\); its .* lost"
    assert re.fullmatch(told, event["text"])
    (record,) = [json.loads(path.read_text()) for path in (tmp_path / "errors").iterdir()]
    assert record["process"] == "evaluator"
    assert "Traceback" in record["traceback"]
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["episodes_lost"] == 1


def test_evaluation_goes_on_when_errors_end_however_many_there_were(tmp_path, store, monkeypatch):
    monkeypatch.setenv("SPREEZE_FAULT_P_NAN", "1.0")
    calls, run = [], evaluator.run_episodes
    monkeypatch.setattr(evaluator, "run_episodes", lambda *args, **options: (calls.append(1), run(*args, **options))[1])
    publish(store, GOOD, 1)
    with running(job_of(tmp_path)) as body:
        for version in range(2, 10):  # more in a row than were ever borne
            wait_until(lambda version=version: len(calls) == version - 1)
            publish(store, GOOD, version)
            body.hint()
        assert body.messages("evaluation") == []
        monkeypatch.delenv("SPREEZE_FAULT_P_NAN")  # environments that are made from now on do not fail
        for version in range(10, 13):  # a last one may still have failed, and the next one ended its environments
            wait_until(lambda version=version: len(calls) == version - 1)
            publish(store, GOOD, version)
            body.hint()
        wait_until(lambda: body.messages("evaluation") and body.messages("evaluation")[-1]["version"] == 12)
        found, events = body.messages("evaluation")[-1], body.messages("event")
    assert found["return_mean"] == expected_return(GOOD, 12)
    assert body.error is None
    assert [event["text"].partition("is lost")[2] for event in events] == ["", "; 10 such errors so far"]


def test_environments_that_cannot_be_made_are_tried_again_for_ever(tmp_path, store, monkeypatch):
    refusals = iter(range(7))

    def refused(spec, **kwargs):
        if next(refusals, None) is not None:
            raise RuntimeError("no display")
        return open_task(spec, **kwargs)

    open_task = episode_recorder.open_task
    monkeypatch.setattr(episode_recorder, "open_task", refused)
    pauses = []
    publish(store, GOOD, 1)
    body = Running(job_of(tmp_path), pauses=pauses)
    version = 1
    while not body.messages("evaluation"):
        version += 1
        assert version < 1000
        publish(store, GOOD, version)
        body.hint()
        time.sleep(0.01)
    body.stop()
    assert body.error is None
    texts = [message["text"] for message in body.messages("event")]
    assert len(texts) == 1
    assert texts[0].startswith("evaluation failed: RuntimeError: no display (test_evaluator.py:")
    assert [pause for pause in pauses if pause >= 1.0] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    os.close(body.read_fd)
    body.context.close()


def test_a_damaged_line_of_the_curve_is_left_out(tmp_path):
    record = dict.fromkeys(COLUMNS, 1) | {"return_mean": -0.1234567890123456}
    append_row(tmp_path / "eval.csv", record)
    with open(tmp_path / "eval.csv", "a") as file:
        file.write("1,2,x\n")
    append_row(tmp_path / "eval.csv", record)
    assert read_rows(tmp_path / "eval.csv") == [record, record]
    assert read_rows(tmp_path / "nothing.csv") == []


def test_a_job_travels_as_json(tmp_path):
    job = job_of(tmp_path, spec=dataclasses.replace(SPEC, import_module=None, args=("a=1", "b=x")))
    assert EvaluatorJob.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_the_last_evaluation_takes_the_newest_weights_once(tmp_path, store):
    publish(store, BAD, 1)
    publish(store, GOOD, 2)
    record = final_evaluation(job_of(tmp_path), budget_s=30.0)
    assert (record["version"], record["episodes"]) == (2, 4)
    assert record["return_mean"] == expected_return(GOOD, 2)
    del record["metrics"]  # recorded once
    assert final_evaluation(job_of(tmp_path), budget_s=0.0) == record
    assert len(read_rows(tmp_path / "eval.csv")) == 1


def test_the_last_evaluation_tests_the_challenger_though_the_newest_weights_were_evaluated_before(tmp_path, store):
    publish(store, BAD, 1)
    with contextlib.closing(Evaluation(job_of(tmp_path), lambda *error: None)) as evaluation:
        evaluation.evaluate(WeightsWatch(tmp_path).newer(0))
        evaluation.test_best()
    best = BestPolicy(tmp_path)
    while best.due() is None:
        best.offer(Candidate(ReturnStats(4, -1e9, 1.0), b"", {}))
    best.record_retest(best.due(), ReturnStats(4, -1e9, 0.0))  # confirmed
    publish(store, GOOD, 2)
    with contextlib.closing(Evaluation(job_of(tmp_path), lambda *error: None)) as evaluation:
        evaluation.evaluate(WeightsWatch(tmp_path).newer(0))
    assert BestPolicy(tmp_path)._challenger is not None
    assert final_evaluation(job_of(tmp_path), budget_s=30.0)["version"] == 2
    assert BestPolicy(tmp_path)._challenger is None
    assert read_weights(tmp_path / "checkpoints" / "best.safetensors").version == 2


def test_the_last_evaluation_keeps_to_its_budget_and_counts_a_prefix_of_the_seeds(tmp_path, store, monkeypatch):
    monkeypatch.setenv("SPREEZE_FAULT_STEP_S", "0.004")
    monkeypatch.setattr(lockstep, "envs_at_once", lambda spec: 1)
    publish(store, GOOD, 1)
    # An episode sleeps for 0.2 s: some of them fit into the budget, and ten thousand do not.
    record = final_evaluation(job_of(tmp_path, episodes=10_000), budget_s=3.0)
    assert 1 <= record["episodes"] < 10_000
    assert record["return_mean"] == expected_return(GOOD, 1, episodes=record["episodes"])
    assert not (tmp_path / "checkpoints").exists()


def test_a_stop_leaves_whole_rounds_and_the_record_says_how_many_were_cut(tmp_path, store, monkeypatch):
    monkeypatch.setattr(lockstep, "envs_at_once", lambda spec: 4)
    publish(store, GOOD, 1)
    asked, most = [], [120]
    with contextlib.closing(
        Evaluation(job_of(tmp_path, episodes=10), print, lambda: len(asked) == most[0] or asked.append(1))
    ) as evaluation:
        found = evaluation.evaluate(WeightsWatch(tmp_path).newer(0), keep_partial=True)
        assert found["return_mean"] == expected_return(GOOD, 1, episodes=8), "two rounds of 50 steps, and a part of one"
        assert (found["episodes"], found["episodes_cut"], found["episodes_lost"]) == (8, 2, 0)
        assert not found["whole"]
        assert not (tmp_path / "checkpoints").exists()
        asked.clear()
        most[0] = 49
        assert evaluation.evaluate(WeightsWatch(tmp_path).newer(0), keep_partial=True) is None


def test_the_last_evaluation_without_weights_or_time_is_none(tmp_path, store):
    assert final_evaluation(job_of(tmp_path), budget_s=5.0) is None
    publish(store, GOOD, 1)
    assert final_evaluation(job_of(tmp_path), budget_s=0.0) is None


def test_the_command_prints_one_json_record_only(tmp_path):
    command = [sys.executable, "-m", "spreeze.workers.evaluator", json.dumps(job_of(tmp_path).to_json()), "5", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, json.loads(done.stdout)) == (0, None)


def test_of_two_learners_the_best_weights_of_all_are_kept_and_the_last_score_is_the_leaders(tmp_path, store):
    job, second = job_of(tmp_path, groups=2), WeightsStore(tmp_path / "groups" / "1" / "weights")
    for where, gain in ((store, IDLE), (second, GOOD)):
        publish(where, gain, 1)
    with running(job) as body:
        wait_until(lambda: {message["group"] for message in body.messages("evaluation")} == {0, 1})
    best = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert (best["group"], best["return"]) == (1, expected_return(GOOD, 1, group=1))
    publish(store, BAD, 2)
    publish(second, IDLE, 2)
    record = final_evaluation(job, budget_s=30.0)
    assert (record["group"], record["version"], record["return_mean"]) == (1, 2, expected_return(IDLE, 2, group=1))


def played_seeds(monkeypatch, returns):
    """The seeds of each evaluation; their episodes have the returns that ``returns`` gives for each one's number."""
    seeds = []

    def run(make, act, some, on_step=None, should_stop=None, **options):
        seeds.append(list(some))
        return [
            evaluator.Episode(seed, value, 1, True)
            for seed, value in zip(some, returns(len(seeds), len(some)), strict=True)
        ]

    monkeypatch.setattr(evaluator, "run_episodes", run)
    return seeds


def evaluated(tmp_path, version=1, **changes):
    publish(WeightsStore(tmp_path / "weights"), GOOD, version)
    with contextlib.closing(Evaluation(job_of(tmp_path, **changes), lambda *error: None)) as evaluation:
        return evaluation.evaluate(WeightsWatch(tmp_path).newer(0))


def test_no_two_versions_are_evaluated_on_the_same_starts_and_a_repeated_evaluation_is(tmp_path, monkeypatch):
    seeds = played_seeds(monkeypatch, lambda number, count: [0.0] * count)
    for version in (1, 2, 2):
        evaluated(tmp_path / str(len(seeds)), version, episodes=10)
    assert len({*seeds[0], *seeds[1]}) == 20
    assert seeds[1] == seeds[2]


@pytest.mark.parametrize(
    ("first", "later", "found", "rounds"),
    [
        ([9.0, 11.0] * 5, [], None, [10]),  # below the target
        ([99.0, 101.0] * 5, [], (True, 10, 100.0), [10]),  # its lower bound is above it
        ([99.0, 101.0], [[60.0] * 20], (True, 20, 60.0), [2, 20]),  # two episodes say little
        ([0.0, 120.0] * 5, [[40.0] * 20], (False, 20, 40.0), [10, 20]),  # ten lucky starts
        ([0.0, 120.0] * 5, [[60.0, 64.0] * 10], (True, 20, 62.0), [10, 20]),
        (
            [0.0, 120.0] * 5,
            [[0.0, 110.0] * 10, [0.0, 80.0] * 10],
            (False, 40, 47.5),
            [10, 20, 20],
        ),  # it was open after 20
        ([0.0, 120.0] * 5, [[0.0, 101.0] * 10] * 5, (True, 100, 50.5), [10, 20, 20, 20, 20, 20]),  # open to the end
    ],
)
def test_a_target_is_reached_by_a_lower_bound_or_by_a_second_evaluation_from_fresh_starts(
    tmp_path, monkeypatch, first, later, found, rounds
):
    seeds = played_seeds(monkeypatch, lambda number, count: [first, *later][number - 1])
    target = evaluated(tmp_path, episodes=len(first), target_return=50.0)["target"]
    assert (None if target is None else tuple(target.values())) == found
    assert [len(each) for each in seeds] == rounds
    assert len({seed for each in seeds for seed in each}) == sum(rounds), "no start is played twice"


def test_a_policy_that_is_below_the_target_on_average_hardly_ever_ends_a_run(tmp_path, monkeypatch):
    """Blackjack by its basic strategy: -0.04 in the mean with a deviation of 0.95; a target of 0.3 is out of reach."""
    rng = np.random.default_rng(3)
    played_seeds(monkeypatch, lambda number, count: rng.choice([-1.0, 0.0, 1.0], count, p=[0.48, 0.08, 0.44]))
    publish(WeightsStore(tmp_path / "weights"), GOOD, 1)
    weights, lucky = WeightsWatch(tmp_path).newer(0), 0
    with contextlib.closing(Evaluation(job_of(tmp_path, episodes=10, target_return=0.3), print)) as evaluation:
        for _ in range(300):
            record = evaluation.evaluate(weights)
            lucky += record["return_mean"] >= 0.3
            assert record["target"] is None or not record["target"]["reached"]
    assert lucky > 20, "one evaluation of ten hands says so often"


def test_a_target_that_was_reached_is_not_confirmed_again(tmp_path, monkeypatch):
    seeds = played_seeds(monkeypatch, lambda number, count: [60.0] * count)
    publish(WeightsStore(tmp_path / "weights"), GOOD, 1)
    weights = WeightsWatch(tmp_path).newer(0)
    with contextlib.closing(Evaluation(job_of(tmp_path, episodes=2, target_return=50.0), print)) as evaluation:
        found = [evaluation.evaluate(weights)["target"] for _ in range(2)]
    assert (found[0]["reached"], found[1]) == (True, None)
    assert [len(each) for each in seeds] == [2, 20, 2]


def test_a_second_evaluation_that_is_stopped_decides_nothing(tmp_path, monkeypatch):
    seeds = played_seeds(monkeypatch, lambda number, count: [60.0] * count)
    run = evaluator.run_episodes
    monkeypatch.setattr(evaluator, "run_episodes", lambda *args, **options: run(*args, **options)[: 2 + 1])
    assert evaluated(tmp_path, episodes=2, target_return=50.0)["target"] is None
    assert [len(each) for each in seeds] == [2, 20]


def test_a_sampler_plays_the_evaluations_in_its_own_environment_where_there_is_no_other(tmp_path, store, monkeypatch):
    monkeypatch.setattr(episode_recorder, "open_task", lambda *args, **more: pytest.fail("there can be no second one"))
    status, (read_fd, write_fd) = StatusTable.create(3), os.pipe()
    context = WorkerContext(Address("sampler"), status, 0, write_fd, tmp_path / "errors")
    own = make_task(FAULT, FAULT_MODULE)
    with evaluator.turn_evaluation(context, job_of(tmp_path, max_envs=1, cpu_share=0.01)) as turn:
        assert turn.play(own) is own, "no weights yet"
        monkeypatch.setattr(evaluator, "_LONGEST_EPISODE_S", -1.0)
        assert not turn.overdue, "no evaluation waits for the end of an episode"
        publish(store, GOOD, 1)
        context.status.header[WEIGHTS_COUNTER] += 1
        assert turn.overdue
        monkeypatch.setattr(turn._watch, "_look_at_s", 0.0)
        assert turn.play(own) is own
        (row,) = read_rows(tmp_path / "eval.csv")
        assert (row["version"], row["episodes"], row["return_mean"]) == (1, 4, expected_return(GOOD, 1))
        assert (tmp_path / "checkpoints" / "best.safetensors").exists()
        message = json.loads(os.read(read_fd, 1 << 16).splitlines()[0])
        assert (message["kind"], message["from"], message["version"]) == ("evaluation", "sampler-0", 1)
        publish(store, IDLE, 2)
        context.status.header[WEIGHTS_COUNTER] += 1
        assert turn.play(own) is own
        assert len(read_rows(tmp_path / "eval.csv")) == 1, "it keeps to its share of the time"
    own.close()
    assert evaluator.turn_evaluation(context, None).__enter__() is None
    os.close(read_fd)
    context.close()


def test_the_last_evaluation_is_told_before_its_environments_are_closed(tmp_path, store, monkeypatch):
    told, open_task = [], episode_recorder.open_task

    def opened(*args, **more):
        task = open_task(*args, **more)
        close = task.close
        monkeypatch.setattr(task, "close", lambda: (told.append("closed"), close()))
        return task

    monkeypatch.setattr(episode_recorder, "open_task", opened)
    publish(store, GOOD, 1)
    final_evaluation(job_of(tmp_path), 60.0, lambda record: told.append(record["version"]))
    assert told[0] == 1
    assert set(told[1:]) == {"closed"}
