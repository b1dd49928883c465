"""Every launcher starts workers that speak, are killed, are seen to end, and leave nothing behind."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest
from harness import PATIENCE_S, REPO, SUPPORT, poll

from spreeze.config.layers import Layer, resolve
from spreeze.envs.probe import probe_env
from spreeze.machine.hardware import CoreFacts, read_machine
from spreeze.machine.logs import LogKeeper
from spreeze.machine.processes import LOW_PRIORITY
from spreeze.modes import assemble
from spreeze.runtime import launcher
from spreeze.runtime.assembly import assembled
from spreeze.runtime.launcher import Launcher, Prewarm, RunContext, group_arguments
from spreeze.runtime.plan import RunPlan
from spreeze.transport import status_table
from spreeze.workers.roles import Phase

_HOLDER = """
import sys, time
from pathlib import Path
sys.path[:0] = {modules!r}
import test_launcher
with test_launcher.worker(Path({folder!r}), test_launcher.LAUNCHERS[{name!r}]) as (process, status):
    test_launcher.until_messages(process, "started")
    print(process.pid, flush=True)
    time.sleep({patience})
"""


class Recording:
    """A launcher of a test: starts by the usual one, and notes whom."""

    def __init__(self):
        self.started = []

    def start(self, spec, run_context):
        self.started.append(spec.name)
        return Launcher().start(spec, run_context)


LAUNCHERS = {"prewarmed": lambda: Prewarm(1), "recording": Recording}
every_launcher = pytest.mark.parametrize("name", [
    "recording", pytest.param("prewarmed", marks=pytest.mark.skipif(
        read_machine().cores.usable < 2, reason="loading beforehand takes a core of its own")),
])  # fmt: skip


@contextlib.contextmanager
def worker(folder, make, *, gives_way=False):
    """A learner that waits for rows that nobody writes, and its status table."""
    (folder / "logs").mkdir()
    values = {"sac": {"hidden_sizes": [8]}, "learner": {"batch_size": 8}, "replay": {"capacity": 20_000}}
    plan = RunPlan(settings=resolve([Layer("test", values)]), spec=probe_env("Pendulum-v1", steps=0).spec, samplers=1,
                   free_core=False)  # fmt: skip
    with contextlib.ExitStack() as stack:
        launcher = make()
        if isinstance(launcher, Prewarm):
            stack.enter_context(launcher)
        run = stack.enter_context(assembled(assemble, plan, folder, time.monotonic()))
        logs = stack.enter_context(LogKeeper())
        nonce = getattr(launcher, "nonce", "contract")
        run_context = RunContext(run_dir=folder, status=run.status, nonce=nonce, gives_way=gives_way, logs=logs)
        process = launcher.start(run.specs["learner"], run_context)
        try:
            yield process, run.status
        finally:
            process.kill_and_wait()
            process.close()


def until_messages(process, kind):
    """The messages up to one of that kind."""
    found = []

    def said():
        found.extend(process.read_messages())
        assert process.poll() is None, "it ended"
        return any(message["kind"] == kind for message in found)

    poll(said, what=f"a message of kind {kind}")
    return found


@pytest.mark.warm
@every_launcher
def test_a_worker_starts_speaks_is_killed_and_its_end_is_seen(tmp_path, name):
    with worker(tmp_path, LAUNCHERS[name]) as (process, status):
        assert {message["from"] for message in until_messages(process, "started")} == {"learner"}
        assert process.spec.name == "learner"
        poll(
            lambda: status.control(process.spec.row)[status_table.PHASE] == Phase.WAIT,
            what="a learner that waits for rows",
        )
        assert status.control(process.spec.row)[status_table.PID] == process.pid
        process.signal_group(signal.SIGKILL)
        poll(lambda: process.poll() is not None, what="its end")
        assert process.poll() == -signal.SIGKILL
        assert {message["kind"] for message in process.read_messages()} <= {"metrics"}, "it may report while it waits"
        assert process.read_messages() == []
        assert process.kill_and_wait() == -signal.SIGKILL, "who has ended can be killed again"


@pytest.mark.warm
@every_launcher
def test_a_worker_that_was_asked_to_stop_ends_by_itself(tmp_path, name):
    with worker(tmp_path, LAUNCHERS[name]) as (process, status):
        until_messages(process, "started")
        status.header[status_table.STOP] = 1
        poll(lambda: process.poll() is not None, what="its end")
        assert process.poll() == 0
        assert [message["kind"] for message in process.read_messages()][-1] == "finished", "last words are not lost"


@every_launcher
def test_a_closed_process_leaves_no_descriptor(tmp_path, name):
    before = set(os.listdir("/proc/self/fd"))
    with worker(tmp_path, LAUNCHERS[name]) as (process, _):
        assert str(process.message_fd) not in before
    assert set(os.listdir("/proc/self/fd")) == before


AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")


@pytest.mark.parametrize("name", ["fresh", "prewarmed"])
def test_a_worker_that_gives_way_has_a_low_priority_within_its_session_and_beyond(tmp_path, name):
    make = {"fresh": Launcher, "prewarmed": lambda: Prewarm(1, gives_way=True)}[name]
    with worker(tmp_path, make, gives_way=True) as (process, _):
        until_messages(process, "started")
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + LOW_PRIORITY
        assert os.getpgid(process.pid) == process.pid
        if AUTOGROUPS.exists() and AUTOGROUPS.read_text().strip() == "1":
            assert os.getsid(process.pid) == process.pid
            assert Path(f"/proc/{process.pid}/autogroup").read_text().split()[-1] == str(LOW_PRIORITY)


@pytest.mark.parametrize(("enabled", "gives_way", "cores", "own"), [
    ("1\n", False, 1.0, True), ("1\n", False, 2.0, True), ("1\n", False, 4.0, False), ("1\n", True, 64.0, True),
    ("0\n", True, 2.0, False), (None, True, 2.0, False),
])  # fmt: skip
def test_workers_lead_sessions_where_the_kernel_shares_few_cores_by_session_or_the_run_gives_way(
    tmp_path, enabled, gives_way, cores, own
):
    """Whichever it is, each leads its process group: by ``setsid``, or by ``setpgid``, never by both."""
    if enabled is not None:
        (tmp_path / "autogroups").write_text(enabled)
    facts = CoreFacts(ids=tuple(range(int(cores))), quota=None, usable=cores, physical=None, reason="as told")
    how = group_arguments(gives_way, facts, tmp_path / "autogroups")
    assert how == {"process_group": None if own else 0, "start_new_session": own}


@every_launcher
def test_a_worker_leads_a_process_group_and_dies_with_its_supervisor(tmp_path, name):
    code = _HOLDER.format(
        modules=[str(Path(__file__).parent), str(SUPPORT)], folder=str(tmp_path), name=name, patience=PATIENCE_S
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=REPO, text=True) as holder:
        process = psutil.Process(int(holder.stdout.readline()))
        assert os.getpgid(process.pid) == process.pid
        holder.kill()
        holder.wait(timeout=PATIENCE_S)
    poll(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, what="the worker's end")


def test_a_launcher_that_cannot_start_a_worker_raises_and_leaves_no_descriptor(tmp_path, monkeypatch):
    before = set(os.listdir("/proc/self/fd"))

    def refuse(*args, **kwargs):
        raise OSError("no more processes")

    monkeypatch.setattr("spreeze.runtime.launcher.subprocess.Popen", refuse)
    with pytest.raises(OSError, match="no more processes"), worker(tmp_path, Launcher):
        pass
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_start_that_gets_only_one_of_its_pipes_leaves_no_descriptor(tmp_path, monkeypatch):
    before, made = set(os.listdir("/proc/self/fd")), []

    def pipe():
        if made:
            raise OSError(errno.EMFILE, "too many open files")
        made.append(os.pipe())
        return made[0]

    monkeypatch.setattr(launcher, "os", types.SimpleNamespace(**{**vars(os), "pipe": pipe}))
    with pytest.raises(OSError, match="too many open files"), worker(tmp_path, Launcher):
        pass
    assert made
    assert set(os.listdir("/proc/self/fd")) == before
