"""ParameterPublisher and ParameterSource: versions grow, whole or not at all, on disk and in shared memory."""

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from harness import REPO, poll

from spreeze.errors import WeightsError
from spreeze.transport.weights import _EMPTY, _HEADER, VersionedParameters, WeightsStore, _slot_header

PUBLISHER = """
import sys
import numpy as np
from pathlib import Path
from spreeze.transport.weights import VersionedParameters, WeightsStore
kind, where = sys.argv[1:]
publisher = WeightsStore(Path(where)) if kind == "disk" else VersionedParameters(tuple(map(int, where.split(","))))
version = publisher.read_latest().version
while True:
    version += 1
    publisher.publish({"w": np.full(2_000, version, np.float32)}, {"updates": version}, 1, version)
"""


class OnDisk:
    """Publisher and source, and what a process needs to publish there, too."""

    kind = "disk"

    def __init__(self, folder):
        self.publisher, self.folder = WeightsStore(folder), folder

    def source(self):
        return WeightsStore(self.folder)

    def address(self):
        return str(self.folder), ()

    def close(self):
        pass


class InSharedMemory:
    kind = "shared memory"

    def __init__(self, slots):
        self.publisher = VersionedParameters.create(slots)

    def source(self):
        return VersionedParameters(self.publisher.fds)

    def address(self):
        return ",".join(map(str, self.publisher.fds)), self.publisher.fds

    def close(self):
        self.publisher.close()


IMPLEMENTATIONS = {
    "files": lambda folder: OnDisk(folder / "weights"),
    "shared memory, 2 slots": lambda folder: InSharedMemory(2),
    "shared memory, 5 slots": lambda folder: InSharedMemory(5),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def where(request, tmp_path):
    made = IMPLEMENTATIONS[request.param](tmp_path)
    yield made
    made.close()


def publish(where, version, epoch=1, value=None):
    value = version if value is None else value
    where.publisher.publish({"w": np.full((2, 3), value, np.float32), "count": np.array(7)}, {"updates": version},
                            epoch, version)  # fmt: skip


def test_a_reader_gets_what_was_published_whole_and_with_its_facts(where):
    assert where.source().read_latest() is None
    publish(where, 4)
    found = where.source().read_latest()
    assert {name: array.tolist() for name, array in found.arrays.items()} == {"w": [[4.0] * 3] * 2, "count": 7}
    assert (found.meta, found.order) == ({"updates": 4}, (1, 4))


def test_versions_grow_and_a_reader_is_told_only_what_is_newer_than_it_has(where):
    source = where.source()
    for version in range(1, 12):
        publish(where, version)
        assert source.read_latest((1, version - 1)).order == (1, version)
        assert source.read_latest((1, version)) is None
        assert source.read_latest((2, 0)) is None, "an older version is no news"
    assert where.source().read_latest().order == (1, 11), "a reader that comes late gets the newest"


def test_an_older_publication_never_replaces_a_newer_one(where):
    publish(where, 6)
    publish(where, 8)
    for order in [(1, 7), (1, 6), (0, 20), (1, 1)]:
        with contextlib.suppress(WeightsError):  # (1, 6) may be there still
            publish(where, order[1], order[0], value=-1)
        found = where.source().read_latest()
        assert (found.order, found.arrays["w"][0, 0]) == ((1, 8), 8)


def test_a_version_that_is_there_stays_as_it_is_for_somebody_may_be_reading_it(where):
    publish(where, 3)
    with contextlib.suppress(WeightsError):
        publish(where, 3, value=-1)
    assert where.source().read_latest().arrays["w"][0, 0] == 3


def test_a_learner_that_starts_again_begins_a_new_epoch_whatever_its_version(where):
    publish(where, 50)
    publish(where, 9, epoch=2)
    assert where.source().read_latest((1, 50)).order == (2, 9)
    with pytest.raises(WeightsError, match="1-51 was not published: 2-9 is already there"):
        publish(where, 51)


@pytest.mark.warm
def test_publishers_that_are_killed_leave_whole_versions_and_successors_go_on(where):
    publish(where, 0)
    address, fds = where.address()
    source, seen = where.source(), (1, 0)
    for _ in range(3):
        command = [sys.executable, "-c", PUBLISHER, where.kind, address]
        child = subprocess.Popen(command, pass_fds=fds, env={**os.environ, "PYTHONPATH": str(REPO)})
        try:
            for _ in range(5):
                found = poll(lambda seen=seen: source.read_latest(seen))
                assert found.order > seen
                seen = found.order
                assert found.meta == {"updates": seen[1]}
                assert (found.arrays["w"] == seen[1]).all()
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        last = where.source().read_latest()
        assert last.order >= seen
        assert (last.arrays["w"] == last.order[1]).all()
        seen = last.order


def test_two_versions_of_parameters_are_kept_and_older_ones_are_gone():
    parameters = VersionedParameters.create()
    try:
        assert parameters.read(0) is None
        for interval in range(3):
            parameters.publish({"w": np.full(3, interval, np.float32)}, {"updates": interval}, 0, interval)
        assert parameters.read(0) is None
        assert [parameters.read(i).arrays["w"][0] for i in (1, 2)] == [1, 2]
        assert parameters.read(2).meta == {"updates": 2}
        parameters.publish({"w": np.zeros(3, np.float32)}, {}, 0, 2)  # there already: somebody may be reading it
        assert parameters.read(2).arrays["w"][0] == 2
    finally:
        parameters.close()


@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_the_newest_versions_stay_whatever_lies_between_them(step):
    parameters = VersionedParameters.create(3)
    try:
        assert parameters.newest is None
        for number in range(5):
            parameters.publish_over_oldest({"w": np.full(2, number, np.float32)}, {}, 1, step * number)
        assert parameters.newest == (1, 4 * step)
        os.pwrite(max(parameters.fds, key=_slot_header), _HEADER.pack(*_EMPTY), 0)  # it is being written over
        assert parameters.read_latest().arrays["w"][0] == 3.0, "the newest but one"
        with pytest.raises(WeightsError, match="was not published"):
            parameters.publish_over_oldest({"w": np.zeros(2, np.float32)}, {}, 0, 100)
    finally:
        parameters.close()


def test_parameters_that_are_being_written_are_not_there(monkeypatch):
    parameters = VersionedParameters.create()
    write = os.pwrite
    try:
        parameters.publish({"w": np.ones(1000, np.float32)}, {}, 0, 0)

        def killed_in_the_array(fd, data, offset):
            if len(data) > 1000:
                write(fd, data[:500], offset)
                raise KeyboardInterrupt
            return write(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", killed_in_the_array)
        with pytest.raises(KeyboardInterrupt):
            parameters.publish({"w": np.zeros(1000, np.float32)}, {}, 0, 2)
        monkeypatch.setattr(os, "pwrite", write)
        assert parameters.read(0) is None
        assert parameters.read(2) is None
        parameters.publish({"w": np.zeros(1000, np.float32)}, {}, 0, 2)
        assert parameters.read(2).arrays["w"].sum() == 0
    finally:
        parameters.close()


@pytest.mark.parametrize("call", [1, 2])
def test_parameters_that_are_overwritten_while_they_are_read_are_not_there(monkeypatch, call):
    parameters, calls = VersionedParameters.create(), []
    try:
        parameters.publish({"w": np.ones(1000, np.float32), "v": np.zeros((2, 3), np.uint8)}, {}, 0, 0)
        read = os.preadv

        def slow(fd, buffers, offset):
            calls.append(offset)
            if len(calls) == call:  # of the description, or of the first array
                parameters.publish({"w": np.zeros(1000, np.float32), "v": np.ones((2, 3), np.uint8)}, {}, 0, 2)
            return read(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", slow)
        assert parameters.read(0) is None
        found = parameters.read(2).arrays
        assert (found["w"].sum(), found["v"].tolist()) == (0, [[1] * 3] * 2)
    finally:
        parameters.close()
