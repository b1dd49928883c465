"""Every way to end a run: Ctrl-C once and twice, SIGTERM, spreeze runs stop, stop conditions."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from harness import FAULT, PENDULUM, REPO, Run, poll, train, verb

from spreeze.transport.checkpoint import CheckpointStore
from spreeze.workers.interrupts import Interrupts


def _in_order(run, document, stopped_by):
    assert document["stopped_by"] == stopped_by
    assert json.loads((run.path / "summary.json").read_text()) == document
    checkpoint = CheckpointStore(run.path / "checkpoints").load_latest()
    assert checkpoint is not None
    assert checkpoint.updates == document["updates"]
    assert document["parameters_sha256"]
    assert run.state()["state"] == "finished"
    assert "Traceback" not in run.stderr
    assert run.nonce_processes() == []


@pytest.mark.timeout(90)
def test_ctrl_c_once_leaves_checkpoint_summary_and_evaluation_within_15_s(tmp_path):
    with Run(tmp_path, *PENDULUM) as run:
        run.until_updates(50)
        start = time.monotonic()
        run.interrupt()
        code, document = run.end(15.0)
        assert time.monotonic() - start <= 15.0
        assert code == 0
        _in_order(run, document, "interrupt (Ctrl-C)")
        assert document["eval_return_mean"] is not None


@pytest.mark.timeout(90)
def test_ctrl_c_twice_ends_within_3_s(tmp_path):
    with Run(tmp_path, *PENDULUM) as run:
        run.until_updates(50)
        start = time.monotonic()
        run.interrupt()
        run.wait_for(lambda: run.state()["state"] == "stopping" or time.monotonic() - start > 0.2)
        run.interrupt()
        code, document = run.end(15.0)
        assert time.monotonic() - start <= 3.0 + 0.2
        assert code in (0, 130)
        assert document["stopped_by"] == "interrupt (Ctrl-C)"
        assert "Traceback" not in run.stderr
        assert run.nonce_processes() == []


@pytest.mark.timeout(60)
def test_ctrl_c_while_starting_leaves_nothing_behind(tmp_path):
    with Run(tmp_path, *PENDULUM) as run:
        run.wait_for(lambda: "usable core" in run.stderr, what="the start")
        run.interrupt()
        code, _ = run.end(15.0)
        assert code in (0, 130)
        assert "Traceback" not in run.stderr


@pytest.mark.timeout(60)
def test_ctrl_c_while_a_slow_environment_is_tried_ends_it_before_a_run_exists(tmp_path):
    with Run(tmp_path, *FAULT, faults={"init_s": 600}) as run:
        run.wait_for(lambda: psutil.Process(run.process.pid).children(), what="the probe")
        run.interrupt()
        code, _ = run.end(15.0)
    assert code == 130
    assert run.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in run.stderr
    assert not run.path.exists()


@pytest.mark.timeout(20)
def test_ctrl_c_while_python_imports_is_no_traceback(tmp_path):
    # A package of the same name in front of ours, that never comes back from its import.
    package = tmp_path / "numpy"
    package.mkdir()
    (package / "__init__.py").write_text("open('importing', 'w').close()\nimport time\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "spreeze.train"], cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"},
    )  # fmt: skip
    poll((tmp_path / "importing").exists, 15.0, "the import")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=5.0)[1] == b""
    assert process.returncode == -signal.SIGINT


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", ["SIGTERM", "runs stop"])
def test_other_ways_to_stop_are_as_one_ctrl_c(tmp_path, how):
    with Run(tmp_path, *FAULT) as run:
        run.until_updates(50)
        if how == "runs stop":
            stopped = verb("runs", "--runs-dir", run.runs_dir, "stop", "run")
            assert stopped.returncode == 0, stopped.stderr
            assert "finished" in stopped.stdout
        else:
            os.kill(run.process.pid, signal.SIGTERM)
        code, document = run.end(15.0)
        assert code == 0
        reason = {"SIGTERM": "interrupt (SIGTERM)", "runs stop": "stop request"}[how]
        _in_order(run, document, reason)


@pytest.mark.timeout(60)
def test_updates_stop_exactly(tmp_path):
    run, code, document = train(tmp_path, *FAULT, "--updates", "123")
    assert code == 0
    assert document["updates"] == 123
    _in_order(run, document, "updates")


@pytest.mark.timeout(90)
def test_target_return_stops_and_is_timed_from_process_start(tmp_path):
    start = time.monotonic()
    _, code, document = train(tmp_path, *FAULT, "--target-return", "-1000", "--seconds", "40")
    assert code == 0
    assert document["stopped_by"] == "target_return"
    assert document["wall_s"] < document["time_to_target_s"] + 15.0
    assert 0 < document["time_to_target_s"] < time.monotonic() - start


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "hang-up")]
)
def test_signals_are_counted_and_never_raise(number, cause):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert not interrupts.asked
        os.kill(os.getpid(), number)
        assert (interrupts.asked, interrupts.urgent, interrupts.cause) == (True, False, cause)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (interrupts.urgent, interrupts.cause) == (True, cause)
    assert signal.getsignal(number) == before
