"""Plan for more hosts than there are: what one driver, its network and learners that gossip give, up to 64 hosts.

Unit costs are measured on this machine: bytes of a row, what the driver does for a chunk and for a row, size of the
weights, what compression saves and costs, the cost of a gossip message. The rest is simulated, event by event: hosts
fill chunks, at most two pulls of each are under way, the driver's network and one core of it serve them in the order
of their arrival, and weights go out newest first. Rates, delays and bandwidths of networks are assumptions, which the
picture states. A learner at the driver is not simulated: how many rows it can use is a line to compare with.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import heapq
import hmac
import itertools
import json
import secrets
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spreeze.bench import Row, row
from spreeze.bench.runs import Say, check_picture
from spreeze.bench.sampling import publish_policy, real_sampler, run_folder, task_plan
from spreeze.errors import TransportError
from spreeze.machine.hardware import read_machine
from spreeze.metrics import median
from spreeze.transport.gloo_gossip import GlooGossip
from spreeze.transport.gossip import GlooPlace
from spreeze.transport.replay_ring import ReplayRing, RingSpec, ShardWriter, write_rows
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import decode, encode
from spreeze.types import RowLayout

HOSTS = (1, 2, 4, 8, 16, 32, 64)
LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 1 << 20, 1 << 22
PULLS = 2
LINGER_S = 0.1
"""A pull is answered after that with what there is."""
_SIMULATED_S = 200.0
"""Of which the second half counts, when buffers that fill are full."""
_CHUNKS = 80
"""Of the largest, for which a connection has time at least."""
_PATIENCE_S = 60.0
_SMALL_CHUNK_BYTES = 1 << 14
"""Beside the largest, to tell what a chunk costs from what its rows cost."""
_ROWS = 20_000
"""Rows of the task that are compressed."""
_MBIT = 125_000.0


# --- what is measured ---


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Unit costs; times are of one core."""

    row_bytes: float
    chunk_s: float
    """Of the driver for a chunk: check of its proof, and the calls."""
    row_s: float
    """Of the driver for a row: proof, copy from the socket, copy into replay."""
    weights_bytes: float
    message_s: float
    """Of both learners together for one gossip message, as large as the weights."""
    message_bytes: float
    linked: float = 1.0
    """Size of rows over their plain size where an observation that the next row repeats travels once."""
    packed: float = 1.0
    """The same, and deflated at level 1 with the bytes of equal weight together."""
    unpack_row_s: float = 0.0


def measured_costs(env_id: str, repeats: int) -> tuple[Costs, list[Row]]:
    """Measures all unit costs; each figure is the median of its repeats."""
    plan = task_plan(env_id)
    with run_folder() as folder:
        publish_policy(plan, folder)
        rows = _real_rows(plan, folder)
        data = next((folder / "weights").glob("*.safetensors")).read_bytes()
        weights = decode(data, folder)
        encode_s = _repeated(lambda: encode(weights.arrays, weights.meta, 1, 1), repeats)
        decode_s = _repeated(lambda: decode(data, folder), repeats)
        message_bytes = 4 * sum(array.size for array in weights.arrays.values())
        messages = _gossip_s(folder, message_bytes // 4, repeats)
    layout, count = plan.layout, plan.config.sampling.envs_per_sampler
    small, large = (_handled_s(layout, rows, size, repeats) for size in (_SMALL_CHUNK_BYTES, MOST_CHUNK_BYTES))
    sizes = [size // layout.row_bytes for size in (_SMALL_CHUNK_BYTES, MOST_CHUNK_BYTES)]
    row_s = [(high - low) / (sizes[1] - sizes[0]) for low, high in zip(small, large, strict=True)]
    chunk_s = [max(0.0, low - each * sizes[0]) for low, each in zip(small, row_s, strict=True)]
    linked, packed, unpack_s = _compressed(layout, rows, count, repeats)
    costs = Costs(row_bytes=layout.row_bytes, chunk_s=median(chunk_s), row_s=median(row_s), weights_bytes=len(data),
                  message_s=median(messages), message_bytes=message_bytes, linked=linked, packed=packed,
                  unpack_row_s=median(unpack_s))
    return costs, [
        row("row", "bytes", [layout.row_bytes], env=env_id),
        row("driver_for_a_chunk", "ms", [1e3 * each for each in chunk_s], env=env_id),
        row("driver_for_a_million_rows", "s", [1e6 * each for each in row_s], env=env_id),
        row("weights", "bytes", [len(data)], env=env_id),
        row("weights_encoded", "ms", [1e3 * each for each in encode_s], env=env_id),
        row("weights_decoded", "ms", [1e3 * each for each in decode_s], env=env_id),
        row("gossip_message_both_sides", "ms", [1e3 * each for each in messages], bytes=message_bytes),
        row("size_of_linked_rows", "ratio", [linked], env=env_id),
        row("size_of_packed_rows", "ratio", [packed], env=env_id),
        row("driver_to_unpack_a_million_rows", "s", [1e6 * each for each in unpack_s], env=env_id),
    ]


def _repeated(act: Callable[[], object], repeats: int) -> list[float]:
    """Processor time of this thread for a call [s], each the least of five."""
    def once() -> float:
        start = time.thread_time()
        act()
        return time.thread_time() - start

    return [min(once() for _ in range(5)) for _ in range(repeats)]


def _real_rows(plan: Any, folder: Path) -> np.ndarray:
    """Rows [n, W] that the sampler of the task writes, in its order."""
    with (contextlib.closing(ReplayRing.create(RingSpec(plan.layout, 1, _ROWS))) as ring,
          contextlib.closing(StatusTable.create(1)) as status):
        loop, sampling = real_sampler(plan, folder, ring, status, 1)
        try:
            while ring.total_committed() < _ROWS - plan.config.sampling.envs_per_sampler:
                loop.turn()
        finally:
            sampling.close()
        return np.array(ring.rows[: ring.total_committed()])


def _handled_s(layout: RowLayout, rows: np.ndarray, size_bytes: int, repeats: int) -> list[float]:
    """Processor time of the driver for one chunk: receive it, check its proof, write its rows into replay."""
    count, secret = size_bytes // layout.row_bytes, secrets.token_bytes(32)
    data = np.resize(rows, (count, layout.width)).astype(np.float32).tobytes()
    proof = hmac.digest(secret, data, hashlib.sha256)
    with contextlib.closing(ReplayRing.create(RingSpec(layout, 1, 4 * count))) as ring:
        sink = ShardWriter(ring, 0)

        def handle() -> None:
            received = _received(ours, len(data))
            assert hmac.compare_digest(hmac.digest(secret, received, hashlib.sha256), proof)
            write_rows(sink, np.frombuffer(received, np.float32).reshape(count, layout.width), 1)

        found = []
        for _ in range(repeats):
            theirs, ours = _connection()
            with theirs, ours:
                sender = threading.Thread(target=lambda to=theirs: [to.sendall(data) for _ in range(5)])
                sender.start()
                found += _repeated(handle, 1)
                sender.join()
        return found


def _connection() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return theirs, ours


def _received(connection: socket.socket, size_bytes: int) -> bytearray:
    data = bytearray(size_bytes)
    view = memoryview(data)
    while view:
        view = view[connection.recv_into(view) :]
    return data


def _compressed(layout: RowLayout, rows: np.ndarray, stride: int, repeats: int) -> tuple[float, float, list[float]]:
    """Size of linked and of packed rows over plain ones, and processor time to unpack a row [s]."""
    continued = (rows[:-stride, layout.next_obs] == rows[stride:, layout.obs]).all(1)
    kept = np.concatenate([~continued, np.ones(stride, bool)])
    linked = [np.ascontiguousarray(rows[:, : layout.next_obs.start]), np.ascontiguousarray(rows[kept, layout.next_obs])]
    linked_bytes = sum(part.nbytes for part in linked)
    planes = [part.reshape(-1).view(np.uint8).reshape(-1, 4).T.tobytes() for part in linked]
    packed = [zlib.compress(plane, 1) for plane in planes]

    def unpack() -> None:
        first, others = (np.frombuffer(zlib.decompress(part), np.uint8).reshape(4, -1).T.tobytes() for part in packed)
        whole = np.empty_like(rows)
        whole[:, : layout.next_obs.start] = np.frombuffer(first, np.float32).reshape(len(rows), -1)
        whole[:-stride, layout.next_obs] = whole[stride:, layout.obs]
        whole[kept, layout.next_obs] = np.frombuffer(others, np.float32).reshape(-1, layout.obs_dim)
        assert np.array_equal(whole, rows)

    unpack()
    return (linked_bytes / rows.nbytes, sum(len(part) for part in packed) / rows.nbytes,
            [each / len(rows) for each in _repeated(unpack, repeats)])


def _gossip_s(folder: Path, size: int, repeats: int) -> list[float]:
    """Processor time of a message of ``size`` numbers between two learners in this process, of all threads [s]."""
    found = []
    with GlooPlace.opened(folder, "127.0.0.1", 2, 2, {}) as place:
        sides = [GlooGossip(learner, place, topology="ring", max_staleness=None) for learner in range(2)]
        try:
            parameters, number = np.ones(size, np.float32), 0
            for _ in range(repeats):
                start, count, end_s = time.process_time(), 0, time.monotonic() + 1.0
                while time.monotonic() < end_s:
                    number += 1
                    sides[0].send(parameters, number)
                    while sides[1].at(0, number) is None:
                        time.sleep(1e-4)
                    count += 1
                found.append((time.process_time() - start) / count)
        finally:
            for side in sides:
                side.close()
    return found


_LEARNER = """
import json, sys, time
import numpy as np
from spreeze.transport.gloo_gossip import GlooGossip
from spreeze.transport.gossip import GlooPlace
gossip = GlooGossip(1, GlooPlace.from_json(json.loads(sys.argv[1])), topology="ring", max_staleness=None)
parameters, number = np.ones(int(sys.argv[2]), np.float32), 0
while True:
    number += 1
    gossip.send(parameters, number)
    gossip.receive()
    time.sleep(0.01)
"""
"""A learner of the ring, that is killed."""


def ring_rows(kills: int, size: int) -> list[Row]:
    """A learner of two is killed with SIGKILL and started again: when the other's ring closes and opens [s].

    It has opened when the first message of ``size`` numbers is here, counted from the moment at which the new process
    has its imports behind it, which is when its record is seen.
    """
    closed, opened = [], []
    with run_folder() as folder, GlooPlace.opened(folder, "127.0.0.1", 2, 2, {}) as place, contextlib.closing(
            GlooGossip(0, place, topology="ring", max_staleness=None)) as gossip:
        command = [sys.executable, "-c", _LEARNER, json.dumps(place.to_json()), str(size)]
        for _ in range(kills):
            with subprocess.Popen(command) as child:
                try:
                    _timed(lambda: len(gossip.living()) == 2)
                    gossip.close_over(gossip.living())
                    opened.append(_timed(gossip.receive))
                    child.kill()
                    closed.append(_timed(lambda: len(gossip.living()) == 1))
                    gossip.close_over(gossip.living())
                finally:
                    child.kill()
    return [row("ring_closes_over_a_killed_learner", "s", closed, target="<= 1"),
            row("ring_opens_for_who_returns", "s", opened)]


def _timed(condition: Callable[[], object]) -> float:
    """How long a condition took to come true [s]; a SpreezeError after a minute."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > _PATIENCE_S:
            raise TransportError(f"a learner of the ring was not seen, or gone, within {_PATIENCE_S:.0f} s")
        time.sleep(0.002)
    return time.monotonic() - start


# --- what is simulated ---


@dataclass(frozen=True, kw_only=True)
class NetworkPath:
    """Between the driver and hosts that are all as far from it."""

    name: str
    delay_s: float
    """One way."""
    driver_bytes_per_s: float
    """Each way."""
    host_up_bytes_per_s: float
    host_down_bytes_per_s: float
    loss: float = 0.0
    """Of packets: one connection carries at most 1.22 segments / (round trip x sqrt(loss)) (Mathis et al. 1997)."""

    @property
    def connection_bytes_per_s(self) -> float:
        return float("inf") if not self.loss else 1.22 * 1448 / (2.0 * self.delay_s * self.loss**0.5)


NETWORKS = (
    NetworkPath(name="rack: 0.05 ms, 10 Gbit/s", delay_s=5e-5, driver_bytes_per_s=10_000 * _MBIT,
            host_up_bytes_per_s=10_000 * _MBIT, host_down_bytes_per_s=10_000 * _MBIT),
    NetworkPath(name="office: 0.2 ms, 1 Gbit/s", delay_s=2e-4, driver_bytes_per_s=1_000 * _MBIT,
            host_up_bytes_per_s=1_000 * _MBIT, host_down_bytes_per_s=1_000 * _MBIT),
    NetworkPath(name="city: 5 ms, driver 1 Gbit/s, hosts 100 Mbit/s", delay_s=5e-3, driver_bytes_per_s=1_000 * _MBIT,
            host_up_bytes_per_s=100 * _MBIT, host_down_bytes_per_s=100 * _MBIT),
    NetworkPath(name="internet: 50 ms, driver 500, hosts 40 up / 100 down Mbit/s", delay_s=5e-2,
            driver_bytes_per_s=500 * _MBIT, host_up_bytes_per_s=40 * _MBIT, host_down_bytes_per_s=100 * _MBIT),
    NetworkPath(name="the same with 1 % loss", delay_s=5e-2, driver_bytes_per_s=500 * _MBIT,
            host_up_bytes_per_s=40 * _MBIT, host_down_bytes_per_s=100 * _MBIT, loss=0.01),
)


@dataclass(frozen=True, kw_only=True)
class Design:
    """How rows and weights travel."""

    name: str
    share: float = 1.0
    """Size of rows over their plain size."""
    unpack_row_s: float = 0.0
    fan_in: int = 1
    """Hosts behind one gateway, whose chunks it sends on as its own, through its own connection."""
    most_chunk_bytes: int = MOST_CHUNK_BYTES
    """Of a chunk, and of what waits at a host before its samplers rest."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    rows_per_s: float
    """At the driver."""
    row_age_s: float
    """Mean, from the env step to replay."""
    weights_age_s: float
    """Mean age of the weights with which a host acts."""
    core_share: float
    """Of the driver's core."""
    network_share: float
    """Of the driver's network, the busier direction."""


class _Server:
    """Serves what arrives in order, one after the other."""

    def __init__(self) -> None:
        self.free_s = self.busy_s = 0.0

    def serve(self, now_s: float, takes_s: float) -> float:
        """When it is done."""
        self.free_s = max(self.free_s, now_s) + takes_s
        self.busy_s += takes_s
        return self.free_s


def simulate(
    hosts: int, rows_per_s: float, costs: Costs, network: NetworkPath, design: Design, *, versions_per_s: float = 10.0,
    seconds: float = _SIMULATED_S,
) -> Flow:
    """The flow of rows and weights between a driver and hosts that each make ``rows_per_s``."""
    up_bytes_per_s = min(network.host_up_bytes_per_s, network.connection_bytes_per_s)
    seconds = max(seconds, _CHUNKS * design.most_chunk_bytes / up_bytes_per_s)
    senders = -(-hosts // design.fan_in)
    rates = [rows_per_s * (hosts // senders + (index < hosts % senders)) for index in range(senders)]
    core, network_in, rows, ages_s = _rows(rates, costs, network, design, seconds)
    network_out, weights_age_s = _weights(senders, costs, network, versions_per_s, seconds)
    if design.fan_in > 1:  # one more hop, beside the hosts
        weights_age_s += costs.weights_bytes * design.fan_in / network.host_down_bytes_per_s
    return Flow(rows_per_s=2.0 * rows / seconds, row_age_s=ages_s / max(rows, 1.0), weights_age_s=weights_age_s,
                   core_share=min(1.0, core.busy_s / seconds),
                   network_share=min(1.0, max(network_in.busy_s, network_out.busy_s) / seconds))


def _rows(
    rates: list[float], costs: Costs, network: NetworkPath, design: Design, seconds: float
) -> tuple[_Server, _Server, float, float]:
    """Driver's core and network, rows that it stored in the second half of the time, and the sum of their ages [s]."""
    row_bytes = costs.row_bytes * design.share
    most = design.most_chunk_bytes / row_bytes
    least = min(most, LEAST_CHUNK_BYTES / row_bytes)
    core, inward, ups = _Server(), _Server(), [_Server() for _ in rates]
    up_bytes_per_s = min(network.host_up_bytes_per_s, network.connection_bytes_per_s)
    begun_s = [0.0] * len(rates)  # since when the rows that wait have been made
    pulls = [0] * len(rates)  # at the sender; one at a time is being answered
    stored = ages_s = 0.0
    # (time, order, what, sender, rows, time of the mean row): asked -> answered -> arrived -> stored -> asked
    events: list[tuple[float, int, str, int, float, float]] = []

    def later(at_s: float, what: str, sender: int, count: float = 0.0, made_s: float = 0.0) -> None:
        heapq.heappush(events, (at_s, next(orders), what, sender, count, made_s))

    def answer(now_s: float, sender: int) -> None:
        later(min(max(now_s, begun_s[sender] + least / rates[sender]), now_s + LINGER_S), "answered", sender)

    orders = itertools.count()
    for sender in range(len(rates)):
        for _ in range(PULLS):
            later(network.delay_s, "asked", sender)
    while events[0][0] <= seconds:
        now_s, _, what, sender, count, made_s = heapq.heappop(events)
        if what == "asked":
            pulls[sender] += 1
            if pulls[sender] == 1:
                answer(now_s, sender)
        elif what == "answered":
            count = min(most, (now_s - begun_s[sender]) * rates[sender])
            made_s, begun_s[sender] = begun_s[sender] + count / rates[sender] / 2.0, now_s
            sent_s = ups[sender].serve(now_s, count * row_bytes / up_bytes_per_s)
            later(sent_s + network.delay_s, "arrived", sender, count, made_s)
            pulls[sender] -= 1
            if pulls[sender]:
                answer(now_s, sender)
        elif what == "arrived":
            through_s = inward.serve(now_s, count * row_bytes / network.driver_bytes_per_s)
            takes_s = costs.chunk_s + count * (costs.row_s + design.unpack_row_s)
            later(core.serve(through_s, takes_s), "stored", sender, count, made_s)
        else:
            if now_s > seconds / 2.0:
                stored, ages_s = stored + count, ages_s + count * (now_s - made_s)
            later(now_s + network.delay_s, "asked", sender)
    return core, inward, stored, ages_s


def _weights(
    receivers: int, costs: Costs, network: NetworkPath, versions_per_s: float, seconds: float
) -> tuple[_Server, float]:
    """Driver's network, and the mean age of the weights at the receivers [s]."""
    outward, age_s, counted_s = _Server(), 0.0, 0.0
    down_bytes_per_s = min(network.host_down_bytes_per_s, network.connection_bytes_per_s)
    first_s, period_s = costs.weights_bytes / network.driver_bytes_per_s, 1.0 / versions_per_s
    last_s = costs.weights_bytes / down_bytes_per_s
    ready = [(0.0, receiver) for receiver in range(receivers)]
    held = [(-1, 0.0)] * receivers  # (number of the version, since when it is there)
    while ready[0][0] <= seconds:
        now_s, receiver = heapq.heappop(ready)
        newest = int(max(now_s, outward.free_s) * versions_per_s + 1e-6)
        before, since_s = held[receiver]
        if newest <= before:
            heapq.heappush(ready, ((before + 1) * period_s, receiver))
            continue
        there_s = outward.serve(now_s, first_s) + network.delay_s + max(0.0, last_s - first_s)
        if before >= 0:
            age_s += (there_s - since_s) * ((since_s + there_s) / 2.0 - before * period_s)
            counted_s += there_s - since_s
        held[receiver] = (newest, there_s)
        heapq.heappush(ready, (there_s + network.delay_s, receiver))
    return outward, age_s / max(counted_s, 1e-9)


def gossip_updates(costs: Costs, network: NetworkPath, updates_per_s: float) -> float:
    """Updates of a learner between two messages of a neighbour; at least one.

    Gloo announces a message, waits until the receiver asks for it, and sends it: a round trip and its bytes.
    """
    bytes_per_s = min(network.host_up_bytes_per_s, network.host_down_bytes_per_s, network.connection_bytes_per_s)
    cycle_s = costs.message_s + 2.0 * network.delay_s + costs.message_bytes / bytes_per_s
    return max(1.0, updates_per_s * cycle_s)


def full_at(rows_per_s: float, costs: Costs, network: NetworkPath, versions_per_s: float) -> dict[str, float]:
    """Hosts with which each part of the driver has no time left: its core, and its network in and out."""
    chunks_per_s = max(rows_per_s * costs.row_bytes / LEAST_CHUNK_BYTES, 1.0 / LINGER_S)
    return {"driver_core": 1.0 / (rows_per_s * costs.row_s + chunks_per_s * costs.chunk_s),
            "driver_network_in": network.driver_bytes_per_s / (rows_per_s * costs.row_bytes),
            "driver_network_out": network.driver_bytes_per_s / (versions_per_s * costs.weights_bytes)}


def designs(costs: Costs) -> tuple[Design, ...]:
    return (
        Design(name="as it is"),
        Design(name="rows linked", share=costs.linked),
        Design(name="linked and deflated", share=costs.packed, unpack_row_s=costs.unpack_row_s),
        Design(name="tree, 8 hosts a gateway", fan_in=8),
        Design(name="chunks of at most 0.25 MB", most_chunk_bytes=1 << 18),
    )


# --- the bench ---


def add_cluster_plan_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--env", default="Walker2DBulletEnv-v0", help="task whose rows are measured (default: Walker2DBulletEnv-v0)")
    add("--host-rows", type=float, default=5_000.0, help="rows/s of a host (default: 5000)")
    add("--versions", type=float, default=10.0, help="weights/s (default: 10)")
    add("--updates", type=float, default=100.0, help="updates/s of a learner that gossips (default: 100)")
    add("--learner-rows", type=float, default=3_700.0,
        help="rows/s that one learner can use: updates/s x batch / samples per insert (default: 3700 = 231 x 128 / 8)")
    add("--ray-chunk-ms", type=float, default=0.0,
        help="processor time of the driver in Ray for a chunk, on top of what is measured [ms] (default: 0)")
    add("--ray-row-us", type=float, default=0.0, help="the same for a row [us] (default: 0)")
    add("--out", default="cluster-plan.png", help="picture to write (default: cluster-plan.png)")


def cluster_plan_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    """Measures unit costs, simulates up to 64 hosts, draws."""
    check_picture(args.out)
    say("unit costs:")
    costs, rows = measured_costs(args.env, args.repeats)
    rows += ring_rows(args.repeats, int(costs.message_bytes) // 4)
    costs = replace(costs, chunk_s=costs.chunk_s + args.ray_chunk_ms / 1e3, row_s=costs.row_s + args.ray_row_us / 1e6)
    found = {network.name: [simulate(hosts, args.host_rows, costs, network, Design(name="as it is"),
                                     versions_per_s=args.versions) for hosts in HOSTS] for network in NETWORKS}
    helped = {network.name: [simulate(HOSTS[-1], args.host_rows, costs, network, design,
                                      versions_per_s=args.versions) for design in designs(costs)]
              for network in NETWORKS}
    for network in NETWORKS:
        for hosts, outcome in zip(HOSTS, found[network.name], strict=True):
            rows += _told(outcome, network.name, hosts, "as it is")
        for design, outcome in zip(designs(costs)[1:], helped[network.name][1:], strict=True):
            rows += _told(outcome, network.name, HOSTS[-1], design.name)
        for part, hosts_at in full_at(args.host_rows, costs, network, args.versions).items():
            rows.append(row(f"{part}_full_at", "hosts", [hosts_at], network=network.name))
        rows.append(row("gossip_updates_between_messages", "updates", [gossip_updates(costs, network, args.updates)],
                        network=network.name))
    _draw(args, costs, found, helped)
    return [*rows, {"metric": "picture", "value": args.out, "unit": "file"}]


def _told(outcome: Flow, network: str, hosts: int, design: str) -> list[Row]:
    more = {"hosts": hosts, "network": network, "design": design}
    return [row("rows_per_s", "1/s", [outcome.rows_per_s], **more), row("row_age", "s", [outcome.row_age_s], **more),
            row("weights_age", "s", [outcome.weights_age_s], **more),
            row("driver_core", "share", [outcome.core_share], **more),
            row("driver_network", "share", [outcome.network_share], **more)]


def _draw(
    args: argparse.Namespace, costs: Costs, found: dict[str, list[Flow]], helped: dict[str, list[Flow]]
) -> None:
    """Rows/s, ages, what would help, and gossip."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((rates, ages), (help_rates, gossip)) = pyplot.subplots(2, 2, figsize=(13, 10.4))
    figure.subplots_adjust(left=0.07, right=0.985, top=0.93, bottom=0.155, hspace=0.3, wspace=0.16)
    rates.plot(HOSTS, [args.host_rows * hosts for hosts in HOSTS], color="0.8", linewidth=7,
               label="all rows that hosts make")
    rates.axhline(args.learner_rows, color="grey", linewidth=1, linestyle="--")
    rates.text(HOSTS[-1], args.learner_rows * 0.9, f"one learner on one core uses {args.learner_rows:,.0f} rows/s",
               fontsize=8, color="grey", ha="right", va="top")
    rates.set_ylim(args.host_rows / 10.0, args.host_rows * HOSTS[-1] * 12.0)
    for number, network in enumerate(NETWORKS):
        outcomes = found[network.name]
        rates.plot(HOSTS, [one.rows_per_s for one in outcomes], "o-", color=f"C{number}", markersize=4,
                   label=network.name)
        ages.plot(HOSTS, [one.row_age_s for one in outcomes], "o-", color=f"C{number}", markersize=4)
        ages.plot(HOSTS, [one.weights_age_s for one in outcomes], "s--", color=f"C{number}", markersize=4)
    rates.set(xscale="log", yscale="log", ylabel="rows/s in the driver's replay", title="Rows that arrive")
    ages.plot([], [], "ko-", markersize=4, label="of a row, when it enters replay")
    ages.plot([], [], "ks--", markersize=4, label="of the weights with which a host acts")
    ages.set(xscale="log", yscale="log", ylabel="mean age [s]",
             title="Age of rows and weights (colours as on the left)")
    for axis in (rates, ages):
        axis.set_xticks(HOSTS, [str(hosts) for hosts in HOSTS])
        axis.minorticks_off()
        axis.set_xlabel("hosts")
        axis.legend(fontsize=8, loc="upper left" if axis is rates else "center left")
        axis.grid(alpha=0.3)
    _draw_help(help_rates, args, costs, helped)
    _draw_gossip(gossip, args, costs)
    figure.suptitle(f"Past one machine, simulated from costs measured on {read_machine().one_line()}", fontsize=11)
    figure.text(0.012, 0.012, _assumptions(args, costs), fontsize=7.6, va="bottom", linespacing=1.35)
    figure.savefig(args.out, dpi=110)
    pyplot.close(figure)


def _draw_help(axis: Any, args: argparse.Namespace, costs: Costs, helped: dict[str, list[Flow]]) -> None:
    """Share of the rows of 64 hosts that arrive, by design; both ages above the bars."""
    kinds, width = designs(costs), 0.16
    for number, design in enumerate(kinds):
        places = np.arange(len(NETWORKS)) + (number - len(kinds) / 2 + 0.5) * width
        outcomes = [helped[network.name][number] for network in NETWORKS]
        shares = [one.rows_per_s / (args.host_rows * HOSTS[-1]) for one in outcomes]
        axis.bar(places, shares, width, label=design.name, color=f"C{number + 5}")
        for place, share, one in zip(places, shares, outcomes, strict=True):
            axis.text(place, share + 0.01, f"{one.row_age_s:.2g} | {one.weights_age_s:.2g} s", fontsize=6.5,
                      rotation=90, ha="center", va="bottom")
    axis.set(ylim=(0, 1.75), ylabel=f"share of the rows of {HOSTS[-1]} hosts that arrive",
             title="What would help (above each bar: age of a row | of the weights)")
    axis.set_xticks(range(len(NETWORKS)), [network.name.split(":")[0].replace("the same", "internet\n")
                                           for network in NETWORKS])
    axis.legend(fontsize=8, ncols=2, loc="upper center")
    axis.grid(alpha=0.3, axis="y")


def _draw_gossip(axis: Any, args: argparse.Namespace, costs: Costs) -> None:
    """Updates between two messages of a neighbour, by delay, for several bandwidths."""
    delays_s = np.logspace(-4.5, -0.5, 60)
    for number, mbit in enumerate((10_000, 1_000, 100, 10)):
        networks = [NetworkPath(name="", delay_s=float(delay), driver_bytes_per_s=mbit * _MBIT,
                            host_up_bytes_per_s=mbit * _MBIT, host_down_bytes_per_s=mbit * _MBIT) for delay in delays_s]
        axis.plot(1e3 * delays_s, [gossip_updates(costs, network, args.updates) for network in networks],
                  color=f"C{number}", label=f"{mbit:,} Mbit/s")
    for network in NETWORKS:
        axis.plot(1e3 * network.delay_s, gossip_updates(costs, network, args.updates), "kx", markersize=6)
    axis.axhline(100, color="grey", linewidth=1, linestyle="--")
    axis.text(0.035, 92, "default limit of staleness: 100 updates", fontsize=8, color="grey", va="top")
    axis.set(xscale="log", yscale="log", xlabel="delay one way [ms]", ylabel="updates between two messages",
             title=f"Learners that gossip at {args.updates:g} updates/s, {costs.message_bytes / 1e6:.2g} MB a message\n"
                   "(crosses: the networks)")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def _assumptions(args: argparse.Namespace, costs: Costs) -> str:
    ray = (f", Ray adds {args.ray_chunk_ms:g} ms and {args.ray_row_us:g} us" if args.ray_chunk_ms or args.ray_row_us
           else "; Ray's own work is left out")
    told = (
        f"Measured ({args.env}): a row has {costs.row_bytes:.0f} bytes; the driver takes {1e6 * costs.chunk_s:.3g} us "
        f"a chunk and {1e6 * costs.row_s:.2g} us a row (receive, check the proof, write into replay{ray}); weights "
        f"have {costs.weights_bytes / 1e6:.2g} MB; linked rows, where an observation that the next row repeats travels "
        f"once, have {costs.linked:.2f} of the size, deflated ones {costs.packed:.2f}, and take "
        f"{1e6 * costs.unpack_row_s:.2g} us a row to unpack; a gossip message of {costs.message_bytes / 1e6:.2g} MB "
        f"takes {1e3 * costs.message_s:.2g} ms of both sides' processors.",
        f"Assumed: a host makes {args.host_rows:,.0f} rows/s and rests while {MOST_CHUNK_BYTES >> 20} MB wait; chunks "
        f"have {LEAST_CHUNK_BYTES >> 20} to {MOST_CHUNK_BYTES >> 20} MB, or what there is after {LINGER_S:g} s; "
        f"{PULLS} pulls are under way to each host, and one of {args.versions:g} weights/s, newest first; the driver "
        "has one core for all this and serves in order of arrival; all hosts are as far; connections have the full "
        "bandwidth, but with loss 1.22 x 1,448 bytes / (round trip x sqrt(loss)) per s; a gateway of the tree has one "
        "host's connection; gossip takes a round trip and its bytes.",
    )
    return "\n".join(line for one in told for line in textwrap.wrap(one, 205))
