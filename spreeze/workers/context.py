"""A worker's link to its supervisor: heartbeat, flags, slots, and a one-way pipe for messages."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spreeze.envs.info_numbers import InfoNumbers
from spreeze.errors import WorkerError, described
from spreeze.metrics.table import TABLE
from spreeze.transport import status_table
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import ParameterStore, WeightsStore
from spreeze.workers.roles import ROLES, Address, Phase

_PAUSE_S = 0.01  # sleep while the governor pauses a sampler: it resumes soon and takes almost no CPU time
_MAX_MESSAGE_BYTES = 4096  # A pipe write of at most PIPE_BUF bytes is atomic: a message arrives whole or not at all
_MAX_UNREAD_BYTES = 16_384 if select.PIPE_BUF >= _MAX_MESSAGE_BYTES else 8_192
"""Unread bytes in the pipe, of at least 64 KiB (macOS: 16), above which no metrics are sent: events have to fit."""
_INFO_S = 1.0
_ENVELOPE_BYTES = 200  # longest text of a message without its entries


def open_weights(folder: Path) -> ParameterStore:
    """The published weights of the learner whose files are in ``folder``, for it and for the workers that read them.

    For weights that travel in another way, return another store here. Commands and the Python interface read the files.
    """
    return WeightsStore(folder / "weights")


def open_values(folder: Path) -> WeightsStore:
    """Values published beside the weights, for the episodes that the evaluator keeps."""
    return WeightsStore(folder / "values")


class WorkerContext:
    """A worker body's view of the run. None of its calls waits for another process."""

    takes_turns = False  # True where several workers take turns in one process: none of them may wait

    def __init__(
        self, address: Address, status: StatusTable, row: int, message_fd: int | None, errors_dir: Path | None = None
    ) -> None:
        self.address, self.name, self.status = address, address.name, status
        self.run_dir = Path() if errors_dir is None else errors_dir.parent
        self._group = status.group(address.group)
        self.slots = status.slots(row)
        self.earlier_counters: list[float] = self.slots.tolist()
        """The counters as an earlier process of this worker left them: slots outlive a process, so counts go on."""
        self._control, self._events = status.control(row), status.events(row)
        self._slot_index = {name: i for i, name in enumerate(TABLE.slots.get(ROLES[address.role].slots, ()))}
        self._message_fd, self._errors_dir = message_fd, errors_dir
        self._unsent: dict[str, float] = {}
        self._fraction, self._paused_until_s, self._next_info_s = 1.0, 0.0, 0.0
        self._control[status_table.PID] = os.getpid()

    def heartbeat(self, phase: Phase) -> None:
        """Signals that the worker is alive and in this phase; costs two stores, and while recording two more."""
        self._control[status_table.PHASE] = int(phase)
        self._control[status_table.HEARTBEAT] += 1
        if self.status.header[status_table.RECORDING]:
            noted = int(self._events[0])
            self._events[1 + noted % status_table.MAX_EVENTS] = time.monotonic_ns() << status_table.PHASE_BITS | int(
                phase
            )
            self._events[0] = noted + 1

    @property
    def stopping(self) -> bool:
        """True once the supervisor has asked all workers to stop."""
        return bool(self.status.header[status_table.STOP])

    @property
    def weights_counter(self) -> int:
        """Changes whenever the group's learner publishes new weights; the file is authoritative."""
        return int(self._group[status_table.WEIGHTS_COUNTER])

    def weights_published(self) -> None:
        """Announces new weights to the group; called by its learner only."""
        self._group[status_table.WEIGHTS_COUNTER] += 1

    def header_word(self, word: int) -> int:
        """A count or flag of the header, which the supervisor writes: see ``transport.status_table``."""
        return int(self.status.header[word])

    @property
    def paused_s(self) -> float:
        """Time that this session was paused so far [s]."""
        return self.header_word(status_table.PAUSED_MS) / 1000

    @property
    def sampler_share(self) -> float:
        """Share of its time that this sampler may work: 1, 0, or in between for the last active one."""
        group = self._group
        active, samplers = int(group[status_table.ACTIVE_SAMPLERS]), int(group[status_table.SAMPLERS])
        if active >= samplers:
            return 1.0
        beyond = (self.address.index - int(group[status_table.FIRST_SAMPLER])) % samplers - active
        return 1.0 if beyond < 0 else 0.0 if beyond > 0 else int(group[status_table.SLOWED_SHARE]) / 1000

    def pause_if_requested(self, now_s: float) -> bool:
        """True if the governor pauses this sampler at ``perf_counter`` time ``now_s``; it has slept briefly.

        A pause does not count as waiting for the limiter or the learner.
        """
        self._fraction = fraction = self.sampler_share
        if fraction >= 1.0 or (fraction > 0.0 and now_s >= self._paused_until_s):
            return False
        self.heartbeat(Phase.WAIT)
        time.sleep(_PAUSE_S if fraction <= 0.0 else min(_PAUSE_S, self._paused_until_s - now_s))
        return True

    def account_work(self, since_s: float) -> None:
        """Notes that the sampler has worked, after which it may have to pause."""
        if 0.0 < self._fraction < 1.0:
            now_s = time.perf_counter()
            self._paused_until_s = now_s + (now_s - since_s) * (1.0 - self._fraction) / self._fraction

    def post(self, **values: float) -> None:
        """Stores numbers into slots by name (see ``metrics.table``); a WorkerError if there is none."""
        try:
            for name, value in values.items():
                self.slots[self._slot_index[name]] = value
        except KeyError as error:
            raise WorkerError(
                f"the {self.address.role} posts {error.args[0]!r}, which is not in spreeze/metrics/table.py; add "
                "a row to METRICS"
            ) from None

    def report(self, metrics: Mapping[str, float]) -> None:
        """Stores the metrics that have slots, and sends the others, the gauges of an algorithm, in one message.

        Metrics that do not fit into the pipe or one message go with the next report, with their values at that time.
        """
        sent = {
            name: float(value)
            for name, value in metrics.items()
            if (row := TABLE.get(name)) is not None and row.is_sent
        }
        self.post(**{name: value for name, value in metrics.items() if name not in sent})
        self._unsent |= sent
        for part in _in_messages({"values": self._unsent}):
            if not self._has_room():
                break
            self.send("metrics", **part)
            self._unsent = {name: value for name, value in self._unsent.items() if name not in part["values"]}

    def episode(self, episode_return: float, length: int, success: bool | None) -> None:
        """Sends an episode to the run's callbacks, if one of them needs episodes and the pipe has room."""
        if self.status.header[status_table.EPISODE_REPORTS] and self._has_room():
            self.send("episode", numbers=(episode_return, length, success))

    def report_info(self, info: InfoNumbers, now_s: float) -> None:
        """Sends the numbers in ``info`` once a second, if the pipe has room; ``now_s``: perf_counter."""
        if now_s < self._next_info_s or not self._has_room():
            return
        self._next_info_s = now_s + _INFO_S
        sums = info.take()
        for part in () if sums is None else _in_messages(sums):
            self.send("info", **part)

    def _has_room(self) -> bool:
        """False while so much is unread that metrics could crowd out other messages."""
        unread = bytearray(4)
        with contextlib.suppress(OSError):
            if self._message_fd is not None:
                fcntl.ioctl(self._message_fd, termios.FIONREAD, unread)
        return int.from_bytes(unread, sys.byteorder) < _MAX_UNREAD_BYTES

    def slot_values(self) -> dict[str, float]:
        """The values of this worker's slots in the status table, by name."""
        return {name: float(self.slots[i]) for name, i in self._slot_index.items()}

    def send(self, kind: str, **fields: Any) -> None:
        """Sends one message, or drops it when the pipe is full or gone."""
        if self._message_fd is None:
            return
        for limit in (_MAX_MESSAGE_BYTES, 1000, 250, 50):  # a character may take twelve bytes
            cut = {key: value[:limit] if isinstance(value, str) else value for key, value in fields.items()}
            line = json.dumps({"kind": kind, "from": self.name, **cut}).encode() + b"\n"
            if len(line) <= _MAX_MESSAGE_BYTES:
                break
        with contextlib.suppress(OSError):
            os.write(self._message_fd, line)

    def event(self, level: str, text: str) -> None:
        self.send("event", level=level, text=text[:500])

    def env_error(self, where: str, error: Exception, count: int, **effect: str) -> None:
        """Reports an error of an environment (``event_text``); ``count``: its number in this process."""
        if self._errors_dir is not None:
            write_error(self._errors_dir, self.name, error, f"environment-{count}")
        self.event("warning", event_text(where, error, count, **effect))

    def saving(self, left_bytes: int) -> None:
        """Signals that a checkpoint is in progress, with this many bytes left to write and check."""
        self.heartbeat(Phase.CHECKPOINT)
        self.post(checkpoint_left_bytes=left_bytes)

    def sleep(self, seconds: float) -> None:
        """Sleeps in short pieces, so that the heartbeat continues and a stop is noticed at once."""
        for _ in self.pauses(seconds):
            pass

    def pauses(self, seconds: float, until: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Yields between the pieces of ``sleep``, so that workers can take turns; ends early if ``until()``."""
        end = time.monotonic() + seconds
        while not self.stopping and not until():
            self.heartbeat(Phase.WAIT)
            left = end - time.monotonic()
            if left <= 0:
                return
            if not self.takes_turns:
                time.sleep(min(left, 0.1))
            yield

    def close(self) -> None:
        self.slots = self._control = self._events = self._group = None  # type: ignore[assignment]
        if self._message_fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._message_fd)
            self._message_fd = None
        self.status.close()


def _in_messages(values: Mapping[str, Mapping[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """The entries of all dictionaries in ``values``, as many in each part as one message holds."""
    parts: list[dict[str, dict[str, Any]]] = []
    left_bytes = 0
    for kind, entries in values.items():
        for name, value in entries.items():
            size = len(json.dumps({name: value}))
            if size > left_bytes:
                parts.append({})
                left_bytes = _MAX_MESSAGE_BYTES - _ENVELOPE_BYTES
            parts[-1].setdefault(kind, {})[name] = value
            left_bytes -= size
    return parts


_LONGEST_PAUSE_S = 60.0


def pause_s(failures: int) -> float:
    """Pause before the next attempt after that many consecutive failures: 1, 2, 4 .. 60 s."""
    return min(_LONGEST_PAUSE_S, 2.0 ** min(failures - 1, 10))


def event_text(where: str, error: BaseException, count: int, effect: str = "its episode is lost") -> str:
    """The message for an error of an environment, with its effect."""
    so_far = "" if count <= 1 else f"; {count} such errors so far"
    return f"{where}: {described(error)}; {effect}{so_far}"


def write_error(folder: Path, process: str, error: BaseException, kind: str = "") -> dict[str, Any]:
    """Writes an error and its traceback into a run's ``errors`` folder; ``kind`` tells those of one process apart."""
    text = "".join(traceback.format_exception(error))
    record = {"process": process, "error": described(error, 1000), "traceback": text[-8000:]}
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        name = "-".join(part for part in (process, str(os.getpid()), kind) if part)
        (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    return record
