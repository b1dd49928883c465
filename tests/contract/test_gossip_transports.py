"""Gossip: messages arrive whole, the newest wins, sends never wait, and receivers wait only for who is overdue."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from harness import REPO, poll

from spreeze.transport.gloo_gossip import GlooGossip, MemberStore
from spreeze.transport.gossip import GlooPlace, SharedGossip, create_secret, messages_kept
from spreeze.transport.weights import VersionedParameters

SENDER = """
import json, sys
import numpy as np
learner, number, where = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
if isinstance(where, dict):
    from spreeze.transport.gloo_gossip import GlooGossip
    from spreeze.transport.gossip import GlooPlace
    gossip = GlooGossip(learner, GlooPlace.from_json(where), topology="ring", max_staleness=None)
else:
    from spreeze.transport.gossip import SharedGossip
    from spreeze.transport.weights import VersionedParameters
    gossip = SharedGossip(learner, [VersionedParameters(fds) for fds in where], topology="ring", max_staleness=None)
while True:
    number += 1
    gossip.send(np.full(200_000, number, np.float32), number)
"""


class InSharedMemory:
    """Learners whose messages lie in memory of this process."""

    def __init__(self, learners, folder):
        self.slots = [VersionedParameters.create(messages_kept(learners)) for _ in range(learners)]
        self.fds = [fd for slots in self.slots for fd in slots.fds]

    def side(self, learner, topology="ring", max_staleness=None):
        slots = [VersionedParameters(slots.fds) for slots in self.slots]
        return SharedGossip(learner, slots, topology=topology, max_staleness=max_staleness)

    @property
    def where(self):
        return [slots.fds for slots in self.slots]

    def close(self):
        for slots in self.slots:
            slots.close()


class OverGloo:
    """Learners whose messages go over connections of this machine."""

    fds = ()

    def __init__(self, learners, folder):
        create_secret(folder / "secret")
        self.store, self.sides = MemberStore(), []
        self.place = GlooPlace(
            store=self.store.address,
            secret_file=str(folder / "secret"),
            listen="127.0.0.1",
            learners=learners,
            own=tuple(range(learners)),
        )

    def side(self, learner, topology="ring", max_staleness=None):
        self.sides.append(GlooGossip(learner, self.place, topology=topology, max_staleness=max_staleness))
        return self.sides[-1]

    @property
    def where(self):
        return self.place.to_json()

    def close(self):
        for side in self.sides:
            side.close()
        self.store.close()


IMPLEMENTATIONS = {"shared memory": InSharedMemory, "gloo": OverGloo}


@pytest.fixture(scope="module", autouse=True)
def _first_store():
    """The library under the stores keeps one pipe for the life of the process, from the first store on."""
    MemberStore().close()


@pytest.fixture(params=IMPLEMENTATIONS)
def ring(request, tmp_path):
    made = IMPLEMENTATIONS[request.param](3, tmp_path)
    yield made
    made.close()


def start_sender(ring, learner, number):
    command = [sys.executable, "-c", SENDER, str(learner), str(number), json.dumps(ring.where)]
    return subprocess.Popen(
        command, pass_fds=ring.fds, env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    )


def _received(side):
    """What is received once anything is here."""
    return _told(poll(side.receive, what="a message"))


def _wait_for(side, sender, number):
    """Until a message is here, not yet received."""
    poll(lambda: side.at(sender, number), what=f"message {number} of learner {sender}")


def _told(messages):
    return [(message.sender, message.number, message.parameters.tolist()) for message in messages]


def _send(side, number):
    side.send(np.full(2, number, np.float32), number)


def test_a_message_reaches_the_next_in_the_ring_once_and_nobody_else(ring):
    sides = [ring.side(learner) for learner in range(3)]
    _send(sides[0], 1)
    assert _received(sides[1]) == [(0, 1, [1.0, 1.0])]
    assert [_told(side.receive()) for side in sides] == [[], [], []]
    assert sides[1].receive() == []
    assert [side.in_neighbours for side in sides] == [(2,), (0,), (1,)]


def test_the_newest_message_wins_and_sending_never_waits_for_a_reader(ring):
    sender, reader = ring.side(0), ring.side(1)
    for number in range(1, 50):
        _send(sender, number)
    _wait_for(reader, 0, 49)
    assert _told(reader.receive()) == [(0, 49, [49.0, 49.0])]


def test_a_neighbour_is_overdue_when_more_was_sent_than_the_limit_since_it_was_heard(ring):
    reader, sender = ring.side(1, max_staleness=2), ring.side(0)
    for number in (1, 2):
        _send(reader, number)
        assert reader.overdue() == ()
    _send(reader, 3)
    assert (reader.overdue(), reader.staleness) == ((0,), {0: 3})
    _send(sender, 1)
    _received(reader)
    assert (reader.overdue(), reader.staleness) == ((), {0: 0})


def test_without_a_limit_nobody_is_ever_overdue(ring):
    reader = ring.side(1)
    for number in range(1, 1000):
        _send(reader, number)
    assert reader.overdue() == ()


def test_in_lockstep_one_step_takes_one_message_of_a_peer_though_the_next_is_there_already(ring):
    reader, sender = ring.side(1, max_staleness=0), ring.side(0, max_staleness=0)
    for number in (1, 2):
        _send(sender, number)
        _wait_for(reader, 0, number)
        if number == 1:
            _send(reader, 1)
            assert _told(reader.receive()) == [(0, 1, [1.0, 1.0])]
    assert reader.receive() == [], "that one belongs to the reader's next step"
    _send(reader, 2)
    assert _told(reader.receive()) == [(0, 2, [2.0, 2.0])]


def test_in_lockstep_the_message_of_the_same_step_is_taken_though_a_newer_one_is_there(ring):
    reader, sender = ring.side(1, max_staleness=0), ring.side(0, max_staleness=0)
    for number in (1, 2, 3):
        _send(sender, number)
    _wait_for(reader, 0, 3)
    for number in (1, 2, 3):
        _send(reader, number)
        assert _told(reader.receive()) == [(0, number, [number, number])]


@pytest.mark.parametrize("starts", [(61, 60), (60, 10)])
def test_in_lockstep_nobody_waits_for_ever_though_the_numbers_differ(ring, starts):
    """After the death of one, or a resume from checkpoints of different rollouts."""
    sides, numbers = [ring.side(learner, "full", max_staleness=0) for learner in range(2)], list(starts)
    for side, number in zip(sides, numbers, strict=True):
        side.close_over([0, 1])
        _send(side, number)
    _wait_for(sides[0], 1, starts[1])
    _wait_for(sides[1], 0, starts[0])

    def go_on():
        for learner, side in enumerate(sides):
            side.receive()
            if not side.overdue():
                numbers[learner] += 1
                _send(side, numbers[learner])
        return all(now > start + 10 for now, start in zip(numbers, starts, strict=True))

    poll(go_on, what="ten steps of both")


def test_the_ring_closes_over_the_dead_and_opens_for_who_returns(ring):
    sides = [ring.side(learner, max_staleness=0) for learner in range(3)]
    _send(sides[0], 1)
    _send(sides[2], 1)
    assert sides[2].overdue() == (1,)
    sides[2].close_over([0, 2])
    assert (sides[2].in_neighbours, sides[2].overdue()) == ((0,), ())
    assert _received(sides[2]) == [(0, 1, [1.0, 1.0])]
    sides[2].close_over([0, 1, 2])
    assert sides[2].in_neighbours == (1,)
    sides[0].close_over([0])
    assert (sides[0].in_neighbours, sides[0].receive()) == ((), [])


def test_all_hear_all_in_the_full_graph(ring):
    sides = [ring.side(learner, "full") for learner in range(3)]
    for side in sides:
        _send(side, 7)
    for learner, side in enumerate(sides):
        for sender in {0, 1, 2} - {learner}:
            _wait_for(side, sender, 7)
    assert [sorted(message.sender for message in side.receive()) for side in sides] == [[1, 2], [0, 2], [0, 1]]
    assert sides[0].latest(1).number == 7


def test_senders_killed_in_the_middle_of_a_message_leave_whole_ones_and_successors_go_on(ring):
    reader, seen = ring.side(1), 0
    for _ in range(3):
        child = start_sender(ring, 0, seen)
        try:
            for _ in range(5):
                (message,) = poll(reader.receive)
                assert message.number > seen
                assert (message.parameters == message.number).all(), "torn"
                seen = message.number
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        last = reader.latest(0)
        assert last.number >= seen
        assert (last.parameters == last.number).all()
        seen = last.number
        reader.receive()  # what the dead one sent last, if it was not received yet


def test_in_shared_memory_a_message_that_was_begun_by_a_killed_sender_is_not_there(tmp_path, monkeypatch):
    ring = InSharedMemory(3, tmp_path)
    sender, reader, write = ring.side(0), ring.side(1), os.pwrite
    sender.send(np.ones(1000, np.float32), 1)

    def killed_in_the_array(fd, data, offset):
        if len(data) > 1000:
            write(fd, data[:500], offset)
            raise KeyboardInterrupt
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", killed_in_the_array)
    with pytest.raises(KeyboardInterrupt):
        sender.send(np.zeros(1000, np.float32), 2)
    monkeypatch.setattr(os, "pwrite", write)
    (message,) = reader.receive()
    assert (message.number, message.parameters.sum()) == (1, 1000)
    sender.send(np.zeros(1000, np.float32), 2)
    (message,) = reader.receive()
    assert (message.number, message.parameters.sum()) == (2, 0)
    ring.close()
