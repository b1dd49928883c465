"""A whole run on a host that works for a run elsewhere, whose learners its own one joins (``transport.gossip``).

It has samplers of its own, inherits the memory for messages, and leaves nothing behind: what it learned is in the
others.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spreeze import __version__
from spreeze.errors import TransportError
from spreeze.formatting import clean
from spreeze.machine.processes import OrphanWatch, kill_and_wait, mark
from spreeze.run_directory import scratch_folder
from spreeze.runtime.launcher import child_environment
from spreeze.transport.gossip import GossipMemory
from spreeze.transport.shared_memory import inherited_fds
from spreeze.types import Jsonable

_TURN_S, _AGAIN_S = 0.2, 3.0
_END_S = 1.0
"""For the run to end by itself, before it is killed: nothing of it is kept, and Ray does not wait for long."""
_FORSAKEN_S = 8.0
"""The run ends when nobody has asked how it is for so long, since the driver is gone; then it waits to be asked."""
_MOST_FAILURES, _WINDOW_S = 4, 120.0


@dataclass(frozen=True, kw_only=True)
class HostRunJob(Jsonable):
    """Job of another host that has a run of its own."""

    arguments: tuple[str, ...]
    """Arguments of ``python -m spreeze.train``: the task, the algorithm, and whom to join."""
    number: int
    """Number of its learner among those of all hosts, of which there are ``learners``."""
    learners: int
    version: str
    """Version of Spreeze of the run that it joins."""


class HostRun(threading.Thread):
    """Keeps a run alive on this host, with all its processes."""

    def __init__(self, job: HostRunJob) -> None:
        """A TransportError if this host has another version of Spreeze than the run that it is to join."""
        super().__init__(name="host-run", daemon=True)
        if job.version != __version__:
            raise TransportError(
                f"this host has Spreeze {__version__}, the run that it is to join has {job.version}; install the same"
            )
        self._job, self._ending = job, threading.Event()
        self.number, self.memory = job.number, GossipMemory.create(job.learners, (job.number,))
        """Messages of all learners; they outlive the run here, which may begin anew."""
        self.start_name = secrets.token_hex(8)
        """Tells this memory from those of earlier processes on this host."""
        self.failure: str | None = None
        """Why it was given up."""
        self.starts = 0
        self.requested_s = time.monotonic()
        """When the driver asked last."""
        self._told: deque[str] = deque(maxlen=20)

    def run(self) -> None:
        nonce = secrets.token_hex(8)
        with scratch_folder("spreeze-host-") as folder:
            watch = OrphanWatch(nonce, folder)
            watch.start()
            try:
                self._keep(folder, nonce)
            except OSError as error:
                self.failure = clean(error, 300)
            finally:
                watch.end()

    def _keep(self, folder: Path, nonce: str) -> None:
        messages = self.memory.handle(joined=True)
        failed_s: deque[float] = deque(maxlen=_MOST_FAILURES)
        while not self._ending.is_set():
            if self._forsaken:
                self._ending.wait(_TURN_S)
                continue
            self.starts += 1
            said = folder / f"run-{self.starts}.txt"
            place = ("--runs-dir", str(folder / "runs"), "--name", f"host-{self.starts}")
            command = [sys.executable, "-m", "spreeze.train", *self._job.arguments, *place]
            with open(said, "wb") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                    env=child_environment(1, nonce) | messages.environment,
                    pass_fds=inherited_fds(messages),
                )
            mark(process.pid, nonce)
            if not self._watch(process):
                continue
            why = (said.read_text(errors="replace").strip().splitlines() or ["no word"])[-1]
            self._told.append(f"its run ended with code {process.returncode}: {clean(why, 200)}")
            failed_s.append(time.monotonic())
            if len(failed_s) == _MOST_FAILURES and failed_s[-1] - failed_s[0] < _WINDOW_S:
                self.failure = clean(why, 300)
                return
            self._ending.wait(_AGAIN_S)

    @property
    def _forsaken(self) -> bool:
        return time.monotonic() - self.requested_s > _FORSAKEN_S

    def _watch(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits for the end of a run; False if it was brought about here, as asked or since nobody asks any more."""
        while process.poll() is None and not self._forsaken and not self._ending.wait(_TURN_S):
            pass
        if process.poll() is not None:
            return not self._ending.is_set()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            kill_and_wait(process)
        return False

    def end(self, within_s: float) -> None:
        """Ends the run and everything that it started."""
        self._ending.set()
        self.join(within_s)
        self.memory.close()

    def facts(self, living: Iterable[int] = ()) -> dict[str, Any]:
        """Status of the host, where the ``living`` are those learners that are there; each event is sent once."""
        self.requested_s = time.monotonic()
        self.memory.hear(living)
        events = [self._told.popleft() for _ in range(len(self._told))]
        learns = self.number in self.memory.living()
        return {"events": events, "failure": self.failure, "start": self.start_name, "learns": learns}
