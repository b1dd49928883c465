"""Worker processes that run only to be measured: paused while others are, watched, and ended without a trace."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import psutil

from spreeze.config.layers import Layer, Settings, Values
from spreeze.errors import ConfigError, ResourceError, WorkerError
from spreeze.machine.awake import AWAKE
from spreeze.machine.logs import LogKeeper
from spreeze.machine.processes import OrphanWatch
from spreeze.machine.utilisation import private_memory_bytes
from spreeze.modes import gala, hts, impact, spreeze
from spreeze.run_directory import scratch_folder
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import RunContext, WorkerSpec
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.supervisor import ProcessSupervisor
from spreeze.transport import status_table as words
from spreeze.transport.mixing import MixMemory
from spreeze.transport.replay_ring import ReplayRing
from spreeze.transport.rollouts import Rollouts
from spreeze.transport.shared_memory import Wakeup
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import VersionedParameters
from spreeze.tuner.problem import BATCH, ENVS, JOINT, ROLLOUT, ROLLOUT_SAMPLERS, SAMPLERS, Setting, TrialResult
from spreeze.workers.collectors import fill_with_synthetic_rows

_MOST_FAILURES = 1
_FROM_OUTSIDE = ("silent for", "ended by SIGKILL")
"""How a worker's failure begins that a machine without time or memory for it also causes."""
_LOOK_S = 0.05
_MEMORY_EVERY_S = 0.25


class TrialFailed(Exception):
    """These settings cannot run here; the text says why. Data for the tuner, not an error."""

    def __init__(self, why: str, *, starved: bool = False) -> None:
        """``starved``: for want of time or memory, as ``TrialResult.starved``."""
        super().__init__(why)
        self.starved = starved


class Pace(NamedTuple):
    """How a kind of trial is measured: many short windows, since the speed of a shared machine changes in seconds."""

    repeats: int
    settle_s: tuple[float, float]
    """Least and most time that is let pass before a window, and that the window takes."""
    window_s: tuple[float, float]


ROWS, ROWS_BYTES = 100_000, 128_000_000
"""Replay of a trial has at most so many rows and bytes."""
_TURNS_IN_WINDOW, _LONGEST_WINDOW_S = 3, 3.0
"""Turns of a sampler (a step of each of its environments) that a window should hold, and the time that they may take
at most."""


class Trial(contextlib.ExitStack):
    """Samplers, replay and learner on settings that differ only in the number of samplers.

    Nothing is left once the stack is closed.
    """

    stage: ClassVar[str] = JOINT
    pace: ClassVar[Pace] = Pace(repeats=5, settle_s=(0.1, 0.25), window_s=(0.3, 0.5))
    edge_s = 0.2
    """A window begins and ends with an update or a swap if one comes within this time: few are counted exactly."""
    _looked_s = 0.0

    def __init__(
        self, plan: RunPlan, candidates: list[TrialResult], finish: Callable[[TrialResult], None], *,
        usable_cores: float, memory_cap_bytes: int, interrupts: Interrupts, step_us: float | None = None,
    ) -> None:
        """``finish`` is given each candidate once it has all of its windows, or has failed."""
        super().__init__()
        self.candidates, self._finish, self._plan = candidates, finish, plan
        self._cores, self._cap_bytes, self._interrupts = usable_cores, memory_cap_bytes, interrupts
        self._setting = max((one.setting for one in candidates), key=lambda one: one.get(SAMPLERS, 0))
        turn_s = self._setting.get(ENVS, 0) * (step_us or 0.0) / 1e6
        self.least_window_s = min(_TURNS_IN_WINDOW * turn_s, _LONGEST_WINDOW_S)
        """Time that a window has to hold to tell anything."""

    @classmethod
    def shared(cls, setting: Setting) -> Setting:
        """What settings have to have in common to share one trial."""
        return setting.without(SAMPLERS)

    def _open(self, run_dir: Path) -> tuple[StatusTable, int, list[WorkerSpec]]:
        """Opens what the workers share; returns the status table, bytes of shared memory, and the workers."""
        plan = replay_plan(self._plan, self._setting, self._cap_bytes)
        status, (self._ring,) = self.enter_context(spreeze.open_memory(plan, run_dir, plan.samplers + 1))
        fill_with_synthetic_rows(self._ring, plan.spec)
        specs = spreeze.worker_specs(plan, run_dir, [self._ring], time.monotonic()).values()
        return status, self._ring.spec.size_bytes, [one for one in specs if one.role.learns or one.role.steps]

    @property
    def ring(self) -> ReplayRing:
        """The replay that its samplers write."""
        return self._ring

    def _late(self) -> str | None:
        """Who has not begun yet; None once all are at work."""
        late = [] if self._ring.sampled > 0 else ["the learner took no update"]
        return ", ".join(late + self._idle_samplers()) or None

    def _idle_samplers(self) -> list[str]:
        return [f"sampler-{row} took no env step" for row in range(self._setting[SAMPLERS])
                if self._status.named_slots(row, "sampler")["env_steps"] <= 0]

    def _mark(self) -> float:
        """What changes with each update or swap."""
        return self._counters()[1]

    def _counters(self) -> tuple[float, float]:
        """Env steps and updates."""
        return counters(self._status, self._setting[SAMPLERS])

    def _prepare(self, setting: Setting) -> None:
        """Sets the running workers to one of the settings that share them."""
        self._status.header[words.ACTIVE_SAMPLERS] = setting[SAMPLERS]
        # The limiter's count starts anew: what another number of samplers saved up must not be spent here.
        self._ring.begin_learning()

    def attempt(self, act: Callable[[], None]) -> None:
        """Does something for all candidates that are left; a failure becomes theirs and ends the trial."""
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

    def start(self) -> None:
        """Starts all processes and returns at once.

        Raises:
            TrialFailed: no room, or settings that contradict each other.
        """
        try:
            run_dir = self.enter_context(scratch_folder("spreeze-tune-"))
            self._status, self._shared_bytes, specs = self._open(run_dir)
            nonce = secrets.token_hex(8)
            watch = OrphanWatch(nonce)
            self.callback(watch.end)
            watch.start()
            logs = LogKeeper()
            self.callback(logs.close)
            logs.start()
            context = RunContext(run_dir=run_dir, status_fd=self._status.block.fd, status_rows=self._status.num_rows,
                                 nonce=nonce, gives_way=self._plan.config.tuning.give_way, logs=logs)
            self._workers = ProcessSupervisor(context, self._status, on_event=lambda level, text: None)
            self.callback(self._workers.stop, hurry=lambda: True, on_messages=lambda messages: None)
            for spec in specs:
                self._workers.add(spec)
        except (ResourceError, ConfigError, OSError) as error:
            raise TrialFailed(str(error), starved=not isinstance(error, ConfigError)) from None

    def begin(self, within_s: float) -> None:
        """Waits until everybody has been at work, then pauses all; raises as ``measure`` does."""
        end = AWAKE() + within_s
        while (late := self._late()) is not None:
            self._look(_LOOK_S)
            if AWAKE() > end:
                raise self._failed(f"{late} within {within_s:.0f} s; {self._why()}")
        self._workers.signal_all(signal.SIGSTOP)

    def go_on(self) -> None:
        """After ``begin``, which stops all."""
        self._workers.signal_all(signal.SIGCONT)

    def take_turn(self, number: int, settle_s: float, window_s: float) -> None:
        """One window of each candidate, forward and backward in turn; then the workers are stopped."""
        self.go_on()
        for candidate in self.candidates[:: 1 if number % 2 == 0 else -1]:
            self.measure(candidate, settle_s, max(window_s, self.least_window_s))
            if len(candidate.cpu_share) == self.pace.repeats:
                self.finish(candidate)
        self._workers.signal_all(signal.SIGSTOP)

    def measure(self, candidate: TrialResult, settle_s: float, window_s: float) -> None:
        """One window of a candidate, after a while to settle; again if it was stopped meanwhile (Ctrl-Z), or asleep.

        Raises:
            TrialFailed: a worker keeps failing, or too much memory is taken.
            KeyboardInterrupt: the user asked to stop.
        """
        disturbed = True
        while disturbed:
            slept_s = AWAKE.slept_s
            self._prepare(candidate.setting)
            self._pass_time(settle_s)
            first_s, first = self._edge()
            cpu_s = self._cpu_s()
            self._pass_time(window_s)
            last_s, last = self._edge()
            disturbed = AWAKE.slept_s > slept_s
        took_s = last_s - first_s
        candidate.env_steps_per_s += ((last[0] - first[0]) / took_s,)
        candidate.updates_per_s += ((last[1] - first[1]) / took_s,)
        candidate.cpu_share += (max(0.0, self._cpu_s() - cpu_s) / (took_s * self._cores),)

    def _edge(self) -> tuple[float, tuple[float, float]]:
        """Time and counters at the next update or swap, or after a short while without one."""
        before, end = self._mark(), AWAKE() + self.edge_s
        while self._mark() == before and AWAKE() < end:
            time.sleep(0.001)
            if self._interrupts.asked:
                raise KeyboardInterrupt
        return AWAKE(), self._counters()

    def _pass_time(self, seconds: float) -> None:
        """Lets time pass, with an eye on the workers."""
        end = AWAKE() + seconds
        while (left := end - AWAKE()) > 0:
            self._look(min(left, _LOOK_S))

    def _look(self, seconds: float) -> None:
        """Waits, then sees to workers, memory and the user's wish to stop; raises as ``measure`` does."""
        self._workers.wait(seconds)
        if self._interrupts.asked:
            raise KeyboardInterrupt
        try:
            self._workers.watch()
        except WorkerError as error:
            raise self._failed(str(error)) from None
        failures = [len(one.failures) for one in self._workers.handles.values() if not one.spec.role.learns]
        learners = [len(one.failures) for one in self._workers.handles.values() if one.spec.role.learns]
        if sum(learners) or sum(failures) > _MOST_FAILURES:
            raise self._failed(self._why())
        if time.monotonic() - self._looked_s >= _MEMORY_EVERY_S:
            self._looked_s = time.monotonic()
            taken = self._shared_bytes + sum(private_memory_bytes(one.pid) or 0 for one in self._processes(whole=True))
            for candidate in self.candidates:
                candidate.memory_bytes = max(taken, candidate.memory_bytes or 0)
            if taken > self._cap_bytes:
                raise TrialFailed(
                    f"out of memory: more than the {self._cap_bytes / 1e9:.1f} GB that a candidate may take",
                    starved=True,
                )

    def _failed(self, why: str) -> TrialFailed:
        """A failure; for want of time or memory unless a worker ended by itself."""
        workers = self._workers.handles.values()
        faults = [text for one in workers for text in (*one.failures, *filter(None, [one.reported]))]
        return TrialFailed(why, starved=all(text.startswith(_FROM_OUTSIDE) for text in faults))

    def _why(self) -> str:
        """The first error that a worker reported."""
        return ": ".join(self._workers.first_error) if self._workers.first_error else "no worker reported an error"

    def _processes(self, *, whole: bool) -> Iterator[psutil.Process]:
        """The workers that live; as a ``whole``, with all that they started."""
        for pid in self._workers.pids().values():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                yield process
                yield from process.children(recursive=True) if whole else ()

    def _cpu_s(self) -> float:
        """Processor time of all so far."""
        total = 0.0
        for process in self._processes(whole=False):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def counters(
    status: StatusTable, samplers: int, *, role: str = "sampler", between: int = 0, learners: int = 1
) -> tuple[float, float]:
    """Env steps of the samplers' rows, which come first, and updates of the learners', ``between`` other rows later."""
    steps = sum(status.named_slots(row, role)["env_steps"] for row in range(samplers))
    rows = range(samplers + between, samplers + between + learners)
    return steps, sum(status.named_slots(row, "learner")["updates"] for row in rows)


def replay_plan(plan: RunPlan, setting: Setting, cap_bytes: int) -> RunPlan:
    """The same task with that setting; the learner never waits, samplers only below the ratio, replay is full."""
    row_bytes, batch, samplers = plan.layout.row_bytes, setting[BATCH], setting[SAMPLERS]
    least = 4 * max(batch, samplers * setting[ENVS] * (1 + plan.layout.depth))
    rows = max(min(ROWS, ROWS_BYTES // row_bytes), least)
    rows = min(rows, max(plan.config.replay.capacity, batch), cap_bytes // 4 // row_bytes)
    settings = _with(plan, setting, {
        "replay": {"capacity": max(rows, 2), "samples_per_insert_max": 1e9, "learning_starts": 1, "save": False},
        "visualizer": {"enabled": False}, "stop": {"updates": None},
    })
    return dataclasses.replace(plan, samplers=samplers, settings=settings)


def _with(plan: RunPlan, setting: Setting, values: Values) -> Settings:
    """The plan's settings with those of a trial, and what makes a trial of them."""
    own = setting.layer().values
    return plan.settings.with_layer(Layer("tuner", {part: {**values.get(part, {}), **own.get(part, {})}
                                                    for part in (*own, *values)}))


class SamplerTrial(Trial):
    """Samplers alone, which nothing holds back: those of a host whose learner is elsewhere (``--cluster``)."""

    stage = ROLLOUT
    edge_s = 0.0

    def _open(self, run_dir: Path) -> tuple[StatusTable, int, list[WorkerSpec]]:
        plan = self._plan
        least = 2 * self._setting[SAMPLERS] * self._setting[ENVS] * (1 + plan.layout.depth)
        settings = _with(plan, self._setting, {
            "replay": {"capacity": max(min(ROWS, ROWS_BYTES // plan.layout.row_bytes), least), "learning_starts": 1,
                       "samples_per_insert_min": 0.0, "save": False},
            "learner": {"batch_size": 1}, "visualizer": {"enabled": False},
        })
        plan = dataclasses.replace(plan, samplers=self._setting[SAMPLERS], settings=settings)
        status, (self._ring,) = self.enter_context(spreeze.open_memory(plan, run_dir, plan.samplers + 1))
        specs = spreeze.worker_specs(plan, run_dir, [self._ring], time.monotonic()).values()
        return status, self._ring.spec.size_bytes, [one for one in specs if one.role.steps]

    def _late(self) -> str | None:
        return ", ".join(self._idle_samplers()) or None

    def _mark(self) -> float:
        return self._counters()[0]


_ROLLOUTS, _LONGEST_ROLLOUTS_S = 2, 4.0
"""Rollouts after which all workers have been busy, and that a window should hold, and the time that they may take there
at most."""


class RolloutTrial(Trial):
    """All workers of one setting; windows begin and end with a swap of the rollouts."""

    stage = ROLLOUT
    pace = Pace(repeats=3, settle_s=(0.1, 0.1), window_s=(0.4, 1.2))
    edge_s = 1.0
    _swap_s, _seen = 0.0, 0

    @classmethod
    def shared(cls, setting: Setting) -> Setting:
        return setting

    def _prepare(self, setting: Setting) -> None:
        pass

    def _open(self, run_dir: Path) -> tuple[StatusTable, int, list[WorkerSpec]]:
        plan = self._trial_plan = rollout_plan(self._plan, self._setting)
        memory = self.enter_context(hts.open_memory(plan, run_dir))
        wakeups = self.enter_context(hts.open_wakeups(plan))
        status = StatusTable.create(plan.samplers + plan.inference_workers + 1)
        self.callback(status.close)
        self._rollouts = memory.rollouts
        specs = hts.worker_specs(plan, run_dir, memory, wakeups, time.monotonic())
        return status, memory.rollouts.spec.size_bytes, list(specs.values())

    def _late(self) -> str | None:
        done, now = self._rollouts.current, time.monotonic()
        if done != self._seen:
            if self._seen > 0:  # the first one holds the imports as well
                rollout_s = (now - self._swap_s) / (done - self._seen)
                self.edge_s = max(1.0, 1.5 * rollout_s)
                self.least_window_s = min(_ROLLOUTS * rollout_s, _LONGEST_ROLLOUTS_S)
            self._seen, self._swap_s = done, now
        return None if done >= _ROLLOUTS else f"{done} rollouts"

    def _mark(self) -> float:
        return self._rollouts.current

    def _counters(self) -> tuple[float, float]:
        plan = self._trial_plan
        return counters(self._status, plan.samplers, role="rollout-sampler", between=plan.inference_workers,
                        learners=plan.learners)


class BufferTrial(RolloutTrial):
    """All workers of one setting, whose samplers go on by themselves; windows begin and end at any time."""

    def _open(self, run_dir: Path) -> tuple[StatusTable, int, list[WorkerSpec]]:
        plan = self._trial_plan = rollout_plan(self._plan, self._setting)
        self._rollouts = Rollouts.create(plan.rollout_spec())
        self.callback(self._rollouts.close)
        status = StatusTable.create(plan.samplers + 3)
        self.callback(status.close)
        wakeup = self.enter_context(contextlib.closing(Wakeup.create()))
        policies = self.enter_context(contextlib.closing(VersionedParameters.create(impact.POLICIES)))
        specs = impact.worker_specs(plan, run_dir, self._rollouts, time.monotonic(), wakeup, policies)
        return status, self._rollouts.spec.size_bytes, [
            spec for spec in specs.values() if spec.role.steps or spec.role.learns]

    def _late(self) -> str | None:
        updates = self._counters()[1]
        return None if updates >= _ROLLOUTS else f"{updates:.0f} updates"

    def _mark(self) -> float:
        return self._counters()[1]

    def _counters(self) -> tuple[float, float]:
        return counters(self._status, self._trial_plan.samplers)


class GossipTrial(RolloutTrial):
    """All workers of several learners that mix; windows begin and end with a swap of one's rollouts."""

    def _open(self, run_dir: Path) -> tuple[StatusTable, int, list[WorkerSpec]]:
        plan = self._trial_plan = rollout_plan(self._plan, self._setting)
        teams = [gala.open_team(self, plan, run_dir, group) for group in range(plan.learners)]
        memory = self.enter_context(contextlib.closing(MixMemory.create(plan.learners)))
        status = StatusTable.create(plan.samplers + plan.learners + 2)
        self.callback(status.close)
        self._rollouts, self._others = teams[0].memory.rollouts, [team.memory.rollouts for team in teams[1:]]
        specs = gala.worker_specs(plan, run_dir, teams, memory, time.monotonic())
        return status, plan.learners * self._rollouts.spec.size_bytes, [
            spec for spec in specs.values() if spec.role.steps or spec.role.learns]

    def _late(self) -> str | None:
        late = [f"{one.current} rollouts" for one in self._others if one.current < _ROLLOUTS]
        return super()._late() or next(iter(late), None)


def rollout_plan(plan: RunPlan, setting: Setting) -> RunPlan:
    """The same task with that setting, until it is stopped."""
    settings = _with(plan, setting, {
        "learner": {"publish_interval_s": 3600.0, "checkpoint_interval_s": 1e6}, "visualizer": {"enabled": False},
        "stop": {"updates": None, "env_steps": None, "seconds": None},
    })
    return dataclasses.replace(plan, settings=settings, samplers=setting[ROLLOUT_SAMPLERS],
                               inference_workers=settings.config.inference_workers)
