"""The tuner's measurements in real processes: what is measured, what fails as data, and that nothing is left."""

import concurrent.futures
import contextlib
import dataclasses
import os
import signal
import time

import psutil
import pytest
from harness import PATIENCE_S, descendants, poll

from spreeze.config.layers import Layer, resolve
from spreeze.envs.probe import probe_env
from spreeze.modes import assemble
from spreeze.run_directory import remove_leftovers
from spreeze.runtime.assembly import assembled
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.tuner import measure, trials
from spreeze.tuner.measure import Measurer
from spreeze.tuner.problem import BATCH, DEVICE, ENVS, PRECISION, RATIO, SAMPLERS, THREADS, Setting, TrialResult
from spreeze.tuner.trials import REPLAY, ROLLOUTS, Pace, Trial
from spreeze.workers.roles import ROLES, role_of

pytestmark = pytest.mark.warm


def _learner(batch_size=32, threads=1, device="cpu", precision="float32"):
    return Setting({DEVICE: device, BATCH: batch_size, THREADS: threads, PRECISION: precision})


SMALL = _learner()


def _plan(env_id="Pendulum-v1", import_module=None, args=(), **parts):
    settings = resolve([Layer("user", {
        "env": {"id": env_id, "import_module": import_module, "args": list(args)}, "sac": {"hidden_sizes": [32, 32]},
        **parts,
    })])  # fmt: skip
    return RunPlan(
        settings=settings, spec=probe_env(env_id, import_module, steps=0, args=args).spec, samplers=1, free_core=False
    )


@pytest.fixture(scope="module")
def pendulum():
    return _plan()


def _measuring(plan, *, seconds=150.0, cap_bytes=4 * 10**9, interrupts=None):
    return Measurer(
        plan,
        usable_cores=2.0,
        memory_cap_bytes=cap_bytes,
        group_bytes=10**8,
        ends_s=time.monotonic() + seconds,
        interrupts=interrupts or Interrupts(),
    )


def _deaf(rate):
    """Hears nothing."""


def _joint(learner=SMALL, samplers=1, ratio=0.0):
    return Setting({**learner, SAMPLERS: samplers, ENVS: 2, RATIO: ratio})


@pytest.fixture
def short(monkeypatch):
    pace = Pace(repeats=5, settle_s=(0.1, 0.1), window_s=(0.3, 0.3))
    monkeypatch.setattr(measure, "REPLAY", REPLAY._replace(pace=pace))
    monkeypatch.setattr(measure, "_LONGEST_START_S", 100.0)  # other tests may keep the machine busy
    monkeypatch.setattr(measure, "_LONGEST_REPEAT_S", 0.06)


def test_updates_are_timed_three_times_in_rounds_and_told_as_they_are_known(pendulum, short):
    told = []
    settings = [_learner(batch_size=size) for size in (32, 2048)]
    with _measuring(pendulum) as measuring:
        rates = measuring.learner(settings, within_s=30.0, on_result=told.append)
        assert 0.0 < measuring.seconds_left() < 150.0
    assert told == rates
    assert [rate.setting for rate in rates] == settings
    assert all(len(rate.updates_per_s) == 3 and rate.failure is None and rate.memory_bytes > 10**7 for rate in rates)
    assert rates[0].updates > 2 * rates[1].updates
    assert descendants() == []


def test_a_batch_beyond_the_memory_cap_fails_alone(short):
    settings = [_learner(batch_size=size) for size in (32, 2_000_000)]
    with _measuring(_plan(replay={"capacity": 3_000_000}), cap_bytes=200_000_000) as measuring:
        small, large = sorted(
            measuring.learner(settings, within_s=30.0, on_result=_deaf), key=lambda rate: rate.setting[BATCH]
        )
    assert small.failure is None
    assert large.failure == "out of memory: more than the 0.2 GB limit of a candidate"
    assert large.updates_per_s == ()


def test_a_setting_that_the_schema_rejects_is_data(pendulum, short):
    with _measuring(pendulum) as measuring:
        (rate,) = measuring.learner([_learner(threads=0)], within_s=10.0, on_result=_deaf)
        (joint,) = measuring.joint([_joint().replace(ENVS, 0)], within_s=10.0, on_result=_deaf)
    assert "learner.threads = 0" in rate.failure
    assert "sampling.envs_per_sampler = 0" in joint.failure


@pytest.mark.slow
def test_a_device_or_precision_that_is_not_there_is_data(pendulum, short):
    gpu, coarse = _learner(batch_size=32, device="cuda:7"), _learner(batch_size=32, precision="tf32")
    with _measuring(pendulum) as measuring:
        rates = {rate.setting: rate for rate in measuring.learner([gpu, coarse, SMALL], within_s=30.0, on_result=_deaf)}
    assert "cuda:7" in rates[gpu].failure
    assert "tf32" in rates[coarse].failure, "no processor has it"
    assert rates[SMALL].failure is None


def _fork_of_the_helper():
    """The process that measures now: a child of the one child that loaded torch."""
    for child in descendants():
        if child.ppid() != os.getpid() and "spreeze.tuner.update_probe" in child.cmdline():
            return child
    return None


@contextlib.contextmanager
def _aside(act):
    """Does something in a thread meanwhile; its exception fails the test."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(act)
        yield
        future.result(timeout=PATIENCE_S)


@pytest.mark.cold
def test_a_candidate_that_crashes_or_hangs_is_data_and_the_next_is_measured(pendulum, monkeypatch):
    monkeypatch.setattr(measure, "_LONGEST_REPEAT_S", 0.5)
    done = []
    with _measuring(pendulum) as measuring:
        for number in (signal.SIGSEGV, signal.SIGSTOP):
            with (
                monkeypatch.context() as impatient,
                _aside(lambda number=number: poll(_fork_of_the_helper, what="a measurement").send_signal(number)),
            ):
                impatient.setattr(measure, "_DEADLINE_S", 2.0)  # the next one may be slow
                measuring.learner([_learner(batch_size=64)], within_s=30.0, on_result=done.append)
        measuring.learner([SMALL], within_s=3.0, on_result=done.append)
    assert [one.failure for one in done] == ["ended by SIGSEGV", "not done within 2 s", None]


@pytest.mark.slow
def test_a_helper_that_is_killed_costs_one_candidate(pendulum, short):
    done = []
    with _measuring(pendulum) as measuring:
        measuring.learner([SMALL], within_s=10.0, on_result=done.append)
        helper = next(child for child in descendants() if child.ppid() == os.getpid())
        helper.kill()
        measuring.learner([SMALL, _learner(batch_size=64)], within_s=20.0, on_result=done.append)
    assert [rate.failure is None for rate in done] == [True, False, True]
    assert "its process ended with -9" in done[1].failure


def test_a_helper_that_cannot_start_is_told_once_for_all(pendulum, monkeypatch):
    monkeypatch.setattr(measure, "child_environment", lambda threads, nonce: {"PATH": "/nowhere"})
    monkeypatch.setattr(measure.sys, "executable", "/bin/false")
    with _measuring(pendulum) as measuring:
        rates = measuring.learner([SMALL, _learner(batch_size=64)], within_s=5.0, on_result=_deaf)
    assert [rate.failure for rate in rates] == ["its process ended with 1"] * 2


def test_settings_that_differ_in_samplers_share_one_group(pendulum, short):
    told, learners = [], set()

    def hear(rate):
        told.append(rate)
        learners.update(one.pid for one in descendants() if role_of(one.name()) is ROLES["learner"])

    settings = [_joint(samplers=1), _joint(samplers=2), _joint(learner=_learner(batch_size=256))]
    with _measuring(pendulum) as measuring:
        rates = measuring.joint(settings, within_s=30.0, on_result=hear)
    assert told == rates
    assert {rate.setting for rate in rates} == set(settings)
    for rate in rates:
        assert rate.failure is None
        assert len(rate.env_steps_per_s) == len(rate.updates_per_s) == len(rate.cpu_share) == REPLAY.pace.repeats
        assert rate.ran
        assert 0 < rate.cpu < 1.6
        assert rate.memory_bytes > 10**7
    assert len(learners) == 2
    assert descendants() == []


@pytest.mark.parametrize("ratio", [0.0, 64.0])
def test_the_samplers_of_a_trial_are_told_the_asked_ratio(pendulum, tmp_path, ratio):
    plan = trials.replay_plan(pendulum, _joint(ratio=ratio), 10**9)
    with assembled(assemble, plan, tmp_path, 0.0) as run:
        assert run.specs["sampler-0"].job.limiter.minimum == ratio


def test_samplers_wait_at_the_asked_ratio_once_their_lead_is_used_up(pendulum, short):
    held = _joint(ratio=64.0)
    candidate = TrialResult(trial="joint", setting=held)
    with Trial(
        REPLAY, pendulum, [candidate], _deaf, usable_cores=2.0, memory_cap_bytes=4 * 10**9, interrupts=Interrupts()
    ) as trial:
        trial.start()
        trial.begin(PATIENCE_S)
        trial.resume_workers()

        def ratio():
            trial.measure(candidate, 0.0, 0.5)
            return candidate.updates_per_s[-1] * 32 / max(candidate.env_steps_per_s[-1], 1e-9)

        # On a crowded machine samplers, which have the lower priority, may take fewer steps than they are allowed.
        poll(lambda: ratio() > 50.0, what="64 samples per insert")


def test_samplers_that_keep_failing_are_data(short):
    plan = _plan("spreeze/Fault-v0", "fault_envs")
    os.environ["SPREEZE_FAULT_EXIT_AT"] = "3"
    try:
        with _measuring(plan) as measuring:
            (rate,) = measuring.joint([_joint()], within_s=20.0, on_result=_deaf)
    finally:
        del os.environ["SPREEZE_FAULT_EXIT_AT"]
    assert rate.env_steps_per_s == ()
    assert "sampler-0" in rate.failure


def test_an_environment_without_a_step_within_the_deadline_is_data(short, monkeypatch):
    monkeypatch.setattr(measure, "_LONGEST_START_S", 2.0)
    plan = _plan("spreeze/Fault-v0", "fault_envs")
    os.environ["SPREEZE_FAULT_HANG_AT"] = "1"
    try:
        with _measuring(plan) as measuring:
            (rate,) = measuring.joint([_joint()], within_s=10.0, on_result=_deaf)
    finally:
        del os.environ["SPREEZE_FAULT_HANG_AT"]
    assert "sampler-0 did no env step within 2 s" in rate.failure


def test_no_room_in_shared_memory_is_data(pendulum, monkeypatch, short):
    from spreeze.transport import shared_memory

    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 1000)
    with _measuring(pendulum) as measuring:
        (rate,) = measuring.joint([_joint()], within_s=10.0, on_result=_deaf)
    assert "1000 are available" in rate.failure


def test_a_crew_beyond_the_memory_cap_is_ended(pendulum, short):
    with _measuring(pendulum, cap_bytes=30_000_000) as measuring:
        (rate,) = measuring.joint([_joint()], within_s=20.0, on_result=_deaf)
    assert rate.failure.startswith("out of memory")


@pytest.mark.parametrize("stage", ["learner", "joint"])
def test_a_wish_to_stop_ends_everything_at_once(pendulum, stage, short):
    interrupts = Interrupts()

    def stop(rate=None):
        interrupts.count = 1

    settings = {"learner": [SMALL, _learner(batch_size=64)], "joint": [_joint(), _joint(samplers=2)]}[stage]
    with pytest.raises(KeyboardInterrupt), _measuring(pendulum, interrupts=interrupts) as measuring:
        getattr(measuring, stage)(settings, within_s=20.0, on_result=stop)
    assert descendants() == []


def test_a_wish_to_stop_ends_a_window_that_waits_for_a_rollout_s_end():
    candidates = [TrialResult(trial="rollout", setting=Setting({}))]
    trial = Trial(ROLLOUTS, None, candidates, _deaf, usable_cores=1.0, memory_cap_bytes=1, interrupts=Interrupts())
    trial.edge_s, trial._mark, trial._interrupts.count = PATIENCE_S, lambda: 1, 1
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trial._edge()
    assert time.monotonic() - start < PATIENCE_S / 2


def test_what_a_killed_tuner_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = next(pid for pid in range(400_000, 500_000) if not psutil.pid_exists(pid))
    for pid in (gone, os.getpid()):
        (tmp_path / f"spreeze-tune-{pid}-abc" / "weights").mkdir(parents=True)
    (tmp_path / "spreeze-tune-mine").mkdir()
    remove_leftovers("spreeze-tune-")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"spreeze-tune-{os.getpid()}-abc", "spreeze-tune-mine"]


@pytest.mark.parametrize("setting", [
    _learner(batch_size=96), _learner(batch_size=32, threads=3),
    _learner(batch_size=32, device="cuda:1"), _learner(batch_size=32, precision="bfloat16"),
])  # fmt: skip
def test_a_learner_alone_and_one_beside_samplers_are_measured_with_the_same_settings(pendulum, monkeypatch, setting):
    beside = trials.replay_plan(pendulum, _joint(setting), 10**9).config
    turns = []
    monkeypatch.setattr(
        measure.UpdateHelper, "run_turn", lambda self, turn: turns.append(turn) or {"failure": "not tried"}
    )
    with _measuring(pendulum) as measuring:
        measuring.learner([setting], within_s=1.0, on_result=_deaf)
    assert turns[0].learner == beside.learner
    assert turns[0].algorithm == dataclasses.asdict(beside.algorithm)
    assert {name: getattr(turns[0].learner, name.split(".")[1]) for name in setting} == dict(setting)


@pytest.mark.slow
def test_one_process_of_a_device_measures_several_batches_and_a_failure_costs_it_alone(pendulum, short, monkeypatch):
    monkeypatch.setattr(measure, "starts_slowly", lambda device: True)  # as if its start cost seconds
    pids, failures = [], []

    def hear(rate):
        failures.append(rate.failure)
        pids.append({child.pid for child in descendants() if child.ppid() != os.getpid()})

    settings = [_learner(batch_size=32), _learner(batch_size=64)]
    with _measuring(pendulum) as measuring:
        first = measuring.learner(settings, within_s=60.0, on_result=hear)
        measuring.learner([_learner(batch_size=32, precision="tf32")], within_s=20.0, on_result=hear)
        measuring.learner([_learner(batch_size=128)], within_s=20.0, on_result=hear)
    assert all(len(rate.updates_per_s) == measure.REPEATS for rate in first)
    assert [failure is None for failure in failures] == [True, True, False, True]
    one, same, gone, fresh = pids
    assert one == same
    assert len(one) == len(fresh) == 1
    assert gone == set()
    assert fresh != one
    assert descendants() == []


class Sleepy:
    """The clock of a process that is stopped for a minute before its second reading, as by Ctrl-Z."""

    def __init__(self):
        self.now_s = self.slept_s = 0.0
        self.readings = 0

    def __call__(self):
        self.readings += 1
        self.slept_s += 60.0 * (self.readings == 2)
        self.now_s += 0.1
        return self.now_s


def test_what_was_measured_while_the_tuner_was_stopped_is_measured_again(pendulum, monkeypatch):
    clock, answers, windows = Sleepy(), [], []
    monkeypatch.setattr(measure, "AWAKE", clock)
    monkeypatch.setattr(trials, "AWAKE", clock)
    monkeypatch.setattr(measure.UpdateHelper, "_result_of", lambda self, turn: answers.append(clock()) or clock())
    helper = measure.UpdateHelper(pendulum, 10**9, Interrupts())
    assert helper.run_turn(None) == pytest.approx(0.4)
    assert len(answers) == 2
    clock.readings = 0
    candidate = TrialResult(trial=trials.JOINT, setting=_joint())
    trial = Trial(
        REPLAY, pendulum, [candidate], _deaf, usable_cores=1.0, memory_cap_bytes=10**9, interrupts=Interrupts()
    )
    for name, value in {
        "_prepare": windows.append,
        "_pass_time": _deaf,
        "_cpu_s": float,
        "_edge": lambda: (clock(), (1000.0 * clock.now_s, 10.0 * clock.now_s)),
    }.items():
        monkeypatch.setattr(trial, name, value)
    trial.measure(candidate, 0.1, 0.1)
    assert len(windows) == 2
    assert candidate.env_steps_per_s == (pytest.approx(1000.0),)
    assert candidate.updates_per_s == (pytest.approx(10.0),)


def test_repeats_are_as_long_as_measured_starts_leave_time_for(pendulum, monkeypatch):
    clock, turns = [0.0], []
    monkeypatch.setattr(measure, "AWAKE", lambda: clock[0])

    def answer(self, turn):
        start_s = 8.0 if not turns else 0.5  # the first one makes the context
        turns.append(turn)
        clock[0] += start_s + turn.repeats * turn.repeat_s
        return {"updates_per_s": [100.0] * turn.repeats, "memory_bytes": 1, "start_s": start_s}

    monkeypatch.setattr(measure.UpdateHelper, "run_turn", answer)
    settings = [_learner(batch_size=2**power, device="cuda:0") for power in range(7, 13)]
    rates = _measuring(pendulum).learner(settings, within_s=14.0, on_result=_deaf)
    assert [rate.setting for rate in rates] == settings, "none starved"
    assert all(isinstance(rate, TrialResult) and len(rate.updates_per_s) == measure.REPEATS for rate in rates)
    assert clock[0] <= 14.0
    assert turns[0].repeat_s < turns[-1].repeat_s


@pytest.mark.slow
def test_the_time_limit_holds_where_every_candidate_is_done_in_one_turn(pendulum, monkeypatch):
    monkeypatch.setattr(measure, "REPEATS", 1)
    settings = [_learner(batch_size=size) for size in (32, 64, 128, 256)]
    with _measuring(pendulum) as measuring:
        rates = measuring.learner(settings, within_s=1e-3, on_result=_deaf)
    assert [rate.setting for rate in rates] == settings[:1], "one is always measured; no time is left for others"


def test_samplers_of_a_host_are_measured_without_a_learner_and_nothing_is_left(pendulum, short):
    asked = [Setting({SAMPLERS: count, ENVS: 2}) for count in (1, 2)]
    with Measurer(
        pendulum,
        usable_cores=2.0,
        memory_cap_bytes=4 * 10**9,
        group_bytes=10**8,
        ends_s=time.monotonic() + 150.0,
        interrupts=Interrupts(),
        samplers_only=True,
    ) as measurer:
        found = measurer.joint(asked, within_s=30.0, on_result=_deaf)
    assert [one.setting for one in found] == asked
    for one in found:
        assert (one.ran, one.failure, one.updates) == (True, None, 0.0)
        assert one.env_steps > 0
    assert descendants() == []
