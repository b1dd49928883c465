"""Hosts behind a link that delays and loses packets, and hosts that are killed for minutes; needs root and Linux."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from long_form import PATIENCE_S, asked, by_hand
from lossy_link import lossy_link

from spreeze.errors import ResourceError

SERVER = """
import hashlib, socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    with connection:
        digest, count = hashlib.sha256(), 0
        while data := connection.recv(65536):
            digest.update(data)
            count += len(data)
        print(digest.hexdigest(), count)
"""
CLIENT = """
import socket, sys
data = sys.stdin.buffer.read()
with socket.create_connection((sys.argv[1], 7000)) as connection:
    connection.sendall(data)
"""


@contextlib.contextmanager
def link(delay_s, loss):
    with contextlib.ExitStack() as stack:
        try:
            ends = stack.enter_context(lossy_link(delay_s, loss))
        except ResourceError as error:
            pytest.skip(str(error))
        yield ends


def test_what_comes_over_a_link_that_loses_packets_is_late_and_whole():
    data = os.urandom(200_000)
    with link(0.01, 0.02) as ends:
        server = subprocess.Popen([*ends.command(1), sys.executable, "-c", SERVER, ends.addresses[1]],
                                  stdout=subprocess.PIPE, text=True)  # fmt: skip
        with server, server.stdout:
            assert server.stdout.readline() == "ready\n"
            subprocess.run(
                [*ends.command(0), sys.executable, "-c", CLIENT, ends.addresses[1]],
                input=data,
                check=True,
                timeout=PATIENCE_S,
            )
            assert server.stdout.readline().split() == [hashlib.sha256(data).hexdigest(), "200000"]


def rows_of(part, **changes):
    """The rows of a part of ``tests/benchmarks/cluster.py`` with its own defaults."""
    folder = Path(__file__).resolve().parents[1] / "benchmarks"
    command = [
        sys.executable,
        str(folder / "cluster.py"),
        "--json",
        "--parts",
        part,
        *(f"--{name.replace('_', '-')}={value}" for name, value in changes.items()),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)["rows"]


@by_hand
@pytest.mark.timeout(1200)
def test_rows_come_at_the_same_rate_over_a_link_with_delay_and_loss(report):
    with link(0.0, 0.0):
        pass
    rows = report(rows_of("link", delay=asked("DELAY_S", 0.05), loss=asked("LOSS", 0.01)))
    assert rows["rate behind the link over that without delay"]["value"] > 0.95


@by_hand
@pytest.mark.timeout(3600)
def test_hosts_that_are_killed_for_minutes_give_no_row_twice(report):
    seconds = 60.0 * asked("MINUTES", 10.0)
    rows = report(rows_of("kill", kill_seconds=seconds))
    assert rows["rows there twice"]["value"] == rows["rows torn or made up"]["value"] == 0
    assert rows["of what the living hosts give"]["value"] > 0.9
    assert max(rows["from a node's return to its rows"]["repeats"]) < 10.0
