"""The serial mode: the same seed gives the same bits."""

import gc
import signal

import pytest
from harness import FAULT, HIDDEN_SIZES, PATIENCE_S, PENDULUM, NoView, train, train_until

from spreeze.config.layers import Layer, resolve
from spreeze.envs.probe import probe_env
from spreeze.modes import serial
from spreeze.run_directory import RunDir
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.workers.evaluator import Evaluation, read_rows


def _sha(tmp_path, name, *args):
    _, code, document = train(tmp_path, *FAULT, "--mode", "serial", "--updates", "150", *args, name=name)
    assert code == 0
    assert (document["mode"], document["updates"], document["samplers"]) == ("serial", 150, 1)
    assert document["restarts"] == 0
    return document["parameters_sha256"], document["env_steps"]


def test_same_seed_same_bits_other_seed_other_bits(tmp_path):
    first = _sha(tmp_path, "first")
    assert _sha(tmp_path, "again") == first
    assert _sha(tmp_path, "other", "--seed", "2")[0] != first[0]


def test_schedules_and_averages_repeat_too(tmp_path):
    settings = ("--set", "sac.lr_schedule=cosine", "--set", "sac.weight_decay=0.01", "--set", "sac.critics=quantile",
                "--set", "sac.policy_average=0.99", "--set", "sac.explore_average=true")  # fmt: skip
    assert _sha(tmp_path, "first", *settings) == _sha(tmp_path, "again", *settings)


def test_environments_that_err_alike_give_the_same_bits(tmp_path):
    faults = {"p_crash": 0.01, "p_nan": 0.01, "seed": 2}
    found = []
    for name in ("first", "again"):
        _, code, document = train(tmp_path, *FAULT, "--mode", "serial", "--updates", "150", name=name, faults=faults)
        assert code == 0
        assert document["env_errors"] + document["rows_refused"] > 1
        found.append((document["parameters_sha256"], document["env_steps"], document["env_errors"]))
    assert found[0] == found[1]


def test_its_one_process_is_watched_as_workers_are(tmp_path):
    run, code, _ = train_until(tmp_path, lambda run: "process_cpu_use/run" in run.numbers(), *PENDULUM, "--mode",
                               "serial")
    assert code == 0
    assert run.numbers()["process_memory_bytes/run"] > 1e7


def test_one_update_an_env_step_as_serial_trainers_do(tmp_path):
    _, code, document = train(tmp_path, *FAULT, "--mode", "serial", "--updates", "400", "--algo", "td3",
                              "--batch-size", "32", "--set", f"td3.hidden_sizes={HIDDEN_SIZES}")  # fmt: skip
    assert code == 0
    assert document["samples_per_insert"] == pytest.approx(32.0, rel=0.05)
    assert document["env_steps"] == pytest.approx(200 + 400, abs=12)


def test_evaluations_come_after_a_number_of_updates_where_that_is_asked_for(tmp_path):
    found, code, _ = train(tmp_path, *FAULT, "--mode", "serial", "--updates", "150",
                           "--set", "evaluation.interval_updates=40")  # fmt: skip
    assert code == 0
    updates = [row["updates"] for row in read_rows(found.path / "eval.csv")]
    assert updates[0] < 40
    assert [count // 40 for count in updates[1:-1]] == [1, 2, 3]
    assert all(count % 40 < 8 for count in updates[1:-1]), "each as soon as the env step's updates are done"
    assert updates[-1] == 150


def test_an_interrupt_in_the_middle_of_an_evaluation_leaves_the_last_weights_a_score(tmp_path, monkeypatch):
    attempt, calls = Evaluation.attempt, []

    def interrupted_at_first(*args, **options):
        if not calls:
            signal.raise_signal(signal.SIGINT)
        calls.append("attempt")
        return attempt(*args, **options)

    monkeypatch.setattr(Evaluation, "attempt", interrupted_at_first)
    monkeypatch.setattr(serial, "_FINAL_EVALUATION_S", PATIENCE_S)
    values = {"env": {"id": "Pendulum-v1"}, "run": {"mode": "serial"}, "sac": {"hidden_sizes": [8]},
              "learner": {"batch_size": 8}, "replay": {"capacity": 20_000, "learning_starts": 50},
              "visualizer": {"enabled": False}, "evaluation": {"episodes": 1}}  # fmt: skip
    plan = RunPlan(settings=resolve([Layer("test", values)]), spec=probe_env("Pendulum-v1", steps=0).spec, samplers=1,
                   free_core=False)  # fmt: skip
    run_dir = RunDir.create(tmp_path, "run")
    try:
        with Interrupts() as interrupts:
            outcome = serial.run_mode(plan, run_dir, NoView(), interrupts)
    finally:
        run_dir.close()
        gc.collect()  # the loop and its data refer to each other; a run's own process ends with it
    assert outcome.stopped_by == "interrupt (Ctrl-C)"
    assert [row["updates"] for row in read_rows(run_dir.path / "eval.csv")] == [outcome.updates]
    assert outcome.eval_return is not None


def test_an_evaluator_that_works_beside_the_learner_cannot_count_updates(tmp_path):
    found, code, _ = train(tmp_path, *FAULT, "--updates", "150", "--set", "evaluation.interval_updates=40")
    assert code == 2
    assert "evaluation.interval_updates = 40: in mode spreeze the evaluator works beside" in found.stderr
