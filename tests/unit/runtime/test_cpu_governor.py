"""The governor on traces made by hand and on simulated machines: how soon, how far, how often."""

import dataclasses
import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from spreeze.runtime.cpu_governor import CHANGES_PER_MINUTE, STEP, Governor, LoadSecond

QUIET = LoadSecond(usable_cores=4.0, external_cpu_cores=0.0, learner_cores=1.0, other_cores=0.0, sampler_cores=3.0,
              learner_wait_share=0.0, samples_per_insert=64.0)  # fmt: skip


def a_second(governor, external=0.0, **changes):
    """A second in which every active sampler wants one core."""
    return dataclasses.replace(QUIET, **{"external_cpu_cores": external, "sampler_cores": governor.active, **changes})


def feed(governor, seconds, external=0.0, **changes):
    """Feeds so many equal seconds; returns (second, change) of all changes."""
    found = []
    for second in range(1, seconds + 1):
        change = governor.feed(a_second(governor, external, **changes))
        if change is not None:
            found.append((second, change))
    return found


def test_nothing_changes_on_a_machine_of_its_own():
    assert feed(Governor(3), 600) == []


def test_two_external_cores_of_four_leave_half_of_three_samplers_beside_the_learner():
    governor = Governor(3)
    feed(governor, 20)
    [(second, change)] = feed(governor, 60, external=2.0)
    assert second == 2  # two seconds in a row ask for it
    # 4 cores - (2.0 - 0.5) of others - 1 of the learner - half the dead band = 1.375, but half of three work on.
    assert change.active == governor.active == 1.5
    assert "other programs use 2.00 of 4 usable cores in one second" in change.reason


def test_a_run_that_does_not_give_way_rests_only_for_a_share_to_be_left_free():
    governor = Governor(3, gives_way=False)
    assert feed(governor, 100, external=4.0) == []
    governor.leave_free = 0.25
    assert feed(governor, 20, external=4.0)[0][1].active == 0.125
    governor.leave_free = 0.0
    assert feed(governor, 100, external=4.0)[-1][1].active == 3.0


def test_what_was_given_is_taken_back_ten_seconds_after_the_load_has_ended():
    governor = Governor(3)
    feed(governor, 20)
    feed(governor, 30, external=2.0)
    [(second, change)] = feed(governor, 60)
    assert 9 <= second <= 11
    assert change.active == 3.0


def test_a_load_that_only_shrinks_gives_back_only_what_it_left():
    governor = Governor(3)
    feed(governor, 20)
    feed(governor, 30, external=2.0)
    [(_, change)] = feed(governor, 60, external=1.0)
    assert change.active == 2.5


def test_a_little_load_left_behind_keeps_nobody_from_coming_back():
    governor = Governor(3)
    feed(governor, 20)
    feed(governor, 30, external=2.0)
    [(_, change)] = feed(governor, 60, external=0.6)  # as much as would not have made anybody rest
    assert change.active == 3.0


def test_one_second_of_load_and_one_quiet_second_are_ignored():
    governor = Governor(3)
    feed(governor, 20)
    assert feed(governor, 1, external=3.0) + feed(governor, 20) == []
    feed(governor, 20, external=2.0)
    assert feed(governor, 1) + feed(governor, 30, external=2.0) == []


def test_a_light_load_and_a_quarter_of_a_core_beyond_it_change_nothing():
    governor = Governor(3)
    assert feed(governor, 100, external=0.74) == []
    assert feed(governor, 10, external=0.8) != []


def test_idle_cores_are_used_up_before_a_sampler_rests():
    governor = Governor(2)  # 1 learner + 2 samplers of 4 cores: one is idle
    assert feed(governor, 100, external=1.7) == []
    assert feed(governor, 10, external=2.4)[0][1].active == 1.0


def test_one_sampler_on_two_cores_works_half_of_its_time_at_least():
    governor = Governor(1)
    feed(governor, 20, usable_cores=2.0)
    feed(governor, 20, external=1.0, usable_cores=2.0)
    assert governor.active == 0.5
    feed(governor, 60, external=2.0, usable_cores=2.0)
    assert governor.active == 0.5


def test_a_share_to_be_left_free_may_slow_the_only_sampler_to_an_eighth_but_never_stops_it():
    governor = Governor(1, leave_free=0.5)
    feed(governor, 60, usable_cores=2.0)
    assert governor.active == STEP


def test_more_samplers_than_cores_is_the_user_s_choice_until_somebody_else_comes():
    governor = Governor(6)
    assert feed(governor, 300, usable_cores=2.0) == []
    feed(governor, 10, external=1.0, usable_cores=2.0)
    assert governor.active == 5.375


def test_samplers_held_by_the_limiter_cost_little_and_need_not_rest():
    governor = Governor(3)
    for _ in range(100):  # all three together use a fifth of a core
        assert governor.feed(a_second(governor, 2.5, sampler_cores=0.2)) is None


def test_the_share_to_be_left_free_is_left_though_nobody_uses_it():
    governor = Governor(3, leave_free=0.25)
    [(second, change)] = feed(governor, 100)
    assert (second, change.active) == (5, 1.875)  # 4 cores - 1 free - 1 learner - half the dead band
    assert "1.00 must stay free" in change.reason
    assert feed(governor, 60, external=1.0) == []  # that is what it was left for
    assert feed(governor, 5, external=2.0)[0][1].active == 1.0


def test_a_learner_that_waits_for_rows_is_given_samplers_back_and_keeps_them():
    governor = Governor(1)
    feed(governor, 20, usable_cores=2.0)
    feed(governor, 20, external=1.0, usable_cores=2.0)
    [(second, change)] = feed(governor, 4, external=1.0, usable_cores=2.0, learner_wait_share=0.4)
    assert (second, change.active) == (3, 0.5 + STEP)
    assert "waits 40 %" in change.reason
    assert "64 samples per insert" in change.reason
    assert feed(governor, 300, external=1.0, usable_cores=2.0) == []


def test_a_learner_that_waits_anyway_is_not_deprived_of_rows():
    assert feed(Governor(3), 100, external=3.0, learner_wait_share=0.5) == []


def test_seconds_without_facts_change_nothing_and_are_not_counted():
    governor = Governor(3)
    feed(governor, 20)
    feed(governor, 1, external=3.0)
    assert governor.feed(None) is None
    assert feed(governor, 4, external=3.0) == []  # settles first, as at the start
    assert feed(governor, 1, external=3.0) != []


def test_a_load_that_comes_and_goes_is_waited_out_longer_each_time():
    governor = Governor(3)
    feed(governor, 20)
    waits = []
    for _ in range(5):
        feed(governor, 5, external=2.0)
        waits.append(feed(governor, 100)[0][0] if len(waits) == 4 else _until_back(governor))
    assert waits[:4] == sorted(waits[:4])
    assert waits[0] <= 11
    assert waits[3] >= 50


def _until_back(governor):
    for second in range(1, 100):
        if governor.feed(a_second(governor)) is not None:
            return second
    raise AssertionError("never taken back")


class Machine:
    """Cores shared by weight among learner, samplers and external programs; readings with noise."""

    def __init__(self, cores, samplers, noise, seed, leave_free=0.0):
        self.cores, self.noise, self.rng = cores, noise, random.Random(seed)
        self.governor = Governor(samplers, leave_free)
        self.changes = []
        self.second = 0

    def run(self, seconds, external):
        """So many seconds beside programs that want so many cores; returns the changes in them."""
        before = len(self.changes)
        for _ in range(seconds):
            self.second += 1
            active = self.governor.active
            wanted = {"learner": (1.0, 1.0), "other": (0.2, 0.03), "samplers": (active, 0.1 * active),
                      "external": (external, max(external, 1e-9))}  # fmt: skip
            given_cores = _shared(self.cores, wanted)
            change = self.governor.feed(LoadSecond(
                usable_cores=self.cores, external_cpu_cores=max(0.0, given_cores["external"] + self._noise()),
                learner_cores=max(0.0, 1.0 + self._noise()), other_cores=max(0.0, 0.2 + self._noise()),
                sampler_cores=max(0.0, active * (1.0 + self._noise())), learner_wait_share=0.0,
            ))  # fmt: skip
            if change is not None:
                self.changes.append((self.second, change.active))
        return self.changes[before:]

    def _noise(self):
        return self.rng.uniform(-self.noise, self.noise)


def _shared(cores, wanted):
    """Cores by weight, nobody more than it wants: what one leaves goes to the others."""
    given_cores, left, open_names = dict.fromkeys(wanted, 0.0), cores, set(wanted)
    while open_names and left > 1e-9:
        weight = sum(wanted[name][1] for name in open_names)
        full = [n for n in open_names if wanted[n][0] <= left * wanted[n][1] / weight]
        if not full:
            for name in open_names:
                given_cores[name] = left * wanted[name][1] / weight
            break
        for name in full:
            given_cores[name] = wanted[name][0]
        left -= sum(wanted[name][0] for name in full)
        open_names -= set(full)
    return given_cores


MACHINES = st.builds(
    lambda cores, spare, noise, seed: Machine(float(cores), max(1, cores - 1 + spare), noise, seed),
    st.integers(2, 32), st.integers(-3, 2), st.floats(0.0, 0.04), st.integers(0, 2**31),
)  # fmt: skip

LOADS = st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 8.0)), max_size=40)


@given(MACHINES, st.floats(0.5, 8.0))
def test_yields_within_5_s_and_takes_all_back_within_15_s(machine, external):
    samplers = float(machine.governor.active)
    machine.run(30, 0.0)
    assert machine.governor.active == samplers
    external = min(external, machine.cores - 1.0)
    idle = machine.cores - 1.2 - samplers
    machine.run(5, external)
    if external - 0.5 > max(idle, 0.0) + max(0.25, 0.04 * machine.cores) + 3 * machine.noise + machine.noise * samplers:
        assert machine.governor.active < samplers
    machine.run(40, external)
    machine.run(15, 0.0)
    assert machine.governor.active == samplers


@given(MACHINES, st.floats(0.0, 32.0))
def test_under_a_constant_load_at_most_two_changes_in_ten_minutes(machine, external):
    machine.run(30, 0.0)
    assert len(machine.run(600, min(external, machine.cores))) <= 2


@given(MACHINES, st.sampled_from([0.0, 0.25]), LOADS)
def test_under_any_load_never_more_changes_than_stated_and_never_out_of_range(machine, leave_free, loads):
    machine.governor = Governor(int(machine.governor.active), leave_free)
    samplers = machine.governor.active
    for seconds, external in loads:
        machine.run(seconds, external)
        assert STEP <= machine.governor.active <= samplers
        assert (machine.governor.active / STEP).is_integer()
    seconds = [second for second, _ in machine.changes]
    assert all(later - first >= 60 for first, later in zip(seconds, seconds[CHANGES_PER_MINUTE:], strict=False))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 32), st.sampled_from([0.1, 0.25, 0.5]), st.floats(0.0, 0.05), st.integers(0, 2**31))
def test_the_share_to_be_left_free_is_reached_and_held(cores, leave_free, noise, seed):
    machine = Machine(float(cores), max(1, cores - 1), noise, seed, leave_free)
    machine.run(30, 0.0)
    used = 1.2 + machine.governor.active
    assert used <= max((1.0 - leave_free) * cores + max(0.45, 0.04 * cores) + noise * cores, 1.2 + STEP)
    assert len(machine.run(600, 0.0)) <= 2
    assert not math.isclose(machine.governor.active, 0.0)


def test_nobody_rests_because_of_another_run_of_the_same_user():
    assert feed(Governor(3), 600, sibling_cores=4.0) == []
    governor = Governor(3)
    feed(governor, 20, sibling_cores=2.0)
    feed(governor, 30, external=2.0, sibling_cores=2.0)
    feed(governor, 60, sibling_cores=2.0)
    assert governor.active == 3.0, "what was given to others comes back, whatever the other run does"


def test_what_another_run_keeps_busy_is_room_that_this_one_does_not_have_for_others():
    governor = Governor(5)
    sixteen = {"usable_cores": 16.0, "sibling_cores": 6.0}
    feed(governor, 30, **sixteen)
    assert feed(governor, 30, external=3.0, **sixteen) == []  # 6 + 6 + 3 = 15
    sixteen["sibling_cores"] = 5.0  # the kernel gives 16 - 6 to the two runs
    changes = feed(governor, 120, external=6.5, **sixteen)
    # 16 - 5 of the other run - (6.5 - 0.5) of others - 1 of the learner - half the dead band of 0.64 = 3.68 samplers.
    assert [change.active for _, change in changes] == [3.625]
    assert "other runs and programs of low priority 5.00" in changes[0][1].reason


class TwoRuns:
    """Two runs with their governors on one machine, which gives to each by weight as above."""

    def __init__(self, cores, samplers, noise, seed):
        self.cores, self.noise, self.rng = cores, noise, random.Random(seed)
        self.governors = [Governor(count) for count in samplers]
        self.changes = []

    def run(self, seconds, external):
        """So many seconds beside programs that want so many cores; returns the changes in them."""
        before = len(self.changes)
        for _ in range(seconds):
            active = [governor.active for governor in self.governors]
            wanted = {"external": (external, max(external, 1e-9))}
            for run, count in enumerate(active):
                wanted |= {f"learner {run}": (1.2, 1.0), f"samplers {run}": (count, 0.1 * count)}
            given_cores = _shared(self.cores, wanted)
            for run, governor in enumerate(self.governors):
                other = given_cores[f"learner {1 - run}"] + given_cores[f"samplers {1 - run}"]
                change = governor.feed(LoadSecond(
                    usable_cores=self.cores, external_cpu_cores=max(0.0, given_cores["external"] + self._noise()),
                    sibling_cores=max(0.0, other + self._noise()), learner_cores=1.2 + self._noise(), other_cores=0.0,
                    sampler_cores=active[run] * (1.0 + self._noise()), learner_wait_share=0.0,
                ))  # fmt: skip
                if change is not None:
                    self.changes.append((run, change.active))
        return self.changes[before:]

    def wanted_cores(self):
        return sum(1.2 + governor.active for governor in self.governors)

    def _noise(self):
        return self.rng.uniform(-self.noise, self.noise)


@given(
    st.integers(4, 32),
    st.integers(1, 16),
    st.integers(1, 16),
    st.floats(0.0, 0.04),
    st.floats(0.5, 8.0),
    st.integers(0, 2**31),
)
def test_two_runs_rest_for_others_only_hold_still_under_a_constant_load_and_take_all_back(
    cores, first, second, noise, external, seed
):
    machine = TwoRuns(float(cores), (first, second), noise, seed)
    assert machine.run(60, 0.0) == [], "not for each other, however many samplers there are"
    fitted = machine.wanted_cores() <= cores
    machine.run(120, external)
    assert len(machine.run(300, external)) <= 2
    pairs = zip(machine.governors, (first, second), strict=True)
    if fitted and all(governor.active > samplers / 2 + STEP for governor, samplers in pairs):
        # A dead band of what neither has to see, and the half core for which priorities suffice, for each.
        slack = 2 * (max(0.25, 0.04 * cores) + 0.5 + STEP) + 4 * noise + noise * (first + second)
        assert machine.wanted_cores() + external <= cores + slack
    machine.run(90, 0.0)
    assert [governor.active for governor in machine.governors] == [first, second]


def feed_balanced(governor, seconds, needed, **changes):
    """Seconds in which the learner takes what ``needed`` samplers insert; returns the changes."""
    found = []
    for _ in range(seconds):
        waits = max(0.0, 1.0 - needed / governor.active)
        starves = max(0.0, 1.0 - governor.active / needed)
        found.append(
            governor.feed(
                a_second(governor, sampler_wait_share=waits, learner_wait_share=starves, usable_cores=8.0, **changes)
            )
        )
    return [change for change in found if change is not None]


def test_samplers_that_a_balanced_learner_does_not_need_rest_whole_and_come_back_when_it_waits():
    governor = Governor(4, balanced_groups=1)
    [change] = feed_balanced(governor, 60, needed=1.2)
    assert change.active == 2.0, "1.2 of work take 1.33 samplers that wait a tenth of their time"
    assert "the samplers wait 70 % of their time for the learner" in change.reason
    assert [change.active for change in feed_balanced(governor, 20, needed=2.4)] == [2.125, 2.25]
    assert feed_balanced(governor, 40, needed=0.5) == [], "not for a minute after it was fed"
    assert [change.active for change in feed_balanced(governor, 60, needed=0.5)] == [1.0]


def test_each_balanced_learner_keeps_a_sampler_and_other_modes_let_them_wait():
    governor = Governor(4, balanced_groups=2)
    feed_balanced(governor, 60, needed=0.1)
    assert governor.active == 2.0
    assert feed_balanced(Governor(4), 60, needed=0.1) == []


def test_balanced_samplers_that_rested_for_others_come_back_only_as_far_as_they_are_needed():
    governor = Governor(4, balanced_groups=1)
    feed_balanced(governor, 20, needed=2.5)
    assert governor.active == 3.0
    governor.leave_free = 0.75
    feed(governor, 60, usable_cores=8.0)
    assert governor.active < 2.0
    governor.leave_free = 0.0
    feed(governor, 200, usable_cores=8.0)
    assert governor.active == 3.0
