"""The tuner's choices on simulated machines: t(B) = a + b B, and cores that samplers and learner share."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spreeze.autotune.sweep import (
    JointRate,
    Knobs,
    UpdateRate,
    as_json,
    batch_candidates,
    batch_score,
    choose_batch,
    choose_envs_per_sampler,
    choose_samplers,
    fit_cost,
    paper_batch,
    sampler_candidates,
    thread_candidates,
    tune,
)


def _knobs(**changes):
    fields = {"usable_cores": 2.0, "configured_batch": 256, "largest_batch": 250_000, "step_us": 60.0,
              "memory_for_samplers": 100}  # fmt: skip
    return Knobs(**{**fields, **changes})


def _rate(size, per_s, threads=1):
    return UpdateRate(batch_size=size, threads=threads, updates_per_s=(per_s,))


def _curve(a, b, sizes, threads=1, noise=None):
    """Rates of an update that takes a + b B seconds; three repeats, each off by the given factors."""
    factors = noise if noise is not None else [1.0, 1.0, 1.0]
    return [
        UpdateRate(batch_size=size, threads=threads, updates_per_s=tuple(f / (a + b * size) for f in factors))
        for size in sizes
    ]


class Machine:
    """Cores that everybody shares: when there are more threads than cores, all get their share."""

    def __init__(self, cores, *, a=2e-3, b=2e-5, env_s=5e-4, thread_speedup=None):
        self.cores, self.a, self.b, self.env_s, self.asked = cores, a, b, env_s, []
        self.thread_speedup = thread_speedup or {1: 1.0, 2: 1.6, 4: 2.2, 8: 2.4}

    def updates(self, sizes, threads):
        self.asked.append((tuple(sizes), threads))
        speed = self.thread_speedup[threads]
        return _curve(self.a, self.b / speed, sizes, threads)

    def joint(self, counts, envs, batch, threads):
        speed = self.thread_speedup[threads]
        alone = 1 / (self.a + self.b / speed * batch)
        found = []
        for count in counts:
            share = min(1.0, self.cores / (count + threads))
            found.append(JointRate(samplers=count, env_steps_per_s=(count * share / self.env_s,) * 3,
                                   updates_per_s=(alone * share,) * 3))  # fmt: skip
        return found

    def tune(self, **knobs):
        return tune(_knobs(usable_cores=self.cores, **knobs), self.updates, self.joint, lambda text: None)


@pytest.mark.parametrize(("cores", "samplers"), [(2, 1), (4, 3), (8, 6)])
def test_samplers_fill_the_cores_that_the_learner_leaves_and_no_more(cores, samplers):
    tuning = Machine(cores, thread_speedup={1: 1.0, 2: 1.0, 4: 1.0}).tune()
    assert tuning.threads.value == 1
    # Candidates go up in steps: 6 is the last one below 8 cores less one.
    assert tuning.samplers.value == samplers


def test_threads_that_pay_are_taken_and_never_more_than_half_of_the_cores():
    assert Machine(8, a=1e-4).tune(configured_batch=1024).threads.value == 4
    assert Machine(2).tune().threads.value == 1
    assert thread_candidates(_knobs(usable_cores=1.0)) == [1]
    assert thread_candidates(_knobs(usable_cores=0.5)) == [1]
    assert thread_candidates(_knobs(usable_cores=64.0)) == [1, 2, 4, 8]


@given(a=st.floats(1e-5, 1e-1), b=st.floats(1e-8, 1e-3))
def test_the_cost_of_an_update_is_recovered_from_its_rates(a, b):
    found = fit_cost(_curve(a, b, [64, 128, 256, 512, 1024, 4096]))
    assert found is not None
    for size in (64, 512, 4096):
        assert found[0] + found[1] * size == pytest.approx(a + b * size, rel=1e-4)


def test_a_cost_needs_two_sizes():
    assert fit_cost([_rate(64, 10.0)]) is None
    assert fit_cost([]) is None
    assert fit_cost([_rate(64, 10.0), UpdateRate(batch_size=128, threads=1, updates_per_s=(), failure="x")]) is None


def test_the_papers_rule_by_hand():
    # a = 1 ms, b = 10 us: 0.85 of the highest frame rate at B = 0.85 / 0.15 * 100 = 567, so 1024.
    assert paper_batch((1e-3, 1e-5)) == 1024
    assert paper_batch((0.0, 1e-5)) == 1
    assert paper_batch((1e-3, 1e-5), share=0.5) == 128


def test_the_score_has_half_of_its_worth_at_256():
    assert batch_score(256, 100.0) == 50.0
    assert batch_score(768, 100.0) == 75.0


def test_a_constant_cost_a_row_keeps_small_batches_and_a_constant_cost_an_update_takes_large_ones():
    knobs = _knobs()
    sizes = batch_candidates(knobs)
    by_row, _ = choose_batch(knobs, _curve(0.0, 1e-5, sizes), [1])
    by_update, _ = choose_batch(knobs, _curve(1e-2, 1e-9, sizes), [1])
    assert by_row.value < 256
    assert by_update.value > 256


def test_the_configured_batch_stays_unless_another_is_ten_per_cent_better():
    def chosen(better):
        score = batch_score(256, 100.0) * better
        return choose_batch(_knobs(), [_rate(256, 100.0), _rate(512, score * (512 + 256) / 512)], [1])[0].value

    assert chosen(1.09) == 256
    assert chosen(1.11) == 512


@given(st.lists(st.floats(0.96, 1.04), min_size=3, max_size=3))
def test_measurement_noise_does_not_move_the_choice(noise):
    knobs = _knobs()
    sizes = batch_candidates(knobs)
    steady = choose_batch(knobs, _curve(5e-3, 2e-5, sizes), [1])[0].value
    assert choose_batch(knobs, _curve(5e-3, 2e-5, sizes, noise=noise), [1])[0].value == steady


def test_failed_candidates_are_left_out_and_a_crash_of_all_is_said():
    failed = UpdateRate(batch_size=4096, threads=1, updates_per_s=(), failure="out of memory")
    assert choose_batch(_knobs(), [_rate(256, 50.0), failed], [1])[0].value == 256
    with pytest.raises(ValueError, match="no batch size could be measured: out of memory"):
        choose_batch(_knobs(), [failed], [1])


def test_an_update_that_takes_longer_than_a_second_is_never_chosen_where_there_is_another():
    assert choose_batch(_knobs(), [_rate(256, 1.5), _rate(16384, 0.9)], [1])[0].value == 256
    assert choose_batch(_knobs(), [_rate(16384, 0.9)], [1])[0].value == 16384


def test_what_the_user_has_set_is_not_tried():
    knobs = _knobs(batch_size=100, threads=3, samplers=5, envs_per_sampler=7)
    assert batch_candidates(knobs) == [100]
    assert thread_candidates(knobs) == [3]
    assert sampler_candidates(knobs, 3) == [5]
    assert choose_envs_per_sampler(knobs).value == 7
    machine = Machine(8, thread_speedup={3: 2.0})
    tuning = tune(knobs, machine.updates, machine.joint, lambda text: None)
    assert (tuning.batch_size.value, tuning.threads.value, tuning.samplers.value) == (100, 3, 5)
    assert all("set by you" in choice.reason for choice in (tuning.threads, tuning.samplers, tuning.envs_per_sampler))


def test_candidates_stay_within_replay_memory_and_cores():
    assert max(batch_candidates(_knobs(largest_batch=1000))) == 512
    assert 300 in batch_candidates(_knobs(configured_batch=300))
    assert sampler_candidates(_knobs(usable_cores=16, memory_for_samplers=2), 1) == [1, 2]
    assert sampler_candidates(_knobs(usable_cores=0.5), 1) == [1]
    assert sampler_candidates(_knobs(usable_cores=2), 1) == [1, 2]


def test_a_sampler_that_costs_the_learner_more_than_five_per_cent_is_not_taken():
    def joint(updates):
        return [
            JointRate(samplers=1, env_steps_per_s=(1000.0,), updates_per_s=(100.0,)),
            JointRate(samplers=2, env_steps_per_s=(2000.0,), updates_per_s=(updates,)),
        ]

    assert choose_samplers(_knobs(), joint(96.0)).value == 2
    refused = choose_samplers(_knobs(), joint(94.0))
    assert refused.value == 1
    assert "2 samplers: env steps +100 %, updates -6 %" in refused.reason


def test_a_sampler_that_adds_less_than_five_per_cent_is_not_taken():
    rates = [
        JointRate(samplers=1, env_steps_per_s=(1000.0,), updates_per_s=(100.0,)),
        JointRate(samplers=2, env_steps_per_s=(1040.0,), updates_per_s=(100.0,)),
        JointRate(samplers=3, env_steps_per_s=(9000.0,), updates_per_s=(100.0,)),
    ]
    assert choose_samplers(_knobs(), rates).value == 1


def test_a_stalled_measurement_divides_by_nothing():
    rates = [JointRate(samplers=n, env_steps_per_s=(0.0,), updates_per_s=(0.0,)) for n in (1, 2)]
    assert choose_samplers(_knobs(), rates).value in (1, 2)


@pytest.mark.parametrize(("step_us", "envs"), [(20.0, 8), (500.0, 8), (6000.0, 4), (None, 8)])
def test_slow_environments_are_fewer_in_a_sampler(step_us, envs):
    assert choose_envs_per_sampler(_knobs(step_us=step_us)).value == envs


@pytest.mark.parametrize("cores", [1, 2, 4, 8, 64, 0.5])
def test_every_choice_comes_with_a_reason_and_everything_is_kept(cores):
    said = []
    machine = Machine(cores)
    record = as_json(tune(_knobs(usable_cores=cores), machine.updates, machine.joint, said.append))
    assert set(record["choice"]) == set(record["reasons"])
    assert all(record["reasons"].values())
    assert all(isinstance(value, int) and value >= 1 for value in record["choice"].values())
    assert len(record["update_rates"]) == sum(len(sizes) for sizes, _ in machine.asked)
    assert len(said) == len(record["update_rates"]) + len(record["joint_rates"])
    assert record["cost_a_s"] == pytest.approx(machine.a, rel=0.01)
    assert np.isfinite(record["cost_b_s_per_row"])
