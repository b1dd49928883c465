"""The serial mode: the same parts in one process, for debugging, repeatable runs, and as a baseline.

Off-policy, each step of the environments is followed by the updates that are due: one per env step, as serial trainers
do (samples per insert = batch size), kept within the configured band. On-policy, a rollout is collected, then learned
from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np

from spreeze.algorithms.fused_mlp import ThreadPair
from spreeze.envs.task import HeldActions, open_task, vector_maker
from spreeze.errors import ResourceError, WeightsError
from spreeze.inference.policy import Policy
from spreeze.machine.output import stdout_to_stderr
from spreeze.machine.processes import LOW_PRIORITY, OrphanWatch, lower_priority, own_mark
from spreeze.metrics.table import SLOTS, Phase
from spreeze.modes import paced_rollouts
from spreeze.modes.replay import load_saved_replay
from spreeze.run_directory import RunDir
from spreeze.runtime.assembly import Assembly
from spreeze.runtime.hang_watch import RUN, HangWatch
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher, log_file
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import SAMPLE_S, CounterSample, GroupSample, Outcome, Recorder, View
from spreeze.runtime.supervisor import run_workers
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, ShardWriter
from spreeze.transport.weights import Weights
from spreeze.workers.collectors import RolloutCollector, RolloutPolicy, TransitionCollector
from spreeze.workers.context import in_a_row, is_power_of_ten
from spreeze.workers.evaluator import Evaluation
from spreeze.workers.feeds import SkippedUpdates, open_on_policy_trainer, run_progress
from spreeze.workers.jobs import EvaluatorJob, OnPolicyLearnerJob
from spreeze.workers.learner import FIRST_CHECKPOINT_S, LearnerFiles
from spreeze.workers.on_policy_trainer import OnPolicyTrainer
from spreeze.workers.replay_trainer import ReplayTrainer
from spreeze.workers.torch_devices import open_device

_FINAL_EVALUATION_S = 6.0
_PUBLISH_S = 1.0
"""Between two publications of weights that nobody evaluates."""
_LEAST_SILENT_S = 30.0
"""Shortest time after which a process counts as hung in code that lets no other thread run: imports take seconds."""
_MARGIN_S = 5.0
"""For the deadline to be met in the usual way before."""


def run_mode(plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH) -> Outcome:
    """Trains in this process until a stop condition or an interrupt; on-policy with several samplers, in workers."""
    on_policy = plan.config.on_policy is not None
    if on_policy and plan.samplers > 1:
        return run_workers(paced_rollouts.assemble, plan, run_dir, view, interrupts, launcher)
    lower_priority(LOW_PRIORITY if plan.config.tuning.give_way else 0)
    with contextlib.ExitStack() as stack:
        recorder = Recorder(plan, run_dir, view)
        stack.callback(lambda: recorder.close(interrupts.again()))
        run = stack.enter_context(Assembly(plan, run_dir.path, recorder.started_s))
        stack.enter_context(stdout_to_stderr())
        stack.enter_context(_guarded(plan, run_dir, interrupts))
        hidden_sizes = (plan.config.on_policy or plan.config.algorithm).hidden_sizes
        recorder.outcome.device, pair = stack.enter_context(
            open_device(plan.config.learner, plan.spec, hidden_sizes, plan.batch_size)
        )
        serial = _Serial(plan, run_dir, recorder, interrupts)
        if on_policy:
            data = paced_rollouts.RolloutData(run, 0)
            recorder.goes_on_from(data.env_steps)
            serial.run(_Rollouts(serial, data, paced_rollouts.learner_job(run, 0, data)))
        else:
            ring = run.open(lambda: ReplayRing.create(plan.ring_spec()))
            with interrupts.abandonable():
                load_saved_replay(plan, run_dir.path, ring)
            serial.run(_Replay(serial, ring, pair))
    return recorder.outcome


@contextlib.contextmanager
def _guarded(plan: RunPlan, run_dir: RunDir, interrupts: Interrupts) -> Iterator[None]:
    """Within the block a small process ends this one where an environment's code lets no other code run."""
    step_s = plan.config.sampling.step_deadline_s
    guard = OrphanWatch(run_dir.nonce, silent_s=max(_LEAST_SILENT_S, step_s) + _MARGIN_S)
    with log_file(run_dir.path, RUN) as log:
        faulthandler.register(signal.SIGUSR1, log, all_threads=True)
        try:
            guard.start()
            with interrupts.guarded_by(guard), own_mark(run_dir.nonce):  # the guard, started before, has no mark
                yield
        finally:
            guard.end()
            faulthandler.unregister(signal.SIGUSR1)


class _Serial:
    """The training loop, which regularly samples counters, evaluates and writes checkpoints."""

    def __init__(self, plan: RunPlan, run_dir: RunDir, recorder: Recorder, interrupts: Interrupts) -> None:
        self._data: _Replay | _Rollouts
        self.plan, self.run_dir, self.recorder, self.interrupts = plan, run_dir, recorder, interrupts
        self._evaluation = Evaluation(
            EvaluatorJob(
                run_dir=str(run_dir.path),
                spec=plan.spec,
                config=plan.config.evaluation,
                has_free_core=False,
                target_return=plan.config.stop.target_return,
                room=plan.room,
            ),
            recorder.env_error,
            lambda phase: self.watch.note(phase),
        )
        self.watch = HangWatch(
            interrupts,
            run_dir.path,
            plan.config.sampling.step_deadline_s,
            lambda: run_dir.asked("stop"),
            plan.config.sampling.start_deadline_s,
        )
        self._ending = self._checkpoint_asked = False
        self._evaluations_s = 0.0
        self._unscored: Weights | None = None
        self._unpublished = self._unwritten = 0  # weights and checkpoints that failed, in a row
        """The newest weights, if an interrupt cut their evaluation short."""
        self._next_sample_s = self._next_evaluation_s = 0.0
        self._next_evaluation_update = 0
        self._next_checkpoint_s = time.monotonic() + plan.config.learner.checkpoint_interval_s
        self._learned = False

    def files(self, trainer: ReplayTrainer | OnPolicyTrainer, env_steps: Callable[[], int]) -> LearnerFiles:
        return LearnerFiles(
            self.run_dir.path,
            self.plan.config.run.algo,
            self.plan.spec.env_id,
            trainer,
            env_steps=env_steps,
            wall_s=lambda: self.recorder.wall_s,
            on_progress=self._saving,
        )

    def run(self, data: _Replay | _Rollouts) -> None:
        """Runs the loop to the end of the run."""
        self._data, recorder = data, self.recorder
        try:
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C, in an environment's code
                while self._stop_reason() is None:
                    self._advance()
            self.watch.done()
            self._ending, recorder.outcome.stopped_by = True, self._stop_reason() or "unknown"
            recorder.sample(self._counters(), pids=None, state="stopping")
            recorder.finish()
            recorder.outcome.parameters_sha256 = data.trainer.parameters_sha256()
            self._checkpoint()
            if (data.files.is_new or self._unscored is not None) and not self.interrupts.urgent:
                with contextlib.suppress(KeyboardInterrupt):
                    self._evaluate(final=True)
        finally:
            with contextlib.suppress(KeyboardInterrupt):
                self.watch.note(Phase.INIT)
                data.envs.close()
                self._evaluation.close()
            self.watch.done()
            self.watch.close()

    def _advance(self) -> None:
        """Collects, learns what is due, and does what is due besides."""
        data = self._data
        self.watch.note(Phase.STEP)
        data.collect()
        self.watch.done()
        updates = data.trainer.updates
        data.learn()
        if not self._learned and data.trainer.updates > updates:
            self._learned = True
            self._next_checkpoint_s = min(self._next_checkpoint_s, time.monotonic() + FIRST_CHECKPOINT_S)
        self.sample()
        if data.files.is_new and self._evaluation_due():
            self._evaluate()
            self.watch.done()
        if time.monotonic() >= self._next_checkpoint_s:
            self._checkpoint()

    def _stop_reason(self) -> str | None:
        if self.interrupts.count:
            return f"interrupt ({self.interrupts.cause})"
        stop, data = self.plan.config.stop, self._data
        if stop.updates is not None and data.trainer.updates >= stop.updates:
            return "updates"
        if stop.env_steps is not None and data.env_steps() >= stop.env_steps:
            return "env_steps"
        return self.recorder.stop_reason()

    def sample(self) -> bool:
        """Records the counters if a sample is due; whether it was."""
        if time.monotonic() < self._next_sample_s:
            return False
        self._next_sample_s = time.monotonic() + SAMPLE_S
        if self.interrupts.hung_up:
            self.recorder.hung_up()
        self.recorder.sample(self._counters(), pids={RUN: os.getpid()})
        self._obey()
        return True

    def _obey(self) -> None:
        """Does what the user asks of a live run."""
        if self.run_dir.asked("pause"):
            self.recorder.hold(lambda: self._stop_reason() is None)
        if self.run_dir.take("evaluate") is not None:
            self._next_evaluation_s = 0.0
        if self.run_dir.take("checkpoint") is not None:
            self._next_checkpoint_s, self._checkpoint_asked = 0.0, True
        if self.run_dir.take("timeline") is not None:
            self.recorder.event("warning", "timeline: mode serial has one process, which does one thing at a time")
        if self.run_dir.take("leave-free") is not None:
            self.recorder.event("warning", "leave-free: no governor watches this run, so nothing changes")

    def _counters(self) -> CounterSample:
        data = self._data
        counts, (env_steps, inserted, baseline, sampled) = data.envs.counts, data.flow(ending=self._ending)
        same = (
            "episodes",
            "episode_return",
            "episode_length",
            "rows_refused",
            "env_errors",
            "policy_s",
            "env_s",
            "write_s",
        )
        sampler = {name: getattr(counts, name) or 0.0 for name in same}
        sampler |= {"env_steps": env_steps, "policy_version": data.trainer.updates, "wait_s": 0.0}
        metrics = data.trainer.metrics(wait_s=0.0, publish_s=self._evaluations_s + data.refresh_s)
        self.recorder.report(0, metrics)
        learner = {name: metrics.get(name, 0.0) for name in SLOTS["learner"]}
        return CounterSample(time.monotonic(), (GroupSample((sampler,), learner, inserted, baseline, sampled),))

    def _evaluation_due(self) -> bool:
        """By the number of updates where the configuration says so, else by time; also when it is asked for."""
        if self.plan.config.evaluation.interval_updates is None or self._next_evaluation_s == 0.0:
            return time.monotonic() >= self._next_evaluation_s
        return self._data.trainer.updates >= self._next_evaluation_update

    def _evaluate(self, *, final: bool = False) -> None:
        """Evaluates the newest weights, for at most ``evaluation.cpu_share`` of the time where time decides."""
        start = time.monotonic()
        patience = 2 if final else 1

        def should_stop() -> bool:
            return self.interrupts.count >= patience or (final and time.monotonic() - start > _FINAL_EVALUATION_S)

        def warn(text: str) -> None:
            self.recorder.event("warning", text)

        try:
            weights = self._newest()
            self._unpublished = 0
        except (OSError, WeightsError) as error:
            self._unpublished += 1
            if is_power_of_ten(self._unpublished):
                warn(f"weights not published{in_a_row(self._unpublished)}, the last good ones stay: {error}")
        else:
            evaluates = self.plan.config.evaluation.enabled
            record = self._evaluation.attempt(weights, should_stop, warn, keep_partial=final) if evaluates else None
            if not evaluates:
                self._unscored = None
            elif record is not None:
                self._unscored = None
                self.recorder.evaluation(record, final=final)
                self._evaluation.test_best(should_stop, warn, last=final)
            elif final and self.interrupts.count < patience:
                self.recorder.no_final_evaluation(_FINAL_EVALUATION_S)
        took_s = time.monotonic() - start
        self._evaluations_s += took_s
        pause_s = took_s / self.plan.config.evaluation.cpu_share if self.plan.config.evaluation.enabled else _PUBLISH_S
        self._next_evaluation_s = time.monotonic() + pause_s
        interval = self.plan.config.evaluation.interval_updates or 1
        self._next_evaluation_update = (self._data.trainer.updates // interval + 1) * interval

    def _newest(self) -> Weights:
        """Publishes the newest weights, unless those were published that have no score yet."""
        if self._unscored is None or self._data.files.is_new:
            self._unscored = self._data.files.publish()
        return self._unscored

    def _checkpoint(self) -> None:
        try:
            self._data.files.save(self._data.saved_ring)
            self._unwritten = 0
            if self._checkpoint_asked:
                self.recorder.event("info", f"checkpoint on request, at update {self._data.trainer.updates}")
        except (OSError, ResourceError) as error:
            self._unwritten += 1
            if is_power_of_ten(self._unwritten):
                text = f"checkpoint not written{in_a_row(self._unwritten)}, the last one stays: {error}"
                self.recorder.event("warning", text)
        self._checkpoint_asked = False
        self._next_checkpoint_s = time.monotonic() + self.plan.config.learner.checkpoint_interval_s

    def _saving(self, left_bytes: int) -> None:
        """Called while a checkpoint is written, which a second Ctrl-C gives up."""
        if self.interrupts.urgent:
            raise ResourceError("given up by a second Ctrl-C")
        if self._ending:
            self.recorder.saving(left_bytes)


class _Replay:
    """Data from replay: one step of the environments, then the updates due for its rows."""

    def __init__(self, serial: _Serial, ring: ReplayRing, pair: ThreadPair | None) -> None:
        plan, recorder, config = serial.plan, serial.recorder, serial.plan.config
        self._serial, self._plan, self._ring = serial, plan, ring
        self._anneals = config.algorithm.lr_schedule != "constant"
        counts = config.stop.env_steps is not None or config.stop.updates is not None
        # What is learned by a run that ends by counts does not depend on the clock.
        self._stop = dataclasses.replace(config.stop, seconds=None) if counts else config.stop
        self.saved_ring = ring if config.replay.save else None
        self._rng = np.random.default_rng([config.run.seed, plan.earlier.sessions])
        self._random = HeldActions(plan.spec, self._rng)
        self.envs = TransitionCollector(
            lambda: open_task(plan.spec),
            config.sampling.envs_per_sampler,
            plan.spec,
            ShardWriter(ring, 0),
            n_step=config.algorithm.n_step,
            gamma=config.algorithm.gamma,
            on_progress=serial.watch.note,
            seeds=[int(s) for s in self._rng.integers(2**31, size=config.sampling.envs_per_sampler)],
            nan_policy=config.sampling.nan_policy,
            make_vector=vector_maker(plan.spec),
            on_error=recorder.env_error,
        )
        serial.watch.done()
        self.trainer = ReplayTrainer(
            plan.spec,
            config.run.algo,
            config.algorithm,
            plan.layout,
            ReplayReader(ring),
            dataclasses.replace(config.learner, mirror=False, updates_per_launch=0),
            seed=config.run.seed,
            normalize_obs=config.env.normalize_obs,
            pair=pair,
            session=float(plan.earlier.sessions),
            loaded_rows=tuple(ring.committed.tolist()),
        )
        self._ratio = config.replay.serial_ratio(config.learner.batch_size)
        self._policy: Policy | None = None
        self.refresh_s = 0.0
        self.files = serial.files(self.trainer, self.env_steps)
        self.files.offered_updates = 0  # the first actions are uniform: there is no policy to evaluate
        checkpoint = self.files.begin()
        if checkpoint is not None:
            self.trainer.load_state(checkpoint.tensors, checkpoint.state)
            self._refresh_policy()
        while self.trainer.notes:
            recorder.event("info", self.trainer.notes.pop(0))
        self._skipped = SkippedUpdates(self.trainer)

    def env_steps(self) -> int:
        return self._plan.earlier.env_steps + self.envs.counts.env_steps

    def collect(self) -> None:
        start = time.perf_counter()
        if self._policy is None:
            actions = self._random.draw(self.envs.num_envs, self.envs.obs)
        else:
            actions, self.envs.state = self._policy.act(self.envs.obs, self.envs.state, self._rng)
        self.envs.counts.policy_s += time.perf_counter() - start
        self.envs.step(actions, self.trainer.updates)

    def learn(self) -> None:
        ring, trainer, most = self._ring, self.trainer, self._plan.config.stop.updates
        inserted = ring.total_committed()
        if ring.baseline_inserted < 0:
            if inserted < max(self._plan.config.replay.learning_starts, 1):
                return
            ring.begin_learning()
        before = trainer.updates
        while ring.sampled + trainer.batch_size <= (inserted - ring.baseline_inserted) * self._ratio:
            if most is not None and trainer.updates >= most:
                break
            trainer.count_returns(np.array(self.envs.counts.returns))
            trainer.refresh()
            if self._anneals:
                trainer.anneal(
                    run_progress(
                        self._stop,
                        self._plan.earlier.wall_s,
                        self._serial.recorder.session_s,
                        self.env_steps(),
                        trainer.updates,
                    )
                )
            trainer.update()
            ring.sampled += trainer.batch_size
        if trainer.updates != before:
            self._skipped.check()
            self._refresh_policy()

    def _refresh_policy(self) -> None:
        start = time.perf_counter()
        arrays, meta = self.trainer.exploring_policy()
        self._policy = Policy.from_weights(arrays, meta | {"env_steps": self.env_steps()})
        self.refresh_s += time.perf_counter() - start

    def flow(self, *, ending: bool) -> tuple[int, int, int, int]:
        """Env steps of this session; rows inserted, rows inserted before learning began, and rows sampled."""
        ring = self._ring
        return self.envs.counts.env_steps, ring.total_committed(), ring.baseline_inserted, ring.sampled


class _Rollouts:
    """Data rollout by rollout: one is collected, then learned from."""

    saved_ring = None
    refresh_s = 0.0

    def __init__(self, serial: _Serial, data: paced_rollouts.RolloutData, job: OnPolicyLearnerJob) -> None:
        plan, config, self._rollouts = serial.plan, serial.plan.config, data.rollouts
        self._serial = serial
        self._first_rollout, self._first_updates = data.first_rollout, data.first_updates
        self.trainer = open_on_policy_trainer(job, data.rollouts, lambda: serial.recorder.session_s)
        self.files = serial.files(self.trainer, self.env_steps)
        self.files.begin()
        self.envs = RolloutCollector(
            lambda: open_task(plan.spec),
            plan.spec,
            data.rollouts,
            first=0,
            num_envs=config.rollout.envs_per_sampler,
            seed=config.run.seed,
            step_synchronous=config.rollout.synchrony == "step",
            nan_policy=config.sampling.nan_policy,
            on_error=serial.recorder.env_error,
            on_progress=serial.watch.note,
        )
        serial.watch.done()
        self._policies = RolloutPolicy(data.rollouts, data.handover.policies)

    def env_steps(self) -> int:
        return self.trainer.env_steps

    def collect(self) -> None:
        """Steps until the rollout is full, or the run ends, which discards an unfinished rollout."""
        serial = self._serial
        while not self._rollouts.full and not serial.interrupts.asked:
            serial.watch.note(Phase.STEP)
            self.envs.advance(self._policies)
            serial.watch.done()
            if serial.sample() and serial.recorder.stop_reason() is not None:
                return

    def learn(self) -> None:
        self.trainer.learn()
        self.trainer.swap()

    def flow(self, *, ending: bool) -> tuple[int, int, int, int]:
        """As for replay; at the end only whole rollouts count."""
        collected = (self._rollouts.current - self._first_rollout) * self._rollouts.spec.rows
        sampled = (self.trainer.updates - self._first_updates) * self._serial.plan.batch_size
        counted = collected if ending else self.envs.counts.env_steps
        return counted, collected, 0, sampled
