"""The governor decides how many samplers may work, for a share of the cores that is to be left free.

It changes only the number of active samplers, in eighths: 1.25 is one sampler and a second that works a quarter of its
time.

* The kernel shares the cores between this run and other programs, at the priority of any program. Other programs go
  first only with ``give_way``: all workers then run at low priority, and at most half of the samplers are paused for
  what priorities do not reach (memory bandwidth, the second thread of a core), not for loads of up to half a core.
* Samplers may use what the usable cores leave after the other programs (or the share that the user keeps free, if that
  is more), the learner, evaluation and pictures. If the run alone wants more than all cores, that stays.
* It starts five seconds after learning, and ignores memory and GPU load. Runs in another container are not recognized.
* No run pauses samplers because of another run. The cores that they keep busy are not available to this one, so each
  sees the same shortage and gives way when another program comes.
* Dead band: nothing changes for less than a quarter of a core, or 4 % of the usable cores if that is more.
* Gives up cores, and half a dead band more, when two seconds in a row ask for it. Reactivates samplers when nine of the
  last ten seconds leave room; a load that returns within two minutes extends this wait, up to a minute. Never more than
  six changes in a minute.
* Where a mode balances production and consumption (TianJi, arXiv 2502.20190, Eq. 3), the limiter holds rows drawn over
  rows inserted at one ratio. Only so many samplers work as the learner needs: if they wait for it, some are paused.
* Even where a share is to be left free, an eighth of a sampler stays active. More come back if the learner waits for
  rows. Each of several learners has its samplers' share of the active ones, and the one that waits most counts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from spreeze.formatting import number, percent
from spreeze.machine.utilisation import ContentionReader, CpuContention
from spreeze.metrics.bottleneck import BACKGROUND_CORES
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import CounterSample, samples_per_insert
from spreeze.transport import status_table
from spreeze.transport.status_table import StatusTable
from spreeze.workers.roles import role_of

STEP = 0.125  # of the number of active samplers, and its minimum
DEAD_BAND_CORES, DEAD_BAND_SHARE = 0.25, 0.04  # smallest change: cores, or a share of the usable ones if that is more
LIGHT_CORES = 0.5  # load of other programs for which the low priority of workers that give way suffices
PAUSED_SHARE = 0.5  # of the samplers, at most, beside heavier loads
SETTLE_S = 5
YIELD_S, RETURN_S, STARVED_S = 2, 10, 3
LONGEST_RETURN_S, RELAPSE_S = 60, 120
CHANGES_PER_MINUTE = 6
STARVED_SHARE = 0.10  # the learner starves if it waits for rows for a larger share of its time
SPARE_SHARE = 0.10  # share of their time that balanced samplers wait for the learner: room for a slow second
BALANCE_S, FED_S = 5, 60
"""Seconds over which that waiting is averaged; seconds after the learner had to be fed, in which nobody is paused."""
SMOOTHING = 0.1  # weight of the newest second in the averages of wanted cores


@dataclass(frozen=True, kw_only=True)
class LoadSecond:
    """One second of a run. Cores are seconds of CPU time a second."""

    usable_cores: float
    external_cpu_cores: float  # usable cores that programs other than the user's runs, tuners and dashboard keep busy
    sibling_cores: float = 0.0  # usable cores that those keep busy
    learner_cores: float  # what the learner uses and waits for, at most its threads
    other_cores: float  # what evaluator, visualizer and supervisor use
    sampler_cores: float  # what all samplers use and wait for, at most a core each
    learner_wait_share: float  # share of its time that the learner waits for rows or the limiter
    samples_per_insert: float | None = None
    sampler_wait_share: float = 0.0  # share of their time that the active samplers wait for the limiter

    @property
    def dead_band(self) -> float:
        return max(DEAD_BAND_CORES, DEAD_BAND_SHARE * self.usable_cores)


class Change(NamedTuple):
    active: float
    reason: str


class Governor:
    """Decides the number of active samplers; fed once a second."""

    def __init__(
        self, maximum: int, leave_free: float = 0.0, *, gives_way: bool = True, balanced_groups: int = 0
    ) -> None:
        """``leave_free`` is the share of the usable cores to keep free for other programs, used or not.

        Without it no sampler is paused for others unless the run ``gives_way``. With ``balanced_groups`` learners,
        whole samplers that these do not need are paused, down to one each; one that works part of its time would
        deliver in bursts.
        """
        self._maximum, self.leave_free, self._gives_way = float(maximum), leave_free, gives_way
        self._groups, self._needed, self._fed_s = balanced_groups, self._maximum, -math.inf
        self.active = self._maximum
        self._seen: deque[LoadSecond] = deque(maxlen=LONGEST_RETURN_S)
        self._fixed, self._per_sampler, self._known = 0.0, 0.0, False
        self._now_s = self._starved_s = 0
        self._changed_s: deque[int] = deque(maxlen=CHANGES_PER_MINUTE)
        self._returned_s = self._gave_up_s = -math.inf
        self._return_wait_s = RETURN_S
        self._minimum = STEP

    def feed(self, second: LoadSecond | None) -> Change | None:
        """Takes in one second; returns a change, or None. ``second`` is None if unknown, as before learning."""
        self._now_s += 1
        if second is None:
            self._seen.clear()
            self._starved_s = 0
            return None
        self._seen.append(second)
        self._smooth(second)
        starved = second.learner_wait_share >= STARVED_SHARE and self.active < self._maximum
        self._starved_s = self._starved_s + 1 if starved else 0
        changes = sum(self._now_s - changed_s < 60 for changed_s in self._changed_s)
        if len(self._seen) < SETTLE_S or changes >= CHANGES_PER_MINUTE:
            return None
        return self._feed_learner(second) or self._give_up(second) or self._balance(second) or self._take_back(second)

    def _smooth(self, second: LoadSecond) -> None:
        """Averages over some seconds the cores that an active sampler and the rest of this run want."""
        fixed = second.learner_cores + second.other_cores
        per_sampler = min(max(second.sampler_cores / self.active, 0.01), 1.25)
        weight = SMOOTHING if self._known else 1.0
        self._fixed += weight * (fixed - self._fixed)
        self._per_sampler += weight * (per_sampler - self._per_sampler)
        self._known = True

    def _unchanged_s(self) -> float:
        return self._now_s - self._changed_s[-1] if self._changed_s else math.inf

    def _fitting_samplers(self, second: LoadSecond) -> float:
        """Samplers that fit beside the load of a second; may be negative, or more than there are."""
        external, usable_cores = second.external_cpu_cores, second.usable_cores
        if self.leave_free > 0.0:
            # What is always there is no part of the share to be left free.
            free = usable_cores - max(external - BACKGROUND_CORES, self.leave_free * usable_cores)
        else:
            free = max(usable_cores - second.sibling_cores, self._fixed + self._maximum * self._per_sampler)
            free -= max(0.0, external - LIGHT_CORES) if self._gives_way else 0.0
        return (free - self._fixed) / self._per_sampler

    def _limited(self, fitting: float) -> float:
        steps = math.floor(fitting / STEP + 1e-6)
        working = 0.0 if self.leave_free > 0.0 else math.ceil((1.0 - PAUSED_SHARE) * self._maximum / STEP) * STEP
        return min(max(steps * STEP, self._minimum, working), self._maximum)

    def _feed_learner(self, second: LoadSecond) -> Change | None:
        """Adds one step when the learner waits for rows, unless that takes from a share to be left free."""
        more = min(self.active + STEP, self._maximum)
        blocked = self.leave_free > 0.0 and self._fitting_samplers(second) < more
        if self._starved_s < STARVED_S or self._unchanged_s() < STARVED_S or blocked:
            return None
        self._minimum, self._needed, self._fed_s = more, max(self._needed, more), self._now_s
        return self._change(
            more,
            f"the learner waits {percent(second.learner_wait_share)} of its time for transitions, at "
            f"{number(second.samples_per_insert)} samples per insert",
        )

    def _give_up(self, second: LoadSecond) -> Change | None:
        latest = list(self._seen)[-YIELD_S:]
        fitting = max(map(self._fitting_samplers, latest))
        mean = dataclasses.replace(
            second,
            external_cpu_cores=sum(one.external_cpu_cores for one in latest) / len(latest),
            sibling_cores=sum(one.sibling_cores for one in latest) / len(latest),
        )
        # Half a dead band more than needed, so that noise requires nothing further.
        fewer = self._limited(self._fitting_samplers(mean) - 0.5 * second.dead_band / self._per_sampler)
        starving = self.leave_free == 0.0 and second.learner_wait_share >= STARVED_SHARE
        if (self.active - fitting) * self._per_sampler <= second.dead_band or fewer >= self.active or starving:
            return None
        if self._unchanged_s() < YIELD_S:
            return None
        relapse = self._now_s - self._returned_s < RELAPSE_S
        self._return_wait_s = min(2 * self._return_wait_s, LONGEST_RETURN_S) if relapse else RETURN_S
        self._returned_s, self._gave_up_s = -math.inf, self._now_s
        return self._change(fewer, self._reason(mean))

    def _balance(self, second: LoadSecond) -> Change | None:
        """Pauses samplers that only wait for the learner, except for some spare time."""
        latest = list(self._seen)[-BALANCE_S:]
        waits = sum(one.sampler_wait_share for one in latest) / len(latest)
        needed = float(max(math.ceil(self.active * (1.0 - waits) / (1.0 - SPARE_SHARE) - 1e-6), self._groups))
        settled = self._unchanged_s() >= BALANCE_S and self._now_s - self._fed_s >= FED_S
        if not self._groups or not settled or needed >= self.active:
            return None
        self._needed, self._minimum = needed, min(self._minimum, needed)
        return self._change(
            self._needed,
            f"the samplers wait {percent(waits)} of their time for the learner; "
            f"{number(self._needed)} of them insert as much as it draws, at "
            f"{number(second.samples_per_insert)} samples per insert",
        )

    def _take_back(self, second: LoadSecond) -> Change | None:
        latest, gave_up_s = list(self._seen)[-self._return_wait_s :], self._now_s - self._gave_up_s
        if self.active >= self._needed or len(latest) < self._return_wait_s or gave_up_s < self._return_wait_s:
            return None
        worst = sorted(latest, key=self._fitting_samplers)[1]
        fitting = self._fitting_samplers(worst)
        # Reactivate all if the shortfall is at most half a dead band; else only if 1.5 dead bands are gained.
        all_back = (self._maximum - fitting) * self._per_sampler <= 0.5 * second.dead_band
        more = min(self._maximum if all_back else self._limited(fitting), self._needed)
        if more <= self.active or (not all_back and (more - self.active) * self._per_sampler <= 1.5 * second.dead_band):
            return None
        self._returned_s = self._now_s
        if more == self._maximum:
            self._minimum = STEP
        return self._change(more, self._reason(worst))

    def _change(self, active: float, reason: str) -> Change:
        self.active = active
        self._changed_s.append(self._now_s)
        return Change(active, reason)

    def _reason(self, second: LoadSecond) -> str:
        kept = " in one second"
        if second.sibling_cores >= BACKGROUND_CORES:
            kept += f", the page, other runs and programs of low priority {second.sibling_cores:.2f}"
        kept += f", {self.leave_free * second.usable_cores:.2f} must stay free" if self.leave_free else ""
        return (
            f"other programs use {second.external_cpu_cores:.2f} of {second.usable_cores:g} usable cores{kept}; "
            f"the learner and the rest need {self._fixed:.2f} cores, each sampler {self._per_sampler:.2f}"
        )


_EVERY_S = 1.0
_LONGEST_S = 3.0  # a reading later than this after the last one is discarded: the machine slept, or was stuck
_TURN_SHARE = 1 / 32
"""A turn is over when each active sampler has written about this share of its shard; checked twice a second."""
_LONGEST_TURN_S = 10.0  # if a sampler is slow or dead


class LoadWatch:
    """Measures the load of other programs once a second, to separate it from the run's own load."""

    def __init__(self, reader: ContentionReader | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader, self._clock = ContentionReader(role_of) if reader is None else reader, clock
        self.now_s, self._measured_s = 0.0, -math.inf
        self.load: CpuContention | None = None

    def measure(self, pids: Mapping[str, int]) -> bool:
        """Measures if a second has passed, and returns True then. ``pids``: of all workers and of the supervisor."""
        self.now_s = self._clock()
        if self.now_s - self._measured_s < _EVERY_S:
            return False
        self.load, self._measured_s = self._reader.sample(pids), self.now_s
        return True

    def update(self, reading: CounterSample, pids: Mapping[str, int]) -> dict[str, float | None]:
        """Measures if a second has passed; returns the metrics of the latest measurement."""
        self.measure(pids)
        return self.metrics

    @property
    def metrics(self) -> dict[str, float | None]:
        return {
            "external_cpu_cores": None if self.load is None else self.load.external_cpu_cores,
            "sibling_cpu_cores": None if self.load is None else self.load.sibling_cores,
        }


class GovernorLoop:
    """One run's governor with its measurements; the supervisor calls it at each sample."""

    def __init__(
        self,
        plan: RunPlan,
        status: StatusTable,
        on_event: Callable[[str, str], None],
        *,
        reader: ContentionReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts with all samplers active; each change is an event (level, text)."""
        self._watch, tuning = LoadWatch(reader, clock), plan.config.tuning
        groups = plan.learners if plan.config.data_flow.balanced else 0
        self._governor_of = functools.partial(Governor, gives_way=tuning.give_way, balanced_groups=groups)
        self._maximum = plan.first_samplers or plan.samplers
        self._governor = self._governor_of(self._maximum, tuning.leave_free)
        self._started, self._status, self._on_event = plan.samplers, status, on_event
        self._suspended, self._learner_threads = False, float(plan.config.learner.threads)
        self._takes_turns = plan.first_samplers is None
        """False while only the first samplers were started."""
        self._samplers = [plan.samplers_of(group) for group in range(plan.learners)]
        self._before: tuple[float, list[int], list[float], float] | None = None
        buffer = plan.ring_spec().rows_per_shard if plan.config.on_policy is None else plan.rollout_spec().rows
        self._turn_rows = _TURN_SHARE * buffer
        self._turn_began = (0.0, 0)  # seconds, rows inserted
        for group, samplers in enumerate(self._samplers):
            status.group(group)[status_table.SAMPLERS] = samplers
        self._post(self._governor.active)

    def update(self, reading: CounterSample, pids: Mapping[str, int]) -> dict[str, float | None]:
        """Measures and acts if a second has passed; returns its metrics."""
        measured, now_s = self._watch.measure(pids), self._watch.now_s
        waits_s = [group.learner["wait_s"] for group in reading.groups]
        sampler_waits_s = sum(sampler["wait_s"] for group in reading.groups for sampler in group.samplers)
        learners = [pid for name, pid in pids.items() if (role := role_of(name)) is not None and role.learns]
        if measured:
            load = self._watch.load
            second = None if load is None else self._load_second(load, reading, now_s, learners)
            self._before = (now_s, learners, waits_s, sampler_waits_s)
            before, change = number(self._governor.active), None if self._suspended else self._governor.feed(second)
            if change is not None:
                self._post(change.active)
                self._on_event(
                    "info",
                    f"governor: {before} -> {number(change.active)} of {self._maximum} samplers "
                    f"active: {change.reason}",
                )
        self._pass_turn(now_s, reading.inserted)
        return {"samplers_active": self._governor.active, **self._watch.metrics}

    def suspend(self) -> None:
        """Suspends the governor until ``resume``, while the tuner controls the samplers."""
        self._suspended = True

    def resume(self, samplers: int) -> None:
        """Governs ``samplers`` from now on: fewer than were started, if the tuner chose fewer."""
        self._suspended, self._takes_turns, self._maximum = False, True, samplers
        self._governor = self._governor_of(samplers, self._governor.leave_free)
        self._post(self._governor.active)

    def leave_free(self, fraction: float) -> None:
        """Keeps that fraction of the usable cores free for other programs from now on."""
        self._governor.leave_free = fraction

    def _pass_turn(self, now_s: float, inserted: int) -> None:
        """While some samplers are paused, makes the next one the first when the active ones have written enough."""
        (began_s, before), active = self._turn_began, self._governor.active
        if inserted - before >= self._turn_rows * max(1.0, active) or now_s - began_s >= _LONGEST_TURN_S:
            self._turn_began = now_s, inserted
            for group, samplers in enumerate(self._samplers) if self._takes_turns and active < self._started else ():
                header = self._status.group(group)
                header[status_table.FIRST_SAMPLER] = (int(header[status_table.FIRST_SAMPLER]) + 1) % samplers

    def _load_second(
        self, load: CpuContention, reading: CounterSample, now_s: float, learners: list[int]
    ) -> LoadSecond | None:
        """Load of this second; None before learning, or if a learner was just restarted."""
        groups = reading.groups
        if self._before is None or learners != self._before[1] or len(learners) < len(groups):
            return None
        elapsed_s = now_s - self._before[0]
        if elapsed_s > _LONGEST_S or any(g.inserted_at_learning_start < 0 or g.learner["updates"] <= 0 for g in groups):
            return None
        samplers = learning = others = 0.0
        for name, wanted in load.wanted.items():
            role, ran = role_of(name), load.ran.get(name, 0.0)
            if role is not None and role.pausable:
                samplers += min(wanted, max(1.0, ran))  # helper threads that wait beside the main one want no more
            elif role is not None and role.learns:
                learning += min(wanted, max(self._learner_threads, ran))
            else:  # of low priority, or in need of little: how long they wait says nothing
                others += ran
        sampler_waits_s = sum(s["wait_s"] for group in groups for s in group.samplers) - self._before[3]
        waited_s = max(group.learner["wait_s"] - before for group, before in zip(groups, self._before[2], strict=True))
        return LoadSecond(
            usable_cores=load.usable_cores,
            external_cpu_cores=load.external_cpu_cores,
            sibling_cores=load.sibling_cores,
            learner_cores=learning,
            sampler_cores=samplers,
            other_cores=others,
            learner_wait_share=min(max(0.0, waited_s) / elapsed_s, 1.0),
            samples_per_insert=samples_per_insert(groups),
            sampler_wait_share=min(max(0.0, sampler_waits_s) / (elapsed_s * self._governor.active), 1.0),
        )

    def _post(self, active: float) -> None:
        """Stores each group's share of the active samplers; between the stores at most one sampler is missing."""
        for group, samplers in enumerate(self._samplers):
            header, working = self._status.group(group), max(active * samplers / self._started, STEP)
            header[status_table.SLOWED_SHARE] = 0
            header[status_table.ACTIVE_SAMPLERS] = int(working)
            header[status_table.SLOWED_SHARE] = round(1000 * (working - int(working)))
