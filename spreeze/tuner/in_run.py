"""The tuner while a run trains: nothing waits for it, and no training is lost.

The run begins with the settings that it would have without the tuner. Off-policy, the same search as before a run
applies its candidates to the run's workers in turn, for a fraction of a second each, and in the end its choice.
Samplers that the choice does not need are paused.

On-policy, sizes of shared memory are among the choices, so candidates are measured in processes of their own; during a
turn, the run's workers are suspended. A choice of other sizes takes effect by a restart of the workers, with the
networks, optimizers and statistics of the last update.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from spreeze.config.schema import Config
from spreeze.config.section import NO_LIMIT
from spreeze.errors import SpreezeError
from spreeze.machine.awake import AWAKE
from spreeze.runtime.assembly import Assembly
from spreeze.runtime.plan import RunPlan, TunerChoice
from spreeze.runtime.worker_pool import WorkerPool
from spreeze.transport import status_table
from spreeze.transport.status_table import RetunedSettings
from spreeze.tuner.knobs import as_configured, find_memory_plan, fit_rollout, max_samplers
from spreeze.tuner.measure import Measurer
from spreeze.tuner.problem import (
    BATCH,
    CAPACITY,
    DEVICE,
    ENVS,
    JOINT,
    PRECISION,
    RATIO,
    RATIO_MAX,
    ROLLOUT_SAMPLERS,
    SAMPLERS,
    THREADS,
    OnResult,
    Setting,
    TrialResult,
    TuningProblem,
)
from spreeze.tuner.run import Tuning, only_tuner
from spreeze.tuner.trials import REPLAY, Stopping, TrialFailed, Windows

_CHANGEABLE = {BATCH, THREADS, SAMPLERS, RATIO, RATIO_MAX}
_DECIDED_BEFORE = {DEVICE, PRECISION, ENVS, CAPACITY}
"""Knobs that running workers can change, and those whose value follows from facts."""
_UPDATES_S, _FIRST_STEPS_S = 10.0, 25.0
"""Longest time to a candidate's second update, and to the first env step of every sampler."""
_WATCH_S, _PAUSE_S = 0.002, 0.2


def can_tune_in_run(problem: TuningProblem, config: Config) -> bool:
    """True if the running workers can change all knobs to choose: one learner on a processor, and its samplers."""
    flow, pin = config.data_flow, problem.pin(DEVICE)
    return (
        config.tuning.while_training
        and config.tuning.govern
        and config.on_policy is None
        and problem.configured.keys() <= _CHANGEABLE | _DECIDED_BEFORE
        and not (flow.serial or flow.averages_parameters or config.mode.module)
        and config.run.learners == 1
        and config.cluster.address is None
        and not config.replay.offline
        and {device.name for device in problem.devices if pin in (None, device.name)} == {"cpu"}
    )


def first_setting(problem: TuningProblem) -> tuple[Setting, int]:
    """The setting with which the run begins, and the most samplers to choose; a ConfigError if pins do not fit."""
    problem = dataclasses.replace(problem, memory_plan=find_memory_plan(problem))
    first = as_configured(problem).replace(ENVS, problem.known_memory_plan.envs_per_sampler.value)
    return first, problem.pin(SAMPLERS) or max(first[SAMPLERS], max_samplers(problem, 1))


def is_paused(run: Assembly) -> bool:
    """True while the user keeps a run paused."""
    return (run.run_dir / "control" / "pause").exists()


class _RunWindows(Windows):
    """Windows on the workers of a run, which train in them."""

    def __init__(
        self,
        run: Assembly,
        pids: Callable[[], Mapping[str, int]],
        base: Setting,
        usable_cores: float,
        interrupts: Stopping,
    ) -> None:
        """``base`` has the values that a candidate does not set."""
        super().__init__(usable_cores, interrupts)
        self.run, self.edge_s, self._worker_pids, self.base = run, REPLAY.edge_s, pids, base
        self._rows_per_step = run.plan.config.replay.rows_per_step
        self._learner = next(spec.row for spec in run.specs.values() if spec.role.learns)
        self._learner_pid = self._pid()

    def _pid(self) -> int:
        return int(self.run.status.control(self._learner)[status_table.PID])

    def apply(self, setting: Setting, max_ratio: float = NO_LIMIT, *, keeps_all: bool = False) -> None:
        """Applies a setting, with at most ``max_ratio`` samples per insert; all samplers are paused if it names none.

        With samplers the rate limiter counts anew: what they inserted before earns no updates. Unless it ``keeps_all``,
        rows beyond those of the ``base`` are dropped: unthrottled samplers of a fast environment would fill replay.
        """
        kept = 0.0 if keeps_all else self.base[RATIO]
        full, group, rows = Setting({**self.base, **setting}), self.run.status.group(0), self._rows_per_step
        group[status_table.SLOWED_SHARE] = 0
        group[status_table.ACTIVE_SAMPLERS] = setting.get(SAMPLERS, 0)
        ratios = (full[RATIO] / rows, max_ratio / rows, kept / rows)
        self.run.status.retune(RetunedSettings(full[BATCH], full[THREADS], *ratios))
        for data in self.run.data if SAMPLERS in setting else ():
            data.reset_counts()

    def _prepare(self, setting: Setting) -> None:
        """Applies a candidate and waits for its second update: the first one allocates."""
        self._learner_pid = self._pid()
        self.apply(setting)
        first, end = self._mark(), AWAKE() + _UPDATES_S
        while self._mark() < first + 2:
            self._watch(_WATCH_S)
            if AWAKE() > end:
                self.apply(self.base)
                raise TrialFailed(f"no second update within {_UPDATES_S:.0f} s", starved=True)

    def _watch(self, seconds: float) -> None:
        self._sleep(seconds)
        while is_paused(self.run):
            self._sleep(_PAUSE_S)
        if self._pid() != self._learner_pid:
            self.apply(self.base)  # before the new learner reads the setting under which its predecessor died
            raise TrialFailed("the learner was restarted", starved=True)

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        if self._interrupts.stop_requested:
            raise KeyboardInterrupt

    def _pids(self) -> Iterable[int]:
        while True:
            with contextlib.suppress(RuntimeError):  # a worker was just restarted
                return list(self._worker_pids().values())

    def _disturbances(self) -> object:
        return super()._disturbances(), int(self.run.status.header[status_table.PAUSED_MS])

    def wait_for_samplers(self) -> None:
        """Waits for the first env step of every sampler, as long as they may take to start."""
        self.apply(self.base.replace(SAMPLERS, self.run.plan.samplers))
        samplers, end = [spec for spec in self.run.specs.values() if spec.role.steps], AWAKE() + _FIRST_STEPS_S
        while AWAKE() < end and any(self.run.slots(spec)["env_steps"] <= 0 for spec in samplers):
            self._watch(0.1)


class RunMeasurer(Measurer):
    """Measures candidates in turn on the workers of a run."""

    def __init__(self, windows: _RunWindows, ends_s: float, usable_cores: float, interrupts: Stopping) -> None:
        plan = windows.run.plan
        super().__init__(
            plan, usable_cores=usable_cores, memory_cap_bytes=1, group_bytes=1, ends_s=ends_s, interrupts=interrupts
        )
        self._helper, self._windows = None, windows

    def joint(self, settings: Sequence[Setting], *, within_s: float, on_result: OnResult) -> list[TrialResult]:
        """All candidates once a round, forward and backward in turn, so that drift affects all equally."""
        candidates = [TrialResult(trial=JOINT, setting=setting) for setting in dict.fromkeys(settings)]
        settle_s, window_s = REPLAY.pace.divided(within_s, len(candidates))
        for number in range(REPLAY.pace.repeats):
            for candidate in candidates[:: 1 if number % 2 == 0 else -1]:
                self._measure(candidate, settle_s, window_s)
            if self.seconds_left() < 0.0:
                break
        for candidate in candidates:
            on_result(candidate)
        return candidates

    def _take_turn(self, candidate: TrialResult, repeat_s: float) -> None:
        self._measure(candidate, 0.0, repeat_s)
        candidate.env_steps_per_s, candidate.cpu_share = (), ()

    def _measure(self, candidate: TrialResult, settle_s: float, window_s: float) -> None:
        if candidate.failure is None:
            try:
                self._windows.measure(candidate, settle_s, window_s)
            except TrialFailed as failed:
                candidate.fail(str(failed), starved=failed.starved)


class TunerStop:
    """Stop condition of the tuner: the user's request, or the end of the run."""

    def __init__(self, interrupts: Stopping) -> None:
        self._interrupts, self.run_ended = interrupts, threading.Event()

    @property
    def stop_requested(self) -> bool:
        return self.run_ended.is_set() or self._interrupts.stop_requested


class TunerThread(abc.ABC):
    """Tunes a run in a thread of its supervisor (``runtime.plan.RunTuner``)."""

    begins = ""  # line for the user at the beginning
    _reported_knobs: Collection[str] = ()  # knobs whose changes are reported to the user; empty: all

    def __init__(self, tuning: Tuning, first: Setting, on_record: Callable[[dict[str, Any]], RunPlan]) -> None:
        """``first`` is in force when the run begins.

        ``on_record`` takes the result in the supervisor's thread, and returns the plan of a run with it.
        """
        self._tuning, self._first, self._on_record = tuning, first, on_record
        tuning.listener = dataclasses.replace(tuning.listener, say=lambda text: None)
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._stop = TunerStop(tuning.interrupts)
        self._thread: threading.Thread | None = None

    def begin(self, run: Assembly, workers: WorkerPool) -> None:
        self._thread = threading.Thread(target=self._run, args=(run, workers), name="tuner", daemon=True)
        self._thread.start()

    def notes(self) -> list[str]:
        """Lines since the last call, for the user."""
        return [self._notes.get_nowait() for _ in range(self._notes.qsize())]  # nobody else takes from it

    def choice(self) -> TunerChoice | None:
        """The choice, once, as soon as the measurements are over."""
        try:
            record = self._found.get_nowait()
        except queue.Empty:
            return None
        return self._as_choice(record, None if record is None else self._on_record(record))

    def end(self) -> None:
        """Ends the measurements; the settings in force stay."""
        self._stop.run_ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, run: Assembly, workers: WorkerPool) -> None:
        record = None
        try:
            with only_tuner(self._notes.put, self._stop) as note:
                self._notes.put(self.begins)
                record = self._measured(run, workers, note)
        except (KeyboardInterrupt, TrialFailed) as stopped:
            self._notes.put(f"not tuned: {str(stopped) or 'the run ended first'}")
        except (SpreezeError, OSError) as error:
            self._notes.put(f"not tuned: {error}")
        finally:
            self._conclude(record)
            self._found.put(record)
        if record is not None:
            first, chosen = self._first, {**self._first, **record["choice"]}
            reported = self._reported_knobs or chosen.keys()
            moved = [name for name in chosen if name in reported and chosen[name] != first[name]]
            changes = [f"{name} {first[name]} -> {chosen[name]}" for name in moved]
            text = ", ".join(changes) or "the initial settings are kept"
            if record["fell_back"]:
                text = f"no choice, so what the run began with stays: {next(iter(record['notes']), 'see Autotune')}"
            self._notes.put(f"tuned in {record['seconds']:.0f} s: {text}")

    @abc.abstractmethod
    def _measured(self, run: Assembly, workers: WorkerPool, note: str | None) -> dict[str, Any]:
        """The tuner's record."""

    def _conclude(self, record: dict[str, Any] | None) -> None:  # noqa: B027 (optional)
        """Applies the choice, or else the first setting, if the workers can change it."""

    @abc.abstractmethod
    def _as_choice(self, record: dict[str, Any] | None, plan: RunPlan | None) -> TunerChoice:
        """The choice that follows from a record, with the plan of a run with it."""


class InRunTuner(TunerThread):
    """Measures on the workers of a run."""

    begins = "the tuner measures on the running workers; training progress made meanwhile is kept"
    _reported_knobs = _CHANGEABLE
    _windows: _RunWindows | None = None

    def _measured(self, run: Assembly, workers: WorkerPool, note: str | None) -> dict[str, Any]:
        tuning, first, cores = self._tuning, self._first, self._tuning.machine.cores.usable
        self._windows = windows = _RunWindows(run, workers.pids, first, cores, self._stop)
        windows.wait_for_samplers()
        problem = tuning.problem()
        known = {name: first[name] for name in (ENVS, CAPACITY) if name in first}
        configured = Setting({**problem.configured, **known})
        # Evaluator and visualizer run, and are measured with the rest.
        problem = dataclasses.replace(problem, configured=configured, observer_cores=0.0)
        ends_s = AWAKE() + problem.targets.budget_s
        return tuning.search(problem, RunMeasurer(windows, ends_s, cores, self._stop), note)

    def _chosen(self, record: dict[str, Any] | None) -> Setting:
        return Setting(self._first if record is None else {**self._first, **record["choice"]})

    def _conclude(self, record: dict[str, Any] | None) -> None:
        if self._windows is not None:
            chosen = self._chosen(record)
            self._windows.apply(chosen, chosen[RATIO_MAX], keeps_all=True)

    def _as_choice(self, record: dict[str, Any] | None, plan: RunPlan | None) -> TunerChoice:
        return TunerChoice(self._chosen(record)[SAMPLERS])


def rollouts_at_first(problem: TuningProblem, config: Config) -> Setting | None:
    """The first setting of an on-policy run that is tuned while it trains; None if it is tuned before."""
    flow = config.data_flow
    single_learner = config.run.learners == 1 and not flow.mixes_parameters and not flow.averages_parameters
    separable = config.mode.starts_processes and not config.mode.module and config.cluster.address is None
    if config.on_policy is None or not (config.tuning.while_training and single_learner and separable):
        return None
    return fit_rollout(problem, problem.configured)


class BesideRunTuner(TunerThread):
    """Measures in processes of its own, taking turns with the workers of a run."""

    begins = (
        "the tuner measures in processes of its own, taking turns with this run; "
        "training progress made meanwhile is kept"
    )

    def _measured(self, run: Assembly, workers: WorkerPool, note: str | None) -> dict[str, Any]:
        tuning = self._tuning

        @contextlib.contextmanager
        def exclusive() -> Iterator[None]:
            """Suspends the workers; waits for the end of the user's pause, and preserves one that begins."""
            while is_paused(run) and not self._stop.stop_requested:
                time.sleep(_PAUSE_S)
            workers.signal_all(signal.SIGSTOP)
            try:
                yield
            finally:
                if not is_paused(run):
                    workers.signal_all(signal.SIGCONT)

        problem = tuning.problem()
        ends_s = AWAKE() + problem.targets.budget_s
        measurer = tuning.measurer(problem, ends_s, exclusive=exclusive, interrupts=self._stop)
        return tuning.search(problem, measurer, note)

    def _as_choice(self, record: dict[str, Any] | None, plan: RunPlan | None) -> TunerChoice:
        changes = record is not None and any(record["choice"][name] != self._first[name] for name in record["choice"])
        if plan is None or not changes:
            return TunerChoice(self._first[ROLLOUT_SAMPLERS])
        return TunerChoice(plan.samplers, plan)
