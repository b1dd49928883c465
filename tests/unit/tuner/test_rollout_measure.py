"""The on-policy tuner's measurements in real processes, and what of its facts and choices reaches a run."""

import contextlib
import dataclasses
import io
import tempfile
import time

import pytest
from harness import descendants

from spreeze.cli.terminal import show_tuning
from spreeze.config.layers import Layer, resolve
from spreeze.envs.probe import Probe, probe_env
from spreeze.errors import ConfigError
from spreeze.machine.hardware import read_machine
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.tuner import measure, run
from spreeze.tuner.knobs import fit_rollout
from spreeze.tuner.measure import Measurer
from spreeze.tuner.problem import (
    INFERENCE_WORKERS,
    LEARNERS,
    ROLLOUT,
    ROLLOUT_ENVS,
    ROLLOUT_SAMPLERS,
    SYNC_INTERVAL,
    Setting,
    TrialResult,
)
from spreeze.tuner.run import check_tunable, problem_of
from spreeze.tuner.trials import ROLLOUTS, Pace, rollout_plan
from spreeze.types import Choices, EnvSpec

pytestmark = pytest.mark.warm

SMALL = Setting({ROLLOUT_SAMPLERS: 1, ROLLOUT_ENVS: 2, INFERENCE_WORKERS: 1, SYNC_INTERVAL: 16})


SPEC = EnvSpec(env_id="CartPole-v1", import_module=None, obs_dim=4, action=Choices((2,)),
               max_episode_steps=500, reward_threshold=475.0)  # fmt: skip
PROBE = Probe(spec=SPEC, step_us_median=50.0, step_cv=0.1, memory_bytes=10**6)


def settings_of(**parts):
    return resolve([Layer("user", {"env": {"id": "CartPole-v1"}, "run": {"mode": "hts", "algo": "ppo"}, **parts})])


@pytest.fixture(scope="module")
def plan():
    return RunPlan(settings=settings_of(), spec=probe_env("CartPole-v1", steps=0).spec, samplers=1, free_core=False)


def measuring(plan, cap_bytes=4 * 10**9, interrupts=None, cores=2.0, seconds=150.0):
    return Measurer(
        plan,
        usable_cores=cores,
        memory_cap_bytes=cap_bytes,
        group_bytes=10**8,
        ends_s=time.monotonic() + seconds,
        interrupts=interrupts or Interrupts(),
    )


@pytest.fixture
def patient(monkeypatch):
    pace = Pace(repeats=3, settle_s=(0.1, 0.1), window_s=(0.2, 0.2))
    monkeypatch.setattr(measure, "ROLLOUTS", ROLLOUTS._replace(pace=pace))
    monkeypatch.setattr(measure, "_LONGEST_START_S", 100.0)  # other tests may keep the machine busy


def test_settings_with_and_without_inference_workers_are_measured_beside_the_learner_and_nobody_is_left(plan, patient):
    settings = [SMALL, SMALL.replace(INFERENCE_WORKERS, 0), SMALL.replace(INFERENCE_WORKERS, 2)]
    told = []
    found = measuring(plan).joint(settings, within_s=60.0, on_result=told.append)
    assert told == found
    rates = {rate.setting: rate for rate in found}
    assert set(rates) == set(settings)
    for rate in (rates[one] for one in settings[:2]):
        assert rate.failure is None, rate.failure
        assert len(rate.env_steps_per_s) == len(rate.updates_per_s) == len(rate.cpu_share) == 3
        assert max(rate.env_steps_per_s) > 0.0, "one window of a busy machine may be empty"
        assert rate.memory_bytes > 10**7
    assert "more than the 1 samplers" in rates[settings[2]].failure
    assert descendants() == []


class StartedTrial(contextlib.ExitStack):
    """Stands for a trial; ``seen``, which a test sets, lists its starts in order."""

    def __init__(self, kind, plan, candidates, finish, **_):
        super().__init__()
        self.candidates, self._finish = candidates, finish

    def attempt(self, act):
        act()

    def start(self):
        self.seen.append(("start", self.candidates[0].setting[ROLLOUT_ENVS]))

    def begin(self, within_s):
        self.seen.append(("begin", self.candidates[0].setting[ROLLOUT_ENVS]))

    def take_turn(self, number, settle_s, window_s):
        """Measures nothing."""

    def finish(self, candidate):
        self.candidates.remove(candidate)
        self._finish(candidate)


@pytest.mark.parametrize(("cores", "seconds", "expected"), [
    (2.0, 150.0, ["start 1", "begin 1", "start 2", "begin 2", "start 3", "begin 3"]),
    (16.0, 150.0, ["start 1", "start 2", "start 3", "begin 1", "begin 2", "begin 3"]),
    (2.0, 6.0, ["start 1", "begin 1"]),
])  # fmt: skip
def test_as_many_candidates_start_together_as_there_are_cores_and_the_first_of_them_in_any_case(
    plan, monkeypatch, cores, seconds, expected
):
    monkeypatch.setattr(measure, "Trial", StartedTrial)
    monkeypatch.setattr(StartedTrial, "seen", [], raising=False)
    settings = [SMALL.replace(ROLLOUT_ENVS, envs) for envs in (1, 2, 3)]
    measuring(plan, cores=cores, seconds=seconds).joint(settings, within_s=seconds, on_result=lambda rate: None)
    assert [f"{what} {envs}" for what, envs in StartedTrial.seen] == expected


def test_too_much_memory_is_a_result_and_a_wish_to_stop_ends_everything(plan, patient):
    (rate,) = measuring(plan, cap_bytes=10**6).joint([SMALL], within_s=60.0, on_result=lambda rate: None)
    assert "out of memory" in rate.failure
    assert rate.env_steps_per_s == ()
    interrupts = Interrupts()
    interrupts.count = 1
    with pytest.raises(KeyboardInterrupt):
        measuring(plan, interrupts=interrupts).joint([SMALL], within_s=60.0, on_result=lambda rate: None)
    assert descendants() == []


def test_several_learners_that_mix_are_measured_with_their_samplers_and_nobody_is_left(patient):
    settings = settings_of(run={"mode": "gala", "algo": "a2c"})
    plan = RunPlan(settings=settings, spec=probe_env("CartPole-v1", steps=0).spec, samplers=1, free_core=False)
    wanted = [Setting({LEARNERS: 2, ROLLOUT_SAMPLERS: count, ROLLOUT_ENVS: 2, SYNC_INTERVAL: 16}) for count in (2, 4)]
    found = measuring(plan).joint(wanted, within_s=60.0, on_result=lambda rate: None)
    assert {rate.setting: rate.failure for rate in found} == dict.fromkeys(wanted)
    for rate in found:
        assert max(rate.env_steps_per_s) > 0.0
        assert max(rate.updates_per_s) > 0.0
    assert descendants() == []


def test_a_measured_plan_has_the_setting_and_no_stop_condition(plan):
    found = rollout_plan(plan, SMALL, 10**9)
    assert (found.samplers, found.inference_workers, found.batch_size) == (1, 1, 32)
    assert found.config.stop.updates is None
    assert not found.config.visualizer.enabled


def problem(settings, cores=6.0):
    machine = read_machine()
    machine = dataclasses.replace(machine, cores=dataclasses.replace(machine.cores, usable=cores))
    return problem_of(settings, PROBE, machine, 8 * 10**9)


def test_facts_come_from_settings_and_machine():
    found = problem(settings_of(rollout={"samplers": 3, "sync_interval": 32}))
    assert dict(found.configured) == {ROLLOUT_SAMPLERS: 3, ROLLOUT_ENVS: 8, INFERENCE_WORKERS: 0, SYNC_INTERVAL: 32}
    assert (found.cores, found.pins) == (6.0, {ROLLOUT_SAMPLERS, SYNC_INTERVAL})
    assert problem(settings_of()).configured[ROLLOUT_SAMPLERS] == 6


@pytest.mark.parametrize(("cores", "interval"), [(1.0, 256), (2.0, 128), (8.0, 32), (64.0, 16)])
def test_a_rollout_has_as_many_env_steps_on_any_number_of_cores(cores, interval):
    assert problem(settings_of(), cores).configured[SYNC_INTERVAL] == interval


@pytest.mark.parametrize(("asked", "learners", "samplers"), [
    ({}, 6, 6), ({"samplers": 4}, 4, 4), ({"samplers": 9}, 3, 9), ({"samplers": 7}, 7, 7), ({"learners": 4}, 4, 4),
    ({"learners": 2}, 2, 6), ({"learners": 2, "samplers": 8}, 2, 8), ({"learners": 8}, 8, 8),
])  # fmt: skip
def test_learners_that_mix_begin_with_a_core_each_and_share_the_samplers_evenly(asked, learners, samplers):
    own = {name: {name: value} for name, value in asked.items()}
    settings = settings_of(
        run={"mode": "gala", "algo": "a2c", **own.get("learners", {})}, rollout=own.get("samplers", {})
    )
    check_tunable(settings.config)
    found = problem(settings)
    assert (found.configured[LEARNERS], found.configured[ROLLOUT_SAMPLERS]) == (learners, samplers)
    assert fit_rollout(found, found.configured) == found.configured


def test_a_resumed_run_keeps_its_environments_and_may_change_its_inference_workers():
    values = {"env": {"id": "CartPole-v1"}, "run": {"mode": "hts", "algo": "ppo"},
              "rollout": {"samplers": 2, "inference_workers": 1, "sync_interval": 64}}  # fmt: skip
    assert problem(resolve([Layer("resumed run", values)])).pins == {ROLLOUT_SAMPLERS, SYNC_INTERVAL}


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_what_is_learned_from_a_rollout_is_not_the_tuners_to_choose(algo):
    assert len(problem(settings_of(run={"mode": "hts", "algo": algo})).configured) == 4


def test_the_serial_mode_has_nothing_to_choose():
    check_tunable(settings_of().config)
    with pytest.raises(ConfigError, match="use --mode hts"):
        check_tunable(settings_of(run={"mode": "serial", "algo": "a2c"}).config)


# --- from the question to the layer of settings ---


class Asleep:
    """Stands in for the measurements: environments that sleep, so that samplers add up to four."""

    asked = 0

    def __init__(self, plan, **facts):
        type(self).asked += 1

    def seconds_left(self):
        return 50.0

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def joint(self, settings, *, within_s, on_result):
        results = [TrialResult(trial=ROLLOUT, setting=one,
                               env_steps_per_s=(1000.0 * min(one[ROLLOUT_SAMPLERS], 4),) * 3,
                               updates_per_s=(10.0,) * 3) for one in settings]  # fmt: skip
        for result in results:
            on_result(result)
        return results


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(run, "Measurer", Asleep)
    monkeypatch.setattr(Asleep, "asked", 0)
    monkeypatch.setattr(run.ExternalLoad, "cores", lambda self: 0.0)  # whatever else this machine does
    base = read_machine()
    machine = dataclasses.replace(base, cores=dataclasses.replace(base.cores, usable=2.0))

    def tune(fresh=False, **parts):
        rows = []
        listener = run.TunerCallbacks(say=lambda text: None, on_result=rows.append)
        tuning = run.Tuning(settings_of(**parts), PROBE, machine, Interrupts(), listener)
        record = (None if fresh else tuning.known()) or tuning.measured(spent_s=0.0, fresh=fresh)
        return run.layer_of(record), record, rows

    return tune


def test_the_choice_is_a_layer_that_a_run_can_be_planned_with_and_is_kept(tuned):
    layer, record, rows = tuned()
    settings = settings_of().with_layer(layer)
    part = settings.config.rollout
    assert (part.samplers, part.envs_per_sampler, part.sync_interval) == (4, 8, 64)
    RunPlan(
        settings=settings, spec=SPEC, samplers=part.samplers, inference_workers=part.inference_workers, free_core=False
    )
    assert [row.as_json() for row in rows] == record["rollout_rates"]
    assert (record["env"], record["algo"], record["objective"]) == ("CartPole-v1", "ppo", "rollout")
    assert (tuned()[0], Asleep.asked) == (layer, 1)
    tuned(rollout={"correction": "none"})
    tuned(rollout={"samplers": 2})
    assert Asleep.asked == 3, "another question"


def test_what_is_set_stays(tuned):
    layer, record, _ = tuned(run={"mode": "hts", "algo": "a2c"}, rollout={"samplers": 3})
    assert layer.values["rollout"]["samplers"] == 3
    assert record["pinned"] == ["rollout.samplers"]


def test_the_tables_show_every_candidate_and_the_choice(tuned):
    _, record, _ = tuned()
    out = io.StringIO()
    show_tuning(record, out, reasons=True)
    lines = out.getvalue().splitlines()
    chosen = sum(rate["setting"] == record["choice"] for rate in record["rollout_rates"])
    assert sum("4,000" in line and "chosen" in line for line in lines) == chosen, "once for each measurement"
    assert any("rollout.samplers = 4: 4 samplers: " in line for line in lines), lines
    assert not any("The learner alone" in line for line in lines)


@pytest.mark.parametrize(("mode", "more"), [("hts", {}), ("gala", {}), ("gala", {"learners": 3}), ("impact", {})])
def test_where_nothing_can_be_measured_a_run_gets_what_the_choice_says(tuned, monkeypatch, mode, more):
    def late(self, settings, *, within_s, on_result):
        results = [
            TrialResult(trial=ROLLOUT, setting=one, failure="0 rollouts within 23 s", starved=True) for one in settings
        ]
        for result in results:
            on_result(result)
        return results

    monkeypatch.setattr(Asleep, "joint", late)
    parts = {"run": {"mode": mode, "algo": "impact" if mode == "impact" else "ppo", **more}}
    layer, record, _ = tuned(**parts)
    assert record["fell_back"]
    assert "0 rollouts within 23 s" in record["provisional"]["rows"]
    config = settings_of(**parts).with_layer(layer).config
    part, choice = config.rollout, record["choice"]
    assert choice[ROLLOUT_SAMPLERS] == (part.samplers or config.rollout_samplers(2.0))
    assert choice["rollout.envs_per_sampler"] == part.envs_per_sampler
    if mode == "gala":
        assert choice["run.learners"] == config.run.learners >= 2
        assert choice[ROLLOUT_SAMPLERS] % config.run.learners == 0


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_the_serial_mode_is_refused_before_anything_is_measured(tuned, algo):
    with pytest.raises(ConfigError, match="has nothing to tune"):
        tuned(run={"mode": "serial", "algo": algo})
    assert Asleep.asked == 0
