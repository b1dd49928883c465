"""The synchronous baseline of the on-policy algorithms: rollout, then learning, in turns; nothing is ever old.

One executor steps in this process, so that everything happens in one place and one order; several are the
executor processes of the HTS-RL mode, with a lag of 0.
"""

from __future__ import annotations

import time

from spreeze.envs.stdout import stdout_to_stderr
from spreeze.envs.task import open_task
from spreeze.modes import hts
from spreeze.modes.inline import Inline
from spreeze.rundir import RunDir
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.workers.devices import learner_threads, resolve_device
from spreeze.workers.gauges import Reading
from spreeze.workers.inference import IntervalPolicy
from spreeze.workers.interrupts import Interrupts
from spreeze.workers.plan import RunPlan
from spreeze.workers.recorder import Outcome, Recorder, View
from spreeze.workers.rollout import RolloutEnvs
from spreeze.workers.rollout_learner import RunFiles, open_learning
from spreeze.workers.spawn import Start, spawn


def run_mode(
    plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, start: Start = spawn
) -> Outcome:
    """Trains until a stop condition or an interrupt.

    Raises:
        ResourceError: no room for the storage.
        ConfigError: a resumed run's checkpoint does not fit.
    """
    if plan.samplers > 1:
        return hts.run_mode(plan, run_dir, view, interrupts, start)
    part = plan.config.learner
    with hts.open_memory(plan, run_dir.path) as memory:
        plan = hts.from_interval(plan, memory.rollouts)
        recorder = Recorder(plan, run_dir, view)
        try:
            with stdout_to_stderr(), learner_threads(plan.spec, part.threads, resolve_device(part.device)):
                _Synchronous(plan, run_dir, memory, recorder, interrupts).run()
        finally:
            recorder.close()
    return recorder.outcome


class _Synchronous:
    def __init__(
        self, plan: RunPlan, run_dir: RunDir, memory: hts.Memory, recorder: Recorder, interrupts: Interrupts
    ) -> None:
        config, spec = plan.config, plan.spec
        self._plan, self._memory, self._recorder, self._interrupts = plan, memory, recorder, interrupts
        job = hts.learner_job(plan, run_dir.path, memory, recorder.started_s)
        recorder.outcome.device = resolve_device(config.learner.device)
        self._first_interval, self._first_updates = memory.rollouts.interval, memory.updates
        self._learning = open_learning(job, memory.rollouts)
        store = CheckpointStore(run_dir.path / "checkpoints", on_progress=lambda left: self._inline.saving(left))
        self._files = RunFiles(job, self._learning, store)
        self._envs = RolloutEnvs(
            lambda: open_task(spec), spec, memory.rollouts, first=0, num_envs=config.rollout.envs_per_executor,
            seed=config.run.seed, step_synchronous=config.rollout.synchrony == "step",
            nan_policy=config.sampling.nan_policy, tell=recorder.env_error,
        )
        self._policies = IntervalPolicy(memory.rollouts, memory.handover.policies)
        self._inline = Inline(plan, run_dir.path, recorder, interrupts, reading=self._reading,
                              publish=self._files.publish, checkpoint=self._files.checkpoint)

    def run(self) -> None:
        """The loop; everything is written out in the order in which it happens."""
        try:
            while (reason := self._stop_reason()) is None:
                self._collect()
                self._learning.learn()
                self._learning.swap()
                self._inline.chores(is_new=self._is_new)
            self._recorder.outcome.stopped_by = reason
            self._inline.finish(self._reading(whole=True), self._learning.parameters_sha256(), is_new=self._is_new)
        finally:
            self._envs.close()
            self._inline.close()

    @property
    def _is_new(self) -> bool:
        return self._learning.updates != self._files.version

    def _collect(self) -> None:
        """Steps until the interval is full, or the run is to end: then what was collected counts for nothing."""
        while not self._memory.rollouts.full and not self._interrupts.asked:
            self._envs.advance(self._policies)
            if self._inline.sample() and self._recorder.stop_reason() is not None:
                return

    def _stop_reason(self) -> str | None:
        if self._interrupts.count:
            return f"interrupt ({self._interrupts.cause})"
        stop = self._plan.config.stop
        if stop.updates is not None and self._learning.updates >= stop.updates:
            return "updates"
        if stop.env_steps is not None and self._learning.env_steps >= stop.env_steps:
            return "env_steps"
        return self._recorder.stop_reason()

    def _reading(self, *, whole: bool = False) -> Reading:
        """All counters; at the end only whole intervals count."""
        counts, learning, rollouts = self._envs.counts, self._learning, self._memory.rollouts
        collected = (rollouts.interval - self._first_interval) * rollouts.spec.rows
        executor = {
            "env_steps": collected if whole else counts.env_steps, "episodes": counts.episodes,
            "episode_return": counts.episode_return or 0.0, "episode_length": counts.episode_length or 0.0,
            "rows_refused": counts.rows_refused, "env_errors": counts.env_errors, "policy_version": learning.updates,
            "policy_s": counts.policy_s, "env_s": counts.env_s, "write_s": counts.write_s, "wait_s": 0.0,
        }
        numbers = learning.numbers(wait_s=0.0, publish_s=self._inline.spent_s)
        return Reading(
            t_s=time.monotonic(), samplers=(executor,), learner=numbers, inserted=collected, baseline_inserted=0,
            sampled=(learning.updates - self._first_updates) * self._plan.batch_size,
        )
