"""The serial mode: the same workers in one process, for debugging, repeatable runs, and as a baseline.

They take turns. Off-policy, each step of the environments is followed by the updates that are due: one per env step, as
serial trainers do (samples per insert = batch size), kept within the configured band. On-policy, a rollout is
collected, then learned from. Learning does not depend on the clock.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from spreeze.machine.processes import LOW_PRIORITY, lower_priority
from spreeze.modes import replay_modes, rollout_modes
from spreeze.run_directory import RunDir
from spreeze.runtime.assembly import Assembly
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher
from spreeze.runtime.outcome import Outcome
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import View
from spreeze.runtime.supervisor import run_workers
from spreeze.runtime.turns import TurnLauncher
from spreeze.transport.weights import LocalHandle, LocalParameters
from spreeze.workers.jobs import BaseLearnerJob, ReplayLearnerJob, ReplaySamplerJob
from spreeze.workers.roles import RestartLimit

_PUBLISH_S = 1.0  # Least time between two publications, since their readers have to wait for their turn.
_NO_RESTART = RestartLimit(failures=1, window_s=1.0, quarantine_s=None)  # a restarted worker's results would not repeat


def run_mode(plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH) -> Outcome:
    """Trains in this process until a stop condition or an interrupt; on-policy with several samplers, in workers."""
    if plan.takes_turns:
        lower_priority(LOW_PRIORITY if plan.config.tuning.give_way else 0)
        launcher = TurnLauncher(run_dir, interrupts, plan.config.sampling)
    return run_workers(assemble, plan, run_dir, view, interrupts, launcher)


def assemble(run: Assembly) -> None:
    """One learner and one sampler, independent of the clock; on-policy with several samplers, as in mode hts."""
    run.takes_turns = run.plan.takes_turns
    (rollout_modes if run.plan.config.on_policy is not None else replay_modes).assemble(run)
    if not run.takes_turns:
        return
    weights_channel, part = LocalHandle(fds=(), channel=LocalParameters()), run.plan.config.replay
    for name, spec in run.specs.items():
        job: Any = spec.job
        changes = _learner_changes(run.plan, job) if isinstance(job, BaseLearnerJob) else {}
        if isinstance(job, ReplayLearnerJob | ReplaySamplerJob):
            ratio = part.serial_ratio(job.limiter.batch_size * run.plan.layout.env_steps_per_row) / part.rows_per_step
            limiter = dataclasses.replace(job.limiter, minimum=0.0, maximum=ratio, serial=True)
            changes |= {"limiter": limiter, "weights_channel": weights_channel}
        if isinstance(job, ReplaySamplerJob):
            changes |= {"seed": run.plan.config.run.seed, "stream": run.plan.earlier.sessions}
        run.specs[name] = dataclasses.replace(spec, job=dataclasses.replace(job, **changes), limit=_NO_RESTART)


def _learner_changes(plan: RunPlan, job: BaseLearnerJob) -> dict[str, Any]:
    evaluation = plan.config.evaluation
    stop = job.stop.by_counts if isinstance(job, ReplayLearnerJob) else job.stop
    publish_s = max(_PUBLISH_S, job.learner.publish_interval_s)
    learner = dataclasses.replace(job.learner, gpu_replay=False, updates_per_launch=0, publish_interval_s=publish_s)
    session, interval = float(plan.earlier.sessions), evaluation.interval_updates if evaluation.enabled else None
    return {"stop": stop, "learner": learner, "session": session, "publish_updates": interval}
