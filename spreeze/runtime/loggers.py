"""Sends all records to the sinks of ``--log`` as well, without ever waiting for one.

A sink is a process of its own (``runtime.metric_sinks``) at the other end of a socket that does not block. Rows wait in
a bounded queue, which drops the oldest ones and counts them. A sink that fails, does not answer for a minute, or does
not end in time is switched off for the session, with an event.

Sinks get each sample (two a second) in the first minutes, then one every thousandth part of the run, but at least one
in ten seconds. All evaluations and events are sent.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spreeze.config.layers import iterate
from spreeze.errors import ConfigError
from spreeze.formatting import clean
from spreeze.machine.awake import AWAKE
from spreeze.machine.processes import OWN_PREFIX, end_orphans, kill_and_wait
from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.table import RETURN, TABLE
from spreeze.run_directory import RunDir, read_run, versions
from spreeze.runtime.launcher import messages_in, open_log, start_process
from spreeze.runtime.plan import RunPlan
from spreeze.transport.shared_memory import readable

OPEN_S = 120.0  # longest time without an answer until a sink is open: imports, a database, a login
SILENT_S = 60.0  # longest time without an answer afterwards
CLOSE_S = 10.0
"""Patience at the end of the run, where the run waits for it; three times that if the sink is not open yet."""
_LONGEST_CLOSE_S = 60.0
_REPORT_AFTER_S = 2.0
MAX_ROWS = 1000
_SHARE_OF_RUN, _MAX_BETWEEN_S = 1e-3, 10.0
_UNCHARTED = "More"  # Group of the series that no chart of the page has.


def check_sinks(names: Sequence[str]) -> None:
    """Raises a ConfigError, before anything is started, for a sink whose package is missing."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a mere folder of that name, as W&B makes one
            raise ConfigError(
                f"--log {name}: the package {name} is not installed: pip install 'spreeze[{name}]', or disable "
                "logging: --log ''"
            )


class Sink:
    """The supervisor's side of one sink. No method but ``reap`` blocks."""

    module = "spreeze.runtime.metric_sinks"

    def __init__(
        self, opening: Mapping[str, Any], run_dir: RunDir, on_event: Callable[[str, str], None], log: str | None = None
    ) -> None:
        """Starts the process; an OSError if that fails.

        ``opening``: first row, for a sink the fields of ``metric_sinks.Opening``; ``on_event`` takes level and text;
        ``log``: name of its log (None: that of the sink).
        """
        self.name = str(opening["sink"])
        self._log = log or f"log-{self.name}"
        self._run_dir, self._on_event = run_dir, on_event
        self.mark = f"{run_dir.nonce}.{self._log}"  # not the run's own: it outlives the workers, until all is written
        self._rows: deque[bytes] = deque()
        self._unsent = b""
        self._received = b""
        self._put = self._done = self.dropped = 0
        self._answered_s = AWAKE()
        self._limits_s = OPEN_S, SILENT_S
        self.open = True
        """False once it has ended, in whatever way."""
        self._line, theirs = socket.socketpair()
        self._line.setblocking(False)
        fd = theirs.fileno()
        with theirs, open_log(run_dir.path, self._log) as output:
            try:
                self._process = start_process(
                    ("-m", "spreeze.machine.processes", f"{OWN_PREFIX}log", self.module, str(fd)),
                    self.mark,
                    name=self._log,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(fd,),
                    start_new_session=True,  # without a terminal, nothing can ask for a password there
                )
            except OSError:
                self._line.close()
                raise
        self.put(opening)

    def fileno(self) -> int:
        return self._line.fileno()

    def put(self, row: Mapping[str, Any]) -> None:
        """Queues a row, sends what can be sent, and reads the answers."""
        if not self.open:
            return
        if self._put == self._done:
            self._answered_s = AWAKE()  # no answer was due
        if len(self._rows) >= MAX_ROWS:
            del self._rows[1]  # the first row may be the one that opens it
            self._put -= 1
            self.dropped += 1
            if self.dropped == 1:
                self._on_event("warning", f"{self.name} does not keep up; the oldest rows are dropped")
        self._rows.append(json.dumps(row).encode() + b"\n")
        self._put += 1
        self.poll()

    def end(self, *, failed: bool) -> None:
        """Asks the sink to write its rows and end; then it is no longer ``open``."""
        if self.open:
            self._limits_s, self._answered_s = (3.0 * CLOSE_S, CLOSE_S), AWAKE()
            self.put({"end": failed})

    def poll(self) -> None:
        """Sends and reads without waiting; switches the sink off if it failed or has been silent for too long."""
        if not self.open:
            return
        self._send()
        ended = self._process.poll() is not None  # before its last messages are read
        for message in self._answers():
            self._take(message)
        limit_s = self._limits_s[self._done > 0]
        if self.open and ended:
            self._switch_off(f"its process ended with exit code {self._process.returncode}")
        elif self.open and self._done < self._put and AWAKE() - self._answered_s > limit_s:
            self._switch_off(f"no answer for {limit_s:g} s")

    def late(self) -> None:
        """Switches off a sink that had to end by now."""
        if self.open:
            self._switch_off("it did not end in time")

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # full, or closed by a process whose end is seen below
            while self._unsent or self._rows:
                self._unsent = self._unsent or self._rows.popleft()
                self._unsent = self._unsent[self._line.send(self._unsent) :]

    def _answers(self) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):
            while data := self._line.recv(65536):
                self._received += data
        *lines, self._received = self._received.split(b"\n")
        return messages_in(lines)

    def _take(self, message: dict[str, Any]) -> None:
        self._answered_s = AWAKE()
        self._done = int(message.get("done", self._done))
        if "event" in message:
            level, text = message["event"]
            self._on_event(level, f"{self.name}: {text}")
        if "known" in message:
            known = read_run(self._run_dir.path).get("sinks")
            self._run_dir.write_state(sinks={**(known if isinstance(known, dict) else {}), self.name: message["known"]})
        if "failed" in message:
            self._switch_off(message["failed"])
        if "closed" in message:
            self.open = False
            if self.dropped:
                self._on_event("warning", f"{self.name} missed {self.dropped} rows: it could not keep up")

    def _switch_off(self, why: str) -> None:
        self.open = False  # first: the event goes to all sinks
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        lost = self._put - self._done + self.dropped
        self._on_event(
            "warning",
            f"{self.name} is disabled; the run continues: {clean(why, 200)}; {lost} rows were not logged (see "
            f"logs/{self._log}.log)",
        )

    def reap(self) -> None:
        """Ends what is left of the process, and what it started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if self.open else 1.0)
        if kill_and_wait(self._process) != 0:
            end_orphans(self.mark)
        self._line.close()


class Loggers:
    """Metric sinks of a run, with the interface of ``MetricsWriter``."""

    def __init__(self, on_event: Callable[[str, str], None]) -> None:
        self._on_event = on_event
        self._next_s = 0.0
        self._now = (0.0, 0)
        self._tags: dict[str, str] = {}
        self._sinks: list[Sink] = []

    def start(self, plan: RunPlan, run_dir: RunDir) -> None:
        """Starts the processes of the run's sinks."""
        names = plan.config.logging.sinks
        known = read_run(run_dir.path).get("sinks") if names else None
        for name in dict.fromkeys(names):
            opening = _opening(name, plan, run_dir.path, known)
            try:
                self._sinks.append(Sink(opening, run_dir, self._on_event))
            except OSError as error:
                self._on_event(
                    "warning", f"{name} is disabled, because it could not be started; the run continues: {error}"
                )

    def sample(self, t: float, step: int, values: Mapping[str, float]) -> None:
        """One sample of all metrics, if one is due; ``t`` is wall time of the run."""
        self._now = (t, step)
        if self._sinks and t >= self._next_s:
            self._next_s = t + min(t * _SHARE_OF_RUN, _MAX_BETWEEN_S)
            self.write(t, step, values)
        self.poll()

    def poll(self) -> None:
        """Reads what the sinks answer, and switches off those that do not."""
        for sink in self._sinks:
            sink.poll()

    def write(self, t: float, step: int, values: Mapping[str, float]) -> None:
        self._put(t, step, values={self._tag(name): value for name, value in values.items()})

    def evaluation(self, row: EvaluationRow) -> None:
        values = {name: float(value) for name, value in row._asdict().items() if name not in ("t", "env_steps")}
        self._put(row.t, row.env_steps, values={f"Evaluation/{name}": value for name, value in values.items()})

    def event(self, t: float, level: str, source: str, text: str) -> None:
        self._put(t, self._now[1], event=(level, clean(text if source == "supervisor" else f"{source}: {text}", 2000)))

    def close(self, *, failed: bool, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ends all sinks; waits while they answer, for at most a minute, and no longer than ``hurry()`` is false."""
        end_all(self._sinks, self._on_event, failed=failed, hurry=hurry)

    def _put(self, t: float, step: int, **row: Any) -> None:
        for sink in self._sinks:
            sink.put({"moment": (time.time() - max(0.0, self._now[0] - t), t, step), **row})

    def _tag(self, series: str) -> str:
        """``updates_per_s`` -> ``Speed/updates_per_s``: the sinks draw one group of charts for each beginning."""
        if series not in self._tags:
            metric = TABLE.by_name(series)
            group = metric.chart.group if metric.chart else RETURN if metric.unit == "return" else _UNCHARTED
            self._tags[series] = f"{group}/{series}"
        return self._tags[series]


def end_all(sinks: list[Any], on_event: Callable[[str, str], None], *, failed: bool, hurry: Callable[[], bool]) -> None:
    """Ends sinks as in ``Loggers.close``, and removes them from the list."""
    for sink in sinks:
        sink.end(failed=failed)
    started_s, reported = AWAKE(), False
    while (left := [sink for sink in sinks if sink.open]) and not hurry():
        readable([sink.fileno() for sink in left], 0.05)
        waited_s = AWAKE() - started_s
        if waited_s > _LONGEST_CLOSE_S:
            break
        if waited_s > _REPORT_AFTER_S and not reported:
            reported = True
            names = " and ".join(sink.name for sink in left)
            on_event("info", f"waiting for {names} to end; Ctrl-C skips this")
        for sink in left:
            sink.poll()
    for sink in sinks:
        sink.late()
        sink.reap()
    sinks.clear()


def setting_values(plan: RunPlan) -> dict[str, Any]:
    """Every setting of a run, as ``section.field`` -> value."""
    return {
        f"{part}.{field}": list(value) if isinstance(value, tuple) else value
        for part, field, value in iterate(plan.config)
    }


def _opening(name: str, plan: RunPlan, run_dir: Path, known: Any) -> dict[str, Any]:
    stored = known.get(name) if isinstance(known, dict) else None
    metadata = {key: str(value) for key, value in versions().items() if value}
    metadata |= {key: str(value) for key, value in read_run(run_dir).items() if key in ("machine", "started")}
    metadata |= {f"reason of {key}": reason for key, reason in plan.reasons.items()}
    return {
        "sink": name,
        "run_dir": os.path.abspath(run_dir),
        "project": plan.config.logging.project,
        "settings": setting_values(plan),
        "facts": metadata,
        "known": {str(key): str(value) for key, value in stored.items()} if isinstance(stored, dict) else {},
    }
