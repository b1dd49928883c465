"""Environments that fail in every way, in real runs: counted, named, and training goes on."""

import json
import os

import pytest
from fault_envs import GRANDCHILD_ID
from harness import FAULT, Run, poll, train


@pytest.mark.parametrize(
    ("faults", "counter"),
    [({"p_crash": 0.003, "seed": 1}, "env_errors"),
     ({"p_nan": 0.002, "p_shape": 0.002, "seed": 4}, "transitions_rejected")],
    ids=["raises", "nan and shape"],
)  # fmt: skip
def test_errors_and_bad_transitions_are_counted_and_training_goes_on(tmp_path, faults, counter):
    # With these seeds an environment that was built anew fails again only after hundreds of steps.
    with Run(tmp_path, *FAULT, "--no-evaluator", faults=faults) as run:
        run.wait_for(lambda: run.numbers().get(counter, 0) >= 3, what=f"three {counter}")
        run.until_progress()
        numbers = run.numbers()
        code, document = run.stop()
    assert code == 0
    assert document["restarts"] == 0
    assert numbers["updates_skipped"] == 0, "no NaN ever reached replay"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param("exit_at", "sampler-0 exited unexpectedly (exit code 0) in phase STEP", marks=pytest.mark.slow),
        ("segfault_at", "sampler-0 ended by SIGSEGV in phase STEP"),
        ("hang_at", "in phase STEP; its stack is in logs/sampler-0.log (sampling.step_deadline_s = 3)"),
    ],
)
def test_a_sampler_whose_environment_takes_it_down_is_started_again(tmp_path, fault, words):
    faults = {fault: 30, "once": tmp_path / "it-happened", "workers": "sampler-0"}
    with Run(tmp_path, *FAULT, "--no-evaluator", "--set", "sampling.step_deadline_s=3", faults=faults) as run:
        run.wait_for(lambda: any(words in event for event in run.events()), what=words)
        run.until_progress()
        code, document = run.stop()
    assert code == 0
    assert (tmp_path / "it-happened").exists()
    assert document["restarts"] >= 1, "once; again only where a step of a healthy one takes longer than the deadline"
    assert document["error"] is None
    if fault != "exit_at":
        assert "fault_envs.py" in (run.path / "logs" / "sampler-0.log").read_text(), "the stack names the culprit"


def test_an_environment_that_always_dies_ends_the_run_with_the_reason_at_the_top(tmp_path):
    run, code, document = train(tmp_path, *FAULT, "--no-evaluator", faults={"exit_at": 30, "workers": "sampler-0"})
    assert code == 1
    assert document["stopped_by"] == "failure"
    assert "samplers keep failing" in document["error"]
    assert "first: sampler-0: exited unexpectedly (exit code 0)" in document["error"]
    assert run.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in run.stderr
    assert run.state()["state"] == "failed"
    assert run.nonce_processes() == []


def test_an_exception_in_a_worker_is_kept_with_its_traceback_and_shown_first(tmp_path):
    more = ("--no-evaluator", "--set", "sampling.nan_policy=fail")
    run, code, document = train(tmp_path, *FAULT, *more, faults={"p_nan": 0.02, "seed": 1})
    assert code == 1
    assert "returned an invalid transition" in document["error"]
    record = json.loads(sorted((run.path / "errors").glob("sampler-0-*.json"))[0].read_text())
    assert record["process"] == "sampler-0"
    assert "BadTransition" in record["traceback"]


@pytest.mark.parametrize(
    ("faults", "words"),
    [({"p_crash_reset": 1.0}, "injected fault: reset raises"), ({"exit_at": 1}, "exit code 0 before the first step"),
     ({"p_shape": 1.0}, "shape")],
    ids=["raises", "exits", "shape"],
)  # fmt: skip
def test_an_environment_that_never_works_is_refused_before_anything_starts(tmp_path, faults, words):
    run, code, document = train(tmp_path, *FAULT, faults=faults)
    assert code == 2
    assert words in document["error"]
    assert "Traceback" not in run.stderr
    assert not run.path.exists()


def test_processes_that_an_environment_started_end_with_it(tmp_path):
    with Run(tmp_path, "--env", GRANDCHILD_ID, "--import", "fault_envs") as run:
        run.until_updates(30)
        assert len(run.nonce_processes()) > 3
        os.kill(run.children()["sampler-0"].pid, 9)
        run.wait_for(lambda: run.numbers()["restarts"] >= 1, what="a restart")
        code, _ = run.stop()
        assert code == 0
        poll(lambda: run.nonce_processes() == [], what=run.nonce_processes)
