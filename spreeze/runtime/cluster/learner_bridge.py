"""The bridge of modes whose learners mix: gives each other host a run of its own, which joins this one's learners.

Ray starts these runs and ends them (``host_run``). Parameters go from learner to learner by gloo, not through Ray.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path
from typing import Any

from spreeze.errors import TransportError
from spreeze.formatting import clean
from spreeze.metrics.table import Phase
from spreeze.runtime.cluster.host_run import HostRunJob
from spreeze.runtime.cluster.ray_nodes import (
    GatewayDied,
    Node,
    Nodes,
    RemoteGateway,
    connected,
    end_gateways,
    parse_address,
)
from spreeze.transport.chunks import seal_json, unseal_json
from spreeze.transport.gossip import read_secret
from spreeze.workers.context import WorkerContext
from spreeze.workers.jobs import LearnerBridgeJob

_TURN_S, _PING_S, _END_S = 0.2, 2.0, 4.0
_WINDOW_S = 120.0
"""Before a host that has failed gets a learner again."""
_LOOPBACK = "127."


def run_learner_bridge(context: WorkerContext, job: LearnerBridgeJob) -> None:
    """Joins the cluster and keeps a learner on each other host until asked to stop."""
    with (
        connected(parse_address(job.address)) as nodes,
        contextlib.closing(LearnerBridge(context, job, nodes)) as bridge,
    ):
        while not context.stopping:
            bridge.turn()


class _Host:
    def __init__(self, node: Node, gateway: RemoteGateway) -> None:
        self.node, self.gateway = node, gateway
        self.ping: Any = None
        self.ping_s = time.monotonic()
        self.silent = False

    @property
    def name(self) -> str:
        return f"host {self.node.name or self.node.address}"


class LearnerBridge:
    """All other hosts, as far as there are learners for them."""

    def __init__(self, context: WorkerContext, job: LearnerBridgeJob, nodes: Nodes) -> None:
        self._context, self._event, self._job, self._nodes = context, context.event, job, nodes
        self._secret = secrets.token_bytes(32)
        self._ring_secret = read_secret(Path(job.place.secret_file)).hex()
        self._hosts: dict[str, _Host] = {}
        self._failed_s: dict[str, float] = {}
        self._event("info", f"joined the Ray cluster at {nodes.address} (Ray {nodes.version})")

    def turn(self) -> None:
        """Looks at the nodes, gives new ones a learner, and asks the others how they are."""
        self._context.beat(Phase.WAIT)
        now = time.monotonic()
        living = {node.id: node for node in self._nodes.others()}
        for host in [host for host in self._hosts.values() if host.node.id not in living]:
            self._event("warning", f"{host.name} died; the ring closes over its learner")
            self._drop(host)
        places = self._job.place.learners - len(self._job.place.own)
        for node in living.values():
            waits = now < self._failed_s.get(node.id, -_WINDOW_S) + _WINDOW_S
            if node.id not in self._hosts and len(self._hosts) < places and not waits:
                self._begin(node)
        ready = set(self._nodes.ready([host.ping for host in self._hosts.values() if host.ping is not None], _TURN_S))
        self._context.beat(Phase.STEP)
        for host in list(self._hosts.values()):
            if host.ping is not None and host.ping in ready:
                self._hear(host)
            elif host.ping is None and now - host.ping_s >= _PING_S:
                host.ping_s = now
                host.ping = host.gateway.call("ping", seal_json(self._secret, b"ping", {}))

    def _begin(self, node: Node) -> None:
        store = self._job.place.store
        if store.startswith(_LOOPBACK) and not node.address.startswith(_LOOPBACK):
            self._failed_s[node.id] = time.monotonic()
            self._event(
                "error",
                f"host {node.address} cannot reach this one's learners, which listen at {store} alone"
                "; set exchange.listen to this machine's address in the cluster",
            )
            return
        job = HostRunJob(
            arguments=(
                *self._job.arguments,
                "--set",
                f"exchange.join={store}",
                "--set",
                f"exchange.listen={node.address}",
            ),
            secret=self._ring_secret,
        )
        host = _Host(node, self._nodes.place(node, self._secret, seal_json(self._secret, b"job", job.to_json())))
        self._hosts[node.id] = host
        self._event("info", f"{host.name} gets a learner")

    def _hear(self, host: _Host) -> None:
        reference, host.ping = host.ping, None
        try:
            facts = unseal_json(self._secret, b"answer", self._nodes.answer(reference))
        except GatewayDied as error:
            self._event("error", f"{host.name} has no learner any more: {error}")
            self._failed_s[host.node.id] = time.monotonic()
            self._drop(host)
            return
        except TransportError as error:
            if not host.silent:
                self._event("warning", f"{host.name} is not available; it is waited for: {error}")
            host.silent = True
            return
        host.silent = False
        for text in list(facts.get("events") or ())[:10]:
            self._event("warning", f"{host.name}: {clean(text, 300)}")
        if facts.get("failure"):
            self._event(
                "error", f"{host.name} has no learner: {clean(facts['failure'], 300)}; tried again in {_WINDOW_S:.0f} s"
            )
            self._failed_s[host.node.id] = time.monotonic()
            self._drop(host)

    def _drop(self, host: _Host) -> None:
        del self._hosts[host.node.id]
        self._nodes.drop(host.gateway)

    def close(self) -> None:
        """Ends the runs of all hosts."""
        end_gateways(
            self._nodes,
            [host.gateway for host in self._hosts.values()],
            seal_json(self._secret, b"end", {}),
            _END_S,
            lambda: self._context.beat(Phase.WAIT),
        )
        self._hosts.clear()
