"""What a process that does everything in turn does between updates: it samples gauges, evaluates and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spreeze.errors import ResourceError, WeightsError
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import CounterSample
from spreeze.runtime.recorder import SAMPLE_S, Recorder
from spreeze.transport.weights import Weights, encode
from spreeze.workers.evaluator import Evaluation, EvaluatorJob, failure_text
from spreeze.workers.sampler_stats import worth_telling

_FINAL_EVALUATION_S = 6.0


class Inline:
    """Chores by the clock, in line with training.

    Args:
        reading: all counters of this moment.
        publish: writes the newest weights and gives them, as they were read back; None if there are none.
        checkpoint: writes a checkpoint.
    """

    def __init__(
        self, plan: RunPlan, run_dir: Path, recorder: Recorder, interrupts: Interrupts, *,
        reading: Callable[[], CounterSample], publish: Callable[[], Weights | None], checkpoint: Callable[[], object],
    ) -> None:
        part = plan.config.evaluation
        self._plan, self._recorder, self._interrupts = plan, recorder, interrupts
        self._reading, self._publish, self._save = reading, publish, checkpoint
        self._evaluation = Evaluation(EvaluatorJob(
            run_dir=str(run_dir), spec=plan.spec, episodes=part.episodes, first_seed=part.seed,
            cpu_share=part.cpu_share, has_free_core=False,
        ), recorder.env_error)
        self._failures = 0
        self._ending = False
        self.spent_s = 0.0
        """Time that evaluations took so far, publication included."""
        self._next_sample_s = self._next_evaluation_s = 0.0
        self._next_checkpoint_s = time.monotonic() + plan.config.learner.checkpoint_interval_s

    def saving(self, left_bytes: int) -> None:
        """To be called while a checkpoint is written, with what is left to write and check.

        Raises:
            ResourceError: the user gives it up.
        """
        if self._interrupts.urgent:
            raise ResourceError("given up by a second Ctrl-C")
        if self._ending:
            self._recorder.saving(left_bytes)

    def close(self) -> None:
        """Closes the evaluation's environments."""
        self._evaluation.drop_environments()

    def sample(self) -> bool:
        """Tells the recorder the counters, if it is time; True if it was."""
        if time.monotonic() < self._next_sample_s:
            return False
        self._next_sample_s = time.monotonic() + SAMPLE_S
        if self._interrupts.hung_up:
            self._recorder.hung_up()
        self._recorder.sample(self._reading(), pids={})
        return True

    def chores(self, *, is_new: bool) -> None:
        """Whatever it is time for.

        Args:
            is_new: weights were learned that are not evaluated yet: a version is evaluated once.
        """
        self.sample()
        if is_new and time.monotonic() >= self._next_evaluation_s:
            self._evaluate()
        if time.monotonic() >= self._next_checkpoint_s:
            self._checkpoint()

    def finish(self, reading: CounterSample, parameters_sha256: str, *, is_new: bool) -> None:
        """Last sample, summary, checkpoint, and an evaluation if the last weights have none and nobody is in a hurry.

        Args:
            reading: the last counters.
            parameters_sha256: of the networks.
            is_new: see ``chores``.
        """
        self._ending = True
        self._recorder.sample(reading, pids=None, state="stopping")
        self._recorder.finish()
        self._recorder.outcome.parameters_sha256 = parameters_sha256
        self._checkpoint()
        if is_new and not self._interrupts.urgent:
            self._evaluate(final=True)

    def _evaluate(self, *, final: bool = False) -> None:
        """Greedy episodes, at most ``evaluation.cpu_share`` of the time."""
        start = time.monotonic()
        patience = 2 if final else 1

        def should_stop() -> bool:
            return self._interrupts.count >= patience or (final and time.monotonic() - start > _FINAL_EVALUATION_S)

        try:
            weights = self._publish()
        except (OSError, WeightsError) as error:
            weights = None
            self._recorder.event("warning", f"weights not published, the last good ones stay: {error}")
        if weights is not None:
            record = self._record(weights, should_stop, final=final)
            if record is not None:
                self._recorder.evaluation(record, final=final)
            elif final and self._interrupts.count < patience:
                self._recorder.no_final_evaluation(_FINAL_EVALUATION_S)
        took_s = time.monotonic() - start
        self.spent_s += took_s
        self._next_evaluation_s = time.monotonic() + took_s / self._plan.config.evaluation.cpu_share

    def _record(self, weights: Weights, should_stop: Callable[[], bool], *, final: bool) -> dict[str, Any] | None:
        """The evaluation's record; None where there is none, which is no reason to end the run."""
        data = encode(weights.arrays, weights.meta, weights.epoch, weights.version)
        try:
            record = self._evaluation.evaluate(weights, data, should_stop=should_stop, partial=final)
        except Exception as error:
            self._failures += 1
            if worth_telling(self._failures):
                self._recorder.event("warning", failure_text(error, self._failures))
            self._evaluation.drop_environments()
            return None
        self._failures = 0
        return record

    def _checkpoint(self) -> None:
        try:
            self._save()
        except (OSError, ResourceError) as error:
            self._recorder.event("warning", f"checkpoint not written, the last one stays: {error}")
        self._next_checkpoint_s = time.monotonic() + self._plan.config.learner.checkpoint_interval_s
