"""Base of both bridges: the connection to Ray, signed calls of the gateways on other hosts, and their events."""

from __future__ import annotations

import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from spreeze.formatting import clean
from spreeze.runtime.cluster.ray_nodes import Node, Nodes, RemoteGateway, connected, parse_address
from spreeze.transport.chunks import sign_json
from spreeze.workers.context import WorkerContext
from spreeze.workers.jobs import LearnerBridgeJob, RowBridgeJob
from spreeze.workers.roles import Phase

AGAIN_S = 0.5  # Between two calls of a host that is not available.
_NODES_S = 1.0  # Between two checks for living nodes.
_END_TURN_S = 0.1  # Between two beats while gateways end.
_MAX_EVENTS = 10  # taken from one answer


class Bridge(ABC):
    """A process with a gateway on each other host."""

    end_s: ClassVar[float]  # longest time in which gateways end

    def __init__(self, context: WorkerContext, job: Any, nodes: Nodes) -> None:
        self._context, self._event, self._job, self._nodes = context, context.event, job, nodes
        self._secret = secrets.token_bytes(32)
        self._nodes_s = 0.0
        if not nodes.is_authenticated:
            text = f"the Ray cluster at {nodes.address} has no authentication: whoever reaches it can run code on its"
            advice = "set RAY_AUTH_MODE=token on all of them (ray get-auth-token --generate)"
            context.event("warning", f"{text} hosts; {advice}")
        context.event("info", f"joined the Ray cluster at {nodes.address} (Ray {nodes.version})")

    @classmethod
    def run(cls, context: WorkerContext, job: RowBridgeJob | LearnerBridgeJob) -> None:
        """Joins the cluster and works until asked to stop."""
        with connected(parse_address(job.address)) as nodes, contextlib.closing(cls(context, job, nodes)) as bridge:
            while not context.stopping:
                bridge.turn()

    def turn(self) -> None:
        """Checks for living nodes now and then; calls all hosts, and waits a little for answers."""
        self._context.heartbeat(Phase.WAIT)
        now = time.monotonic()
        if now - self._nodes_s >= _NODES_S:
            self._nodes_s = now
            self._update_hosts({node.id: node for node in self._nodes.others()}, now)
        self._exchange(now)

    @abstractmethod
    def _update_hosts(self, living: dict[str, Node], now: float) -> None:
        """Drops hosts that died, and places gateways on new ones."""

    @abstractmethod
    def _exchange(self, now: float) -> None:
        """Calls all hosts, and takes the answers that have arrived."""

    @abstractmethod
    def close(self) -> None: ...

    def _place(self, node: Node, job: dict[str, Any]) -> RemoteGateway:
        return self._nodes.place(node, self._secret, sign_json(self._secret, b"job", job))

    def _call(self, gateway: RemoteGateway, method: str, facts: dict[str, Any]) -> Any:
        """A reference to the answer, which is yet to come."""
        return gateway.call(method, sign_json(self._secret, method.encode(), facts))

    def _relay_events(self, name: str, facts: dict[str, Any]) -> None:
        """Reports the events in an answer of the host of that name."""
        for text in list(facts.get("events") or ())[:_MAX_EVENTS]:
            self._event("warning", f"{name}: {clean(text, 300)}")

    def _end(self, gateways: Iterable[RemoteGateway | None]) -> None:
        """Asks gateways to end, waits for that, and drops them."""
        placed = [gateway for gateway in gateways if gateway is not None]
        requests = [self._call(gateway, "end", {}) for gateway in placed]
        end = time.monotonic() + self.end_s
        while requests and time.monotonic() < end:
            self._context.heartbeat(Phase.WAIT)
            done = set(self._nodes.ready(requests, _END_TURN_S))
            requests = [reference for reference in requests if reference not in done]
        for gateway in placed:
            self._nodes.drop(gateway)
