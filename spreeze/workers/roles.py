"""The roles of workers, one row each: what code runs, its priority, what its failures mean for a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class RestartLimit:
    """How often a role may fail."""

    failures: int
    """Failures within the window after which the worker rests for ``quarantine_s``, or for ever."""
    window_s: float
    quarantine_s: float | None
    """None: no further restart."""
    first_delay_s: float = 0.0
    backoff_s: float = 0.5
    max_delay_s: float = 30.0


class Loss(Enum):
    """When a role's lost workers end the run."""

    ANY = "any of them"
    MOST = "more than half of them"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class Body:
    """The code of a worker process; imported only in the process that runs it."""

    module: str
    function: str
    job: str
    """Class of its job, in the same module."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """What the machine and the supervisor have to know of a kind of worker.

    Its slots in the status table are in ``spreeze.metrics.table.SLOTS``; deadlines belong to phases, not to roles.
    """

    name: str
    bodies: dict[str, Body]
    """Name of a body -> its code; a job that names none runs the one that is called as the role."""
    limit: RestartLimit
    lost: Loss
    label: str = ""
    """What its workers are called; empty: as the role."""
    several: bool = False
    """A group can have several; their names end in a number."""
    nice: int = 0
    """At nice 10 a process gets about a tenth of a core that another one wants; at 15 a third of that."""
    oom_score: int = 0
    """Where memory runs out, Linux takes the process with the highest first."""
    steps: bool = False
    """It steps environments to collect what is learned from."""
    may_end: bool = False
    """It may end by itself before the run does."""
    infers: bool = False
    """It chooses actions for those that step environments."""
    learns: bool = False
    """It takes gradient steps. A run ends when all of these have finished."""
    saves: bool = False
    """It writes checkpoints: asked to stop, it has the time that its last work takes."""
    rests: bool = False
    """The governor may let it rest while other programs need its core."""
    prewarmed: bool = False
    """Its libraries load so long that a process may begin with them before the job is known."""


@dataclass(frozen=True)
class Address:
    """Who a worker is. A group is a learner with its own samplers, buffer, weights and checkpoints."""

    role: str
    group: int = 0
    index: int = 0
    """Among the workers of its role in its group."""

    @property
    def name(self) -> str:
        """In logs, messages and metrics: the role, the group unless it is 0, the index if a group can have several.

        ``learner``, ``sampler-3``; in group 1 ``learner-g1``, ``sampler-g1-3``.
        """
        group = f"-g{self.group}" if self.group else ""
        label = ROLES[self.role].label or self.role
        return f"{label}{group}-{self.index}" if ROLES[self.role].several else f"{label}{group}"


def role_of(name: str) -> Role | None:
    """The role of a worker by its name; None: no worker is called so."""
    return ROLES.get(name.partition("-")[0])


_WATCHER = RestartLimit(failures=3, window_s=600.0, quarantine_s=None, first_delay_s=1.0)
_ALL = (
    # What a run waits for: nothing gives way less, and memory is taken from it last.
    Role(
        name="learner", learns=True, saves=True, prewarmed=True, lost=Loss.ANY,
        limit=RestartLimit(failures=3, window_s=600.0, quarantine_s=None),
        bodies={
            "learner": Body(module="spreeze.workers.learner", function="run_learner", job="LearnerJob"),
            "rollout-learner": Body(module="spreeze.workers.learner", function="run_on_policy_learner",
                                    job="OnPolicyLearnerJob"),
        },
    ),
    # Cheap to replace, and nobody waits for a single one: another program's core is theirs first.
    Role(
        name="sampler", several=True, steps=True, rests=True, nice=10, oom_score=500, lost=Loss.MOST,
        limit=RestartLimit(failures=5, window_s=60.0, quarantine_s=300.0),
        bodies={"sampler": Body(module="spreeze.workers.sampler", function="run_sampler", job="SamplerJob")},
    ),
    # Waited for like the learner, which then has nothing to do: what counts is that both are always busy.
    Role(
        name="rollout-sampler", label="sampler", several=True, steps=True, nice=5, oom_score=500, lost=Loss.ANY,
        limit=RestartLimit(failures=5, window_s=60.0, quarantine_s=None),
        bodies={"rollout-sampler": Body(module="spreeze.workers.rollout_sampler", function="run_rollout_sampler",
                                 job="RolloutSamplerJob")},
    ),
    Role(
        name="inference", several=True, infers=True, nice=2, oom_score=300, lost=Loss.ANY,
        limit=RestartLimit(failures=5, window_s=60.0, quarantine_s=None),
        bodies={"inference": Body(module="spreeze.workers.inference_worker", function="run_inference_worker",
                              job="InferenceWorkerJob")},
    ),
    # Keeps to its share of a core by pausing, so once at work it goes before the samplers: at 15 a score of Pendulum
    # came seconds after the policy it was about.
    Role(
        name="evaluator", nice=5, oom_score=300, may_end=True, lost=Loss.NEVER, limit=_WATCHER,
        bodies={"evaluator": Body(module="spreeze.workers.evaluator", function="run_evaluator", job="EvaluatorJob")},
    ),
    Role(
        name="visualizer", nice=15, oom_score=300, may_end=True, lost=Loss.NEVER, limit=_WATCHER,
        bodies={"visualizer": Body(module="spreeze.workers.visualizer", function="run_visualizer",
                                   job="VisualizerJob")},
    ),
)
ROLES: dict[str, Role] = {role.name: role for role in _ALL}
"""By name. One-for-one supervision as in Erlang: a failed worker is restarted alone."""
BODIES: dict[str, Body] = {name: body for role in _ALL for name, body in role.bodies.items()}
"""Name of a body -> its code."""
