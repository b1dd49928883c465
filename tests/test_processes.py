"""Who heeds which signal: workers none that ask to end, what an environment starts all of them."""

import json
import os
import select
import signal
import subprocess
import sys
import threading

from harness import PATIENCE_S, REPO, poll

from spreeze.machine import processes

_WORKER = """
import sys
from spreeze.machine.processes import leave_to_supervisor
leave_to_supervisor()
sys.stdout.write("listening")
sys.stdout.flush()
sys.stdin.read()
"""
_ENVIRONMENT = """
import json, multiprocessing, signal, subprocess, sys, time
from spreeze.machine.processes import leave_to_supervisor

def idle():
    time.sleep(600)

if __name__ == "__main__":
    leave_to_supervisor()
    codes = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        helper = subprocess.Popen(["sleep", "600"])
        helper.send_signal(number)
        codes.append(helper.wait())
    for method in (*20 * ("fork",), "forkserver", "spawn"):
        helper = multiprocessing.get_context(method).Process(target=idle)
        helper.start()
        helper.terminate()
        helper.join()
        codes.append(helper.exitcode)
    print(json.dumps([codes, sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))]))
"""


def _begin(script, **options):
    return subprocess.Popen([sys.executable, "-c", script], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            **options)  # fmt: skip


def test_no_signal_ends_a_worker_from_its_first_moment_on():
    with processes.held_back():
        worker = _begin(_WORKER)

    def listens():
        # Most of these come before Python itself has started.
        for number in processes.ENDING:
            worker.send_signal(number)
        assert worker.poll() is None, "a signal ended it"
        return select.select([worker.stdout], [], [], 0.0)[0]

    with worker:
        poll(listens, what="its first word")
        worker.stdin.close()
        assert worker.wait(PATIENCE_S) == 0


def test_a_signal_that_came_meanwhile_is_heard_after_the_block():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with processes.held_back():
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # any other thread would take the process's
            assert heard == []
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not set(processes.ENDING) & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_what_an_environment_starts_ends_when_it_is_told_to(tmp_path):
    script = tmp_path / "environment.py"
    script.write_text(_ENVIRONMENT)
    with processes.held_back():
        worker = subprocess.Popen([sys.executable, script], cwd=tmp_path, stdout=subprocess.PIPE, process_group=0,
                                  env={**os.environ, "PYTHONPATH": str(REPO)})  # fmt: skip
    try:
        output, _ = worker.communicate(timeout=PATIENCE_S)
    finally:
        processes.kill_and_wait(worker)
    codes, blocked = json.loads(output)
    assert codes == [-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP, *22 * [-signal.SIGTERM]]
    assert blocked == []


def test_a_process_that_does_not_die_is_no_error(monkeypatch):
    with _begin(_WORKER, process_group=0) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", lambda pid, number: None)
            assert processes.kill_and_wait(worker, 0.05) is None
        assert f"learner (process {worker.pid}) does not end" in processes.left_behind("learner", worker.pid)
        assert processes.kill_and_wait(worker) == -signal.SIGKILL
        assert processes.kill_and_wait(worker) == -signal.SIGKILL, "once more does no harm"
