"""Every way to end a run: Ctrl-C once and twice, SIGTERM, spreeze runs stop, stop conditions."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from harness import FAULT, NOBODY, PATIENCE_S, PENDULUM, REPO, TINY, Run, poll, run_command, train
from pseudo_terminal import PseudoTerminal

from spreeze.machine.processes import ENDING, PROBE, WATCHER
from spreeze.metrics.store import MetricsReader, Point
from spreeze.run_directory import read_run
from spreeze.runtime.interrupts import Interrupts
from spreeze.transport.checkpoint import CheckpointStore


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


def test_ctrl_c_once_leaves_checkpoint_summary_and_evaluation(tmp_path):
    with Run(tmp_path, *PENDULUM) as run:
        reader = MetricsReader(run.path / "metrics.db")
        run.until_updates(50)
        run.wait_for(lambda: len(reader.evaluations()) >= 2, what="two evaluations")
        left = [folder / f".tmp-{NOBODY}-ab" for folder in (run.path, run.path / "weights")]
        for path in left:
            path.write_bytes(b"half of what a worker wrote that was killed")
        code, document = run.stop()
        assert code == 0
        _in_order(run, document, "interrupt (Ctrl-C)")
        assert [path for path in left if path.exists()] == []
    evaluations = reader.evaluations()
    assert [e.version for e in evaluations] == sorted({e.version for e in evaluations})
    assert evaluations[-1].version <= document["updates"]
    assert document["eval_return_mean"] == pytest.approx(evaluations[-1].return_mean)
    assert document["eval_return_best"] == pytest.approx(max(e.return_mean for e in evaluations))


def test_ctrl_c_twice_ends_in_order_too(tmp_path):
    with Run(tmp_path, *PENDULUM) as run:
        run.until_updates(50)
        run.interrupt()
        poll(lambda: run.process.poll() is not None or run.state()["state"] == "stopping", what="the end's beginning")
        run.interrupt()
        code, document = run.end()
        assert code in (0, 130)
        assert document["stopped_by"] == "interrupt (Ctrl-C)"
        assert "Traceback" not in run.stderr
        assert run.nonce_processes() == []


def test_ctrl_c_while_starting_leaves_nothing_behind(tmp_path):
    with Run(tmp_path, *PENDULUM) as run:
        run.wait_for(lambda: "usable core" in run.stderr, what="the start")
        code, _ = run.stop()
        assert code in (0, 130)
        assert "Traceback" not in run.stderr


def _names_of_children(pid):
    names = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            names.append(child.name())
    return names


def test_ctrl_c_while_a_slow_environment_is_tried_ends_it_before_a_run_exists(tmp_path):
    with Run(tmp_path, *FAULT, faults={"init_s": 600}) as run:
        run.wait_for(lambda: PROBE in _names_of_children(run.process.pid), what="the probe")
        code, _ = run.stop()
    assert code == 130
    assert run.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in run.stderr
    assert not run.path.exists()


@pytest.mark.cold
def test_ctrl_c_while_python_imports_is_no_traceback(tmp_path):
    # A package of the same name in front of ours, that never comes back from its import.
    package = tmp_path / "numpy"
    package.mkdir()
    (package / "__init__.py").write_text("open('importing', 'w').close()\nimport time\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "spreeze.train"], cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"},
    )  # fmt: skip
    poll((tmp_path / "importing").exists, what="the import")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_S)[1] == b""
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize("how", ["SIGTERM", "runs stop"])
def test_other_ways_to_stop_are_as_one_ctrl_c(tmp_path, how):
    with Run(tmp_path, *FAULT) as run:
        run.until_updates(50)
        if how == "runs stop":
            stopped = run_command("runs", "--runs-dir", run.runs_dir, "stop", "run")
            assert stopped.returncode == 0, stopped.stderr
            assert "finished" in stopped.stdout
        else:
            os.kill(run.process.pid, signal.SIGTERM)
        code, document = run.end()
        assert code == 0
        reason = {"SIGTERM": "interrupt (SIGTERM)", "runs stop": "stop request"}[how]
        _in_order(run, document, reason)
        why = {"SIGTERM": "it was interrupted", "runs stop": "it was stopped"}[how]
        assert any(f"the run ends: {why}" in event for event in run.events())


def test_updates_stop_exactly_and_no_file_holds_objects_that_would_be_executed(tmp_path):
    run, code, document = train(tmp_path, *FAULT, "--updates", "43", "--save-replay")
    assert (code, document["updates"]) == (0, 43)
    _in_order(run, document, "updates")
    for path in run.path.rglob("*"):
        if path.is_file():
            head = path.read_bytes()[:4]
            assert path.suffix not in (".pt", ".pth", ".pkl", ".pickle")
            if path.suffix == ".npz":  # an archive of arrays, none of which may hold objects
                with np.load(path, allow_pickle=False) as arrays:
                    assert all(arrays[name].dtype.kind != "O" for name in arrays)
                continue
            assert head[:2] not in (b"\x80\x04", b"\x80\x05", b"PK"), f"{path} looks like a pickle"
    with contextlib.closing(sqlite3.connect(run.path / "metrics.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize(("numbers", "asked", "urgent", "cause"), [
    ((), False, False, None),
    ((signal.SIGINT,), True, False, "Ctrl-C"),
    ((signal.SIGINT, signal.SIGINT), True, True, "Ctrl-C"),
    ((signal.SIGTERM,), True, False, "SIGTERM"),
    ((signal.SIGTERM, signal.SIGTERM, signal.SIGTERM), True, False, "SIGTERM"),  # a batch system repeats itself
    ((signal.SIGTERM, signal.SIGINT), True, False, "SIGTERM"),
    ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), True, True, "SIGTERM"),
    ((signal.SIGHUP,), False, False, None),
    ((signal.SIGHUP, signal.SIGHUP), False, False, None),  # a closed window: from the shell and from the kernel
    ((signal.SIGHUP, signal.SIGHUP, signal.SIGTERM), True, False, "SIGTERM"),  # a logout
    ((signal.SIGINT, signal.SIGHUP, signal.SIGHUP), True, False, "Ctrl-C"),
])  # fmt: skip
def test_signals_are_counted_and_never_raise(numbers, asked, urgent, cause):
    before = [signal.getsignal(number) for number in ENDING]
    with Interrupts() as interrupts:
        for number in numbers:
            os.kill(os.getpid(), number)
        assert (interrupts.stop_requested, interrupts.urgent, interrupts.cause) == (asked, urgent, cause)
        assert interrupts.hung_up == (signal.SIGHUP in numbers)
        assert interrupts.count == numbers.count(signal.SIGINT) + (signal.SIGTERM in numbers)
    assert [signal.getsignal(number) for number in ENDING] == before


@pytest.mark.parametrize("how", [
    (), pytest.param(("--json",), marks=pytest.mark.slow), pytest.param(("--mode", "serial"), marks=pytest.mark.slow),
], ids=["panel", "plain", "serial"])  # fmt: skip
def test_a_terminal_that_is_gone_changes_nothing_but_what_is_seen(tmp_path, how):
    """As after ``disown``: nobody says that the terminal is gone, all that is written to it fails."""
    path = tmp_path / "runs" / "run"
    command = [sys.executable, "-m", "spreeze.train", *PENDULUM, *TINY, "--runs-dir", str(path.parent), "--name", "run"]
    with PseudoTerminal([*command, *how], start_new_session=True) as terminal:
        try:

            def updates():
                assert terminal.process.poll() is None, terminal.shown
                return MetricsReader(path / "metrics.db").latest().get("updates", Point(0.0, 0, 0.0)).value

            poll(lambda: updates() > 20, what=lambda: terminal.shown)
            poll(lambda: "updates" in terminal.shown, what="something to see")
            terminal.close()
            for _ in range(3):
                before = updates()
                poll(lambda before=before: updates() > before, what="more updates")
            terminal.process.terminate()
            assert terminal.process.wait(PATIENCE_S) == 0
        finally:
            terminal.process.kill()
            terminal.process.wait()
    summary = json.loads((path / "summary.json").read_text())
    assert summary["stopped_by"] == "interrupt (SIGTERM)"
    assert CheckpointStore(path / "checkpoints").load_latest().updates == summary["updates"]
    assert json.loads((path / "run.json").read_text())["state"] == "finished"


def test_a_terminal_that_stands_still_holds_up_nothing_and_ctrl_z_stops_all(tmp_path):
    path = tmp_path / "runs" / "run"
    command = [sys.executable, "-m", "spreeze.train", *PENDULUM, *TINY, "--runs-dir", str(path.parent), "--name", "run"]
    with PseudoTerminal(command, start_new_session=True) as terminal:
        supervisor = psutil.Process(terminal.process.pid)

        def updates():
            assert terminal.process.poll() is None, terminal.shown
            return MetricsReader(path / "metrics.db").latest().get("updates", Point(0.0, 0, 0.0)).value

        def progress():
            before = updates()
            poll(lambda: updates() > before, what="more updates")

        def states():
            everyone = [supervisor, *supervisor.children(recursive=True)]
            return {process.status() for process in everyone if process.name() != WATCHER} - {psutil.STATUS_ZOMBIE}

        try:
            poll(lambda: updates() > 20 and "updates" in terminal.shown, what=lambda: terminal.shown)
            terminal.press(b"\x13")  # Ctrl-S: whoever writes to it from now on waits
            for _ in range(4):
                progress()
            terminal.process.send_signal(signal.SIGTSTP)
            poll(lambda: states() == {psutil.STATUS_STOPPED}, what=lambda: f"all to be stopped: {states()}")
            terminal.process.send_signal(signal.SIGCONT)
            for _ in range(2):
                progress()
            terminal.process.terminate()
            assert terminal.process.wait(PATIENCE_S) == 0
        finally:
            terminal.process.kill()
            terminal.process.wait()
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["stopped_by"], summary["restarts"]) == ("interrupt (SIGTERM)", 0)
    assert read_run(path)["state"] == "finished"


@pytest.mark.slow
def test_a_hang_up_is_told_once_and_ends_nothing(tmp_path):
    with Run(tmp_path, *PENDULUM) as run:
        run.until_updates(50)
        for _ in range(3):
            os.kill(run.process.pid, signal.SIGHUP)
            run.until_progress()
        run.interrupt()
        code, document = run.end()
        assert code == 0
        _in_order(run, document, "interrupt (Ctrl-C)")
        assert sum("the terminal was closed" in event and str(run.path) in event for event in run.events()) == 1


_SLOW_DISK = """
import os, time
if os.environ.get("SPREEZE_WORKER", "supervisor") == {role!r}:
    sync = os.fsync
    def slow(fd):
        while "tensors" in os.readlink(f"/proc/self/fd/{{fd}}") and os.path.exists({gate!r}):
            time.sleep(0.01)
        sync(fd)
    os.fsync = slow
"""


class SlowDisk:
    """While it is slow, one process's sync of a checkpoint's largest file does not return."""

    def __init__(self, folder, monkeypatch, role):
        self.gate = folder / "slow"
        (folder / "sitecustomize.py").write_text(_SLOW_DISK.format(role=role, gate=str(self.gate)))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)

    def slow(self):
        self.gate.touch()

    def fast(self):
        self.gate.unlink()


def _says_that_it_saves(run):
    return any("waiting for the last checkpoint, " in event and "left to write" in event
               for event in run.events())  # fmt: skip


@pytest.mark.slow
def test_the_last_checkpoint_has_as_long_as_it_needs_and_shows_what_is_left(tmp_path, monkeypatch):
    disk = SlowDisk(tmp_path, monkeypatch, "learner")
    with Run(tmp_path, *PENDULUM) as run:
        run.until_updates(50)
        disk.slow()
        start = time.monotonic()
        run.interrupt()
        run.wait_for(lambda: _says_that_it_saves(run), what="a word on the last checkpoint")
        run.wait_for(lambda: run.state().get("checkpoint_left_bytes"), what="what is left of it")
        run.wait_for(lambda: "of checkpoint left" in run.stderr, what="a line on it")
        stopped = run_command("runs", "--runs-dir", run.runs_dir, "stop", "run", "--timeout", "0.1")
        assert stopped.returncode == 2
        assert "still writes its last checkpoint, " in stopped.stderr
        run.wait_for(lambda: time.monotonic() - start > 7.5, what="longer than a worker gets that does nothing")
        disk.fast()
        code, document = run.end()
        assert code == 0
        _in_order(run, document, "interrupt (Ctrl-C)")
        assert run.state()["checkpoint_left_bytes"] is None


@pytest.mark.slow
def test_a_second_ctrl_c_gives_the_last_checkpoint_up(tmp_path, monkeypatch):
    disk = SlowDisk(tmp_path, monkeypatch, "learner")
    with Run(tmp_path, *PENDULUM) as run:
        run.wait_for(lambda: _has_checkpoint(run), what="a checkpoint")
        run.until_progress()
        disk.slow()
        run.interrupt()
        run.wait_for(lambda: _says_that_it_saves(run), what="a word on the last checkpoint")
        run.interrupt()
        code, document = run.end()  # the disk never becomes fast again
        assert code == 0
        assert document["stopped_by"] == "interrupt (Ctrl-C)"
        assert run.state()["state"] == "finished"
        assert any("in phase CHECKPOINT while stopping; its last checkpoint is used" in event for event in run.events())
        assert 0 < CheckpointStore(run.path / "checkpoints").load_latest().updates < document["updates"]
        assert not list((run.path / "checkpoints").glob(".tmp-*")), "nothing half written takes the disk's room"
        assert run.nonce_processes() == []


def _has_checkpoint(run):
    return CheckpointStore(run.path / "checkpoints").paths()


@pytest.mark.slow
def test_a_second_ctrl_c_gives_the_last_checkpoint_of_one_process_up(tmp_path, monkeypatch):
    disk = SlowDisk(tmp_path, monkeypatch, "supervisor")
    with Run(tmp_path, *PENDULUM, "--mode", "serial", "--set", "learner.checkpoint_interval_s=1") as run:
        run.wait_for(lambda: _has_checkpoint(run), what="a checkpoint")
        run.until_progress()
        disk.slow()
        run.interrupt()
        run.wait_for(lambda: list((run.path / "checkpoints").glob(".tmp-*/tensors*")), what="the last checkpoint")
        run.interrupt()
        disk.fast()
        code, document = run.end()
        assert code == 0
        assert document["stopped_by"] == "interrupt (Ctrl-C)"
        assert run.state()["state"] == "finished"
        assert any("writing the checkpoint failed" in event and "second Ctrl-C" in event for event in run.events())
        assert 0 < CheckpointStore(run.path / "checkpoints").load_latest().updates <= document["updates"]


_UNDYING = """
import os, signal
if "SPREEZE_WORKER" not in os.environ:
    kill_group = os.killpg
    def killpg(pid, number):
        try:
            with open(f"/proc/{pid}/comm") as file:
                name = file.read().strip()
        except OSError:
            name = ""
        if (name, number) != ("evaluator", signal.SIGKILL):
            kill_group(pid, number)
    os.killpg = killpg
"""
_IMPATIENT = """
import sys
import spreeze.runtime.worker_pool
from spreeze.cli import train
spreeze.runtime.worker_pool.DEATH_S = 1.0
sys.exit(train.main())
"""
"""``spreeze train`` that does not wait long for what was killed."""


@pytest.mark.slow
def test_a_process_that_does_not_die_is_named_and_the_run_ends_in_order(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(_UNDYING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with Run(tmp_path, *PENDULUM, program=("-c", _IMPATIENT)) as run:
        run.until_updates(50)
        held = run.wait_for(lambda: run.children().get("evaluator"), what="the evaluator")
        held.suspend()
        run.interrupt()
        code, document = run.end()
        assert code == 0
        _in_order(run, document, "interrupt (Ctrl-C)")
        assert document["error"] is None
        named = f"evaluator (process {held.pid}) does not end on SIGKILL"
        assert any(named in event and "left behind" in event for event in run.events())
