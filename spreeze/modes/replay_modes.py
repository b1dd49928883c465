"""Groups of replay: samplers -> shared-memory replay -> learner, ``run.learners`` times.

Each learner has samplers, replay, weights and checkpoints of its own. If the mode does not average them, it learns
like a separate run with the seed ``run.seed`` + its number, and groups exchange nothing. Else all learners start with
the same parameters, and each takes the mean of its own and the others' at intervals, through memory of the supervisor,
so that the death of a learner stops no other (``replay_learner.PeerAverage``).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from spreeze.runtime.assembly import Assembly, GroupData
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import GroupSample
from spreeze.transport.checkpoint import load_replay
from spreeze.transport.demonstrations import NO_RETURNS, ReturnSums, load_demonstrations
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_ring import ReplayRing
from spreeze.transport.transitions import fill_with_synthetic_rows
from spreeze.transport.weights import VersionedParameters
from spreeze.types import EnvSpec
from spreeze.workers.jobs import HostJob, ReplayLearnerJob, ReplaySamplerJob, RowBridgeJob
from spreeze.workers.roles import Address

_HOST_LEAD_ROWS = 2048
"""Rows that other hosts may insert when samplers of this machine already wait: so hosts come first, and local cores are
left to the learner, as long as the hosts' rows in progress cover those drawn."""


class ReplayData(GroupData):
    """A group's replay."""

    def __init__(self, ring: ReplayRing, rows_per_step: int) -> None:
        """Rows with other goals are not counted as inserted."""
        self.ring, self.size_bytes, self._rows_per_step = ring, ring.spec.size_bytes, rows_per_step

    def read(self, posted: GroupSample, *, ending: bool) -> GroupSample:
        ring, rows, steps = self.ring, self._rows_per_step, self.ring.spec.layout.env_steps_per_row
        at_start = ring.inserted_at_learning_start
        return dataclasses.replace(
            posted,
            inserted=ring.total_committed() * steps // rows,
            inserted_at_learning_start=at_start if at_start < 0 else at_start * steps // rows,
            sampled=ring.rows_drawn * steps,
        )

    def fill(self, spec: EnvSpec) -> None:
        fill_with_synthetic_rows(self.ring, spec)

    def reset_counts(self) -> None:
        """Starts the limiter's counts anew, because the number of samplers has changed."""
        self.ring.begin_learning()


def assemble(run: Assembly) -> None:
    """Learners and samplers of all groups, and in group 0 the samplers of other hosts."""
    plan, config, data_flow = run.plan, run.plan.config, run.plan.config.data_flow
    groups, hosts = range(plan.learners), run.hosts_messages()
    rings = [run.open(functools.partial(ReplayRing.create, plan.ring_spec(group))) for group in groups]
    returns = [_load_rows(run, group, ring) for group, ring in enumerate(rings)]
    shares = data_flow.averages_parameters and plan.learners > 1 and hosts is None
    averages = tuple(run.open(VersionedParameters.create).handle for _ in groups if shares)
    learner_wakeups = [run.wakeups(1)[0] if data_flow.balanced else None for _ in groups]
    sampler_wakeups = [run.wakeups(plan.samplers_of(group) if data_flow.balanced else 0) for group in groups]
    counted = range(plan.learners, plan.learners + (0 if config.replay.offline else plan.samplers) + plan.hosts)
    for group, ring in enumerate(rings):
        run.data.append(ReplayData(ring, config.replay.rows_per_step))
        run.learner(
            group,
            ReplayLearnerJob(
                **run.learner_fields(group)
                | {"seed": config.run.seed + (0 if data_flow.averages_parameters else group)},
                save_replay=config.replay.save,
                rollback_enabled=plan.rollback_enabled,
                replay=ring.handle,
                limiter=_limiter(plan, ring),
                sampler_status_rows=tuple(counted),
                averages=averages,
                hosts=hosts,
                wakeup=learner_wakeups[group],
                sampler_wakeups=sampler_wakeups[group],
                loaded_rows=tuple(ring.committed.tolist()) if plan.earlier.sessions else (),
                returns=NO_RETURNS if plan.earlier.sessions else returns[group],
                offline=config.replay.offline,
            ),
        )
    facts = _row_facts(plan)
    for group, ring in enumerate(rings):
        for index in range(0 if config.replay.offline else plan.samplers_of(group)):
            run.sampler(
                group,
                index,
                ReplaySamplerJob(
                    **facts,
                    group_dir=str(run.folder(group)),
                    index=index,
                    seed=plan.session_seed + run.seed_offset(group),
                    num_envs=config.sampling.envs_per_sampler,
                    replay=ring.handle,
                    loaded_rows=int(ring.committed[index]),
                    limiter=_limiter(plan, ring),
                    wakeup=sampler_wakeups[group][index] if data_flow.balanced else None,
                    learner_wakeup=learner_wakeups[group],
                    evaluation=run.turn_evaluation,
                ),
            )
    if plan.hosts:
        _add_hosts(run, rings[0])


def _load_rows(run: Assembly, group: int, ring: ReplayRing) -> ReturnSums:
    """Loads the rows of an earlier session into an empty ring, else the demonstrations; the sums of their returns."""
    plan, checkpoint = run.plan, run.checkpoint(group)
    if checkpoint is not None and checkpoint.replay_path is not None:
        load_replay(checkpoint.replay_path, ring)
        return NO_RETURNS
    text = plan.config.replay.demonstrations
    return load_demonstrations(text, plan.spec, ring, plan.config.algorithm.gamma)[1] if text else NO_RETURNS


def _row_facts(plan: RunPlan) -> dict[str, Any]:
    """Fields of ``RowFacts``."""
    config = plan.config
    return {
        "spec": plan.spec,
        "nan_policy": config.sampling.nan_policy,
        "n_step": config.algorithm.n_step,
        "gamma": config.algorithm.gamma,
        "her": config.replay.her,
        "rows_per_step": config.replay.rows_per_step,
    }


def _add_hosts(run: Assembly, ring: ReplayRing) -> None:
    plan, config, limiter = run.plan, run.plan.config, _limiter(run.plan, ring)
    assert config.cluster.address is not None
    host = HostJob(
        **_row_facts(plan),
        layout=plan.layout,
        seed=config.run.seed,
        samplers=1 if plan.single_env else config.cluster.samplers,
        sampling=config.sampling,
        gives_way=config.tuning.give_way,
        tune=plan.host_tune,
    )
    run.host_rows = run.rows(plan.hosts)
    run.add(
        Address("bridge"),
        RowBridgeJob(
            host_rows=tuple(run.host_rows),
            address=config.cluster.address,
            run_dir=str(run.run_dir),
            replay=ring.handle,
            first_shard=plan.samplers,
            host=host,
            limiter=dataclasses.replace(limiter, rows_per_write=limiter.rows_per_write + _HOST_LEAD_ROWS),
        ),
    )


def _limiter(plan: RunPlan, ring: ReplayRing) -> RateLimiter:
    """The limiter in rows: its bounds are per env step, and learning starts after that many env steps.

    A sequence is one row, of equally many env steps for both sides. With other goals an env step is one row until an
    environment's first episode is over, which lasts no longer than the time limit.
    """
    part, config, rows = plan.config.replay, plan.config, plan.config.replay.rows_per_step
    envs = config.sampling.envs_per_sampler * ring.spec.num_shards
    first = envs * (plan.spec.max_episode_steps or 0)
    starts = part.learning_starts + (rows - 1) * max(0, part.learning_starts - first)
    steps = ring.spec.layout.env_steps_per_row
    starts = -(-starts // steps)
    return RateLimiter(
        minimum=part.samples_per_insert_min / rows,
        maximum=part.samples_per_insert_max / rows,
        learning_starts=min(starts, ring.total_committed()) if part.demonstrations else starts,
        batch_size=max(1, config.learner.batch_size // steps),
        rows_per_write=envs * rows,
    )
