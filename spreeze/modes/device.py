"""Mode *device*: one process steps the environments, keeps replay or a rollout, and learns, all on one device.

Its environments come from an engine whose observations are tensors (``envs.vector_task``). Evaluator and visualizer are
processes of their own, as in other modes, and the learner is restarted as there; its replay on the device is then
collected again.
"""

from __future__ import annotations

import dataclasses

from spreeze.runtime.assembly import Assembly, GroupData
from spreeze.runtime.rates import GroupSample
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.workers.jobs import DeviceEnvs, DeviceReplayJob, DeviceRolloutJob


class DeviceData(GroupData):
    """Data that a learner collects by itself; its counters of a sampler are in a row of their own."""

    size_bytes = 0

    def __init__(self, run: Assembly, row: int) -> None:
        self._run, self._row, self._first_updates = run, row, run.first_updates()

    def read(self, posted: GroupSample, *, ending: bool) -> GroupSample:
        sampler = self._run.status.named_slots(self._row, "sampler")
        inserted = int(sampler["env_steps"])
        sampled = posted.rows_drawn(self._run.plan.batch_size, self._first_updates)
        return dataclasses.replace(posted, samplers=(sampler,), inserted=inserted, sampled=sampled)


def assemble(run: Assembly) -> None:
    """One learner, which is its own sampler."""
    plan, config, row = run.plan, run.plan.config, run.rows(1)[0]
    run.data.append(DeviceData(run, row))
    fields = run.learner_fields(0) | {"stop": config.stop.by_counts}
    on_policy = config.on_policy is not None
    envs = DeviceEnvs(
        num_envs=plan.rollout_envs if on_policy else config.sampling.envs_per_sampler,
        seed=plan.session_seed,
        nan_policy=config.sampling.nan_policy,
        row=row,
        steps=plan.sync_interval if on_policy else 0,
        capacity=0 if on_policy else config.replay.capacity,
    )
    deadlines = {name: getattr(config.sampling, name) for name in ("step_deadline_s", "start_deadline_s")}
    if on_policy:
        run.learner(0, DeviceRolloutJob(**fields, batch_size=plan.batch_size, envs=envs), **deadlines)
        return
    replay = config.replay
    ratio = replay.samples_per_insert_min or replay.serial_ratio(config.learner.batch_size)
    limiter = RateLimiter(
        minimum=0.0,
        maximum=ratio,
        learning_starts=max(1, replay.learning_starts),
        batch_size=config.learner.batch_size,
        rows_per_write=envs.num_envs,
        serial=True,
    )
    job = DeviceReplayJob(**fields, limiter=limiter, sampler_status_rows=(row,), layout=plan.layout, envs=envs)
    run.learner(0, job, **deadlines)
