"""The tuner's measurements on this machine: updates alone, and a mode's real workers, settings taking turns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Self

from spreeze.errors import ConfigError
from spreeze.machine.awake import AWAKE
from spreeze.machine.processes import PROBE, kill_and_wait, signals_blocked
from spreeze.runtime.launcher import child_environment
from spreeze.runtime.plan import RunPlan
from spreeze.transport.shared_memory import readable
from spreeze.tuner.problem import BATCH, DEVICE, LEARNER, SAMPLERS, OnResult, Setting, TrialResult
from spreeze.tuner.trials import HOST, REPLAY, ROLLOUTS, ROWS, ROWS_BYTES, Stopping, Trial
from spreeze.workers.jobs import UpdateProbeJob, UpdateTurn

_MAX_GROUPS = 4  # Trials that take turns.
_CORES_OF_START = 4
"""Cores for each trial that starts at the same time: a start is mostly imports, which keep a core busy per process."""
_GROUP_START_S = 5.0  # Time to start a group, about.
_SHORTEST_START_S, _LONGEST_START_S = 4.0, 25.0  # bounds of the time that starting a group may take: as much as is left
REPEATS = 3
_LONGEST_REPEAT_S, _SHORTEST_REPEAT_S = 0.3, 0.06
_START_S, _GPU_START_S = 0.2, 6.0
"""Assumed start and warm-up of a measurement until one is known: on a GPU context, libraries and kernels."""
_SLOW_UPDATE_S = 0.25  # Larger batches are left out once an update takes longer.
_OVERTIME = 0.5
"""Share of its time by which measuring updates alone may overrun. On a machine that busy, a candidate with one
repeat then gets no further ones."""
_LOADING_S, _DEADLINE_S, _GRACE_S = 40.0, 10.0, 2.0
_GPU_DEADLINE_S = 25.0  # On a GPU a measurement includes the start of CUDA; without a fork, that of PyTorch.


class Measurer:
    """Measures settings in fresh child processes, in turns; all of them end with its ``with`` block.

    ``learner`` and ``joint`` measure settings in order of importance, within about ``within_s`` seconds: they shorten
    their windows, then leave out the last settings. A crash, a hang or missing memory is a result with ``failure``.
    ``on_result`` gets each result as soon as it is known. Both raise KeyboardInterrupt when the user asks to stop.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        usable_cores: float,
        memory_cap_bytes: int,
        group_bytes: int,
        ends_s: float,
        interrupts: Stopping,
        samplers_only: bool = False,
        exclusive: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Starts nothing yet; all must be done at ``ends_s``; ``samplers_only`` measures without a learner.

        A candidate takes about ``group_bytes``, at most ``memory_cap_bytes``, of private memory. The context of
        ``exclusive`` keeps the workers of a run from computing during a turn of a mode's real workers.
        """
        on_policy = plan.config.on_policy is not None
        self._plan, self._ends_s, self._exclusive = plan, ends_s, exclusive
        self._helper = None if on_policy or samplers_only else UpdateHelper(plan, memory_cap_bytes, interrupts)
        self._kind = HOST if samplers_only else ROLLOUTS if on_policy else REPLAY
        self._open = functools.partial(
            Trial, self._kind, plan, usable_cores=usable_cores, memory_cap_bytes=memory_cap_bytes, interrupts=interrupts
        )
        self._groups = max(1, min(_MAX_GROUPS, memory_cap_bytes // max(1, group_bytes)))
        self._starts = max(1, int(usable_cores / _CORES_OF_START))
        self.step_us: float | None = None  # Time of one env step, None if not known; windows are long enough for some.
        self._start_s: dict[str, float] = {}
        """By device: time before the first repeat of the newest measurement of updates alone."""

    def __enter__(self) -> Self:
        if self._helper is not None:
            self._helper.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._helper is not None:
            self._helper.close()

    def seconds_left(self) -> float:
        """Seconds of the budget that are left; negative when it is overdrawn."""
        return self._ends_s - AWAKE()

    # --- everything running ---

    def joint(self, settings: Sequence[Setting], *, within_s: float, on_result: OnResult) -> list[TrialResult]:
        """Measures the mode's real workers. Several trials start together and take turns, as far as memory allows."""
        if self._helper is not None:
            self._helper.close()  # its libraries take memory, and updates alone are measured by now
        shared: dict[Setting, list[TrialResult]] = {}
        for setting in dict.fromkeys(settings):
            candidate = TrialResult(trial=self._kind.trial, setting=setting)
            shared.setdefault(setting.without(SAMPLERS) if self._kind.shares else setting, []).append(candidate)
        waiting, end = list(shared.values()), AWAKE() + within_s
        results: list[TrialResult] = []

        def finish(candidate: TrialResult) -> None:
            results.append(candidate)
            on_result(candidate)

        while waiting and self.seconds_left() > _SHORTEST_START_S:
            if results and AWAKE() + _GROUP_START_S > end:
                break
            fraction = min(1.0, self._groups / len(waiting))
            self._together(waiting[: self._groups], AWAKE() + (end - AWAKE()) * fraction, finish)
            waiting = waiting[self._groups :]
        return results

    def _together(self, groups: Sequence[list[TrialResult]], end: float, finish: OnResult) -> None:
        """Runs all once a round, forward and backward in turn against drift; the last ones only if time is left."""
        with contextlib.ExitStack() as stack:
            trials: list[Trial] = []
            for at in range(0, len(groups), self._starts):
                if trials and self.seconds_left() < _SHORTEST_START_S + _GROUP_START_S:
                    break
                starting = groups[at : at + self._starts]
                new = [stack.enter_context(self._open(group, finish, step_us=self.step_us)) for group in starting]
                trials += new
                for trial in new:
                    trial.attempt(trial.start)
                for trial in new:
                    start_s = min(_LONGEST_START_S, max(_SHORTEST_START_S, self.seconds_left()))
                    trial.attempt(functools.partial(trial.begin, start_s))
            pace = self._kind.pace
            settle_s, window_s = pace.divided(end - AWAKE(), sum(len(one.candidates) for one in trials))
            for number in range(pace.repeats):
                for trial in trials[:: 1 if number % 2 == 0 else -1]:
                    with self._exclusive():
                        trial.attempt(functools.partial(trial.take_turn, number, settle_s, window_s))
                if self.seconds_left() < 0.0:
                    break
            for trial in trials:
                for candidate in list(trial.candidates):  # the budget is overdrawn: their results so far must suffice
                    trial.finish(candidate)

    # --- updates alone ---

    def learner(self, settings: Sequence[Setting], *, within_s: float, on_result: OnResult) -> list[TrialResult]:
        """Measures updates alone on synthetic rows, in rounds against drift, without batches whose updates are slow."""
        start = AWAKE()
        everyone = [TrialResult(trial=LEARNER, setting=setting) for setting in settings]
        waiting, done = list(everyone), []
        for _ in range(REPEATS):
            for candidate in list(waiting):
                elapsed_s, measured = AWAKE() - start, bool(candidate.updates_per_s)
                late = elapsed_s > within_s or _too_slow(candidate, everyone)
                if late and not measured and candidate is not everyone[0]:
                    waiting.remove(candidate)
                    continue
                if not measured or elapsed_s <= (1.0 + _OVERTIME) * within_s:
                    self._take_turn(candidate, self._repeat_s(waiting, within_s - elapsed_s))
                    if not candidate.failure and len(candidate.updates_per_s) < REPEATS:
                        continue
                waiting.remove(candidate)
                done.append(candidate)
                on_result(candidate)
        return done

    def _repeat_s(self, candidates: Sequence[TrialResult], left_s: float) -> float:
        """Length of a repeat with which all remaining candidates finish in time, starts included."""
        starts, repeats = 0.0, 0
        for candidate in candidates:
            device, missing = candidate.setting[DEVICE], REPEATS - len(candidate.updates_per_s)
            start_s, count = (_GPU_START_S, 1) if starts_slowly(device) else (_START_S, missing)
            starts += self._start_s.get(device, start_s) * count
            repeats += missing
        return min(_LONGEST_REPEAT_S, max(_SHORTEST_REPEAT_S, (left_s - starts) / max(1, repeats)))

    def _take_turn(self, candidate: TrialResult, repeat_s: float) -> None:
        device = candidate.setting[DEVICE]
        slow = starts_slowly(device)
        try:
            config = self._plan.settings.with_layer(candidate.setting.layer()).config
        except ConfigError as error:
            return candidate.fail(str(error))
        assert self._helper is not None
        result = self._helper.run_turn(
            UpdateTurn(
                learner=config.learner,
                algorithm=dataclasses.asdict(config.algorithm),
                # On a GPU a start costs more than drift: all repeats in a row, in a process kept for the next batch.
                repeats=REPEATS if slow else 1,
                repeat_s=repeat_s,
                kept=slow,
                deadline_s=_GPU_DEADLINE_S if slow or sys.platform != "linux" else _DEADLINE_S,
            )
        )
        if "start_s" in result:  # the newest: only the first one on a GPU has to make the context
            self._start_s[device] = result["start_s"]
        candidate.updates_per_s += tuple(result.get("updates_per_s", ()))
        candidate.memory_bytes = max(result.get("memory_bytes") or 0, candidate.memory_bytes or 0) or None
        if result.get("failure"):
            candidate.fail(result["failure"], starved=bool(result.get("starved")))


def starts_slowly(device: str) -> bool:
    """True if starting a process on a device costs seconds."""
    return "cuda" in device


def _too_slow(candidate: TrialResult, others: Sequence[TrialResult]) -> bool:
    setting = candidate.setting
    slow = [one.setting for one in others if one.updates_per_s and one.updates_per_s[0] * _SLOW_UPDATE_S < 1.0]
    return any(setting[BATCH] > one[BATCH] and setting.without(BATCH) == one.without(BATCH) for one in slow)


class UpdateHelper:
    """A process that has loaded a learner's libraries, and measures in forks of itself; a dead one is restarted."""

    def __init__(self, plan: RunPlan, memory_cap_bytes: int, interrupts: Stopping) -> None:
        config = plan.config
        rows = max(1000, min(ROWS, config.replay.capacity, ROWS_BYTES // plan.layout.row_bytes))
        self._job = UpdateProbeJob(
            spec=plan.spec,
            algo=config.run.algo,
            algorithm=plan.algorithm_fields(),
            normalize_obs=config.env.normalize_obs,
            rows=rows,
            memory_cap_bytes=memory_cap_bytes,
        )
        self._interrupts = interrupts
        self._process: subprocess.Popen[bytes] | None = None
        self._unusable: dict[str, Any] | None = None

    def start(self) -> None:
        """Starts the helper, so that it loads in the background; the first turn waits for it."""
        if self._process is not None:
            return
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the helper lives)
        self._pending, self._ready = b"", False
        job = json.dumps(self._job.to_json())
        command = [sys.executable, "-m", "spreeze.machine.processes", PROBE, "spreeze.tuner.update_probe", job]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        with signals_blocked():
            self._process = subprocess.Popen(command, process_group=0, env=child_environment(1, "probe"), **streams)

    def close(self) -> None:
        """Ends the helper and whatever it measures."""
        process, self._process = self._process, None
        if process is not None:
            kill_and_wait(process)
            for stream in filter(None, (process.stdin, process.stdout, self._errors)):
                with contextlib.suppress(OSError):
                    stream.close()

    def run_turn(self, turn: UpdateTurn) -> dict[str, Any]:
        """Result of one turn; a helper that dies or hangs is a failure. Repeated if the process stopped or slept."""
        while True:
            slept_s = AWAKE.slept_s
            result = self._result_of(turn)
            if AWAKE.slept_s == slept_s:
                return result

    def _result_of(self, turn: UpdateTurn) -> dict[str, Any]:
        if self._unusable is not None:
            return self._unusable
        self.start()
        if not self._ready:
            loaded = self._line(_LOADING_S)
            self._unusable, self._ready = loaded if "failure" in loaded else None, True
            if self._unusable is not None:
                return loaded
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, as the missing line will show
            self._process.stdin.write(json.dumps(turn.to_json()).encode() + b"\n")
            self._process.stdin.flush()
        return self._line(turn.deadline_s + _GRACE_S)

    def _line(self, within_s: float) -> dict[str, Any]:
        """The helper's next line; if none comes, a failure, which ends the helper. KeyboardInterrupt on request."""
        assert self._process is not None
        assert self._process.stdout is not None
        fd, end = self._process.stdout.fileno(), AWAKE() + within_s
        while b"\n" not in self._pending:
            if self._interrupts.stop_requested:
                raise KeyboardInterrupt
            if AWAKE() > end:
                return self._lost(f"not done within {within_s:.0f} s", starved=True)
            if readable([fd], 0.1):
                data = os.read(fd, 65536)
                if not data:
                    code = kill_and_wait(self._process)
                    why = "its process does not terminate" if code is None else f"its process ended with {code}"
                    return self._lost(why, starved=code in (None, -signal.SIGKILL))
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return dict(json.loads(line))

    def _lost(self, why: str, *, starved: bool = False) -> dict[str, Any]:
        self._errors.seek(0)
        lines = [line for line in self._errors.read()[-4000:].decode(errors="replace").splitlines() if line.strip()]
        self.close()
        return {"failure": f"{why}: {lines[-1].strip()[:200]}" if lines else why, "starved": starved}
