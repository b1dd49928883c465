"""Tests start processes warm: what such a process finds, and how it ends, is what a fresh interpreter finds and how."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import warm
from harness import PATIENCE_S, REPO, SUPPORT, poll

pytestmark = [pytest.mark.warm, pytest.mark.skipif(sys.platform != "linux", reason="tests start warm on Linux")]
PROGRAM = [sys.executable, "-m", "process_facts"]
PATHS = f"{SUPPORT}{os.pathsep}{REPO}"


def started(*arguments, variables=None, **options):
    """A process that tells what it finds; ``variables`` are set as well."""
    env = {**os.environ, "PYTHONPATH": PATHS, **(variables or {})}
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": REPO} | options
    return subprocess.Popen([*PROGRAM, *arguments], env=env, **options)


@contextlib.contextmanager
def ignoring(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def blocking(*numbers):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def limited():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 7, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def masking():
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def on_one_core():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


CASES = {
    "plain": (contextlib.nullcontext, {}),
    "session": (contextlib.nullcontext, {"start_new_session": True}),
    "group": (contextlib.nullcontext, {"process_group": 0}),
    "folder": (contextlib.nullcontext, {"cwd": "/tmp"}),
    "one stream": (contextlib.nullcontext, {"stderr": subprocess.STDOUT}),
    "variables": (contextlib.nullcontext, {"variables": {
        "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "SPREEZE_X": "\udcff é", "PYTHONPATH": f"/none:{PATHS}"}}),
    "ignored": (lambda: ignoring(signal.SIGINT), {}),
    "blocked": (lambda: blocking(signal.SIGINT, signal.SIGTERM), {}),
    "limits": (limited, {}),
    "umask": (masking, {}),
    "cores": (on_one_core, {}),
}  # fmt: skip


def told_by(process):
    out, _ = process.communicate(timeout=PATIENCE_S)
    told = json.loads(out.splitlines()[0])
    told["descriptors"].pop("400", None)  # the line to its own nursery
    for entry in told["descriptors"].values():  # numbers of pipes and of the process differ
        entry[0] = entry[0].partition("[")[0].replace(str(process.pid), "PID")
    return told


@pytest.mark.parametrize("case", CASES)
def test_a_warm_process_finds_what_a_fresh_one_finds(case, warm_starts):
    around, options = CASES[case]
    reader, writer = os.pipe()
    try:
        found = []
        for warm_starts.wanted in (True, False):
            with around(), started("7", pass_fds=(writer,), **options) as process:
                assert (warm_starts.latest == process.pid) is warm_starts.wanted
                found.append(told_by(process))
            assert process.returncode == 7
        assert found[0] == found[1]
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(("end", "code", "words"), [("raise", 1, "raised"), ("kill", -9, ""), ("exit", 3, "")])
def test_a_warm_process_ends_as_a_fresh_one_does(end, code, words, warm_starts):
    with started(end, text=True) as process:
        assert warm_starts.latest == process.pid
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert words in errors


def test_a_warm_process_is_a_child_of_its_caller_and_its_nursery_ends_with_it(warm_starts):
    with started("wait", stdin=subprocess.PIPE) as process:
        process.stdout.readline()
        found = psutil.Process(process.pid)
        assert found.ppid() == os.getpid()
        (nursery,) = found.children()
        process.kill()
    poll(lambda: not nursery.is_running() or nursery.status() == psutil.STATUS_ZOMBIE, what="the end of the nursery")


def test_where_the_nursery_was_killed_the_next_process_begins_another(monkeypatch):
    first, begun = warm.FirstNursery(), []

    def begin(self):
        begun.append(SimpleNamespace(code=None))
        self.process = SimpleNamespace(poll=lambda: begun[-1].code)
        self._nursery = SimpleNamespace(start=lambda told, fds: 100 * len(begun) + told["number"])

    monkeypatch.setattr(warm.FirstNursery, "_begin", begin)
    assert [first.start({"number": number}, []) for number in (1, 2)] == [101, 102]
    begun[-1].code = -signal.SIGKILL
    assert first.start({"number": 3}, []) == first.latest == 203


def test_limits_that_a_caller_sets_at_once_hold(warm_starts):
    for _ in range(3):
        with started("wait", stdin=subprocess.PIPE) as process:
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (7, 7))
            limits = json.loads(process.stdout.readline())["limits"]
            assert resource.prlimit(process.pid, resource.RLIMIT_CORE) == (7, 7), limits
            process.stdin.close()


@pytest.mark.cold
def test_a_test_that_is_marked_cold_starts_fresh_interpreters(warm_starts):
    with started() as process:
        process.communicate(timeout=PATIENCE_S)
    assert warm_starts.latest != process.pid
