"""``bench cluster``: rows of simulated hosts through Ray into replay, and what they cost the driver.

The hosts are Ray nodes on this machine, their environments sleep, and the bridge runs in this process, with a ring of
its own and no learner. So a figure is about the way from the hosts into replay alone.
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
from typing import Any

import numpy as np
import psutil

from spreeze.bench import Row, row
from spreeze.bench.lossy_link import Ends, lossy_link
from spreeze.bench.runs import Say, in_turn, ratio_row, time_row, until_target
from spreeze.bench.sampling import publish_policy, task_plan
from spreeze.envs.task import make_task
from spreeze.errors import SpreezeError
from spreeze.runtime.cluster.bridge import Bridge
from spreeze.runtime.cluster.ray_nodes import LocalCluster, Nodes, check_installed, joined, local_environment
from spreeze.testing import NUMBERED_ID, count_numbered
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_ring import ReplayRing, RingHandle, RingSpec
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import WeightsStore
from spreeze.types import EnvSpec, RowLayout
from spreeze.workers.context import WorkerContext
from spreeze.workers.jobs import BridgeJob, HostJob
from spreeze.workers.roles import Address

PARTS = ("scale", "cost", "weights", "kill", "link", "target")
_OBS, _ACTION = 22, 6
"""Sizes of Walker2D, whose rows have 52 floats."""
_STEP_S = 0.004
_ENVS = 4
"""A host's one sampler gives at most ``1 / _STEP_S`` rows a second: it steps its environments one after the other."""
_RING_ROWS = 400_000
_RATE = 20_000.0
"""Rows a second at which the driver's processor time has a target."""
_START_S, _NODE_S = 120.0, 12.0
_RAY_PORT = 6379
_VERSIONS_PER_S = 10.0
"""Of the default policy, which has 0.3 MB for these sizes."""


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default: all)")
    add("--hosts", type=int, nargs="+", default=[1, 2, 4, 8], help="simulated hosts of part scale (default: 1 2 4 8)")
    add("--seconds", type=float, default=10.0, help="length of one measurement [s] (default: 10)")
    add("--kill-every", type=float, default=30.0, help="part kill: time between two deaths [s] (default: 30)")
    add("--kill-seconds", type=float, default=600.0, help="part kill: length [s] (default: 600)")
    add("--address", default=None, metavar="HOST:PORT",
        help="parts cost, weights and scale on the hosts of that Ray cluster (default: hosts simulated here)")
    add("--delay", type=float, default=0.05, help="part link: delay each way [s] (default: 0.05)")
    add("--loss", type=float, default=0.01, help="part link: share of packets that are lost (default: 0.01)")
    add("--limit", type=float, default=120.0, help="part target: a run is given up after that [s] (default: 120)")
    add("--runs-dir", default="runs", help="where runs go (default: runs)")


def cluster_rows(args: argparse.Namespace, say: Say) -> list[Row]:
    """The figures of the chosen parts; a ConfigError without Ray."""
    check_installed()
    if args.address is not None:
        with joined(args.address) as nodes:
            return [one for part in ("cost", "weights", "scale") if part in args.parts
                    for one in {"cost": _cost, "weights": _weights, "scale": _scale}[part](nodes, args, say)]
    found: list[Row] = []
    if {"scale", "cost", "weights", "kill"} & set(args.parts):
        with contextlib.closing(LocalCluster(1)) as cluster, joined(cluster.address) as nodes:
            if "cost" in args.parts:
                found += _cost(nodes, args, say)
            if "weights" in args.parts:
                found += _weights(nodes, args, say)
            if "scale" in args.parts:
                found += _scale(nodes, args, say, cluster)
            if "kill" in args.parts:
                while len(cluster.hosts) != 2:
                    if len(cluster.hosts) < 2:
                        cluster.add()
                    else:
                        cluster.remove(0)
                found += _kill(cluster, nodes, args, say)
    if "link" in args.parts:
        found += _link(args, say)
    if "target" in args.parts:
        found += _target(args, say)
    return found


def _env_args(sleep_s: float) -> tuple[str, ...]:
    return f"sleep_s={sleep_s}", f"obs_dim={_OBS}", f"action_dim={_ACTION}"


def _spec(sleep_s: float) -> EnvSpec:
    task = make_task(NUMBERED_ID, "spreeze.testing", args=_env_args(sleep_s))
    task.close()
    return dataclasses.replace(task.spec, import_module="spreeze.testing")


class _Driver:
    """A bridge in this process, with a ring and weights of its own."""

    def __init__(
        self, nodes: Nodes, hosts: int, folder: Path, sleep_s: float, envs: int, *, limited: bool = False
    ) -> None:
        """``limited`` lets hosts write as many rows as ``ring.sampled`` says."""
        spec = _spec(sleep_s)
        layout = RowLayout.of(spec, 1)
        self.ring = ReplayRing.create(RingSpec(layout, 1 + hosts, -(-_RING_ROWS // (1 + hosts))))
        self.status = StatusTable.create(hosts + 1)
        self.folder, self.events = folder, [""]
        context = WorkerContext(Address("bridge"), self.status, hosts, None)
        context.send = self._note  # type: ignore[method-assign]
        host = HostJob(spec=spec, layout=layout, n_step=1, gamma=0.99, nan_policy="drop", seed=1, samplers=1,
                       envs_per_sampler=envs)
        job = BridgeJob(address="", run_dir=str(folder), first_shard=1,
                        replay=RingHandle(fds=(os.dup(self.ring.fd),), spec=self.ring.spec),
                        host=host, limiter=RateLimiter(float(limited), 1e9, 1, 1, 1),
                        host_rows=tuple(range(hosts)))
        self.ring.begin_learning()
        self.context, self.hosts, self.bridge = context, hosts, Bridge(context, job, nodes)

    def _note(self, kind: str, **fields: Any) -> None:
        self.events.append(str(fields.get("text", "")))

    def number(self, name: str, host: int) -> float:
        return self.status.named_slots(host, "host")[name]

    def total(self, name: str) -> float:
        return sum(self.number(name, host) for host in range(self.hosts))

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> float:
        """Turns for that long; returns how long it was."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < seconds:
            self.bridge.turn()
            each()
        return time.monotonic() - began_s

    def until_all_work(self, each: Callable[[], None] = lambda: None) -> None:
        """Turns until every host gives rows; a TimeoutError if one does not."""
        began_s = time.monotonic()
        while min(self.number("chunks", host) for host in range(self.hosts)) < 2:
            self.bridge.turn()
            each()
            if time.monotonic() - began_s > _START_S:
                raise TimeoutError(f"not all of {self.hosts} hosts began within {_START_S:.0f} s: {self.events[-3:]}")

    def close(self) -> None:
        self.bridge.close()
        del self.bridge
        self.ring.close()
        self.context.close()


@contextlib.contextmanager
def _driver(
    nodes: Nodes, hosts: int, *, sleep_s: float = _STEP_S, envs: int = _ENVS, limited: bool = False
) -> Iterator[_Driver]:
    with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as folder:
        made = _Driver(nodes, hosts, Path(folder), sleep_s, envs, limited=limited)
        try:
            yield made
        finally:
            made.close()


def _scale(nodes: Nodes, args: argparse.Namespace, say: Say, cluster: LocalCluster | None = None) -> list[Row]:
    """Rows a second of several hosts, whose environments sleep; of a real cluster as many as it has."""
    rates: dict[int, list[float]] = {}
    for count in sorted(args.hosts) if cluster is not None else [len(nodes.others())]:
        while cluster is not None and len(cluster.hosts) < count:
            cluster.add()
        with _driver(nodes, count) as driver:
            driver.until_all_work()
            for _ in range(args.repeats):
                before = driver.total("rows_arrived")
                took_s = driver.run(args.seconds)
                rates.setdefault(count, []).append((driver.total("rows_arrived") - before) / took_s)
        say(f"{count} hosts: {statistics.median(rates[count]):.0f} rows/s at the learner")
    first = min(rates)
    one = statistics.median(rates[first]) / first
    return [row("rows at the learner", "1/s", rates[count], hosts=count) for count in rates] + [
        row("of linear", "ratio", [rate / (count * one) for rate in rates[count]], hosts=count, target=">= 0.9")
        for count in rates if count > first]


def _cost(nodes: Nodes, args: argparse.Namespace, say: Say) -> list[Row]:
    """Processor time of the bridge and of this machine's own raylet, at all that one host gives and at a rate."""
    found: list[Row] = []
    for rate in (None, _RATE):
        per_million, shares, rates, ray = [], [], [], []
        with _driver(nodes, 1, sleep_s=0.0, envs=32, limited=rate is not None) as driver:
            began_s = time.monotonic()

            def hold_back(rate: float | None = rate, driver: _Driver = driver, began_s: float = began_s) -> None:
                if rate is not None:
                    driver.ring.sampled = int(rate * (time.monotonic() - began_s))

            driver.until_all_work(hold_back)
            driver.run(2.0, hold_back)  # what had been saved up meanwhile
            raylet = _own_raylet()
            for _ in range(args.repeats):
                rows, cpu_s, ray_s = driver.total("rows_arrived"), time.process_time(), _cpu_s(raylet)
                took_s = driver.run(args.seconds, hold_back)
                arrived, cpu_s = driver.total("rows_arrived") - rows, time.process_time() - cpu_s
                per_million.append(cpu_s / arrived * 1e6)
                ray.append((_cpu_s(raylet) - ray_s) / arrived * 1e6)
                rates.append(arrived / took_s)
                shares.append(cpu_s / took_s)
        how = "all that a host gives" if rate is None else f"held to {rate:,.0f} rows/s"
        say(f"{how}: {statistics.median(rates):.0f} rows/s cost {statistics.median(per_million):.2f} s a million")
        found += [
            row(f"rows at the learner, {how}", "1/s", rates),
            row(f"driver's processor time per million rows of 52 floats, {how}", "s", per_million),
            row(f"driver's processor time, {how}", "core", shares, target=None if rate is None else "<= 0.05"),
            row(f"that of its own raylet besides, per million rows, {how}", "s", ray),
        ]
    return found


def _own_raylet() -> psutil.Process:
    """The raylet of the head, the first that was started: by this process, or by ``ray start``.

    Raises:
        SpreezeError: this machine has none.
    """
    found = [child for child in psutil.Process().children() if child.name() == "raylet"]
    found = found or [process for process in psutil.process_iter() if process.name() == "raylet"]
    if not found:
        raise SpreezeError("no raylet runs on this machine: start the bench on the head of the cluster")
    return min(found, key=lambda child: child.create_time())


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _weights(nodes: Nodes, args: argparse.Namespace, say: Say) -> list[Row]:
    """Age of the weights on a host, from their publication, sampled evenly over time."""
    delays: list[float] = []
    ages: list[float] = []
    with _driver(nodes, 1) as driver:
        publish_policy(task_plan(NUMBERED_ID, 1, _ENVS, "spreeze.testing", env_args=_env_args(_STEP_S)), driver.folder)
        store = WeightsStore(driver.folder / "weights")
        policy = store.read_latest()
        assert policy is not None
        driver.until_all_work()
        version, next_s, last, applied_s = 1, time.monotonic(), 0.0, 0.0

        def publish_and_look() -> None:
            nonlocal version, next_s, last, applied_s
            now = time.monotonic()
            if now >= next_s:
                next_s, version = max(now, next_s + 1.0 / _VERSIONS_PER_S), version + 1
                store.publish(policy.arrays, policy.meta, 1, version)
                driver.context.weights_published()
            delay = driver.number("weights_delay_s", 0)
            if delay != last:
                last, applied_s = delay, now
                delays.append(delay)
            if applied_s:
                ages.append(now - applied_s + last)

        driver.run(args.seconds * args.repeats, publish_and_look)
    say(f"weights: {version} versions published, {len(delays)} arrived")
    warmup = len(delays) // 10  # the first ones meet samplers that start
    return [
        row("age of the weights on a host, 10 versions of 0.3 MB a second, median", "s", [statistics.median(ages)],
            target="<= 0.2", n=len(ages)),
        row("from publication to the host, median", "s", [statistics.median(delays[warmup:])], n=len(delays),
            p95=float(np.quantile(delays[warmup:], 0.95))),
    ]


class _Deaths:
    """Kills the raylet of the oldest host every so often and starts another one at once.

    That takes seconds, in which the bridge of this process stands still, and hosts keep their rows.
    """

    def __init__(self, cluster: LocalCluster, every_s: float) -> None:
        self._cluster, self._every_s, self._next_s = cluster, every_s, time.monotonic() + every_s / 2
        self.count = 0
        self.returned_s: float | None = None
        """When the last one that died was there again; None before, and once its rows were."""
        self.noticed = False
        """Whether the bridge knows of that death: until then the dead one counts as working."""

    def turn(self) -> float:
        """Returns for how long a host was missing just now."""
        began_s = time.monotonic()
        if began_s < self._next_s or self.returned_s is not None:
            return 0.0
        self._next_s, self.count = self._next_s + self._every_s, self.count + 1
        os.kill(self._cluster.pid(0), signal.SIGKILL)
        self._cluster.remove(0)
        self._cluster.add()
        self.returned_s = time.monotonic()
        return self.returned_s - began_s


def _kill(cluster: LocalCluster, nodes: Nodes, args: argparse.Namespace, say: Say) -> list[Row]:
    """Rows while hosts die and come back, over what those give that live, from the start of a node to its end."""
    hosts, returns, living_s = len(cluster.hosts), [], 0.0
    with _driver(nodes, hosts) as driver:
        driver.until_all_work()
        before, took_s = driver.total("rows_arrived"), driver.run(args.seconds)
        each = (driver.total("rows_arrived") - before) / took_s / hosts
        deaths, first = _Deaths(cluster, args.kill_every), driver.total("rows_arrived")
        began_s = seen_s = time.monotonic()
        while seen_s - began_s < args.kill_seconds:
            driver.bridge.turn()
            missing_s, now = deaths.turn(), time.monotonic()
            living_s, seen_s = living_s + (now - seen_s) * hosts - missing_s, now
            if deaths.returned_s is not None:
                working = driver.total("alive")
                deaths.noticed |= working < hosts
                if deaths.noticed and working == hosts:
                    returns.append(now - deaths.returned_s)
                    deaths.returned_s, deaths.noticed = None, False
        arrived = driver.total("rows_arrived") - first
        share = arrived / (living_s * each)
        again, torn, checked = _checked(driver.ring)
        say(f"{deaths.count} hosts killed: {arrived:.0f} rows, {100 * share:.0f} % of what the living give")
        return [
            row("hosts killed", "hosts", [deaths.count], every_s=args.kill_every, seconds=args.kill_seconds),
            row("rows there twice", "rows", [again], target="0", checked=checked),
            row("rows torn or made up", "rows", [torn], target="0"),
            row("rows that came again and were not stored", "rows", [driver.total("rows_again")]),
            row("chunks lost", "chunks", [driver.total("chunks_lost")]),
            row("of what the living hosts give", "ratio", [share], target=">= 0.9"),
            row("from a node's return to its rows", "s", returns, target="<= 10"),
        ]


def _checked(ring: ReplayRing) -> tuple[int, int, int]:
    """Rows in a ring that are there twice, that are torn or made up, and that there are."""
    spec = ring.spec
    kept = [ring.rows[shard * spec.stride_rows :][: min(committed, spec.rows_per_shard)]
            for shard, (_, committed) in enumerate(ring.counters())]
    rows = np.concatenate(kept)
    return (*count_numbered(rows, spec.layout), len(rows))


def _link(args: argparse.Namespace, say: Say) -> list[Row]:
    """One host behind a link, first of no delay, then as asked: what of its rate arrives, and how old weights are."""
    found: dict[bool, dict[str, Row]] = {}
    for slow in (False, True):
        with lossy_link(args.delay if slow else 0.0, args.loss if slow else 0.0) as ends, _cluster_over(ends) as (
                address, environment):
            command = [*ends.command(0), sys.executable, "-m", "spreeze.bench", "cluster", "--json", "--parts",
                       "weights", "scale", "--address", address, "--repeats", str(args.repeats), "--seconds",
                       str(args.seconds)]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, check=False,
                                  timeout=_START_S + 4 * args.repeats * args.seconds)
            if done.returncode:
                raise SpreezeError(f"the bench behind the link: {done.stderr.decode(errors='replace')[-500:]}")
            rows = json.loads(done.stdout)["rows"]
            found[slow] = {one["metric"]: one for one in rows}
            told = "; ".join(f"{one['metric']} {one['value']:.4g}" for one in rows)
            say(f"delay {args.delay if slow else 0:g} s: {told}")
    plain, slow_rows = found[False], found[True]
    rate, age = "rows at the learner", next(name for name in plain if name.startswith("age"))
    return [
        *(_told_of(one, delay_s=0.0, loss=0.0) for one in plain.values()),
        *(_told_of(one, delay_s=args.delay, loss=args.loss) for one in slow_rows.values()),
        row("rate behind the link over that without delay", "ratio", [slow_rows[rate]["value"] / plain[rate]["value"]],
            target=">= 0.95"),
        row("age of weights behind the link, more than without, in delays each way", "delays",
            [(slow_rows[age]["value"] - plain[age]["value"]) / args.delay]),
    ]


def _told_of(one: Row, **more: float) -> Row:
    """A row that another process has measured, without its target and with what it was measured at."""
    return {name: value for name, value in one.items() if name != "target"} | more


@contextlib.contextmanager
def _cluster_over(ends: Ends) -> Iterator[tuple[str, dict[str, str]]]:
    """A Ray head at the first end of a link and a node at the other; its address, and what joins it needs."""
    with tempfile.TemporaryDirectory(prefix=f"spz-ray-{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, **local_environment(Path(folder))}
        del environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]  # these nodes have addresses of their own
        address, started = f"{ends.addresses[0]}:{_RAY_PORT}", []
        common = ["--num-cpus=1", f"--object-store-memory={100 * 2**20}", "--disable-usage-stats", "--block"]
        head = ["--head", f"--port={_RAY_PORT}", "--include-dashboard=false"]
        try:
            for end, arguments in enumerate((head, [f"--address={address}"])):
                started.append(subprocess.Popen(
                    [*ends.command(end), sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, *common,
                     f"--node-ip-address={ends.addresses[end]}"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, env=environment, start_new_session=True))
                time.sleep(_NODE_S)
            yield address, environment
        finally:
            for process in started:
                family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
                for member in [*family, process]:
                    with contextlib.suppress(psutil.Error, OSError):
                        member.kill()
                process.wait()


def _target(args: argparse.Namespace, say: Say) -> list[Row]:
    """Time to -200 on Pendulum, alone and with another host of a cluster that is there already, in turn."""
    with contextlib.closing(LocalCluster(1)) as cluster:
        cases = {"alone": [], "another host": ["--cluster", cluster.address, "--host-samplers", "1"]}
        found = in_turn(cases, args.repeats, until_target("Pendulum-v1", -200.0, args.runs_dir, args.limit, []), say)
    alone, remote = found.values()
    return [*(time_row(documents, case=case) for case, documents in found.items()),
            ratio_row("with another host over alone", remote, alone, target="<= 1.3")]
