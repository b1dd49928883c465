"""Who heeds which signal: workers none that ask to end, what an environment starts all of them."""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading

import psutil
from harness import PATIENCE_S, REPO, poll

from spreeze.machine import processes
from spreeze.run_directory import new_nonce

_WORKER = """
import sys
from spreeze.machine.processes import ignore_ending_signals
ignore_ending_signals()
sys.stdout.write("listening")
sys.stdout.flush()
sys.stdin.read()
"""
_ENVIRONMENT = """
import json, multiprocessing, signal, subprocess, sys, time
from spreeze.machine.processes import ignore_ending_signals

def idle():
    time.sleep(600)

if __name__ == "__main__":
    ignore_ending_signals()
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
    with processes.signals_blocked():
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
        with processes.signals_blocked():
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # any other thread would take the process's
            assert heard == []
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not set(processes.ENDING) & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_what_an_environment_starts_ends_when_it_is_told_to(tmp_path):
    script = tmp_path / "environment.py"
    script.write_text(_ENVIRONMENT)
    with processes.signals_blocked():
        worker = subprocess.Popen([sys.executable, script], cwd=tmp_path, stdout=subprocess.PIPE, process_group=0,
                                  env={**os.environ, "PYTHONPATH": str(REPO)})  # fmt: skip
    try:
        output, _ = worker.communicate(timeout=PATIENCE_S)
    finally:
        processes.kill_and_wait(worker)
    codes, blocked = json.loads(output)
    assert codes == [-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP, *22 * [-signal.SIGTERM]]
    assert blocked == []


_LEAVES_SOMEBODY = """
import subprocess, sys
from spreeze.machine.processes import MARK
command = [sys.executable, "-c", "import sys; print('here', flush=True); sys.stdin.read()"]
subprocess.Popen(command, env={}, start_new_session=True, cwd="/")
"""


def test_what_a_marked_process_starts_is_found_whatever_session_and_variables_it_has():
    nonce, others = new_nonce(), new_nonce()
    with _begin(_LEAVES_SOMEBODY) as first:
        processes.mark(first.pid, nonce)
        assert first.stdout.readline() == b"here\n"
        first.wait(PATIENCE_S)
        found = [*processes.marked_processes(nonce)]
        assert [process.environ() for process in found] == [{}]
        assert [*processes.marked_processes(others)] == []
        assert processes.end_orphans(others) == 0
        assert processes.end_orphans(nonce) == 1
        poll(lambda: [*processes.marked_processes(nonce)] == [], what="its end")


def test_no_variables_of_other_processes_are_read_where_the_mark_is_a_limit(monkeypatch):
    def refuse(process):
        raise AssertionError("a hung process would never answer")

    monkeypatch.setattr(psutil.Process, "environ", refuse)
    assert [*processes.marked_processes(new_nonce())] == []


def test_where_no_limit_can_mark_the_variable_does(monkeypatch):
    monkeypatch.setattr(processes, "_marks_by_limit", lambda: False)
    nonce = new_nonce()
    with _begin(_WORKER, env={**os.environ, processes.MARK: nonce}) as worker:
        poll(
            lambda: [process.pid for process in processes.marked_processes(nonce)] == [worker.pid], what="its variables"
        )
        assert processes.end_orphans(nonce) == 1


def test_what_a_marked_block_starts_is_found_and_the_process_is_as_it_was():
    before, nonce = resource.getrlimit(processes._RLIMIT_LOCKS), new_nonce()
    with processes.own_mark(nonce):
        child = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
        assert [process.pid for process in processes.marked_processes(nonce)] == [child.pid]
    assert resource.getrlimit(processes._RLIMIT_LOCKS) == before
    assert processes.end_orphans(nonce) == 1
    assert child.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_block_without_limits_marks_what_it_starts_by_the_variable(monkeypatch):
    monkeypatch.delattr(resource, "prlimit")
    nonce = new_nonce()
    with processes.own_mark(nonce):
        child = subprocess.Popen(["sleep", "600"])
        poll(
            lambda: [process.pid for process in processes.marked_processes(nonce)] == [child.pid], what="its variables"
        )
    assert processes.MARK not in os.environ
    assert processes.end_orphans(nonce) == 1
    assert child.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_watcher_is_none_of_the_family_where_it_can_take_no_name(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "_COMM", tmp_path / "none")
    code = "import sys; sys.stdin.read()  # spreeze.machine.watcher"
    with _begin(code) as child:
        poll(lambda: psutil.Process(child.pid).cmdline()[1:2] == ["-c"], what="its command")
        assert child.pid not in {process.pid for process in processes.family()}
        child.kill()


_HAS_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
child.wait()
"""
_WITHOUT_SIGNAL = """
import os, time
from spreeze.machine import processes
processes.ctypes.CDLL = lambda *args, **options: object()
processes.end_with_parent()
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_process_that_no_signal_tells_notices_the_end_of_its_parent():
    command = [sys.executable, "-c", _HAS_CHILD, _WITHOUT_SIGNAL]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
        poll(lambda: not psutil.pid_exists(pid), what="the end of its child")


def test_a_process_that_does_not_die_is_no_error(monkeypatch):
    with _begin(_WORKER, process_group=0) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", lambda pid, number: None)
            assert processes.kill_and_wait(worker, 0.05) is None
        assert f"learner (process {worker.pid}) does not end" in processes.unkillable_message("learner", worker.pid)
        assert processes.kill_and_wait(worker) == -signal.SIGKILL
        assert processes.kill_and_wait(worker) == -signal.SIGKILL, "once more does no harm"
