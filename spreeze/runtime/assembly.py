"""A run put together: its workers, the channels between them, and how their counters are read.

Each mode has a function that fills an ``Assembly``. The supervisor starts the workers in it, and so does the tuner, for
its measurements.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from spreeze.errors import ResourceError
from spreeze.run_directory import group_folder
from spreeze.runtime.launcher import WorkerSpec
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import CounterSample, GroupSample
from spreeze.runtime.recorder import Recorder
from spreeze.transport import status_table
from spreeze.transport.checkpoint import Checkpoint, CheckpointStore
from spreeze.transport.gossip import GossipHandle, GossipMemory
from spreeze.transport.shared_memory import Wakeup, WakeupHandle, available_bytes
from spreeze.transport.status_table import StatusTable
from spreeze.types import EnvSpec
from spreeze.workers.jobs import EvaluatorJob, Job, LearnerBridgeJob, VisualizerJob
from spreeze.workers.roles import Address, RestartLimit

_MIN_LIMIT_BYTES = 2**30


_T = TypeVar("_T")


class GroupData(abc.ABC):
    """A group's data on its way from samplers to learner, as the supervisor and the tuner see it."""

    size_bytes: int

    @abc.abstractmethod
    def read(self, posted: GroupSample, *, ending: bool) -> GroupSample:
        """Returns the group's counters with rows inserted and drawn; ``ending``: those that a resume continues from."""

    @property
    def swaps(self) -> int | None:
        """Rollouts that the learner has taken over so far; None: it takes data at any time."""
        return None

    def fill(self, spec: EnvSpec) -> None:  # noqa: B027 (optional)
        """Fills it with synthetic data, so that a measurement need not wait."""

    def reset_counts(self) -> None:  # noqa: B027 (optional)
        """Resets the counts by which samplers and learner wait for each other."""


class Assembly(contextlib.ExitStack):
    """Workers and channels of a run, as its mode adds them; channels close at the end of the ``with`` block."""

    def __init__(self, plan: RunPlan, run_dir: Path, started_s: float) -> None:
        """``started_s``: monotonic time at which the session started."""
        super().__init__()
        self.plan, self.run_dir, self.started_s = plan, run_dir, started_s
        self.specs: dict[str, WorkerSpec] = {}
        """Workers by name, in starting order."""
        self.data: list[GroupData] = []
        self.messages: GossipHandle | None = None
        """Messages of the learners of all hosts; None: only this host has learners."""
        self.resumed_env_steps: int | None = None
        """Env steps that a resume continues from, if it collects part of the earlier ones again."""
        self.notes: list[str] = []
        self.shared_metrics: Callable[[tuple[GroupSample, ...], float, Recorder], dict[str, float]] = lambda *_: {}
        """Metrics of all learners together, from a sample of the groups, its time and the run's recorder."""
        self.host_rows = range(0)
        """Rows of the status table of other hosts, each of which looks like a sampler."""
        self.takes_turns = False
        """Its workers take turns in this process: it has no visualizer, no free core, and no limit of memory."""
        self._rows = 0

    # --- for modes ---

    def folder(self, group: int) -> Path:
        """Directory of a group's weights and checkpoints; created if missing."""
        folder = group_folder(self.run_dir, group)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def checkpoint(self, group: int) -> Checkpoint | None:
        """The newest checkpoint of a group's learner from an earlier session."""
        return CheckpointStore(self.folder(group) / "checkpoints").load_latest() if self.plan.earlier.sessions else None

    def first_updates(self) -> int:
        """Updates of the run's only learner in earlier sessions."""
        checkpoint = self.checkpoint(0)
        return 0 if checkpoint is None else checkpoint.updates

    def open(self, create: Callable[[], _T]) -> _T:
        """Creates a channel that lasts as long as the run; a ResourceError if there are too few descriptors."""
        try:
            channel: Any = create()
        except OSError as error:
            raise ResourceError(f"no descriptors for {self.plan.samplers} samplers: {error}; raise ulimit -n") from None
        self.callback(channel.close)
        return channel  # type: ignore[no-any-return]

    def wakeups(self, count: int) -> tuple[WakeupHandle, ...]:
        return tuple(self.open(Wakeup.create).handle for _ in range(count))

    def hosts_messages(self) -> GossipHandle | None:
        """Memory for the messages of learners on all hosts; None if only this host has learners."""
        plan = self.plan
        self.messages = plan.joined_run
        if plan.joined_run is None and plan.all_learners > plan.learners:
            here = range(plan.learners)
            self.messages = self.open(lambda: GossipMemory.create(plan.all_learners, here)).handle()
        return self.messages

    def seed_offset(self, group: int) -> int:
        """Number of a group's learner among those of all hosts, for distinct seeds of its samplers."""
        return group if self.messages is None else self.messages.own[group]

    def learner_fields(self, group: int) -> dict[str, Any]:
        """Fields that the jobs of all learners have in common."""
        config = self.plan.config
        return {
            "group_dir": str(self.folder(group)),
            "spec": self.plan.spec,
            "algo": config.run.algo,
            "algorithm": self.plan.algorithm_fields(),
            "learner": config.learner,
            "seed": config.run.seed,
            "normalize_obs": config.env.normalize_obs,
            "stop": config.stop,
            "session_started_s": self.started_s,
            "previous_wall_s": self.plan.earlier.wall_s,
            "previous_env_steps": self.plan.earlier.env_steps,
            "session": self.started_s,
            "publishes_values": config.evaluation.enabled and config.evaluation.keep_episodes > 0,
        }

    def learner(self, group: int, job: Job, limit: RestartLimit | None = None, **deadlines: float) -> None:
        """``deadlines`` of a ``WorkerSpec``, if it steps environments."""
        self.add(Address("learner", group), job, threads=self.plan.config.learner.threads, limit=limit, **deadlines)

    def sampler(self, group: int, index: int, job: Job, role: str = "sampler") -> None:
        part = self.plan.config.sampling
        self.add(
            Address(role, group, index),
            job,
            step_deadline_s=part.step_deadline_s,
            start_deadline_s=part.start_deadline_s,
            memory_limit_bytes=self._sampler_limit_bytes,
        )

    @functools.cached_property
    def _sampler_limit_bytes(self) -> int:
        """Memory above which a sampler is restarted, from the free memory after the run's own."""
        requested_bytes = self.plan.config.sampling.memory_limit_bytes
        needed_bytes = 0 if requested_bytes else 2 * self.plan.sampler_bytes  # twice what its environments take
        return max(limit_of_each(requested_bytes, self.plan.samplers), needed_bytes)

    def rows(self, count: int) -> range:
        """Rows of the status table for counters beside those of the workers here."""
        self._rows += count
        return range(self._rows - count, self._rows)

    def add(self, address: Address, job: Job, **options: Any) -> None:
        """Adds a worker with its job; ``options`` as in ``WorkerSpec``."""
        if self.takes_turns:
            options["memory_limit_bytes"] = None
        self.specs[address.name] = WorkerSpec(address=address, row=self._rows, job=job, **options)
        self._rows += 1

    # --- for supervisor and tuner ---

    @property
    def turn_evaluation(self) -> EvaluatorJob | None:
        """Evaluations that the only sampler plays in its only environment; None: the evaluator has its own."""
        plan = self.plan
        if not plan.single_env or not plan.config.evaluation.enabled:
            return None
        return evaluator_job(plan, self.run_dir, has_free_core=False)

    def complete(self) -> None:
        """Adds what all modes have: the bridge to learners of other hosts, evaluator, visualizer, status table."""
        plan, address, start_s = self.plan, self.plan.config.cluster.address, self.plan.config.sampling.start_deadline_s
        if self.messages is not None and address is not None:
            topology = plan.config.gala.topology if plan.config.data_flow.mixes_parameters else "full"
            job = LearnerBridgeJob(
                address=address, messages=self.messages, topology=topology, arguments=plan.host_arguments
            )
            self.add(Address("bridge"), job)
        free_core = plan.free_core and not self.takes_turns
        if plan.config.evaluation.enabled and not plan.single_env:
            self.add(
                Address("evaluator"),
                evaluator_job(plan, self.run_dir, has_free_core=free_core),
                memory_limit_bytes=observer_limit_bytes(plan, plan.config.evaluation.episodes),
                start_deadline_s=start_s,
            )
        if plan.config.visualizer.enabled and not self.takes_turns:
            viewer = VisualizerJob(
                run_dir=str(self.run_dir),
                spec=plan.spec,
                config=plan.config.visualizer,
                has_free_core=free_core,
                seed=plan.config.run.seed,
            )
            self.add(
                Address("visualizer"),
                viewer,
                memory_limit_bytes=observer_limit_bytes(plan, 1),
                start_deadline_s=start_s,
            )
        self.status = self.open(lambda: StatusTable.create(self._rows))

    def read(self) -> CounterSample:
        """Returns all counters; the final ones once the stop flag is set."""
        now_s, ending = time.monotonic(), bool(self.status.header[status_table.STOP])
        groups = (data.read(self._posted(group), ending=ending) for group, data in enumerate(self.data))
        return CounterSample(now_s, tuple(groups))

    def _posted(self, group: int) -> GroupSample:
        specs = [spec for spec in self.specs.values() if spec.address.group == group]

        def posted(trait: str) -> tuple[dict[str, float], ...]:
            return tuple(self.slots(spec) for spec in specs if getattr(spec.role, trait))

        hosts = tuple(self.status.named_slots(row, "host") for row in (self.host_rows if group == 0 else ()))
        return GroupSample(
            samplers=posted("steps"),
            learner=posted("learns")[0],
            inserted=0,
            inserted_at_learning_start=0,
            sampled=0,
            inference_workers=posted("infers"),
            hosts=hosts,
        )

    def slots(self, spec: WorkerSpec) -> dict[str, float]:
        """The numbers that a worker has posted, by name."""
        return self.status.named_slots(spec.row, spec.role.slots)

    def counters(self) -> tuple[float, float]:
        """Env steps of all samplers, and updates of all learners."""
        specs = self.specs.values()
        return (
            sum(self.slots(spec)["env_steps"] for spec in specs if spec.role.steps),
            sum(self.slots(spec)["updates"] for spec in specs if spec.role.learns),
        )


Assemble = Callable[[Assembly], None]


@contextlib.contextmanager
def assembled(assemble: Assemble, plan: RunPlan, run_dir: Path, started_s: float) -> Iterator[Assembly]:
    """The run that a mode's function assembles; a ResourceError if there is no room, a ConfigError for a checkpoint."""
    with Assembly(plan, run_dir, started_s) as run:
        assemble(run)
        run.complete()
        yield run


def limit_of_each(requested_bytes: int | None, samplers: int) -> int:
    """Memory that each of ``samplers`` may take on this machine."""
    return requested_bytes or max(_MIN_LIMIT_BYTES, available_bytes() // (2 * samplers))


def evaluator_job(plan: RunPlan, run_dir: Path, *, has_free_core: bool) -> EvaluatorJob:
    return EvaluatorJob(
        run_dir=str(run_dir),
        spec=plan.spec,
        config=plan.config.evaluation,
        max_envs=plan.max_envs,
        has_free_core=has_free_core,
        groups=plan.policies,
        target_return=plan.target_return,
    )


def observer_limit_bytes(plan: RunPlan, environments: int) -> int:
    """Memory above which evaluator or visualizer is restarted: half of what is free, or a sampler's by environments."""
    sampling = plan.config.sampling
    if sampling.memory_limit_bytes is None:
        return limit_of_each(None, 1)
    return sampling.memory_limit_bytes * -(-environments // sampling.envs_per_sampler)
