"""The tuner beside an on-policy run, whose storage sizes are among the choices.

The run begins with the settings that it would have without the tuner. Candidates are measured in processes of their
own; during a turn, the run's workers are suspended. A choice of other sizes takes effect by a restart of the workers,
with the networks, optimizers and statistics of the last update.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

from spreeze.config.schema import Config
from spreeze.machine.awake import AWAKE
from spreeze.runtime.assembly import Assembly
from spreeze.runtime.plan import RunPlan, TunerChoice
from spreeze.runtime.process_supervisor import ProcessSupervisor
from spreeze.tuner.in_run import PAUSE_S, TunerThread, is_paused
from spreeze.tuner.knobs import fit_rollout
from spreeze.tuner.problem import ROLLOUT_SAMPLERS, Setting, TuningProblem


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

    def _measured(self, run: Assembly, workers: ProcessSupervisor, note: str | None) -> dict[str, Any]:
        tuning = self._tuning

        @contextlib.contextmanager
        def exclusive() -> Iterator[None]:
            """Suspends the workers; waits for the end of the user's pause, and preserves one that begins."""
            while is_paused(run) and not self._stop.stop_requested:
                time.sleep(PAUSE_S)
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
