"""The bridge of modes whose learners mix: gives each other host a run of its own, and carries messages to and fro.

Ray starts and ends these runs (``host.HostRun``). Each host has the messages of all learners in its own memory
(``transport.gossip``). The bridge gives a host the newest messages of its learner's in-neighbours, and listens for its
learner's own: one call of a kind to each host at a time, in which a newer message replaces an older one. Presence is
sent apart from large messages: by a ping, four times a second, both sides list the learners that are alive. A learner
silent for ``SILENT_S`` is left out of the graph.
"""

from __future__ import annotations

import time
from typing import Any

from spreeze import __version__
from spreeze.errors import TransportError
from spreeze.formatting import clean
from spreeze.runtime.cluster.bridge import AGAIN_S, Bridge
from spreeze.runtime.cluster.host import HostRunJob
from spreeze.runtime.cluster.ray_nodes import GatewayDied, Node, Nodes, RemoteGateway
from spreeze.transport.chunks import verify_json
from spreeze.transport.gossip import in_neighbours, sign_messages, verify_messages
from spreeze.workers.context import WorkerContext
from spreeze.workers.jobs import LearnerBridgeJob

_TURN_S, _PING_S = 0.01, 0.25
_WINDOW_S = 120.0  # Before a host that has failed gets a learner again.


class _Host:
    def __init__(self, node: Node, gateway: RemoteGateway, number: int) -> None:
        self.node, self.gateway, self.number = node, gateway, number
        self.calls: dict[str, Any] = {}
        self.begin("", 0)
        self.ping_s = self.resume_s = 0.0
        self.silent = False

    def begin(self, start: str, epoch: int) -> None:
        """Starts anew with an empty memory for messages; ``epoch`` is that of its learner's first ones here."""
        self.start, self.epoch = start, epoch
        self.received = (-1, -1)
        """(epoch, number) of its learner's newest message that has arrived, in its own count."""
        self.sent: dict[int, tuple[int, int]] = {}
        """Other learner -> (epoch, number) of its newest message that was sent."""

    @property
    def name(self) -> str:
        return f"host {self.node.name or self.node.address}"


class LearnerBridge(Bridge):
    """All other hosts that have a learner."""

    end_s = 4.0

    def __init__(self, context: WorkerContext, job: LearnerBridgeJob, nodes: Nodes) -> None:
        super().__init__(context, job, nodes)
        self._job, self._memory = job, job.messages.attach()
        self._size: int | None = None  # Parameters in a message; None before the first of this host's.
        self._hosts: dict[str, _Host] = {}
        self._failed_s: dict[str, float] = {}

    def _exchange(self, now: float) -> None:
        for host in self._hosts.values():
            if now >= host.resume_s:
                self._call_host(host, now)
        ready = set(self._nodes.ready([call for host in self._hosts.values() for call in host.calls.values()], _TURN_S))
        for host in list(self._hosts.values()):
            for method in [method for method, call in host.calls.items() if call in ready]:
                self._answered(host, method, host.calls.pop(method))

    # --- hosts come and go ---

    def _update_hosts(self, living: dict[str, Node], now: float) -> None:
        for host in [host for host in self._hosts.values() if host.node.id not in living]:
            self._event("warning", f"{host.name} died; its learner is removed from the ring")
            self._drop(host)
        for node in living.values():
            taken = {*self._job.messages.own, *(host.number for host in self._hosts.values())}
            free = set(range(self._job.messages.learners)) - taken
            waits = now < self._failed_s.get(node.id, -_WINDOW_S) + _WINDOW_S
            if node.id not in self._hosts and free and not waits:
                self._begin(node, min(free))

    def _begin(self, node: Node, number: int) -> None:
        job = HostRunJob(
            arguments=self._job.arguments, number=number, learners=self._job.messages.learners, version=__version__
        )
        host = self._hosts[node.id] = _Host(node, self._place(node, job.to_json()), number)
        self._event("info", f"{host.name} starts a learner")

    def _fail(self, host: _Host, why: str) -> None:
        self._event("error", f"{host.name} has no learner: {why}; retry in {_WINDOW_S:.0f} s")
        self._failed_s[host.node.id] = time.monotonic()
        self._drop(host)

    def _drop(self, host: _Host) -> None:
        if self._hosts.pop(host.node.id, None) is not None:
            self._memory.lose(host.number)
            self._nodes.drop(host.gateway)

    # --- messages ---

    def _call_host(self, host: _Host, now: float) -> None:
        living = self._memory.living()
        if "ping" not in host.calls and now - host.ping_s >= _PING_S:
            host.ping_s = now
            host.calls["ping"] = self._call(host.gateway, "ping", {"living": living})
        if not host.start:
            return
        if "listen" not in host.calls:
            request = {"start": host.start, "after": host.received}
            host.calls["listen"] = self._call(host.gateway, "listen", request)
        if "give" in host.calls:
            return
        peers = in_neighbours(self._job.topology, host.number, living)
        newest = [self._memory.newest(peer, host.sent.get(peer, (-1, -1))) for peer in peers]
        if messages := [message for message in newest if message is not None]:
            host.sent |= {message.sender: (message.epoch, message.number) for message in messages}
            data = sign_messages(self._secret, b"give " + host.start.encode(), messages)
            host.calls["give"] = host.gateway.call("give", data)

    def _answered(self, host: _Host, method: str, reference: Any) -> None:
        if host.node.id not in self._hosts:
            return  # dropped because of another answer
        try:
            answer = self._nodes.answer(reference)
            if method == "listen":
                self._store(host, answer)
            else:
                self._take_facts(host, method, verify_json(self._secret, b"answer", answer))
        except GatewayDied as error:
            self._fail(host, str(error))
        except TransportError as error:
            host.resume_s = time.monotonic() + AGAIN_S
            host.sent.clear()
            if not host.silent:
                self._event("warning", f"{host.name} is not available; waiting for it: {error}")
            host.silent = True

    def _store(self, host: _Host, answer: bytes) -> None:
        """Stores messages of a host's learner; another learner or size is a failure of the host."""
        for message in verify_messages(self._secret, b"listen " + host.start.encode(), answer):
            size = self._parameters()
            if size is None:
                return  # it will be requested again
            if message.sender != host.number or len(message.parameters) != size:
                self._fail(
                    host,
                    f"its learner {message.sender} has {len(message.parameters)} parameters, where learner "
                    f"{host.number} of this run has {size}",
                )
                return
            host.received = message.epoch, message.number
            self._memory.put(message._replace(epoch=host.epoch + message.epoch))

    def _parameters(self) -> int | None:
        if self._size is None:
            newest = (self._memory.newest(learner, (-1, -1)) for learner in self._job.messages.own)
            self._size = next((len(message.parameters) for message in newest if message is not None), None)
        return self._size

    def _take_facts(self, host: _Host, method: str, facts: dict[str, Any]) -> None:
        self._relay_events(host.name, facts)
        if method == "give":
            if facts.get("failure"):
                host.sent.clear()
            return
        if facts.get("failure"):
            self._fail(host, clean(facts["failure"], 300))
            return
        host.silent = False
        if facts.get("start", "") != host.start:
            host.begin(str(facts["start"]), self._memory.newest_version(host.number)[0] + 1)
        if facts.get("learns"):
            self._memory.note_alive((host.number,))
        else:
            self._memory.lose(host.number)

    def close(self) -> None:
        """Ends the runs of all hosts."""
        self._end(host.gateway for host in self._hosts.values())
        self._hosts.clear()
        self._memory.close()


run_learner_bridge = LearnerBridge.run
