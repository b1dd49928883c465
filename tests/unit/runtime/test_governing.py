"""The governor in a run: what it reads, what it posts, and real samplers that rest and come back."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from itertools import groupby

import numpy as np
import pytest
from harness import PATIENCE_S, poll

from spreeze.config.layers import Layer, resolve
from spreeze.envs.probe import probe_env
from spreeze.envs.task import open_task
from spreeze.machine.hardware import CoreFacts
from spreeze.machine.logs import LogKeeper
from spreeze.machine.utilisation import ContentionReader, CpuContention
from spreeze.metrics.bottleneck import bottleneck
from spreeze.metrics.store import MetricsReader
from spreeze.metrics.table import SLOTS
from spreeze.modes import assemble, run_mode
from spreeze.run_directory import SUBDIRECTORIES, RunDir
from spreeze.runtime import cpu_governor, supervisor
from spreeze.runtime.assembly import assembled
from spreeze.runtime.cpu_governor import GovernorLoop, LoadWatch
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import RunContext
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import CounterSample, GroupSample
from spreeze.runtime.worker_pool import WorkerPool
from spreeze.transport import status_table
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, ShardWriter
from spreeze.transport.shared_memory import Wakeup, readable
from spreeze.transport.status_table import StatusTable
from spreeze.workers.collectors.transition_collector import TransitionCollector
from spreeze.workers.context import WorkerContext
from spreeze.workers.roles import Address, Phase, role_of
from spreeze.workers.samplers import SamplerLoop

TWO_CORES = CoreFacts(ids=(0, 1), quota=None, usable=2.0, physical=2, reason="as told")


def busy():
    """A process that keeps one core busy, in a session of its own like another user's program."""
    return subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)


def plan(**parts):
    values = {
        "env": {"id": "Pendulum-v1"},
        "sac": {"hidden_sizes": [32, 32]},
        "learner": {"batch_size": 32},
        "replay": {"capacity": 20_000, "learning_starts": 200},
        "visualizer": {"enabled": False},
        "sampling": {"samplers": 2, "envs_per_sampler": 2},
        "tuning": {"give_way": True},
        **parts,
    }
    return RunPlan(
        settings=resolve([Layer("test", values)]),
        spec=probe_env("Pendulum-v1", steps=0).spec,
        samplers=2,
        free_core=False,
    )


class Proc:
    """A made-up ``/proc``."""

    def __init__(self, root):
        self.root = root / "proc"
        self.ticks = {0: [0] * 10, 1: [0] * 10, 7: [0] * 10}

    def stat(self):
        self.root.mkdir(exist_ok=True)
        lines = [f"cpu{core} {' '.join(map(str, ticks))}" for core, ticks in self.ticks.items()]
        (self.root / "stat").write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *lines, "intr 1 2 3"]) + "\n")

    def thread(self, pid, ran_s, waited_s, tid=None, children=()):
        folder = self.root / str(pid) / "task" / str(tid or pid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{int(ran_s * 1e9)} {int(waited_s * 1e9)} 17\n")
        (folder / "children").write_text("".join(f"{child} " for child in children))

    def named(self, pid, name, parent=1, allowed="3"):
        """What tells a sibling: its name, its parent, the cores that it may use (as bits); it leads its group."""
        (self.root / str(pid) / "stat").write_text(f"{pid} ({name}) R {parent} {pid} {pid} 0 -1 0 0\n")
        (self.root / str(pid) / "status").write_text(f"Name:\t{name}\nCpus_allowed:\t{allowed}\n")


@pytest.fixture
def proc(tmp_path):
    return Proc(tmp_path)


def test_external_cores_are_the_busy_ones_less_our_own_processes_with_threads_and_children(proc, tmp_path):
    seconds = iter((10.0, 12.0))
    reader = ContentionReader(role_of, cores=TWO_CORES, root=tmp_path, clock=lambda: next(seconds))
    proc.stat()
    proc.thread(100, 5.0, 1.0, children=(300, 200))
    proc.thread(100, 1.0, 0.0, tid=101)
    proc.thread(200, 0.0, 0.0)
    proc.thread(300, 2.0, 0.0)
    pids = {"learner": 100, "sampler-0": 200}
    assert reader.sample(pids) is None
    # In 2 s: user, nice, system, irq and softirq count, idle, iowait and steal do not; core 7 is not ours.
    proc.ticks = {0: [100, 10, 20, 50, 5, 5, 5, 5, 0, 0], 1: [160, 0, 0, 40, 0, 0, 0, 0, 0, 0], 7: [200] + [0] * 9}
    proc.stat()
    proc.thread(100, 5.8, 1.6, children=(300, 200))
    proc.thread(100, 1.2, 0.0, tid=101)
    proc.thread(200, 0.4, 0.2)
    proc.thread(300, 2.1, 0.0)
    load = reader.sample(pids)
    assert load.ran == pytest.approx({"learner": 0.55, "sampler-0": 0.2})
    assert load.wanted == pytest.approx({"learner": 0.85, "sampler-0": 0.3})
    assert load.external_cpu_cores == pytest.approx((1.4 + 1.6) / 2 - 0.75)


def test_under_a_quota_cores_beyond_it_hide_external_load_until_our_own_threads_wait(proc, tmp_path):
    seconds = iter((0.0, 1.0, 2.0))
    quota = CoreFacts(ids=(0, 1, 7), quota=1.5, usable=1.5, physical=3, reason="as told")
    reader = ContentionReader(role_of, cores=quota, root=tmp_path, clock=lambda: next(seconds))
    proc.stat()
    proc.thread(100, 0.0, 0.0)
    reader.sample({"learner": 100})
    proc.ticks = {0: [100] + [0] * 9, 1: [100] + [0] * 9, 7: [0] * 10}
    proc.stat()
    proc.thread(100, 1.0, 0.0)
    assert reader.sample({"learner": 100}).external_cpu_cores == 0.0  # one of three cores, and we need but 1.5
    proc.ticks = {0: [200] + [0] * 9, 1: [150] + [0] * 9, 7: [0] * 10}
    proc.stat()
    proc.thread(100, 1.5, 0.5)  # half a core where 1.5 are allowed, and waiting: somebody else has the rest
    assert reader.sample({"learner": 100}).external_cpu_cores == pytest.approx(1.0)


def test_another_run_with_its_supervisor_and_what_it_started_counts_as_sibling(proc, tmp_path):
    seconds = iter((10.0, 11.0))
    reader = ContentionReader(role_of, cores=TWO_CORES, root=tmp_path, clock=lambda: next(seconds))

    def second(busy_s, ran_s):
        proc.ticks = {0: [int(100 * busy_s)] + [0] * 9, 1: [0] * 10}
        proc.stat()
        proc.thread(100, ran_s["ours"], 0.0, children=(200,))
        proc.thread(200, 0.0, 0.0)
        proc.named(200, "learner", parent=100)  # of ours
        proc.thread(300, ran_s["supervisor"], 0.0, children=(310, 320, 340))
        proc.named(300, "python")
        proc.thread(310, ran_s["learner"], 9.0, children=(311,))
        proc.named(310, "learner", parent=300)
        proc.thread(311, ran_s["its child"], 0.0)
        proc.named(311, "bash", parent=310)
        proc.thread(320, ran_s["half here"], 0.0)
        proc.named(320, "sampler-0", parent=300, allowed="00000000,00000006")  # cores 1 and 2; ours are 0 and 1
        proc.thread(330, ran_s["elsewhere"], 0.0)
        proc.named(330, "sampler-1", parent=1, allowed="f0")
        proc.thread(340, ran_s["external"], 0.0)
        proc.named(340, "python", parent=300)  # a supervisor may be a notebook: what else it starts is not of the run
        return reader.sample({"supervisor": 100, "learner": 200})

    names = ("ours", "supervisor", "learner", "its child", "half here", "elsewhere", "external")
    assert second(50.0, dict.fromkeys(names, 7.0)) is None
    ran_s = {
        "ours": 0.3,
        "supervisor": 0.05,
        "learner": 0.4,
        "its child": 0.1,
        "half here": 0.3,
        "elsewhere": 1.0,
        "external": 0.2,
    }
    load = second(51.2, {name: 7.0 + gained_s for name, gained_s in ran_s.items()})
    assert load.ran == pytest.approx({"supervisor": 0.3, "learner": 0.0})
    assert load.sibling_cores == pytest.approx(0.05 + 0.4 + 0.1 + 0.5 * 0.3)
    assert load.external_cpu_cores == pytest.approx(1.2 - 0.3 - 0.7)


def test_under_a_quota_another_run_that_uses_it_up_counts_as_sibling_too(proc, tmp_path):
    seconds = iter((0.0, 1.0))
    quota = CoreFacts(ids=(0, 1, 7), quota=1.5, usable=1.5, physical=3, reason="as told")
    reader = ContentionReader(role_of, cores=quota, root=tmp_path, clock=lambda: next(seconds))
    for passed_s in (0, 1):
        proc.ticks = {0: [150 * passed_s] + [0] * 9, 1: [0] * 10, 7: [0] * 10}
        proc.stat()
        proc.thread(100, 0.5 * passed_s, 0.8 * passed_s)  # it waits although 1.5 cores are allowed
        proc.thread(300, 1.0 * passed_s, 0.0)
        proc.named(300, "learner", allowed="83")
        load = reader.sample({"learner": 100})
    assert load.sibling_cores == pytest.approx(1.0)
    assert load.external_cpu_cores == 0.0


def test_where_the_kernel_does_not_tell_there_is_no_load(tmp_path):
    reader = ContentionReader(role_of, cores=TWO_CORES, root=tmp_path)
    assert reader.sample({"learner": 1}) is None
    assert reader.sample({"learner": 1}) is None


def test_a_busy_process_of_ours_is_ours_and_one_of_others_is_external():
    ours, other = busy(), busy()
    try:
        reader = ContentionReader(role_of)
        reader.sample({"ours": ours.pid, "gone": 2**22 + 1})
        loads = deque(maxlen=1)

        def seen():
            loads.append(reader.sample({"ours": ours.pid}))
            return loads[0] is not None and loads[0].ran["ours"] > 0.05 and loads[0].external_cpu_cores > 0.05

        poll(lambda: time.sleep(0.2) or seen(), what=lambda: str(loads))
        assert loads[0].wanted["ours"] >= loads[0].ran["ours"]
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


@pytest.fixture
def status():
    status = StatusTable.create(4)
    yield status
    status.close()


def shares(status, samplers=3):
    addresses = [Address("sampler", index=index) for index in range(samplers)]
    return [WorkerContext(address, status, address.index, None).sampler_share for address in addresses]


def test_without_a_word_of_the_supervisor_every_sampler_works(status):
    assert shares(status) == [1.0, 1.0, 1.0]


def test_the_tuner_sets_whole_numbers_and_nobody_is_slowed(status):
    status.header[status_table.ACTIVE_SAMPLERS] = 2
    assert shares(status) == [1.0, 1.0, 0.0]


def test_who_works_is_counted_from_the_first_sampler_on_and_round(status):
    status.header[status_table.SAMPLERS] = 3
    status.header[status_table.ACTIVE_SAMPLERS] = 1
    status.header[status_table.SLOWED_SHARE] = 250
    found = []
    for first in range(3):
        status.header[status_table.FIRST_SAMPLER] = first
        found.append(shares(status))
    assert found == [[1.0, 0.25, 0.0], [0.0, 1.0, 0.25], [0.25, 0.0, 1.0]]


class OneSampler:
    """The sampler of a run in this process, with its status and ring, beside a learner that never limits it."""

    def __init__(self, folder, links=(None, None), band=(0.0, 512.0)):
        self.plan = plan(replay={"samples_per_insert_min": band[0], "samples_per_insert_max": band[1],
                                 "capacity": 20_000})  # fmt: skip
        with assembled(assemble, self.plan, folder, 0.0) as run:
            job = run.specs["sampler-0"].job  # what it refers to ends here
        wakeup, learner_wakeup = links
        job = dataclasses.replace(job, wakeup=wakeup, learner_wakeup=learner_wakeup)
        self.status, self.ring = StatusTable.create(4), ReplayRing.create(self.plan.ring_spec())
        self.context = WorkerContext(Address("sampler"), self.status, 0, None)
        sink = ShardWriter(self.ring, 0)
        self.sampling = TransitionCollector(
            lambda: open_task(self.plan.spec), job.num_envs, self.plan.spec, sink, n_step=1, gamma=0.99, seeds=[1, 2]
        )
        self.loop = SamplerLoop(self.context, job, sink, self.sampling, np.random.default_rng(1))

    def turns(self, seconds):
        """Env steps and beats of so much time."""
        before = self.sampling.counts.env_steps, int(self.status.control(0)[status_table.HEARTBEAT])
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.loop.step_or_wait()
        return self.sampling.counts.env_steps - before[0], int(self.status.control(0)[status_table.HEARTBEAT]) - before[
            1
        ]

    def close(self):
        self.sampling.close()
        self.loop = self.context = self.sampling = None
        self.status.close()
        self.ring.close()


@pytest.fixture
def one_sampler(tmp_path):
    sampler = OneSampler(tmp_path)
    yield sampler
    sampler.close()


def test_a_resting_sampler_beats_takes_no_step_and_counts_no_waiting(one_sampler):
    one_sampler.status.header[status_table.ACTIVE_SAMPLERS] = 0
    start_s = time.perf_counter()
    steps, beats = one_sampler.turns(0.2)
    assert steps == 0
    # Naps of 10 ms, not the short ones of a sampler that is about to go on.
    assert 1 <= beats <= (time.perf_counter() - start_s) / 0.01 + 1
    assert one_sampler.status.named_slots(0, "sampler")["wait_s"] == 0.0
    one_sampler.status.header[status_table.ACTIVE_SAMPLERS] = 1
    assert one_sampler.turns(0.1)[0] > 0


def test_a_balanced_sampler_tells_its_learner_of_rows_and_sleeps_until_it_is_told_of_batches(tmp_path):
    with contextlib.ExitStack() as stack:
        own, learner = (stack.enter_context(contextlib.closing(Wakeup.create())) for _ in range(2))
        links = own.handle, learner.handle
        sampler = stack.enter_context(contextlib.closing(OneSampler(tmp_path, links, band=(8.0, 8.0))))
        sampler.ring.begin_learning()
        assert sampler.loop.step_or_wait() is not None
        assert readable(learner.fds[:1], 0.0), "rows are there"
        while sampler.loop.step_or_wait() is not None:
            pass
        own.notify()
        assert sampler.loop.step_or_wait() is None, "held by the limiter"
        assert not readable(own.fds[:1], 0.0), "it slept until it was told"
        sampler.ring.rows_drawn += 8 * sampler.plan.config.sampling.envs_per_sampler * sampler.plan.samplers
        assert sampler.loop.step_or_wait() is not None


def test_a_slowed_sampler_works_its_share_of_the_time(one_sampler):
    one_sampler.status.header[status_table.ACTIVE_SAMPLERS] = 0
    one_sampler.status.header[status_table.SLOWED_SHARE] = 125
    start_s = time.perf_counter()
    one_sampler.turns(0.6)
    passed_s = time.perf_counter() - start_s
    slots = one_sampler.status.named_slots(0, "sampler")
    worked_s = slots["policy_s"] + slots["env_s"] + slots["write_s"]
    assert 0.0 < worked_s < 0.5 * passed_s  # an eighth, but for a turn that the machine made long


@pytest.mark.warm
def test_a_sampler_killed_while_it_rests_is_started_again_and_rests_on(tmp_path):
    decided = plan(replay={"samples_per_insert_min": 0.0, "capacity": 20_000})
    for sub in SUBDIRECTORIES:
        (tmp_path / sub).mkdir()
    with assembled(assemble, decided, tmp_path, time.monotonic()) as run, LogKeeper() as logs:
        status, row = run.status, run.specs["sampler-0"].row
        workers = WorkerPool(
            RunContext(run_dir=tmp_path, status=status, nonce="resting", logs=logs), on_event=lambda level, text: None
        )
        status.header[status_table.ACTIVE_SAMPLERS] = 0

        def resting():
            workers.wait(0.02)
            workers.watch()
            return status.control(row)[status_table.PHASE] == Phase.WAIT

        try:
            workers.add(run.specs["sampler-0"])
            poll(resting, what="rest")
            os.kill(workers.pids()["sampler-0"], signal.SIGKILL)
            poll(lambda: resting() and workers.restart_count == 1, what="rest of the second")
            beat = int(status.control(row)[status_table.HEARTBEAT])
            poll(lambda: resting() and status.control(row)[status_table.HEARTBEAT] > beat + 5, what="beats")
            assert status.named_slots(row, "sampler")["env_steps"] == 0
            status.header[status_table.ACTIVE_SAMPLERS] = 1
            poll(lambda: (workers.watch(), status.named_slots(row, "sampler")["env_steps"] > 0)[1], what="work")
            assert workers.restart_count == 1
        finally:
            workers.stop(hurry=lambda: True, on_messages=lambda messages: None)


class Told:
    """A reader that says what it is told."""

    external_cpu_cores = 0.0

    def sample(self, pids):
        return CpuContention(
            usable_cores=2.0,
            external_cpu_cores=self.external_cpu_cores,
            ran={},
            wanted={"learner": 1.0, "sampler-0": 0.5, "sampler-1": 0.5, "supervisor": 0.02},
        )


def reading(baseline=200, updates=10.0, inserted=1000):
    learner = {**dict.fromkeys(SLOTS["learner"], 0.0), "updates": updates}
    return CounterSample(0.0, (GroupSample((), learner, inserted, baseline, 8000),))


def test_changes_are_posted_on_the_board_told_as_events_and_measured(status):
    told, events, now = Told(), [], [0.0]
    governing = GovernorLoop(plan(), status, lambda level, text: events.append(text), reader=told, clock=lambda: now[0])

    def seconds(count, baseline=200, pid=7):
        for _ in range(2 * count):
            now[0] += 0.5
            numbers = governing.update(reading(baseline), {"learner": pid})
        return numbers

    told.external_cpu_cores = 1.0
    assert seconds(20, baseline=-1)["samplers_active"] == 2.0  # learning has not begun: nobody to protect
    assert shares(status, 2) == [1.0, 1.0]
    assert events == []
    numbers = seconds(6)
    assert numbers == {"samplers_active": 1.0, "external_cpu_cores": 1.0, "sibling_cpu_cores": 0.0}
    assert sorted(shares(status, 2)) == [0.0, 1.0]
    assert events[0].startswith("governor: 2 -> 1 of 2 samplers active: other programs use 1.00 of 2 usable cores")
    told.external_cpu_cores = 0.0
    seconds(5)
    seconds(2, pid=8)  # the learner was started again: what it wants is not known for a while
    assert seconds(3, pid=8)["samplers_active"] == 1.0
    assert seconds(12, pid=8)["samplers_active"] == 2.0
    assert shares(status, 2) == [1.0, 1.0]
    assert len(events) == 2


def test_what_workers_want_is_bounded_by_what_they_could_use(status):
    """Beside programs that hold the cores, threads that wait add up to more than anybody could use."""

    class Starved(Told):
        def sample(self, pids):
            wanted = {"learner": 3.0, "sampler-0": 2.0, "sampler-1": 2.0, "evaluator": 1.8, "supervisor": 0.9}
            return CpuContention(usable_cores=2.0, external_cpu_cores=1.0, ran={"evaluator": 0.25}, wanted=wanted)

    events, now = [], [0.0]
    governing = GovernorLoop(
        plan(), status, lambda _, text: events.append(text), reader=Starved(), clock=lambda: now[0]
    )
    for second in range(20):
        now[0] = float(second)
        governing.update(reading(), {"learner": 7})
    assert events[0].endswith("the learner and the rest need 1.25 cores, each sampler 1.00")


class FourSamplers:
    """A governor with four samplers, all but an eighth of one at rest, and what they write."""

    def __init__(self, status, rows_per_look):
        self.plan = dataclasses.replace(plan(), samplers=4)
        self.status, self.ring = status, ReplayRing.create(self.plan.ring_spec())
        self.now_s, self.rows_per_look = 0.0, rows_per_look
        self.writers = [ShardWriter(self.ring, index) for index in range(4)]
        self.governing = GovernorLoop(
            self.plan, status, lambda level, text: None, reader=self, clock=lambda: self.now_s
        )
        self.governing.leave_free(0.9)
        for _ in range(20):
            self.now_s += 0.5
            active = self.governing.update(self.reading(), {"learner": 7})["samplers_active"]
        assert active == 0.125

    def sample(self, pids):
        """As ``ContentionReader``: others keep 1.2 of 2 cores, and each active sampler wants 0.3."""
        wanted = {"learner": 1.0, "sampler-0": 0.3 * sum(shares(self.status, 4))}
        return CpuContention(usable_cores=2.0, external_cpu_cores=1.2, ran={}, wanted=wanted)

    def reading(self):
        return reading(inserted=self.ring.total_committed())

    def look(self, dead=()):
        """Half a second: who may work and is not dead writes its rows, then the supervisor looks; returns who may."""
        working = [index for index, share in enumerate(shares(self.status, 4)) if share > 0]
        for index in set(working) - set(dead):
            width = self.plan.layout.obs_dim, self.plan.layout.action_dim
            obs, action, reward = (np.zeros((self.rows_per_look, size), np.float32) for size in (*width, 1))
            self.writers[index].write(obs, action, reward[:, 0], reward[:, 0], obs)
        self.now_s += 0.5
        self.governing.update(self.reading(), {"learner": 7})
        return working

    def close(self):
        del self.writers
        self.ring.close()


def test_without_a_governor_the_load_of_others_is_measured_once_a_second():
    class Reader:
        calls = 0

        def sample(self, pids):
            self.calls += 1
            if self.calls == 1:
                return None
            load = {"external_cpu_cores": self.calls / 10, "sibling_cores": 0.7}
            return CpuContention(usable_cores=2.0, **load, ran={}, wanted={})

    reader, now_s = Reader(), [0.0]
    watch = LoadWatch(reader, clock=lambda: now_s[0])
    told = []
    for now_s[0] in (0.0, 0.5, 1.0, 1.5, 2.0):
        told.append(tuple(watch.update(None, {"learner": 7}).values()))
    assert told == [(None, None), (None, None), (0.2, 0.7), (0.2, 0.7), (0.3, 0.7)]


@pytest.fixture
def four_samplers(status):
    made = []

    def make(rows_per_look):
        made.append(FourSamplers(status, rows_per_look))
        return made[0]

    yield make
    for one in made:
        one.close()


@pytest.mark.warm
def test_samplers_paused_in_turn_so_that_the_replay_keeps_its_size(four_samplers):
    """Four shards of 5,000 rows; an eighth of one sampler at work. Were it always the same, 5,000 could be drawn."""
    samplers = four_samplers(rows_per_look=10)
    turns = Counter()
    while samplers.ring.total_committed() < 60_000:
        [working] = samplers.look()
        turns[working] += 1
    # A turn is over after 5,000 / 32 = 156.25 rows, seen in whole looks: 160. Four turns are 640 rows.
    assert max(turns.values()) - min(turns.values()) <= 16
    assert max(samplers.ring.committed) - min(samplers.ring.committed) <= 160
    # Next to each writer 5,000 // 64 = 78 rows are left out. The age at which rows are out, 20,000, is known to a block
    # of 256 rows of each shard; and 5,000 is no whole number of turns, which costs each shard at most one.
    assert ReplayReader(samplers.ring).available >= 20_000 - 4 * (78 + 256 + 160)


def test_a_turn_of_a_sampler_that_writes_nothing_is_over_after_ten_seconds(four_samplers):
    samplers = four_samplers(rows_per_look=200)
    turns = [(index, len(list(looks))) for index, looks in groupby(samplers.look(dead=[2])[0] for _ in range(70))]
    assert {looks for index, looks in turns[1:-1] if index == 2} == {20}
    assert {looks for index, looks in turns[1:-1] if index != 2} == {1}, "200 rows are enough"


def test_where_the_load_cannot_be_read_every_sampler_works(status, tmp_path):
    events, now = [], iter(range(100))
    governing = GovernorLoop(
        plan(),
        status,
        lambda level, text: events.append(text),
        clock=lambda: float(next(now)),
        reader=ContentionReader(role_of, cores=TWO_CORES, root=tmp_path),
    )
    for _ in range(30):
        numbers = governing.update(reading(), {"learner": 7})
    assert numbers == {"samplers_active": 2.0, "external_cpu_cores": None, "sibling_cpu_cores": None}
    assert shares(status, 2) == [1.0, 1.0]
    assert events == []


class OnlyThese:
    """The real reader, but blind for all external programs except the given ones, each of which keeps a core busy.

    Their real share depends on the neighbours of the test.
    """

    def __init__(self, processes):
        self.processes, self.reader = processes, ContentionReader(role_of)

    def sample(self, pids):
        named = {f"external-{process.pid}": process.pid for process in self.processes}
        load = self.reader.sample({**pids, **named})
        if load is None:
            return None
        return CpuContention(
            usable_cores=2.0,
            external_cpu_cores=float(sum(name in load.ran for name in named)),
            ran={},
            wanted={name: cores for name, cores in load.wanted.items() if name not in named},
        )


class Script:
    """Starts external load when the run learns, ends it when samplers rest, ends the run when they are back."""

    def __init__(self, run_dir):
        self.run_dir, self.processes, self.rested, self.seen = run_dir, [], None, []

    def update(self, snapshot):
        self.seen.append((snapshot.samplers_active, snapshot.bottleneck))
        if self.rested is None and not self.processes and (snapshot.updates or 0) > 5:
            self.processes += [busy() for _ in range(2)]
        elif self.processes and snapshot.samplers_paused and (snapshot.external_cpu_cores or 0.0) > 0.25:  # a mean
            self.rested = snapshot
            self.end()
        elif self.rested is not None and not snapshot.samplers_paused:
            (self.run_dir.path / "control" / "stop").touch()

    def note(self, text):
        """Lines that stay are read from the store."""

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes.clear()


@pytest.mark.warm
def test_a_run_gives_way_to_a_busy_process_and_takes_back_when_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_governor, "SETTLE_S", 2)
    monkeypatch.setattr(cpu_governor, "RETURN_S", 3)
    run_dir = RunDir.create(tmp_path, "run")
    script = Script(run_dir)
    monkeypatch.setattr(
        supervisor,
        "GovernorLoop",
        lambda plan, status, on_event: GovernorLoop(plan, status, on_event, reader=OnlyThese(script.processes)),
    )
    try:
        with Interrupts() as interrupts:
            short = plan(stop={"seconds": PATIENCE_S}, evaluation={"episodes": 1})
            outcome = run_mode(short, run_dir, script, interrupts)
    finally:
        script.end()
        run_dir.close()
    assert (outcome.stopped_by, outcome.error, outcome.restarts) == ("stop request", None, 0)
    nobody_waits = dataclasses.replace(script.rested, learner_shares={"wait": 0.0}, sampler_shares={"wait": 0.0})
    assert "Other programs are the limit" in bottleneck(nobody_waits)
    reader = MetricsReader(run_dir.path / "metrics.db")
    events = [event.text for event in reader.events(100) if event.text.startswith("governor")]
    assert any(text.startswith("governor: 2 -> ") for text in events)
    assert any("-> 2 of 2 samplers active" in text for text in events)
    assert reader.latest()["samplers_active"].value == 2.0


def test_a_sampler_follows_the_bounds_that_the_tuner_puts_in_force(one_sampler):
    one_sampler.ring.begin_learning()
    assert one_sampler.turns(0.1)[0] > 0
    one_sampler.status.retune(status_table.RetunedSettings(32, 1, 1e6, 1e6))
    assert one_sampler.turns(0.1)[0] <= one_sampler.plan.config.sampling.envs_per_sampler
    one_sampler.status.retune(status_table.RetunedSettings(32, 1, 0.0, 512.0))
    assert one_sampler.turns(0.1)[0] > 0


def test_rows_of_unthrottled_samplers_that_are_only_measured_do_not_fill_replay(one_sampler):
    def stepped_and_stored(turns):
        before = one_sampler.sampling.counts.env_steps, one_sampler.ring.total_committed()
        for _ in range(turns):
            one_sampler.loop.step_or_wait()
        return one_sampler.sampling.counts.env_steps - before[0], one_sampler.ring.total_committed() - before[1]

    envs, writes = one_sampler.plan.config.sampling.envs_per_sampler, one_sampler.loop._limiter.rows_per_write
    one_sampler.ring.begin_learning()
    one_sampler.status.retune(status_table.RetunedSettings(32, 1, 0.0, 1e9, 1e6))
    assert stepped_and_stored(20) == (20 * envs, writes)
    one_sampler.status.retune(status_table.RetunedSettings(32, 1, 0.0, 1e9))
    assert stepped_and_stored(20) == (20 * envs, 20 * envs)


def test_settings_in_force_are_read_as_they_were_written(status):
    assert status.header[status_table.RETUNED] == 0
    settings = status_table.RetunedSettings(256, 2, 0.25, 1e9, 8.0)
    status.retune(settings)
    assert (status.retuned_settings(), status.header[status_table.RETUNED]) == (settings, 1)


def test_only_the_first_samplers_work_until_the_tuner_allows_its_choice(status):
    told, now = Told(), [0.0]
    begun = dataclasses.replace(plan(), samplers=2, first_samplers=1)
    governing = GovernorLoop(begun, status, lambda level, text: None, reader=told, clock=lambda: now[0])

    def seconds(count):
        for _ in range(2 * count):
            now[0] += 0.5
            numbers = governing.update(reading(), {"learner": 7})
        return numbers["samplers_active"]

    assert (seconds(20), shares(status, 2)) == (1.0, [1.0, 0.0]), "no turns with one that was not started"
    governing.suspend()
    told.external_cpu_cores = 2.0
    assert (seconds(20), shares(status, 2)) == (1.0, [1.0, 0.0]), "the tuner has them"
    told.external_cpu_cores = 0.0
    governing.resume(2)
    assert (seconds(1), shares(status, 2)) == (2.0, [1.0, 1.0])
