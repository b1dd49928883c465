"""The tuner's choice for a host that only collects, on machines that are formulas."""

import pytest
from test_search_rollouts import Machine

from spreeze.errors import ConfigError
from spreeze.tuner.knobs import host_knobs
from spreeze.tuner.model import HOST_FORMULA
from spreeze.tuner.problem import ENVS, ROLLOUT, SAMPLERS, Setting, TuningProblem
from spreeze.tuner.search import tune


def problem(cores=8.0, samplers=8, envs=8, pins=(), **facts):
    facts = {"memory_bytes": 8 * 10**9, "sampler_bytes": 10**8, "env_bytes": 10**7, **facts}
    return TuningProblem(knobs=host_knobs(), usable_cores=cores, configured=Setting({SAMPLERS: samplers, ENVS: envs}),
                         pins=frozenset(pins), trial=ROLLOUT, **facts)  # fmt: skip


def chosen(tuning):
    return tuning.choices[SAMPLERS].value, tuning.choices[ENVS].value


def test_every_core_of_a_host_gets_a_sampler_where_steps_keep_it_busy():
    tuning = tune(problem(samplers=4), Machine(lambda one: 1000.0 * min(one[SAMPLERS], 8)), lambda result: None)
    assert chosen(tuning) == (8, 8)
    assert tuning.as_json()["formula"] == HOST_FORMULA
    assert "8000 env steps/s" in tuning.choices[SAMPLERS].reason


def test_more_samplers_than_cores_are_taken_where_environments_wait():
    machine = Machine(lambda one: 100.0 * min(one[SAMPLERS], 64))
    assert chosen(tune(problem(step_cpu_share=0.05, memory_bytes=32 * 10**9), machine, lambda result: None))[0] == 64


def test_more_environments_are_taken_where_inference_is_shared():
    machine = Machine(lambda one: 1000.0 * min(one[SAMPLERS], 8) * one[ENVS] / (one[ENVS] + 4))
    assert chosen(tune(problem(), machine, lambda result: None)) == (8, 64), "twice as many give 6 % more once again"


def test_what_memory_has_no_room_for_is_not_tried():
    machine = Machine(lambda one: 1000.0 * one[SAMPLERS])
    tune(problem(samplers=4, memory_bytes=10**9, env_bytes=0), machine, lambda result: None)
    assert max(one[SAMPLERS] for one in machine.asked) <= 9
    with pytest.raises(ConfigError, match="do not fit into memory"):
        tune(problem(memory_bytes=10**8), machine, lambda result: None)


def test_what_is_set_stays():
    machine = Machine(lambda one: 1000.0 * min(one[SAMPLERS], 8))
    assert chosen(tune(problem(samplers=3, pins=[SAMPLERS]), machine, lambda result: None))[0] == 3
