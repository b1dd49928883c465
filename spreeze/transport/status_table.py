"""The status table: a small block of shared memory where workers post numbers and read flags.

Every worker has its own row (int64 control words, float64 slots). A row has one writer, every value is an aligned
8-byte store, and nothing here can block.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spreeze.config.schema import MAX_LEARNERS
from spreeze.metrics.table import TABLE
from spreeze.transport.shared_memory import ArraySpec, Handle, SharedArrays

_GROUP_WORDS, _CONTROL_WORDS = 24, 16
MAX_EVENTS = 1007
_LINE_WORDS = 8

STOP, VISUALIZER_PAUSED, WEIGHTS_COUNTER, ACTIVE_SAMPLERS, SLOWED_SHARE, FIRST_SAMPLER, SAMPLERS = 2, 3, 4, 5, 6, 7, 8
EVALUATION_REQUESTS, CHECKPOINT_REQUESTS = 9, 10
PAUSED_MS, RECORDING, STARTING_MS, EPISODE_REPORTS, ENV_ARGS = 11, 12, 13, 14, 15
ROLLBACKS, RETUNED, BATCH_SIZE, LEARNER_THREADS, MIN_PER_INSERT, MAX_PER_INSERT = 16, 17, 18, 19, 20, 21
KEPT_PER_INSERT = 22
"""Words of the header. ``STARTING_MS`` is the time until the first env step where environments are slow to start;
``EPISODE_REPORTS`` is 1 where samplers report each episode, ``ENV_ARGS`` counts changes of the environments' arguments,
``ROLLBACKS`` counts falls of the return after which the learner rolls back to its best checkpoint; ``RETUNED`` counts
changes of the five words after it, which the tuner puts in force (``RetunedSettings``); ``WEIGHTS_COUNTER`` to
``SAMPLERS`` belong to a group (see ``StatusTable.group``).

The supervisor writes them; only ``WEIGHTS_COUNTER`` is written by the group's learner. Of the group's ``SAMPLERS``
samplers, counted cyclically from ``FIRST_SAMPLER``, ``ACTIVE_SAMPLERS`` work all of the time, the next one works
``SLOWED_SHARE`` thousandths of it, and the others are paused.
"""
HEARTBEAT, PHASE, PID = 0, 1, 2  # control words of a row, written by its worker
PHASE_BITS = 4  # low bits of an event, which hold the phase; the others hold the monotonic time [ns]


class RetunedSettings(NamedTuple):
    """Settings that the tuner changes while a run trains."""

    batch_size: int
    learner_threads: int
    samples_per_insert_min: float  # bounds of the rate limiter, per inserted row
    samples_per_insert_max: float
    kept_per_insert: float = 0.0
    """Samples per insert below which rows of vectors are dropped, so that measurements do not fill replay."""


@dataclass(frozen=True, kw_only=True)
class StatusHandle(Handle):
    """Carries a ``StatusTable``."""

    rows: int
    slots: int  # of a row

    def fields(self) -> tuple[ArraySpec, ...]:
        return (
            ArraySpec("header", (MAX_LEARNERS * _GROUP_WORDS,), "int64"),
            ArraySpec("control", (self.rows, _CONTROL_WORDS), "int64"),
            ArraySpec("slots", (self.rows, self.slots), "float64"),
            ArraySpec("events", (self.rows, 1 + MAX_EVENTS), "int64"),
        )

    def attach(self) -> StatusTable:
        return StatusTable(self, SharedArrays.attach(self.fds[0], self.fields()))


class StatusTable:
    """Typed view of the block, created by the supervisor and attached by descriptor in the workers."""

    def __init__(self, handle: StatusHandle, arrays: SharedArrays) -> None:
        self.handle, self._arrays = handle, arrays
        self.header = arrays["header"]

    @classmethod
    def create(cls, num_rows: int) -> StatusTable:
        lines = -(-max(map(len, TABLE.slots.values())) // _LINE_WORDS)  # whole cache lines: a row has one writer
        handle = StatusHandle(fds=(), rows=num_rows, slots=lines * _LINE_WORDS)
        arrays = SharedArrays.create("spreeze-status", handle.fields())
        status = cls(dataclasses.replace(handle, fds=(arrays.fd,)), arrays)
        for group in range(MAX_LEARNERS):
            status.group(group)[[ACTIVE_SAMPLERS, SAMPLERS]] = 2**31
        return status

    def group(self, group: int) -> np.ndarray:
        """The header's int64 words of a group; those of group 0 come first."""
        return self.header[group * _GROUP_WORDS : (group + 1) * _GROUP_WORDS]

    def retune(self, settings: RetunedSettings) -> None:
        """Puts settings in force: workers read them as soon as they see that ``RETUNED`` has changed."""
        batch_size, threads, *per_insert = settings
        scaled = [round(1e6 * value) for value in per_insert]
        self.header[BATCH_SIZE : KEPT_PER_INSERT + 1] = batch_size, threads, *scaled
        self._arrays.in_order()
        self.header[RETUNED] += 1

    def retuned_settings(self) -> RetunedSettings:
        """The settings in force, once ``RETUNED`` is above 0."""
        self._arrays.in_order()
        batch_size, threads, *per_insert = self.header[BATCH_SIZE : KEPT_PER_INSERT + 1].tolist()
        return RetunedSettings(batch_size, threads, *(value / 1e6 for value in per_insert))

    def control(self, row: int) -> np.ndarray:
        """int64 control words of a row."""
        return self._arrays["control"][row, :]

    def slots(self, row: int) -> np.ndarray:
        """float64 slots of a row, in the order of ``MetricTable.slots`` of its role."""
        return self._arrays["slots"][row, :]

    def events(self, row: int) -> np.ndarray:
        """int64 [1 + MAX_EVENTS]: number of events that the worker noted while ``RECORDING``, then a ring of these."""
        return self._arrays["events"][row, :]

    def named_slots(self, row: int, role: str) -> dict[str, float]:
        """A copy of a row's slots by name."""
        names = TABLE.slots.get(role, ())
        return dict(zip(names, self.slots(row)[: len(names)].tolist(), strict=True))

    def close(self) -> None:
        del self.header
        self._arrays.close()
