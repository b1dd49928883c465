"""Which processes belong to Spreeze, and two real runs that share the cores without resting because of each other."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PATIENCE_S, PENDULUM, REPO, SUPPORT, TINY, Run, poll

from spreeze.machine.processes import PAGE, PREWARM, PROBE
from spreeze.machine.utilisation import ExemptProcesses
from spreeze.metrics.store import MetricsReader
from spreeze.runtime.cpu_governor import BACKGROUND_CORES
from spreeze.runtime.launcher import Prewarm
from spreeze.workers.roles import role_of

GOVERNED = (*(flag for flag in TINY if flag != "--no-governor"), "--give-way")
QUIET_RUN = (str(SUPPORT / "quiet_run.py"),)


class Proc:
    """A made-up ``/proc``: process id -> (name, parent, group)."""

    def __init__(self, root):
        self.root = root
        (root / "self").mkdir()
        (root / "stat").write_text("cpu 1 2 3\n")

    def put(self, pid, name, parent=1, group=None, nice=0):
        (self.root / str(pid)).mkdir(exist_ok=True)
        group = pid if group is None else group
        (self.root / str(pid) / "stat").write_text(
            f"{pid} ({name}) S {parent} {group} {group} 0 -1 4194560 9 9 0 0 0 0 0 0 {20 + nice} {nice} 1\n"
        )


@pytest.fixture
def proc(tmp_path):
    return Proc(tmp_path)


def test_workers_and_named_processes_are_siblings_and_so_are_those_who_started_a_worker(proc):
    proc.put(10, "python")
    proc.put(11, "sampler-0", parent=10)
    proc.put(12, "learner", parent=10)
    proc.put(13, "spreeze-early", parent=10)
    proc.put(20, "bash")
    proc.put(21, PAGE, parent=20)
    proc.put(30, "learner", group=29)  # of somebody else: ours lead their groups
    proc.put(31, "samplers")
    proc.put(32, "a ) (learner) S 1 32", group=32)
    proc.put(33, "spreezer")
    assert ExemptProcesses(proc.root, role_of).find(ours=()) == ({11, 12, 13, 21}, {10})
    assert ExemptProcesses(proc.root, role_of).find(ours={10, 11, 12, 13}) == ({21}, set())


def test_what_runs_at_low_priority_gives_way_by_itself_and_is_no_external_load(proc, monkeypatch):
    proc.put(11, "backup", nice=19)
    proc.put(12, "make", nice=10)
    proc.put(13, "compiler", nice=9)
    assert ExemptProcesses(proc.root, role_of).find(ours=()) == ({11, 12}, set())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert ExemptProcesses(proc.root, role_of).find(ours={12}) == ({11}, set())


def test_processes_of_another_user_are_external(proc, monkeypatch):
    proc.put(11, "sampler-0")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert ExemptProcesses(proc.root, role_of).find(ours=()) == (set(), set())


def test_a_process_that_ends_while_it_is_looked_at_is_left_out(proc):
    proc.put(11, "sampler-0")
    (proc.root / "12").mkdir()
    (proc.root / "13").mkdir()
    (proc.root / "13" / "stat").write_text("")
    assert ExemptProcesses(proc.root, role_of).find(ours=())[0] == {11}


def test_a_name_that_is_taken_late_is_seen_within_eight_looks_and_a_number_with_a_new_owner_at_once(proc):
    exempt = ExemptProcesses(proc.root, role_of)
    proc.put(11, "python")
    seen = []
    for look in range(1, 40):
        if look == 2:
            proc.put(12, "python")  # due at looks 3, 5, 9, 17, 25, 33
        if look == 18:
            proc.put(12, "learner", parent=11)
        seen.append(exempt.find(ours=())[0])
        if look == 30:
            proc.put(12, "bash")
    assert [index + 1 for index, roots in enumerate(seen) if roots == {12}] == list(range(25, 31))
    assert seen[30:] == [set()] * 9


def name_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()


@contextlib.contextmanager
def running(*command, **options):
    """A child process, killed at the end."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, **options)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def test_what_measures_once_has_its_name_before_it_loads_anything(tmp_path):
    (tmp_path / "made_up.py").write_text(
        "import sys, time\nassert __name__ == '__main__'\nopen(sys.argv[1], 'w').write(' '.join(sys.argv[1:]))\n"
        "time.sleep(10_000)\n"
    )
    said = tmp_path / "said"
    with running(
        sys.executable,
        "-m",
        "spreeze.machine.processes",
        PROBE,
        "made_up",
        str(said),
        "b",
        process_group=0,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{tmp_path}"},
    ) as child:
        poll(lambda: said.exists() and said.read_text() == f"{said} b", what="the module's first line")
        assert name_of(child.pid) == PROBE
        roots, parents = ExemptProcesses(Path("/proc"), role_of).find(ours=())
        assert child.pid in roots
        assert os.getpid() in parents


def test_a_learner_that_waits_for_its_job_and_one_that_tries_an_environment_are_siblings(tmp_path):
    with Prewarm(1) as head_start:
        poll(lambda: name_of(head_start._process.pid) == PREWARM, what="its name")
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(10_000)\n")
    job = {"what": "time", "limit_s": PATIENCE_S, "folder": str(tmp_path),
           "task": {"env_id": "slow/None-v0", "import_module": "slow", "args": []}}  # fmt: skip
    with running(
        sys.executable,
        "-m",
        "spreeze.envs.probe",
        json.dumps(job),
        env={**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{tmp_path}"},
    ) as child:
        poll(lambda: name_of(child.pid) == PROBE, what=lambda: name_of(child.pid))


def test_the_page_takes_its_name_as_soon_as_its_server_loads_it():
    code = "import app; from pathlib import Path; print(Path('/proc/self/comm').read_text().strip())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout.split()[-1:] == [PAGE], done.stderr[-2000:]


class Governed:
    """What a run's governor saw since this was last asked."""

    def __init__(self, run):
        self.run, self.reader, self.since_s = run, MetricsReader(run.path / "metrics.db"), 0.0

    def begin(self):
        """From here on."""
        self.since_s = max(point.t for point in self.reader.latest().values())

    def external_cpu_cores(self):
        """Sample by sample, two a second."""
        points = self.reader.tail(["external_cpu_cores"], self.since_s)
        return [point.value for point in points.get("external_cpu_cores", ())]

    def changes(self):
        return [event.text for event in self.reader.events(1000) if event.text.startswith("governor:")]

    def updates(self):
        return self.run.numbers()["updates"]


@pytest.mark.slow
def test_two_runs_at_once_are_no_strangers_to_each_other_and_a_busy_process_is_one_to_both(tmp_path):
    """Both learn and sample all the time; for them the machine holds only what this test has started."""
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(Run(tmp_path, *PENDULUM, name=name, tiny=GOVERNED, program=QUIET_RUN))
            for name in ("a", "b")
        ]
        for run in runs:
            run.until_updates(1)
        both = [Governed(run) for run in runs]
        for one in both:
            one.begin()
        before = [one.updates() for one in both]

        def seen_none():
            """Samples, two a look, without external load; the governor makes up its mind in seven looks."""
            return [sum(cores < BACKGROUND_CORES for cores in one.external_cpu_cores()) for one in both]

        for run in runs:
            run.wait_for(lambda: min(seen_none()) >= 16, what="looks without external load")
        assert all(one.updates() > updates for one, updates in zip(both, before, strict=True))
        assert [one.changes() for one in both] == [[], []]
        for one in both:
            one.begin()
        for _ in range(3):
            stack.enter_context(running(sys.executable, "-c", "while True: pass"))
        for one in both:
            seen = one.external_cpu_cores
            one.run.wait_for(lambda seen=seen: max(seen(), default=0.0) > BACKGROUND_CORES, what="external load")
        for run in runs:
            run.interrupt()
        assert [run.end()[0] for run in runs] == [0, 0]
