"""The on-policy tuner's measurements on this machine: executors, actors and the real learner at work."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spreeze.config.layers import Layer
from spreeze.errors import ConfigError, ResourceError
from spreeze.modes import hts
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.transport.status_table import StatusTable
from spreeze.tuner.rollout_search import RolloutRate, RolloutSetting
from spreeze.tuner.trials import TrialFailed, TrialProcesses, Window, folder

REPEATS = 3
_GROUPS = 3
"""Crews that are started together and take turns, at most one a core: their start is mostly imports."""
_SETTLE_S = 0.1
_WINDOW_S, _SHORTEST_WINDOW_S = 1.2, 0.4
_INTERVALS_IN_WINDOW, _LONGEST_WINDOW_S = 2.0, 4.0
"""Intervals that a window should hold, where that takes at most so long."""
_EDGE_S = 1.0
"""A window begins and ends with a swap of the storages, where one comes within this time or 1.5 intervals."""
_START_S, _LONGEST_START_S = 5.0, 25.0
_INTERVALS = 2
"""Intervals after which learner, executors and actors have all been at work."""


class RolloutTrialRun:
    """One group of the HTS-RL mode; nothing of it is left after ``close``."""

    def __init__(
        self, plan: RunPlan, setting: RolloutSetting, *, usable_cores: float, memory_cap_bytes: int,
        interrupts: Interrupts,
    ) -> None:
        self._plan, self._setting, self._cores = plan, setting, usable_cores
        self._cap_bytes, self._interrupts = memory_cap_bytes, interrupts
        self._stack = contextlib.ExitStack()
        self._interval_s = self._started_s = 0.0

    def start(self) -> None:
        """Starts all processes and returns at once.

        Raises:
            Unfit: no room, or settings that contradict each other.
        """
        self._started_s = time.monotonic()
        try:
            plan = measured_plan(self._plan, self._setting)
            run_dir = self._stack.enter_context(folder())
            memory = self._stack.enter_context(hts.open_memory(plan, run_dir))
            wakeups = self._stack.enter_context(hts.open_wakeups(plan))
            rows = plan.samplers + plan.actors + 1
            self._status = StatusTable.create(rows)
            self._stack.callback(self._status.close)
            self._rollouts = memory.rollouts
            self._troupe = TrialProcesses(
                self._stack, run_dir, self._status, rows, shared_bytes=memory.rollouts.spec.size_bytes,
                memory_cap_bytes=self._cap_bytes, interrupts=self._interrupts,
            )
            for spec in hts.worker_specs(plan, run_dir, memory, wakeups, time.monotonic()).values():
                self._troupe.add(spec)
        except (ResourceError, ConfigError, OSError) as error:
            raise TrialFailed(str(error)) from None

    def begin(self, end_s: float) -> None:
        """Waits until two intervals have been collected, at most to that monotonic time, then pauses all.

        Raises:
            Unfit: that takes too long, or a worker keeps failing.
            KeyboardInterrupt: the user asked to stop.
        """
        swap_s = time.monotonic()
        while self._rollouts.interval < _INTERVALS:
            before = self._rollouts.interval
            self._troupe.look()
            if before == 1 < self._rollouts.interval:
                self._interval_s = time.monotonic() - swap_s
            if before == 0:  # the first interval holds the imports as well
                swap_s = time.monotonic()
            if time.monotonic() > end_s:
                age_s = time.monotonic() - self._started_s
                raise TrialFailed(f"{self._rollouts.interval} intervals within {age_s:.0f} s; {self._troupe.why()}")
        self._troupe.pause()

    def window(self, window_s: float) -> Window:
        """Rates over whole intervals, with all at work; then all are paused again.

        Raises:
            Unfit: a worker keeps failing, or too much memory is taken.
            KeyboardInterrupt: the user asked to stop.
        """
        self._troupe.resume()
        self._troupe.pass_time(_SETTLE_S)
        first_s, steps, updates = self._edge()
        cpu_s = self._troupe.cpu_s()
        self._troupe.pass_time(max(window_s, min(_INTERVALS_IN_WINDOW * self._interval_s, _LONGEST_WINDOW_S)))
        last_s, last_steps, last_updates = self._edge()
        took_s = last_s - first_s
        used_s = self._troupe.cpu_s() - cpu_s
        self._troupe.pause()
        return Window((last_steps - steps) / took_s, (last_updates - updates) / took_s,
                      max(0.0, used_s) / (took_s * self._cores))

    def _edge(self) -> tuple[float, float, float]:
        """Time, env steps and updates at the next swap, or after a while without one."""
        before, end = self._rollouts.interval, time.monotonic() + max(_EDGE_S, 1.5 * self._interval_s)
        while self._rollouts.interval == before and time.monotonic() < end:
            time.sleep(0.001)
        executors = range(self._setting.executors)
        steps = sum(self._status.named_slots(row, "executor")["env_steps"] for row in executors)
        learner = self._status.named_slots(self._setting.executors + self._setting.actors, "learner")
        return time.monotonic(), steps, learner["updates"]

    @property
    def memory_bytes(self) -> int | None:
        """Most that all of it took: private memory of the processes, and the storages."""
        return self._troupe.memory_bytes

    def close(self) -> None:
        """Ends the processes, frees memory, removes files."""
        self._stack.close()


def measured_plan(plan: RunPlan, setting: RolloutSetting) -> RunPlan:
    """The same task with that setting, until it is stopped."""
    values = {
        "rollout": {"executors": setting.executors, "envs_per_executor": setting.envs_per_executor,
                    "actors": setting.actors, "sync_interval": setting.sync_interval},
        "learner": {"publish_interval_s": 3600.0, "checkpoint_interval_s": 1e6},
        "visualizer": {"enabled": False}, "stop": {"updates": None, "env_steps": None},
    }  # type: dict[str, dict[str, object]]
    if hasattr(plan.config.on_policy, "minibatches"):
        values[plan.config.run.algo] = {"minibatches": setting.minibatches}
    return dataclasses.replace(plan, settings=plan.settings.with_layer(Layer("tuner", values)),
                               samplers=setting.executors, actors=setting.actors)


@dataclass
class _Candidate:
    setting: RolloutSetting
    ensemble: RolloutTrialRun
    windows: list[Window] = field(default_factory=list)
    failure: str | None = None

    def attempt(self, act: Callable[[], None]) -> None:
        """Does something unless it has failed; a failure ends the group."""
        if self.failure is None:
            try:
                act()
            except TrialFailed as unfit:
                self.failure = str(unfit)
                self.ensemble.close()

    def measure(self, window_s: float) -> None:
        """One more window."""
        self.windows.append(self.ensemble.window(window_s))

    def result(self) -> RolloutRate:
        kept = [] if self.failure else self.windows
        return RolloutRate(
            setting=self.setting, env_steps_per_s=tuple(one.env_steps_per_s for one in kept),
            cpu_share=tuple(one.cpu_share for one in kept), failure=self.failure,
            memory_bytes=self.ensemble.memory_bytes if kept else None,
        )


class RolloutMeasurer:
    """Fulfils ``autotune.rollouts.RolloutMeasure``; no child process is left when a method has returned."""

    def __init__(
        self, plan: RunPlan, *, usable_cores: float, memory_cap_bytes: int, ends_s: float, interrupts: Interrupts
    ) -> None:
        """Starts nothing yet.

        Args:
            plan: the task and its settings.
            usable_cores: what shares of processor time are shares of.
            memory_cap_bytes: private memory that one candidate may take.
            ends_s: monotonic time at which all must be done.
            interrupts: the user's wish to stop, which raises KeyboardInterrupt.
        """
        self._plan, self._cores, self._cap_bytes = plan, usable_cores, memory_cap_bytes
        self._groups = max(1, min(_GROUPS, int(usable_cores)))
        self._ends_s, self._interrupts = ends_s, interrupts

    def seconds_left(self) -> float:
        """Seconds of the budget that are left; negative when it is overdrawn."""
        return self._ends_s - time.monotonic()

    def rollouts(
        self, settings: Sequence[RolloutSetting], *, within_s: float, on_rate: Callable[[RolloutRate], None]
    ) -> list[RolloutRate]:
        """Each setting's own group, some started together and measured in turns; see ``RolloutMeasure``."""
        end, left = time.monotonic() + within_s, list(dict.fromkeys(settings))
        found: list[RolloutRate] = []
        while left and self.seconds_left() > _START_S and (not found or time.monotonic() + _START_S < end):
            now, left = left[: self._groups], left[self._groups :]
            share = len(now) / (len(now) + len(left))
            for rate in self._together(now, (end - time.monotonic()) * share):
                found.append(rate)
                on_rate(rate)
        return found

    def _together(self, settings: Sequence[RolloutSetting], within_s: float) -> list[RolloutRate]:
        end = time.monotonic() + within_s
        with contextlib.ExitStack() as stack:
            candidates = []
            for setting in settings:
                ensemble = RolloutTrialRun(self._plan, setting, usable_cores=self._cores,
                                           memory_cap_bytes=self._cap_bytes, interrupts=self._interrupts)
                stack.callback(ensemble.close)
                candidates.append(_Candidate(setting, ensemble))
            for one in candidates:
                one.attempt(one.ensemble.start)
            limit_s = time.monotonic() + min(_LONGEST_START_S, max(_START_S, self.seconds_left()))
            for one in candidates:
                one.attempt(functools.partial(one.ensemble.begin, limit_s))
            each_s = (end - time.monotonic()) / (REPEATS * len(candidates)) - _SETTLE_S
            window_s = min(_WINDOW_S, max(_SHORTEST_WINDOW_S, each_s))
            for number in range(REPEATS):
                for one in candidates[:: 1 if number % 2 == 0 else -1]:
                    one.attempt(functools.partial(one.measure, window_s))
            return [one.result() for one in candidates]
