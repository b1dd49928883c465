"""Gossip: messages arrive whole, the newest wins, sends never wait, and receivers wait only for who is overdue."""

import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from harness import REPO, poll
from hosts_without_ray import HostsWithoutRay, Told, inherited

from spreeze.runtime.cluster import host
from spreeze.runtime.cluster.learner_bridge import LearnerBridge
from spreeze.transport.gossip import Gossip, GossipMemory, messages_kept
from spreeze.transport.shared_memory import inherited_fds
from spreeze.transport.weights import VersionedParameters
from spreeze.workers.jobs import LearnerBridgeJob

SENDER = """
import json, sys
import numpy as np
from spreeze.transport.gossip import Gossip, GossipHandle
from spreeze.transport.weights import VersionedParameters
learner, number, where = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
if isinstance(where, dict):
    gossip = GossipHandle.from_json(where).attach().enter(learner, topology="ring", max_staleness=None)
else:
    gossip = Gossip(learner, [VersionedParameters(fds) for fds in where], topology="ring", max_staleness=None)
while True:
    number += 1
    gossip.send(np.full(200_000, number, np.float32), number)
"""


class InSharedMemory:
    """Learners whose messages lie in memory of this process."""

    def __init__(self, learners, patch):
        self.slots = [VersionedParameters.create(messages_kept(learners)) for _ in range(learners)]
        self.fds = [fd for slots in self.slots for fd in slots.fds]

    def side(self, learner, topology="ring", max_staleness=None):
        slots = [VersionedParameters(slots.fds) for slots in self.slots]
        return Gossip(learner, slots, topology=topology, max_staleness=max_staleness)

    @property
    def where(self):
        return [slots.fds for slots in self.slots]

    def close(self):
        for slots in self.slots:
            slots.close()


class OnSeveralHosts:
    """Learner 0 is here, each other one on a host of its own; a bridge in a thread carries messages."""

    def __init__(self, learners, patch):
        patch.setattr(host, "LINGER_S", 0.0)
        patch.setattr(host.HostRun, "start", lambda run: None)  # its learner is in this process
        patch.setattr(host.HostRun, "end", lambda run, within_s: run.memory.close())
        self.memory = GossipMemory.create(learners, (0,))
        self.nodes = HostsWithoutRay(*(f"127.0.0.{host}" for host in range(2, learners + 1)))
        self.fds = inherited_fds(self.memory.handle())
        messages = inherited(self.memory.handle())
        job = LearnerBridgeJob(address="here", messages=messages, topology="full", arguments=())
        self.bridge, self.stopping = LearnerBridge(Told(), job, self.nodes), threading.Event()
        self.thread = threading.Thread(target=self._carry)
        self.thread.start()
        poll(lambda: len(self.nodes.actors) == learners - 1)

    def _carry(self):
        while not self.stopping.wait(0.002):
            self.bridge.turn()

    def side(self, learner, topology="ring", max_staleness=None):
        memory = self.memory if learner == 0 else self.nodes.actors[learner - 1]._run.memory
        return memory.enter(learner, topology=topology, max_staleness=max_staleness)

    @property
    def where(self):
        return self.memory.handle().to_json()

    def close(self):
        self.stopping.set()
        self.thread.join()
        self.bridge.close()
        self.memory.close()


IMPLEMENTATIONS = {"shared memory": InSharedMemory, "several hosts": OnSeveralHosts}


@pytest.fixture(params=IMPLEMENTATIONS)
def ring(request, monkeypatch):
    made = IMPLEMENTATIONS[request.param](3, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def memory(monkeypatch):
    """Learners of several hosts are never in lockstep."""
    made = InSharedMemory(3, monkeypatch)
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


def test_in_lockstep_one_step_takes_one_message_of_a_peer_though_the_next_is_there_already(memory):
    reader, sender = memory.side(1, max_staleness=0), memory.side(0, max_staleness=0)
    for number in (1, 2):
        _send(sender, number)
        _wait_for(reader, 0, number)
        if number == 1:
            _send(reader, 1)
            assert _told(reader.receive()) == [(0, 1, [1.0, 1.0])]
    assert reader.receive() == [], "that one belongs to the reader's next step"
    _send(reader, 2)
    assert _told(reader.receive()) == [(0, 2, [2.0, 2.0])]


def test_in_lockstep_the_message_of_the_same_step_is_taken_though_a_newer_one_is_there(memory):
    reader, sender = memory.side(1, max_staleness=0), memory.side(0, max_staleness=0)
    for number in (1, 2, 3):
        _send(sender, number)
    _wait_for(reader, 0, 3)
    for number in (1, 2, 3):
        _send(reader, number)
        assert _told(reader.receive()) == [(0, number, [number, number])]


@pytest.mark.parametrize("starts", [(61, 60), (60, 10)])
def test_in_lockstep_nobody_waits_for_ever_though_the_numbers_differ(memory, starts):
    """After the death of one, or a resume from checkpoints of different rollouts."""
    sides, numbers = [memory.side(learner, "full", max_staleness=0) for learner in range(2)], list(starts)
    for side, number in zip(sides, numbers, strict=True):
        side.restrict_to([0, 1])
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
    sides[2].restrict_to([0, 2])
    assert (sides[2].in_neighbours, sides[2].overdue()) == ((0,), ())
    assert _received(sides[2]) == [(0, 1, [1.0, 1.0])]
    sides[2].restrict_to([0, 1, 2])
    assert sides[2].in_neighbours == (1,)
    sides[0].restrict_to([0])
    assert (sides[0].in_neighbours, sides[0].receive()) == ((), [])


def test_all_hear_all_in_the_full_graph(ring):
    sides = [ring.side(learner, "full") for learner in range(3)]
    for side in sides:
        _send(side, 7)
    for learner, side in enumerate(sides):
        for sender in {0, 1, 2} - {learner}:
            _wait_for(side, sender, 7)
    assert [sorted(message.sender for message in side.receive()) for side in sides] == [[1, 2], [0, 2], [0, 1]]
    assert sides[0].newest(1).number == 7


@pytest.mark.warm
def test_senders_killed_in_the_middle_of_a_message_leave_whole_ones_and_successors_go_on(ring):
    reader, seen = ring.side(1), (-1, 0)
    for _ in range(3):
        child = start_sender(ring, 0, seen[1])
        try:
            for _ in range(5):
                (message,) = poll(reader.receive)
                assert (message.epoch, message.number) > seen
                assert (message.parameters == message.number).all(), "torn"
                seen = message.epoch, message.number
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()

        def newest(seen=seen):  # a bridge may still be writing: then there is none, or the one before
            found = reader.newest(0)
            return found if found is not None and (found.epoch, found.number) >= seen else None

        last = poll(newest, what="a message that is whole and no older than what was seen")
        assert (last.parameters == last.number).all()
        seen = last.epoch, last.number
        reader.receive()  # what the dead one sent last, if it was not received yet


def test_in_shared_memory_a_message_that_was_begun_by_a_killed_sender_is_not_there(memory, monkeypatch):
    sender, reader, write = memory.side(0), memory.side(1), os.pwrite
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
