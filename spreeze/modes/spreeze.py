"""The Spreeze mode: samplers -> shared-memory replay -> learner, with evaluator and visualizer beside."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from spreeze.machine.orphan_cleanup import OrphanWatch
from spreeze.run_directory import RunDir
from spreeze.runtime.cpu_governor import GovernorLoop
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import RunContext, Start, WorkerSpec, spawn
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import CounterSample
from spreeze.runtime.recorder import Outcome, Recorder, View
from spreeze.runtime.services import last_evaluation, memory_limit_bytes, supervise, watcher_specs
from spreeze.runtime.supervisor import ProcessSupervisor, Supervisor
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.checkpoint import load_replay as load_replay
from spreeze.transport.replay_ring import ReplayRing
from spreeze.transport.status_table import StatusTable
from spreeze.workers.jobs import LearnerJob
from spreeze.workers.sampler import SamplerJob


def run_mode(
    plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, start: Start = spawn
) -> Outcome:
    """Trains until a stop condition or an interrupt.

    Raises:
        ResourceError: no room for replay; nothing was started.
    """
    names = status_rows(plan.samplers)
    recorder = Recorder(plan, run_dir, view)
    watch = OrphanWatch(run_dir.nonce)
    try:
        watch.start()
        with open_memory(plan, run_dir.path, len(names)) as (status, ring):
            run_context = RunContext(run_dir=run_dir.path, status_fd=status.block.fd, status_rows=len(names),
                                     nonce=run_dir.nonce)
            workers = ProcessSupervisor(run_context, status, on_event=recorder.event,
                                        takeover=lambda spec: _take_over(ring, spec),
                                        start=start, forgiven=plan.config.run.forgiven_failures)
            governing = GovernorLoop(plan, status, recorder.event) if plan.config.tuning.govern else None
            supervisor = Supervisor(run_dir, status, workers, lambda: _read(status, ring, plan.samplers), recorder,
                                    interrupts, governing)
            supervise(supervisor, workers, worker_specs(plan, run_dir.path, ring, recorder.started_s),
                      lambda: ring.baseline_inserted >= 0)
        last_evaluation(plan, run_dir, recorder, supervisor, interrupts)
    finally:
        watch.end()
        recorder.close()
    return recorder.outcome


def status_rows(samplers: int) -> dict[str, int]:
    """Name of a worker -> its row of the status table."""
    names = (*(f"sampler-{index}" for index in range(samplers)), "learner", "evaluator", "visualizer")
    return {name: row for row, name in enumerate(names)}


def _read(status: StatusTable, ring: ReplayRing, samplers: int) -> CounterSample:
    """All counters of this moment."""
    return CounterSample(
        t_s=time.monotonic(), samplers=tuple(status.named_slots(row, "sampler") for row in range(samplers)),
        learner=status.named_slots(samplers, "learner"),
        inserted=ring.total_committed(), baseline_inserted=ring.baseline_inserted, sampled=ring.sampled,
    )


def _take_over(ring: ReplayRing, spec: WorkerSpec) -> None:
    """The shard of a sampler that is certainly dead gets a new epoch; its next owner is not known yet."""
    if spec.role == "sampler":
        ring.takeover(spec.index, 0)


def load_saved_replay(plan: RunPlan, run_dir: Path, ring: ReplayRing) -> None:
    """Rows saved by an earlier session; before anybody writes into the ring."""
    saved = CheckpointStore(run_dir / "checkpoints").latest_replay() if plan.earlier.sessions else None
    if saved is not None:
        load_replay(saved, ring)


@contextlib.contextmanager
def open_memory(plan: RunPlan, run_dir: Path, num_rows: int) -> Iterator[tuple[StatusTable, ReplayRing]]:
    """Board and ring, owned by this process: a worker may die and come back, its rows stay."""
    ring = ReplayRing.create(plan.ring_spec())
    try:
        load_saved_replay(plan, run_dir, ring)
        status = StatusTable.create(num_rows)
        try:
            yield status, ring
        finally:
            status.close()
    finally:
        ring.close()


def worker_specs(plan: RunPlan, run_dir: Path, ring: ReplayRing, run_started_s: float) -> dict[str, WorkerSpec]:
    """Worker specifications in starting order: what takes longest to import comes first."""
    config, samplers = plan.config, plan.samplers
    limit = memory_limit_bytes(plan)
    fds = (ring.block.fd,)
    specs = {
        "learner": WorkerSpec(
            role="learner", index=0, row=samplers, job=_learner_job(plan, run_dir, ring, run_started_s).to_json(),
            threads=config.learner.threads, inherited_fds=fds,
        )
    }
    for index in range(samplers):
        job = SamplerJob(
            run_dir=str(run_dir), spec=plan.spec, index=index, seed=config.run.seed + 1000 * plan.earlier.sessions,
            num_envs=config.sampling.envs_per_sampler, n_step=config.algorithm.n_step, gamma=config.algorithm.gamma,
            nan_policy=config.sampling.nan_policy, ring_fd=ring.block.fd, ring=ring.spec.to_json(),
            samples_per_insert_min=config.replay.samples_per_insert_min,
            samples_per_insert_max=config.replay.samples_per_insert_max,
            learning_starts=config.replay.learning_starts, batch_size=config.learner.batch_size,
        )
        specs[f"sampler-{index}"] = WorkerSpec(role="sampler", index=index, row=index, job=job.to_json(),
                                               step_deadline_s=config.sampling.step_deadline_s, inherited_fds=fds,
                                               memory_limit_bytes=limit)
    return specs | watcher_specs(plan, run_dir, samplers + 1)


def _learner_job(plan: RunPlan, run_dir: Path, ring: ReplayRing, run_started_s: float) -> LearnerJob:
    config = plan.config
    return LearnerJob(
        run_dir=str(run_dir), spec=plan.spec, algo=config.run.algo, algorithm=plan.algorithm_fields(),
        seed=config.run.seed, batch_size=config.learner.batch_size, threads=config.learner.threads,
        device=config.learner.device, precision=config.learner.precision, overlap=config.learner.overlap,
        mirror=config.learner.mirror, updates_per_launch=config.learner.updates_per_launch,
        normalize_obs=config.env.normalize_obs,
        publish_interval_s=config.learner.publish_interval_s,
        checkpoint_interval_s=config.learner.checkpoint_interval_s, save_replay=config.replay.save,
        max_updates=config.stop.updates, ring_fd=ring.block.fd, ring=ring.spec.to_json(),
        samples_per_insert_min=config.replay.samples_per_insert_min,
        samples_per_insert_max=config.replay.samples_per_insert_max, learning_starts=config.replay.learning_starts,
        num_samplers=plan.samplers, rows_per_write=config.sampling.envs_per_sampler * plan.samplers,
        run_started_s=run_started_s,
        wall_base_s=plan.earlier.wall_s, env_steps_base=plan.earlier.env_steps,
    )
