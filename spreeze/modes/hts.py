"""The HTS-RL mode: samplers and inference workers fill one rollout storage while the learner learns from the other.

The synchronous baseline with several samplers is the same wiring with a lag of 0: rollout and learning take turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from spreeze.errors import CheckpointError, ConfigError, ResourceError
from spreeze.run_directory import RunDir
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher, WorkerSpec
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import CounterSample, GroupSample, Outcome, Recorder, View
from spreeze.runtime.supervisor import (
    Wired,
    memory_limit_bytes,
    read_group,
    run_workers,
    turn_evaluation_job,
    watcher_specs,
)
from spreeze.transport import status_table as words
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.rollouts import Handover, InferenceMailbox, Rollouts, put_back
from spreeze.transport.shared_memory import Wakeup
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import VersionedParameters
from spreeze.workers.jobs import OnPolicyLearnerJob
from spreeze.workers.roles import Address
from spreeze.workers.rollout_workers import RolloutSamplerJob, RolloutWorkerJob


class Memory(NamedTuple):
    """Shared memory of an on-policy run, owned by this process."""

    rollouts: Rollouts
    mailbox: InferenceMailbox
    handover: Handover

    @property
    def updates(self) -> int:
        """Updates at the start of the current rollout."""
        state = self.handover.states.read(self.rollouts.current)
        return 0 if state is None else int(state.meta["updates"])


def run_mode(plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH) -> Outcome:
    """Trains until a stop condition or an interrupt."""
    with open_memory(plan, run_dir.path) as memory:
        plan = continued(plan, memory.rollouts)
        recorder = Recorder(plan, run_dir, view)
        wired = _wired(plan, run_dir.path, memory, recorder)
        return run_workers(plan, run_dir, recorder, interrupts, launcher, wired)


@contextlib.contextmanager
def _wired(plan: RunPlan, run_dir: Path, memory: Memory, recorder: Recorder) -> Iterator[Wired]:
    first_watcher = plan.samplers + plan.inference_workers + 1
    with open_wakeups(plan) as wakeups, contextlib.closing(StatusTable.create(first_watcher + 2)) as status:
        specs = (worker_specs(plan, run_dir, memory, wakeups, recorder.started_s)
                 | watcher_specs(plan, run_dir, first_watcher))

        read_one = reader(plan, memory, status, specs)
        yield Wired(status=status, specs=specs, read=lambda: CounterSample(time.monotonic(), (read_one(),)))


def reader(
    plan: RunPlan, memory: Memory, status: StatusTable, specs: dict[str, WorkerSpec], group: int = 0
) -> Callable[[], GroupSample]:
    """Reads all counters of a learner; at the end only whole rollouts count, since a resume collects the rest again."""
    first_rollout, first_updates = memory.rollouts.current, memory.updates

    def read() -> GroupSample:
        collected = (memory.rollouts.current - first_rollout) * memory.rollouts.spec.rows
        found = read_group(status, specs, group, inserted=collected, baseline_inserted=0)
        if status.header[words.STOP]:
            for sampler in found.samplers:
                sampler["env_steps"] = collected / plan.samplers
        sampled = int(max(0.0, found.learner["updates"] - first_updates)) * plan.batch_size
        return dataclasses.replace(found, sampled=sampled)

    return read


def continued(plan: RunPlan, rollouts: Rollouts) -> RunPlan:
    """The plan with the env steps of whole rollouts so far; the rest is collected again."""
    env_steps = rollouts.current * rollouts.spec.rows
    return dataclasses.replace(plan, earlier=dataclasses.replace(plan.earlier, env_steps=env_steps))


@contextlib.contextmanager
def open_memory(plan: RunPlan, run_dir: Path) -> Iterator[Memory]:
    """Opens storages and buffers, restored from the last checkpoint if there is one.

    Raises a ResourceError if there is no room, a ConfigError if the checkpoint does not fit the settings.
    """
    spec = plan.rollout_spec()
    with contextlib.ExitStack() as stack:
        rollouts = stack.enter_context(contextlib.closing(Rollouts.create(spec)))
        mailbox = stack.enter_context(contextlib.closing(InferenceMailbox.create(spec)))
        policies = stack.enter_context(contextlib.closing(VersionedParameters.create()))
        states = stack.enter_context(contextlib.closing(VersionedParameters.create()))
        memory = Memory(rollouts, mailbox, Handover(policies=policies, states=states))
        checkpoint = CheckpointStore(run_dir / "checkpoints").load_latest() if plan.earlier.sessions else None
        if checkpoint is not None:
            try:
                put_back(checkpoint.tensors, checkpoint.state, rollouts, memory.handover)
            except (CheckpointError, KeyError) as error:
                raise ConfigError(f"{run_dir.name} cannot be continued with these settings: {error}") from None
        yield memory


class Wakeups(NamedTuple):
    """One for each worker that can sleep."""

    samplers: tuple[Wakeup, ...]
    inference_workers: tuple[Wakeup, ...]
    learner: Wakeup


@contextlib.contextmanager
def open_wakeups(plan: RunPlan) -> Iterator[Wakeups]:
    """A wakeup for each worker of the plan; a ResourceError if there are too few descriptors."""
    samplers, workers = plan.samplers, plan.samplers + plan.inference_workers
    with contextlib.ExitStack() as stack:
        try:
            made = [stack.enter_context(contextlib.closing(Wakeup.create())) for _ in range(workers + 1)]
        except OSError as error:
            raise ResourceError(f"no descriptors for {samplers} samplers: {error}; raise ulimit -n") from None
        yield Wakeups(tuple(made[:samplers]), tuple(made[samplers:workers]), made[workers])


def _fds(*wakeups: Wakeup) -> tuple[int, ...]:
    return tuple(fd for wakeup in wakeups for fd in wakeup.fds)


def worker_specs(
    plan: RunPlan, run_dir: Path, memory: Memory, wakeups: Wakeups, run_started_s: float
) -> dict[str, WorkerSpec]:
    """Learner, samplers and inference workers, in starting order: slowest imports first."""
    job, limit = learner_job(plan, run_dir, memory, run_started_s, wakeups), memory_limit_bytes(plan)
    rollouts = memory.rollouts
    shared = (rollouts.fd, memory.mailbox.fd, *memory.handover.policies.fds,
              *_fds(*wakeups.samplers, *wakeups.inference_workers, wakeups.learner))
    specs = [WorkerSpec(address=Address("learner"), body="rollout-learner", row=plan.samplers + plan.inference_workers,
                        job=job.to_json(), threads=job.learner.threads,
                        inherited_fds=(*shared, *memory.handover.states.fds))]
    specs += [
        WorkerSpec(address=Address("rollout-sampler", index=index), row=index, inherited_fds=shared,
                   job=sampler_job(plan, run_dir, memory, wakeups, index).to_json(), memory_limit_bytes=limit,
                   step_deadline_s=plan.config.sampling.step_deadline_s,
                   start_deadline_s=plan.config.sampling.start_deadline_s)
        for index in range(plan.samplers)
    ]
    for index in range(plan.inference_workers):
        worker = RolloutWorkerJob(**_shared(plan, memory, wakeups, index))
        specs.append(WorkerSpec(address=Address("inference", index=index), row=plan.samplers + index,
                                job=worker.to_json(), inherited_fds=shared))
    return {spec.name: spec for spec in specs}


def _shared(plan: RunPlan, memory: Memory, wakeups: Wakeups, index: int) -> dict[str, Any]:
    """What samplers and inference workers are given alike."""
    return {
        "index": index, "num_envs": plan.config.rollout.envs_per_sampler,
        "num_inference_workers": plan.inference_workers, "rollouts": memory.rollouts.spec,
        "rollouts_fd": memory.rollouts.fd, "mailbox_fd": memory.mailbox.fd, "policy_fds": memory.handover.policies.fds,
        "sampler_wakeup_fds": _fds(*wakeups.samplers), "inference_wakeup_fds": _fds(*wakeups.inference_workers),
    }


def sampler_job(plan: RunPlan, run_dir: Path, memory: Memory, wakeups: Wakeups, index: int) -> RolloutSamplerJob:
    return RolloutSamplerJob(
        **_shared(plan, memory, wakeups, index), spec=plan.spec, seed=plan.config.run.seed,
        step_synchronous=plan.lag == 0 and plan.config.rollout.synchrony == "step",
        nan_policy=plan.config.sampling.nan_policy, learner_wakeup_fds=_fds(wakeups.learner),
        evaluation=turn_evaluation_job(plan, run_dir),
    )


def learner_job(
    plan: RunPlan, run_dir: Path, memory: Memory, run_started_s: float, wakeups: Wakeups | None = None
) -> OnPolicyLearnerJob:
    """The learner's job; without ``wakeups`` for a learner in this process."""
    config, lag = plan.config, plan.lag or 0
    return OnPolicyLearnerJob(
        run_dir=str(run_dir), spec=plan.spec, algo=config.run.algo, algorithm=plan.algorithm_fields(),
        correction=config.rollout.correction if lag else "on-policy", lag=lag, seed=config.run.seed,
        learner=config.learner, normalize_obs=config.env.normalize_obs, batch_size=plan.batch_size,
        fingerprint=config.rollout.fingerprint,
        stop=config.stop, rollouts=memory.rollouts.spec,
        rollouts_fd=memory.rollouts.fd, policy_fds=memory.handover.policies.fds, state_fds=memory.handover.states.fds,
        sampler_wakeup_fds=_fds(*wakeups.samplers) if wakeups else (),
        wakeup_fds=_fds(wakeups.learner) if wakeups else (), run_started_s=run_started_s,
        wall_base_s=plan.earlier.wall_s,
    )
