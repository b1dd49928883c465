"""A learner's process that loads while the run is decided: it becomes the learner, or leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from harness import PATIENCE_S, PENDULUM, REPO, Run, poll, train

from spreeze.machine.hardware import read_machine
from spreeze.machine.logs import LogKeeper
from spreeze.runtime.launcher import Prewarm, RunContext, WorkerSpec
from spreeze.transport.status_table import StatusTable
from spreeze.types import Jsonable
from spreeze.workers.main import install_fds, receive
from spreeze.workers.roles import Address

pytestmark = pytest.mark.warm
_TWO_CORES = pytest.mark.skipif(read_machine().cores.usable < 2, reason="a head start takes a core of its own")
_HOLDER = """
import sys, time
from spreeze.runtime.launcher import Prewarm
held = Prewarm(1)
print(held._process.pid, flush=True)
sys.stdin.read()
"""


def _began_early(process):
    return process.cmdline()[3] == "--wait"


@pytest.mark.cold  # its command line is looked at
@_TWO_CORES
def test_the_first_learner_of_a_run_loads_beforehand_and_a_restarted_one_is_fresh(tmp_path):
    with Run(tmp_path, *PENDULUM, "--no-evaluator", "--set", "learner.checkpoint_interval_s=0.5") as run:
        run.until_updates(20)
        first = run.children()["learner"]
        assert _began_early(first)
        assert first.environ()["OMP_NUM_THREADS"] == "1"
        os.kill(first.pid, signal.SIGKILL)
        run.wait_for(lambda: run.children().get("learner") not in (None, first), what="another learner")
        assert not _began_early(run.children()["learner"])
        run.until_progress()
        code, document = run.stop()
    assert code == 0
    assert document["restarts"] == 1


@_TWO_CORES
def test_what_an_early_learner_prints_is_in_its_log(tmp_path):
    with Run(tmp_path, *PENDULUM) as run:
        run.until_updates(20)
        os.kill(run.children()["learner"].pid, signal.SIGUSR1)  # writes the stacks of its threads
        log = run.path / "logs" / "learner.log"
        run.wait_for(lambda: "most recent call first" in log.read_text(), what="a stack in the log")
        assert run.stop()[0] == 0


@pytest.mark.cold  # processes are known by their variables
def test_a_run_that_is_refused_leaves_no_process(tmp_path):
    run, code, _ = train(tmp_path, "--env", "NoSuchTask-v0")
    assert code == 2
    assert "NoSuchTask-v0" in run.stderr
    assert [process.pid for process in psutil.process_iter() if _is_of_this_test(process)] == []


def _is_of_this_test(process):
    """Whether a living process, orphans included, was begun by this test."""
    try:
        mine = process.environ().get("PYTEST_CURRENT_TEST") == os.environ["PYTEST_CURRENT_TEST"]
        return mine and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_it_ends_with_its_holder_however_that_ends():
    command = [sys.executable, "-c", _HOLDER]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO, text=True)
    with holder:
        waiting = psutil.Process(int(holder.stdout.readline()))
        holder.kill()
        holder.wait(timeout=PATIENCE_S)
    gone = lambda: not waiting.is_running() or waiting.status() == psutil.STATUS_ZOMBIE  # noqa: E731
    poll(gone, what="the end of the waiting process")


def test_it_ends_where_nobody_takes_it():
    with Prewarm(1) as held:
        waiting = psutil.Process(held._process.pid)
    assert held._process is None
    assert not waiting.is_running()


def test_no_process_is_begun_where_none_is_wanted():
    before = len(psutil.Process().children())
    with Prewarm(1, wanted=False) as held:
        assert held._process is None
        assert len(psutil.Process().children()) == before
        assert len(held.nonce) == 16


@dataclass(frozen=True)
class ReplayLearnerJob(Jsonable):
    """Lacks all fields of the real one."""


class _Started:
    """A learner's start by a ``Prewarm``, whose job no learner can read: it ends with an error at once."""

    def __init__(self, held, tmp_path, threads=1, nonce=None):
        (tmp_path / "logs").mkdir(exist_ok=True)
        self._status, self._logs = StatusTable.create(1), LogKeeper()
        run_context = RunContext(run_dir=tmp_path, status=self._status, nonce=nonce or held.nonce, logs=self._logs)
        spec = WorkerSpec(address=Address("learner"), row=0, job=ReplayLearnerJob(), threads=threads)
        self.child = held.start(spec, run_context)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.child.kill_and_wait()
        self.child.close()
        self._logs.close()
        self._status.close()

    def error(self):
        """What it says of its end."""
        messages = []
        poll(lambda: messages.extend(self.child.read_messages()) or messages, what="the worker's message")
        return messages[0]["error"]


def test_job_and_descriptors_arrive_in_the_waiting_process(tmp_path):
    with Prewarm(1) as held:
        waiting = held._process.pid
        with _Started(held, tmp_path) as started:
            assert started.child.pid == waiting
            assert held._process is None
            assert "test_prewarm" in started.error(), "the class of the job is none that a worker can import"
    assert "Traceback" in (tmp_path / "logs" / "learner.log").read_text()


def test_a_waiting_process_that_takes_its_job_at_once_is_used(tmp_path, monkeypatch):
    def send_and_see_the_end(line, messages, fds):
        sent = send_fds(line, messages, fds)
        assert line.recv(1) == b"", "it has read all and closed its end"
        return sent

    send_fds = socket.send_fds
    with Prewarm(1) as held:
        waiting = held._process.pid
        held._line.settimeout(PATIENCE_S)
        monkeypatch.setattr(socket, "send_fds", send_and_see_the_end)
        with _Started(held, tmp_path) as started:
            assert started.child.pid == waiting


@pytest.mark.parametrize("other", [{"threads": 2}, {"nonce": "another run's"}])
def test_a_learner_that_it_does_not_fit_is_a_fresh_process(tmp_path, other):
    with Prewarm(1) as held:
        waiting = psutil.Process(held._process.pid)
        with _Started(held, tmp_path, **other) as started:
            assert started.child.pid != waiting.pid
            assert not waiting.is_running(), "it would wait in vain"
            assert started.error()


def test_a_fresh_process_takes_over_where_the_waiting_one_was_killed(tmp_path):
    with Prewarm(1) as held:
        waiting = psutil.Process(held._process.pid)
        waiting.kill()
        poll(lambda: waiting.status() == psutil.STATUS_ZOMBIE, what="the end of the waiting process")
        with _Started(held, tmp_path) as started:
            assert started.child.pid != waiting.pid
            assert started.error()


def test_a_long_message_arrives_whole_with_its_descriptors(tmp_path):
    here, there = socket.socketpair()
    with here, there, open(tmp_path / "file", "w+") as file:
        line = b"x" * 100_000 + b"\n"
        sent = socket.send_fds(here, [line], [file.fileno()])
        here.sendall(line[sent:])
        data, fds = receive(there)
    assert data == line
    assert [os.readlink(f"/proc/self/fd/{fd}") for fd in fds] == [str(tmp_path / "file")]
    os.close(fds[0])


@pytest.mark.parametrize("cut", [0, 50])
def test_a_message_that_was_cut_off_is_none(cut):
    here, there = socket.socketpair()
    with there:
        with here:
            here.sendall(b"x" * cut)
        assert receive(there) == (b"", [])


def test_descriptors_get_the_numbers_that_the_job_knows(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    fds = [os.open(path, os.O_CREAT | os.O_RDWR) for path in paths]
    highest = max(fds)
    places = [fds[1], fds[0], highest + 10]  # two of them swap their numbers
    install_fds(fds, places)
    try:
        assert [os.readlink(f"/proc/self/fd/{number}") for number in places] == [str(path) for path in paths]
        assert not Path(f"/proc/self/fd/{fds[2]}").exists()
        assert not os.get_inheritable(places[0])
    finally:
        for number in places:
            os.close(number)


def test_a_number_in_use_is_never_taken(tmp_path):
    with open(tmp_path / "in use", "w") as used:
        fd = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
        with pytest.raises(OSError, match="in use"):
            install_fds([fd], [used.fileno()])
        assert os.readlink(f"/proc/self/fd/{used.fileno()}") == str(tmp_path / "in use")
        for left in os.listdir("/proc/self/fd"):
            name = f"/proc/self/fd/{left}"
            if os.path.lexists(name) and os.readlink(name) == str(tmp_path / "other"):
                os.close(int(left))
