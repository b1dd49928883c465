"""A real run, watched from outside through its own shared memory (Linux)."""

import contextlib
import dataclasses
import json
import os
import time

import psutil
from long_form import LEFT_S, LIMIT_S
from watched_run import LiveRun

from spreeze.machine.processes import MARK
from spreeze.run_directory import read_run
from spreeze.transport.replay_ring import RingHandle
from spreeze.transport.status_table import StatusHandle


class AttachedRun(LiveRun):
    """A run with its status and ring, once ``attach`` has mapped them."""

    end_s = LIMIT_S

    def __init__(self, *arguments, **options):
        self.status = self.ring = None
        self.rows = {}  # name of a worker -> its row of the status table
        self.shards = 0  # of this machine's samplers; those of other hosts follow
        self.has_hosts = "--cluster" in arguments[0]
        super().__init__(*arguments, **options)

    def __exit__(self, *exc):
        for memory in (self.status, self.ring):
            if memory is not None:
                memory.close()
        super().__exit__(*exc)

    def workers(self):
        """Name -> process id of the living workers."""
        return {name: child.pid for name, child in self.children().items()}

    def attach(self):
        """Maps the run's status and ring, as a sampler's argument has them.

        Raises:
            SpreezeError: the run ended or did not start in time.
        """
        self.wait(lambda: "sampler-0" in self.workers(), LIMIT_S, "the first sampler's start")
        spec = self._spec("sampler-0")
        self.status = self._attached(StatusHandle.from_json(spec["status"]))
        self.ring = self._attached(RingHandle.from_json(spec["job"]["replay"]))
        self.shards, after = self.ring.spec.num_shards, []
        if self.has_hosts:
            self.wait(lambda: "bridge" in self.workers(), LIMIT_S, "the bridge's start")
            job = self._spec("bridge")["job"]
            self.shards, after = job["first_shard"], [*(f"host-{row}" for row in job["host_rows"]), "bridge"]
        names = ["learner", *(f"sampler-{index}" for index in range(self.shards)), *after, "evaluator", "visualizer"]
        self.rows = {name: row for row, name in enumerate(names) if not name.startswith("host-")}

    def _spec(self, name):
        """What a worker was told at its start."""
        return json.loads(self.children()[name].cmdline()[3])

    def _attached(self, handle):
        """Attaches by a descriptor of our own to what the supervisor has open."""
        own = os.open(f"/proc/{self.process.pid}/fd/{handle.fds[0]}", os.O_RDWR | os.O_CLOEXEC)
        return dataclasses.replace(handle, fds=(own,)).attach()

    def version(self):
        """(epoch, version) that the pointer names; (0, 0) while there is none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            pointer = json.loads((self.path / "weights" / "LATEST.json").read_bytes())
            return int(pointer["epoch"]), int(pointer["version"])
        return 0, 0

    def orphans(self):
        """Processes that still carry the run's mark some seconds after its end."""
        nonce, end = read_run(self.path).get("nonce"), time.monotonic() + LEFT_S
        while (left := len(marked(MARK, str(nonce)))) and time.monotonic() < end:
            time.sleep(0.1)
        return left


def marked(variable, value):
    """Ids of the living processes with this in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
