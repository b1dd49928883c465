"""Learners that exchange messages by gloo: real processes die, fall silent and return, and nobody waits for them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import REPO, poll

from spreeze.errors import TransportError
from spreeze.transport import gloo_gossip
from spreeze.transport.gloo_gossip import GlooGossip, MemberStore, SignedStore
from spreeze.transport.gossip import GlooPlace, create_secret, read_secret

LEARNER = """
import json, sys
import numpy as np
from spreeze.transport.gloo_gossip import GlooGossip
from spreeze.transport.gossip import GlooPlace
gossip = GlooGossip(int(sys.argv[1]), GlooPlace.from_json(json.loads(sys.argv[2])), topology="ring",
                    max_staleness=None)
number = 0
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
        self.secret_file = folder / "secret"

    def place(self, learners, **changed):
        facts = {"store": self.store.address, "secret_file": str(self.secret_file), "listen": "127.0.0.1",
                 "learners": learners, "own": tuple(range(learners))}  # fmt: skip
        return GlooPlace(**facts | changed)

    def side(self, learner, learners=3, **changed):
        self.sides.append(GlooGossip(learner, self.place(learners, **changed), topology="ring", max_staleness=None))
        return self.sides[-1]

    def start(self, learner, learners=3):
        command = [sys.executable, "-c", LEARNER, str(learner), json.dumps(self.place(learners).to_json())]
        self.children[learner] = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        )

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
    second = poll(lambda: message if (message := heard(own, 0)).epoch > first.epoch else None)
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


def test_who_was_replaced_while_it_was_out_of_reach_is_alone_and_does_not_disturb_its_successor(ring):
    old, other = ring.side(0, 2), ring.side(1, 2)
    wait_until_living(other, (0, 1))
    successor = ring.side(0, 2)
    wait_until_living(old, (0,))
    wait_until_living(successor, (0, 1))
    successor.send(np.full(2, 5.0, np.float32), 1)
    assert heard(other, 0).parameters.tolist() == [5.0, 5.0]
    assert other._members[0].epoch == 2


def test_only_this_user_can_read_the_secret_and_it_is_written_once(tmp_path):
    path = tmp_path / "secret"
    secret = create_secret(path)
    assert (path.stat().st_mode & 0o777, read_secret(path)) == (0o600, secret)
    with pytest.raises(FileExistsError):
        create_secret(path)
    assert create_secret(tmp_path / "copy", secret) == read_secret(tmp_path / "copy") == secret
    with pytest.raises(TransportError, match="cannot be read"):
        read_secret(tmp_path / "none")
    create_secret(tmp_path / "cut short", b"")
    with pytest.raises(TransportError, match="has 0 bytes, not 32"):
        read_secret(tmp_path / "cut short")


def test_who_does_not_know_the_secret_is_neither_seen_nor_heard(ring, tmp_path):
    (tmp_path / "other").mkdir()
    create_secret(tmp_path / "other" / "secret")
    own = ring.side(0, 2)
    other = ring.side(1, 2, secret_file=str(tmp_path / "other" / "secret"))
    other.send(np.ones(3, np.float32), 1)
    poll(lambda: own.rejected and other.rejected, what="a rejected record on both sides")
    assert (own.living(), other.living(), own.latest(1)) == ((0,), (1,), None)


def test_a_message_that_was_changed_on_its_way_is_rejected_and_the_next_connection_brings_it(ring, monkeypatch):
    own, other, proof = ring.side(0, 2), ring.side(1, 2), gloo_gossip._Link._proof
    monkeypatch.setattr(
        gloo_gossip._Link, "_proof", lambda link, frame: proof(link, frame ^ 1 if link.rank == 0 else frame)
    )
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


def test_a_store_that_is_not_there_and_an_address_of_another_machine_are_told_in_one_line(ring, tmp_path):
    with pytest.raises(TransportError, match=r"no store of learners at 127\.0\.0\.1:1: "):
        ring.side(0, store="127.0.0.1:1")
    with pytest.raises(TransportError, match=r"cannot listen at 203\.0\.113\.7: .*set exchange\.listen"):
        MemberStore("203.0.113.7")
    with (
        pytest.raises(TransportError, match=r"cannot listen at 203\.0\.113\.7"),
        GlooPlace.opened(tmp_path, "203.0.113.7", 1, 2, {}),
    ):
        pass


class Host:
    """A run's place, that other hosts join."""

    def __init__(self, place):
        self.place, self.file = place, Path(place.secret_file)

    def admit(self, count, claimant, facts):
        return GlooPlace.joining(self.place.store, self.file, "127.0.0.1", count, claimant, facts)


@pytest.fixture
def host(tmp_path):
    (tmp_path / "run").mkdir()
    with GlooPlace.opened(tmp_path / "run", "127.0.0.1", 1, 4, {"run.algo": "a2c", "sizes": (2, 2)}) as place:
        yield Host(place)
    assert not Path(place.secret_file).exists(), "the secret ends with the run"


FACTS = {"run.algo": "a2c", "sizes": (2, 2)}


def test_hosts_that_join_get_numbers_of_their_own_and_the_same_ones_again(host):
    assert (host.place.own, host.place.learners, host.place.joined) == ((0,), 4, False)
    assert host.file.stat().st_mode & 0o077 == 0
    first, second = host.admit(2, "b:/runs/x", FACTS), host.admit(1, "c:/runs/x", FACTS)
    assert (first.own, second.own, first.joined, first.learners) == ((1, 2), (3,), True, 4)
    assert host.admit(2, "b:/runs/x", FACTS).own == (1, 2)


def test_who_is_gone_makes_room_and_who_learns_keeps_its_number(host):
    first = host.admit(2, "b:/runs/x", FACTS)
    with contextlib.closing(GlooGossip(0, first, topology="ring", max_staleness=None)) as living:
        assert host.admit(2, "c:/runs/x", FACTS).own == (2, 3)
        poll(lambda: living.epoch == 1)
        with pytest.raises(TransportError, match="has room for 2 more of its 4 learners, not for 3; use fewer here"):
            host.admit(3, "d:/runs/x", FACTS)


def test_who_has_other_settings_or_another_secret_cannot_join(host, tmp_path):
    with pytest.raises(TransportError, match=r"cannot be joined: sizes is \[4\] here and \[2, 2\] there"):
        host.admit(1, "b", FACTS | {"sizes": (4,)})
    create_secret(tmp_path / "secret")
    host.file = tmp_path / "secret"
    with pytest.raises(TransportError, match="not signed with this run's secret"):
        host.admit(1, "b", FACTS)
