import dataclasses

import pytest

from spreeze.metrics.table import SLOTS
from spreeze.runtime.rates import CounterSample, GroupSample, Rates, samples_per_insert


def _reading(t_s, steps=(0,), updates=0, *, inserted=0, baseline=-1, sampled=0, sampler=None, learner=None):
    samplers = tuple({**dict.fromkeys(SLOTS["sampler"], 0.0), "env_steps": float(s), **(sampler or {})} for s in steps)
    learner = {**dict.fromkeys(SLOTS["learner"], 0.0), "updates": float(updates), **(learner or {})}
    return CounterSample(t_s, (GroupSample(samplers, learner, inserted, baseline, sampled),))


def test_one_reading_gives_counts_and_no_rates():
    metrics = Rates(32).read(_reading(5.0, (10, 20)))
    assert metrics["env_steps_per_s"] is None
    assert metrics["updates"] == 0.0
    assert metrics["samples_per_insert"] is None
    assert metrics["transition_age"] is None, "it is unknown before the first update"


def test_rates_of_two_readings_by_hand():
    gauges = Rates(32)
    gauges.read(_reading(10.0, (100, 0), 5))
    metrics = gauges.read(_reading(12.0, (300, 50), 25))
    assert metrics["env_steps_per_s"] == 125.0
    assert metrics["sampler_env_steps_per_s/0"] == 100.0
    assert metrics["sampler_env_steps_per_s/1"] == 25.0
    assert metrics["updates_per_s"] == 10.0
    assert metrics["update_frames_per_s"] == 320.0


def test_rates_look_back_three_seconds():
    gauges = Rates(1)
    for second in range(20):
        rate = 100.0 if second > 10 else 0.0
        metrics = gauges.read(_reading(float(second), (max(second - 10, 0) * rate,)))
    assert metrics["env_steps_per_s"] == 100.0


def test_counters_that_go_back_after_a_restart_give_no_negative_rate():
    gauges = Rates(1)
    gauges.read(_reading(0.0, (0,), 500))
    assert gauges.read(_reading(1.0, (10,), 400))["updates_per_s"] == 0.0


def test_restored_updates_are_no_rate_at_a_resume_and_none_at_a_restart():
    gauges = Rates(1, restores=True)
    seen = [gauges.read(_reading(float(t), updates=n, sampled=1))["updates_per_s"]
            for t, n in enumerate((0, 0, 480_000, 480_100, 480_200, 0, 480_150, 480_250))]  # fmt: skip
    assert seen == [None, 0.0, None, 100.0, 100.0, 0.0, None, 100.0]


@pytest.mark.parametrize("counts", [(0, 0, 1000, 1400, 1100, 1500, 1900), (0, 0, 1000, 1400, 0, 1200, 1600)])
def test_update_frames_leave_out_the_updates_that_a_killed_learner_lost_as_updates_do(counts):
    rates = Rates(4, warmup_s=0.0)
    for t, count in enumerate(counts):
        seen = rates.read(_reading(float(t), updates=count, sampled=1))
        assert (seen["update_frames_per_s"] or 0.0) == 4 * (seen["updates_per_s"] or 0.0)
    assert rates.steady()["update_frames_per_s"] == 4 * rates.steady()["updates_per_s"] > 0.0


def test_the_same_instant_twice_gives_no_rate():
    gauges = Rates(1)
    gauges.read(_reading(1.0))
    assert gauges.read(_reading(1.0, (5,)))["env_steps_per_s"] is None


def test_shares_are_of_the_time_between_the_readings():
    gauges = Rates(1)
    gauges.read(_reading(0.0, sampler={"env_s": 100.0}, learner={"wait_s": 50.0}))
    metrics = gauges.read(_reading(
        1.0, sampler={"env_s": 100.5, "policy_s": 0.25, "wait_s": 0.25}, learner={"wait_s": 50.2, "critic_s": 0.6},
    ))  # fmt: skip
    assert metrics["sampler_env_share"] == pytest.approx(0.5)
    assert metrics["sampler_policy_share"] == pytest.approx(0.25)
    assert metrics["sampler_write_share"] == 0.0
    assert metrics["learner_critic_share"] == pytest.approx(0.75)
    assert sum(v for k, v in metrics.items() if k.startswith("learner_") and k.endswith("_share")) == pytest.approx(1)


def test_a_suspension_counts_to_no_part_of_a_workers_time_neither_now_nor_over_the_run():
    gauges = Rates(1, warmup_s=0.0)

    def read(t_s, wait_s, critic_s, actor_s):
        times = {"wait_s": wait_s, "critic_s": critic_s, "actor_s": actor_s}
        return gauges.read(_reading(t_s, updates=int(10 * t_s), sampled=1, sampler={"wait_s": wait_s}, learner=times))

    read(1.0, 0.5, 0.25, 0.25)
    read(2.0, 1.0, 0.5, 0.5)
    live = read(2.5, 1.0, 0.5, 77.0)  # a pause of 76 s, which t_s does not count, during an actor step
    assert live["learner_actor_share"] == pytest.approx(0.25)
    live = read(3.5, 1.5, 0.75, 77.25)
    assert live["learner_actor_share"] == pytest.approx(0.25)
    assert gauges.steady()["learner_actor_share"] == pytest.approx(0.25)


def test_an_update_that_takes_long_is_no_suspension():
    gauges = Rates(1)
    for second in range(12):
        metrics = gauges.read(_reading(float(second), learner={"critic_s": 11.0 if second == 11 else 0.0}))
    assert metrics["learner_critic_share"] == 1.0


def test_shares_are_unknown_when_nothing_happened():
    gauges = Rates(1)
    gauges.read(_reading(0.0))
    assert gauges.read(_reading(1.0))["learner_wait_share"] is None


@pytest.mark.parametrize(
    ("inserted", "baseline", "sampled", "ratio"),
    [(100, -1, 0, None), (100, 100, 0, None), (300, 100, 1600, 8.0), (150, 0, 75, 0.5)],
)
def test_samples_per_insert_counts_from_the_beginning_of_learning(inserted, baseline, sampled, ratio):
    assert samples_per_insert(_reading(0.0, inserted=inserted, baseline=baseline, sampled=sampled).groups) == ratio


def test_steady_rates_leave_out_start_and_warm_up():
    gauges = Rates(10, warmup_s=1.0)
    gauges.read(_reading(0.0, (0,)))
    gauges.read(_reading(50.0, (5000,)))
    gauges.read(_reading(60.0, (5000,), 1, sampled=10))  # learning begins
    gauges.read(_reading(60.5, (5000,), 500, sampled=5000))  # still warming up
    gauges.read(_reading(61.0, (5000,), 1000, sampled=10000))  # from here on
    gauges.read(_reading(71.0, (6000,), 1500, sampled=15000))
    steady = gauges.steady()
    assert (steady["env_steps_per_s"], steady["updates_per_s"], steady["update_frames_per_s"]) == (100.0, 50.0, 500.0)
    assert steady["measured_s"] == 10.0


def test_update_frames_of_a_whole_run_count_each_update_with_the_batch_of_its_time():
    gauges = Rates(10, warmup_s=0.0)
    gauges.read(_reading(60.0, (0,), 1000, sampled=1, learner={"batch_size": 10.0}))
    gauges.read(_reading(70.0, (0,), 1100, sampled=2, learner={"batch_size": 10.0}))
    gauges.read(_reading(70.5, (0,), 1102, sampled=3, learner={"batch_size": 100.0}))
    live = gauges.read(_reading(72.5, (0,), 1202, sampled=4, learner={"batch_size": 100.0}))
    assert live["update_frames_per_s"] == (2 * 10 + 100 * 100) / 2.5, "the updates of a change may be of the old size"
    assert gauges.steady()["update_frames_per_s"] == (100 * 10 + 2 * 10 + 100 * 100) / 12.5


def test_a_resumed_counter_alone_is_not_the_beginning_of_learning():
    gauges = Rates(1, warmup_s=0.0)
    gauges.read(_reading(0.0, updates=1000, sampled=0))
    assert gauges.steady()["updates_per_s"] is None


def test_a_short_run_has_no_steady_rates():
    gauges = Rates(1)
    gauges.read(_reading(0.0, updates=5, sampled=5))
    assert set(gauges.steady().values()) == {None}


def test_episode_means_leave_out_samplers_without_an_episode():
    first = {"episodes": 2.0, "episode_return": -10.0}
    reading = _reading(0.0, (1, 1))
    reading.groups[0].samplers[0].update(first)
    metrics = Rates(1).read(reading)
    assert metrics["episodes"] == 2.0
    assert metrics["episode_return"] == -10.0


def test_what_a_learner_waited_before_it_began_is_no_share_of_its_time():
    rates = Rates(32)
    for t_s, baseline, learner in (
        (0.0, -1, {"wait_s": 0.0}),
        (1.0, -1, {"wait_s": 1.0}),
        (1.5, 64, {"wait_s": 1.5}),
        (2.0, 64, {"wait_s": 1.5, "critic_s": 0.5}),
    ):
        found = rates.read(_reading(t_s, (64,), 0, inserted=64, baseline=baseline, learner=learner))
    assert (found["learner_wait_share"], found["learner_critic_share"]) == (0.0, 1.0)


def test_while_no_sampler_steps_their_episodes_are_unknown():
    episode = {"episodes": 2.0, "episode_return": -10.0}
    readings = [_reading(float(t), (steps, 1)) for t, steps in enumerate((1, 5, 5, 5, 5, 5, 6))]
    rates, found = Rates(1), []
    for reading in readings:
        reading.groups[0].samplers[0].update(episode)
        found.append(rates.read(reading)["episode_return"])
    assert found[:2] == [-10.0, -10.0]
    assert found[-2:] == [None, -10.0]


def test_an_on_policy_learner_has_numbers_of_its_own_and_none_of_replay():
    learner = {"learn_s": 0.75, "wait_s": 0.25, "policy_lag": 1.0}
    gauges = Rates(32)
    gauges.read(_reading(0.0, sampled=32, baseline=0))
    metrics = gauges.read(_reading(1.0, (64,), 2, inserted=64, baseline=0, sampled=64, learner=learner))
    assert (metrics["learner_learn_share"], metrics["learner_wait_share"]) == (0.75, 0.25)
    assert metrics["policy_lag"] == 1.0
    assert metrics["samples_per_insert"] == 1.0
    for name in ("replay_fill", "transition_age", "rows_redrawn"):
        assert metrics[name] is None
    assert "learner_critic_share" not in metrics


def test_inference_workers_rows_are_counted_by_the_batch():
    def reading(t_s, rows, batches, policy_s, wait_s):
        numbers = {"rows": rows, "batches": batches, "policy_s": policy_s, "wait_s": wait_s, "policy_version": 0.0}
        (group,) = _reading(t_s).groups
        return CounterSample(t_s, (dataclasses.replace(group, inference_workers=(numbers, numbers)),))

    gauges = Rates(32)
    assert gauges.read(reading(0.0, 0.0, 0.0, 0.0, 0.0))["inference_rows_per_batch"] is None
    metrics = gauges.read(reading(1.0, 12.0, 4.0, 0.25, 0.75))
    assert metrics["inference_rows_per_batch"] == 3.0
    assert (metrics["inference_policy_share"], metrics["inference_wait_share"]) == (0.25, 0.75)


def test_of_two_groups_counters_and_rates_are_sums_and_other_numbers_means():
    def reading(t_s, steps, updates, age):
        one = {"sampled": 640, "inserted": 200, "baseline": 100, "learner": {"transition_age": age}}
        return CounterSample(
            t_s, tuple(_reading(t_s, own, count, **one).groups[0] for own, count in zip(steps, updates, strict=True))
        )

    gauges = Rates(32)
    gauges.read(reading(0.0, ((0, 0), (0,)), (1, 1), 50.0))
    both = reading(2.0, ((100, 60), (40,)), (11, 31), 50.0)
    both.groups[1].learner["transition_age"] = 70.0
    metrics = gauges.read(both)
    names = ("updates", "updates_per_s", "env_steps_per_s", "update_frames_per_s", "transition_age")
    assert [metrics[name] for name in names] == [42.0, 20.0, 100.0, 640.0, 60.0]
    assert [metrics[f"{name}/0"] for name in names] == [11.0, 5.0, 80.0, 160.0, 50.0]
    assert [metrics[f"{name}/1"] for name in names] == [31.0, 15.0, 20.0, 480.0, 70.0]
    assert [metrics[f"sampler_env_steps_per_s/{index}"] for index in range(3)] == [50.0, 30.0, 20.0]
    assert metrics["samples_per_insert"] == metrics["samples_per_insert/1"] == 6.4


def test_a_run_of_one_group_has_no_series_by_group():
    gauges = Rates(32)
    gauges.read(_reading(0.0))
    series = [name for name in gauges.read(_reading(1.0, (9,), 3)) if "/" in name]
    assert series == ["sampler_env_steps_per_s/0"]


def test_consumption_over_production_is_that_of_the_latest_seconds():
    gauges = Rates(32, balanced_rows=1000)
    at = {"updates": 10, "baseline": 100, "learner": {"batch_size": 32.0, "replay_fill": 0.5}}
    gauges.read(_reading(0.0, inserted=200, sampled=6400, **at))
    metrics = gauges.read(_reading(1.0, inserted=300, sampled=7200, **at))
    assert (metrics["samples_per_insert"], metrics["samples_per_insert_now"]) == (36.0, 8.0)
    assert metrics["staleness"] == 0.064
    again = gauges.read(_reading(2.0, updates=11, inserted=400, baseline=400, sampled=7300))
    assert again["samples_per_insert_now"] is None, "a learner that began again counts anew"
