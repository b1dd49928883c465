"""Wakeups: no ring is lost, waits end, and waiting takes no processor time."""

import fcntl
import os
import resource
import threading
import time

import pytest
from harness import PATIENCE_S

from spreeze.transport.shared_memory import Wakeup, readable


@pytest.fixture
def wakeup():
    made = Wakeup.create()
    yield made
    made.close()


def test_a_ring_before_the_wait_ends_it_at_once_and_counts_once(wakeup):
    wakeup.notify()
    wakeup.notify()
    assert wakeup.wait(PATIENCE_S)
    assert not wakeup.wait(0.0)


def test_a_ring_from_elsewhere_ends_a_wait(wakeup):
    ringer = threading.Timer(0.05, wakeup.notify)
    ringer.start()
    try:
        assert wakeup.wait(PATIENCE_S)
    finally:
        ringer.join()


def test_a_wait_that_nobody_ends_costs_no_processor_time(wakeup):
    used_s = time.thread_time()
    assert not wakeup.wait(1.0)
    assert time.thread_time() - used_s < 0.5


def test_a_closed_bell_may_be_rung(wakeup):
    wakeup.close()
    wakeup.notify()


@pytest.fixture
def pipe_above_1023():
    """A pipe whose reading end has a number that ``select.select`` refuses."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200:
        pytest.skip("fewer than 1,200 descriptors are allowed here")
    low, write_fd = os.pipe()
    high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1100)
    os.close(low)
    ends = [high, write_fd]
    yield ends
    for fd in ends:
        os.close(fd)


def test_descriptors_of_any_number_can_be_waited_for(pipe_above_1023):
    high, write_fd = pipe_above_1023
    assert high > 1023
    assert readable([high], 0.0) == []
    os.write(write_fd, b"x")
    assert readable([high, write_fd], 20.0) == [high]
    os.read(high, 1)
    os.close(pipe_above_1023.pop())
    assert readable([high], 20.0) == [high], "the other end is closed: who reads sees the end"
