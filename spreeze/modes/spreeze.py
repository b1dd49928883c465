"""Mode Spreeze, and TianJi with replay: samplers -> shared-memory replay -> learner, ``run.learners`` times.

Each learner has samplers, replay, weights and checkpoints of its own (a group). In mode spreeze it learns like a
separate run with the seed ``run.seed`` + its number, and groups exchange nothing. In mode tianji all learners begin
with the same parameters, and each takes the mean of its own and the others' now and then, through memory of this
process or by gloo, so that the death of a learner stops no other (``replay_trainer.PeerAverage``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from spreeze.errors import ResourceError
from spreeze.run_directory import RunDir, group_folder
from spreeze.runtime.cluster.bridge import BridgeJob
from spreeze.runtime.cluster.host import HostJob
from spreeze.runtime.cluster.learner_bridge import learner_bridge_spec
from spreeze.runtime.cpu_governor import GovernorLoop
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher, WorkerSpec
from spreeze.runtime.plan import RunPlan, split_evenly
from spreeze.runtime.recorder import CounterSample, Outcome, Recorder, View
from spreeze.runtime.supervisor import (
    Wired,
    memory_limit_bytes,
    open_place,
    read_group,
    run_workers,
    tell_place,
    turn_evaluation_job,
    watcher_specs,
)
from spreeze.transport.checkpoint import CheckpointStore, load_replay
from spreeze.transport.gossip import GlooPlace
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_ring import ReplayRing
from spreeze.transport.shared_memory import Wakeup
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import VersionedParameters
from spreeze.workers.jobs import LearnerJob
from spreeze.workers.roles import Address
from spreeze.workers.sampler import SamplerJob

_HOST_LEAD_ROWS = 2048
"""Rows that other hosts may insert where samplers of this machine already wait: so hosts come first, and cores here are
left to the learner, as long as what hosts have under way covers what is drawn."""


def run_mode(plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH) -> Outcome:
    """Trains until a stop condition or an interrupt; a ResourceError if there is no room for replay."""
    recorder = Recorder(plan, run_dir, view)
    return run_workers(plan, run_dir, recorder, interrupts, launcher, _wired(plan, run_dir.path, recorder))


@contextlib.contextmanager
def _wired(plan: RunPlan, run_dir: Path, recorder: Recorder) -> Iterator[Wired]:
    rows = status_rows(plan.samplers, plan.learners, plan.hosts)
    with (open_memory(plan, run_dir, len(rows)) as (status, rings), open_links(plan) as links,
          open_place(plan, run_dir) as place):
        tell_place(place, recorder.event)
        specs = worker_specs(plan, run_dir, rings, recorder.started_s, links, place)

        def read() -> CounterSample:
            groups = (read_group(status, specs, group, ring.total_committed(), ring.baseline_inserted, ring.sampled,
                                 host_rows(plan)) for group, ring in enumerate(rings))
            return CounterSample(time.monotonic(), tuple(groups))

        yield Wired(
            status=status, specs=specs, read=read,
            governing=GovernorLoop(plan, status, recorder.event) if plan.config.tuning.govern else None,
        )


def status_rows(samplers: int, learners: int = 1, hosts: int = 0) -> dict[str, int]:
    """Name of a worker -> its row of the status table.

    First come the samplers of all groups and other hosts, which count env steps, then learners, watchers, the bridge.
    """
    workers = [Address("sampler", group, index).name for group, count in enumerate(split_evenly(samplers, learners))
               for index in range(count)]
    workers += [f"host-{index}" for index in range(hosts)]
    workers += [Address("learner", group).name for group in range(learners)]
    workers += [Address(role).name for role in ("evaluator", "visualizer", "bridge")]
    return {name: row for row, name in enumerate(workers)}


def host_rows(plan: RunPlan) -> range:
    """Rows of the status table for other hosts, each of which looks like a sampler there."""
    return range(plan.samplers, plan.samplers + plan.hosts)


def load_saved_replay(plan: RunPlan, folder: Path, ring: ReplayRing) -> None:
    """Loads the rows that a group saved in an earlier session; must come before any write into the ring."""
    checkpoint = CheckpointStore(folder / "checkpoints").load_latest() if plan.earlier.sessions else None
    if checkpoint is not None and checkpoint.replay_path is not None:
        load_replay(checkpoint.replay_path, ring)


@contextlib.contextmanager
def open_memory(plan: RunPlan, run_dir: Path, num_rows: int) -> Iterator[tuple[StatusTable, list[ReplayRing]]]:
    """Status table and each group's replay, owned by this process, so that rows survive the death of a worker."""
    with contextlib.ExitStack() as stack:
        rings = []
        for group in range(plan.learners):
            rings.append(stack.enter_context(contextlib.closing(ReplayRing.create(plan.ring_spec(group)))))
            load_saved_replay(plan, group_folder(run_dir, group), rings[-1])
        yield stack.enter_context(contextlib.closing(StatusTable.create(num_rows))), rings


class Links(NamedTuple):
    """Descriptors of what connects the workers of mode tianji besides replay; empty in mode spreeze."""

    averages: tuple[int, ...] = ()
    """Of the files through which learners average, two for each group."""
    learners: tuple[tuple[int, ...], ...] = ()
    """Of the wakeup of each group's learner: it sleeps until there are rows for a batch."""
    samplers: tuple[tuple[int, ...], ...] = ()
    """Of the wakeups of each group's samplers: they sleep until the learner has drawn enough."""


@contextlib.contextmanager
def open_links(plan: RunPlan) -> Iterator[Links]:
    """Opens what the mode of the plan needs; a ResourceError if there are too few descriptors."""
    wiring, groups = plan.config.wiring, range(plan.learners)

    def wakeups(count: int) -> tuple[int, ...]:
        return tuple(fd for _ in range(count if wiring.balanced else 0)
                     for fd in stack.enter_context(contextlib.closing(Wakeup.create())).fds)

    with contextlib.ExitStack() as stack:
        try:
            shares = wiring.averages and plan.learners > 1 and plan.config.exchange.transport == "shared"
            averages = tuple(fd for _ in groups if shares
                             for fd in stack.enter_context(contextlib.closing(VersionedParameters.create())).fds)
            links = Links(averages, tuple(wakeups(1) for _ in groups),
                          tuple(wakeups(plan.samplers_of(group)) for group in groups))
        except OSError as error:
            raise ResourceError(f"no descriptors for {plan.samplers} samplers: {error}; raise ulimit -n") from None
        yield links


def worker_specs(
    plan: RunPlan, run_dir: Path, rings: Sequence[ReplayRing], run_started_s: float, links: Links | None = None,
    place: GlooPlace | None = None,
) -> dict[str, WorkerSpec]:
    """Worker specifications in starting order: slowest imports first."""
    config, rows = plan.config, status_rows(plan.samplers, plan.learners, plan.hosts)
    limit, none = memory_limit_bytes(plan), ((),) * plan.learners
    averages, learners, samplers = links or Links((), none, none)
    specs = []
    for group, ring in enumerate(rings):
        learner_job = LearnerJob(
            run_dir=str(group_folder(run_dir, group)), spec=plan.spec, algo=config.run.algo,
            algorithm=plan.algorithm_fields(), learner=config.learner,
            seed=config.run.seed + (0 if config.wiring.averages else group),
            normalize_obs=config.env.normalize_obs, save_replay=config.replay.save,
            ring_fd=ring.block.fd, ring=ring.spec, limiter=_limiter(plan, ring),
            # Of the whole run, other hosts included, whose env steps go into weights and checkpoints.
            num_samplers=plan.samplers + plan.hosts,
            run_started_s=run_started_s, wall_base_s=plan.earlier.wall_s, env_steps_base=plan.earlier.env_steps,
            stop=config.stop, shared_fds=averages, gloo=place, wakeup_fds=learners[group],
            sampler_wakeup_fds=samplers[group], loaded_rows=tuple(ring.committed.tolist()),
        )
        address = Address("learner", group)
        specs.append(WorkerSpec(
            address=address, row=rows[address.name], job=learner_job.to_json(), threads=config.learner.threads,
            inherited_fds=(ring.block.fd, *averages, *learners[group], *samplers[group]),
        ))
    for group, ring in enumerate(rings):
        number = group if place is None else place.own[group]
        for index in range(plan.samplers_of(group)):
            job = SamplerJob(
                run_dir=str(group_folder(run_dir, group)), spec=plan.spec, index=index,
                seed=plan.session_seed + number,
                num_envs=config.sampling.envs_per_sampler, n_step=config.algorithm.n_step,
                gamma=config.algorithm.gamma, nan_policy=config.sampling.nan_policy, ring_fd=ring.block.fd,
                ring=ring.spec, limiter=_limiter(plan, ring), wakeup_fds=samplers[group][2 * index : 2 * index + 2],
                learner_wakeup_fds=learners[group], evaluation=turn_evaluation_job(plan, run_dir),
            )
            address = Address("sampler", group, index)
            specs.append(WorkerSpec(
                address=address, row=rows[address.name], job=job.to_json(),
                inherited_fds=(ring.block.fd, *job.wakeup_fds, *job.learner_wakeup_fds),
                step_deadline_s=config.sampling.step_deadline_s, memory_limit_bytes=limit,
                start_deadline_s=config.sampling.start_deadline_s,
            ))
    if place is not None and config.cluster.address is not None:
        specs.append(learner_bridge_spec(plan, place, rows["bridge"]))
    elif plan.hosts:
        specs.append(_bridge_spec(plan, run_dir, rings[0], rows, learners[0]))
    return {spec.name: spec for spec in specs} | watcher_specs(plan, run_dir, rows["evaluator"])


def _bridge_spec(
    plan: RunPlan, run_dir: Path, ring: ReplayRing, rows: dict[str, int], learner_wakeup_fds: tuple[int, ...]
) -> WorkerSpec:
    config, address = plan.config, Address("bridge")
    assert config.cluster.address is not None
    host = HostJob(
        spec=plan.spec, layout=plan.layout, n_step=config.algorithm.n_step, gamma=config.algorithm.gamma,
        nan_policy=config.sampling.nan_policy, seed=config.run.seed,
        samplers=1 if plan.alone else config.cluster.samplers,
        envs_per_sampler=config.sampling.envs_per_sampler, step_deadline_s=config.sampling.step_deadline_s,
        start_deadline_s=config.sampling.start_deadline_s,
        memory_limit_bytes=config.sampling.memory_limit_bytes, gives_way=config.tuning.give_way, tune=plan.host_tune,
    )
    limiter = _limiter(plan, ring)
    job = BridgeJob(
        address=config.cluster.address, run_dir=str(run_dir), ring=ring.spec, ring_fd=ring.block.fd,
        first_shard=plan.samplers, host=host,
        limiter=dataclasses.replace(limiter, rows_per_write=limiter.rows_per_write + _HOST_LEAD_ROWS),
        host_rows=tuple(host_rows(plan)), learner_wakeup_fds=learner_wakeup_fds,
    )
    return WorkerSpec(address=address, row=rows[address.name], job=job.to_json(),
                      inherited_fds=(ring.block.fd, *learner_wakeup_fds))


def _limiter(plan: RunPlan, ring: ReplayRing) -> RateLimiter:
    part, config = plan.config.replay, plan.config
    return RateLimiter(
        minimum=part.samples_per_insert_min, maximum=part.samples_per_insert_max, learning_starts=part.learning_starts,
        batch_size=config.learner.batch_size, rows_per_write=config.sampling.envs_per_sampler * ring.spec.num_shards,
    )
