"""Learners that exchange messages by gloo: real processes die, fall silent and return, and nobody waits for them."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from harness import REPO, poll

from spreeze.errors import TransportError
from spreeze.transport import gloo_gossip
from spreeze.transport.gloo_gossip import GlooGossip, MemberStore, SignedStore
from spreeze.transport.gossip import GlooPlace
from spreeze.transport.socket_sink import create_secret

LEARNER = """
import json, sys
import numpy as np
from spreeze.transport.gloo_gossip import GlooGossip
from spreeze.transport.gossip import GlooPlace
learner, learners, place = int(sys.argv[1]), int(sys.argv[2]), GlooPlace.from_json(json.loads(sys.argv[3]))
gossip = GlooGossip(learner, learners, place, topology="ring", max_staleness=None)
gossip.env_steps, number = 100, 0
while True:
    number += 1
    gossip.close_over(gossip.living())
    gossip.send(np.full(100, number, np.float32), number)
    gossip.receive()
"""


@pytest.fixture(scope="module", autouse=True)
def _first_store():
    """The library under the stores keeps one pipe for the life of the process, from the first store on."""
    MemberStore().close()


class Ring:
    """A store, one learner in this process, and the others in processes of their own."""

    def __init__(self, folder):
        create_secret(folder / "secret")
        self.store, self.children, self.sides = MemberStore(), {}, []
        self.place = GlooPlace(store=self.store.address, secret_file=str(folder / "secret"), listen="127.0.0.1")

    def side(self, learner, learners=3, place=None):
        self.sides.append(GlooGossip(learner, learners, place or self.place, topology="ring", max_staleness=None))
        return self.sides[-1]

    def start(self, learner, learners=3):
        command = [sys.executable, "-c", LEARNER, str(learner), str(learners), json.dumps(self.place.to_json())]
        self.children[learner] = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"})

    def signal(self, learner, number):
        os.kill(self.children[learner].pid, number)

    def close(self):
        for child in self.children.values():
            child.kill()
            child.wait()
        for side in self.sides:
            side.close()
        self.store.close()


@pytest.fixture
def ring(tmp_path):
    made = Ring(tmp_path)
    yield made
    made.close()


def heard(side, sender):
    """A new message of that learner, of the newest ones."""
    def found():
        side.close_over(side.living())
        return next((message for message in side.receive() if message.sender == sender), None)

    return poll(found, what=f"a message of learner {sender}")


def wait_until_living(side, learners):
    poll(lambda: set(side.living()) == set(learners), what=lambda: f"{side.living()} are living, not {learners}")


def test_the_ring_closes_over_a_killed_learner_and_opens_again_when_it_returns(ring):
    own = ring.side(1)
    for learner in (0, 2):
        ring.start(learner)
    first = heard(own, 0)
    wait_until_living(own, (0, 1, 2))
    assert own.in_neighbours == (0,)
    ring.signal(0, signal.SIGKILL)
    wait_until_living(own, (1, 2))
    own.close_over(own.living())
    assert own.in_neighbours == (2,)
    heard(own, 2)
    ring.children[0].wait()
    ring.start(0)
    second = heard(own, 0)
    assert (first.epoch, second.epoch) == (1, 2), "the numbers of the second start begin anew"
    assert own.in_neighbours == (0,)


def test_a_learner_that_falls_silent_is_left_out_until_it_speaks_again(ring):
    own = ring.side(1, 2)
    ring.start(0, 2)
    heard(own, 0)
    ring.signal(0, signal.SIGSTOP)
    wait_until_living(own, (1,))
    number = own.latest(0).number
    own.send(np.ones(1 << 20, np.float32), 1)  # more than the connection takes while nobody reads
    own.send(np.ones(1 << 20, np.float32), 2)
    ring.signal(0, signal.SIGCONT)
    assert heard(own, 0).number > number
    wait_until_living(own, (0, 1))


def test_a_learner_to_which_no_connection_can_be_made_is_left_out_until_one_can(ring, monkeypatch):
    def cut(gossip, link):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(GlooGossip, "open_group", cut)
    own, other = ring.side(0, 2), ring.side(1, 2)
    wait_until_living(own, (0, 1))
    wait_until_living(own, (0,))
    own.close_over(own.living())
    assert own.in_neighbours == ()
    monkeypatch.undo()
    wait_until_living(own, (0, 1))
    other.send(np.ones(3, np.float32), 1)
    assert heard(own, 1).parameters.tolist() == [1.0, 1.0, 1.0]


def test_who_leaves_is_not_among_the_living_at_once(ring):
    own, other = ring.side(0, 2), ring.side(1, 2)
    wait_until_living(own, (0, 1))
    other.close()
    wait_until_living(own, (0,))
    assert own._members[1].left, "it said so"


def test_who_does_not_know_the_secret_is_neither_seen_nor_heard(ring, tmp_path):
    (tmp_path / "other").mkdir()
    create_secret(tmp_path / "other" / "secret")
    own = ring.side(0, 2)
    other = ring.side(1, 2, GlooPlace(store=ring.store.address, secret_file=str(tmp_path / "other" / "secret"),
                                      listen="127.0.0.1"))  # fmt: skip
    other.send(np.ones(3, np.float32), 1)
    poll(lambda: own.rejected and other.rejected, what="a rejected record on both sides")
    assert (own.living(), other.living(), own.latest(1)) == ((0,), (1,), None)


def test_a_message_that_was_changed_on_its_way_is_rejected_and_the_next_connection_brings_it(ring, monkeypatch):
    own, other, proof = ring.side(0, 2), ring.side(1, 2), gloo_gossip._Link._proof
    monkeypatch.setattr(gloo_gossip._Link, "_proof",
                        lambda link, frame: proof(link, frame ^ 1 if link.rank == 0 else frame))
    other.send(np.ones(3, np.float32), 1)
    poll(lambda: own.rejected, what="a rejected message")
    assert own.latest(1) is None
    monkeypatch.undo()
    assert heard(own, 1).number == 1


def test_values_in_the_store_belong_to_their_key(ring):
    own = ring.side(0, 2)
    store = SignedStore(own._store, own.secret, "a ", lambda: False)
    store.set("x", b"value")
    assert store.get("x") == b"value"
    own._store.set("a y", own._store.get("a x"))
    with pytest.raises(TransportError, match="a y in the learners' store was not signed with this run's secret"):
        store.get("y")


def test_learners_go_on_with_each_other_when_the_store_is_gone(ring):
    own, other = ring.side(0, 2), ring.side(1, 2)
    other.send(np.ones(3, np.float32), 1)
    heard(own, 1)
    ring.store.close()
    other.send(np.ones(3, np.float32), 2)
    assert heard(own, 1).number == 2


def test_env_steps_of_all_learners_are_known(ring):
    own = ring.side(1, 2)
    own.env_steps = 11
    ring.start(0, 2)
    poll(lambda: own.all_env_steps() == 111, what="env steps of the other")


def test_a_store_that_is_not_there_and_an_address_of_another_machine_are_told_in_one_line(ring, tmp_path):
    with pytest.raises(TransportError, match=r"no store of learners at 127\.0\.0\.1:1: "):
        GlooGossip(0, 2, GlooPlace(store="127.0.0.1:1", secret_file=ring.place.secret_file, listen="127.0.0.1"),
                   topology="ring", max_staleness=None)  # fmt: skip
    with pytest.raises(TransportError, match=r"cannot listen at 203\.0\.113\.7: .*set exchange\.listen"):
        MemberStore("203.0.113.7")
    with pytest.raises(TransportError, match=r"cannot listen at 203\.0\.113\.7"), \
            GlooPlace.opened(tmp_path, "203.0.113.7"):
        pass
