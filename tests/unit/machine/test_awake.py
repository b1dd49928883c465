"""The clock that stands still while the process does not run."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest
from harness import PATIENCE_S, poll

from spreeze.cli import train
from spreeze.machine.awake import AwakeClock
from spreeze.machine.processes import resume_family, stop_family
from spreeze.run_directory import RunDir, send_request
from spreeze.runtime.interrupts import Interrupts


class Times:
    """A machine's time and a process's processor time, as a test sets them."""

    def __init__(self):
        self.now_s = self.used_s = 0.0
        self.clock = AwakeClock(lambda: self.now_s, lambda: self.used_s)

    def pass_time(self, seconds, used_s=0.0):
        self.now_s += seconds
        self.used_s += used_s
        return self.clock()


def test_a_long_gap_without_work_is_sleep_and_leaves_the_clock_where_it_was():
    times = Times()
    with times.clock.watched():
        assert times.pass_time(1.0) == 1.0
        assert times.pass_time(3600.0) == 1.0
        assert times.pass_time(2.0) == 3.0
    assert times.clock.slept_s == 3600.0


def test_a_process_that_computes_or_that_nobody_watches_does_not_sleep():
    times = Times()
    assert times.pass_time(60.0) == 60.0
    with times.clock.watched():
        assert times.pass_time(60.0, used_s=59.0) == 120.0
    assert times.clock.slept_s == 0.0


def test_after_a_continuation_a_short_gap_is_sleep_too():
    times = Times()
    with times.clock.watched():
        times.pass_time(1.0)
        times.now_s += 2.0
        times.clock.continued()
        assert times.clock() == 1.0
        times.now_s += 0.1
        times.clock.continued()
        assert times.clock() == 1.1


_FAMILY = """
import subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"], start_new_session=True)
            for _ in range(2)]
print("\\n".join(str(child.pid) for child in children), flush=True)
time.sleep(10_000)
"""


def test_a_family_is_stopped_and_goes_on_but_for_what_was_stopped_before():
    with subprocess.Popen([sys.executable, "-c", _FAMILY], stdout=subprocess.PIPE, text=True) as parent:
        kin = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
        try:
            kin[0].suspend()
            poll(lambda: kin[0].status() == psutil.STATUS_STOPPED, what="a stopped grandchild")
            stopped = stop_family()
            assert {process.pid for process in stopped} == {parent.pid, kin[1].pid}
            poll(lambda: all(process.status() == psutil.STATUS_STOPPED for process in stopped), what="all stopped")
            resume_family(stopped)
            poll(lambda: all(process.status() != psutil.STATUS_STOPPED for process in stopped), what="going on")
            assert kin[0].status() == psutil.STATUS_STOPPED
        finally:
            for process in kin:
                process.kill()
            parent.kill()


_STOPPED = """
import sys, time
from spreeze.machine.awake import AWAKE
from spreeze.runtime.interrupts import Interrupts
with Interrupts() as interrupts:
    interrupts.on_stop = lambda: print("stop", flush=True)
    began_s, began_awake_s = time.monotonic(), AWAKE()
    print("ready", flush=True)
    while not interrupts.stop_requested:
        time.sleep(0.01)
    print(time.monotonic() - began_s - (AWAKE() - began_awake_s), AWAKE.slept_s, flush=True)
"""


def test_ctrl_z_stops_a_process_without_a_shell_too_and_its_clock_with_it():
    with subprocess.Popen([sys.executable, "-c", _STOPPED], stdout=subprocess.PIPE, text=True,
                          start_new_session=True) as process:  # fmt: skip
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTSTP)
            assert process.stdout.readline() == "stop\n"
            inside = psutil.Process(process.pid)
            poll(lambda: inside.status() == psutil.STATUS_STOPPED, what="it to be stopped")
            process.send_signal(signal.SIGCONT)
            assert process.stdout.readline() == "stop\n"
            process.send_signal(signal.SIGINT)
            left_out_s, slept_s = map(float, process.communicate(timeout=PATIENCE_S)[0].split())
            assert left_out_s == slept_s > 0.0 or abs(left_out_s - slept_s) < 1e-3
        finally:
            process.kill()


def test_handlers_are_as_before_once_nobody_counts_interrupts():
    numbers = (signal.SIGTSTP, signal.SIGCONT, signal.SIGTTOU, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    with Interrupts():
        os.kill(os.getpid(), signal.SIGTTOU)  # would stop this process
    assert [signal.getsignal(number) for number in numbers] == before


_HELD_UP = """
import os, signal, subprocess, sys
from spreeze.runtime.interrupts import Interrupts
with Interrupts() as interrupts:
    interrupts.on_exit = lambda reason: print(reason, flush=True)
    child = subprocess.Popen(["sleep", "1000"], process_group=0)
    print(child.pid, flush=True)
    open(sys.argv[1])  # a pipe that nobody writes into
"""


def test_a_second_ctrl_c_ends_a_process_that_is_held_up_with_all_that_it_has_started(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen([sys.executable, "-c", _HELD_UP, str(tmp_path / "pipe")], stdout=subprocess.PIPE, text=True,
                          start_new_session=True) as process:  # fmt: skip
        child = psutil.Process(int(process.stdout.readline()))
        try:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            psutil.wait_procs([child], timeout=0.5)
            assert process.poll() is None, "one Ctrl-C is no hurry"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=PATIENCE_S)[0] == "interrupted and killed\n"
            assert process.returncode == 130
            poll(lambda: not child.is_running(), what="the end of what it has started")
        finally:
            process.kill()


_DEAF = """
import itertools, os, subprocess
from spreeze.machine.processes import own_mark
from spreeze.machine.watcher import OrphanWatch
from spreeze.runtime.interrupts import Interrupts
nonce = f"{os.getpid():016x}"
with Interrupts() as interrupts, OrphanWatch(nonce) as guard, interrupts.guarded_by(guard), own_mark(nonce):
    child = subprocess.Popen(["sleep", "1000"], process_group=0)
    print(child.pid, flush=True)
    all(itertools.repeat(True))  # no other thread runs, and no handler of a signal
"""
_SILENT = _DEAF.replace("OrphanWatch(nonce)", "OrphanWatch(nonce, silent_s=1.0)")


@pytest.mark.parametrize("script", [_DEAF, _SILENT], ids=["second Ctrl-C", "silent"])
def test_code_that_lets_no_other_run_is_ended_from_outside(script):
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                          start_new_session=True) as process:  # fmt: skip
        child = psutil.Process(int(process.stdout.readline()))
        try:
            for _ in range(2 * (script is not _SILENT)):
                process.send_signal(signal.SIGINT)
                psutil.wait_procs([child], timeout=0.1)  # two that come at once are one
            assert process.wait(PATIENCE_S) < 0
            poll(lambda: not child.is_running(), what="the end of what it has started")
        finally:
            process.kill()
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def test_a_run_pauses_while_the_program_that_called_train_is_stopped(tmp_path):
    run_dir = RunDir.create(tmp_path, "run")
    with subprocess.Popen(["sleep", "1000"]) as caller:
        look = train._pause_with(caller.pid, run_dir)
        try:
            look()
            assert not run_dir.requested("pause")
            caller.send_signal(signal.SIGSTOP)
            poll(lambda: look() or run_dir.requested("pause"), what="a pause")
            caller.send_signal(signal.SIGCONT)
            poll(lambda: look() or not run_dir.requested("pause"), what="its end")
            send_request(run_dir.path, "pause")  # the user's own
            look()
            assert run_dir.requested("pause")
        finally:
            caller.kill()
            run_dir.close()
