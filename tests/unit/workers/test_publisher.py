"""The publisher: the newest offer wins, failures are told, a stop waits for what is offered."""

import threading

import numpy as np
import pytest
from harness import PATIENCE_S

from spreeze.errors import WeightsError
from spreeze.transport.weights import WeightsStore
from spreeze.workers.learner import PublishingThread

WEIGHTS = np.ones((2, 3), np.float32)


def arrays():
    return {"w0": WEIGHTS}


class Gate:
    """A store whose writes wait until they are let through."""

    def __init__(self, failure=None):
        self.written, self.begun, self.open, self.failure = [], threading.Event(), threading.Event(), failure

    def publish(self, arrays, meta, epoch, version):
        self.begun.set()
        assert self.open.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        self.written.append(version)


@pytest.fixture
def publisher_of():
    made = []

    def make(store, *args, **options):
        made.append(PublishingThread(store, *args, **options))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()
        assert not publisher._thread.is_alive()


def test_what_is_offered_is_read_back_and_its_readers_are_told(tmp_path, publisher_of):
    store, told = WeightsStore(tmp_path), []
    publisher = publisher_of(store, lambda: told.append(store.read_latest().version))
    publisher.submit(arrays, {"algo": "sac"}, 1, 7)
    assert publisher.flush(PATIENCE_S)
    latest = store.read_latest()
    assert (latest.order, latest.meta, publisher.version, told) == ((1, 7), {"algo": "sac"}, 7, [7])
    np.testing.assert_array_equal(latest.arrays["w0"], WEIGHTS)


def test_while_one_is_written_the_newest_of_several_offers_wins(publisher_of):
    gate = Gate()
    publisher = publisher_of(gate)
    publisher.submit(arrays, {}, 1, 1)
    assert gate.begun.wait(PATIENCE_S)
    for version in (2, 3, 4):
        publisher.submit(arrays, {}, 1, version)
    assert not publisher.flush(0.01)
    gate.open.set()
    assert publisher.flush(PATIENCE_S)
    assert gate.written == [1, 4]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), WeightsError("not finite"),
                                     RuntimeError("surprise")])  # fmt: skip
def test_a_failure_is_told_once_and_the_next_version_is_published(failure, publisher_of):
    gate = Gate(failure)
    gate.open.set()
    told = []
    publisher = publisher_of(gate, on_failure=told.append)
    publisher.submit(arrays, {}, 1, 1)
    assert publisher.flush(PATIENCE_S)
    assert len(told) == 1
    assert str(failure) in told[0]
    assert publisher.version == -1
    gate.failure = None
    publisher.submit(arrays, {}, 1, 2)
    assert publisher.flush(PATIENCE_S)
    assert (publisher.version, gate.written, len(told)) == (2, [2], 1)


def test_failures_in_a_row_are_told_by_powers_of_ten(publisher_of):
    gate = Gate(OSError(28, "No space left on device"))
    gate.open.set()
    told = []
    publisher = publisher_of(gate, on_failure=told.append)
    for version in range(1, 121):
        publisher.submit(arrays, {}, 1, version)
        assert publisher.flush(PATIENCE_S)
    cause = "the previous weights remain in use: [Errno 28] No space left on device"
    times = ("", " 10 times in a row", " 100 times in a row")
    assert told == [f"publishing weights failed{words}; {cause}" for words in times]
    gate.failure = None
    publisher.submit(arrays, {}, 1, 121)
    assert publisher.flush(PATIENCE_S)
    gate.failure = OSError(28, "No space left on device")
    publisher.submit(arrays, {}, 1, 122)
    assert publisher.flush(PATIENCE_S)
    assert told[3:] == [f"publishing weights failed; {cause}"], "another failure, told again"


def test_weights_that_are_not_finite_leave_the_last_good_ones(tmp_path, publisher_of):
    store, told = WeightsStore(tmp_path), []
    publisher = publisher_of(store, on_failure=told.append)
    publisher.submit(arrays, {}, 1, 1)
    assert publisher.flush(PATIENCE_S)
    publisher.submit(lambda: {"w0": np.full(3, np.nan, np.float32)}, {}, 1, 2)
    assert publisher.flush(PATIENCE_S)
    assert "not finite" in told[0]
    assert store.read_latest().version == 1


def test_closing_writes_what_waits_and_ends_the_thread(tmp_path):
    before = threading.active_count()
    publisher = PublishingThread(WeightsStore(tmp_path))
    publisher.submit(arrays, {}, 1, 5)
    publisher.close()
    publisher.close()
    assert WeightsStore(tmp_path).read_latest().version == 5
    assert threading.active_count() == before


def test_a_disk_that_hangs_holds_nobody_up():
    gate = Gate()
    publisher = PublishingThread(gate)
    publisher.submit(arrays, {}, 1, 1)
    assert gate.begun.wait(PATIENCE_S)
    publisher.close(0.01)
    assert publisher._thread.is_alive()
    gate.open.set()
    publisher.close()
    assert not publisher._thread.is_alive()
