"""Times updates of one learner setting after the other, in processes of their own, none of which can do harm."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Self

from spreeze.machine.process_names import PROBE
from spreeze.machine.processes import held_back, kill_and_wait
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import child_environment
from spreeze.runtime.plan import RunPlan
from spreeze.transport.shared_memory import readable
from spreeze.tuner.problem import LearnerRate, LearnerSetting
from spreeze.workers.jobs import UpdateProbeJob, UpdateTurn

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
class _Candidate:
    setting: LearnerSetting
    rates: list[float] = field(default_factory=list)
    memory_bytes: int | None = None
    failure: str | None = None

    @property
    def on_gpu(self) -> bool:
        """True where starting a process costs seconds."""
        return "cuda" in self.setting.device

    def result(self) -> LearnerRate:
        rates = () if self.failure else tuple(self.rates)
        return LearnerRate(setting=self.setting, updates_per_s=rates, failure=self.failure,
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
        self._interrupts = interrupts
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
                [sys.executable, "-m", "spreeze.machine.process_names", PROBE, "spreeze.workers.update_probe",
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
        self, settings: Sequence[LearnerSetting], within_s: float, on_rate: Callable[[LearnerRate], None]
    ) -> list[LearnerRate]:
        """Rates of the settings, in rounds so that drift of the machine meets all alike.

        Raises:
            KeyboardInterrupt: the user asked to stop.
        """
        end = time.monotonic() + within_s
        last = end + _OVERTIME * within_s
        candidates = [_Candidate(setting) for setting in settings]
        done: list[LearnerRate] = []
        for _ in range(REPEATS):
            for candidate in list(candidates):
                late = time.monotonic() > end
                if candidate.rates and time.monotonic() > last:
                    done.append(self._finished(candidate, candidates, on_rate))
                    continue
                first = not candidate.rates and candidate is not candidates[0]
                if first and (late or _too_slow(candidate, candidates)):
                    candidates.remove(candidate)
                    continue
                self._turn(candidate, self._repeat_s(candidates, end - time.monotonic()))
                if candidate.failure or len(candidate.rates) >= REPEATS:
                    done.append(self._finished(candidate, candidates, on_rate))
        return done

    def _repeat_s(self, candidates: Sequence[_Candidate], left_s: float) -> float:
        """Length of a repeat with which all that are left are done in time, their starts included."""
        starts, repeats = 0.0, 0
        for candidate in candidates:
            on_gpu, missing = candidate.on_gpu, REPEATS - len(candidate.rates)
            starts += self._start_s.get(candidate.setting.device, _GPU_START_S if on_gpu else _START_S) * (
                1 if on_gpu else missing)
            repeats += missing
        return min(_LONGEST_REPEAT_S, max(_SHORTEST_REPEAT_S, (left_s - starts) / max(1, repeats)))

    def _finished(
        self, candidate: _Candidate, candidates: list[_Candidate], on_rate: Callable[[LearnerRate], None]
    ) -> LearnerRate:
        candidates.remove(candidate)
        rate = candidate.result()
        on_rate(rate)
        return rate

    def _turn(self, candidate: _Candidate, repeat_s: float) -> None:
        setting, on_gpu = candidate.setting, candidate.on_gpu
        turn = UpdateTurn(
            batch_size=setting.batch_size, threads=setting.threads, device=setting.device, precision=setting.precision,
            # On a GPU a start costs more than drift: all repeats in a row, in a process kept for the next batch.
            repeats=REPEATS if on_gpu else 1, repeat_s=repeat_s, kept=on_gpu,
            deadline_s=_GPU_DEADLINE_S if on_gpu else _DEADLINE_S,
        )
        answer = self._answer(turn)
        if "start_s" in answer:  # the newest: only the first one on a GPU has to make the context
            self._start_s[setting.device] = answer["start_s"]
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


def _too_slow(candidate: _Candidate, others: Sequence[_Candidate]) -> bool:
    """True for a larger batch than one that already took too long in the same place."""
    setting = candidate.setting
    where = (setting.threads, setting.device, setting.precision)
    return any(
        other.rates and other.rates[0] * _SLOW_UPDATE_S < 1.0 and setting.batch_size > other.setting.batch_size
        and where == (other.setting.threads, other.setting.device, other.setting.precision)
        for other in others
    )
