"""The balance between inserting and sampling."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spreeze.errors import ConfigError
from spreeze.transport.rate_limiter import RateLimiter


def make(minimum=1.0, maximum=4.0, learning_starts=10, batch_size=8, rows_per_write=1):
    return RateLimiter(minimum, maximum, learning_starts, batch_size, rows_per_write)


@pytest.mark.parametrize(
    "change",
    [{"minimum": 5.0}, {"minimum": -1.0}, {"minimum": 0.0, "maximum": 0.0}, {"maximum": float("inf")},
     {"minimum": float("nan")}, {"batch_size": 0}, {"rows_per_write": 0}],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_with_the_reason(change):
    with pytest.raises(ConfigError, match="would deadlock"):
        make(**change)


def test_before_learning_samplers_fill_to_learning_starts_and_wait():
    limiter = make(rows_per_write=4)
    assert limiter.may_insert(9, -1, 0, 4)
    assert not limiter.may_insert(10, -1, 0, 4)
    assert not limiter.may_sample(9, -1, 0)
    assert limiter.may_sample(10, -1, 0)


def test_learning_starts_zero_still_needs_one_row():
    limiter = make(learning_starts=0)
    assert limiter.may_insert(0, -1, 0, 1)
    assert not limiter.may_sample(0, -1, 0)
    assert limiter.may_sample(1, -1, 0)


def test_band_by_hand():
    # 1..4 samples per insert, batch 8, one row a write, learning began at 10 rows
    limiter = make()
    assert limiter.may_sample(10, 10, 0)  # 0 <= 0 * 4
    assert not limiter.may_sample(10, 10, 8)  # 8 > 0 * 4
    assert not limiter.may_sample(11, 10, 8)  # 8 > 1 * 4
    assert limiter.may_sample(12, 10, 8)  # 8 <= 2 * 4
    assert limiter.may_insert(18, 10, 8, 1)  # (8 + 1 - 1) * 1 <= 8
    assert not limiter.may_insert(19, 10, 8, 1)


def test_minimum_zero_never_holds_a_sampler_back():
    limiter = make(minimum=0.0)
    assert limiter.may_insert(10**9, -1, 0, 1)
    assert limiter.may_insert(10**9, 0, 0, 1)


def test_new_baseline_after_a_restart_leaves_no_burst():
    limiter = make()
    inserted = 1_000_000  # with the old baseline four million samples would be owed
    sampled = 0
    while limiter.may_sample(inserted, inserted, sampled):
        sampled += limiter.batch_size
    assert sampled == limiter.batch_size


@st.composite
def cases(draw):
    minimum = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.7, 24.0]))
    maximum = draw(st.sampled_from([m for m in (0.1, 0.5, 1.0, 3.7, 24.0, 256.0) if m >= minimum]))
    writers = draw(st.integers(1, 4))
    rows = draw(st.integers(1, 8))
    limiter = RateLimiter(minimum, maximum, draw(st.integers(0, 50)), draw(st.sampled_from([1, 8, 64])), writers * rows)
    return limiter, writers, rows, draw(st.floats(0.01, 0.99)), draw(st.integers(0, 2**32))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_any_speeds_any_schedule_no_deadlock_and_ratio_in_band(case):
    limiter, writers, rows, sampler_speed, seed = case
    random = Random(seed)
    inserted, baseline, sampled = 0, -1, 0
    enough = 20 * max(limiter.rows_per_write, limiter.batch_size / limiter.maximum)
    pending = [0] * writers  # a sampler looks at the counters and writes later: others may act in between

    def sampler_step():
        nonlocal inserted
        index = random.randrange(writers)
        if pending[index]:
            inserted += pending[index]
            pending[index] = 0
        elif limiter.may_insert(inserted, baseline, sampled, rows):
            pending[index] = rows
        else:
            return False
        return True

    def learner_step():
        nonlocal baseline, sampled
        if not limiter.may_sample(inserted, baseline, sampled):
            return False
        if baseline < 0:
            baseline = inserted
        else:
            sampled += limiter.batch_size
        return True

    for _ in range(3000):
        moved = sampler_step() if random.random() < sampler_speed else learner_step()
        if not moved and not any(pending):
            can_insert = limiter.may_insert(inserted, baseline, sampled, rows)
            assert can_insert or limiter.may_sample(inserted, baseline, sampled), "deadlock"
        after = inserted - baseline
        if baseline >= 0 and after > enough:
            ratio = sampled / after
            if limiter.minimum > 0:
                assert ratio >= 0.95 * limiter.minimum * (1 - 2 * limiter.rows_per_write / after)
            assert ratio <= 1.05 * limiter.maximum


@pytest.mark.parametrize("learner_share", [0.02, 0.5, 0.98])
def test_long_run_ratio_is_within_five_percent_of_the_band(learner_share):
    limiter = make(minimum=8.0, maximum=10.0, learning_starts=100, batch_size=256, rows_per_write=2)
    inserted, baseline, sampled, clock = 100, 100, 0, 0.0
    for _ in range(200_000):
        clock += learner_share
        if clock >= 1.0:
            clock -= 1.0
            if limiter.may_sample(inserted, baseline, sampled):
                sampled += 256
        elif limiter.may_insert(inserted, baseline, sampled, 1):
            inserted += 1
    assert inserted - baseline > 1000
    assert 8.0 * 0.95 <= sampled / (inserted - baseline) <= 10.0 * 1.05


def test_in_turns_a_batch_is_drawn_as_soon_as_its_rows_are_there_and_never_before():
    limiter = RateLimiter(0.0, 8.0, learning_starts=10, batch_size=16, rows_per_write=4, serial=True)
    assert not limiter.may_sample(9, -1, 0)
    assert limiter.may_sample(10, -1, 0)
    sampled, drawn = 0, []
    for inserted in range(10, 20):
        while limiter.may_sample(inserted, 10, sampled):
            sampled += 16
        drawn.append(sampled)
    assert drawn == [0, 0, 16, 16, 32, 32, 48, 48, 64, 64]
