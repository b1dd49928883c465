"""Bells: no ring is lost, waits end, and waiting takes no processor time."""

import threading
import time

import pytest

from spreeze.transport.wake import Bell


@pytest.fixture
def bell():
    made = Bell.create()
    yield made
    made.close()


def test_a_ring_before_the_wait_ends_it_at_once_and_counts_once(bell):
    bell.ring()
    bell.ring()
    assert bell.wait(10.0)
    assert not bell.wait(0.0)


def test_a_ring_from_elsewhere_ends_a_wait(bell):
    ringer = threading.Timer(0.05, bell.ring)
    ringer.start()
    try:
        assert bell.wait(20.0)
    finally:
        ringer.join()


def test_a_wait_that_nobody_ends_costs_no_processor_time(bell):
    used_s = time.thread_time()
    assert not bell.wait(0.3)
    assert time.thread_time() - used_s < 0.05


def test_a_closed_bell_may_be_rung(bell):
    bell.close()
    bell.ring()
