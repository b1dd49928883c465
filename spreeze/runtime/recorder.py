"""Records a run: metrics, events, evaluations, the outcome, ``summary.json``."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from spreeze.formatting import size
from spreeze.machine.hardware import Machine, memory_limits
from spreeze.machine.utilisation import Utilisation
from spreeze.metrics.bottleneck import bottleneck
from spreeze.metrics.snapshot import Snapshot, measured
from spreeze.metrics.store import EvaluationRow, MetricsWriter
from spreeze.metrics.table import TABLE, MetricTable
from spreeze.run_directory import RunDir, process_age_s, versions
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import CounterSample, Rates, split_names
from spreeze.workers.context import event_text, write_error

_STATE_S = 2.0
SAMPLE_S = 0.5
"""Time between two samples of all metrics."""
_SAVING_S = 2.0
"""Time between two reports on the last checkpoint while it is written; none if it takes less."""


class View(Protocol):
    """Shows a run while it goes on: the terminal, or nothing."""

    def update(self, snapshot: Snapshot) -> None:
        """Shows the newest numbers."""

    def note(self, text: str) -> None:
        """Shows one line permanently."""


@dataclass
class Outcome:
    """The results of a run; None is unknown."""

    stopped_by: str = "unknown"
    wall_s: float = 0.0
    env_steps: int = 0
    updates: int = 0
    rates: dict[str, float | None] = field(default_factory=dict)
    warmup_s: float | None = None
    samples_per_insert: float | None = None
    policy_lag_mean: float | None = None
    episodes: int = 0
    eval_return: float | None = None
    eval_best: float | None = None
    eval_episodes: int | None = None
    """Episodes in ``eval_return``; others may have been cut by the time limit or lost to errors."""
    eval_episodes_cut: int | None = None
    eval_episodes_lost: int | None = None
    time_to_target_s: float | None = None
    restarts: int = 0
    env_errors: int | None = None
    """Exceptions that environments raised."""
    rows_refused: int | None = None
    """Bad transitions that environments gave."""
    parameters_sha256: str | None = None
    """Of group 0's networks."""
    learners: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Group -> its learner's results."""
    device: str | None = None
    bottleneck: str | None = None
    error: str | None = None

    def learned(self, group: int, message: Mapping[str, Any]) -> None:
        """Takes a learner's last message."""
        sha256 = message.get("parameters_sha256")
        self.learners[group] = {
            **self.learners.get(group, {}), "updates": int(message.get("updates", 0)), "parameters_sha256": sha256,
        }
        self.updates = sum(learner.get("updates", 0) for learner in self.learners.values())
        if group == 0:
            self.parameters_sha256 = sha256


class Recorder:
    """Keeps the store, the view and the outcome of one run up to date."""

    def __init__(self, plan: RunPlan, run_dir: RunDir, view: View, table: MetricTable = TABLE) -> None:
        self._plan, self._run_dir, self._view, self._table = plan, run_dir, view, table
        self._store = MetricsWriter(run_dir.path / "metrics.db", table=table)
        self._gauges = Rates(plan.batch_size, table=table)
        self._utilisation = Utilisation({})
        self._memory_total_bytes = memory_limits().total_bytes
        self._events: deque[str] = deque(maxlen=6)
        self._eval_returns: deque[float] = deque(maxlen=60)
        self._lag_sum, self._lag_count = 0.0, 0
        self._metrics: dict[str, float | None] = {}
        # Taken once, so that setting the clock during the run does not change a duration.
        self._age_at_start_s = process_age_s()
        self._next_state_s = 0.0
        self._evaluated: tuple[int, Any, Any] = (0, None, None)
        self._scores: dict[int, float] = {}
        self._samplers_alive = 0
        self._hung_up = False
        self._saving_said, self._next_saving_s = False, float("inf")
        self.started_s = time.monotonic()
        self.reading: CounterSample | None = None
        self.first_error: tuple[str, str] | None = None
        self.outcome = Outcome(eval_best=plan.earlier.best_return)

    @property
    def session_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def wall_s(self) -> float:
        """Wall time of the run, earlier sessions included."""
        return self._plan.earlier.wall_s + self.session_s

    def event(self, level: str, text: str, source: str = "supervisor") -> None:
        """Stores and shows an event."""
        line = text if source == "supervisor" else f"{source}: {text}"
        self._events.append(line)
        self._store.event(self.wall_s, level, source, text)
        self._view.note(line if level == "info" else f"{level}: {line}")

    def env_error(self, where: str, error: Exception, count: int) -> None:
        """Reports an error of an environment in this process, which lost at most an episode."""
        write_error(self._run_dir.path / "errors", "supervisor", error, f"environment-{count}")
        self.event("warning", event_text(where, error, count)[:500])

    def hung_up(self) -> None:
        """Reports once that the terminal was closed, which does not end the run."""
        if not self._hung_up:
            self._hung_up = True
            self.event("info", "the terminal was closed (SIGHUP): the run goes on without it; to end it: "
                       f"python -m spreeze runs stop {self._run_dir.path.absolute()}")

    def saving(self, left_bytes: int) -> None:
        """Shows now and then how much of the last checkpoints is left, while the run waits only for these.

        ``left_bytes`` is 0 before writing begins, and when almost done.
        """
        now = time.monotonic()
        if now < self._next_saving_s:
            if self._next_saving_s == float("inf"):
                self._next_saving_s = now + _SAVING_S
            return
        self._next_saving_s = now + _SAVING_S
        if not self._saving_said:
            self._saving_said = True
            left = f", {size(left_bytes)} left to write and check" if left_bytes else ""
            self.event("info", f"the run ends when its last checkpoint is written{left}; a second Ctrl-C gives it up")
        state = f"stopping, {size(left_bytes)} of checkpoint left" if left_bytes else "stopping"
        self._view.update(self.snapshot(state))
        self._run_dir.write_state(state="stopping", checkpoint_left_bytes=left_bytes)

    def evaluation(self, record: Mapping[str, Any], *, final: bool = False) -> None:
        """Takes an evaluation of a learner's weights, with fields as in ``eval.csv``.

        The run's score, and its curve in the store, are those of the learner with the highest latest score. The
        final evaluation comes after training, so it does not count for the time to the target.
        """
        value = record.get("return_mean")
        if not isinstance(value, int | float):
            return
        outcome, target, group = self.outcome, self._plan.config.stop.target_return, int(record.get("group", 0))
        asked = self._plan.config.evaluation.episodes
        whole = bool(record.get("whole", int(record.get("episodes") or 0) == asked))
        if whole and (outcome.eval_best is None or value > outcome.eval_best):
            outcome.eval_best = float(value)
        if not final and whole and target is not None and value >= target and outcome.time_to_target_s is None:
            outcome.time_to_target_s = self._age_at_start_s + self.session_s
        self._scores[group] = float(value)
        outcome.learners.setdefault(group, {})["eval_return"] = float(value)
        if by_group := self._eval_returns_by_group():
            self._metrics |= by_group
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self._store.write(float(record["wall_s"]), int(record["env_steps"]),
                                  {name: score for name, score in by_group.items() if name == f"eval_return/{group}"})
        if not final and value < max(self._scores.values()):
            return
        outcome.eval_return = float(value)
        self._eval_returns.append(float(value))
        outcome.eval_episodes = int(record.get("episodes") or 0)
        outcome.eval_episodes_cut = int(record.get("episodes_cut") or 0)
        outcome.eval_episodes_lost = int(record.get("episodes_lost") or 0)
        if outcome.eval_episodes_cut:
            self.event("info", f"final evaluation: {outcome.eval_episodes} of {asked} episodes, "
                               "the others would have taken too long; only whole rounds count")
        self._metrics["eval_return"] = float(value)
        order = (group, record.get("epoch"), record.get("version"))
        if final and order == self._evaluated:
            return
        self._evaluated = order
        with contextlib.suppress(KeyError, TypeError, ValueError):
            fields = {name: record[name] for name in EvaluationRow._fields if name != "t"}
            self._store.evaluation(EvaluationRow(t=float(record["wall_s"]), **fields))
            self._store.write(float(record["wall_s"]), int(record["env_steps"]),
                              {"eval_return": float(value), "eval_length": float(record["length_mean"])})

    def _eval_returns_by_group(self) -> dict[str, float]:
        """The latest scores as series, if there are several learners."""
        if self._plan.learners == 1:
            return {}
        return {f"eval_return/{group}": value for group, value in self._scores.items()}

    def no_final_evaluation(self, budget_s: float) -> None:
        """Reports why the last score is that of an earlier policy."""
        self.event("info", f"no final evaluation: no whole round of episodes gave a score within {budget_s:.0f} s; the "
                           "score is the latest one of training")

    def sample(
        self, reading: CounterSample, *, pids: Mapping[str, int] | None, restarts: int = 0, samplers_alive: int = 1,
        state: str = "training", governed: Mapping[str, float | None] | None = None,
    ) -> None:
        """Takes one sample of all metrics; without utilisation if ``pids`` is None (the workers have ended)."""
        self.reading, self._samplers_alive = reading, samplers_alive
        metrics = self._gauges.read(reading)
        metrics.update(governed or {})
        metrics["env_steps"] = self._plan.earlier.env_steps + reading.env_steps
        metrics["restarts"] = restarts
        metrics["episodes"] = self._plan.earlier.episodes + (metrics["episodes"] or 0.0)
        if pids is not None:
            metrics.update(self._utilisation.sample(pids))
        if (lag := metrics.get("policy_lag")) is not None:
            self._lag_sum, self._lag_count = self._lag_sum + lag, self._lag_count + 1
        self._metrics = {**metrics, "eval_return": self._metrics.get("eval_return"), **self._eval_returns_by_group()}
        snapshot = self.snapshot(state)
        self.outcome.bottleneck = snapshot.bottleneck
        self._store.write(self.wall_s, int(metrics["env_steps"] or 0),
                          {name: value for name, value in metrics.items() if value is not None})
        self._view.update(snapshot)
        if state == "training" and time.monotonic() >= self._next_state_s:
            self._next_state_s = time.monotonic() + _STATE_S
            self._run_dir.write_state(state="running", wall_s=self.wall_s, env_steps=metrics["env_steps"],
                                      updates=metrics["updates"], eval_best=self.outcome.eval_best,
                                      episodes=metrics["episodes"])

    def snapshot(self, state: str) -> Snapshot:
        known: dict[str, Any] = {
            "state": state, "wall_s": self.wall_s, "eval_best": self.outcome.eval_best,
            "eval_returns": tuple(self._eval_returns), "memory_total_bytes": self._memory_total_bytes,
            "learner_device": self.outcome.device, "samplers_alive": self._samplers_alive,
            "first_error": self.first_error, "events": tuple(self._events),
        }
        bare = take_snapshot(self._plan, self._metrics, self.session_s, self._table, **known)
        return dataclasses.replace(bare, bottleneck=bottleneck(bare).sentence)

    def stop_reason(self) -> str | None:
        """The stop condition that is met, or None."""
        stop, reading = self._plan.config.stop, self.reading
        if (self._run_dir.path / "control" / "stop").exists():
            return "stop request"
        if self.outcome.time_to_target_s is not None:
            return "target_return"
        if stop.seconds is not None and self.session_s >= stop.seconds:
            return "seconds"
        if reading is None:
            return None
        if self._plan.config.on_policy is not None:
            return None  # its learner stops it at a swap
        if stop.updates is not None and all(group.learner["updates"] >= stop.updates for group in reading.groups):
            return "updates"
        steps = reading.env_steps + self._plan.earlier.env_steps
        return "env_steps" if stop.env_steps is not None and steps >= stop.env_steps else None

    def ending(self) -> None:
        """Ends the measurement of rates when training is over."""
        self._gauges.end()

    def finish(self, restarts: int = 0) -> None:
        """Fills the outcome from the last sample."""
        outcome, metrics = self.outcome, self._metrics
        outcome.wall_s = self.wall_s
        outcome.env_steps = int(metrics.get("env_steps") or 0)
        outcome.updates = max(outcome.updates, int(metrics.get("updates") or 0))
        outcome.rates, outcome.warmup_s = self._gauges.steady(), self._gauges.warmup_s
        outcome.samples_per_insert = metrics.get("samples_per_insert")
        outcome.policy_lag_mean = self._lag_sum / self._lag_count if self._lag_count else None
        outcome.episodes = int(metrics.get("episodes") or 0)
        outcome.restarts = restarts
        outcome.env_errors, outcome.rows_refused = _count(metrics, "env_errors"), _count(metrics, "rows_refused")
        if outcome.error and self.first_error:
            outcome.error = f"{outcome.error} (first: {self.first_error[0]}: {self.first_error[1]})"

    def close(self) -> None:
        """Closes the store and the GPU monitor."""
        if self._saving_said:
            self._run_dir.write_state(checkpoint_left_bytes=None)
        self._utilisation.close()
        self._store.close()


def _count(metrics: Mapping[str, float | None], name: str) -> int | None:
    value = metrics.get(name)
    return None if value is None else int(value)


def take_snapshot(
    plan: RunPlan, metrics: Mapping[str, float | None], session_s: float, table: MetricTable = TABLE, **known: Any
) -> Snapshot:
    """Builds a snapshot from the newest value of each series, None or absent where unknown.

    ``session_s`` is the wall time of this session, for progress; ``known`` are further fields of ``Snapshot``.
    """
    replay = plan.config.replay
    progress, eta_s = _progress(plan, metrics, session_s)
    return Snapshot(
        env_id=plan.spec.env_id, algo=plan.config.run.algo, lag=plan.lag,
        learning_starts=replay.learning_starts if plan.lag is None else None,
        samples_per_insert_min=replay.samples_per_insert_min if plan.lag is None else None,
        samples_per_insert_max=replay.samples_per_insert_max if plan.lag is None else None,
        samplers_wanted=plan.samplers, env_errors=_env_errors(metrics), progress=progress, eta_s=eta_s,
        **measured(metrics, on_policy=plan.lag is not None, table=table), **known,
    )


def _env_errors(metrics: Mapping[str, float | None]) -> int | None:
    known = [value for name in ("env_errors", "rows_refused") if (value := metrics.get(name)) is not None]
    return int(sum(known)) if known else None


def _progress(
    plan: RunPlan, metrics: Mapping[str, float | None], session_s: float
) -> tuple[float | None, float | None]:
    """Share of the stop condition that will come first, and the seconds until then."""
    stop = plan.config.stop
    candidates: list[tuple[float, float | None]] = []
    if stop.seconds:
        candidates.append((session_s / stop.seconds, max(stop.seconds - session_s, 0.0)))
    for limit, done, rate in (
        (stop.env_steps, metrics.get("env_steps"), metrics.get("env_steps_per_s")),
        (stop.updates and stop.updates * plan.learners, metrics.get("updates"), metrics.get("updates_per_s")),
    ):
        if limit and done is not None:
            candidates.append((done / limit, max(limit - done, 0.0) / rate if rate else None))
    if not candidates:
        return None, None
    share, eta_s = max(candidates, key=lambda entry: entry[0])
    return min(share, 1.0), eta_s


def _on_policy_fields(plan: RunPlan) -> dict[str, Any]:
    """Further fields in the summary of an on-policy run."""
    part = plan.config.rollout
    if plan.config.on_policy is None:
        return {}
    return {
        "samplers": plan.samplers, "envs_per_sampler": part.envs_per_sampler,
        "inference_workers": plan.inference_workers, "sync_interval": part.sync_interval,
        "correction": part.correction if plan.lag else None,
        "synchrony": part.synchrony if plan.lag == 0 else None,
    }


def summary(plan: RunPlan, outcome: Outcome, run_dir: Path, machine: Machine) -> dict[str, Any]:
    """``summary.json``: all that scripts and comparisons need of a finished run; None is unknown."""
    config, rates = plan.config, outcome.rates
    return {
        "run_dir": str(run_dir),
        "env": plan.spec.env_id,
        "algo": config.run.algo,
        "mode": config.run.mode,
        "seed": config.run.seed,
        "device": outcome.device,
        "samplers": plan.samplers,
        "envs_per_sampler": config.sampling.envs_per_sampler,
        "batch_size": plan.batch_size,
        **_on_policy_fields(plan),
        **({"learners": [{"group": group, **own} for group, own in sorted(outcome.learners.items())]}
           if plan.learners > 1 else {}),
        "learner_threads": config.learner.threads,
        "wall_s": outcome.wall_s,
        "process_s": outcome.wall_s - plan.earlier.wall_s + plan.process_age_s,
        "env_steps": outcome.env_steps,
        "updates": outcome.updates,
        "env_steps_per_s": rates.get("env_steps_per_s"),
        "updates_per_s": rates.get("updates_per_s"),
        "update_frames_per_s": rates.get("update_frames_per_s"),
        "rates_measured_s": rates.get("measured_s"),
        "rates_warmup_s": outcome.warmup_s,
        "time_split": {name: rates.get(name) for name in split_names(
            on_policy=config.on_policy is not None, inference_workers=plan.inference_workers > 0)},
        "samples_per_insert": outcome.samples_per_insert,
        "samples_per_insert_band": [config.replay.samples_per_insert_min, config.replay.samples_per_insert_max],
        "policy_lag_mean": outcome.policy_lag_mean,
        "episodes": outcome.episodes,
        "eval_return_mean": outcome.eval_return,
        "eval_return_best": outcome.eval_best,
        "eval_episodes": outcome.eval_episodes,
        "eval_episodes_cut": outcome.eval_episodes_cut,
        "eval_episodes_lost": outcome.eval_episodes_lost,
        "target_return": config.stop.target_return,
        "time_to_target_s": outcome.time_to_target_s,
        "restarts": outcome.restarts,
        "env_errors": outcome.env_errors,
        "rows_refused": outcome.rows_refused,
        "stopped_by": outcome.stopped_by,
        "error": outcome.error,
        "bottleneck": outcome.bottleneck,
        "parameters_sha256": outcome.parameters_sha256,
        "reasons": plan.reasons,
        "versions": versions(),
        "machine": machine.one_line(),
    }
