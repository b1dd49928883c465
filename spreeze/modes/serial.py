"""The serial mode: the same parts in one process, one after the other.

For debugging, repeatable runs, and as the honest baseline of the asynchronous mode. After each step
of the environments it takes the updates that are due: one per env step, as serial trainers do
(samples per insert = batch size), kept inside the asked band.
"""
from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from spreeze.algorithms.nn.two_thread_update import ThreadPair
from spreeze.envs.stdout import stdout_to_stderr
from spreeze.envs.task import open_task, uniform_actions, vector_maker
from spreeze.inference.policy import Policy
from spreeze.modes import hts
from spreeze.modes.spreeze import load_saved_replay
from spreeze.run_directory import RunDir
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import CounterSample
from spreeze.runtime.recorder import Outcome, Recorder, View
from spreeze.runtime.serial_services import Inline
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.frames import open_reader
from spreeze.transport.replay_ring import ReplayRing, ShardWriter
from spreeze.transport.weights import Weights, WeightsStore
from spreeze.workers.collect.rollout_collector import RolloutCollector
from spreeze.workers.collect.transition_collector import TransitionCollector
from spreeze.workers.inference_worker import RolloutPolicy
from spreeze.workers.learn.replay_trainer import ReplayTrainer
from spreeze.workers.learn.torch_devices import learner_threads, products_in, resolve_device
from spreeze.workers.on_policy_learner import RunFiles, open_learning


def run_mode(
    plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH
) -> Outcome:
    """Trains in this process until a stop condition or an interrupt.

    Raises:
        ResourceError: no room for replay.
    """
    if plan.config.on_policy is not None:
        return run_in_turns(plan, run_dir, view, interrupts, launcher)
    learner = plan.config.learner
    recorder = Recorder(plan, run_dir, view)
    try:
        with stdout_to_stderr():
            ring = ReplayRing.create(plan.ring_spec())
            try:
                load_saved_replay(plan, run_dir.path, ring)
                device = resolve_device(learner.device)
                with products_in(learner.precision, device), \
                        learner_threads(plan.spec, learner.threads, device) as pair:
                    _Serial(plan, run_dir.path, ring, recorder, interrupts, pair).run()
            finally:
                ring.close()
    finally:
        recorder.close()
    return recorder.outcome


class _Serial:
    def __init__(self, plan: RunPlan, run_dir: Path, ring: ReplayRing, recorder: Recorder, interrupts: Interrupts,
                 pair: ThreadPair | None) -> None:
        config, spec = plan.config, plan.spec
        self._plan, self._ring, self._recorder, self._interrupts = plan, ring, recorder, interrupts
        self._rng = np.random.default_rng([config.run.seed, plan.earlier.sessions])
        self._sampling = TransitionCollector(
            lambda: open_task(spec),
            config.sampling.envs_per_sampler, spec,
            ShardWriter(ring, 0), n_step=config.algorithm.n_step, gamma=config.algorithm.gamma,
            seeds=[int(s) for s in self._rng.integers(2**31, size=config.sampling.envs_per_sampler)],
            nan_policy=config.sampling.nan_policy, make_vector=vector_maker(spec),
            tell=recorder.env_error,
        )
        device = resolve_device(config.learner.device)
        self._learning = ReplayTrainer(
            spec, config.run.algo, config.algorithm, plan.layout, open_reader(ring),
            batch_size=config.learner.batch_size, device=device, seed=config.run.seed,
            normalize_obs=config.env.normalize_obs, pair=pair, overlap=config.learner.overlap,
            copy_interval=config.learner.copy_interval,
        )
        recorder.outcome.device = device
        self._weights = WeightsStore(run_dir / "weights")
        self._checkpoints = CheckpointStore(run_dir / "checkpoints", on_progress=lambda left: self._inline.saving(left))
        self._inline = Inline(plan, run_dir, recorder, interrupts, reading=self._reading, publish=self._publish,
                              checkpoint=self._checkpoint)
        self._ratio = min(max(float(config.learner.batch_size), config.replay.samples_per_insert_min),
                          config.replay.samples_per_insert_max)
        self._epoch = 1
        self._published_updates = 0
        self._policy: Policy | None = None
        self._policy_s = self._refresh_s = 0.0

    def run(self) -> None:
        """The loop; everything is written out in the order in which it happens."""
        self._restore()
        try:
            while (reason := self._stop_reason()) is None:
                self._sampling.step(self._actions(), self._learning.updates)
                self._learn()
                self._inline.chores(is_new=self._is_new)
            self._recorder.outcome.stopped_by = reason
            self._inline.finish(self._reading(), self._learning.parameters_sha256(), is_new=self._is_new)
        finally:
            self._sampling.close()
            self._inline.close()

    def _restore(self) -> None:
        checkpoint = self._checkpoints.load_latest()
        latest = self._weights.read_latest(None)
        self._epoch = 1 + max(latest.epoch if latest else 0, checkpoint.epoch if checkpoint else 0)
        if checkpoint is not None:
            self._learning.load_state(checkpoint.tensors, checkpoint.state)
            while self._learning.notes:
                self._recorder.event("info", self._learning.notes.pop(0))
            self._refresh_policy()

    def _stop_reason(self) -> str | None:
        if self._interrupts.count:
            return f"interrupt ({self._interrupts.cause})"
        stop = self._plan.config.stop
        if stop.updates is not None and self._learning.updates >= stop.updates:
            return "updates"
        steps = self._sampling.counts.env_steps + self._plan.earlier.env_steps
        if stop.env_steps is not None and steps >= stop.env_steps:
            return "env_steps"
        return self._recorder.stop_reason()

    def _actions(self) -> np.ndarray:
        start = time.perf_counter()
        if self._policy is None:
            actions = uniform_actions(self._plan.spec, self._sampling.num_envs, self._rng)
        else:
            actions = self._policy.act(self._sampling.obs, self._rng)
        self._policy_s += time.perf_counter() - start
        return actions

    def _learn(self) -> None:
        """The updates that the rows inserted so far have earned."""
        ring, learning, stop = self._ring, self._learning, self._plan.config.stop
        inserted = ring.total_committed()
        if ring.baseline_inserted < 0:
            if inserted < max(self._plan.config.replay.learning_starts, 1):
                return
            ring.begin_learning()
        learned = False
        while ring.sampled + learning.batch_size <= (inserted - ring.baseline_inserted) * self._ratio:
            if stop.updates is not None and learning.updates >= stop.updates:
                break
            learning.refresh()
            learning.update()
            ring.sampled += learning.batch_size
            learned = True
        if learned:
            self._refresh_policy()

    def _refresh_policy(self) -> None:
        start = time.perf_counter()
        arrays, meta = self._learning.policy(self._plan.spec, self._plan.config.run.algo)
        self._policy = Policy.from_weights(arrays, meta | {"env_steps": self._env_steps()})
        self._refresh_s += time.perf_counter() - start

    @property
    def _is_new(self) -> bool:
        """A version is published and evaluated once: after a resume it stays the same until replay is filled."""
        return self._learning.updates != self._published_updates

    def _publish(self) -> Weights | None:
        arrays, meta = self._learning.policy(self._plan.spec, self._plan.config.run.algo)
        meta |= {"env_steps": self._env_steps(), "wall_s": self._recorder.wall_s}
        self._published_updates = self._learning.updates
        self._weights.publish(arrays, meta, self._epoch, self._published_updates)
        return self._weights.read_latest(None)

    def _env_steps(self) -> int:
        return self._plan.earlier.env_steps + self._sampling.counts.env_steps

    def _checkpoint(self) -> None:
        tensors, state = self._learning.state()
        state |= {"algo": self._plan.config.run.algo, "env_id": self._plan.spec.env_id,
                  "env_steps": self._env_steps(), "wall_s": self._recorder.wall_s}
        self._checkpoints.save(tensors, state, epoch=self._epoch, updates=self._learning.updates,
                               ring=self._ring if self._plan.config.replay.save else None)

    def _reading(self) -> CounterSample:
        counts, learning, ring = self._sampling.counts, self._learning, self._ring
        sampler = {
            "env_steps": counts.env_steps, "episodes": counts.episodes, "rows_refused": counts.rows_refused,
            "episode_return": counts.episode_return or 0.0, "episode_length": counts.episode_length or 0.0,
            "env_errors": counts.env_errors, "policy_version": learning.updates, "policy_s": self._policy_s,
            "env_s": counts.env_s, "write_s": counts.write_s, "wait_s": 0.0,
        }
        return CounterSample.of_one(
            t_s=time.monotonic(), samplers=(sampler,),
            learner=learning.numbers(wait_s=0.0, publish_s=self._refresh_s + self._inline.spent_s),
            inserted=ring.total_committed(), baseline_inserted=ring.baseline_inserted, sampled=ring.sampled,
        )


def run_in_turns(
    plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH
) -> Outcome:
    """Trains until a stop condition or an interrupt.

    Raises:
        ResourceError: no room for the storage.
        ConfigError: a resumed run's checkpoint does not fit.
    """
    if plan.samplers > 1:
        return hts.run_mode(plan, run_dir, view, interrupts, launcher)
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
        self._envs = RolloutCollector(
            lambda: open_task(spec), spec, memory.rollouts, first=0, num_envs=config.rollout.envs_per_executor,
            seed=config.run.seed, step_synchronous=config.rollout.synchrony == "step",
            nan_policy=config.sampling.nan_policy, tell=recorder.env_error,
        )
        self._policies = RolloutPolicy(memory.rollouts, memory.handover.policies)
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

    def _reading(self, *, whole: bool = False) -> CounterSample:
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
        return CounterSample.of_one(
            t_s=time.monotonic(), samplers=(executor,), learner=numbers, inserted=collected, baseline_inserted=0,
            sampled=(learning.updates - self._first_updates) * self._plan.batch_size,
        )
