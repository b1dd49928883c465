"""A circular buffer: samplers -> rollouts in shared memory -> learner, each at its own pace (IMPACT).

The algorithm sets the number of slots of the buffer, the uses of a rollout (``slots``, ``uses``), and whether a sampler
waits before it overwrites one with too few uses (``least_uses``, by default half of ``uses``, rounded down). The
learner waits when all stored rollouts are used up. Each step has the policy's version and its log-probability, so the
algorithm can correct for any lag.
"""

from __future__ import annotations

import dataclasses

from spreeze.runtime.assembly import Assembly, GroupData
from spreeze.runtime.rates import GroupSample
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.rollouts import Rollouts
from spreeze.transport.weights import VersionedParameters
from spreeze.workers.jobs import BufferLearnerJob, BufferSamplerJob

_POLICIES = 3  # versions of the policy in shared memory: while one is written or read, a newer one may be written


class BufferData(GroupData):
    """The circular buffer of a learner."""

    def __init__(self, rollouts: Rollouts, batch_size: int, first_updates: int) -> None:
        self._rollouts, self._batch_size, self._first_updates = rollouts, batch_size, first_updates
        self.size_bytes = rollouts.spec.size_bytes

    def read(self, posted: GroupSample, *, ending: bool) -> GroupSample:
        updates = int(max(0.0, posted.learner["updates"] - self._first_updates))
        return dataclasses.replace(posted, inserted=int(self._rollouts.steps.sum()), sampled=updates * self._batch_size)


def assemble(run: Assembly) -> None:
    """One learner and its samplers."""
    plan, config, num_envs = run.plan, run.plan.config, run.plan.config.rollout.envs_per_sampler
    checkpoint = CheckpointStore(run.run_dir / "checkpoints").load_latest() if plan.earlier.sessions else None
    rollouts = run.open(lambda: Rollouts.create(plan.rollout_spec()))
    weights_channel = run.open(lambda: VersionedParameters.create(_POLICIES)).handle
    (wakeup,) = run.wakeups(1)
    run.data.append(BufferData(rollouts, plan.batch_size, 0 if checkpoint is None else checkpoint.updates))
    run.learner(
        0,
        BufferLearnerJob(
            **run.learner_fields(0) | {"algorithm": plan.algorithm_fields() | {"slots": plan.buffer_slots}},
            batch_size=plan.batch_size,
            envs_per_sampler=num_envs,
            rollouts=rollouts.handle,
            weights_channel=weights_channel,
            wakeup=wakeup,
        ),
    )
    for index in range(plan.samplers):
        run.sampler(
            0,
            index,
            BufferSamplerJob(
                spec=plan.spec,
                index=index,
                num_envs=num_envs,
                nan_policy=config.sampling.nan_policy,
                seed=plan.session_seed,
                rollouts=rollouts.handle,
                weights_channel=weights_channel,
                learner_wakeup=wakeup,
                evaluation=run.turn_evaluation,
            ),
        )
