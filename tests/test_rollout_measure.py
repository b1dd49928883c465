"""The on-policy tuner's measurements in real processes, and what of its facts and choices reaches a run."""

import dataclasses
import io
import tempfile
import time

import psutil
import pytest

from spreeze.cli.terminal import show_tuning
from spreeze.config.layers import Layer, resolve
from spreeze.envs.probe import Probe, probe_env
from spreeze.errors import ConfigError
from spreeze.machine.hardware import read_machine
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.tuner import rollout_measure, run
from spreeze.tuner.rollout_measure import RolloutMeasurer, measured_plan
from spreeze.tuner.rollout_search import RolloutRate, RolloutSetting
from spreeze.tuner.run import check_tunable, configured, pins, rollout_knobs, setting_names
from spreeze.types import EnvSpec

SMALL = RolloutSetting(executors=1, envs_per_executor=2, actors=1, sync_interval=16, minibatches=4)
SIZES = {"executor_bytes": 10**8, "env_bytes": 10**7, "learner_bytes": 5 * 10**8}


def settings_of(**parts):
    return resolve([Layer("user", {"env": {"id": "CartPole-v1"}, "run": {"mode": "hts", "algo": "ppo"}, **parts})])


@pytest.fixture(scope="module")
def plan():
    return RunPlan(settings=settings_of(), spec=probe_env("CartPole-v1", steps=0).spec, samplers=1, free_core=False)


def measuring(plan, cap_bytes=4 * 10**9, interrupts=None):
    return RolloutMeasurer(plan, usable_cores=2.0, memory_cap_bytes=cap_bytes, ends_s=time.monotonic() + 150.0,
                            interrupts=interrupts or Interrupts())


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(rollout_measure, "_LONGEST_START_S", 100.0)  # other tests may keep the machine busy


def test_settings_with_and_without_actors_are_measured_beside_the_learner_and_nobody_is_left(plan, patient):
    settings = [SMALL, dataclasses.replace(SMALL, actors=0), dataclasses.replace(SMALL, minibatches=5)]
    told = []
    rates = measuring(plan).rollouts(settings, within_s=60.0, on_rate=told.append)
    assert [rate.setting for rate in rates] == [rate.setting for rate in told] == settings
    for rate in rates[:2]:
        assert rate.failure is None, rate.failure
        assert len(rate.env_steps_per_s) == len(rate.cpu_share) == 3
        assert min(rate.env_steps_per_s) > 0.0
        assert rate.memory_bytes > 10**7
    assert "does not divide" in rates[2].failure
    assert psutil.Process().children(recursive=True) == []


def test_too_much_memory_is_a_result_and_a_wish_to_stop_ends_everything(plan, patient):
    (rate,) = measuring(plan, cap_bytes=10**6).rollouts([SMALL], within_s=60.0, on_rate=lambda rate: None)
    assert "out of memory" in rate.failure
    assert rate.env_steps_per_s == ()
    interrupts = Interrupts()
    interrupts.count = 1
    with pytest.raises(KeyboardInterrupt):
        measuring(plan, interrupts=interrupts).rollouts([SMALL], within_s=60.0, on_rate=lambda rate: None)
    assert psutil.Process().children(recursive=True) == []


def test_a_measured_plan_has_the_setting_and_no_stop_condition(plan):
    found = measured_plan(plan, SMALL)
    assert (found.samplers, found.actors, found.batch_size) == (1, 1, 8)
    assert found.config.stop.updates is None
    assert not found.config.visualizer.enabled


def test_facts_come_from_settings_and_machine():
    settings = settings_of(rollout={"executors": 3, "sync_interval": 32})
    found = configured(settings.config, 6.0)
    assert (found.executors, found.envs_per_executor, found.actors, found.sync_interval) == (3, 8, 0, 32)
    assert configured(settings_of().config, 6.0).executors == 6
    assert pins(settings) == {"executors", "sync_interval"}
    knobs = rollout_knobs(settings, 6.0, 8 * 10**9, **SIZES)
    assert (knobs.cores, knobs.configured, knobs.pins) == (6.0, found, pins(settings))


def test_a_resumed_run_keeps_its_environments_and_may_change_its_actors():
    values = {"run": {"mode": "hts", "algo": "ppo"}, "rollout": {"executors": 2, "actors": 1, "sync_interval": 64}}
    assert pins(resolve([Layer("resumed run", values)])) == {"executors", "sync_interval"}


def test_an_algorithm_without_minibatches_has_none_to_choose():
    assert "ppo.minibatches" in setting_names(settings_of().config).values()
    assert "minibatches" not in setting_names(settings_of(run={"mode": "hts", "algo": "a2c"}).config)


def test_the_serial_mode_has_nothing_to_choose():
    check_tunable(settings_of().config)
    with pytest.raises(ConfigError, match="use --mode hts"):
        check_tunable(settings_of(run={"mode": "serial", "algo": "a2c"}).config)


# --- from the question to the layer of settings ---

SPEC = EnvSpec(env_id="CartPole-v1", import_module=None, obs_dim=4, action_dim=1, action_low=(), action_high=(),
               num_actions=2, max_episode_steps=500, reward_threshold=475.0)  # fmt: skip


class Asleep:
    """Stands in for the measurements: environments that sleep, so that executors add up to four."""

    asked = 0

    def __init__(self, plan, **facts):
        type(self).asked += 1

    def seconds_left(self):
        return 50.0

    def rollouts(self, settings, *, within_s, on_rate):
        rates = [RolloutRate(setting=one, env_steps_per_s=(1000.0 * min(one.executors, 4),) * 3) for one in settings]
        for rate in rates:
            on_rate(rate)
        return rates


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(run, "RolloutMeasurer", Asleep)
    monkeypatch.setattr(Asleep, "asked", 0)
    probe = Probe(spec=SPEC, step_us_median=None, step_cv=None, first_reset_s=0.1, memory_bytes=10**6)
    base = read_machine()
    machine = dataclasses.replace(base, cores=dataclasses.replace(base.cores, usable=2.0))

    def tune(fresh=False, **parts):
        rows = []
        listener = run.Listener(say=lambda text: None, on_row=rows.append)
        return *run.tuned_layer(settings_of(**parts), probe, machine, Interrupts(), listener, fresh=fresh), rows

    return tune


def test_the_choice_is_a_layer_that_a_run_can_be_planned_with_and_is_kept(tuned):
    layer, record, rows = tuned()
    settings = settings_of().with_layer(layer)
    part = settings.config.rollout
    assert (part.executors, part.envs_per_executor, part.sync_interval) == (4, 8, 32)
    RunPlan(settings=settings, spec=SPEC, samplers=part.executors, actors=part.actors, free_core=False)
    assert [row.as_json() for row in rows] == record["rollout_rates"]
    assert (record["env"], record["algo"], record["objective"]) == ("CartPole-v1", "ppo", "rollout")
    assert (tuned()[0], Asleep.asked) == (layer, 1)
    tuned(rollout={"correction": "none"})
    tuned(rollout={"executors": 2})
    assert Asleep.asked == 3, "another question"


def test_what_is_set_stays_and_a2c_gets_no_minibatches(tuned):
    layer, record, _ = tuned(run={"mode": "hts", "algo": "a2c"}, rollout={"executors": 3})
    assert layer.values["rollout"]["executors"] == 3
    assert "ppo" not in layer.values
    assert record["pinned"] == ["rollout.executors"]


def test_the_tables_show_every_candidate_and_the_choice(tuned):
    _, record, _ = tuned()
    out = io.StringIO()
    show_tuning(record, out, reasons=True)
    lines = out.getvalue().splitlines()
    assert sum("4,000" in line and "chosen" in line for line in lines) == 1
    assert any("rollout.executors = 4: 4 executors: 4000 env steps/s" in line for line in lines)
    assert not any("updates alone" in line for line in lines)


def test_the_serial_mode_is_refused_before_anything_is_measured(tuned):
    with pytest.raises(ConfigError, match="leaves nothing to choose"):
        tuned(run={"mode": "serial", "algo": "ppo"})
    assert Asleep.asked == 0
