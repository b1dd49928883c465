"""The tuner's measurements on this machine: updates alone, and a mode's real workers, settings taking turns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Self

from spreeze.errors import ConfigError
from spreeze.machine.processes import PROBE, held_back, kill_and_wait
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import child_environment
from spreeze.runtime.plan import RunPlan
from spreeze.transport.shared_memory import readable
from spreeze.tuner.problem import BATCH, DEVICE, LEARNER, SAMPLERS, Setting, TrialResult
from spreeze.tuner.trials import ReplayTrial, RolloutTrial, TrialFailed, TrialRun, Window
from spreeze.workers.jobs import UpdateProbeJob, UpdateTurn

_EDGE_S = 0.1
"""What aligning a window with updates takes, about."""
_GROUP_START_S = 5.0
"""What starting a group takes, about; what it may take, between these bounds:"""
_SHORTEST_START_S, _LONGEST_START_S = 4.0, 25.0


@dataclass
class _Candidate:
    setting: Setting
    stage: str
    windows: list[Window] = field(default_factory=list)
    memory_bytes: int | None = None
    failure: str | None = None

    def result(self) -> TrialResult:
        kept = [] if self.failure else self.windows
        return TrialResult(
            stage=self.stage, setting=self.setting, env_steps_per_s=tuple(one.env_steps_per_s for one in kept),
            updates_per_s=tuple(one.updates_per_s for one in kept), cpu_share=tuple(one.cpu_share for one in kept),
            memory_bytes=self.memory_bytes, failure=self.failure,
        )


@dataclass
class TrialGroup:
    """A trial and the settings that are to be measured with it."""

    run: TrialRun
    candidates: list[_Candidate]
    """Those that are not finished yet."""
    finish: Callable[[_Candidate], None]

    def attempt(self, act: Callable[[], None]) -> None:
        """Does something for all that are left; a failure becomes theirs and ends the trial."""
        if not self.candidates:
            return
        try:
            act()
        except TrialFailed as failed:
            self.run.close()
            for candidate in self.candidates:
                candidate.failure = str(failed)
                self.finish(candidate)
            self.candidates.clear()

    def take_turn(self, number: int, settle_s: float, window_s: float, step_us: float | None) -> None:
        """One window of each candidate, forward and backward in turn; then the workers are stopped."""
        self.run.resume()
        for candidate in self.candidates[:: 1 if number % 2 == 0 else -1]:
            least_s = self.run.least_window_s(candidate.setting, step_us)
            candidate.windows.append(self.run.window(candidate.setting, settle_s, max(window_s, least_s)))
            candidate.memory_bytes = self.run.memory_bytes
            if len(candidate.windows) == self.run.pace.repeats:
                self.candidates.remove(candidate)
                self.finish(candidate)
        self.run.pause()


class Measurer:
    """Fulfils ``problem.Measure``; every child process has ended when its ``with`` block has."""

    def __init__(
        self, plan: RunPlan, *, usable_cores: float, memory_cap_bytes: int, group_bytes: int, ends_s: float,
        interrupts: Interrupts,
    ) -> None:
        """Starts nothing yet; all must be done at ``ends_s``, and a wish to stop raises KeyboardInterrupt anywhere.

        One candidate may take ``memory_cap_bytes`` of private memory; it takes about ``group_bytes``.
        """
        on_policy = plan.config.on_policy is not None
        self._trial: type[TrialRun] = RolloutTrial if on_policy else ReplayTrial
        self._timer = None if on_policy else UpdateTimer(plan, memory_cap_bytes, interrupts)
        self._open = functools.partial(self._trial, plan, usable_cores=usable_cores,
                                       memory_cap_bytes=memory_cap_bytes, interrupts=interrupts)
        self._groups = max(1, min(self._trial.most_groups(usable_cores), memory_cap_bytes // max(1, group_bytes)))
        self._ends_s = ends_s
        self.step_us: float | None = None
        """Time of one env step, None if not known; windows are long enough for some."""

    def __enter__(self) -> Self:
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.close()

    def seconds_left(self) -> float:
        return self._ends_s - time.monotonic()

    def device_start_s(self, device: str) -> float:
        return self._timer.device_start_s(device) if self._timer is not None else 0.0

    def learner(
        self, settings: Sequence[Setting], *, within_s: float, on_result: Callable[[TrialResult], None]
    ) -> list[TrialResult]:
        assert self._timer is not None
        return self._timer.measure(settings, within_s, on_result)

    def joint(
        self, settings: Sequence[Setting], *, within_s: float, on_result: Callable[[TrialResult], None]
    ) -> list[TrialResult]:
        # Several groups are started together and take turns, the others paused meanwhile, as far as memory allows.
        if self._timer is not None:
            self._timer.close()  # what it loaded takes memory, and updates alone are known by now
        shared: dict[Setting, list[_Candidate]] = {}
        for setting in dict.fromkeys(settings):
            shared.setdefault(self._trial.shared(setting), []).append(_Candidate(setting, self._trial.stage))
        waiting, end = list(shared.values()), time.monotonic() + within_s
        found: list[TrialResult] = []
        while waiting and self.seconds_left() > _SHORTEST_START_S:
            if found and time.monotonic() + _GROUP_START_S > end:
                break
            now, waiting = waiting[: self._groups], waiting[self._groups :]
            share = len(now) / (len(now) + len(waiting))
            found += self._together(now, (end - time.monotonic()) * share, on_result)
        return found

    def _together(
        self, groups: Sequence[list[_Candidate]], within_s: float, on_result: Callable[[TrialResult], None]
    ) -> list[TrialResult]:
        """Measures some groups in turns."""
        end = time.monotonic() + within_s
        done: list[TrialResult] = []

        def finish(candidate: _Candidate) -> None:
            done.append(candidate.result())
            on_result(done[-1])

        with contextlib.ExitStack() as stack:
            running: list[TrialGroup] = []
            for candidates in groups:
                largest = max((one.setting for one in candidates), key=lambda one: one.get(SAMPLERS, 0))
                running.append(TrialGroup(stack.enter_context(self._open(largest)), candidates, finish))
            for group in running:
                group.attempt(group.run.start)
            for group in running:
                start_s = min(_LONGEST_START_S, max(_SHORTEST_START_S, self.seconds_left()))
                group.attempt(functools.partial(group.run.begin, start_s))
            self._rounds([group for group in running if group.candidates], end)
        return done

    def _rounds(self, running: list[TrialGroup], end: float) -> None:
        """Every setting once a round, forward and backward in turn, so that drift meets all alike."""
        pace = self._trial.pace
        each_s = (end - time.monotonic()) / (pace.repeats * max(1, sum(len(one.candidates) for one in running)))
        settle_s = min(pace.settle_s[1], max(pace.settle_s[0], 0.25 * (each_s - _EDGE_S)))
        window_s = min(pace.window_s[1], max(pace.window_s[0], each_s - _EDGE_S - settle_s))
        for number in range(pace.repeats):
            for group in running[:: 1 if number % 2 == 0 else -1]:
                group.attempt(functools.partial(group.take_turn, number, settle_s, window_s, self.step_us))
            if self.seconds_left() < 0.0:
                break
        for group in running:
            for candidate in group.candidates:  # the budget is overdrawn: what they have has to do
                group.finish(candidate)


# --- updates alone ---

REPEATS = 3
_ROWS, _ROWS_BYTES = 100_000, 128_000_000
_LONGEST_REPEAT_S, _SHORTEST_REPEAT_S = 0.3, 0.06
_START_S, _GPU_START_S = 0.2, 6.0
"""Start and warm-up of one measurement, about, until one is measured: on a GPU context, libraries and kernels."""
_SLOW_UPDATE_S = 0.25
"""Larger batches are left out once an update takes longer."""
_OVERTIME = 0.5
"""On a machine so busy that all takes this share longer, what has one repeat by then has to do."""
_LOADING_S, _DEADLINE_S, _GRACE_S = 40.0, 10.0, 2.0
_GPU_DEADLINE_S = 25.0
"""On a GPU a measurement includes the start of CUDA."""


@dataclass
class Timing:
    """Updates of one setting, as far as they are timed."""

    setting: Setting
    rates: list[float] = field(default_factory=list)
    memory_bytes: int | None = None
    failure: str | None = None

    @property
    def on_gpu(self) -> bool:
        """True where starting a process costs seconds."""
        return "cuda" in self.setting[DEVICE]

    def result(self) -> TrialResult:
        rates = () if self.failure else tuple(self.rates)
        return TrialResult(stage=LEARNER, setting=self.setting, updates_per_s=rates, failure=self.failure,
                           memory_bytes=self.memory_bytes)


class UpdateTimer:
    """One helper process that has loaded what a learner needs, and measures in forks of itself.

    Nothing of it is left after the ``with`` block. A helper that dies is started again for the next turn.
    """

    def __init__(self, plan: RunPlan, memory_cap_bytes: int, interrupts: Interrupts) -> None:
        config = plan.config
        rows = max(1000, min(_ROWS, config.replay.capacity, _ROWS_BYTES // plan.layout.row_bytes))
        self._job = UpdateProbeJob(
            spec=plan.spec, algo=config.run.algo, algorithm=plan.algorithm_fields(),
            normalize_obs=config.env.normalize_obs, rows=rows, memory_cap_bytes=memory_cap_bytes,
        )
        self._interrupts, self._settings = interrupts, plan.settings
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._pending = b""
        self._ready = False
        self._unusable: str | None = None
        self._start_s: dict[str, float] = {}
        """By device: what came before the first repeat of its newest measurement."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the helper, so that it can load while something else is done; the first turn waits for it."""
        if self._process is not None:
            return
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the helper lives)
        self._pending, self._ready = b"", False
        with held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spreeze.machine.processes", PROBE, "spreeze.workers.update_probe",
                 json.dumps(self._job.to_json())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, process_group=0,
                env=child_environment(1, "probe"),
            )

    def close(self) -> None:
        """Ends the helper and whatever it measures."""
        process, self._process = self._process, None
        if process is not None:
            kill_and_wait(process)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def device_start_s(self, device: str) -> float:
        """Planned start of a GPU that was not used yet; 0 of any other device."""
        return _GPU_START_S if "cuda" in device and device not in self._start_s else 0.0

    def measure(
        self, settings: Sequence[Setting], within_s: float, on_result: Callable[[TrialResult], None]
    ) -> list[TrialResult]:
        """Rates of the settings, in rounds so that drift of the machine meets all alike.

        Raises:
            KeyboardInterrupt: the user asked to stop.
        """
        end = time.monotonic() + within_s
        last = end + _OVERTIME * within_s
        candidates = [Timing(setting) for setting in settings]
        everyone = tuple(candidates)
        done: list[TrialResult] = []
        for _ in range(REPEATS):
            for candidate in list(candidates):
                late = time.monotonic() > end
                if candidate.rates and time.monotonic() > last:
                    done.append(self._finished(candidate, candidates, on_result))
                    continue
                first = not candidate.rates and candidate is not everyone[0]
                if first and (late or _too_slow(candidate, everyone)):
                    candidates.remove(candidate)
                    continue
                self._turn(candidate, self._repeat_s(candidates, end - time.monotonic()))
                if candidate.failure or len(candidate.rates) >= REPEATS:
                    done.append(self._finished(candidate, candidates, on_result))
        return done

    def _repeat_s(self, candidates: Sequence[Timing], left_s: float) -> float:
        """Length of a repeat with which all that are left are done in time, their starts included."""
        starts, repeats = 0.0, 0
        for candidate in candidates:
            on_gpu, missing = candidate.on_gpu, REPEATS - len(candidate.rates)
            starts += self._start_s.get(candidate.setting[DEVICE], _GPU_START_S if on_gpu else _START_S) * (
                1 if on_gpu else missing)
            repeats += missing
        return min(_LONGEST_REPEAT_S, max(_SHORTEST_REPEAT_S, (left_s - starts) / max(1, repeats)))

    def _finished(
        self, candidate: Timing, candidates: list[Timing], on_result: Callable[[TrialResult], None]
    ) -> TrialResult:
        candidates.remove(candidate)
        rate = candidate.result()
        on_result(rate)
        return rate

    def _turn(self, candidate: Timing, repeat_s: float) -> None:
        setting, on_gpu = candidate.setting, candidate.on_gpu
        try:
            config = self._settings.with_layer(setting.layer()).config
        except ConfigError as error:
            candidate.failure = str(error)
            return
        turn = UpdateTurn(
            learner=config.learner, algorithm=dataclasses.asdict(config.algorithm),
            # On a GPU a start costs more than drift: all repeats in a row, in a process kept for the next batch.
            repeats=REPEATS if on_gpu else 1, repeat_s=repeat_s, kept=on_gpu,
            deadline_s=_GPU_DEADLINE_S if on_gpu else _DEADLINE_S,
        )
        answer = self._answer(turn)
        if "start_s" in answer:  # the newest: only the first one on a GPU has to make the context
            self._start_s[setting[DEVICE]] = answer["start_s"]
        candidate.failure = answer.get("failure")
        candidate.rates += answer.get("updates_per_s", ())
        memory = answer.get("memory_bytes")
        if memory is not None:
            candidate.memory_bytes = max(memory, candidate.memory_bytes or 0)

    def _answer(self, turn: UpdateTurn) -> dict[str, Any]:
        """What the helper found; its own death or silence is a failure of this measurement."""
        if self._unusable is not None:
            return {"failure": self._unusable}
        self.start()
        if not self._ready:
            self._unusable = self._line(_LOADING_S).get("failure")
            if self._unusable is not None:
                return {"failure": self._unusable}
            self._ready = True
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: the missing answer tells
            self._process.stdin.write(json.dumps(turn.to_json()).encode() + b"\n")
            self._process.stdin.flush()
        return self._line(turn.deadline_s + _GRACE_S)

    def _line(self, within_s: float) -> dict[str, Any]:
        """The helper's next line; a failure, and the end of the helper, where none comes.

        Raises:
            KeyboardInterrupt: the user asked to stop.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        fd, end = self._process.stdout.fileno(), time.monotonic() + within_s
        while b"\n" not in self._pending:
            if self._interrupts.asked:
                raise KeyboardInterrupt
            if time.monotonic() > end:
                return self._lost(f"not done within {within_s:.0f} s")
            if readable([fd], 0.1):
                data = os.read(fd, 65536)
                if not data:
                    code = kill_and_wait(self._process)
                    return self._lost("its process does not end" if code is None else f"its process ended with {code}")
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _lost(self, why: str) -> dict[str, Any]:
        assert self._errors is not None
        self._errors.seek(0)
        lines = [line for line in self._errors.read()[-4000:].decode(errors="replace").splitlines() if line.strip()]
        self.close()
        return {"failure": f"{why}: {lines[-1].strip()[:200]}" if lines else why}


def _too_slow(candidate: Timing, others: Sequence[Timing]) -> bool:
    """True for a larger batch than one that already took too long in the same place."""
    setting = candidate.setting
    return any(
        other.rates and other.rates[0] * _SLOW_UPDATE_S < 1.0 and setting[BATCH] > other.setting[BATCH]
        and setting.without(BATCH) == other.setting.without(BATCH) for other in others
    )
