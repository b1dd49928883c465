"""What the tuner remembers: reused on the same machine for the same question, measured anew otherwise."""

import fcntl
import json
import os

import pytest

from spreeze import tuning
from spreeze.autotune.sweep import JointRate, UpdateRate
from spreeze.envs.probe import Probe
from spreeze.errors import SpreezeError, WorkerError
from spreeze.hardware import read_machine
from spreeze.settings import Layer, resolve
from spreeze.types import EnvSpec
from spreeze.workers.interrupts import Interrupts

SPEC = EnvSpec(
    env_id="Pendulum-v1", import_module=None, obs_dim=3, action_dim=1, action_low=(-2.0,), action_high=(2.0,),
    max_episode_steps=200, reward_threshold=None,
)  # fmt: skip
PROBE = Probe(spec=SPEC, step_us_median=50.0, step_cv=0.1, first_reset_s=0.1, memory_bytes=10**6)


class Bench:
    """Stands in for the measurements; says how often it was asked."""

    def __init__(self, monkeypatch, cache):
        self.measured, self.said, self.fail = 0, [], False
        self.cache = cache / "spreeze"
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setattr(tuning, "measure_updates", self._updates)
        monkeypatch.setattr(tuning, "measure_samplers", self._samplers)

    def _updates(self, plan, sizes, threads, interrupts):
        self.measured += 1
        if self.fail:
            return [UpdateRate(batch_size=sizes[0], threads=threads, updates_per_s=(), failure="it crashed")]
        return [UpdateRate(batch_size=s, threads=threads, updates_per_s=(1 / (1e-3 + 1e-5 * s),)) for s in sizes]

    def _samplers(self, plan, counts, envs, batch, threads, interrupts):
        return [JointRate(samplers=n, env_steps_per_s=(1000.0 * n,), updates_per_s=(100.0,)) for n in counts]

    def tune(self, user=None, *, fresh=False, probe=PROBE):
        settings = resolve([Layer("user", {"env": {"id": "Pendulum-v1"}, **(user or {})})])
        return tuning.tuned_layer(settings, probe, read_machine(), Interrupts(), fresh=fresh, say=self.said.append)

    def records(self):
        return sorted(self.cache.glob("tune-*.json"))


@pytest.fixture
def bench(monkeypatch, tmp_path):
    return Bench(monkeypatch, tmp_path)


def test_a_result_is_a_layer_of_settings_with_its_record(bench):
    layer, record = bench.tune()
    assert layer.source == "tuner"
    settings = resolve([layer])
    assert settings.config.learner.batch_size == record["choice"]["learner.batch_size"]
    assert settings.config.sampling.samplers == record["choice"]["sampling.samplers"]
    assert record["env"] == "Pendulum-v1"
    assert record["machine"]
    assert record["versions"]["torch"]


def test_the_same_question_is_measured_once(bench):
    layer, record = bench.tune()
    asked = bench.measured
    again, remembered = bench.tune()
    assert again == layer
    assert remembered == json.loads(json.dumps(record))
    assert bench.measured == asked
    assert any("tuned before on this machine" in text and "--fresh" in text for text in bench.said)


def test_fresh_measures_again(bench):
    bench.tune()
    asked = bench.measured
    bench.tune(fresh=True)
    assert bench.measured == 2 * asked
    assert len(bench.records()) == 1


@pytest.mark.parametrize(
    "user",
    [{"run": {"algo": "td3"}}, {"sac": {"hidden_sizes": [64]}}, {"sac": {"n_step": 3}}, {"learner": {"batch_size": 64}},
     {"sampling": {"samplers": 1}}, {"learner": {"device": "cpu"}}],
    ids=str,
)  # fmt: skip
def test_another_question_has_an_answer_of_its_own(bench, user):
    bench.tune()
    bench.tune(user)
    assert len(bench.records()) == 2


def test_another_version_or_task_is_another_question(bench, monkeypatch):
    bench.tune()
    monkeypatch.setattr(tuning, "versions", lambda: {"torch": "other"})
    bench.tune()
    assert len(bench.records()) == 2


def test_what_does_not_matter_to_speed_is_the_same_question(bench):
    bench.tune()
    asked = bench.measured
    bench.tune({"run": {"seed": 5, "name": "other"}, "stop": {"seconds": 10.0}})
    assert bench.measured == asked


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 0}', '{"schema": 1, "choice": {}}'])
def test_a_damaged_memory_is_said_and_measured_anew(bench, text):
    bench.tune()
    asked, path = bench.measured, bench.records()[0]
    path.write_text(text)
    bench.tune()
    assert bench.measured == 2 * asked
    assert any("damaged" in line for line in bench.said)
    assert json.loads(path.read_text())["schema"] == tuning.SCHEMA


@pytest.mark.parametrize("choice", [-5, "many", None, 10**30])
def test_a_memory_with_impossible_values_is_measured_anew(bench, choice):
    bench.tune()
    asked, path = bench.measured, bench.records()[0]
    record = json.loads(path.read_text())
    record["choice"]["learner.batch_size"] = choice
    path.write_text(json.dumps(record))
    layer, _ = bench.tune()
    resolve([layer])
    assert bench.measured == 2 * asked


def test_a_failure_of_every_candidate_is_one_line_and_not_remembered(bench):
    bench.fail = True
    with pytest.raises(WorkerError, match="tuning failed: no batch size could be measured: it crashed"):
        bench.tune()
    assert bench.records() == []


def test_a_cache_that_cannot_be_written_only_costs_time(bench):
    bench.cache.parent.mkdir(exist_ok=True)
    bench.cache.write_text("in the way")
    layer, _ = bench.tune()
    assert layer.values


def test_one_tuner_at_a_time(bench, monkeypatch):
    monkeypatch.setattr(tuning, "_LOCK_WAIT_S", 0.1)
    bench.cache.mkdir(parents=True)
    fd = os.open(bench.cache / "tune.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(SpreezeError, match=r"another tuner still measures after"):
            bench.tune()
        assert any("another tuner is measuring" in text for text in bench.said)
    finally:
        os.close(fd)
    bench.tune()
