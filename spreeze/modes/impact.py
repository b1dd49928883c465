"""The IMPACT mode: samplers -> circular buffer in shared memory -> learner, each at its own pace.

The algorithm says how many slots the buffer has, how often the learner uses a rollout (``slots``, ``uses``), and
whether a sampler waits before it writes over one that was used too rarely (``least_uses``, by default half of
``uses``, rounded down). The learner waits when all that is there is used up. Weights reach the samplers in shared
memory, and the evaluator by files and a pointer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from spreeze.run_directory import RunDir
from spreeze.runtime.cpu_governor import GovernorLoop
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher, WorkerSpec
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import CounterSample, Outcome, Recorder, View
from spreeze.runtime.supervisor import (
    Wired,
    memory_limit_bytes,
    read_group,
    run_workers,
    turn_evaluation_job,
    watcher_specs,
)
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.rollouts import Rollouts
from spreeze.transport.shared_memory import Wakeup
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import VersionedParameters
from spreeze.workers.jobs import BufferLearnerJob
from spreeze.workers.roles import Address
from spreeze.workers.rollout_workers import BufferSamplerJob

POLICIES = 3
"""Versions of the policy in shared memory: while one is written or read, another newer one may be written."""


def run_mode(plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH) -> Outcome:
    """Trains until a stop condition or an interrupt; a ResourceError if there is no room for the buffer."""
    recorder = Recorder(plan, run_dir, view)
    return run_workers(plan, run_dir, recorder, interrupts, launcher, _wired(plan, run_dir.path, recorder))


@contextlib.contextmanager
def _wired(plan: RunPlan, run_dir: Path, recorder: Recorder) -> Iterator[Wired]:
    checkpoint = CheckpointStore(run_dir / "checkpoints").load_latest() if plan.earlier.sessions else None
    first_updates = 0 if checkpoint is None else checkpoint.updates
    with (
        contextlib.closing(Rollouts.create(plan.rollout_spec())) as rollouts,
        contextlib.closing(StatusTable.create(plan.samplers + 3)) as status,
        contextlib.closing(Wakeup.create()) as wakeup,
        contextlib.closing(VersionedParameters.create(POLICIES)) as policies,
    ):
        specs = worker_specs(plan, run_dir, rollouts, recorder.started_s, wakeup, policies)

        def read() -> CounterSample:
            inserted = int(rollouts.steps.sum())
            updates = status.named_slots(plan.samplers, "learner")["updates"] - first_updates
            sampled = int(max(0.0, updates)) * plan.batch_size
            return CounterSample(time.monotonic(), (read_group(status, specs, 0, inserted, 0, sampled),))

        yield Wired(
            status=status, specs=specs, read=read,
            governing=GovernorLoop(plan, status, recorder.event) if plan.config.tuning.govern else None,
        )


def worker_specs(
    plan: RunPlan, run_dir: Path, rollouts: Rollouts, run_started_s: float, wakeup: Wakeup,
    policies: VersionedParameters,
) -> dict[str, WorkerSpec]:
    """Learner, samplers and watchers, in starting order: slowest imports first; ``wakeup`` is the learner's."""
    config, each = plan.config, plan.config.rollout.envs_per_sampler
    learner = BufferLearnerJob(
        run_dir=str(run_dir), spec=plan.spec, algo=config.run.algo, learner=config.learner,
        seed=config.run.seed, normalize_obs=config.env.normalize_obs,
        stop=config.stop, run_started_s=run_started_s, batch_size=plan.batch_size,
        wall_base_s=plan.earlier.wall_s, env_steps_base=plan.earlier.env_steps, envs_per_sampler=each,
        rollouts=rollouts.spec, rollouts_fd=rollouts.fd, policy_fds=policies.fds, wakeup_fds=wakeup.fds,
        algorithm=plan.algorithm_fields() | {"slots": plan.buffer_slots},
    )
    shared = (rollouts.fd, *policies.fds, *wakeup.fds)
    specs = [WorkerSpec(address=Address("learner"), body="buffer-learner", row=plan.samplers, job=learner.to_json(),
                        threads=config.learner.threads, inherited_fds=shared)]
    for index in range(plan.samplers):
        job = BufferSamplerJob(
            spec=plan.spec, index=index, num_envs=each, nan_policy=config.sampling.nan_policy,
            seed=plan.session_seed, rollouts=rollouts.spec,
            rollouts_fd=rollouts.fd, policy_fds=policies.fds, learner_wakeup_fds=wakeup.fds,
            evaluation=turn_evaluation_job(plan, run_dir),
        )
        specs.append(WorkerSpec(
            address=Address("sampler", index=index), body="buffer-sampler", row=index, job=job.to_json(),
            inherited_fds=shared, step_deadline_s=config.sampling.step_deadline_s,
            start_deadline_s=config.sampling.start_deadline_s,
            memory_limit_bytes=memory_limit_bytes(plan),
        ))
    return {spec.name: spec for spec in specs} | watcher_specs(plan, run_dir, plan.samplers + 1)
