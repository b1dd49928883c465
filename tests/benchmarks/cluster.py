"""Rows of several hosts through Ray into replay, and what they cost the driver.

The hosts are Ray nodes on this machine, or with ``--address`` those of a cluster. Their environments sleep. The bridge
runs in this process with a ring of its own and no learner, so a figure is about the way from the hosts into replay.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
from common import compare, main, say
from fault_envs import NUMBERED_ID, count_numbered
from figures import Row, row
from linked_cluster import cluster_over
from lossy_link import lossy_link
from ray_hosts import forget_host, raylet_pid
from sampler_cost import publish_policy, task_plan
from whole_runs import ratio_row, time_row

from spreeze.config.schema import SamplingConfig
from spreeze.envs.task import make_task
from spreeze.runtime.cluster.ray_nodes import LocalCluster, Nodes, joined
from spreeze.runtime.cluster.row_bridge import RowBridge
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_ring import ReplayRing, RingHandle, RingSpec
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import WeightsStore
from spreeze.types import RowLayout
from spreeze.workers.context import WorkerContext
from spreeze.workers.jobs import HostJob, RowBridgeJob
from spreeze.workers.roles import Address

STEP_S, ENVS = 0.004, 4
"""A host's one sampler gives at most ``1 / STEP_S`` rows a second: it steps its environments one after the other."""
RING_ROWS, RATE = 400_000, 20_000.0
"""``RATE``: rows a second at which the driver's processor time has a target."""
START_S, VERSIONS_PER_S = 120.0, 10.0


def env_args(sleep_s: float) -> tuple[str, ...]:
    """Sizes of Walker2D, whose rows have 52 floats."""
    return f"sleep_s={sleep_s}", "obs_dim=22", "action_dim=6"


class Driver:
    """A bridge in this process, with a ring and weights of its own."""

    def __init__(self, nodes: Nodes, hosts: int, folder: Path, sleep_s: float, envs: int, limited: bool) -> None:
        """``limited`` lets hosts write as many rows as ``ring.rows_drawn`` says."""
        task = make_task(NUMBERED_ID, "fault_envs", args=env_args(sleep_s))
        task.close()
        spec = dataclasses.replace(task.spec, import_module="fault_envs")
        layout = RowLayout.of(spec, 1)
        self.ring = ReplayRing.create(RingSpec(layout, 1 + hosts, -(-RING_ROWS // (1 + hosts))))
        self.status = StatusTable.create(hosts + 1)
        self.context = WorkerContext(Address("bridge"), self.status, hosts, None)
        self.folder, self.hosts = folder, hosts
        host = HostJob(
            spec=spec,
            layout=layout,
            n_step=1,
            gamma=0.99,
            nan_policy="drop",
            seed=1,
            samplers=1,
            sampling=SamplingConfig(envs_per_sampler=envs),
        )
        self.ring.begin_learning()
        self.bridge = RowBridge(
            self.context,
            RowBridgeJob(
                address="",
                run_dir=str(folder),
                first_shard=1,
                replay=RingHandle(fds=(os.dup(self.ring.fd),), spec=self.ring.spec),
                host=host,
                limiter=RateLimiter(float(limited), 1e9, 1, 1, 1),
                host_rows=tuple(range(hosts)),
            ),
            nodes,
        )

    def number(self, name: str, host: int) -> float:
        return self.status.named_slots(host, "host")[name]

    def total(self, name: str) -> float:
        return sum(self.number(name, host) for host in range(self.hosts))

    def run(self, seconds: float, each: Callable[[], object] = lambda: None) -> float:
        """Turns for that long; returns how long it was."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < seconds:
            self.bridge.turn()
            each()
        return time.monotonic() - began_s

    def rate(self, seconds: float) -> float:
        """Rows a second over that time."""
        before = self.total("rows_arrived")
        took_s = self.run(seconds)
        return (self.total("rows_arrived") - before) / took_s

    def until_all_work(self, each: Callable[[], object] = lambda: None) -> None:
        """Turns until every host gives rows; a TimeoutError if one does not."""
        end_s = time.monotonic() + START_S
        while min(self.number("chunks", host) for host in range(self.hosts)) < 2:
            self.bridge.turn()
            each()
            if time.monotonic() > end_s:
                raise TimeoutError(f"not all of {self.hosts} hosts began within {START_S:.0f} s")

    def close(self) -> None:
        self.bridge.close()
        del self.bridge
        self.ring.close()
        self.context.close()


@contextlib.contextmanager
def driver(
    nodes: Nodes, hosts: int, *, sleep_s: float = STEP_S, envs: int = ENVS, limited: bool = False
) -> Iterator[Driver]:
    with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as folder:
        made = Driver(nodes, hosts, Path(folder), sleep_s, envs, limited)
        try:
            yield made
        finally:
            made.close()


@contextlib.contextmanager
def hosts_of(args: argparse.Namespace, count: int) -> Iterator[tuple[Nodes, LocalCluster | None, int]]:
    """Nodes of the cluster that ``--address`` names, or so many hosts on this machine; and how many there are."""
    if args.address:
        with joined(args.address) as nodes:
            yield nodes, None, len(nodes.others())
    else:
        with contextlib.closing(LocalCluster(count)) as cluster, joined(cluster.address) as nodes:
            yield nodes, cluster, count


def scale(args: argparse.Namespace) -> list[Row]:
    """Rows a second at the learner by number of hosts, whose environments sleep."""
    rates: dict[int, list[float]] = {}
    for count in (0,) if args.address else args.hosts:
        with hosts_of(args, count) as (nodes, _, there), driver(nodes, there) as made:
            made.until_all_work()
            rates[there] = [made.rate(args.seconds) for _ in range(args.repeats)]
        say(f"  {there} hosts: {statistics.median(rates[there]):.0f} rows/s")
    first = min(rates)
    one = statistics.median(rates[first]) / first
    return [row("rows at the learner", "1/s", rates[count], hosts=count) for count in rates] + [
        row("of linear", "ratio", [rate / (count * one) for rate in rates[count]], hosts=count, target=">= 0.9")
        for count in rates
        if count > first
    ]


def cost(args: argparse.Namespace) -> list[Row]:
    """Processor time of the bridge and of the head's raylet, at all that one host gives and at a rate."""
    found: list[Row] = []
    for rate in (None, RATE):
        per_million, shares, rates, ray = [], [], [], []
        with (
            hosts_of(args, 1) as (nodes, _, _),
            driver(nodes, 1, sleep_s=0.0, envs=32, limited=rate is not None) as made,
        ):
            began_s = time.monotonic()

            def hold_back(rate: float | None = rate, made: Driver = made, began_s: float = began_s) -> None:
                if rate is not None:
                    made.ring.rows_drawn = int(rate * (time.monotonic() - began_s))

            made.until_all_work(hold_back)
            made.run(2.0, hold_back)  # what had been saved up meanwhile
            raylet = min(
                (process for process in psutil.process_iter() if process.name() == "raylet"),
                key=lambda process: process.create_time(),
            )
            for _ in range(args.repeats):
                rows, cpu_s, ray_s = made.total("rows_arrived"), time.process_time(), sum(raylet.cpu_times()[:2])
                took_s = made.run(args.seconds, hold_back)
                arrived, cpu_s = made.total("rows_arrived") - rows, time.process_time() - cpu_s
                per_million.append(cpu_s / arrived * 1e6)
                ray.append((sum(raylet.cpu_times()[:2]) - ray_s) / arrived * 1e6)
                rates.append(arrived / took_s)
                shares.append(cpu_s / took_s)
        how = "all that a host gives" if rate is None else f"held to {rate:,.0f} rows/s"
        found += [
            row(f"rows at the learner, {how}", "1/s", rates),
            row(f"driver's processor time per million rows, {how}", "s", per_million),
            row(f"driver's processor time, {how}", "core", shares, target=None if rate is None else "<= 0.05"),
            row(f"that of its own raylet per million rows, {how}", "s", ray),
        ]
    return found


def weights(args: argparse.Namespace) -> list[Row]:
    """Age of the weights on a host, from their publication, at ten versions a second."""
    delays: list[float] = []
    ages: list[float] = []
    with hosts_of(args, 1) as (nodes, _, _), driver(nodes, 1) as made:
        publish_policy(task_plan(NUMBERED_ID, 1, ENVS, "fault_envs", env_args=env_args(STEP_S)), made.folder)
        store = WeightsStore(made.folder / "weights")
        policy = store.read_latest()
        assert policy is not None
        made.until_all_work()
        version, next_s, last, applied_s = 1, time.monotonic(), 0.0, 0.0

        def publish_and_look() -> None:
            nonlocal version, next_s, last, applied_s
            now = time.monotonic()
            if now >= next_s:
                next_s, version = max(now, next_s + 1.0 / VERSIONS_PER_S), version + 1
                store.publish(policy.arrays, policy.meta, 1, version)
                made.context.weights_published()
            delay = made.number("weights_delay_s", 0)
            if delay != last:
                last, applied_s = delay, now
                delays.append(delay)
            if applied_s:
                ages.append(now - applied_s + last)

        made.run(args.seconds * args.repeats, publish_and_look)
    settled = delays[len(delays) // 10 :]  # the first ones meet samplers that start
    return [
        row("age of the weights on a host", "s", [statistics.median(ages)], target="<= 0.2", versions=version),
        row("from publication to the host", "s", [statistics.median(settled)], p95=float(np.quantile(settled, 0.95))),
    ]


def kill(args: argparse.Namespace) -> list[Row]:
    """Rows while raylets of two hosts are killed and started again, over what living hosts give."""
    with hosts_of(args, 2) as (nodes, cluster, hosts), driver(nodes, hosts) as made:
        assert cluster is not None, "part kill: without --address"
        made.until_all_work()
        each, first = made.rate(args.seconds) / hosts, made.total("rows_arrived")
        began_s = seen_s = time.monotonic()
        next_s, living_s, back_s, noticed = began_s + args.kill_every / 2, 0.0, None, False
        returns, deaths = [], 0
        while seen_s - began_s < args.kill_seconds:
            made.bridge.turn()
            missing_s = 0.0
            if time.monotonic() >= next_s and back_s is None:
                next_s, deaths, start_s = next_s + args.kill_every, deaths + 1, time.monotonic()
                os.kill(raylet_pid(cluster, 0), signal.SIGKILL)
                forget_host(cluster, 0)
                cluster.add()  # takes seconds, in which the bridge stands still and hosts keep their rows
                back_s = time.monotonic()
                missing_s = back_s - start_s
            now = time.monotonic()
            living_s, seen_s = living_s + (now - seen_s) * hosts - missing_s, now
            if back_s is not None:
                noticed |= made.total("alive") < hosts  # until then the dead one counts as working
                if noticed and made.total("alive") == hosts:
                    returns.append(now - back_s)
                    back_s, noticed = None, False
        spec = made.ring.spec
        again, torn = count_numbered(
            np.concatenate(
                [
                    made.ring.rows[shard * spec.stride_rows :][: min(committed, spec.rows_per_shard)]
                    for shard, (_, committed) in enumerate(made.ring.counters())
                ]
            ),
            spec.layout,
        )
        share = (made.total("rows_arrived") - first) / (living_s * each)
        return [
            row("hosts killed", "hosts", [deaths]),
            row("rows there twice", "rows", [again], target="0"),
            row("rows torn or made up", "rows", [torn], target="0"),
            row("chunks lost", "chunks", [made.total("chunks_lost")]),
            row("of what the living hosts give", "ratio", [share], target=">= 0.9"),
            row("from a node's return to its rows", "s", returns, target="<= 10"),
        ]


def link(args: argparse.Namespace) -> list[Row]:
    """One host behind a link, first of no delay, then as asked: its rate, and how old its weights are."""
    found: list[dict[str, Row]] = []
    for delay, loss in ((0.0, 0.0), (args.delay, args.loss)):
        with lossy_link(delay, loss) as ends, cluster_over(ends) as cluster:
            command = [
                *ends.command(0),
                sys.executable,
                __file__,
                "--json",
                "--parts",
                "weights",
                "scale",
                "--address",
                cluster.address,
                "--repeats",
                str(args.repeats),
                "--seconds",
                str(args.seconds),
            ]
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=cluster.environment,
                check=True,
                timeout=START_S + 4 * args.repeats * args.seconds,
            )
            found.append({one["metric"]: one for one in json.loads(done.stdout)["rows"]})
    rates, ages = (
        [one[name]["value"] for one in found] for name in ("rows at the learner", "age of the weights on a host")
    )
    return [
        row("rate behind the link over that without delay", "ratio", [rates[1] / rates[0]], target=">= 0.95"),
        row("age of weights behind the link, more than without", "delays", [(ages[1] - ages[0]) / args.delay]),
    ]


def target(args: argparse.Namespace) -> list[Row]:
    """Time to -200 on Pendulum, alone and with another host of a cluster that is there already."""
    with contextlib.closing(LocalCluster(1)) as cluster:
        cases = {"alone": [], "another host": ["--cluster", cluster.address, "--host-samplers", "1"]}
        found = compare(args, cases, ["--env", "Pendulum-v1", "--target-return", "-200"], args.limit)
    alone, remote = found.values()
    return [
        *(time_row(documents, case=case) for case, documents in found.items()),
        ratio_row("with another host over alone", remote, alone, target="<= 1.3"),
    ]


SECTIONS = {"scale": scale, "cost": cost, "weights": weights, "kill": kill, "link": link, "target": target}
FLAGS = {
    "hosts": (1, 2, 4, 8),
    "kill_every": 30.0,
    "kill_seconds": 600.0,
    "address": "",
    "delay": 0.05,
    "loss": 0.01,
    "limit": 120.0,
}

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS, flags=FLAGS, seconds=10.0)
