"""The on-policy tuner's choice, on machines that are formulas."""

import dataclasses

import pytest

from spreeze.errors import ConfigError, WorkerError
from spreeze.tuner.rollout_search import (
    SHORTEST_INTERVAL,
    RolloutProblem,
    RolloutRate,
    RolloutSetting,
    fitted,
    pick,
    tune_rollouts,
    variations,
)

DEFAULT = RolloutSetting(executors=2, envs_per_executor=8, actors=1, sync_interval=64, minibatches=4)


def knobs(cores=2.0, configured=DEFAULT, pins=(), memory_bytes=8 * 10**9):
    return RolloutProblem(cores=cores, memory_bytes=memory_bytes, executor_bytes=10**8, env_bytes=10**7,
                        learner_bytes=5 * 10**8, configured=configured, pins=frozenset(pins))


class Machine:
    """Rates by a formula; each measurement takes 5 s of the budget."""

    def __init__(self, rate, budget_s=200.0, fails=lambda setting: None):
        self.rate, self.left_s, self.fails, self.asked = rate, budget_s, fails, []

    def seconds_left(self):
        return self.left_s

    def rollouts(self, settings, *, within_s, on_rate):
        found = []
        for setting in settings[: max(1, int(within_s / 5.0))]:
            self.asked.append(setting)
            self.left_s -= 5.0
            failure, rate = self.fails(setting), self.rate(setting)
            found.append(RolloutRate(setting=setting, failure=failure,
                                     env_steps_per_s=() if failure else (0.99 * rate, rate, 1.01 * rate)))
            on_rate(found[-1])
        return found


def chosen(tuning):
    return RolloutSetting(**{name: choice.value for name, choice in tuning.choices.items()})


def sleepy(setting):
    """Environments that sleep: the more processes the better, up to 4; inference is cheaper in a process of its own."""
    return 100.0 * min(setting.executors, 4) * (1.2 if setting.actors == 1 else 1.0)


def test_more_executors_are_taken_where_environments_sleep():
    machine = Machine(sleepy)
    told = []
    tuning = tune_rollouts(knobs(), machine, told.append)
    assert chosen(tuning) == RolloutSetting(executors=4, envs_per_executor=8, actors=1, sync_interval=32, minibatches=4)
    assert tuning.choices["executors"].runners_up[0] == (3, pytest.approx(0.75))
    assert [rate.setting for rate in told] == machine.asked == list(dict.fromkeys(machine.asked)), "none twice"


def test_executors_infer_for_themselves_where_an_actor_costs_a_core():
    tuning = tune_rollouts(knobs(), Machine(lambda one: 100.0 if one.actors else 150.0), lambda rate: None)
    assert chosen(tuning) == dataclasses.replace(DEFAULT, actors=0)
    assert "infer for themselves" in tuning.choices["actors"].reason


def test_more_environments_of_an_executor_shorten_the_interval_and_keep_the_rows():
    tuning = tune_rollouts(knobs(), Machine(lambda one: float(min(one.envs_per_executor, 16))), lambda rate: None)
    found = chosen(tuning)
    assert (found.envs_per_executor, found.sync_interval, found.rows) == (16, 32, DEFAULT.rows)
    assert found.minibatches == 4


def test_a_machine_that_does_not_care_keeps_what_is_configured():
    assert chosen(tune_rollouts(knobs(), Machine(lambda one: 100.0), lambda rate: None)) == DEFAULT


def test_what_the_user_has_set_stays():
    pins = ("executors", "sync_interval")
    tuning = tune_rollouts(knobs(pins=pins), Machine(lambda one: float(one.envs * one.executors)), lambda rate: None)
    assert (chosen(tuning).executors, chosen(tuning).sync_interval) == (2, 64)
    assert tuning.choices["executors"].pinned
    assert "set by you" in tuning.choices["sync_interval"].reason


def test_a_candidate_that_fails_is_not_taken_and_the_next_one_is():
    machine = Machine(sleepy, fails=lambda one: "out of memory" if one.executors > 3 else None)
    tuning = tune_rollouts(knobs(), machine, lambda rate: None)
    assert chosen(tuning).executors == 3
    assert 4 not in [value for value, _ in tuning.choices["executors"].runners_up]


def test_nothing_measured_is_an_error_that_says_why():
    with pytest.raises(WorkerError, match="no such library"):
        tune_rollouts(knobs(), Machine(sleepy, fails=lambda one: "no such library"), lambda rate: None)
    with pytest.raises(WorkerError, match="no time was left"):
        tune_rollouts(knobs(), Machine(sleepy, budget_s=0.0), lambda rate: None)


def test_the_budget_bounds_the_candidates():
    machine = Machine(sleepy, budget_s=20.0)
    tune_rollouts(knobs(), machine, lambda rate: None)
    assert len(machine.asked) <= 4
    assert machine.asked[0] == DEFAULT, "what is configured comes first"


@pytest.mark.parametrize("cores", [1.0, 2.0, 7.5, 64.0])
@pytest.mark.parametrize("name", ["executors", "actors", "envs_per_executor"])
def test_every_variation_divides_and_fits(cores, name):
    for configured in (DEFAULT, dataclasses.replace(DEFAULT, minibatches=32, envs_per_executor=1, executors=6)):
        found = variations(knobs(cores, configured), configured, name)
        assert found or cores == 64.0, "384 rows are too few for 64 executors"
        for one in found:
            assert one.rows % one.minibatches == 0
            assert one.actors <= one.executors
            assert one.sync_interval >= SHORTEST_INTERVAL
            assert one.rows == pytest.approx(configured.rows, rel=0.25)


def test_many_executors_get_fewer_environments_each_before_an_interval_is_too_short():
    found = variations(knobs(64.0), DEFAULT, "executors")
    assert RolloutSetting(executors=64, envs_per_executor=1, actors=1, sync_interval=16, minibatches=4) in found
    assert variations(knobs(64.0, pins=("envs_per_executor",)), DEFAULT, "executors") == []


def test_memory_bounds_executors():
    assert fitted(knobs(memory_bytes=10**9), DEFAULT) == DEFAULT
    assert fitted(knobs(memory_bytes=10**9), dataclasses.replace(DEFAULT, executors=4)) is None
    with pytest.raises(ConfigError, match="no room"):
        tune_rollouts(knobs(memory_bytes=6 * 10**8), Machine(sleepy), lambda rate: None)


def test_pinned_minibatches_that_do_not_divide_are_refused():
    odd = dataclasses.replace(DEFAULT, minibatches=5)
    assert fitted(knobs(configured=odd, pins=("minibatches",)), odd) is None
    assert fitted(knobs(configured=odd), odd).minibatches == 4


def test_a_tie_goes_to_what_is_configured_then_to_the_smaller():
    rates = [RolloutRate(setting=dataclasses.replace(DEFAULT, executors=n), env_steps_per_s=(rate,))
             for n, rate in ((4, 103.0), (2, 101.0), (3, 104.0), (1, 50.0))]
    assert pick(knobs(), rates).executors == 2
    assert pick(knobs(), rates[:1] + rates[2:]).executors == 3
    assert pick(knobs(), []) is None


def test_the_record_names_settings_and_every_candidate():
    tuning = tune_rollouts(knobs(), Machine(sleepy), lambda rate: None)
    names = {name: f"rollout.{name}" for name in tuning.choices} | {"minibatches": "ppo.minibatches"}
    record = tuning.as_json(names)
    assert record["choice"]["ppo.minibatches"] == 4
    assert set(record["reasons"]) == set(record["choice"])
    assert len(record["rollout_rates"]) == len(tuning.rates)
    assert "env steps/s" in tuning.rates[0].line()
    assert RolloutRate(setting=DEFAULT, failure="too slow").line().endswith("too slow")
