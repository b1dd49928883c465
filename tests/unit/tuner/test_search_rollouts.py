"""The tuner's choice for a mode with rollouts, on machines that are formulas."""

import dataclasses

import pytest

from spreeze.config.layers import Layer, resolve
from spreeze.config.modes import find_mode
from spreeze.config.schema import TuningConfig
from spreeze.errors import ConfigError, WorkerError
from spreeze.tuner.knobs import KNOBS, SHORTEST_ROLLOUT, fit_rollout, knob_names, knobs_of, ordered, rollout_rows
from spreeze.tuner.model import Scored, pick, worth
from spreeze.tuner.problem import (
    INFERENCE_WORKERS,
    LEARNERS,
    MINIBATCHES,
    ROLLOUT,
    ROLLOUT_ENVS,
    ROLLOUT_SAMPLERS,
    SYNC_INTERVAL,
    Knob,
    Setting,
    TrialResult,
    TuningProblem,
    result_line,
)
from spreeze.tuner.search import Search, tune

ROWS = ordered(KNOBS)
TABLE = {knob.name: knob for knob in ROWS if knob.name in (*knob_names(find_mode("hts").on_policy), MINIBATCHES)}
DEFAULT = Setting({ROLLOUT_SAMPLERS: 2, ROLLOUT_ENVS: 8, INFERENCE_WORKERS: 1, SYNC_INTERVAL: 64, MINIBATCHES: 4})


def changed(**values):
    names = {"samplers": ROLLOUT_SAMPLERS, "envs": ROLLOUT_ENVS, "inference_workers": INFERENCE_WORKERS,
             "interval": SYNC_INTERVAL,
             "minibatches": MINIBATCHES}  # fmt: skip
    return Setting({**DEFAULT, **{names[name]: value for name, value in values.items()}})


def problem(cores=2.0, configured=DEFAULT, pins=(), memory_bytes=8 * 10**9):
    return TuningProblem(
        knobs=tuple(TABLE.values()), usable_cores=cores, memory_bytes=memory_bytes, sampler_bytes=10**8,
        env_bytes=10**7, learner_bytes=5 * 10**8, configured=configured, pins=frozenset(pins),
        trial=ROLLOUT,
    )  # fmt: skip


class Machine:
    """Rates by a formula; each measurement takes 5 s of the budget."""

    def __init__(self, rate, budget_s=200.0, fails=lambda setting: None, cpu_share=()):
        self.rate, self.left_s, self.fails, self.asked = rate, budget_s, fails, []
        self.cpu_share = cpu_share

    def seconds_left(self):
        return self.left_s

    def joint(self, settings, *, within_s, on_result):
        found = []
        for setting in settings[: max(1, int(within_s / 5.0))]:
            self.asked.append(setting)
            self.left_s -= 5.0
            failure, rate = self.fails(setting), self.rate(setting)
            rates = () if failure else (0.99 * rate, rate, 1.01 * rate)
            found.append(
                TrialResult(
                    trial=ROLLOUT,
                    setting=setting,
                    failure=failure,
                    env_steps_per_s=rates,
                    updates_per_s=rates,
                    cpu_share=self.cpu_share,
                )
            )
            on_result(found[-1])
        return found


def tuned(machine, told=lambda result: None, **facts):
    return tune(problem(**facts), machine, told)


def chosen(tuning):
    return Setting({name: choice.value for name, choice in tuning.choices.items()})


def sleepy(setting):
    """Environments that sleep: the more processes the better, up to 4; inference is cheaper in a process of its own."""
    return 100.0 * min(setting[ROLLOUT_SAMPLERS], 4) * (1.2 if setting[INFERENCE_WORKERS] == 1 else 1.0)


def test_more_samplers_are_taken_where_environments_sleep():
    machine, told = Machine(sleepy), []
    tuning = tuned(machine, told.append)
    assert chosen(tuning) == changed(samplers=4, interval=32)
    assert tuning.choices[ROLLOUT_SAMPLERS].runners_up[0] == (3, pytest.approx(0.75))
    assert [result.setting for result in told] == machine.asked


@pytest.mark.parametrize(("gain", "samplers"), [(1.09, 2), (1.11, 3)])
def test_rollouts_of_another_shape_have_to_pay_more_than_seeds_differ(gain, samplers):
    tuning = tuned(Machine(lambda setting: 100.0 * (gain if setting[ROLLOUT_SAMPLERS] == 3 else 1.0), budget_s=1000.0))
    assert tuning.choices[ROLLOUT_SAMPLERS].value == samplers


def test_cores_that_are_to_stay_free_bound_samplers_where_no_governor_rests_some():
    free = TuningConfig(leave_free=0.5)
    machine = Machine(lambda setting: 100.0 * setting[ROLLOUT_SAMPLERS], budget_s=1000.0)
    assert tuned(machine, cores=8.0, configured=changed(samplers=4)).choices[ROLLOUT_SAMPLERS].value > 4
    machine = Machine(machine.rate, budget_s=1000.0)
    tuning = tune(dataclasses.replace(problem(8.0, changed(samplers=4)), targets=free), machine, lambda result: None)
    assert tuning.choices[ROLLOUT_SAMPLERS].value == 4


def test_inference_workers_change_no_bit_and_a_gain_of_more_than_5_percent_is_enough():
    for gain, workers in ((1.04, 1), (1.08, 0)):
        machine = Machine(lambda one, gain=gain: 100.0 * (1.0 if one[INFERENCE_WORKERS] else gain), budget_s=1000.0)
        assert tuned(machine).choices[INFERENCE_WORKERS].value == workers


def test_a_knob_is_measured_again_where_what_is_there_gives_far_less_than_before():
    class Shared(Machine):
        """Another program disturbs the first setting of the second call alone."""

        calls = 0

        def joint(self, settings, **more):
            self.calls += 1
            quiet, first = self.rate, settings[0]
            if self.calls == 2:
                self.rate = lambda setting: quiet(setting) * (0.5 if setting == first else 1.0)
            found = super().joint(settings, **more)
            self.rate = quiet
            return found

    tuning = tuned(Shared(lambda setting: 100.0, budget_s=1000.0))
    assert chosen(tuning) == DEFAULT
    assert [note for note in tuning.notes if "measured again: the machine was busy" in note]
    assert not any("busy" in note for note in tuned(Machine(lambda setting: 100.0, budget_s=1000.0)).notes)


def test_each_knob_s_values_are_measured_beside_what_is_there():
    machine = Machine(lambda one: 100.0 * (0.9 if one[INFERENCE_WORKERS] else 1.0))
    assert chosen(tuned(machine)) == changed(inference_workers=0)
    assert machine.asked[0] == DEFAULT
    assert [one for one in machine.asked if one == DEFAULT] == 2 * [DEFAULT], "once for each knob until one moves"


def test_where_the_cores_are_busy_and_no_first_step_is_better_nothing_more_is_measured():
    busy, idle = (Machine(lambda setting: 100.0, cpu_share=(share,)) for share in (0.9, 0.5))
    tuning = tuned(busy)
    assert chosen(tuning) == DEFAULT
    assert busy.asked == [DEFAULT, changed(samplers=1, interval=128, inference_workers=1),
                          changed(inference_workers=0), changed(envs=16, interval=32)]  # fmt: skip
    assert tuning.choices[ROLLOUT_ENVS].runners_up == ((16, 1.0),)
    tuned(idle)
    assert len(idle.asked) > len(busy.asked), "more processes may use what is idle"
    beside = Machine(lambda setting: 100.0, cpu_share=(0.5,))
    tune(problem(), beside, lambda result: None, busy=lambda: True)
    assert beside.asked == busy.asked, "what is idle belongs to other programs"


def test_a_first_step_that_is_better_is_where_the_others_are_varied():
    machine = Machine(lambda setting: 100.0 * min(setting[ROLLOUT_ENVS], 16), budget_s=1000.0, cpu_share=(0.9,))
    assert tuned(machine).choices[ROLLOUT_ENVS].value == 16
    assert changed(envs=32, interval=16) in machine.asked


def test_a_machine_that_had_slowed_down_before_a_candidate_does_not_hide_it():
    slow = []

    def rate(one):
        slow.append(one)
        return (70.0 if len(slow) <= 8 else 100.0) * (1.0 if one[ROLLOUT_SAMPLERS] == 2 else 0.7)

    assert chosen(tuned(Machine(rate)))[ROLLOUT_SAMPLERS] == 2


def test_samplers_infer_for_themselves_where_an_actor_costs_a_core():
    tuning = tuned(Machine(lambda one: 100.0 if one[INFERENCE_WORKERS] else 150.0))
    assert chosen(tuning) == changed(inference_workers=0)
    assert "infer for themselves" in tuning.choices[INFERENCE_WORKERS].reason


def test_more_environments_of_a_sampler_shorten_the_interval_and_keep_the_rows():
    found = chosen(tuned(Machine(lambda one: float(min(one[ROLLOUT_ENVS], 16)))))
    assert (found[ROLLOUT_ENVS], found[SYNC_INTERVAL], rollout_rows(found)) == (16, 32, rollout_rows(DEFAULT))
    assert found[MINIBATCHES] == 4


def test_a_machine_that_does_not_care_keeps_what_is_configured():
    assert chosen(tuned(Machine(lambda one: 100.0))) == DEFAULT


def test_what_the_user_has_set_stays():
    tuning = tuned(
        Machine(lambda one: float(one[ROLLOUT_ENVS] * one[ROLLOUT_SAMPLERS] ** 2)),
        pins=(ROLLOUT_SAMPLERS, SYNC_INTERVAL),
    )
    assert (chosen(tuning)[ROLLOUT_SAMPLERS], chosen(tuning)[SYNC_INTERVAL]) == (2, 64)
    assert tuning.choices[ROLLOUT_SAMPLERS].pinned
    assert "set by you" in tuning.choices[SYNC_INTERVAL].reason


def test_a_candidate_that_fails_is_not_taken_and_the_next_one_is():
    tuning = tuned(Machine(sleepy, fails=lambda one: "out of memory" if one[ROLLOUT_SAMPLERS] > 3 else None))
    assert chosen(tuning)[ROLLOUT_SAMPLERS] == 3
    assert 4 not in [value for value, _ in tuning.choices[ROLLOUT_SAMPLERS].runners_up]


def test_nothing_measured_is_an_error_that_says_why_and_for_want_of_time_what_is_configured():
    with pytest.raises(WorkerError, match="no such library"):
        tuned(Machine(sleepy, fails=lambda one: "no such library"))
    found = tuned(Machine(sleepy, budget_s=0.0))
    assert (found.fell_back, chosen(found)) == (True, DEFAULT)
    assert "no time was left" in found.doubts[0]


class Late(Machine):
    """Fails for want of time."""

    def joint(self, settings, **more):
        return [dataclasses.replace(one, starved=one.failure is not None) for one in super().joint(settings, **more)]


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("held_up", [lambda one: one[ROLLOUT_SAMPLERS] == 2, lambda one: one == DEFAULT])
def test_where_other_programs_hold_up_what_is_configured_nothing_else_takes_its_place(busy, held_up):
    machine = Late(sleepy, fails=lambda one: "0 rollouts within 25 s" if held_up(one) else None)
    found = tune(problem(), machine, lambda result: None, busy=lambda: busy)
    assert (found.fell_back, chosen(found)) == (True, DEFAULT)
    assert "0 rollouts within 25 s" in found.doubts[0]
    assert not any("env steps/s" in choice.reason for choice in found.choices.values()), "none was measured"


def test_time_that_is_up_after_some_values_of_a_knob_is_told_as_such():
    search = Search(problem(), Machine(sleepy), lambda result: None)
    machine = Machine(sleepy)
    search.results = machine.joint([changed(samplers=3)], within_s=5.0, on_result=lambda result: None)
    for name, text in (
        (ROLLOUT_SAMPLERS, f"more values of {ROLLOUT_SAMPLERS}"),
        (INFERENCE_WORKERS, INFERENCE_WORKERS),
    ):
        assert search._vary(TABLE[name], DEFAULT, 0.0) is None
        assert search.limits[-1] == f"out of time before {text} could be measured"


def test_the_budget_bounds_the_candidates():
    machine = Machine(sleepy, budget_s=20.0)
    tuned(machine)
    assert len(machine.asked) <= 4
    assert machine.asked[0] == DEFAULT, "what is configured comes first"


@pytest.mark.parametrize("cores", [1.0, 2.0, 7.5, 64.0])
@pytest.mark.parametrize("name", [ROLLOUT_SAMPLERS, INFERENCE_WORKERS, ROLLOUT_ENVS])
def test_every_variation_divides_and_fits(cores, name):
    for configured in (DEFAULT, changed(minibatches=32, envs=1, samplers=6)):
        found = TABLE[name].neighbours(problem(cores, configured), configured)
        assert found or cores == 64.0, "384 rows are too few for 64 samplers"
        for one in found:
            assert rollout_rows(one) % one[MINIBATCHES] == 0
            assert one[INFERENCE_WORKERS] <= one[ROLLOUT_SAMPLERS]
            assert one[SYNC_INTERVAL] >= SHORTEST_ROLLOUT
            assert rollout_rows(one) == pytest.approx(rollout_rows(configured), rel=0.25)


def test_many_samplers_get_fewer_environments_each_before_an_interval_is_too_short():
    knob = TABLE[ROLLOUT_SAMPLERS]
    assert changed(samplers=64, envs=1, interval=16) in knob.neighbours(problem(64.0), DEFAULT)
    assert knob.neighbours(problem(64.0, pins=(ROLLOUT_ENVS,)), DEFAULT) == []


def test_a_pinned_interval_keeps_the_rows_of_a_rollout_too():
    facts = problem(8.0, pins=(SYNC_INTERVAL,))
    assert fit_rollout(facts, changed(envs=16)) is None
    for knob in (TABLE[ROLLOUT_SAMPLERS], TABLE[ROLLOUT_ENVS]):
        found = knob.neighbours(facts, DEFAULT)
        assert all(one[SYNC_INTERVAL] == 64 and 768 <= rollout_rows(one) <= 1280 for one in found), (
            "1024, within a quarter"
        )
    assert changed(samplers=8, envs=2) in TABLE[ROLLOUT_SAMPLERS].neighbours(facts, DEFAULT)


def test_memory_bounds_samplers():
    little = problem(memory_bytes=10**9)
    assert fit_rollout(little, DEFAULT) == DEFAULT
    assert fit_rollout(little, changed(samplers=4)) is None
    with pytest.raises(ConfigError, match="fit into memory"):
        tuned(Machine(sleepy), memory_bytes=6 * 10**8)


def test_pinned_minibatches_that_do_not_divide_are_rejected():
    odd = changed(minibatches=5)
    assert fit_rollout(problem(configured=odd, pins=(MINIBATCHES,)), odd) is None
    assert fit_rollout(problem(configured=odd), odd)[MINIBATCHES] == 4


def test_a_tie_goes_to_what_is_configured_then_to_the_smaller():
    scores = [
        Scored(setting=changed(samplers=n), score=rate, updates_per_s=1.0, env_steps_per_s=rate)
        for n, rate in ((4, 103.0), (2, 101.0), (3, 104.0), (1, 50.0))
    ]
    assert pick(problem(), scores).setting[ROLLOUT_SAMPLERS] == 2
    assert pick(problem(), scores[:1] + scores[2:]).setting[ROLLOUT_SAMPLERS] == 3


def test_the_record_names_settings_and_every_candidate():
    tuning = tuned(Machine(sleepy))
    record = tuning.as_json()
    assert list(record["choice"]) == list(record["reasons"]) == list(record["labels"]) == list(DEFAULT)
    assert len(record["rollout_rates"]) == len(tuning.results)
    first = record["rollout_rates"][0]
    assert first["setting"][ROLLOUT_SAMPLERS] == 2
    assert "env steps/s" in result_line(problem(), tuning.results[0])
    failed = TrialResult(trial=ROLLOUT, setting=DEFAULT, failure="too slow")
    assert result_line(problem(), failed).endswith("too slow")


def test_another_module_s_knob_is_varied_around_the_choice():
    own = Knob(name="learner.publish_interval_s", candidates=lambda problem, here: (1.0, 9.0), varied_last=True)
    facts = problem()
    facts = dataclasses.replace(facts, knobs=(*facts.knobs, own), configured=Setting({**DEFAULT, own.name: 0.25}))
    machine = Machine(lambda one: sleepy(one) * (1.3 if one[own.name] == 9.0 else 1.0))
    tuning = tune(facts, machine, lambda result: None)
    assert chosen(tuning) == Setting({**changed(samplers=4, interval=32), own.name: 9.0})
    assert dict(tuning.choices[own.name].runners_up) == pytest.approx({1.0: 0.77, 0.25: 0.77}, abs=0.02)


TEAM = Setting({LEARNERS: 2, ROLLOUT_SAMPLERS: 2, ROLLOUT_ENVS: 8, SYNC_INTERVAL: 32})


def team(cores=2.0, pins=(), **facts):
    knobs = tuple(knob for knob in ROWS if knob.name in knob_names(find_mode("gala").on_policy))
    return dataclasses.replace(problem(cores, TEAM, pins), knobs=knobs, **facts)


def test_as_many_learners_are_taken_as_pay_each_with_rollouts_of_the_configured_rows():
    machine = Machine(lambda one: 100.0 * min(one[LEARNERS], 4) + one[ROLLOUT_SAMPLERS])
    found = tune(team(cores=4.0), machine, lambda result: None)
    assert chosen(found) == TEAM.replace(LEARNERS, 4).replace(ROLLOUT_SAMPLERS, 4)
    assert {one[LEARNERS] for one in machine.asked} >= {2, 4, 8}
    for one in machine.asked:
        assert one[ROLLOUT_SAMPLERS] % one[LEARNERS] == 0
        assert (
            rollout_rows(one) == one[ROLLOUT_SAMPLERS] // one[LEARNERS] * one[ROLLOUT_ENVS] * one[SYNC_INTERVAL] == 256
        )


def test_learners_that_are_set_stay_and_their_samplers_are_shared_evenly():
    machine = Machine(lambda one: 100.0 * one[ROLLOUT_SAMPLERS])
    found = tune(team(cores=4.0, pins=(LEARNERS,)), machine, lambda result: None)
    assert chosen(found)[LEARNERS] == 2
    assert {one[ROLLOUT_SAMPLERS] for one in machine.asked} == {2, 4, 8}


def test_learners_whose_environments_wait_are_tried_beyond_the_cores():
    knob = next(knob for knob in KNOBS if knob.name == LEARNERS)
    assert set(knob.candidates(team(), TEAM)) == {2, 4}
    assert set(knob.candidates(team(step_cpu_share=0.1), TEAM)) == {2, 4, 8, 16}


BUFFER = Setting({ROLLOUT_SAMPLERS: 2, ROLLOUT_ENVS: 8, SYNC_INTERVAL: 16, "impact.minibatches": 1, "impact.slots": 4,
                  "impact.uses": 20})  # fmt: skip


def buffer_problem(configured=BUFFER, **facts):
    config = resolve([Layer("user", {"run": {"algo": "impact", "mode": "impact"}})]).config
    return dataclasses.replace(problem(configured=configured, **facts), knobs=knobs_of(config))


class BufferMachine(Machine):
    """Samplers take what they get of two cores; the learner has the rest, and waits where there is nothing to use."""

    def joint(self, settings, *, within_s, on_result):
        found = []
        for setting in settings:
            env_steps, updates = self.rate(setting)
            found.append(TrialResult(trial=ROLLOUT, setting=setting, env_steps_per_s=3 * (env_steps,),
                                     updates_per_s=3 * (updates,)))  # fmt: skip
            on_result(found[-1])
        return found


def test_of_rollouts_of_any_age_updates_count_up_to_the_uses_that_are_worth_the_same():
    found = tune(
        buffer_problem(),
        BufferMachine(lambda one: (2500.0 * one[ROLLOUT_SAMPLERS], 300.0 / one[ROLLOUT_SAMPLERS])),
        lambda result: None,
    )
    assert chosen(found)[ROLLOUT_SAMPLERS] == 1, "more env steps are no use to a learner with less time"
    found = tune(
        buffer_problem(), BufferMachine(lambda one: (400.0 * one[ROLLOUT_SAMPLERS], 300.0)), lambda result: None
    )
    assert chosen(found)[ROLLOUT_SAMPLERS] == 4, "300 updates/s of 128 rows are 20 uses of 1,920 env steps/s"
    assert found.as_json()["formula"].startswith("updates/s of the whole run, with rollouts used up to 20 times")


def test_updates_of_minibatches_count_by_their_rows_and_a_rollout_of_one_sampler_stays_divisible():
    several = BUFFER.replace("impact.minibatches", 8).replace(SYNC_INTERVAL, 64)
    asked = set()

    def rate(one):
        asked.add(one["impact.minibatches"])
        return 2500.0 * one[ROLLOUT_SAMPLERS], 600.0 / one[ROLLOUT_SAMPLERS]

    assert chosen(tune(buffer_problem(several), BufferMachine(rate), lambda result: None))[ROLLOUT_SAMPLERS] == 1
    assert asked == {8}
    one, eight = (
        worth(buffer_problem(setting), setting, 100.0 * setting["impact.minibatches"], 1e6, None).score
        for setting in (BUFFER, BUFFER.replace("impact.minibatches", 8))
    )
    assert one == eight == 100.0 * 128


def test_slots_and_uses_stay_as_configured():
    found = tune(buffer_problem(), BufferMachine(lambda one: (1000.0, 100.0)), lambda result: None)
    assert chosen(found) == BUFFER
    assert found.choices["impact.slots"].reason.endswith("as configured")
    assert "up to 20, the paper's value for continuous actions" in found.choices["impact.uses"].reason


@pytest.mark.parametrize(("changes", "slots", "uses"), [
    ({"impact.slots": 16, "impact.uses": 32}, "as configured", "more uses need more updates"),
    ({"impact.slots": 3}, "4 in total, one for each of 2 samplers", "up to 20"),
    ({"impact.slots": 15}, "as configured; 16 in total", "up to 20"),
])  # fmt: skip
def test_the_reason_for_slots_and_uses_tells_their_total_and_what_more_uses_need(changes, slots, uses):
    configured = Setting({**BUFFER, **changes})
    found = tune(buffer_problem(configured), BufferMachine(lambda one: (1000.0, 100.0)), lambda result: None)
    assert slots in found.choices["impact.slots"].reason
    assert uses in found.choices["impact.uses"].reason


def test_where_samplers_wait_for_nobody_the_rows_of_one_sampler_stay():
    configured = Setting({ROLLOUT_SAMPLERS: 2, ROLLOUT_ENVS: 8, SYNC_INTERVAL: 32})
    facts = problem(configured=configured)
    assert rollout_rows(configured) == 256
    assert fit_rollout(facts, configured.replace(ROLLOUT_SAMPLERS, 4)) == configured.replace(ROLLOUT_SAMPLERS, 4)
    assert fit_rollout(facts, configured.replace(ROLLOUT_ENVS, 4))[SYNC_INTERVAL] == 64
    assert fit_rollout(facts, configured.replace(ROLLOUT_ENVS, 32)) is None, "the interval would be too short"
