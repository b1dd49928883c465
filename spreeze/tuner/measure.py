"""The tuner's measurements on this machine: updates alone, and samplers beside the real learner."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.tuner.problem import JointRate, JointSetting, LearnerRate, LearnerSetting
from spreeze.tuner.trials import TrialFailed, TrialGroup, TrialRun
from spreeze.tuner.update_timer import UpdateTimer

REPEATS = 5
"""Windows of each setting: short ones in many turns, since the speed of a shared machine changes within seconds."""
_SETTLE_S, _WINDOW_S = 0.25, 0.5
_SHORTEST_SETTLE_S, _SHORTEST_WINDOW_S = 0.1, 0.3
_TURNS_IN_WINDOW = 3
"""Turns of a sampler (a step of each of its environments) that a window should hold, where that takes at most:"""
_LONGEST_WINDOW_S = 3.0
_EDGE_S = 0.1
"""What aligning a window with updates takes, about."""
_CREW_START_S = 5.0
"""What starting a group takes, about; what it may take, between these bounds:"""
_SHORTEST_START_S, _LONGEST_START_S = 4.0, 25.0
_MOST_GROUPS = 4


@dataclass
class _Candidate:
    setting: JointSetting
    env_steps_per_s: list[float] = field(default_factory=list)
    updates_per_s: list[float] = field(default_factory=list)
    cpu_share: list[float] = field(default_factory=list)
    memory_bytes: int | None = None
    failure: str | None = None

    def result(self) -> JointRate:
        kept = slice(0, 0 if self.failure else None)
        return JointRate(
            setting=self.setting, env_steps_per_s=tuple(self.env_steps_per_s[kept]),
            updates_per_s=tuple(self.updates_per_s[kept]), cpu_share=tuple(self.cpu_share[kept]),
            memory_bytes=self.memory_bytes, failure=self.failure,
        )


@dataclass
class _Group:
    """A group and what is to be measured with it."""

    ensemble: TrialRun
    candidates: list[_Candidate]
    """Those that are not finished yet."""
    finish: Callable[[_Candidate], None]

    def attempt(self, act: Callable[[], None]) -> None:
        """Does something for all that are left; a failure becomes theirs and ends the group."""
        if not self.candidates:
            return
        try:
            act()
        except TrialFailed as unfit:
            self.ensemble.close()
            for candidate in self.candidates:
                candidate.failure = str(unfit)
                self.finish(candidate)
            self.candidates.clear()


class ReplayMeasurer:
    """Fulfils ``autotune.records.Measure``; every child process has ended when its ``with`` block has."""

    def __init__(
        self, plan: RunPlan, *, usable_cores: float, memory_cap_bytes: int, group_bytes: int, ends_s: float,
        interrupts: Interrupts,
    ) -> None:
        """Starts nothing yet.

        Args:
            plan: the task and its settings.
            usable_cores: what shares of processor time are shares of.
            memory_cap_bytes: private memory that one candidate may take.
            group_bytes: about what learner and samplers of one candidate take.
            ends_s: monotonic time at which all must be done.
            interrupts: the user's wish to stop, which raises KeyboardInterrupt from any method.
        """
        self._plan, self._cores, self._cap_bytes = plan, usable_cores, memory_cap_bytes
        self._groups = max(1, min(_MOST_GROUPS, memory_cap_bytes // max(1, group_bytes)))
        self.step_us: float | None = None
        """Time of one env step, None if not known; windows are long enough for some."""
        self._ends_s, self._interrupts = ends_s, interrupts
        self._nursery = UpdateTimer(plan, memory_cap_bytes, interrupts)

    def __enter__(self) -> Self:
        self._nursery.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._nursery.close()

    def seconds_left(self) -> float:
        """Seconds of the budget that are left; negative when it is overdrawn."""
        return self._ends_s - time.monotonic()

    def device_start_s(self, device: str) -> float:
        """Context and libraries of a GPU that was not used yet; see ``Measure.device_start_s``."""
        return self._nursery.device_start_s(device)

    def learner(
        self, settings: Sequence[LearnerSetting], *, within_s: float, on_rate: Callable[[LearnerRate], None]
    ) -> list[LearnerRate]:
        """Updates alone, on synthetic rows; see ``Measure.learner``."""
        return self._nursery.measure(settings, within_s, on_rate)

    def joint(
        self, settings: Sequence[JointSetting], *, within_s: float, on_rate: Callable[[JointRate], None]
    ) -> list[JointRate]:
        """Real samplers beside the real learner; see ``Measure.joint``.

        Settings that differ only in the number of samplers share one group. Several groups are started
        together and take turns, the others paused meanwhile, as far as memory allows.
        """
        self._nursery.close()  # what it loaded takes memory, and updates alone are known by now
        groups: dict[TrialGroup, list[_Candidate]] = {}
        for setting in dict.fromkeys(settings):
            company = TrialGroup(setting.learner, setting.envs_per_sampler, setting.samples_per_insert_min)
            groups.setdefault(company, []).append(_Candidate(setting))
        pairs, end = list(groups.items()), time.monotonic() + within_s
        found: list[JointRate] = []
        while pairs and self.seconds_left() > _SHORTEST_START_S:
            if found and time.monotonic() + _CREW_START_S > end:
                break
            now, pairs = pairs[: self._groups], pairs[self._groups :]
            share = len(now) / (len(now) + len(pairs))
            found += self._together(now, (end - time.monotonic()) * share, on_rate)
        return found

    def _together(
        self,
        groups: Sequence[tuple[TrialGroup, list[_Candidate]]],
        within_s: float,
        on_rate: Callable[[JointRate], None],
    ) -> list[JointRate]:
        """Measures some groups in turns."""
        end = time.monotonic() + within_s
        done: list[JointRate] = []

        def finish(candidate: _Candidate) -> None:
            done.append(candidate.result())
            on_rate(done[-1])

        with contextlib.ExitStack() as stack:
            running: list[_Group] = []
            for company, candidates in groups:
                most = max(candidate.setting.samplers for candidate in candidates)
                ensemble = stack.enter_context(TrialRun(
                    self._plan, company, most, usable_cores=self._cores, memory_cap_bytes=self._cap_bytes,
                    interrupts=self._interrupts,
                ))
                running.append(_Group(ensemble, candidates, finish))
            for group in running:
                group.attempt(group.ensemble.start)
            for group in running:
                within_s = min(_LONGEST_START_S, max(_SHORTEST_START_S, self.seconds_left()))
                group.attempt(functools.partial(group.ensemble.begin, within_s))
            self._rounds([group for group in running if group.candidates], end)
        return done

    def _rounds(self, running: list[_Group], end: float) -> None:
        """Every setting once a round, forward and backward in turn, so that drift meets all alike."""
        count = sum(len(group.candidates) for group in running)
        settle_s, window_s = self._lengths(end - time.monotonic(), REPEATS * max(1, count))
        for number in range(REPEATS):
            for group in running[:: 1 if number % 2 == 0 else -1]:
                group.attempt(functools.partial(self._round, group, number, settle_s, window_s))
            if self.seconds_left() < 0.0:
                break
        for group in running:
            for candidate in group.candidates:  # the budget is overdrawn: what they have has to do
                group.finish(candidate)

    def _round(self, group: _Group, number: int, settle_s: float, window_s: float) -> None:
        group.ensemble.resume()
        for candidate in group.candidates[:: 1 if number % 2 == 0 else -1]:
            turns_s = _TURNS_IN_WINDOW * candidate.setting.envs_per_sampler * (self.step_us or 0.0) / 1e6
            window = group.ensemble.window(candidate.setting.samplers, settle_s,
                                           max(window_s, min(turns_s, _LONGEST_WINDOW_S)))
            candidate.env_steps_per_s.append(window.env_steps_per_s)
            candidate.updates_per_s.append(window.updates_per_s)
            candidate.cpu_share.append(window.cpu_share)
            candidate.memory_bytes = group.ensemble.memory_bytes
            if len(candidate.updates_per_s) == REPEATS:
                group.candidates.remove(candidate)
                group.finish(candidate)
        group.ensemble.pause()

    def _lengths(self, within_s: float, windows: int) -> tuple[float, float]:
        """Settling time and window that fit, between their bounds."""
        each = within_s / windows - _EDGE_S
        settle_s = min(_SETTLE_S, max(_SHORTEST_SETTLE_S, 0.25 * each))
        return settle_s, min(_WINDOW_S, max(_SHORTEST_WINDOW_S, each - settle_s))
