"""The workers with pretended processes and a clock that the test holds."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys

import pytest
from harness import PATIENCE_S, poll

from spreeze.errors import WorkerError
from spreeze.machine.awake import AwakeClock
from spreeze.machine.logs import LogKeeper
from spreeze.machine.utilisation import private_memory_bytes, tree_memory_bytes
from spreeze.runtime import worker_pool
from spreeze.runtime.launcher import Launcher, RunContext, WorkerSpec
from spreeze.runtime.worker_pool import WorkerPool
from spreeze.transport import status_table
from spreeze.transport.status_table import StatusTable
from spreeze.workers.roles import DEADLINE_S, ROLES, Address, Phase

ROWS = {"sampler-0": 0, "sampler-1": 1, "sampler-2": 2, "learner": 3, "evaluator": 4, "visualizer": 5}


class FakeChild:
    """A ``WorkerProcess`` without a process; ``code`` is what poll() says."""

    def __init__(self, spec, pid):
        self.spec, self.pid, self.code, self.signals, self.waited, self.log = spec, pid, None, [], 0, None
        self.process_name = spec.name
        self.undying, self.clock = False, None
        """Whether the kernel holds it whatever comes; the stage, whose time then passes in waiting for it."""
        self.message_fd, self._write_fd = os.pipe()
        os.set_blocking(self.message_fd, False)

    def poll(self):
        return self.code

    def say(self, **message):
        os.write(self._write_fd, json.dumps(message).encode() + b"\n")

    def read_messages(self):
        try:
            return [json.loads(line) for line in os.read(self.message_fd, 65536).splitlines()]
        except BlockingIOError:
            return []

    def signal_group(self, number):
        self.signals.append(number)

    def kill_and_wait(self, within_s=10.0):
        self.signals.append(signal.SIGKILL)
        self.waited += 1
        if self.undying:
            self.clock.now += within_s
            return None
        self.code = -signal.SIGKILL
        return self.code

    def close(self):
        if self.message_fd >= 0:
            os.close(self.message_fd)
            os.close(self._write_fd)
        self.message_fd = -1


class Stage(Launcher):
    def __init__(self, tmp_path, roles, clock=lambda scene: lambda: scene.now):
        self.now, self.events, self.order, self.started = 0.0, [], [], []
        self.refuse, self.clock = False, clock(self)
        self.status = StatusTable.create(len(ROWS))
        self.logs = LogKeeper()
        run_context = RunContext(run_dir=tmp_path, status=self.status, nonce="x", logs=self.logs)
        self.workers = WorkerPool(
            run_context, on_event=lambda level, text: self.events.append(f"{level}: {text}"),
            launcher=self, clock=self.clock,
        )  # fmt: skip
        for name in roles:
            role, _, index = name.partition("-")
            self.workers.add(
                WorkerSpec(address=Address(role, index=int(index or 0)), row=ROWS[name], job={}, step_deadline_s=5.0)
            )

    def start(self, spec, run_context):
        if self.refuse:
            raise OSError("no more processes")
        before = [child for child in self.started if child.spec.name == spec.name]
        assert all(child.code is not None or child.undying for child in before), "two processes of one worker"
        self.order.append(f"start {spec.name}")
        self.started.append(FakeChild(spec, 100 + len(self.started)))
        self.started[-1].clock = self
        return self.started[-1]

    def child(self, name):
        return self.workers.handles[name].process

    def heartbeat(self, name, phase):
        control = self.status.control(ROWS[name])
        control[status_table.HEARTBEAT] += 1
        control[status_table.PHASE] = int(phase)

    def pass_time(self, seconds, beating=()):
        """In steps of a second, as the supervisor looks; ``beating`` workers stay alive."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1.0, end)
            for name, phase in beating:
                self.heartbeat(name, phase)
            self.workers.watch()

    def close(self):
        for child in self.started:
            child.close()
        self.logs.close()
        self.status.close()


@pytest.fixture
def stage(tmp_path):
    stages = []

    def make(*roles, **options):
        stages.append(Stage(tmp_path, roles, **options))
        return stages[-1]

    yield make
    for made in stages:
        made.close()


def test_a_dead_sampler_is_started_again_and_counted(stage):
    scene = stage("sampler-0", "sampler-1", "learner")
    scene.order.clear()
    dead = scene.child("sampler-0")
    scene.heartbeat("sampler-0", Phase.STEP)
    dead.code = -signal.SIGSEGV
    scene.workers.watch()
    scene.workers.watch()
    assert scene.order == ["start sampler-0"]
    assert scene.workers.restart_count == 1
    assert scene.workers.alive(ROLES["sampler"]) == 2
    assert "ended by SIGSEGV in phase STEP; restarting now" in scene.events[0]
    assert signal.SIGKILL in dead.signals, "what the dead worker had started is ended too"
    assert scene.workers.first_error == ("sampler-0", "ended by SIGSEGV in phase STEP")
    assert len(scene.events) == 1, "it has not yet worked"
    scene.heartbeat("sampler-0", Phase.STEP)
    for _ in range(2):
        scene.workers.watch()
    assert [event for event in scene.events if "sampler-0 is back after" in event] == scene.events[1:]


def test_exit_0_without_being_done_is_a_failure(stage):
    scene = stage("sampler-0")
    scene.heartbeat("sampler-0", Phase.STEP)
    scene.child("sampler-0").code = 0
    scene.workers.watch()
    assert "exit code 0) in phase STEP" in scene.events[0]


def test_a_visualizer_that_says_done_is_finished_and_not_started_again(stage):
    scene = stage("visualizer", "sampler-0")
    scene.heartbeat("visualizer", Phase.DONE)
    scene.child("visualizer").code = 0
    scene.pass_time(20, [("sampler-0", Phase.STEP)])
    assert scene.workers.handles["visualizer"].process is None
    assert (scene.workers.restart_count, scene.events) == (0, [])


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.RESET, Phase.UPDATE, Phase.CHECKPOINT, Phase.EVALUATE])
def test_each_phase_has_its_own_deadline(stage, phase):
    scene = stage("learner")
    silent = scene.child("learner")
    scene.heartbeat("learner", phase)
    scene.workers.watch()
    scene.pass_time(DEADLINE_S[phase])
    assert silent.signals == []
    scene.pass_time(2)
    assert silent.signals[:2] == [signal.SIGUSR1, signal.SIGKILL], "first its stack, then its end"
    assert silent.waited == 1, "waited for before anything else happens"
    assert f"in phase {phase.name}; its stack is in logs/learner.log" in scene.events[0]


def test_a_worker_that_waits_for_a_core_is_not_hung(stage, monkeypatch):
    scene, waited = stage("learner"), {"s": 50.0}
    silent = scene.child("learner")
    monkeypatch.setattr(worker_pool, "waited_for_core_s", lambda pid: waited["s"])
    scene.heartbeat("learner", Phase.INIT)
    scene.workers.watch()
    deadline_s = int(DEADLINE_S[Phase.INIT])
    scene.pass_time(deadline_s / 2 + 1)
    waited["s"] += deadline_s / 2
    scene.pass_time(deadline_s / 2 + 1)
    assert silent.signals == [], "half of the time it got no core"
    scene.pass_time(deadline_s / 2)
    assert silent.signals[:2] == [signal.SIGUSR1, signal.SIGKILL]


def test_the_deadline_of_an_env_step_is_the_workers_own(stage):
    scene = stage("sampler-0", "sampler-1")
    scene.heartbeat("sampler-0", Phase.STEP)
    scene.pass_time(10, [("sampler-1", Phase.STEP)])
    assert scene.workers.restart_count == 1
    told = "sampler-0 silent for 6 s in phase STEP; its stack is in logs/sampler-0.log (sampling.step_deadline_s = 5)"
    assert told in scene.events[0]
    scene.heartbeat("sampler-0", Phase.STEP)
    scene.workers.watch()
    assert any("sampler-0 is back after" in event for event in scene.events)


def test_a_stopped_process_that_beats_again_in_time_is_left_alone(stage):
    scene = stage("sampler-0")
    for _ in range(10):
        scene.heartbeat("sampler-0", Phase.STEP)
        scene.pass_time(4.5)
    assert scene.workers.restart_count == 0


def test_nobody_is_blamed_when_the_machine_slept(stage):
    scene = stage("sampler-0", "learner", clock=lambda scene: AwakeClock(lambda: scene.now, lambda: 0.0))
    for name in ("sampler-0", "learner"):
        scene.heartbeat(name, Phase.STEP)
    scene.workers.watch()
    with scene.clock.watched():
        scene.now += 3600.0
        scene.workers.watch()
    assert scene.workers.restart_count == 0
    assert scene.events == []
    scene.pass_time(4)
    assert scene.workers.restart_count == 0
    scene.pass_time(2)
    assert scene.workers.handles["sampler-0"].failures, "a full deadline after waking up it counts again"


def test_pauses_between_restarts_are_kept(stage):
    scene = stage("learner", "sampler-0")
    starts = []
    for _ in range(2):
        scene.child("learner").code = 1
        scene.workers.watch()
        died = scene.now
        while scene.child("learner") is None:
            scene.now += 0.125
            scene.heartbeat("sampler-0", Phase.STEP)
            scene.workers.watch()
        starts.append(scene.now - died)
    assert starts == [0.125, 0.5]


def test_a_learner_that_keeps_failing_ends_the_run_with_its_last_words(stage):
    scene = stage("learner")
    for count in range(3):
        child = scene.child("learner")
        child.say(kind="error", error=f"ValueError: bad {count}", **{"from": "learner"})
        child.code = 1
        if count == 2:
            with pytest.raises(WorkerError, match=r"the learner failed 3 times .*; the last .*ValueError: bad 2"):
                scene.workers.watch()
        else:
            scene.pass_time(2)
    assert scene.workers.first_error[1].endswith("ValueError: bad 0")
    assert scene.events[-1].startswith("error: learner ended with exit code 1")
    assert scene.events[-1].endswith("; given up")


def _fail_often(scene, name):
    for _ in range(5):
        while scene.child(name) is None:
            scene.now += 1.0
            scene.workers.watch()
        scene.child(name).code = 1
        scene.workers.watch()


def test_half_of_the_samplers_may_rest_more_may_not(stage):
    scene = stage("sampler-0", "sampler-1")
    for name in ("sampler-0", "sampler-1"):
        scene.status.control(ROWS[name])[status_table.PHASE] = int(Phase.STEP)
    _fail_often(scene, "sampler-0")
    assert "restarting in 300.0 s" in scene.events[-1]
    with pytest.raises(WorkerError, match="2 of 2 samplers keep failing; sampler-0: ended with exit code 1"):
        _fail_often(scene, "sampler-1")


@pytest.mark.parametrize("name", ["evaluator", "visualizer"])
def test_evaluator_and_visualizer_rest_without_harm_and_are_tried_again(stage, name):
    scene = stage(name, "sampler-0")
    for restarts in (2, 3):  # the second time, one failure more is enough
        for _ in range(3 if restarts == 2 else 1):
            scene.child(name).code = 1
            scene.pass_time(4, [("sampler-0", Phase.STEP)])
        assert scene.workers.alive(ROLES[name]) == 0
        assert scene.workers.keeps_failing(name)
        assert not scene.workers.keeps_failing("sampler-0")
        assert scene.workers.alive(ROLES["sampler"]) == 1
        assert scene.workers.restart_count == restarts
        assert "restarting in 300.0 s" in scene.events[-1]
        scene.pass_time(301, [("sampler-0", Phase.STEP)])
        assert scene.workers.alive(ROLES[name]) == 1
        assert not scene.workers.keeps_failing(name)


def test_a_process_that_cannot_be_started_counts_as_a_failure(stage):
    scene = stage("sampler-0", "sampler-1", "sampler-2")
    scene.child("sampler-0").code = 1
    scene.refuse = True
    scene.pass_time(3, [("sampler-1", Phase.STEP), ("sampler-2", Phase.STEP)])
    assert any("sampler-0 could not be started: no more processes" in event for event in scene.events)
    scene.refuse = False
    scene.pass_time(5, [("sampler-1", Phase.STEP), ("sampler-2", Phase.STEP)])
    assert scene.workers.alive(ROLES["sampler"]) == 3


def test_a_learner_that_cannot_be_started_again_ends_the_run_with_that_as_the_reason(stage):
    scene = stage("learner")
    scene.child("learner").code = -signal.SIGKILL
    scene.workers.watch()
    scene.refuse = True
    with pytest.raises(WorkerError, match=r"failed 3 times .*; the last failure: could not be started: no more proc"):
        scene.pass_time(5)
    assert scene.events[-1] == "error: learner could not be started: no more processes; given up"


def test_messages_arrive_and_the_last_ones_of_the_dead_too(stage):
    scene = stage("sampler-0", "learner")
    scene.child("learner").say(kind="started")
    assert scene.workers.wait(1.0) == [{"kind": "started"}]
    scene.child("learner").say(kind="event", text="last words")
    scene.child("learner").code = 1
    assert scene.workers.watch() == [{"kind": "event", "text": "last words"}]


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200, reason="fewer descriptors are allowed here")
def test_a_worker_is_heard_through_a_descriptor_of_any_number(stage):
    scene = stage("learner")
    child = scene.child("learner")
    high = fcntl.fcntl(child.message_fd, fcntl.F_DUPFD_CLOEXEC, 1100)
    os.close(child.message_fd)
    child.message_fd = high
    child.say(kind="event", text="hello")
    assert [message["text"] for message in scene.workers.wait(PATIENCE_S)] == ["hello"]


def test_only_the_first_error_is_the_first(stage):
    scene = stage("sampler-0")
    scene.workers.note_error("learner", "one")
    scene.workers.note_error("sampler-0", "two")
    assert scene.workers.first_error == ("learner", "one")


def test_stopping_waits_for_those_who_obey(stage):
    scene = stage("sampler-0", "learner")
    said = []

    def on_messages(messages):
        said.extend(messages)
        scene.now += 0.5
        if scene.status.header[status_table.STOP]:
            for child in scene.started:
                if child.code is None:
                    child.say(kind="bye")
                    child.code = 0

    scene.workers.stop(hurry=lambda: False, on_messages=on_messages)
    assert said == [{"kind": "bye"}, {"kind": "bye"}]
    assert scene.workers.pids() == {}
    assert all(child.waited == 0 for child in scene.started)


def test_stopping_asks_then_kills_and_never_terminates(stage):
    scene = stage("sampler-0")
    stubborn = scene.child("sampler-0")
    times = []

    def on_messages(messages):
        scene.now += 0.25
        times.append(scene.now)

    scene.workers.stop(hurry=lambda: False, on_messages=on_messages)
    assert set(stubborn.signals) == {signal.SIGKILL}, "workers leave SIGTERM to their supervisor"
    assert 6.0 < times[-1] < 7.0
    assert scene.workers.pids() == {}


class Ending:
    """Time passes while the workers waits; the learner saves until its part is played."""

    def __init__(self, scene, phase, *, beats_s, ends_s=float("inf")):
        self.scene, self.phase, self.beats_s, self.ends_s = scene, phase, beats_s, ends_s
        self.waited_for = set()

    def __call__(self, messages):
        scene = self.scene
        scene.now += 2.0
        if scene.now <= self.beats_s:
            scene.heartbeat("learner", self.phase)
        if scene.now >= self.ends_s and scene.child("learner") is not None:
            scene.heartbeat("learner", Phase.DONE)
            scene.child("learner").code = 0

    def stop(self, hurry=lambda: False):
        self.scene.workers.stop(hurry=hurry, on_messages=self, on_wait=self._waiting)
        return self.scene.now

    def _waiting(self, specs):
        self.waited_for.update(spec.name for spec in specs)


def test_the_last_checkpoint_has_as_long_as_it_makes_progress(stage):
    scene = stage("sampler-0", "learner")
    saving = scene.child("learner")
    ending = Ending(scene, Phase.CHECKPOINT, beats_s=300.0, ends_s=300.0)
    assert ending.stop() == pytest.approx(300.0, abs=2.0)
    assert saving.waited == 0
    assert scene.started[0].signals[0] == signal.SIGKILL, "a sampler that does not obey is not waited for"
    assert ending.waited_for == {"sampler-0", "learner"}
    assert not [event for event in scene.events if "learner" in event]


@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.UPDATE, Phase.PUBLISH, Phase.WAIT, Phase.INIT])
def test_a_last_checkpoint_without_progress_is_given_up(stage, phase):
    scene = stage("learner")
    hung = scene.child("learner")
    patience_s = 6.0 if phase in (Phase.WAIT, Phase.INIT) else DEADLINE_S[phase]
    assert Ending(scene, phase, beats_s=50.0).stop() == pytest.approx(50.0 + patience_s, abs=4.0)
    assert hung.waited == 1
    assert f"learner ended by SIGKILL in phase {phase.name} while stopping; its last checkpoint" in scene.events[-1]


def test_a_last_checkpoint_is_given_up_in_a_hurry(stage):
    scene = stage("learner")
    assert Ending(scene, Phase.CHECKPOINT, beats_s=1e9).stop(hurry=lambda: scene.now > 20.0) <= 26.0
    assert "while stopping; its last checkpoint is used" in scene.events[-1]


def test_who_does_not_die_is_named_and_left_and_all_of_them_together_have_one_time(stage):
    scene = stage("sampler-0", "sampler-1", "sampler-2", "learner")
    for child in scene.started:
        child.undying = True
    scene.workers.stop(hurry=lambda: True, on_messages=lambda messages: None)
    assert scene.now == 10.0
    assert scene.workers.pids() == {}
    named = [event for event in scene.events if event.startswith("error: ") and "left behind" in event]
    assert [event.split()[1] for event in named] == ["sampler-0", "sampler-1", "sampler-2", "learner"]
    assert "(process 100) does not end on SIGKILL" in named[0]
    assert scene.events[-1] == "warning: learner was left behind while stopping; its last checkpoint is used"


def test_a_hung_worker_that_does_not_die_is_left_and_another_takes_its_place(stage):
    scene = stage("sampler-0", "learner")
    held = scene.child("sampler-0")
    held.undying = True
    scene.heartbeat("sampler-0", Phase.STEP)
    scene.pass_time(8, [("learner", Phase.UPDATE)])
    scene.pass_time(3, [("learner", Phase.UPDATE)])
    assert scene.child("sampler-0") not in (None, held)
    assert scene.workers.restart_count == 1
    assert "sampler-0 (process 100) does not end on SIGKILL" in scene.events[0]
    assert "sampler-0 silent for 6 s in phase STEP" in scene.events[1]


def test_hurry_kills_at_once(stage):
    scene = stage("sampler-0", "learner")
    scene.workers.stop(hurry=lambda: True, on_messages=lambda messages: None)
    assert scene.now == 0.0
    assert all(child.waited == 1 for child in scene.started)


def test_more_than_half_of_one_groups_samplers_lost_ends_the_run_though_the_others_are_fine(tmp_path):
    scene = Stage(tmp_path, ["sampler-0", "sampler-1"])
    try:
        scene.workers.add(WorkerSpec(address=Address("sampler", 1, 0), row=2, job={}))
        assert list(scene.workers.pids()) == ["sampler-0", "sampler-1", "sampler-g1-0"]
        with pytest.raises(WorkerError, match=r"1 of 1 samplers keep failing; sampler-g1-0: ended with exit code 1"):
            _fail_again_and_again(scene, "sampler-g1-0")
    finally:
        for child in scene.started:
            child.close()
        scene.status.close()


def _fail_again_and_again(scene, name):
    for _ in range(100):
        if (child := scene.child(name)) is not None:
            child.code = 1
        scene.pass_time(1.0, [("sampler-0", Phase.STEP), ("sampler-1", Phase.STEP)])


def test_memory_counts_what_a_worker_started():
    child = "x = bytes(range(256)) * 200_000; input()"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", code + "; input()"], stdin=subprocess.PIPE) as process:
        poll(lambda: tree_memory_bytes(process.pid) > 50_000_000, what="the child's memory")
        assert private_memory_bytes(process.pid) < 50_000_000
    assert tree_memory_bytes(process.pid) == 0


def test_a_start_has_a_deadline_of_its_own_which_is_told_and_named(tmp_path):
    scene = Stage(tmp_path, [])
    spec = WorkerSpec(address=Address("sampler"), row=0, job={}, start_deadline_s=200.0)
    scene.workers.add(spec)
    scene.heartbeat("sampler-0", Phase.INIT)
    scene.pass_time(199)
    assert scene.events == [
        "info: waiting for an environment of sampler-0 to start: 11 s so far, at most 200 s (--start-deadline-s)"
    ]
    scene.pass_time(3)
    assert "in phase INIT" in scene.events[1]
    assert "for slow environments set --start-deadline-s 400; restarting now" in scene.events[1]
    scene.close()


def test_what_a_worker_wrote_last_stands_in_the_reason_of_its_end_unless_it_reported_one(stage, tmp_path):
    scene = stage("sampler-0", "sampler-1")
    for name in ("sampler-0", "sampler-1"):
        scene.child(name).log = log = scene.logs.log(tmp_path / f"{name}.log")
        with log.open() as output:
            output.write(b"engine: out of licences\n")
    scene.child("sampler-1").say(kind="error", error="ValueError: no")
    for name in ("sampler-0", "sampler-1"):
        scene.child(name).code = 3
        scene.workers.wait(0.0)
    scene.workers.watch()
    texts = sorted(text for text in scene.events if "exit code 3" in text)
    assert "ended with exit code 3 in phase START: engine: out of licences; restarting" in texts[0]
    assert "ended with exit code 3 in phase START: ValueError: no; restarting" in texts[1]


def test_a_sampler_that_has_done_its_work_has_a_moment_to_close_and_one_that_steps_has_more(stage):
    scene = stage("sampler-0", "sampler-1")
    children = [scene.child(name) for name in ("sampler-0", "sampler-1")]
    scene.heartbeat("sampler-0", Phase.DONE)
    scene.heartbeat("sampler-1", Phase.STEP)
    scene.workers.watch()
    ends = {}

    def on_wait(specs):
        scene.now += 0.5
        for child in children:
            if child.code is not None:
                ends.setdefault(child.spec.name, scene.now)

    scene.workers.stop(hurry=lambda: False, on_messages=lambda messages: None, on_wait=on_wait)
    assert ends["sampler-0"] <= 3.5
    assert children[1].code is not None
    assert scene.now > 6.0
