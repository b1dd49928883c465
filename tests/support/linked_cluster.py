"""A Ray head at one end of a link between two network namespaces, and a node at the other that can start anew."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from lossy_link import Ends

from spreeze.errors import ResourceError
from spreeze.runtime.cluster.ray_nodes import local_environment

_PORT = 6379
_READY = "session_2*/metrics_agent_port_*"
"""What a process of a node writes that its raylet waits for: it gives up where that takes long."""
_STARTS, _SETTLED_S = 10, 5.0
_STORE_BYTES = 100 * 2**20


class LinkedCluster:
    """``address`` and ``environment`` are what a process at the first end needs to join."""

    def __init__(self, ends: Ends, folder: Path, more: Mapping[str, str]) -> None:
        """Starts both nodes; ``more`` variables for all processes.

        Raises:
            ResourceError: a node does not come up.
        """
        self.ends, self._folder, self._is_cut = ends, folder, False
        self.address = f"{ends.addresses[0]}:{_PORT}"
        self.environment = {**os.environ, **local_environment(folder), **more}
        del self.environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]  # these nodes have addresses of their own
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        for _ in range(_STARTS):
            if self._comes_up(0) and self._comes_up(1):
                return
        self.close()
        raise ResourceError(f"Ray nodes gave up {_STARTS} times: this machine is too busy for them")

    def _comes_up(self, end: int) -> bool:
        ready = len(self._ready())
        self.start(end)
        while self.lives(0) and self.lives(end) and len(self._ready()) <= ready:
            time.sleep(0.2)
        time.sleep(_SETTLED_S)
        return self.lives(0) and self.lives(end)

    def _ready(self) -> list[Path]:
        return list(self._folder.glob(f"ray/{_READY}"))

    def keep(self) -> None:
        """Starts the node at the second end again if it has given up, as one does that Ray counts as dead.

        Raises:
            ResourceError: the head has ended.
        """
        if not self.lives(0):
            raise ResourceError("the head of the Ray cluster has ended: this machine is too busy for it")
        if not self._is_cut and not self.lives(1):
            self.start(1)

    def cut(self, cut: bool = True) -> None:
        """Cuts the link, or joins it."""
        self._is_cut = cut
        self.ends.cut(cut)

    def start(self, end: int) -> None:
        """Starts the node at that end, in place of an earlier one."""
        self._end(end)
        node = ["--head", f"--port={_PORT}", "--include-dashboard=false"] if end == 0 else [f"--address={self.address}"]
        command = [
            *self.ends.command(end), sys.executable, "-m", "ray.scripts.scripts", "start", *node, "--num-cpus=1",
            f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats", "--block",
            f"--node-ip-address={self.ends.addresses[end]}",
        ]  # fmt: skip
        self._nodes[end] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=self.environment, start_new_session=True,
        )  # fmt: skip

    def lives(self, end: int) -> bool:
        return self._nodes[end].poll() is None

    def _end(self, end: int) -> None:
        process = self._nodes.pop(end, None)
        if process is None:
            return
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for member in [*family, process]:
            with contextlib.suppress(psutil.Error, OSError):
                member.kill()
        process.wait()

    def close(self) -> None:
        for end in (1, 0):
            self._end(end)


@contextlib.contextmanager
def cluster_over(ends: Ends, more: Mapping[str, str] = {}) -> Iterator[LinkedCluster]:
    """A Ray head at the first end of a link and a node at the other."""
    with (
        tempfile.TemporaryDirectory(prefix=f"spz-ray-{os.getpid()}-", ignore_cleanup_errors=True) as folder,
        contextlib.closing(LinkedCluster(ends, Path(folder), more)) as cluster,
    ):
        yield cluster
