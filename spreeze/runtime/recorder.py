"""Records a run: metrics, events, evaluations, the outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from spreeze.errors import SpreezeError
from spreeze.formatting import is_power_of_ten, size
from spreeze.machine.awake import AWAKE
from spreeze.machine.hardware import memory_limits
from spreeze.machine.utilisation import Utilisation
from spreeze.metrics.bottleneck import bottleneck
from spreeze.metrics.info_means import InfoMeans
from spreeze.metrics.return_curve import FINAL_EVALUATIONS, HELD, final_metric, worst_of_last
from spreeze.metrics.snapshot import LOADS_S, OTHER_LOADS, Snapshot, snapshot_of
from spreeze.metrics.stop_conditions import Reached, StopReason, stop_reason_of
from spreeze.metrics.store import EvaluationRow, MetricsReader
from spreeze.metrics.table import EVALUATION, TABLE
from spreeze.metrics.writer import MetricsWriter
from spreeze.process_identity import process_age_s
from spreeze.run_directory import RunDir, group_folder
from spreeze.runtime.callback_process import CallbackLinks
from spreeze.runtime.loggers import Loggers
from spreeze.runtime.outcome import Outcome
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import CounterSample, GroupSample, Rates
from spreeze.workers.evaluator import COLUMNS, CONFIRMING_EPISODES, read_rows

_LOADS = (*OTHER_LOADS, "cpu_use")
_STATE_S = 2.0
_SLOW_START_S = 5.0
_HOLD_S = 0.02  # between two checks for the end of a pause
_MIN_SLEEP_S = 1.0  # shorter stops are not reported
SAMPLE_S = 0.5  # between two samples of all metrics
_MAX_LOADS = round(LOADS_S / SAMPLE_S) + 1
_SAVING_S = 2.0  # between two reports on the last checkpoint while it is written; none if it takes less


class View(Protocol):
    """Shows a run while it continues: the terminal, or nothing."""

    def update(self, snapshot: Snapshot) -> None: ...

    def note(self, text: str) -> None:
        """Shows one line permanently."""


class Recorder:
    """Keeps the store, the view and the outcome of one run up to date."""

    def __init__(self, plan: RunPlan, run_dir: RunDir, view: View) -> None:
        self._plan, self._run_dir, self._view = plan, run_dir, view
        self._store = MetricsWriter(run_dir.path / "metrics.db")
        self.rates = self._new_rates()
        self._utilisation = Utilisation({})
        self._memory_total_bytes = memory_limits().total_bytes
        self._events: deque[str] = deque(maxlen=6)
        self._eval_returns: deque[float] = deque(maxlen=60)
        self._lag_sum, self._lag_count = 0.0, 0
        self._loads: dict[str, tuple[float, int]] = {}  # sums and numbers of samples of the cores' loads
        self._other_loads: deque[tuple[float, dict[str, float | None]]] = deque(maxlen=_MAX_LOADS)  # with their times
        self.leave_free: float | None = None  # share of the cores that the user leaves free; None: as configured
        self._metrics: dict[str, float | None] = {}
        # Taken once, so that setting the clock during the run does not change a duration.
        self._age_at_start_s = process_age_s()
        self._next_state_s = 0.0
        self._evaluated: tuple[int, Any, Any] = (0, None, None)
        self.curve = _earlier_curve(run_dir.path, plan.policies) if plan.earlier.sessions else []
        self._session_curve: list[EvaluationRow] = []
        self._inserted_before: int | None = None  # Rows of a saved replay.
        self._ending = plan.ending
        self._scores: dict[int, float] = {}
        self.reported: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        """group -> gauges of its algorithm as its learner sent them; the newest of each counts until the next one."""
        self._info = InfoMeans()
        self._callback_values: dict[str, float] = {}
        # The latter count what this session's earlier workers did, if it has gone on with others.
        self._samplers_alive = self._restarts_before = self._env_steps_before = 0
        self._env_errors_before = self._rejected_before = 0
        self.samplers_wanted, self.tuner_measures = plan.working_samplers, False
        self._hung_up = self._saving_reported = self._target_reached = False
        self._next_saving_s = math.inf
        self.started_s = time.monotonic()
        self._paused_s, self._slept_before_s = 0.0, AWAKE.slept_s
        self._slept_reported_s = 0.0
        self.starting_s = 0.0  # Time until the first env step, where environments are slow to start: no training time.
        self.reading: CounterSample | None = None
        self.first_error: tuple[str, str] | None = None
        self._unevaluated, self._evaluator_warnings = False, 0
        best = plan.earlier.best_return
        self.outcome = Outcome(
            eval_return_best=max((row.return_mean for row in self.curve), default=None) if best is None else best
        )
        self._update_final_metrics()
        self._gpu_trouble: str | None = None
        self._gpu_troubles = 0
        self._loggers = Loggers(self.event)
        self._loggers.start(plan, run_dir)
        values = self._callback_values
        self.callbacks = CallbackLinks(self.event, lambda name, value: values.update({f"callback/{name}": value}))
        self.callbacks.start(plan, run_dir)
        self._report_trouble()
        if self.curve and not self._store_has_curve():
            self._store.evaluation(*self.curve)
            self.event("info", f"metrics: {len(self.curve)} evaluations of earlier sessions were read from eval.csv")

    def _new_rates(self) -> Rates:
        plan = self._plan
        rows = plan.config.replay.capacity if plan.config.data_flow.balanced else None
        return Rates(plan.batch_size, restores=plan.earlier.sessions > 0, balanced_rows=rows)

    def continue_with(self, plan: RunPlan) -> RunPlan:
        """The plan with the totals of the ended workers, for new workers in the same session."""
        outcome, before = self.outcome, self._plan.earlier
        counts = {name: getattr(outcome, name) for name in ("env_steps", "updates", "episodes")}
        self._restarts_before, self._env_steps_before = outcome.restarts, outcome.env_steps - before.env_steps
        self._env_errors_before, self._rejected_before = outcome.env_errors or 0, outcome.transitions_rejected or 0
        earlier = dataclasses.replace(before, **counts, sessions=before.sessions + 1)
        self._plan = dataclasses.replace(plan, earlier=earlier)
        self.rates, self.samplers_wanted = self._new_rates(), plan.working_samplers
        return self._plan

    def continue_from(self, env_steps: int) -> None:
        """Sets the env steps of earlier sessions that count, if part of them is collected again."""
        earlier = dataclasses.replace(self._plan.earlier, env_steps=env_steps)
        self._plan = dataclasses.replace(self._plan, earlier=earlier)

    @property
    def paused_s(self) -> float:
        """Time that this session was paused, stopped (Ctrl-Z), or asleep with the machine [s]."""
        AWAKE()  # notices the latest sleep
        return self._paused_s + self._slept_s

    @property
    def _slept_s(self) -> float:
        return AWAKE.slept_s - self._slept_before_s

    @property
    def session_s(self) -> float:
        """Time since this session started, without pauses and sleep."""
        paused_s = self.paused_s
        return time.monotonic() - self.started_s - paused_s

    @property
    def wall_s(self) -> float:
        """Wall time of the run, earlier sessions included."""
        return self._plan.earlier.wall_s + self.session_s

    def event(self, level: str, text: str, source: str = "supervisor") -> None:
        """Stores and shows an event."""
        line = text if source == "supervisor" else f"{source}: {text}"
        self._events.append(line)
        self._store.event(self.wall_s, level, source, text)
        self._loggers.event(self.wall_s, level, source, text)
        self._view.note(line if level == "info" else f"{level}: {line}")

    def _store_has_curve(self) -> bool:
        with contextlib.suppress(SpreezeError, OSError):
            return MetricsReader(self._run_dir.path / "metrics.db").last_evaluation()[0] > 0
        return True  # unknown

    def _report_trouble(self) -> None:
        for level, text in self._store.reports():
            self.event(level, text)
            if level == "warning":
                self.outcome.metrics_trouble = text
        trouble, before = self._utilisation.trouble, self._gpu_trouble
        self._gpu_trouble = trouble
        if trouble is not None and before is None:
            self._gpu_troubles += 1
            if is_power_of_ten(self._gpu_troubles):
                times = "" if self._gpu_troubles == 1 else f" (for the {self._gpu_troubles}th time)"
                self.event("warning", f"GPU metrics are missing{times}: {trouble}")
        elif trouble is None and before is not None and is_power_of_ten(self._gpu_troubles):
            self.event("info", "GPU metrics are available again")

    def wait_while_paused(self, goes_on: Callable[[], bool]) -> None:
        """Waits while ``control/pause`` exists and ``goes_on()``; no clock of the run counts this time."""
        self.event("info", "paused: all processes are suspended, replay and networks stay in memory")
        start_s, before_s, next_state_s = AWAKE(), self._paused_s, 0.0
        while self._run_dir.requested("pause") and goes_on():
            self._paused_s = before_s + AWAKE() - start_s
            if time.monotonic() >= next_state_s:
                next_state_s = time.monotonic() + _STATE_S
                shown = self.snapshot("paused")
                self._run_dir.write_state(
                    state="paused", wall_s=shown.wall_s, progress=shown.progress, eta_s=shown.eta_s
                )
                self._view.update(shown)
            time.sleep(_HOLD_S)
        self._paused_s = before_s + AWAKE() - start_s
        self._run_dir.withdraw("pause")
        self._next_state_s = 0.0
        self.event("info", f"resumed after a pause of {self._paused_s - before_s:.1f} s")

    def _report_sleep(self) -> None:
        if (slept_s := self._slept_s - self._slept_reported_s) >= _MIN_SLEEP_S:
            self._slept_reported_s = self._slept_s
            self.event("info", f"resumed after {slept_s:.0f} s of suspension, which do not count as training time")

    def report_sighup(self) -> None:
        """Reports once that the terminal was closed, which does not end the run."""
        if not self._hung_up:
            self._hung_up = True
            self.event(
                "info",
                "the terminal was closed (SIGHUP): the run continues; stop it with python -m spreeze runs stop "
                f"{self._run_dir.path.absolute()}",
            )

    def saving(self, left_bytes: int) -> None:
        """Shows now and then how much of the last checkpoints is left, while the run waits only for these."""
        now = time.monotonic()
        if now < self._next_saving_s:
            if self._next_saving_s == math.inf:
                self._next_saving_s = now + _SAVING_S
            return
        self._next_saving_s = now + _SAVING_S
        if not self._saving_reported:
            self._saving_reported = True
            left = f", {size(left_bytes)} left to write and check" if left_bytes else ""
            self.event("info", f"waiting for the last checkpoint{left}; press Ctrl-C again to skip it")
        state = f"stopping, {size(left_bytes)} of checkpoint left" if left_bytes else "stopping"
        self._view.update(self.snapshot(state))
        self._run_dir.write_state(state="stopping", checkpoint_left_bytes=left_bytes)

    def info(self, message: Mapping[str, Any]) -> None:
        """Takes sums of the numbers in environments' ``info``."""
        if (text := self._info.add(message)) is not None:
            self.event("info", text)

    def episode(self, sampler: str, episode_return: float, length: int, success: bool | None) -> None:
        """Passes an episode of a sampler to the callbacks."""
        record = {"return": episode_return, "length": length, "success": success, "sampler": sampler}
        self.callbacks.call("on_episode_end", record)

    def _gauges(self, groups: tuple[GroupSample, ...]) -> dict[str, float]:
        """The reported gauges: means over the learners that have learned, and of several learners each one's own."""
        by_name: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for group, values in self.reported.items():
            for name, value in values.items() if group < len(groups) and groups[group].learned else ():
                known = isinstance(value, int | float) and math.isfinite(value)
                if known and (metric := TABLE.get(name)) is not None and metric.is_sent:
                    by_name[name][group] = float(value)
        gauges = {name: sum(values.values()) / len(values) for name, values in by_name.items()}
        if len(groups) > 1:
            gauges |= {f"{name}/{group}": value for name, values in by_name.items() for group, value in values.items()}
        return gauges

    def evaluation(self, record: Mapping[str, Any], *, final: bool = False) -> None:
        """Takes an evaluation of a learner's weights, with fields as in ``eval.csv``.

        The run's score and stored curve are those of the learner with the highest latest score. The ``final`` one does
        not count for the time to the target.
        """
        if not isinstance(record.get("return_mean"), int | float) or not math.isfinite(record["return_mean"]):
            return
        row, value = _evaluation_row(record), float(record["return_mean"])
        outcome, group = self.outcome, int(record.get("group", 0))
        requested = self._plan.config.evaluation.episodes
        whole = bool(record.get("whole", int(record.get("episodes") or 0) == requested))
        if whole and (outcome.eval_return_best is None or value > outcome.eval_return_best):
            outcome.eval_return_best = value
        if not final:
            self._report_target_confirmation(record.get("target"))
        self._scores[group] = value
        outcome.learners.setdefault(group, {})["eval_return"] = value
        if self._plan.policies > 1:
            self._metrics[f"eval_return/{group}"] = value
            if row is not None:
                self._write(row.t, int(row.env_steps), {f"eval_return/{group}": value})
        if not final and value < max(self._scores.values()):
            return
        outcome.eval_return_mean = self._metrics["eval_return"] = value
        self._eval_returns.append(value)
        outcome.eval_episodes = int(record.get("episodes") or 0)
        outcome.eval_episodes_cut = int(record.get("episodes_cut") or 0)
        outcome.eval_episodes_lost = int(record.get("episodes_lost") or 0)
        if outcome.eval_episodes_cut:
            self.event(
                "info",
                f"final evaluation: {outcome.eval_episodes} of {requested} episodes, the others would take too long",
            )
        order = (group, record.get("epoch"), record.get("version"))
        if final and order == self._evaluated:
            return
        self._evaluated = order
        if row is not None:
            self._keep(row, record)
        self._update_final_metrics()
        if not final:
            self._update_target()
        self.callbacks.call("on_evaluation", {name: record.get(name) for name in (*COLUMNS, "success_rate")})

    def _keep(self, row: EvaluationRow, record: Mapping[str, Any]) -> None:
        self.curve.append(row)
        self._session_curve.append(row)
        self._store.evaluation(row)
        self._loggers.evaluation(row)
        scores = {"eval_return": row.return_mean, "eval_length": float(row.length_mean)}
        if isinstance(success := record.get("success_rate"), int | float):
            scores["eval_success_rate"] = float(success)
            self.outcome.eval_success_rate = self._metrics["eval_success_rate"] = float(success)
        for name, value in record.get("metrics", {}).items():
            metric = TABLE.get(name)
            if metric is not None and metric.writer == EVALUATION and isinstance(value, int | float):
                scores[name] = float(value)
        self._write(row.t, int(row.env_steps), scores)

    def _report_target_confirmation(self, result: Any) -> None:
        target, outcome = self._plan.target_return, self.outcome
        if target is None or not isinstance(result, Mapping) or outcome.time_to_target_s is not None:
            return
        text = f"{float(result['return_mean']):.4g}, the mean of {int(result['episodes'])} episodes"
        if result["reached"]:
            outcome.time_to_target_s = self._age_at_start_s + self.session_s
            self.event("info", f"target return {target:g} reached: {text}")
        else:
            self.event("info", f"target return {target:g} not confirmed: {text} on fresh seeds")

    def _write(self, t: float, step: int, values: dict[str, float]) -> None:
        self._store.write(t, step, values)
        self._loggers.write(t, step, values)

    def _update_target(self) -> None:
        outcome, stop, target = self.outcome, self._plan.config.stop, self._plan.target_return
        if target is None:
            return

        def held(curve: list[EvaluationRow], policies: int) -> bool:
            mean = final_metric(curve, policies)
            return len(curve) >= policies and mean is not None and mean >= target

        if outcome.time_to_target_held_s is None and held(self._session_curve, HELD):
            outcome.time_to_target_held_s = self._age_at_start_s + self.session_s
        latest = self.curve[-stop.target_evaluations :]
        enough = outcome.time_to_target_s is not None or sum(row.episodes for row in latest) >= CONFIRMING_EPISODES
        self._target_reached |= stop.target_evaluations > 1 and enough and held(self.curve, stop.target_evaluations)

    def _update_final_metrics(self) -> None:
        outcome, curve = self.outcome, self.curve
        outcome.eval_return_final, outcome.eval_return_worst_of_20 = final_metric(curve), worst_of_last(curve)
        outcome.eval_return_final_evaluations = min(len(curve), FINAL_EVALUATIONS)

    def no_final_evaluation(self, budget_s: float) -> None:
        instead = "using the last evaluation during training" if self.curve else "the run ends without an evaluation"
        self.event("info", f"no complete evaluation within {budget_s:.0f} s; {instead}")

    def sample(
        self,
        reading: CounterSample,
        *,
        pids: Mapping[str, int] | None,
        restarts: int = 0,
        samplers_alive: int = 1,
        state: str = "training",
        more: Mapping[str, float | None] | None = None,
    ) -> None:
        """Takes one sample of all metrics, ``more`` included; without utilisation if ``pids`` is None."""
        t_s = reading.t_s - self.paused_s
        if self.reading is not None:  # it may have been stopped between the reading and now
            t_s = max(t_s, self.reading.t_s)
        reading = dataclasses.replace(reading, t_s=t_s)
        self._report_sleep()
        self.reading = reading
        # A sampler that the tuner did not choose is paused, and is not missed.
        self._samplers_alive = min(samplers_alive, self.samplers_wanted)
        if self._plan.start_s > _SLOW_START_S and not reading.env_steps:
            self.starting_s = self.session_s
        if self._inserted_before is None:
            self._inserted_before = reading.inserted if self._plan.earlier.sessions else 0
        metrics = self.rates.read(reading) | self._gauges(reading.groups) | dict(more or {})
        if metrics.get("env_steps_per_s") != 0.0:
            metrics |= self._info.means(reading.t_s)
        earlier = self._plan.earlier
        metrics |= {
            "env_steps": earlier.env_steps + reading.env_steps,
            "restarts": restarts + self._restarts_before,
            "episodes": earlier.episodes + (metrics["episodes"] or 0.0),
            # 0 until the learner has loaded its checkpoint
            "updates": metrics["updates"] or float(earlier.updates),
        }
        if pids is not None:
            metrics.update(self._utilisation.sample(pids))
            env_steps = self._env_steps_before + reading.env_steps  # of this session, as the energy
            if (energy_j := metrics.get("energy_j")) is not None and env_steps > 0:
                metrics["energy_per_million_steps_kj"] = energy_j * 1e3 / env_steps
            self.outcome.energy_per_million_steps_kj = metrics.get("energy_per_million_steps_kj")
        if (lag := metrics.get("policy_lag")) is not None:
            self._lag_sum, self._lag_count = self._lag_sum + lag, self._lag_count + 1
        kept = ("eval_return/", "eval_success_rate")
        scores = {name: value for name, value in self._metrics.items() if name.startswith(kept)}
        self._metrics = {**metrics, "eval_return": self._metrics.get("eval_return"), **scores}
        self._other_loads.append((t_s, {name: metrics.get(name) for name in OTHER_LOADS}))
        snapshot = self.snapshot(state)
        if pids is not None:  # else nothing is known of the cores
            self.outcome.bottleneck = snapshot.bottleneck
            for name in _LOADS:
                if (load := metrics.get(name)) is not None:
                    total, count = self._loads.get(name, (0.0, 0))
                    self._loads[name] = total + load, count + 1
        known = {name: value for name, value in metrics.items() if value is not None} | self._callback_values
        self._callback_values.clear()
        wall_s, step = self.wall_s, int(metrics["env_steps"] or 0)
        self._store.write(wall_s, step, known)
        self._loggers.sample(wall_s, step, known)
        saved = sum(group.learner.get("checkpoint_updates", 0.0) for group in reading.groups)
        self.callbacks.sample(wall_s, step, known, saved)
        self._report_trouble()
        self._view.update(snapshot)
        if state == "training" and time.monotonic() >= self._next_state_s:
            self._next_state_s = time.monotonic() + _STATE_S
            self._run_dir.write_state(
                state="running",
                wall_s=self.wall_s,
                env_steps=metrics["env_steps"],
                updates=metrics["updates"],
                eval_best=self.outcome.eval_return_best,
                eval_final=self.outcome.eval_return_final,
                episodes=metrics["episodes"],
                unevaluated=self._unevaluated,
                tuner_measures=self.tuner_measures,
                progress=snapshot.progress,
                eta_s=snapshot.eta_s,
            )

    def note_evaluator(self, present: bool) -> None:
        """Warns once if a run waits for a return and no evaluator works."""
        stop = self._plan.config.stop
        unevaluated = not present and stop.at_return
        if unevaluated == self._unevaluated:
            return
        self._unevaluated, self._next_state_s = unevaluated, 0.0
        self._evaluator_warnings += unevaluated
        if unevaluated and is_power_of_ten(self._evaluator_warnings):
            self.event(
                "warning", f"without an evaluator, the target return of {stop.target_return:g} cannot stop the run"
            )

    def snapshot(self, state: str, changes: Mapping[str, float | None] | None = None) -> Snapshot:
        """The state of the run now; ``changes`` replace newest values of metrics."""
        plan, outcome = self._plan, self.outcome
        progress, eta_s = _progress(plan, self._metrics, self.session_s - self.starting_s)
        newest_s = self._other_loads[-1][0] if self._other_loads else 0.0
        recent = [load for t_s, load in self._other_loads if newest_s - t_s <= LOADS_S]
        known = {name: [cores for load in recent if (cores := load[name]) is not None] for name in OTHER_LOADS}
        loads = {name: fmean(cores) for name, cores in known.items() if cores}
        run = {
            "env_id": plan.spec.env_id,
            "algo": plan.config.run.algo,
            "wall_s": self.wall_s,
            "eval_best": outcome.eval_return_best,
            "eval_final": outcome.eval_return_final,
            "unevaluated": self._unevaluated,
            "tuner_measures": self.tuner_measures,
            **({} if self.leave_free is None else {"leave_free": self.leave_free}),
        }
        bare = snapshot_of(
            run,
            {name: vars(part) for name, part in plan.config.sections().items()},
            {**self._metrics, **loads, **(changes or {})},
            plan.config.data_flow,
            state=state,
            samplers_wanted=self.samplers_wanted,
            samplers_alive=self._samplers_alive,
            learner_device=outcome.device,
            memory_total_bytes=self._memory_total_bytes,
            eval_returns=tuple(self._eval_returns),
            first_error=self.first_error,
            events=tuple(self._events),
            progress=progress,
            eta_s=eta_s,
        )
        return dataclasses.replace(bare, bottleneck=bottleneck(bare))

    def stop_reason(self) -> StopReason | None:
        """The stop condition that is met, or None; updates and env steps of rollouts are counted by their learner."""
        stop, reading = self._plan.config.stop, self.reading
        if self._plan.config.on_policy is not None:
            reading = None
        updates = [] if reading is None else [group.learner["updates"] for group in reading.groups]
        at_first = stop.target_evaluations == 1 and self.outcome.time_to_target_s is not None
        reached = Reached(
            stop_requested=self._run_dir.requested("stop"),
            target_reached=self._target_reached or at_first,
            trained_s=self.session_s - self.starting_s,
            curve=self._session_curve,
            updates=min(updates, default=None),
            env_steps=None if reading is None else reading.env_steps + self._plan.earlier.env_steps,
        )
        return stop_reason_of(stop, self._ending, reached)

    def finish(self, restarts: int = 0) -> None:
        """Fills the outcome from the last sample."""
        outcome, metrics = self.outcome, self._metrics
        outcome.wall_s = self.wall_s
        outcome.env_steps = int(metrics.get("env_steps") or 0)
        outcome.updates = max(outcome.updates, int(metrics.get("updates") or 0))
        outcome.rates, outcome.rates_warmup_s = self.rates.steady(), self.rates.warmup_s
        if outcome.bottleneck is not None:  # of the whole run, whose last second says little
            loads = {name: total / count for name, (total, count) in self._loads.items()}
            rates = {name: rate for name, rate in outcome.rates.items() if rate is not None}
            outcome.bottleneck = self.snapshot("finished", {**rates, **loads}).bottleneck
        outcome.samples_per_insert = metrics.get("samples_per_insert")
        outcome.policy_lag_mean = self._lag_sum / self._lag_count if self._lag_count else None
        outcome.episodes = int(metrics.get("episodes") or 0)
        outcome.restarts = restarts + self._restarts_before
        if (errors := metrics.get("env_errors")) is not None:
            outcome.env_errors = int(errors) + self._env_errors_before
        if (rejected := metrics.get("transitions_rejected")) is not None:
            outcome.transitions_rejected = int(rejected) + self._rejected_before
        if self.reading is not None and self._plan.config.on_policy is None:
            outcome.rows_stored = self.reading.inserted - (self._inserted_before or 0)
        if outcome.error and self.first_error:
            outcome.error = f"{outcome.error} (first: {self.first_error[0]}: {self.first_error[1]})"

    def close(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Closes the sinks, which may take seconds unless ``hurry()``, the store and the GPU monitor."""
        failed = self.outcome.error is not None or self.outcome.stopped_by == "unknown"  # by an exception
        self.callbacks.close(self.outcome.stopped_by, hurry)
        if self._callback_values:
            self._write(self.wall_s, self.outcome.env_steps, self._callback_values)
        self._loggers.close(failed=failed, hurry=hurry)
        if self._saving_reported:
            self._run_dir.write_state(checkpoint_left_bytes=None)
        self._utilisation.close()
        self._store.close()
        self.outcome.metrics_trouble = next(
            (text for level, text in reversed(self._store.reports()) if level == "warning"),
            self.outcome.metrics_trouble,
        )
        self.outcome.metrics_rows_lost = lost = self._store.rows_dropped
        if lost:
            trouble = self.outcome.metrics_trouble
            self._view.note(f"warning: {lost:,} rows of metrics were lost in this session: {trouble}")


def _evaluation_row(record: Mapping[str, Any]) -> EvaluationRow | None:
    """An evaluator's record as a row of the curve; None if a number is missing or invalid."""
    try:
        fields = {name: record[name] for name in EvaluationRow._fields if name != "t"}
        return EvaluationRow(t=float(record["wall_s"]), **fields)
    except (KeyError, TypeError, ValueError):
        return None


def _earlier_curve(run_dir: Path, learners: int) -> list[EvaluationRow]:
    """The evaluations of earlier sessions, from ``eval.csv`` if the store has none or cannot be read."""
    with contextlib.suppress(SpreezeError, OSError):
        if stored := MetricsReader(run_dir / "metrics.db").evaluations():
            return stored
    entries = [
        (group, row) for group in range(learners) for row in read_rows(group_folder(run_dir, group) / "eval.csv")
    ]
    curve, scores = list[EvaluationRow](), dict[int, float]()
    for group, record in sorted(entries, key=lambda entry: entry[1]["wall_s"]):
        row = _evaluation_row(record)
        if row is not None and all(map(math.isfinite, row)):
            scores[group] = row.return_mean
            curve += [row] if row.return_mean >= max(scores.values()) else []
    return curve


def _progress(
    plan: RunPlan, metrics: Mapping[str, float | None], elapsed_s: float
) -> tuple[float | None, float | None]:
    """Completed fraction of the stop condition that will come first, and the seconds until then."""
    stop = plan.config.stop
    candidates: list[tuple[float, float | None]] = []
    for limit, done, rate in (
        (stop.limit_s, elapsed_s, 1.0),
        (stop.env_steps, metrics.get("env_steps"), metrics.get("env_steps_per_s")),
        (stop.updates and stop.updates * plan.learners, metrics.get("updates"), metrics.get("updates_per_s")),
    ):
        if limit and done is not None:
            candidates.append((done / limit, max(limit - done, 0.0) / rate if rate else None))
    if not candidates:
        return None, None
    fraction, eta_s = max(candidates, key=lambda entry: entry[0])
    return min(fraction, 1.0), eta_s
