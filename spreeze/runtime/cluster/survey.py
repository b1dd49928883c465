"""Survey of a cluster: its hosts in short before a run, and details of each for ``spreeze doctor``.

In a child process (``python -m spreeze.runtime.cluster.survey REQUEST``), which alone loads Ray: it may hang, and a
process can join one cluster only.
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import time
from typing import Any

from spreeze.errors import ConfigError, SpreezeError, TransportError
from spreeze.formatting import clean
from spreeze.machine.processes import end_orphans, end_with_parent, ignore_ending_signals, kill_and_wait
from spreeze.runtime.cluster.ray_nodes import (
    ClusterAddress,
    Nodes,
    RemoteGateway,
    check_installed,
    check_reachable,
    connected,
)
from spreeze.runtime.launcher import start_process
from spreeze.transport.chunks import sign_json, verify_json

_JOIN_S, _CHECK_S = 60.0, 150.0  # Longest time to join a cluster, and to check all of its hosts.
_START_S = 60.0
_PINGS = 20
_BANDWIDTH_BYTES = 1 << 24


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
    arguments = ("-m", "spreeze.runtime.cluster.survey", json.dumps({"address": address, "task": task}))
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
