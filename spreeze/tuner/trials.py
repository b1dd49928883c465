"""Worker processes that run only to be measured: paused while others are, watched, and ended without a trace."""
from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from spreeze.config.layers import Layer
from spreeze.errors import ConfigError, ResourceError, WorkerError
from spreeze.machine.orphan_cleanup import OrphanWatch
from spreeze.modes.spreeze import open_memory, worker_specs
from spreeze.run_directory import SUBDIRECTORIES
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import RunContext, WorkerSpec
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.supervisor import ProcessSupervisor, private_memory_bytes
from spreeze.transport import status_table as words
from spreeze.transport.status_table import StatusTable
from spreeze.tuner.problem import LearnerSetting
from spreeze.workers.learn.synthetic_replay import fill_with_synthetic_rows

_MOST_FAILURES = 1
_LOOK_S = 0.05
_MEMORY_EVERY_S = 0.25
_PREFIX = "spreeze-tune-"


class Window(NamedTuple):
    """What was counted in one window."""

    env_steps_per_s: float
    updates_per_s: float
    cpu_share: float
    """Processor time of all workers over that of the usable cores."""


class TrialFailed(Exception):
    """These settings cannot run here; the text says why. Data for the tuner, not an error."""


class TrialProcesses:
    """Some workers on a status table; nothing of them is left after the stack that they were started on has closed."""

    def __init__(
        self, stack: contextlib.ExitStack, run_dir: Path, status: StatusTable, rows: int, *, shared_bytes: int,
        memory_cap_bytes: int, interrupts: Interrupts,
    ) -> None:
        """Starts nobody yet.

        Args:
            stack: ends the workers when it closes, before what was put on it earlier.
            run_dir: where their logs go.
            status: their slots and heartbeats.
            rows: of the status table.
            shared_bytes: shared memory that counts as theirs.
            memory_cap_bytes: what all of it may take.
            interrupts: the user's wish to stop.
        """
        nonce = secrets.token_hex(8)
        watch = OrphanWatch(nonce)
        stack.callback(watch.end)
        watch.start()
        run_context = RunContext(run_dir=run_dir, status_fd=status.block.fd, status_rows=rows, nonce=nonce)
        self._group = ProcessSupervisor(run_context, status, on_event=lambda level, text: None)
        stack.callback(self._group.stop, hurry=lambda: True, on_messages=lambda messages: None)
        self._shared_bytes, self._cap_bytes, self._interrupts = shared_bytes, memory_cap_bytes, interrupts
        self.memory_bytes: int | None = None
        """Most that all of it took: private memory of the processes, and what they share."""
        self._looked_s = 0.0

    def add(self, spec: WorkerSpec) -> None:
        """Starts a worker and returns at once.

        Raises:
            OSError: it cannot be started.
        """
        self._group.add(spec)

    def why(self) -> str:
        """The first error that a worker reported."""
        return ": ".join(self._group.first_error) if self._group.first_error else "no worker reported an error"

    def pause(self) -> None:
        """Stops all processes where they are."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for post in self._group.handles.values():
            if post.process is not None:
                post.process.signal_group(number)

    def cpu_s(self) -> float:
        """Processor time of all so far."""
        total = 0.0
        for pid in self._group.pids().values():
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
        return total

    def pass_time(self, seconds: float) -> None:
        """Lets time pass, with an eye on the workers; raises as ``look`` does."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.look(min(left, _LOOK_S))

    def look(self, seconds: float = _LOOK_S) -> None:
        """Waits, then sees to workers, memory and the user's wish to stop.

        Raises:
            Unfit: a worker keeps failing, or too much memory is taken.
            KeyboardInterrupt: the user asked to stop.
        """
        self._group.wait(seconds)
        if self._interrupts.asked:
            raise KeyboardInterrupt
        try:
            self._group.watch()
        except WorkerError as error:
            raise TrialFailed(str(error)) from None
        failures = [len(post.failures) for post in self._group.handles.values() if not post.spec.role.learns]
        if self._group.handles["learner"].failures or sum(failures) > _MOST_FAILURES:
            raise TrialFailed(self.why())
        now = time.monotonic()
        if now - self._looked_s >= _MEMORY_EVERY_S:
            self._looked_s = now
            taken = self._taken_bytes()
            self.memory_bytes = max(taken, self.memory_bytes or 0)
            if taken > self._cap_bytes:
                raise TrialFailed(
                    f"out of memory: more than the {self._cap_bytes / 1e9:.1f} GB that a candidate may take"
                )

    def _taken_bytes(self) -> int:
        total = self._shared_bytes
        for pid in self._group.pids().values():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                total += sum(private_memory_bytes(one.pid) or 0 for one in (process, *process.children(recursive=True)))
        return total


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A run directory that is removed afterwards; also removes those that a killed tuner left."""
    remove_leftovers()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as path:
        for sub in SUBDIRECTORIES:
            (Path(path) / sub).mkdir()
        yield Path(path)


def remove_leftovers() -> None:
    """Removes what tuners left behind that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and not psutil.pid_exists(int(pid)) and path.stat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)


_ROWS, _ROWS_BYTES = 100_000, 128_000_000
_TICK_S = 0.2
"""A window begins and ends with an update, where one comes within this time: few updates are counted exactly."""


class TrialGroup(NamedTuple):
    """What can share one learner and its samplers."""

    learner: LearnerSetting
    envs_per_sampler: int
    samples_per_insert_min: float


class TrialRun:
    """One group; nothing of it is left after ``close``."""

    def __init__(
        self, plan: RunPlan, company: TrialGroup, samplers: int, *, usable_cores: float, memory_cap_bytes: int,
        interrupts: Interrupts,
    ) -> None:
        self.company, self.samplers = company, samplers
        self._interrupts, self._cores, self._cap_bytes = interrupts, usable_cores, memory_cap_bytes
        self._plan = plan
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        """Starts all processes and returns at once.

        Raises:
            Unfit: no room, or settings that contradict each other.
        """
        try:
            plan = _measured_plan(self._plan, self.company, self.samplers, self._cap_bytes)
            run_dir = self._stack.enter_context(folder())
            self._status, (self._ring,) = self._stack.enter_context(open_memory(plan, run_dir, self.samplers + 1))
            fill_with_synthetic_rows(self._ring, plan.spec)
            self._troupe = TrialProcesses(
                self._stack, run_dir, self._status, self.samplers + 1, shared_bytes=self._ring.spec.size_bytes,
                memory_cap_bytes=self._cap_bytes, interrupts=self._interrupts,
            )
            for spec in worker_specs(plan, run_dir, [self._ring], time.monotonic()).values():
                if spec.role.learns or spec.role.steps:
                    self._troupe.add(spec)
        except (ResourceError, ConfigError, OSError) as error:
            raise TrialFailed(str(error)) from None

    def begin(self, within_s: float) -> None:
        """Waits until the learner learns and every sampler samples, then pauses all.

        Raises:
            Unfit: they do not, or a worker keeps failing.
            KeyboardInterrupt: the user asked to stop.
        """
        end = time.monotonic() + within_s
        while (late := self._idle()) is not None:
            self._troupe.look()
            if time.monotonic() > end:
                raise TrialFailed(f"{late} within {within_s:.0f} s; {self._troupe.why()}")
        self.pause()

    def _idle(self) -> str | None:
        """Who has not begun yet; None once all are at work."""
        idle = [] if self._ring.sampled > 0 else ["the learner took no update"]
        steps = [self._status.named_slots(row, "sampler")["env_steps"] for row in range(self.samplers)]
        idle += [f"sampler-{row} took no env step" for row, taken in enumerate(steps) if taken <= 0]
        return ", ".join(idle) or None

    def pause(self) -> None:
        """Stops all processes where they are."""
        self._troupe.pause()

    def resume(self) -> None:
        """Lets them go on."""
        self._troupe.resume()

    @property
    def memory_bytes(self) -> int | None:
        """Most that all of it took: private memory of the processes, and replay."""
        return self._troupe.memory_bytes

    def window(self, samplers: int, settle_s: float, window_s: float) -> Window:
        """Rates with that many samplers at work, after a while to settle.

        Raises:
            Unfit: a worker keeps failing, or too much memory is taken.
            KeyboardInterrupt: the user asked to stop.
        """
        self._status.header[words.ACTIVE_SAMPLERS] = samplers
        # The limiter's count starts anew: what another number of samplers saved up must not be spent here.
        self._ring.begin_learning()
        self._troupe.pass_time(settle_s)
        first_s, first = self._edge()
        cpu_s = self._troupe.cpu_s()
        self._troupe.pass_time(window_s)
        last_s, last = self._edge()
        took_s = last_s - first_s
        used_s = self._troupe.cpu_s() - cpu_s
        return Window((last[0] - first[0]) / took_s, (last[1] - first[1]) / took_s,
                      max(0.0, used_s) / (took_s * self._cores))

    def _edge(self) -> tuple[float, tuple[float, float]]:
        """Time and counters at the next update, or after a short while without one."""
        before = counters(self._status, self.samplers)
        end = time.monotonic() + _TICK_S
        while True:
            now_s, found = time.monotonic(), counters(self._status, self.samplers)
            if found[1] != before[1] or now_s >= end:
                return now_s, found
            time.sleep(0.001)

    def close(self) -> None:
        """Ends the processes, frees memory, removes files."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _measured_plan(plan: RunPlan, company: TrialGroup, samplers: int, cap_bytes: int) -> RunPlan:
    """The same task; the learner never waits, samplers only below the asked ratio, replay is full at once."""
    learner = company.learner
    least = 4 * max(learner.batch_size, samplers * company.envs_per_sampler * (1 + plan.layout.depth))
    rows = max(min(_ROWS, _ROWS_BYTES // plan.layout.row_bytes), least)
    rows = min(rows, max(plan.config.replay.capacity, learner.batch_size), cap_bytes // 4 // plan.layout.row_bytes)
    settings = plan.settings.with_layer(Layer("tuner", {
        "replay": {
            "capacity": max(rows, 2), "samples_per_insert_min": company.samples_per_insert_min,
            "samples_per_insert_max": 1e9, "learning_starts": 1, "save": False,
        },
        "learner": dataclasses.asdict(learner),  # whole: a field left out would be measured as something else
        "sampling": {"envs_per_sampler": company.envs_per_sampler, "samplers": samplers},
        "visualizer": {"enabled": False}, "stop": {"updates": None},
    }))
    return dataclasses.replace(plan, settings=settings, samplers=samplers)


def counters(status: StatusTable, samplers: int) -> tuple[float, float]:
    """Env steps of the first ``samplers`` rows together, and the learner's updates."""
    steps = sum(status.named_slots(row, "sampler")["env_steps"] for row in range(samplers))
    return steps, status.named_slots(samplers, "learner")["updates"]
