"""A real learner and real samplers that run only to be measured, and are paused while others are."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import NamedTuple, Self

from spreeze.autotune.records import LearnerSetting
from spreeze.errors import ConfigError, ResourceError
from spreeze.modes.spreeze import open_memory, worker_specs
from spreeze.modes.troupe import Troupe, Unfit, Window, folder
from spreeze.settings import Layer
from spreeze.transport import board as words
from spreeze.transport.board import Board
from spreeze.workers.filling import fill
from spreeze.workers.interrupts import Interrupts
from spreeze.workers.plan import RunPlan

_ROWS, _ROWS_BYTES = 100_000, 128_000_000
_TICK_S = 0.2
"""A window begins and ends with an update, where one comes within this time: few updates are counted exactly."""


class Company(NamedTuple):
    """What can share one learner and its samplers."""

    learner: LearnerSetting
    envs_per_sampler: int
    samples_per_insert_min: float


class Ensemble:
    """One crew; nothing of it is left after ``close``."""

    def __init__(
        self, plan: RunPlan, company: Company, samplers: int, *, usable_cores: float, memory_cap_bytes: int,
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
            self._board, self._ring = self._stack.enter_context(open_memory(plan, run_dir, self.samplers + 1))
            fill(self._ring, plan.spec)
            self._troupe = Troupe(
                self._stack, run_dir, self._board, self.samplers + 1, shared_bytes=self._ring.spec.size_bytes,
                memory_cap_bytes=self._cap_bytes, interrupts=self._interrupts,
            )
            for spec in worker_specs(plan, run_dir, self._ring, time.monotonic()).values():
                if spec.role in ("learner", "sampler"):
                    self._troupe.add(spec)
        except (ResourceError, ConfigError, OSError) as error:
            raise Unfit(str(error)) from None

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
                raise Unfit(f"{late} within {within_s:.0f} s; {self._troupe.why()}")
        self.pause()

    def _idle(self) -> str | None:
        """Who has not begun yet; None once all are at work."""
        idle = [] if self._ring.sampled > 0 else ["the learner took no update"]
        idle += [f"sampler-{row} took no env step" for row in range(self.samplers) if self._board.slots(row)[0] <= 0]
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
        self._board.header[words.ACTIVE_SAMPLERS] = samplers
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
        before = counters(self._board, self.samplers)
        end = time.monotonic() + _TICK_S
        while True:
            now_s, found = time.monotonic(), counters(self._board, self.samplers)
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


def _measured_plan(plan: RunPlan, company: Company, samplers: int, cap_bytes: int) -> RunPlan:
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


def counters(board: Board, samplers: int) -> tuple[float, float]:
    """Env steps of the first ``samplers`` rows together, and the learner's updates."""
    steps = sum(float(board.slots(row)[0]) for row in range(samplers))
    return steps, board.named_slots(samplers, "learner")["updates"]
