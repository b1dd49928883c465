"""All calls of Ray, which is imported only in the process that uses it; ``Nodes`` is the connection.

``survey`` tells of a cluster's hosts, for ``spreeze doctor``. It runs this module as a process, which alone loads Ray,
since that may hang, and a process can join one cluster only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spreeze.errors import ConfigError, SpreezeError, TransportError
from spreeze.formatting import clean
from spreeze.machine.processes import ENDING, end_orphans, end_with_parent, ignore_ending_signals, kill_and_wait
from spreeze.run_directory import remove_leftovers
from spreeze.runtime.cluster.host import CONTROL, GROUPS, PULL, GatewayActor
from spreeze.runtime.launcher import start_process
from spreeze.transport.chunks import sign_json, verify_json

LOCAL = "local"
_MAX_LOCAL = 64
_KNOCK_S = 3.0
_TOKENS_SINCE = (2, 52)  # Version of Ray from which on a token can be requested; earlier ones ignore the variable.
_HTTP2, _HTTP2_SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 4
"""How a client of gRPC starts, and the kind of frame with which a server answers (RFC 9113, section 3.4)."""
_FOLDER_IN, _FOLDER = "/tmp", "spz-ray-"
_LOCAL_NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "node_ip_address": "127.0.0.1"}
"""Arguments of a node here; Ray's servers listen on the loopback address alone where a node has it as its own."""
_HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 6,
}
"""A node of our own cluster that does not answer for three seconds is dead."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}


_JOIN_S, _CHECK_S = 60.0, 150.0  # Longest time to join a cluster, and to check all of its hosts.
_START_S = 60.0
_PINGS = 20
_BANDWIDTH_BYTES = 1 << 24


class ClusterAddress(NamedTuple):
    """The address of the other hosts."""

    text: str  # address of a Ray cluster: ``HOST:PORT`` or ``auto``
    local: int = 0  # hosts to simulate on this machine; 0: a real cluster


def parse_address(text: str) -> ClusterAddress:
    """``HOST:PORT``, ``auto``, ``local`` (two simulated hosts) or ``local:N``; a ConfigError for anything else."""
    kind, colon, count = text.partition(":")
    if kind == LOCAL:
        if (colon and not count.isdecimal()) or not 1 <= int(count or 2) <= _MAX_LOCAL:
            raise ConfigError(f"--cluster {clean(text, 80)}: expected local:N with N from 1 to {_MAX_LOCAL}")
        return ClusterAddress("", int(count or 2))
    if text == "auto":
        return ClusterAddress(text)
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "://" in text:
        raise ConfigError(
            f"--cluster {clean(text, 80)}: expected HOST:PORT of a Ray cluster's head, auto, local or local:N"
        )
    return ClusterAddress(text)


def check_installed() -> None:
    """Raises a ConfigError that names the package to install if Ray is missing."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--cluster: Ray is not installed in this Python: pip install 'spreeze[cluster]', or remove --cluster: a "
            "single machine needs no Ray"
        )


def check_reachable(address: ClusterAddress) -> None:
    """Raises a ConfigError at once if no Ray head listens at the address; Ray itself would take a minute."""
    if address.local or address.text == "auto":
        return
    host, _, port = address.text.rpartition(":")
    advice = "run ray start --head on that machine and use the HOST:PORT that it prints"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S) as connection:
            connection.sendall(_HTTP2)
            answer = connection.recv(9)
    except OSError as error:
        raise ConfigError(f"--cluster {clean(address.text, 80)}: no answer ({error}); {advice}") from None
    if len(answer) < 9 or answer[3] != _HTTP2_SETTINGS:
        raise ConfigError(f"--cluster {clean(address.text, 80)}: this is not a Ray head node; {advice}")


class Node(NamedTuple):
    """A living host of the cluster."""

    id: str
    address: str
    name: str


class GatewayDied(TransportError):
    """A gateway that ended for good."""


class RemoteGateway:
    """The bridge's end of one host's actor; calls return references at once."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, method: str, request: Any) -> Any:
        group = PULL if method in ("pull", "listen") else CONTROL
        return getattr(self._actor, method).options(concurrency_group=group).remote(request)


class Nodes:
    """A connection to Ray, of which a process can have one."""

    def __init__(self, ray: Any, address: str) -> None:
        self._ray = ray
        self.address = address
        self.version = str(ray.__version__)
        self._node_id = str(ray.get_runtime_context().get_node_id())

    @property
    def is_authenticated(self) -> bool:
        """True if members of this cluster need its token."""
        known = tuple(int(part) for part in self.version.split(".")[:2] if part.isdecimal()) >= _TOKENS_SINCE
        return known and os.environ.get("RAY_AUTH_MODE") == "token"

    def others(self) -> list[Node]:
        """Living nodes except this process's own."""
        return [
            Node(str(node["NodeID"]), str(node["NodeManagerAddress"]), clean(node.get("NodeManagerHostname"), 60))
            for node in self._ray.nodes()
            if node["Alive"] and str(node["NodeID"]) != self._node_id
        ]

    def place(self, node: Node, secret: bytes, job: bytes) -> RemoteGateway:
        """Starts a gateway on that node; if its process dies, Ray starts it again there."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = self._ray.remote(
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            concurrency_groups=GROUPS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )(GatewayActor)
        return RemoteGateway(actor.remote(secret, job))

    def drop(self, gateway: RemoteGateway) -> None:
        """Ends a gateway for good."""
        with contextlib.suppress(Exception):  # it may be dead already, of which Ray has many errors
            self._ray.kill(gateway._actor, no_restart=True)

    def share(self, data: bytes) -> Any:
        """Puts bytes into the object store, out of which each host fetches them once."""
        return self._ray.put(data)

    def ready(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        """Waits for the first answer; returns all that have arrived."""
        if not references:
            time.sleep(timeout_s)
            return []
        done, rest = self._ray.wait(list(references), num_returns=1, timeout=timeout_s)
        if done and rest:
            done += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return list(done)

    def answer(self, reference: Any, timeout_s: float = 5.0) -> bytes:
        """An answer that has arrived; a TransportError if it is lost, a GatewayDied if the actor is gone."""
        try:
            return bytes(self._ray.get(reference, timeout=timeout_s))
        except (self._ray.exceptions.ActorDiedError, self._ray.exceptions.ActorUnschedulableError) as error:
            raise GatewayDied(f"{type(error).__name__}: {clean(error, 400)}") from None
        except self._ray.exceptions.RayError as error:
            raise TransportError(f"{type(error).__name__}: {clean(error, 200)}") from None


@contextlib.contextmanager
def connected(address: ClusterAddress) -> Iterator[Nodes]:
    """Joins a cluster, or makes one on this machine, which ends with the block; a ConfigError if that is impossible."""
    check_installed()
    check_reachable(address)
    with contextlib.ExitStack() as stack:
        os.environ.update({name: os.environ.get(name, value) for name, value in _QUIET.items()})
        text = address.text
        if address.local:
            local = stack.enter_context(contextlib.closing(LocalCluster(address.local)))
            text = local.address
        yield stack.enter_context(joined(text))


@contextlib.contextmanager
def joined(text: str) -> Iterator[Nodes]:
    """Joins the cluster at a Ray address; a ConfigError if it rejects us."""
    import ray

    try:
        with _handlers_kept():
            ray.init(address=text, log_to_driver=False, logging_level="warning")
    except Exception as error:
        raise ConfigError(
            f"--cluster {clean(text, 80)}: this machine is not part of the Ray cluster ({clean(error, 300)}); "
            "join it with ray start --address HOST:PORT, with the same version of Ray and, if the cluster uses "
            "one, its token (RAY_AUTH_MODE=token)"
        ) from None
    try:
        yield Nodes(ray, text)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restores this process's handlers of the signals that end it: Ray's own would end it, or keep it from ending."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def local_environment(folder: Path) -> dict[str, str]:
    """Variables of all processes of a cluster on this machine: a new token, a folder of its own."""
    return _QUIET | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": str(folder),
        # Otherwise Ray would take a network address as its own and listen there.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_worker_niceness": "0",  # Ray's 15 would starve samplers that a learner waits for
    }


class LocalCluster:
    """Several nodes of Ray on this machine, for demonstrations, tests and benches.

    They listen on the loopback address alone, with a token known to this process and its children only. All that Ray
    writes goes into a temporary folder that is removed.
    """

    def __init__(self, hosts: int) -> None:
        """Starts a head, which is this machine's own node, and that many hosts. Takes seconds."""
        remove_leftovers(_FOLDER)
        # Short, since the names of sockets in it may have 107 letters at most.
        self._folder = tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=_FOLDER_IN)
        os.environ.update(local_environment(Path(self._folder)))
        from ray.cluster_utils import Cluster

        lean = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        head = {**_LOCAL_NODE, **lean, "_system_config": _HEALTH}
        with _handlers_kept():
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = str(self._cluster.address)
        self.hosts: list[Any] = []
        for _ in range(hosts):
            self.add()

    def add(self) -> None:
        with _handlers_kept():
            self.hosts.append(self._cluster.add_node(**_LOCAL_NODE))

    def close(self) -> None:
        with contextlib.suppress(Exception):  # a node that was killed
            self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def survey(address: ClusterAddress, task: dict[str, Any] | None = None) -> dict[str, Any]:
    """The hosts of a cluster (``address``, ``name``), Ray's version, whether a token is requested.

    With a ``task`` (arguments of ``envs.probe.probe_env``, or none of them) each host's gateway is checked
    (``host.GatewayActor.check``), and its clock, round trip and bandwidth are measured. A ConfigError if Ray is not
    installed, or the cluster rejects us.
    """
    check_installed()
    check_reachable(address)
    nonce = secrets.token_hex(8)
    limit_s = _JOIN_S if task is None else _JOIN_S + _CHECK_S
    arguments = ("-m", "spreeze.runtime.cluster.ray_nodes", json.dumps({"address": address, "task": task}))
    process = start_process(arguments, nonce, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0)
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--cluster {address.text or 'local'}: could not join the Ray cluster within {limit_s:.0f} "
            "s; is it Ray's own HOST:PORT (6379 by default), and the same version?"
        ) from None
    finally:
        kill_and_wait(process)
        end_orphans(nonce)
    try:
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(f"--cluster {address.text or 'local'}: {clean(' '.join(last), 300) or 'Ray ended'}") from None
    if "error" in result:
        raise ConfigError(str(result["error"]))
    return result


def _survey(nodes: Nodes, task: dict[str, Any] | None) -> dict[str, Any]:
    others, secret = nodes.others(), secrets.token_bytes(32)
    hosts: list[dict[str, Any]] = [{"address": node.address, "name": node.name} for node in others]
    if task is not None:
        placed = [nodes.place(node, secret, sign_json(secret, b"job", {})) for node in others]
        for host, gateway in zip(hosts, placed, strict=True):
            try:
                host.update(_examine(nodes, gateway, secret, task))
            except TransportError as error:
                host["failure"] = str(error)
    return {"hosts": hosts, "ray": nodes.version, "authenticated": nodes.is_authenticated}


def _examine(nodes: Nodes, gateway: RemoteGateway, secret: bytes, task: dict[str, Any]) -> dict[str, Any]:
    def answer(method: str, facts: dict[str, Any], within_s: float) -> bytes:
        return nodes.answer(gateway.call(method, sign_json(secret, method.encode(), facts)), within_s)

    answer("ping", {}, _START_S)
    differences, trips = [], []
    for _ in range(_PINGS):
        began_s = time.time()
        facts = verify_json(secret, b"answer", answer("ping", {}, _START_S))
        ended_s = time.time()
        trips.append(ended_s - began_s - (facts["went_s"] - facts["came_s"]))
        differences.append((facts["came_s"] - began_s + facts["went_s"] - ended_s) / 2.0)
    began_s = time.monotonic()
    size = len(answer("bandwidth", {"bytes": _BANDWIDTH_BYTES}, _START_S))
    rate = size / (time.monotonic() - began_s)
    checked = verify_json(secret, b"answer", answer("check", task, _CHECK_S))
    trip_s, difference_s = statistics.median(trips), statistics.median(differences)
    return checked | {"round_trip_s": trip_s, "clock_difference_s": difference_s, "bandwidth_bytes_per_s": rate}


def main(argv: list[str]) -> None:
    end_with_parent()
    ignore_ending_signals()
    request = json.loads(argv[0])
    try:
        with connected(ClusterAddress(*request["address"])) as nodes:
            result = _survey(nodes, request["task"])
    except SpreezeError as error:
        result = {"error": str(error)}
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
