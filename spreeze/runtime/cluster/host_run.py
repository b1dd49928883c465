"""A whole run on a host that works for a run elsewhere, whose learners its own ones join (``transport.gloo_gossip``).

It has samplers of its own, and leaves nothing behind: what it learned is in the others.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spreeze.formatting import clean
from spreeze.machine.processes import OrphanWatch, kill_and_wait, mark
from spreeze.run_directory import scratch_folder
from spreeze.runtime.launcher import child_environment
from spreeze.transport.gossip import create_secret
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
    secret: str
    """Secret of the run that it joins, in hexadecimal digits."""


class HostRun(threading.Thread):
    """Keeps a run alive on this host, with all its processes."""

    def __init__(self, job: HostRunJob) -> None:
        super().__init__(name="host-run", daemon=True)
        self._job, self._ending = job, threading.Event()
        self.failure: str | None = None
        """Why it was given up."""
        self.starts = 0
        self.asked_s = time.monotonic()
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
        secret_file = folder / "secret-of-the-ring"
        create_secret(secret_file, bytes.fromhex(self._job.secret))
        failed_s: deque[float] = deque(maxlen=_MOST_FAILURES)
        while not self._ending.is_set():
            if self._forsaken:
                self._ending.wait(_TURN_S)
                continue
            self.starts += 1
            said = folder / f"run-{self.starts}.txt"
            command = [
                sys.executable,
                "-m",
                "spreeze.train",
                *self._job.arguments,
                "--runs-dir",
                str(folder / "runs"),
                "--name",
                f"host-{self.starts}",
                "--set",
                f"exchange.secret_file={secret_file}",
            ]
            with open(said, "wb") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                    env=child_environment(1, nonce),
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
        return time.monotonic() - self.asked_s > _FORSAKEN_S

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

    def facts(self) -> dict[str, Any]:
        """Status of the host; each event is sent once."""
        self.asked_s = time.monotonic()
        return {"events": [self._told.popleft() for _ in range(len(self._told))], "failure": self.failure}
