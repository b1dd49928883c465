"""Worker processes that run only to be measured: paused while others are, watched, and ended without a trace."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import psutil

from spreeze.config.layers import Layer, Values
from spreeze.config.section import NO_LIMIT
from spreeze.errors import ConfigError, ResourceError, WorkerError
from spreeze.machine.awake import AWAKE
from spreeze.machine.logs import LogKeeper
from spreeze.machine.utilisation import tree_memory_bytes
from spreeze.machine.watcher import OrphanWatch
from spreeze.modes import assemble
from spreeze.run_directory import scratch_folder
from spreeze.runtime.assembly import Assembly, assembled
from spreeze.runtime.launcher import RunContext
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.worker_pool import WorkerPool
from spreeze.transport import status_table
from spreeze.tuner.problem import (
    BATCH,
    ENVS,
    JOINT,
    ROLLOUT,
    ROLLOUT_SAMPLERS,
    SAMPLERS,
    OnResult,
    Setting,
    TrialResult,
    too_much_memory,
)

_MAX_FAILURES = 1
_FROM_OUTSIDE = ("silent for", "ended by SIGKILL")
"""Prefixes of worker failures that a lack of time or memory also causes."""
_WATCH_S = 0.05
_MEMORY_EVERY_S = 0.25


class TrialFailed(Exception):
    """Signals that settings cannot run on this machine, with the reason. Data for the tuner, not an error."""

    def __init__(self, why: str, *, starved: bool = False) -> None:
        """``starved``: for lack of time or memory, as ``TrialResult.starved``."""
        super().__init__(why)
        self.starved = starved


_EDGE_S = 0.1  # Time to align a window with updates, about.


class Pace(NamedTuple):
    """Measurement windows of a kind of trial: many short ones, since the speed of a shared machine varies."""

    repeats: int
    settle_s: tuple[float, float]  # least and most time to wait before a window, and length of the window
    window_s: tuple[float, float]

    def divided(self, seconds: float, candidates: int) -> tuple[float, float]:
        """(time to wait, length of the window) with which ``candidates`` are done within ``seconds``."""
        each_s = seconds / (self.repeats * max(1, candidates))
        settle_s = min(self.settle_s[1], max(self.settle_s[0], 0.25 * (each_s - _EDGE_S)))
        return settle_s, min(self.window_s[1], max(self.window_s[0], each_s - _EDGE_S - settle_s))


ROWS, ROWS_BYTES = 100_000, 128_000_000  # most rows and bytes of a trial's replay
_ROLLOUTS, _LONGEST_ROLLOUTS_S = 2, 4.0
"""Rollouts after which all workers have been busy, also the length of a window, and the longest time for them in a
window."""
_TURNS_IN_WINDOW, _LONGEST_WINDOW_S = 3, 3.0
"""Turns of a sampler (a step of each of its environments) in a window, and the longest time for them."""


class TrialKind(NamedTuple):
    """A kind of measurement: the plan of its trials, and how long their windows are."""

    trial: str
    pace: Pace
    plan_of: Callable[[RunPlan, Setting, int], RunPlan]
    """The plan of a trial: the same task with a setting, within that many bytes of memory."""
    rounds: int
    """Updates, or swaps of rollouts where samplers and learner are in step, after which all have been at work."""
    edge_s: float
    """A window starts and ends with an update or a swap if one comes within this time: few are counted exactly."""
    shares: bool = False  # settings that differ only in the number of samplers share a trial
    learns: bool = True  # True if there is a learner; else only samplers, which nothing limits


class Stopping(Protocol):
    """Stop condition of measurements: the user's ``Interrupts``, or the end of a run."""

    @property
    def stop_requested(self) -> bool: ...


class Windows(abc.ABC):
    """Measures candidates on workers that run, a window each."""

    run: Assembly
    edge_s: float  # a window starts and ends with an update or a swap if one comes within this time

    def __init__(self, usable_cores: float, interrupts: Stopping) -> None:
        self._cores, self._interrupts = usable_cores, interrupts

    @abc.abstractmethod
    def _prepare(self, setting: Setting) -> None:
        """Sets the running workers to a candidate's setting."""

    @abc.abstractmethod
    def _watch(self, seconds: float) -> None:
        """Waits, then checks the workers and for a stop request; raises as ``measure`` does."""

    @abc.abstractmethod
    def _pids(self) -> Iterable[int]:
        """Processes of the workers."""

    def _disturbances(self) -> object:
        """A value that changes with each event that spoils a window: suspension of the process (Ctrl-Z, sleep)."""
        return AWAKE.slept_s

    def _mark(self) -> float:
        """A number that changes with each update."""
        return self.run.counters()[1]

    def measure(self, candidate: TrialResult, settle_s: float, window_s: float) -> None:
        """Measures one window of a candidate after ``settle_s``, again if disturbed; TrialFailed if workers fail."""
        disturbed = True
        while disturbed:
            before = self._disturbances()
            self._prepare(candidate.setting)
            self._pass_time(settle_s)
            first_s, first = self._edge()
            cpu_s = self._cpu_s()
            self._pass_time(window_s)
            last_s, last = self._edge()
            disturbed = self._disturbances() != before
        took_s = last_s - first_s
        candidate.env_steps_per_s += ((last[0] - first[0]) / took_s,)
        candidate.updates_per_s += ((last[1] - first[1]) / took_s,)
        candidate.cpu_share += (max(0.0, self._cpu_s() - cpu_s) / (took_s * self._cores),)

    def _edge(self) -> tuple[float, tuple[float, float]]:
        """Time and counters at the next update or swap, or after a short while without one."""
        before, end = self._mark(), AWAKE() + self.edge_s
        while self._mark() == before and AWAKE() < end:
            time.sleep(0.001)
            if self._interrupts.stop_requested:
                raise KeyboardInterrupt
        return AWAKE(), self.run.counters()

    def _pass_time(self, seconds: float) -> None:
        end = AWAKE() + seconds
        while (left := end - AWAKE()) > 0:
            self._watch(min(left, _WATCH_S))

    def _cpu_s(self) -> float:
        total = 0.0
        for pid in self._pids():
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
        return total


class Trial(contextlib.ExitStack, Windows):
    """The workers of a mode on settings that share them. Nothing is left once the stack is closed."""

    _looked_s = _swap_s = 0.0
    _seen = 0

    def __init__(
        self,
        kind: TrialKind,
        plan: RunPlan,
        candidates: list[TrialResult],
        finish: OnResult,
        *,
        usable_cores: float,
        memory_cap_bytes: int,
        interrupts: Stopping,
        step_us: float | None = None,
    ) -> None:
        """``finish`` gets each candidate once it has all of its windows, or has failed."""
        contextlib.ExitStack.__init__(self)
        Windows.__init__(self, usable_cores, interrupts)
        self.candidates, self._finish, self._kind, self._plan = candidates, finish, kind, plan
        self._cap_bytes = memory_cap_bytes
        self._setting = max((candidate.setting for candidate in candidates), key=lambda one: one.get(SAMPLERS, 0))
        turn_s = self._setting.get(ENVS, 0) * (step_us or 0.0) / 1e6
        self.min_window_s = min(_TURNS_IN_WINDOW * turn_s, _LONGEST_WINDOW_S)
        """Shortest time of a window that is meaningful."""
        self.edge_s = kind.edge_s

    def start(self) -> None:
        """Starts all processes and returns at once; TrialFailed without room, or if settings contradict each other."""
        try:
            run_dir = self.enter_context(scratch_folder("spreeze-tune-"))
            plan = self._kind.plan_of(self._plan, self._setting, self._cap_bytes)
            self.run = run = self.enter_context(assembled(assemble, plan, run_dir, time.monotonic()))
            for data in run.data if self._kind.learns else ():
                data.fill(plan.spec)
            nonce = secrets.token_hex(8)
            logs = self.enter_context(LogKeeper())
            self.enter_context(OrphanWatch(nonce))
            way = self._plan.config.tuning.give_way
            context = RunContext(run_dir=run_dir, status=run.status, nonce=nonce, gives_way=way, logs=logs)
            self._workers = WorkerPool(context, on_event=lambda level, text: None)
            self.callback(self._workers.stop, hurry=lambda: True, on_messages=lambda messages: None)
            for spec in run.specs.values():
                if spec.role.steps or (self._kind.learns and (spec.role.learns or spec.role.infers)):
                    self._workers.add(spec)
        except (ResourceError, ConfigError, OSError) as error:
            raise TrialFailed(str(error), starved=not isinstance(error, ConfigError)) from None

    def _late(self) -> str | None:
        late, rounds = list[str](), self._kind.rounds
        swaps = [data.swaps for data in self.run.data if data.swaps is not None]
        if self._kind.learns and swaps:
            self._note_pace(swaps[0])
            late += [f"{done} rollouts" for done in swaps if done < rounds]
        elif self._kind.learns and (updates := self.run.counters()[1]) < rounds:
            late.append(f"the learner took {updates:.0f} updates")
        samplers = [name for name, spec in self.run.specs.items() if spec.role.steps]
        idle = [name for name in samplers if self.run.slots(self.run.specs[name])["env_steps"] <= 0]
        return ", ".join([*late, *(f"{name} did no env step" for name in idle)]) or None

    def _note_pace(self, done: int) -> None:
        """Makes windows, and the time for their edges, as long as rollouts take."""
        now = time.monotonic()
        if done == self._seen:
            return
        if self._seen > 0:  # the first one holds the imports as well
            rollout_s = (now - self._swap_s) / (done - self._seen)
            self.edge_s = max(1.0, 1.5 * rollout_s)
            self.min_window_s = min(_ROLLOUTS * rollout_s, _LONGEST_ROLLOUTS_S)
        self._seen, self._swap_s = done, now

    def _mark(self) -> float:
        """A number that changes with each update or swap; without a learner, with each env step."""
        swaps = self.run.data[0].swaps if self._kind.learns else None
        return self.run.counters()[self._kind.learns] if swaps is None else swaps

    def _prepare(self, setting: Setting) -> None:
        if self._kind.shares:
            self.run.status.header[status_table.ACTIVE_SAMPLERS] = setting[SAMPLERS]
            for data in self.run.data:
                data.reset_counts()

    def attempt(self, act: Callable[[], None]) -> None:
        """Runs ``act`` for all remaining candidates; a failure becomes theirs and ends the trial."""
        if not self.candidates:
            return
        try:
            act()
        except TrialFailed as failed:
            self.close()
            for candidate in list(self.candidates):
                candidate.fail(str(failed), starved=failed.starved)
                self.finish(candidate)

    def finish(self, candidate: TrialResult) -> None:
        self.candidates.remove(candidate)
        self._finish(candidate)

    def begin(self, within_s: float) -> None:
        """Waits until every worker has worked, then pauses all; raises as ``measure`` does."""
        end = AWAKE() + within_s
        while (late := self._late()) is not None:
            self._watch(_WATCH_S)
            if AWAKE() > end:
                raise self._failed(f"{late} within {within_s:.0f} s; {self._why()}")
        self._workers.signal_all(signal.SIGSTOP)

    def resume_workers(self) -> None:
        """After ``begin``, which stops all."""
        self._workers.signal_all(signal.SIGCONT)

    def take_turn(self, number: int, settle_s: float, window_s: float) -> None:
        """One window of each candidate, forward and backward in turn; then the workers are stopped again."""
        self.resume_workers()
        for candidate in self.candidates[:: 1 if number % 2 == 0 else -1]:
            self.measure(candidate, settle_s, max(window_s, self.min_window_s))
            if len(candidate.cpu_share) == self._kind.pace.repeats:
                self.finish(candidate)
        self._workers.signal_all(signal.SIGSTOP)

    def _watch(self, seconds: float) -> None:
        self._workers.wait(seconds)
        if self._interrupts.stop_requested:
            raise KeyboardInterrupt
        try:
            self._workers.watch()
        except WorkerError as error:
            raise self._failed(str(error)) from None
        failed = [handle for handle in self._workers.handles.values() for _ in handle.failures]
        if len(failed) > _MAX_FAILURES or any(handle.spec.role.learns for handle in failed):
            raise self._failed(self._why())
        if time.monotonic() - self._looked_s >= _MEMORY_EVERY_S:
            self._looked_s = time.monotonic()
            taken = sum(map(tree_memory_bytes, self._pids()))
            taken += sum(data.size_bytes for data in self.run.data)
            for candidate in self.candidates:
                candidate.memory_bytes = max(taken, candidate.memory_bytes or 0)
            if taken > self._cap_bytes:
                raise TrialFailed(too_much_memory(self._cap_bytes), starved=True)

    def _failed(self, why: str) -> TrialFailed:
        """A failure; for lack of time or memory unless a worker ended by itself."""
        workers = self._workers.handles.values()
        faults = [text for worker in workers for text in (*worker.failures, *filter(None, [worker.reported]))]
        return TrialFailed(why, starved=all(text.startswith(_FROM_OUTSIDE) for text in faults))

    def _why(self) -> str:
        return ": ".join(self._workers.first_error) if self._workers.first_error else "no worker reported an error"

    def _pids(self) -> Iterable[int]:
        return self._workers.pids().values()


def replay_plan(plan: RunPlan, setting: Setting, cap_bytes: int) -> RunPlan:
    """Plan of the task with that setting; the learner never waits, samplers only below the ratio, replay is full."""
    row_bytes, batch, samplers = plan.layout.step_bytes, setting[BATCH], setting[SAMPLERS]
    needed = 4 * max(batch, samplers * setting[ENVS] * (1 + plan.layout.depth) * plan.layout.env_steps_per_row)
    rows = max(min(ROWS, ROWS_BYTES // row_bytes), needed)
    rows = min(rows, max(plan.config.replay.capacity, batch), cap_bytes // 4 // row_bytes)
    replay = _REPLAY | {"capacity": max(rows, 2), "samples_per_insert_max": NO_LIMIT}
    return _trial_plan(plan, setting, {"replay": replay, "stop": {"updates": None}}, samplers)


_REPLAY: dict[str, Any] = {"learning_starts": 1, "save": False, "demonstrations": ""}
"""Settings of replay that is measured."""


def _trial_plan(plan: RunPlan, setting: Setting, values: Values, samplers: int) -> RunPlan:
    chosen, values = setting.layer().values, values | {"visualizer": {"enabled": False}}
    merged = {part: {**values.get(part, {}), **chosen.get(part, {})} for part in (*chosen, *values)}
    settings = plan.settings.with_layer(Layer("tuner", merged))
    infer = settings.config.inference_workers if settings.config.on_policy is not None else 0
    return dataclasses.replace(plan, settings=settings, samplers=samplers, inference_workers=infer, all_learners=0)


def sampler_plan(plan: RunPlan, setting: Setting, cap_bytes: int) -> RunPlan:
    """A plan for samplers with that setting that write as fast as they can."""
    needed = 2 * setting[SAMPLERS] * setting[ENVS] * (1 + plan.layout.depth) * plan.layout.env_steps_per_row
    capacity = max(min(ROWS, ROWS_BYTES // plan.layout.step_bytes), needed)
    replay = _REPLAY | {"capacity": capacity, "samples_per_insert_min": 0.0}
    return _trial_plan(plan, setting, {"replay": replay, "learner": {"batch_size": 1}}, setting[SAMPLERS])


def rollout_plan(plan: RunPlan, setting: Setting, cap_bytes: int) -> RunPlan:
    """Plan of the task with that setting, until it is stopped."""
    learner = {"publish_interval_s": 3600.0, "checkpoint_interval_s": 1e6}
    stop = dict.fromkeys(("updates", "env_steps", "seconds"))
    return _trial_plan(plan, setting, {"learner": learner, "stop": stop}, setting[ROLLOUT_SAMPLERS])


_REPLAY_PACE = Pace(repeats=5, settle_s=(0.1, 0.25), window_s=(0.3, 0.5))
REPLAY = TrialKind(trial=JOINT, pace=_REPLAY_PACE, plan_of=replay_plan, rounds=1, edge_s=0.2, shares=True)
"""Samplers, replay and learner."""
HOST = TrialKind(ROLLOUT, _REPLAY_PACE, plan_of=sampler_plan, rounds=0, edge_s=0.0, shares=True, learns=False)
"""The samplers of a host whose learner is elsewhere (``--cluster``)."""
_ROLLOUT_PACE = Pace(repeats=3, settle_s=(0.1, 0.1), window_s=(0.4, 1.2))
ROLLOUTS = TrialKind(ROLLOUT, _ROLLOUT_PACE, plan_of=rollout_plan, rounds=_ROLLOUTS, edge_s=1.0)
"""Trial of all workers of a mode with rollouts."""
