"""The bridge of rows: the worker process between this machine's replay and the gateways of other hosts."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.errors import TransportError
from spreeze.formatting import clean
from spreeze.metrics.table import SLOTS, TABLE
from spreeze.runtime.cluster.bridge import AGAIN_S, Bridge
from spreeze.runtime.cluster.host import LINGER_S
from spreeze.runtime.cluster.ray_nodes import GatewayDied, Node, Nodes, RemoteGateway
from spreeze.transport.chunks import MAX_CHUNK_BYTES, RowChunk, SequenceTracker, quotas, sign, verify_chunk, verify_json
from spreeze.transport.replay_ring import ShardWriter
from spreeze.workers.context import WorkerContext, open_weights
from spreeze.workers.jobs import RowBridgeJob
from spreeze.workers.roles import Phase

_MAX_PULLS = 2  # Pulls in progress to one host: one is filled while the other travels.
_LINGER_EACH_S, _MAX_LINGER_S = 0.05, 0.5
"""A chunk costs the driver CPU time, whatever its size. So with more hosts each waits longer to fill one."""
_PACE = 0.8
"""Least time between two pulls of one host, as a share of that time: if the rate limiter binds, answers are quick."""
_WAIT_S = 0.05
_PING_S = 5.0
_SILENT_S = 5.0  # A host that has not answered for this long is reported.
_REPLACE_S = 5.0  # Between two gateways on a host where one cannot work.
_SAMPLER = SLOTS["sampler"]
_CUMULATIVE = np.array([name in TABLE.cumulative("sampler") for name in _SAMPLER])


class Host:
    """One host as the bridge sees it: what is in progress, what has arrived, and its row of the status table."""

    def __init__(self, index: int, slots: Any) -> None:
        self.index, self.slots = index, slots
        self.node: Node | None = None
        self.gateway: RemoteGateway | None = None
        self.ledger = SequenceTracker()
        self.pulls: deque[tuple[Any, float]] = deque()
        """(reference, time of the request), oldest first; answers are taken in this order."""
        self.allowed = 0
        """Number of the row up to which the host may write, of the ledger's ring."""
        self.calls: dict[str, tuple[Any, float]] = {}
        self.sent: tuple[int, int] = (-1, -1)
        """(epoch, version) of the weights that were last sent to it."""
        self.sent_s = 0.0
        self.resume_s = self.ping_s = self.requested_s = 0.0
        self.silent = False
        self.before = slots.copy()  # counters of earlier rings, and of an earlier bridge
        self._latest = np.zeros(len(_SAMPLER))

    @property
    def name(self) -> str:
        node = self.node
        return f"host-{self.index}" if node is None else f"host-{self.index} ({node.name or node.address})"

    def count(self, facts: dict[str, Any]) -> None:
        """Takes over the counters that the host sent."""
        slots = facts.get("slots")
        if isinstance(slots, dict):
            self._latest = np.array([float(slots.get(name, 0.0)) for name in _SAMPLER])
            self.slots[: len(_SAMPLER)] = self._latest + np.where(_CUMULATIVE, self.before[: len(_SAMPLER)], 0.0)

    def begin_ring(self) -> None:
        """Keeps the counters of the ring that is gone."""
        self.before[: len(_SAMPLER)] += np.where(_CUMULATIVE, self._latest, 0.0)
        self._latest[_CUMULATIVE] = 0.0
        self.allowed, self.sent = 0, (-1, -1)

    def post(self, **values: float) -> None:
        for name, value in values.items():
            self.slots[_SLOT_INDEX[name]] = value

    def total(self, name: str, counted: float) -> float:
        """A counter with what an earlier bridge had counted."""
        return float(self.before[_SLOT_INDEX[name]]) + counted


_SLOT_INDEX = {name: index for index, name in enumerate(SLOTS["host"])}


class RowBridge(Bridge):
    """All hosts, and the part of the ring that their rows go into."""

    end_s = 2.0

    def __init__(self, context: WorkerContext, job: RowBridgeJob, nodes: Nodes) -> None:
        super().__init__(context, job, nodes)
        self._job = job
        self._ring = ring = job.replay.attach()
        self._layout = ring.spec.layout
        # Rows of all hosts go to these in turn, so that all keep equally old rows, whichever hosts come and go.
        self._sinks = [ShardWriter(ring, shard) for shard in range(job.first_shard, ring.spec.num_shards)]
        self._next_sink = 0
        self._hosts = [Host(index, context.status.slots(row)) for index, row in enumerate(job.host_rows)]
        for host in self._hosts:  # what an earlier bridge left in progress is lost
            host.post(chunks_lost=host.total("chunks_lost", host.slots[_SLOT_INDEX["pulls"]]), pulls=0.0, alive=0.0)
            host.before = host.slots.copy()
        self._learner = None if job.learner_wakeup is None else job.learner_wakeup.attach()
        self._weights = open_weights(Path(job.run_dir))
        self._weights_counter, self._shared = -1, None
        self._order: tuple[int, int] | None = None
        self._published_s = 0.0
        self._linger_s = LINGER_S
        self._failed: dict[str, tuple[float, str]] = {}  # Node -> when its last gateway could not work, and why.

    def _exchange(self, now: float) -> None:
        self._read_weights()
        working = [host for host in self._hosts if host.gateway is not None]
        waiting: list[Any] = []
        for host in working:
            waiting += [reference for reference, _ in [*list(host.pulls)[:1], *host.calls.values()]]
        ready = set(self._nodes.ready(waiting, _WAIT_S))
        self._context.heartbeat(Phase.STEP)
        for host in working:
            while host.pulls and host.pulls[0][0] in ready:
                self._take(host, host.pulls.popleft()[0])
            for method in [method for method, (reference, _) in host.calls.items() if reference in ready]:
                self._take_answer(host, method, *host.calls.pop(method))
        working = [host for host in self._hosts if host.gateway is not None]
        self._allow(working)
        self._linger_s = min(_MAX_LINGER_S, max(LINGER_S, _LINGER_EACH_S * len(working)))
        for host in working:
            self._request(host, time.monotonic())
            self._report(host)

    # --- hosts come and go ---

    def _update_hosts(self, living: dict[str, Node], now: float) -> None:
        for host in self._hosts:
            if host.node is not None and host.node.id not in living:
                self._died(host)
        known = {host.node.id for host in self._hosts if host.node is not None}
        for node in living.values():
            free = next((host for host in self._hosts if host.node is None), None)
            if node.id in known or free is None or now < self._failed.get(node.id, (-_REPLACE_S, ""))[0] + _REPLACE_S:
                continue
            free.node, free.silent = node, False
            free.gateway = self._place(node, self._job.host.to_json())
            free.resume_s = free.ping_s = 0.0
            if node.id not in self._failed:
                self._event("info", f"{free.name} joins")

    def _died(self, host: Host) -> None:
        self._event("warning", f"{host.name} died; {self._lose(host)}; the run continues without it")
        self._drop(host)

    def _lose(self, host: Host) -> str:
        """Counts what is in progress as lost; returns a text about that."""
        count = len(host.pulls)
        for _ in range(count):
            host.ledger.lost_chunks += 1
        host.pulls.clear()
        host.calls.clear()
        return f"{count} chunk{'' if count == 1 else 's'} on the way lost"

    def _drop(self, host: Host) -> None:
        if host.gateway is not None:
            self._nodes.drop(host.gateway)
        host.ledger.close()
        host.begin_ring()
        self._report(host)
        host.node = host.gateway = None

    # --- rows ---

    def _allow(self, hosts: list[Host]) -> None:
        """Divides the rows that the run's limiter allows among the hosts."""
        known = [host for host in hosts if host.ledger.ring_id]
        free_rows = self._job.limiter.rows_allowed(*self._sinks[0].counts())
        max_rows = 2 * MAX_CHUNK_BYTES // self._layout.row_bytes
        on_the_way = [max(0, host.allowed - host.ledger.next_row) for host in known]
        for host, more in zip(known, quotas(free_rows, on_the_way, max_rows), strict=True):
            host.allowed = max(host.allowed, host.ledger.next_row) + more

    def _request(self, host: Host, now: float) -> None:
        assert host.gateway is not None
        if now < host.resume_s:
            return
        if len(host.pulls) < _MAX_PULLS and now - host.requested_s >= _PACE * self._linger_s:
            host.requested_s = now
            request = {"ring_id": host.ledger.ring_id, "allowed": host.allowed, "linger_s": self._linger_s}
            host.pulls.append((self._call(host.gateway, "pull", request), now))
        if host.ledger.ring_id and self._order is not None and host.sent < self._order and "weights" not in host.calls:
            host.sent, host.sent_s = self._order, self._published_s
            host.calls["weights"] = (host.gateway.call("weights", self._shared), time.time())
        if now - host.ping_s >= _PING_S and "ping" not in host.calls:
            host.ping_s = now
            host.calls["ping"] = (self._call(host.gateway, "ping", {}), time.time())
        if not host.silent and host.ledger.ring_id and host.pulls and now - host.pulls[0][1] > _SILENT_S:
            host.silent = True
            self._event("warning", f"{host.name} has been silent for {_SILENT_S:.0f} s; waiting for it")

    def _take(self, host: Host, reference: Any) -> None:
        try:
            chunk = verify_chunk(self._secret, self._layout, self._nodes.answer(reference))
        except GatewayDied as error:
            host.pulls.appendleft((reference, 0.0))  # it is in progress forever
            if host.node is not None and host.node.id not in {node.id for node in self._nodes.others()}:
                self._died(host)
            else:
                self._give_up(host, str(error))
            return
        except TransportError as error:
            host.ledger.lost_chunks += 1
            host.resume_s = time.monotonic() + AGAIN_S
            if not host.silent:
                host.silent = True
                self._event("warning", f"{host.name} is not available, 1 chunk lost; waiting for it: {error}")
            return
        self._take_facts(host, chunk.facts)
        if chunk.ring_id == 0:
            return
        if host.node is not None:
            self._failed.pop(host.node.id, None)  # it works again
        before, known = host.ledger.ring_id, host.ledger.admit(chunk)
        if host.ledger.ring_id != before:
            host.begin_ring()
        if chunk.ring_id == host.ledger.ring_id:
            host.count(chunk.facts)
        self._store(chunk, known)

    def _store(self, chunk: RowChunk, known: int) -> None:
        start = 0
        for count, version in chunk.segments:
            rows = chunk.rows[max(start, known) : start + count]
            start += count
            if len(rows):
                self._sinks[self._next_sink].write_packed(rows, version)
                self._next_sink = (self._next_sink + 1) % len(self._sinks)
        if self._learner is not None and start > known:
            self._learner.notify()

    def _take_facts(self, host: Host, facts: dict[str, Any]) -> None:
        self._relay_events(host.name, facts)
        if facts.get("failure"):
            self._give_up(host, clean(facts["failure"], 300))
        elif host.silent:
            host.silent = False
            self._event("info", f"{host.name} is back")

    def _give_up(self, host: Host, why: str) -> None:
        if host.node is None:
            return
        if self._failed.get(host.node.id, (0.0, ""))[1] != why:
            self._event("error", f"{host.name} cannot sample: {why}; retried every {_REPLACE_S:.0f} s")
        self._failed[host.node.id] = (time.monotonic(), why)
        self._lose(host)
        self._drop(host)

    # --- weights and clocks ---

    def _read_weights(self) -> None:
        counter = self._context.weights_counter
        if counter == self._weights_counter:
            return
        weights = self._weights.read_latest(self._order)
        if weights is not None and weights.version > 0:  # hosts act uniformly until there are trained ones
            self._shared = self._nodes.share(sign(self._secret, b"weights", weights.to_bytes()))
            self._order = weights.order
            self._published_s = weights.path.stat().st_mtime if weights.path.exists() else time.time()
        elif weights is None and self._order is None:
            return
        self._weights_counter = counter

    def _take_answer(self, host: Host, method: str, reference: Any, requested_s: float) -> None:
        received_s = time.time()
        try:
            facts = verify_json(self._secret, b"answer", self._nodes.answer(reference))
        except TransportError:
            host.sent = (-1, -1) if method == "weights" else host.sent
            return
        if method == "ping" and "came_s" in facts:
            host.post(
                clock_difference_s=(facts["came_s"] - requested_s + facts["went_s"] - received_s) / 2.0,
                round_trip_s=max(0.0, received_s - requested_s - (facts["went_s"] - facts["came_s"])),
            )
        elif method == "weights":
            if tuple(facts.get("weights", ())) != host.sent:
                host.sent = (-1, -1)  # its samplers had not begun
            else:
                difference_s = float(host.slots[_SLOT_INDEX["clock_difference_s"]])
                host.post(weights_delay_s=max(0.0, facts["time_s"] - difference_s - host.sent_s))

    def _report(self, host: Host) -> None:
        ledger = host.ledger
        version = host.slots[_SLOT_INDEX["policy_version"]]
        host.post(
            chunks=host.total("chunks", ledger.chunks),
            chunks_lost=host.total("chunks_lost", ledger.lost_chunks),
            rows_lost=host.total("rows_lost", ledger.lost_rows),
            rows_again=host.total("rows_again", ledger.refused_rows),
            rows_arrived=host.total("rows_arrived", ledger.rows),
            pulls=float(len(host.pulls)),
            alive=float(ledger.ring_id > 0 and not host.silent),
            seen=1.0,
            lag=max(0.0, float(self._order[1]) - version) if self._order is not None and ledger.rows else 0.0,
        )

    def close(self) -> None:
        """Ends the gateways of all hosts."""
        self._end(host.gateway for host in self._hosts)
        self._ring.close()


run_row_bridge = RowBridge.run
